"""Answers of a lab's profile to the questions of its guide, in sentences; and the lab's own flags
for the advisor's findings."""

import re
from collections.abc import Iterable, Iterator

from workshop.labs import LabRun
from workshop.profilers.metrics import Figures, digits, duration
from workshop.profilers.names import display_name

TOP = 5
_NAME_WIDTH = 60
_RUNNERS = "run_rocprofv3.sh, run_nsys.sh and run_pytorch_profiler.py"
_TREATMENTS = {
    "inference_benchmark": {
        "launch": "--cuda-graph captures the network, and one launch replays it; --fold-norms and "
        "--compile make fewer kernels; a larger --batch-size gives each more to do.",
        "host": "Look at what the host's threads do in the gaps of the timeline, which "
        "run_pytorch_profiler.py writes.",
        "latency": "Only fewer or longer kernels make this less: --compile, --fold-norms, a larger "
        "--batch-size.",
        "idle": "Compare the span of a step here with its time without a profiler, which the "
        "benchmark prints.",
        "mixed": "Take the findings one by one, the largest first; --ladder shows what each switch "
        "is worth.",
        "attention": "A larger --batch-size makes larger products; --fp16 1 uses faster units.",
        "elementwise": "--fold-norms takes the batch norms out; --compile joins what lies between "
        "the products.",
        "device-copies": "--channels-last spares the libraries' changes of layout; --fp16 1 casts "
        "the weights once.",
        "materialised-attention": "--compile joins softmax with what surrounds it.",
        "optimizer": "An update costs the same for any batch: a larger --batch-size makes it a "
        "smaller part.",
        "copy": "The benchmark's images lie on the device before the first iteration: look in the "
        "timeline for what is copied.",
        "synchronisations": "Leave out of the loop what reads a result on the host: .item(), "
        ".cpu(), printing a tensor.",
    }
}
"""By lab and finding."""
_CALLS_A_COPY = re.compile(
    r"aten::(?:to|_to_copy|type_as|clone|contiguous|stack|repeat|repeat_interleave)$"
)
"""Operators of a CPU that copy by calling another one, copy_ or cat, which counts itself."""
_FASTER = "--fp16 1 (or --precision tf32, bf16) uses faster units."
_LARGER = (
    "What is left is the products' own rate: --channels-last, a larger --batch-size, "
    "--compile --compileContext \"{'mode': 'max-autotune'}\"."
)


def treatment(figures: Figures, lab: LabRun, finding: str) -> str | None:
    """The lab's own; None where it has none."""
    own = _TREATMENTS.get(lab.lab)
    if own and finding == "GEMM":
        return _FASTER if figures.precision == "fp32" else _LARGER
    return own.get(finding) if own else None


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
    together = sum(kernel.total_ns for kernel in top)
    return f"The top {len(top)} {figures.calls} take {figures.of_all(together)}: {each}."


def _launches(figures: Figures) -> str:
    calls, mean = figures.launches, figures.total_ns / figures.launches
    all_ = f" ({calls:,} in {figures.steps:,})" if figures.steps else ""
    return f"It runs {figures.times(calls, figures.calls)}{all_}, {duration(mean)} each on average."


def _copies(figures: Figures) -> str:
    copies = [kernel for kernel in figures.table.kernels if kernel.category == "copy"]
    between = figures.groups_ns["copy"]
    within = sum(kernel.total_ns for kernel in copies) - between
    calls = sum(kernel.calls for kernel in copies if not _CALLS_A_COPY.match(kernel.name))
    number = figures.times(calls, "copies")
    parts = f"between host and device {between / figures.total_ns:.1%}"
    if figures.on_host:
        return f"Copies: {number}, {within / figures.total_ns:.1%} of the operators' time."
    return f"Copies: {number}; {parts}, on the device {within / figures.total_ns:.1%} of the time."


def _host_and_gpu(figures: Figures) -> str:
    if figures.on_host:
        return f"No GPU took part: {figures.time(figures.total_ns)} are all the CPU's."
    launched = figures.launch_calls.total_ns + figures.graph_launches.total_ns
    host = f"The host's launch calls take {figures.time(launched)}; " if launched else ""
    line = figures.table.timeline
    idle = figures.idle_share
    if line is None or idle is None:
        return (
            f"{host}the kernels take {figures.time(figures.total_ns)}; this tool has no timeline."
        )
    return (
        f"{host}the GPU works {1 - idle:.0%} of the time ({figures.time(line.busy_ns)}) and waits "
        f"for the host {idle:.0%} ({figures.time(line.idle_ns)})."
    )


def _roof(figures: Figures, lab: LabRun) -> str:
    """By the counters where the tool has them, else by the counts of the whole batch."""
    operations = _sum(kernel.flops for kernel in figures.table.kernels)
    moved = _sum(kernel.bytes for kernel in figures.table.kernels)
    source = "The profiler counted"
    if not (operations and moved and _products_counted(figures)):
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
        limits = "limits are not known"
        if lab.ceiling_tflops:
            limits = (
                f"bandwidth is not known, while a large product reached "
                f"{digits(lab.ceiling_tflops)} TFLOP/s"
            )
        return (
            f"{facts}. This device's {limits}: `python analysis_tools/roofline_analysis.py "
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


def _products_counted(figures: Figures) -> bool:
    """Whether most of the time is of kernels with counts."""
    counted = sum(k.total_ns for k in figures.table.kernels if k.bytes and k.flops is not None)
    return counted >= 0.9 * figures.total_ns


def _sum(values: Iterable[float | None]) -> float:
    return sum(value or 0.0 for value in values)
