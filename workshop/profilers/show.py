"""The hot list of a kernel table: on the terminal, and as CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop import errors
from workshop.profilers import kernel_file, step_time
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
_Column = tuple[str, Callable[[Kernel, float], float | None]]
"""Format, and the figure of a kernel and the total of all."""
_COLUMNS: dict[str, _Column] = {
    "calls": (",", lambda k, total: k.calls),
    "total ms": (",.3f", lambda k, total: k.total_ns / 1e6),
    "mean µs": (",.1f", lambda k, total: k.mean_ns / 1e3),
    "min": (",.1f", lambda k, total: None if k.min_ns is None else k.min_ns / 1e3),
    "max": (",.1f", lambda k, total: None if k.max_ns is None else k.max_ns / 1e3),
    "share": (".1%", lambda k, total: k.total_ns / total if total else 0.0),
    "GB/s": (",.0f", lambda k, total: k.bytes / k.total_ns if k.bytes and k.total_ns else None),
    "TFLOP/s": (
        ",.1f",
        lambda k, total: k.flops / k.total_ns / 1e3 if k.flops and k.total_ns else None,
    ),
}
_OF_SUMS = ("calls", "total ms", "share")
"""The headings of what can be given of many kernels together too."""


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
    for renderable in [*render(table, limit, console.width), *render_warnings(table.warnings)]:
        console.print(renderable)
    for file in written:
        print(f"Written: {file}")
    return errors.DONE


def render(table: KernelTable, limit: int, width: int) -> list[Any]:
    """The hot list, its summary, and where the time of a step goes, for rich's console of `width`
    columns: the figures whole, and of the names what then fits."""
    from rich.table import Table
    from rich.text import Text

    shown, rest = table.kernels[:limit], table.kernels[limit:]
    wanted = max((len(display_name(kernel.name, _READABLE_NAME)) for kernel in shown), default=0)
    categories = max(len(category) for category in ("category", *(k.category for k in shown)))
    columns = _columns(shown, rest, table.total_ns)

    def left_for_names() -> int:
        numbers = sum(max(map(len, (heading, *cells))) for heading, cells in columns.items())
        # Each column is between two spaces and a line.
        return width - numbers - 3 * len(columns) - categories - 7

    for heading in _DISPENSABLE:
        if left_for_names() < wanted:
            columns.pop(heading, None)
    left = max(left_for_names(), _LEAST_NAME)
    where = f", {display_name(table.device, 60)}" if table.device else ""
    title = Text(f"{printable(table.tool)}{where}: {printable(str(table.path))}")
    hot = Table(title=title, title_justify="left")
    hot.add_column(table.what, no_wrap=True, max_width=left)
    hot.add_column("category", no_wrap=True)
    for heading in columns:
        hot.add_column(heading, justify="right", no_wrap=True)
    names = distinct_names([kernel.name for kernel in shown], left)
    for index, kernel in enumerate(shown):
        cells = (texts[index] for texts in columns.values())
        # Names come from files: as text they can be neither markup nor terminal codes.
        hot.add_row(Text(names[index]), Text(kernel.category, COLOURS[kernel.category]), *cells)
    if rest:
        cells = (texts[-1] for texts in columns.values())
        hot.add_row(f"{len(rest):,} more", "", *cells, style="dim")
    return [hot, Text("\n".join(summary(table))), *_render_steps(table)]


def _columns(shown: list[Kernel], rest: list[Kernel], total: float) -> dict[str, list[str]]:
    """The cells by heading, for each kernel that is shown, and for the rest together if there is
    one; without the figures that the tool does not have."""
    together = Kernel("", "other", sum(k.calls for k in rest), sum(k.total_ns for k in rest))
    columns = {}
    for heading, (style, figure) in _COLUMNS.items():
        found = [figure(kernel, total) for kernel in shown]
        if any(found):
            columns[heading] = ["-" if n is None else format(n, style) for n in found]
            if rest:
                last = figure(together, total) if heading in _OF_SUMS else ""
                columns[heading].append(format(last, style if last != "" else ""))
    return columns


def _render_steps(table: KernelTable) -> list[Any]:
    """The steps' time by what then ran, and what they used of the GPU; nothing where the tool does
    not see it."""
    from rich.table import Table
    from rich.text import Text

    steps = table.step_times
    if not steps:
        return []
    mean = step_time.mean(steps)
    parts = Table(title="Where a step's time goes", title_justify="left")
    parts.add_column("the first active")
    for heading in ("mean ms", "share", "least", "most"):
        parts.add_column(heading, justify="right")
    for category, part in mean.parts_ns.items():
        each = [step.parts_ns[category] for step in steps]
        mean_ms, least, most = (f"{ns / 1e6:,.3f}" for ns in (part, min(each), max(each)))
        if part:
            parts.add_row(category, mean_ms, f"{part / mean.ns:.1%}", least, most)
    lines = [f"{len(steps):,} step{'s' * (len(steps) > 1)}, {mean.ns / 1e6:,.3f} ms each"]
    if table.what == "kernel":
        lines.append(f"GPU utilisation {mean.gpu_share:.1%}: the share with a kernel running")
        lines.append(f"of that on tensor cores, by the kernels' names: {mean.tensor_share:.1%}")
    return [parts, Text("\n".join(lines))]


def render_warnings(warnings: Iterable[str]) -> list[Text]:
    """A table's warnings for rich's console. Needs rich."""
    from rich.text import Text

    return [Text(f"warning: {printable(warning)}", style="yellow") for warning in warnings]


def summary(table: KernelTable) -> Iterator[str]:
    """Calls, busy and idle time, time by marker range and by category: a line each, where known."""
    in_steps, total, steps = "", table.total_ns, table.steps or 1
    if table.steps:
        in_steps = f", in {steps:,} step{'s' * (steps > 1)}: {table.launches / steps:,.0f} calls, "
        in_steps += f"{total / steps / 1e6:,.3f} ms each"
    yield f"{table.launches:,} {table.what} calls, {total / 1e6:,.3f} ms{in_steps}"
    if (t := table.timeline) and t.span_ns:
        yield (
            f"GPU busy {t.busy_ns / 1e6:,.3f} of {t.span_ns / 1e6:,.3f} ms "
            f"({t.busy_ns / t.span_ns:.1%}), idle {t.idle_ns / 1e6:,.3f} ms"
        )
    if loading := table.loading:
        wait, span = loading.wait_ns, loading.span_ns
        times = f"{wait / 1e6:,.3f} of {span / 1e6:,.3f} ms ({wait / span:.1%})"
        yield f"loading data {times}, {loading.batches:,} batches"
    if table.phases_ns:
        parts = [f"{name} {ns / steps / 1e6:,.3f} ms" for name, ns in table.phases_ns.items()]
        yield f"by marker range{' a step' if table.steps else ''}: {', '.join(parts)}"
    if total:
        shares = ", ".join(f"{name} {ns / total:.1%}" for name, ns in table.category_ns().items())
        yield f"by category: {shares}"
