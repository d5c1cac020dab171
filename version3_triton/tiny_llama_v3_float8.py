"""Tiny-LLaMA, version 3, in fp8: `--precision fp8` and `fp8-rowwise` turn V3's blocks into these.

The products are those of workshop/run/float8.py. What is between them stays with the kernels, and
so does rounding to fp8 (triton_float8.py): a matrix that a norm or SwiGLU writes comes with its
amax, and so does its gradient, so that the product reads it once, not twice. Attention finds none.
"""

from typing import Any

from triton_launch import autocast_dtype

import torch
import triton_float8 as kernels
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workshop.errors import WorkshopError
from workshop.run import float8
from workshop.run.float8 import Formats

Branch = tuple[Tensor, Tensor]
"""The result of a sub-layer, and the (1,) whose gradient is the amax of the result's."""


class _Product(torch.autograd.Function):
    """`Float8Product`, whose backward pass gets the amax of dy, as triton_float8.py explains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *more: Any) -> Branch:
        return float8.product_forward(ctx, x, *more), x.new_empty(1, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dy_amax: Tensor) -> tuple[Tensor | None, ...]:
        return *float8.product_backward(ctx, dy, dy_amax), None, None, None, None


class Float8Block(nn.Module):
    """V3's `Block` with its products in fp8; the parameters and their names are that block's."""

    recipe: str
    types: Formats
    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def forward(
        self, stream: Tensor, branch: Branch | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Branch]:
        attention, mlp = self.self_attn, self.mlp
        x, amax, stream = _norm(self.input_layernorm, stream, branch)
        how = self.recipe, self.types, kernels.round_both_ways
        qkv = float8.float8_linear(x, attention.qkv_proj.weight, *how, amax)
        heads = attention.num_heads, attention.num_kv_heads
        y = kernels.heads_attention(qkv, cos, sin, *heads)  # (B, T, H D)
        branch = self.multiply(y, attention.o_proj.weight)
        x, amax, stream = _norm(self.post_attention_layernorm, stream, branch)
        gate_up = self.multiply(x, mlp.gate_up_proj.weight, amax)  # (B, T, 2F)
        y, amax = kernels.swiglu(*gate_up)
        return stream, self.multiply(y, mlp.down_proj.weight, amax)

    def multiply(self, x: Tensor, weight: Tensor, amax: Tensor | None = None) -> Branch:
        """x weight', and the (1,) for its gradient's amax."""
        rows, padded = float8.padded_factors(x, weight)
        y, dy_amax = _Product.apply(
            rows, padded, self.recipe, self.types, kernels.round_both_ways, amax
        )
        return float8.unpadded(y, x, weight), dy_amax


class LastNorm(nn.Module):
    """The norm before the head, of what the last block returns."""

    def forward(self, stream: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        x, _, stream = _norm(self, stream, branch)
        return x, stream


def _norm(norm: Any, stream: Tensor, branch: Branch | None) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the branch, if there is one, to the stream: the sum's norm, its amax, and the sum."""
    if branch is not None:
        return kernels.add_rms_norm(*branch, stream, norm.weight, norm.eps)
    dtype = autocast_dtype(stream)
    return *kernels.rms_norm(stream, norm.weight, norm.eps, dtype), stream


def to_float8(model: Any, recipe: str, types: Formats) -> None:
    """Turns V3's blocks into those above, in place; again it does nothing.

    Raises:
        WorkshopError: a kernel of the blocks is switched off.
    """
    off = [
        name
        for name in ("fuse_norm", "fuse_swiglu", "fuse_attention", "fuse_linear")
        if not getattr(model.fusions, name)
    ]
    if off:
        switches = " ".join(f"--no-{name.replace('_', '-')}" for name in off)
        raise WorkshopError(f"{switches}: in fp8 V3's blocks have no other operators: leave it out")
    for block in model.layers:
        block.__class__ = Float8Block
        block.recipe, block.types = recipe, types
    model.norm.__class__ = LastNorm
