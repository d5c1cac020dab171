"""One run of the benchmark: its arguments checked, its output as it goes, its result file."""

import argparse
import copy
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from labs.inference_benchmark import group as groups
from labs.inference_benchmark import measure, modes, networks, peer_timm, proof, request, show
from labs.inference_benchmark.group import Group
from labs.inference_benchmark.measure import Bench, Measured
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
    group = groups.find(arguments)
    variant = variant_of(arguments)
    network = networks.get_network(arguments.network)
    device = groups.device_of(group, arguments.device)
    training = arguments.mode == "training"
    check(arguments, variant, device)
    folder = results.prepare_folder(arguments.output_dir)
    parts = group.parts(arguments.batch_size)
    setting = Setting(network, device, parts[group.rank], arguments.seed, parts, group.rank)
    setting.gpus = group.gpus if arguments.dataparallel else ()
    record = new_run(arguments, network, variant, device)
    if setting.gpus:
        record.variant += f", {len(setting.gpus)} GPUs of one process"
    path = records.path_in(folder, record.session)
    groups.join(group, device, arguments.dist_backend)
    record.session = groups.of_first(group, record.session)
    try:
        with trainer.memory_failure_as(lambda asked: too_large(arguments, asked)):
            return _measure(arguments, setting, variant, record, group, path, training)
    finally:
        groups.leave(group)


def variant_of(arguments: argparse.Namespace) -> Variant:
    """Raises WorkshopError for flags that contradict each other."""
    if arguments.fp16 and arguments.precision not in (None, "fp16"):
        raise WorkshopError(f"--fp16 1 and --precision {arguments.precision}: give one of them")
    precision = "fp16" if arguments.fp16 else arguments.precision or "fp32"
    context = None
    if arguments.compile_context is not None and not arguments.compile:
        raise WorkshopError("--compileContext goes with --compile")
    if arguments.compile:
        context = modes.parse_context(arguments.compile_context or "{}")
    training = arguments.mode == "training"
    return Variant(
        precision=precision,
        # Training keeps fp32 weights at every precision.
        autocast=training and precision in ("bf16", "fp16"),
        channels_last=arguments.channels_last,
        fold=arguments.fold_norms,
        fuse=arguments.fuse_relus,
        compile=context,
        cuda_graph=arguments.cuda_graph,
        export=arguments.export == "aoti",
        peer=arguments.peer,
    )


def check(arguments: argparse.Namespace, variant: Variant, device: torch.device) -> None:
    """Raises WorkshopError for arguments that can't be."""
    training = arguments.mode == "training"
    modes.check(variant, device, training=training)
    if training and variant.cuda_graph:
        raise WorkshopError("--cuda-graph is for --mode inference")
    eager = variant.compile is None and not variant.cuda_graph and not variant.export
    if arguments.dataparallel and not eager:
        raise WorkshopError("--dataparallel runs in eager mode: use torchrun, a process a GPU")
    step = arguments.flops_prof_step
    if step < 0 or (step and arguments.iterations <= step):
        raise WorkshopError(
            f"--flops-prof-step {step}: it must be smaller than --iterations "
            f"{arguments.iterations}, which counts from 0"
        )
    if arguments.jobs > 1 and (training or not (arguments.compare or arguments.ladder)):
        raise WorkshopError("--jobs is for --network all, --compare and --ladder of inference")
    if arguments.resume:
        raise WorkshopError("--resume is for --network all")
    if not 0 <= arguments.seed < 2**62:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^62")
    if variant.peer:
        _check_peer(arguments, variant)


def _check_peer(arguments: argparse.Namespace, variant: Variant) -> None:
    """Raises WorkshopError for what a peer does not do, NotOnThisMachine without its package."""
    refused = {
        "--mode training": arguments.mode == "training",
        "--fold-norms": variant.fold,
        "--cuda-graph": variant.cuda_graph,
        "--export": variant.export,
        "--flops-prof-step": arguments.flops_prof_step,
        "--dataparallel": arguments.dataparallel,
        "several processes": groups.find(arguments).world_size > 1,
    }
    given = [name for name, value in refused.items() if value]
    if given:
        raise WorkshopError(
            f"--peer {variant.peer} is plain inference in one process: leave out {', '.join(given)}"
        )
    errors.require(variant.peer)


def too_large(arguments: argparse.Namespace, asked: str) -> OutOfMemory:
    return OutOfMemory(
        f"{arguments.network} at batch {arguments.batch_size} does not fit in memory ({asked}): "
        "take a smaller --batch-size, or find the largest with --find-max-batch"
    )


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
    edge = network.edge
    batch, label = f", batch {arguments.batch_size}", variant.label
    if study == "compare batch-size":
        batch, label = "", f"{label}{batch}"
    record = lab_record.begin(
        device,
        variant.precision,
        session,
        ("--output-dir",),
        command,
        lab=request.LAB,
        subject=f"{network.name}{batch}, {edge} x {edge}, {arguments.mode}{study and f', {study}'}",
        variant=label,
        unit="images",
        units_per_step=arguments.batch_size,
        options={
            "network": network.name,
            "batch_size": arguments.batch_size,
            "mode": arguments.mode,
            **{
                name: str(value) if name == "compile" and value is not None else value
                for name, value in dataclasses.asdict(variant).items()
            },
        },
    )
    notes: list[str] = []
    known = ceilings.find(hardware.device_name(device), record.device.get("threads"), None, notes)
    rates = {one.name: one.rate for one in known}
    if variant.precision in rates:
        record.ceiling_tflops = rates[variant.precision] / 1e12
    if MAIN_MEMORY in rates:
        record.metrics["ceiling_gbs"] = rates[MAIN_MEMORY] / 1e9
    return record


def planned(flags: list[str], study: str, session: str) -> tuple[LabRun, proof.InferenceCheck]:
    """The record of a run that a study asks for, before it measures, and what will judge it."""
    arguments = request.build_parser().parse_args(flags)
    device = hardware.get_device(arguments.device)
    network = networks.get_network(arguments.network)
    command = ["micro_benchmarking_pytorch.py", *flags]
    run = new_run(arguments, network, variant_of(arguments), device, study, session, command)
    setting = Setting(network, device, arguments.batch_size, arguments.seed)
    seed = random.SystemRandom().randrange(2**62)

    def build() -> nn.Module:
        return networks.build(network, setting.seed, device)

    return run, check_of(arguments, setting, build, seed)


def check_of(
    arguments: argparse.Namespace, setting: Setting, build: Callable[[], nn.Module], seed: int
) -> proof.InferenceCheck:
    """As proof.InferenceCheck."""
    first = arguments.warmup_iterations
    timed, variant = range(first, first + arguments.iterations), variant_of(arguments)
    kind = proof.TrainingCheck if arguments.mode == "training" else proof.InferenceCheck
    return kind(setting, variant, timed, build, seed)


def _measure(
    arguments: argparse.Namespace,
    setting: Setting,
    variant: Variant,
    record: LabRun,
    group: Group,
    path: Path,
    training: bool,
) -> int:
    say = show.speaker(group, setting.device)
    show.configuration(say, arguments, setting, variant, group)
    bench = measure.make_bench(setting, variant, record, training)
    check = check_of(arguments, setting, lambda: bench.model, setting.seed)
    bench.turn = Turn(arguments.candidate, check)
    if arguments.ranges:
        bench.range_ = markers.for_vendor_tools(setting.device)
        if setting.device.type == "cpu":
            say("Ranges: none, a CPU has neither ROCTX nor NVTX")
    groups.meet(group)
    if training:
        wrap = groups.wrapper(group, setting.device)
        measured = _trained(bench, arguments, say, wrap)
    else:
        timed = peer_timm.measure_timm if variant.peer == "timm" else measure.measure_inference
        measured = timed(bench, arguments.iterations, arguments.warmup_iterations, say)
    # After the iterations: processes beside this one may prepare until then.
    dtype = PRECISIONS[variant.precision].autocast_dtype
    record.ceiling_tflops = hardware.measure_matmul_tflops(setting.device, dtype)
    record.losses = results.finite(measured.losses)
    show.iterations(say, measured)
    if not all(groups.of_all(group, record.gate.status != "fail")):
        record.status = "gate failed"
        if record.gate.status == "pass":  # another process's is not
            record.gate.status = "fail"
            record.gate.failures.append("the gate of another process failed")
    _finish(bench, measured, group, arguments, training)
    if bench.turn.judged:
        bench.turn.tell(record)
    elif group.is_first:
        records.save(record, path)
        show.summary(say, bench, measured, group)
        say(f"Written: {path}")
    if record.status == "interrupted":
        print("interrupted: the result holds the iterations that were complete", file=sys.stderr)
    if record.status == "complete":
        _profile(arguments, bench, group, say, training)
    groups.meet(group)  # torchrun ends the others when one has gone with an error
    return {
        "complete": errors.DONE,
        "gate failed": errors.ANSWER_IS_NO,
        "interrupted": errors.INTERRUPTED,
    }[record.status]


def _trained(
    bench: Bench,
    arguments: argparse.Namespace,
    say: show.Say,
    wrap: Callable[[nn.Module], nn.Module],
) -> Measured:
    counts = arguments.iterations, arguments.warmup_iterations
    try:
        return measure.measure_training(bench, *counts, say, wrap)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise WorkshopError(
            f"{arguments.network} has batch norms that can't train on a single image: take a "
            "larger --batch-size, two images a process"
        ) from None


def _finish(
    bench: Bench,
    measured: Measured,
    group: Group,
    arguments: argparse.Namespace,
    training: bool,
) -> None:
    """Fills in what follows from the times: those of the whole group, percentiles, break-even,
    physics."""
    record = bench.run
    by_rank = groups.of_all(group, measured.step_ms)
    record.step_ms = [max(times) for times in zip(*by_rank, strict=False)]  # of the slowest
    record.flops_per_step = (
        (record.flops_per_step or 0.0) / bench.setting.batch_size * record.units_per_step
    )
    if group.world_size > 1:
        record.metrics["processes"] = group.world_size
        record.variant += f", {group.world_size} processes"
        _compare_with_one(bench, group, arguments, training)
    element = 4 if training else bench.variant.dtype.itemsize
    record.metrics["flop_per_byte"] = bench.counts.intensity(bench.setting.batch_size, element)
    if record.status != "complete":
        return
    record.plausibility = labs.implausible(record, group.world_size)
    # Compilers take longer beside other processes: there is no break-even then.
    if record.setup_s.get("compile") and not training and not bench.turn.beside:
        plain_ms = measure.time_plain(bench)
        if plain_ms is not None:
            record.metrics["plain_ms"] = plain_ms
            saved = plain_ms - timing.median(record.step_ms)
            batches = math.ceil(record.setup_s["compile"] * 1e3 / saved) if saved > 0 else None
            record.metrics["break_even_batches"] = batches


def _compare_with_one(
    bench: Bench, group: Group, arguments: argparse.Namespace, training: bool
) -> None:
    """Measures the first process's part again while the others wait: efficiency is the group's
    throughput over that of as many processes alone."""
    groups.meet(group)
    if group.is_first:
        setting = dataclasses.replace(bench.setting, parts=())
        run = copy.deepcopy(bench.run)
        alone = dataclasses.replace(
            bench, setting=setting, run=run, range_=nullcontext, turn=Turn(judged=False)
        )
        counts = arguments.iterations, arguments.warmup_iterations
        again = measure.measure_training if training else measure.measure_inference
        measured = again(alone, *counts, lambda line: None)
        one_ms = timing.median(measured.step_ms) / bench.setting.batch_size
        all_ms = timing.median(bench.run.step_ms) / bench.run.units_per_step
        bench.run.metrics["one_process_per_s"] = 1e3 / one_ms
        bench.run.metrics["scaling_efficiency"] = one_ms / all_ms / group.world_size
    groups.meet(group)


def _profile(
    arguments: argparse.Namespace, bench: Bench, group: Group, say: show.Say, training: bool
) -> None:
    from labs.inference_benchmark import profiling

    if arguments.flops_prof_step:
        profiling.flops(bench, arguments.flops_prof_step, group, say, training)
    if arguments.autograd_profiler:
        profiling.tables(bench, say)
    if arguments.kineto:
        profiling.trace(bench, arguments.output_dir, group, print)
