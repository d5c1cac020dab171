"""Attention from the QKV product on: product, RoPE and flash attention around one tensor.

Between separate operators q, k and v would be copied on the way: rotated into tensors of their own,
and their gradients joined again. Here the product's own output is rotated in its place, attention
reads the heads where they lie, and the gradients are written where the product's backward pass
reads them.

Shapes in the comments:
    B batch   T tokens   C width   H query heads   K key/value heads   D head size
"""

from triton_launch import autocast_dtype, check, check_shape, first_order, operator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton_attention import (
    HEAD_SIZES,
    MAX_OFFSET,
    attend,
    attend_backward,
    attention_flops,
    backward_attention_flops,
    flash_attention_reference,
)
from triton_linear import rounded, weight_gradient
from triton_rope import apply_rope_reference, check_tables, rotate, rows


def _heads(qkv: Tensor, H: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """The views q (B, H, T, D), k and v (B, K, T, D) of (B, T, (H + 2K) D)."""
    B, T, width = qkv.shape
    q, k, v = (
        qkv.view(B, T, H + 2 * K, width // (H + 2 * K)).transpose(1, 2).split((H, K, K), dim=1)
    )
    return q, k, v


# --- operators ----------------------------------------------------------------------------------


def _fake_qkv_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
) -> tuple[Tensor, Tensor]:
    B, T, width = qkv.shape
    out = qkv.new_empty(B, T, width // (H + 2 * K) * H)
    return out, qkv.new_empty(B, H, T, dtype=torch.float32)


@operator("tiny_llama::qkv_attention", fake=_fake_qkv_attention, mutates_args=("qkv",))
def qkv_attention_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, T, H D), and each query's log-sum-exp; q and k of the product
    (B, T, (H + 2K) D) are rotated in their place."""
    q, k, v = _heads(qkv, H, K)
    rotate((q, k), (q, k), rows(cos), rows(sin))
    out, lse = attend(q, k, v, True, q.shape[-1] ** -0.5)
    return out.transpose(1, 2).flatten(2), lse


@operator("tiny_llama::qkv_attention_backward", fake=lambda dout, qkv, *_: qkv.new_empty(qkv.shape))
def qkv_attention_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
) -> Tensor:
    """The gradient of the product, (B, T, (H + 2K) D)."""
    q, k, v = _heads(qkv, H, K)
    scale = q.shape[-1] ** -0.5
    dqkv = qkv.new_empty(qkv.shape)
    dq, dk, dv = _heads(dqkv, H, K)
    dout, out = (x.view(*x.shape[:2], H, -1).transpose(1, 2) for x in (dout.contiguous(), out))
    tables = rows(cos), rows(sin)
    attend_backward(dout, q, k, v, out, lse, True, scale, dq, dk, dv, tables)
    return dqkv


def _q_shape(qkv_shape: tuple[int, ...], H: int, K: int) -> tuple[int, ...]:
    B, T, width = qkv_shape
    return B, H, T, width // (H + 2 * K)


@register_flop_formula(torch.ops.tiny_llama.qkv_attention)
def _forward_flops(qkv_shape, cos_shape, sin_shape, H, K, *, out_shape=None, **_) -> int:
    return attention_flops(_q_shape(qkv_shape, H, K), causal=True)


@register_flop_formula(torch.ops.tiny_llama.qkv_attention_backward)
def _backward_flops(dout_shape, qkv_shape, o_shape, lse_shape, cos_shape, sin_shape, H, K, **_):
    return backward_attention_flops(_q_shape(qkv_shape, H, K), causal=True)


class _QkvAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, H, K, dtype):
        ctx.dtypes, ctx.heads = (x.dtype, weight.dtype), (H, K)
        x, weight = x.to(dtype), rounded(weight, dtype)
        qkv = x @ weight.t()  # (B, T, (H + 2K) D)
        out, lse = qkv_attention_forward(qkv, cos, sin, H, K)
        ctx.save_for_backward(x, weight, cos, sin, out, qkv, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        x, weight, cos, sin, out, qkv, lse = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dqkv = qkv_attention_backward(dout, qkv, out, lse, cos, sin, *ctx.heads)
        dx = (dqkv @ weight).to(x_dtype)
        return dx, weight_gradient(dqkv, x, weight_dtype), None, None, None, None, None


def qkv_attention(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> Tensor:
    """flash_attention(*apply_rope(q, k), v), causal, where q, k, v are the heads of x weight'.

    Args:
        x: (B, T, C). weight: ((H + 2K) D, C): the rows of q's heads, then k's, then v's. Under
            autocast everything is computed in its dtype, else in x's.
        cos, sin: (T, D). They get no gradient.

    Returns:
        (B, T, H D), the heads of a token side by side, for the product behind it.

    Bytes: as for its parts, without the writing and reading of v, and of dq once, that joining
    and splitting would take; and without a pass of RoPE over dq and dk, which attention turns back
    before it writes them.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit; a head size that
            the kernels do not have.
    """
    op = "qkv_attention"
    check(op, x=x, weight=weight, cos=cos, sin=sin)
    check_shape(op, "x", x, "B", "T", "C")
    check_shape(op, "weight", weight, "(H + 2K) D", x.shape[-1])
    H, K, T, width = num_heads, num_kv_heads, x.shape[1], weight.shape[0]
    if K < 1 or H % K or H < 1:
        raise ValueError(f"{op}: {H} query heads do not share {K} key/value heads")
    D, rest = divmod(width, H + 2 * K)
    if rest or D not in HEAD_SIZES:
        raise ValueError(
            f"{op}: weight has {width} numbers for {H + 2 * K} heads; a head has one of "
            f"{HEAD_SIZES}"
        )
    check_tables(op, cos, sin, T, D)
    if T * width > MAX_OFFSET:
        raise ValueError(f"{op}: {T} tokens lie more than {MAX_OFFSET} numbers apart")
    return _QkvAttention.apply(x, weight, cos, sin, H, K, autocast_dtype(x))


def qkv_attention_reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> Tensor:
    """`qkv_attention`, operation by operation."""
    q, k, v = _heads(x @ weight.t(), num_heads, num_kv_heads)
    q, k = apply_rope_reference(q, k, cos, sin)
    out = flash_attention_reference(q.to(v.dtype), k.to(v.dtype), v)
    return out.transpose(1, 2).flatten(2)
