"""Nsight Systems' reports as CSV, which `nsys stats` writes one file each:

    nsys stats --report cuda_gpu_kern_sum --format csv --output . report.nsys-rep

cuda_gpu_trace, where it was requested, has every kernel and copy with its start; otherwise
cuda_gpu_kern_sum and cuda_gpu_mem_time_sum have their sums. cuda_api_sum adds the calls on the
host, nvtx_sum or nvtx_pushpop_sum the number of steps, nvtx_kern_sum the phases of a step.

The headers are known from nsys's documentation and from outputs that others have published; no
output of our own has been read with this yet.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers import reading
from workshop.profilers.reading import CsvTable, Problems, count, nanoseconds
from workshop.profilers.table import PHASES, STEP, HostCall, KernelTable, Sums

_KERNELS, _COPIES, _TRACE = "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "cuda_gpu_trace"
_HOST_CALLS, _RANGE_KERNELS = "cuda_api_sum", "nvtx_kern_sum"
_RANGES = ("nvtx_sum", "nvtx_pushpop_sum")
_COLUMNS = {
    _KERNELS: ("Name", "Instances", "Total Time"),
    _COPIES: ("Operation", "Count", "Total Time"),
    _TRACE: ("Name", "Start", "Duration", "CorrId"),
    _HOST_CALLS: ("Name", "Num Calls", "Total Time"),
    _RANGE_KERNELS: ("NVTX Range", "Total Time", "Kernel Name"),
    **dict.fromkeys(_RANGES, ("Range", "Instances")),
}
"""The columns that each report needs, without their units."""
_ON_THE_GPU = (_TRACE, _KERNELS, _COPIES)
STATS = "nsys stats --report cuda_gpu_kern_sum --format csv {path}"
"""The command that makes a report of what nsys itself keeps: .nsys-rep, .sqlite."""

_FILE_NAME = re.compile(rf"(?P<profile>.*?)(?P<report>{'|'.join(_COLUMNS)})\.csv(?:\.gz)?")
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}


def recognises_header(columns: Iterable[str]) -> bool:
    """Whether a CSV file with these columns is a report on the GPU's kernels and copies."""
    return _report_with(columns) in _ON_THE_GPU


def read(path: Path) -> KernelTable:
    """The kernels and copies of one profile.

    Args:
        path: a report; those in its folder whose names begin alike belong to it. Or a folder, with
            the reports of one profile in it or below.

    Raises:
        WorkshopError: it can't be read, has no kernels, or is a folder with several profiles.
    """
    reports, problems, sums = _Reports(path), Problems(path), Sums()
    for name, start, duration, device in reports.rows(_TRACE, problems, "Device"):
        sums.add(name, duration, start_ns=start, device=device or None)
    for report in () if len(sums) else (_KERNELS, _COPIES):
        for row in reports.rows(report, problems, "Min", "Max"):
            sums.add(**row)
    if not len(sums):
        raise WorkshopError("; ".join([f"{path}: no kernels in it", *problems.warnings()[:1]]))
    table = KernelTable(path, "nsys", sums.kernels(), timeline=sums.timeline())
    table.device = re.sub(r" \(\d+\)$", "", str(sums.busiest() or "")) or None
    for row in reports.rows(_HOST_CALLS, problems):
        call = table.host_calls.setdefault(row["name"], HostCall())
        call.calls += row["calls"]
        call.total_ns += row["total_ns"]
    for report in _RANGES:
        for range_, instances in reports.rows(report, problems):
            if range_ == STEP:
                table.steps = max(table.steps or 0, instances)
    phases = dict.fromkeys(PHASES, 0.0)
    for range_, ns in reports.rows(_RANGE_KERNELS, problems):
        if range_ in PHASES:
            phases[range_] += ns
    table.phases_ns = {phase: ns for phase, ns in phases.items() if ns}
    table.warnings = sums.warnings() + problems.warnings()
    if table.phases_ns and "backward" not in table.phases_ns:
        table.warnings.append(
            "no kernel is in a range named backward: nsys gives a kernel to the ranges of the "
            "thread that launched it, and autograd has one of its own by default"
        )
    return table


class _Reports:
    """The reports of one profile."""

    def __init__(self, path: Path) -> None:
        path = _only_profile(path) if path.is_dir() else path
        match = _FILE_NAME.fullmatch(path.name)
        if not match:
            columns = CsvTable(path, Problems(path)).columns
            self._files = {_report_with(columns) or _KERNELS: path}
            return
        others = ((_FILE_NAME.fullmatch(file.name), file) for file in sorted(path.parent.iterdir()))
        self._files = {
            other["report"]: file
            for other, file in others
            if other and other["profile"] == match["profile"] and file.is_file()
        }
        self._files[match["report"]] = path

    def rows(self, report: str, problems: Problems, *optional: str) -> Iterator[Any]:
        """The rows of a report, if it is there, checked. Its errors are kept: the profile's other
        reports may be whole."""
        if report not in self._files:
            return
        path = self._files[report]
        of_file = problems.of(path)
        try:
            yield from _rows(path, report, of_file, optional)
        except WorkshopError as error:
            of_file.errors.append(error)


def _rows(path: Path, report: str, problems: Problems, optional: Iterable[str]) -> Iterator[Any]:
    """The rows of one report. Raises WorkshopError: the file can't be read, or is not this
    report."""
    table = CsvTable(path, problems)
    found = _report_with(table.columns)
    if found is None or _COLUMNS[found] != _COLUMNS[report]:
        raise WorkshopError(f"{path}: has the columns of {found or 'no report'}, not of {report}")
    names = {_split(column)[0]: column for column in table.columns}

    def unit_ns(column: str) -> float:
        unit = _split(names.get(column, "(ns)"))[1]
        if unit not in _UNITS_NS:
            raise WorkshopError(f"{path}: {unit!r:.40} is no unit of time, of {column}")
        return _UNITS_NS[unit]

    wanted = [names[column] for column in _COLUMNS[report]]
    others = [names.get(column, column) for column in optional]
    last = max(table.columns, key=table.columns.__getitem__)
    rows = table.select(last, *wanted, optional=others)
    for row, (_, text, *values) in rows:
        with problems.noted(row):
            if report == _TRACE:
                start = nanoseconds(values[0], unit_ns("Start"))
                duration = nanoseconds(values[1], unit_ns("Duration"))
                yield reading.name(text), start, duration, values[-1]
            elif report in _RANGES:
                yield _range_name(text), count(values[0])
            elif report == _RANGE_KERNELS:
                yield _range_name(text), nanoseconds(values[0], unit_ns("Total Time"))
            else:
                units = (unit_ns("Total Time"), unit_ns("Min"), unit_ns("Max"))
                calls, total, least, most = (*values, None, None)[:4]
                yield reading.sums(text, calls, total, least, most, units)


def _only_profile(folder: Path) -> Path:
    """A report on the kernels of the one profile in a folder."""
    profiles = {}
    for file in sorted(folder.rglob("*.csv*")):
        match = _FILE_NAME.fullmatch(file.name)
        if match and match["report"] in _ON_THE_GPU:
            profiles[file.parent, match["profile"]] = file
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
    return next((report for report, wanted in _COLUMNS.items() if {*wanted} <= bare), None)


def _split(column: str) -> tuple[str, str]:
    """A column's name and its unit: "Total Time (ns)"."""
    column = column.strip().lstrip("\ufeff")
    if not column.endswith(")"):
        return column, ""
    name, _, unit = column[:-1].rpartition("(")
    return name.rstrip(), unit


def _range_name(text: str) -> str:
    """Without its domain: "PyTorch:step", or ":step" in the default one."""
    return text.rpartition(":")[2]
