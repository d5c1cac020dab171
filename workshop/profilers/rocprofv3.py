"""rocprofv3's output: CSV of ROCm 6.3 and later, rocpd databases, and folders of them. rocprof-sys
writes such databases too.

A traced process leaves a set of files, `<prefix>_kernel_trace.csv` and its like or
`<prefix>_results.db`. By default they lie in a folder with the host's name and the
prefix is the process's number; the passes of a run under counters get separate folders. A
domain without events leaves no file.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers import reading
from workshop.profilers.amd_counters import Counters
from workshop.profilers.names import printable
from workshop.profilers.reading import CsvTable, Problems
from workshop.profilers.rocprofv3_formats import Event, Process, from_database, from_tables
from workshop.profilers.table import PHASES, STEP, HostCall, KernelTable, Ranges, Sums

_COPY = "MEMORY_COPY_"


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
    problems, counters = Problems(path), Counters()
    runs: dict[Path, list[Process]] = {}
    with contextlib.ExitStack() as stack:
        for files in _sets_below(path) if path.is_dir() else [_set_of(path)]:
            runs.setdefault(files.run, []).extend(_processes(files, stack, problems))
        table = _first_table(path, runs, counters, problems)
        if table is None:
            raise problems.error("kernels, host calls or steps")
        for process in chain.from_iterable(runs.values()):
            for count in process.counts or ():  # those that the table has not read
                counters.add(count.kernel, count.counter, count.value)
    counters.fill(table.kernels)
    table.warnings += counters.warnings(table.device) + problems.warnings()
    return table


def _first_table(
    path: Path, runs: Mapping[Path, list[Process]], counters: Counters, problems: Problems
) -> KernelTable | None:
    """The table of the run whose times mislead least; of one with kernels, if there is any."""

    def rank(folder: Path) -> tuple:
        processes = runs[folder]
        only_sums = not any(one.kernels is not None for one in processes)
        has_kernels = any(one.has_kernels for one in processes)
        return not has_kernels, _under_counters(processes), only_sums, folder

    ranked = sorted(runs, key=rank)
    without_kernels = []
    for index, folder in enumerate(ranked):
        table = _Run(runs[folder], counters, problems).table(path)
        if table.kernels:
            others = (
                other
                for other in ranked[index + 1 :]
                if any(one.has_kernels for one in runs[other]) and not _under_counters(runs[other])
            )
            table.warnings += [f"{other} holds another run, which is left out" for other in others]
            return table
        without_kernels.append(table)
    return next((table for table in without_kernels if table.host_calls or table.steps), None)


def _under_counters(processes: Iterable[Process]) -> bool:
    return any(one.counts is not None for one in processes)


class _Part:
    """A run's kernels, copies and calls, or those of its steps."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.host_calls: dict[str, HostCall] = {}
        self.phases_ns = dict.fromkeys(("", *PHASES), 0.0)
        """Time of kernels and copies; under "" of those in no phase."""

    def add(self, name: str, total_ns: float, phase: str = "", **more: Any) -> None:
        self.sums.add(name, total_ns, **more)
        self.phases_ns[phase] += total_ns


class _Run:
    """Adds up the processes of one run: all that they did, and what their marked steps launched.
    The rest is start-up and warm-up, which rocprofv3 watches too.

    A kernel has the correlation of the host call that launched it, and belongs where that call
    began, on any thread, since autograd launches from its own. Without host calls nothing is
    known. The time at which a kernel ran would not do: the GPU lags behind the host, often by more
    than a phase.
    """

    def __init__(self, processes: list[Process], counters: Counters, problems: Problems) -> None:
        self._processes, self._counters, self._problems = processes, counters, problems
        self._whole, self._in_steps = _Part(), _Part()
        self._steps, self._kernels_in_steps = 0, 0
        self._phases: set[str] = set()
        self._calls_traced = False
        self._under_counters = _under_counters(processes)
        for process in processes:
            self._add(process)

    def table(self, path: Path) -> KernelTable:
        """Without the bytes and operations that come from counters."""
        part = self._in_steps if self._kernels_in_steps else self._whole
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
        place = self._places(process)
        traced = False
        for event in process.kernels or ():
            traced = True
            in_step, phase = place(event)
            self._kernels_in_steps += in_step
            self._add_event(process, event, event.name, in_step, phase, not self._under_counters)
        summed = False
        for sums in () if traced else process.kernel_sums or ():
            summed = True
            self._whole.add(**sums, process=process.name)
        if not traced and not summed:
            self._add_counted(process)
        for event in process.copies or ():
            # Versions differ in whether they put the operation's prefix before it.
            name = _COPY + event.name.removeprefix(_COPY)
            # Where only sums of the kernels are known, the copies alone make no timeline.
            in_timeline = traced and not self._under_counters
            self._add_event(process, event, name, *place(event), in_timeline, category="copy")

    def _places(self, process: Process) -> Callable[[Event], tuple[bool, str]]:
        """Adds the ranges and host calls of a process; a function that says for what it launched
        whether a step did so, and in which phase ("" for none)."""
        ranges = [event for event in process.markers or () if event.ns]  # others are marks
        spans = [(event.start, event.start + event.ns - 1, event.name) for event in ranges]
        marked = [span for span in spans if span[2] == STEP]
        steps, phases = Ranges(marked), Ranges(span for span in spans if span[2] in PHASES)
        self._steps = max(self._steps, len(marked))
        self._phases |= {event.name for event in ranges} & {*PHASES}
        places: dict[Hashable, tuple[bool, str]] = {}

        def note(call: Event) -> bool:
            in_step, phase = bool(steps.at(call.start)), phases.at(call.start)
            if in_step or phase:
                places[call.correlation] = in_step, phase
            return in_step

        for call in process.hsa_calls or () if ranges else ():
            note(call)
        for call in process.host_calls or ():
            self._calls_traced = True
            for part in self._parts(note(call)):
                total = part.host_calls.setdefault(call.name, HostCall())
                total.calls += 1
                total.total_ns += call.ns
        return lambda event: places.get(event.correlation, (False, ""))

    def _add_event(
        self,
        process: Process,
        event: Event,
        name: str,
        in_step: bool,
        phase: str,
        in_timeline: bool,
        **more: Any,
    ) -> None:
        more |= {"device": event.device, "process": process.name, "bytes": event.bytes}
        start_ns = event.start if in_timeline else None
        for part in self._parts(in_step):
            part.add(name, event.ns, phase, start_ns=start_ns, **more)

    def _add_counted(self, process: Process) -> None:
        """Adds the dispatches that a process has under counters alone, with these."""
        timed = set[Hashable]()
        for count in process.counts or ():
            self._counters.add(count.kernel, count.counter, count.value)
            if count.ns is None:
                why = "no times in it, as ROCm 6.2 writes counters; give the folder that has the"
                error = WorkshopError(f"{self._problems.path}: {why} kernel trace too")
                self._problems.errors.append(error)
                return
            if count.dispatch not in timed:
                self._whole.add(count.kernel, count.ns, device=count.device, process=process.name)
                timed.add(count.dispatch)

    def _parts(self, in_step: bool) -> tuple[_Part, ...]:
        return (self._whole, self._in_steps) if in_step else (self._whole,)


# --- which files there are -----------------------------------------------------------------------


@dataclass
class Files:
    """The files that one traced process left."""

    run: Path
    """The folder that it shares with the other processes of its run."""
    process: str = ""
    """The name that tells it from the others, as in "host/77"."""
    tables: dict[str, Path] = field(default_factory=dict)
    """CSV, by the domain in their names, such as "kernel_trace"."""
    database: Path | None = None


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
_SUMS = "kernel_stats"
_TABLES = ("kernel_trace", _SUMS, "memory_copy_trace", "counter_collection", "agent_info")
_CSV_NAME = re.compile(
    rf"(?:(?P<prefix>.*)_)?(?P<table>{'|'.join(_TABLES + _API_TRACES)})\.csv(?:\.gz)?"
)


def recognises(folder: Path) -> bool:
    """Whether a folder holds, at any depth, a file that `read` reads."""
    return bool(_sets_below(folder))


def recognises_header(columns: Iterable[str]) -> bool:
    """Whether a CSV file with these columns is one that `read` reads."""
    return _table_with(columns) is not None


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database, under any name."""
    return path.is_file() and reading.starts_with(path, b"SQLite format 3\0")


def _table_with(columns: Iterable[str]) -> str | None:
    has = set(columns)
    return next((table for table, needs in _HEADERS.items() if needs <= has), None)


def _set_of(path: Path) -> Files:
    """A file by itself, known by its content; what a table of sums sums, by its name."""
    if is_database(path):
        return Files(path.parent, path.name, database=path)
    columns = CsvTable(path, Problems(path)).columns
    table = _table_with(columns)
    if table is None:
        raise WorkshopError(
            f"{path}: none of the tables that rocprofv3 writes; "
            f"its columns are {printable(', '.join(columns)):.200}"
        )
    names: Iterable[str] = [table]
    if table == "api_trace":  # one header for all domains, which the rows name
        names = _API_TRACES
    elif table == "stats":
        if "stats" in path.name and _SUMS not in path.name:
            raise WorkshopError(f"{path}: sums of other events than kernels; give the folder")
        names = [_SUMS]
    return Files(path.parent, path.name, dict.fromkeys(names, path))


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
    if sets:
        return list(sets.values())
    found = []
    for path in paths:
        with contextlib.suppress(WorkshopError):
            if path.name.removesuffix(".gz").endswith(".csv"):
                found.append(_set_of(path))
    return found


def _processes(files: Files, stack: contextlib.ExitStack, problems: Problems) -> list[Process]:
    """Those in a set of files: from its database, if that can be read, or its CSV."""
    try:
        if files.database is not None:
            return from_database(files.database, files.process, stack, problems)
    except WorkshopError as error:
        problems.errors.append(error)
    return (
        [from_tables(files.tables, files.process, problems)]
        if files.tables.keys() - {"agent_info"}
        else []
    )
