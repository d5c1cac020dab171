"""Nsight Systems' reports as CSV, which `nsys stats` writes one file each:

    nsys stats --report cuda_gpu_kern_sum --format csv --output . report.nsys-rep

cuda_gpu_trace, where it was requested, has every kernel and copy with its start; otherwise
cuda_gpu_kern_sum and cuda_gpu_mem_time_sum have their sums. cuda_api_sum adds the calls on the
host, nvtx_sum or nvtx_pushpop_sum the number of steps, nvtx_kern_sum the phases of a step.

The headers are known from nsys's documentation and from outputs that others have published; no
output of our own has been read with this yet.
"""

import csv
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.profilers.names import printable
from workshop.profilers.reading import (
    BEFORE_HEADER,
    CsvTable,
    NoNumber,
    Problems,
    count,
    lines,
    nanoseconds,
)
from workshop.profilers.table import PHASES, STEP, HostCall, KernelTable, Sums

_KERNELS, _COPIES, _TRACE = "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "cuda_gpu_trace"
_HOST_CALLS, _RANGE_KERNELS = "cuda_api_sum", "nvtx_kern_sum"
_RANGES = ("nvtx_sum", "nvtx_pushpop_sum")
_COLUMNS = {
    _KERNELS: {"Total Time", "Instances", "Name"},
    _COPIES: {"Total Time", "Count", "Operation"},
    _TRACE: {"Start", "Duration", "CorrId", "Name"},
    _HOST_CALLS: {"Total Time", "Num Calls", "Name"},
    _RANGE_KERNELS: {"NVTX Range", "Total Time", "Kernel Name"},
    **{ranges: {"Instances", "Range"} for ranges in _RANGES},
}
"""The columns that each report needs; the units are left out."""
_ON_THE_GPU = (_TRACE, _KERNELS, _COPIES)
_FILE_ENDS = {f"{report}.csv": report for report in _COLUMNS}
"""The report by the end of its file's name, without ".gz"."""
STATS = "nsys stats --report cuda_gpu_kern_sum --format csv {path}"
"""The command that makes a report of what nsys itself keeps: .nsys-rep, .sqlite."""

_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}
_OUTPUT_OF_NSYS = ("Generating ", "Processing [", "NOTICE: ")
_NEXT_TABLE = re.compile(r"Processing \[|\s*\*\* |Time \(%\)|Start \(")


def recognises_header(columns: Iterable[str]) -> bool:
    """Whether a CSV file's first line with these columns is a header of a report on the GPU's
    kernels and copies, or the beginning of what nsys prints before one."""
    columns = list(columns)
    return any(name.startswith(_OUTPUT_OF_NSYS) for name in columns[:1]) or (
        _report_with(columns) in _ON_THE_GPU
    )


def hint(columns: Iterable[str]) -> str | None:
    """Advice for a report of nsys's, recognised by its columns, without kernels or with copies
    among them; None for other files."""
    bare = {_split(name)[0] for name in columns}
    if {"Time", "Total Time"} <= bare or {"Start", "Duration"} <= bare:
        return f"not one of nsys's reports that are read: take {_TRACE}, or {_KERNELS}"
    return None


def read(path: Path) -> KernelTable:
    """The kernels and copies of one profile.

    Args:
        path: a report; those beside it whose names begin alike belong to it. Or a folder, with
            the reports of one profile in it or below.

    Raises:
        WorkshopError: it can't be read, has no kernels, or is a folder with several profiles.
    """
    files = _reports_of(path)
    table, sums = KernelTable(path, "nsys", []), Sums()

    def add(add_report: Callable[["_Report"], None], report: str) -> None:
        """Adds a report. Its errors become warnings: the profile's others may be whole."""
        if report in files:
            problems = Problems(files[report])
            try:
                add_report(_Report(files[report], report, problems))
            except WorkshopError as error:
                table.warnings.append(str(error))
            else:
                table.warnings += problems.warnings()

    add(partial(_add_trace, sums), _TRACE)
    if not len(sums):
        add(partial(_add_sums, sums, "Name", "Instances"), _KERNELS)
        add(partial(_add_sums, sums, "Operation", "Count"), _COPIES)
    if not len(sums):
        raise WorkshopError("; ".join([f"{path}: no kernels in it", *table.warnings[:1]]))
    table.kernels, table.timeline = sums.kernels(), sums.timeline()
    table.device = re.sub(r" \(\d+\)$", "", str(sums.busiest() or "")) or None
    table.warnings += sums.warnings()
    add(partial(_add_host_calls, table), _HOST_CALLS)
    for ranges in _RANGES:
        add(partial(_count_steps, table), ranges)
    add(partial(_add_phases, table), _RANGE_KERNELS)
    return table


# --- finding the reports -------------------------------------------------------------------------


def _reports_of(path: Path) -> dict[str, Path]:
    """The files of a profile, by the report's name."""
    if path.is_dir():
        path = _only_profile(path)
    end = _end_of_name(path)
    if end is None:
        report, _ = _find_header(path)
        return {report: path}
    prefix = path.name.removesuffix(".gz").removesuffix(end)
    beside = {
        path.with_name(f"{prefix}{other}{packed}"): report
        for packed in (".gz", "")
        for other, report in _FILE_ENDS.items()
    }
    return {report: file for file, report in beside.items() if file == path or file.is_file()}


def _end_of_name(path: Path) -> str | None:
    """The part of a file's name that names its report; None if there is none."""
    name = path.name.removesuffix(".gz")
    return next((end for end in _FILE_ENDS if name.endswith(end)), None)


def _only_profile(folder: Path) -> Path:
    """A report on the kernels of the one profile in a folder."""
    profiles = {}
    for file in sorted(folder.rglob("*.csv*")):
        end = _end_of_name(file)
        if end and _FILE_ENDS[end] in _ON_THE_GPU:
            profiles[file.parent, file.name.removesuffix(".gz").removesuffix(end)] = file
    if not profiles:
        raise WorkshopError(f"{folder}: no report *{_KERNELS}.csv of nsys's in it")
    if len(profiles) > 1:
        names = ", ".join(file.name for file in list(profiles.values())[:3])
        raise WorkshopError(
            f"{folder}: reports of {len(profiles)} profiles ({names}): name one of the files"
        )
    return next(iter(profiles.values()))


def _report_with(columns: Iterable[str]) -> str | None:
    """The report that has these columns; None if there is none."""
    bare = {_split(name)[0] for name in columns}
    return next((report for report, wanted in _COLUMNS.items() if wanted <= bare), None)


def _split(column: str) -> tuple[str, str]:
    """A column's name and its unit: "Total Time (ns)"."""
    column = column.strip()
    if not column.endswith(")"):
        return column, ""
    name, _, unit = column[:-1].rpartition("(")
    return name.rstrip(), unit


def _find_header(path: Path) -> tuple[str, str]:
    """The report whose table comes first in a file, and the name of its first column."""
    for line in lines(path, BEFORE_HEADER):
        with suppress(csv.Error):
            columns = next(csv.reader([line]), [])
            if report := _report_with(columns):
                return report, columns[0].strip().lstrip("\ufeff")
    raise WorkshopError(f"{path}: no header of a report of nsys's in it; is it empty or cut off?")


class _Report:
    """One report's rows, read by the names of its columns, units left out."""

    def __init__(self, path: Path, report: str, problems: Problems) -> None:
        """
        Raises:
            WorkshopError: the file can't be read, or is not this report.
        """
        found, first_column = _find_header(path)
        if _COLUMNS[found] != _COLUMNS[report]:
            raise WorkshopError(f"{path}: has the columns of {found}, not of {report}")
        self._path, self._problems = path, problems
        self._table = CsvTable(path, problems, first_column=first_column)
        self._columns = {}
        for column, index in self._table.columns.items():
            name, unit = _split(column)
            self._columns[name] = index, unit
        if missing := _COLUMNS[report] - self._columns.keys():
            raise WorkshopError(
                f"{path}: its first table has no column {min(missing)}: let `nsys stats --output` "
                "write a file for each report"
            )

    def each(self, add: Callable[..., None], *columns: str) -> None:
        """Has `add` take these columns of every row, None for one that the report has not got; a
        row that it finds to hold no number is noted and left out. What nsys prints after the table,
        and further tables, are none of it."""
        width = 1 + max(self._table.columns.values())
        indices = [self._columns[name][0] if name in self._columns else None for name in columns]
        for row, fields in self._table.rows():
            if _NEXT_TABLE.match(fields[0]):
                return
            if len(fields) < width:
                self._problems.add(row, f"has only {len(fields)} fields")
                continue
            with self._problems.noted(row):
                add(*(None if index is None else fields[index] for index in indices))

    def unit_ns(self, column: str) -> float:
        """
        Raises:
            WorkshopError: the column's unit is none of time.
        """
        _, unit = self._columns.get(column, (None, "ns"))
        if unit not in _UNITS_NS:
            raise WorkshopError(f"{self._path}: {unit!r:.40} is no unit of time, of {column}")
        return _UNITS_NS[unit]


# --- reading them --------------------------------------------------------------------------------


def _add_trace(sums: Sums, report: _Report) -> None:
    start_unit, unit = report.unit_ns("Start"), report.unit_ns("Duration")

    def add(name: str, start: str, duration: str, device: str | None) -> None:
        start_ns = nanoseconds(start, start_unit)
        ns = nanoseconds(duration, unit)
        sums.add(_name(name), ns, start_ns=start_ns, device=device or None)

    report.each(add, "Name", "Start", "Duration", "Device")


def _add_sums(sums: Sums, name_column: str, calls_column: str, report: _Report) -> None:
    unit, least_unit, most_unit = map(report.unit_ns, ("Total Time", "Min", "Max"))

    def add(name: str, calls: str, total: str, shortest: str | None, longest: str | None) -> None:
        n, total_ns = count(calls), nanoseconds(total, unit)
        least = None if shortest is None else nanoseconds(shortest, least_unit)
        most = None if longest is None else nanoseconds(longest, most_unit)
        rounding = unit * n
        too_short = least is not None and least * n > total_ns + rounding
        if too_short or (most is not None and most * n < total_ns - rounding):
            raise NoNumber(f"{total!r:.40} does not lie between the calls' extremes")
        sums.add(_name(name), total_ns, calls=n, min_ns=least, max_ns=most)

    report.each(add, name_column, calls_column, "Total Time", "Min", "Max")


def _add_host_calls(table: KernelTable, report: _Report) -> None:
    unit_ns = report.unit_ns("Total Time")

    def add(name: str, calls: str, total: str) -> None:
        n, total_ns = count(calls), nanoseconds(total, unit_ns)
        call = table.host_calls.setdefault(_name(name), HostCall())
        call.calls += n
        call.total_ns += total_ns

    report.each(add, "Name", "Num Calls", "Total Time")


def _count_steps(table: KernelTable, report: _Report) -> None:
    """Sets the number of steps, where there are ranges named so."""

    def add(range_: str, instances: str) -> None:
        if _range_name(range_) == STEP:
            table.steps = max(table.steps or 0, count(instances))

    report.each(add, "Range", "Instances")


def _add_phases(table: KernelTable, report: _Report) -> None:
    """Sets the times of the phases that have kernels. nsys gives a kernel to the ranges of the
    thread that launched it, and autograd has a thread of its own by default."""
    unit_ns = report.unit_ns("Total Time")
    sums = dict.fromkeys(PHASES, 0.0)

    def add(range_: str, total: str) -> None:
        if (phase := _range_name(range_)) in PHASES:
            sums[phase] += nanoseconds(total, unit_ns)

    report.each(add, "NVTX Range", "Total Time")
    table.phases_ns = {phase: ns for phase, ns in sums.items() if ns}
    if table.phases_ns and "backward" not in table.phases_ns:
        table.warnings.append(
            "no kernel is in a range named backward: nsys gives a kernel to the ranges of the "
            "thread that launched it, and autograd has one of its own by default"
        )


def _name(text: str) -> str:
    """In printable form. Raises NoNumber: it is empty."""
    if not text:
        raise NoNumber("has no name")
    return printable(text)


def _range_name(text: str) -> str:
    """Without its domain: "PyTorch:step", or ":step" in the default one."""
    return text.rpartition(":")[2]
