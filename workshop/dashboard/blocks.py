"""What each view holds, in blocks of sentences, a figure and a table: for the server and the file
alike."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go

from workshop.compare.collection import Profile
from workshop.compare.rows import Row, without_interval
from workshop.dashboard import data, figures
from workshop.dashboard.data import SWEPT, Choice, Group, Snapshot
from workshop.errors import WorkshopError
from workshop.profilers.names import display_name, printable
from workshop.profilers.show import summary
from workshop.profilers.table import KernelTable
from workshop.results import Parity
from workshop.roofline import figures as roofline_figures
from workshop.roofline.model import Roofline, flags, sentences
from workshop.run import precision
from workshop.versions import ALL, BASELINE

ROOFLINE, KERNELS = "Roofline", "Kernels"
"""The views that show a profile."""
HOT = 15
"""Kernels of a hot list, and points of a roofline's table."""
SAID = 6
"""Points of a roofline of which sentences tell."""
GOOD, BAD, WARN, DIM = "good", "bad", "warn", "dim"
"""Looks of cells and sentences."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `title` is what pointing at it tells, `bar` fills a share of it."""

    text: str
    look: str = ""
    title: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    texts: int = 1
    """Columns, the first ones, that hold no figures."""


@dataclass(frozen=True)
class Block:
    """A part of a view, under one heading."""

    key: str
    """Names it on the page, once in all views."""
    title: str
    figure: go.Figure | None = None
    table: Table | None = None
    before: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Sentences above the figure, each with its look."""
    after: Sequence[str] = field(default_factory=tuple)
    wide: bool = False
    """Whether it takes the whole width of a page."""


def view(name: str, snapshot: Snapshot, choice: Choice) -> list[Block]:
    """The blocks of one of VIEWS, for a settled choice."""
    if choice.group not in snapshot.groups and name != KERNELS:
        return [_word("empty", "No results yet", "make compare writes the first ones; this page "
                      "will show them as they come.")]  # fmt: skip
    rows = [row for row in snapshot.rows(choice.group) if row.label in choice.versions]
    if not rows and name != KERNELS:
        return [_word("none", "No version is chosen", "Choose one above.")]
    return VIEWS[name](snapshot, choice, rows)


def _word(key: str, title: str, *lines: str) -> Block:
    return Block(key, title, before=[(line, DIM) for line in lines], wide=True)


# --- speed and memory ----------------------------------------------------------------------------


def _overview(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    best = data.headline(rows)
    return [
        Block(
            "summary",
            "The ladder",
            table=Table(_SPEED_HEADER, [_speed_cells(row) for row in rows], texts=2),
            before=[(best, GOOD)] if best else [],
            after=[*data.doubts(rows), *without_interval(rows),
                   *data.sources(snapshot, choice.group, rows)],
            wide=True,
        ),
        Block("throughput", "Throughput", figures.throughput(rows)),
        Block("speedup", "Speed-up over V1, with its 95% interval", figures.speedups(rows)),
        Block("phases", "A step and its parts", figures.phases(rows),
              after=["The parts come from a pass of their own, so that measuring them does not "
                     "slow the whole step, which the mark shows."]),
        Block("memory", "Peak memory", figures.memory(rows)),
    ]  # fmt: skip


_SPEED_HEADER = (
    "version", "proof", "tokens/s", "step ms", "forward", "backward", "optimizer",
    "speed-up [95%]", "peak MB", "TFLOP/s", "of peak",
)  # fmt: skip


def _speed_cells(row: Row) -> list[Cell | str]:
    spread = "" if row.step_spread is None else f" ±{row.step_spread / 2:.1%}"
    reduction = row.memory_reduction if row.verdict() != "baseline" else None
    return [
        _version(row),
        _gate(row),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.step_ms, ",.2f") + spread,
        _number(row.forward_ms, ",.2f"),
        _number(row.backward_ms, ",.2f"),
        _number(row.optimizer_ms, ",.2f"),
        _verdict(row),
        _number(row.peak_memory_mb, ",.0f")
        + ("" if reduction is None else f" ({-reduction:+.0%})"),
        _number(row.tflops, ",.3g"),
        "-" if row.peak_share is None else f"{row.peak_share:.1%}",
    ]


def _version(row: Row) -> Cell:
    return Cell(printable(row.label), f"version {row.version}", ALL[row.version].title)


def _verdict(row: Row) -> Cell:
    if row.failed:
        words = f"{row.refused.upper()} RED" if row.refused else "FAILED"
        return Cell(words, BAD, printable(row.note))
    slower = row.speedup_ci is not None and row.speedup_ci[1] < 1
    faster = row.speedup_ci is not None and row.speedup_ci[0] > 1
    return Cell(row.verdict(), BAD if slower else GOOD if faster else "", printable(row.note))


def _gate(row: Row) -> Cell:
    told = row.proof(red="RED").replace("pass", "green")
    look = {"RED": BAD, "green": GOOD}.get(told.removesuffix(" *"), WARN)
    if not row.gate_is_smaller or row.gate_shape is None:
        return Cell(told, look)
    batch_size, seq_len = row.gate_shape
    return Cell(told, look, f"the gate ran on fewer tokens than the run: {batch_size} x {seq_len}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
    cells = [_proof_cells(snapshot, choice.group, row) for row in rows]
    table = Table(_PROOF_HEADER, cells, texts=3)
    wrong = [(f"{r.label}: {printable(text)}", BAD) for r in rows for text in r.plausibility]
    fine = [("No figure contradicts the physics.", GOOD)] if any(r.step_ms for r in rows) else []
    return [
        *blocks,
        Block("gate", "The gate: the same model as V1?", table=table, after=data.doubts(rows),
              wide=True),
        Block("plausibility", "Plausibility: could a machine give these figures?",
              before=wrong or fine, wide=True),
    ]  # fmt: skip


_PROOF_HEADER = (
    "version", "proof", "closest to its limit", "error", "allowed", "tensors with gradient",
    "parameters", "loss",
)  # fmt: skip


def _proof_cells(snapshot: Snapshot, group: Group, row: Row) -> list[Cell | str]:
    stored = snapshot.stored(group, row)
    gated = next((s for s in stored if s.run.parity.status != "not run"), stored[0])
    what, error, allowed = _closest(gated.run.parity)
    gradients = f"{row.tensors_with_grad}/{row.tensors_total}" if row.tensors_total else "-"
    severed = row.tensors_with_grad != row.tensors_total
    loss = f"{_number(row.loss_first, '.3f')} → {_number(row.loss_last, '.3f')}"
    gate = _gate(row)
    refused = next((s.run.refused for s in stored if s.run.refused), ("", []))
    failures = printable("; ".join(refused[1]))
    return [
        _version(row),
        Cell(gate.text, gate.look, failures or gate.title),
        Cell(display_name(what, 34), DIM, printable(what)),
        error,
        allowed,
        Cell(gradients, BAD if severed else ""),
        _number(row.params_total, ",d"),
        loss if row.loss_first is not None else "-",
    ]


def _closest(parity: Parity) -> tuple[str, str, str]:
    """The measure of the gate that uses most of what it is allowed, its error and its limit."""
    closest = parity.closest()
    if closest is None:
        return "-", "-", "-"
    name, error, allowed = closest
    return name, f"{error:.1e}" if math.isfinite(error) else "not finite", f"{allowed:.1e}"


# --- the ladder, step by step --------------------------------------------------------------------


def _ladder(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    rungs = [row for row in rows if not row.variant and row.speedup is not None]
    left_out = [row.label for row in rows if not row.variant and row.speedup is None]
    after = [f"Left out, for want of a speed-up: {', '.join(left_out)}."] if left_out else []
    if len(rungs) < 2 or rungs[0].version != BASELINE:
        blocks = [_word("waterfall", "What each rung saves", "It needs V1 and another version of "
                        "the same session, both with a green gate.", *after)]  # fmt: skip
    else:
        blocks = [
            Block("waterfall", "What each rung saves", figures.waterfall(rungs), after=after,
                  wide=True),
            Block("savings", "Where it is saved: each version's parts against V1's",
                  figures.savings(rungs[0], rungs[1:]), wide=True),
        ]  # fmt: skip
    return blocks + _switches(snapshot.rows(choice.group))


def _switches(rows: list[Row]) -> list[Block]:
    """Of all versions that ran with single parts switched off in the session of the whole one,
    whether or not those are chosen."""
    blocks = []
    for whole in rows:
        single = [
            row
            for row in rows
            if row.version == whole.version
            and row.variant.startswith("no-")
            and " " not in row.variant
            and row.session == whole.session
            and row.step_ms
            and row.parity == "pass"
        ]
        if not whole.variant and whole.step_ms and single:
            name = whole.label.upper()
            blocks.append(
                Block(f"switches-{whole.version}", f"What each switch of {name} is worth",
                      figures.switches(whole, single), wide=True)
            )  # fmt: skip
    return blocks


# --- sweeps --------------------------------------------------------------------------------------


def _sweeps(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    blocks: list[Block] = []
    for axis, name in SWEPT.items():
        found = [(row, data.sweep(snapshot, choice.group, row.label, axis)) for row in rows]
        lines = [(row, points) for row, points in found if len(points) > 1]
        if not lines:
            continue
        panels: list[tuple[str, str, Callable[[data.SweepPoint], float | None]]] = [
            ("step time", "ms a step", lambda point: point.step_ms),
            ("throughput", "tokens a second", lambda point: point.tokens_per_s),
            ("memory", "peak memory, MB", lambda point: point.peak_mb),
        ]
        after = ["Open marks: no gate was run there."] if _any_unproven(lines) else []
        blocks += [
            Block(f"{axis}-{what.split()[0]}", f"{what.capitalize()} over {name}",
                  figures.sweep(lines, axis, title, value), after=after)
            for what, title, value in panels
        ]  # fmt: skip
    return blocks or [
        _word("sweeps", "No sweep goes through this size", "A sweep is two or more runs of one "
              "version that differ in the batch size, the sequence length or the hidden dimension "
              "alone, as compare_versions.py --sweep makes them.")
    ]  # fmt: skip


def _any_unproven(lines: Sequence[tuple[Row, Sequence[data.SweepPoint]]]) -> bool:
    return any(not point.proven for _, points in lines for point in points)


# --- roofline ------------------------------------------------------------------------------------


def _roofline(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    stored = [s for row in rows if row.step_ms for s in snapshot.stored(choice.group, row)]
    blocks = []
    if stored:
        paths = [s.path for s in stored]
        blocks.append(_one_roofline("steps", "Whole steps and their parts", snapshot, paths))
    profile = snapshot.profiles_of(choice.device).get(choice.profile)
    if profile:
        title = f"Kernels of {data.profile_label(profile)}"
        blocks.append(_one_roofline("kernels", title, snapshot, [profile.folder]))
    for index, benchmark in enumerate(snapshot.benchmarks):
        if printable(benchmark.device) == choice.device:
            title = "V3's kernels, each alone in a benchmark"
            blocks.append(_one_roofline(f"benchmark-{index}", title, snapshot, [benchmark.path]))
    return blocks or [_word("roofline", "Roofline", "No timed run is chosen.")]


def _one_roofline(key: str, title: str, snapshot: Snapshot, paths: Sequence[Path]) -> Block:
    try:
        roofline = snapshot.roofline(paths)
    except WorkshopError as error:
        return _word(f"roofline-{key}", title, printable(str(error)))
    red = [(printable(sentence), BAD) for sentence in flags(roofline)]
    said = [printable(s) for s in (*sentences(roofline, SAID), *roofline.notes)]
    return Block(
        f"roofline-{key}",
        title,
        figures.fit_for_both_themes(roofline_figures.plotly_figure(roofline)),
        _points(roofline),
        before=red,
        after=said,
        wide=True,
    )


def _points(roofline: Roofline) -> Table:
    """The figure's numbers, and what they stand for."""
    header, *rows = roofline_figures.table_cells(roofline)[: HOT + 1]
    cells: list[list[Cell | str]] = [
        [number, Cell(printable(name), "name"), *rest] for number, name, *rest in rows
    ]
    if more := len(roofline.points) - HOT:
        cells += [["", Cell(f"{more:,} more", DIM)]] if more > 0 else []
    return Table(header, cells, texts=3)


# --- kernels -------------------------------------------------------------------------------------


def _kernels(snapshot: Snapshot, choice: Choice, rows: list[Row]) -> list[Block]:
    profile = snapshot.profiles.get(choice.profile)
    if profile is None:
        return [_word("kernels", "No profile yet", "make profile runs every profiler that this "
                      "machine has on every version.")]  # fmt: skip
    alike = [
        (data.profile_name(other), other.table)
        for other in snapshot.profiles.values()
        if _comparable(other) == _comparable(profile)
    ]
    title = f"Where the time goes: {profile.tool}"
    return [
        Block(
            "categories",
            title,
            figures.categories(alike),
            wide=True,
        ),
        Block(
            "hot",
            f"Hot list of {data.profile_label(profile)}",
            table=_hot_list(profile.table),
            after=[printable(line) for line in (*summary(profile.table), *profile.table.warnings)],
            wide=True,
        ),
    ]


def _comparable(profile: Profile) -> tuple[object, ...]:
    """Profiles of which this is the same may stand side by side."""
    group = data.group_of(profile.run) if profile.run else None
    return (group, profile.tool, data.device_of(profile), profile.table.what)


def _hot_list(table: KernelTable) -> Table:
    shown = table.kernels[:HOT]
    rows: list[list[Cell | str]] = [
        [
            Cell(display_name(kernel.name, 90), "name", printable(kernel.name[:2000])),
            Cell(kernel.category, f"category {kernel.category}"),
            f"{kernel.calls:,}",
            f"{kernel.total_ns / 1e6:,.3f}",
            f"{kernel.mean_ns / 1e3:,.1f}",
            Cell(f"{table.share(kernel):.1%}", bar=table.share(kernel)),
        ]
        for kernel in shown
    ]
    rest = table.kernels[HOT:]
    if rest:
        total = sum(kernel.total_ns for kernel in rest)
        calls = f"{sum(kernel.calls for kernel in rest):,}"
        share = f"{total / table.total_ns:.1%}" if table.total_ns else "-"
        more = Cell(f"{len(rest):,} more", DIM)
        rows.append([more, "", calls, f"{total / 1e6:,.3f}", "", share])
    return Table((table.what, "category", "calls", "total ms", "mean µs", "share"), rows, texts=2)


VIEWS: dict[str, Callable[[Snapshot, Choice, list[Row]], list[Block]]] = {
    "Speed and memory": _overview,
    "Same model?": _proof,
    "Ladder": _ladder,
    "Sweeps": _sweeps,
    ROOFLINE: _roofline,
    KERNELS: _kernels,
}
