"""The hot list of a kernel table: on the terminal, and as CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop import errors
from workshop.profilers import kernel_file
from workshop.profilers.load import load_with_doubts
from workshop.profilers.names import display_name, distinct_names, printable
from workshop.profilers.table import Kernel, KernelTable

if TYPE_CHECKING:
    from rich.text import Text

_LEAST_NAME, _READABLE_NAME = 16, 30
"""Characters of a name: below the second, figures that can be done without make room for it."""
_DISPENSABLE = ("max", "min", "mean µs", "calls")
"""The headings of those, the first to go first."""
COLOURS = {
    "GEMM": "green",
    "attention": "cyan",
    "norm": "magenta",
    "elementwise": "yellow",
    "optimizer": "blue",
    "copy": "red",
    "communication": "bright_red",
    "other": "white",
}


def show(path: Path, *, limit: int = 15, output_dir: Path | None = None) -> int:
    """Prints the hot list of what a profiler wrote, and with `output_dir` writes it there
    as kernel_file.CSV_FILE and JSON_FILE; the exit status. A runner has it written to the folder
    that it is about to leave."""
    errors.require("rich")
    from rich.console import Console

    by_its_runner = output_dir is not None and output_dir.resolve() == path.resolve()
    table = load_with_doubts(path, ended=not by_its_runner)
    written = kernel_file.write(table, output_dir) if output_dir is not None else ()
    console = Console()
    for renderable in render(table, limit, console.width):
        console.print(renderable)
    for warning in render_warnings(table.warnings):
        console.print(warning)
    for file in written:
        print(f"Written: {file}")
    return errors.DONE


def render(table: KernelTable, limit: int, width: int) -> list[Any]:
    """The hot list, its summary and the categories, for rich's console of `width` columns: the
    figures whole, and of the names what then fits."""
    from rich.table import Table
    from rich.text import Text

    shown = table.kernels[:limit]
    columns = [column for column in _COLUMNS if any(column.value(kernel) for kernel in shown)]
    wanted = max((len(display_name(kernel.name, _READABLE_NAME)) for kernel in shown), default=0)
    left = _left_for_names(table, limit, columns, width)
    for heading in _DISPENSABLE:
        if left < wanted:
            columns = [column for column in columns if column.heading != heading]
            left = _left_for_names(table, limit, columns, width)
    left = max(left, _LEAST_NAME)
    hot = Table(title=Text(_title(table)), title_justify="left")
    hot.add_column(table.what, no_wrap=True, max_width=left)
    hot.add_column("category", no_wrap=True)
    for column in columns:
        hot.add_column(column.heading, justify="right", no_wrap=True)
    names = distinct_names([kernel.name for kernel in shown], left)
    for name, kernel in zip(names, shown, strict=True):
        cells = [column.cell(kernel, table) for column in columns]
        # Names come from files: as text they can be neither markup nor terminal codes.
        hot.add_row(Text(name), Text(kernel.category, style=COLOURS[kernel.category]), *cells)
    if rest := _rest(table, limit, columns):
        hot.add_row(f"{len(table.kernels) - limit:,} more", "", *rest, style="dim")
    return [hot, Text("\n".join(summary(table)))]


def render_warnings(warnings: Iterable[str]) -> list[Text]:
    """A table's warnings for rich's console. Needs rich."""
    from rich.text import Text

    return [Text(f"warning: {printable(warning)}", style="yellow") for warning in warnings]


def _left_for_names(table: KernelTable, limit: int, columns: list[_Column], width: int) -> int:
    """Characters of a line of `width` that the category and these columns leave."""
    shown = table.kernels[:limit]
    rows = [[column.cell(kernel, table) for column in columns] for kernel in shown]
    rows += [rest] if (rest := _rest(table, limit, columns)) else []
    headings = [column.heading for column in columns]
    numbers = sum(max(map(len, cells)) for cells in zip(headings, *rows, strict=True))
    categories = max(len(category) for category in ("category", *(k.category for k in shown)))
    # Each column is between two spaces and a line.
    return width - numbers - 3 * len(columns) - categories - 7


@dataclass(frozen=True)
class _Column:
    heading: str
    value: Callable[[Kernel], float | None]
    """Of a kernel, in the heading's unit; None where the tool does not have it."""
    format: str
    of_sums: bool = False
    """Whether it says something of many kernels together too."""

    def cell(self, kernel: Kernel, table: KernelTable) -> str:
        value = self.value(kernel)
        if value is None:
            return "-"
        return format(value if self.heading != "share" else table.share(kernel), self.format)


_COLUMNS = (
    _Column("calls", lambda k: k.calls, ",", of_sums=True),
    _Column("total ms", lambda k: k.total_ns / 1e6, ",.3f", of_sums=True),
    _Column("mean µs", lambda k: k.mean_ns / 1e3, ",.1f"),
    _Column("min", lambda k: None if k.min_ns is None else k.min_ns / 1e3, ",.1f"),
    _Column("max", lambda k: None if k.max_ns is None else k.max_ns / 1e3, ",.1f"),
    _Column("share", lambda k: k.total_ns, ".1%", of_sums=True),
    _Column("GB/s", lambda k: k.bytes / k.total_ns if k.bytes and k.total_ns else None, ",.0f"),
    _Column(
        "TFLOP/s", lambda k: k.flops / k.total_ns / 1e3 if k.flops and k.total_ns else None, ",.1f"
    ),
)


def _rest(table: KernelTable, limit: int, columns: list[_Column]) -> list[str]:
    """The cells of all kernels below the limit together; none where there are none."""
    rest = table.kernels[limit:]
    if not rest:
        return []
    calls, total = sum(k.calls for k in rest), sum(k.total_ns for k in rest)
    together = Kernel("", "other", calls, total)
    return [column.cell(together, table) if column.of_sums else "" for column in columns]


def _title(table: KernelTable) -> str:
    where = f", {display_name(table.device, 60)}" if table.device else ""
    return f"{printable(table.tool)}{where}: {printable(str(table.path))}"


def summary(table: KernelTable) -> list[str]:
    """Calls, busy and idle time, time by marker range and by category: a line each, where known."""
    lines = [f"{table.launches:,} {table.what} calls, {table.total_ns / 1e6:,.3f} ms"]
    if table.steps:
        per_step = table.launches / table.steps, table.total_ns / table.steps / 1e6
        in_steps = f"{table.steps:,} step{'s' if table.steps > 1 else ''}"
        lines[0] += f", in {in_steps}: {per_step[0]:,.0f} calls, {per_step[1]:,.3f} ms each"
    if table.timeline and table.timeline.span_ns:
        t = table.timeline
        lines.append(
            f"GPU busy {t.busy_ns / 1e6:,.3f} of {t.span_ns / 1e6:,.3f} ms "
            f"({t.busy_ns / t.span_ns:.1%}), idle {t.idle_ns / 1e6:,.3f} ms"
        )
    if table.phases_ns:
        steps, each = (table.steps, " a step") if table.steps else (1, "")
        parts = [f"{name} {ns / steps / 1e6:,.3f} ms" for name, ns in table.phases_ns.items()]
        lines.append(f"by marker range{each}: {', '.join(parts)}")
    total = table.total_ns
    if total:
        shares = ", ".join(f"{name} {ns / total:.1%}" for name, ns in table.category_ns().items())
        lines.append(f"by category: {shares}")
    return lines
