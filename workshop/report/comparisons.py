"""The ladder of one size on one device: its tables, what it saves, its losses, its roofline."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import results
from workshop.collection import StoredRun
from workshop.compare import rows as measured
from workshop.compare.rows import Row, size_name, variant
from workshop.profilers.names import printable
from workshop.report import charts, parts
from workshop.report.parts import BAD, Cell, Line, Section, Table, add_roofline, alarms, cells
from workshop.report.pictures import Picture
from workshop.results import FAIL, RunResult
from workshop.run import precision, presets
from workshop.show import comparisons as comparison_tables
from workshop.show.charts import MEMORY_COLOURS, PHASE_COLOURS
from workshop.versions import ALL, BASELINE

_PHASES = [name for name, *_ in PHASE_COLOURS]


@dataclass(frozen=True)
class Group:
    """Versions that may be compared: of one device, size and precision."""

    anchor: str
    rows: list[Row]
    runs: list[list[StoredRun]]
    """The runs of each row."""

    @property
    def device(self) -> str:
        return self.rows[0].device

    @property
    def size(self) -> str:
        return printable(f"{size_name(self.runs[0][0].run)}, {self.rows[0].precision}")

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(stored.path for runs in self.runs for stored in runs))

    def pairs(self) -> Iterator[tuple[Row, list[StoredRun]]]:
        return zip(self.rows, self.runs, strict=True)


def groups(stored: Sequence[StoredRun]) -> list[Group]:
    """Those of the device that ran last come first; of a device, the smallest size.

    Args:
        stored: the oldest session first.
    """
    by_key: dict[tuple[object, ...], list[StoredRun]] = defaultdict(list)
    newest: dict[str, str] = {}
    for one in stored:
        by_key[_key(one.run)].append(one)
        newest[str(one.run.device.get("name"))] = one.run.session
    order = sorted(newest, key=lambda name: (newest[name], name), reverse=True)
    keys = sorted(by_key, key=lambda key: (order.index(str(key[0])), *key[1:]))
    peaks = measured.session_peaks(one.run for one in stored)
    return [_group(f"size-{number}", by_key[key], peaks) for number, key in enumerate(keys, 1)]


def _key(run: RunResult) -> tuple[object, ...]:
    """The properties that the runs of a group share; groups are sorted by it."""
    sizes = tuple(sorted(run.config.items()))
    tokens = run.batch_size * run.seq_len
    name = str(run.device.get("name"))
    rank = presets.rank(run.config_name)
    return name, rank, tokens, run.config_name, run.precision, run.batch_size, sizes


def _group(anchor: str, stored: list[StoredRun], peaks: measured.Peaks) -> Group:
    rows = measured.build_rows([one.run for one in stored], peaks)
    by_row: dict[tuple[str, str, str], list[StoredRun]] = defaultdict(list)
    for one in stored:
        by_row[one.run.version, one.run.session, variant(one.run)].append(one)
    runs = [by_row[row.version, row.session, row.variant] for row in rows]
    return Group(anchor, rows, runs)


def section(group: Group, folder: Path) -> Section:
    """All of a group.

    Args:
        folder: of results, with measured ceilings.
    """
    part = tables(group)
    part.pictures = list(pictures(group))
    add_group_roofline(part, group, folder)
    return part


def add_group_roofline(part: Section, group: Group, folder: Path) -> None:
    """Adds what bounds the steps of a group's timed rows, as `add_roofline`."""
    timed = [one for row, stored in group.pairs() if row.step_ms for one in stored]
    if timed:
        files = dict.fromkeys(one.path for one in timed)
        add_roofline(part, group.size, [*files], folder, [one.run for one in timed])


def tables(group: Group) -> Section:
    """The tables, notes and alarms of a group."""
    speed, proof = comparison_tables.group_tables(group.rows)
    files = [Cell("", parts.links(runs)) for runs in group.runs]
    part = Section(group.anchor, printable(comparison_tables.title(group.rows)))
    part.tables = [
        parts.with_column("How fast", speed, "result files", files),
        parts.with_column("Verdict and cost", proof, "error, of allowed",
                    [_worst(runs) for runs in group.runs]),
    ]  # fmt: skip
    for table in part.tables:
        for row, line in zip(group.rows, table.lines, strict=True):
            line.tone = BAD if row.plausibility else line.tone
    part.tables += _saved(group)
    part.sentences = [printable(note) for note in proof.notes]
    for row, stored in group.pairs():
        where = f"{row.label} {group.size}, {row.device}"
        part.alarms += alarms(row, where, parts.links(stored))
    return part


# --- tables --------------------------------------------------------------------------------------


def _worst(stored: Sequence[StoredRun]) -> Cell:
    """The largest of the gate's errors, as a share of what is allowed."""
    closest = [found for one in stored if (found := one.run.gate.closest())]
    share = max((error / allowed for _, error, allowed in closest), default=None)
    if share is None:
        return Cell("-")
    return Cell(f"{share:.0%}" if math.isfinite(share) else "not finite")


def _saved(group: Group) -> list[Table]:
    """By how much each version with a significant speed-up shortens V1's step, by phase."""
    proven = [row for row in group.rows if row.speedup is not None and row.forward_ms is not None]
    if len(proven) < 2 or proven[0].version != BASELINE or proven[0].variant:
        return []
    baseline, *others = proven
    lines = []
    for row in others:
        low, high = row.speedup_ci or (1.0, 1.0)
        if row.session == baseline.session and not low <= 1 <= high:
            names = (*_PHASES, "step_ms")
            saved = [_minus(getattr(baseline, name), getattr(row, name)) for name in names]
            lines.append(Line(cells(row.label, *saved)))
    header = ["version", "forward", "backward", "optimizer", "whole step"]
    return [Table("Saved of V1's step, in ms", header, lines)] if lines else []


def _minus(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{before - after:,.2f}"


def at_a_glance(all_groups: Sequence[Group]) -> Table | None:
    """A line for each size, without the versions' variants."""
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
        others = cells(*(_in_a_word(plain.get(key), plain.get(BASELINE)) for key in keys))
        lines.append(Line([first, *others], BAD if bad else ""))
    header = ["size", *(f"{key}: {ALL[key].title}" for key in keys)]
    caption = (
        "Median step and speed-up over V1; where V1 is not that of the line, its step is named"
    )
    return Table(caption, header, lines)


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
    over = f" over {row.speedup * row.step_ms:,.2f} ms" if elsewhere else ""
    return f"{step}, {speedup.replace('no significant difference', 'no difference')}{over}"


# --- pictures ------------------------------------------------------------------------------------


def speedup_pictures(anchor: str, own: Sequence[Group]) -> list[Picture]:
    """All speed-ups of a device in one chart."""
    rows = [
        (group.size, row)
        for group in own
        for row in group.rows
        if row.speedup and row.speedup_ci and row.speedup_text() != "baseline"
    ]
    files = tuple(path for group in own for path in group.files)
    return [charts.speedups(f"{anchor}-speedups", rows, files)] if rows else []


def pictures(group: Group) -> Iterator[Picture]:
    """The parts of a step, of the memory, and the losses, each as far as there are any."""
    phases = [(row, row.step_parts) for row in group.rows if row.step_parts]
    yield from _stack(group, "phases", "Where the time of a step goes", "ms of the median step, "
                      "divided as the separate pass timed its parts", phases, PHASE_COLOURS,
                      in_markdown=False)  # fmt: skip
    memory = [(row, row.memory_mb) for row in group.rows if row.memory_mb]
    yield from _stack(group, "memory", "What fills the memory at its peak", "MB at the peak",
                      memory, MEMORY_COLOURS)  # fmt: skip
    first = {  # each version's first run
        row.version: stored[0].run
        for row, stored in group.pairs()
        if row.status in ("timed", "interpreted") and not row.variant and stored[0].run.losses
    }
    if first:
        curves = {version: _finite(run) for version, run in first.items()}
        differences = {
            version: [a - b for a, b in zip(curves[version], curves[BASELINE], strict=False)]
            for version, run in first.items()
            if BASELINE in first
            and version != BASELINE
            and not measured.trained_differently([run, first[BASELINE]])
        }
        caution = precision.of_losses(group.rows[0].precision)
        yield charts.losses(f"{group.anchor}-losses", curves, differences, group.files, caution)


def _stack(
    group: Group,
    name: str,
    title: str,
    unit: str,
    bars: Sequence[tuple[Row, Mapping[str, Any]]],
    colours: Sequence[tuple[str, str, str]],
    **more: bool,
) -> Iterator[Picture]:
    if bars:
        lengths = [
            (legend, colour, [_drawable(values.get(field)) for _, values in bars])
            for field, legend, colour in colours
        ]
        labels, name = [row.label for row, _ in bars], f"{group.anchor}-{name}"
        yield charts.stack(name, title, unit, labels, lengths, group.files, **more)


def _drawable(length: float | str | None) -> float:
    """The length of a part of a bar: a broken file may have any."""
    return min(max(0.0, float(length or 0.0)), results.MOST)


def _finite(run: RunResult) -> list[float]:
    return [
        loss if loss is not None and abs(loss) <= results.MOST else math.nan for loss in run.losses
    ]
