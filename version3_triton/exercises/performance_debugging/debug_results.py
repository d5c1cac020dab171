"""The stages' result files, and the metrics that they show."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.arguments import option
from workshop.results import Positive, RunResult
from workshop.run import timing

FOLDER = results.DEFAULT_FOLDER / "performance_debugging"
HEALTHY = "stage6"

METRICS = {
    "loss_first": "the loss of the first step",
    "loss_last": "the loss of the last timed step",
    "tensors_with_grad": "tensors that the backward pass reached, of all",
    "logits_error": "how far the logits are from V1's, from the same weights: relative RMS",
    "peak_mb": "the peak of memory in a step",
    "optimizer_state_mb": "AdamW's part of it: two moments for each weight that it updates",
    "programs": "programs that a step's launches of Triton kernels start",
    "timed_share": "the steps' times, added up, over the time that the loop really took",
    "samples_per_s": "sequences a second, by the steps' times",
    "step_ms": "the median time of a step",
    "forward_ms": "of its forward pass",
    "backward_ms": "of its backward pass",
    "optimizer_ms": "of AdamW's update",
}
"""Columns of the tables; no times, from `samples_per_s` on, where the kernels are interpreted."""
COUNTS = ("tensors_with_grad", "launches", "programs")


@dataclass
class Flags:
    """Flags of a stage and of all: where they run, and where their results go."""

    device: str = option(
        "default auto: the first GPU, if any", "auto", choices=("auto", "cpu", "cuda")
    )
    output_dir: Path = option(
        "where result files go (default: results/performance_debugging)", FOLDER
    )


@dataclass
class StageResult:
    """Measurements of one stage."""

    stage: str
    """The name of its file, without .py."""
    loop_ms: Positive
    """Time of all timed steps, from the first launch until the device had finished."""
    logits_error: float | None
    launches: int
    """Launches of Triton's kernels in a step, and the programs that they start."""
    programs: int
    run: RunResult

    @property
    def key(self) -> str:
        """`stage1`, ..., `stage6`."""
        return self.stage.partition("_")[0]

    @property
    def setting(self) -> str:
        """Sizes, precision and device, which must be the same for two stages to be compared."""
        run, c = self.run, self.run.config
        how = ", kernels interpreted" if run.interpreted else ""
        return (
            f"{run.batch_size} x {run.seq_len} tokens, hidden {c['hidden_dim']}, "
            f"{c['num_layers']} layers, {run.precision}, {run.device['name']}{how}"
        )

    def metrics(self) -> dict[str, float]:
        """Those of METRICS, and the launches; NaN where this machine can't give one."""
        run = self.run
        names = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
        times = {name: [] if run.interpreted else getattr(run, name) for name in names}
        medians = {name: timing.median(ms) if ms else math.nan for name, ms in times.items()}
        found = {
            "loss_first": run.losses[0],
            "loss_last": run.losses[-1],
            "tensors_with_grad": run.gradients.tensors_with_grad if run.gradients else None,
            "logits_error": self.logits_error,
            "peak_mb": float(run.memory_mb["peak"]),
            "optimizer_state_mb": float(run.memory_mb["optimizer_state"]),
            "launches": self.launches,
            "programs": self.programs,
            "timed_share": sum(run.step_ms) / self.loop_ms,
            "samples_per_s": run.batch_size / medians["step_ms"] * 1e3,
            **medians,
        }
        return {name: math.nan if value is None else value for name, value in found.items()}

    def text(self, metric: str) -> str:
        """A metric as the tables have it, a dash for one that there is none of."""
        value = self.metrics()[metric]
        if math.isnan(value):
            return "-"
        if metric in COUNTS:
            return f"{value:,.0f}"
        if metric.startswith("loss_"):
            return f"{value:.4f}"
        if value < 0.01:
            return f"{value:.1e}"
        return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def save(result: StageResult, folder: Path) -> Path:
    """Writes `folder/STAGE.json` and returns its path."""
    path = folder / f"{result.stage}.json"
    results.write_json(path, dataclasses.asdict(result))
    return path


def load_all(folder: Path) -> dict[str, StageResult]:
    """The stages that have been run, by key and in order.

    Raises:
        WorkshopError: a file is broken; the message names it and the field.
    """
    paths = sorted(folder.glob("stage*.json"))
    found = [results.convert(StageResult, results.read_json(path), str(path)) for path in paths]
    return {result.key: result for result in found}
