"""SwiGLU's element-wise half, silu(gate) * up, in one pass over memory, forward and backward; and
the feed-forward layer around it, with the products before and behind.

Shapes in the comments:
    R rows (tokens)   F width of a row   C width of the layer's input and output
"""

import math
from collections.abc import Sequence
from typing import Any

from triton_launch import (
    GLUON,
    as_rows,
    autocast_dtype,
    cdiv,
    check,
    check_dtypes,
    check_shape,
    first_order,
    launch_options,
    next_power_of_2,
    on_hopper,
    operator,
    tuned,
    wait_for_previous,
)

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton_linear import rounded, weight_gradient

hopper: Any = None  # the module with the kernel for it
if GLUON:
    import triton_swiglu_hopper as hopper  # type: ignore[no-redef]

# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def _place(R, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns of a program, and which of them exist: rows are cut into blocks."""
    blocks = tl.cdiv(F, BLOCK)
    r = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return r, f, (r < R) & (f < F)


@triton.jit
def swiglu_tile(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, R, F, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes a program's tile of y, and returns it."""
    r, f, inside = _place(R, F, ROWS, BLOCK)
    gate = tl.load(gate_ptr + r * stride_gate + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + r * stride_up + f, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + r * F + f, y, mask=inside)
    return y


@triton.jit
def _swiglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, R, F, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_previous()
    swiglu_tile(gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, R, F, ROWS, BLOCK)


@triton.jit
def swiglu_tile_backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, R, F,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes and returns a program's tiles of dgate and dup.

    With s = sigmoid(gate):  dup = dy gate s,  dgate = dy up s (1 + gate (1 - s)); and y again,
    for who needs it and has not kept it.
    """
    r, f, inside = _place(R, F, ROWS, BLOCK)
    dy = tl.load(dy_ptr + r * stride_dy + f, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + r * stride_gate + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + r * stride_up + f, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    dup = (dy * silu).to(dup_ptr.dtype.element_ty)
    dgate = (dy * up * (s + silu * (1 - s))).to(dgate_ptr.dtype.element_ty)
    tl.store(dgate_ptr + r * stride_dgate + f, dgate, mask=inside)
    tl.store(dup_ptr + r * stride_dup + f, dup, mask=inside)
    if AGAIN:
        tl.store(y_ptr + r * F + f, (silu * up).to(y_ptr.dtype.element_ty), mask=inside)
    return dgate, dup


@triton.jit
def _swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, R, F,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    swiglu_tile_backward(
        dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,
        stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, R, F, AGAIN, ROWS, BLOCK,
    )  # fmt: skip


# By architecture or vendor: rows and columns of a program, and its warps. sm: swept on an H200.
# gfx: unmeasured.
FORWARD_BLOCKS = {"sm": (1, 1024, 4), "gfx": (1, 1024, 4), "interpreter": (256, 4096, 1)}
BACKWARD_BLOCKS = {"sm": (1, 1024, 8), "gfx": (1, 1024, 4), "interpreter": (256, 4096, 1)}


def _all_as_rows(*tensors: Tensor) -> list[Tensor]:
    """Each as (R, F) with contiguous rows; as one long row if all of them are contiguous, since
    the kernels do not care where a row ends."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up as (R, F) of (..., 2F)."""
    gate, up = as_rows(gate_up).chunk(2, dim=1)
    return gate, up


def launch(table: dict[str, tuple[int, int, int]], R: int, F: int) -> tuple[int, dict[str, int]]:
    """Programs, and the kernel's block sizes and warps."""
    rows, block, warps = tuned(table)
    block = min(block, next_power_of_2(F))
    programs = cdiv(R, rows) * cdiv(F, block)
    return programs, {"ROWS": rows, "BLOCK": block, **launch_options(warps)}


def _forward(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """gate and up are (R, F) with contiguous rows; y is contiguous."""
    R, F = gate.shape
    programs, constants = launch(FORWARD_BLOCKS, R, F)
    _swiglu_forward_kernel[(programs,)](
        gate, up, y, gate.stride(0), up.stride(0), R, F, **constants
    )


def launch_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, y: Tensor | None = None
) -> None:
    """All are (R, F) with contiguous rows; y, if it is to be computed again, is contiguous."""
    R, F = dy.shape
    programs, constants = launch(BACKWARD_BLOCKS, R, F)
    _swiglu_backward_kernel[(programs,)](
        dy, gate, up, dgate, dup, dy if y is None else y,
        dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0), R, F,
        AGAIN=y is not None, **constants,
    )  # fmt: skip


# --- operators ----------------------------------------------------------------------------------


@operator("tiny_llama::swiglu", fake=lambda gate, up: gate.new_empty(gate.shape))
def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    y = gate.new_empty(gate.shape)
    gate, up = _all_as_rows(gate, up)
    _forward(gate, up, y)
    return y


@operator(
    "tiny_llama::swiglu_backward",
    fake=lambda dy, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
)
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    launch_backward(*_all_as_rows(dy, gate, up, dgate, dup))
    return dgate, dup


@operator(
    "tiny_llama::linear_swiglu",
    fake=lambda x, weight: _results(x, len(weight)),
)
def linear_swiglu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up = x weight', and SwiGLU of it."""
    rows, F = as_rows(x), len(weight) // 2
    if on_hopper() and hopper.takes(rows, weight, F):
        gate_up, y = _results(x, 2 * F)
        hopper.forward(rows, weight, as_rows(gate_up), as_rows(y))
        return gate_up, y
    gate_up = x @ weight.t()
    y = new_result(gate_up)
    _forward(*halves(gate_up), y)
    return gate_up, y


@operator(
    "tiny_llama::linear_swiglu_backward",
    fake=lambda dout, weight, gate_up: _results(gate_up, gate_up.shape[-1]),
)
def linear_swiglu_backward(dout: Tensor, weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up's gradient, from that of the layer's output, and SwiGLU of gate_up again."""
    dgate_up, y = _results(gate_up, gate_up.shape[-1])
    rows = as_rows(dout)
    if on_hopper() and hopper.takes(rows, weight, y.shape[-1]):
        hopper.backward(rows, weight, as_rows(gate_up), as_rows(dgate_up), as_rows(y))
    else:
        launch_backward(as_rows(dout @ weight), *halves(gate_up), *halves(dgate_up), y)
    return dgate_up, y


def new_result(gate_up: Tensor) -> Tensor:
    """An empty (..., F) for (..., 2F)."""
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _results(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Empty tensors (..., width) and (..., width / 2)."""
    gate_up = like.new_empty(*like.shape[:-1], width)
    return gate_up, new_result(gate_up)


@register_flop_formula(
    [torch.ops.tiny_llama.linear_swiglu, torch.ops.tiny_llama.linear_swiglu_backward]
)
def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    """2 M C O of the product of x or dout, (..., C), with a weight of C x O numbers."""
    return 2 * math.prod(x_shape[:-1]) * math.prod(weight_shape)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return swiglu_backward(dy, *ctx.saved_tensors)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, dtype: torch.dtype):
        ctx.dtypes = x.dtype, gate_up_weight.dtype, down_weight.dtype
        x, up, down = x.to(dtype), rounded(gate_up_weight, dtype), rounded(down_weight, dtype)
        gate_up, y = linear_swiglu(x, up)
        ctx.save_for_backward(x, gate_up, up, down)
        return y @ down.t()

    @staticmethod
    @first_order
    def backward(ctx, dout):
        x, gate_up, up, down = ctx.saved_tensors
        x_dtype, up_dtype, down_dtype = ctx.dtypes
        dgate_up, y = linear_swiglu_backward(dout, down, gate_up)
        ddown = weight_gradient(dout, y, down_dtype) if ctx.needs_input_grad[2] else None
        del y
        dx = (dgate_up @ up).to(x_dtype) if ctx.needs_input_grad[0] else None
        dup = weight_gradient(dgate_up, x, up_dtype) if ctx.needs_input_grad[1] else None
        return dx, dup, ddown, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """y = silu(gate) * up = gate sigmoid(gate) up, computed in fp32.

    Args:
        gate, up: (..., F), of one dtype, any strides; views with contiguous rows are read in place.

    Returns:
        (..., F), contiguous, in their dtype.

    Bytes: forward gate, up and y once; backward dy, gate and up read, dgate and dup written, with
    silu(gate) computed again. About 5 operations an element forward, 10 backward: bound by memory.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; gate and up of different shape or dtype.
    """
    check("swiglu", gate=gate, up=up)
    check_shape("swiglu", "up", up, *gate.shape)
    check_dtypes("swiglu", gate=gate, up=up)
    return _Swiglu.apply(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu`, operation by operation."""
    return gate * torch.sigmoid(gate) * up


def feed_forward(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """`linear(swiglu(gate, up), down_weight)` of the halves of `linear(x, gate_up_weight)`, which
    alone are kept.

    The last product's backward pass needs its input, (..., F), again: the kernel of SwiGLU's
    backward pass, which has gate and up at hand, writes it once more. On Hopper SwiGLU and its
    gradient are computed by the product before them (`triton_swiglu_hopper`), if that is large.

    Args:
        x: (..., C). gate_up_weight: (2F, C), gate's rows, then up's. down_weight: (O, F). Under
            autocast the products are computed in its dtype, else in x's.

    Returns:
        (..., O), in the products' dtype.

    Products: 6 R C F operations forward if O is C, 12 R C F backward.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; gate_up_weight of an odd number of rows;
            shapes that do not fit.
    """
    check("feed_forward", x=x, gate_up_weight=gate_up_weight, down_weight=down_weight)
    check_shape("feed_forward", "gate_up_weight", gate_up_weight, "2F", x.shape[-1])
    rows = len(gate_up_weight)
    if rows % 2:
        raise ValueError(f"feed_forward: gate_up_weight has {rows} rows, expected (2F, C)")
    check_shape("feed_forward", "down_weight", down_weight, "O", rows // 2)
    return _FeedForward.apply(x, gate_up_weight, down_weight, autocast_dtype(x))


def feed_forward_reference(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """`feed_forward`, operation by operation."""
    gate, up = (x @ gate_up_weight.t()).chunk(2, dim=-1)
    return swiglu_reference(gate, up) @ down_weight.t()
