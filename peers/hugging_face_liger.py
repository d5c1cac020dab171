"""A peer: Hugging Face's Llama with Liger-Kernel's Triton operators, not compiled.

As hugging_face_llama.py, with the `liger_kernel` package's RMSNorm, RoPE, SwiGLU and linear cross
entropy in the place of theirs. They run on a GPU alone. With `--compile` the linear cross entropy
fails (0.8.5, PyTorch 2.11: the compiler refuses one of its products).
"""

import sys

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("hf-liger")

from hugging_face_llama import TinyLlama, TinyLlamaConfig, configure_optimizer
from liger_kernel.transformers import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama()

__all__ = ["TinyLlama", "TinyLlamaConfig", "configure_optimizer"]

if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
