"""The one table that every profiler's output becomes."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from workshop.profilers.categories import categorize
from workshop.profilers.names import printable
from workshop.profilers.step_time import Span, StepTime, union

STEP = "step"
PHASES = ("forward", "backward", "optimizer")
"""The workshop's marker ranges: a training step, and its parts."""


@dataclass(slots=True)
class Kernel:
    """All calls of one kernel (of one operator, in a trace of a machine without a GPU)."""

    name: str
    category: str
    """One of categories.CATEGORIES."""
    calls: int
    total_ns: float
    min_ns: float | None = None
    """None where the tool gives sums only."""
    max_ns: float | None = None
    bytes: float | None = None
    """Read from and written to the device's memory by all calls, where there are counters."""
    flops: float | None = None
    """Floating-point operations of all calls, where there are counters."""
    occupancy_ns: float | None = None
    """Time of all calls, each by its share of the warps that an SM can hold, from 0 to 1; where
    the tool measures or estimates it. `KernelTable.occupancy` says which."""

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.calls


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a GPU worked, where a tool has the start and end of every kernel and copy; of several
    GPUs, the one that worked longest."""

    span_ns: float
    """From the first start to the last end."""
    busy_ns: float
    """Time in which at least one of them ran: those that overlap count once."""
    calls: int | None = None
    """Kernels and copies that this GPU ran."""

    @property
    def idle_ns(self) -> float:
        return self.span_ns - self.busy_ns


@dataclass(frozen=True, slots=True)
class Loading:
    """How long the thread that trains is in PyTorch's DataLoader, for its next batch."""

    span_ns: float
    """From the first step's start to the last one's end; without steps, from the first wait to the
    end of what came after the last batch."""
    wait_ns: float
    """Part of the span that is spent waiting."""
    batches: int
    """At least 1."""
    in_thread: bool
    """Whether the thread makes the batches itself, for most of that time; else workers do."""
    gpu_idle_ns: float | None = None
    """Part of the wait in which the GPU idles; None where no GPU was traced."""

    @property
    def lost_ns(self) -> float:
        """A GPU that still has work loses nothing while the host waits."""
        return self.wait_ns if self.gpu_idle_ns is None else self.gpu_idle_ns


@dataclass(slots=True)
class HostCall:
    """All calls of one function of the CUDA or HIP runtime, on the host."""

    calls: int = 0
    total_ns: float = 0.0


@dataclass
class KernelTable:
    """The part of a run that a profiler saw.

    `kernels` comes longest total first. Copies and memsets that the tool has are among them,
    under the category "copy".
    """

    path: Path
    """The file or folder that it was read from."""
    tool: str
    """The profiler, as its users call it: "torch.profiler", "rocprofv3", "ncu", "nsys", ..."""
    kernels: list[Kernel]
    what: str = "kernel"
    """Or "operator", for a trace of a machine without a GPU: then times are the host's."""
    device: str | None = None
    timeline: Timeline | None = None
    steps: int | None = None
    """Training steps, from the marker ranges."""
    phases_ns: dict[str, float] = field(default_factory=dict)
    """Time of kernels (and copies) by the marker range that launched them, where there are any:
    "forward", "backward", "optimizer"."""
    host_calls: dict[str, HostCall] = field(default_factory=dict)
    """By the runtime function's name, such as cudaLaunchKernel or hipStreamSynchronize."""
    loading: Loading | None = None
    """None where the tool does not see it, or no batch came from a DataLoader."""
    step_times: list[StepTime] = field(default_factory=list)
    """One entry a step, where the tool has the start and end of what host and GPU did in it."""
    warnings: list[str] = field(default_factory=list)
    """Sentences: what could not be read, what the figures leave out."""

    @property
    def total_ns(self) -> float:
        return sum(kernel.total_ns for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def occupancy(self) -> str:
        """The name of the tool's occupancy."""
        return "active warps" if self.tool == "ncu" else "est. occupancy"

    def share(self, kernel: Kernel) -> float:
        """Share of the time of all kernels, from 0 to 1."""
        return kernel.total_ns / self.total_ns if self.total_ns else 0.0

    def category_ns(self) -> dict[str, float]:
        """Total time by category, longest first."""
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            sums[kernel.category] = sums.get(kernel.category, 0.0) + kernel.total_ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


Device = int | str | None
"""A GPU's number, or what a tool calls it; None where the tool does not say."""


_Place = tuple[str, Device]
"""A process and a device."""


class Sums:
    """Adds calls up to kernels, and their intervals to a timeline of each device. Made for a
    million calls: it keeps two numbers a call, and those only where starts are given. Names become
    printable.

    A kernel has extremes only if every addition to it has, counters if any has."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._by_name_as_read: dict[str, Kernel] = {}
        self._ns: defaultdict[_Place, float] = defaultdict(float)
        self._intervals: defaultdict[_Place, list[Span]] = defaultdict(list)

    def add(
        self,
        name: str,
        total_ns: float,
        *,
        calls: int = 1,
        start_ns: float | None = None,
        min_ns: float | None = None,
        max_ns: float | None = None,
        bytes: float | None = None,
        flops: float | None = None,
        occupancy_ns: float | None = None,
        category: str | None = None,
        device: Device = None,
        process: str = "",
    ) -> None:
        """Adds one call, or the sum of `calls` calls with the extremes that the tool gives.

        Args:
            start_ns: of a single call, where the tool has it.
            category: where the tool says more than the name.
            process: the name of the process that launched it, where there are several: what they
                call a device may be another one for each.
        """
        kernel = self._by_name_as_read.get(name)
        if kernel is None:
            shown = printable(name)
            if shown not in self._kernels:
                new = Kernel(shown, category or categorize(shown), 0, 0.0, math.inf, -math.inf)
                self._kernels[shown] = new
            kernel = self._by_name_as_read[name] = self._kernels[shown]
        if calls == 1:
            min_ns = max_ns = total_ns
        kernel.calls += calls
        kernel.total_ns += total_ns
        if min_ns is None or max_ns is None or kernel.min_ns is None or kernel.max_ns is None:
            kernel.min_ns = kernel.max_ns = None
        else:
            kernel.min_ns, kernel.max_ns = min(kernel.min_ns, min_ns), max(kernel.max_ns, max_ns)
        if bytes is not None:
            kernel.bytes = (kernel.bytes or 0.0) + bytes
        if flops is not None:
            kernel.flops = (kernel.flops or 0.0) + flops
        if occupancy_ns is not None:
            kernel.occupancy_ns = (kernel.occupancy_ns or 0.0) + occupancy_ns
        self._ns[process, device] += total_ns
        if start_ns is not None:
            self._intervals[process, device].append((start_ns, start_ns + total_ns))

    def kernels(self) -> list[Kernel]:
        """Longest total first, then by name."""
        return sorted(self._kernels.values(), key=lambda kernel: (-kernel.total_ns, kernel.name))

    def busiest(self) -> Device:
        """The device that worked longest; None where the tool does not say, or nothing ran."""
        return self._busiest()[1]

    def timeline(self) -> Timeline | None:
        """The busiest device's; None where no starts were given."""
        return timeline(self._placed().get(self._busiest(), []))

    def warnings(self) -> list[str]:
        """One sentence where several devices or processes are added up, or none."""
        places = self._placed()
        if len(places) < 2:
            return []
        processes, what = len({process for process, _ in places}), []
        if len(places) > processes:
            what.append(f"{len(places)} devices")
        if processes > 1:
            what.append(f"{processes} processes")
        sentence = f"the kernels of {' in '.join(what)} are added up"
        process, device = busiest = self._busiest()
        if places[busiest]:
            name = f"device {device}" if isinstance(device, int) else device
            parts = [name, process if processes > 1 else ""]
            whose = printable(" in ".join(filter(None, parts)))
            sentence += f"; busy and idle time are those of {whose}, the busiest"
        return [sentence]

    def _placed(self) -> dict[_Place, list[Span]]:
        """Intervals by process and device. What a process ran on no known device is its only
        device's; it is left out where there are several."""
        places = {
            place: list(self._intervals.get(place, ()))
            for place in self._ns
            if place[1] is not None
        }
        for process, device in self._ns:
            if device is None:
                its = [place for place in places if place[0] == process]
                found = self._intervals.get((process, None), [])
                if len(its) < 2:
                    places.setdefault(its[0] if its else (process, None), []).extend(found)
        return places

    def _busiest(self) -> _Place:
        places = self._placed()
        longest = sorted(places, key=lambda place: (not places[place], -self._ns[place]))
        return next(iter(longest), ("", None))

    def __len__(self) -> int:
        return len(self._kernels)


class Ranges:
    """Named ranges of time, from (start, end, name). Of ranges within each other the outermost
    counts: a forward that the backward pass repeats, to save memory, is part of the backward pass.
    """

    def __init__(self, ranges: Iterable[tuple[float, float, str]]) -> None:
        self._starts: list[float] = []
        self._ends_and_names: list[tuple[float, str]] = []
        reached = -math.inf
        for start, end, name in sorted(ranges, key=lambda range_: (range_[0], -range_[1])):
            if end > reached:
                self._starts.append(max(start, reached))
                self._ends_and_names.append((end, name))
                reached = end

    def at(self, instant: float) -> str:
        """The name of the range that an instant lies in; "" for none."""
        index = bisect_right(self._starts, instant) - 1
        end, name = self._ends_and_names[index] if index >= 0 else (-math.inf, "")
        return name if instant <= end else ""


def timeline(intervals: Iterable[Span]) -> Timeline | None:
    """The span of (start, end) intervals and the part of it that they cover; None for none."""
    ordered = sorted(intervals)
    covered = union(ordered)
    if not covered:
        return None
    busy = sum(end - start for start, end in covered)
    return Timeline(covered[-1][1] - covered[0][0], busy, calls=len(ordered))
