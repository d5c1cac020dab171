"""Three kernels against plain PyTorch: odd sizes, strides, and memory that is watched."""

import os
from collections.abc import Iterator, Sequence
from types import ModuleType

from triton_launch import INTERPRETED

import torch
from torch import Tensor

from version3_triton.exercises.guarded_memory import (
    Output,
    device,
    guarded,
    imported,
    to_the_first_red,
    watched_launches,
    watched_loads,
)
from workshop.exercises import runner
from workshop.exercises.frame import Item, Work

FP32 = 1e-5
"""Room for a sum in another order; a mistake is larger."""

INTERPRETER_S = 200
"""Against a hang: the kernels take seconds there."""

STRIDES = "4 x 37, rows 100 apart in x, 37 in out"
PASSES = "2 passes over memory; largest, exp(x - largest), sum and division one by one take 6"


def check(work: Work) -> Iterator[Item]:
    yield imported(work)
    green = True
    for part in (_add, _softmax, _transpose):
        for item in to_the_first_red(work.each(part)):
            yield item
            green = green and item.ok
    if green and not INTERPRETED:
        yield from _as_interpreted(work)


def _as_interpreted(work: Work) -> Iterator[Item]:
    """Checks the loads of kernels that are right on a GPU: only the interpreter can watch them."""
    os.environ["TRITON_INTERPRET"] = "1"
    outcome = runner.run(work.folder, mine=work.mine_path, limit_s=INTERPRETER_S)
    what = "loads: none beside the inputs, in Triton's interpreter"
    red = [item for item in outcome.items if not item.ok]
    yield from red or [Item(outcome.passed, what, outcome.missing or "")]


def _add(work: Work) -> Iterator[Item]:
    mine = work.module
    for N in (mine.BLOCK, 1, 1000):
        x, y = _normal(N), _normal(N)
        item = _launched(mine, "add", (x, y), Output(x), x + y, f"add: N = {N:,}")
        programs = -(-N // mine.BLOCK)
        masked = f"programs: {programs}; elements of the last one that are masked: "
        yield _with_reason(item, f"{masked}{programs * mine.BLOCK - N}")


def _softmax(work: Work) -> Iterator[Item]:
    mine = work.module
    for name, x, like in _rows():
        right = torch.softmax(x, -1)
        item = _launched(mine, "softmax", (x,), Output(like), right, f"softmax: {name}")
        yield _with_reason(item, PASSES) if name == STRIDES else item


def _rows() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Cases: in words, x, and a tensor of the output's strides."""
    for R, C, shift in ((3, 64, 0), (5, 63, -200), (5, 63, 200), (2, 129, 0)):
        x = 3 * _normal(R, C) + shift
        yield f"{R} x {C}" + (f", all about {shift}" if shift else ""), x, x
    wide = _normal(4, 100)[:, :37]
    yield "4 x 37, rows 100 elements apart", wide, wide
    yield STRIDES, wide, _normal(4, 37)


def _transpose(work: Work) -> Iterator[Item]:
    mine = work.module
    R, C = mine.TILE_R, mine.TILE_C
    cases = (
        (f"arange as {R} x {C}, one tile", _arange(R, C), 0),
        ("arange as 33 x 50", _arange(33, 50), 0),
        ("arange as 3 x 2, less than a tile", _arange(3, 2), 0),
        ("every second column of arange as 20 x 80", _arange(20, 80)[:, ::2], 0),
        ("the transposed view of arange as 45 x 21", _arange(45, 21).t(), 0),
        ("arange as 17 x 40, into columns of a wider matrix", _arange(17, 40), 9),
    )
    for name, x, spare in cases:
        right = x.t().contiguous()
        out = Output(right.new_empty(len(right), len(x) + spare)[:, : len(x)])
        yield _launched(mine, "transpose", (x,), out, right, f"transpose: {name}")


def _launched(
    mine: ModuleType,
    name: str,
    inputs: Sequence[Tensor],
    out: Output,
    right: Tensor,
    what: str,
) -> Item:
    arguments = [guarded(x) for x in inputs]
    with watched_loads(*arguments) as outside, watched_launches(mine) as launched:
        getattr(mine, name)(*arguments, out.tensor)
    if not launched:
        return Item(False, what, "no kernel of yours ran: write it in Triton, not plain PyTorch")
    item = out.compare(right, what=what, limit=FP32)
    return Item(False, what, outside[0]) if item.ok and outside else item


def _arange(R: int, C: int) -> Tensor:
    """Each element is its place in memory: it shows where a wrong one came from."""
    return torch.arange(R * C, dtype=torch.float32, device=device()).reshape(R, C)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=device())


def _with_reason(item: Item, why: str) -> Item:
    """A green Item with a reason."""
    return Item(True, item.what, why) if item.ok else item
