"""Sweeps in words: tables for the terminal and for Markdown, JSON, CSV."""

import csv
import dataclasses
import io
import json
from typing import Any, Literal

from workshop import results
from workshop.compare import comparison
from workshop.compare.markdown import escape, escape_block, table_line
from workshop.compare.sweep import Curve, Point, Sweep
from workshop.errors import printable

SCHEMA_VERSION = 1
SAME = "~1"
LEGEND = f"speed-up over V1 at the same size; {SAME}: no significant difference"
_TEXTS = 2
"""Columns, the first ones, that hold no figures."""
_VERSION, _SPEED_UP = 1, 4
_MOST_OF_LABEL = 20
"""Characters of a version with its switches that no other column takes from it."""


def header(sweep: Sweep) -> list[str]:
    return [sweep.axis, "version", "step ms", "tokens/s", "speed-up [95%]", "peak MB", "proof"]


def lines(sweep: Sweep) -> list[tuple[str, Point]]:
    """The points, size by size, each with its version's label."""
    sizes = sorted({point.size for curve in sweep.curves for point in curve.points})
    return [
        (curve.label, point)
        for size in sizes
        for curve in sweep.curves
        for point in curve.points
        if point.size == size
    ]


def cells(label: str, point: Point) -> list[str]:
    """A line of the table."""
    row = point.row
    if row.step_ms is None:
        return [
            f"{point.size:,}",
            label,
            in_place_of_time(point),
            "-",
            "-",
            "-",
            row.proof(red="RED"),
        ]
    verdict = row.verdict().replace("no significant difference", SAME)
    memory = "-" if row.peak_memory_mb is None else f"{row.peak_memory_mb:,.0f}"
    figures = [f"{row.step_ms:,.2f}", f"{row.tokens_per_s:,.0f}", verdict, memory]
    return [f"{point.size:,}", label, *figures, row.proof(red="RED")]


def in_place_of_time(point: Point) -> str:
    """Why a point has no time, in a few words."""
    if point.out_of_memory:
        return "out of memory"
    if point.predicted_mb is not None:
        return "not tried"
    return f"{point.row.refused.upper()} RED" if point.row.refused else point.row.status


def limits(sweep: Sweep) -> list[str]:
    """Where the memory of each version ends, in sentences."""
    return [f"{curve.label}: {_limit(curve)}" for curve in sweep.curves]


def _limit(curve: Curve) -> str:
    if any(not point.ran and not point.told_by_memory for point in curve.points):
        fits = "no size ran" if curve.fits is None else f"ran up to {curve.fits:,}"
    elif curve.fits is None:
        fits = "no size fits"
    elif curve.measured_limit is None and curve.predicted_limit is None:
        fits = f"all sizes fit, up to {curve.fits:,}"
    else:
        fits = f"fits up to {curve.fits:,}"
    told = []
    if curve.measured_limit is not None:
        told.append(f"out of memory at {curve.measured_limit:,} (measured)")
    if curve.predicted_limit is not None:
        point = next(p for p in curve.points if p.size == curve.predicted_limit)
        told.append(
            f"{point.size:,} would take {point.predicted_mb:,.0f} MB of {point.free_mb:,.0f} "
            "(predicted, not tried)"
        )
    if curve.predicted_end is not None:
        told.append(f"memory predicted to end near {_rounded(curve.predicted_end):,}")
    return "; ".join([fits, *told])


def _rounded(size: float) -> int:
    """To two digits: a prediction has no more."""
    return int(float(f"{size:.2g}"))


def notes(sweep: Sweep) -> list[str]:
    """Why a version failed or was skipped, if not for want of memory, where the gate was a smaller
    one, and implausible figures. That there is no speed-up where V1 did not run is seen."""
    told = comparison.proof_notes(point.row for _, point in lines(sweep))
    for (label, note), sizes in _reasons(sweep).items():
        told.append(f"{label} at {', '.join(sizes)}: {note}")
    for label, point in lines(sweep):
        where = f"IMPLAUSIBLE, {label} at {point.size:,}"
        told += [f"{where}: {sentence}" for sentence in point.row.plausibility]
    return [printable(line) for line in told]


def _reasons(sweep: Sweep) -> dict[tuple[str, str], list[str]]:
    """By version and reason, the sizes that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, point in lines(sweep):
        note = point.row.note
        if note and not point.told_by_memory and (point.row.step_ms is None or "gate" in note):
            found.setdefault((label, note), []).append(f"{point.size:,}")
    return found


def show(sweeps: list[Sweep], form: str) -> None:
    if form == "json":
        print(json.dumps(as_json(sweeps), indent=1, allow_nan=False))
    elif form == "csv":
        print(as_csv(sweeps), end="")
    elif form == "markdown":
        print(as_markdown(sweeps))
    else:
        _show_tables(sweeps)


def _show_tables(sweeps: list[Sweep]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=100, highlight=False, markup=False)
    for sweep in sweeps:
        table = Table(
            title=sweep.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0), pad_edge=False,
        )  # fmt: skip
        for index, name in enumerate(header(sweep)):
            justify: Literal["left", "right"] = "left" if index == _VERSION else "right"
            table.add_column(name, justify=justify, no_wrap=index != _SPEED_UP)
        table.columns[_VERSION].min_width = min(
            _MOST_OF_LABEL, max(len(curve.label) for curve in sweep.curves)
        )
        before = None
        for label, point in lines(sweep):
            if before not in (None, point.size):
                table.add_section()
            before = point.size
            dim = "dim" if point.row.step_ms is None else None
            table.add_row(*cells(label, point), style="red" if point.failed else dim)
        console.print(table)
        for line in (*limits(sweep), *notes(sweep), LEGEND):
            console.print(line, markup=False)


def as_markdown(sweeps: list[Sweep], heading: str = "###") -> str:
    parts = []
    for sweep in sweeps:
        names = header(sweep)
        parts += [f"{heading} {escape(sweep.title)}", "", table_line(map(escape, names))]
        parts.append("| ---: | --- |" + " ---: |" * (len(names) - _TEXTS))
        parts += [table_line(map(escape, cells(*line))) for line in lines(sweep)]
        told = (*limits(sweep), *notes(sweep), LEGEND)
        parts += ["", *(f"- {escape_block(line)}" for line in told), ""]
    return "\n".join(parts).rstrip()


def as_json(sweeps: list[Sweep]) -> dict[str, Any]:
    """Of each sweep its curves; null where nothing was measured."""
    told = []
    for sweep in sweeps:
        content = {f.name: getattr(sweep, f.name) for f in dataclasses.fields(Sweep)}
        content["curves"] = [_curve(curve) for curve in sweep.curves]
        told.append(content)
    return {"schema_version": SCHEMA_VERSION, "created": results.now(), "sweeps": told}


def _curve(curve: Curve) -> dict[str, Any]:
    content = {f.name: getattr(curve, f.name) for f in dataclasses.fields(Curve)}
    content["points"] = [_point(point) for point in curve.points]
    return content


def _point(point: Point) -> dict[str, Any]:
    row = point.row
    figures = (
        "status", "parity", "note", "runs", "step_ms", "step_spread", "tokens_per_s", "speedup",
        "speedup_ci", "peak_memory_mb",
    )  # fmt: skip
    batch_size, seq_len = row.gate_shape or (None, None)
    return {
        "size": point.size,
        **{name: getattr(row, name) for name in figures},
        "out_of_memory": point.out_of_memory,
        "predicted_mb": point.predicted_mb,
        "gate_batch_size": batch_size,
        "gate_seq_len": seq_len,
    }


def as_csv(sweeps: list[Sweep]) -> str:
    """A line a point, with the sweep and the version that it is of."""
    of_sweep = [f.name for f in dataclasses.fields(Sweep) if f.name != "curves"]
    told = [
        {
            **{name: getattr(sweep, name) for name in of_sweep},
            "version": curve.label,
            **_point(point),
        }
        for sweep in sweeps
        for curve in sweep.curves
        for point in curve.points
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(told[0]) if told else of_sweep)
    writer.writeheader()
    for line in told:
        texts = {name: printable(value) for name, value in line.items() if isinstance(value, str)}
        writer.writerow(line | texts)
    return text.getvalue()
