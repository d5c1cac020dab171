"""Advice on what bounds a run, by its kernel table, in plain sentences: each quotes its figures and
names the version of the workshop, or the lab's flag, that treats it.

A profile shows what ran, not why. So a sentence claims no more than its figures do, and where the
table does not have them (no timeline, no marker ranges, no counters) there is none.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workshop.gate.plausibility import LEAST_BACKWARD_SHARE
from workshop.labs import LabRun
from workshop.profilers import lab_answers
from workshop.profilers.metrics import (
    LAUNCH_NS,
    LEAST_NS,
    LONGEST_LAUNCH_GAP_NS,
    Figures,
    digits,
    duration,
    group,
    is_product,
)
from workshop.profilers.names import display_name, printable
from workshop.profilers.table import Kernel, KernelTable, Loading
from workshop.results import RunResult
from workshop.run import flops
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.versions import VERSIONS

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTE, WARNING = "note", "warning"
BOUND = "-bound"
MIXED = "mixed"

FEWEST_CALLS = 10
"""A training step of the smallest model launches hundreds of kernels: fewer than this are no step,
and their shares mean nothing."""
PROFILER_SLOWDOWN = 2
"""Recording an operator and its launch takes the host about as long as they take themselves, so
without the profiler it may be twice as fast, and the GPU's idle time that much shorter."""
SOMEWHAT_IDLE = 0.25
"""Share of the timeline: less than this can be the profiler's doing alone."""
LEAST_SHARES = {
    "products": 0.2,
    "elementwise": 0.15,
    "device-copies": 0.1,
    "copy": 0.05,
    "communication": 0.05,
    "optimizer": 0.03,
    "materialised-attention": 0.03,
    "unrecognised": 0.2,
}
"""Shares of the kernels' time, by finding. At the first three, halving what they are of gives a
step a few percent. The next are lower, since what treats these removes most of it. With more
kernels than the last that are not understood, the other shares say little."""
LEAST_LOADING = 0.05
"""Share of the steps' time, lost in waiting for data: what treats that removes all of it."""
LEAST_FLOPS = 0.75
"""Share of a step's products. The forward pass alone makes a third of them; without the gradient of
either the inputs or the weights two thirds remain."""
COUNTED = 0.9
"""Share of a group's time: the part whose operations or bytes must be known before their rate is
given; kernels that only add up partial products count no operations."""
FEWEST_PASSES = 3
"""Kernels of an update that goes operation by operation: SGD's is a single one as it is."""
LEAST_WAITING = 0.01
"""Share of the time: a shorter wait finds the GPU done already, so that it costs nothing more."""
OWN_WAITS = 2
"""Synchronisations that the profiler, or the script around it, makes at its start and end."""
MANY_WAITS = 10
"""In a profile whose steps are not known, beyond OWN_WAITS."""
IDLE_THAT_WAITS_COST = 0.1
"""Share of the timeline: with less of it idle, no wait has left the GPU without work."""

_WAIT = re.compile(
    r"(?:cuda|hip)(?:Device|Stream|Event)Synchronize|cu(?:Ctx|Stream|Event)Synchronize"
    r"|(?:cuda|cu|hip)Memcpy(?!\w*Async)"
)
# The computation of these kernels is in their template arguments: they follow an I in a mangled
# name, and are missing in one that rocprofv3 has truncated.
_UNFUSED = re.compile(r"multi_tensor_apply_kernel[<I](?!.*fused_?adam)", re.IGNORECASE | re.DOTALL)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_LOG_SOFTMAX = re.compile(
    r"log_?softmax"
    r"|softmax_warp_\w+<(?:[^<>,]+,){4} ?(?:true|\(bool\)1)\b"
    r"|softmax_warp_(?:for|back)wardI\w{1,80}?Li\d+ELb1E"
    r"|(?:^|::)cunn_softmax\w*$",
    re.IGNORECASE,
)
"""The loss's, which is no part of attention: some kernels say so in their fifth argument alone. The
last is a truncated name, of the rows too long for the warps' kernel, as a vocabulary's are."""
_LONGEST = 1 << 14
"""Characters of a kernel's name that are looked at: a made-up one of a megabyte would cost the
patterns above minutes."""


@dataclass(frozen=True)
class Advice:
    """One finding."""

    finding: str
    """Its short name: "launch-bound", "GEMM", "severed-gradient", ... The one that ends in
    "-bound", or is "mixed", names what bounds the run."""
    sentence: str
    treatment: str
    """Remedy, with the file or README of the workshop that has it."""
    severity: str = NOTE
    """Or WARNING: the run does not do what it seems to."""
    at_stake_ns: float = 0.0
    """The time in the profile that it is about."""


def advise(table: KernelTable, record: RunResult | LabRun | None = None) -> list[Advice]:
    """The findings on a kernel table: warnings first, then by the time at stake. Of a lab's profile
    the answers to its guide's questions precede them.

    Args:
        record: of what was profiled; None for a profile of another program.
    """
    figures = Figures(table, record)
    if figures.lab:
        return _of_lab(figures, figures.lab)
    interpreted = figures.run is not None and figures.run.interpreted
    faults = (_severed_gradient,) if interpreted else _FAULTS  # the others judge times
    found = [advice for check in faults for advice in check(figures)]
    unfit = _unfit(figures)
    if unfit:
        found.append(unfit)
    else:
        if any(advice.severity == WARNING for advice in found):
            figures.needed_flops = None  # they were not all done: no rate can be made of them
        found += [advice for check in _CHECKS for advice in check(figures)]
    return sorted(found, key=lambda advice: (advice.severity != WARNING, -advice.at_stake_ns))


def _of_lab(figures: Figures, lab: LabRun) -> list[Advice]:
    unfit = _unfit(figures)
    if unfit:
        return [unfit]
    found = [advice for check in _CHECKS for advice in check(figures)]
    treated = [
        dataclasses.replace(advice, treatment=treatment) if treatment else advice
        for advice in found
        for treatment in [lab_answers.treatment(figures, lab, advice.finding.removesuffix(BOUND))]
    ]
    answers = [Advice(*answer) for answer in lab_answers.answers(figures, lab)]
    return [*answers, *sorted(treated, key=lambda advice: -advice.at_stake_ns)]


def headline(advices: Iterable[Advice]) -> Advice | None:
    """The one that names what bounds the run; None if the metrics do not show it."""
    return next(
        (advice for advice in advices if advice.finding.endswith(BOUND) or advice.finding == MIXED),
        None,
    )


def render(advices: Sequence[Advice]) -> RenderableType:
    """The sentences for rich's console. Needs rich."""
    from rich.text import Text

    text, first = Text(), headline(advices)
    for advice in advices:
        style = "red" if advice.severity == WARNING else "bold" if advice is first else ""
        text.append(f"- {advice.sentence}\n", style)
        text.append(f"  {advice.treatment}\n", "dim")
    return text


# --- the step is not the training step that it seems to be ---------------------------------------


def _severed_gradient(figures: Figures) -> Iterator[Advice]:
    reached = figures.run.gradients if figures.run else None
    if reached is None or reached.params_with_grad >= reached.params_total:
        return
    line = figures.table.timeline
    yield Advice(
        "severed-gradient",
        f"Severed gradient: only {reached.params_with_grad:,} of {reached.params_total:,} "
        f"parameters ({reached.params_with_grad / reached.params_total:.1%}), in "
        f"{reached.tensors_with_grad:,} of {reached.tensors_total:,} tensors, received one. The "
        "step trains only that part of the model.",
        _ask_the_gate(figures.run),
        WARNING,
        # All of the time is: no other finding is larger.
        max(figures.total_ns, line.span_ns if line else 0.0),
    )


def _short_backward(figures: Figures) -> Iterator[Advice]:
    phases = figures.table.phases_ns
    forward, backward = phases.get("forward", 0.0), phases.get("backward", 0.0)
    trains = figures.run is not None or "backward" in phases or "optimizer" in phases
    if not trains or forward <= 0 or backward >= LEAST_BACKWARD_SHARE * forward:
        return
    reached = figures.run.gradients if figures.run else None
    if reached and reached.params_with_grad == reached.params_total:
        return  # V3's forward pass computes gradients too: most of all, with a large vocabulary
    ratio = f"{backward / forward:.2f} of the forward's {figures.time(forward)}"
    outside = figures.total_ns - forward - backward - phases.get("optimizer", 0.0)
    if outside >= LEAST_BACKWARD_SHARE * forward:
        yield Advice(
            "backward-unplaced",
            f"The kernels in the backward range take {figures.time(backward)}, {ratio}, but "
            f"{figures.time(outside)} lie outside of all ranges: a range belongs to the thread "
            "that opened it, and autograd runs the backward pass on another. The ranges can't show "
            "whether it is whole.",
            "run_pytorch_profiler.py places the backward pass right, in each version's folder.",
            at_stake_ns=outside,
        )
        return
    yield Advice(
        "short-backward",
        f"The backward pass is all but absent: its kernels take {figures.time(backward)}, {ratio}. "
        "It has twice the forward's products to compute, so a part of it did not run: a severed "
        "gradient.",
        _ask_the_gate(figures.run),
        WARNING,
        forward,
    )


def _missing_products(figures: Figures) -> Iterator[Advice]:
    """By the operations that a step must do, where the record has the model's sizes."""
    needed, peak = figures.needed_flops, figures.peak_tflops
    if needed is None or figures.total_ns < LEAST_NS:
        return
    counted = _counted_flops(figures)
    rate = needed / figures.total_ns / 1e3
    if counted is not None and counted < LEAST_FLOPS * needed:
        facts = (
            f"the profiler counted {digits(counted / 1e12)} TFLOP in {figures.steps:,} steps, "
            f"{counted / needed:.2f} of the {digits(needed / 1e12)}"
        )
    elif peak and rate > peak:
        facts = (
            f"all kernels together took {duration(figures.total_ns)}, in which the chip can do "
            f"{digits(peak * figures.total_ns / 1e9)} TFLOP (data sheet), not the "
            f"{digits(needed / 1e12)}"
        )
    else:
        return
    yield Advice(
        "missing-products",
        f"Products are missing: {facts} that the forward and backward pass of this model need. "
        "Either kernels are missing from the profile, or a part of the backward pass did not run.",
        "Profile whole steps, as the run_* scripts do: a range of one thread misses the backward "
        f"pass. {_ask_the_gate(figures.run)}",
        WARNING,
        figures.total_ns,
    )


def _counted_flops(figures: Figures) -> float | None:
    """Operations of all kernels, where counters cover those of the products."""
    covered_ns = _time(k for k in figures.table.kernels if is_product(k) and k.flops)
    if covered_ns <= 0 or covered_ns < COUNTED * figures.products_ns:
        return None
    return sum(kernel.flops or 0.0 for kernel in figures.table.kernels)


def _unfit(figures: Figures) -> Advice | None:
    """Why the times say nothing; None if they do."""
    if figures.run and figures.run.interpreted:
        return Advice(
            "interpreted",
            f"{_capital(NOT_COMPARABLE)}: Triton's interpreter ran this version's kernels on the "
            "CPU, so these times say nothing about them.",
            "Profile it on a GPU; `python -m workshop.kernels.inspect` shows without one what the "
            "compiler makes of the kernels.",
        )
    if figures.launches < FEWEST_CALLS or figures.total_ns < LEAST_NS:
        return Advice(
            "too-few",
            f"Calls in this profile: {figures.launches:,}, of {duration(figures.total_ns)} in all. "
            "They are too few to be a training step, or to say anything of one.",
            "Profile whole training steps: --steps N of the run_* scripts.",
        )
    return None


# --- the bound, outside of the kernels ------------------------------------------------------


def _idle(figures: Figures) -> Iterator[Advice]:
    share, line, bound = figures.idle_share, figures.table.timeline, figures.bound
    if share is None or line is None or share < SOMEWHAT_IDLE or bound == "data":
        return
    facts = (
        f"the GPU idles {share:.0%} of the time ({duration(line.idle_ns)} of "
        f"{duration(line.span_ns)}). It runs {figures.times(figures.line_launches, 'kernels')}, "
        f"{duration(figures.total_ns / figures.launches)} long on average, with "
        f"{duration(figures.gap_ns)} between them.{_host_launches(figures)} "
    )
    if bound == "launch":
        still_idle = max(0.0, 1 - PROFILER_SLOWDOWN * line.busy_ns / line.span_ns)
        facts += (
            f"The profiler slows the host; were it {PROFILER_SLOWDOWN} times as fast without, the "
            f"GPU would still idle {still_idle:.0%}."
        )
        treatment = [
            "--cuda-graph captures the step, and one launch replays all of it: it works with every "
            f"version, and {_where('v4')} does so by default.",
            *_beyond(figures, v2="{} does the same in fewer kernels."),
        ]
    elif bound == "host":
        why = (
            "its kernels come out of a graph"
            if figures.in_graphs
            else f"gaps of more than {duration(LONGEST_LAUNCH_GAP_NS)} are longer than those"
        )
        facts += (
            f"The GPU waits for the host, and not for ordinary launches ({why}): for data, for "
            "Python between the steps, or for start-up, in which code is loaded and compiled, if "
            "the profile covers it."
        )
        treatment = [
            "Look at what the host's threads do in the gaps of the timeline, which "
            "run_pytorch_profiler.py writes in each version's folder; workshop/run/data.py makes "
            "all batches before the first step."
        ]
    elif bound == "latency":
        facts += (
            f"Eager PyTorch takes at least {duration(LAUNCH_NS)} to launch a kernel, and these "
            f"follow each other every {duration(figures.pace_ns)}: the gaps lie between kernels "
            "that were launched together, as those of a graph are."
        )
        treatment = [
            "Only fewer kernels, or longer ones, make this less: --batch-size and --config give "
            "each of them more to do.",
            *_beyond(figures, v2=_V2_FUSES, v3="{} does more in each kernel of its own.", v4=_V4),
        ]
    else:
        facts += "The profiler slows the host, so a part of this is its own doing."
        treatment = [
            "Compare the span of a step here with its time without a profiler, which "
            "analysis_tools/compare_versions.py measures."
        ]
        yield Advice("idle", _capital(facts), treatment[0], at_stake_ns=line.idle_ns)
        return
    sentence = f"{bound}{BOUND}: {facts}"
    yield Advice(bound + BOUND, sentence, " ".join(treatment), at_stake_ns=line.idle_ns)


def _data(figures: Figures) -> Iterator[Advice]:
    loading = figures.table.loading
    if loading is None or figures.data_share < LEAST_LOADING:
        return
    rest_ns = loading.span_ns - loading.lost_ns
    wait, rest = (duration(ns / loading.batches) for ns in (loading.wait_ns, rest_ns))
    if loading.in_thread:
        how, first = "makes the batches there", _WORKERS_FIRST
        needed = f"num_workers={math.ceil(loading.wait_ns / rest_ns):,} would load as fast"
    else:
        how, first = "waits for its workers", _MORE_WORKERS_FIRST
        needed = f"the workers have to load {digits(loading.span_ns / rest_ns)} times as fast"
    idle = loading.gpu_idle_ns
    meanwhile = f" The GPU idles {idle / loading.wait_ns:.0%} of that." if idle else ""
    sentence = (
        f"the main thread spends {loading.wait_ns / loading.span_ns:.0%} of the "
        f"{'step' if figures.steps else 'time'} in the DataLoader, which {how}: {wait} a batch."
        f"{meanwhile} Without this loss the loop takes {rest} a batch: {needed}."
        f"{_rates(figures, loading, rest_ns)}"
    )
    yield _of_group(figures, "data", sentence, f"{first} {_CHEAPER_BATCHES}", loading.lost_ns)


def _rates(figures: Figures, loading: Loading, rest_ns: float) -> str:
    """Rates of a lab's pipeline and model, as its record has them, else by the trace."""
    lab = figures.lab
    if lab is None:
        return ""
    units = lab.units_per_step * loading.batches * 1e9
    if prepared := _metric(lab, "worker_per_s"):
        source = f"One worker prepares {digits(prepared)}"
    elif loading.in_thread:
        source = f"The main thread makes {digits(units / loading.wait_ns)}"
    else:
        source = f"The workers bring {digits(units / loading.span_ns)}"
    model = _metric(lab, "model_per_s") or units / rest_ns
    return f" {source} {lab.unit}/s, the model takes {digits(model)}."


def _metric(lab: LabRun, name: str) -> float | None:
    value = lab.metrics.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _host_launches(figures: Figures) -> str:
    calls = {"launch calls": figures.launch_calls, "graph launches": figures.graph_launches}
    parts = [
        f"{figures.times(call.calls, what)}, {duration(call.total_ns / call.calls)} each"
        for what, call in calls.items()
        if call.calls
    ]
    return f" The host makes {' and '.join(parts)}." if parts else ""


def _mixed(figures: Figures) -> Iterator[Advice]:
    if figures.bound is None:
        categories = list(figures.table.category_ns().items())[:3]
        parts = ", ".join(f"{name} {ns / figures.total_ns:.0%}" for name, ns in categories)
        yield Advice(
            MIXED,
            f"No known kind of {figures.calls} bounds this run alone. The largest parts of their "
            f"time: {parts}.",
            "Take the findings one by one, the largest first; README.md lists what each version "
            "does.",
            at_stake_ns=sum(ns for _, ns in categories),
        )


def _no_timeline(figures: Figures) -> Iterator[Advice]:
    if figures.on_host or figures.table.timeline is not None:
        return
    sentence = (
        f"This table, of {printable(figures.table.tool)}, has no timeline: how long the GPU idles, "
        "and whether launching bounds the run, can't be seen in sums."
    )
    mean = figures.total_ns / figures.launches
    if mean < LAUNCH_NS and not figures.in_graphs:
        sentence += (
            f" But its kernels are {duration(mean)} long on average, and eager PyTorch takes at "
            f"least {duration(LAUNCH_NS)} to launch one: unless they come out of a graph, this "
            "run is launch-bound."
        )
    yield Advice(
        "no-timeline",
        sentence,
        "run_pytorch_profiler.py writes a timeline, in each version's folder.",
    )


# --- where the kernels' time goes ----------------------------------------------------------------


def _products(figures: Figures) -> Iterator[Advice]:
    kind, ns = figures.products, figures.products_ns
    if kind != figures.bound and _is_small(figures, "products", ns):
        return
    both = ((name, figures.groups_ns[name]) for name in ("GEMM", "attention"))
    parts = ", ".join(f"{name} {figures.time(part)}" for name, part in both if part)
    sentence = f"matrix products take {figures.of_all(ns)} ({parts}).{_product_rate(figures)}"
    yield _of_group(figures, kind, sentence, _product_treatment(figures), ns)


def _product_rate(figures: Figures) -> str:
    """Rate of the products: by counters, else by the operations that the model's sizes ask for."""
    counted = [k for k in figures.table.kernels if is_product(k) and k.flops]
    ns = _time(counted)
    if counted and ns >= COUNTED * figures.products_ns > 0:
        operations = sum(kernel.flops or 0.0 for kernel in counted)
        facts = f" The profiler counted {digits(operations / 1e12)} TFLOP in {duration(ns)} of it"
    elif figures.needed_flops and figures.steps and figures.products_ns:
        operations, ns = figures.needed_flops, figures.products_ns
        each = digits(operations / figures.steps / 1e12)
        counted_how = "" if figures.lab else ", causal attention counted by half"
        facts = f" A step needs {each} TFLOP{counted_how}"
    else:
        return ""
    rate, peak = operations / ns / 1e3, figures.peak_tflops
    if peak is None:
        return f"{facts}: {digits(rate)} TFLOP/s."
    if rate > peak:  # of another precision's units, or not all in kernels with a product's name
        return ""
    return (
        f"{facts}: {digits(rate)} TFLOP/s, {rate / peak:.0%} of the {digits(peak)} that the data "
        f"sheet gives for {figures.precision}."
    )


def _product_treatment(figures: Figures) -> str:
    run = figures.run
    if figures.on_host:
        return (
            "The CPU's library computes them. Most of what the workshop's versions change lies "
            "between them: profile on a GPU, where that takes more of the time (README.md)."
        )
    if run is None:
        return (
            "If they run in fp32, bf16 or tf32 is faster (--precision here); else larger products "
            f"are: a larger batch, and weights stacked as in {_where('v2')}."
        )
    faster = {"fp32": ["tf32", "bf16"], "tf32": ["bf16"]}.get(run.precision)
    if faster is None:
        advice = [
            "What is left is the products' own rate, which is higher for larger ones: "
            "--batch-size, --config.",
            *_beyond(figures, v2="{} makes one product of q, k and v, and one of gate and up."),
        ]
        return " ".join(advice)
    rates = figures.peaks.tflops if figures.peaks else {}
    faster = [name for name in faster if name in rates or not rates]
    facts = [f"{name} {digits(rates[name])}" for name in (run.precision, *faster) if name in rates]
    sheet = f" (TFLOP/s on the data sheet: {', '.join(facts)})" if facts else ""
    return (
        f"--precision {' or '.join(faster)} uses faster units{sheet}; PERFORMANCE_RESULTS.md "
        "has every version's times at both."
    )


def _elementwise(figures: Figures) -> Iterator[Advice]:
    ns = figures.groups_ns["elementwise"]
    if figures.bound != "elementwise" and _is_small(figures, "elementwise", ns):
        return
    kernels = [k for k in figures.table.kernels if group(k) == "elementwise"]
    named = {"elementwise": "elementwise", "norm": "norm", "copy": _copies(figures)}
    by_category = {c: _time(k for k in kernels if k.category == c) for c in named}
    parts = ", ".join(f"{named[c]} {figures.time(part)}" for c, part in by_category.items() if part)
    sentence = (
        f"work that moves memory and computes little takes {figures.of_all(ns)} "
        f"({parts}), in {figures.times(_calls(kernels), figures.calls)}."
        f"{_memory_rate(figures, kernels)}"
    )
    v3 = "{} passes over memory once, in kernels of its own."
    treatment = _treatment(figures, v2=_V2_FUSES, v3=v3, v4=_V4)
    yield _of_group(figures, "elementwise", sentence, treatment, ns)


def _memory_rate(figures: Figures, kernels: list[Kernel]) -> str:
    counted = [kernel for kernel in kernels if kernel.bytes]
    moved, ns = sum(k.bytes or 0.0 for k in counted), _time(counted)
    if not counted or ns <= 0 or ns < COUNTED * figures.groups_ns["elementwise"]:
        return ""
    share, peak = "", figures.peaks.bandwidth_gbs if figures.peaks else 0.0
    if moved / ns <= peak:  # more comes out of a cache, and is no share of the memory's rate
        share = f", {moved / ns / peak:.0%} of the {digits(peak)} of the data sheet"
    return (
        f" The profiler counted {digits(moved / 1e9)} GB in {duration(ns)} of it: "
        f"{digits(moved / ns)} GB/s{share}."
    )


def _device_copies(figures: Figures) -> Iterator[Advice]:
    copies = [
        k for k in figures.table.kernels if k.category == "copy" and group(k) == "elementwise"
    ]
    ns = _time(copies)
    if _is_small(figures, "device-copies", ns):
        return
    yield Advice(
        "device-copies",
        f"{_capital(_copies(figures))} take {_share(figures, ns)}, in "
        f"{figures.times(_calls(copies), figures.calls)}, and compute nothing: casts to another "
        "precision, transposed tensors made contiguous, fills.",
        _treatment(
            figures,
            v3="{} reads and writes the products' precision in its own kernels.",
            v4="{} has the compiler cast in the kernel before or after.",
        ),
        at_stake_ns=ns,
    )


def _copies(figures: Figures) -> str:
    return "copies in memory" if figures.on_host else "copies on the device"


def _materialised_attention(figures: Figures) -> Iterator[Advice]:
    ns = _time(k for k in figures.table.kernels if _is_softmax(k))
    small = ns <= 0 or _is_small(figures, "materialised-attention", ns)
    if figures.groups_ns["attention"] or small:
        return
    size = ""
    if figures.run and figures.sizes:
        batch, length = figures.run.batch_size, figures.run.seq_len
        size = f" ({batch:,} x {figures.sizes.num_heads} x {length:,} x {length:,} numbers a layer)"
    yield Advice(
        "materialised-attention",
        f"Softmax {figures.calls} take {_share(figures, ns)}, and nothing runs "
        f"that is made for attention: the scores{size} go through memory.",
        _treatment(
            figures,
            v2="{} calls F.scaled_dot_product_attention, which keeps them on the chip.",
            v3="{} does so in a Triton kernel that one can read.",
        ),
        at_stake_ns=ns,
    )


def _optimizer(figures: Figures) -> Iterator[Advice]:
    unfused = [k for k in figures.table.kernels if _is_named(k, _UNFUSED)]
    ns = _time(unfused)
    if len(unfused) >= FEWEST_PASSES and not _is_small(figures, "optimizer", ns):
        passes = (
            f", in {figures.times(_calls(unfused), 'kernels')}: a pass over the parameters for "
            "each of its operations"
        )
        treatment = f"AdamW(fused=True) makes a single pass: configure_optimizer of {_where('v2')}."
    elif figures.bound == "optimizer":
        passes, ns = "", figures.groups_ns["optimizer"]
        treatment = (
            "An update costs the same however many tokens it follows: a larger --batch-size makes "
            "it a smaller part (compare the sizes in PERFORMANCE_RESULTS.md)."
        )
    else:
        return
    sentence = (
        f"the optimizer's update takes {_share(figures, ns)}{passes}.{_least_update(figures)}"
    )
    yield _of_group(figures, "optimizer", sentence, treatment, ns)


def _least_update(figures: Figures) -> str:
    """Least time of an update, where the model and the chip are known."""
    if figures.sizes is None or figures.peaks is None:
        return ""
    each, rate = flops.ADAMW_BYTES_PER_PARAMETER, figures.peaks.bandwidth_gbs
    moved = flops.parameter_count(figures.sizes) * each
    return (
        f" AdamW must move {each} bytes a parameter, {digits(moved / 1e9)} GB: "
        f"{duration(moved / rate)} at the data sheet's {digits(rate)} GB/s."
    )


def _host_copies(figures: Figures) -> Iterator[Advice]:
    ns = figures.groups_ns["copy"]
    if figures.bound != "copy" and _is_small(figures, "copy", ns):
        return
    copies = [kernel for kernel in figures.table.kernels if group(kernel) == "copy"]
    sentence = (
        f"copies between host and device take {_share(figures, ns)}, in "
        f"{figures.times(_calls(copies), 'copies')}."
    )
    if any("pageable" in kernel.name.lower() for kernel in copies):
        sentence += " Some are from or to pageable memory, where a copy holds the host up."
    treatment = (
        "Keep on the device what is used again; pin the host's memory and copy with "
        "non_blocking=True, as Runner does with the batches (workshop/run/trainer.py)."
    )
    yield _of_group(figures, "copy", sentence, treatment, ns)


def _communication(figures: Figures) -> Iterator[Advice]:
    ns, line = figures.groups_ns["communication"], figures.table.timeline
    if figures.bound != "communication" and _is_small(figures, "communication", ns):
        return
    sentence = f"communication between devices takes {_share(figures, ns)}."
    # Communication that the others can't cover, even if none of them overlap, is exposed.
    exposed = line.busy_ns - (figures.total_ns - ns) if line else 0.0
    if exposed > 0:
        sentence += f" At least {figures.time(exposed)} of it pass while nothing else runs."
    treatment = (
        "The workshop's versions train on one device and have none. Send gradients in larger "
        "buckets, while the backward pass still runs: DistributedDataParallel does both."
    )
    yield _of_group(figures, "communication", sentence, treatment, ns)


def _waits(figures: Figures) -> Iterator[Advice]:
    waits, idle = figures.host_calls(_WAIT), figures.idle_share
    if figures.on_host or waits.calls <= OWN_WAITS + (figures.steps or MANY_WAITS):
        return
    line = figures.table.timeline
    span = line.span_ns if line else figures.total_ns
    if waits.total_ns < LEAST_WAITING * span or (idle is not None and idle < IDLE_THAT_WAITS_COST):
        return
    calls = {name: c.calls for name, c in figures.table.host_calls.items() if _WAIT.match(name)}
    most = sorted(calls, key=lambda name: (-calls[name], name))[:3]
    names = ", ".join(f"{display_name(name, 40)} {calls[name]:,}" for name in most)
    yield Advice(
        "synchronisations",
        f"The host waits for the GPU {figures.times(waits.calls, 'times')} (in all: {names}), "
        f"{figures.time(waits.total_ns)}. A thread that waits launches nothing: once the GPU has "
        "done what all streams hold, it idles until the next launch reaches it.",
        "Leave out of the loop what reads a result on the host: .item(), .cpu(), printing a "
        "tensor, copies without non_blocking=True. Runner (workshop/run/trainer.py) looks at the "
        "losses after the run.",
        at_stake_ns=min(waits.total_ns, line.idle_ns) if line else waits.total_ns,
    )


def _unrecognised(figures: Figures) -> Iterator[Advice]:
    ns = figures.groups_ns["other"]
    if _is_small(figures, "unrecognised", ns):
        return
    longest = next(kernel for kernel in figures.table.kernels if group(kernel) == "other")
    yield Advice(
        "unrecognised",
        f"{_share(figures, ns)} went into {figures.calls} of no category, "
        f"above all {display_name(longest.name, 60)} ({figures.time(longest.total_ns)}): the other "
        "shares may be larger than they seem.",
        "workshop/profilers/categories.py assigns categories by name: add what is missing.",
        at_stake_ns=ns,
    )


# --- what they share -----------------------------------------------------------------------------

_WORKERS_FIRST = (
    "Workers first, as many as there are free cores, with persistent_workers=True, or each epoch "
    "starts them again."
)
_MORE_WORKERS_FIRST = (
    "More workers first, while there are free cores; a larger prefetch_factor helps only where "
    "some batches take longer than others."
)
_CHEAPER_BATCHES = (
    "Then cheaper batches: files decoded once and packed into one, augmentation on the GPU "
    "(pin_memory=True for the copies), or all data kept there."
)
_V2_FUSES = "{} has fused forms of norm and attention."
_V4 = "{} has the compiler join what lies between the products."


def _is_small(figures: Figures, finding: str, ns: float) -> bool:
    return ns < LEAST_SHARES[finding] * figures.total_ns


def _of_group(figures: Figures, name: str, sentence: str, treatment: str, ns: float) -> Advice:
    """A finding about one group of kernels, named "-bound" if it bounds the run.

    Args:
        sentence: beginning with a small letter.
    """
    if name == figures.bound:
        name += BOUND
        sentence = f"{name}: {sentence}"
    else:
        sentence = _capital(sentence)
    return Advice(name, sentence, treatment, at_stake_ns=ns)


def _where(version: str) -> str:
    return f"{version.upper()} ({VERSIONS[version].folder}/README.md)"


def _beyond(figures: Figures, **sentences: str) -> list[str]:
    """The sentences, by version, of those that can treat the run: on which its version is not
    built, and which this kind of machine can time; {} becomes the version's name and README."""
    built_on, key = set(), figures.run.version if figures.run else None
    while key is not None:
        built_on.add(key)
        key = VERSIONS[key].parent
    return [
        sentence.format(_where(version))
        for version, sentence in sentences.items()
        if version not in built_on and not (figures.on_host and VERSIONS[version].triton)
    ]


def _treatment(figures: Figures, **sentences: str) -> str:
    """The sentences of `_beyond` as one text, and another where there are none."""
    left = f"This is what {_where(figures.run.version)} leaves of it." if figures.run else ""
    return " ".join(_beyond(figures, **sentences)) or left


def _ask_the_gate(run: RunResult | None) -> str:
    version = f" --version {run.version}" if run else ""
    return (
        f"No time of such a step counts. python -m workshop.parity{version} (the gate, "
        "workshop/gate/parity.py) compares every parameter's gradient with V1's; look for a "
        "detach(), a no_grad(), a kernel without a backward pass."
    )


def _is_softmax(kernel: Kernel) -> bool:
    return _is_named(kernel, _SOFTMAX) and not _is_named(kernel, _LOG_SOFTMAX)


def _is_named(kernel: Kernel, pattern: re.Pattern[str]) -> bool:
    return pattern.search(kernel.name, 0, _LONGEST) is not None


def _share(figures: Figures, ns: float) -> str:
    """As in "62% of the kernels' time (12.4 ms a step)"."""
    return f"{figures.of_all(ns)} ({figures.time(ns)})"


def _calls(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.calls for kernel in kernels)


def _time(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.total_ns for kernel in kernels)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_Check = Callable[[Figures], Iterator[Advice]]
_FAULTS: tuple[_Check, ...] = (_severed_gradient, _short_backward, _missing_products)
_CHECKS: tuple[_Check, ...] = (
    _data,
    _idle,
    _mixed,
    _products,
    _elementwise,
    _device_copies,
    _materialised_attention,
    _optimizer,
    _host_copies,
    _communication,
    _waits,
    _unrecognised,
    _no_timeline,
)
