"""Profilers of a run: tables, a trace and counts of operations after the timed iterations, which
they would slow; and the run that the scripts' profilers watch, without clock and gate."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from labs import shared
from labs.group import Group
from labs.inference_benchmark import measure, modes, networks, request, single
from labs.inference_benchmark.counts import WHOLE
from labs.inference_benchmark.measure import Bench, Inference, Learning
from labs.inference_benchmark.modes import Setting
from labs.inference_benchmark.single import RULE, Say
from workshop import records, results
from workshop.arguments import parse
from workshop.labs import LabRun
from workshop.profilers import profile_run
from workshop.profilers.profile_run import Plan, Prepare
from workshop.profilers.programs import Program
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.table import STEP
from workshop.run import markers, timing, trainer
from workshop.run.timing import StepClock

ITERATIONS = 5
"""Profiled for the tables."""
SKIPPED, RECORDED = 3, 2
"""Iterations of a trace."""
ROWS, NAME_WIDTH = 10, 36
_OF_THE_RUNNER = {
    "output_dir": "--output-dir",
    "profile_steps": "--steps",
    "iterations": "--steps",
}
_Run = Callable[[markers.Range], object]


# --- tables and traces ---------------------------------------------------------------------------


def tables(bench: Bench, say: Say) -> None:
    """Operations by CPU time, by GPU time and by memory, of a few iterations."""
    on_gpu = bench.setting.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, profile_memory=True) as profiler:
        for index in range(ITERATIONS):
            bench.iteration(index)
        measure.wait(bench.setting.device)
    by_name = profiler.key_averages()
    for line in (RULE, f"PyTorch Profiler Results ({ITERATIONS} iterations):", RULE):
        say(line)
    for place, name in {"CPU": "cpu", **({"CUDA": "device"} if on_gpu else {})}.items():
        for what, heading in (
            ("time_total", f"Top {ROWS} operations by total {place} time of their own"),
            ("memory_usage", "Memory Profiling, by what an operation itself takes and keeps"),
        ):
            say(f"{heading} (Self {place}):")
            table = by_name.table(
                sort_by=f"self_{name}_{what}", row_limit=ROWS, max_name_column_width=NAME_WIDTH
            )
            for line in table.splitlines():
                say(line)


def trace(bench: Bench, folder: Path, group: Group, say: Say) -> None:
    """Writes a trace of this process and its record, and prints the command that shows it."""
    rank = f"_rank{group.rank}" if group.size > 1 else ""
    place = results.prepare_folder(folder / "traces" / bench.run.session)
    path = place / f"trace{SKIPPED + RECORDED}{rank}.json"

    def steps() -> Iterator[int]:
        for index in range(SKIPPED + RECORDED):
            bench.iteration(index)
            measure.wait(bench.setting.device)
            yield index

    shared.record_trace(
        bench.setting.device, steps(), path, skipped=SKIPPED, recorded=RECORDED, shapes=True
    )
    if group.is_first:  # `advise` reads the record of this process's part with the trace
        batch = bench.setting.batch_size
        flops = (bench.run.flops_per_step or 0.0) * batch / bench.run.units_per_step
        changes = {"status": "profiled", "units_per_step": batch, "step_ms": []}
        record = dataclasses.replace(bench.run, flops_per_step=flops, **changes)  # type: ignore[arg-type]
        records.write(record, place / RUN_FILE)
    say(f"Trace: python -m workshop.profilers show {path}")


# --- operations ----------------------------------------------------------------------------------


def flops(bench: Bench, step: int, group: Group, say: Say) -> None:
    """Prints each layer's operations of the whole batch, parameters and times, by PyTorch's counter
    in the layout of DeepSpeed's profiler."""
    for line in (RULE, "FLOPS Profiler Output (PyTorch's counter):", RULE):
        say(line)
    for line in _report(bench, step, group):
        say(line)


def _report(bench: Bench, step: int, group: Group) -> Iterator[str]:
    """DeepSpeed's lines, which the guide's commands search for."""
    batch, counted = bench.setting.batch_size, bench.counts
    times = {name: ms for name, (ms,) in bench.run.phase_ms.items()}
    total, whole_ms = counted.flops * batch, times[WHOLE]
    yield f"Profile Summary at step {step}:"
    pairs = {
        "world size": str(group.size),
        "batch size per GPU": str(batch),
        "params per GPU": _si(counted.parameters),
        "fwd MACs per GPU": f"{_si(total / 2)}MACs",
        "fwd FLOPs per GPU": f"{_si(total)}FLOPs",
        "fwd latency": f"{whole_ms:.2f} ms",
        "fwd FLOPS per GPU = fwd FLOPs per GPU / fwd latency": (
            f"{_si(total / whole_ms * 1e3)}FLOPS"
        ),
    }
    if bench.run.gate.status == "pass":
        rate = total * (3 if bench.training else 1) / timing.median(bench.run.step_ms) * 1e3
        what = "fwd+bwd" if bench.training else "fwd"
        pairs[f"{what} FLOPS of the timed iterations"] = f"{_si(rate)}FLOPS"
    for name, value in pairs.items():
        yield f"{name + ':':<58}{value}"
    yield ""
    yield "Each module: parameters, MACs, their share, forward time, its share, FLOP a byte"
    size = bench.variant.dtype.itemsize
    for name, module in bench.model.named_modules():
        own = [one for one in counted.layers if f"{one.name}.".startswith(f"{name}.")]
        if not own or name not in times:
            continue
        macs = sum(layer.flops for layer in own) * batch / 2
        moved = sum(layer.bytes(batch, size) for layer in own)
        parameters = sum(p.numel() for p in module.parameters())
        ms = times[name]
        yield (
            f"{'  ' * name.count('.')}{name} ({type(module).__name__}): {_si(parameters)}, "
            f"{_si(macs)}MACs, {2 * macs / total:.1%}, {ms:.3f} ms, {ms / whole_ms:.1%}, "
            f"{2 * macs / moved:.1f}"
        )


@torch.no_grad()
def layer_ms(bench: Bench) -> dict[str, list[float]]:
    """Milliseconds of the forward pass of each module in the two upper levels, and of the WHOLE
    network, which runs without the marks; the second of two passes.

    The network runs operation by operation here, at the run's precision and in its layout: no
    profiler sees into a compiled one."""
    setting, variant = bench.setting, bench.variant
    eager = dataclasses.replace(variant.plain(), channels_last=variant.channels_last)
    model = modes.prepare(bench.model, eager)
    images = setting.network.images(setting.batch_size, setting.seed).to(
        setting.device, eager.dtype, memory_format=eager.layout()
    )
    clock, marks = StepClock(images.device), itertools.count()
    starts: dict[str, int] = {}
    spans: dict[str, tuple[int, int]] = {}

    def mark() -> int:
        clock.mark()
        return next(marks)

    def watch(name: str, module: nn.Module) -> None:
        def before(*_: object) -> None:
            starts[name] = mark()

        def after(*_: object) -> None:
            spans[name] = (starts[name], mark())

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    with eager.context(setting.device):
        for _ in range(2):
            first = mark()
            model(images)
            whole = (first, mark())
        for name, module in model.named_modules():
            if name and name.count(".") < 2:
                watch(name, module)
        model(images)
    clock.durations_ms()  # waits
    times = {name: clock.between_ms(*span) for name, span in {WHOLE: whole, **spans}.items()}
    return {name: [ms] for name, ms in times.items() if ms > 0}


def _si(number: float) -> str:
    """As in "4.1 G"."""
    if number <= 0:
        return "0 "
    power = min(4, max(0, int(math.log10(number) // 3)))
    return f"{number / 1000**power:.2f} {['', 'K', 'M', 'G', 'T'][power]}"


# --- what the scripts' profilers watch -----------------------------------------------------------


@dataclass
class Watched:
    """A network after its warm-up; profile_run.Watched."""

    bench: Bench
    _run: _Run
    _run_eagerly: _Run
    _range: markers.Range

    @property
    def device(self) -> torch.device:
        return self.bench.setting.device

    @property
    def record(self) -> LabRun:
        return self.bench.run

    def step(self) -> None:
        with self._range(STEP):
            self._run(self._range)

    def eager_step(self) -> None:
        with self._range(STEP):
            self._run_eagerly(self._range)

    def wait(self) -> None:
        measure.wait(self.device)

    def layer_ranges(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save_record(self, folder: Path) -> Path:
        return records.write(self.record, folder / RUN_FILE)

    def verdict(self) -> str:
        return "what it computes was not compared: the benchmark does that, without --profile-steps"


def run(arguments: argparse.Namespace) -> int:
    """`--profile-steps N`; the exit status."""
    steps, folder, device = arguments.profile_steps, arguments.output_dir, request.check(arguments)
    if folder == request.OUTPUT_DIR:
        folder = results.DEFAULT_FOLDER / "profiles" / request.LAB / "steps"
    with trainer.memory_failure_as(partial(single.too_large, arguments)):
        results.prepare_folder(folder)
        watched = prepare(arguments, device, markers.for_vendor_tools(device))
        return profile_run.watch(watched, steps, arguments.warmup_iterations, folder)


def plan(program: Program, flags: list[str], steps: int) -> Plan[Prepare]:
    """As profile_run.plan."""
    parser = request.build_parser()
    parser.prog = program.path.name
    usual = {name: parser.get_default(name) for name in _OF_THE_RUNNER}
    parser.set_defaults(**dict.fromkeys(_OF_THE_RUNNER))
    arguments = parse(parser, flags)
    profile_run.refuse_flags(arguments, _OF_THE_RUNNER)
    vars(arguments).update(usual, profile_steps=steps)
    device = request.check(arguments)

    def within_memory(work: Callable[[], int]) -> int:
        with trainer.memory_failure_as(partial(single.too_large, arguments)):
            return work()

    return Plan(within_memory, lambda: partial(prepare, arguments, device))


def prepare(arguments: argparse.Namespace, device: torch.device, range_: markers.Range) -> Watched:
    """Builds the network, captures what is captured, runs the warm-up; prints the configuration
    first."""
    network, variant = networks.get_network(arguments.network), request.variant_of(arguments)
    setting = Setting(network, device, arguments.batch_size, arguments.seed)
    if variant.cuda_graph:  # Proton would count a replay's kernels with those of the profile
        arguments.warmup_iterations = 0
    record = single.new_run(arguments, network, variant, device)
    record.status = "profiled"
    record.options["num_steps"] = arguments.profile_steps
    single.configuration(print, arguments, setting, variant, Group())
    training = arguments.mode == "training"
    bench = measure.make_bench(setting, variant, record, training)
    work = (Learning if training else Inference)(setting, variant, bench.model)
    if isinstance(work, Inference):
        work.capture()
    index = itertools.count()

    def run(range_: markers.Range) -> None:
        work(next(index), range_)

    def run_eagerly(range_: markers.Range) -> None:
        plain = dataclasses.replace(variant, cuda_graph=False)
        Inference(setting, plain, bench.model)(0, range_)

    for _ in range(arguments.warmup_iterations):
        run(nullcontext)
    measure.wait(device)
    return Watched(bench, run, run_eagerly if variant.cuda_graph else run, range_)
