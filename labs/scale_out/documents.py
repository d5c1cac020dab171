"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections.abc import Iterable
from pathlib import Path

from labs.scale_out import collectives, scaling
from workshop import tables
from workshop.labs import LabRun
from workshop.show import lab_table

README = Path(__file__).with_name("README.md")
COMMAND = "python measure.py --jobs 2"


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """The text between the markers, from runs of any labs."""
    found = sorted(scaling.sessions(runs).items())
    shown = [scaling.summary(*its) for its in found]
    rows = [row for _, sessions in found for session in sessions for row in session]
    shown = [table for table in (*shown, collectives.table(rows)) if table.lines]
    if not shown:
        return {README: {"scaling": lab_table.not_measured(COMMAND)}}
    return {README: {"scaling": tables.markdown(shown, "####")}}
