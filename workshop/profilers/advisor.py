"""Advice on what bounds a run, by its kernel table, in plain sentences: each quotes its figures and
names the version of the workshop, or the lab's flag, that treats it.

A profile shows what ran, not why. So a sentence claims no more than its figures do, and where the
table does not have them (no timeline, no marker ranges, no counters) there is no sentence.

A rule returns (finding, sentence, time at stake in ns), or None where it finds nothing. The finding
that bounds the run gets "-bound" at its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
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
    calls_of,
    digits,
    duration,
    group,
    is_product,
    time_of,
)
from workshop.profilers.names import display_name, printable
from workshop.profilers.table import Kernel, KernelTable, Loading
from workshop.profilers.treatments import treatment, unfused_update
from workshop.results import RunResult
from workshop.run import flops
from workshop.run.interpreter import NOT_COMPARABLE

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


Found = tuple[str, str, float]


def advise(table: KernelTable, record: RunResult | LabRun | None = None) -> list[Advice]:
    """The findings on a kernel table: warnings first, then by the time at stake. Of a lab's profile
    the answers to its guide's questions precede them.

    Args:
        record: of what was profiled; None for a profile of another program.
    """
    figures = Figures(table, record)
    unfit = _unfit(figures)
    if figures.lab:
        if unfit:
            return [unfit]
        answers = [Advice(*answer) for answer in lab_answers.answers(figures, figures.lab)]
        return [*answers, *_by_stake(_check(figures, _RULES, NOTE))]
    interpreted = figures.run is not None and figures.run.interpreted
    faults = _FAULTS[:1] if interpreted else _FAULTS  # the others judge times
    found = _check(figures, faults, WARNING)
    if unfit:
        found.append(unfit)
    else:
        if any(advice.severity == WARNING for advice in found):
            figures.needed_flops = None  # they were not all done: no rate can be made of them
        found += _check(figures, _RULES, NOTE)
    return _by_stake(found)


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


def _check(figures: Figures, rules: Iterable[_Rule], severity: str) -> list[Advice]:
    advices = []
    for rule in rules:
        if found := rule(figures):
            finding, sentence, at_stake_ns = found
            remedy = treatment(figures, finding)
            weight = NOTE if finding == _UNPLACED else severity
            if severity == NOTE and finding == figures.bound:
                finding += BOUND
                sentence = f"{finding}: {sentence}"
            sentence = sentence if finding.endswith(BOUND) else sentence[0].upper() + sentence[1:]
            advices.append(Advice(finding, sentence, remedy, weight, at_stake_ns))
    return advices


def _by_stake(advices: list[Advice]) -> list[Advice]:
    return sorted(advices, key=lambda advice: (advice.severity != WARNING, -advice.at_stake_ns))


def _unfit(figures: Figures) -> Advice | None:
    """Why the times say nothing; None if they do."""
    if figures.run and figures.run.interpreted:
        return Advice(
            "interpreted",
            f"{NOT_COMPARABLE.capitalize()}: Triton's interpreter ran this version's kernels on "
            "the CPU, so these times say nothing about them.",
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


# --- the step is not the training step that it seems to be ---------------------------------------

_UNPLACED = "backward-unplaced"


def _severed_gradient(figures: Figures) -> Found | None:
    reached = figures.run.gradients if figures.run else None
    if reached is None or reached.params_with_grad >= reached.params_total:
        return None
    sentence = (
        f"Severed gradient: only {reached.params_with_grad:,} of {reached.params_total:,} "
        f"parameters ({reached.params_with_grad / reached.params_total:.1%}), in "
        f"{reached.tensors_with_grad:,} of {reached.tensors_total:,} tensors, received one. The "
        "step trains only that part of the model."
    )
    line = figures.table.timeline  # all of the time is at stake: no other finding is larger
    return "severed-gradient", sentence, max(figures.total_ns, line.span_ns if line else 0.0)


def _short_backward(figures: Figures) -> Found | None:
    phases = figures.table.phases_ns
    forward, backward = phases.get("forward", 0.0), phases.get("backward", 0.0)
    trains = figures.run is not None or "backward" in phases or "optimizer" in phases
    if not trains or forward <= 0 or backward >= LEAST_BACKWARD_SHARE * forward:
        return None
    reached = figures.run.gradients if figures.run else None
    if reached and reached.params_with_grad == reached.params_total:
        return None  # V3's forward pass computes gradients too: most, with a large vocabulary
    ratio = f"{backward / forward:.2f} of the forward's {figures.time(forward)}"
    outside = figures.total_ns - forward - backward - phases.get("optimizer", 0.0)
    if outside >= LEAST_BACKWARD_SHARE * forward:
        sentence = (
            f"The kernels in the backward range take {figures.time(backward)}, {ratio}, but "
            f"{figures.time(outside)} lie outside of all ranges: a range belongs to the thread "
            "that opened it, and autograd runs the backward pass on another. The ranges can't show "
            "whether it is whole."
        )
        return _UNPLACED, sentence, outside
    sentence = (
        f"The backward pass is all but absent: its kernels take {figures.time(backward)}, {ratio}. "
        "It has twice the forward's products to compute, so a part of it did not run: a severed "
        "gradient."
    )
    return "short-backward", sentence, forward


def _missing_products(figures: Figures) -> Found | None:
    """By the operations that a step must do, where the record has the model's sizes."""
    needed, peak = figures.needed_flops, figures.peak_tflops
    if needed is None or figures.total_ns < LEAST_NS:
        return None
    rate = needed / figures.total_ns / 1e3
    covered_ns = time_of(k for k in figures.table.kernels if is_product(k) and k.flops)
    is_counted = covered_ns > 0 and covered_ns >= COUNTED * figures.products_ns
    counted = sum(kernel.flops or 0.0 for kernel in figures.table.kernels)
    if is_counted and counted < LEAST_FLOPS * needed:
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
        return None
    sentence = (
        f"Products are missing: {facts} that the forward and backward pass of this model need. "
        "Either kernels are missing from the profile, or a part of the backward pass did not run."
    )
    return "missing-products", sentence, figures.total_ns


# --- the bound, outside of the kernels -----------------------------------------------------------


def _idle(figures: Figures) -> Found | None:
    share, line, bound = figures.idle_share, figures.table.timeline, figures.bound
    if share is None or line is None or share < SOMEWHAT_IDLE or bound == "data":
        return None
    calls = {"launch calls": figures.launch_calls, "graph launches": figures.graph_launches}
    launched = " and ".join(
        f"{figures.times(call.calls, what)}, {duration(call.total_ns / call.calls)} each"
        for what, call in calls.items()
        if call.calls
    )
    facts = (
        f"the GPU idles {share:.0%} of the time ({duration(line.idle_ns)} of "
        f"{duration(line.span_ns)}). It runs {figures.times(figures.line_launches, 'kernels')}, "
        f"{duration(figures.total_ns / figures.launches)} long on average, with "
        f"{duration(figures.gap_ns)} between them.{launched and f' The host makes {launched}.'} "
    )
    still_idle = max(0.0, 1 - PROFILER_SLOWDOWN * line.busy_ns / line.span_ns)
    host = (
        "its kernels come out of a graph"
        if figures.in_graphs
        else f"gaps of more than {duration(LONGEST_LAUNCH_GAP_NS)} are longer than those"
    )
    why = {
        "launch": f"The profiler slows the host; were it {PROFILER_SLOWDOWN} times as fast "
        f"without, the GPU would still idle {still_idle:.0%}.",
        "host": f"The GPU waits for the host, and not for ordinary launches ({host}): for data, "
        "for Python between the steps, or for start-up, in which code is loaded and compiled, if "
        "the profile covers it.",
        "latency": f"Eager PyTorch takes at least {duration(LAUNCH_NS)} to launch a kernel, and "
        f"these follow each other every {duration(figures.pace_ns)}: the gaps lie between kernels "
        "that were launched together, as those of a graph are.",
        "idle": "The profiler slows the host, so a part of this is its own doing.",
    }
    name = bound if bound in why else "idle"
    return name, facts + why[name], line.idle_ns


def _data(figures: Figures) -> Found | None:
    loading = figures.table.loading
    if loading is None or figures.data_share < LEAST_LOADING:
        return None
    rest_ns = loading.span_ns - loading.lost_ns
    wait, rest = (duration(ns / loading.batches) for ns in (loading.wait_ns, rest_ns))
    if loading.in_thread:
        how = "makes the batches there"
        needed = f"num_workers={math.ceil(loading.wait_ns / rest_ns):,} would load as fast"
    else:
        how = "waits for its workers"
        needed = f"the workers have to load {digits(loading.span_ns / rest_ns)} times as fast"
    idle = loading.gpu_idle_ns
    meanwhile = f" The GPU idles {idle / loading.wait_ns:.0%} of that." if idle else ""
    sentence = (
        f"the main thread spends {loading.wait_ns / loading.span_ns:.0%} of the "
        f"{'step' if figures.steps else 'time'} in the DataLoader, which {how}: {wait} a batch."
        f"{meanwhile} Without this loss the loop takes {rest} a batch: {needed}."
        f"{_rates(figures.lab, loading, rest_ns) if figures.lab else ''}"
    )
    return "data", sentence, loading.lost_ns


def _rates(lab: LabRun, loading: Loading, rest_ns: float) -> str:
    """Rates of a lab's pipeline and model, as its record has them, else by the trace."""
    units = lab.units_per_step * loading.batches * 1e9
    prepared, model = (lab.metrics.get(name) for name in ("worker_per_s", "model_per_s"))
    if isinstance(prepared, int | float) and prepared > 0:
        source = f"One worker prepares {digits(prepared)}"
    elif loading.in_thread:
        source = f"The main thread makes {digits(units / loading.wait_ns)}"
    else:
        source = f"The workers bring {digits(units / loading.span_ns)}"
    known = isinstance(model, int | float) and model > 0
    rate = float(model) if known and model else units / rest_ns
    return f" {source} {lab.unit}/s, the model takes {digits(rate)}."


def _waits(figures: Figures) -> Found | None:
    waits, idle = figures.host_calls(_WAIT), figures.idle_share
    if figures.on_host or waits.calls <= OWN_WAITS + (figures.steps or MANY_WAITS):
        return None
    line = figures.table.timeline
    span = line.span_ns if line else figures.total_ns
    if waits.total_ns < LEAST_WAITING * span or (idle is not None and idle < IDLE_THAT_WAITS_COST):
        return None
    calls = {name: c.calls for name, c in figures.table.host_calls.items() if _WAIT.match(name)}
    most = sorted(calls, key=lambda name: (-calls[name], name))[:3]
    names = ", ".join(f"{display_name(name, 40)} {calls[name]:,}" for name in most)
    sentence = (
        f"The host waits for the GPU {figures.times(waits.calls, 'times')} (in all: {names}), "
        f"{figures.time(waits.total_ns)}. A thread that waits launches nothing: once the GPU has "
        "done what all streams hold, it idles until the next launch reaches it."
    )
    return "synchronisations", sentence, min(waits.total_ns, line.idle_ns if line else math.inf)


def _no_timeline(figures: Figures) -> Found | None:
    if figures.on_host or figures.table.timeline is not None:
        return None
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
    return "no-timeline", sentence, 0.0


# --- where the kernels' time goes ----------------------------------------------------------------


def _is_small(figures: Figures, finding: str, ns: float) -> bool:
    """Whether it is not worth a sentence: it does not bound the run, and takes a small share."""
    return finding != figures.bound and ns < LEAST_SHARES[finding] * figures.total_ns


def _mixed(figures: Figures) -> Found | None:
    if figures.bound is not None:
        return None
    categories = list(figures.table.category_ns().items())[:3]
    parts = ", ".join(f"{name} {ns / figures.total_ns:.0%}" for name, ns in categories)
    sentence = (
        f"No known kind of {figures.calls} bounds this run alone. The largest parts of their "
        f"time: {parts}."
    )
    return MIXED, sentence, sum(ns for _, ns in categories)


def _products(figures: Figures) -> Found | None:
    kind, ns = figures.products, figures.products_ns
    if kind != figures.bound and _is_small(figures, "products", ns):
        return None
    both = ((name, figures.groups_ns[name]) for name in ("GEMM", "attention"))
    parts = "; ".join(
        f"{name} {part / figures.total_ns:.0%}: {figures.time(part)}" for name, part in both if part
    )
    sentence = f"matrix products take {figures.of_all(ns)} ({parts}).{_product_rate(figures)}"
    return kind, sentence, ns


def _product_rate(figures: Figures) -> str:
    """Rate of the products: by counters, else by the operations that the model's sizes ask for."""
    counted = [k for k in figures.table.kernels if is_product(k) and k.flops]
    ns = time_of(counted)
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


def _elementwise(figures: Figures) -> Found | None:
    ns = figures.groups_ns["elementwise"]
    if _is_small(figures, "elementwise", ns):
        return None
    kernels = [k for k in figures.table.kernels if group(k) == "elementwise"]
    named = {"elementwise": "elementwise", "norm": "norm", "copy": _copies(figures)}
    by_category = {c: time_of(k for k in kernels if k.category == c) for c in named}
    parts = ", ".join(f"{named[c]} {figures.time(part)}" for c, part in by_category.items() if part)
    sentence = (
        f"work that moves memory and computes little takes {figures.of_all(ns)} "
        f"({parts}), in {figures.times(calls_of(kernels), figures.calls)}."
        f"{_memory_rate(figures, kernels)}"
    )
    return "elementwise", sentence, ns


def _memory_rate(figures: Figures, kernels: list[Kernel]) -> str:
    counted = [kernel for kernel in kernels if kernel.bytes]
    moved, ns = sum(k.bytes or 0.0 for k in counted), time_of(counted)
    if not counted or ns <= 0 or ns < COUNTED * figures.groups_ns["elementwise"]:
        return ""
    share, peak = "", figures.peaks.bandwidth_gbs if figures.peaks else 0.0
    if moved / ns <= peak:  # more comes out of a cache, and is no share of the memory's rate
        share = f", {moved / ns / peak:.0%} of the {digits(peak)} of the data sheet"
    return (
        f" The profiler counted {digits(moved / 1e9)} GB in {duration(ns)} of it: "
        f"{digits(moved / ns)} GB/s{share}."
    )


def _copies(figures: Figures) -> str:
    return "copies in memory" if figures.on_host else "copies on the device"


def _device_copies(figures: Figures) -> Found | None:
    copies = [
        k for k in figures.table.kernels if k.category == "copy" and group(k) == "elementwise"
    ]
    ns = time_of(copies)
    if _is_small(figures, "device-copies", ns):
        return None
    sentence = (
        f"{_copies(figures)} take {figures.share(ns)}, in "
        f"{figures.times(calls_of(copies), figures.calls)}, and compute nothing: casts to another "
        "precision, transposed tensors made contiguous, fills."
    )
    return "device-copies", sentence, ns


def _materialised_attention(figures: Figures) -> Found | None:
    names = ((kernel, kernel.name[:_LONGEST]) for kernel in figures.table.kernels)
    softmax = ((kernel, name) for kernel, name in names if _SOFTMAX.search(name))
    ns = time_of(kernel for kernel, name in softmax if not _LOG_SOFTMAX.search(name))
    small = ns <= 0 or _is_small(figures, "materialised-attention", ns)
    if figures.groups_ns["attention"] or small:
        return None
    size = ""
    if figures.run and figures.sizes:
        batch, length = figures.run.batch_size, figures.run.seq_len
        size = f" ({batch:,} x {figures.sizes.num_heads} x {length:,} x {length:,} numbers a layer)"
    sentence = (
        f"Softmax {figures.calls} take {figures.share(ns)}, and nothing runs that is made for "
        f"attention: the scores{size} go through memory."
    )
    return "materialised-attention", sentence, ns


def _optimizer(figures: Figures) -> Found | None:
    unfused = unfused_update(figures.table)
    ns, passes = time_of(unfused), ""
    if unfused and ns >= LEAST_SHARES["optimizer"] * figures.total_ns:
        passes = (
            f", in {figures.times(calls_of(unfused), 'kernels')}: a pass over the parameters for "
            "each of its operations"
        )
    elif figures.bound == "optimizer":
        ns = figures.groups_ns["optimizer"]
    else:
        return None
    sentence = f"the optimizer's update takes {figures.share(ns)}{passes}."
    if figures.sizes and figures.peaks:
        each, rate = flops.ADAMW_BYTES_PER_PARAMETER, figures.peaks.bandwidth_gbs
        moved = flops.parameter_count(figures.sizes) * each
        sentence += (
            f" AdamW must move {each} bytes a parameter, {digits(moved / 1e9)} GB: "
            f"{duration(moved / rate)} at the data sheet's {digits(rate)} GB/s."
        )
    return "optimizer", sentence, ns


def _host_copies(figures: Figures) -> Found | None:
    ns = figures.groups_ns["copy"]
    if _is_small(figures, "copy", ns):
        return None
    copies = [kernel for kernel in figures.table.kernels if group(kernel) == "copy"]
    sentence = (
        f"copies between host and device take {figures.share(ns)}, in "
        f"{figures.times(calls_of(copies), 'copies')}."
    )
    if any("pageable" in kernel.name.lower() for kernel in copies):
        sentence += " Some are from or to pageable memory, where a copy holds the host up."
    return "copy", sentence, ns


def _communication(figures: Figures) -> Found | None:
    ns, line = figures.groups_ns["communication"], figures.table.timeline
    if _is_small(figures, "communication", ns):
        return None
    sentence = f"communication between devices takes {figures.share(ns)}."
    # Communication that the others can't cover, even if none of them overlap, is exposed.
    exposed = line.busy_ns - (figures.total_ns - ns) if line else 0.0
    if exposed > 0:
        sentence += f" At least {figures.time(exposed)} of it pass while nothing else runs."
    return "communication", sentence, ns


def _unrecognised(figures: Figures) -> Found | None:
    ns = figures.groups_ns["other"]
    if _is_small(figures, "unrecognised", ns):
        return None
    longest = next(kernel for kernel in figures.table.kernels if group(kernel) == "other")
    sentence = (
        f"{figures.share(ns)} went into {figures.calls} of no category, "
        f"above all {display_name(longest.name, 60)} ({figures.time(longest.total_ns)}): the other "
        "shares may be larger than they seem."
    )
    return "unrecognised", sentence, ns


def _occupancy(figures: Figures) -> Found | None:
    known = [k for k in figures.table.kernels if k.occupancy_ns is not None and k.total_ns]
    if not known:
        return None
    ns = time_of(known)
    mean = f"{sum(k.occupancy_ns or 0.0 for k in known) / ns:.0%}"
    name, share = display_name(known[0].name, 60), (known[0].occupancy_ns or 0) / known[0].total_ns
    longest = f"{name}, the longest of these, {share:.0%}"
    if figures.table.tool == "ncu":
        sentence = (
            f"{mean} of the warps that an SM can hold were active on average, measured over "
            f"{figures.of_all(ns)}; {longest}."
        )
    else:
        sentence = (
            f"occupancy is estimated at {mean}, over {figures.of_all(ns)}; {longest}. The profiler "
            "computes it from grid, block, registers and shared memory, and measures nothing; "
            "kernels with more than 48 KB of shared memory, such as large products, are left out."
        )
    return "occupancy", sentence, 0.0


_Rule = Callable[[Figures], Found | None]
_FAULTS: tuple[_Rule, ...] = (_severed_gradient, _short_backward, _missing_products)
_RULES: tuple[_Rule, ...] = (
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
    _occupancy,
    _no_timeline,
)
