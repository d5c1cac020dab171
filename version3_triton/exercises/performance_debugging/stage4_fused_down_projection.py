#!/usr/bin/env python3
"""Stage 4: V3, with SwiGLU and the down projection fused into one kernel.

silu(gate) * up goes straight into the product with down_proj's weight: the widest activation of the
model, (B, T, F), is never written to memory and never read again.
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
def _swiglu_down_kernel(gate_up_ptr, weight_ptr, y_ptr, C, F, BLOCK_F: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)  # token
    c = tl.program_id(1).to(tl.int64)  # column of the result
    f = tl.arange(0, BLOCK_F)
    inside = f < F
    gate = tl.load(gate_up_ptr + t * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c * F + f, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(gate * tl.sigmoid(gate) * up * weight)
    tl.store(y_ptr + t * C + c, y.to(y_ptr.dtype.element_ty))


class SwiGLUDown(torch.autograd.Function):
    """(silu(gate) * up) @ weight', with gate and up side by side in a row."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, weight: Tensor) -> Tensor:
        gate_up, weight = gate_up.contiguous(), weight.contiguous()
        ctx.save_for_backward(gate_up, weight)
        C, F = weight.shape
        tokens = gate_up.numel() // (2 * F)
        y = gate_up.new_empty(*gate_up.shape[:-1], C)
        _swiglu_down_kernel[(tokens, C)](
            gate_up, weight, y, C, F, BLOCK_F=triton.next_power_of_2(F)
        )
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        s = torch.sigmoid(gate)
        silu = gate * s
        dhidden = dy @ weight
        dgate = dhidden * up * (s + silu * (1 - s))
        dweight = dy.flatten(0, -2).T @ (silu * up).flatten(0, -2)
        return torch.cat((dgate, dhidden * silu), dim=-1), dweight


class FeedForward(v3.FeedForward):
    """V3's, with the kernel above."""

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)  # (B, T, 2F)
        return SwiGLUDown.apply(gate_up, self.down_proj.weight.to(gate_up.dtype))


class TinyLlama(v3.TinyLlama):
    """V3's model, with the feed-forward layers above."""

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = FeedForward  # keeps the weights that it has


if __name__ == "__main__":
    sys.exit(main(__file__, TinyLlama))
