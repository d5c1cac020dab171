"""One call of an operation: its arguments, drawn from a seed, and what it gives.

The judge and the implementations' process draw the same numbers from one seed on one device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workshop.gate.audit import sketch
from workshop.kernels.cases import (
    BACKWARD,
    FORWARD,
    HEADS,
    NORMAL,
    WEIGHT,
    Case,
    Drawn,
    Function,
    Tensors,
)
from workshop.run.precision import Precision

GRADIENT = "gradient of "  # and the argument's name
NO_GRAPH = "no graph can be captured"

Outcome = dict[str, Tensor | None]
"""Results and gradients by name; None for what is missing or has another shape."""


@dataclass(frozen=True)
class Setting:
    """The device and precision of all cases. `stream` is the current one, on a GPU."""

    device: torch.device
    precision: Precision
    stream: torch.cuda.Stream | None = None


@dataclass(frozen=True)
class Data:
    """A case's arguments and the gradients of its results that come from upstream."""

    arguments: Tensors
    upstream: Tensors

    @property
    def tensors(self) -> Tensors:
        return (*self.arguments, *self.upstream)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Data":
        """Another tensor in the place of each; those that have a gradient keep one."""
        arguments, upstream = (
            tuple(change(x.detach()).requires_grad_(x.requires_grad) for x in tensors)
            for tensors in (self.arguments, self.upstream)
        )
        return Data(arguments, upstream)

    def fresh(self) -> "Data":
        """A copy, gaps between numbers left out: some implementations overwrite their arguments."""
        return self.changed(torch.clone)

    def fill(self, original: "Data", index: int = 0) -> None:
        """Copies values, unseen by autograd, which would forbid a second backward pass. Those that
        have a gradient, and the upstream's, are moved on by `index` places: the calls of a run have
        different arguments."""
        wants = (*(tensor.requires_grad for tensor in self.arguments), *[True] * len(self.upstream))
        for tensor, source, moves in zip(self.tensors, original.tensors, wants, strict=True):
            tensor.data.copy_(source.data.roll(index) if moves and index else source.data)


def draw_data(case: Case, setting: Setting, seed: int) -> Data:
    """Random arguments and upstream gradients, those of heads laid out as the model has them."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    how = setting.device, setting.precision.dtype, generator
    arguments = tuple(
        one.draw(*how).requires_grad_(one.differentiable) for one in case.arguments.values()
    )
    results = as_tuple(case.plain(*(tensor.detach().to("meta") for tensor in arguments)))
    kinds = {4: HEADS, 0: WEIGHT}
    upstream = (
        Drawn(kinds.get(like.dim(), NORMAL), tuple(like.shape), case.upstream_scale).draw(*how)
        for like in results
    )
    return Data(arguments, tuple(upstream))


# How the arguments and upstream gradients of a check lie in memory.
AS_DRAWN, ROWS_APART = "as in a model", "NaN between the rows"
TRANSPOSED, EXPANDED = "columns contiguous", "gradients of y.sum()"
LAYOUTS = (AS_DRAWN, ROWS_APART, TRANSPOSED, EXPANDED)
_GAP = 8


def lay_out(data: Data, layout: str) -> Data:
    """The same numbers with other strides. EXPANDED has other upstream gradients instead, all the
    same number, with strides of zero."""
    if layout == AS_DRAWN:
        return data
    if layout == EXPANDED:
        alike = (x.flatten()[:1].view([1] * x.dim()).expand(x.shape) for x in data.upstream)
        return Data(data.arguments, tuple(alike))
    return data.changed(_apart if layout == ROWS_APART else _transposed)


def _apart(x: Tensor) -> Tensor:
    if x.dim() < 2 or not x.is_floating_point():
        return x
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + _GAP), torch.nan)
    return wide[..., : x.shape[-1]].copy_(x)


def _transposed(x: Tensor) -> Tensor:
    """Columns in a row's place; of heads, whose numbers are always neighbours, a head's tokens."""
    if x.dim() < 2:
        return x
    return x.contiguous() if x.dim() == 4 else x.mT.contiguous().mT


def as_tuple(results: Tensor | Tensors) -> Tensors:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def gradients(results: Tensors, data: Data, *, retain_graph: bool) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted; None where the backward pass does not reach an argument."""
    wanted = [tensor for tensor in data.arguments if tensor.requires_grad]
    reached = [
        (result, upstream.to(result.dtype))
        for result, upstream in zip(results, data.upstream, strict=True)
        if result.requires_grad
    ]
    if not reached:
        return (None,) * len(wanted)
    outputs, upstreams = zip(*reached, strict=True)
    return torch.autograd.grad(
        outputs, wanted, upstreams, retain_graph=retain_graph, allow_unused=True
    )


def names(case: Case, phase: str) -> tuple[str, ...]:
    """The names of what a phase gives: results, gradients or both."""
    wanted = tuple(GRADIENT + name for name in case.differentiable)
    return {FORWARD: case.results, BACKWARD: wanted}.get(phase, (*case.results, *wanted))


def outcome(case: Case, function: Function, data: Data) -> Outcome:
    """Results and gradients of a call."""
    results = as_tuple(function(*data.arguments))
    if [result.shape for result in results] != [upstream.shape for upstream in data.upstream]:
        return dict.fromkeys(names(case, ""))
    found = gradients(results, data, retain_graph=False)
    return dict(zip(names(case, ""), (*results, *found), strict=True))


def sketches(found: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """A sketch of each tensor that is there: (BUCKETS,), fp64."""
    return {name: sketch(one, name, seed) for name, one in found.items() if one is not None}
