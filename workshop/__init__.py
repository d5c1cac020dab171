"""The workshop's plumbing: what measures, checks and stores, once for all versions.

The models are not here: each is whole in its own `versionN_*/tiny_llama_vN.py`.
"""
