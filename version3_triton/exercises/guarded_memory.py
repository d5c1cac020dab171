"""Tensors amid memory that is watched, so that a kernel without a mask is caught in the act.

Around what a kernel may read is NaN, and what it must write holds NaN before. Around that is
a number that no kernel writes, which is looked at afterwards. In Triton's interpreter the loads are
watched, too. So a mistake that would bring Python down, or nothing at all, on another day, becomes
a wrong element with a name.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from triton_launch import INTERPRETED

import torch
from torch import Tensor

from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work
from workshop.kernels import launches

GUARD = 4096
"""Elements before and behind a tensor: more than a block of an exercise's kernels overshoots."""
_UNTOUCHED = -1776.5  # exact in every floating-point type
_NAN_MEANS = (
    "NaN is beside the inputs, and in the output before your kernel runs: such an element was "
    "never written, or made of what is not the input's; or it is a 0 / 0 of the kernel's own"
)


def guarded(values: Tensor) -> Tensor:
    """The values with their strides, in separate memory that holds NaN everywhere else."""
    memory = values.new_full((_extent(values) + 2 * GUARD,), math.nan)
    return memory.as_strided(values.shape, values.stride(), GUARD).copy_(values)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def watched_loads(*inputs: Tensor) -> Iterator[list[str]]:
    """Gives a list that gets a sentence for each load of what is not an input's, also where its
    number is never used. Of a kernel in Triton's interpreter: a compiled one's loads are not seen.

    Args:
        inputs: of `guarded`.
    """
    from triton.runtime import interpreter

    outside: list[str] = []
    triton, load = interpreter._interpreter, interpreter._interpreter.load

    def watched(pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = torch.from_numpy(pointers[mask.astype(bool)].astype("int64"))
        outside.extend(sentence for x in inputs if (sentence := _beside_input(x, loaded)))
        return load(pointers, mask, *rest)

    triton.load = watched
    try:
        yield outside
    finally:
        triton.load = load


@contextmanager
def watched_launches(mine: ModuleType) -> Iterator[set[str]]:
    """Gives a set that gets the name of each kernel of a module that is launched."""
    launched: set[str] = set()

    def see(kernel: Any, grid: Any) -> None:
        function = kernel
        while hasattr(function, "fn"):  # an autotuned kernel holds the kernel, which holds it
            function = function.fn
        if function.__globals__ is vars(mine):
            launched.add(function.__name__)

    with launches.watched(see):
        yield launched


def _beside_input(tensor: Tensor, addresses: Tensor) -> str:
    """Words for the addresses that are in a tensor's memory and not the tensor's."""
    beside = torch.ones(_extent(tensor) + 2 * GUARD, dtype=torch.bool)
    beside.as_strided(tensor.shape, tensor.stride(), GUARD).fill_(False)
    places = (addresses - tensor.data_ptr()) // tensor.element_size() + GUARD
    places = places[(places >= 0) & (places < len(beside))]
    return _words(places[beside[places]] - GUARD, tensor, "an input were loaded", "load")


def _words(places: Tensor, tensor: Tensor, what: str, access: str) -> str:
    """A sentence on elements of the memory around a tensor, counted from its first; "" for none."""
    if not len(places):
        return ""
    first = int(places[0])
    if first < 0:
        where = f"{-first} elements before its first"
    elif first >= _extent(tensor):
        where = f"{first - _extent(tensor) + 1} behind its last element"
    else:
        where = f"between its rows, {first} elements from its first"
    return (
        f"{len(places)} elements of memory beside {what}, the first {where}: look at the "
        f"{access}'s mask, then at its pointers"
    )


class Output:
    """A tensor that a kernel must fill, without writing outside."""

    def __init__(self, like: Tensor) -> None:
        """As `like`, strides included, full of NaN."""
        self._memory = like.new_full((_extent(like) + 2 * GUARD,), _UNTOUCHED)
        self.tensor = self._memory.as_strided(like.shape, like.stride(), GUARD).fill_(math.nan)

    def compare(self, expected: Tensor, *, what: str, limit: float) -> Item:
        """Whether the kernel wrote what was expected, and nothing outside.

        Args:
            expected, what, limit: as for `first_difference`.
        """
        return self.beside(what) or nan_explained(
            first_difference(self.tensor, expected, what=what, limit=limit), self.tensor
        )

    def beside(self, what: str) -> Item | None:
        """A red Item about `what` if memory that is not the tensor's was written."""
        rest = self._memory.clone()
        rest.as_strided(self.tensor.shape, self.tensor.stride(), GUARD).fill_(_UNTOUCHED)
        places = (rest != _UNTOUCHED).nonzero().flatten() - GUARD
        why = _words(places, self.tensor, "the output were written", "store")
        return Item(False, what, why) if why else None


def nan_explained(item: Item, yours: object) -> Item:
    """A red Item about a tensor with NaN in it, with the reason that this usually has."""
    has_nan = isinstance(yours, Tensor) and bool(yours.isnan().any())
    return item if item.ok or not has_nan else Item(False, item.what, f"{item.why}\n{_NAN_MEANS}")


# --- what the checks of kernels begin with -------------------------------------------------------


def imported(work: Work) -> Item:
    """An Item about mine.py, if it can be imported."""
    torch.manual_seed(0)
    where = "run in Triton's interpreter" if INTERPRETED else "are compiled for this GPU"
    return Item(bool(work.module), f"mine.py can be imported; its kernels {where}")


def device() -> torch.device:
    """Where the kernels run: the GPU, or Triton's interpreter."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def to_the_first_red(items: Iterable[Item]) -> Iterator[Item]:
    """The cases of a kernel up to the first that fails: later ones would show the same mistake."""
    for item in items:
        yield item
        if not item.ok:
            return
