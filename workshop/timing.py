"""Time: marks on the device's own clock, and what a list of step times says."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class StepClock:
    """Marks moments; the time between two marks is measured where the work runs.

    On a GPU a mark is an event in the stream, so nothing waits; `durations_ms` waits once, for
    the last mark. On the CPU a mark reads the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def reached(self, index: int) -> bool:
        """Whether the device has come to mark `index`; never waits."""
        mark = self._marks[index]
        return mark.query() if isinstance(mark, torch.cuda.Event) else True

    def between_ms(self, first: int, last: int) -> float:
        """Milliseconds from one mark to a later one, both reached."""
        start, end = self._marks[first], self._marks[last]
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return float(start.elapsed_time(end))
        assert isinstance(end, float)
        return (end - start) * 1e3

    def durations_ms(self) -> list[float]:
        """The times between neighbouring marks, in milliseconds."""
        if self._marks and self._on_gpu:
            torch.cuda.synchronize()
        return [self.between_ms(i, i + 1) for i in range(len(self._marks) - 1)]


def median(samples: Sequence[float]) -> float:
    return float(torch.tensor(samples, dtype=torch.float64).quantile(0.5))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median: 0.02 says that half of the samples lie within 2%."""
    low, mid, high = torch.tensor(samples, dtype=torch.float64).quantile(
        torch.tensor((0.25, 0.5, 0.75), dtype=torch.float64)
    )
    return float((high - low) / mid)


@dataclass(frozen=True)
class Ratio:
    """How many times faster, with the interval that holds 95% of the bootstrap's ratios."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return not self.low <= 1.0 <= self.high


def speedup(
    baseline: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Ratio:
    """Median step of `baseline` over median step of `other`.

    Each argument holds one list of step times a process. The bootstrap draws processes first and
    then steps within each, since steps of one process share its clock, memory layout and
    neighbours: drawing steps alone would claim a certainty that a second run refutes.
    """
    generator = torch.Generator().manual_seed(seed)
    ratios = _bootstrap_medians(baseline, resamples, generator) / _bootstrap_medians(
        other, resamples, generator
    )
    low, high = ratios.quantile(torch.tensor((0.025, 0.975), dtype=torch.float64)).tolist()
    return Ratio(median(_pool(baseline)) / median(_pool(other)), low, high)


def _pool(runs: Sequence[Sequence[float]]) -> list[float]:
    return [sample for run in runs for sample in run]


def _bootstrap_medians(
    runs: Sequence[Sequence[float]], resamples: int, generator: torch.Generator
) -> torch.Tensor:
    """Medians of `resamples` two-level draws, (resamples,)."""
    lengths = torch.tensor([len(run) for run in runs])
    width = int(lengths.max())
    padded = torch.zeros(len(runs), width, dtype=torch.float64)
    for row, run in zip(padded, runs, strict=True):
        row[: len(run)] = torch.tensor(run, dtype=torch.float64)
    draws = []
    for _ in runs:
        chosen = torch.randint(len(runs), (resamples,), generator=generator)
        uniform = torch.rand(resamples, width, generator=generator, dtype=torch.float64)
        steps = (uniform * lengths[chosen, None]).long()
        draws.append(padded[chosen].gather(1, steps))
    return torch.cat(draws, dim=1).quantile(0.5, dim=1)
