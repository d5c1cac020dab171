"""rocprofv3's output: CSV of ROCm 6.3 and later, rocpd databases, and folders of them. rocprof-sys
writes such databases too.

A traced process leaves a set of files, `<prefix>_kernel_trace.csv` and its like or
`<prefix>_results.db`. By default they lie in a folder with the host's name and the
prefix is the process's number; the passes of a run under counters get folders of their own. A
domain without events leaves no file.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers import reading
from workshop.profilers.amd_counters import Counters
from workshop.profilers.names import printable
from workshop.profilers.reading import CsvTable, NoNumber, Problems
from workshop.profilers.rocprofv3_formats import (
    Count,
    Event,
    Files,
    Notes,
    Process,
    Sum,
    from_database,
    from_tables,
    interval,
)
from workshop.profilers.table import PHASES, STEP, HostCall, KernelTable, Ranges, Sums

_COPY = "MEMORY_COPY_"

_HEADERS: Mapping[str, frozenset[str]] = {
    "counter_collection": frozenset(
        ("Correlation_Id", "Dispatch_Id", "Kernel_Name", "Counter_Name", "Counter_Value")
    ),
    "kernel_trace": frozenset(
        ("Correlation_Id", "Dispatch_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
    ),
    "memory_copy_trace": frozenset(("Kind", "Direction", "Start_Timestamp", "End_Timestamp")),
    "api_trace": frozenset(("Domain", "Function", "Start_Timestamp", "End_Timestamp")),
    "stats": frozenset(("Name", "Calls", "TotalDurationNs")),
}
"""The columns that identify a table; the first match counts."""
_API_TRACES = ("hip_api_trace", "hsa_api_trace", "marker_api_trace")
_SUMS = ("kernel_stats", "memory_copy_stats", "hip_api_stats")
_OTHER_SUMS = re.compile(
    r"(?:domain|marker_api|hsa_api|rccl_api|memory_allocation|scratch_memory)_stats"
)
_TABLES = ("kernel_trace", "memory_copy_trace", "counter_collection", "agent_info")
_CSV_NAME = re.compile(
    rf"(?:(?P<prefix>.*)_)?(?P<table>{'|'.join(_TABLES + _API_TRACES + _SUMS)})\.csv(?:\.gz)?"
)


def read(path: Path) -> KernelTable:
    """The kernels and copies in a file of rocprofv3's, or in all that a folder holds.

    Of a folder's runs, those that trace every dispatch go before those with sums only, and those
    without counters before those with them, under which kernels take longer and never overlap.
    Where there are several, the first by name is read.

    If the run marks its steps and traces the host's calls, the table is that of the steps, without
    start-up and warm-up.

    Bytes and operations come from counters, which other runs collected than the one that gave the
    times: they are the means over the dispatches of a kernel, times its calls. A copy's bytes are
    those that it moved.

    Raises:
        WorkshopError: it can't be read, or has neither kernels, nor host calls, nor steps in it.
    """
    notes, counters = Notes(path), Counters()
    runs: dict[Path, list[Process]] = {}
    with contextlib.ExitStack() as stack:
        for files in _sets_below(path) if path.is_dir() else [_set_of(path)]:
            runs.setdefault(files.run, []).extend(_processes(files, stack, notes))
        table = _first_table(path, runs, counters, notes)
        if table is None:
            raise notes.nothing_found("kernels, host calls or steps")
        for process in chain.from_iterable(runs.values()):
            _add_counts(process, counters, notes)
    counters.fill(table.kernels)
    table.warnings += counters.warnings(table.device) + notes.warnings()
    return table


def recognises(folder: Path) -> bool:
    """Whether a folder holds, at any depth, a file that `read` reads."""
    return bool(_sets_below(folder))


def recognises_header(columns: list[str]) -> bool:
    """Whether a CSV file with these columns is one that `read` reads."""
    return _table_with(columns) is not None


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database, under any name."""
    if not path.is_file():
        return False
    with reading.readable(path), path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


# --- which files there are ---


def _table_with(columns: Iterable[str]) -> str | None:
    has = set(columns)
    return next((table for table, needs in _HEADERS.items() if needs <= has), None)


def _set_of(path: Path) -> Files:
    """A file by itself, known by its content; what a table of sums sums, by its name."""
    files = Files(path.parent, path.name)
    if is_database(path):
        files.database = path
        return files
    columns = CsvTable(path, Problems(path)).columns
    table = _table_with(columns)
    if table is None:
        raise WorkshopError(
            f"{path}: none of the tables that rocprofv3 writes; "
            f"its columns are {printable(', '.join(columns)):.200}"
        )
    if table == "api_trace":  # one header for all domains, which the rows name
        files.tables = dict.fromkeys(_API_TRACES, path)
    elif table == "stats":
        if _OTHER_SUMS.search(path.name):
            raise WorkshopError(f"{path}: sums of other events than kernels; give the folder")
        files.tables = {next((name for name in _SUMS if name in path.name), _SUMS[0]): path}
    else:
        files.tables = {table: path}
    return files


def _sets_below(folder: Path) -> list[Files]:
    """All files below a folder that rocprofv3 may have written, by process. Where none has a name
    that the tool gives, they are known by their content, each for itself."""
    sets: dict[tuple[Path, str], Files] = {}

    def set_of(path: Path, prefix: str) -> Files:
        # A number is the process's, in a folder with the host's name; others are the user's.
        run = path.parent.parent if prefix.isdigit() else path.parent
        return sets.setdefault((path.parent, prefix), Files(run, f"{path.parent.name}/{prefix}"))

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        if match := _CSV_NAME.fullmatch(path.name):
            set_of(path, match["prefix"] or "").tables[match["table"]] = path
        elif path.suffix == ".db" and is_database(path):
            set_of(path, path.stem.removesuffix("results").rstrip("_")).database = path
    return list(sets.values()) or list(_sets_by_content(paths))


def _sets_by_content(paths: Iterable[Path]) -> Iterator[Files]:
    for path in paths:
        with contextlib.suppress(WorkshopError):
            if path.name.removesuffix(".gz").endswith(".csv"):
                yield _set_of(path)


# --- the table, from what the processes did ---


def _processes(files: Files, stack: contextlib.ExitStack, notes: Notes) -> list[Process]:
    """Those in a set of files: from its database, if that can be read, or its CSV."""
    try:
        if files.database is not None:
            return from_database(files.database, files, stack)
    except WorkshopError as error:
        notes.errors.append(error)
    return [from_tables(files)] if files.tables.keys() - {"agent_info"} else []


def _first_table(
    path: Path, runs: Mapping[Path, list[Process]], counters: Counters, notes: Notes
) -> KernelTable | None:
    """The table of the run whose times mislead least; of one with kernels, if there is any."""
    ranked = sorted(runs, key=lambda run: (_rank(runs[run]), run))
    without_kernels = []
    for index, folder in enumerate(ranked):
        run = _Run(runs[folder], counters, notes)
        table = run.table(path)
        if table.kernels:
            table.warnings += [
                f"{other} holds another run, which is left out"
                for other in ranked[index + 1 :]
                if _has_kernels(runs[other]) and not _has_counters(runs[other])
            ]
            return table
        without_kernels.append(table)
    return next((table for table in without_kernels if table.host_calls or table.steps), None)


def _has_kernels(processes: Iterable[Process]) -> bool:
    return any(one.kernels or one.kernel_sums or one.counts for one in processes)


def _has_counters(processes: Iterable[Process]) -> bool:
    return any(one.counts for one in processes)


def _rank(processes: list[Process]) -> tuple[bool, bool, bool]:
    """Sort key: the run whose times mislead least comes first."""
    only_sums = not any(process.kernels for process in processes)
    return not _has_kernels(processes), _has_counters(processes), only_sums


class _Part:
    """A run's kernels, copies and calls, or those of a part of it."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.host_calls: dict[str, HostCall] = {}
        self.phases_ns = dict.fromkeys(("", *PHASES), 0.0)
        """Time of kernels and copies; under "" of those in no phase."""
        self.kernels = 0

    def add_kernel(self, name: str, ns: float, phase: str = "", **more: Any) -> None:
        self.sums.add(name, ns, **more)
        self.phases_ns[phase] += ns
        self.kernels += 1

    def add_copy(self, direction: str, ns: float, phase: str = "", **more: Any) -> None:
        # Versions differ in whether they put the operation's prefix before it.
        self.sums.add(_COPY + direction.removeprefix(_COPY), ns, category="copy", **more)
        self.phases_ns[phase] += ns

    def add_host_call(self, name: str, ns: float, *, calls: int = 1, **_: object) -> None:
        call = self.host_calls.setdefault(name, HostCall())
        call.calls += calls
        call.total_ns += ns


def _add_counts(
    process: Process, counters: Counters, notes: Notes, part: _Part | None = None
) -> None:
    """Adds a process's counters and, to `part`, the dispatches that they are of. They can be read
    once."""
    counts, process.counts = process.counts, None
    if counts is None:
        return
    path, timed = counts.problems.path, set[Hashable]()

    def add_count(row: Count) -> None:
        _, kernel, counter, value, dispatch, start, end, device = row
        counters.add(_name(kernel), counter, value)
        if part is not None and dispatch not in timed:
            if start is None or end is None:
                raise WorkshopError(
                    f"{path}: no times in it, as ROCm 6.2 writes counters; give the folder that "
                    "has the kernel trace too"
                )
            ns = interval(start, end)[1]
            part.add_kernel(kernel, ns, device=device, process=process.name)
            timed.add(dispatch)

    notes.each(counts, add_count)


class _Run:
    """Adds up the processes of one run: all that they did, and what their marked steps launched.
    The rest is start-up and warm-up, which rocprofv3 watches too."""

    def __init__(self, processes: list[Process], counters: Counters, notes: Notes) -> None:
        self._processes, self._counters, self._notes = processes, counters, notes
        self._whole, self._in_steps = _Part(), _Part()
        self._steps = 0
        self._phases: set[str] = set()
        self._calls_traced = False
        self._under_counters = _has_counters(processes)
        for process in processes:
            self._add(process)

    def table(self, path: Path) -> KernelTable:
        """Without the bytes and operations that come from counters."""
        part = self._in_steps if self._in_steps.kernels else self._whole
        table = KernelTable(
            path,
            next((process.tool for process in self._processes), "rocprofv3"),
            part.sums.kernels(),
            device=next((process.device for process in self._processes if process.device), None),
            steps=self._steps or None,
            host_calls=part.host_calls,
        )
        phases_ns = {phase: part.phases_ns[phase] for phase in PHASES if phase in self._phases}
        if any(phases_ns.values()):
            table.phases_ns = phases_ns
        table.timeline, table.warnings = part.sums.timeline(), part.sums.warnings()
        if table.kernels and self._under_counters:
            table.warnings.append(
                "times are those of a run under counters, where kernels take longer and run one "
                "at a time"
            )
        if part is self._in_steps:
            whole = self._whole.sums.kernels()
            if calls := sum(kernel.calls for kernel in whole) - table.launches:
                milliseconds = (sum(kernel.total_ns for kernel in whole) - table.total_ns) / 1e6
                table.warnings.append(
                    "left out what was launched outside of the marked steps: "
                    f"{calls:,} kernels and copies, {milliseconds:,.1f} ms"
                )
        elif self._steps and table.kernels:
            table.steps = None
            why = (
                "no call in the marked steps launched a kernel"
                if self._calls_traced
                else "without a trace of the HIP runtime it is unknown what the marked steps "
                "launched"
            )
            table.warnings.append(
                f"{why}: these are the kernels of the whole run, warm-up included"
            )
        return table

    def _add(self, process: Process) -> None:
        launches, each, whole = _Launches(process.name), self._notes.each, self._whole
        add_kernel = partial(whole.add_kernel, process=process.name)
        add_copy = partial(whole.add_copy, process=process.name)
        if each(process.markers, partial(self._add_range, launches)):
            launches.close_ranges()
            each(process.hsa_calls, partial(_place_call, launches))
        self._steps = max(self._steps, len(launches.steps))
        if each(process.host_calls, partial(self._add_call, launches)):
            self._calls_traced = True
        else:
            each(process.host_call_sums, partial(_add_sum, whole.add_host_call))
        traced = each(process.kernels, partial(self._add_kernel, launches))
        if not traced and not each(process.kernel_sums, partial(_add_sum, add_kernel)):
            _add_counts(process, self._counters, self._notes, whole)
        # Where only sums of the kernels are known, the copies alone make no timeline.
        in_timeline = traced > 0 and not self._under_counters
        if not each(process.copies, partial(self._add_copy, launches, in_timeline=in_timeline)):
            each(process.copy_sums, partial(_add_sum, add_copy))

    def _add_range(self, launches: "_Launches", event: Event) -> None:
        _, name, start, end, *_ = event
        launches.add_range(name, *interval(start, end))
        if name in PHASES:
            self._phases.add(name)

    def _add_call(self, launches: "_Launches", event: Event) -> None:
        _, name, start, end, correlation, *_ = event
        first, ns = interval(start, end)
        for part in self._parts(launches.add_call(correlation, first)):
            part.add_host_call(_name(name), ns)

    def _add_kernel(self, launches: "_Launches", event: Event) -> None:
        _, name, start, end, correlation, device, _ = event
        first, ns = interval(start, end)
        where = {"device": device, "process": launches.process}
        start_ns = None if self._under_counters else first
        in_step, phase = launches.place(correlation)
        for part in self._parts(in_step):
            part.add_kernel(_name(name), ns, phase, start_ns=start_ns, **where)

    def _add_copy(self, launches: "_Launches", event: Event, *, in_timeline: bool) -> None:
        _, direction, start, end, correlation, device, size = event
        first, ns = interval(start, end)
        where = {"device": device, "process": launches.process}
        start_ns = first if in_timeline else None
        in_step, phase = launches.place(correlation)
        for part in self._parts(in_step):
            moved = _size(size)
            part.add_copy(_name(direction), ns, phase, start_ns=start_ns, bytes=moved, **where)

    def _parts(self, in_step: bool) -> tuple[_Part, ...]:
        return (self._whole, self._in_steps) if in_step else (self._whole,)


class _Launches:
    """The step and phase of each launch in one process. Ranges come before host calls, and those
    before what they launched.

    A kernel has the correlation of the host call that launched it, and belongs where that call
    began, on any thread, since autograd launches from its own. Without host calls nothing is
    known. The time at which a kernel ran would not do: the GPU lags behind the host, often by more
    than a phase.
    """

    def __init__(self, process: str) -> None:
        self.process = process
        self.steps: list[tuple[float, float, str]] = []
        self._phases: list[tuple[float, float, str]] = []
        self._step_ranges = self._phase_ranges = Ranges(())
        self._places: dict[Hashable, tuple[bool, str]] = {}

    def add_range(self, name: object, start: int, ns: int) -> None:
        if not ns:  # a mark, no range
            return
        if name == STEP:
            self.steps.append((start, start + ns - 1, STEP))  # with its last nanosecond
        elif isinstance(name, str) and name in PHASES:
            self._phases.append((start, start + ns - 1, name))

    def close_ranges(self) -> None:
        """All ranges were added."""
        self._step_ranges, self._phase_ranges = Ranges(self.steps), Ranges(self._phases)

    def add_call(self, correlation: Hashable, start: int) -> bool:
        """Whether it began in a step."""
        in_step, phase = bool(self._step_ranges.at(start)), self._phase_ranges.at(start)
        if in_step or phase:
            self._places[correlation] = in_step, phase
        return in_step

    def place(self, correlation: Hashable) -> tuple[bool, str]:
        """Whether a step launched what has this correlation, and in which phase; "" for none."""
        return self._places.get(correlation, (False, ""))


def _place_call(launches: _Launches, event: Event) -> None:
    _, _, start, end, correlation, *_ = event
    launches.add_call(correlation, interval(start, end)[0])


# --- single values ---


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise NoNumber(f"{name!r:.40} is no name")
    return printable(name)


def _add_sum(add: Callable[..., None], row: Sum) -> None:
    """Gives a row of a table of sums to `add`, with its extremes where it has both."""
    _, name, calls, total, shortest, longest = row
    number_of_calls, total_ns = reading.count(calls), reading.nanoseconds(total)
    if shortest is None or longest is None:
        add(_name(name), total_ns, calls=number_of_calls)
        return
    least, most = reading.nanoseconds(shortest), reading.nanoseconds(longest)
    mean = total_ns / number_of_calls
    if not least - 1 <= mean <= most + 1:
        raise NoNumber(f"a mean of {mean:.0f} ns is not between {least:.0f} and {most:.0f}")
    add(_name(name), total_ns, calls=number_of_calls, min_ns=least, max_ns=most)


def _size(size: Any) -> float | None:
    """A copy's bytes, where the format has them."""
    with contextlib.suppress(NoNumber):
        return reading.amount(size)
    return None
