"""One run of the benchmark: its record, its measurement, its output, its profilers."""

import argparse
import copy
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from labs.group import Group, of_all
from labs.inference_benchmark import gate, measure, networks, request, show
from labs.inference_benchmark import group as groups
from labs.inference_benchmark.measure import Bench
from labs.inference_benchmark.modes import Setting, Variant
from workshop import errors, labs, records, results
from workshop.errors import OutOfMemory, WorkshopError
from workshop.judge import lab_record
from workshop.judge.turn import Turn
from workshop.labs import LabRun
from workshop.roofline import ceilings
from workshop.roofline.model import MAIN_MEMORY
from workshop.run import hardware, markers, timing, trainer
from workshop.run.precision import PRECISIONS


def run(arguments: argparse.Namespace) -> int:
    """Measures once, in this process or as one of a group; its exit status."""
    device = request.check(arguments)
    group, variant = groups.find(arguments), request.variant_of(arguments)
    network = networks.get_network(arguments.network)
    results.prepare_folder(arguments.output_dir)
    parts = group.parts(arguments.batch_size)
    setting = Setting(network, device, parts[group.rank], arguments.seed, parts, group.rank)
    setting.gpus = group.gpus if arguments.dataparallel else ()
    record = new_run(arguments, network, variant, device)
    if setting.gpus:
        record.variant += f", {len(setting.gpus)} GPUs of one process"
    groups.join(group, device, arguments.dist_backend)
    record.session = of_all(record.session)[0]
    try:
        with trainer.memory_failure_as(partial(too_large, arguments)):
            return _measure(arguments, setting, variant, record, group)
    finally:
        groups.leave(group)


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
    say = show.speaker(group, setting.device)
    show.configuration(say, arguments, setting, variant, group)
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
    show.iterations(say, bench)
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
        show.summary(say, bench, group)
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


def _timed(bench: Bench, arguments: argparse.Namespace, group: Group, say: show.Say) -> None:
    """Raises WorkshopError for batch norms that can't train on a single image."""
    wrap = partial(groups.replica, group, bench.setting.device)
    try:
        measure.measure(bench, arguments.iterations, arguments.warmup_iterations, say, wrap)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise WorkshopError(
            f"{arguments.network} has batch norms that can't train on a single image: take a "
            "larger --batch-size, two images a process"
        ) from None


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


def _profile(arguments: argparse.Namespace, bench: Bench, group: Group, say: show.Say) -> None:
    from labs.inference_benchmark import profiling

    if arguments.flops_prof_step:
        profiling.flops(bench, arguments.flops_prof_step, group, say)
    if arguments.autograd_profiler:
        profiling.tables(bench, say)
    if arguments.kineto:
        profiling.trace(bench, arguments.output_dir, group, print)
