"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between their markers."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from labs.text_generation.lm_gen import LAB
from labs.text_generation.measure_engines import compile_s, ladder
from workshop import labs
from workshop.labs import LabRow, LabRun
from workshop.show import lab_table
from workshop.tables import Markdown, escape, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure_engines.py --jobs 9"
_COLUMNS: dict[str, Callable[[LabRow], str]] = {
    "": lambda row: row.first.variant,
    "ms a token": lambda row: number(row.step_ms, ",.3f"),
    "floor": lambda row: number(row.metric("floor_ms"), ",.3f"),
    Markdown("over `hf`"): lab_table.speedup_text,
    "first token, ms": lambda row: number(row.metric("first_token_ms"), ",.2f"),
    "TFLOP/s until it": lambda row: number(row.metric("prefill_tflops"), ",.3g"),
    "compiled, s": lambda row: number(compile_s(row), ",.0f"),
    "verdict": lab_table.verdict,
}


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """The texts between the markers of the lab's README, from the runs of any labs."""
    groups = labs.newest(run for run in runs if run.lab == LAB and run.baseline)
    blocks = "\n\n".join(map(_block, map(ladder, groups)))
    return {README: {"engines": blocks or lab_table.not_measured(COMMAND)}}


def _block(rows: Sequence[LabRow]) -> str:
    """A table for each batch size and length."""
    found = groupby(rows, key=lambda row: row.first.subject)
    tables = [f"{escape(subject)}:\n\n{lab_table.columns(own, _COLUMNS)}" for subject, own in found]
    return "\n\n".join([lab_table.source(rows), *tables, *_skipped(rows)])


def _skipped(rows: Sequence[LabRow]) -> list[str]:
    """Why rows have no time, each reason once."""
    reasons = dict.fromkeys(f"- {row.first.variant}: {row.note}" for row in rows if row.note)
    return ["\n".join(map(escape, reasons))] if reasons else []
