"""V3's operators for products in fp8: rounding a matrix as it is and transposed, and what lies
between two products, with the amax that rounding needs.

Products of fp8 matrices read both factors with the inner dimension inside, so the backward pass
needs each factor of the forward pass transposed. A scale for the whole matrix, or for each of its
rows, brings the amax, the largest absolute value, to the format's largest number; it has to be
known before the first number is rounded. One kernel finds the amax, the other reads the matrix once
more and writes it both ways: PyTorch takes more than ten passes. The norms and SwiGLU here find the
amax of what they write on the way, which spares a product the first kernel.

An amax is a tensor (1,). A result's amax is a second result. A gradient's amax travels as a
gradient does: the product that makes a matrix returns an empty (1,) beside it, and the operator
that reads the matrix returns, as the gradient of that (1,), the amax of the matrix's gradient.

Shapes in the comments:
    R rows   C columns
"""

from triton_launch import as_rows, cdiv, first_order, launch_options, operator, wait_for_previous

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_qkv_attention import qkv_attention_backward, qkv_attention_forward
from triton_rms_norm import (
    launch_backward,
    launch_forward,
    norm_rows,
    norm_rows_backward,
    rms_norm_backward,
)
from triton_swiglu import (
    BACKWARD_BLOCKS,
    FORWARD_BLOCKS,
    halves,
    launch,
    new_result,
    swiglu_tile,
    swiglu_tile_backward,
)

BLOCK = 128
"""Rows and columns of a tile."""

# --- kernels: rounding --------------------------------------------------------------------------


@triton.jit
def _tile(x_ptr, stride_x, R, C, BLOCK: tl.constexpr):
    """A tile of x in fp32, zeros beyond its end, and its rows and columns."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r[:, None] < R) & (c[None, :] < C)
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride_x + c[None, :], mask=inside, other=0.0)
    return x.to(tl.float32), r, c, inside


@triton.jit
def _absolute(x):
    """|x| in fp32; infinite for a NaN, which a maximum would pass over."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _raise_amax(amax_ptr, absolute):
    """Raises a number in memory to the largest of a tile. Most programs have nothing to raise, and
    leave the one address to the others."""
    amax = tl.max(absolute)
    if amax > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, amax, sem="relaxed")


@triton.jit
def _float8_amax_kernel(x_ptr, row_ptr, column_ptr, stride_x, R, C, BY_ROW: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """The amax of each row and column, or of the matrix."""
    wait_for_previous()
    x, r, c, _ = _tile(x_ptr, stride_x, R, C, BLOCK)
    absolute = _absolute(x)
    if BY_ROW:
        tl.atomic_max(row_ptr + r, tl.max(absolute, axis=1), mask=r < R, sem="relaxed")
        tl.atomic_max(column_ptr + c, tl.max(absolute, axis=0), mask=c < C, sem="relaxed")
    else:
        _raise_amax(row_ptr, absolute)


@triton.jit
def _float8_round_kernel(
    x_ptr, row_ptr, column_ptr, values_ptr, row_scale_ptr, transposed_ptr, column_scale_ptr,
    stride_x, R, C, LARGEST: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x over its scale, in fp8, as (R, C) and as (C, R), and the scales. LARGEST: the format's."""
    wait_for_previous()
    x, r, c, inside = _tile(x_ptr, stride_x, R, C, BLOCK)
    type_: tl.constexpr = values_ptr.dtype.element_ty
    step: tl.constexpr = 1 if BY_ROW else 0
    # The smallest keeps zeros from infinity.
    row = tl.maximum(tl.load(row_ptr + r * step, mask=r < R, other=1.0), 1e-30)
    column = tl.maximum(tl.load(column_ptr + c * step, mask=c < C, other=1.0), 1e-30)
    rows, columns = (R, C) if BY_ROW else (1, 1)
    tl.store(row_scale_ptr + r * step, row / LARGEST, mask=(r < rows) & (tl.program_id(1) == 0))
    tl.store(
        column_scale_ptr + c * step, column / LARGEST,
        mask=(c < columns) & (tl.program_id(0) == 0),
    )  # fmt: skip
    values = (x * (1.0 / row * LARGEST)[:, None]).to(type_)
    # Rounded on its own, also where both are the same: ptxas 12.9, which Triton 3.6 to 3.8 have for
    # Hopper, spoils fp8 numbers that are stored as they are and transposed (triton#11111).
    turned = (x * (1.0 / column * LARGEST)[None, :]).to(type_)
    tl.store(values_ptr + r[:, None].to(tl.int64) * C + c[None, :], values, mask=inside)
    rows_of_it = transposed_ptr + c[:, None].to(tl.int64) * R
    tl.store(rows_of_it + r[None, :], tl.trans(turned), mask=tl.trans(inside))


# --- kernels: those of triton_rms_norm.py and triton_swiglu.py, which also find an amax ---------


@triton.jit
def _float8_rms_norm_forward_kernel(
    x_ptr, branch_ptr, weight_ptr, y_ptr, stream_ptr, rstd_ptr, amax_ptr, stride_x, stride_branch,
    rows, C, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        y = norm_rows(
            x_ptr, branch_ptr, weight, y_ptr, stream_ptr, rstd_ptr, c, stride_x, stride_branch,
            group, rows, C, eps, ADD, ROWS,
        )  # fmt: skip
        _raise_amax(amax_ptr, _absolute(y))


@triton.jit
def _float8_rms_norm_backward_kernel(
    dy_ptr, dstream_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dbranch_ptr, partial_dw_ptr, amax_ptr,
    stride_dy, stride_dstream, stride_x, rows, C,
    ADD: tl.constexpr, BRANCH: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_C,), tl.float32)
    absolute = tl.zeros((ROWS,), tl.float32)
    groups = tl.cdiv(rows, ROWS)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=STAGES):
        dw, dbranch = norm_rows_backward(
            dy_ptr, dstream_ptr, x_ptr, weight, rstd_ptr, dx_ptr, dbranch_ptr, dw, c,
            stride_dy, stride_dstream, stride_x, group, rows, C, ADD, BRANCH, ROWS,
        )  # fmt: skip
        absolute = tl.maximum(absolute, tl.max(_absolute(dbranch), 1))
    tl.store(partial_dw_ptr + tl.program_id(0).to(tl.int64) * C + c, dw, mask=c < C)
    _raise_amax(amax_ptr, absolute)


@triton.jit
def _float8_swiglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, amax_ptr, stride_gate, stride_up, R, F,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    y = swiglu_tile(gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, R, F, ROWS, BLOCK)
    _raise_amax(amax_ptr, _absolute(y))


@triton.jit
def _float8_swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, amax_ptr,
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, R, F,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    dgate, dup = swiglu_tile_backward(
        dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_ptr,
        stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, R, F, False, ROWS, BLOCK,
    )  # fmt: skip
    _raise_amax(amax_ptr, tl.maximum(_absolute(dgate), _absolute(dup)))


# --- operators ----------------------------------------------------------------------------------


def _new_amax(x: Tensor) -> Tensor:
    return x.new_zeros(1, dtype=torch.float32)


def _empty(
    x: Tensor, dtype: torch.dtype, by_row: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    R, C = x.shape
    row, column = ((R, 1), (C, 1)) if by_row else ((), ())
    scales = (x.new_empty(shape, dtype=torch.float32) for shape in (row, column))
    values = (x.new_empty(shape, dtype=dtype) for shape in ((R, C), (C, R)))
    return tuple(t for pair in zip(values, scales, strict=True) for t in pair)  # type: ignore[return-value]


@operator("tiny_llama::round_both_ways", fake=_empty)
def round_both_ways(
    x: Tensor, dtype: torch.dtype, by_row: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix in fp8, as it is and transposed, each with the scale that it was divided by.

    Args:
        x: (R, C). dtype: one of PyTorch's fp8 formats.
        by_row: a scale for each row of either, not one for the matrix.
        amax: x's, (1,), if it is known; with a scale for each row it does not help.

    Returns:
        values (R, C), its scale, values of x' (C, R), its scale. The scales are fp32: (R, 1) and
        (C, 1), or () twice. Where x is not finite, what is divided by its scale is 0 or NaN, and
        the scale infinite: times the scale it is NaN.

    Bytes: two reads of x, or one if its amax is known and it has one scale; one write of each
    result.
    """
    x = as_rows(x)
    R, C = x.shape
    values, row_scale, transposed, column_scale = out = _empty(x, dtype, by_row)
    grid = cdiv(R, BLOCK), cdiv(C, BLOCK)
    sizes = {"BY_ROW": by_row, "BLOCK": BLOCK, **launch_options(8)}
    if by_row or amax is None:
        amax = x.new_zeros(R + C if by_row else 1, dtype=torch.float32)
        column = amax[R:] if by_row else amax
        _float8_amax_kernel[grid](x, amax, column, x.stride(0), R, C, **sizes)
    else:
        column = amax
    _float8_round_kernel[grid](
        *(x, amax, column, values, row_scale, transposed, column_scale, x.stride(0), R, C),
        LARGEST=torch.finfo(dtype).max,
        **sizes,
    )
    return out


@operator(
    "tiny_llama::float8_rms_norm",
    fake=lambda x, weight, eps, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32),
        _new_amax(x),
    ),
)
def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows, 1 / rms of each, and the normed rows' amax."""
    amax = _new_amax(x)
    y, _, rstd = launch_forward(_float8_rms_norm_forward_kernel, x, None, weight, eps, dtype, amax)
    return y, rstd, amax


@operator(
    "tiny_llama::float8_add_rms_norm",
    fake=lambda branch, stream, weight, eps: (
        torch.empty_like(branch),
        stream.new_empty(stream.shape),
        stream.new_empty(stream.numel() // stream.shape[-1], dtype=torch.float32),
        _new_amax(stream),
    ),
)
def _add_rms_norm(
    branch: Tensor, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normed rows of the sum in the branch's dtype, the sum, its 1 / rms, the rows' amax."""
    kernel, amax = _float8_rms_norm_forward_kernel, _new_amax(stream)
    return *launch_forward(kernel, stream, branch, weight, eps, branch.dtype, amax), amax


@operator(
    "tiny_llama::float8_rms_norm_backward",
    fake=lambda dy, dstream, x, weight, rstd: (
        x.new_empty(x.shape),
        x.new_empty(x.shape, dtype=dy.dtype),
        torch.empty_like(weight),
        _new_amax(x),
    ),
)
def _add_rms_norm_backward(
    dy: Tensor, dstream: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the stream, the branch and the weight; and the branch's gradient's amax."""
    dbranch, amax = x.new_empty(x.shape, dtype=dy.dtype), _new_amax(x)
    kernel = _float8_rms_norm_backward_kernel
    dx, dw = launch_backward(kernel, dy, dstream, x, weight, rstd, dbranch, amax)
    return dx, dbranch, dw, amax


@operator(
    "tiny_llama::float8_swiglu", fake=lambda gate_up: (new_result(gate_up), _new_amax(gate_up))
)
def _swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    y, amax, (gate, up) = new_result(gate_up), _new_amax(gate_up), halves(gate_up)
    programs, constants = launch(FORWARD_BLOCKS, *gate.shape)
    _float8_swiglu_forward_kernel[(programs,)](
        gate, up, y, amax, gate.stride(0), up.stride(0), *gate.shape, **constants
    )
    return y, amax


@operator(
    "tiny_llama::float8_swiglu_backward",
    fake=lambda dy, gate_up: (gate_up.new_empty(gate_up.shape), _new_amax(gate_up)),
)
def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    dgate_up, amax = gate_up.new_empty(gate_up.shape), _new_amax(gate_up)
    tensors = as_rows(dy), *halves(gate_up), *halves(dgate_up)
    programs, constants = launch(BACKWARD_BLOCKS, *tensors[0].shape)
    _float8_swiglu_backward_kernel[(programs,)](
        *tensors, amax, *(x.stride(0) for x in tensors), *tensors[0].shape, **constants
    )
    return dgate_up, amax


# --- with autograd ------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        y, rstd, amax = _rms_norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @first_order
    def backward(ctx, dy, _):
        x, weight, rstd = ctx.saved_tensors
        dx, _, dw = rms_norm_backward(dy, None, x, weight, rstd, False)
        return dx, dw, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """triton_rms_norm.py's, in `dtype`, and its amax."""
    return _RmsNorm.apply(x, weight, eps, dtype)


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, branch, dbranch_amax, stream, weight, eps):
        y, total, rstd, amax = _add_rms_norm(branch, stream, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.mark_non_differentiable(amax)
        if not torch.compiler.is_compiling():  # it can't trace the call
            ctx.set_materialize_grads(False)  # a model does not use its last sum
        return y, amax, total

    @staticmethod
    @first_order
    def backward(ctx, dy, _, dstream):
        dx, dbranch, dw, amax = _add_rms_norm_backward(dy, dstream, *ctx.saved_tensors)
        return dbranch, amax, dx, dw, None


def add_rms_norm(
    branch: Tensor, dbranch_amax: Tensor, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """triton_rms_norm.py's, in the branch's dtype; its amax; and the sum.

    Args:
        dbranch_amax: came with the branch; its gradient is the amax of the branch's.
    """
    return _AddRmsNorm.apply(branch, dbranch_amax, stream, weight, eps)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, dgate_up_amax):
        ctx.save_for_backward(gate_up)
        y, amax = _swiglu(gate_up)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @first_order
    def backward(ctx, dy, _):
        return _swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate_up: Tensor, dgate_up_amax: Tensor) -> tuple[Tensor, Tensor]:
    """triton_swiglu.py's `swiglu` of the halves of gate_up, and its amax.

    Args:
        dgate_up_amax: came with gate_up; its gradient is the amax of gate_up's.
    """
    return _Swiglu.apply(gate_up, dgate_up_amax)


class _HeadsAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, H, K):
        ctx.heads = H, K
        out, lse = qkv_attention_forward(qkv, cos, sin, H, K)
        torch.autograd.graph.increment_version(qkv)  # backward passes that have kept it refuse
        ctx.save_for_backward(cos, sin, out, qkv, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        cos, sin, out, qkv, lse = ctx.saved_tensors
        dqkv = qkv_attention_backward(dout, qkv, out, lse, cos, sin, *ctx.heads)
        return dqkv, None, None, None, None


def heads_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> Tensor:
    """`qkv_attention` behind its product; q and k are rotated in their place.

    Args:
        qkv: (B, T, (H + 2K) D), overwritten. cos, sin: (T, D). They get no gradient.

    Returns:
        (B, T, H D).
    """
    return _HeadsAttention.apply(qkv.contiguous(), cos, sin, num_heads, num_kv_heads)
