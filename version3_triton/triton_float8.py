"""Rounding a matrix to fp8, as it is and transposed, in two passes: PyTorch takes more than ten.

Products of fp8 matrices read both factors with the inner dimension inside, so the backward pass
needs each factor of the forward pass transposed. A scale for the whole matrix, or for each of its
rows, brings the largest element to the format's largest; it has to be known before the first number
is rounded. One kernel finds the largest elements, the other reads the matrix once more and writes
both. A kernel that makes a matrix can find its largest element on the way: `keep_largest`.

Shapes in the comments:
    R rows   C columns
"""

from triton_launch import as_rows, begin_early, cdiv, launch_options, operator

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Rows and columns of a tile."""


@triton.jit
def _tile(x_ptr, stride_x, R, C, BLOCK: tl.constexpr):
    """A tile of x in fp32, zeros beyond its end, and its rows and columns."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r[:, None] < R) & (c[None, :] < C)
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * stride_x + c[None, :], mask=inside, other=0.0)
    return x.to(tl.float32), r, c, inside


@triton.jit
def sizes_of(x):
    """The size of each element, in fp32; infinite for a NaN, which a maximum would pass over."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def raise_to_largest(largest_ptr, sizes):
    """Raises a number in memory to the largest of a tile. Most programs have nothing to raise, and
    leave the one address to the others."""
    largest = tl.max(sizes)
    if largest > tl.load(largest_ptr):
        tl.atomic_max(largest_ptr, largest, sem="relaxed")


@triton.jit
def _float8_largest_kernel(x_ptr, row_ptr, column_ptr, stride_x, R, C, BY_ROW: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """The largest size of an element: in each row and column, or in the matrix."""
    begin_early()
    x, r, c, _ = _tile(x_ptr, stride_x, R, C, BLOCK)
    sizes = sizes_of(x)
    if BY_ROW:
        tl.atomic_max(row_ptr + r, tl.max(sizes, axis=1), mask=r < R, sem="relaxed")
        tl.atomic_max(column_ptr + c, tl.max(sizes, axis=0), mask=c < C, sem="relaxed")
    else:
        raise_to_largest(row_ptr, sizes)


@triton.jit
def _float8_round_kernel(
    x_ptr, row_ptr, column_ptr, values_ptr, row_scale_ptr, transposed_ptr, column_scale_ptr,
    stride_x, R, C, LARGEST: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x over its scale, in fp8, as (R, C) and as (C, R), and the scales."""
    begin_early()
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


def new_largest(x: Tensor, float8: bool) -> Tensor | None:
    """A tensor (1,) that a kernel raises to the amax; None unless fp8 needs it."""
    return x.new_zeros(1, dtype=torch.float32) if float8 else None


def keep_largest(x: Tensor, largest: Tensor | None) -> Tensor:
    """Returns x, of which `round_both_ways` then knows the largest size of an element, (1,)."""
    if largest is not None and not torch.compiler.is_compiling():
        x.largest = largest, x._version  # type: ignore[attr-defined]
    return x


def _known_largest(x: Tensor) -> Tensor | None:
    """The amax that a kernel left with x, or with the tensor that x is a view of."""
    whole = x if x._base is None else x._base
    largest, version = getattr(whole, "largest", (None, 0))
    return largest if version == x._version and whole.numel() == x.numel() else None


def _empty(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    R, C = x.shape
    row, column = ((R, 1), (C, 1)) if by_row else ((), ())
    scales = (x.new_empty(shape, dtype=torch.float32) for shape in (row, column))
    values = (x.new_empty(shape, dtype=dtype) for shape in ((R, C), (C, R)))
    return tuple(t for pair in zip(values, scales, strict=True) for t in pair)  # type: ignore[return-value]


@operator("tiny_llama::round_both_ways", fake=_empty)
def round_both_ways(
    x: Tensor, dtype: torch.dtype, by_row: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix in fp8, as it is and transposed, each with the scale that it was divided by.

    Args:
        x: (R, C). dtype: one of PyTorch's fp8 formats.
        by_row: a scale for each row of either, not one for the matrix.

    Returns:
        values (R, C), its scale, values of x' (C, R), its scale. The scales are fp32: (R, 1) and
        (C, 1), or () twice. Where x is not finite, what is divided by its scale is 0 or NaN, and
        the scale infinite: times the scale it is NaN.

    Bytes: two reads of x, or one if its largest element is known (`keep_largest`) and it has one
    scale; one write of each result.
    """
    known = None if by_row else _known_largest(x)
    x = as_rows(x)
    R, C = x.shape
    values, row_scale, transposed, column_scale = out = _empty(x, dtype, by_row)
    largest = known
    if largest is None:
        largest = x.new_zeros(R + C if by_row else 1, dtype=torch.float32)
    row, column = largest, largest[R:] if by_row else largest
    grid = cdiv(R, BLOCK), cdiv(C, BLOCK)
    sizes = {"BY_ROW": by_row, "BLOCK": BLOCK, **launch_options(8)}
    if known is None:
        _float8_largest_kernel[grid](x, row, column, x.stride(0), R, C, **sizes)
    _float8_round_kernel[grid](
        *(x, row, column, values, row_scale, transposed, column_scale, x.stride(0), R, C),
        LARGEST=torch.finfo(dtype).max,
        **sizes,
    )
    return out
