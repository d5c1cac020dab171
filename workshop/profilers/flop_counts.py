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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from workshop import errors, results
from workshop.gate import canonical
from workshop.request import Request, peak
from workshop.run import flops, hardware, interpreter, timing, trainer
from workshop.run.flops import ModelSizes, StepFlops
from workshop.run.precision import Precision

if TYPE_CHECKING:
    # It imports Triton, which V3 has to import first: to choose its interpreter without a GPU.
    from torch.utils.flop_counter import FlopCounterMode

SCHEMA_VERSION = 1
TORCH, DEEPSPEED, ANALYTIC = "FlopCounterMode", "DeepSpeed", "analytic"
INSTALL = "DS_BUILD_OPS=0 python -m pip install -r setup/requirements-profiling.txt"
_WIDTH = 80
"""Of the report, in characters: it is read in a terminal too."""
_SDPA = "scaled_dot_product"

Operators = dict[str, int]
"""FLOP by operator, under PyTorch's name for it, such as aten.mm."""


class CountedStep:
    """Forward and backward pass on one batch, int64 (2, B, T), operation by operation."""

    def __init__(self, model: nn.Module, precision: Precision, inputs: Tensor) -> None:
        self.model, self.precision, self.inputs = model, precision, inputs

    def forward(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with self.precision.autocast(self.inputs.device.type):
            loss: Tensor = self.model(*self.inputs)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()


CountWithTorch = Callable[[CountedStep], tuple[Operators, Operators]]
"""Runs a step's forward and backward passes under FlopCounterMode: the operators of each."""
CountWithDeepSpeed = Callable[[CountedStep, Path], tuple[int, int]]
"""Runs a step's forward pass under DeepSpeed's profiler, which writes its report to the path:
FLOP, and multiply-accumulate operations."""


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


def eager_step(request: Request, tokens: Tensor) -> CountedStep:
    """The request's model, not compiled and not captured, ready to run on `tokens`, int64
    (2, B, T)."""
    model = request.build_on(request.device)
    request.precision.set_matmul_mode()
    return CountedStep(model, request.precision, tokens.to(request.device))


def by_operator(counter: "FlopCounterMode") -> Operators:
    """What a counter has counted, all modules together; empty where nothing ran."""
    total = counter.get_flop_counts().get("Global", {})
    return {str(operator): amount for operator, amount in total.items()}


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


def count_with_torch(step: CountedStep, count: CountWithTorch) -> TorchCount:
    """What FlopCounterMode counts. Where it has no formula for the operator behind
    scaled_dot_product_attention, or refuses it, the step is counted again with the backend that
    is made of plain products."""
    try:
        counted = _observe(step, count)
    except AssertionError:  # of older releases, for fewer key/value heads than query heads
        note = "this PyTorch's FLOP formula for attention refuses grouped heads"
    else:
        unseen = [operator for operator in counted.without_formula if _SDPA in operator]
        if not unseen:
            return counted
        forward, backward = counted.step_flops
        note = (
            f"attention runs here as {unseen[0]}, which has no FLOP formula: the step as it runs "
            f"would count {forward:,} forward, {backward:,} backward"
        )
    with sdpa_kernel(SDPBackend.MATH):
        counted = _observe(step, count)
    counted.note = f"{note}. Counted with sdpa_kernel(MATH), whose plain products have formulas"
    return counted


def _observe(step: CountedStep, count: CountWithTorch) -> TorchCount:
    with _OperatorsSeen() as seen:
        forward, backward = count(step)
    return TorchCount(forward, backward, dict(seen.without_formula))


def count_with_deepspeed(
    step: CountedStep, count: CountWithDeepSpeed, report: Path
) -> tuple[DeepSpeedCount | None, str]:
    """What DeepSpeed counts; or None, and why: it is not installed, or it failed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None, "not installed"
    try:
        with contextlib.redirect_stdout(sys.stdout):  # which its report replaces for a while
            return DeepSpeedCount(*count(step, report)), ""
    except Exception as error:  # of anything that it patches
        first_line = next(iter(str(error).splitlines()), "")
        return None, f"failed ({type(error).__name__}: {first_line:.100})"


# --- explaining ----------------------------------------------------------------------------------

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
        causes.append(
            Remark(
                TORCH,
                f"the backward pass is cut: {gradients.tensors_with_grad} of "
                f"{gradients.tensors_total} parameter tensors get a gradient, and "
                f"{-rest_backward / work.step.backward:.1%} of its products are never computed",
                backward=rest_backward,
            )
        )
        rest_backward = 0.0
    yield from causes
    ours = [name for name in counted.without_formula if not _is_pytorchs(name)]
    if rest_forward or rest_backward:
        suspects = f"; no formula, so counted as 0: {', '.join(ours)}" if ours else ""
        yield _unexplained(TORCH, work, rest_forward, rest_backward, suspects)
    elif ours:
        yield Remark(
            TORCH,
            f"no formula, so counted as 0: {', '.join(ours)}. They multiply no matrices: all "
            "products are accounted for without them",
        )


def _attention(work: Work, counted: TorchCount) -> Iterator[Remark]:
    forward, backward = (
        sum(amount for operator, amount in phase.items() if _is_attention(operator))
        for phase in (counted.forward, counted.backward)
    )
    unseen = [name for name in counted.without_formula if "attention" in name]
    if not forward and unseen:
        yield Remark(
            TORCH,
            f"no formula for {', '.join(unseen)}: missed",
            forward=-work.attention,
            backward=backward - 2 * work.attention,
        )
        return
    # To the forward pass's two products. The gradients need four of them.
    products = {2.5: "five", 3.5: "seven"}.get(backward / forward if forward else 0.0)
    recomputed = backward - 2 * forward if products else 0.0
    if forward == 2 * work.attention:
        half = (backward - recomputed) / 2
        yield Remark(TORCH, _WHOLE_SQUARE, forward=work.attention, backward=half)
    if recomputed:
        yield Remark(
            TORCH,
            "flash attention stores no scores: its backward pass computes them again, "
            f"{products} products where the gradients need four",
            backward=recomputed,
        )


def _fused_head(work: Work, counted: TorchCount) -> Iterator[Remark]:
    fused = [name for name, amount in counted.forward.items() if amount == 3 * work.head]
    for operator in fused:
        if not _is_pytorchs(operator):
            yield Remark(
                TORCH,
                f"the forward pass of {operator} already computes the head's two gradients: moved "
                "from one column to the other, the total stays",
                forward=2 * work.head,
                backward=-2 * work.head,
            )


def explain_deepspeed(
    work: Work, counted: DeepSpeedCount, operators: TorchCount
) -> Iterator[Remark]:
    """What DeepSpeed's count has more or less than the analytic one, cause by cause.

    Args:
        operators: of the same step, for the names of those that DeepSpeed does not see.
    """
    products = 2 * counted.macs
    elementwise = counted.flops - products
    attention = products - work.weights
    unseen = [name for name in operators.forward if "attention" in name and not _is_pytorchs(name)]
    if attention == 2 * work.attention:
        attention -= work.attention
        yield Remark(DEEPSPEED, _WHOLE_SQUARE, forward=work.attention)
    elif attention == 0 and unseen:
        attention += work.attention
        yield Remark(
            DEEPSPEED,
            f"missed: {', '.join(unseen)}. DeepSpeed patches PyTorch's Python functions and sees "
            "no other kernel",
            forward=-work.attention,
        )
    if elementwise:
        yield Remark(
            DEEPSPEED,
            "element-wise work in functions that it patches, such as F.silu (FLOP without "
            "multiply-accumulates); operators such as * and + go uncounted",
            forward=elementwise,
        )
    yield Remark(
        DEEPSPEED,
        "it counts no backward pass; three times its figure is a step only if the backward pass "
        "is whole",
        backward=-work.step.backward,
    )
    if attention != work.attention:
        yield _unexplained(DEEPSPEED, work, attention - work.attention, 0.0)


def _unexplained(
    counter: str, work: Work, forward: float, backward: float, suspects: str = ""
) -> Remark:
    share = (abs(forward) + abs(backward)) / work.step.total
    return Remark(
        counter,
        f"not explained ({share:.2%} of the analytic count){suspects}",
        forward,
        backward,
        explained=False,
    )


def _is_pytorchs(operator: str) -> bool:
    return operator.split(".")[0] in ("aten", "prim", "prims", "profiler")


def _is_attention(operator: str) -> bool:
    """The models' products of two activations are batched, those with weights are not."""
    return "attention" in operator or operator in ("aten.bmm", "aten.baddbmm")


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
    ceiling, source = peak(request)
    assert ceiling is not None and source is not None
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
    deepspeed_lack: str
    """Why there is no count of DeepSpeed."""
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


def count(
    request: Request,
    batch: Tensor,
    with_torch: CountWithTorch,
    with_deepspeed: CountWithDeepSpeed,
    deepspeed_report: Path,
) -> Report:
    """Counts one step of the request.

    An interpreted step runs on one sequence: every count is proportional to the batch size, as
    it is not to the sequence length, and each sequence takes the interpreter seconds.

    Args:
        batch: int64 (2, B, T).
        deepspeed_report: where DeepSpeed writes what it found of each module.
    """
    if request.interpreted:
        batch = batch[:, :1]
    print(f"counting one step of {batch.shape[1]} x {batch.shape[2]} tokens ...", flush=True)
    scale = request.batch_size // batch.shape[1]
    step = eager_step(request, batch)
    counted = count_with_torch(step, with_torch)
    for phase in (counted.forward, counted.backward):
        phase.update({operator: scale * amount for operator, amount in phase.items()})
    gradients = canonical.count_gradients(step.model)
    deepspeed, lack = count_with_deepspeed(step, with_deepspeed, deepspeed_report)
    if deepspeed:
        deepspeed = DeepSpeedCount(scale * deepspeed.flops, scale * deepspeed.macs)
    return Report(
        request,
        Work.of(request.config, request.batch_size, request.seq_len),
        counted,
        deepspeed,
        lack,
        gradients,
        counted_batch=batch.shape[1],
    )


def write(report: Report, folder: Path, command: str) -> int:
    """Writes flops.json and flops.md, prints the latter; the exit status: 1 if DeepSpeed is
    installed and failed."""
    results.write_json(folder / "flops.json", _record(report, command))
    text = _markdown(report)
    results.write_text(folder / "flops.md", text)
    print(f"\n{text}\nOutputs: {folder}")
    return errors.ANSWER_IS_NO if report.deepspeed_lack.startswith("failed") else errors.DONE


def _record(report: Report, command: str) -> dict[str, Any]:
    request, analytic = report.request, report.work.step
    forward, backward = report.torch.step_flops
    deepspeed, used = report.deepspeed, report.utilisation
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
        "software": results.describe_software() | {"deepspeed": _deepspeed_version()},
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
                "lack": report.deepspeed_lack or None,
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


def _deepspeed_version() -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("deepspeed")
    return None


def _markdown(report: Report) -> str:
    request = report.request
    sequences = "sequence" if request.batch_size == 1 else "sequences"
    what = (
        f"{request.batch_size} {sequences} of {request.seq_len} tokens, "
        f"{request.precision.name}, {hardware.device_name(request.device)}."
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
        "",
    ]
    for counter in (TORCH, DEEPSPEED):
        sentences = [str(remark) for remark in report.remarks if remark.counter == counter]
        lines += [f"{counter} against the analytic count:", ""]
        if counter == TORCH or report.deepspeed:
            lines += [_wrapped(f"- {text}") for text in sentences or ["the same, to the operation"]]
        else:
            lines += _how_to_get_deepspeed(report.deepspeed_lack)
        lines.append("")
    return "\n".join([*lines, _wrapped(_utilisation_line(report)), ""])


def _how_to_get_deepspeed(lack: str) -> list[str]:
    if lack != "not installed":
        return [_wrapped(f"- {lack}")]
    why = f"- {lack}; the first lines of this file say how to keep pip from exchanging PyTorch:"
    return [_wrapped(why), f"  `{INSTALL}`"]


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
        deepspeed = (report.deepspeed_lack.split(" (")[0], "-", "-")
    ratio = f"{(forward + backward) / analytic.total:.4f}"
    rows = [
        ("counter", "forward", "backward", "of analytic"),
        (DEEPSPEED, *deepspeed),
        (TORCH, f"{forward:,}", f"{backward:,}", ratio),
        (ANALYTIC, f"{analytic.forward:,.0f}", f"{analytic.backward:,.0f}", "1.0000"),
    ]
    for number, row in enumerate(rows):
        yield "| {:<15} | {:>18} | {:>18} | {:>16} |".format(*row)
        if number == 0:
            yield f"|{'-' * 17}|{'-' * 19}:|{'-' * 19}:|{'-' * 17}:|"


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
