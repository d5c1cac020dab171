"""The benchmark as profilers watch it: a few iterations after the warm-up, in marker ranges, with
no clock and no proof, whose kernels would lie among those of the network."""

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from labs.inference_benchmark import group as groups
from labs.inference_benchmark import measure, networks, request, show, single
from labs.inference_benchmark.measure import Bench, Inference
from labs.inference_benchmark.modes import Setting
from workshop import records, results
from workshop.arguments import parse
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.profilers import profile_run
from workshop.profilers.profile_run import Plan, Prepare
from workshop.profilers.programs import Program
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.table import STEP
from workshop.run import markers, trainer

_OF_THE_RUNNER = {
    "output_dir": "--output-dir",
    "profile_steps": "--steps",
    "iterations": "--steps",
}
_Run = Callable[[markers.Range], object]


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
    steps = arguments.profile_steps
    device = check(arguments)
    folder = arguments.output_dir
    if folder == request.OUTPUT_DIR:
        folder = results.DEFAULT_FOLDER / "profiles" / request.LAB / "steps"

    def work() -> int:
        results.prepare_folder(folder)
        watched = prepare(arguments, device, markers.for_vendor_tools(device))
        return profile_run.watch(watched, steps, arguments.warmup_iterations, folder)

    return _within_memory(arguments, work)


def plan(program: Program, flags: list[str], steps: int) -> Plan[Prepare]:
    """As profile_run.plan."""
    parser = request.build_parser()
    parser.prog = program.path.name
    usual = {name: parser.get_default(name) for name in _OF_THE_RUNNER}
    parser.set_defaults(**dict.fromkeys(_OF_THE_RUNNER))
    arguments = parse(parser, flags)
    profile_run.refuse_flags(arguments, _OF_THE_RUNNER)
    vars(arguments).update(usual, profile_steps=steps)
    device = check(arguments)
    return Plan(partial(_within_memory, arguments), lambda: partial(prepare, arguments, device))


def check(arguments: argparse.Namespace) -> torch.device:
    """Sets the iterations to those of a profile; the device.

    Raises:
        WorkshopError: arguments that can't be.
    """
    studies = ("compare", "ladder", "find_max_batch")
    given = [f"--{name.replace('_', '-')}" for name in studies if getattr(arguments, name)]
    for flag in given + request.of_single_run(arguments):
        raise WorkshopError(f"{flag} does not go with a profiler: leave it out")
    group = groups.find(arguments)
    if group.world_size > 1:
        raise WorkshopError("a profile is of one process: leave out torchrun")
    networks.get_network(arguments.network)
    device = groups.device_of(group, arguments.device)
    single.check(arguments, single.variant_of(arguments), device)
    arguments.iterations = arguments.profile_steps
    if arguments.cuda_graph:  # Proton would count a replay's kernels with those of the profile
        arguments.warmup_iterations = 0
    return device


def prepare(arguments: argparse.Namespace, device: torch.device, range_: markers.Range) -> Watched:
    """Builds the network, captures what is captured, runs the warm-up; prints the configuration
    first."""
    network, variant = networks.get_network(arguments.network), single.variant_of(arguments)
    setting = Setting(network, device, arguments.batch_size, arguments.seed)
    record = single.new_run(arguments, network, variant, device)
    record.status = "profiled"
    record.options["num_steps"] = arguments.profile_steps
    show.configuration(print, arguments, setting, variant, groups.Group())
    training = arguments.mode == "training"
    bench = measure.make_bench(setting, variant, record, training)
    element = 4 if training else variant.dtype.itemsize
    record.metrics["flop_per_byte"] = bench.counts.intensity(setting.batch_size, element)
    run, run_eagerly = _training(bench) if training else _inference(bench)
    for _ in range(arguments.warmup_iterations):
        run(nullcontext)
    measure.wait(device)
    return Watched(bench, run, run_eagerly, range_)


def _inference(bench: Bench) -> tuple[_Run, _Run]:
    """An iteration, and one that replays no graph."""
    inference, index = Inference(bench), itertools.count()

    def run_eagerly(range_: markers.Range) -> None:
        plain = dataclasses.replace(bench.variant, cuda_graph=False)
        Inference(dataclasses.replace(bench, variant=plain))(0, range_)

    def run(range_: markers.Range) -> None:
        inference(next(index), range_)

    return run, run_eagerly if bench.variant.cuda_graph else run


def _training(bench: Bench) -> tuple[_Run, _Run]:
    step = measure.make_training(bench).step
    return step, step


def _within_memory(arguments: argparse.Namespace, work: Callable[[], int]) -> int:
    with trainer.memory_failure_as(lambda asked: single.too_large(arguments, asked)):
        return work()
