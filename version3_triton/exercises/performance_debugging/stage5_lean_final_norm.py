#!/usr/bin/env python3
"""Stage 5: V3, with a final norm that is nothing but its kernel.

V3's operators check their arguments and are registered with PyTorch, which takes the host longer
than a small norm takes the GPU. Here the kernel is launched straight away.
"""

import sys

from debug_harness import main

# isort: split

import tiny_llama_v3 as v3
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    stream_ptr, branch_ptr, weight_ptr, y_ptr, total_ptr, C, eps, BLOCK_C: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BLOCK_C)
    inside = c < C
    x = tl.load(stream_ptr + row + c, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(branch_ptr + row + c, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / C + eps) * weight
    tl.store(total_ptr + row + c, x.to(total_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + row + c, y.to(y_ptr.dtype.element_ty), mask=inside)


class FinalNorm(v3.RMSNorm):
    """The norm of the sum of stream and branch, and the sum, in one pass."""

    def forward(self, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        stream, branch = stream.contiguous(), branch.contiguous()
        y, total = torch.empty_like(stream), torch.empty_like(stream)
        C = stream.shape[-1]
        _add_rms_norm_kernel[(stream.numel() // C,)](
            stream, branch, self.weight, y, total, C, self.eps, BLOCK_C=triton.next_power_of_2(C)
        )
        return y, total


class TinyLlama(v3.TinyLlama):
    """V3's model, with the norm above before its head."""

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        self.norm = FinalNorm(config.hidden_dim, config.norm_eps, self.fusions)


if __name__ == "__main__":
    sys.exit(main(__file__, TinyLlama))
