"""Where the time of a training step goes: each of its instants counted once, by what then ran.

Many things run at once. An instant belongs to the first of CATEGORIES that is active in it, so
that what a running kernel hides is the kernel's time, and the parts add up to the step.
TensorBoard's plugin for PyTorch divided steps so, except that the runtime came before the
DataLoader: a thread that pins memory while the main thread waits for its batch hid the wait.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

TENSOR, KERNEL, COPY, LOADING = "kernel on tensor cores", "kernel", "copy", "DataLoader"
RUNTIME, CPU, OTHER = "runtime", "CPU", "other"
CATEGORIES = (KERNEL, COPY, LOADING, RUNTIME, CPU, OTHER)
"""In the order in which they count: a kernel runs; a copy or memset does; the main thread is in
the DataLoader; a thread calls the CUDA or HIP runtime; it runs an operator; none of these (Python,
or nothing)."""
_ORDER = (TENSOR, *CATEGORIES[:-1])

Span = tuple[float, float]
"""Start and end in ns."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time."""

    parts_ns: dict[str, float]
    """By CATEGORIES: their sum is the step's length."""
    tensor_ns: float
    """Time within the kernels' part with one on tensor cores."""

    @property
    def ns(self) -> float:
        return sum(self.parts_ns.values())

    @property
    def gpu_share(self) -> float:
        """GPU utilisation, from 0 to 1: the share of the step in which a kernel runs."""
        return self.parts_ns[KERNEL] / self.ns

    @property
    def tensor_share(self) -> float:
        """Share of the time with a kernel, from 0 to 1."""
        kernels = self.parts_ns[KERNEL]
        return self.tensor_ns / kernels if kernels else 0.0


def divide(active: Mapping[str, Sequence[Span]], spans: Iterable[Span]) -> list[StepTime]:
    """The time of each of these spans.

    Args:
        active: what ran, by category; TENSOR's kernels apart from the others.
    """
    covered, sums = list[Span](), []
    for category in _ORDER:
        covered = union([*covered, *active.get(category, ())])
        sums.append(_Covered(covered))
    return [_divide(span, sums) for span in spans]


def mean(steps: Sequence[StepTime]) -> StepTime:
    """Mean of at least one step; its shares are those of all steps together."""
    parts = {c: sum(step.parts_ns[c] for step in steps) / len(steps) for c in CATEGORIES}
    return StepTime(parts, sum(step.tensor_ns for step in steps) / len(steps))


@dataclass(frozen=True, slots=True)
class Communication:
    """Communication in a step: its length, the time in which it communicates, and the part of that
    in which it also computes, which hides it."""

    step_ns: float
    ns: float
    hidden_ns: float


def communication(
    transfers: Iterable[Span], work: Iterable[Span], spans: Iterable[Span]
) -> list[Communication]:
    """Communication in each of these spans, by when transfers and computations ran."""
    parts = (union(transfers), union(work))
    transferring, working, either = map(_Covered, (*parts, union(chain(*parts))))
    found = []
    for span in spans:
        ns = transferring.within(span)
        both = ns + working.within(span) - either.within(span)
        found.append(Communication(span[1] - span[0], ns, max(both, 0.0)))
    return found


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that spans cover, as spans in order that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


class _Covered:
    """How much of any stretch of time the spans of a `union` cover."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._before = [0.0, *accumulate(end - start for start, end in spans)]

    def within(self, span: Span) -> float:
        return self._until(span[1]) - self._until(span[0])

    def _until(self, instant: float) -> float:
        index = bisect_right(self._starts, instant)
        beyond = max(self._spans[index - 1][1] - instant, 0.0) if index else 0.0
        return self._before[index] - beyond


def _divide(span: Span, sums: list[_Covered]) -> StepTime:
    """Args:
    sums: of each of _ORDER what it and those before it cover.
    """
    tensor, *reached = (covered.within(span) for covered in sums)
    bounds = [0.0, *reached, span[1] - span[0]]
    # Sums of many spans differ in their last digits.
    parts = [max(b - a, 0.0) for a, b in pairwise(bounds)]
    return StepTime(dict(zip(CATEGORIES, parts, strict=True)), max(tensor, 0.0))
