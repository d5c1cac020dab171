"""Nsight Compute's CSV: the raw page (one row a launch) and the details page (one row a metric).

    ncu --import report.ncu-rep --csv --page raw

ncu runs one kernel at a time, several times over, with empty caches by default: the
times are those of a kernel alone, and there is no timeline. What it computes and moves, it counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers.names import printable
from workshop.profilers.reading import (
    BEFORE_HEADER,
    CsvTable,
    NoNumber,
    Problems,
    amount,
    lines,
    nanoseconds,
)
from workshop.profilers.table import KernelTable, Sums

_ID, _NAME, _PROCESS, _GPU = "ID", "Kernel Name", "Process ID", "Device"
_TIME = "gpu__time_duration.sum"
_TIME_LABEL = "Duration"
"""The details page's name for it when it comes from a section, and not from --metrics."""
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
_DEVICE = "device__attribute_display_name"
_COMPLAINTS = ("==ERROR==", "==WARNING==")
_NO_PERMISSION = (
    "the GPU's counters are for administrators only: ask for "
    "NVreg_RestrictProfilingToAdminUsers=0, see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)

# Operations by executed thread instruction: a fused multiply-add is two, and instructions on half
# precision work on pairs.
_OPS_PER_INSTRUCTION = {
    f"smsp__sass_thread_inst_executed_op_{prefix}{op}_pred_on.sum": width * operations
    for prefix, width in (("f", 1), ("d", 1), ("h", 2))
    for op, operations in (("add", 1), ("mul", 1), ("fma", 2))
}
# Matrix units: operations already, by data types. Those on integers are no floating-point ones.
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?!int)(\w{1,60})\.sum")
_VECTOR_KINDS = {"f": "FP32", "d": "FP64", "h": "FP16/BF16"}
"""By the first letter of the instruction: those on half precision take both of its types."""
TENSOR = " tensor"
"""Ends the kinds of operations that the tensor cores do, as in "BF16 tensor"."""

_WANTED = {_TIME, *_READ, *_WRITTEN, *CACHES.values(), *_BUSY.values(), _DEVICE}
_WANTED |= _OPS_PER_INSTRUCTION.keys()
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
    values: dict[str, str]
    """By the metric's name."""
    units: dict[str, str]
    process: str = ""
    gpu: str | None = None
    """The GPU's number."""


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

    Raises:
        WorkshopError: it can't be read.
    """
    before = lines(path, BEFORE_HEADER)
    return any(line.startswith(f'"{_ID}"') and f'"{_NAME}"' in line for line in before)


def hint(path: Path) -> str | None:
    """Reason why a file of ncu's has no page, as ncu says, and what to do; None for other files."""
    said = (line for line in lines(path, BEFORE_HEADER) if line.startswith(_COMPLAINTS))
    if not (first := printable(next(said, "").strip())):
        return None
    todo = _NO_PERMISSION if "ERR_NVGPUCTRPERM" in first else "solve this, and profile again"
    return f"ncu profiled no kernel: {first[:200].rstrip('.')}; {todo}"


def read(path: Path) -> KernelTable:
    """The kernels of a CSV file of either page, with bytes and operations where they were counted.

    Raises:
        WorkshopError: it can't be read, or has no kernel with a time.
    """
    problems = Problems(path)
    sums = Sums()
    device = None
    for launch in _launches(path, problems):
        with problems.noted(launch.row):
            _add(sums, launch)
            device = device or launch.values.get(_DEVICE)
    if not len(sums):
        raise _no_kernels(problems)
    kernels, warnings = sums.kernels(), sums.warnings() + problems.warnings()
    vector_units = _OPS_PER_INSTRUCTION.keys() & launch.values.keys()
    if vector_units and all(kernel.flops is None for kernel in kernels):
        warnings.append(
            "no operations are given: without the metrics of the tensor cores "
            "(sm__ops_path_tensor_*) they would be far too few"
        )
    return KernelTable(path, "ncu", kernels, device=device, warnings=warnings)


def read_counts(path: Path) -> Report:
    """As `read`, with operations by kind and bytes by level. What was not collected is absent.

    Raises:
        WorkshopError: it can't be read, or has no kernel with a time.
    """
    problems, total = Problems(path), Counted("all kernels")
    kernels: dict[str, Counted] = {}
    metrics: set[str] = set()
    device = None
    for launch in _launches(path, problems):
        with problems.noted(launch.row):
            counted = _counted(launch)
            kernels.setdefault(counted.name, Counted(counted.name)).add(counted)
            total.add(counted)
            metrics |= {name for name, value in launch.values.items() if value not in _MISSING}
            device = device or launch.values.get(_DEVICE)
    if not total.time_ns:
        raise _no_kernels(problems)
    ordered = sorted(kernels.values(), key=lambda kernel: (-kernel.time_ns, kernel.name))
    return Report(path, device, ordered, total, metrics, problems.warnings())


def _launches(path: Path, problems: Problems) -> Iterator[Launch]:
    table = CsvTable(path, problems, first_column=_ID)
    details = "Metric Name" in table.columns
    return _details_launches(table, problems) if details else _raw_launches(table, problems)


def _no_kernels(problems: Problems) -> WorkshopError:
    nothing = problems.error("kernels with a time")
    return WorkshopError(f"{nothing}; was ncu run with --metrics {_TIME}?")


def _raw_launches(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """One a row; the units are in the row below the header."""
    name = table.index(_NAME)
    process, gpu = table.columns.get(_PROCESS), table.columns.get(_GPU)
    columns = {metric: i for metric, i in table.columns.items() if _is_wanted(metric)}
    units = dict.fromkeys(columns, "")
    read = [name, *columns.values(), *(i for i in (process, gpu) if i is not None)]
    for index, (row, fields) in enumerate(_rows(table, problems, at_least=1 + max(read))):
        if fields[0]:
            values = {metric: fields[i] for metric, i in columns.items()}
            launched_by = "" if process is None else fields[process]
            device = None if gpu is None else fields[gpu]
            yield Launch(row, fields[name], values, units, launched_by, device)
        elif index == 0:
            units = {metric: fields[i] for metric, i in columns.items()}
        else:
            problems.add(row, "has no ID")


def _details_launches(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """One of several rows, one below the other: one of each metric."""
    name, metric = table.index(_NAME), table.index("Metric Name")
    unit, value = table.index("Metric Unit"), table.index("Metric Value")
    process, gpu = table.index(_PROCESS), table.columns.get(_GPU)
    at_least = 1 + max(name, metric, unit, value, process, gpu or 0)
    rows = _rows(table, problems, at_least)
    for _, group in groupby(rows, key=lambda row: (row[1][process], row[1][0])):
        row, fields = first = next(group)
        if not fields[0]:
            problems.add(row, "has no ID")
            continue
        device = None if gpu is None else fields[gpu]
        launch = Launch(row, fields[name], {}, {}, fields[process], device)
        for _, of_metric in chain((first,), group):
            wanted = _TIME if of_metric[metric] == _TIME_LABEL else of_metric[metric]
            if _is_wanted(wanted):
                launch.values[wanted], launch.units[wanted] = of_metric[value], of_metric[unit]
        yield launch


def _rows(table: CsvTable, problems: Problems, at_least: int) -> Iterator[tuple[int, list[str]]]:
    """The rows of launches, and of units, which have no ID; what ncu and the program print between
    them is no row."""
    for row, fields in table.rows():
        first = fields[0]
        if first.startswith("=="):  # "==PROF== Disconnected from process 4711"
            continue
        if len(fields) < at_least:
            problems.add(row, f"has only {len(fields)} fields")
        elif first.isdigit() or not first:
            yield row, fields
        else:
            problems.add(row, f"{first!r:.40} is no kernel's ID")


@lru_cache(maxsize=4096)
def _is_wanted(metric: str) -> bool:
    return metric in _WANTED or _TENSOR.fullmatch(metric) is not None


def _add(sums: Sums, launch: Launch) -> None:
    """Adds a launch. Raises NoNumber: it has no time, or a counter holds no number."""
    counted = _counted(launch)
    # Without a counter of the tensor cores there are no operations: what the other units do is
    # next to nothing in a product.
    known = any(kind.endswith(TENSOR) for kind in counted.operations)
    sums.add(
        launch.name,
        counted.time_ns,
        bytes=counted.moved.get(DRAM),
        flops=counted.flops if known else None,
        device=launch.gpu,
        process=launch.process,
    )


def _counted(launch: Launch) -> Counted:
    """Raises NoNumber: it has no name or time, or a counter holds no number."""
    if not launch.name:
        raise NoNumber("has no kernel name")
    time = launch.values.get(_TIME, "")
    if time in _MISSING:
        raise NoNumber(f"has no {_TIME}")
    unit = launch.units[_TIME]
    if unit not in _TIMES_NS:
        raise NoNumber(f"{unit!r:.40} is no unit of time")
    counted = Counted(printable(launch.name), 1, nanoseconds(time, _TIMES_NS[unit]))
    read, written = _count(launch, *_READ), _count(launch, *_WRITTEN)
    caches = {level: _count(launch, metric) for level, metric in CACHES.items()}
    if read is not None and written is not None:
        counted.moved[DRAM] = read + written
    counted.moved |= {level: moved for level, moved in caches.items() if moved is not None}
    for part, metric in _BUSY.items():
        if (percent := launch.values.get(metric, "")) not in _MISSING:
            counted.busy_ns[part] = counted.time_ns * amount(percent, 0.01)
    for metric, factor in _operation_counters(tuple(launch.values)):
        count = _count(launch, metric)
        if count is not None:
            kind = _kind(metric)
            counted.operations[kind] = counted.operations.get(kind, 0.0) + count * factor
    return counted


@lru_cache(maxsize=4096)
def _kind(metric: str) -> str:
    """The kind of operations that a metric counts; a tensor core's by the type that it reads."""
    tensor = _TENSOR.fullmatch(metric)
    if tensor:
        return tensor[1].split("_")[0].upper() + TENSOR
    return _VECTOR_KINDS[metric.removeprefix("smsp__sass_thread_inst_executed_op_")[0]]


@lru_cache(maxsize=4096)
def _operation_counters(metrics: tuple[str, ...]) -> list[tuple[str, int]]:
    """Those metrics that count floating-point operations, each with the operations in one."""
    counters = [(m, _OPS_PER_INSTRUCTION[m]) for m in metrics if m in _OPS_PER_INSTRUCTION]
    tensor = {match[1]: metric for metric in metrics if (match := _TENSOR.fullmatch(metric))}
    for types, metric in tensor.items():
        # A counter's parts have its name and a suffix: they are in its sum already.
        wholes = (types[: underscore.start()] for underscore in re.finditer("_", types))
        if not any(whole in tensor for whole in wholes):
            counters.append((metric, 1))
    return counters


def _count(launch: Launch, *metrics: str) -> float | None:
    """The first of these counters that was collected, in bytes or instructions; None without any.
    Raises NoNumber: it is no number, negative, or in an unknown unit."""
    for metric in metrics:
        if (text := launch.values.get(metric, "")) not in _MISSING:
            unit = launch.units[metric]
            if unit not in _COUNTS:
                raise NoNumber(f"{unit!r:.40} is no unit of a counter")
            return amount(text, _COUNTS[unit])
    return None
