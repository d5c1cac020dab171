"""RMSNorm in one pass over memory, forward and backward, alone or with the residual add before it.

Shapes in the comments:
    R rows (tokens)   C width of a row   P programs of the backward pass
"""

from dataclasses import dataclass
from typing import Any

from triton_launch import (
    as_rows,
    autocast_dtype,
    cdiv,
    check,
    check_shape,
    first_order,
    launch_options,
    multiprocessors,
    next_power_of_2,
    operator,
    shared_memory,
    tuned,
    wait_for_previous,
)

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 65536  # a row stays in the registers of one program


# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def norm_rows(
    x_ptr, branch_ptr, weight, y_ptr, stream_ptr, rstd_ptr, c, stride_x, stride_branch,
    group, rows, C, eps, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the normed rows of one group, and returns them."""
    r = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = (r[:, None] < rows) & (c[None, :] < C)
    x = tl.load(x_ptr + r[:, None] * stride_x + c[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    out = r[:, None] * C + c[None, :]
    if ADD:
        branch = tl.load(
            branch_ptr + r[:, None] * stride_branch + c[None, :], mask=inside, other=0.0
        )
        stream = (x + branch.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + out, stream, mask=inside)
        x = stream.to(tl.float32)  # the rounded sum, which the backward pass reloads
    rstd = tl.rsqrt(tl.sum(x * x, 1) / C + eps)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    y = (x * rstd[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + out, y, mask=inside)
    return y


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr, branch_ptr, weight_ptr, y_ptr, stream_ptr, rstd_ptr, stride_x, stride_branch,
    rows, C, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each program takes every P-th group of ROWS rows (one group where P programs cover all), and
    keeps the weight in registers."""
    wait_for_previous()
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        norm_rows(
            x_ptr, branch_ptr, weight, y_ptr, stream_ptr, rstd_ptr, c, stride_x, stride_branch,
            group, rows, C, eps, ADD, ROWS,
        )  # fmt: skip


@triton.jit
def norm_rows_backward(
    dy_ptr, dstream_ptr, x_ptr, weight, rstd_ptr, dx_ptr, dbranch_ptr, dw, c,
    stride_dy, stride_dstream, stride_x, group, rows, C,
    ADD: tl.constexpr, BRANCH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes dx of one group of rows; returns dw with their part, and dx in the branch's dtype.

    With n = x rstd the normed row and g = dy weight:  dx = rstd (g - n mean(g n)),  dw = dy n.
    """
    r = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = (r[:, None] < rows) & (c[None, :] < C)
    dy = tl.load(dy_ptr + r[:, None] * stride_dy + c[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + r[:, None] * stride_x + c[None, :], mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    dy = dy.to(tl.float32)
    normed = x.to(tl.float32) * rstd[:, None]
    dw += tl.sum(dy * normed, 0)
    g = dy * weight[None, :]
    dx = rstd[:, None] * (g - normed * (tl.sum(g * normed, 1) / C)[:, None])
    if ADD:  # the gradient that arrives along the residual stream
        dstream = tl.load(
            dstream_ptr + r[:, None] * stride_dstream + c[None, :], mask=inside, other=0.0
        )
        dx += dstream.to(tl.float32)
    out = r[:, None] * C + c[None, :]
    tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    dbranch = dx.to(dbranch_ptr.dtype.element_ty)
    if BRANCH:  # the same gradient in the branch's dtype
        tl.store(dbranch_ptr + out, dbranch, mask=inside)
    return dw, dbranch


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr, dstream_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dbranch_ptr, partial_dw_ptr,
    stride_dy, stride_dstream, stride_x, rows, C,
    ADD: tl.constexpr, BRANCH: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dw sums over all rows: each program over its own, into its own row of partial_dw (P, C).
    While it works on some rows, those of its next STAGES - 1 iterations are on their way to
    shared memory."""
    wait_for_previous()
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_C,), tl.float32)
    groups = tl.cdiv(rows, ROWS)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=STAGES):
        dw, _ = norm_rows_backward(
            dy_ptr, dstream_ptr, x_ptr, weight, rstd_ptr, dx_ptr, dbranch_ptr, dw, c,
            stride_dy, stride_dstream, stride_x, group, rows, C, ADD, BRANCH, ROWS,
        )  # fmt: skip
    tl.store(partial_dw_ptr + tl.program_id(0).to(tl.int64) * C + c, dw, mask=c < C)


@triton.jit
def _rms_norm_sum_kernel(
    partial_ptr, sum_ptr, P, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A few columns of partial (P, C), summed over all of its rows, which lie in the L2 cache:
    ROWS of them are on their way at once."""
    wait_for_previous()
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        p = start + tl.arange(0, ROWS)
        inside = (p[:, None] < P) & (c[None, :] < C)
        total += tl.load(partial_ptr + p[:, None] * C + c[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + c, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=c < C)


# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """How much of the tensor a program holds at once, and its warps.

    Attributes:
        elements: of the rows that it holds: ROWS = elements / C, at least one.
        elements_per_thread: sets the warps.
        programs: per multiprocessor, each of which walks over rows; None: one for each ROWS.
        staged: whether loads go through shared memory, some iterations ahead.
    """

    elements: int
    elements_per_thread: int
    programs: int | None
    staged: bool = False


# By architecture or vendor; the first row whose width is at least C. sm: swept on an H200 at
# widths 1024 to 4096, the backward pass at 512 to 16384. gfx: unmeasured.
Blocks = dict[str, tuple[tuple[int, Block], ...]]
FORWARD_BLOCKS: Blocks = {
    "sm": ((2048, Block(2048, 32, None)), (MAX_WIDTH, Block(4096, 32, None))),
    "gfx": ((MAX_WIDTH, Block(4096, 16, None)),),
    "interpreter": ((MAX_WIDTH, Block(2**18, 2**18, None)),),
}
BACKWARD_BLOCKS: Blocks = {
    "sm": (
        (512, Block(2048, 32, 4, staged=True)),
        (1024, Block(1024, 32, 4, staged=True)),
        (2048, Block(2048, 32, 4, staged=True)),
        (8192, Block(8192, 32, 1, staged=True)),
        (MAX_WIDTH, Block(16384, 32, 1)),
    ),
    "gfx": ((MAX_WIDTH, Block(4096, 16, 4)),),
    "interpreter": ((MAX_WIDTH, Block(2**16, 2**16, 2)),),
}
# A fourth stage pays while no more bytes than this are on their way to a multiprocessor (H200).
IN_FLIGHT = 64 * 1024
# _rms_norm_sum_kernel's tiles: rows, columns and warps. sm: swept on an H200. gfx: unmeasured.
SUM_BLOCKS = {"sm": (256, 8, 8), "gfx": (256, 16, 4), "interpreter": (1024, 1024, 1)}


def _block(table: Blocks, C: int) -> Block:
    return next(block for width, block in tuned(table) if width >= C)


def _launch(block: Block, rows: int, C: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Programs, and the kernel's block sizes and warps."""
    block_c = next_power_of_2(C)
    block_rows = next_power_of_2(max(1, min(block.elements // block_c, next_power_of_2(rows))))
    warps = block_rows * block_c // (32 * block.elements_per_thread)
    warps = next_power_of_2(max(1, min(warps, 16)))
    programs = cdiv(rows, block_rows)
    if block.programs is not None:
        at_once = block.programs * multiprocessors(device)
        # In the last of few rounds most programs would have nothing left to do.
        while block_rows > 1 and at_once < cdiv(rows, block_rows) < 4 * at_once:
            block_rows //= 2
        programs = min(cdiv(rows, block_rows), at_once)
    return programs, {"ROWS": block_rows, "BLOCK_C": block_c, **launch_options(warps)}


def _backward_launch(
    rows: int, C: int, itemsize: int, device: torch.device
) -> tuple[int, dict[str, int]]:
    """As `_launch`, with STAGES: 3, or 4 where that puts little on its way; 1 where a program has
    one iteration, or where shared memory is too small.

    Args:
        itemsize: bytes of all tensors that are read, per element.
    """
    block = _block(BACKWARD_BLOCKS, C)
    programs, constants = _launch(block, rows, C, device)
    stages = 1
    if block.staged and block.programs is not None and rows > programs * constants["ROWS"]:
        column = block.programs * constants["ROWS"] * itemsize  # bytes of one iteration, per column
        if 3 * column * C <= IN_FLIGHT:
            stages = 4
        elif 2 * column * constants["BLOCK_C"] < 0.9 * shared_memory():  # the compiler takes some
            stages = 3
    return programs, {**constants, "STAGES": stages}


# --- operators ----------------------------------------------------------------------------------


def launch_forward(
    kernel: Any, stream: Tensor, branch: Tensor | None, weight: Tensor, eps: float,
    dtype: torch.dtype, *more: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The normed rows, the residual sum (without a branch: the normed rows again), and
    1 / sqrt(mean(sum^2) + eps) of each row, (R,).

    Args:
        kernel: `_rms_norm_forward_kernel`, or one that takes `more` tensors behind `rstd`.
    """
    rows = as_rows(stream)
    branch_rows = rows if branch is None else as_rows(branch)
    R, C = rows.shape
    y, rstd = stream.new_empty(stream.shape, dtype=dtype), _new_rstd(stream)
    total = y if branch is None else stream.new_empty(stream.shape)
    programs, constants = _launch(_block(FORWARD_BLOCKS, C), R, C, stream.device)
    kernel[(programs,)](
        rows, branch_rows, weight.contiguous(), y, total, rstd, *more,
        rows.stride(0), branch_rows.stride(0), R, C, eps, ADD=branch is not None, **constants,
    )  # fmt: skip
    return y, total, rstd


def _new_rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@operator(
    "tiny_llama::rms_norm",
    fake=lambda x, weight, eps, dtype: (x.new_empty(x.shape, dtype=dtype), _new_rstd(x)),
)
def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / rms of each, (R,)."""
    y, _, rstd = launch_forward(_rms_norm_forward_kernel, x, None, weight, eps, dtype)
    return y, rstd


@operator(
    "tiny_llama::add_rms_norm",
    fake=lambda branch, stream, weight, eps, dtype: (
        stream.new_empty(stream.shape, dtype=dtype),
        stream.new_empty(stream.shape),
        _new_rstd(stream),
    ),
)
def add_rms_norm_forward(
    branch: Tensor, stream: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows of the sum, the sum in the stream's dtype, and its 1 / rms, (R,)."""
    return launch_forward(_rms_norm_forward_kernel, stream, branch, weight, eps, dtype)


def launch_backward(
    kernel: Any, dy: Tensor, dstream: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor,
    dbranch: Tensor | None, *more: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x (the sum) and of the weight; dx goes into `dbranch`, too, in its dtype.

    Args:
        kernel: `_rms_norm_backward_kernel`, or one that takes `more` tensors behind `partial_dw`.
    """
    rows, dy_rows = as_rows(x), as_rows(dy)
    dstream_rows = rows if dstream is None else as_rows(dstream)
    R, C = rows.shape
    dx = x.new_empty(x.shape)
    itemsize = dy.element_size() + x.element_size()
    itemsize += 0 if dstream is None else dstream.element_size()
    programs, constants = _backward_launch(R, C, itemsize, x.device)
    partial_dw = x.new_empty(programs, C, dtype=torch.float32)
    kernel[(programs,)](
        dy_rows, dstream_rows, rows, weight.contiguous(), rstd, dx,
        dx if dbranch is None else dbranch, partial_dw, *more,
        dy_rows.stride(0), dstream_rows.stride(0), rows.stride(0), R, C,
        ADD=dstream is not None, BRANCH=dbranch is not None, **constants,
    )  # fmt: skip
    return dx, _sum_rows(partial_dw, weight.dtype)


def _sum_rows(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """(C,) of a contiguous fp32 (P, C)."""
    P, C = partial.shape
    sums = partial.new_empty(C, dtype=dtype)
    rows, columns, warps = tuned(SUM_BLOCKS)
    rows = min(rows, next_power_of_2(P))
    _rms_norm_sum_kernel[(cdiv(C, columns),)](
        partial, sums, P, C, ROWS=rows, COLUMNS=columns, **launch_options(warps)
    )
    return sums


@operator(
    "tiny_llama::rms_norm_backward",
    fake=lambda dy, dstream, x, weight, rstd, branch: (
        x.new_empty(x.shape),
        x.new_empty(x.shape if branch else 0, dtype=dy.dtype),
        torch.empty_like(weight),
    ),
)
def rms_norm_backward(
    dy: Tensor, dstream: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, branch: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (the sum), of the branch in dy's dtype (empty without one), and of the
    weight."""
    # In one dtype the two gradients are one tensor; the caller hands it out twice.
    dbranch = x.new_empty(x.shape if branch else 0, dtype=dy.dtype)
    dx, dw = launch_backward(
        *(_rms_norm_backward_kernel, dy, dstream, x, weight, rstd, dbranch if branch else None)
    )
    return dx, dbranch, dw


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, _, dw = rms_norm_backward(dy, None, x, weight, rstd, False)
        return dx, dw, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, branch: Tensor, stream: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        y, total, rstd = add_rms_norm_forward(branch, stream, weight, eps, dtype)
        ctx.save_for_backward(total, weight, rstd)
        ctx.branch_dtype = branch.dtype
        if not torch.compiler.is_compiling():  # it can't trace the call
            ctx.set_materialize_grads(False)  # a model does not use its last sum
        return y, total

    @staticmethod
    @first_order
    def backward(ctx, dy, dstream):
        total, weight, rstd = ctx.saved_tensors
        if dy is None:  # the normed rows went nowhere
            return dstream.to(ctx.branch_dtype), dstream, None, None, None
        cast = ctx.branch_dtype != total.dtype
        dx, dbranch, dw = rms_norm_backward(dy, dstream, total, weight, rstd, cast)
        dbranch = dbranch if cast else dx
        return dbranch.to(ctx.branch_dtype), dx, dw, None, None


def _check_norm(op: str, x: Tensor, weight: Tensor) -> None:
    check_shape(op, "weight", weight, x.shape[-1])
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"{op}: rows of {x.shape[-1]} are wider than the kernel's {MAX_WIDTH}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32.

    Args:
        x: (..., C), any strides; a view whose rows are contiguous is read without a copy.
        weight: (C,), of any supported dtype.

    Returns:
        x's shape, in x's dtype; under autocast in its dtype, since what follows is a matrix
        product, which would round it there.

    Bytes: forward x and y once; backward x, dy and dx once (the weight's gradient is gathered in
    registers). About 4 C operations a row forward, 11 C backward: bound by memory.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit; C > 65536.
    """
    check("rms_norm", x=x, weight=weight)
    _check_norm("rms_norm", x, weight)
    return _RmsNorm.apply(x, weight, float(eps), autocast_dtype(x))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`, operation by operation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    branch: Tensor, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm behind it: (rms_norm(stream + branch), stream + branch).

    Args:
        branch: (..., C), what a sub-layer returned.
        stream: the same shape, the residual stream. Its dtype is the sum's.
        weight: (C,).

    Returns:
        The normed sum, in the stream's dtype or autocast's, and the sum.

    Bytes: forward branch, stream, sum and y once, so that the norm's own read of the sum is saved;
    backward dy, the sum and its gradient once, and one write for each input's gradient (one for
    both if they have one dtype).

    Raises:
        TypeError, ValueError: as for `rms_norm`.
    """
    check("add_rms_norm", branch=branch, stream=stream, weight=weight)
    check_shape("add_rms_norm", "branch", branch, *stream.shape)
    _check_norm("add_rms_norm", stream, weight)
    return _AddRmsNorm.apply(branch, stream, weight, float(eps), autocast_dtype(stream))


def add_rms_norm_reference(
    branch: Tensor, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, operation by operation."""
    total = stream + branch
    return rms_norm_reference(total, weight, eps), total
