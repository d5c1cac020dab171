#!/usr/bin/env python3
"""Stage 2: V3, with a SwiGLU kernel of our own, shorter than V3's.

An element of the result needs one element of gate and one of up, at any place in the row. So
a program takes BLOCK of them in a line, and there are neither rows nor columns.
"""

import sys

from debug_harness import main

# isort: split

import tiny_llama_v3 as v3
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, elements, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    gate = tl.load(gate_ptr + i, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + i, mask=inside).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, elements, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    dy = tl.load(dy_ptr + i, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + i, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    tl.store(dgate_ptr + i, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + i, dup.to(dup_ptr.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, forward and backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = gate.new_empty(gate.shape)
        programs = triton.cdiv(y.numel(), BLOCK)
        _swiglu_kernel[(programs,)](gate, up, y, y.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
        programs = triton.cdiv(dy.numel(), BLOCK)
        _swiglu_backward_kernel[(programs,)](
            dy.contiguous(), gate, up, dgate, dup, dy.numel(), BLOCK=BLOCK
        )
        return dgate, dup


class FeedForward(v3.FeedForward):
    """V3's, with the kernel above."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down_proj(SwiGLU.apply(gate, up))


class TinyLlama(v3.TinyLlama):
    """V3's model, with the feed-forward layers above."""

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = FeedForward  # keeps the weights that it has


if __name__ == "__main__":
    sys.exit(main(__file__, TinyLlama))
