"""One run of the benchmark: its record, its measurement, its output, its profilers."""

import argparse
import copy
import dataclasses
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from labs.group import Group, member, of_all
from labs.inference_benchmark import gate, measure, networks, request
from labs.inference_benchmark.measure import Bench
from labs.inference_benchmark.modes import Setting, Variant
from workshop import errors, labs, records, results
from workshop.errors import OutOfMemory, WorkshopError
from workshop.gate import parity
from workshop.judge import lab_record
from workshop.judge.turn import Turn
from workshop.labs import LabRun, percentile
from workshop.roofline import ceilings
from workshop.roofline.model import MAIN_MEMORY
from workshop.run import hardware, markers, timing, trainer
from workshop.run.precision import PRECISIONS

Say = Callable[[str], object]


def run(arguments: argparse.Namespace) -> int:
    """Measures once, in this process or as one of a group; its exit status."""
    device = request.check(arguments)
    group, variant = request.group_of(arguments), request.variant_of(arguments)
    network = networks.get_network(arguments.network)
    results.prepare_folder(arguments.output_dir)
    parts = group.parts(arguments.batch_size)
    setting = Setting(network, device, parts[group.rank], arguments.seed, parts, group.rank)
    setting.gpus = group.gpus if arguments.dataparallel else ()
    record = new_run(arguments, network, variant, device)
    if setting.gpus:
        record.variant += f", {len(setting.gpus)} GPUs of one process"
    with member(group, device) if group.size > 1 else nullcontext():
        record.session = of_all(record.session)[0]
        with trainer.memory_failure_as(partial(too_large, arguments)):
            return _measure(arguments, setting, variant, record, group)


def too_large(arguments: argparse.Namespace, asked: str) -> OutOfMemory:
    return OutOfMemory(
        f"{arguments.network} at batch {arguments.batch_size} does not fit in memory ({asked}): "
        "take a smaller --batch-size, or find the largest with --find-max-batch"
    )


# --- before the clock ----------------------------------------------------------------------------


def new_run(
    arguments: argparse.Namespace,
    network: networks.Network,
    variant: Variant,
    device: torch.device,
    study: str = "",
    session: str = "",
    command: Sequence[str] = (),
) -> LabRun:
    """A record of a run that has not measured yet."""
    batch, label = f", batch {arguments.batch_size}", variant.label
    if study == "compare batch-size":
        batch, label = "", f"{label}{batch}"
    compiled = None if variant.compile is None else str(variant.compile)
    subject = f"{network.name}{batch}, {network.edge} x {network.edge}, {arguments.mode}"
    record = lab_record.begin(
        device,
        variant.precision,
        session,
        ("--output-dir",),
        command,
        lab=request.LAB,
        subject=f"{subject}, {study}" if study else subject,
        variant=label,
        unit="images",
        units_per_step=arguments.batch_size,
        options={
            "network": network.name,
            "batch_size": arguments.batch_size,
            "mode": arguments.mode,
            **(dataclasses.asdict(variant) | {"compile": compiled}),
        },
    )
    known = ceilings.find(hardware.device_name(device), record.device.get("threads"), None, [])
    rates = {one.name: one.rate for one in known}
    if variant.precision in rates:
        record.ceiling_tflops = rates[variant.precision] / 1e12
    if MAIN_MEMORY in rates:
        record.metrics["ceiling_gbs"] = rates[MAIN_MEMORY] / 1e9
    return record


def planned(flags: list[str], study: str, session: str) -> tuple[LabRun, gate.InferenceCheck]:
    """The record of a run that a study asks for, before it measures, and what will judge it."""
    arguments = request.build_parser().parse_args(flags)
    device = hardware.get_device(arguments.device)
    network = networks.get_network(arguments.network)
    command = ["micro_benchmarking_pytorch.py", *flags]
    variant = request.variant_of(arguments)
    run = new_run(arguments, network, variant, device, study, session, command)
    setting = Setting(network, device, arguments.batch_size, arguments.seed)
    seed = random.SystemRandom().randrange(2**62)
    build = partial(networks.build, network, setting.seed, device)
    return run, check_of(arguments, setting, build, seed)


def check_of(
    arguments: argparse.Namespace, setting: Setting, build: Callable[[], nn.Module], seed: int
) -> gate.InferenceCheck:
    """As gate.InferenceCheck."""
    first = arguments.warmup_iterations
    timed = range(first, first + arguments.iterations)
    kind = gate.TrainingCheck if arguments.mode == "training" else gate.InferenceCheck
    return kind(setting, request.variant_of(arguments), timed, build, seed)


# --- the run -------------------------------------------------------------------------------------


def _measure(
    arguments: argparse.Namespace, setting: Setting, variant: Variant, record: LabRun, group: Group
) -> int:
    say = speaker(group, setting.device)
    configuration(say, arguments, setting, variant, group)
    bench = measure.make_bench(setting, variant, record, arguments.mode == "training")
    check = check_of(arguments, setting, lambda: bench.model, setting.seed)
    bench.turn = Turn(arguments.candidate, check)
    if arguments.ranges:
        bench.range_ = markers.for_vendor_tools(setting.device)
        if setting.device.type == "cpu":
            say("Ranges: none, a CPU has neither ROCTX nor NVTX")
    of_all(None)
    _timed(bench, arguments, group, say)
    # After the iterations: processes beside this one may prepare until then.
    dtype = PRECISIONS[variant.precision].autocast_dtype
    record.ceiling_tflops = hardware.measure_matmul_tflops(setting.device, dtype)
    iterations(say, bench)
    if not all(of_all(record.gate.status != "fail")):
        record.status = "gate failed"
        if record.gate.status == "pass":  # another process's is not
            record.gate.status = "fail"
            record.gate.failures.append("the gate of another process failed")
    _add_what_follows(bench, group, arguments)
    if bench.turn.judged:
        bench.turn.tell(record)
    elif group.is_first:
        path = records.path_in(arguments.output_dir, record.session)
        records.save(record, path)
        summary(say, bench, group)
        say(f"Written: {path}")
    if record.status == "interrupted":
        print("interrupted: the result holds the iterations that were complete", file=sys.stderr)
    if record.status == "complete":
        _profile(arguments, bench, group, say)
    of_all(None)  # torchrun ends the others when one has gone with an error
    return {
        "complete": errors.DONE,
        "gate failed": errors.ANSWER_IS_NO,
        "interrupted": errors.INTERRUPTED,
    }[record.status]


def _timed(bench: Bench, arguments: argparse.Namespace, group: Group, say: Say) -> None:
    """Raises WorkshopError for batch norms that can't train on a single image."""
    wrap = partial(replica, group, bench.setting.device)
    try:
        measure.measure(bench, arguments.iterations, arguments.warmup_iterations, say, wrap)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise WorkshopError(
            f"{arguments.network} has batch norms that can't train on a single image: take a "
            "larger --batch-size, two images a process"
        ) from None


def replica(group: Group, device: torch.device, model: nn.Module) -> nn.Module:
    """The network for training as one of a group's replicas."""
    if group.size == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def _add_what_follows(bench: Bench, group: Group, arguments: argparse.Namespace) -> None:
    """Fills in what follows from the times: those of the whole group, break-even, physics."""
    record = bench.run
    by_rank = of_all(record.step_ms)
    record.step_ms = [max(times) for times in zip(*by_rank, strict=False)]  # of the slowest
    record.flops_per_step = (
        (record.flops_per_step or 0.0) / bench.setting.batch_size * record.units_per_step
    )
    if group.size > 1:
        record.metrics["processes"] = group.size
        record.variant += f", {group.size} processes"
        _compare_with_one(bench, group, arguments)
    if record.status != "complete":
        return
    record.plausibility = labs.implausible(record, group.size)
    if arguments.flops_prof_step:
        from labs.inference_benchmark import profiling

        record.phase_ms = profiling.layer_ms(bench)
    # Compilers take longer beside other processes: there is no break-even then.
    if record.setup_s.get("compile") and not bench.training and not bench.turn.beside:
        plain_ms = measure.time_plain(bench)
        if plain_ms is not None:
            record.metrics["plain_ms"] = plain_ms
            saved = plain_ms - timing.median(record.step_ms)
            batches = math.ceil(record.setup_s["compile"] * 1e3 / saved) if saved > 0 else None
            record.metrics["break_even_batches"] = batches


def _compare_with_one(bench: Bench, group: Group, arguments: argparse.Namespace) -> None:
    """Measures the first process's part again while the others wait: efficiency is the group's
    throughput over that of as many processes alone."""
    of_all(None)
    if group.is_first:
        alone = dataclasses.replace(
            bench,
            setting=dataclasses.replace(bench.setting, parts=()),
            run=copy.deepcopy(bench.run),
            range_=nullcontext,
            turn=Turn(judged=False),
            warmup_ms=[],
        )
        measure.measure(alone, arguments.iterations, arguments.warmup_iterations)
        one_ms = timing.median(alone.run.step_ms) / bench.setting.batch_size
        all_ms = timing.median(bench.run.step_ms) / bench.run.units_per_step
        bench.run.metrics["one_process_per_s"] = 1e3 / one_ms
        bench.run.metrics["scaling_efficiency"] = one_ms / all_ms / group.size
    of_all(None)


def _profile(arguments: argparse.Namespace, bench: Bench, group: Group, say: Say) -> None:
    from labs.inference_benchmark import profiling

    if arguments.flops_prof_step and group.is_first:  # all processes have the same layers
        profiling.flops(bench, arguments.flops_prof_step, group, say)
    if arguments.autograd_profiler:
        profiling.tables(bench, say)
    if arguments.kineto:
        profiling.trace(bench, arguments.output_dir, group, print)


# --- output ---------------------------------------------------------------------------------------


RULE = "=" * 40
UNSTEADY = 0.1
"""Share of the mean: a standard deviation above it says that something disturbed the run."""


def speaker(group: Group, device: torch.device) -> Say:
    """Prints lines, with the process's number where there are several."""
    head = f"[{_each(device.type)} {group.rank}] " if group.size > 1 else ""
    return lambda line: print(f"{head}{line}" if line else line, flush=True)


def _each(device: str) -> str:
    """The device that a process of a group has for itself: on a CPU they share one."""
    return "GPU" if device == "cuda" else "process"


def configuration(
    say: Say, arguments: argparse.Namespace, setting: Setting, variant: Variant, group: Group
) -> None:
    say(f"Using network: {setting.network.name}")
    say(f"Batch size: {arguments.batch_size}")
    if group.size > 1:
        say(f"Local batch size: {setting.batch_size}")
        say(f"Global batch size: {arguments.batch_size}")
    if arguments.profile_steps is None:  # a profiler's script adds some that it does not record
        say(f"Iterations: {arguments.iterations}")
    say(f"FP16: {variant.precision == 'fp16'}")
    say(f"Precision: {variant.precision.upper()}{' autocast' if variant.autocast else ''}")
    say(f"Mode: {arguments.mode}")
    say(f"Device: {setting.device} ({hardware.device_name(setting.device)})")
    if variant.compile is not None:
        say(f"PyTorch Compile: ENABLED (mode={variant.compile.get('mode') or 'default'})")
    say(f"Variant: {variant.label}")
    say("")
    no_loss = "" if arguments.mode == "training" else ", without a loss: nothing is trained"
    say(f"Warming up ({arguments.warmup_iterations} iterations{no_loss}) ...")


def iterations(say: Say, bench: Bench) -> None:
    lines = [("Warmup iteration", i, ms) for i, ms in enumerate(bench.warmup_ms)]
    lines += [("Epoch", i, ms) for i, ms in enumerate(bench.run.step_ms)]
    for (name, i, ms), loss in zip(lines, bench.run.losses, strict=False):
        if (name, i) == ("Epoch", 0):
            say("Warmup complete.")
            say("")
            note = "" if bench.training else " (the loss is of random weights, and shows nothing)"
            say(f"Running timed iterations{note} ...")
        known = "" if loss is None else f"Loss = {loss:.4f}, "
        say(f"{name} {i}: {known}Time = {ms / 1e3:.4f} seconds")
    say("")


def summary(say: Say, bench: Bench, group: Group) -> None:
    """The guide's lines, and what else the run has measured; of a run that failed only why."""
    run = bench.run
    say(RULE)
    say(f"Performance Summary{' (all processes)' if group.size > 1 else ''}:")
    say(RULE)
    lines = [
        f"Network: {bench.setting.network.name}",
        f"Batch size: {run.units_per_step}",
        f"Iterations: {len(run.step_ms)} (excluding warmup)",
        f"Precision: {bench.variant.precision.upper()}",
    ]
    if group.size > 1:
        lines += [
            f"Global batch size: {run.units_per_step}",
            f"Local batch size: {bench.setting.batch_size}",
            f"World size: {group.size}",
        ]
    lines += ["", *_gate(run)]
    if run.gate.status == "pass":
        lines += ["", *_speed(run, group), "", *_memory(run), "", *_work(run)]
    lines += [f"IMPLAUSIBLE: {sentence}" for sentence in run.plausibility]
    for line in (*lines, RULE):
        say(line)


def _gate(run: LabRun) -> list[str]:
    closest = run.gate.closest()
    words = f"Gate: {run.gate.status}"
    if closest is not None:
        words += f"; {parity.closest(*closest)} ({run.gate.reference})"
    for name, found in run.gate.measures.items():
        if found["allowed"] == 0:  # a count
            words += f"; {name}: {found['error']}"
    lines = [words, *(f"FAIL, no throughput: {why}" for why in run.gate.failures)]
    if "top1_agreement" in run.metrics:
        lines.append(f"Top-1 agreement with fp32: {run.metrics['top1_agreement']:.1%}")
    return lines


def _speed(run: LabRun, group: Group) -> list[str]:
    ordered = sorted(run.step_ms)
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    p50, p90, p99 = timing.median(ordered), percentile(ordered, 0.9), percentile(ordered, 0.99)
    per_s = run.units_per_step / p50 * 1e3
    whole = " (global)" if group.size > 1 else ""
    lines = [
        f"Average time per iteration: {mean / 1e3:.4f} seconds",
        f"Standard deviation: {deviation / 1e3:.4f} seconds ({deviation / mean:.1%})",
        f"Latency: p50 {p50:.3f} ms, p90 {p90:.3f} ms, p99 {p99:.3f} ms",
        f"Throughput: {per_s:,.1f} samples/sec{whole}, from the median",
        f"Images per second: {per_s:,.1f}",
        f"Milliseconds per batch: {p50:,.3f}",
        f"Microseconds per sample: {p50 / run.units_per_step * 1e3:,.1f}",
    ]
    if deviation / mean > UNSTEADY:
        lines.append(f"Unsteady: the times scatter by more than {UNSTEADY:.0%}; run it again")
    if group.size > 1:
        each = _each(str(run.device["type"]))
        efficiency = float(run.metrics["scaling_efficiency"] or 0.0)
        lines += [
            f"Per-{each} throughput: {per_s / group.size:,.1f} samples/sec",
            f"One {each} alone: {run.metrics['one_process_per_s']:,.1f} samples/sec",
            f"Scaling efficiency: {_share(efficiency, 'the one alone')}",
        ]
    if compile_s := run.setup_s.get("compile"):
        lines.append(f"Compilation time: {compile_s:.1f} seconds")
    if "plain_ms" in run.metrics:
        batches = run.metrics["break_even_batches"]
        after = f"after {batches:,} batches" if batches else "never: it is not faster"
        lines.append(f"Break-even: {after} (plain {run.metrics['plain_ms']:.3f} ms a batch)")
    return lines


def _memory(run: LabRun) -> list[str]:
    peak = float(run.memory_mb["peak"])
    words = ", ".join(
        f"{name.replace('_', ' ')} {amount:,.0f}"
        for name, amount in run.memory_mb.items()
        if name not in ("peak", "source", "reserved") and amount
    )
    per_s = run.units_per_step / timing.median(run.step_ms) * 1e3 / run.processes
    where = "GPU " if run.device["type"] == "cuda" else ""
    return [
        f"{where}Memory Usage: {peak:,.0f} MB at its peak ({words})",
        f"Images per second per GB: {per_s / peak * 1e3:,.1f}",
    ]


def _work(run: LabRun) -> list[str]:
    flops = run.flops_per_step or 0.0
    rate = flops / timing.median(run.step_ms) / 1e9
    lines = [
        f"Operations of a batch: {flops / 1e9:,.1f} GFLOP "
        f"({flops / run.units_per_step / 1e9:.2f} an image)",
        f"Achieved: {rate:,.3g} TFLOP/s",
        f"Arithmetic intensity: {run.metrics['flop_per_byte']:,.1f} FLOP a byte, layer by layer",
    ]
    if run.options.get("mode") == "inference" and "ceiling_gbs" in run.metrics:
        gbs = rate / float(run.metrics["flop_per_byte"] or 0.0) * 1e3 / run.processes
        copy = float(run.metrics["ceiling_gbs"] or 0.0)
        lines.append(
            f"Memory traffic, layer by layer: {gbs:,.0f} GB/s, {gbs / copy:.1%} of a large copy's "
            f"{copy:,.0f} GB/s"
        )
    if run.peak_tflops:
        share = rate / run.peak_tflops / run.processes
        lines.append(f"Share of the data sheet's {run.peak_tflops:,.0f} TFLOP/s: {share:.1%}")
    if run.ceiling_tflops:
        words = _share(rate / run.ceiling_tflops / run.processes, "the product")
        lines.append(f"Share of a large product's {run.ceiling_tflops:,.3g} TFLOP/s: {words}")
    return lines


def _share(share: float, of: str) -> str:
    """As in "97.4%"; above 100%, why that can be."""
    high = f" (above 100%: {of} was measured at a busier moment; run it again)"
    return f"{share:.1%}{high if share > 1 else ''}"
