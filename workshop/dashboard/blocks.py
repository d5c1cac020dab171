"""The content of each view, in blocks of sentences, a figure and a table."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from workshop.collection import Profile, distinct_names
from workshop.compare import lab_table, tables
from workshop.compare.rows import Row, build_row, without_interval
from workshop.compare.sweep import AXES
from workshop.dashboard import data, figures
from workshop.dashboard.data import Choice, Group, Snapshot
from workshop.errors import WorkshopError
from workshop.labs import LabRow
from workshop.profilers.names import display_name, printable
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.profilers.show import summary
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import FAIL, PASS, RunResult
from workshop.roofline import figures as roofline_figures
from workshop.roofline.model import Roofline, flags, sentences
from workshop.run import precision, presets
from workshop.versions import ALL, BASELINE, VERSIONS

CONTENTS, OVERVIEW = "What is here", "Speed and memory"
ROOFLINE, KERNELS = "Roofline", "Kernels"
"""The views that show a profile."""
LABS = "Labs"
_WITHOUT_GROUP = (CONTENTS, KERNELS, LABS)
"""The views that show no runs of versions."""
_HOT = 15
"""Kernels of a hot list, and points of a roofline's table."""
GOOD, BAD, WARN, DIM = "good", "bad", "warn", "dim"
"""Looks of cells and sentences."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `title` is its tooltip, `bar` fills a share of it, and a square of its
    `colour` precedes it."""

    text: str
    look: str = ""
    title: str = ""
    bar: float | None = None
    colour: str = ""


Cells = list[Cell | str]


@dataclass(frozen=True)
class Table:
    """The first `texts` columns are words, the others numbers."""

    header: Sequence[str]
    rows: Sequence[Cells]
    texts: int = 1


@dataclass(frozen=True)
class Block:
    """A part of a view, under one heading. `key` is unique on the page."""

    key: str
    title: str
    figure: go.Figure | None = None
    table: Table | None = None
    before: Sequence[tuple[str, str]] = ()
    """Sentences above the figure, each with its look."""
    after: Sequence[str] = ()
    wide: bool = False
    """Whether it takes the whole width of a page."""


def view(name: str, snapshot: Snapshot, choice: Choice) -> list[Block]:
    """The blocks of one of VIEWS, for a settled choice."""
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


# --- what is here --------------------------------------------------------------------------------


def _contents(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    """The contents of each of the other views."""
    groups = snapshot.sizes()  # points of a sweep have sizes of their own
    groups = [group for group in groups if group.preset in presets.PRESETS] or groups
    ladder = [_group_line(group, snapshot.rows(group)) for group in groups]
    profiles = Counter((printable(p.device), p.tool) for p in snapshot.profiles.values())
    found = [
        _part(f"Versions beside V1: {len(ladder)}", f'the views from "{OVERVIEW}" to "{ROOFLINE}"',
              ("device, size, precision, batch × sequence", "versions", "best"), ladder, 3),
        _part(f"Labs: {len(snapshot.labs)}", f'the view "{LABS}"',
              ("lab and subject", "fastest", "rows", "pass"),
              [_lab_line(title, own) for title, own in snapshot.labs.items()], 2),
        _part(f"Profiles: {len(snapshot.profiles)}", f'the view "{KERNELS}"',
              ("device", "tool", "profiles"),
              [[*key, str(count)] for key, count in profiles.items()], 2),
    ]  # fmt: skip
    return [block for block in found if block.table and block.table.rows] or [_nothing()]


def _part(title: str, where: str, header: Sequence[str], lines: list[Cells], texts: int) -> Block:
    key = f"contents-{title.split()[0].strip(':').lower()}"
    after = [f"Shown by {where}."]
    return Block(key, title, None, Table(header, lines, texts), (), after, True)


def _group_line(group: Group, rows: list[Row]) -> Cells:
    best = data.headline(rows)
    timed = ", ".join(printable(row.label) for row in rows if row.step_ms)
    tested = any(row.speedup_ci and row.version != BASELINE for row in rows)
    without = "no significant speed-up" if tested else "no speed-up with an interval"
    verdict = Cell(best, GOOD) if best else Cell(without, DIM)
    return [Cell(" · ".join(group), "name"), timed, verdict]


def _lab_line(title: str, rows: list[LabRow]) -> Cells:
    faster = [(row.speedup.value, row) for row in rows if row.speedup and row.speedup.significant]
    value, best = max(faster, key=lambda pair: pair[0], default=(0.0, None))
    fastest = f"{printable(best.label)}: {value:.2f}x" if best else "-"
    passed = sum(lab_table.verdict(row) == PASS for row in rows)
    return [Cell(printable(title), "name"), fastest, str(len(rows)), str(passed)]


# --- speed and memory ----------------------------------------------------------------------------


def _overview(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    speed, proof = tables.group_tables(rows)
    header = ("version", "verdict", *speed.header[2:], *proof.header[4:])
    lines: list[Cells] = [
        [_version(row), _verdict(row), *fast.cells[2:-1], _speedup(row), *cost.cells[4:]]
        for row, fast, cost in zip(rows, speed.lines, proof.lines, strict=True)
    ]
    best = data.headline(rows)
    return [
        Block("summary", "The ladder", table=Table(header, lines, texts=2),
              before=[(best, GOOD)] if best else [],
              after=[*data.doubts(rows), *without_interval(rows),
                     *data.sources(snapshot, choice.group, rows)], wide=True),
        Block("throughput", "Throughput", figures.throughput(rows)),
        Block("speedup", "Speed-up over V1, with its 95% interval", figures.speedups(rows)),
        Block("phases", "A step and its parts", figures.phases(rows),
              after=["The parts are timed in a separate pass, so that measuring them does not "
                     "slow the whole step, which the mark shows."]),
        Block("memory", "Peak memory", figures.memory(rows)),
    ]  # fmt: skip


def _version(row: Row) -> Cell:
    version = ALL[row.version]
    return Cell(printable(row.label), title=version.title, colour=version.colour)


def _speedup(row: Row) -> Cell:
    if row.failed:
        return Cell("-", BAD, printable(row.note))
    low, high = row.speedup_ci or (1.0, 1.0)
    look = BAD if high < 1 else GOOD if low > 1 else ""
    return Cell(row.speedup_text(), look, printable(row.note))


def _verdict(row: Row) -> Cell:
    look = {FAIL: BAD, PASS: GOOD}.get(row.verdict, WARN)
    if not row.gate_is_smaller or row.gate_shape is None:
        return Cell(row.verdict, look)
    batch_size, seq_len = row.gate_shape
    return Cell(
        row.starred_verdict,
        look,
        f"the gate ran on fewer tokens than the run: {batch_size} x {seq_len}",
    )


# --- the same model ------------------------------------------------------------------------------


def _proof(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    curves = data.loss_curves(snapshot, choice.group, rows)
    blocks = []
    if curves:
        statements = [data.loss_difference(curves), precision.of_losses(choice.group.precision)]
        blocks.append(
            Block("losses", "Loss curves, one upon another", figures.losses(curves),
                  before=[(text, "") for text in statements if text], wide=True)
        )  # fmt: skip
    lines = [
        _proof_cells(snapshot, choice.group, row, line.cells)
        for row, line in zip(rows, tables.group_tables(rows)[1].lines, strict=True)
    ]
    wrong = [(f"{r.label}: {printable(text)}", BAD) for r in rows for text in r.plausibility]
    fine = [("No number contradicts the physics.", GOOD)] if any(r.step_ms for r in rows) else []
    return [
        *blocks,
        Block("gate", "The gate: the same model as V1?", table=Table(_PROOF_HEADER, lines, texts=3),
              after=data.doubts(rows), wide=True),
        Block("plausibility", "Plausibility: could a machine reach these numbers?",
              before=wrong or fine, wide=True),
    ]  # fmt: skip


_PROOF_HEADER = ("version", "verdict", "closest to its limit", "error", "allowed",
                 "tensors with gradient", "parameters", "loss")  # fmt: skip


def _proof_cells(snapshot: Snapshot, group: Group, row: Row, proof: Sequence[str]) -> Cells:
    runs = [stored.run for stored in snapshot.stored(group, row)]
    gated = next((run for run in runs if run.gate.status != "not run"), runs[0])
    name, error, allowed = gated.gate.closest() or ("-", None, None)
    refused = next((run.refused for run in runs if run.refused), ("", []))
    cell = _verdict(row)
    return [
        _version(row),
        Cell(cell.text, cell.look, printable("; ".join(refused[1])) or cell.title),
        Cell(display_name(name, 34), DIM, printable(name)),
        "not finite" if error is not None and not math.isfinite(error)
        else tables.number(error, ".1e"),
        tables.number(allowed, ".1e"),
        Cell(proof[2], BAD if row.tensors_with_grad != row.tensors_total else ""),
        tables.number(row.params_total, ",d"),
        proof[3],
    ]  # fmt: skip


# --- the ladder, step by step --------------------------------------------------------------------


def _ladder(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    whole = [row for row in rows if not row.variant]
    session = next((row.session for row in whole if row.version == BASELINE), "")
    reasons = {row.label: _no_rung(row, session) for row in whole}
    rungs = [row for row in whole if not reasons[row.label]]
    left_out = ", ".join(f"{label} ({reason})" for label, reason in reasons.items() if reason)
    after = [f"Left out: {left_out}."] if left_out else []
    title = "What each rung saves"
    if len(rungs) < 2 or rungs[0].version != BASELINE:
        needs = "It needs V1 and another version of the same session, which passed the gate."
        blocks = [_note("waterfall", title, needs, *after)]
    else:
        runs = [[s.run for s in snapshot.stored(choice.group, row)] for row in rungs]
        gains = [build_row(its, before).speedup_ci for before, its in itertools.pairwise(runs)]
        figure = figures.waterfall(rungs, gains)
        blocks = [Block("waterfall", title, figure, after=after, wide=True)]
        if proven := [row for row in rungs[1:] if figures.differs(row.speedup_ci)]:
            where = "Where it is saved: the parts of each version that differs from V1"
            figure = figures.savings(rungs[0], proven)
            blocks.append(Block("savings", where, figure, wide=True))
    return blocks + _switches(snapshot.rows(choice.group))


def _no_rung(row: Row, session: str) -> str:
    """Why a row is no rung of the ladder that V1 begins in a session; empty for a rung."""
    if row.version not in VERSIONS:
        return "a peer"
    if row.speedup is None:
        return "no speed-up"
    return "" if row.session == session else "another comparison"


def _switches(rows: list[Row]) -> list[Block]:
    """Of all versions, chosen or not, that ran with single parts switched off in the session of the
    whole version."""
    timed = [row for row in rows if row.step_ms]
    blocks = []
    for whole in timed:
        single = [
            row
            for row in timed
            if (row.version, row.session) == (whole.version, whole.session)
            and row.variant.startswith("no-")
            and " " not in row.variant
            and row.parity == "pass"
        ]
        if single and not whole.variant:
            title = f"What each switch of {whole.label.upper()} is worth"
            figure = figures.switches(whole, single)
            blocks.append(Block(f"switches-{whole.version}", title, figure, wide=True))
    return blocks


# --- sweeps --------------------------------------------------------------------------------------


_PANELS: tuple[tuple[str, str, Callable[[Row], float | None]], ...] = (
    ("Step time", "ms a step", lambda row: row.step_ms),
    ("Throughput", "tokens a second", lambda row: row.tokens_per_s),
    ("Memory", "peak memory, MB", lambda row: row.peak_memory_mb),
)


def _sweeps(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    blocks: list[Block] = []
    for axis in AXES.values():
        found = snapshot.sweep(choice.group, axis)
        lines = [(row, found[row.label]) for row in rows if len(found.get(row.label, ())) > 1]
        if not lines:
            continue
        gated = all(point.row.parity == "pass" for _, points in lines for point in points)
        after = [] if gated else ["Open marks: no gate was run there."]
        blocks += [
            Block(f"{axis.flag}-{what.split()[0].lower()}", f"{what} over {axis.words}",
                  figures.sweep(lines, axis, title, value), after=after)
            for what, title, value in _PANELS
        ]  # fmt: skip
    return blocks or [
        _note("sweeps", "No sweep goes through this size", "compare_versions.py --sweep runs the "
              "versions over a range of batch sizes, sequence lengths or hidden dimensions.")
    ]  # fmt: skip


# --- roofline ------------------------------------------------------------------------------------


def _roofline(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    stored = [s for row in rows if row.step_ms for s in snapshot.stored(choice.group, row)]
    blocks = []
    if stored:
        paths, runs = [s.path for s in stored], [s.run for s in stored]
        blocks.append(_one_roofline("steps", "Whole steps and their parts", snapshot, paths, runs))
    profile = snapshot.profiles_of(choice.device).get(choice.profile)
    if profile:
        title = f"Kernels of {snapshot.profile_labels[choice.profile]}"
        blocks.append(_one_roofline("kernels", title, snapshot, [profile.folder]))
    for index, (path, its) in enumerate(snapshot.kernels.items()):
        if its[0].ceiling_gbs and printable(str(its[0].device.get("name"))) == choice.device:
            title = f"V3's kernels, each alone in the benchmark of {data.shown_path(path.parent)}"
            blocks.append(_one_roofline(f"benchmark-{index}", title, snapshot, [path]))
    return blocks or [_note("roofline", "Roofline", "No timed run is chosen.")]


def _one_roofline(
    key: str, title: str, snapshot: Snapshot, paths: Sequence[Path], runs: Sequence[RunResult] = ()
) -> Block:
    try:
        roofline = snapshot.roofline(paths, runs)
    except WorkshopError as error:
        return _note(f"roofline-{key}", title, printable(str(error)))
    figure = figures.fit_for_both_themes(roofline_figures.plotly_figure(roofline))
    red = [(printable(sentence), BAD) for sentence in flags(roofline)]
    notes = [printable(s) for s in (*sentences(roofline, 6), *roofline.notes)]
    table = _points(roofline)
    return Block(f"roofline-{key}", title, figure, table, before=red, after=notes, wide=True)


def _points(roofline: Roofline) -> Table:
    """The numbers in the figure, with their names."""
    header, *rows = roofline_figures.table_cells(roofline)[: _HOT + 1]
    cells: list[Cells] = [
        [number, Cell(printable(name), "name"), *rest] for number, name, *rest in rows
    ]
    if (more := len(roofline.points) - _HOT) > 0:
        cells.append(["", Cell(f"{more:,} more", DIM)])
    return Table(header, cells, texts=3)


# --- kernels -------------------------------------------------------------------------------------


def _kernels(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    profile = snapshot.profiles.get(choice.profile)
    if profile is None:
        return [_note("kernels", "No profile yet", "make profile runs every profiler that this "
                      "machine has on every version.")]  # fmt: skip
    alike = [p for p in snapshot.profiles.values() if _comparable(p) == _comparable(profile)]
    bars = zip(distinct_names(alike), (other.table for other in alike), strict=True)
    title = f"Where the time goes: {profile.tool}"
    return [
        Block("categories", title, figures.categories(list(bars)), wide=True),
        Block(
            "hot",
            f"Hot list of {snapshot.profile_labels[choice.profile]}",
            table=_hot_list(profile.table),
            after=[printable(line) for line in (*summary(profile.table), *profile.table.warnings)],
            wide=True,
        ),
    ]


def _comparable(profile: Profile) -> tuple[object, ...]:
    """Equal for profiles that may be shown side by side."""
    group = data.group_of(profile.run) if profile.run else profile.lab and profile.lab.subject
    table = profile.table
    return (group, profile.tool, profile.device, table.what, table.steps is None)


def _hot_list(table: KernelTable) -> Table:
    """The longest kernels, and a sum that is as long as the profile's bar in `figures.categories`:
    of a step, where the steps are known."""

    def numbers(kernels: Sequence[Kernel]) -> Cells:
        calls, ns = sum(k.calls for k in kernels), sum(k.total_ns for k in kernels)
        share = sum(map(table.share, kernels))
        return [f"{calls / steps:,.{places}f}", f"{ns / steps / 1e6:,.3f}",
                f"{ns / calls / 1e3:,.1f}", Cell(f"{share:.1%}", bar=share)]  # fmt: skip

    steps, each = (table.steps, " a step") if table.steps else (1, "")
    places = 1 if any(kernel.calls % steps for kernel in table.kernels) else 0
    rows: list[Cells] = [
        [
            Cell(display_name(kernel.name, 90), "name", printable(kernel.name[:2000])),
            Cell(kernel.category, colour=CATEGORY_COLOURS.get(kernel.category, "")),
            *numbers([kernel]),
        ]
        for kernel in table.kernels[:_HOT]
    ]
    if rest := table.kernels[_HOT:]:
        rows.append([Cell(f"{len(rest):,} more", DIM), "", *numbers(rest)])
    if table.kernels:
        rows.append([Cell("in all", "name"), "", *numbers(table.kernels)])
    header = (table.what, "category", f"calls{each}", f"ms{each}", "mean µs", "share")
    return Table(header, rows, texts=2)


# --- labs ----------------------------------------------------------------------------------------


def _labs(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    found = snapshot.labs.get(choice.lab)
    if found is None:
        programs = "python labs/inference_benchmark/micro_benchmarking_pytorch.py"
        return [_note("labs", "No run of a lab yet", f"The labs' programs write them: {programs}")]
    table = lab_table.lab_table(found)
    lines = [_lab_cells(row, line.cells) for row, line in zip(found, table.lines, strict=True)]
    alarms = lab_table.alarms(found)
    notes = [note for note in table.notes if note not in alarms]
    title = f"{choice.lab}, session {printable(found[0].first.session)}"
    blocks = [
        Block("lab", title, table=Table(table.header, lines, texts=2),
              before=[(line, BAD) for line in alarms],
              after=[*notes, *data.files_in_words(snapshot.lab_paths(found))], wide=True)
    ]  # fmt: skip
    if any(row.times for row in found) and not found[0].of:  # a table of many subjects is enough
        title = f"{printable(found[0].first.unit).capitalize()} a second"
        colours = "Green is faster than the baseline, orange slower, pale not shown to differ."
        after = [colours] if any(row.speedup for row in found) else []
        blocks.append(Block("lab-rates", title, figures.lab_rates(found), after=after, wide=True))
    return blocks


def _lab_cells(row: LabRow, cells: Sequence[str]) -> Cells:
    verdict, note = lab_table.verdict(row), printable(row.note())
    look = {PASS: GOOD, FAIL: BAD}.get(verdict, WARN)
    speedup = row.speedup
    faster = speedup is not None and speedup.value > 1
    gain = (GOOD if faster else BAD) if speedup and speedup.significant else ""
    name = Cell(printable(cells[0]), "name")
    return [name, Cell(verdict, look, note), *cells[2:6], Cell(cells[6], gain), *cells[7:]]


VIEWS: dict[str, Callable[[Snapshot, Choice, list[Row]], list[Block]]] = {
    CONTENTS: _contents,
    OVERVIEW: _overview,
    "Same model?": _proof,
    "Ladder": _ladder,
    "Sweeps": _sweeps,
    ROOFLINE: _roofline,
    KERNELS: _kernels,
    LABS: _labs,
}
