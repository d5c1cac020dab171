"""The figures in the lab's documents, from result files: `make docs` writes those of
results/reference/ between the documents' markers. measure.sh there has the commands.

What has not been measured has one line there, with its command.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from labs.inference_benchmark import studies
from labs.inference_benchmark.request import LAB
from workshop import labs, tables
from workshop.compare.rows import ratio
from workshop.errors import WorkshopError
from workshop.labs import LabRow, LabRun
from workshop.run.timing import Ratio
from workshop.show import lab_table
from workshop.tables import SAME, Line, Table, code, fill_last_column, number

FOLDER = Path(__file__).parent
README, CHECKLIST = FOLDER / "README.md", FOLDER / "CHECKLIST.md"
OPERATORS = FOLDER / "TorchTensorOpsBench" / "README.md"
USUAL = 32
"""CHECKLIST.md's batch."""
ON = "python micro_benchmarking_pytorch.py --network"
B = "B"
"""CHECKLIST.md's short form of ResNet-50 at the usual batch."""
HALF = ("bf16", "fp16")
Groups = dict[str, list[list[LabRow]]]
"""Rows that may be compared, a list for each device, by their subject."""
_SPEED: dict[str, Callable[[LabRow], str]] = {
    "images/s": lab_table.rate,
    "p50 ms": lambda row: number(row.step_ms, ",.3f"),
    "p99 ms": lambda row: number(row.percentile_ms(0.99), ",.3f"),
}
Study = tuple[str, str]
"""A subject as `single.new_run` words it, and the command that measures it."""


def _resnet(batch: int | None, study: str, flags: str) -> Study:
    size = "" if batch is None else f"batch {batch}, "
    command = f"{ON} resnet50 --batch-size {batch} {flags}" if flags[0] != B else flags
    return f"resnet50, {size}224 x 224, inference, {study}", command


LADDERS = {n: _resnet(n, "ladder", "--ladder --jobs 9") for n in (1, 32, 256)}
PEERS = {n: _resnet(n, "compare peers", "--fp16 1 --compare peers") for n in (32, 256)}
TRAINING = (
    "densenet121, batch 2048, 224 x 224, training, compare compile",
    f"{ON} densenet121 --batch-size 2048 --mode training --precision bf16 --channels-last "
    "--compare compile --compile",
)
NETWORKS = ", all networks", f"{ON} all --batch-size 32 --fp16 1 --jobs 16"
"""The end of each network's subject."""
PRECISION = _resnet(USUAL, "compare precision", f"{B} --compare precision")
BATCH_SIZE = _resnet(None, "compare batch-size", f"{B} --compare batch-size")
BENCH, PREDEFINED = "TorchTensorOpsBench", "python torch_tensor_ops_bench.py --run-predefined"
"""The operator bench's name as a lab, and a command."""


def parts(runs: Sequence[LabRun]) -> dict[Path, dict[str, str]]:
    """The text between the markers of the documents, from runs of any labs, the operator bench's
    among them."""
    groups = _groups(runs)
    wins = {"Precision": PRECISION, "Batch": BATCH_SIZE}
    return {
        README: {
            "ladder": _several(groups, _by_batch(LADDERS), _ladder_table),
            "peers": _several(groups, _by_batch(PEERS), _peers_table),
            "training": _block(groups, TRAINING, _comparison_table),
            "networks": _networks(groups),
        },
        CHECKLIST: {"wins": _several(groups, wins, _comparison_table)},
        OPERATORS: {"operators": _operators(runs)},
    }


def _groups(runs: Iterable[LabRun], lab: str = LAB) -> Groups:
    groups: Groups = defaultdict(list)
    for rows in labs.newest(run for run in runs if run.lab == lab):
        for subject in dict.fromkeys(row.first.subject for row in rows):
            groups[subject].append([row for row in rows if row.first.subject == subject])
    return groups


# --- blocks --------------------------------------------------------------------------------------


def _by_batch(found: dict[int, Study]) -> dict[str, Study]:
    return {f"Batch {n}": study for n, study in found.items()}


def _several(groups: Groups, found: dict[str, Study], render: Callable[[list[LabRow]], str]) -> str:
    blocks = (f"**{title}.** {_block(groups, one, render)}" for title, one in found.items())
    return "\n\n".join(blocks)


def _block(groups: Groups, study: Study, render: Callable[[list[LabRow]], str]) -> str:
    """A table for each device, below what it is of; or one line."""
    subject, command = study
    found = groups.get(subject, [])
    texts = (f"{lab_table.source(rows, command)}\n\n{render(rows)}" for rows in found)
    return "\n\n".join(texts) or lab_table.not_measured(command)


def _comparison_table(rows: list[LabRow]) -> str:
    """Variants, with the speed-up over the first."""
    gains = {
        "speed-up": lab_table.speedup_text,
        "peak MB": lambda row: number(row.peak_memory_mb, ",.0f"),
        "verdict": lab_table.verdict,
    }
    return lab_table.columns(rows, {"variant": lambda row: row.first.variant} | _SPEED | gains)


def _peers_table(rows: list[LabRow]) -> str:
    """The comparison, and our fastest over the fastest peer."""
    timed = sorted((row for row in rows if row.times), key=_rate, reverse=True)
    ours = next((row for row in timed if not row.first.options.get("peer")), None)
    peer = next((row for row in timed if row.first.options.get("peer")), None)
    last = ""
    if ours and peer:
        gain, names = labs.speedup(peer, ours), (code(row.first.variant) for row in (ours, peer))
        last = f"\n\n{' over the fastest peer, '.join(names)}: {_text(gain)}."
    return _comparison_table(rows) + last


def _ladder_table(rows: list[LabRow]) -> str:
    """Rungs, with the gain over the one before."""
    gains = {row.first.variant: _text(gain) for row, _, gain in _rungs(rows)}
    ends = {
        "over the one before": lambda row: gains[row.first.variant],
        "verdict": lab_table.verdict,
    }
    table = lab_table.columns(rows, {"rung": lambda row: row.first.variant} | _SPEED | ends)
    best = max((row for row in rows if row.speedup), key=_rate, default=None)
    summary = ""
    if best is not None:
        over_first = lab_table.speedup_text(best)
        summary = f"\n\nFastest: {code(best.first.variant)}; over the first rung {over_first}."
    return table + summary


def _rate(row: LabRow) -> float:
    return row.units_per_s or 0.0


def _text(gain: Ratio | None) -> str:
    return ratio(gain, SAME)


def _rungs(rows: Sequence[LabRow]) -> list[tuple[LabRow, str, Ratio | None]]:
    """Each row, what it changes of the one before, and the gain over that."""
    return [
        (row, _change(row, last), labs.speedup(last, row) if last else None)
        for row, last in zip(rows, [None, *rows[:-1]], strict=True)
    ]


def _change(row: LabRow, other: LabRow | None) -> str:
    """The words of a variant that another does not have."""
    known = other.first.variant.split(", ") if other else []
    return ", ".join(word for word in row.first.variant.split(", ") if word not in known)


# --- all networks, and operators -----------------------------------------------------------------


def _networks(groups: Groups) -> str:
    ending, command = NETWORKS
    by_device: dict[str, list[LabRow]] = defaultdict(list)
    for subject, found in groups.items():
        for rows in found if subject.endswith(ending) else ():
            if len(rows) == 2:  # else one of the two did not run
                by_device[rows[0].device] += rows
    blocks = [
        f"{lab_table.source(rows, command)}\n\n"
        + tables.markdown([dataclasses.replace(studies.all_table(rows), continues=True)])
        for rows in by_device.values()
    ]
    return "\n\n".join(blocks) or lab_table.not_measured(command)


def _operators(runs: Sequence[LabRun]) -> str:
    """The newest run of each kind: each operator's rate, and its share of the ceiling."""
    header = ("operator", "verdict", "rate", "of ceiling")
    shown = [
        Table(lab_table.title(rows), header, [Line(_operator(row)) for row in rows], left=(0, 1))
        for found in _groups(runs, BENCH).values()
        for rows in found
    ]
    return tables.markdown(shown) or lab_table.not_measured(PREDEFINED)


def _operator(row: LabRow) -> list[str]:
    value, unit = (row.gbs, "GB/s") if row.first.bytes_per_step else (row.tflops, "TFLOP/s")
    rate = "-" if value is None else f"{value:,.4g} {unit}"
    cached = ", cached" if row.first.metrics.get("cached") else ""
    return [row.first.variant, row.verdict + cached, rate, number(row.ceiling_share, ".1%")]


# --- CHECKLIST.md's techniques -------------------------------------------------------------------


def techniques(runs: Sequence[LabRun], old: str) -> str:
    """The table with its last column filled in: what was measured, and the command. Raises
    WorkshopError: a technique that was measured is not in the table."""
    groups = _groups(runs)
    gains: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for batch, (subject, _) in LADDERS.items():
        for rows in groups.get(subject, ()):
            for _, change, gain in _rungs(rows)[1:]:
                gains[change][rows[0].device].append(f"batch {batch} {_text(gain)}")

    def of_rung(change: str) -> str:
        found = [f"{'; '.join(its)}, {device}" for device, its in gains[change].items()]
        return "; ".join([*found, f"`{B} --ladder`"])

    def of_variants(study: Study, wanted: Sequence[str] = ()) -> str:
        found = []
        for rows in groups.get(study[0], ()):
            own = [(_change(row, rows[0]), _text(row.speedup)) for row in rows[1:]]
            shown = [f"{what} {gain}" for what, gain in own if not wanted or what in wanted]
            found.append(f"{'; '.join(shown)}, {rows[0].device}")
        return "; ".join([*found, f"`{study[1]}`"])

    cells = {
        "bf16 or fp16": of_variants(PRECISION, HALF),
        "channels last": of_rung("channels-last"),
        "batch norms folded": of_rung("folded norms"),
        "convolution and ReLU fused": of_rung("fused ReLUs"),
        "larger batch": of_variants(BATCH_SIZE),
        "torch.compile": of_rung("compile"),
        "graph": of_rung("graph"),
        "AOTInductor": of_rung("AOTInductor"),
    }
    filled = fill_last_column(
        old, lambda row: cells.pop(row.split(" | ")[0].removeprefix("| "), None)
    )
    if cells:
        raise WorkshopError(f"{CHECKLIST.name}: no technique {min(cells)!r} in its table")
    return filled
