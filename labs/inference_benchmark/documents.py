"""The figures in the lab's documents, from result files: `make docs` writes those of
results/reference/ between the documents' markers. measure.sh there has the commands.

What has not been measured has one line there, with its command.
"""

import dataclasses
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
from workshop.tables import Line, Table, code, escape, fill_last_column
from workshop.tables import markdown_rows as markdown_table

FOLDER = Path(__file__).parent
README, CHECKLIST = FOLDER / "README.md", FOLDER / "CHECKLIST.md"
OPERATORS = FOLDER / "TorchTensorOpsBench" / "README.md"
TECHNIQUES, WINS = "techniques", "wins"
"""CHECKLIST.md's parts."""
LADDER_BATCHES, PEERS_BATCHES = (1, 32, 256), (32, 256)
USUAL = 32
"""CHECKLIST.md's batch."""
ON = "python micro_benchmarking_pytorch.py --network"
B = "B"
"""CHECKLIST.md's short form of ResNet-50 at the usual batch."""
HALF = ("bf16", "fp16")
Groups = dict[str, list[list[LabRow]]]
"""Rows that may be compared, a list for each device, by their subject."""
Pair = tuple[str, LabRow, LabRow]
"""A network's name, its plain row and its fast one."""
Study = tuple[str, str]
"""A subject as `single.new_run` words it, and the command that measures it."""


def _resnet(batch: int | None, study: str, command: str) -> Study:
    size = "" if batch is None else f"batch {batch}, "
    return f"resnet50, {size}224 x 224, inference, {study}", command


LADDERS = {
    batch: _resnet(batch, "ladder", f"{ON} resnet50 --batch-size {batch} --ladder --jobs 9")
    for batch in LADDER_BATCHES
}
PEERS = {
    batch: _resnet(
        batch, "compare peers", f"{ON} resnet50 --batch-size {batch} --fp16 1 --compare peers"
    )
    for batch in PEERS_BATCHES
}
TRAINING = (
    "densenet121, batch 2048, 224 x 224, training, compare compile",
    f"{ON} densenet121 --batch-size 2048 --mode training --precision bf16 --channels-last "
    "--compare compile --compile",
)
NETWORKS = ", all networks", f"{ON} all --batch-size 32 --fp16 1 --jobs 16"
"""The end of each network's subject."""
PRECISION = _resnet(USUAL, "compare precision", f"{B} --compare precision")
BATCH_SIZE = _resnet(None, "compare batch-size", f"{B} --compare batch-size")
B_LADDER = f"{B} --ladder"
BENCH, PREDEFINED = "TorchTensorOpsBench", "python torch_tensor_ops_bench.py --run-predefined"
"""The operator bench's name as a lab, and a command."""


def parts(runs: Sequence[LabRun], old_techniques: str) -> dict[Path, dict[str, str]]:
    """The text between the markers of the documents.

    Args:
        runs: of any labs, the operator bench's among them.
        old_techniques: CHECKLIST.md's table of techniques, whose last column is filled in.
    """
    groups: Groups = {}
    for rows in labs.newest(run for run in runs if run.lab == LAB):
        for own in _by_subject(rows):
            groups.setdefault(own[0].first.subject, []).append(own)
    return {
        README: {
            "ladder": _several(groups, LADDERS, _ladder_table),
            "peers": _several(groups, PEERS, _peers_table),
            "training": _block(groups, TRAINING, _comparison_table),
            "networks": _networks(groups),
        },
        CHECKLIST: {
            TECHNIQUES: _techniques(groups, old_techniques),
            WINS: _wins(groups),
        },
        OPERATORS: {"operators": _operators(runs)},
    }


def _by_subject(rows: list[LabRow]) -> list[list[LabRow]]:
    subjects = dict.fromkeys(row.first.subject for row in rows)
    return [[row for row in rows if row.first.subject == one] for one in subjects]


# --- blocks --------------------------------------------------------------------------------------


def _several(
    groups: Groups, by_batch: dict[int, Study], render: Callable[[list[LabRow]], str]
) -> str:
    found = (f"**Batch {n}.** {_block(groups, one, render)}" for n, one in by_batch.items())
    return "\n\n".join(found)


def _block(groups: Groups, study: Study, render: Callable[[list[LabRow]], str]) -> str:
    """A table for each device, below what it is of; or one line."""
    subject, command = study
    found = groups.get(subject, [])
    if not found:
        return lab_table.not_measured(command)
    return "\n\n".join(f"{lab_table.source(rows, command)}\n\n{render(rows)}" for rows in found)


def _comparison_table(rows: list[LabRow]) -> str:
    """Variants, with the speed-up over the first."""
    header = ["variant", "images/s", "p50 ms", "p99 ms", "speed-up", "peak MB", "verdict"]
    return markdown_table(header, list(map(_compared, rows)), (0, 6))


def _compared(row: LabRow) -> list[str]:
    peak = tables.number(row.peak_memory_mb, ",.0f")
    return list(map(escape, [*_speed(row), lab_table.speedup_text(row), peak, row.verdict]))


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
    header = ["rung", "images/s", "p50 ms", "p99 ms", "over the one before", "verdict"]
    lines = [
        list(map(escape, [*_speed(row), _text(gain), row.verdict])) for row, _, gain in _rungs(rows)
    ]
    best = max((row for row in rows if row.speedup), key=_rate, default=None)
    summary = ""
    if best is not None:
        over_first = lab_table.speedup_text(best)
        summary = f"\n\nFastest: {code(best.first.variant)}; over the first rung {over_first}."
    return markdown_table(header, lines, (0, 5)) + summary


def _speed(row: LabRow) -> list[str]:
    """The variant, images a second, p50 and p99."""
    p99 = row.percentile_ms(0.99)
    times = [tables.number(ms, ",.3f") for ms in (row.step_ms, p99)]
    return [row.first.variant, tables.number(row.units_per_s, ",.0f"), *times]


def _rate(row: LabRow) -> float:
    return row.units_per_s or 0.0


def _text(gain: Ratio | None) -> str:
    return ratio(gain.value, gain.interval, tables.SAME) if gain else "-"


def _rungs(rows: Sequence[LabRow]) -> list[tuple[LabRow, str, Ratio | None]]:
    """Each row, what it changes of the one before, and the gain over that."""
    before = [None, *rows[:-1]]
    return [
        (row, change(row, last), labs.speedup(last, row) if last else None)
        for row, last in zip(rows, before, strict=True)
    ]


def change(row: LabRow, other: LabRow | None) -> str:
    """The words of a variant that another does not have."""
    known = other.first.variant.split(", ") if other else []
    return ", ".join(word for word in row.first.variant.split(", ") if word not in known)


# --- all networks --------------------------------------------------------------------------------


def _networks(groups: Groups) -> str:
    ending, command = NETWORKS
    by_device: dict[str, list[Pair]] = {}
    for subject, found in groups.items():
        for rows in found if subject.endswith(ending) else ():
            if pair := _pair(rows):
                by_device.setdefault(rows[0].device, []).append(pair)
    blocks = []
    for pairs in by_device.values():
        table = dataclasses.replace(studies.all_table(pairs), continues=True)  # no heading
        source = lab_table.source([row for _, *rows in pairs for row in rows], command)
        blocks.append(f"{source}\n\n{tables.markdown([table])}")
    return "\n\n".join(blocks) or lab_table.not_measured(command)


def _pair(rows: Sequence[LabRow]) -> Pair | None:
    """A network, as it is and as fast as it gets; None if one of the two did not run."""
    if len(rows) != 2:
        return None
    plain, fast = sorted(rows, key=lambda row: row.first.options["compile"] is not None)
    runs = [run for row in (plain, fast) for run in row.runs]
    both = labs.build_rows(dataclasses.replace(run, baseline=plain.first.variant) for run in runs)
    by_variant = {row.first.variant: row for row in both}
    name = str(plain.first.options["network"])
    return name, by_variant[plain.first.variant], by_variant[fast.first.variant]


# --- operators -----------------------------------------------------------------------------------


def _operators(runs: Sequence[LabRun]) -> str:
    """The newest run of each kind: each operator's rate, and its share of the ceiling."""
    found = labs.newest(run for run in runs if run.lab == BENCH)
    header = ("operator", "verdict", "rate", "of ceiling")
    shown = [
        Table(lab_table.title(rows), header, [Line(_operator(row)) for row in rows], left=(0, 1))
        for group in found
        for rows in _by_subject(group)
    ]
    return tables.markdown(shown) or lab_table.not_measured(PREDEFINED)


def _operator(row: LabRow) -> list[str]:
    value, unit = (row.gbs, "GB/s") if row.first.bytes_per_step else (row.tflops, "TFLOP/s")
    rate = "-" if value is None else f"{value:,.4g} {unit}"
    cached = ", cached" if row.first.metrics.get("cached") else ""
    share = tables.number(row.ceiling_share, ".1%")
    return [row.first.variant, row.verdict + cached, rate, share]


# --- CHECKLIST.md --------------------------------------------------------------------------------


def _wins(groups: Groups) -> str:
    """The comparisons that the page names."""
    blocks = [
        f"**{title}.** {_block(groups, study, table)}"
        for title, study, table in (
            ("Precision", PRECISION, _comparison_table),
            ("Batch", BATCH_SIZE, _comparison_table),
        )
    ]
    return "\n\n".join(blocks)


def _gains(groups: Groups) -> dict[str, dict[str, dict[int, str]]]:
    """For each device and change of the ladders, the gain over the rung before, by batch."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for batch, (subject, _) in LADDERS.items():
        for rows in groups.get(subject, ()):
            own = found.setdefault(rows[0].device, {})
            for _, change, gain in _rungs(rows)[1:]:
                own.setdefault(change, {})[batch] = _text(gain)
    return found


def _techniques(groups: Groups, old: str) -> str:
    """The table with its last column filled in: what was measured, and the command."""
    wins = _cells(groups)
    filled = fill_last_column(
        old, lambda row: wins.pop(row.split(" | ")[0].removeprefix("| "), None)
    )
    if wins:
        raise WorkshopError(f"{CHECKLIST.name}: no technique {min(wins)!r} in its table")
    return filled


def _cells(groups: Groups) -> dict[str, str]:
    """The last cell of each technique that has a command."""
    gains = _gains(groups)

    def of_rung(change: str) -> str:
        found = [
            f"{_listed((f'batch {n}', text) for n, text in its[change].items())}, {device}"
            for device, its in gains.items()
            if change in its
        ]
        return "; ".join([*found, f"`{B_LADDER}`"])

    def of_variants(study: Study, wanted: Sequence[str] = ()) -> str:
        found = []
        for rows in groups.get(study[0], ()):
            own = [(change(row, rows[0]), _text(row.speedup)) for row in rows[1:]]
            own = [(change, text) for change, text in own if not wanted or change in wanted]
            found.append(f"{_listed(own)}, {rows[0].device}")
        return "; ".join([*found, f"`{study[1]}`"])

    return {
        "bf16 or fp16": of_variants(PRECISION, HALF),
        "channels last": of_rung("channels-last"),
        "batch norms folded": of_rung("folded norms"),
        "convolution and ReLU fused": of_rung("fused ReLUs"),
        "larger batch": of_variants(BATCH_SIZE),
        "torch.compile": of_rung("compile"),
        "graph": of_rung("graph"),
        "AOTInductor": of_rung("AOTInductor"),
    }


def _listed(gains: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{what} {gain}" for what, gain in gains)
