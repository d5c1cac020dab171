"""RMSNorm with a backward pass of your own.

The forward pass is written. Two gaps are left, marked YOUR CODE: the body of the backward kernel,
and the method that joins it to autograd. Take the `raise` out where you fill one.

Shapes in the comments:
    R rows   C width of a row   P programs of the backward kernel
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- the specification ----------------------------------------------------------------------------


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x rstd weight with rstd = 1 / sqrt(mean(x^2) + eps), over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


# --- forward, written -----------------------------------------------------------------------------


@triton.jit
def _forward_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, C, eps, BLOCK_C: tl.constexpr):
    """Program number r makes row r of y (R, C), and keeps its rstd (R,) for the backward pass."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + r * C + c, mask=c < C, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    tl.store(rstd_ptr + r, rstd)
    y = x * rstd * weight
    tl.store(y_ptr + r * C + c, y.to(y_ptr.dtype.element_ty), mask=c < C)


def launch_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (R, C) in x's dtype, and rstd (R,) in fp32, of contiguous x (R, C)."""
    R, C = x.shape
    y, rstd = torch.empty_like(x), x.new_empty(R, dtype=torch.float32)
    _forward_kernel[(R,)](x, weight, y, rstd, C, eps, BLOCK_C=triton.next_power_of_2(C))
    return y, rstd


# --- 1. the backward kernel -----------------------------------------------------------------------


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_dw_ptr, R, C, BLOCK_C: tl.constexpr
):
    """Program number p takes the rows p, p + P, p + 2 P, ... (P is tl.num_programs(0)).

    It writes the gradient of each of its rows to dx (R, C). The weight's gradient is a sum over all
    rows: a program sums over its own, in registers, and writes that to row p of partial_dw (P, C),
    which no other program touches. It writes that row even if it had no rows.

    All tensors are contiguous. Compute in fp32; dx is stored in dx_ptr.dtype.element_ty.
    """
    # YOUR CODE: `for r in range(first, R, step)` works here as in Python.


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, partial_dw: Tensor
) -> None:
    """Fills dx (R, C), and partial_dw (P, C), fp32, with P programs. All contiguous."""
    R, C = x.shape
    raise NotImplementedError("the body of _backward_kernel; then take this line out")
    _backward_kernel[(len(partial_dw),)](
        dy, x, weight, rstd, dx, partial_dw, R, C, BLOCK_C=triton.next_power_of_2(C)
    )


# --- 2. autograd ----------------------------------------------------------------------------------

PROGRAMS = 4  # few, since the interpreter runs them one after the other


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        weight = weight.contiguous()
        y, rstd = launch_forward(rows, weight, eps)
        ctx.save_for_backward(rows, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """The gradients of forward's three arguments, each with the shape and dtype of its
        argument; None for eps.

        dy has y's shape, and any strides: after `y.sum()` all of them are 0.
        """
        # YOUR CODE: ctx.saved_tensors has rows, weight and rstd; PROGRAMS says how many programs.
        raise NotImplementedError("the gradients of x, weight and eps")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` of x (..., C) and weight (C,), with gradients for both."""
    return RMSNorm.apply(x, weight, eps)
