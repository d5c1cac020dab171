"""The formats of rocprofv3's output, CSV and rocpd databases: each becomes the events of the
processes that it traced, which are checked as they are read."""

import contextlib
import json
import re
import shlex
import sqlite3
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from workshop.errors import WorkshopError
from workshop.profilers import nsys, reading
from workshop.profilers.names import printable
from workshop.profilers.reading import MOST_NS, CsvTable, Invalid, Problems

T = TypeVar("T")
_LATEST_NS = 1e19
"""The last reading of a clock: the year 2286 in nanoseconds since 1970."""


class Event(NamedTuple):
    """A kernel, a copy (its direction), a host call or a marker range."""

    name: str
    start: int
    ns: int
    correlation: Hashable
    """Number that a host call shares with what it launched."""
    device: str | None
    dispatch: Any
    """A kernel's number."""
    bytes: float | None
    """A copy's, where the format has them."""


class Count(NamedTuple):
    """A counter's value for one dispatch of a kernel."""

    kernel: str
    counter: str
    value: float
    dispatch: Hashable
    ns: int | None
    """Time of the dispatch, where the format has it."""
    device: str | None


Sum = dict[str, Any]
"""Arguments of table.Sums.add: name, total_ns, calls, and perhaps min_ns and max_ns."""


@dataclass
class Process:
    """One traced process. Its rows are read on demand, once; None where the format has none."""

    name: str
    """The name that tells it from the run's others."""
    tool: str = "rocprofv3"
    """Or "rocprof-sys", which writes the same databases."""
    device: str | None = None
    markers: Iterable[Event] | None = None
    host_calls: Iterable[Event] | None = None
    """Calls of the HIP runtime."""
    hsa_calls: Iterable[Event] | None = None
    """Calls of the layer below it. Where they are traced too, what was launched has the correlation
    of the call nearest to the hardware."""
    kernels: Iterable[Event] | None = None
    kernel_sums: Iterable[Sum] | None = None
    copies: Iterable[Event] | None = None
    counts: Iterable[Count] | None = None

    @property
    def has_kernels(self) -> bool:
        return any(rows is not None for rows in (self.kernels, self.kernel_sums, self.counts))


# --- single values -------------------------------------------------------------------------------


def interval(start: Any, end: Any) -> tuple[int, int]:
    """(start, nanoseconds) from two readings of a clock in nanoseconds. They are whole numbers,
    because a clock's can be longer than a float's 53 bits. Raises Invalid: they are no numbers,
    or the clock would run backwards."""
    try:
        first, last = int(start), int(end)
    except (TypeError, ValueError, OverflowError):
        first, last = int(reading.number(start)), int(reading.number(end))
    if not 0 < first <= last <= _LATEST_NS or last - first > MOST_NS:
        raise Invalid(f"from {start!r:.40} to {end!r:.40} is no time")
    return first, last - first


_FROM_HOST = re.compile(r"host_?to_?(device|host)", re.IGNORECASE)


def _device(name: Any, agent: Any, source: Any = None, destination: Any = None) -> str | None:
    """The GPU that ran a kernel or a copy: of a copy from the host the one that it goes to, of
    others the one that it comes from. None for a copy within the host's memory."""
    if agent is None:
        from_host = _FROM_HOST.search(str(name))
        agent = source if from_host is None else destination
        if from_host and from_host[1].lower() == "host":
            return None
    return f"Agent {agent}" if str(agent).isdigit() else agent and str(agent)


def _joined(names: Iterable[Any]) -> str | None:
    return ", ".join(dict.fromkeys(str(name) for name in names if name)) or None


def _guarded(rows: Iterator[T], problems: Problems) -> Iterator[T]:
    """The rows up to an error that ends them, which is kept."""
    try:
        yield from rows
    except WorkshopError as error:
        problems.errors.append(error)


# --- CSV -----------------------------------------------------------------------------------------


def from_tables(tables: Mapping[str, Path], name: str, problems: Problems) -> Process:
    """The process that left these CSV files, which are opened when their rows are read.

    Args:
        tables: by the domain in their names, such as "kernel_trace".
    """

    def rows(table: str, read: Callable[[Path, Problems], Iterator[T]]) -> Iterator[T] | None:
        path = tables.get(table)
        of_file = problems.of(path) if path else problems
        return _guarded(read(path, of_file), of_file) if path else None

    def events(table: str, name_column: str, domain: str = "") -> Iterator[Event] | None:
        return rows(table, partial(_csv_events, name_column=name_column, domain=domain))

    names = rows("agent_info", _csv_devices)
    return Process(
        name,
        device=_joined(names or ()),
        markers=events("marker_api_trace", "Function", "MARKER"),
        host_calls=events("hip_api_trace", "Function", "HIP"),
        hsa_calls=events("hsa_api_trace", "Function", "HSA"),
        kernels=events("kernel_trace", "Kernel_Name"),
        kernel_sums=rows("kernel_stats", _csv_sums),
        copies=events("memory_copy_trace", "Direction"),
        counts=rows("counter_collection", _csv_counts),
    )


def _csv_events(path: Path, problems: Problems, name_column: str, domain: str) -> Iterator[Event]:
    """Args:
    domain: how that of the wanted rows begins; "" for all, where a table has one only.
    """
    columns = (name_column, "Start_Timestamp", "End_Timestamp", "Correlation_Id")
    rows = CsvTable(path, problems).select(
        "Domain" if domain else name_column,
        *columns,
        optional=("Guid", "Dispatch_Id", "Agent_Id", "Source_Agent_Id", "Destination_Agent_Id"),
    )
    for row, (of_domain, name, start, end, correlation, guid, dispatch, *agents) in rows:
        if of_domain.startswith(domain):
            device = _device(name, *agents)
            if guid is not None:
                correlation, device = (guid, correlation), device and f"{device} in {guid}"
            with problems.noted(row):
                times = interval(start, end)
                yield Event(reading.name(name), *times, correlation, device, dispatch, None)


def _csv_sums(path: Path, problems: Problems) -> Iterator[Sum]:
    columns = ("Name", "Calls", "TotalDurationNs")
    rows = CsvTable(path, problems).select(*columns, optional=("MinNs", "MaxNs"))
    for row, (name, calls, total, shortest, longest) in rows:
        with problems.noted(row):
            yield reading.sums(name, calls, total, shortest, longest)


def _csv_counts(path: Path, problems: Problems) -> Iterator[Count]:
    columns = ("Kernel_Name", "Counter_Name", "Counter_Value", "Dispatch_Id")
    optional = ("Start_Timestamp", "End_Timestamp", "Agent_Id", "Guid")
    rows = CsvTable(path, problems).select(*columns, optional=optional)
    for row, (kernel, counter, value, dispatch, start, end, agent, guid) in rows:
        with problems.noted(row):
            ns = None if start is None or end is None else interval(start, end)[1]
            counted = reading.name(kernel), counter, reading.amount(value), (guid, dispatch)
            yield Count(*counted, ns, _device(kernel, agent))


def _csv_devices(path: Path, problems: Problems) -> Iterator[str]:
    """The names of the GPUs in an agent_info table."""
    rows = CsvTable(path, problems).select("Agent_Type", optional=("Product_Name", "Name"))
    yield from (product or name for _, (kind, product, name) in rows if kind == "GPU")


# --- rocpd ---------------------------------------------------------------------------------------

# Views by what they are called in the versions of the schema, with their columns.
_COUNTS = {
    "counters_collection": ("kernel_name", "counter_name", "value"),
    "kernel_pmc_events": ("name", "pmc_name", "pmc_value"),
}
_EVENT = (
    *("id", "name", "start", "end"),
    "stack_id",  # the tool's own correlation; the schema's "correlation" is the user's
    *("dispatch_id", "size", "extdata", "agent_abs_index", "src_agent_abs_index"),
    "dst_agent_abs_index",
)
_Which = dict[str, int | str]
"""The columns that tell one process's rows from another's, with their values."""


def from_database(
    path: Path, name: str, stack: contextlib.ExitStack, problems: Problems
) -> list[Process]:
    """The processes in a rocpd database, which stays open until `stack` closes.

    Args:
        name: the beginning of the processes' names.

    Raises:
        WorkshopError: it can't be read, or has no views of rocpd.
    """
    database = _Database(path, stack, problems.of(path))
    if not database.columns("kernels") and not database.columns("regions"):
        if database.columns("StringIds"):
            command = nsys.STATS.format(path=shlex.quote(str(path)))
            raise WorkshopError(f"{path}: nsys's database, its own tool reads it first: {command}")
        if database.columns("compute_kernel"):
            raise WorkshopError(
                f"{path}: rocprof-compute's analysis, which ROCm Optiq opens; give the workload "
                "that it was made from"
            )
        raise WorkshopError(
            f"{path}: an SQLite database without rocpd's views `kernels` and `regions`; did the "
            "run end early?"
        )
    tool, device = database.tool(), database.device()
    return [
        Process(
            ", ".join((name, *(f"{column} {value}" for column, value in which.items()))),
            tool,
            device,
            markers=database.events("regions", which, "MARKER"),
            host_calls=database.events("regions", which, "HIP"),
            hsa_calls=database.events("regions", which, "HSA"),
            kernels=database.events("kernels", which),
            copies=database.events("memory_copies", which),
            counts=database.counts(which),
        )
        for which in database.processes()
    ]


class _Database:
    def __init__(self, path: Path, stack: contextlib.ExitStack, problems: Problems) -> None:
        self._path, self._problems = path, problems
        with self._errors():
            # Read-only by its address: nothing, not even a journal, is written to its folder.
            uri = f"{path.resolve().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(uri, uri=True)
        stack.callback(self._connection.close)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            reason = f"{printable(str(error))}; is the file cut off?"
            raise WorkshopError(f"{self._path}: can't be read as a database: {reason}") from None

    def _query(self, query: str) -> Iterator[tuple]:
        with self._errors():
            yield from self._connection.execute(query)

    def columns(self, view: str) -> set[str]:
        """Empty where there is no such view."""
        return {name for _, name, *_ in self._query(f"PRAGMA table_info([{view}])")}

    def processes(self) -> list[_Which]:
        """The columns that tell the processes apart, with their values: those of several nodes may
        have the same number. [{}] where the database does not list them."""
        names = [name for name in ("pid", "guid") if name in self.columns("processes")]
        if "pid" not in names:
            return [{}]
        query = f"SELECT DISTINCT {', '.join(names)} FROM [processes]"
        found = [dict(zip(names, row, strict=True)) for row in self._query(query)]
        return [which for which in found if isinstance(which["pid"], int)] or [{}]

    def tool(self) -> str:
        """By the name of the first event's category: rocprofv3 writes it in capital letters."""
        for view in ("kernels", "regions"):
            if "category" in self.columns(view):
                for (category,) in self._query(f"SELECT [category] FROM [{view}] LIMIT 1"):
                    return "rocprof-sys" if str(category).islower() else "rocprofv3"
        return "rocprofv3"

    def device(self) -> str | None:
        has = self.columns("rocpd_info_agent")
        name = next((column for column in ("product_name", "name") if column in has), None)
        if name is None or "type" not in has:
            return None
        query = f"SELECT DISTINCT [{name}] FROM [rocpd_info_agent] WHERE [type] = 'GPU'"
        return _joined(name for (name,) in self._query(query))

    def _select(self, view: str, columns: Iterable[str], which: _Which, domain: str = "") -> str:
        """The text of a query; columns that the view does not have come as NULL.

        Args:
            domain: of regions, such as "HIP"; rocprof-sys has it as in "rocm_hip_api".
        """
        has = self.columns(view)
        names = ", ".join(f"[{name}]" if name in has else "NULL" for name in columns)
        wanted = [f"[{n}] = {_literal(value)}" for n, value in which.items() if n in has]
        if domain:
            wanted.append(f"([category] LIKE '{domain}%' OR [category] LIKE 'rocm_{domain}%')")
        return f"SELECT {names} FROM [{view}] WHERE {' AND '.join(['1', *wanted])}"

    def events(self, view: str, which: _Which, domain: str = "") -> Iterator[Event] | None:
        if not {"name", "start", "end"} <= self.columns(view):
            return None
        return _guarded(self._events(view, which, domain), self._problems)

    def _events(self, view: str, which: _Which, domain: str) -> Iterator[Event]:
        query = self._select(view, _EVENT, which, domain)
        for row, name, start, end, stack, dispatch, size, data, *agents in self._query(query):
            moved = None
            if view == "memory_copies":
                with contextlib.suppress(Invalid):
                    moved = reading.amount(size)
            if domain == "MARKER":
                # In rocprofv3's databases the name is that of the function that set the marker, and
                # what it says lies beside; in those of rocprof-sys the name is what it says.
                name = _message(data) or name
            with self._problems.noted(row):
                times, device = interval(start, end), _device(name, *agents)
                yield Event(reading.name(name), *times, stack, device, dispatch, moved)

    def counts(self, which: _Which) -> Iterator[Count] | None:
        for view, columns in _COUNTS.items():
            if {*columns, "dispatch_id"} <= self.columns(view):
                query = self._select(view, ("dispatch_id", *columns), which)
                if next(self._query(f"{query} LIMIT 1"), None) is not None:
                    return _guarded(self._count_rows(query, columns), self._problems)
        return None

    def _count_rows(self, query: str, columns: tuple[str, str, str]) -> Iterator[Count]:
        kernel, counter, value = columns
        # Some schemas give a row for each instance of a hardware block.
        summed = (
            f"SELECT [dispatch_id], [{kernel}], [{counter}], SUM([{value}]) FROM ({query}) "
            f"GROUP BY [dispatch_id], [{kernel}], [{counter}]"
        )
        for row, (dispatch, name, counted, total) in enumerate(self._query(summed), start=1):
            with self._problems.noted(row):
                value_ = reading.amount(total)
                yield Count(reading.name(name), str(counted), value_, dispatch, None, None)


def _literal(value: int | str) -> str:
    """A value in SQL."""
    return str(value) if isinstance(value, int) else "'{}'".format(str(value).replace("'", "''"))


def _message(data: Any) -> Any:
    try:
        return json.loads(data)["message"]
    except (LookupError, TypeError, ValueError):
        return None
