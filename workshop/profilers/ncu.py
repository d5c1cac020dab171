"""Nsight Compute's CSV: the raw page (one row a launch) and the details page (one row a metric).

    ncu --import report.ncu-rep --csv --page raw

ncu runs one kernel at a time, several times over, with empty caches by default: the
times are those of a kernel alone, and there is no timeline. What it computes and moves, it counts.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from workshop.errors import WorkshopError
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

_ID, _NAME = "ID", "Kernel Name"
_TIME = "gpu__time_duration.sum"
_TIME_LABEL = "Duration"
"""What the details page calls it when it comes from a section, and not from --metrics."""
_READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
_WRITTEN = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")
"""The second is what Blackwell calls it."""
_DEVICE = "device__attribute_display_name"

# Operations by executed thread instruction: a fused multiply-add is two, and instructions on half
# precision work on pairs.
_OPS_PER_INSTRUCTION = {
    f"smsp__sass_thread_inst_executed_op_{prefix}{op}_pred_on.sum": width * operations
    for prefix, width in (("f", 1), ("d", 1), ("h", 2))
    for op, operations in (("add", 1), ("mul", 1), ("fma", 2))
}
# Matrix units: operations already, by data types. Those on integers are no floating-point ones.
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?!int)(\w{1,60})\.sum")

_WANTED = {_TIME, *_READ, *_WRITTEN, _DEVICE, *_OPS_PER_INSTRUCTION}
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
    """What a page has on one launch of a kernel."""

    row: int
    name: str
    values: dict[str, str]
    """By the metric's name."""
    units: dict[str, str]


def recognises(path: Path) -> bool:
    """Whether a file is a page of ncu's in CSV, with or without a program's output before it.

    Raises:
        WorkshopError: it can't be read.
    """
    before = lines(path, BEFORE_HEADER)
    return any(line.startswith(f'"{_ID}"') and f'"{_NAME}"' in line for line in before)


def read(path: Path) -> KernelTable:
    """The kernels of a CSV file of either page, with bytes and operations where they were counted.

    Raises:
        WorkshopError: it can't be read, or has no kernel with a time.
    """
    problems = Problems(path)
    table = CsvTable(path, problems, first_column=_ID)
    details = "Metric Name" in table.columns
    launches = _details_launches(table, problems) if details else _raw_launches(table, problems)
    sums = Sums()
    device = None
    for launch in launches:
        with problems.noted(launch.row):
            _add(sums, launch)
            device = device or launch.values.get(_DEVICE)
    if not len(sums):
        nothing = problems.error("kernels with a time")
        raise WorkshopError(f"{nothing}; was ncu run with --metrics {_TIME}?")
    kernels, warnings = sums.kernels(), problems.warnings()
    vector_units = _OPS_PER_INSTRUCTION.keys() & launch.values.keys()
    if vector_units and all(kernel.flops is None for kernel in kernels):
        warnings.append(
            "no operations are given: without the metrics of the tensor cores "
            "(sm__ops_path_tensor_*) they would be far too few"
        )
    return KernelTable(path, "ncu", kernels, device=device, warnings=warnings)


def _raw_launches(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """One a row; the units are in the row below the header."""
    name = table.index(_NAME)
    columns = {metric: i for metric, i in table.columns.items() if _is_wanted(metric)}
    units = dict.fromkeys(columns, "")
    rows = _rows(table, problems, at_least=1 + max(name, *columns.values(), 0))
    for index, (row, fields) in enumerate(rows):
        if fields[0]:
            values = {metric: fields[i] for metric, i in columns.items()}
            yield Launch(row, fields[name], values, units)
        elif index == 0:
            units = {metric: fields[i] for metric, i in columns.items()}
        else:
            problems.add(row, "has no ID")


def _details_launches(table: CsvTable, problems: Problems) -> Iterator[Launch]:
    """One of several rows, one below the other: one of each metric."""
    name, metric = table.index(_NAME), table.index("Metric Name")
    unit, value = table.index("Metric Unit"), table.index("Metric Value")
    process = table.index("Process ID")
    at_least = 1 + max(name, metric, unit, value, process)
    rows = _rows(table, problems, at_least)
    for _, group in groupby(rows, key=lambda row: (row[1][process], row[1][0])):
        row, fields = first = next(group)
        if not fields[0]:
            problems.add(row, "has no ID")
            continue
        launch = Launch(row, fields[name], {}, {})
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
    if not launch.name:
        raise NoNumber("has no kernel name")
    time = launch.values.get(_TIME, "")
    if time in _MISSING:
        raise NoNumber(f"has no {_TIME}")
    unit = launch.units[_TIME]
    if unit not in _TIMES_NS:
        raise NoNumber(f"{unit!r:.40} is no unit of time")
    time_ns = nanoseconds(time, _TIMES_NS[unit])
    read, written = _count(launch, *_READ), _count(launch, *_WRITTEN)
    moved = None if read is None or written is None else read + written
    sums.add(launch.name, time_ns, bytes=moved, flops=_flops(launch))


def _flops(launch: Launch) -> float | None:
    """Floating-point operations of a launch; None where no counter of the tensor cores was
    collected: what the other units do is next to nothing in a product."""
    operations, of_tensor_cores = 0.0, False
    for metric, factor in _operation_counters(tuple(launch.values)):
        count = _count(launch, metric)
        if count is not None:
            operations += count * factor
            of_tensor_cores |= metric not in _OPS_PER_INSTRUCTION
    return operations if of_tensor_cores else None


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
