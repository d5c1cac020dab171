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
    blocks = [*map(_block, scaling.measured(runs).values()), *pictures]
    return {README: {"scaling": "\n\n".join(blocks) or lab_table.not_measured(COMMAND)}}


def _block(sessions: list[list[LabRow]]) -> str:
    """The tables of one device."""
    rows = [row for session in sessions for row in session]
    sources = dict.fromkeys(map(lab_table.source, sessions))
    return "\n\n".join([*sources, tables.markdown(scaling.tables_of(rows), "####")])
