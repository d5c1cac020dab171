"""Waterfalls in words: tables for the terminal and for Markdown, JSON, CSV."""

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Sequence
from typing import Any

from workshop import results
from workshop.compare import comparison
from workshop.compare.markdown import escape, escape_block, table_line
from workshop.compare.waterfall import Step, Waterfall
from workshop.errors import printable
from workshop.run.interpreter import NOT_COMPARABLE

SCHEMA_VERSION = 1
HEADER = ["change", "code", "step ms", "over the last", "over V1 fp32", "proof", "peak MB"]
SAME = "~1"
LEGEND = (
    f"over the last: times as fast as the last rung with a time, with the 95% interval; {SAME}: no "
    "significant difference"
)


def ratio(value: float | None, interval: Sequence[float] | None) -> str:
    """As in "1.80x [1.75, 1.84]"; "1.80x (1 process)" without interval; a dash where there is no
    ratio."""
    if value is None:
        return "-"
    if interval is None:
        return f"{value:.2f}x ({comparison.ONE_PROCESS})"
    low, high = interval
    told = SAME if low <= 1 <= high else f"{value:.2f}x"
    return f"{told} [{low:.2f}, {high:.2f}]"


def cells(step: Step) -> list[str]:
    """A line of the table."""
    row = step.row
    if row is None:
        return [step.rung.title, step.rung.version, "-", "-", "-", "-", "-"]
    over_v1 = "baseline" if step.rung.is_first else ratio(row.speedup, row.speedup_ci)
    memory = "-" if row.peak_memory_mb is None else f"{row.peak_memory_mb:,.0f}"
    return [
        step.rung.title,
        step.rung.version,
        f"{step.step_ms:,.2f}" if step.step_ms is not None else "-",
        ratio(step.gain, step.gain_ci),
        over_v1 if step.timed else "-",
        row.proof(red="RED"),
        memory,
    ]


def notes(waterfall: Waterfall) -> list[str]:
    """What the figures alone would not say."""
    titles: dict[str, list[str]] = {}
    for step in waterfall.steps:
        titles.setdefault(step.note, []).append(step.rung.title)
    lines = [f"{', '.join(own)}: {note}" for note, own in titles.items() if note]
    lines += _gaps(waterfall)
    lines += comparison.proof_notes(step.row for step in waterfall.steps if step.row)
    for step in waterfall.steps:
        lines += [f"IMPLAUSIBLE: {said}" for said in (step.row.plausibility if step.row else ())]
    return list(map(printable, lines))


def _gaps(waterfall: Waterfall) -> list[str]:
    """Where a rung is not compared with the one above it, which has no time."""
    steps = waterfall.steps
    return [
        f"{step.rung.title}: over {step.before}, since {above.rung.title} has no time"
        for above, step in itertools.pairwise(steps)
        if step.before is not None and not above.timed
    ]


def show(waterfalls: list[Waterfall], form: str) -> None:
    if form == "json":
        print(json.dumps(as_json(waterfalls), indent=1, allow_nan=False))
    elif form == "csv":
        print(as_csv(waterfalls), end="")
    elif form == "markdown":
        print(as_markdown(waterfalls))
    else:
        _show_tables(waterfalls)


def _show_tables(waterfalls: list[Waterfall]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=120, highlight=False, markup=False)
    for waterfall in waterfalls:
        table = Table(
            title=waterfall.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        for index, name in enumerate(HEADER):
            table.add_column(name, justify="left" if index < 2 else "right")
        for step in waterfall.steps:
            table.add_row(*cells(step), style=_style(step))
        console.print(table)
        for line in (*notes(waterfall), LEGEND):
            console.print(line, markup=False)


def _style(step: Step) -> str | None:
    if step.row is not None and step.row.failed:
        return "red"
    return None if step.timed else "dim"


def as_markdown(waterfalls: list[Waterfall], heading: str = "###") -> str:
    parts = []
    for waterfall in waterfalls:
        parts += [f"{heading} {escape(waterfall.title)}", ""]
        parts.append(table_line(map(escape, HEADER)))
        parts.append("|" + " --- |" * 2 + " ---: |" * (len(HEADER) - 2))
        parts += [table_line(map(escape, cells(step))) for step in waterfall.steps]
        lines = (*notes(waterfall), LEGEND)
        parts += ["", *(f"- {escape_block(line)}" for line in lines), ""]
    return "\n".join(parts).rstrip()


def as_json(waterfalls: list[Waterfall]) -> dict[str, Any]:
    """Of each waterfall its rungs, from V1 on; null where nothing was measured."""
    told = []
    for waterfall in waterfalls:
        content = {f.name: getattr(waterfall, f.name) for f in dataclasses.fields(Waterfall)}
        content["steps"] = [_record(step) for step in waterfall.steps]
        told.append(content)
    return {"schema_version": SCHEMA_VERSION, "created": results.now(), "waterfalls": told}


def _record(step: Step) -> dict[str, Any]:
    row = step.row
    record: dict[str, Any] = {
        "change": step.rung.title,
        "version": step.rung.version,
        "variant": row.variant if row else None,
        "precision": step.rung.precision,
        "status": row.status if row else "not run",
        "parity": row.parity if row else "not run",
        "note": step.note,
        "runs": row.runs if row else 0,
        "step_ms": step.step_ms,
        "step_spread": row.step_spread if row and step.timed else None,
        "before": step.before,
        "saved_ms": step.saved_ms,
        "gain": step.gain,
        "gain_ci": list(step.gain_ci) if step.gain_ci else None,
        "speedup": row.speedup if row and step.timed else None,
        "speedup_ci": row.speedup_ci if row and step.timed else None,
        "peak_memory_mb": row.peak_memory_mb if row else None,
        "plausibility": row.plausibility if row else [],
    }
    return record


def as_csv(waterfalls: list[Waterfall]) -> str:
    """A line a rung, with the waterfall it is of."""
    of_all = [f.name for f in dataclasses.fields(Waterfall) if f.name != "steps"]
    lines = [
        {name: getattr(waterfall, name) for name in of_all} | _record(step)
        for waterfall in waterfalls
        for step in waterfall.steps
    ]
    for line in lines:
        del line["plausibility"]
        line |= {name: printable(text) for name, text in line.items() if isinstance(text, str)}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else of_all)
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def in_place_of_time(step: Step) -> str:
    """Why a rung has no bar, in a few words."""
    if step.row is None:
        return step.note
    if step.row.refused:
        return f"{step.row.refused.upper()} RED"
    if step.row.status == "interpreted":
        return NOT_COMPARABLE
    return {"timed": "gate not run"}.get(step.row.status, step.row.status)
