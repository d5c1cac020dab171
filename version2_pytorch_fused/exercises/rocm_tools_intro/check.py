"""Your GPU's profilers: each answer against the participant's own outputs for V1, of AMD's tools or
NVIDIA's; where one is missing, against the output recorded on an H200."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workshop import results
from workshop.exercises.frame import RESULTS, Item, Missing, Work
from workshop.exercises.hot_list import not_the_hottest
from workshop.exercises.predict import Chosen, Found, NotCompared, Predicted, Question, Written, ask
from workshop.profilers import load, rocprof_compute
from workshop.profilers.table import Kernel, KernelTable
from workshop.run import chips

VERSION = "v1"
RECORDED = RESULTS / "reference/nvidia_h200/profiles" / VERSION
TOOLS = {
    "trace": ("rocprofv3", "nsys", "pytorch_profiler"),
    "host": ("rocprof_sys", "nsys", "pytorch_profiler"),
    "counters": ("rocprof_compute", "ncu"),
}
"""The runners' folders that can answer each part; the first that is there does."""
SHOWN = 15
"""Rows of a hot list, as `show` prints it."""
LAUNCH = re.compile(r"(cuda|hip|cu)\w*Launch\w*Kernel\w*", re.IGNORECASE)
MATRIX = {"bf16": "MFMABF16", "fp16": "MFMAF16", "fp32": "MFMAF32"}
"""rocprof-compute's ceilings of the matrix units, by precision."""
SCRIPTS = ("run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh")
SIDES = ("memory", "arithmetic")
LEFT_OUT = {
    "backward": "",
    "attention": "its two products are functions that DeepSpeed patches",
    "embedding": "a look-up has no operations that any of the three would count",
}
"""Parts of a step, each with the reason why it is not what DeepSpeed leaves out; "" if it is."""
IDLE_CLEARLY, BUSY_CLEARLY = 30.0, 15.0
"""Percent of idle time; in between, both answers are right."""


@dataclass(frozen=True)
class Ceiling:
    """The roofline of one GPU at one precision."""

    tflops: float
    gbs: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOP a byte at which a kernel could reach both."""
        return self.tflops * 1e3 / self.gbs


class Outputs:
    """The outputs that the questions are about, each read when it is first needed."""

    def __init__(self, work: Work) -> None:
        self.profiles = work.results / "profiles" / VERSION

    def folder(self, part: str) -> Path:
        """Where a part's output is: the participant's own of a GPU, else the recorded one."""
        folders = [place / tool for place in (self.profiles, RECORDED) for tool in TOOLS[part]]
        return next(folder for folder in folders if _is_of_a_gpu(folder))

    @cached_property
    def trace(self) -> KernelTable:
        return load.load(self.folder("trace"))

    @cached_property
    def host(self) -> KernelTable:
        return load.load(self.folder("host"))

    @cached_property
    def counters(self) -> KernelTable:
        """Raises Missing: the tool left no bytes or operations."""
        table = load.load(self.folder("counters"))
        if not any(kernel.bytes for kernel in table.kernels):
            raise Missing("no kernel's bytes in the counters; again:", _command("counters"))
        return table

    @cached_property
    def ceiling(self) -> Ceiling:
        """As rocprof-compute measured it; else by the data sheet.

        Raises:
            NotCompared: the chip is in no table of ours.
        """
        folder = self.folder("counters")
        run = load.recorded_run(folder)
        precision = run.precision if run else "bf16"
        for measured in rocprof_compute.ceilings(folder)[:1]:
            gflops, gbs = measured.rates_gflops, measured.bandwidths_gbs
            if MATRIX.get(precision) in gflops and "HBM" in gbs:
                tflops = gflops[MATRIX[precision]] / 1e3
                return Ceiling(tflops, gbs["HBM"], "roofline.csv")
        device = str(run.device["name"]) if run else self.counters.device or ""
        peaks = chips.find_peaks(device)
        if peaks is None or precision not in peaks.tflops:
            raise NotCompared(f"no data sheet of {device or 'this GPU'} is known: not compared")
        return Ceiling(peaks.tflops[precision], peaks.bandwidth_gbs, peaks.source)

    @cached_property
    def counts(self) -> dict[str, dict[str, Any]]:
        """The operations of a step by counter, of the participant's own run.

        Raises:
            Missing: the program has not been run.
        """
        path = self.profiles / "deepspeed_flops" / "flops.json"
        if not path.is_file():
            raise Missing("no count of a step's operations yet:", _command("flops"))
        counts: dict[str, dict[str, Any]] = results.read_json(path)["counts"]
        return counts


def _is_of_a_gpu(folder: Path) -> bool:
    run = load.recorded_run(folder) if folder.is_dir() else None
    return run is not None and run.device["type"] != "cpu"


def _command(part: str) -> str:
    folder = "version1_pytorch_baseline"
    if part == "flops":
        return f"{folder}/run_deepspeed_flops.py --steps 2"
    amd, nvidia, *others = TOOLS[part]
    without = f"; without {nvidia} run_{others[0]}.py" if others else ""
    return f"{folder}/run_{amd}.sh --class (NVIDIA: run_{nvidia}.sh --class{without})"


def check(work: Work) -> Iterator[Item]:
    return ask(work, Outputs, (_read, *QUESTIONS))


def _read(work: Work) -> Iterator[Item]:
    """An Item for each part, which names the output that the answers are compared with."""
    outputs = Outputs(work)
    for part in TOOLS:
        folder = outputs.folder(part)
        own = outputs.profiles in folder.parents
        note = str(folder.relative_to(work.results)) if own else f"yours: {_command(part)}"
        whose = "your own" if own else "recorded on an H200"
        yield Item(True, f"{part}: {folder.name}, {whose}", note)


# --- the right answers ---------------------------------------------------------------------------


def kernels_a_step(outputs: Outputs) -> float:
    table = outputs.trace
    if not table.steps:
        raise NotCompared("this output has no marked steps: not compared")
    return table.launches / table.steps


def idle_percent(outputs: Outputs) -> float:
    line = outputs.trace.timeline
    if line is None:
        raise NotCompared("this output has no times of single kernels: not compared")
    return 100 * line.idle_ns / line.span_ns


def hottest_percent(outputs: Outputs) -> float:
    return 100 * outputs.trace.share(outputs.trace.kernels[0])


def launch_us(outputs: Outputs) -> float:
    """The mean time of the runtime function that launches most kernels."""
    calls = outputs.host.host_calls
    launches = [call for name, call in calls.items() if LAUNCH.fullmatch(name)]
    if not launches:
        raise NotCompared("this output has no calls of the runtime: not compared")
    most = max(launches, key=lambda call: call.calls)
    return most.total_ns / most.calls / 1e3


def waits(outputs: Outputs) -> list[str]:
    idle = idle_percent(outputs)
    return ["GPU"] * (idle > BUSY_CLEARLY) + ["host"] * (idle < IDLE_CLEARLY)


def gbs(kernel: Kernel) -> float:
    return (kernel.bytes or 0.0) / kernel.total_ns


def fastest_gbs(outputs: Outputs) -> float:
    return max(map(gbs, outputs.counters.kernels[:SHOWN]))


def product(outputs: Outputs) -> Kernel:
    """The hottest matrix product that has its operations and bytes counted."""
    for kernel in outputs.counters.kernels[:SHOWN]:
        if kernel.category == "GEMM" and kernel.flops and kernel.bytes:
            return kernel
    raise NotCompared("no matrix product among the first rows has its operations: not compared")


def intensity(outputs: Outputs) -> float:
    kernel = product(outputs)
    return (kernel.flops or 0.0) / (kernel.bytes or 1.0)


def side(outputs: Outputs) -> str:
    return SIDES[intensity(outputs) >= outputs.ceiling.ridge]


def deepspeed_percent(outputs: Outputs) -> float:
    """DeepSpeed's count over the operations of a whole step, from the model's sizes."""
    counted, analytic = outputs.counts["DeepSpeed"], outputs.counts["analytic"]
    if counted["forward"] is None:
        raise NotCompared(f"DeepSpeed has no count here ({counted['error']}): not compared")
    return float(100 * counted["forward"] / (analytic["forward"] + analytic["backward"]))


QUESTIONS: tuple[Question[Outputs], ...] = (
    Predicted(
        "predict.kernels_a_step", "predicted: kernels a step", "", kernels_a_step,
        "Each written-out operation is a kernel, forward; about two, backward; and AdamW has some "
        "for every tensor.", within=0.5,
    ),
    Predicted(
        "predict.idle_percent", "predicted: the GPU's idle share", "%", idle_percent,
        "A short kernel is over before the host, which the profiler slows, has launched the next.",
        within=0.3,
    ),
    Predicted(
        "predict.percent_of_bandwidth", "predicted: the best kernel's share of the bandwidth", "%",
        lambda outputs: 100 * fastest_gbs(outputs) / outputs.ceiling.gbs,
        "No kernel reaches the ceiling; a long element-wise one comes near. Only fewer bytes make "
        "such a kernel faster: that is what fusing does.", within=0.15,
    ),
    Written("trace.hottest", "the hottest kernel",
            lambda outputs, answer: not_the_hottest(outputs.trace, answer)),
    Found(
        "trace.hottest_percent", "its share of the kernels' time", "%", hottest_percent,
        "the column `share`, first row", within=0.02, margin=0.1,
    ),
    Found(
        "trace.kernels_a_step", "kernels a step", "", kernels_a_step,
        "the line below the hot list has them, for all steps and for each", within=0.005,
        slips=lambda outputs: [
            (outputs.trace.launches, "that is of all profiled steps together")
        ],
    ),
    Found(
        "trace.idle_percent", "the GPU's idle share", "%", idle_percent,
        "the line `GPU busy A of B ms`: what is left of B, in percent of B", within=0, margin=1,
        slips=lambda outputs: [(100 - idle_percent(outputs), "that is the busy share")],
    ),
    Chosen(
        "trace.category", "what takes most of the kernels' time",
        ("GEMM", "attention", "norm", "elementwise", "copy", "optimizer", "communication", "other"),
        lambda outputs: next(iter(outputs.trace.category_ns())),
        "it is not the first in the line `by category`",
    ),
    Chosen(
        "host.script", "AMD's script that can't say when the GPU idles", SCRIPTS,
        lambda _: "run_rocprof_compute.sh",
        "that one records when each kernel runs; one of them runs each kernel by itself, again and "
        "again",
    ),
    Found(
        "host.launch_us", "the host's time for a launch", "µs", launch_us,
        "of the launching function with most calls: its time over its calls, in kernels.json of "
        "that folder, `host_calls`", within=0.05,
    ),
    Chosen(
        "host.waits", "which of the two waits for the other", ("GPU", "host"), waits,
        lambda outputs: f"the GPU is idle for {idle_percent(outputs):.0f}% of the profiled time",
    ),
    Found(
        "counters.fastest_gbs", "the most GB/s in the hot list", "GB/s", fastest_gbs,
        "the largest number of the column GB/s, of the rows that `show` prints", within=0.02,
        slips=lambda outputs: [
            (gbs(outputs.counters.kernels[0]), "that is the first row's: look for the largest")
        ],
    ),
    Found(
        "roofline.ridge", "FLOP a byte at the roofline's ridge", "FLOP/byte",
        lambda outputs: outputs.ceiling.ridge,
        lambda outputs: f"peak over bandwidth, both of {outputs.ceiling.source}: GFLOP/s over GB/s "
        "are FLOP a byte", within=0.03,
        slips=lambda outputs: [
            (outputs.ceiling.ridge / 1e3, "a TFLOP/s is a thousand GFLOP/s")
        ],
    ),
    Found(
        "roofline.intensity", "FLOP a byte of the hottest matrix product", "FLOP/byte", intensity,
        "of the first row with category GEMM: its TFLOP/s over its GB/s, times a thousand",
        within=0.04,
        slips=lambda outputs: [(intensity(outputs) / 1e3, "TFLOP/s are a thousand GFLOP/s")],
    ),
    Chosen(
        "roofline.side", "what limits that product, by the roofline", SIDES, side,
        "left of the ridge is memory's side, right of it that of the arithmetic",
    ),
    Found(
        "flops.deepspeed_percent", "DeepSpeed's count, of a whole step's operations", "%",
        deepspeed_percent,
        "its number in flops.md over the sum of the two in the row `analytic`", within=0, margin=1,
        slips=lambda outputs: [(3 * deepspeed_percent(outputs), "of a whole step, not of forward")],
    ),
    Chosen(
        "flops.left_out", "what DeepSpeed's count leaves out", LEFT_OUT,
        lambda _: [answer for answer, why in LEFT_OUT.items() if not why],
    ),
)  # fmt: skip
