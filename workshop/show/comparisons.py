"""Comparisons, waterfalls and sweeps as tables, and as records for JSON and CSV."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from workshop.compare import rows
from workshop.compare.rows import Row, ratio, ratio_fields
from workshop.compare.sweep import Curve, Point, Sweep
from workshop.compare.waterfall import Step, Waterfall
from workshop.errors import printable
from workshop.results import FAIL
from workshop.run import precision
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.tables import SAME, Line, Report, Table, number

# --- the rows of a comparison --------------------------------------------------------------------

SPEED_HEADER = ("version", "samples/s", "tokens/s", "step ms", "forward", "backward", "optimizer",
                "speed-up [95%]")  # fmt: skip
PROOF_HEADER = ("version", "verdict", "gradients", "loss", "peak MB", "memory", "TFLOP/s",
                "of peak")  # fmt: skip
_STYLES = {"failed": "red", "skipped": "dim"}


def of_rows(found: list[Row]) -> Report:
    names = [field.name for field in dataclasses.fields(Row)]
    tables = [table for group in groups(found) for table in group_tables(group)]
    return Report("rows", tables, [_row_record(row, names) for row in found])


def _row_record(row: Row, names: Iterable[str]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name in names:
        value = getattr(row, name)
        record |= ratio_fields(name, value) if name == "speedup" else {name: value}
    return record


def groups(found: Iterable[Row]) -> list[list[Row]]:
    """Rows that may be compared with each other, together."""
    by_group: dict[object, list[Row]] = {}
    for row in found:
        by_group.setdefault(row.group, []).append(row)
    return list(by_group.values())


def title(group: list[Row]) -> str:
    row = group[0]
    size = f"{row.config}: {row.batch_size} x {row.seq_len} tokens"
    return printable(f"{size}, {row.precision}, {row.device}")


def group_tables(group: list[Row]) -> list[Table]:
    """Speed, then verdict and memory."""
    steps = {row.steps for row in group if row.steps}
    styles = [_STYLES.get(row.status) for row in group]
    speed = [Line(_speed_cells(row), style) for row, style in zip(group, styles, strict=True)]
    proof = [
        Line(_proof_cells(row, differ=len(steps) > 1), style)
        for row, style in zip(group, styles, strict=True)
    ]
    notes = _row_notes(group)
    if steps:
        last = f", {max(steps)}" if len(steps) == 1 else ""
        first = "loss: in step 1, the first of the warm-up, and in the last timed step"
        caution = precision.of_losses(group[0].precision)
        notes = [f"{first}{last}", *([caution] if caution else []), *notes]
    return [
        Table(title(group), SPEED_HEADER, speed),
        Table("verdict and cost", PROOF_HEADER, proof, notes, continues=True),
    ]


def _speed_cells(row: Row) -> list[str]:
    spread = "" if row.step_spread is None else f" ±{row.step_spread / 2:.1%}"
    phases = (row.forward_ms, row.backward_ms, row.optimizer_ms)
    return [
        row.label,
        number(row.samples_per_s, ",.1f"),
        number(row.tokens_per_s, ",.0f"),
        number(row.step_ms, ",.2f") + spread,
        *(number(phase, ",.2f") for phase in phases),
        row.speedup_text(),
    ]


def _proof_cells(row: Row, differ: bool) -> list[str]:
    """`differ` says that not all rows of the table trained the same number of steps."""
    gradients = "-" if row.tensors_total is None else f"{row.tensors_with_grad}/{row.tensors_total}"
    losses = f"{number(row.loss_first, '.3f')} → {number(row.loss_last, '.3f')}"
    losses += f" in step {row.steps}" * differ
    compared = row.memory_reduction and row.speedup_text() != "baseline"
    return [
        row.label,
        row.starred_verdict,
        gradients,
        "-" if row.loss_first is None else losses,
        number(row.peak_memory_mb, ",.0f"),
        f"{-(row.memory_reduction or 0.0):+.0%}" if compared else "-",
        number(row.tflops, ",.3g"),
        number(row.peak_share, ".1%"),
    ]


def _row_notes(group: list[Row]) -> list[str]:
    """Explanations below the table, for numbers that need one."""
    lines = [f"{row.label}: {row.note}" for row in group if row.note]
    lines += [f"IMPLAUSIBLE: {sentence}" for row in group for sentence in row.plausibility]
    lines += [f"{row.label}: {_startup(row)}" for row in group if row.startup_s]
    sources = {f"{r.peak_tflops:,.3g} TFLOP/s ({r.peak_source})" for r in group if r.peak_tflops}
    if len(sources) == 1:
        lines.append(f"peak: {sources.pop()}")
    elif sources:
        lines.append("peak: the highest that a large matrix product reached in each row's session")
    lines += rows.verdict_notes(group)
    if any(row.peak_share is not None and row.peak_share > 1 for row in group):
        lines.append("more than 100% of peak: other programs ran while the peak was measured")
    return list(map(printable, lines))


def _startup(row: Row) -> str:
    """As in "startup 12.7 s (compile 12.3, capture 0.4), break-even with V1 after 1,234 steps"."""
    assert row.startup_s is not None and row.startup_least_s is not None
    parts = ", ".join(f"{name} {row.setup_s[name]:.1f}" for name in ("compile", "capture"))
    text = f"startup {row.startup_s:.1f} s ({parts})"
    if row.startup_least_s < 0.9 * row.startup_s:
        text += f", {row.startup_least_s:.1f} s with filled caches"
    if row.prepared_beside:
        others = "process" if row.prepared_beside == 1 else "processes"
        text += f", beside {row.prepared_beside} other {others}"
    endings = {
        "never": "; no break-even: its step is not shorter than V1's",
        "unknown": "; break-even unknown: no significant speed-up, or no interval",
        None: "",
    }
    return text + endings.get(row.break_even, f"; break-even with V1 {row.break_even}")


# --- waterfalls ----------------------------------------------------------------------------------

WATERFALL_HEADER = ("change", "code", "step ms", "over the last", "over V1 fp32", "verdict",
                    "peak MB")  # fmt: skip
_WATERFALL_LEGEND = (
    f"over the last: times as fast as the last rung with a time, with the 95% interval; {SAME}: no "
    "significant difference"
)


def of_waterfalls(found: Sequence[Waterfall]) -> Report:
    items = [
        _fields(one, without="steps") | {"steps": list(map(_step_record, one.steps))}
        for one in found
    ]
    return Report("waterfalls", list(map(waterfall_table, found)), items)


def waterfall_table(one: Waterfall) -> Table:
    lines = []
    for step in one.steps:
        failed = step.row is not None and step.row.failed
        lines.append(Line(_step_cells(step), "red" if failed else None if step.timed else "dim"))
    notes = [*_waterfall_notes(one), _WATERFALL_LEGEND]
    return Table(one.title, WATERFALL_HEADER, lines, notes, left=(0, 1))


def _step_cells(step: Step) -> list[str]:
    row, first = step.row, [step.rung.title, step.rung.version]
    if row is None:
        return first + ["-"] * (len(WATERFALL_HEADER) - len(first))
    over_v1 = "baseline" if step.rung.is_first else ratio(row.speedup, SAME)
    return [
        *first,
        number(step.step_ms, ",.2f"),
        ratio(step.gain, SAME),
        over_v1 if step.timed else "-",
        row.starred_verdict,
        number(row.peak_memory_mb, ",.0f"),
    ]


def _waterfall_notes(one: Waterfall) -> list[str]:
    titles: dict[str, list[str]] = {}
    for step in one.steps:
        titles.setdefault(step.note, []).append(step.rung.title)
    lines = [f"{', '.join(own)}: {note}" for note, own in titles.items() if note]
    for above, step in itertools.pairwise(one.steps):
        if step.before is not None and not above.timed:
            reason = f"since {above.rung.title} has no time"
            lines.append(f"{step.rung.title}: over {step.before}, {reason}")
    ran = [step.row for step in one.steps if step.row]
    lines += rows.verdict_notes(ran)
    lines += [f"IMPLAUSIBLE: {sentence}" for row in ran for sentence in row.plausibility]
    return list(map(printable, lines))


def _step_record(step: Step) -> dict[str, Any]:
    row, timed = step.row, step.row if step.timed else None
    return {
        "change": step.rung.title,
        "version": step.rung.version,
        "variant": row.variant if row else None,
        "precision": step.rung.precision,
        "status": row.status if row else "not run",
        "parity": row.parity if row else "not run",
        "note": step.note,
        "runs": row.runs if row else 0,
        "step_ms": step.step_ms,
        "step_spread": timed.step_spread if timed else None,
        "before": step.before,
        "saved_ms": step.saved_ms,
        **ratio_fields("gain", step.gain),
        **ratio_fields("speedup", timed.speedup if timed else None),
        "peak_memory_mb": row.peak_memory_mb if row else None,
        "plausibility": row.plausibility if row else [],
    }


def without_time(row: Row) -> str:
    """Why a row of a waterfall or a sweep has no time, in a few words."""
    words = {"interpreted": NOT_COMPARABLE, "timed": "gate not run", "failed": FAIL}
    return words.get(row.status, row.status)


# --- sweeps --------------------------------------------------------------------------------------

_SWEEP_LEGEND = f"speed-up over V1 at the same size; {SAME}: no significant difference"
_POINT_FIELDS = ("status", "parity", "note", "runs", "step_ms", "step_spread", "tokens_per_s",
                 "speedup", "peak_memory_mb")  # fmt: skip


def of_sweeps(found: Sequence[Sweep]) -> Report:
    items = []
    for one in found:
        curves = [
            _fields(curve, without="points") | {"points": list(map(_point_record, curve.points))}
            for curve in one.curves
        ]
        items.append(_fields(one, without="curves") | {"curves": curves})
    return Report("sweeps", list(map(sweep_table, found)), items)


def sweep_table(one: Sweep) -> Table:
    header = (one.axis, "version", "step ms", "tokens/s", "speed-up [95%]", "peak MB", "verdict")
    lines = []
    for label, point in sweep_points(one):
        style = "red" if point.failed else "dim" if point.row.step_ms is None else None
        lines.append(Line(_point_cells(label, point), style, section=point.size))
    notes = [*limits(one), *_sweep_notes(one), _SWEEP_LEGEND]
    return Table(one.title, header, lines, notes, left=(1,), wraps=(4,))


def sweep_points(one: Sweep) -> list[tuple[str, Point]]:
    """The points, size by size, each with its version's label."""
    points = [(curve.label, point) for curve in one.curves for point in curve.points]
    return sorted(points, key=lambda labelled: labelled[1].size)


def _point_cells(label: str, point: Point) -> list[str]:
    row, size = point.row, f"{point.size:,}"
    if row.step_ms is None:
        verdict = "-" if point.beyond_memory else row.starred_verdict
        return [size, label, point_without_time(point), "-", "-", "-", verdict]
    return [
        size,
        label,
        number(row.step_ms, ",.2f"),
        number(row.tokens_per_s, ",.0f"),
        row.speedup_text().replace("no significant difference", SAME),
        number(row.peak_memory_mb, ",.0f"),
        row.starred_verdict,
    ]


def point_without_time(point: Point) -> str:
    if point.out_of_memory:
        return "out of memory"
    return "not tried" if point.predicted_mb is not None else without_time(point.row)


def limits(one: Sweep) -> list[str]:
    """Where the memory of each version ends, in sentences."""
    return [f"{curve.label}: {_limit(curve)}" for curve in one.curves]


def _limit(curve: Curve) -> str:
    if any(not point.ran and not point.beyond_memory for point in curve.points):
        parts = ["no size ran" if curve.fits is None else f"ran up to {curve.fits:,}"]
    elif curve.fits is None:
        parts = ["no size fits"]
    elif curve.measured_limit is None and curve.predicted_limit is None:
        parts = [f"all sizes fit, up to {curve.fits:,}"]
    else:
        parts = [f"fits up to {curve.fits:,}"]
    if curve.measured_limit is not None:
        parts.append(f"out of memory at {curve.measured_limit:,} (measured)")
    if curve.predicted_limit is not None:
        point = next(p for p in curve.points if p.size == curve.predicted_limit)
        parts.append(
            f"{point.size:,} would take {point.predicted_mb:,.0f} MB of {point.free_mb:,.0f} "
            "(predicted, not tried)"
        )
    if curve.predicted_end is not None:  # two digits: a prediction has no more
        parts.append(f"memory predicted to end near {float(f'{curve.predicted_end:.2g}'):,.0f}")
    return "; ".join(parts)


def _sweep_notes(one: Sweep) -> list[str]:
    """Smaller gates, failures and skips for another reason than memory, and implausible numbers."""
    points = sweep_points(one)
    lines = rows.verdict_notes(point.row for _, point in points)
    reasons: dict[tuple[str, str], list[str]] = {}
    for label, point in points:
        note = point.row.note
        if note and not point.beyond_memory and (point.row.step_ms is None or "gate" in note):
            reasons.setdefault((label, note), []).append(f"{point.size:,}")
    lines += [f"{label} at {', '.join(own)}: {note}" for (label, note), own in reasons.items()]
    for label, point in points:
        where = f"IMPLAUSIBLE, {label} at {point.size:,}"
        lines += [f"{where}: {sentence}" for sentence in point.row.plausibility]
    return list(map(printable, lines))


def _point_record(point: Point) -> dict[str, Any]:
    batch_size, seq_len = point.row.gate_shape or (None, None)
    return {
        "size": point.size,
        **_row_record(point.row, _POINT_FIELDS),
        "out_of_memory": point.out_of_memory,
        "predicted_mb": point.predicted_mb,
        "gate_batch_size": batch_size,
        "gate_seq_len": seq_len,
    }


def _fields(of: Any, without: str) -> dict[str, Any]:
    return {f.name: getattr(of, f.name) for f in dataclasses.fields(of) if f.name != without}
