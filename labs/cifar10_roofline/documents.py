"""The figures in the lab's README, from result files: `make docs` writes those of
results/reference/ between its markers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from labs.cifar10_roofline.loop import LAB
from workshop import labs
from workshop.labs import LabRow, LabRun
from workshop.show import lab_table
from workshop.tables import Markdown, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure_table.py --jobs 9"
_COLUMNS: dict[str, Callable[[LabRow], str]] = {
    "": lambda row: row.label,
    "images/s": lab_table.rate,
    "ms a step": lambda row: number(row.step_ms, ",.2f"),
    "TFLOP/s": lambda row: number(row.tflops, ",.1f"),
    "of ceiling": lambda row: number(row.ceiling_share, ".1%"),
    Markdown("over `--amp --workers 4`"): lab_table.speedup_text,
    "verdict": lab_table.verdict,
}


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """Markdown for the README's markers, from the runs of any labs."""
    groups = labs.newest(run for run in runs if run.lab == LAB and run.baseline)
    blocks = [
        f"**{labs.shared_subject(rows)}.** {lab_table.source(rows)}\n\n{_table(rows)}"
        for rows in groups
    ]
    return {README: {"training": "\n\n".join(blocks) or lab_table.not_measured(COMMAND)}}


def _table(rows: Sequence[LabRow]) -> str:
    """Rows of each network and batch: the usual training first, then the slowest to the fastest."""
    subjects = list(dict.fromkeys(row.of for row in rows))
    ordered = sorted(
        rows,
        key=lambda row: (subjects.index(row.of), not row.is_baseline, row.units_per_s or 0.0),
    )
    return lab_table.columns(ordered, _COLUMNS)
