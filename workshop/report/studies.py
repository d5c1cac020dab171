"""The waterfalls and sweeps of a report: their tables and pictures."""

import math
from collections.abc import Sequence

from workshop.compare import figures, sweep, tables, waterfall
from workshop.compare.collection import StoredRun
from workshop.compare.rows import Row
from workshop.compare.sweep import AXES, Point, Sweep
from workshop.compare.waterfall import Waterfall
from workshop.profilers.names import printable
from workshop.report.parts import Cell, Section, alarms, links, with_column
from workshop.report.pictures import DrawnPicture
from workshop.results import RunResult

WATERFALL = (
    "From V1 at fp32 one change at a time, each in its own processes (compare_versions.py "
    "--waterfall)."
)
SWEEP = "One size grows, all others are fixed (compare_versions.py --sweep)."


def split(stored: Sequence[StoredRun]) -> tuple[list[StoredRun], list[StoredRun]]:
    """The runs of waterfalls and sweeps, and those of ordinary comparisons."""
    own = [one for one in stored if one.run.kind != "run"]
    return own, [one for one in stored if one.run.kind == "run"]


def build(stored: Sequence[StoredRun]) -> tuple[list[tuple[str, Section]], list[Row]]:
    """A section for the newest waterfall and sweep of each kind, with its device's name; and the
    rows of all that ran."""
    runs = [one.run for one in stored]
    falls = waterfall.build(runs)
    sweeps = [one for axis in AXES.values() for one in sweep.build(runs, axis)]
    sections = [
        *((fall.device, _waterfall(f"waterfall-{i}", fall, stored))
          for i, fall in enumerate(falls, 1)),
        *((one.device, _sweep(f"sweep-{i}", one, stored)) for i, one in enumerate(sweeps, 1)),
    ]  # fmt: skip
    rows = [step.row for fall in falls for step in fall.steps]
    points = [point for one in sweeps for curve in one.curves for point in curve.points]
    rows += [point.row for point in points if not point.out_of_memory]
    return sections, [row for row in rows if row is not None and row.status != "skipped"]


def _waterfall(anchor: str, one: Waterfall, stored: Sequence[StoredRun]) -> Section:
    own = [s for s in stored if one.includes(s.run)]
    section = Section(anchor, printable(one.title), intro=WATERFALL)
    cells = []
    for step in one.steps:
        cells.append(Cell("", links(s for s in own if step.rung.ran(s.run))))
        if step.row is not None:
            where = f"{step.rung.title}, {one.title}"
            section.alarms += alarms(step.row, where, cells[-1].links)
    table = tables.waterfall_table(one)
    section.tables = [with_column("What each change is worth", table, "result files", cells)]
    section.sentences = [printable(note) for note in table.notes]
    times = [f"{s.rung.title} {s.step_ms:,.4g} ms" for s in one.steps if s.step_ms]
    section.pictures = [
        DrawnPicture(
            f"{anchor}-picture",
            "What each change takes off the step",
            printable(f"{one.title}: {'; '.join(times)}."),
            tuple(s.path for s in own),
            lambda target: figures.plot_waterfalls([one], target),
        )
    ]
    return section


def _sweep(anchor: str, one: Sweep, stored: Sequence[StoredRun]) -> Section:
    own = [s for s in stored if one.includes(s.run)]
    section = Section(anchor, printable(f"Sweep: {one.title}"), intro=SWEEP)
    cells = []
    for label, point in tables.sweep_points(one):
        cells.append(Cell("", links(s for s in own if _is_at(s.run, point, one))))
        if not point.out_of_memory:
            where = f"{label} at {point.size:,}, {one.title}"
            section.alarms += alarms(point.row, where, cells[-1].links)
    table = tables.sweep_table(one)
    section.tables = [with_column("Cost as work grows", table, "result files", cells)]
    section.sentences = [printable(note) for note in table.notes]
    section.pictures = [
        DrawnPicture(
            f"{anchor}-picture",
            "Time, throughput and memory as the work grows",
            printable(f"{one.title}: {'; '.join(tables.limits(one))}."),
            tuple(s.path for s in own),
            lambda target: figures.plot_sweeps([one], target),
        )
    ]
    return section


def _is_at(run: RunResult, point: Point, one: Sweep) -> bool:
    size = sweep.size_of(run, AXES[one.axis])
    return run.version == point.row.version and math.isclose(size, point.size)
