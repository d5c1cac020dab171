"""The waterfalls and sweeps of a report: their tables and pictures."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from workshop import tables
from workshop.collection import StoredRun
from workshop.compare import sweep, waterfall
from workshop.compare.rows import Row
from workshop.compare.sweep import AXES, Point, Sweep
from workshop.compare.waterfall import Waterfall
from workshop.profilers.names import printable
from workshop.report.parts import Cell, Link, Section, alarms, links, with_column
from workshop.report.pictures import DrawnPicture
from workshop.results import RunResult
from workshop.show import charts as comparison_charts
from workshop.show import comparisons as comparison_tables

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
    section = Section(anchor, printable(one.title), intro=WATERFALL)
    own = [s for s in stored if one.includes(s.run)]
    files = [links(s for s in own if step.rung.ran(s.run)) for step in one.steps]
    for step, of_step in zip(one.steps, files, strict=True):
        if step.row is not None:
            section.alarms += alarms(step.row, f"{step.rung.title}, {one.title}", of_step)
    _add_table(section, "What each change is worth", comparison_tables.waterfall_table(one), files)
    times = (f"{s.rung.title} {s.step_ms:,.4g} ms" for s in one.steps if s.step_ms)
    words = f"{one.title}: {'; '.join(times)}."
    draw = functools.partial(comparison_charts.save, comparison_charts.draw_waterfalls, [one])
    _add_picture(section, "What each change takes off the step", words, own, draw)
    return section


def _sweep(anchor: str, one: Sweep, stored: Sequence[StoredRun]) -> Section:
    section = Section(anchor, printable(f"Sweep: {one.title}"), intro=SWEEP)
    own = [s for s in stored if one.includes(s.run)]
    points = comparison_tables.sweep_points(one)
    files = [links(s for s in own if _is_at(s.run, point, one)) for _, point in points]
    for (label, point), of_point in zip(points, files, strict=True):
        if not point.out_of_memory:
            where = f"{label} at {point.size:,}, {one.title}"
            section.alarms += alarms(point.row, where, of_point)
    _add_table(section, "Cost as work grows", comparison_tables.sweep_table(one), files)
    words = f"{one.title}: {'; '.join(comparison_tables.limits(one))}."
    draw = functools.partial(comparison_charts.save, comparison_charts.draw_sweeps, [one])
    _add_picture(section, "Time, throughput and memory as the work grows", words, own, draw)
    return section


def _add_table(
    section: Section, caption: str, table: tables.Table, files: Sequence[tuple[Link, ...]]
) -> None:
    cells = [Cell("", own) for own in files]
    section.tables.append(with_column(caption, table, "result files", cells))
    section.sentences += map(printable, table.notes)


def _add_picture(
    section: Section, title: str, words: str, own: Sequence[StoredRun], draw: Callable[[Path], None]
) -> None:
    files = tuple(dict.fromkeys(s.path for s in own))
    name = f"{section.anchor}-picture"
    section.pictures.append(DrawnPicture(name, title, printable(words), files, draw))


def _is_at(run: RunResult, point: Point, one: Sweep) -> bool:
    size = sweep.size_of(run, AXES[one.axis])
    return run.version == point.row.version and math.isclose(size, point.size)
