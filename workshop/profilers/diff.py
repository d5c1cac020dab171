"""What changed from one profile to another: kernels gone, new, slower and faster; launches; the
GPU's busy and idle time."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workshop.errors import WorkshopError
from workshop.profilers.names import display_name, printable
from workshop.profilers.table import Kernel, KernelTable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SCHEMA_VERSION = 1
LEAST_CHANGE = 0.03
"""Of a kernel's own time: one run's kernels differ that much from the next one's, by the clock of
the GPU and by what happens to lie in its cache."""
LEAST_SHARE = 0.01
"""Of the time of all kernels: a change below it can't be seen in a step's time either."""

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
    """Of the GPU, and the time between: None where the tool has no timeline."""
    idle_ns: float | None
    categories_ns: dict[str, float]


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
    """What the figures are of: "step" where both tables tell the steps, else "profile"."""
    what: str
    """What the tables hold: "kernel", or a CPU's "operator"."""
    a: Side
    b: Side
    changes: list[Change]
    """The largest difference first; kernels whose difference is noise are not among them."""
    unchanged: int
    notes: list[str]
    """Sentences: why the two may not be comparable."""


def compare(a: KernelTable, b: KernelTable) -> TableDiff:
    """What changed from `a` to `b`: per step where both tell their steps, else in all.

    Kernels are matched by name, and those of torch.compile also where only its running number
    differs, if that leaves no choice.

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
    total = max(a.total_ns / of_a, b.total_ns / of_b)
    changes = []
    pairs = _pairs(a.kernels, b.kernels)
    for before, after in pairs:
        change = _change(before, after, of_a, of_b)
        if change.kind in (GONE, NEW) or _matters(change, total):
            changes.append(change)
    return TableDiff(
        unit=unit,
        what=a.what,
        a=_side(a, of_a),
        b=_side(b, of_b),
        changes=sorted(changes, key=lambda c: (-abs(c.difference_ns), c.name)),
        unchanged=len(pairs) - len(changes),
        notes=_notes(a, b),
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
    in_b = {kernel.name: kernel for kernel in b}
    names_a = {kernel.name for kernel in a}
    only_a = [kernel for kernel in a if kernel.name not in in_b]
    only_b = [kernel for kernel in b if kernel.name not in names_a]
    in_a, renamed = _unnumbered(only_a), _unnumbered(only_b)
    matched = {name: (in_a[name], renamed[name]) for name in in_a if name in renamed}
    gone = {before.name for before, _ in matched.values()}
    new = {after.name for _, after in matched.values()}
    pairs: list[tuple[Kernel | None, Kernel | None]] = [
        (kernel, in_b[kernel.name]) for kernel in a if kernel.name in in_b
    ]
    pairs += matched.values()
    pairs += [(kernel, None) for kernel in only_a if kernel.name not in gone]
    pairs += [(None, kernel) for kernel in only_b if kernel.name not in new]
    return pairs


def _unnumbered(kernels: Iterable[Kernel]) -> dict[str, Kernel]:
    """Those of the compiler's kernels that remain unique when their number is left out."""
    named = [
        (match[1], kernel) for kernel in kernels if (match := _INDUCTOR.fullmatch(kernel.name))
    ]
    times = Counter(name for name, _ in named)
    return {name: kernel for name, kernel in named if times[name] == 1}


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


def _matters(change: Change, total_ns: float) -> bool:
    difference = abs(change.difference_ns)
    return difference >= LEAST_CHANGE * change.a_ns and difference > LEAST_SHARE * total_ns


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
    )


def _notes(a: KernelTable, b: KernelTable) -> list[str]:
    notes = []
    if not (a.steps and b.steps):
        notes.append(
            "whole profiles are compared: not both tell how many steps they hold, so a longer one "
            "has more of everything"
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
    sides = [f"{label}: {printable(side.path)}" for label, side in (("A", diff.a), ("B", diff.b))]
    notes = [f"note: {note}" for note in diff.notes]
    return Group(
        Text("\n".join(sides)),
        _totals(diff, f"in all, {per}"),
        _changed(diff, limit, f"{diff.what}s, {per}"),
        Text("\n".join([*_left_out(diff, limit), *notes])),
    )


def _totals(diff: TableDiff, title: str) -> Table:
    table = _table(title, ("", "A", "B", "change"))

    def add(label: str, a: float | None, b: float | None, form: Callable[[float], str]) -> None:
        if a is None and b is None:
            return
        shown = ["-" if value is None else form(value) for value in (a, b)]
        table.add_row(label, *shown, _relative(a, b))

    a, b = diff.a, diff.b
    add(f"{diff.what} calls", a.launches, b.launches, _calls)
    add(f"all {diff.what}s, ms", a.kernels_ns, b.kernels_ns, _ms)
    add("GPU busy, ms", a.busy_ns, b.busy_ns, _ms)
    add("GPU idle, ms", a.idle_ns, b.idle_ns, _ms)
    for category in dict.fromkeys([*a.categories_ns, *b.categories_ns]):
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
            _calls(change.a_calls),
            _calls(change.b_calls),
            _ms(change.a_ns),
            _ms(change.b_ns),
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
        lines.append(
            f"unchanged: {diff.unchanged:,} of the {diff.what}s (by less than {LEAST_CHANGE:.0%} "
            f"of their own time, or {LEAST_SHARE:.0%} of all)"
        )
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
