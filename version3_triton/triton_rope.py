"""Rotary position embedding (rotate-half), of q and k together, or of the whole QKV product.

Shapes in the comments:
    B batch   H query heads   K key/value heads   T tokens   D head size
"""

from triton_launch import check, check_shape, new_heads, tuned

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    x, y, cos1, cos2, sin1, sin2, stride_xt, stride_yt, t, d, inside,
    HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotates the rows t of one head, pair (x[d], x[d + D/2]) by pair. The backward pass multiplies
    by the transposed matrix: the gradient is rotated back."""
    source = x + t[:, None] * stride_xt + d[None, :]
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    target = y + t[:, None] * stride_yt + d[None, :]
    tl.store(target, y1.to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF, y2.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _copy(x, y, stride_xt, stride_yt, t, d, inside, HALF: tl.constexpr):
    source = x + t[:, None] * stride_xt + d[None, :]
    target = y + t[:, None] * stride_yt + d[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    tl.store(target + HALF, tl.load(source + HALF, mask=inside), mask=inside)


@triton.jit
def _rope_kernel(
    q, k, v, q_out, k_out, v_out, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_qob, stride_qoh, stride_qot,
    stride_kob, stride_koh, stride_kot, stride_vob, stride_voh, stride_vot,
    stride_cos, stride_sin, T, H, K, heads,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of BLOCK_H heads, which share its angles. The heads are those of q, then
    those of k, then those of v, which are copied."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    b = tl.program_id(2).to(tl.int64)
    inside = (t[:, None] < T) & (d[None, :] < HALF)
    cos = cos_ptr + t[:, None] * stride_cos + d[None, :]
    sin = sin_ptr + t[:, None] * stride_sin + d[None, :]
    cos1 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + HALF, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(1) * BLOCK_H
    for head in range(first, tl.minimum(first + BLOCK_H, heads)):
        if head < H:
            _rotate(
                q + b * stride_qb + head * stride_qh, q_out + b * stride_qob + head * stride_qoh,
                cos1, cos2, sin1, sin2, stride_qt, stride_qot, t, d, inside, HALF, BACKWARD,
            )  # fmt: skip
        elif head < H + K:
            h = head - H
            _rotate(
                k + b * stride_kb + h * stride_kh, k_out + b * stride_kob + h * stride_koh,
                cos1, cos2, sin1, sin2, stride_kt, stride_kot, t, d, inside, HALF, BACKWARD,
            )  # fmt: skip
        else:
            h = head - H - K
            _copy(
                v + b * stride_vb + h * stride_vh, v_out + b * stride_vob + h * stride_voh,
                stride_vt, stride_vot, t, d, inside, HALF,
            )  # fmt: skip


# By architecture or vendor: tokens and heads of a tile, and warps. sm: swept on an H200. gfx:
# unmeasured.
BLOCKS = {"sm": (16, 2, 2), "gfx": (16, 2, 2), "interpreter": (4096, 4096, 1)}

Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v; without a v to copy, k stands in for it


def _rope(
    inputs: Heads, outputs: Heads, cos: Tensor, sin: Tensor, copy_v: bool, backward: bool
) -> None:
    B, H, T, D = inputs[0].shape
    K = inputs[1].shape[1]
    heads = H + 2 * K if copy_v else H + K
    block_t, block_h, warps = tuned(BLOCKS)
    block_t = min(block_t, triton.next_power_of_2(T))
    _rope_kernel[(triton.cdiv(T, block_t), triton.cdiv(heads, block_h), B)](
        *inputs, *outputs, cos, sin,
        *(stride for x in (*inputs, *outputs) for stride in x.stride()[:3]),
        cos.stride(0), sin.stride(0), T, H, K, heads,
        BACKWARD=backward, HALF=D // 2, BLOCK_D=triton.next_power_of_2(D // 2),
        BLOCK_T=block_t, BLOCK_H=block_h, num_warps=warps,
    )  # fmt: skip


# --- operators ----------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _split(qkv: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    """The views q (B, H, T, D), k and v (B, K, T, D) of a product (B, T, (H + 2K) D)."""
    B, T, width = qkv.shape
    heads = qkv.view(B, T, -1, width // (num_heads + 2 * num_kv_heads)).transpose(1, 2)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


@torch.library.custom_op("tiny_llama::apply_rope", mutates_args=())
def apply_rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    """q and k rotated, or with `backward` rotated back."""
    q, k, cos, sin = _rows(q), _rows(k), _rows(cos), _rows(sin)
    q_out, k_out = new_heads(q), new_heads(k)
    _rope((q, k, k), (q_out, k_out, k_out), cos, sin, False, backward)
    return q_out, k_out


@apply_rope_forward.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    return new_heads(q), new_heads(k)


@torch.library.custom_op("tiny_llama::rope_qkv", mutates_args=())
def rope_qkv_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated and v as it was, each a tensor of its own."""
    inputs = _split(_rows(qkv).contiguous(), num_heads, num_kv_heads)
    q, k, v = (new_heads(x) for x in inputs)
    _rope(inputs, (q, k, v), _rows(cos), _rows(sin), True, False)
    return q, k, v


@rope_qkv_forward.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (new_heads(x) for x in _split(qkv, num_heads, num_kv_heads))
    return q, k, v


@torch.library.custom_op("tiny_llama::rope_qkv_backward", mutates_args=())
def rope_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the product, (B, T, (H + 2K) D)."""
    B, H, T, D = dq.shape
    K = dk.shape[1]
    dqkv = dq.new_empty(B, T, (H + 2 * K) * D)
    _rope((_rows(dq), _rows(dk), _rows(dv)), _split(dqkv, H, K), _rows(cos), _rows(sin), True, True)
    return dqkv


@rope_qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, H, T, D = dq.shape
    return dq.new_empty(B, T, (H + 2 * dk.shape[1]) * D)


def _setup_context(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    dq, dk = apply_rope_forward(dq, dk, *ctx.saved_tensors, not ctx.backward)
    return dq, dk, None, None, None


def _setup_qkv_context(ctx, inputs, output) -> None:
    _, cos, sin, _, _ = inputs
    ctx.save_for_backward(cos, sin)


def _qkv_backward(ctx, dq, dk, dv):
    return rope_qkv_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


apply_rope_forward.register_autograd(_backward, setup_context=_setup_context)
rope_qkv_forward.register_autograd(_qkv_backward, setup_context=_setup_qkv_context)


def _check_tables(op: str, cos: Tensor, sin: Tensor, T: int, D: int) -> None:
    check_shape(op, "cos", cos, (T, D))
    check_shape(op, "sin", sin, (T, D))
    if D % 2:
        raise ValueError(f"{op}: head size {D} is odd: RoPE rotates pairs")


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x cos + rotate_half(x) sin for q and k, where rotate_half(x) = (-x[D/2:], x[:D/2]).

    That turns each pair (x[i], x[i + D/2]) by an angle that grows with its token's position.
    Computed in fp32; its backward pass turns the gradients back.

    Args:
        q: (B, H, T, D). k: (B, K, T, D). Any strides.
        cos, sin: (T, D), the tables of V1 to V4. They get no gradient.

    Returns:
        q and k rotated, in their dtype; in memory (B, T, heads, D).

    Bytes: q and k read and written once, each way. 3 D operations a token and head.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit; an odd D.
    """
    check("apply_rope", q=q, k=k, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError("apply_rope: q and k must be (B, heads, T, D)")
    B, _, T, D = q.shape
    check_shape("apply_rope", "k", k, (B, k.shape[1], T, D))
    if q.dtype != k.dtype:
        raise TypeError(f"apply_rope: q is {q.dtype}, k {k.dtype}: cast one of them")
    _check_tables("apply_rope", cos, sin, T, D)
    return apply_rope_forward(q, k, cos, sin, False)


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def apply_rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rope`, operation by operation."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`apply_rope` of the q and k in one QKV product, and its v.

    v is copied along: a quarter more bytes than q and k alone, at 2 query heads a key/value head.
    In return the backward pass writes the gradient of the whole product as one tensor, where
    joining three would read and write all of them again.

    Args:
        qkv: (B, T, (H + 2K) D): the heads of q, then those of k, then those of v.
        cos, sin: (T, D). They get no gradient.

    Returns:
        q (B, H, T, D), k and v (B, K, T, D); in memory (B, T, heads, D).

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit; an odd D.
    """
    check("rope_qkv", qkv=qkv, cos=cos, sin=sin)
    heads = num_heads + 2 * num_kv_heads
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"rope_qkv: {num_heads} query and {num_kv_heads} key/value heads")
    if qkv.dim() != 3 or qkv.shape[-1] % heads:
        raise ValueError(
            f"rope_qkv: qkv is {tuple(qkv.shape)}, expected (B, T, {heads} D) for {num_heads} "
            f"query and {num_kv_heads} key/value heads"
        )
    _check_tables("rope_qkv", cos, sin, qkv.shape[1], qkv.shape[-1] // heads)
    return rope_qkv_forward(qkv, cos, sin, num_heads, num_kv_heads)


def rope_qkv_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_qkv`, operation by operation."""
    q, k, v = _split(qkv, num_heads, num_kv_heads)
    return *apply_rope_reference(q, k, cos, sin), v
