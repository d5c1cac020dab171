"""The parts of a report beside the ladders: profiles, V3's benchmark, the harness's own cost."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from workshop import results
from workshop.collection import Collection, Profile, distinct_names
from workshop.compare.rows import size_name
from workshop.errors import WorkshopError
from workshop.kernels import rows
from workshop.kernels.cases import OURS
from workshop.kernels.rows import Row
from workshop.labs import LabRun
from workshop.profilers import advisor, kernel_file, show
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.names import display_name, printable
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.table import KernelTable
from workshop.report import charts, lab_sections, parts
from workshop.report.parts import Alarm, Cell, Line, Link, Section, Table, add_roofline, cells
from workshop.report.pictures import Picture
from workshop.results import SKIPPED

HARNESS = "harness"
"""A results folder's records of what the harness adds to a step."""
_NAME_WIDTH = 60

KERNELS = (
    "Written by workshop.kernels.benchmark, commit {commit}. A rate at the median, "
    "± half of the interquartile range; replayed from graphs, so that launches are not timed; on "
    "data that the cache does not hold. “of ceiling” compares with what a large copy or product "
    "reached in the same run, forward / backward. “device / host”: a forward and backward pass on "
    "the device, as replayed, and the host's time to launch it from Python; a caller without a "
    "graph waits for the longer one. The error is the worst of results and gradients "
    "against fp64, with what the precision explains in brackets."
)
HARNESS_INTRO = (
    "The same step in a bare hand-written loop and through the harness, alternating in one process "
    "(pytest tests/test_gpu.py -k harness); medians of all its samples."
)


# --- profiles ------------------------------------------------------------------------------------


def folder_of(path: Path, folders: Sequence[Path]) -> Path:
    """The one of a collection's folders that a file lies in."""
    return next(folder for folder in folders if folder in path.parents)


def profile(anchor: str, found: Profile, folders: Sequence[Path], top: int) -> Section:
    """The head of a profile's hot list, its summary and its advice."""
    file = found.folder / kernel_file.JSON_FILE
    records = (place / RUN_FILE for place in (found.folder, found.folder.parent) if found.record)
    record = next((path for path in records if path.is_file()), None)
    links = [Link(path.name, path) for path in (file, record) if path]
    section = Section(anchor, _title(found), tuple(links))
    section.tables = [hot_list(found.table, top)]
    section.sentences = [printable(line) for line in show.summary(found.table)]
    section.sentences += map(printable, found.table.warnings)
    for advice in advisor.advise(found.table, found.record):
        section.advice.append((printable(advice.sentence), printable(advice.treatment)))
        if advice.severity == advisor.WARNING:
            text = printable(f"{section.title}: {advice.sentence}")
            section.alarms.append(Alarm(parts.SUSPECT, text, tuple(links)))
    add_roofline(section, section.title, [file], folder_of(file, folders))
    return section


def _title(found: Profile) -> str:
    lab = found.lab.lab if found.lab else ""
    name = printable(found.version or lab) or "another program"
    return ", ".join([name, *_tool_and_size(found)])


def _tool_and_size(found: Profile) -> list[str]:
    size = f"{size_name(found.run)}, {found.run.precision}" if found.run else ""
    if found.lab:
        size = f"{found.lab.subject}, {found.lab.variant}"
    return [printable(part) for part in (found.tool or "an unnamed tool", size) if part]


def hot_list(table: KernelTable, top: int) -> Table:
    """The longest kernels; a step each, where the steps are known."""
    steps, each = (table.steps, " a step") if table.steps else (1, "")
    header = [table.what, "category", f"calls{each}", f"ms{each}", "share"]
    lines = []
    for kernel in table.kernels[:top]:
        name = Cell(display_name(kernel.name, _NAME_WIDTH), is_code=True)
        calls, ms = f"{kernel.calls / steps:,.0f}", f"{kernel.total_ns / steps / 1e6:,.3f}"
        share = f"{table.share(kernel):.1%}"
        lines.append(Line([name, *cells(kernel.category, calls, ms, share)]))
    rest = len(table.kernels) - top
    caption = f"The longest {table.what}s" + (f"; {rest:,} more in the file" if rest > 0 else "")
    return Table(caption, header, lines, texts=2)


def category_pictures(anchor: str, profiles: Sequence[Profile]) -> list[Picture]:
    """A device's profiles of the same work beside each other: a picture for each tool and size."""
    by_work: dict[tuple[object, ...], list[Profile]] = {}
    for found in profiles:
        run = found.run
        size: tuple[object, ...] = (found.lab.subject,) if found.lab else ()
        if run:
            size = (run.config_name, run.batch_size, run.seq_len, run.precision)
        steps_known = found.table.steps is not None
        by_work.setdefault((found.tool, found.table.what, steps_known, *size), []).append(found)
    pictures: list[Picture] = []
    for own in by_work.values():
        sums = [
            {kind: ns / (found.table.steps or 1) for kind, ns in found.table.category_ns().items()}
            for found in own
        ]
        if not any(sums):
            continue
        what = f"{own[0].table.what}s"
        pictures.append(charts.stack(
            f"{anchor}-categories-{len(pictures) + 1}",
            f"What the {what}' time goes to: {', '.join(_tool_and_size(own[0]))}",
            f"ms of a step's {what}" if own[0].table.steps else f"ms of all {what}",
            distinct_names(own),
            [(kind, CATEGORY_COLOURS[kind], [one.get(kind, 0.0) / 1e6 for one in sums])
             for kind in CATEGORIES],
            tuple(found.folder / kernel_file.JSON_FILE for found in own),
        ))  # fmt: skip
    return pictures


# --- benchmarks and the cost of the harness ------------------------------------------------------


def others(collection: Collection) -> tuple[list[tuple[str, Section]], list[tuple[Path, str]]]:
    """The other measurements in a collection's folders, each with the name of its device; and the
    broken ones, each with the reason."""
    found = [
        benchmark(f"benchmark-{number}", path, runs, collection.folders)
        for number, (path, runs) in enumerate(collection.kernels.items(), 1)
    ]
    broken: list[tuple[Path, str]] = []
    files = (path for top in collection.folders for path in top.rglob(f"{HARNESS}/[!.]*.json"))
    for path in sorted({path.parent for path in files}):
        try:
            found.append(_harness_cost(f"harness-{len(found) + 1}", path))
        except WorkshopError as error:
            broken.append((path, str(error)))
    return found, broken


def benchmark(
    anchor: str, path: Path, runs: Sequence[LabRun], folders: Sequence[Path]
) -> tuple[str, Section]:
    """V3's operators beside other implementations, without those that do not exist for a case; and
    the device's name."""
    measured = [row for row in (Row((run,)) for run in runs) if row.verdict != SKIPPED]
    first = runs[0]
    section = Section(anchor, "V3's kernels", (Link(path.name, path),))
    section.intro = KERNELS.format(commit=printable(str(first.git_commit)))
    for group in rows.by_op(measured):
        table = rows.table(group)
        lines = [
            Line(cells(*line.cells), parts.BAD * (line.style == "red")) for line in table.lines
        ]
        section.tables.append(Table(printable(table.title), list(table.header), lines, texts=2))
        section.sentences += [printable(f"{group[0].op}: {note}") for note in table.notes]
        for row in group:
            if row.implementation == OURS or row.plausibility:
                named = dataclasses.replace(row, of=row.first.subject)
                section.alarms += lab_sections.alarms(named, section.title, section.links)
    section.sentences.append(printable(rows.summary(Row((first,)))))
    add_roofline(section, section.title, [path], folder_of(path, folders), in_words=False)
    return str(first.device["name"]), section


def _harness_cost(anchor: str, folder: Path) -> tuple[str, Section]:
    lines, links, devices = [], [], []
    for path in sorted(folder.glob("*.json")):
        cost = results.read_json(path)
        try:
            bare, harness = (statistics.median(cost[name]) for name in ("bare_ms", "harness_ms"))
            texts = [cost["version"], f"{cost['config']}, {cost['precision']}", f"{bare:.3f} ms",
                     f"{harness:.3f} ms", f"{harness / bare - 1:+.2%}"]  # fmt: skip
            devices.append(str(cost["device"]["name"]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise WorkshopError(f"{path}: no record of the harness's cost ({error!r})") from None
        links.append(Link(path.name, path))
        lines.append(Line([*cells(*map(str, texts)), Cell("", (links[-1],))]))
    header = ["version", "size", "bare loop", "harness", "difference", "result file"]
    section = Section(anchor, "What the harness costs", tuple(links), HARNESS_INTRO)
    section.tables = [Table("Median time of a step", header, lines, texts=2)]
    return devices[0], section
