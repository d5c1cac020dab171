"""Time: marks on the device's own clock, and what a list of step times says."""

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TAIL = 0.025
"""The probability on each side of an interval headed 95%."""

LEAST_SCATTER = 1e-3
"""Scatter of processes whose times agree to the last digit, as a share: no two are so alike."""


class StepClock:
    """Marks moments; the time between two marks is measured where the work runs.

    On a GPU a mark is an event in the stream, so nothing waits; `durations_ms` waits once, for
    the last mark. On the CPU a mark reads the host's clock.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch  # the only part of this module that needs it

        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self._new_event = partial(torch.cuda.Event, enable_timing=True)
        self._synchronize = torch.cuda.synchronize

    def mark(self) -> None:
        if self._on_gpu:
            event = self._new_event()
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def reached(self, index: int) -> bool:
        """Whether the device has come to mark `index`; never waits."""
        mark = self._marks[index]
        return True if isinstance(mark, float) else mark.query()

    def between_ms(self, first: int, last: int) -> float:
        """Milliseconds from one mark to a later one, both reached."""
        start, end = self._marks[first], self._marks[last]
        if isinstance(start, float):
            assert isinstance(end, float)
            return (end - start) * 1e3
        assert not isinstance(end, float)
        return float(start.elapsed_time(end))

    def outlasted_ms(self) -> float:
        """Waits for the last mark, then for all other streams, and gives the milliseconds of the
        second wait."""
        mark = self._marks[-1]
        if isinstance(mark, float):
            return 0.0
        mark.synchronize()
        start = time.perf_counter()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def durations_ms(self) -> list[float]:
        """The times between neighbouring marks, in milliseconds."""
        if self._marks and self._on_gpu:
            self._synchronize()
        return [self.between_ms(end - 1, end) for end in range(1, len(self._marks))]


def median(samples: Sequence[float]) -> float:
    return float(statistics.median(samples))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median: 0.02 says that half of the samples lie within 2%."""
    if len(samples) == 1:
        return 0.0
    low, mid, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / mid


@dataclass(frozen=True)
class Ratio:
    """How many times faster, and its 95% interval: None where one side is a single process, which
    says nothing of the scatter between processes."""

    value: float
    interval: tuple[float, float] | None

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1.0 <= self.interval[1]


def speedup(baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Ratio:
    """Median step of `baseline` over median step of `other`.

    Each argument holds one list of step times a process. A process counts once, with the logarithm
    of its median: steps of one process share its clock, memory layout and neighbours, so that more
    of them say nothing of the next process. The interval is Welch's t, since one version may
    scatter a hundred times as much between processes as the other. docs/regression.md says how
    often it is wrong.
    """
    before, after = (median([ms for run in side for ms in run]) for side in (baseline, other))
    value = before / after
    sides = [[math.log(median(run)) for run in side] for side in (baseline, other)]
    if min(map(len, sides)) < 2:
        return Ratio(value, None)
    difference = statistics.fmean(sides[0]) - statistics.fmean(sides[1])
    # Processes that agree to the last digit do so by luck: their steps' scatter remains.
    half = _half_width(*sides) or max(LEAST_SCATTER, *map(spread, [*baseline, *other]))
    # The middle one of many uneven processes may lie far from the mean: the interval holds both.
    low, high = math.exp(difference - half), math.exp(difference + half)
    return Ratio(value, (min(low, value), max(high, value)))


def _half_width(*sides: Sequence[float]) -> float:
    """Half the 95% interval of the difference of two means, of two values or more each.

    The degrees of freedom are Welch's, estimated without bias (n + 1 and -2, where the usual
    formula has n - 1): with that one 2 processes a side differ in 2.4% of the cases, not in 5%.
    """
    squares = [statistics.variance(side) / len(side) for side in sides]
    error = sum(squares)
    if error == 0:
        return 0.0
    parts = (square**2 / (len(side) + 1) for square, side in zip(squares, sides, strict=True))
    return t_quantile(TAIL, max(error**2 / sum(parts) - 2, 1.0)) * math.sqrt(error)


@functools.lru_cache
def t_quantile(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail` (below 1/2); `freedom`, its
    degrees, is 1 or more and need not be whole.

    With t = sqrt(freedom) / tan(angle) the density of the angle is sin(angle) ** (freedom - 1), up
    to a factor: Newton's method finds the angle, from above, since the integral is convex.
    """
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    angle = math.pi / 2
    slices = 100  # of Simpson's rule
    while True:
        values = [math.sin(angle * i / slices) ** (freedom - 1) for i in range(slices + 1)]
        inner = 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        integral = angle / slices / 3 * (values[0] + inner + values[-1])
        excess = integral - tail * whole
        step = excess / math.sin(angle) ** (freedom - 1)
        angle -= step
        if step < 1e-9 * angle:
            return math.sqrt(freedom) / math.tan(angle)
