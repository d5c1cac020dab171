"""The stages' result files, and the metrics that they show."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.errors import WorkshopError
from workshop.results import RunResult
from workshop.run import timing

FOLDER = results.DEFAULT_FOLDER / "performance_debugging"
SCHEMA_VERSION = 2
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of a stage and of all: where they run, and where their results go."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default auto: the first GPU, if any",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=FOLDER,
        help="where result files go (default: results/performance_debugging)",
    )


@dataclass
class StageResult:
    """Measurements of one stage."""

    stage: str
    """The name of its file, without .py."""
    loop_ms: float
    """Time of all timed steps, from the first launch until the device had finished."""
    logits_error: float | None
    launches: dict[str, int]
    """Launches in a step, by kernel; Triton's alone."""
    programs: dict[str, int]
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

    def metrics(self) -> dict[str, float | None]:
        """Those of METRICS, and the launches; None where this machine can't give one."""
        run = self.run
        names = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
        times = {} if run.interpreted else {name: getattr(run, name) for name in names}
        medians = {name: timing.median(times[name]) if times.get(name) else None for name in names}
        step_ms = medians["step_ms"]
        return {
            "loss_first": run.losses[0],
            "loss_last": run.losses[-1],
            "tensors_with_grad": run.gradients.tensors_with_grad if run.gradients else None,
            "logits_error": self.logits_error,
            "peak_mb": float(run.memory_mb["peak"]),
            "optimizer_state_mb": float(run.memory_mb["optimizer_state"]),
            "launches": sum(self.launches.values()),
            "programs": sum(self.programs.values()),
            "timed_share": sum(run.step_ms) / self.loop_ms,
            "samples_per_s": run.batch_size / step_ms * 1e3 if step_ms else None,
            **medians,
        }


def shown(metric: str, value: float | None) -> str:
    """A metric as the tables have it, a dash for one that there is none of."""
    if value is None:
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
    if result.logits_error is not None and not math.isfinite(result.logits_error):
        result = dataclasses.replace(result, logits_error=None)
    path = folder / f"{result.stage}.json"
    results.write_json(path, {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(result))
    return path


def load(path: Path) -> StageResult:
    """Reads one stage's file.

    Raises:
        WorkshopError: it is not as a stage writes it; the message names file and field.
    """
    content = results.read_json(path)
    version = content.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise WorkshopError(
            f"{path}: schema_version is {version!r}, this workshop reads {SCHEMA_VERSION}; run "
            "the stage again"
        )
    result = results.convert(StageResult, content, str(path))
    for wrong in result.run.wrong():
        raise WorkshopError(f"{path}: field run.{wrong}")
    if not result.loop_ms > 0:
        raise WorkshopError(f"{path}: field loop_ms should be positive, found {result.loop_ms}")
    return result


def load_all(folder: Path) -> dict[str, StageResult]:
    """The stages that have been run, by key and in order.

    Raises:
        WorkshopError: a file is broken.
    """
    found = [load(path) for path in sorted(folder.glob("stage*.json"))]
    return {result.key: result for result in found}
