"""RMSNorm's backward pass against fp64, as close as plain PyTorch is at the same precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from version3_triton.exercises.guarded_memory import (
    Output,
    device,
    guarded,
    imported,
    nan_explained,
    to_the_first_red,
    watched_launches,
)
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work
from workshop.gate.parity import MULTIPLE

EPS = 1e-5
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ROUNDINGS = 8.0
"""Allowed beyond a multiple of the plain version's error, which may be nil by luck."""
GIVEN = "_forward_kernel"
NO_KERNEL = "no kernel of yours ran: the gradients are to come from one, not from plain PyTorch"
FIRST_WRONG = 8.0
"""How many times the allowed error of the whole an element may be off before it is shown."""

Call = Callable[[Tensor, Tensor], Tensor]


def check(work: Work) -> Iterator[Item]:
    yield imported(work)
    green = True
    for item in to_the_first_red(work.each(_kernel)):
        yield item
        green = item.ok
    if green:
        yield from to_the_first_red(work.each(_function))
    else:
        yield Item(False, "rms_norm: looked at once the kernel is right")


# --- what is true, and how close to it one can be -------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Arguments of the norm, and what comes from above. Shapes (..., C), (C,), (..., C)."""

    name: str
    x: Tensor
    weight: Tensor
    dy: Tensor

    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """y, dx and dw of the specification, computed in `dtype`."""

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight

        return forward_and_backward(norm, self, dtype)


def forward_and_backward(norm: Call, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """y, dx and dw of a norm; without the gradients that did not come."""
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (case.x, case.weight))
    y = norm(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), case.dy.to(dtype), allow_unused=True)
    found = {"y": y.detach(), "dx": dx, "dw": dw}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def look(case: Case, name: str, yours: Tensor | None) -> Item:
    """Compares y, dx or dw with fp64, and allows what the plain version loses at the case's
    precision."""
    what, dtype = f"{name}, {case.name}", case.x.dtype
    true, plain = (case.plain(its)[name] for its in (torch.float64, dtype))
    allowed = MULTIPLE * _off(plain, true) + ROUNDINGS * ROUNDOFF[dtype]
    first = first_difference(yours, true.to(dtype), what=what, limit=FIRST_WRONG * allowed)
    if yours is None or yours.shape != true.shape or yours.dtype != dtype:
        return first
    off = _off(yours, true)
    size = f"off by {off:.1e} of its size, allowed {allowed:.1e}"
    if off <= allowed:
        return Item(True, what, size)
    suspects = [
        f"{sentence} gives just this"
        for sentence, wrong in _suspects(case)[name].items()
        if wrong.norm() > 0 and _off(yours, wrong) <= allowed
    ]
    return Item(False, what, "\n".join(filter(None, (first.why, size, *suspects[:1]))))


def _off(found: Tensor, true: Tensor) -> float:
    """|found - true| / |true|; infinite where something is no number."""
    off = float((found.double() - true.double()).norm() / true.double().norm())
    return math.inf if math.isnan(off) else off


def _suspects(case: Case) -> dict[str, dict[str, Tensor]]:
    """y, dx and dw with well-known mistakes, in fp64."""
    C = case.x.shape[-1]
    x, weight, dy = (t.double() for t in (case.x, case.weight, case.dy))

    def mean(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True)

    squares = mean(x * x)
    rstd = torch.rsqrt(squares + EPS)
    normed, g = x * rstd, dy * weight
    block_share = C / 2 ** math.ceil(math.log2(C))
    rows = (dy * normed).reshape(-1, C)
    return {
        "y": {"eps outside of the root": x * (torch.rsqrt(squares) + EPS) * weight},
        "dx": {
            "leaving out the mean, as if rstd did not depend on x,": rstd * g,
            "adding the mean": rstd * (g + normed * mean(g * normed)),
            "a mean over BLOCK_C": rstd * (g - normed * mean(g * normed) * block_share),
            "leaving out the weight": rstd * (dy - normed * mean(dy * normed)),
        },
        "dw": {
            "a sum over the first half of the rows": rows[: len(rows) // 2].sum(0),
            "a sum of dy x, without rstd,": (dy * x).reshape(-1, C).sum(0),
            "a mean over the rows": rows.mean(0),
        },
    }


# --- the kernel -----------------------------------------------------------------------------------


def _kernel(work: Work) -> Iterator[Item]:
    for R, C, P in ((7, 64, 1), (5, 72, 1), (63, 100, 4), (2, 33, 3), (1, 1000, 1)):
        programs = "1 program" if P == 1 else f"{P} programs"
        yield from _launched(work.module, _draw(f"{R} x {C}, {programs}", R, C), P)


def _launched(mine: ModuleType, case: Case, P: int) -> Iterator[Item]:
    x, weight, dy = case.x, case.weight, case.dy
    rstd = torch.rsqrt(x.double().pow(2).mean(-1) + EPS).float()
    dx, partial_dw = Output(x), Output(x.new_empty(P, x.shape[1]))
    arguments = (guarded(t) for t in (dy, x, weight, rstd))
    with watched_launches(mine) as launched:
        mine.launch_backward(*arguments, dx.tensor, partial_dw.tensor)
    if not launched - {GIVEN}:
        yield Item(False, f"dx, {case.name}", NO_KERNEL)
        return
    yield dx.beside(f"dx, {case.name}") or nan_explained(look(case, "dx", dx.tensor), dx.tensor)
    what, written = f"partial_dw, {case.name}", partial_dw.tensor
    empty = written.isnan().all(1).nonzero().flatten().tolist()
    if item := partial_dw.beside(what):
        yield item
    elif empty:
        why = f"rows {empty} were not written, or are NaN: each program has its own"
        yield Item(False, what, why)
    else:
        yield look(case, "dw", written.sum(0))


# --- the function ---------------------------------------------------------------------------------


def _function(work: Work) -> Iterator[Item]:
    odd = _draw("rms_norm of x (2, 31, 72)", 2, 31, 72)
    one = torch.ones((), device=odd.x.device)
    x, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (odd.x, odd.dy))
    cases = (
        odd,
        Case("rms_norm, and y.sum(): dy of strides 0", odd.x, odd.weight, one.expand(odd.x.shape)),
        Case("rms_norm, x and dy transposed views", x, odd.weight, dy),
        _draw("rms_norm of x (3, 72) in bf16", 3, 72, dtype=torch.bfloat16),
    )
    for case in cases:
        yield from _joined(work.module, case)


def _joined(mine: ModuleType, case: Case) -> Iterator[Item]:
    """An Item for each of y, dx and dw that is wrong, or one for all."""
    # Memory that PyTorch hands out holds NaN until something is written to it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with watched_launches(mine) as launched:
            norm = lambda x, w: mine.rms_norm(x, w, EPS)  # noqa: E731
            found = forward_and_backward(norm, case, case.x.dtype)
    except RuntimeError as error:
        if "returned an in" not in str(error):
            raise
        # Autograd's own words: the number of gradients, or the shape of one, is wrong.
        yield Item(False, case.name, str(error))
        return
    finally:
        torch.use_deterministic_algorithms(False)
    items = [look(case, name, found.get(name)) for name in ("y", "dx", "dw")]
    if not launched - {GIVEN}:
        items.insert(0, Item(False, case.name, NO_KERNEL))
    yield from [item for item in items if not item.ok] or [
        Item(True, case.name, "y, dx and dw agree with fp64")
    ]


def _draw(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    """Rows of x from large to tiny, so that the place of eps shows; random dy and weight."""
    where = device()
    scales = torch.logspace(1, -4, shape[-2], device=where)[:, None]
    x, dy = torch.randn(2, *shape, device=where)
    weight = torch.randn(shape[-1], device=where)
    return Case(name, (x * scales).to(dtype), weight.to(dtype), dy.to(dtype))
