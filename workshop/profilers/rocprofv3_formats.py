"""The formats of rocprofv3's output, each as the events of the processes that it traced."""

import contextlib
import json
import re
import shlex
import sqlite3
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from workshop.errors import WorkshopError
from workshop.profilers import nsys, reading
from workshop.profilers.names import printable
from workshop.profilers.reading import MOST_NS, CsvTable, NoNumber, Problems, number

_RowT = TypeVar("_RowT", bound=tuple)

Event = tuple[int, Any, Any, Any, Hashable, str | None, Any]
"""(row, name, start, end, correlation, device, bytes) of a kernel, a copy, a host call or a marker
range: as they were read, unchecked. Bytes are a copy's, None where the format has none."""
Sum = tuple[int, str, str, str, str | None, str | None]
"""(row, name, calls, total, shortest, longest)."""
Count = tuple[int, Any, str, Any, Hashable, Any, Any, str | None]
"""(row, kernel, counter, value, dispatch, start, end, device)."""


@dataclass
class Rows(Generic[_RowT]):
    """Rows that are read on demand, once, and where to note those that can't be."""

    problems: Problems
    rows: Iterable[_RowT]


class Notes(reading.Notes):
    """The files and rows of one profile that could not be read."""

    def each(self, rows: Rows[_RowT] | None, use: Callable[[_RowT], None]) -> int:
        """Gives each row to `use`, which raises NoNumber for one that makes no sense; how many
        made sense. An error that ends the rows is kept."""
        if rows is None:
            return 0
        self.problems.append(rows.problems)
        used = 0
        try:
            for row in rows.rows:
                with rows.problems.noted(row[0]):
                    use(row)
                    used += 1
        except WorkshopError as error:
            self.errors.append(error)
        return used


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


@dataclass
class Process:
    """One traced process's events; None for what the format does not have."""

    run: Path
    name: str
    """The name that tells it from the run's others."""
    tool: str = "rocprofv3"
    """Or "rocprof-sys", which writes the same databases."""
    device: str | None = None
    markers: Rows[Event] | None = None
    host_calls: Rows[Event] | None = None
    """Calls of the HIP runtime."""
    hsa_calls: Rows[Event] | None = None
    """Calls of the layer below it. Where they are traced too, what was launched has the correlation
    of the call nearest to the hardware."""
    host_call_sums: Rows[Sum] | None = None
    kernels: Rows[Event] | None = None
    kernel_sums: Rows[Sum] | None = None
    copies: Rows[Event] | None = None
    copy_sums: Rows[Sum] | None = None
    counts: Rows[Count] | None = None
    dispatches: Iterable[tuple[Hashable, Any]] = ()
    """(number, kernel) of each, for counters that a file of another tool has by the number."""


_LATEST_NS = 1e19
"""No clock has counted further: the year 2286 in nanoseconds since 1970."""


def interval(start: Any, end: Any) -> tuple[int, int]:
    """(start, nanoseconds) from two readings of a clock in nanoseconds. They are whole numbers,
    because a clock's can be longer than a float's 53 bits. Raises NoNumber: they are none, or none
    of a clock that runs forwards."""
    try:
        first, last = int(start), int(end)
    except (TypeError, ValueError, OverflowError):
        first, last = int(number(start)), int(number(end))
    if not 0 < first <= last <= _LATEST_NS or last - first > MOST_NS:
        raise NoNumber(f"from {start!r:.40} to {end!r:.40} is no time")
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


# --- CSV ---


def from_tables(files: Files) -> Process:
    """The process that left these CSV files. They are opened when their rows are read."""

    def rows(table: str, read: Callable[[Path, Problems], Iterable[_RowT]]) -> Rows[_RowT] | None:
        path = files.tables.get(table)
        if path is None:
            return None
        problems = Problems(path)
        return Rows(problems, read(path, problems))

    def events(table: str, name_column: str, domain: str = "") -> Rows[Event] | None:
        return rows(table, partial(_csv_events, name_column=name_column, domain=domain))

    return Process(
        files.run,
        files.process,
        device=_device_of(files.tables.get("agent_info")),
        markers=events("marker_api_trace", "Function", "MARKER"),
        host_calls=events("hip_api_trace", "Function", "HIP"),
        hsa_calls=events("hsa_api_trace", "Function", "HSA"),
        host_call_sums=rows("hip_api_stats", _csv_sums),
        kernels=events("kernel_trace", "Kernel_Name"),
        kernel_sums=rows("kernel_stats", _csv_sums),
        copies=events("memory_copy_trace", "Direction"),
        copy_sums=rows("memory_copy_stats", _csv_sums),
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
        optional=("Guid", "Agent_Id", "Source_Agent_Id", "Destination_Agent_Id"),
    )
    for row, (of_domain, name, start, end, correlation, guid, *agents) in rows:
        if of_domain.startswith(domain):
            device = _device(name, *agents)
            if guid is not None:
                correlation, device = (guid, correlation), device and f"{device} in {guid}"
            yield row, name, start, end, correlation, device, None


def _csv_sums(path: Path, problems: Problems) -> Iterator[Sum]:
    columns = ("Name", "Calls", "TotalDurationNs")
    rows = CsvTable(path, problems).select(*columns, optional=("MinNs", "MaxNs"))
    for row, (name, calls, total, shortest, longest) in rows:
        yield row, name, calls, total, shortest, longest


def _csv_counts(path: Path, problems: Problems) -> Iterator[Count]:
    columns = ("Kernel_Name", "Counter_Name", "Counter_Value", "Dispatch_Id")
    optional = ("Start_Timestamp", "End_Timestamp", "Agent_Id", "Guid")
    rows = CsvTable(path, problems).select(*columns, optional=optional)
    for row, (kernel, counter, value, dispatch, start, end, agent, guid) in rows:
        yield row, kernel, counter, value, (guid, dispatch), start, end, _device(kernel, agent)


def _device_of(agents: Path | None) -> str | None:
    """The names of the GPUs in an agent_info table, each once."""
    if agents is None:
        return None
    with contextlib.suppress(WorkshopError):
        rows = CsvTable(agents, Problems(agents)).select(
            "Agent_Type", optional=("Product_Name", "Name")
        )
        return _joined(product or name for _, (kind, product, name) in rows if kind == "GPU")
    return None


def _joined(names: Iterable[Any]) -> str | None:
    return ", ".join(dict.fromkeys(str(name) for name in names if name)) or None


# --- rocpd ---

# Views by what they are called in the versions of the schema, with their columns.
_COUNTS = {
    "counters_collection": ("kernel_name", "counter_name", "value"),
    "kernel_pmc_events": ("name", "pmc_name", "pmc_value"),
}
_AGENTS = ("agent_abs_index", "src_agent_abs_index", "dst_agent_abs_index")
_Which = dict[str, int | str]
"""The columns that tell one process's rows from another's, with their values."""


def from_database(path: Path, files: Files, stack: contextlib.ExitStack) -> list[Process]:
    """The processes in a rocpd database, which stays open until `stack` closes.

    Raises:
        WorkshopError: it can't be read, or has no views of rocpd.
    """
    database = _Database(path, stack)
    if not database.columns("kernels") and not database.columns("regions"):
        if database.columns("StringIds"):
            command = nsys.STATS.format(path=shlex.quote(str(path)))
            raise WorkshopError(f"{path}: nsys's database, its own tool reads it first: {command}")
        raise WorkshopError(
            f"{path}: an SQLite database without rocpd's views `kernels` and `regions`; did the "
            "run end early?"
        )
    return [database.process(files, which) for which in database.processes()]


class _Database:
    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._path = path
        with self._errors():
            # Read-only by its address: nothing, not even a journal, is written beside it.
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

    def process(self, files: Files, which: _Which) -> Process:
        return Process(
            files.run,
            ", ".join((files.process, *(f"{name} {value}" for name, value in which.items()))),
            tool=self._tool(),
            device=self._device(),
            markers=self._markers(which),
            host_calls=self._events("regions", which, _of_domain("HIP")),
            hsa_calls=self._events("regions", which, _of_domain("HSA")),
            kernels=self._events("kernels", which),
            copies=self._events("memory_copies", which),
            counts=self._counts(which),
            dispatches=self._query(self._select("kernels", ("dispatch_id", "name"), which)),
        )

    def _tool(self) -> str:
        """By the name of the first event's category: rocprofv3 writes it in capital letters."""
        for view in ("kernels", "regions"):
            if "category" in self.columns(view):
                for (category,) in self._query(f"SELECT [category] FROM [{view}] LIMIT 1"):
                    return "rocprof-sys" if str(category).islower() else "rocprofv3"
        return "rocprofv3"

    def _select(self, view: str, columns: Iterable[str], which: _Which, more: str = "") -> str:
        """The text of a query; columns that the view does not have come as NULL."""
        has = self.columns(view)
        names = ", ".join(f"[{name}]" if name in has else "NULL" for name in columns)
        where = (
            f"AND [{name}] = {_literal(value)}" for name, value in which.items() if name in has
        )
        return f"SELECT {names} FROM [{view}] WHERE 1 {' '.join(where)} {more}"

    def _events(
        self, view: str, which: _Which, more: str = "", last: str = "size"
    ) -> Rows[Event] | None:
        """Args:
        more: a condition on the rows.
        last: the column that comes last in an event.
        """
        if not {"name", "start", "end"} <= self.columns(view):
            return None
        # The tool's own correlation is the schema's "stack"; its "correlation" is the user's.
        columns = ("id", "name", "start", "end", "stack_id", *_AGENTS, last)
        found = self._query(self._select(view, columns, which, more))
        rows = (
            (row, name, start, end, stack, _device(name, *agents), size)
            for row, name, start, end, stack, *agents, size in found
        )
        return Rows(Problems(self._path), rows)

    def _markers(self, which: _Which) -> Rows[Event] | None:
        """In rocprofv3's databases their names are those of the functions that set them, and what
        they say lies beside; in those of rocprof-sys the name is what they say."""
        found = self._events("regions", which, _of_domain("MARKER"), last="extdata")
        if found is None:
            return None
        return Rows(
            found.problems,
            ((row, _message(data) or name, *event, None) for row, name, *event, data in found.rows),
        )

    def _counts(self, which: _Which) -> Rows[Count] | None:
        for view, columns in _COUNTS.items():
            if {*columns, "dispatch_id"} <= self.columns(view):
                query = self._select(view, ("dispatch_id", *columns), which)
                if next(self._query(f"{query} LIMIT 1"), None) is not None:
                    return Rows(Problems(self._path), self._count_rows(query, columns))
        return None

    def _count_rows(self, query: str, columns: tuple[str, str, str]) -> Iterator[Count]:
        kernel, counter, value = columns
        # Some schemas give a row for each instance of a hardware block.
        summed = (
            f"SELECT [dispatch_id], [{kernel}], [{counter}], SUM([{value}]) FROM ({query}) "
            f"GROUP BY [dispatch_id], [{kernel}], [{counter}]"
        )
        for row, (dispatch, name, counted, total) in enumerate(self._query(summed), start=1):
            yield row, name, str(counted), total, dispatch, None, None, None

    def _device(self) -> str | None:
        has = self.columns("rocpd_info_agent")
        name = next((column for column in ("product_name", "name") if column in has), None)
        if name is None or "type" not in has:
            return None
        query = f"SELECT DISTINCT [{name}] FROM [rocpd_info_agent] WHERE [type] = 'GPU'"
        return _joined(name for (name,) in self._query(query))


def _literal(value: int | str) -> str:
    """A value in SQL."""
    return str(value) if isinstance(value, int) else "'{}'".format(str(value).replace("'", "''"))


def _of_domain(domain: str) -> str:
    """The condition, in SQL, on a region of a domain such as "HIP"; rocprof-sys has it as in
    "rocm_hip_api"."""
    return f"AND ([category] LIKE '{domain}%' OR [category] LIKE 'rocm_{domain}%')"


def _message(data: Any) -> Any:
    try:
        return json.loads(data)["message"]
    except (LookupError, TypeError, ValueError):
        return None
