"""Tensors amid memory that is watched, so that a kernel without a mask is caught in the act.

Around what a kernel may read stands NaN, and what it must write holds NaN before. Around that lies
a number that no kernel writes, which is looked at afterwards. So a mistake that would bring Python
down, or nothing at all, on another day, becomes a wrong element with a name.
"""

import math

import torch
from torch import Tensor

from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item

GUARD = 4096
"""Elements before and behind a tensor: more than a block of an exercise's kernels overshoots."""
_UNTOUCHED = -1776.5  # exact in every floating-point type
_NAN_TOLD = (
    "NaN stands beside the inputs, and in the output before your kernel runs: such an element was "
    "never written, or made of what is not the input's; or it is a 0 / 0 of the kernel's own"
)


def guarded(values: Tensor) -> Tensor:
    """The values with their strides, in memory of their own that holds NaN everywhere else."""
    memory = values.new_full((_extent(values) + 2 * GUARD,), math.nan)
    return memory.as_strided(values.shape, values.stride(), GUARD).copy_(values)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class Output:
    """A tensor that a kernel must fill, and nothing beside it."""

    def __init__(self, like: Tensor) -> None:
        """As `like`, strides included, full of NaN."""
        self._memory = like.new_full((_extent(like) + 2 * GUARD,), _UNTOUCHED)
        self.tensor = self._memory.as_strided(like.shape, like.stride(), GUARD).fill_(math.nan)

    def compare(self, expected: Tensor, *, what: str, limit: float) -> Item:
        """Whether the kernel wrote what was expected, and nothing beside it.

        Args:
            expected, what, limit: as for `first_difference`.
        """
        return self.beside(what) or with_nan_told(
            first_difference(self.tensor, expected, what=what, limit=limit), self.tensor
        )

    def beside(self, what: str) -> Item | None:
        """A red Item about `what` if memory that is not the tensor's was written."""
        rest = self._memory.clone()
        rest.as_strided(self.tensor.shape, self.tensor.stride(), GUARD).fill_(_UNTOUCHED)
        places = (rest != _UNTOUCHED).nonzero().flatten() - GUARD
        if not len(places):
            return None
        place, end = int(places[0]), _extent(self.tensor)
        if place < 0:
            where = f"{-place} elements before its first"
        elif place >= end:
            where = f"{place - end + 1} behind its last element"
        else:
            where = f"between its rows, {place} elements from its first"
        return Item(
            False,
            what,
            f"{len(places)} elements of memory beside the output were written, the first {where}: "
            "look at the store's mask, then at its pointers",
        )


def with_nan_told(item: Item, yours: object) -> Item:
    """A red Item about a tensor with NaN in it, with the reason that this usually has."""
    has_nan = isinstance(yours, Tensor) and bool(yours.isnan().any())
    return item if item.ok or not has_nan else Item(False, item.what, f"{item.why}\n{_NAN_TOLD}")


def device() -> torch.device:
    """Where the kernels run: the GPU, or Triton's interpreter."""
    from triton_launch import INTERPRETED

    return torch.device("cpu" if INTERPRETED else "cuda")
