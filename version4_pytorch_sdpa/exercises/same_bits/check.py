"""The same seed twice: the participant's two tables against what was predicted and read off."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import determinism
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, NotCompared, Predicted, Question, ask
from workshop.results import read_json

COMMAND = "python -m workshop.determinism --versions v1 "
OTHER = (
    "--num-steps 3 --second ATEN_CPU_CAPABILITY=default --output-dir results/determinism/other_cpu"
)
EMBEDDING = "embed_tokens.weight"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """Rows by version and whether the flag was on: of one machine, and of V1 on another CPU."""

    same: Mapping[tuple[str, bool], Row]
    other: Mapping[tuple[str, bool], Row]


def check(work: Work) -> Iterator[Item]:
    yield from ask(work, measured, QUESTIONS)


def measured(work: Work) -> Measured:
    folder = work.results / "determinism"
    return Measured(
        _rows(folder, COMMAND + "v4", "v1", "v4"),
        _rows(folder / "other_cpu", COMMAND + OTHER, "v1"),
    )


def _rows(folder: Path, command: str, *needed: str) -> dict[tuple[str, bool], Row]:
    """Raises Missing: there is no table of these versions, or a process failed."""
    path = folder / determinism.FILE
    rows = read_json(path)["rows"] if path.is_file() else []
    found = {(row["version"], row["deterministic"]): row for row in rows if not row["error"]}
    if any((version, on) not in found for version in needed for on in (False, True)):
        raise Missing(f"no complete table of {' and '.join(needed)} in {path}:", command)
    return found


def _weights(m: Measured, on: bool) -> float:
    return len(m.same["v4", on]["weights"]["differ"])


def _cost_percent(m: Measured) -> float:
    ratio = determinism.cost(m.same["v1", False], m.same["v1", True])
    assert ratio
    return 100 * (ratio.value - 1)


def _growth(m: Measured) -> float:
    off = {
        kind: {one["name"]: one["at_most"] for one in m.other["v1", True][kind]["differ"]}
        for kind in determinism.KINDS
    }
    if not all(EMBEDDING in its for its in off.values()):
        raise NotCompared("your two runs agree in it: this processor has no other instructions")
    return float(off["weights"][EMBEDDING] / off["gradients"][EMBEDDING])


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.v4_differ", "V4's tensors that differ without the flag", "",
        lambda m: _weights(m, False),
        "One tensor is enough: its last bits reach the loss, and with it every gradient. On a CPU "
        "the threads' order is luck, so another run may find fewer.",
    ),
    Predicted(
        "predict.cost_percent", "what the flag costs V1", "%", _cost_percent,
        "V1's operators add in one order anyway, on a CPU all of them: what you measure is the "
        "scatter of the machine.", margin=5,
    ),
    Found(
        "findings.v4_differ", "V4's tensors that differ without the flag", "",
        lambda m: _weights(m, False), "the column `weights`, row v4, off", within=0,
    ),
    Found(
        "findings.v4_differ_on", "V4's tensors that differ with it", "",
        lambda m: _weights(m, True), "the column `weights`, row v4, on; equal is 0", within=0,
    ),
    Chosen(
        "findings.adds", "the gradient without a fixed order",
        ("embedding", "norm", "attention", "loss"), lambda m: "embedding",
        "the kernel with atomic_add has its operation in its name",
    ),
    Found(
        "findings.first_other_loss", "the first other loss", "",
        lambda m: m.other["v1", True]["first_other_loss"] or 0,
        "the column `losses` of the second table", within=0,
    ),
    Found(
        "findings.growth", "by how much the difference grew", "x", _growth,
        "below the second table: the weights' share over the gradients'", within=0.12,
    ),
)  # fmt: skip
