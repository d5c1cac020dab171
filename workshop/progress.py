"""Progress of long work, in words: for a log, and for programs that have nothing but PyTorch."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 20.0
"""Work that takes longer says how far it is this often."""


def about(seconds: float) -> str:
    """As in "40 s", "12 min", "3 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.0f} h"


def left(items: int, seconds_each: float) -> str:
    """As in ", about 2 min left"; empty where no items are."""
    return f", about {about(items * seconds_each)} left" if items else ""


def told(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with lines on stderr like "epoch 1: 12 of 44, about 2 min left"."""
    begin = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last >= EVERY_S:
            rest = left(total - done, (now - begin) / done)
            print(f"{what}: {done} of {total}{rest}", file=sys.stderr, flush=True)
            last = now
        yield item
