"""The content of each view, in blocks of sentences, figures and tables: the report's parts, and for
a first look figures that answer to the pointer."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from workshop.collection import Profile
from workshop.compare.rows import Row, without_interval
from workshop.dashboard import data, figures
from workshop.dashboard.data import Choice, Group, Snapshot
from workshop.labs import LabRow
from workshop.profilers.names import printable
from workshop.report import comparisons, sections
from workshop.report.parts import BAD, DIM, Cell, Line, Section, Table, cells
from workshop.report.pictures import Picture
from workshop.results import FAIL, PASS
from workshop.run import presets
from workshop.show import comparisons as comparison_tables
from workshop.versions import ALL, BASELINE

CONTENTS, OVERVIEW = "What is here", "Speed and memory"
ROOFLINE, KERNELS = "Roofline", "Kernels"
"""The views that show a profile."""
LABS = "Labs"
_WITHOUT_GROUP = (CONTENTS, KERNELS, LABS)
"""The views that show no runs of versions."""
_HOT = 15
"""Kernels of a hot list."""
GOOD, WARN = "good", "warn"
"""Looks of cells and sentences, besides BAD and DIM."""


@dataclass(frozen=True)
class Block:
    """A part of a view, under one heading. `key` is unique on the page."""

    key: str
    title: str
    figure: go.Figure | None = None
    tables: Sequence[Table] = ()
    before: Sequence[tuple[str, str]] = ()
    """Sentences above the figure, each with its look."""
    after: Sequence[str] = ()
    wide: bool = False
    """Whether it takes the whole width of a page."""
    pictures: Sequence[Picture] = ()


def view(name: str, snapshot: Snapshot, choice: Choice) -> list[Block]:
    """The blocks of one of VIEWS, for a settled choice."""
    if (name, choice) not in snapshot.views:
        snapshot.views[name, choice] = list(_view(name, snapshot, choice))
    found: list[Block] = snapshot.views[name, choice]
    return found


def _view(name: str, snapshot: Snapshot, choice: Choice) -> Iterable[Block]:
    rows = snapshot.chosen(choice)
    if name not in _WITHOUT_GROUP and choice.group not in snapshot.groups:
        return [_nothing()]
    if name not in _WITHOUT_GROUP and not rows:
        return [_note("none", "No version is chosen", "Choose one above.")]
    return VIEWS[name](snapshot, choice, rows)


def _nothing() -> Block:
    words = "make compare writes the first ones; this page shows them as they come."
    return _note("empty", "No results yet", words)


def _note(key: str, title: str, *lines: str) -> Block:
    return Block(key, title, before=[(line, DIM) for line in lines], wide=True)


def _block(section: Section) -> Block:
    """A section of the report."""
    advice = [line for finding in section.advice for line in finding]
    return Block(
        section.anchor,
        section.title,
        tables=section.tables,
        before=[(f"{alarm.kind}: {alarm.text}", BAD) for alarm in section.alarms],
        after=[*filter(None, [section.intro]), *advice, *section.sentences],
        wide=True,
        pictures=section.pictures,
    )


def _pictured(picture: Picture) -> Block:
    key = picture.name.rpartition("-")[2]
    after = [picture.alt] if picture.in_markdown else []
    return Block(key, picture.title, after=after, pictures=[picture])


# --- what is here --------------------------------------------------------------------------------


def _contents(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    """The contents of each of the other views."""
    groups = snapshot.sizes()  # points of a sweep have sizes of their own
    groups = [group for group in groups if group.preset in presets.PRESETS] or groups
    ladder = [_group_line(group, snapshot.rows(group)) for group in groups]
    profiles = Counter((p.device, p.tool) for p in snapshot.profiles.values())
    found = [
        _part(f"Versions beside V1: {len(ladder)}", f'the views from "{OVERVIEW}" to "{ROOFLINE}"',
              ["device, size, precision, batch × sequence", "versions", "best"], ladder, 3),
        _part(f"Labs: {len(snapshot.labs)}", f'the view "{LABS}"',
              ["lab and subject", "fastest", "rows", "pass"],
              [_lab_line(title, own) for title, own in snapshot.labs.items()], 2),
        _part(f"Profiles: {len(snapshot.profiles)}", f'the view "{KERNELS}"',
              ["device", "tool", "profiles"],
              [Line(cells(*key, str(count))) for key, count in profiles.items()], 2),
    ]  # fmt: skip
    return [block for block in found if block.tables[0].lines] or [_nothing()]


def _part(title: str, where: str, header: list[str], lines: list[Line], texts: int) -> Block:
    key = f"contents-{title.split()[0].strip(':').lower()}"
    table = Table("", header, lines, texts)
    return Block(key, title, tables=[table], after=[f"Shown by {where}."], wide=True)


def _group_line(group: Group, rows: list[Row]) -> Line:
    best = data.headline(rows)
    timed = ", ".join(row.label for row in rows if row.step_ms)
    tested = any(row.speedup_ci and row.version != BASELINE for row in rows)
    without = "no significant speed-up" if tested else "no speed-up with an interval"
    verdict = Cell(best, look=GOOD) if best else Cell(without, look=DIM)
    return Line([Cell(" · ".join(group), look="name"), *cells(timed), verdict])


def _lab_line(title: str, rows: list[LabRow]) -> Line:
    faster = [(row.speedup.value, row) for row in rows if row.speedup and row.speedup.significant]
    value, best = max(faster, key=lambda pair: pair[0], default=(0.0, None))
    fastest = f"{best.label}: {value:.2f}x" if best else "-"
    passed = sum(row.verdict == PASS for row in rows)
    name = Cell(printable(title), look="name")
    return Line([name, *cells(fastest, str(len(rows)), str(passed))])


# --- speed and memory ----------------------------------------------------------------------------


def _overview(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    speed, proof = comparison_tables.group_tables(rows)
    header = ["version", "verdict", *speed.header[2:], *proof.header[4:]]
    lines = [
        Line([_version(row), _verdict(row), *map(Cell, fast.cells[2:-1]), _speedup(row),
              *map(Cell, cost.cells[4:])])
        for row, fast, cost in zip(rows, speed.lines, proof.lines, strict=True)
    ]  # fmt: skip
    best = data.headline(rows)
    pictures = map(_pictured, comparisons.pictures(snapshot.reported(choice)))
    return [
        Block("summary", "The ladder", tables=[Table("", header, lines, texts=2)],
              before=[(best, GOOD)] if best else [],
              after=[*data.doubts(rows), *without_interval(rows),
                     *data.sources(snapshot, choice.group, rows)], wide=True),
        Block("throughput", "Throughput", figures.throughput(rows)),
        Block("speedup", "Speed-up over V1, with its 95% interval", figures.speedups(rows)),
        *(block for block in pictures if block.key != "losses"),
    ]  # fmt: skip


def _version(row: Row) -> Cell:
    version = ALL[row.version]
    return Cell(printable(row.label), look="", title=version.title, colour=version.colour)


def _speedup(row: Row) -> Cell:
    if row.failed:
        return Cell("-", look=BAD, title=printable(row.note))
    low, high = row.speedup_ci or (1.0, 1.0)
    look = BAD if high < 1 else GOOD if low > 1 else ""
    return Cell(row.speedup_text(), look=look, title=printable(row.note))


def _verdict(row: Row) -> Cell:
    look = {FAIL: BAD, PASS: GOOD}.get(row.verdict, WARN)
    if not row.gate_is_smaller or row.gate_shape is None:
        return Cell(row.verdict, look=look)
    batch_size, seq_len = row.gate_shape
    words = f"the gate ran on fewer tokens than the run: {batch_size} x {seq_len}"
    return Cell(row.starred_verdict, look=look, title=words)


# --- the report's parts --------------------------------------------------------------------------


def _same_model(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> Iterable[Block]:
    group = snapshot.reported(choice)
    part = comparisons.tables(group)
    wrong = [(f"{row.label}: {printable(text)}", BAD) for row in rows for text in row.plausibility]
    fine = [("No number contradicts the physics.", GOOD)] if any(r.step_ms for r in rows) else []
    pictures = map(_pictured, comparisons.pictures(group))
    yield from (block for block in pictures if block.key == "losses")
    yield Block("gate", "The gate: the same model as V1?", tables=part.tables[1:2],
                after=[*data.doubts(rows), *part.sentences], wide=True)  # fmt: skip
    title = "Plausibility: could a machine reach these numbers?"
    yield Block("plausibility", title, before=wrong or fine, wide=True)


def _ladder(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> Iterable[Block]:
    title = "Where it is saved: the parts of each version that differs from V1"
    saved = comparisons.tables(snapshot.reported(choice)).tables[2:]
    if saved:
        yield Block("savings", title, tables=saved, wide=True)
    else:
        needs = "It needs V1 and another version of the same session, faster or slower than V1."
        yield _note("savings", title, needs)
    yield from map(_block, snapshot.studies("waterfall", choice.device))


def _sweeps(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    return [_block(section) for section in snapshot.studies("sweep", choice.device)] or [
        _note("sweeps", "No sweep on this device", "compare_versions.py --sweep runs the "
              "versions over a range of batch sizes, sequence lengths or hidden dimensions.")
    ]  # fmt: skip


def _roofline(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> Iterable[Block]:
    group = snapshot.reported(choice)
    part = Section("steps", "Whole steps and their parts")
    folder = sections.folder_of(group.files[0], snapshot.folders)
    comparisons.add_group_roofline(part, group, folder)
    if part.pictures or part.sentences:
        yield _block(part)
    else:
        yield _note("roofline", "Roofline", "No timed run is chosen, or no limit is known.")
    if profile := snapshot.profiles_of(choice.device).get(choice.profile):
        part = sections.profile("kernels", profile, snapshot.folders, _HOT)
        if part.pictures:
            part.tables = []
            yield _block(part)
    for index, (path, runs) in enumerate(snapshot.kernels.items()):
        if runs[0].ceiling_gbs and printable(str(runs[0].device.get("name"))) == choice.device:
            _, part = sections.benchmark(f"benchmark-{index}", path, runs, snapshot.folders)
            yield _block(part)


def _kernels(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> Iterable[Block]:
    profile = snapshot.profiles.get(choice.profile)
    if profile is None:
        yield _note("kernels", "No profile yet", "make profile runs every profiler that this "
                    "machine has on every version.")  # fmt: skip
        return
    alike = [p for p in snapshot.profiles.values() if _comparable(p) == _comparable(profile)]
    for picture in sections.category_pictures("alike", alike):
        yield Block(picture.name, picture.title, pictures=[picture], wide=True)
    part = sections.profile("hot", profile, snapshot.folders, _HOT)
    part.title, part.pictures = f"Hot list of {snapshot.profile_labels[choice.profile]}", []
    yield _block(part)


def _comparable(profile: Profile) -> tuple[object, ...]:
    """Equal for profiles that may be shown side by side."""
    group = data.group_of(profile.run) if profile.run else profile.lab and profile.lab.subject
    table = profile.table
    return (group, profile.tool, profile.device, table.what, table.steps is None)


def _labs(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    if choice.lab not in snapshot.labs:
        programs = "python labs/inference_benchmark/micro_benchmarking_pytorch.py"
        return [_note("labs", "No run of a lab yet", f"The labs' programs write them: {programs}")]
    return [_block(snapshot.lab_section(choice.lab))]


VIEWS: dict[str, Callable[[Snapshot, Choice, list[Row]], Iterable[Block]]] = {
    CONTENTS: _contents,
    OVERVIEW: _overview,
    "Same model?": _same_model,
    "Ladder": _ladder,
    "Sweeps": _sweeps,
    ROOFLINE: _roofline,
    KERNELS: _kernels,
    LABS: _labs,
}
