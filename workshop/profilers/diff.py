"""Changes from one profile to another: kernels gone, new, slower and faster; launches; the
GPU's busy and idle time."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workshop.errors import WorkshopError
from workshop.profilers.names import display_name, printable
from workshop.profilers.show import render_warnings
from workshop.profilers.table import Kernel, KernelTable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from workshop.results import RunResult

SCHEMA_VERSION = 1
LEAST_CHANGE = 0.03
"""Share of a kernel's own time: one run's kernels differ that much from the next one's, by the
clock of the GPU and by what happens to lie in its cache."""
LEAST_HOST_FACTOR = 1.75
"""Factor of a CPU operator's fastest call. The sum of its calls, and the longest, change
severalfold from run to run, with what else runs and with the memory that the system has to find. In
30 pairs of profiles of one model the fastest call was within 1.52 times; at twice the batch it
takes 2 to 2.7 times as long."""
LEAST_SHARE = 0.01
"""Share of the time of all kernels: a change below it can't be seen in a step's time either."""

GONE, NEW, SLOWER, FASTER = KINDS = ("gone", "new", "slower", "faster")
_STYLES = {GONE: "green", FASTER: "green", NEW: "yellow", SLOWER: "red"}
_NAME_WIDTH = 60

_INDUCTOR = re.compile(r"(triton_[a-z]+_fused_\w*?)_\d+")
"""The compiler numbers the kernels of a graph: one more before it, and the same kernel has another
name."""


@dataclass(frozen=True)
class Side:
    """One table's figures, in the difference's unit. Times in ns."""

    path: str
    tool: str
    device: str | None
    steps: int | None
    kernels_ns: float
    """Sum of all kernels' times."""
    launches: float
    busy_ns: float | None
    """Busy time of the GPU, and the time between: None where the tool has no timeline."""
    idle_ns: float | None
    categories_ns: dict[str, float]
    warnings: list[str]
    """Sentences: what could not be read, what the figures leave out."""


@dataclass(frozen=True)
class Change:
    """One kernel that differs. Times in ns, calls and times in the difference's unit, and 0 on
    the side that does not have it."""

    kind: str
    """One of KINDS."""
    name: str
    """As in `b`, or in `a` if it is gone."""
    category: str
    a_calls: float
    b_calls: float
    a_ns: float
    b_ns: float

    @property
    def difference_ns(self) -> float:
        return self.b_ns - self.a_ns


@dataclass(frozen=True)
class TableDiff:
    """From table `a` to table `b`."""

    unit: str
    """Unit of the figures: "step" where both tables have the steps, else "profile"."""
    what: str
    """Kind of the tables' lines: "kernel", or a CPU's "operator"."""
    a: Side
    b: Side
    changes: list[Change]
    """The largest difference first; kernels whose difference is noise are not among them."""
    unchanged: int
    """Kernels on both sides that take about the same time, or whose times are not compared."""
    timed: bool
    """Whether times are compared: not where Triton's interpreter ran the kernels."""
    notes: list[str]
    """Sentences: why the two may not be comparable."""


def compare(
    a: KernelTable,
    b: KernelTable,
    run_a: RunResult | None = None,
    run_b: RunResult | None = None,
) -> TableDiff:
    """Changes from `a` to `b`: per step where both have their steps, else in all.

    Kernels are matched by name, and those of torch.compile also where only its running number
    differs, if that leaves no choice.

    Args:
        run_a, run_b: the records of what was profiled, where there are some. Where Triton's
            interpreter ran one of them, no kernel is called slower or faster.

    Raises:
        WorkshopError: one holds a GPU's kernels and the other a CPU's operators.
    """
    if a.what != b.what:
        raise WorkshopError(
            f"{a.path} holds {a.what}s and {b.path} {b.what}s: compare two profiles of one kind"
        )
    by_step = bool(a.steps and b.steps)
    unit = "step" if by_step else "profile"
    of_a, of_b = (float(table.steps or 1) if by_step else 1.0 for table in (a, b))
    least_ns = LEAST_SHARE * max(a.total_ns / of_a, b.total_ns / of_b)
    timed = not any(run is not None and run.interpreted for run in (run_a, run_b))
    changes = []
    pairs = _pairs(a.kernels, b.kernels)
    for before, after in pairs:
        change = _change(before, after, of_a, of_b)
        if before is None or after is None:
            changes.append(change)
        elif timed and abs(change.difference_ns) > least_ns:
            differs = abs(change.difference_ns) >= LEAST_CHANGE * change.a_ns
            if a.what == "operator":
                differs = _differs_on_host(change, before, after)
            if differs:
                changes.append(change)
    return TableDiff(
        unit=unit,
        what=a.what,
        a=_side(a, of_a),
        b=_side(b, of_b),
        changes=sorted(changes, key=lambda c: (-abs(c.difference_ns), c.name)),
        unchanged=len(pairs) - len(changes),
        timed=timed,
        notes=_notes(a, b, timed),
    )


def as_json(diff: TableDiff) -> dict[str, Any]:
    """The difference as plain values, with each change's difference_ns."""
    changes = [
        dataclasses.asdict(change) | {"difference_ns": change.difference_ns}
        for change in diff.changes
    ]
    return {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(diff) | {"changes": changes}


# --- matching ------------------------------------------------------------------------------------


def _pairs(a: list[Kernel], b: list[Kernel]) -> list[tuple[Kernel | None, Kernel | None]]:
    """Each kernel of either side once, with its counterpart or None."""
    in_a, in_b = _by_key(a, b), _by_key(b, a)
    return [(in_a.get(key), in_b.get(key)) for key in in_a | in_b]


def _by_key(kernels: list[Kernel], others: list[Kernel]) -> dict[tuple[str, bool], Kernel]:
    """Kernels by name, True; or by (name without its number, False), if they are the compiler's,
    not among the others, and that is unique."""
    names = {kernel.name for kernel in others}
    unnumbered = {
        kernel.name: match[1]
        for kernel in kernels
        if kernel.name not in names and (match := _INDUCTOR.fullmatch(kernel.name))
    }
    times = Counter(unnumbered.values())
    keys = ((unnumbered.get(kernel.name, ""), kernel) for kernel in kernels)
    return {(bare, False) if times[bare] == 1 else (k.name, True): k for bare, k in keys}


def _change(before: Kernel | None, after: Kernel | None, of_a: float, of_b: float) -> Change:
    known = after or before
    assert known is not None
    a_ns = before.total_ns / of_a if before else 0.0
    b_ns = after.total_ns / of_b if after else 0.0
    slower_or_faster = SLOWER if b_ns > a_ns else FASTER
    return Change(
        kind=NEW if before is None else GONE if after is None else slower_or_faster,
        name=known.name,
        category=known.category,
        a_calls=before.calls / of_a if before else 0.0,
        b_calls=after.calls / of_b if after else 0.0,
        a_ns=a_ns,
        b_ns=b_ns,
    )


def _differs_on_host(change: Change, before: Kernel, after: Kernel) -> bool:
    """By the fastest call, where there are as many calls on both sides: see LEAST_HOST_FACTOR."""
    if change.a_calls != change.b_calls:
        return True
    shorter, longer = sorted((before, after), key=lambda kernel: kernel.mean_ns)
    if shorter.min_ns is None or longer.min_ns is None:
        return longer.mean_ns > LEAST_HOST_FACTOR * shorter.mean_ns
    return longer.min_ns > LEAST_HOST_FACTOR * shorter.min_ns


def _side(table: KernelTable, per: float) -> Side:
    line = table.timeline
    return Side(
        path=str(table.path),
        tool=table.tool,
        device=table.device,
        steps=table.steps,
        kernels_ns=table.total_ns / per,
        launches=table.launches / per,
        busy_ns=line.busy_ns / per if line else None,
        idle_ns=line.idle_ns / per if line else None,
        categories_ns={name: ns / per for name, ns in table.category_ns().items()},
        warnings=table.warnings,
    )


def _notes(a: KernelTable, b: KernelTable, timed: bool) -> list[str]:
    notes = []
    if not timed:
        notes.append(
            "no times are compared: Triton's interpreter ran the kernels of one, on the CPU, and "
            "takes hundreds of times longer than a GPU"
        )
    elif a.what == "operator":
        notes.append(
            "a CPU's times differ from run to run, their sum by a quarter, an operator's "
            "severalfold: one that is called as often counts as slower or faster only if its "
            f"fastest call is, by {LEAST_HOST_FACTOR} times"
        )
    if not (a.steps and b.steps):
        notes.append(
            "whole profiles are compared: the steps of one are not known, so a longer one has "
            "more of everything"
        )
    if a.tool != b.tool:
        notes.append(
            f"{printable(a.tool)} and {printable(b.tool)} measure differently: trust large "
            "differences alone"
        )
    if a.device and b.device and a.device != b.device:
        notes.append(f"two devices: {printable(a.device)} and {printable(b.device)}")
    return notes


# --- for the terminal ----------------------------------------------------------------------------


def render(diff: TableDiff, limit: int = 20) -> RenderableType:
    """The difference for rich's console: totals, categories, and the `limit` largest changes.
    Needs rich."""
    from rich.console import Group
    from rich.text import Text

    per = "a step" if diff.unit == "step" else "a profile"
    sides: list[RenderableType] = []
    for label, side in (("A", diff.a), ("B", diff.b)):
        sides += [Text(f"{label}: {printable(side.path)}"), *render_warnings(side.warnings)]
    notes = [f"note: {note}" for note in diff.notes]
    changed = [_changed(diff, limit, f"{diff.what}s, {per}")] if diff.changes else []
    return Group(
        *sides,
        _totals(diff, f"in all, {per}"),
        *changed,
        Text("\n".join([*_left_out(diff, limit), *notes])),
    )


def _totals(diff: TableDiff, title: str) -> Table:
    table = _table(title, ("", "A", "B", "change"))

    def add(label: str, a: float | None, b: float | None, form: Callable[[float], str]) -> None:
        if a is not None or b is not None:
            shown = ["-" if value is None else form(value) for value in (a, b)]
            table.add_row(label, *shown, _relative(a, b))

    a, b = diff.a, diff.b
    add(f"{diff.what} calls", a.launches, b.launches, _calls)
    if not diff.timed:
        return table
    add(f"all {diff.what}s, ms", a.kernels_ns, b.kernels_ns, _ms)
    add("GPU busy, ms", a.busy_ns, b.busy_ns, _ms)
    add("GPU idle, ms", a.idle_ns, b.idle_ns, _ms)
    for category in a.categories_ns | b.categories_ns:
        before, after = (side.categories_ns.get(category, 0.0) for side in (a, b))
        add(f"  {category}, ms", before, after, _ms)
    return table


def _changed(diff: TableDiff, limit: int, title: str) -> Table:
    from rich.text import Text

    table = _table(title, ("", diff.what, "calls A", "B", "ms A", "B", "change"))
    for change in diff.changes[:limit]:
        table.add_row(
            Text(change.kind, style=_STYLES[change.kind]),
            # Names come from files: as text they can be neither markup nor terminal codes.
            Text(display_name(change.name, _NAME_WIDTH)),
            *map(_calls, (change.a_calls, change.b_calls)),
            *map(_ms, (change.a_ns, change.b_ns)),
            f"{change.difference_ns / 1e6:+,.3f}",
        )
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        # Where the terminal is narrow the names are folded, and no figure is cut.
        if heading in ("kernel", "operator"):
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def _left_out(diff: TableDiff, limit: int) -> list[str]:
    rest = Counter(change.kind for change in diff.changes[limit:])
    more = ", ".join(f"{rest[kind]:,} {kind}" for kind in KINDS if rest[kind])
    lines = [f"smaller ones, not shown: {more}"] if more else []
    if diff.unchanged:
        alike = "about the same" if diff.timed else "on both sides"
        lines.append(f"{alike}: {diff.unchanged:,} of the {diff.what}s")
        if diff.timed and diff.what == "kernel":  # of operators a note says it
            lines[-1] += f" (by less than {LEAST_CHANGE:.0%} of their own time, or "
            lines[-1] += f"{LEAST_SHARE:.0%} of all)"
    return lines


def _relative(a: float | None, b: float | None) -> str:
    if not a or b is None:
        return "-"
    if b > 1000 * a:
        return "> 1000x"
    return f"{b / a:,.1f}x" if b >= 2 * a else f"{b / a - 1:+.1%}"


def _calls(calls: float) -> str:
    return f"{calls:,.0f}" if calls >= 10 or calls == int(calls) else f"{calls:.1f}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f}"
