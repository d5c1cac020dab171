"""A participant's tensor against the expected one: the first element that is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workshop.exercises.frame import Item

if TYPE_CHECKING:
    from torch import Tensor

_BESIDE = 4
"""Elements that are shown, from the first wrong one on."""


def first_difference(yours: object, expected: Tensor, *, what: str, limit: float) -> Item:
    """Whether a tensor is the expected one, up to rounding; if not, where it first differs.

    An element is wrong if it is further from the expected one than `limit` times the sum of that
    one's size and of all expected elements' root mean square: those near zero need no
    more digits than the others.

    Args:
        yours: the participant's tensor, or anything else, such as None.
        expected: any shape, any floating or integer type.
        what: what it is, as the Item names it: "the gradient of x, shape (5, 63)".
        limit: such as 1e-5 for fp32.
    """
    import torch

    if not isinstance(yours, torch.Tensor):
        found = "nothing (None)" if yours is None else f"a {type(yours).__name__}"
        return Item(False, what, f"yours is {found}, expected a tensor")
    if yours.shape != expected.shape:
        why = f"its shape is {tuple(yours.shape)}, expected {tuple(expected.shape)}"
        return Item(False, what, why)
    if yours.dtype != expected.dtype:
        return Item(False, what, f"its dtype is {yours.dtype}, expected {expected.dtype}")
    a, b = yours.detach().cpu().double(), expected.detach().cpu().double()
    finite = b[b.isfinite()]
    scale = finite.square().mean().sqrt() if finite.numel() else b.new_zeros(())
    close = b.isfinite() & ((a - b).abs() <= limit * (b.abs() + scale))
    wrong = ~close & (a != b) & ~(a.isnan() & b.isnan())
    return Item(False, what, _describe(a, b, wrong)) if wrong.any() else Item(True, what)


def _describe(yours: Tensor, expected: Tensor, wrong: Tensor) -> str:
    count = int(wrong.sum())
    text = f"{count:,} of {wrong.numel():,} elements are wrong ({count / wrong.numel():.1%})"
    for name, test in (("NaN", yours.isnan()), ("infinite", yours.isinf())):
        if test.any():
            text += f"; {int(test.sum())} are {name}"
    lines = [text]
    first = tuple(int(i) for i in wrong.nonzero()[0])
    if first:
        lines.append(f"first at {list(first)}:")
    for name, tensor in (("yours", yours), ("expected", expected)):
        row = tensor[first[:-1]][first[-1] : first[-1] + _BESIDE] if first else tensor
        values = row.reshape(-1).tolist()
        lines.append(f"  {name:<9}" + " ".join(f"{v:11.5g}" for v in values))
    return "\n".join(lines)
