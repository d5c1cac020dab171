"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections.abc import Iterable
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
    runs = list(runs)
    of_device = {device: _flat(lists) for device, lists in scaling.measured(runs).items()}
    of_session = (
        scaling.measured(run for run in runs if run.session == session)
        for session in sorted({run.session for run in runs})
    )
    found = [(device, _flat(lists)) for its in of_session for device, lists in its.items()]
    blocks = [
        _block(rows, of_device[device])
        for device, rows in sorted(found, key=lambda session: session[0])
    ]
    text = "\n\n".join([*blocks, *pictures]) or lab_table.not_measured(COMMAND)
    return {README: {"scaling": text}}


def _block(rows: list[LabRow], of_device: list[LabRow]) -> str:
    """The tables of a session, whose rows are compared with each other alone: another session may
    have run on another machine."""
    trained = [row for row in rows if row.first.unit == "tokens"]
    text = tables.markdown(scaling.tables_of(rows, of_device), "####")
    return f"{lab_table.source(trained or rows)}\n\n{text}"


def _flat(lists: Iterable[list[LabRow]]) -> list[LabRow]:
    return [row for rows in lists for row in rows]
