"""Figures that follow from a kernel table and the record of its run: those that the advisor's
sentences rest on, and how they are written."""

import dataclasses
import re
from collections.abc import Iterable
from functools import cached_property

from workshop.labs import LabRun
from workshop.profilers.table import HostCall, Kernel, KernelTable
from workshop.results import RunResult
from workshop.run import chips, flops

CLEARLY_IDLE = 0.6
"""Share of the timeline. A profiler may make the host half as fast; even without it, the GPU would
then idle for a fifth of the time."""
LONGEST_LAUNCH_GAP_NS = 100e3
"""Between two kernels: an eager launch takes 5 to 20 µs, traced perhaps 40. Where the gaps are
longer than this on average, the host is doing something else."""
LAUNCH_NS = 5e3
"""The least time that the host needs to launch a kernel from eager PyTorch."""
LEAST_NS = 1.0
"""No profiler's clock resolves less: a shorter time shows nothing."""
LEAST_LOADING_BOUND = 0.5
"""Share of the steps' time, lost in waiting for data: nothing else then takes more."""
LEAST_BOUND = 0.4
"""Share of the kernels' time: what takes less bounds nothing alone."""

_GROUPS = ("GEMM", "attention", "elementwise", "optimizer", "copy", "communication", "other")
_SINGULAR = {"graph launches": "graph launch", "copies": "copy"}
_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_LAUNCH = re.compile(r"(?:cuda|cu|hip)(?!Graph)\w*Launch\w*Kernel")
_HOST_COPY = re.compile(
    r"(?:cpy|copy)[ _]?(?:h(?:ost)?[ _-]?to[ _-]?d(?:evice)?|d(?:evice)?[ _-]?to[ _-]?h(?:ost)?)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""As in "Memcpy HtoD (Pageable -> Device)", MEMORY_COPY_HOST_TO_DEVICE, CopyHostToDevice and
"[CUDA memcpy Host-to-Device]"."""


class Figures:
    """A table's figures, with those that the record of its run adds.

    Attributes:
        steps: training steps in the profile; None where they are not known.
        on_host: whether these are a CPU's operators, which launch nothing.
        launch_calls: the host's calls that launch one kernel each; `graph_launches` a graph each.
        run: the record of a version; `lab` that of a lab. None for another program's profile.
        needed_flops: operations of the products in all these steps, causal attention counted by
            half; None where model or steps are not known.
    """

    def __init__(self, table: KernelTable, record: RunResult | LabRun | None) -> None:
        self.table, self.record = table, record
        self.run = record if isinstance(record, RunResult) else None
        self.lab = record if isinstance(record, LabRun) else None
        self.steps = table.steps or _recorded_steps(table, record)
        self.total_ns, self.launches = table.total_ns, table.launches
        self.on_host = table.what == "operator"
        self.launch_calls, self.graph_launches = map(self.host_calls, (_LAUNCH, _GRAPH_LAUNCH))
        self.needed_flops = self._needed_flops()

    # --- where the kernels' time goes ---

    @cached_property
    def groups_ns(self) -> dict[str, float]:
        """Time by `group`."""
        sums = dict.fromkeys(_GROUPS, 0.0)
        for kernel in self.table.kernels:
            sums[group(kernel)] += kernel.total_ns
        return sums

    @property
    def products(self) -> str:
        """The kind of products that takes longer: "GEMM" or "attention"."""
        groups = self.groups_ns
        return "attention" if groups["attention"] > groups["GEMM"] else "GEMM"

    @property
    def products_ns(self) -> float:
        return self.groups_ns["GEMM"] + self.groups_ns["attention"]

    @cached_property
    def bound(self) -> str | None:
        """The bound of the run: a group, "data", or "launch", "latency", "host", where the GPU
        idles; None if no one thing does."""
        if self.data_share >= LEAST_LOADING_BOUND:
            return "data"
        idle = self.idle_share
        if idle is not None and idle >= CLEARLY_IDLE:
            if self.pace_ns < LAUNCH_NS:
                return "latency"
            by_launches = self.gap_ns <= LONGEST_LAUNCH_GAP_NS and not self.in_graphs
            return "launch" if by_launches else "host"
        groups = self.groups_ns | {self.products: self.products_ns}
        largest = max(groups, key=groups.__getitem__)
        if largest == "other" or groups[largest] < LEAST_BOUND * self.total_ns:
            return None
        return largest

    # --- between the kernels ---

    @property
    def idle_share(self) -> float | None:
        """Share of the timeline, from 0 to 1; None without one, and for a CPU's operators."""
        line = self.table.timeline
        if self.on_host or line is None or line.span_ns <= 0:
            return None
        return line.idle_ns / line.span_ns

    @property
    def data_share(self) -> float:
        """Share of the steps' time that is lost in waiting for data, from 0 to 1; 0 if not known,
        or if the loop does nothing but load."""
        loading = self.table.loading
        if loading is None or loading.span_ns - loading.lost_ns < LEAST_NS:
            return 0.0
        return loading.lost_ns / loading.span_ns

    @property
    def line_launches(self) -> int:
        """Kernels in the timeline, which is that of one device."""
        line = self.table.timeline
        return (line and line.calls) or self.launches

    @property
    def gap_ns(self) -> float:
        """Between two kernels, on average; 0 without a timeline."""
        return line.idle_ns / self.line_launches if (line := self.table.timeline) else 0.0

    @property
    def pace_ns(self) -> float:
        """From the start of a kernel to that of the next one, on average; 0 without a timeline."""
        return line.span_ns / self.line_launches if (line := self.table.timeline) else 0.0

    @property
    def in_graphs(self) -> bool:
        """Whether most kernels come out of captured graphs."""
        launched, replayed = self.launch_calls.calls, self.graph_launches.calls
        if launched or replayed:
            return replayed > 0 and launched < self.launches / 2
        return bool(self.record and self.record.options.get("cuda_graph"))

    def host_calls(self, pattern: re.Pattern[str]) -> HostCall:
        """The sum of the runtime functions whose names begin so."""
        calls = [call for name, call in self.table.host_calls.items() if pattern.match(name)]
        return HostCall(sum(c.calls for c in calls), sum(c.total_ns for c in calls))

    # --- the model and the chip ---

    @cached_property
    def sizes(self) -> flops.Sizes | None:
        """The model's; None without a record."""
        if self.run is None:
            return None
        names = [field.name for field in dataclasses.fields(flops.Sizes)]
        return flops.Sizes(**{name: int(self.run.config[name]) for name in names})

    def _needed_flops(self) -> float | None:
        if self.lab and self.lab.flops_per_step and self.steps:
            return self.lab.flops_per_step * self.steps
        if self.run is None or self.sizes is None or not self.steps:
            return None
        step = flops.step_flops(self.sizes, self.run.batch_size, self.run.seq_len)
        return step.total * self.steps

    @cached_property
    def peaks(self) -> chips.Peaks | None:
        """The chip's data sheet."""
        name = str(self.record.device.get("name")) if self.record else self.table.device
        return None if self.on_host or not name else chips.find_peaks(name)

    @property
    def precision(self) -> str:
        """The run's; empty without a record."""
        of_a_lab = self.lab.options.get("precision") if self.lab else ""
        return self.run.precision if self.run else str(of_a_lab or "")

    @property
    def peak_tflops(self) -> float | None:
        """At the run's precision."""
        return self.peaks.tflops.get(self.precision) if self.peaks else None

    # --- in words ---

    @property
    def calls(self) -> str:
        """Name of the table's rows."""
        return "operators" if self.on_host else "kernels"

    def of_all(self, ns: float) -> str:
        """As in "62% of the kernels' time"."""
        where = " on the CPU" if self.on_host else ""
        return f"{ns / self.total_ns:.0%} of the {self.calls}' time{where}"

    def share(self, ns: float) -> str:
        """As in "62% of the kernels' time (12.4 ms a step)"."""
        return f"{self.of_all(ns)} ({self.time(ns)})"

    def time(self, ns: float) -> str:
        """As in "12.4 ms a step"; "124 ms", of all of them, where the steps are not known."""
        return f"{duration(ns / self.steps)} a step" if self.steps else duration(ns)

    def times(self, count: float, what: str) -> str:
        """As in "385 kernels a step"; "770 kernels" where the steps are not known."""
        number = count / self.steps if self.steps else count
        what = _SINGULAR.get(what, what.removesuffix("s")) if number == 1 else what
        return f"{digits(number)} {what}{' a step' if self.steps else ''}"


def group(kernel: Kernel) -> str:
    """The group that a kernel is treated as: its category, but "elementwise" for all that moves
    memory on the device, which leaves "copy" to copies between host and device."""
    on_device = kernel.category == "copy" and not _HOST_COPY.search(kernel.name)
    if on_device or kernel.category == "norm":
        return "elementwise"
    return kernel.category if kernel.category in _GROUPS else "other"


def is_product(kernel: Kernel) -> bool:
    return kernel.category in ("GEMM", "attention")


def calls_of(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.calls for kernel in kernels)


def time_of(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.total_ns for kernel in kernels)


def duration(ns: float) -> str:
    """As in "12.4 ms": three digits, in the unit that makes them readable."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{digits(ns / size)} {unit}"
    return f"{digits(ns)} ns"


def digits(value: float) -> str:
    """Three of them, or all before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _recorded_steps(table: KernelTable, run: RunResult | LabRun | None) -> int | None:
    # ncu starts with the steps, and Proton's table has phases where it holds nothing else. The
    # other tools without marker ranges watch the warm-up too.
    steps_alone = table.tool == "ncu" or (table.tool == "proton" and table.phases_ns)
    if not steps_alone or run is None or run.status != "profiled":
        return None
    steps = run.options.get("num_steps")
    return steps if isinstance(steps, int) and steps > 0 else None
