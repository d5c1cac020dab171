"""Profilers of a run, after the timed iterations, which they would slow."""

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from labs.inference_benchmark import measure
from labs.inference_benchmark.group import Group
from labs.inference_benchmark.measure import Bench
from labs.inference_benchmark.show import RULE, Say
from workshop import records, results
from workshop.profilers.runner_files import RUN_FILE
from workshop.run import timing
from workshop.run.timing import StepClock

ITERATIONS = 5
"""Profiled for the tables."""
WAIT, WARM_UP, ACTIVE = 1, 2, 2
"""Iterations of a trace: skipped, run to warm the profiler up, recorded."""
ROWS, NAME_WIDTH = 10, 36


def _activities(bench: Bench) -> list[ProfilerActivity]:
    on_gpu = bench.setting.device.type == "cuda"
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]


# --- tables and traces ---------------------------------------------------------------------------


def tables(bench: Bench, say: Say) -> None:
    """Operations by CPU time, by GPU time and by memory, of a few iterations."""
    with profile(activities=_activities(bench), profile_memory=True) as profiler:
        for index in range(ITERATIONS):
            bench.iteration(index)
        measure.wait(bench.setting.device)
    on_gpu = bench.setting.device.type == "cuda"
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
    rank = f"_rank{group.rank}" if group.world_size > 1 else ""
    place = results.prepare_folder(folder / "traces" / bench.run.session)
    path = place / f"trace{WAIT + WARM_UP + ACTIVE}{rank}.json"
    plan = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
    with profile(activities=_activities(bench), schedule=plan, record_shapes=True) as profiler:
        for index in range(WAIT + WARM_UP + ACTIVE):
            bench.iteration(index)
            measure.wait(bench.setting.device)
            if index < WAIT + WARM_UP + ACTIVE - 1:  # the last one would start a new cycle
                profiler.step()
    with results.atomic_path(path) as temporary:
        profiler.export_chrome_trace(str(temporary))
    if group.is_first:
        _save_record(bench, place / RUN_FILE)
    say(f"Trace: python -m workshop.profilers show {path}")


def _save_record(bench: Bench, path: Path) -> None:
    """Writes the record that `advise` reads with a trace: the part of this process."""
    run, batch = bench.run, bench.setting.batch_size
    flops = (run.flops_per_step or 0.0) * batch / run.units_per_step
    record = dataclasses.replace(
        run, status="profiled", units_per_step=batch, flops_per_step=flops, step_ms=[]
    )
    records.write(record, path)


# --- operations ----------------------------------------------------------------------------------


def flops(bench: Bench, step: int, group: Group, say: Say, training: bool) -> None:
    """Operations, parameters and times of each layer of the whole batch, by PyTorch's counter in
    the layout of DeepSpeed's profiler; then by that one where it is installed.

    The network runs operation by operation here: no profiler sees into a compiled one.
    """
    device, batch = bench.setting.device, bench.setting.batch_size
    images = bench.setting.network.images(batch, bench.setting.seed).to(device)
    latencies = _latencies(bench.model, images)
    for line in (RULE, "FLOPS Profiler Output (PyTorch's counter):", RULE):
        say(line)
    for line in _report(bench, step, group, latencies, training):
        say(line)
    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler
    except Exception as error:  # it looks for compilers and devices while it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name == "deepspeed"
        why = "is not installed" if missing else f"can't be imported: {error!r:.100}"
        say(f"DeepSpeed {why}")
        return
    for line in (RULE, "DeepSpeed FLOPS Profiler Output:", RULE):
        say(line)
    for line in _deepspeed(FlopsProfiler(bench.model), bench.model, images, step):
        say(line)


def _deepspeed(profiler: Any, model: nn.Module, images: torch.Tensor, step: int) -> list[str]:
    """The lines that it prints."""
    profiler.start_profile()
    with torch.no_grad():
        model.eval()(images)
    profiler.stop_profile()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        profiler.print_model_profile(profile_step=step)
    profiler.end_profile()
    return printed.getvalue().splitlines()


def _report(
    bench: Bench, step: int, group: Group, latencies: dict[str, float], training: bool
) -> Iterator[str]:
    """DeepSpeed's lines, which the guide's commands search for."""
    batch, counted = bench.setting.batch_size, bench.counts
    total, whole_ms = counted.flops * batch, latencies[""]
    rate = total / whole_ms * 1e3
    yield f"Profile Summary at step {step}:"
    pairs = {
        "world size": str(group.world_size),
        "batch size per GPU": str(batch),
        "params per GPU": _si(counted.parameters),
        "fwd MACs per GPU": f"{_si(total / 2)}MACs",
        "fwd FLOPs per GPU": f"{_si(total)}FLOPs",
        "fwd latency": f"{whole_ms:.2f} ms",
        "fwd FLOPS per GPU = fwd FLOPs per GPU / fwd latency": f"{_si(rate)}FLOPS",
    }
    if bench.run.gate.status == "pass":
        ms = timing.median(bench.run.step_ms)
        what = "fwd+bwd" if training else "fwd"
        flops = total * (3 if training else 1)
        pairs[f"{what} FLOPS of the timed iterations"] = f"{_si(flops / ms * 1e3)}FLOPS"
    for name, value in pairs.items():
        yield f"{name + ':':<58}{value}"
    yield ""
    yield "Each module: parameters, MACs, their share, forward time, its share, FLOP a byte"
    size = bench.variant.dtype.itemsize
    for name, module in bench.model.named_modules():
        own = [one for one in counted.layers if f"{one.name}.".startswith(f"{name}.")]
        if not name or name.count(".") > 1 or not own or name not in latencies:
            continue
        macs = sum(layer.flops for layer in own) * batch / 2
        moved = sum(layer.bytes(batch, size) for layer in own)
        parameters = sum(p.numel() for p in module.parameters())
        ms = latencies[name]
        yield (
            f"{'  ' * name.count('.')}{name} ({type(module).__name__}): {_si(parameters)}, "
            f"{_si(macs)}MACs, {2 * macs / total:.1%}, {ms:.3f} ms, {ms / whole_ms:.1%}, "
            f"{2 * macs / moved:.1f}"
        )


@torch.no_grad()
def _latencies(model: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Milliseconds of each module's forward pass, and under "" of the whole network's, which runs
    without the marks; the second of two passes."""
    device = images.device
    clock = StepClock(device)
    spans: dict[str, tuple[int, int]] = {}
    marks = 0

    def mark() -> int:
        nonlocal marks
        clock.mark()
        marks += 1
        return marks - 1

    def watch(name: str, module: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        start = 0

        def before(*_: object) -> None:
            nonlocal start
            start = mark()

        def after(*_: object) -> None:
            spans[name] = (start, mark())

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after)

    model.eval()
    for _ in range(2):
        first = mark()
        model(images)
        whole = (first, mark())
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in watch(name, module) if name else ():
                stack.callback(handle.remove)
        model(images)
    clock.durations_ms()  # waits
    return {"": clock.between_ms(*whole)} | {
        name: clock.between_ms(*span) for name, span in spans.items()
    }


def _si(number: float) -> str:
    """As in "4.1 G"."""
    if number <= 0:
        return "0 "
    power = min(4, max(0, int(math.log10(number) // 3)))
    return f"{number / 1000**power:.2f} {['', 'K', 'M', 'G', 'T'][power]}"
