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
    for name in ("shape", "dtype"):
        mine, right = getattr(yours, name), getattr(expected, name)
        if mine != right:
            shown = [str(tuple(v)) if name == "shape" else str(v) for v in (mine, right)]
            return Item(False, what, f"its {name} is {shown[0]}, expected {shown[1]}")
    a, b = yours.detach().cpu().double(), expected.detach().cpu().double()
    finite = b[b.isfinite()]
    scale = finite.square().mean().sqrt() if finite.numel() else b.new_zeros(())
    close = b.isfinite() & ((a - b).abs() <= limit * (b.abs() + scale))
    wrong = ~close & (a != b) & ~(a.isnan() & b.isnan())
    count = int(wrong.sum())
    return Item(True, what) if count == 0 else Item(False, what, _describe(a, b, wrong, count))


def _describe(yours: Tensor, expected: Tensor, wrong: Tensor, count: int) -> str:
    share = count / wrong.numel()
    first = tuple(int(i) for i in wrong.nonzero()[0])
    unfit = [
        f"{int(test.sum())} are {name}"
        for name, test in (("NaN", yours.isnan()), ("infinite", yours.isinf()))
        if test.any()
    ]
    lines = [
        f"{count:,} of {wrong.numel():,} elements are wrong ({share:.1%})"
        + (f"; {', '.join(unfit)}" if unfit else ""),
        f"first at {list(first)}:" if first else "",
    ]
    for name, tensor in (("yours", yours), ("expected", expected)):
        row = tensor[first[:-1]][first[-1] : first[-1] + _BESIDE] if first else tensor
        values = row.reshape(-1).tolist()
        lines.append(f"  {name:<9}" + " ".join(f"{v:11.5g}" for v in values))
    return "\n".join(line for line in lines if line)
