"""The hot list of a kernel table: on the terminal, on pages, and as CSV and JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from workshop import errors, tables
from workshop.profilers import kernel_file, step_time
from workshop.profilers.load import load_with_doubts
from workshop.profilers.names import display_name, distinct_names, printable
from workshop.profilers.table import Kernel, KernelTable
from workshop.tables import Cell, Line, Table, number

_READABLE_NAME, _NAME_ON_A_PAGE = 30, 60
"""Characters of a name: below the first, figures that can be done without make room for it."""
_DISPENSABLE = ("max", "min", "mean µs", "calls")
"""The headings of those, the first to go first."""
_Column = tuple[str, Callable[[Kernel, KernelTable], float | None]]
"""Format, and the figure of a kernel in its table."""
_COLUMNS: dict[str, _Column] = {
    "calls": (",.10g", lambda k, table: _rounded(k.calls / (table.steps or 1))),
    "ms": (",.3f", lambda k, table: k.total_ns / (table.steps or 1) / 1e6),
    "mean µs": (",.1f", lambda k, table: k.mean_ns / 1e3),
    "min": (",.1f", lambda k, table: None if k.min_ns is None else k.min_ns / 1e3),
    "max": (",.1f", lambda k, table: None if k.max_ns is None else k.max_ns / 1e3),
    "share": (".1%", lambda k, table: table.share(k)),
    "GB/s": (",.0f", lambda k, table: k.bytes / k.total_ns if k.bytes and k.total_ns else None),
    "TFLOP/s": (
        ",.1f",
        lambda k, table: k.flops / k.total_ns / 1e3 if k.flops and k.total_ns else None,
    ),
    "occupancy": (
        ".0%",
        lambda k, table: (
            None if k.occupancy_ns is None or not k.total_ns else k.occupancy_ns / k.total_ns
        ),
    ),
}
_OF_A_STEP = ("calls", "ms")
"""The headings of what is given of each step, where the steps are known."""
_OF_SUMS = (*_OF_A_STEP, "share")
"""The headings of what can be given of many kernels together too."""


def show(path: Path, *, limit: int = 15, output_dir: Path | None = None) -> int:
    """Prints the hot list of what a profiler wrote, and with `output_dir` writes it there
    as kernel_file.CSV_FILE and JSON_FILE; the exit status. A runner has it written to the folder
    that it is about to leave."""
    errors.require("rich")
    by_its_runner = output_dir is not None and output_dir.resolve() == path.resolve()
    table = load_with_doubts(path, ended=not by_its_runner)
    written = kernel_file.write(table, output_dir) if output_dir is not None else ()
    steps = [step_table(table)] if table.step_times else []
    tables.print_tables([hot_list(table, limit), *steps])
    tables.print_notes(warnings(table))
    for file in written:
        print(f"Written: {file}")
    return errors.DONE


def hot_list(table: KernelTable, limit: int) -> Table:
    """The longest kernels and the table's summary, for the terminal: the figures whole, and of the
    names what then fits. Needs rich."""
    shown, rest = table.kernels[:limit], table.kernels[limit:]
    columns = {"category": [kernel.category for kernel in shown] + [""] * bool(rest)}
    columns |= _figures(shown, rest, table)
    wanted = max((len(display_name(kernel.name, _READABLE_NAME)) for kernel in shown), default=0)
    for heading in _DISPENSABLE:
        if room_for_names(columns) < wanted:
            columns.pop(_headed(heading, table), None)
    names = distinct_names([kernel.name for kernel in shown], room_for_names(columns))
    names += [f"{len(rest):,} more"] if rest else []
    rows = zip(names, *columns.values(), strict=True)
    lines = [Line(row, "dim" if i == len(shown) else None) for i, row in enumerate(rows)]
    where = f", {display_name(table.device, 60)}" if table.device else ""
    title = f"{printable(table.tool)}{where}: {printable(str(table.path))}"
    header = [table.what, *columns]
    return Table(title, header, lines, list(summary(table)), left=(0, 1), wraps=())


def short_list(table: KernelTable, limit: int) -> Table:
    """The longest kernels, for a page; a step each, where the steps are known."""
    header = [table.what, "category", *(_headed(heading, table) for heading in _OF_SUMS)]
    lines = []
    for kernel in table.kernels[:limit]:
        name = Cell(display_name(kernel.name, _NAME_ON_A_PAGE), is_code=True)
        figures = (number(_COLUMNS[h][1](kernel, table), _COLUMNS[h][0]) for h in _OF_SUMS)
        lines.append(Line([name, kernel.category, *figures]))
    rest = len(table.kernels) - limit
    title = f"The longest {table.what}s" + (f"; {rest:,} more in the file" if rest > 0 else "")
    return Table(title, header, lines, left=(0, 1))


def room_for_names(columns: Mapping[str, Sequence[str]]) -> int:
    """Characters that these columns leave for one of names on the terminal, where they are between
    lines if it is wide, else between spaces; at least 16."""
    width = tables.terminal().width
    others = sum(max(map(len, (heading, *cells))) for heading, cells in columns.items())
    between = (3 if width >= tables.WIDE else 2) * len(columns)
    return max(width - others - between - 4, 16)


def _rounded(calls: float) -> float:
    """Calls of a step; fewer than 10 with their tenths, for those that not every step makes."""
    return round(calls, 1 if calls < 10 else 0)


def _headed(heading: str, table: KernelTable) -> str:
    if heading == "occupancy":
        return table.occupancy
    return f"{heading} a step" if table.steps and heading in _OF_A_STEP else heading


def _figures(shown: list[Kernel], rest: list[Kernel], table: KernelTable) -> dict[str, list[str]]:
    """The cells by heading, for each kernel that is shown, and for the rest together if there is
    one; without the figures that the tool does not have."""
    together = Kernel("", "other", sum(k.calls for k in rest), sum(k.total_ns for k in rest))
    columns = {}
    for heading, (form, figure) in _COLUMNS.items():
        found = [figure(kernel, table) for kernel in shown]
        if any(found):
            columns[_headed(heading, table)] = cells = [number(value, form) for value in found]
            if rest:
                of_rest = heading in _OF_SUMS and number(figure(together, table), form)
                cells.append(of_rest or "")
    return columns


def step_table(table: KernelTable) -> Table:
    """The steps' time by what then ran, and what they used of the GPU."""
    steps = table.step_times
    mean = step_time.mean(steps)
    lines = []
    for category, part in mean.parts_ns.items():
        each = [step.parts_ns[category] for step in steps]
        mean_ms, least, most = (f"{ns / 1e6:,.3f}" for ns in (part, min(each), max(each)))
        if part:
            lines.append(Line([category, mean_ms, f"{part / mean.ns:.1%}", least, most]))
    notes = [f"{len(steps):,} step{'s' * (len(steps) > 1)}, {mean.ns / 1e6:,.3f} ms each"]
    if table.what == "kernel":
        notes.append(f"GPU utilisation {mean.gpu_share:.1%}: the share with a kernel running")
        notes.append(f"of that on tensor cores, by the kernels' names: {mean.tensor_share:.1%}")
    header = ["the first active", "mean ms", "share", "least", "most"]
    return Table("Where a step's time goes", header, lines, notes)


def warnings(table: KernelTable) -> list[str]:
    return [f"warning: {warning}" for warning in table.warnings]


def summary(table: KernelTable) -> Iterator[str]:
    """Calls, busy and idle time, time by marker range and by category: a line each, where known."""
    total, steps = table.total_ns, table.steps or 1
    over = " a step" if table.steps else ""
    mean = f", mean of {steps:,} steps" if steps > 1 else ""

    def ms(ns: float) -> str:
        return f"{ns / steps / 1e6:,.3f}"

    yield f"{table.launches / steps:,.0f} {table.what} calls{over}, {ms(total)} ms{mean}"
    if (t := table.timeline) and t.span_ns:
        busy = f"{t.busy_ns / t.span_ns:.1%}"
        whole = f"{ms(t.span_ns)} ms{over} ({busy}), idle {ms(t.idle_ns)} ms"
        yield f"GPU busy {ms(t.busy_ns)} of {whole}"
    if loading := table.loading:
        wait, span = loading.wait_ns, loading.span_ns
        times = f"{wait / 1e6:,.3f} of {span / 1e6:,.3f} ms ({wait / span:.1%})"
        yield f"loading data {times}, {loading.batches:,} batches"
    if table.phases_ns:
        parts = [f"{name} {ms(ns)} ms" for name, ns in table.phases_ns.items()]
        yield f"by marker range{over}: {', '.join(parts)}"
    if total:
        shares = ", ".join(f"{name} {ns / total:.1%}" for name, ns in table.category_ns().items())
        yield f"by category: {shares}"
