"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from labs.data_pipeline import measure_pipeline, rungs
from labs.data_pipeline.measure_rung import LAB
from workshop import labs, tables
from workshop.labs import LabRow, LabRun
from workshop.show import lab_table
from workshop.tables import Line, Table, escape, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure_pipeline.py --steps all"
_HEADER = ("", "images/s", "ms a step", "over the first", "verdict")


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
    parts = tables.markdown([measure_pipeline.rates_table(rows)])
    return f"{title}\n\n{lab_table.source(rows)}\n\n{_table(rows)}\n\n{parts}"


def _table(rows: Sequence[LabRow]) -> str:
    lines = [
        Line([row.label, number(row.units_per_s, ",.0f"), number(row.step_ms, ",.2f"),
         lab_table.speedup_text(row), row.verdict])
        for row in rows
    ]  # fmt: skip
    return tables.markdown_body(Table("", _HEADER, lines, left=(0, 4)))
