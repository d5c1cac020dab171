"""A peer: Hugging Face's Llama compiled, and its whole step captured as one CUDA/HIP graph.

As hugging_face_llama.py; the graph is the harness's, which any version gets from `--cuda-graph`.
At sizes at which the host can't launch kernels fast enough, this is the peer to compare with.
"""

import sys

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("hf-graph")

from hugging_face_llama import TinyLlama, TinyLlamaConfig, configure_optimizer

__all__ = ["TinyLlama", "TinyLlamaConfig", "configure_optimizer"]

if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
