"""The waterfalls and sweeps of a report: their tables and pictures."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from workshop.compare import figures, sweep, tables, waterfall
from workshop.compare.collection import StoredRun
from workshop.compare.rows import Row
from workshop.compare.sweep import AXES, Point, Sweep
from workshop.compare.waterfall import Step, Waterfall
from workshop.profilers.names import printable
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
from workshop.report.pictures import DrawnPicture
from workshop.results import RunResult

WATERFALL = (
    "From V1 at fp32 one change at a time, each in processes of its own (compare_versions.py "
    "--waterfall)."
)
SWEEP = "One size grows, all others are kept (compare_versions.py --sweep)."


@dataclass(frozen=True)
class Studies:
    """The waterfalls and sweeps that some runs hold, the newest of each kind."""

    stored: list[StoredRun]
    falls: list[Waterfall]
    sweeps: list[Sweep]

    @classmethod
    def of(cls, stored: Sequence[StoredRun]) -> "Studies":
        runs = [one.run for one in stored]
        sweeps = [one for axis in AXES.values() for one in sweep.build(runs, axis)]
        return cls(list(stored), waterfall.build(runs), sweeps)

    @property
    def rows(self) -> list[Row]:
        """Of all that was run."""
        rows = [step.row for fall in self.falls for step in fall.steps]
        points = [point for one in self.sweeps for curve in one.curves for point in curve.points]
        rows += [point.row for point in points if not point.out_of_memory]
        return [row for row in rows if row is not None and row.status != "skipped"]

    def sections(self) -> Iterator[tuple[str, Section]]:
        """A section for each, with the name of its device."""
        for number, fall in enumerate(self.falls, 1):
            yield fall.device, _waterfall(f"waterfall-{number}", fall, self.stored)
        for number, one in enumerate(self.sweeps, 1):
            yield one.device, _sweep(f"sweep-{number}", one, self.stored)


def split(stored: Sequence[StoredRun]) -> tuple[list[StoredRun], list[StoredRun]]:
    """The runs of waterfalls and sweeps, and those of ordinary comparisons."""
    own = [one for one in stored if one.run.kind != "run"]
    return own, [one for one in stored if one.run.kind == "run"]


# --- waterfalls ----------------------------------------------------------------------------------


def _waterfall(anchor: str, one: Waterfall, stored: Sequence[StoredRun]) -> Section:
    own = [s for s in stored if one.includes(s.run)]
    section = Section(anchor, printable(one.title), intro=WATERFALL)
    table, lines = tables.waterfall_table(one), []
    for step, line in zip(one.steps, table.lines, strict=True):
        links = _links(s for s in own if step.rung.ran(s.run))
        lines.append(Line([*cells(*line.cells), Cell("", links)], _tone(step)))
        if step.row is not None:
            where = f"{step.rung.title}, {one.title}"
            section.alarms += _alarms(step.row, where, links, failed=step.row.failed)
    header = [*table.header, "result files"]
    section.tables = [Table("What each change is worth", header, lines, texts=2)]
    section.sentences = [printable(note) for note in table.notes]
    told = "; ".join(
        f"{step.rung.title} {step.step_ms:,.4g} ms" for step in one.steps if step.step_ms
    )
    section.pictures = [
        DrawnPicture(
            f"{anchor}-picture",
            "What each change takes off the step",
            f"{printable(one.title)}: {printable(told)}.",
            tuple(s.path for s in own),
            lambda target: figures.plot_waterfalls([one], target),
        )
    ]
    return section


def _tone(step: Step) -> str:
    if step.row is not None and step.row.failed:
        return BAD
    return "" if step.timed else DIM


# --- sweeps --------------------------------------------------------------------------------------


def _sweep(anchor: str, one: Sweep, stored: Sequence[StoredRun]) -> Section:
    own = [s for s in stored if one.includes(s.run)]
    section = Section(anchor, printable(f"Sweep: {one.title}"), intro=SWEEP)
    table, lines = tables.sweep_table(one), []
    for (label, point), line in zip(tables.sweep_points(one), table.lines, strict=True):
        links = _links(s for s in own if _is_at(s.run, point, one))
        dim = DIM if point.row.step_ms is None else ""
        lines.append(Line([*cells(*line.cells), Cell("", links)], BAD if point.failed else dim))
        where = f"{label} at {point.size:,}, {one.title}"
        section.alarms += _alarms(point.row, where, links, failed=point.failed)
    header = [*table.header, "result files"]
    section.tables = [Table("Cost as work grows", header, lines, texts=2)]
    section.sentences = [printable(note) for note in table.notes]
    section.pictures = [
        DrawnPicture(
            f"{anchor}-picture",
            "Time, throughput and memory as the work grows",
            f"{printable(one.title)}: {printable('; '.join(tables.limits(one)))}.",
            tuple(s.path for s in own),
            lambda target: figures.plot_sweeps([one], target),
        )
    ]
    return section


def _is_at(run: RunResult, point: Point, one: Sweep) -> bool:
    size = sweep.size_of(run, AXES[one.axis])
    return run.version == point.row.version and math.isclose(size, point.size)


# --- both ----------------------------------------------------------------------------------------


def _links(stored: Iterable[StoredRun]) -> tuple[Link, ...]:
    return tuple(Link(str(number), one.path) for number, one in enumerate(stored, 1))


def _alarms(row: Row, where: str, links: tuple[Link, ...], *, failed: bool) -> Iterator[Alarm]:
    if failed:
        kind = f"{row.refused.upper()} RED" if row.refused else FAILED
        yield Alarm(kind, printable(f"{where}: {row.note}"), links)
    for sentence in row.plausibility:
        yield Alarm(IMPLAUSIBLE, printable(f"{where}: {sentence}"), links)
