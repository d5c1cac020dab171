"""Nsight Compute's CSV: the raw page (one row a launch) and the details page (one row a metric).

    ncu --import report.ncu-rep --csv --page raw

ncu runs one kernel at a time, several times over, with empty caches by default: the
times are those of a kernel alone, and there is no timeline. What it computes and moves, it counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers.names import printable
from workshop.profilers.reading import (
    BEFORE_HEADER,
    CsvTable,
    Invalid,
    Problems,
    amount,
    lines,
    nanoseconds,
)
from workshop.profilers.table import KernelTable, Sums

_ID, _NAME, _PROCESS, _GPU = "ID", "Kernel Name", "Process ID", "Device"
_METRIC = ("Metric Name", "Metric Unit", "Metric Value")
_TIME = "gpu__time_duration.sum"
_READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
_WRITTEN = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")
"""The second is what Blackwell calls it."""
CACHES = {"L2": "lts__t_bytes.sum", "L1": "l1tex__t_bytes.sum"}
DRAM = "DRAM"
LEVELS = (DRAM, *CACHES)
"""Where bytes are counted, from the memory up to the level that the cores ask."""
_BUSY = {
    part: f"{part.lower()}__throughput.avg.pct_of_peak_sustained_elapsed" for part in ("SM", DRAM)
}
_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
"""ncu's achieved occupancy: the mean of the warps that were active on an SM while it worked."""
_LABELS = {"Duration": _TIME, "Achieved Occupancy": _WARPS}
"""Metrics by the details page's names for them when they come from a section, and not from
--metrics."""
_DEVICE = "device__attribute_display_name"
_VECTOR_KINDS = {"f": ("FP32", 1), "d": ("FP64", 1), "h": ("FP16/BF16", 2)}
"""Kinds of operations by the first letter of the instruction, and how many numbers it takes: those
on half precision take both of its types, and work on pairs."""
_VECTOR = {
    f"smsp__sass_thread_inst_executed_op_{prefix}{op}_pred_on.sum": (kind, width * operations)
    for prefix, (kind, width) in _VECTOR_KINDS.items()
    for op, operations in (("add", 1), ("mul", 1), ("fma", 2))
}
"""The kind of operations and their number by executed thread instruction, by metric."""
# Matrix units: operations already, by data types. Those on integers are no floating-point ones.
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?!int)(\w{1,60})\.sum")
TENSOR = " tensor"
"""Ends the kinds of operations that the tensor cores do, as in "BF16 tensor"."""

_WANTED = {_TIME, *_READ, *_WRITTEN, *CACHES.values(), *_BUSY.values(), _WARPS, _DEVICE, *_VECTOR}
_TIMES_NS = {
    **dict.fromkeys(("", "ns", "nsec", "nsecond"), 1.0),
    **dict.fromkeys(("us", "usec", "usecond"), 1e3),
    **dict.fromkeys(("ms", "msec", "msecond"), 1e6),
    **dict.fromkeys(("s", "sec", "second"), 1e9),
}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_COUNTS = {
    prefix + unit: factor for prefix, factor in _PREFIXES.items() for unit in ("", "byte", "inst")
}
_MISSING = frozenset(("", "n/a", "N/A", "nan"))


class Launch(NamedTuple):
    """One launch of a kernel, as a page has it."""

    row: int
    name: str
    process: str | None
    gpu: str | None
    """The GPU's number."""
    metrics: dict[str, tuple[str, str]]
    """Value and unit of those that are wanted and were collected."""


@dataclass
class Counted:
    """ncu's counts of one kernel, over all its launches."""

    name: str
    calls: int = 0
    time_ns: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)
    """By kind: "FP32", "FP64" and "FP16/BF16" of the vector units, "BF16 tensor" and its like."""
    moved: dict[str, float] = field(default_factory=dict)
    """Bytes by level, of those among LEVELS that were collected."""
    busy_ns: dict[str, float] = field(default_factory=dict)
    """By part of the chip, "SM" and "DRAM": the time, each launch by the share of the part's peak
    that ncu says it reached."""
    occupancy_ns: float | None = None
    """As `Kernel.occupancy_ns`, for one launch."""

    @property
    def flops(self) -> float:
        return sum(self.operations.values())

    def add(self, other: "Counted") -> None:
        self.calls += other.calls
        self.time_ns += other.time_ns
        for name in ("operations", "moved", "busy_ns"):
            mine: dict[str, float] = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0.0) + value


@dataclass
class Report:
    """All that was counted of a run; `kernels` comes longest total first."""

    path: Path
    device: str | None
    kernels: list[Counted]
    total: Counted
    metrics: set[str]
    """Those that were collected, of all that are read here."""
    warnings: list[str]
    """Sentences: rows that could not be read."""


def recognises(path: Path) -> bool:
    """Whether a file is a page of ncu's in CSV, with or without a program's output before it.
    Raises WorkshopError: it can't be read."""
    before = lines(path, BEFORE_HEADER)
    return any(line.startswith(f'"{_ID}"') and f'"{_NAME}"' in line for line in before)


def read(path: Path) -> KernelTable:
    """The kernels of a CSV file of either page, with bytes and operations where they were counted.
    Raises WorkshopError: it can't be read, or has no kernel with a time."""
    problems, sums, without_tensor = Problems(path), Sums(), False
    device = None
    for launch, counted in _counted_launches(path, problems):
        # Without a counter of the tensor cores there are no operations: what the other units do is
        # next to nothing in a product.
        known = any(kind.endswith(TENSOR) for kind in counted.operations)
        without_tensor |= bool(_VECTOR.keys() & launch.metrics.keys())
        sums.add(
            counted.name,
            counted.time_ns,
            bytes=counted.moved.get(DRAM),
            flops=counted.flops if known else None,
            occupancy_ns=counted.occupancy_ns,
            device=launch.gpu,
            process=launch.process or "",
        )
        device = device or launch.metrics.get(_DEVICE, (None, ""))[0]
    if not len(sums):
        raise _no_kernels(problems)
    kernels, warnings = sums.kernels(), sums.warnings() + problems.warnings()
    if without_tensor and all(kernel.flops is None for kernel in kernels):
        warnings.append(
            "no operations are given: without the metrics of the tensor cores "
            "(sm__ops_path_tensor_*) they would be far too few"
        )
    return KernelTable(path, "ncu", kernels, device=device, warnings=warnings)


def read_counts(path: Path) -> Report:
    """As `read`, with operations by kind and bytes by level. What was not collected is absent.
    Raises WorkshopError: it can't be read, or has no kernel with a time."""
    problems, total = Problems(path), Counted("all kernels")
    kernels: dict[str, Counted] = {}
    metrics: set[str] = set()
    device = None
    for launch, counted in _counted_launches(path, problems):
        kernels.setdefault(counted.name, Counted(counted.name)).add(counted)
        total.add(counted)
        metrics |= launch.metrics.keys()
        device = device or launch.metrics.get(_DEVICE, (None, ""))[0]
    if not total.time_ns:
        raise _no_kernels(problems)
    ordered = sorted(kernels.values(), key=lambda kernel: (-kernel.time_ns, kernel.name))
    return Report(path, device, ordered, total, metrics, problems.warnings())


def _no_kernels(problems: Problems) -> WorkshopError:
    nothing = problems.error("kernels with a time")
    return WorkshopError(f"{nothing}; was ncu run with --metrics {_TIME}?")


# --- launches ------------------------------------------------------------------------------------


def _counted_launches(path: Path, problems: Problems) -> Iterator[tuple[Launch, Counted]]:
    table = CsvTable(path, problems, first_column=_ID)
    page = _details if _METRIC[0] in table.columns else _raw
    for launch in page(table, problems):
        with problems.noted(launch.row):
            yield launch, _counted(launch)


def _raw(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """One launch a row; the units are in the row below the header."""
    metrics = list(filter(_is_wanted, table.columns))
    units = [""] * len(metrics)
    rows = table.select(_ID, _NAME, *metrics, optional=(_PROCESS, _GPU))
    for index, (row, (number, name, *values, process, gpu)) in enumerate(rows):
        if index == 0 and not number:
            units = values
        elif _is_launch(row, number, problems):
            pairs = zip(metrics, zip(values, units, strict=True), strict=True)
            found = {metric: pair for metric, pair in pairs if pair[0] not in _MISSING}
            yield Launch(row, name, process, gpu, found)


def _details(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """A launch is several rows, one below the other: one of each metric."""
    rows = table.select(_ID, _NAME, *_METRIC, _PROCESS, optional=[_GPU])
    launched = (one for one in rows if _is_launch(one[0], one[1][0], problems))
    for _, group in groupby(launched, key=lambda one: (one[1][5], one[1][0])):
        launch = None
        for row, (_, name, metric, unit, value, process, gpu) in group:
            launch = launch or Launch(row, name, process, gpu, {})
            metric = _LABELS.get(metric, metric)
            if _is_wanted(metric) and value not in _MISSING:
                launch.metrics[metric] = value, unit
        assert launch
        yield launch


def _is_launch(row: int, number: str, problems: Problems) -> bool:
    """Whether a row is a launch, by its ID; ncu and the program print other lines between them."""
    if not number.isdigit():
        problems.add(row, f"{number!r:.40} is no kernel's ID")
    return number.isdigit()


@lru_cache(maxsize=4096)
def _is_wanted(metric: str) -> bool:
    return metric in _WANTED or _TENSOR.fullmatch(metric) is not None


def _counted(launch: Launch) -> Counted:
    """Raises Invalid: it has no name or time, or a counter holds no number."""
    if not launch.name:
        raise Invalid("has no kernel name")
    if _TIME not in launch.metrics:
        raise Invalid(f"has no {_TIME}")
    time, unit = launch.metrics[_TIME]
    if unit not in _TIMES_NS:
        raise Invalid(f"{unit!r:.40} is no unit of time")
    counted = Counted(printable(launch.name), 1, nanoseconds(time, _TIMES_NS[unit]))
    read, written = _count(launch, *_READ), _count(launch, *_WRITTEN)
    if read is not None and written is not None:
        counted.moved[DRAM] = read + written
    for level, metric in CACHES.items():
        if (moved := _count(launch, metric)) is not None:
            counted.moved[level] = moved
    for part, metric in _BUSY.items():
        if metric in launch.metrics:
            percent = launch.metrics[metric][0]
            counted.busy_ns[part] = counted.time_ns * amount(percent, 0.01)
    if _WARPS in launch.metrics:
        counted.occupancy_ns = counted.time_ns * amount(launch.metrics[_WARPS][0], 0.01)
    for metric, kind, factor in _operation_counters(tuple(launch.metrics)):
        number = _count(launch, metric) or 0.0
        counted.operations[kind] = counted.operations.get(kind, 0.0) + number * factor
    return counted


@lru_cache(maxsize=4096)
def _operation_counters(metrics: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Those metrics that count floating-point operations, each with the kind of these (a tensor
    core's by the type that it reads) and the operations in one count."""
    counters = [(metric, *_VECTOR[metric]) for metric in metrics if metric in _VECTOR]
    tensor = {match[1]: metric for metric in metrics if (match := _TENSOR.fullmatch(metric))}
    for types, metric in tensor.items():
        # A counter's parts have its name and a suffix: they are in its sum already.
        wholes = (types[: underscore.start()] for underscore in re.finditer("_", types))
        if not any(whole in tensor for whole in wholes):
            counters.append((metric, types.split("_")[0].upper() + TENSOR, 1))
    return counters


def _count(launch: Launch, *metrics: str) -> float | None:
    """The first of these counters that was collected, in bytes or instructions; None without any.
    Raises Invalid: it is no number, negative, or in an unknown unit."""
    found = next((metric for metric in metrics if metric in launch.metrics), None)
    if found is None:
        return None
    text, unit = launch.metrics[found]
    if unit not in _COUNTS:
        raise Invalid(f"{unit!r:.40} is no unit of a counter")
    return amount(text, _COUNTS[unit])
