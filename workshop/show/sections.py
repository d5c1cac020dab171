"""The parts of a page beside the ladders: a waterfall, a sweep, a lab, V3's benchmark, a profile.
Each has tables, charts and sentences."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workshop import labs, results
from workshop.collection import Profile, StoredLab, StoredRun, distinct_names
from workshop.compare import sweep as sweeps
from workshop.compare import waterfall
from workshop.compare.rows import Row, size_name
from workshop.compare.sweep import AXES, Sweep
from workshop.compare.waterfall import Waterfall
from workshop.errors import WorkshopError, printable
from workshop.kernels import rows as kernel_rows
from workshop.kernels.cases import OURS
from workshop.labs import LabRow, LabRun
from workshop.profilers import advisor, kernel_file, show
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.profilers.runner_files import RUN_FILE
from workshop.results import FAIL, SKIPPED, RunResult
from workshop.roofline import ceilings, inputs
from workshop.roofline.model import Roofline, flags, sentences
from workshop.show import charts, comparisons, drawing, lab_table, roofline_chart
from workshop.show.drawing import Bars, Chart
from workshop.tables import Cell, Line, Link, Table

IMPLAUSIBLE, SUSPECT = "IMPLAUSIBLE", "SUSPECT PROFILE"
HARNESS = "harness"
"""A results folder's records of what the harness adds to a step."""
LADDERS, STUDIES, LABS, KERNELS, PROFILES, OTHER = (
    "Versions", "Waterfalls and sweeps", "Labs", "V3's kernels", "Profiles", "Harness",
)  # fmt: skip
"""Kinds of sections, in the order of a page."""
_KERNELS_IN_WORDS = 6
"""Kernels whose distance from their roofs is given in words."""
_HOT = 10
"""Kernels of a hot list, and letters of a name."""


@dataclass(frozen=True)
class Alarm:
    """A reason to quote no number before it is looked into."""

    kind: str
    text: str
    links: tuple[Link, ...]


@dataclass
class Section:
    """A part of a page; `size` and `precision` are empty where it has none."""

    kind: str
    device: str
    title: str
    size: str = ""
    precision: str = ""
    links: tuple[Link, ...] = ()
    intro: str = ""
    tables: list[Table] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    anchor: str = ""
    """Unique on a page, which sets it."""

    def say(self, lines: Iterable[str]) -> None:
        """Adds sentences, each once."""
        self.sentences = list(dict.fromkeys([*self.sentences, *map(printable, lines)]))


def file_links(stored: Iterable[StoredRun | StoredLab]) -> tuple[Link, ...]:
    paths = dict.fromkeys(one.path for one in stored)
    return tuple(Link(str(i), path) for i, path in enumerate(paths, 1))


def _alarms(failed: str, implausible: Iterable[str], files: tuple[Link, ...]) -> Iterator[Alarm]:
    """Alarms of a row: why it failed, if it did, and what of its numbers is implausible."""
    if failed:
        yield Alarm(FAIL, printable(failed), files)
    for sentence in implausible:
        yield Alarm(IMPLAUSIBLE, printable(sentence), files)


def row_alarms(row: Row, where: str, files: tuple[Link, ...]) -> Iterator[Alarm]:
    failed = f"{where}: {row.note}" if row.failed else ""
    return _alarms(failed, (f"{where}: {text}" for text in row.plausibility), files)


# --- rooflines -----------------------------------------------------------------------------------


def folder_of(path: Path, folders: Sequence[Path]) -> Path:
    """The one of a collection's folders that holds a file."""
    return next(folder for folder in folders if folder in path.parents)


def read_roofline(
    paths: Sequence[Path], runs: Sequence[RunResult], folder: Path
) -> Roofline | None:
    """The roofline of some files, or of some runs in them, with all known ceilings of their device,
    measured ones from the results' folder; None if nothing in them has a place on one, or no
    ceiling is known."""
    try:
        roofline = inputs.load(paths, runs)
    except WorkshopError:  # broken files are listed anyway
        return None
    ceilings.attach(roofline, folder=folder)
    return roofline if roofline.ceilings else None


def add_roofline(
    section: Section, files: Sequence[Path], folders: Sequence[Path],
    runs: Sequence[RunResult] = (), *, title: str = "", in_words: bool = True,
) -> None:  # fmt: skip
    """Adds what bounds the whole steps, or the longest kernels, in words, and a chart of several
    points; the parts of a step are in the chart alone."""
    roofline = read_roofline(files, runs, folder_of(files[0], folders))
    if roofline is None:
        return
    roofline.title = title or roofline.title
    whole = sum(point.category == inputs.STEP for point in roofline.points)
    if in_words:
        found = sentences(roofline, whole or _KERNELS_IN_WORDS)
        section.say((*flags(roofline), *found, *roofline.notes))
    if whole or len(roofline.points) > 1:
        alt = f"Roofline: {'; '.join(sentences(roofline, 6))}."
        draw = functools.partial(roofline_chart.picture, roofline, 12)
        heading = "How far from the chip's limits"
        section.charts.append(
            Chart("roofline", heading, alt, tuple(files), draw, wide=True, as_png=True)
        )


# --- waterfalls and sweeps -----------------------------------------------------------------------


def studies(stored: Sequence[StoredRun]) -> tuple[list[Section], list[Row]]:
    """A section for the newest waterfall and sweep of each kind, and the rows of all that ran."""
    stored = [one for one in stored if one.run.kind != "run"]
    runs = [one.run for one in stored]
    falls = waterfall.build(runs)
    found = [one for axis in AXES.values() for one in sweeps.build(runs, axis)]
    sections = [_waterfall(fall, stored) for fall in falls]
    sections += [_sweep(one, stored) for one in found]
    rows = [step.row for fall in falls for step in fall.steps]
    points = [point for one in found for curve in one.curves for point in curve.points]
    rows += [point.row for point in points if not point.out_of_memory]
    return sections, [row for row in rows if row is not None and row.status != "skipped"]


def _waterfall(one: Waterfall, stored: Sequence[StoredRun]) -> Section:
    intro = (
        "From V1 at fp32 one change at a time, each in its own processes (compare_versions.py "
        "--waterfall)."
    )
    times = (f"{s.rung.title} {s.step_ms:,.4g} ms" for s in one.steps if s.step_ms)
    ran = [
        (step.row, step.rung.title, lambda run, rung=step.rung: rung.ran(run)) for step in one.steps
    ]
    title = "What each change is worth"
    table = dataclasses.replace(comparisons.waterfall_table(one), title=title)
    draw = functools.partial(charts.draw_waterfalls, [one])
    return _study(one, one.title, intro, table, ran, stored, "; ".join(times), draw)


def _sweep(one: Sweep, stored: Sequence[StoredRun]) -> Section:
    axis = AXES[one.axis]
    ran = [
        (
            None if point.out_of_memory else point.row,
            f"{label} at {point.size:,}",
            lambda run, point=point: (
                run.version == point.row.version
                and math.isclose(sweeps.size_of(run, axis), point.size)
            ),
        )
        for label, point in comparisons.sweep_points(one)
    ]
    table = dataclasses.replace(comparisons.sweep_table(one), title="Cost as work grows")
    intro = "One size grows, all others are fixed (compare_versions.py --sweep)."
    words = "; ".join(comparisons.limits(one))
    draw = functools.partial(charts.draw_sweeps, [one])
    return _study(one, f"Sweep: {one.title}", intro, table, ran, stored, words, draw)


def _study(
    one: Waterfall | Sweep, title: str, intro: str, table: Table,
    ran: Sequence[tuple[Row | None, str, Callable[[RunResult], bool]]],
    stored: Sequence[StoredRun], words: str, draw: Callable[[], object],
) -> Section:  # fmt: skip
    """The section of a waterfall or a sweep.

    Args:
        ran: for each line of the table its row, its name, and the test for a run in it.
    """
    own = [s for s in stored if one.includes(s.run)]
    files = [file_links(s for s in own if is_part(s.run)) for *_, is_part in ran]
    part = Section(STUDIES, one.device, printable(title), one.config, one.precision, intro=intro)
    for (row, label, _), links in zip(ran, files, strict=True):
        if row is not None:
            part.alarms += row_alarms(row, f"{label}, {one.title}", links)
    part.tables = [table.with_column("result files", [Cell("", links) for links in files])]
    part.say(table.notes)
    paths = tuple(dict.fromkeys(s.path for s in own))
    alt = printable(f"{one.title}: {words}.")
    part.charts.append(Chart("study", table.title, alt, paths, draw, wide=True, as_png=True))
    return part


# --- labs ----------------------------------------------------------------------------------------


def lab_sections(stored: Sequence[StoredLab]) -> list[tuple[Section, list[LabRow]]]:
    """A section for each of `labs.newest`, and its rows; V3's benchmark has its own."""
    groups = labs.newest(one.run for one in stored if one.run.lab != labs.KERNELS)
    files = {id(one.run): one for one in stored}
    found = []
    for rows in groups:
        first = rows[0].first
        units = " or ".join(f"{n:,}" for n in sorted({row.first.units_per_step for row in rows}))
        intro = (
            f"labs/{first.lab}, session {first.session}: percentiles over all steps of all "
            f"processes, in ms a step of {units} {first.unit}. A row that did not pass its gate "
            "has no times."
        )
        part = Section(LABS, rows[0].device, lab_table.title(rows), intro=printable(intro))
        table = lab_table.lab_table(rows)
        links = [file_links(files[id(run)] for run in row.runs) for row in rows]
        cells = [Cell("", own) for own in links]
        part.tables = [table.with_column("result files", cells, title="How fast, and verdict")]
        part.say(table.notes)
        for row, own in zip(rows, links, strict=True):
            part.alarms += lab_alarms(row, part.title, own)
        found.append((part, rows))
    return found


def lab_alarms(row: LabRow, title: str, files: tuple[Link, ...]) -> Iterator[Alarm]:
    failed = f"{title}: {lab_table.failure(row)}" if row.failed else ""
    return _alarms(failed, (f"{title}: {line}" for line in lab_table.implausible(row)), files)


# --- V3's benchmark, and the cost of the harness -------------------------------------------------


def benchmark(path: Path, runs: Sequence[LabRun], folders: Sequence[Path]) -> Section:
    """V3's operators beside the other implementations, without those that do not exist for a
    case."""
    rows = [row for row in (kernel_rows.Row((run,)) for run in runs) if row.verdict != SKIPPED]
    first = runs[0]
    part = Section(
        KERNELS, str(first.device["name"]), "V3's kernels", links=(Link(path.name, path),)
    )
    part.intro = (
        f"Written by workshop.kernels.benchmark, commit {printable(str(first.git_commit))}. A rate "
        "at the median, ± half of the interquartile range; replayed from graphs, so that launches "
        "are not timed; on data that the cache does not hold. “of ceiling” compares with what a "
        "large copy or product reached in the same run, forward / backward. “device / host”: a "
        "forward and backward pass on the device, as replayed, and the host's time to launch it "
        "from Python; a caller without a graph waits for the longer one. The error is the worst of "
        "results and gradients against fp64, with what the precision explains in brackets."
    )
    for group in kernel_rows.by_op(rows):
        table = kernel_rows.table(group)
        part.tables.append(dataclasses.replace(table, notes=()))
        part.say(f"{group[0].op}: {note}" for note in table.notes)
        for row in group:
            if row.implementation == OURS or row.plausibility:
                named = dataclasses.replace(row, of=row.first.subject)
                part.alarms += lab_alarms(named, part.title, part.links)
    part.say([kernel_rows.summary(kernel_rows.Row((first,)))])
    add_roofline(part, [path], folders, in_words=False)
    return part


def harness_costs(
    folders: Sequence[Path], keep: Callable[[Path], bool]
) -> tuple[list[Section], list[tuple[Path, str]]]:
    """The records of what the harness adds to a step, and the broken ones with the reason.

    Args:
        keep: says of a file whether it is wanted.
    """
    found: list[Section] = []
    broken: list[tuple[Path, str]] = []
    files = (path for top in folders for path in top.rglob(f"{HARNESS}/[!.]*.json"))
    for folder in sorted({path.parent for path in files if keep(path)}):
        try:
            found.append(_harness_cost(folder))
        except WorkshopError as error:
            broken.append((folder, str(error)))
    return found, broken


def _harness_cost(folder: Path) -> Section:
    lines, device = [], ""
    for path in sorted(folder.glob("*.json")):
        cost = results.read_json(path)
        try:
            bare, harness = (statistics.median(cost[name]) for name in ("bare_ms", "harness_ms"))
            texts = [cost["version"], f"{cost['config']}, {cost['precision']}", f"{bare:.3f} ms",
                     f"{harness:.3f} ms", f"{harness / bare - 1:+.2%}"]  # fmt: skip
            device = device or str(cost["device"]["name"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise WorkshopError(f"{path}: no record of the harness's cost ({error!r})") from None
        lines.append(Line([*map(str, texts), Cell("", [Link(path.name, path)])]))
    header = ["version", "size", "bare loop", "harness", "difference", "result file"]
    intro = (
        "The same step in a bare hand-written loop and through the harness, alternating in one "
        "process (pytest tests/test_gpu.py -k harness); medians of all its samples."
    )
    table = Table("Median time of a step", header, lines, left=(0, 1))
    return Section(OTHER, device, "What the harness costs", intro=intro, tables=[table])


# --- profiles ------------------------------------------------------------------------------------


def profile(found: Profile, folders: Sequence[Path]) -> Section:
    """The head of a profile's hot list, its summary and its advice."""
    file = found.folder / kernel_file.JSON_FILE
    records = (place / RUN_FILE for place in (found.folder, found.folder.parent) if found.record)
    record = next((path for path in records if path.is_file()), None)
    name = printable(found.version or (found.lab.lab if found.lab else "")) or "another program"
    part = Section(PROFILES, found.device, ", ".join([name, *_tool_and_size(found)]))
    part.links = tuple(Link(path.name, path) for path in (file, record) if path)
    if found.run:
        part.size, part.precision = printable(size_name(found.run)), found.run.precision
    part.tables = [show.short_list(found.table, _HOT)]
    part.say((*show.summary(found.table), *found.table.warnings))
    for advice in advisor.advise(found.table, found.record):
        part.say([f"{advice.sentence} {advice.treatment}"])
        if advice.severity == advisor.WARNING:
            text = printable(f"{part.title}: {advice.sentence}")
            part.alarms.append(Alarm(SUSPECT, text, part.links))
    add_roofline(part, [file], folders, title=part.title)
    return part


def _tool_and_size(found: Profile) -> list[str]:
    size = f"{size_name(found.run)}, {found.run.precision}" if found.run else ""
    if found.lab:
        size = f"{found.lab.subject}, {found.lab.variant}"
    return [printable(part) for part in (found.tool or "an unnamed tool", size) if part]


def category_charts(profiles: Sequence[Profile]) -> list[Chart]:
    """A device's profiles of the same work side by side: a chart for each tool and size."""
    by_work: dict[tuple[object, ...], list[Profile]] = {}
    for found in profiles:
        run = found.run
        size: tuple[object, ...] = (found.lab.subject,) if found.lab else ()
        if run:
            size = (run.config_name, run.batch_size, run.seq_len, run.precision)
        known = found.table.steps is not None
        by_work.setdefault((found.tool, found.table.what, known, *size), []).append(found)
    drawn: list[Chart] = []
    for own in by_work.values():
        sums = [
            {kind: ns / (found.table.steps or 1) for kind, ns in found.table.category_ns().items()}
            for found in own
        ]
        if not any(sums):
            continue
        what = f"{own[0].table.what}s"
        series = {kind: [one.get(kind, 0.0) / 1e6 for one in sums] for kind in CATEGORIES}
        axis = f"ms of a step's {what}" if own[0].table.steps else f"ms of all {what}"
        colours = [CATEGORY_COLOURS[kind] for kind in CATEGORIES]
        title = f"What the {what}' time goes to: {', '.join(_tool_and_size(own[0]))}"
        files = tuple(found.folder / kernel_file.JSON_FILE for found in own)
        bars = Bars(distinct_names(own), series, axis, colours)
        drawn.append(drawing.bars_chart(f"categories-{len(drawn) + 1}", title, bars, files))
    return drawn
