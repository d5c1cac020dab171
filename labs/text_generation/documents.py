"""The figures in the lab's README and the text at the end of the workshop's, from result files:
`make docs` writes those of results/reference/ between their markers."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from labs.text_generation.export import RECORD
from labs.text_generation.lm_gen import LAB
from labs.text_generation.measure_engines import compile_s, ladder
from workshop import labs, results
from workshop.labs import LabRow, LabRun
from workshop.show import lab_table
from workshop.tables import Line, Markdown, Table, escape, markdown_body, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure_engines.py --jobs 9"
TEXT = "tiny_llama.txt.jsonl"
"""The record that lm_gen.py wrote, in the folder of that of the model's training."""
LAST = 100
"""Steps whose mean loss is quoted."""
_HEADER = ("", "ms a token", "floor", Markdown("over `hf`"), "first token, ms", "TFLOP/s until it",
           "compiled, s", "verdict")  # fmt: skip


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """The texts between the markers of the lab's README, from the runs of any labs."""
    groups = labs.newest(run for run in runs if run.lab == LAB and run.baseline)
    blocks = "\n\n".join(map(_block, map(ladder, groups)))
    return {README: {"engines": blocks or lab_table.not_measured(COMMAND)}}


def _block(rows: Sequence[LabRow]) -> str:
    """A table for each batch size and length."""
    found = groupby(rows, key=lambda row: row.first.subject)
    tables = [f"{escape(subject)}:\n\n{_table(list(own))}" for subject, own in found]
    return "\n\n".join([lab_table.source(rows), *tables, *_skipped(rows)])


def _table(rows: Sequence[LabRow]) -> str:
    lines = [
        Line([row.first.variant, number(row.step_ms, ",.3f"),
         number(row.metric("floor_ms"), ",.3f"), lab_table.speedup_text(row),
         number(row.metric("first_token_ms"), ",.2f"),
         number(row.metric("prefill_tflops"), ",.3g"), number(compile_s(row), ",.0f"),
         row.verdict])
        for row in rows
    ]  # fmt: skip
    return markdown_body(Table("", _HEADER, lines, left=(0, 7)))


def _skipped(rows: Sequence[LabRow]) -> list[str]:
    """Why rows have no time, each reason once."""
    reasons = dict.fromkeys(f"- {row.first.variant}: {row.note}" for row in rows if row.note)
    return ["\n".join(map(escape, reasons))] if reasons else []


def sample(reference: Path) -> str:
    """The text of the trained Tiny-LLaMA, and how it came about."""
    blocks = []
    for path in sorted(reference.glob(f"*/{LAB}/{TEXT}")):
        record = results.read_json(path.with_name(RECORD))
        line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        losses = record["losses"]
        blocks.append(
            f"{record['version'].upper()}, {record['seconds'] / 60:.0f} minutes on "
            f"{escape(record['device'])}, {len(losses):,} steps, at the end "
            f"{sum(losses[-LAST:]) / LAST:.2f} nats a byte (commit {record['git_commit'][:7]}); "
            f"the prompt is the first line, {line['new_tokens']} tokens follow:\n\n"
            f"```text\n{line['text']}\n```"
        )
    return "\n\n".join(blocks)
