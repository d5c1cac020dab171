"""Program that profilers look at: a version that trains a few steps, warmed up, with marker ranges.

`tiny_llama_vN.py --profile-steps N` runs `profile` for the profilers that start a program
themselves; run_pytorch_profiler.py calls `prepare` and steps by itself. A lab's program has the
same interface: `Watched` and `Plan` are what it must offer.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from workshop import errors, records, results, versions
from workshop.arguments import count, parse
from workshop.errors import WorkshopError
from workshop.gate import canonical
from workshop.labs import LabRun
from workshop.profilers import programs, runner_files
from workshop.profilers.programs import Program
from workshop.profilers.runner_files import RUN_FILE
from workshop.request import (
    PROFILES,
    Data,
    Request,
    build_parser,
    check_arguments,
    load_data,
    new_result,
    print_configuration,
    within_memory,
)
from workshop.run import hardware, markers, trainer
from workshop.versions import Version

_OF_THE_RUNNER = {"output_dir": "--output-dir", "profile_steps": "--steps", "num_steps": "--steps"}
"""The model's flags that a runner sets or has no use for, and what its own are called."""
T = TypeVar("T")


class Watched(Protocol):
    """A program after its warm-up, ready to run the steps that a profiler watches."""

    @property
    def device(self) -> torch.device: ...

    @property
    def record(self) -> results.RunResult | LabRun:
        """Record of the profiled run."""

    def step(self) -> None:
        """Runs one step in marker ranges: table.STEP around it, table.PHASES around its parts."""

    def eager_step(self) -> None:
        """Runs one step operation by operation, also where `step` replays a graph."""

    def wait(self) -> None:
        """Until the device has done all steps."""

    def layer_ranges(self) -> AbstractContextManager[None]:
        """The layers' marker ranges, as long as it is entered, where there are any."""

    def save_record(self, folder: Path) -> Path:
        """Writes RUN_FILE."""

    def verdict(self) -> str:
        """The record's verdict on the steps, in a sentence."""


Prepare = Callable[[markers.Range], Watched]


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A run under a profiler that has been checked."""

    within_memory: Callable[[Callable[[], int]], int]
    """Does some work; its exit status. Raises OutOfMemory."""
    load: Callable[[], T]
    """Gets what the work needs besides; it may raise WorkshopError."""


@dataclass
class ProfileRun:
    """A version after its warm-up; a Watched."""

    request: Request
    model: nn.Module
    optimizer: torch.optim.Optimizer
    runner: trainer.Runner
    range: markers.Range
    record: results.RunResult
    _step: trainer.Step

    @property
    def device(self) -> torch.device:
        return self.runner.device

    def step(self) -> None:
        """Trains one step, of the number that the request has."""
        self.runner.marked_step(self._step, self.range)

    def eager_step(self) -> None:
        self.runner.marked_step(self.runner.eager_step, self.range)

    def layer_ranges(self) -> AbstractContextManager[None]:
        """None where a compiler or a graph has dissolved the layers."""
        if self.request.compile_mode == "none" and not self.request.cuda_graph:
            return markers.layer_ranges(self.model, self.range)
        return nullcontext()

    def wait(self) -> None:
        self.runner.wait()

    def verdict(self) -> str:
        assert self.record.gradients is not None  # since it was saved
        return gradients_sentence(self.record.gradients)

    def save_record(self, folder: Path) -> Path:
        """Writes RUN_FILE: what was profiled, and what its last backward pass reached."""
        self.runner.wait()
        self.record.gradients = canonical.count_gradients(self.model)
        self.record.losses = []
        return records.write(self.record, folder / RUN_FILE)


def plan(program: Program, flags: list[str], steps: int) -> Plan[Prepare]:
    """Plan of the program with these flags and `--profile-steps STEPS`; its `load` gives the
    function that prepares it.

    Raises:
        WorkshopError, NotOnThisMachine: it can't run here, or a flag is the runner's to set.
    """
    if program.version is None:
        lab: Plan[Prepare] = importlib.import_module(program.watched).plan(program, flags, steps)
        return lab
    request = make_request(program.version, flags, steps)

    def load() -> Prepare:
        data = load_data(request)
        return lambda range_: prepare(request, data, range_=range_)

    return Plan(partial(within_memory, request), load)


def plan_of(request: Request) -> Plan[Data]:
    """For work that needs a version's data alone."""
    return Plan(partial(within_memory, request), partial(load_data, request))


def make_request(version: Version, model_flags: list[str], steps: int) -> Request:
    """Request of `tiny_llama_vN.py --profile-steps STEPS` with these flags. Raises as `plan`."""
    module = versions.load(version.key)
    parser = build_parser(version, module)
    parser.prog = version.path.name
    arguments = parse(parser, model_flags)
    refuse_flags(arguments, _OF_THE_RUNNER)
    arguments.profile_steps = steps
    request = check_arguments(version, module, arguments)
    request.build_on(torch.device("meta"))  # checks the sizes, at no cost
    return request


def refuse_flags(arguments: argparse.Namespace, of_the_runner: dict[str, str]) -> None:
    """Raises WorkshopError for a flag of the program, None by default, that its runner sets.

    Args:
        of_the_runner: by the name in `arguments`, the runner's own flag.
    """
    for name, instead in of_the_runner.items():
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise WorkshopError(
                f"--{flag}, after --, is no flag for a profile: use {instead} of this script"
            )


def prepare(request: Request, data: Data, *, range_: markers.Range) -> ProfileRun:
    """Builds the model with V1's initial weights, trains the warm-up, captures what is captured;
    prints the configuration first.

    A captured step is taken in three graphs, so that marker ranges can mark its parts.
    """
    batches, data_record = data
    print_configuration(request, data_record)
    record = new_result(request, data_record)
    record.status = "profiled"
    if peaks := hardware.peaks(request.device):
        record.peak_tflops = peaks.tflops.get(request.precision.name)
        record.peak_source = peaks.source
    model = request.build()
    arguments = request.arguments
    canonical.load_canonical(model, canonical.canonical_state(request.config, arguments.seed))
    request.precision.set_matmul_mode()
    optimizer = request.module.configure_optimizer(model, arguments.learning_rate)
    graph = request.cuda_graph
    runner = trainer.Runner(model, optimizer, batches, request.precision, cuda_graph=graph)
    print(f"warming up for {request.schedule.warmup} steps ...", flush=True)
    step = runner.warm_up_parts(request.schedule.warmup)
    runner.wait()
    return ProfileRun(request, model, optimizer, runner, range_, record, step)


def profile(request: Request) -> int:
    """`--profile-steps`: trains the steps between the calls that start and stop NVIDIA's
    profilers; the exit status."""

    def work() -> int:
        data, steps = load_data(request), request.schedule.timed
        results.prepare_folder(request.output_dir)
        run = prepare(request, data, range_=markers.for_vendor_tools(request.device))
        return watch(run, steps, request.schedule.warmup, request.output_dir)

    return within_memory(request, work)


def watch(run: Watched, steps: int, warmup: int, folder: Path) -> int:
    """Runs the steps between the calls that start and stop NVIDIA's profilers, and writes RUN_FILE
    into the folder; the exit status."""
    # A range belongs to the thread that opened it. In a thread of autograd's own, the backward
    # pass would lie outside of them all, and some tools lose what other threads do.
    with (
        run.layer_ranges(),
        torch.autograd.set_multithreading_enabled(False),
        _nvidia_profiler(run.device),
    ):
        for _ in range(steps):
            run.step()
        run.wait()
    path = run.save_record(folder)
    done = f"{steps} step{'s' if steps > 1 else ''}"
    print(f"Profiled: {done} after {warmup} of warm-up; nothing was timed")
    print(f"  {run.verdict()}")
    print(f"Record: {path}")
    return errors.DONE


def gradients_sentence(g: results.Gradients) -> str:
    """Whether a backward pass reached the whole model."""
    whole = g.params_with_grad == g.params_total
    return (
        f"{'gradients' if whole else 'SEVERED: gradients'} reached {g.tensors_with_grad} of "
        f"{g.tensors_total} tensors, {g.params_with_grad:,} of {g.params_total:,} parameters"
    )


@contextmanager
def _nvidia_profiler(device: torch.device) -> Iterator[None]:
    """Starts and stops NVIDIA's profilers around the block. ROCm has no counterpart: its tools see
    the whole run, and the ranges mark the steps."""
    if device.type != "cuda" or not torch.version.cuda:
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    yield
    torch.cuda.profiler.stop()


# --- the runners in Python -----------------------------------------------------------------------


def runner_arguments(
    description: str, *, steps: int, argv: list[str], switches: dict[str, str] | None = None
) -> argparse.Namespace:
    """Parses `[--steps N] [--output-dir DIR] [--dry-run] [-- FLAGS OF THE MODEL]`.

    Args:
        steps: the default of --steps.
        argv: the whole command line. Its first word is the runner's file, whose folder gives the
            program and whose name the tool.
        switches: help by flag, of the runner's own flags without a value.

    Returns:
        program, steps, output_dir, dry_run, model_flags, and the runner's own; command, as a user
        would type it to run what a dry run only shows.
    """
    script = Path(argv[0])
    program = programs.of_folder(script.parent)  # of the link that was called
    if program is None:
        example = f"{versions.VERSIONS['v1'].folder}/{script.name}"
        print(f"error: call it in a version's folder, such as {example}", file=sys.stderr)
        sys.exit(errors.WRONG_USAGE)
    output_dir = PROFILES / program.key / script.stem.removeprefix("run_")
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=description,
        usage=f"{script.name} [options] [-- flags of {program.path.name}]",
        epilog="Exit status: 0 done, 1 memory ran out or a counter failed, 2 wrong usage, 77 this "
        "machine does not have what it needs, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=count, default=steps, metavar="N", help=f"steps (default {steps})")
    help_ = f"where the outputs go (default: results/profiles/{program.key}/{output_dir.name})"
    add("--output-dir", type=Path, metavar="DIR", default=output_dir, help=help_)
    add("--dry-run", action="store_true", help="print the command and run nothing")
    for flag, help_ in (switches or {}).items():
        add(flag, action="store_true", help=help_)
    arguments = parse(parser, argv[1:split])
    words = [word for word in argv[:split] if word != "--dry-run"]
    arguments.command = shlex.join(["python", *words, *argv[split:]])
    arguments.program, arguments.model_flags = program, argv[split + 1 :]
    return arguments


def run(plan: Plan[T], arguments: argparse.Namespace, work: Callable[[T], int]) -> int:
    """Prints a runner's command, and unless this is a dry run does its work; the exit status.

    The work finds the output folder empty except for COMMAND_FILE, which gets the exit status:
    what an earlier run left is deleted, once all is known to be there that this one needs.

    Args:
        arguments: of `runner_arguments`.
        work: gets what the plan loads; its result is the exit status.

    Raises:
        WorkshopError: the folder holds what no runner has written, can't be made, or another run
            is filling it.
    """
    print(arguments.command, flush=True)
    if arguments.dry_run:
        return errors.DONE
    folder, command = arguments.output_dir, arguments.command
    return plan.within_memory(
        lambda: runner_files.fill(folder, command, partial(work, plan.load()))
    )
