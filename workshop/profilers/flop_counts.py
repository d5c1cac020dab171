"""The floating-point operations of one training step by three counters, and why they differ.

FlopCounterMode watches the operators that PyTorch dispatches, DeepSpeed the Python functions that
it has patched, and `workshop.run.flops` multiplies sizes. Each difference is measured here, then
looked for among the things that can cause it; one that is none of them, to the operation, is
printed as not explained.

The step is counted as it runs operation by operation: no counter sees into a compiled function or
a captured graph, and the products are the same there.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from workshop import errors, results
from workshop.gate import canonical
from workshop.request import Request
from workshop.run import flops, hardware, interpreter, timing, trainer
from workshop.run.flops import ModelSizes, StepFlops
from workshop.run.precision import Precision

SCHEMA_VERSION = 1
TORCH, DEEPSPEED, ANALYTIC = "FlopCounterMode", "DeepSpeed", "analytic"
NOT_INSTALLED = "not installed"
INSTALL = "DS_BUILD_OPS=0 python -m pip install -r setup/requirements-profiling.txt"
_WIDTH = 80
"""Of the report, in characters: it is read in a terminal too."""

Operators = dict[str, int]
"""FLOP by operator, under PyTorch's name for it, such as aten.mm."""


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


@dataclass(frozen=True)
class Work:
    """The analytic count of one step, taken apart: the products of its forward pass, in FLOP."""

    weights: float
    """With the weights, the head's among them."""
    head: float
    attention: float
    """q k' and probabilities x v, the causal half of the (T, T) square."""

    @classmethod
    def of(cls, config: ModelSizes, batch_size: int, seq_len: int) -> "Work":
        tokens = batch_size * seq_len
        return cls(
            weights=flops.matmul_flops(config, tokens),
            head=2.0 * tokens * config.hidden_dim * config.vocab_size,
            attention=flops.attention_flops(config, batch_size, seq_len),
        )

    @property
    def step(self) -> StepFlops:
        return StepFlops(self.weights + self.attention)


@dataclass
class TorchCount:
    """What FlopCounterMode counted."""

    forward: Operators
    backward: Operators
    without_formula: dict[str, int]
    """Calls of the operators for which it has none, and which count 0."""
    note: str = ""
    """Why the step was not counted as it runs, if it was not."""

    @property
    def step_flops(self) -> tuple[int, int]:
        """Forward and backward."""
        return sum(self.forward.values()), sum(self.backward.values())


@dataclass
class DeepSpeedCount:
    """What DeepSpeed counted of the forward pass."""

    flops: int
    macs: int
    """Multiply-accumulates: of matrix products alone, each of which is two FLOP."""


@dataclass(frozen=True)
class Remark:
    """A sentence about a counter, and the FLOP more (or less, < 0) than the analytic count that
    it accounts for."""

    counter: str
    text: str
    forward: float = 0.0
    backward: float = 0.0
    explained: bool = True

    def __str__(self) -> str:
        amounts = ((self.forward, "forward"), (self.backward, "backward"))
        text = ", ".join(f"{amount:+,.0f} {phase}" for amount, phase in amounts if amount)
        return f"{text}: {self.text}" if text else self.text


# --- counting ------------------------------------------------------------------------------------


class _OperatorsSeen(TorchDispatchMode):
    """Counts the calls of operators that have no FLOP formula."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        self.without_formula: Counter[str] = Counter()
        self._has_formula = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket not in self._has_formula:
            self.without_formula[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def count_with_torch(step: CountedStep) -> TorchCount:
    """What FlopCounterMode counts. Where it has no formula for the operator behind
    scaled_dot_product_attention, or refuses it, the step is counted again with the backend that
    is made of plain products."""
    try:
        counted = _run_counted(step)
    except AssertionError:  # of older releases, for fewer key/value heads than query heads
        note = "this PyTorch's FLOP formula for attention refuses grouped heads"
    else:
        unseen = [name for name in counted.without_formula if "scaled_dot_product" in name]
        if not unseen:
            return counted
        forward, backward = counted.step_flops
        note = (
            f"attention runs here as {unseen[0]}, which has no FLOP formula: the step as it runs "
            f"would count {forward:,} forward, {backward:,} backward"
        )
    with sdpa_kernel(SDPBackend.MATH):
        counted = _run_counted(step)
    counted.note = f"{note}. Counted with sdpa_kernel(MATH), whose plain products have formulas"
    return counted


def _run_counted(step: CountedStep) -> TorchCount:
    # Not above: it imports Triton, which V3 has to import first, to choose its interpreter.
    from torch.utils.flop_counter import FlopCounterMode

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with _OperatorsSeen() as seen:
        with forward:
            loss = step.forward()
        with backward:
            loss.backward()
    # Empty where nothing ran.
    of_forward, of_backward = (
        {str(name): flop for name, flop in phase.get_flop_counts().get("Global", {}).items()}
        for phase in (forward, backward)
    )
    return TorchCount(of_forward, of_backward, dict(seen.without_formula))


def count_with_deepspeed(step: CountedStep, report: Path) -> tuple[DeepSpeedCount | None, str]:
    """What DeepSpeed counts of a forward pass, in the functions that it patches; or None, and why:
    it is not installed, or it failed.

    Args:
        report: where DeepSpeed writes what it counted of each module.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None, NOT_INSTALLED
    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        profiler = FlopsProfiler(step.model)
        with contextlib.redirect_stdout(sys.stdout):  # which its report replaces for a while
            profiler.start_profile()
            try:
                with torch.no_grad():  # in training, V3 computes gradients in this pass already
                    step.forward()
                profiler.print_model_profile(output_file=str(report))  # module by module
                counts = profiler.get_total_flops(), profiler.get_total_macs()
            finally:
                profiler.end_profile()  # which forgets the counts
        return DeepSpeedCount(*counts), ""
    except Exception as error:  # of anything that it patches
        first_line = next(iter(str(error).splitlines()), "")
        return None, f"failed ({type(error).__name__}: {first_line:.100})"


# --- explaining ----------------------------------------------------------------------------------

_BATCHED = ("aten.bmm", "aten.baddbmm")
_WHOLE_SQUARE = "all of attention's (T, T) square, of which a causal model needs half"


def explain_torch(
    work: Work, counted: TorchCount, gradients: results.Gradients
) -> Iterator[Remark]:
    """What FlopCounterMode's count has more or less than the analytic one, cause by cause.

    Args:
        gradients: what the counted backward pass reached.
    """
    if counted.note:
        yield Remark(TORCH, counted.note)
    causes = [*_attention(work, counted), *_fused_head(work, counted)]
    forward, backward = counted.step_flops
    rest_forward = forward - work.step.forward - sum(cause.forward for cause in causes)
    rest_backward = backward - work.step.backward - sum(cause.backward for cause in causes)
    if rest_backward < 0 and gradients.tensors_with_grad < gradients.tensors_total:
        text = (
            f"the backward pass is cut: {gradients.tensors_with_grad} of "
            f"{gradients.tensors_total} parameter tensors get a gradient, and "
            f"{-rest_backward / work.step.backward:.1%} of its products are never computed"
        )
        causes.append(Remark(TORCH, text, backward=rest_backward))
        rest_backward = 0.0
    yield from causes
    ours = ", ".join(name for name in counted.without_formula if not _is_pytorchs(name))
    if rest_forward or rest_backward:
        suspects = f"; no formula, so counted as 0: {ours}" if ours else ""
        yield _unexplained(TORCH, work, rest_forward, rest_backward, suspects)
    elif ours:
        text = "They multiply no matrices: all products are accounted for without them"
        yield Remark(TORCH, f"no formula, so counted as 0: {ours}. {text}")


def _attention(work: Work, counted: TorchCount) -> Iterator[Remark]:
    # The models' products of two activations are batched, those with weights are not.
    forward, backward = (
        sum(n for name, n in phase.items() if "attention" in name or name in _BATCHED)
        for phase in (counted.forward, counted.backward)
    )
    unseen = [name for name in counted.without_formula if "attention" in name]
    if not forward and unseen:
        missed = backward - 2 * work.attention
        text = f"no formula for {', '.join(unseen)}: missed"
        yield Remark(TORCH, text, forward=-work.attention, backward=missed)
        return
    # To the forward pass's two products. The gradients need four of them.
    products = {2.5: "five", 3.5: "seven"}.get(backward / forward if forward else 0.0)
    recomputed = backward - 2 * forward if products else 0.0
    if forward == 2 * work.attention:
        half = (backward - recomputed) / 2
        yield Remark(TORCH, _WHOLE_SQUARE, forward=work.attention, backward=half)
    if recomputed:
        text = (
            "flash attention stores no scores: its backward pass computes them again, "
            f"{products} products where the gradients need four"
        )
        yield Remark(TORCH, text, backward=recomputed)


def _fused_head(work: Work, counted: TorchCount) -> Iterator[Remark]:
    for name, amount in counted.forward.items():
        if amount == 3 * work.head and not _is_pytorchs(name):
            text = (
                f"the forward pass of {name} already computes the head's two gradients: moved "
                "from one column to the other, the total stays"
            )
            yield Remark(TORCH, text, forward=2 * work.head, backward=-2 * work.head)


def explain_deepspeed(
    work: Work, counted: DeepSpeedCount, operators: TorchCount
) -> Iterator[Remark]:
    """What DeepSpeed's count has more or less than the analytic one, cause by cause.

    Args:
        operators: of the same step, for the names of those that DeepSpeed does not see.
    """
    products = 2 * counted.macs
    elementwise = counted.flops - products
    in_fp8 = operators.forward.get("aten._scaled_mm", 0)
    attention = products + in_fp8 - work.weights
    if in_fp8:
        text = "missed: the layers' products in fp8, whose operator it does not patch"
        yield Remark(DEEPSPEED, text, forward=-in_fp8)
    unseen = [name for name in operators.forward if "attention" in name and not _is_pytorchs(name)]
    if attention == 2 * work.attention:
        attention -= work.attention
        yield Remark(DEEPSPEED, _WHOLE_SQUARE, forward=work.attention)
    elif attention == 0 and unseen:
        attention += work.attention
        text = (
            f"missed: {', '.join(unseen)}. DeepSpeed patches PyTorch's Python functions and sees "
            "no other kernel"
        )
        yield Remark(DEEPSPEED, text, forward=-work.attention)
    if elementwise:
        text = (
            "element-wise work in functions that it patches, such as F.silu (FLOP without "
            "multiply-accumulates); operators such as * and + go uncounted"
        )
        yield Remark(DEEPSPEED, text, forward=elementwise)
    text = (
        "it counts no backward pass; three times its figure is a step only if the backward pass "
        "is whole"
    )
    yield Remark(DEEPSPEED, text, backward=-work.step.backward)
    if attention != work.attention:
        yield _unexplained(DEEPSPEED, work, attention - work.attention, 0.0)


def _unexplained(
    counter: str, work: Work, forward: float, backward: float, suspects: str = ""
) -> Remark:
    share = (abs(forward) + abs(backward)) / work.step.total
    text = f"not explained ({share:.2%} of the analytic count){suspects}"
    return Remark(counter, text, forward, backward, explained=False)


def _is_pytorchs(operator: str) -> bool:
    return operator.split(".")[0] in ("aten", "prim", "prims", "profiler")


# --- timing --------------------------------------------------------------------------------------


@dataclass
class Utilisation:
    """Model FLOP/s utilisation (MFU): the useful operations of a step over what the chip could do
    in its time. Times in ms, rates in TFLOP/s."""

    step_ms: list[float]
    flops: float
    """Of a step, the analytic count."""
    peak_tflops: float
    peak_source: str

    @property
    def tflops(self) -> float:
        return self.rate(self.flops)

    @property
    def mfu(self) -> float:
        return self.tflops / self.peak_tflops

    def rate(self, flops: float) -> float:
        """TFLOP/s, if a step had so many operations."""
        return flops / (timing.median(self.step_ms) / 1e3) / 1e12


def measure_utilisation(request: Request, batches: Tensor) -> Utilisation:
    """Times the request's steps as `tiny_llama_vN.py` does: compiled and captured as requested.

    Args:
        batches: int64 (n, 2, B, T) on the host, as many as the request's schedule takes.
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
    ceiling, source = hardware.peak(request.device, request.precision)
    step = flops.step_flops(request.config, request.batch_size, request.seq_len)
    return Utilisation(training.step_ms, step.total, ceiling, source)


# --- the report ----------------------------------------------------------------------------------


@dataclass
class Report:
    """All that is known of the operations of a request's step."""

    request: Request
    work: Work
    torch: TorchCount
    deepspeed: DeepSpeedCount | None
    deepspeed_error: str
    """Why there is no count of DeepSpeed: NOT_INSTALLED, or how it failed."""
    gradients: results.Gradients
    counted_batch: int
    """Sequences of the counted step, whose counts were scaled to the request's batch."""
    utilisation: Utilisation | None = None
    """None where Triton's interpreter runs the kernels."""
    remarks: list[Remark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remarks = list(explain_torch(self.work, self.torch, self.gradients))
        if self.deepspeed:
            self.remarks += explain_deepspeed(self.work, self.deepspeed, self.torch)


def count(request: Request, batch: Tensor, deepspeed_report: Path) -> Report:
    """Counts one step of the request's model, neither compiled nor captured.

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
    for phase in (counted.forward, counted.backward):
        phase.update({operator: scale * amount for operator, amount in phase.items()})
    if deepspeed:
        deepspeed = DeepSpeedCount(scale * deepspeed.flops, scale * deepspeed.macs)
    work = Work.of(request.config, request.batch_size, request.seq_len)
    return Report(request, work, counted, deepspeed, error, gradients, batch.shape[1])


def write(report: Report, folder: Path, command: str) -> int:
    """Writes flops.json and flops.md, prints the latter; the exit status: 1 if DeepSpeed is
    installed and failed."""
    results.write_json(folder / "flops.json", _record(report, command))
    text = _markdown(report)
    results.write_text(folder / "flops.md", text)
    print(f"\n{text}\nOutputs: {folder}")
    failed = report.deepspeed_error not in ("", NOT_INSTALLED)
    return errors.ANSWER_IS_NO if failed else errors.DONE


def _record(report: Report, command: str) -> dict[str, Any]:
    request, analytic = report.request, report.work.step
    forward, backward = report.torch.step_flops
    deepspeed, used = report.deepspeed, report.utilisation
    software = results.describe_software()
    found = importlib.metadata.distributions(name="deepspeed")
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
        "software": software | {"deepspeed": next((d.version for d in found), None)},
        "git_commit": results.git_commit(),
        "created": results.now(),
        "command": command,
        "counted_batch_size": report.counted_batch,
        "counts": {
            ANALYTIC: {"forward": int(analytic.forward), "backward": int(analytic.backward)},
            TORCH: {
                "forward": forward,
                "backward": backward,
                "forward_by_operator": report.torch.forward,
                "backward_by_operator": report.torch.backward,
                "calls_without_formula": report.torch.without_formula,
            },
            DEEPSPEED: {
                "forward": deepspeed.flops if deepspeed else None,
                "backward": None,
                "forward_macs": deepspeed.macs if deepspeed else None,
                "error": report.deepspeed_error or None,
            },
        },
        "differences": [dataclasses.asdict(remark) for remark in report.remarks],
        "gradients": dataclasses.asdict(report.gradients),
        "step_ms": used.step_ms if used else [],
        "tflops": used.tflops if used else None,
        "peak_tflops": used.peak_tflops if used else None,
        "peak_source": used.peak_source if used else None,
        "mfu": used.mfu if used else None,
    }


def _markdown(report: Report) -> str:
    request, error = report.request, report.deepspeed_error
    what = (
        f"{request.batch_size} sequence{'s' if request.batch_size > 1 else ''} of "
        f"{request.seq_len} tokens, {request.precision.name}, "
        f"{hardware.device_name(request.device)}."
    )
    if report.counted_batch != request.batch_size:
        what += (
            f" Counted on {report.counted_batch} sequence, in Triton's interpreter, and multiplied "
            f"by {request.batch_size}."
        )
    lines = [
        f"# FLOP of one training step: {request.version.key}, {request.config_name}",
        "",
        _wrapped(what),
        "",
        *_table(report),
    ]
    for counter in (TORCH, DEEPSPEED):
        remarks = [str(remark) for remark in report.remarks if remark.counter == counter]
        if counter == DEEPSPEED and error == NOT_INSTALLED:
            remarks = [f"{error}; the first lines of this file say how to keep pip from exchanging "
                       "PyTorch:"]  # fmt: skip
        elif counter == DEEPSPEED and error:
            remarks = [error]
        lines += ["", f"{counter} against the analytic count:", ""]
        lines += [_wrapped(f"- {text}") for text in remarks or ["the same, to the operation"]]
    if error == NOT_INSTALLED:
        lines.append(f"  `{INSTALL}`")
    return "\n".join([*lines, "", _wrapped(_utilisation_line(report)), ""])


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(report: Report) -> Iterator[str]:
    """The rows of a Markdown table whose columns are aligned in plain text too."""
    analytic = report.work.step
    forward, backward = report.torch.step_flops
    if report.deepspeed:
        ratio = f"{report.deepspeed.flops / analytic.forward:.4f} (forward)"
        deepspeed = (f"{report.deepspeed.flops:,}", "not counted", ratio)
    else:
        deepspeed = (report.deepspeed_error.split(" (")[0], "-", "-")
    ratio = f"{(forward + backward) / analytic.total:.4f}"
    row = "| {:<15} | {:>18} | {:>18} | {:>16} |".format
    yield row("counter", "forward", "backward", "of analytic")
    yield f"|{'-' * 17}|{'-' * 19}:|{'-' * 19}:|{'-' * 17}:|"
    yield row(DEEPSPEED, *deepspeed)
    yield row(TORCH, f"{forward:,}", f"{backward:,}", ratio)
    yield row(ANALYTIC, f"{analytic.forward:,.0f}", f"{analytic.backward:,.0f}", "1.0000")


def _utilisation_line(report: Report) -> str:
    used = report.utilisation
    if used is None:
        return f"MFU: {interpreter.NOT_COMPARABLE}."
    step_ms = timing.median(used.step_ms)
    line = (
        f"MFU: {used.mfu:.1%}. {used.flops:,.0f} FLOP in {step_ms:.2f} ms (median of "
        f"{len(used.step_ms)} steps) are {used.tflops:,.3g} TFLOP/s, of {used.peak_tflops:,.3g} "
        f"({used.peak_source})."
    )
    other = sum(report.torch.step_flops)
    if not math.isclose(other, used.flops, rel_tol=1e-3):
        share = used.rate(other) / used.peak_tflops
        line += f" {TORCH}'s count would make it {share:.1%}."
    return line
