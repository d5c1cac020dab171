"""The matrix products around the kernels: the vendor's library, and no cast more than needed.

There is no kernel here. PyTorch's own linear layer under autocast leaves the weight's gradient in
16 bits and copies it to fp32 in a second pass; the library can leave it in fp32 at once, as it
sums it in fp32 anyway.

Shapes in the comments:
    N tokens   I width of the input   O width of the output
"""

from dataclasses import dataclass

from triton_launch import autocast_dtype, check, check_shape, first_order, state_of

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class _Kept:
    """A weight's rounded copy, once there is one, and of what."""

    copy: Tensor | None = None
    state: tuple[object, ...] = ()


_kept = WeakTensorKeyDictionary()
"""Copies of weights whose optimizer renews them."""


def has_wide_products() -> bool:
    """Whether PyTorch can leave a product of 16-bit matrices in fp32: from 2.8 on, and not with
    ROCm, where 2.8 and 2.9 have the function and refuse the call."""
    return hasattr(torch.ops.aten.mm, "dtype_out") and torch.version.hip is None


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy' x, (O, I), of dy (..., O) and x (..., I), summed in fp32 and left in `dtype`."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if dtype == torch.float32 != x.dtype and x.is_cuda and has_wide_products():
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return (dy.t() @ x).to(dtype)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`.

    Of a weight that V3's optimizer updates the copy is kept, and taken again when the weight has
    changed otherwise; the optimizer writes the copy anew (triton_adamw.py). Two things are not
    seen: what is written through `weight.data`, and, by a captured step, what changes a weight
    between its replays. Then capture again.
    """
    if weight.dtype == dtype:
        return weight
    kept = None
    # A copy that is made in inference mode can't be trained with later.
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        kept = _kept.get(weight)
    if kept is None:
        return weight.to(dtype)
    if kept.copy is None or kept.copy.dtype != dtype or kept.state != state_of(weight):
        kept.copy, kept.state = weight.detach().to(dtype), state_of(weight)
    return kept.copy


def keep_rounded(weight: Tensor) -> None:
    """From now on `rounded` keeps this weight's copy: the caller renews it."""
    _kept.setdefault(weight, _Kept())


def rounded_copy(weight: Tensor) -> Tensor | None:
    """The copy that `rounded` made, if the weight has one and has not changed since."""
    kept = _kept.get(weight)
    return kept.copy if kept is not None and kept.state == state_of(weight) else None


def renew_rounded(weight: Tensor) -> None:
    """Notes that the copy has just been written with what the weight is now. A product that was
    computed with the old one, and whose backward pass is yet to come, will say so."""
    kept = _kept[weight]
    torch.autograd.graph.increment_version(kept.copy)
    kept.state = state_of(weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        x, weight = x.to(dtype), rounded(weight, dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dx = (dy @ weight).to(x_dtype) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(dy, x, weight_dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x weight', as `F.linear`; the weight's gradient leaves the product in the weight's dtype.

    Args:
        x: (..., I). weight: (O, I). Under autocast the products are computed in its dtype, else
            in x's.

    Returns:
        (..., O), in the products' dtype.

    Products: 2 N I O operations forward, 4 N I O backward. Bytes: under autocast 4 I O less than
    with `F.linear`, whose gradient of the weight is written and read in 16 bits in between.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit.
    """
    check("linear", x=x, weight=weight)
    check_shape("linear", "weight", weight, "O", x.shape[-1])
    return _Linear.apply(x, weight, autocast_dtype(x))


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`linear`, plainly."""
    return x @ weight.t()
