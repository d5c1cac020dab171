"""Answers of a lab's profile to the questions of its guide, in sentences."""

import re
from collections.abc import Iterator

from workshop.labs import LabRun
from workshop.profilers.metrics import Figures, calls_of, digits, duration, time_of
from workshop.profilers.names import display_name

TOP = 5
_NAME_WIDTH = 60
_RUNNERS = "run_rocprofv3.sh, run_nsys.sh and run_pytorch_profiler.py"
_CALLS_A_COPY = re.compile(
    r"aten::(?:to|_to_copy|type_as|clone|contiguous|stack|repeat|repeat_interleave)$"
)
"""Operators of a CPU that copy by calling another one, copy_ or cat, which counts itself."""


def answers(figures: Figures, lab: LabRun) -> Iterator[tuple[str, str, str]]:
    """(name, answer, what goes with it) for each question."""
    yield "top-kernels", _top(figures), "`python -m workshop.profilers show` lists them all."
    yield "launches", _launches(figures), "--compile and --fold-norms make fewer."
    yield "copies", _copies(figures), "Above 10%, look at these first."
    yield "host-and-gpu", _host_and_gpu(figures), f"A timeline comes from {_RUNNERS}."
    yield "compute-or-memory", _roof(figures, lab), "run_ncu.sh and run_rocprofv3.sh count both."


def _top(figures: Figures) -> str:
    top = figures.table.kernels[:TOP]
    each = ", ".join(
        f"{display_name(kernel.name, _NAME_WIDTH)} {figures.table.share(kernel):.1%}"
        for kernel in top
    )
    together = figures.of_all(time_of(top))
    return f"The top {len(top)} {figures.calls} take {together}: {each}."


def _launches(figures: Figures) -> str:
    calls, mean = figures.launches, figures.total_ns / figures.launches
    all_ = f" ({calls:,} in {figures.steps:,})" if figures.steps else ""
    return f"It runs {figures.times(calls, figures.calls)}{all_}, {duration(mean)} each on average."


def _copies(figures: Figures) -> str:
    copies = [kernel for kernel in figures.table.kernels if kernel.category == "copy"]
    between = figures.groups_ns["copy"]
    within = f"{(time_of(copies) - between) / figures.total_ns:.1%}"
    calls = calls_of(kernel for kernel in copies if not _CALLS_A_COPY.match(kernel.name))
    number = figures.times(calls, "copies")
    if figures.on_host:
        return f"Copies: {number}, {within} of the operators' time."
    parts = f"between host and device {between / figures.total_ns:.1%}, on the device {within}"
    return f"Copies: {number}; {parts} of the time."


def _host_and_gpu(figures: Figures) -> str:
    if figures.on_host:
        return f"No GPU took part: {figures.time(figures.total_ns)} are all the CPU's."
    launched = figures.launch_calls.total_ns + figures.graph_launches.total_ns
    host = f"The host's launch calls take {figures.time(launched)}; " if launched else ""
    line, idle = figures.table.timeline, figures.idle_share
    if line is None or idle is None:
        kernels = f"the kernels take {figures.time(figures.total_ns)}"
        return f"{host}{kernels}; this tool has no timeline."
    return (
        f"{host}the GPU works {1 - idle:.0%} of the time ({figures.time(line.busy_ns)}) and waits "
        f"for the host {idle:.0%} ({figures.time(line.idle_ns)})."
    )


def _roof(figures: Figures, lab: LabRun) -> str:
    """By the counters where most of the time is of kernels that have them, else by the counts of
    the whole batch."""
    kernels = figures.table.kernels
    operations = sum(kernel.flops or 0.0 for kernel in kernels)
    moved = sum(kernel.bytes or 0.0 for kernel in kernels)
    counted_ns = time_of(k for k in kernels if k.bytes and k.flops is not None)
    source = "The profiler counted"
    if not (operations and moved and counted_ns >= 0.9 * figures.total_ns):
        intensity = lab.metrics.get("flop_per_byte")
        if not (lab.flops_per_step and isinstance(intensity, float)):
            return "Operations and bytes of a step are not known."
        operations, moved = lab.flops_per_step, lab.flops_per_step / intensity
        source = f"By the layers' sizes a step of {lab.units_per_step:,} {lab.unit} needs"
    intensity = operations / moved
    facts = (
        f"{source} {digits(operations / 1e9)} GFLOP and {digits(moved / 1e9)} GB: "
        f"{digits(intensity)} FLOP a byte"
    )
    ridge, origin = _ridge(figures, lab)
    if ridge is None:
        known = "limits are not known"
        if lab.ceiling_tflops:
            reached = f"{digits(lab.ceiling_tflops)} TFLOP/s"
            known = f"bandwidth is not known, while a large product reached {reached}"
        return (
            f"{facts}. This device's {known}: `python analysis_tools/roofline_analysis.py "
            "--measure` measures both, then profile again."
        )
    verdict = "compute" if intensity > ridge else "memory"
    return (
        f"{facts}; the device's {figures.precision} rate and bandwidth ({origin}) meet at "
        f"{digits(ridge)}: {verdict}-bound as a whole."
    )


def _ridge(figures: Figures, lab: LabRun) -> tuple[float | None, str]:
    """FLOP a byte at which a device's two limits meet, and where they are from."""
    if figures.peaks and figures.peak_tflops:
        return figures.peak_tflops * 1e3 / figures.peaks.bandwidth_gbs, "data sheet"
    bandwidth = lab.metrics.get("ceiling_gbs")
    if lab.ceiling_tflops and isinstance(bandwidth, float):
        return lab.ceiling_tflops * 1e3 / bandwidth, "measured"
    return None, ""
