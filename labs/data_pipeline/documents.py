"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from labs.data_pipeline import measure_pipeline, rungs
from labs.data_pipeline.measure_rung import LAB
from workshop import labs, tables
from workshop.labs import LabRow, LabRun
from workshop.show import lab_table
from workshop.tables import escape, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure_pipeline.py --steps all"
_COLUMNS: dict[str, Callable[[LabRow], str]] = {
    "": lambda row: row.label,
    "images/s": lab_table.rate,
    "ms a step": lambda row: number(row.step_ms, ",.2f"),
    "over the first": lab_table.speedup_text,
    "verdict": lab_table.verdict,
}


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """Markdown for the README's markers, from the runs of any labs."""
    groups = labs.newest(run for run in runs if run.lab == LAB and run.baseline)
    blocks = [
        _block([replace(row, of="") for row in own])  # its title says of what
        for rows in groups
        for _, own in groupby(sorted(rows, key=rungs.place), lambda row: row.first.subject)
    ]
    return {README: {"pipeline": "\n\n".join(blocks) or lab_table.not_measured(COMMAND)}}


def _block(rows: Sequence[LabRow]) -> str:
    title = escape(lab_table.title(rows))
    speed = lab_table.columns(rows, _COLUMNS)
    parts = tables.markdown([measure_pipeline.rates_table(rows)])
    return f"{title}\n\n{lab_table.source(rows)}\n\n{speed}\n\n{parts}"
