"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from labs.scale_out import scaling
from labs.scale_out.request import LAB
from workshop.compare import lab_table, tables
from workshop.labs import LabRow, LabRun
from workshop.versions import ROOT

README = Path(__file__).with_name("README.md")
COMMAND = "python measure.py --jobs 2"
PICTURES = {
    "collectives": "Bus bandwidth of the collectives by size of the message",
    "prediction": "Efficiency of weak scaling: measured, and predicted up to 1,024 GPUs",
}
"""Pictures that measure.py draws beside its result files."""


def parts(runs: Iterable[LabRun], reference: Path) -> dict[Path, dict[str, str]]:
    """The text between the markers, from runs of any labs and the pictures below `reference`."""
    pictures = [
        f"![{title}](../../{path.relative_to(ROOT).as_posix()})"
        for name, title in PICTURES.items()
        for path in sorted(reference.glob(f"*/{LAB}/{name}.png"))
    ]
    sessions = [
        (_source(rows), scaling.tables_of(rows, [row for its in of_device for row in its]))
        for _, of_device in sorted(scaling.sessions(runs).items())
        for rows in of_device
    ]
    notes = Counter(note for _, its in sessions for table in its for note in table.notes)
    common = [note for note, tables_with_it in notes.items() if tables_with_it > 1]
    blocks = [
        f"{source}\n\n{tables.markdown([_without(table, common) for table in its], '####')}"
        for source, its in sessions
    ]
    legend = "\n".join(["In these tables:", "", *(f"- {note}" for note in common)])
    text = "\n\n".join([*blocks, *[legend] * bool(common), *pictures])
    return {README: {"scaling": text or lab_table.not_measured(COMMAND)}}


def _source(rows: list[LabRow]) -> str:
    """Where a session's tables come from. Its rows are compared with each other alone: another
    session may have run on another machine."""
    trained = [row for row in rows if row.first.unit == "tokens"]
    return lab_table.source(trained or rows)


def _without(table: tables.Table, notes: Iterable[str]) -> tables.Table:
    return replace(table, notes=[note for note in table.notes if note not in notes])
