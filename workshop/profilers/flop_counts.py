"""The floating-point operations of one training step, by PyTorch's FlopCounterMode, from the
model's sizes, and by DeepSpeed where it is installed; and the share of the chip's peak that the
step reaches.

The step is counted as it runs operation by operation: no counter sees into a compiled function or
a captured graph, and the products are the same there. Attention is counted as plain products:
FlopCounterMode has no formula for the CPU's kernel, and a GPU's flash attention computes its scores
again in the backward pass.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from workshop import errors, results, tables
from workshop.gate import canonical
from workshop.profilers import profile_run
from workshop.request import Request
from workshop.run import flops, hardware, interpreter, timing, trainer
from workshop.run.precision import Precision
from workshop.tables import Line, Markdown, Table

SCHEMA_VERSION = 2
TORCH, DEEPSPEED, ANALYTIC = "FlopCounterMode", "DeepSpeed", "analytic"
NOT_INSTALLED = "not installed"
INSTALL = "DS_BUILD_OPS=0 python -m pip install -r setup/requirements-profiling.txt"
WHY_THEY_DIFFER = (
    "The analytic count multiplies sizes. Of attention it takes the half of the (T, T) square that "
    "a causal model needs; the other two take all of it.",
    "FlopCounterMode counts the operators that PyTorch dispatches. V3's kernels are operators with "
    "a formula: their attention skips the other half and computes its scores again in the backward "
    "pass; their loss computes the head's gradients in the forward pass.",
    "DeepSpeed counts the Python functions that it patches, of the forward pass alone: also "
    "element-wise ones such as F.silu, no product in fp8 and no Triton kernel. Three times its "
    "figure is a step only if the backward pass is whole.",
)


@dataclass
class CountedStep:
    """Forward and backward pass on one batch, int64 (2, B, T), operation by operation."""

    model: nn.Module
    precision: Precision
    inputs: Tensor

    def forward(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with self.precision.autocast(self.inputs.device.type):
            loss: Tensor = self.model(*self.inputs)
        return loss


def count_with_torch(step: CountedStep) -> tuple[dict[str, int], dict[str, int]]:
    """FlopCounterMode's count of a forward and a backward pass: FLOP by operator, under PyTorch's
    name for it, such as aten.mm."""
    # Not above: it imports Triton, which V3 has to import first, to choose its interpreter.
    from torch.utils.flop_counter import FlopCounterMode, mm_flop

    # PyTorch 2.6 has no formula for fp8 products.
    fp8 = {torch.ops.aten._scaled_mm: lambda a, b, *_, **__: mm_flop(a, b)}
    forward, backward = (FlopCounterMode(display=False, custom_mapping=fp8) for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH):
        with forward:
            loss = step.forward()
        with backward:
            loss.backward()
    counts = (phase.get_flop_counts().get("Global", {}) for phase in (forward, backward))
    on_forward, on_backward = ({str(name): n for name, n in one.items()} for one in counts)
    return on_forward, on_backward


def count_with_deepspeed(step: CountedStep, report: Path) -> tuple[int | None, str]:
    """DeepSpeed's count of a forward pass; or None, and why: it is not installed, or it failed.

    Args:
        report: where DeepSpeed writes what it counted of each module.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None, NOT_INSTALLED
    if torch.version.hip:  # else DeepSpeed looks for CUDA's compiler where PyTorch finds no ROCm
        os.environ.setdefault("ROCM_HOME", os.environ.get("ROCM_PATH") or "/opt/rocm")
    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        profiler = FlopsProfiler(step.model)
        with contextlib.redirect_stdout(sys.stdout):  # which its report replaces for a while
            profiler.start_profile()
            try:
                with torch.no_grad():  # in training, V3 computes gradients in this pass already
                    step.forward()
                profiler.print_model_profile(output_file=str(report))  # module by module
                counted = profiler.get_total_flops()
            finally:
                profiler.end_profile()  # which forgets the count
        return counted, ""
    except Exception as error:  # of anything that it patches
        first_line = next(iter(str(error).splitlines()), "")
        return None, f"failed ({type(error).__name__}: {first_line:.100})"


def count(request: Request, batch: Tensor, deepspeed_report: Path) -> dict[str, Any]:
    """The record of one counted step of the request's model, neither compiled nor captured.

    An interpreted step runs on one sequence: every count is proportional to the batch size, as
    it is not to the sequence length, and each sequence takes the interpreter seconds.

    Args:
        batch: int64 (2, B, T).
        deepspeed_report: where DeepSpeed writes what it found of each module.
    """
    if request.interpreted:
        batch = batch[:, :1]
    print(f"counting one step of {batch.shape[1]} x {batch.shape[2]} tokens ...", flush=True)
    model = request.build_on(request.device)
    request.precision.set_matmul_mode()
    request.precision.prepare(model)
    step = CountedStep(model, request.precision, batch.to(request.device))
    counted = count_with_torch(step)
    gradients = canonical.count_gradients(model)
    deepspeed, error = count_with_deepspeed(step, deepspeed_report)
    scale = request.batch_size // batch.shape[1]
    forward, backward = ({name: scale * n for name, n in phase.items()} for phase in counted)
    analytic = flops.step_flops(request.config, request.batch_size, request.seq_len)
    found = importlib.metadata.distributions(name="deepspeed")
    software = results.describe_software() | {"deepspeed": next((d.version for d in found), None)}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": request.version.key,
        "config_name": request.config_name,
        "config": dataclasses.asdict(request.config),
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "precision": request.precision.name,
        "options": {"compile": request.compile_mode, "cuda_graph": request.cuda_graph}
        | request.switches,
        "interpreted": request.interpreted,
        "device": hardware.describe(request.device),
        "software": software,
        "git_commit": results.git_commit(),
        "created": results.now(),
        "counted_batch_size": batch.shape[1],
        "counts": {
            DEEPSPEED: {
                "forward": None if deepspeed is None else scale * deepspeed,
                "backward": None,
                "error": error or None,
            },
            TORCH: {
                "forward": sum(forward.values()),
                "backward": sum(backward.values()),
                "forward_by_operator": forward,
                "backward_by_operator": backward,
            },
            ANALYTIC: {"forward": int(analytic.forward), "backward": int(analytic.backward)},
        },
        "gradients": dataclasses.asdict(gradients),
        "step_ms": [],
        **dict.fromkeys(("tflops", "peak_tflops", "peak_source", "mfu")),
    }


def measure_utilisation(request: Request, batches: Tensor) -> dict[str, Any]:
    """Model FLOP/s utilisation (MFU), for the record: the analytic count over what the chip could
    do in the time of a step, timed as `tiny_llama_vN.py` does: compiled and captured as requested.

    Args:
        batches: int64 (n, 2, B, T) on the host: n is the number that the request's schedule takes.
    """
    steps = request.schedule
    print(f"timing {steps.timed} steps after {steps.warmup} of warm-up ...", flush=True)
    model = request.build()
    request.precision.set_matmul_mode()
    training = trainer.train(
        model,
        request.module.configure_optimizer(model, request.arguments.learning_rate),
        batches,
        request.precision,
        schedule=steps,
        cuda_graph=request.cuda_graph,
    )
    if training.interrupted:
        raise KeyboardInterrupt
    peak_tflops, source = hardware.peak(request.device, request.precision)
    step = flops.step_flops(request.config, request.batch_size, request.seq_len)
    tflops = step.total / (timing.median(training.step_ms) / 1e3) / 1e12
    return {
        "step_ms": training.step_ms,
        "tflops": tflops,
        "peak_tflops": peak_tflops,
        "peak_source": source,
        "mfu": tflops / peak_tflops,
    }


def write(record: dict[str, Any], folder: Path, command: str) -> int:
    """Writes flops.json and flops.md, prints the latter; the exit status. Without DeepSpeed the
    table is whole, and a note says why its count is missing."""
    results.write_json(folder / "flops.json", record | {"command": command})
    text = tables.markdown([report(record)], "#") + "\n"
    results.write_text(folder / "flops.md", text)
    print(f"\n{text}\nOutputs: {folder}")
    return errors.DONE


def report(record: dict[str, Any]) -> Table:
    """The counts, side by side; the notes say why they differ, and the MFU."""
    counts, title = record["counts"], "FLOP of one training step"
    lines = [Line([name, *_cells(counted, counts[ANALYTIC])]) for name, counted in counts.items()]
    header = ["counter", "forward", "backward", "of analytic"]
    notes = list(_notes(record))
    return Table(f"{title}: {record['version']}, {record['config_name']}", header, lines, notes)


def _cells(counted: dict[str, Any], analytic: dict[str, Any]) -> list[str]:
    forward, backward = counted["forward"], counted["backward"]
    if forward is None:
        return [counted["error"].split(" (")[0], "-", "-"]
    if backward is None:
        return [f"{forward:,}", "not counted", f"{forward / analytic['forward']:.4f} (forward)"]
    return [f"{forward:,}", f"{backward:,}", f"{(forward + backward) / sum(analytic.values()):.4f}"]


def _notes(record: dict[str, Any]) -> Iterator[str]:
    sequences, counted = record["batch_size"], record["counted_batch_size"]
    what = f"{sequences} x {record['seq_len']} tokens, {record['precision']}"
    yield f"{what}, {record['device']['name']}"
    if counted != sequences:
        where = f"{counted} sequence, in Triton's interpreter"
        yield f"Counted on {where}, and multiplied by {sequences}."
    yield profile_run.gradients_sentence(results.Gradients(**record["gradients"]))
    yield from WHY_THEY_DIFFER
    error = record["counts"][DEEPSPEED]["error"]
    if error == NOT_INSTALLED:
        yield Markdown(
            "DeepSpeed is not installed; the first lines of the file named here say how to keep "
            f"pip from exchanging PyTorch: `{INSTALL}`"
        )
    elif error:
        yield f"DeepSpeed {error}"
    if record["mfu"] is None:
        yield f"MFU: {interpreter.NOT_COMPARABLE}."
        return
    total = sum(record["counts"][ANALYTIC].values())
    times = f"{timing.median(record['step_ms']):.2f} ms (median of {len(record['step_ms'])} steps)"
    yield (
        f"MFU: {record['mfu']:.1%}. {total:,.0f} FLOP in {times} are {record['tflops']:,.3g} "
        f"TFLOP/s, of {record['peak_tflops']:,.3g} ({record['peak_source']})."
    )
