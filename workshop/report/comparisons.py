"""The ladder of one size on one device: its tables, what it saves, its losses, its roofline."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.compare import tables as compared
from workshop.compare.collection import StoredRun
from workshop.compare.figures import MEMORY_COLOURS
from workshop.compare.rows import (
    Peaks,
    Row,
    build_rows,
    session_peaks,
    trained_differently,
    variant,
)
from workshop.profilers.names import printable
from workshop.report import charts
from workshop.report.parts import (
    BAD,
    DIM,
    FAILED,
    IMPLAUSIBLE,
    Alarm,
    Cell,
    Line,
    Link,
    Section,
    Table,
    cells,
)
from workshop.report.pictures import Picture, RooflinePicture, read_roofline
from workshop.results import RunResult
from workshop.roofline.inputs import STEP
from workshop.roofline.model import flags, sentences
from workshop.run import precision, presets
from workshop.versions import ALL, BASELINE

_TONES = {"failed": BAD, "skipped": DIM, "interpreted": DIM}
_PHASES = ("forward_ms", "backward_ms", "optimizer_ms", "step_ms")


@dataclass(frozen=True)
class Group:
    """Versions that may be compared: of one device, size and precision."""

    anchor: str
    rows: list[Row]
    runs: list[list[StoredRun]]
    """Of each row."""

    @property
    def device(self) -> str:
        return self.rows[0].device

    @property
    def size(self) -> str:
        return f"{printable(self.rows[0].config)}, {printable(self.rows[0].precision)}"

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(stored.path for runs in self.runs for stored in runs)

    def pairs(self) -> Iterator[tuple[Row, list[StoredRun]]]:
        return zip(self.rows, self.runs, strict=True)


def groups(stored: Sequence[StoredRun]) -> list[Group]:
    """Those of the device that ran last come first; of a device, the smallest size.

    Args:
        stored: the oldest session first.
    """
    by_key: dict[tuple[object, ...], list[StoredRun]] = {}
    newest: dict[str, str] = {}
    for one in stored:
        by_key.setdefault(_key(one.run), []).append(one)
        newest[str(one.run.device.get("name"))] = one.run.session
    order = sorted(newest, key=lambda name: (newest[name], name), reverse=True)
    keys = sorted(by_key, key=lambda key: (order.index(str(key[0])), *key[1:]))
    peaks = session_peaks(one.run for one in stored)
    return [_group(f"size-{number}", by_key[key], peaks) for number, key in enumerate(keys, 1)]


def _key(run: RunResult) -> tuple[object, ...]:
    """What the runs of a group share, in the order in which groups are told."""
    sizes = tuple(sorted(run.config.items()))
    tokens = run.batch_size * run.seq_len
    name = str(run.device.get("name"))
    rank = presets.rank(run.config_name)
    return name, rank, tokens, run.config_name, run.precision, run.batch_size, sizes


def _group(anchor: str, stored: list[StoredRun], peaks: Peaks) -> Group:
    rows = build_rows([one.run for one in stored], peaks)
    runs = [[one for one in stored if _is_of(one.run, row)] for row in rows]
    return Group(anchor, rows, runs)


def _is_of(run: RunResult, row: Row) -> bool:
    return (run.version, run.session) == (row.version, row.session) and (
        variant(run) == row.variant
    )


def section(group: Group, folder: Path) -> Section:
    """All that is told of a group.

    Args:
        folder: of results, in which measured ceilings are looked for.
    """
    told = tables(group)
    told.pictures = list(_pictures(group))
    told.alarms = list(_alarms(group))
    _add_roofline(told, group, folder)
    return told


def tables(group: Group) -> Section:
    """What is told of a group in figures alone."""
    told = Section(group.anchor, printable(compared.title(group.rows)))
    speed, proof = compared.group_tables(group.rows)
    told.tables = [
        _table("How fast", group, speed, "result files", lambda runs: Cell("", links(runs))),
        _table("The same model? And at what cost", group, proof, "error, of allowed", _worst),
        *_saved(group),
    ]  # fmt: skip
    told.sentences = [printable(note) for note in proof.notes]
    return told


def links(stored: Iterable[StoredRun]) -> tuple[Link, ...]:
    return tuple(Link(str(i), one.path) for i, one in enumerate(stored, 1))


# --- tables --------------------------------------------------------------------------------------


def _table(
    caption: str,
    group: Group,
    table: compared.Table,
    last: str,
    last_cell: Callable[[list[StoredRun]], Cell],
) -> Table:
    """A table of compare/tables.py, with a column more."""
    lines = [
        Line([*cells(*line.cells), last_cell(runs)],
             BAD if row.plausibility else _TONES.get(row.status, ""))
        for (row, runs), line in zip(group.pairs(), table.lines, strict=True)
    ]  # fmt: skip
    return Table(caption, [*table.header, last], lines)


def _worst(stored: Sequence[StoredRun]) -> Cell:
    """Of the gate's measures, the one that comes closest to what is allowed."""
    closest = [found for one in stored if (found := one.run.parity.closest())]
    share = max((error / allowed for _, error, allowed in closest), default=None)
    if share is None:
        return Cell("-")
    return Cell(f"{share:.0%}" if math.isfinite(share) else "not finite")


def _saved(group: Group) -> list[Table]:
    """What each version that is proven to differ from V1 takes off its step, by phase; none
    without V1's phases."""
    proven = [row for row in group.rows if row.speedup is not None and row.forward_ms is not None]
    if len(proven) < 2 or proven[0].version != BASELINE or proven[0].variant:
        return []
    baseline, *others = proven
    lines = []
    for row in others:
        if row.session == baseline.session and _differs(row):
            saved = [_minus(getattr(baseline, name), getattr(row, name)) for name in _PHASES]
            lines.append(Line(cells(row.label, *saved)))
    header = ["version", "forward", "backward", "optimizer", "whole step"]
    return [Table("Saved of V1's step, in ms", header, lines)] if lines else []


def _differs(row: Row) -> bool:
    low, high = row.speedup_ci or (1.0, 1.0)
    return not low <= 1 <= high


def _minus(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{before - after:,.2f}"


def at_a_glance(all_groups: Sequence[Group]) -> Table | None:
    """A line for each size; variants of versions stand in its own table."""
    if not all_groups:
        return None
    rows = [row for group in all_groups for row in group.rows]
    keys = [key for key in ALL if any(row.version == key for row in rows)]
    several = len({row.device for row in rows}) > 1
    lines = []
    for group in all_groups:
        device = f", {printable(group.device)}" if several else ""
        plain = {row.version: row for row in group.rows if not row.variant}
        bad = any(row.failed or row.plausibility for row in group.rows)
        first = Cell(f"{group.size}{device}", anchor=group.anchor)
        figures = cells(*(_in_a_word(plain.get(key)) for key in keys))
        lines.append(Line([first, *figures], BAD if bad else ""))
    header = ["size", *(f"{key}: {ALL[key].title}" for key in keys)]
    return Table("Step time of V1, and each version's speed-up over it", header, lines)


def _in_a_word(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.failed:
        return f"{row.refused} red" if row.refused else "failed"
    if row.verdict() in ("baseline", "-") and row.step_ms is not None:
        return f"{row.step_ms:,.2f} ms"
    return row.verdict().replace("no significant difference", "no difference")


# --- pictures ------------------------------------------------------------------------------------


def speedup_pictures(anchor: str, own: Sequence[Group]) -> list[Picture]:
    """All of a device's speed-ups in one."""
    intervals = [
        charts.Interval(
            printable(row.label), row.speedup, row.speedup_ci[0], row.speedup_ci[1], group.size
        )
        for group in own
        for row in group.rows
        if row.speedup is not None and row.speedup_ci and row.verdict() != "baseline"
    ]
    files = tuple(path for group in own for path in group.files)
    return [charts.speedups(f"{anchor}-speedups", intervals, files)] if intervals else []


def _pictures(group: Group) -> Iterator[Picture]:
    files = group.files
    timed = [row for row in group.rows if row.forward_ms is not None]
    if timed:
        bars = [charts.Bar(printable(row.label), _phases(row)) for row in timed]
        yield charts.phases(f"{group.anchor}-phases", bars, files)
    measured = [row for row in group.rows if row.memory_mb]
    if measured:
        bars = [charts.Bar(printable(row.label), _memory(row)) for row in measured]
        yield charts.memory(f"{group.anchor}-memory", bars, files)
    curves = _curves(group)
    if curves:
        caution = precision.of_losses(group.rows[0].precision)
        yield charts.losses(f"{group.anchor}-losses", curves, files, caution)


def _phases(row: Row) -> tuple[float, ...]:
    return tuple(_drawable(getattr(row, name) or 0.0) for name in _PHASES[:-1])


def _memory(row: Row) -> tuple[float, ...]:
    names = [name for name, _, _ in MEMORY_COLOURS]
    return tuple(_drawable(float(row.memory_mb.get(name, 0.0))) for name in names)


def _drawable(length: float) -> float:
    """Of a part of a bar: a broken file may have any."""
    return min(max(0.0, length), results.MOST)


def _curves(group: Group) -> list[charts.Curve]:
    """Of each version as it is, its first run's."""
    first = {
        row.version: stored[0].run
        for row, stored in group.pairs()
        if row.status in ("timed", "interpreted") and not row.variant and stored[0].run.losses
    }
    baseline = first.get(BASELINE)
    curves = []
    for version, run in first.items():
        differences: tuple[float, ...] = ()
        if version != BASELINE and baseline and not trained_differently([run, baseline]):
            pairs = zip(_finite(run), _finite(baseline), strict=False)
            differences = tuple(own - its for own, its in pairs)
        curves.append(charts.Curve(version, _finite(run), differences))
    return curves


def _finite(run: RunResult) -> tuple[float, ...]:
    return tuple(
        loss if loss is not None and abs(loss) <= results.MOST else math.nan for loss in run.losses
    )


def _add_roofline(told: Section, group: Group, folder: Path) -> None:
    """What bounds the whole steps in words; the parts of a step are points of the picture alone."""
    paths = [one.path for row, stored in group.pairs() if row.step_ms for one in stored]
    roofline = read_roofline(paths, title=group.size, results_folder=folder) if paths else None
    if roofline is None:
        return
    steps = sum(point.category == STEP for point in roofline.points)
    lines = map(printable, [*flags(roofline), *sentences(roofline, steps), *roofline.notes])
    told.sentences = list(dict.fromkeys([*told.sentences, *lines]))
    told.pictures.append(RooflinePicture.of(f"{group.anchor}-roofline", roofline, tuple(paths)))


# --- alarms --------------------------------------------------------------------------------------


def _alarms(group: Group) -> Iterator[Alarm]:
    for row, stored in group.pairs():
        where = f"{row.label} {group.size}, {row.device}"
        if row.refused:
            red = [one for one in stored if one.run.refused]
            what, failures = red[0].run.refused or ("", [])
            for failure in failures:
                kind = f"{what.upper()} RED"
                yield Alarm(kind, printable(f"{where}: {failure}"), links(red))
        elif row.failed:
            yield Alarm(FAILED, printable(f"{where}: {row.note}"), links(stored))
        for sentence in row.plausibility:
            yield Alarm(IMPLAUSIBLE, printable(f"{where}: {sentence}"), links(stored))
