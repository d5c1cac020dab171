"""The ladder of one size on one device: its tables, what it saves, its losses, its roofline."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.collection import StoredRun
from workshop.compare import rows as measured
from workshop.compare.rows import Row, size_name, variant
from workshop.errors import printable
from workshop.results import FAIL, RunResult
from workshop.run import presets
from workshop.show import charts, comparisons
from workshop.show.drawing import Chart
from workshop.show.sections import LADDERS, Section, add_roofline, file_links, row_alarms
from workshop.tables import Cell, Line, Table
from workshop.versions import ALL, BASELINE


@dataclass(frozen=True)
class Group:
    """Versions that may be compared: of one device, size and precision."""

    rows: list[Row]
    runs: list[list[StoredRun]]
    """The runs of each row."""

    @property
    def device(self) -> str:
        return self.rows[0].device

    @property
    def preset(self) -> str:
        return size_name(self.runs[0][0].run)

    @property
    def size(self) -> str:
        """With the tokens of a step where no preset names them."""
        run = self.runs[0][0].run
        own = self.preset != run.config_name
        tokens = f", {run.batch_size} x {run.seq_len} tokens" if own else ""
        return printable(f"{self.preset}{tokens}, {self.rows[0].precision}")

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(stored.path for runs in self.runs for stored in runs))

    def pairs(self) -> Iterator[tuple[Row, list[StoredRun]]]:
        return zip(self.rows, self.runs, strict=True)

    def only(self, labels: Sequence[str]) -> "Group | None":
        """The rows with these labels; None without any."""
        kept = [(row, runs) for row, runs in self.pairs() if row.label in labels]
        return Group([row for row, _ in kept], [runs for _, runs in kept]) if kept else None


def ladders(stored: Sequence[StoredRun]) -> list[Group]:
    """The groups of ordinary runs. Those of the device that ran last come first; of a device, the
    smallest size.

    Args:
        stored: the oldest session first.
    """
    stored = [one for one in stored if one.run.kind == "run"]
    by_key: dict[tuple[object, ...], list[StoredRun]] = defaultdict(list)
    newest: dict[str, str] = {}
    for one in stored:
        by_key[_key(one.run)].append(one)
        newest[str(one.run.device.get("name"))] = one.run.session
    order = sorted(newest, key=lambda name: (newest[name], name), reverse=True)
    keys = sorted(by_key, key=lambda key: (order.index(str(key[0])), *key[1:]))
    peaks = measured.session_peaks(one.run for one in stored)
    return [_group(by_key[key], peaks) for key in keys]


def _key(run: RunResult) -> tuple[object, ...]:
    """The properties that the runs of a group share; groups are sorted by it."""
    sizes, tokens = tuple(sorted(run.config.items())), run.batch_size * run.seq_len
    preset = presets.rank(run.config_name), tokens, run.config_name
    return str(run.device.get("name")), *preset, run.precision, run.batch_size, sizes


def _group(stored: list[StoredRun], peaks: measured.Peaks) -> Group:
    rows = measured.build_rows([one.run for one in stored], peaks)
    by_row: dict[tuple[str, str, str], list[StoredRun]] = defaultdict(list)
    for one in stored:
        by_row[one.run.version, one.run.session, variant(one.run)].append(one)
    return Group(rows, [by_row[row.version, row.session, row.variant] for row in rows])


def ladder_section(group: Group, folders: Sequence[Path]) -> Section:
    """All of a group: its tables, what bounds its steps, its charts."""
    first = group.rows[0]
    part = Section(LADDERS, group.device, printable(comparisons.title(group.rows)),
                   printable(group.preset), printable(first.precision))  # fmt: skip
    speed, verdicts = comparisons.group_tables(group.rows)
    part.say(verdicts.notes)
    files = [Cell("", file_links(runs)) for runs in group.runs]
    part.tables = [
        _marked(speed.with_column("result files", files, title="How fast"), group.rows),
        _marked(verdicts.with_column("error, of allowed", map(_worst, group.runs),
                                     title="Verdict and cost"), group.rows),
        *_saved(group),
    ]  # fmt: skip
    for row, stored in group.pairs():
        where = f"{row.label} {group.size}, {row.device}"
        part.alarms += row_alarms(row, where, file_links(stored))
    timed = [one for row, stored in group.pairs() if row.step_ms for one in stored]
    if timed:
        part.charts.append(charts.rows_chart("rows", group.rows, group.files))
    part.charts += _losses(group)
    if timed:
        paths = [*dict.fromkeys(one.path for one in timed)]
        add_roofline(part, paths, folders, [one.run for one in timed])
    return part


def _marked(table: Table, rows: Sequence[Row]) -> Table:
    """The table with its implausible rows in red."""
    lines = [
        dataclasses.replace(line, style="red") if row.plausibility else line
        for row, line in zip(rows, table.lines, strict=True)
    ]
    return dataclasses.replace(table, lines=lines)


def _worst(stored: Sequence[StoredRun]) -> str:
    """The largest of the gate's errors, as a share of what is allowed."""
    closest = [found for one in stored if (found := one.run.gate.closest())]
    share = max((error / allowed for _, error, allowed in closest), default=None)
    if share is None:
        return "-"
    return f"{share:.0%}" if math.isfinite(share) else "not finite"


def _saved(group: Group) -> list[Table]:
    """By how much each version with a significant speed-up shortens V1's step, by phase."""
    timed = [row for row in group.rows if row.speedup is not None and row.forward_ms is not None]
    if len(timed) < 2 or timed[0].version != BASELINE or timed[0].variant:
        return []
    baseline, *others = timed
    names = (*results.PHASE_TIMES, "step_ms")
    lines = []
    for row in others:
        if row.session == baseline.session and row.speedup and row.speedup.significant:
            pairs = [(getattr(baseline, name), getattr(row, name)) for name in names]
            saved = ["-" if None in pair else f"{pair[0] - pair[1]:,.2f}" for pair in pairs]
            lines.append(Line([row.label, *saved]))
    header = ["version", "forward", "backward", "optimizer", "whole step"]
    return [Table("Saved of V1's step, in ms", header, lines)] if lines else []


def _losses(group: Group) -> Iterator[Chart]:
    """The losses of each version's first run, without interpreted ones, of a step or two."""
    first = {
        row.version: stored[0].run
        for row, stored in group.pairs()
        if row.status == "timed" and not row.variant and stored[0].run.losses
    }
    if not first:
        return
    curves = {version: _finite(run) for version, run in first.items()}
    differences = {
        version: [a - b for a, b in zip(curves[version], curves[BASELINE], strict=False)]
        for version, run in first.items()
        if BASELINE in first
        and version != BASELINE
        and not measured.trained_differently([run, first[BASELINE]])
    }
    yield charts.losses_chart("losses", curves, differences, group.files)


def _finite(run: RunResult) -> list[float]:
    return [
        loss if loss is not None and abs(loss) <= results.MOST else math.nan for loss in run.losses
    ]


def at_a_glance(groups: Sequence[Group], anchors: Sequence[str] = ()) -> Table | None:
    """A line for each size, without the versions' variants; `anchors` are those of the groups."""
    if not groups:
        return None
    rows = [row for group in groups for row in group.rows]
    keys = [key for key in ALL if any(row.version == key for row in rows)]
    several = len({row.device for row in rows}) > 1
    lines = []
    for i, group in enumerate(groups):
        name = f"{group.size}, {printable(group.device)}" if several else group.size
        plain = {row.version: row for row in group.rows if not row.variant}
        bad = any(row.failed or row.plausibility for row in group.rows)
        first = Cell(name, anchor=anchors[i]) if anchors else name
        others = (_in_a_word(plain.get(key), plain.get(BASELINE)) for key in keys)
        lines.append(Line([first, *others], "red" if bad else None))
    header = ["size", *(f"{key}: {ALL[key].title}" for key in keys)]
    title = (
        "Median step and speed-up over V1 (none: V1 was not in the comparison); where V1 is not "
        "that of the line, its step is named; †: the gate passed, the timed run was not audited"
    )
    return Table(title, header, lines)


def _in_a_word(row: Row | None, baseline: Row | None) -> str:
    """The step and the speed-up; if that is over another V1 than the line's, with its step."""
    if row is None:
        return "-"
    if row.failed:
        return FAIL
    if row.step_ms is None:
        return row.speedup_text()
    step, speedup = f"{row.step_ms:,.2f} ms", row.speedup_text()
    if row.speedup is None or speedup == "baseline":
        return step
    elsewhere = baseline is not None and row.session != baseline.session
    over = f" over {row.speedup.value * row.step_ms:,.2f} ms" if elsewhere else ""
    mark = "" if row.audit == "pass" else " †"
    return f"{step}, {speedup.replace('no significant difference', 'not significant')}{over}{mark}"


def speedups(groups: Sequence[Group]) -> list[Chart]:
    """All speed-ups of a device in one chart."""
    rows = [
        (group.size, row)
        for group in groups
        for row in group.rows
        if row.speedup and row.speedup.interval and row.speedup_text() != "baseline"
    ]
    files = tuple(path for group in groups for path in group.files)
    return [charts.speedups_chart("speedups", rows, files)] if rows else []
