"""Changes from one profile to another: kernels gone, new, slower and faster; launches; the
GPU's busy and idle time."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workshop.errors import WorkshopError
from workshop.profilers.names import distinct_names, printable
from workshop.profilers.show import room_for_names
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import RunResult
from workshop.tables import Line, Table

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
_INDUCTOR = re.compile(r"(triton_[a-z]+_fused_\w*?)_\d+")
"""The compiler numbers the kernels of a graph: one more before it, and the same kernel has another
name."""


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
    difference_ns: float


@dataclass(frozen=True)
class TableDiff:
    """From table `a` to table `b`."""

    a: KernelTable
    b: KernelTable
    unit: str
    """Unit of the figures: "step" where both tables have the steps, else "profile"."""
    changes: list[Change]
    """The largest difference first; kernels whose difference is noise are not among them."""
    unchanged: int
    """Kernels on both sides that take about the same time, or whose times are not compared."""
    timed: bool
    """Whether times are compared: not where Triton's interpreter ran the kernels."""
    notes: list[str]
    """Sentences: why the two may not be comparable."""

    @property
    def what(self) -> str:
        """Kind of the tables' lines: "kernel", or a CPU's "operator"."""
        return self.a.what

    def figures(self, table: KernelTable) -> dict[str, float]:
        """Calls and times in ns of `a` or `b`, in the unit; the GPU's where the tool has a
        timeline."""
        per, line = _units(table, self.unit), table.timeline
        found: dict[str, float] = {"calls": table.launches, f"all {self.what}s": table.total_ns}
        if line:
            found |= {"GPU busy": line.busy_ns, "GPU idle": line.idle_ns}
        found |= {f"  {name}": ns for name, ns in table.category_ns().items()}
        return {name: value / per for name, value in found.items()}


def _units(table: KernelTable, unit: str) -> float:
    return float(table.steps or 1) if unit == "step" else 1.0


def compare(
    a: KernelTable, b: KernelTable, run_a: RunResult | None = None, run_b: RunResult | None = None
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
    unit = "step" if a.steps and b.steps else "profile"
    of_a, of_b = _units(a, unit), _units(b, unit)
    least_ns = LEAST_SHARE * max(a.total_ns / of_a, b.total_ns / of_b)
    timed = not any(run is not None and run.interpreted for run in (run_a, run_b))
    in_a, in_b = _by_key(a.kernels, b.kernels), _by_key(b.kernels, a.kernels)
    pairs = [(in_a.get(key), in_b.get(key)) for key in in_a | in_b]
    changes = []
    for before, after in pairs:
        change = _change(before, after, of_a, of_b)
        if before is None or after is None:
            changes.append(change)
        elif timed and abs(change.difference_ns) > least_ns:
            differs = abs(change.difference_ns) >= LEAST_CHANGE * change.a_ns
            if a.what == "operator":
                differs = _differs_on_host(change, before, after)
            changes += [change] if differs else []
    changes.sort(key=lambda change: (-abs(change.difference_ns), change.name))
    unchanged = len(pairs) - len(changes)
    return TableDiff(a, b, unit, changes, unchanged, timed, list(_notes(a, b, timed)))


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
    a_calls, a_ns = (before.calls / of_a, before.total_ns / of_a) if before else (0.0, 0.0)
    b_calls, b_ns = (after.calls / of_b, after.total_ns / of_b) if after else (0.0, 0.0)
    kind = SLOWER if b_ns > a_ns else FASTER
    kind = NEW if before is None else GONE if after is None else kind
    return Change(kind, known.name, known.category, a_calls, b_calls, a_ns, b_ns, b_ns - a_ns)


def _differs_on_host(change: Change, before: Kernel, after: Kernel) -> bool:
    """By the fastest call, where there are as many calls on both sides: see LEAST_HOST_FACTOR."""
    if change.a_calls != change.b_calls:
        return True
    shorter, longer = sorted((before, after), key=lambda kernel: kernel.mean_ns)
    if shorter.min_ns is None or longer.min_ns is None:
        return longer.mean_ns > LEAST_HOST_FACTOR * shorter.mean_ns
    return longer.min_ns > LEAST_HOST_FACTOR * shorter.min_ns


def _notes(a: KernelTable, b: KernelTable, timed: bool) -> Iterator[str]:
    if not timed:
        yield (
            "no times are compared: Triton's interpreter ran the kernels of one, on the CPU, and "
            "takes hundreds of times longer than a GPU"
        )
    elif a.what == "operator":
        yield (
            "a CPU's times differ from run to run, their sum by a quarter, an operator's "
            "severalfold: one that is called as often counts as slower or faster only if its "
            f"fastest call is, by {LEAST_HOST_FACTOR} times"
        )
    if not (a.steps and b.steps):
        yield (
            "whole profiles are compared: the steps of one are not known, so a longer one has "
            "more of everything"
        )
    if a.tool != b.tool:
        tools = f"{printable(a.tool)} and {printable(b.tool)}"
        yield f"{tools} measure differently: trust large differences alone"
    if a.device and b.device and a.device != b.device:
        yield f"two devices: {printable(a.device)} and {printable(b.device)}"


# --- for the terminal ----------------------------------------------------------------------------


def render(diff: TableDiff, limit: int = 20) -> list[Table]:
    """The difference for the terminal: totals and categories, and the `limit` largest changes.
    Needs rich."""
    a, b = diff.figures(diff.a), diff.figures(diff.b)
    lines = [_total(f"{diff.what} calls", a, b, "calls", _calls)]
    for name in (a | b) if diff.timed else ():
        if name != "calls":
            lines.append(_total(f"{name}, ms", a, b, name, _ms))
    header = ["", "A", "B", "change"]
    shown = [Table(f"in all, a {diff.unit}", header, lines)]
    if diff.changes:
        shown.append(_changes(diff, limit))
    notes = [*_left_out(diff, limit), *(f"note: {note}" for note in diff.notes)]
    shown[-1] = dataclasses.replace(shown[-1], notes=notes)
    return shown


def _changes(diff: TableDiff, limit: int) -> Table:
    changes = diff.changes[:limit]
    columns = {
        "": [one.kind for one in changes],
        "calls A": [_calls(one.a_calls) for one in changes],
        "calls B": [_calls(one.b_calls) for one in changes],
        "ms A": [_ms(one.a_ns) for one in changes],
        "ms B": [_ms(one.b_ns) for one in changes],
        "change": [f"{one.difference_ns / 1e6:+,.3f}" for one in changes],
    }
    kinds, *figures = columns.values()
    names = distinct_names([one.name for one in changes], room_for_names(columns))
    rows = zip(kinds, names, *figures, strict=True)
    lines = [Line(row, _STYLES[row[0]]) for row in rows]
    _, *headings = columns
    title = f"{diff.what}s, a {diff.unit}"
    return Table(title, ["", diff.what, *headings], lines, left=(0, 1), wraps=())


def _total(
    label: str,
    a: dict[str, float],
    b: dict[str, float],
    name: str,
    form: Callable[[float], str],
) -> Line:
    """A figure of both sides, and its change; a category that a side does not have took no time."""
    missing = 0.0 if name.startswith(" ") else None
    before, after = a.get(name, missing), b.get(name, missing)
    first, second = ("-" if value is None else form(value) for value in (before, after))
    return Line([label, first, second, _relative(before, after)])


def _left_out(diff: TableDiff, limit: int) -> Iterator[str]:
    rest = Counter(change.kind for change in diff.changes[limit:])
    if rest:
        more = ", ".join(f"{rest[kind]:,} {kind}" for kind in KINDS if rest[kind])
        yield f"smaller ones, not shown: {more}"
    if diff.unchanged:
        alike = "about the same" if diff.timed else "on both sides"
        by = f" (by less than {LEAST_CHANGE:.0%} of their own time, or {LEAST_SHARE:.0%} of all)"
        said = diff.timed and diff.what == "kernel"  # of operators a note says it
        yield f"{alike}: {diff.unchanged:,} of the {diff.what}s{by if said else ''}"


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
