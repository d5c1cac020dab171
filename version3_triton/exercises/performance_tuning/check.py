"""Counts, predictions and findings about V3's norm, against the benchmark and the compiler."""

import importlib
import math
from collections.abc import Iterator
from typing import Any

from workshop import records, results, versions
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.kernels import offline
from workshop.kernels.cases import BACKWARD, FORWARD, OURS
from workshop.kernels.rows import Row
from workshop.kernels.rows import load as load_rows
from workshop.profilers import load
from workshop.results import PASS
from workshop.versions import ROOT

REFERENCE = ROOT / "results/reference/nvidia_h200"
SMALL, LARGE = (8192, 1024), (65536, 2048)
FLOP_A_NUMBER = 4
"""The operations of the forward norm, as its docstring counts."""
BENCHMARK, INSPECTION = "kernels", "kernels/inspect.json"
RECORDED = REFERENCE / BENCHMARK / "runs/20261126-220537-dd8037.jsonl"
"""Below results/, and the first below the reference."""
COMPILE = (
    "python -m workshop.kernels.inspect --target sm_90 gfx942 --config medium large "
    "--precision bf16 fp32 --kernel backward --json results/kernels/inspect.json"
)
WIDTHS = {1024: "bf16 medium", 2048: "bf16 large"}
"""Widths of a row, in the training steps that are inspected."""
KERNELS = ("rms_norm_backward", "swiglu_backward", "attention_backward")
ATTENTION = "attention_backward_dk_dv"


def check(work: Work) -> Iterator[Item]:
    yield from ask(work, Measured, (_where, *FROM_THE_BENCHMARK))
    yield from ask(work, lambda _: offline.CHIPS["sm_90"], OCCUPANCY)
    yield from work.each(_compiled)


# --- the benchmark --------------------------------------------------------------------------------


class Measured:
    """V3's rows for rms_norm: the participant's own if they were timed, else the H200's."""

    def __init__(self, work: Work) -> None:
        """Raises WorkshopError: the participant's file can't be read."""
        for path in (*records.files_in(work.results / BENCHMARK)[-1:], RECORDED):
            self._rows = load_rows(path)
            self.run = self._rows[0].first
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            self.where = f"{shown} ({self.run.device['name']}, {self._rows[0].precision})"
            if self._rows[0].timed:
                break

    def row(self, size: tuple[int, int]) -> Row:
        """Raises WorkshopError: the file has no times of that size."""
        name = "{} x {}".format(*size)
        for row in self._rows:
            ours = row.op == "rms_norm" and row.implementation == OURS
            if ours and row.size == name and row.verdict == PASS:
                return row
        raise WorkshopError(
            f"{self.where} has no times of rms_norm at {name}: run "
            "`python -m workshop.kernels.benchmark --op rms_norm`"
        )

    def us(self, size: tuple[int, int], phase: str) -> float:
        return 1000 * (self.row(size).median_ms(phase) or math.nan)

    def share(self, size: tuple[int, int], phase: str) -> float:
        """The share of the copy rate, in %."""
        return 100 * (self.row(size).share(phase) or math.nan)

    def fixed_us(self) -> float:
        """The time of a backward call where the line through two sizes meets no bytes at all."""
        small, large = (self.row(size).amounts[BACKWARD] for size in (SMALL, LARGE))
        first, second = (self.us(size, BACKWARD) for size in (SMALL, LARGE))
        return first - small * (second - first) / (large - small)


def _where(work: Work) -> Iterator[Item]:
    yield Item(True, f"measured: {Measured(work).where}")


def _sum_us(_: Measured) -> float:
    """The time of the kernel that adds up the partial gradients of a norm's weight."""
    table = load.load(REFERENCE / "profiles/v3/pytorch_profiler/kernels.json")
    sums = next(kernel for kernel in table.kernels if kernel.name == "_rms_norm_sum_kernel")
    return sums.total_ns / sums.calls / 1000


PASSES = "numbers x bytes a number x passes over memory; the weight hardly counts"
OF_CEILING = "the column `of ceiling`, forward / backward, in Triton (V3)'s rows of rms_norm"
SHORT_CALL = (
    "so short a call hardly reaches the copy rate: programs start and end, and what does not "
    "depend on the bytes shows. fixed_backward_us is its size"
)
FROM_THE_BENCHMARK: tuple[Question[Measured], ...] = (
    Found(
        "forward_bytes", "bytes of the forward norm", "bytes",
        lambda m: m.row(SMALL).amounts[FORWARD], PASSES, within=0.02,
    ),
    Found(
        "backward_bytes", "bytes of the backward norm", "bytes",
        lambda m: m.row(SMALL).amounts[BACKWARD], PASSES, within=0.02,
    ),
    Found(
        "forward_flop", "operations of the forward norm", "FLOP",
        lambda m: FLOP_A_NUMBER * SMALL[0] * SMALL[1],
        "the docstring says how many a row has", within=0.3,
    ),
    Found(
        "balance_flop_per_byte", "the balance", "FLOP a byte",
        lambda m: 1e12 * (m.run.ceiling_tflops or 0) / (1e9 * (m.run.ceiling_gbs or 1)),
        "the product's FLOP/s by the copy's bytes/s, both under the benchmark's tables",
        within=0.05,
    ),
    Chosen(
        "bound_by", "what bounds the norm", ("memory", "compute"), lambda m: "memory",
        "has it more operations a byte than the balance, or fewer?",
    ),
    Predicted(
        "predicted_small_forward_us", "predicted: forward, small", "µs",
        lambda m: m.us(SMALL, FORWARD), SHORT_CALL,
    ),
    Predicted(
        "predicted_small_backward_us", "predicted: backward, small", "µs",
        lambda m: m.us(SMALL, BACKWARD), SHORT_CALL,
    ),
    Predicted(
        "predicted_large_backward_us", "predicted: backward, large", "µs",
        lambda m: m.us(LARGE, BACKWARD),
        "over so many bytes a fixed cost is small: look at what else the pass reads and writes",
    ),
    Found(
        "small_forward_share", "forward, small: of the copy rate", "%",
        lambda m: m.share(SMALL, FORWARD), OF_CEILING, within=0.04,
    ),
    Found(
        "small_backward_share", "backward, small: of the copy rate", "%",
        lambda m: m.share(SMALL, BACKWARD), OF_CEILING, within=0.04,
    ),
    Found(
        "large_backward_share", "backward, large: of the copy rate", "%",
        lambda m: m.share(LARGE, BACKWARD), OF_CEILING, within=0.04,
    ),
    Found(
        "fixed_backward_us", "the fixed part of a backward call", "µs",
        Measured.fixed_us,
        "µs = bytes / (1000 x GB/s) at both sizes; the slope is the difference of times by that "
        "of bytes; what is left at 0 bytes?",
        within=0.2,
    ),
    Found(
        "sum_us", "the sum kernel, a part of what is fixed", "µs",
        _sum_us,
        "its total by its calls, one for each of 2 x 12 + 1 norms in each of 3 steps", within=0.1,
    ),
)  # fmt: skip


# --- the compiler ---------------------------------------------------------------------------------


def _waves(chip: offline.Chip, registers: int, warps: int) -> float:
    return min(offline.occupancy(chip, warps, {"registers": registers}, 0).values())


OCCUPANCY: tuple[Predicted[offline.Chip], ...] = (
    Predicted(
        "predicted_waves_56", "predicted: waves with 56 registers, 4 warps", "waves",
        lambda chip: _waves(chip, 56, 4),
        "a SIMD has 512 registers a lane: 512 / 56 is 9, and programs of 4 warps put one on each "
        "SIMD",
    ),
    Predicted(
        "predicted_waves_142", "predicted: waves with 142 registers, 8 warps", "waves",
        lambda chip: _waves(chip, 142, 8),
        "142 registers are given out as 144, of which 512 holds 3; but a program of 8 warps takes "
        "2 on each SIMD, and a second program would need 4",
    ),
)  # fmt: skip


def _compiled(work: Work) -> Iterator[Item]:
    missing = versions.missing(versions.VERSIONS["v3"])
    if missing:
        raise NotOnThisMachine(missing)
    path = work.results / INSPECTION
    if not path.is_file():
        raise Missing(f"results/{INSPECTION} is not there yet", COMPILE)
    try:
        questions = _on_compiled(results.read_json(path)["kernels"], Measured(work))
    except (KeyError, TypeError, StopIteration):
        raise WorkshopError(
            f"{path}: not what this command writes, run it again: {COMPILE}"
        ) from None
    yield from ask(work, lambda _: None, questions)


def _on_compiled(kernels: list[dict[str, Any]], measured: Measured) -> list[Question[None]]:
    """Questions on the inspected kernels and on V3's table of blocks.

    Raises:
        StopIteration: a kernel is not among them.
    """

    def kernel(target: str, name: str, used_by: str, **constants: bool) -> dict[str, Any]:
        return next(
            k for k in kernels
            if (k["target"], k["kernel"]) == (target, name) and used_by in k["used_by"]
            and constants.items() <= k["constants"].items()
        )  # fmt: skip

    def found(key: str, what: str, unit: str, right: float, how: str) -> Found[None]:
        return Found(key, what, unit, lambda _: right, how, within=0.001)

    def guess(key: str, choices: tuple[str, ...], true: str, why: str) -> Chosen[None]:
        """A prediction, never red."""
        shown = {choice: f"predicted {choice}, found {true}\n{why}" for choice in choices}
        return Chosen(key, key, shown, lambda _: choices)

    waves = {
        C: kernel("sm_90", KERNELS[0], used_by, ADD=False, BRANCH=False)["waves"]
        for C, used_by in WIDTHS.items()
    }
    blocks = importlib.import_module("triton_rms_norm").BACKWARD_BLOCKS["sm"]
    holds = {C: next(b.elements * b.programs for width, b in blocks if width >= C) for C in WIDTHS}
    here = [k for k in kernels if k["target"] == "sm_90"]
    spilling = {k["kernel"] for k in here if k["spills"]["bytes"]} or {"none"}
    fewer = min(waves, key=lambda C: waves[C])
    closer = max((SMALL, LARGE), key=lambda size: measured.share(size, BACKWARD))[1]
    spilled = kernel("sm_90", ATTENTION, "bf16 medium")["spills"]["bytes"]
    limit = [*kernel("gfx942", ATTENTION, "bf16 medium")["limited_by"], "slots"][0]
    row = "the row without `add` and `branch`, column `waves`"
    table = "BACKWARD_BLOCKS, architecture sm: elements x programs of the row for that width"
    return [
        guess(
            "predicted_spiller", (*KERNELS, "none"), "; ".join(sorted(spilling)),
            "A norm holds a row or a few; attention's backward pass tiles of q, k, v and dout, "
            "of scores, and of what they give, all at a time.",
        ),
        guess(
            "predicted_closer", ("more", "fewer"), "fewer" if closer == fewer else "more",
            "More waves are one way to keep memory busy, more work a thread another (compare "
            "held_1024 and held_2048), loads some turns ahead (`staged`) a third, and at the small "
            "size fixed_backward_us may weigh more than any. `python -m workshop.kernels.autotune` "
            "finds the better block on a GPU.",
        ),
        *(found(f"waves_{C}", f"waves at C = {C}", "waves", waves[C], row) for C in WIDTHS),
        *(found(f"held_{C}", f"numbers held at C = {C}", "numbers", holds[C], table)
          for C in WIDTHS),
        found(
            "spilled_bytes", "what attention spills", "bytes a lane", spilled,
            "the line FAULT says how many",
        ),
        Chosen(
            "gfx942_limit", "what limits its waves on gfx942", ("registers", "LDS", "slots"),
            lambda _: limit, f"the column `limited by` of {ATTENTION}; none there means slots",
        ),
    ]  # fmt: skip
