"""A peer: as hugging_face_graph.py, with FlashAttention's newest kernels, in CuTe, as attention.

transformers calls them `flash_attention_4`. They need the `flash_attn_4` package, a GPU from Hopper
on, and 16-bit numbers.
"""

import sys

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("hf-flash")

from hugging_face_llama import CHOICES, TinyLlama, TinyLlamaConfig, configure_optimizer

CHOICES["attn_implementation"] = "flash_attention_4"

__all__ = ["TinyLlama", "TinyLlamaConfig", "configure_optimizer"]

if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
