"""Rotary position embedding (rotate-half) of q and k together.

Shapes in the comments:
    B batch   H query heads   K key/value heads   T tokens   D head size
"""

from triton_launch import (
    cdiv,
    check,
    check_dtypes,
    check_shape,
    first_order,
    launch_options,
    new_heads,
    next_power_of_2,
    operator,
    tuned,
    wait_for_previous,
)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_tiles import head_of, store_tile

# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def load_angles(cos_ptr, sin_ptr, stride_cos, stride_sin, t, d, inside, HALF: tl.constexpr):
    """The tables' rows t at d and at d + D/2, in fp32: cos, cos, sin, sin."""
    t = t[:, None].to(tl.int64)
    cos = cos_ptr + t * stride_cos + d[None, :]
    sin = sin_ptr + t * stride_sin + d[None, :]
    cos1 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + HALF, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32)
    return cos1, cos2, sin1, sin2


@triton.jit
def turn(x1, x2, cos1, cos2, sin1, sin2, BACKWARD: tl.constexpr):
    """The pairs (x1, x2) rotated. The backward pass multiplies by the transposed matrix: the
    gradient is rotated back."""
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    return y1, y2


@triton.jit
def store_gradient(
    x, stride_b, stride_h, stride_t, cos_ptr, sin_ptr, stride_cos, stride_sin,
    b, h, first, T, tile, ROTATED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`store_tile`; of heads that RoPE has turned, turned back, pair (tile[i], tile[i + D/2]) by
    pair."""
    if ROTATED:
        HALF: tl.constexpr = D // 2
        t = first + tl.arange(0, ROWS)
        d = tl.arange(0, HALF)
        inside = t[:, None] < T
        cos1, cos2, sin1, sin2 = load_angles(
            cos_ptr, sin_ptr, stride_cos, stride_sin, t, d, inside, HALF
        )
        x1, x2 = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
        y1, y2 = turn(x1, x2, cos1, cos2, sin1, sin2, True)
        base = head_of(x, stride_b, stride_h, b, h)
        target = base + t[:, None] * stride_t + d[None, :]
        tl.store(target, y1.to(x.dtype.element_ty), mask=inside)
        tl.store(target + HALF, y2.to(x.dtype.element_ty), mask=inside)
    else:
        store_tile(x, stride_b, stride_h, stride_t, b, h, first, T, tile, ROWS, D)


@triton.jit
def _rotate(
    x, y, cos1, cos2, sin1, sin2, stride_xt, stride_yt, t, d, inside,
    HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotates the rows t of one head, pair (x[d], x[d + D/2]) by pair."""
    t = t[:, None].to(tl.int64)
    source = x + t * stride_xt + d[None, :]
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    y1, y2 = turn(x1, x2, cos1, cos2, sin1, sin2, BACKWARD)
    target = y + t * stride_yt + d[None, :]
    tl.store(target, y1.to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF, y2.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q, k, q_out, k_out, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_qob, stride_qoh, stride_qot, stride_kob, stride_koh, stride_kot,
    stride_cos, stride_sin, T, H, heads,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of BLOCK_H heads, which share its angles. The heads are those of q, then
    those of k. A program writes what it alone has read: an output may be its input."""
    wait_for_previous()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    b = tl.program_id(2)
    inside = (t[:, None] < T) & (d[None, :] < HALF)
    cos1, cos2, sin1, sin2 = load_angles(
        cos_ptr, sin_ptr, stride_cos, stride_sin, t, d, inside, HALF
    )
    first = tl.program_id(1) * BLOCK_H
    for head in range(first, tl.minimum(first + BLOCK_H, heads)):
        if head < H:
            _rotate(
                head_of(q, stride_qb, stride_qh, b, head),
                head_of(q_out, stride_qob, stride_qoh, b, head),
                cos1, cos2, sin1, sin2, stride_qt, stride_qot, t, d, inside, HALF, BACKWARD,
            )  # fmt: skip
        else:
            _rotate(
                head_of(k, stride_kb, stride_kh, b, head - H),
                head_of(k_out, stride_kob, stride_koh, b, head - H),
                cos1, cos2, sin1, sin2, stride_kt, stride_kot, t, d, inside, HALF, BACKWARD,
            )  # fmt: skip


# By architecture or vendor: tokens and heads of a tile, and pairs of a thread, of which there are
# T x D/2 in a head. sm: swept on an H200, and at D = 128 on an H100. gfx: unmeasured.
BLOCKS = {"sm": (16, 2, 8), "gfx": (16, 2, 8), "interpreter": (4096, 4096, 2**18)}

Pair = tuple[Tensor, Tensor]  # of q and k


def rotate(
    inputs: Pair, outputs: Pair, cos: Tensor, sin: Tensor, *, backward: bool = False
) -> None:
    """Writes q and k rotated, or rotated back, into the outputs, which may be the inputs. The last
    dimensions must be contiguous."""
    B, H, T, D = inputs[0].shape
    heads = H + inputs[1].shape[1]
    block_t, block_h, pairs = tuned(BLOCKS)
    block_t, block_d = min(block_t, next_power_of_2(T)), next_power_of_2(D // 2)
    warps = max(1, block_t * block_d // (32 * pairs))
    _rope_kernel[(cdiv(T, block_t), cdiv(heads, block_h), B)](
        *inputs, *outputs, cos, sin,
        *(stride for x in (*inputs, *outputs) for stride in x.stride()[:3]),
        cos.stride(0), sin.stride(0), T, H, heads,
        BACKWARD=backward, HALF=D // 2, BLOCK_D=block_d,
        BLOCK_T=block_t, BLOCK_H=block_h, **launch_options(warps),
    )  # fmt: skip


# --- operators ----------------------------------------------------------------------------------


def rows(x: Tensor) -> Tensor:
    """x, or a copy of it, with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


@operator("tiny_llama::apply_rope", fake=lambda q, k, *_: (new_heads(q), new_heads(k)))
def apply_rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    """q and k rotated, or with `backward` rotated back."""
    q, k, cos, sin = rows(q), rows(k), rows(cos), rows(sin)
    q_out, k_out = new_heads(q), new_heads(k)
    rotate((q, k), (q_out, k_out), cos, sin, backward=backward)
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        ctx.save_for_backward(cos, sin)
        return apply_rope_forward(q, k, cos, sin, False)

    @staticmethod
    @first_order
    def backward(ctx, dq, dk):
        return *apply_rope_forward(dq, dk, *ctx.saved_tensors, True), None, None


def check_tables(op: str, cos: Tensor, sin: Tensor, T: int, D: int) -> None:
    """Raises ValueError for tables of another shape than (T, D), or an odd D."""
    check_shape(op, "cos", cos, T, D)
    check_shape(op, "sin", sin, T, D)
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
    check_shape("apply_rope", "q", q, "B", "H", "T", "D")
    B, _, T, D = q.shape
    check_shape("apply_rope", "k", k, B, "K", T, D)
    check_dtypes("apply_rope", q=q, k=k)
    check_tables("apply_rope", cos, sin, T, D)
    return _Rope.apply(q, k, cos, sin)


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def apply_rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rope`, operation by operation."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)
