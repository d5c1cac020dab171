"""PyTorch's operators: which are known, what one call moves and computes, whether it is right.

Bytes are counted from the shapes, each tensor once: what is read and what is written. `add` of two
tensors of n elements reads 2n and writes n; in place it moves as much. A tensor that is broadcast
counts with its own size. A comparison writes one byte an element, a reduction one element. A
sparse `add_` reads indices (8 bytes) and values, and reads and writes a row for each index.
Operations: one an element, two for `norm`, three for `std` and `var`, 2 n k m for a product.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workshop.errors import WorkshopError

DEFAULT_DIM = "64-1024-1024"
SEED = 42

UNARY, BINARY, REDUCTION, SPARSE = "unary", "binary", "reduction", "sparse"
COPY, MATRIX = "copy", "matrix"
KINDS = (UNARY, BINARY, REDUCTION, SPARSE, COPY, MATRIX)

NORMAL, POSITIVE, INTEGERS, FACTORS = "normal", "positive", "integers", "factors"
"""Values that an operator is tried on: so that a wrong one shows, and rounding does not."""


@dataclass(frozen=True)
class Op:
    """A method of torch.Tensor."""

    kind: str
    values: str = NORMAL
    operations: int = 1
    """For each element of the result, or of what is reduced."""


OPS = {
    # The predefined ones, in the order in which they run.
    **dict.fromkeys(("add", "mul"), Op(BINARY)),
    "div": Op(BINARY, POSITIVE),
    "sub": Op(BINARY),
    "eq": Op(BINARY, INTEGERS),
    "exp": Op(UNARY),
    "relu": Op(UNARY),
    "tanh": Op(UNARY),
    "sqrt": Op(UNARY, POSITIVE),
    "sum": Op(REDUCTION, POSITIVE),
    "prod": Op(REDUCTION, FACTORS),
    "norm": Op(REDUCTION, POSITIVE, 2),
    "max": Op(REDUCTION),
    "mean": Op(REDUCTION, POSITIVE),
    **dict.fromkeys(("std", "var"), Op(REDUCTION, POSITIVE, 3)),
    **dict.fromkeys(("argmax", "argmin"), Op(REDUCTION)),
    # By name only.
    **dict.fromkeys(("maximum", "minimum"), Op(BINARY)),
    **dict.fromkeys(("ne", "lt", "gt"), Op(BINARY, INTEGERS)),
    **dict.fromkeys(("abs", "neg", "sigmoid", "erf"), Op(UNARY)),
    **dict.fromkeys(("log2", "rsqrt", "reciprocal"), Op(UNARY, POSITIVE)),
    **dict.fromkeys(("min", "amax", "amin"), Op(REDUCTION)),
    **dict.fromkeys(("clone", "copy"), Op(COPY, operations=0)),
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm"), Op(MATRIX)),
}
PREDEFINED = tuple(OPS)[:18]
ONLY_INPLACE = ("copy",)
WITH_BIAS = ("addmm", "baddbmm")
"""Add a vector of the product's last size: the fused bias of a linear layer."""

# Calls of BERT and DLRM, with their sizes.
_TOKENS = ("32-128-1024", "64-128-1024", "4-512-1024", "8-512-1024")
_SCORES = {
    "32-16-128-128": "32-1-1-128",
    "64-16-128-128": "64-1-1-128",
    "4-16-512-512": "4-1-1-512",
    "8-16-512-512": "8-1-1-512",
}
"""Attention scores, and the mask that is added to them."""
_WEIGHTS = (
    "512-13", "512-512", "256-512", "256-256", "128-256", "128-128", "1024-480", "1024-1024",
    "512-1024", "1-256", "1",
)  # fmt: skip
MODEL_OPS: tuple[tuple[str, str | None, str, str | None], ...] = (
    *(
        pair
        for tokens, (scores, mask) in zip(_TOKENS, _SCORES.items(), strict=True)
        for pair in (("add", None, tokens, tokens), ("add", None, scores, mask))
    ),
    *(("add_", None, tokens, "1024") for tokens in _TOKENS),
    *(("add_", None, weight, weight) for weight in _WEIGHTS),
    *(("div", None, scores, "1") for scores in _SCORES),
    *(("sum", None, tokens, None) for tokens in _TOKENS),
    ("add_", SPARSE, "32709138-128", "851968"),
    *(("relu_", None, f"32768-{width}", None) for width in (512, 256, 128, 1024)),
)
"""Name, type (None: the operator's own), dimensions of both inputs."""


# --- what runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator at one size. `dims` are the shapes of what it is called with; for a sparse one
    the table's and (rows that are added, width)."""

    name: str
    inplace: bool
    sparse: bool
    dims: tuple[tuple[int, ...], ...]

    @property
    def op(self) -> Op:
        return OPS[self.name]

    @property
    def method(self) -> str:
        return self.name + "_" * self.inplace

    @property
    def shapes(self) -> str:
        return ", ".join("-".join(map(str, dim)) for dim in self.dims)

    @property
    def is_product(self) -> bool:
        return self.op.kind == MATRIX

    @property
    def in_whole(self) -> bool:
        """Whether the check takes all elements in fp64 at once."""
        return self.sparse or self.op.kind in (MATRIX, REDUCTION)


def make_case(
    op: str, op_type: str | None, dim1: str, dim2: str | None, *, inplace: bool = False
) -> Case:
    """Raises WorkshopError for an unknown operator, a type that is not its own, or dimensions that
    do not fit."""
    name = op.removesuffix("_")
    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, n=3) or OPS
        raise WorkshopError(f"--op {op}: not known; did you mean {' or '.join(near)}?")
    own = OPS[name].kind
    sparse = op_type == SPARSE
    if op_type not in (None, own) and not (sparse and name == "add"):
        raise WorkshopError(f"--op-type {op_type}: {name} is {own}; only add may be sparse")
    inplace = inplace or op.endswith("_") or sparse or name in ONLY_INPLACE
    if inplace and not has_inplace(name):
        raise WorkshopError(f"--op {op}: {name} has no in-place form; leave out --inplace and _")
    first = _parse_dim(dim1, "--input1-dim")
    if sparse:
        rows = _parse_dim(dim2 or dim1, "--input2-dim")
        if len(first) != 2 or len(rows) != 1:
            raise WorkshopError("--op-type sparse: give ROWS-WIDTH as --input1-dim, and the number "
                                "of rows that are added as --input2-dim")  # fmt: skip
        dims: tuple[tuple[int, ...], ...] = (first, (*rows, first[1]))
    elif own in (BINARY, MATRIX) or name == "copy":
        dims = (first, _parse_dim(dim2 or dim1, "--input2-dim"))
        dims = ((dims[1][-1],), *dims) if name in WITH_BIAS else dims
    else:
        dims = (first,)
    case = Case(name, inplace, sparse, dims)
    try:
        result_like(case, torch.float32)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WorkshopError(f"{case.method}({case.shapes}): {reason}") from None
    return case


def has_inplace(name: str) -> bool:
    return hasattr(Tensor, f"{name}_")


def _parse_dim(text: str, flag: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,11}(-[1-9]\d{0,11})*", text):
        raise WorkshopError(f"{flag} {text!r}: sizes of 1 or more with - between them, as in "
                            f"{DEFAULT_DIM}")  # fmt: skip
    return tuple(map(int, text.split("-")))


def result_like(case: Case, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, of the result's shape and type; RuntimeError if nothing fits."""
    inputs = [torch.empty(dim, dtype=dtype, device="meta") for dim in case.dims]
    return inputs[0] if case.sparse else find_function(case)(*inputs)


def find_function(case: Case) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(Tensor, case.method)
    return function


# --- counting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amounts:
    """Bytes and operations of one call."""

    read: int
    """Bytes."""
    written: int
    """Bytes."""
    operations: int

    @property
    def moved(self) -> int:
        return self.read + self.written

    def must_cross(self, cache: int) -> int:
        """Bytes that memory has moved when the clock stops; of a result the rest may be cached."""
        return max(self.read, self.moved - cache)


def count_amounts(case: Case, dtype: torch.dtype) -> Amounts:
    size = dtype.itemsize
    elements = [math.prod(dim) for dim in case.dims]
    if case.sparse:
        indices, added = 8 * case.dims[1][0], elements[1]
        return Amounts(indices + 2 * added * size, added * size, added)
    result = result_like(case, dtype)
    written = result.numel() * result.element_size()
    if case.name == "copy":
        return Amounts(elements[1] * size, written, 0)
    read = sum(elements) * size
    if case.is_product:
        bias = result.numel() if case.name in WITH_BIAS else 0
        return Amounts(read, written, 2 * result.numel() * case.dims[-2][-1] + bias)
    each = elements[0] if case.op.kind == REDUCTION else result.numel()
    return Amounts(read, written, each * case.op.operations)


# --- the check -----------------------------------------------------------------------------------

PART = 2**24
"""Elements that are compared at a time: fp64 takes several times the memory of what is tested."""
FUNCTION_ROUNDINGS = 8.0
"""Tolerance of a function of one element: four units in the last place."""
PRODUCT_ROUNDINGS = 16.0
"""Tolerance for a product's typical element: its largest have five times that size, and partial
sums may be rounded as well."""
SUM_ROUNDINGS = 8.0
"""Roundings of fp32, for each of the log2(n) levels at which a tree adds n numbers."""


def draw(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The arguments, random but the same in every run."""
    generator = torch.Generator(device).manual_seed(SEED)
    options = {"dtype": dtype, "device": device}
    values = POSITIVE if case.sparse else case.op.values  # whose sums cancel nothing
    tensors = [_draw(dim, values, options, generator) for dim in case.dims]
    if case.sparse:
        rows, added = case.dims[0][0], case.dims[1][0]
        at = torch.randint(rows, (1, added), device=device, generator=generator)
        tensors[1] = torch.sparse_coo_tensor(at, tensors[1], case.dims[0], check_invariants=False)
    return tensors


def _draw(
    dim: tuple[int, ...], values: str, options: dict[str, Any], generator: torch.Generator
) -> Tensor:
    """`options`: dtype and device."""
    if values == INTEGERS:  # of which a fifth are equal
        return torch.randint(-2, 3, dim, generator=generator, **options)
    if values == FACTORS:  # ones, and few others: a product that neither overflows nor vanishes
        factors = torch.ones(dim, **options).view(-1)
        few = torch.randint(factors.numel(), (16,), device=factors.device, generator=generator)
        factors[few] = 0.5 + 1.5 * torch.rand(16, generator=generator, **options)
        return factors.view(dim)
    drawn = torch.randn(dim, generator=generator, **options)
    return drawn.abs_().add_(0.5) if values == POSITIVE else drawn


def allowed_roundings(case: Case, dtype: torch.dtype, roundoff: float) -> float:
    """How far a result may be from fp64's, in roundings of one number of its type. Sums are taken
    in fp32 or better, whatever the type."""
    of_fp32 = 2.0**-24 / roundoff
    if case.is_product:
        return PRODUCT_ROUNDINGS + 4 * math.sqrt(case.dims[-2][-1]) * of_fp32
    if case.op.kind == REDUCTION:
        levels = math.log2(max(2, math.prod(case.dims[0])))
        return FUNCTION_ROUNDINGS + SUM_ROUNDINGS * levels * of_fp32
    return FUNCTION_ROUNDINGS


def error_roundings(case: Case, inputs: list[Tensor], result: Tensor, roundoff: float) -> float:
    """The largest distance from fp64's result, in roundings of the true number (a product: of its
    typical element); infinite for a result of another shape."""
    if result.shape != result_like(case, inputs[0].dtype).shape:
        return math.inf
    if case.sparse:
        return _error_of_sparse(inputs, result, roundoff)
    if case.name in ("argmax", "argmin"):  # of equal elements any
        found = inputs[0].view(-1)[result.clamp(0, inputs[0].numel() - 1)]
        return _roundings(found, getattr(torch, case.name[3:])(inputs[0].double()), roundoff)
    if case.in_whole:
        true = _truth(case, inputs)
        scale = true.square().mean().sqrt() if case.is_product else None
        return _roundings(result, true, roundoff, scale)
    shaped = [tensor.broadcast_to(result.shape) for tensor in inputs]
    return max(
        _roundings(found, _truth(case, own), roundoff) for found, *own in _in_parts(result, *shaped)
    )


def _truth(case: Case, inputs: Iterable[Tensor]) -> Tensor:
    doubles = [tensor.double() for tensor in inputs]
    if case.name == "copy":
        return doubles[1]
    true: Tensor = getattr(torch, case.name)(*doubles)
    return true.double()  # of a comparison too


def _in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, along their first dimension."""
    shape = tensors[0].shape
    if not shape:
        return iter([tensors])
    parts = min(shape[0], math.ceil(tensors[0].numel() / PART))
    return zip(*(tensor.tensor_split(parts) for tensor in tensors), strict=True)


def _roundings(found: Tensor, true: Tensor, roundoff: float, scale: Tensor | None = None) -> float:
    """|found - true| in units of roundoff x scale (default: |true|), at its largest. A number too
    small for the type's full precision may be off by its last place."""
    limits = torch.finfo(found.dtype if found.is_floating_point() else torch.float32)
    unit = (true.abs() if scale is None else scale) * roundoff + limits.tiny * limits.eps
    worst = float(((found.double() - true).abs() / unit).max())
    return math.inf if math.isnan(worst) else worst


def _error_of_sparse(inputs: list[Tensor], result: Tensor, roundoff: float) -> float:
    """Error of the rows that were added to; infinite if another one changed."""
    table, added = inputs
    rows, which = added._indices()[0].unique(return_inverse=True)
    true = table[rows].double().index_add_(0, which, added._values().double())
    parts = [(now != before).any(1) for now, before in _in_parts(result, table)]
    changed = torch.cat(parts)
    changed[rows] = False
    return math.inf if changed.any() else _roundings(result[rows], true, roundoff)
