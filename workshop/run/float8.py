"""Linear layers in fp8: what `--precision fp8` adds to bf16's autocast.

A layer multiplies three times: y = x w', dx = dy w, dw = dy' x. Each factor is divided by a scale
that brings its amax, the largest absolute value, to the format's largest number, and rounded; the
product is multiplied by both scales. The scales are computed from the matrices as they are, on the
device:

    tensorwise  One scale for a matrix. x and w are rounded to e4m3 (3 stored bits of significand,
                up to 448), dy to e5m2 (2 bits, up to 57,344), whose range is wider.
    rowwise     One scale for each row of either factor, so that one large element costs its own row
                alone. Everything is e4m3. Each factor is rounded twice, since two products sum over
                different dimensions of it.

torchao has both. Weights, their gradients and the optimizer stay fp32; norms,
attention, the head and the loss are as in bf16.

Shapes in the comments:
    N tokens   I width of the input   O width of the output
"""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from workshop import versions
from workshop.run.flops import matmul_flops
from workshop.versions import Sizes

TENSORWISE, ROWWISE = "tensorwise", "rowwise"
TILE = 16
"""Divisor of a product's sizes: cuBLAS wants multiples of it."""


@dataclass(frozen=True)
class Scaled:
    """An fp8 matrix (rows, K) and what it has to be multiplied with: a scalar, or (rows, 1)."""

    values: Tensor
    scale: Tensor


def recipes(device: torch.device) -> tuple[str, ...]:
    """Those that the device has products for: tensorwise from Ada (8.9) on; both on Hopper (9.0)
    and the data centre's Blackwell (10.0), and on AMD's MI300 and MI350. On RTX Blackwell (12.0)
    PyTorch 2.10 has no rowwise ones."""
    if device.type != "cuda":
        return ()
    if torch.version.hip:
        return (TENSORWISE, ROWWISE) if _gfx(device).startswith(("gfx94", "gfx95")) else ()
    capability = torch.cuda.get_device_capability(device)
    if capability[0] in (9, 10):
        return TENSORWISE, ROWWISE
    return (TENSORWISE,) if capability >= (8, 9) else ()


def _gfx(device: torch.device) -> str:
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name


Formats = tuple[torch.dtype, torch.dtype]
"""For values and for gradients."""


def formats(device: torch.device, recipe: str) -> Formats:
    """The device's for a recipe. MI300 has other formats, without a negative zero."""
    if torch.version.hip and device.type == "cuda" and _gfx(device).startswith("gfx94"):
        values, wide = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    else:
        values, wide = torch.float8_e4m3fn, torch.float8_e5m2
    return values, wide if recipe == TENSORWISE else values


def quantise(x: Tensor, dtype: torch.dtype, recipe: str) -> Scaled:
    """A matrix (rows, K) in fp8. What is not finite stays so, as NaN."""
    rows = 1 if recipe == ROWWISE else None
    amax = torch.linalg.vector_norm(x, math.inf, rows, keepdim=rows is not None)
    # The smallest keeps a matrix of zeros from infinity.
    amax, largest = amax.float().clamp(min=1e-30), torch.finfo(dtype).max
    # Nothing is clipped: a product that was rounded up is far nearer to the format's largest
    # number than to the next one, which would be NaN.
    return Scaled((x.float() * (largest / amax)).to(dtype), amax / largest)


def round_both_ways(
    x: Tensor, dtype: torch.dtype, by_row: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix and its transpose in fp8: the values and the scale of one, then of the other.

    Args:
        amax: x's, if it is known; not used here, but by V3's kernels.
    """
    recipe = ROWWISE if by_row else TENSORWISE
    q = quantise(x, dtype, recipe)
    turned = quantise(x.t(), dtype, recipe) if by_row else Scaled(q.values.t(), q.scale)
    return q.values, q.scale, turned.values, turned.scale


BothWays = Callable[
    [Tensor, torch.dtype, bool, Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor]
]
"""`round_both_ways`, or V3's kernels for it."""


def product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """a b', (rows of a, rows of b), in `dtype`.

    Args:
        fast: Hopper's matrix units sum in fewer bits than fp32 has; their sums are added up in fp32
            at the end of the product instead of every few steps. Good enough for outputs, not for
            gradients. Rowwise products are fast always: PyTorch's others are slow.
    """
    by_row = a.scale.dim() > 0
    out: Tensor = torch._scaled_mm(
        a.values.contiguous(),
        b.values.contiguous().t(),  # both factors lie with K inside, all that Hopper reads
        scale_a=a.scale,
        scale_b=b.scale.t() if by_row else b.scale,
        out_dtype=torch.bfloat16 if by_row else dtype,  # all that rowwise products write
        use_fast_accum=fast or by_row,
    )
    # Not `to` alone: it may return `out` itself, and PyTorch 2.11's compiler gives zero gradients
    # where the last operation of a forward pass returns its own input (pytorch/pytorch#180642).
    return out if out.dtype == dtype else out.to(dtype)


def product_forward(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    recipe: str,
    types: Formats,
    both_ways: BothWays = round_both_ways,
    x_amax: Tensor | None = None,
) -> Tensor:
    """x w', of x (N, I) in bf16 and w (O, I) in fp32; sizes are multiples of TILE."""
    ctx.dtypes, by_row = (x.dtype, weight.dtype), recipe == ROWWISE
    values, gradients = types
    ctx.both_ways, ctx.rounding = both_ways, (gradients, by_row)
    *qx, x_t, x_t_scale = both_ways(x, values, by_row, x_amax)
    *qw, w_t, w_t_scale = both_ways(weight, values, by_row, None)
    ctx.save_for_backward(x_t, x_t_scale, w_t, w_t_scale)
    return product(Scaled(*qx), Scaled(*qw), x.dtype, fast=True)


def product_backward(ctx: Any, dy: Tensor, dy_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
    dtype, weight_dtype = ctx.dtypes
    qdy, scale, dy_t, dy_t_scale = ctx.both_ways(dy, *ctx.rounding, dy_amax)
    dx = product(Scaled(qdy, scale), Scaled(w_t, w_t_scale), dtype, fast=False)
    dy_t, x_t = Scaled(dy_t, dy_t_scale), Scaled(x_t, x_t_scale)
    return dx, product(dy_t, x_t, weight_dtype, fast=False)


class Float8Product(torch.autograd.Function):
    """`product_forward` with its gradients."""

    forward = staticmethod(product_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *product_backward(ctx, dy, None), None, None, None, None


def float8_linear(
    x: Tensor,
    weight: Tensor,
    recipe: str,
    types: Formats,
    both_ways: BothWays = round_both_ways,
    x_amax: Tensor | None = None,
) -> Tensor:
    """x weight' by products of fp8 matrices, forward and backward.

    Args:
        x: (..., I). weight: (O, I); its gradient has its dtype.
        recipe: TENSORWISE or ROWWISE. types: as `formats` gives them.
        both_ways: rounds the factors. x_amax: x's, if it is known.

    Returns:
        (..., O), in autocast's dtype, or x's.
    """
    rows, padded = padded_factors(x, weight)
    y: Tensor = Float8Product.apply(rows, padded, recipe, types, both_ways, x_amax)
    return unpadded(y, x, weight)


def padded_factors(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., I) as a matrix in autocast's dtype, or its own, and the weight (O, I); zeros are
    added to both, up to multiples of TILE."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _padded(x.reshape(-1, x.shape[-1]).to(dtype)), _padded(weight)


def _padded(x: Tensor) -> Tensor:
    rows, columns = (-size % TILE for size in x.shape)
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def unpadded(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The product of `padded_factors` as (..., O)."""
    rows = x.numel() // x.shape[-1]
    return y[:rows, : weight.shape[0]].reshape(*x.shape[:-1], weight.shape[0])


# --- whole models --------------------------------------------------------------------------------


class Float8Linear(nn.Linear):
    """A linear layer without bias, as `float8_linear`."""

    recipe: str
    types: Formats

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.recipe, self.types)


def convert(model: nn.Module, recipe: str) -> None:
    """Turns the linear layers of a model's blocks into fp8 ones, in place; again it does nothing.
    The head, whose weight is the embedding's, stays: it belongs to the loss.

    A class of models that does it another way has a method `to_float8(recipe)`, as the peer has, or
    a file of that name beside its own: V3's operators, which multiply, are replaced by
    tiny_llama_v3_float8.py.
    """
    # Here, since the compiler does not see into what asks for the device.
    types = formats(next(model.parameters()).device, recipe)
    if hasattr(model, "to_float8"):
        model.to_float8(recipe)  # type: ignore[operator]
        return
    for kind in type(model).__mro__:
        file = Path(getattr(sys.modules[kind.__module__], "__file__", None) or __file__)
        beside = file.with_name(f"{file.stem}_float8.py")
        if beside.is_file():
            versions.load_file(beside).to_float8(model, recipe, types)
            return
    tied = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in model.modules():
        if isinstance(part, nn.Linear) and id(part.weight) not in tied:
            part.__class__ = Float8Linear
            assert isinstance(part, Float8Linear)
            part.recipe, part.types = recipe, types


class _Operations(TorchDispatchMode):
    """Counts those of fp8 products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {*types} <= {Tensor, nn.Parameter}:
            return NotImplemented  # torchao's tensors: the products that they launch will come by
        if func is torch.ops.aten._scaled_mm.default:
            self.total += 2 * args[0].shape[0] * args[1].numel()
        return func(*args, **(kwargs or {}))


def share_in_float8(
    model: nn.Module, config: Sizes, autocast: AbstractContextManager[None]
) -> float:
    """Share of the products of the blocks' linear layers, forward and backward, that runs in fp8:
    1 if all do, more where sizes are padded. It trains nothing, but runs a few tokens through the
    model, operation by operation."""
    tokens = torch.zeros(TILE, 2, dtype=torch.int64, device=next(model.parameters()).device)
    with _Operations() as counted, torch.compiler.set_stance("force_eager"):
        with autocast:
            loss = model(tokens, tokens)
        loss.backward()
    model.zero_grad(set_to_none=True)
    head = 2.0 * tokens.numel() * config.vocab_size * config.hidden_dim
    return counted.total / (3 * (matmul_flops(config, tokens.numel()) - head))
