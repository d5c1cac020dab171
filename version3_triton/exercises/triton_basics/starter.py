"""Three kernels: a mask, a row, strides.

Above each is its specification in plain PyTorch. Write the kernel's body at YOUR CODE, then take
the `raise` out of the function that launches it. The launches are right as they are. `tl` has what
a body needs: program_id, arange, load, store, max, sum, exp."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- 1. a mask ------------------------------------------------------------------------------------

BLOCK = 64


def add_reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Adds contiguous vectors (N,). A program has the elements of one block of them,
    tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).
    """
    # YOUR CODE: which of the elements exist? Load x and y there, and store their sum there.


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out = x + y, all contiguous (N,)."""
    N = out.numel()
    raise NotImplementedError("the body of _add_kernel; then take this line out")
    _add_kernel[(triton.cdiv(N, BLOCK),)](x, y, out, N, BLOCK=BLOCK)


# --- 2. a row -------------------------------------------------------------------------------------


def softmax_reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, stride_x, stride_out, C, BLOCK_C: tl.constexpr):
    """Program number r, tl.program_id(0), makes row r of x (R, C) into row r of out.

    From a row to the next it is stride_x elements in x, stride_out in out; within a row the
    elements lie side by side. BLOCK_C is the power of two that is not less than C.
    """
    # YOUR CODE: load row r, all at once; exp(x - the row's largest) / its sum; store it.


def softmax(x: Tensor, out: Tensor) -> None:
    """out = softmax of each row of x, both (R, C)."""
    R, C = x.shape
    raise NotImplementedError("the body of _softmax_kernel; then take this line out")
    _softmax_kernel[(R,)](x, out, x.stride(0), out.stride(0), C, BLOCK_C=triton.next_power_of_2(C))


# --- 3. strides -----------------------------------------------------------------------------------

TILE_R, TILE_C = 16, 32


def transpose_reference(x: Tensor) -> Tensor:
    return x.t().contiguous()


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, R, C, stride_xr, stride_xc, stride_or, stride_oc,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Program (i, j) copies a tile of TILE_R x TILE_C elements of x (R, C) to out (C, R). Its rows,
    as a column of indices: tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)[:, None].

    Element [r, c] of x lies r stride_xr + c stride_xc elements behind x_ptr; element [c, r] of out
    c stride_or + r stride_oc behind out_ptr. Nothing else is known about the strides.
    """
    # YOUR CODE: the rows, the columns as [None, :], one load and one store.


def transpose(x: Tensor, out: Tensor) -> None:
    """out[c, r] = x[r, c]; x (R, C) and out (C, R) of any strides."""
    R, C = x.shape
    grid = (triton.cdiv(R, TILE_R), triton.cdiv(C, TILE_C))
    raise NotImplementedError("the body of _transpose_kernel; then take this line out")
    strides = (*x.stride(), *out.stride())
    _transpose_kernel[grid](x, out, R, C, *strides, TILE_R=TILE_R, TILE_C=TILE_C)
