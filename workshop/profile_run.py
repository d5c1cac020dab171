"""What profilers look at: a version that trains a few steps, warmed up, with marker ranges.

`tiny_llama_vN.py --profile-steps N` runs `profile` for the profilers that start a program of their
own accord; run_pytorch_profiler.py calls `prepare` and steps by itself.
"""

import argparse
import shlex
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workshop import cli, errors, hardware, markers, parity, results, trainer, versions
from workshop.errors import WorkshopError
from workshop.versions import Version

COMMAND_FILE = "command.txt"
"""In every folder that a runner fills: what was run. A folder may be replaced if its first line
begins with COMMAND_MARK."""
COMMAND_MARK = "# run_"
RUN_FILE = "run.json"
PROFILES = results.DEFAULT_FOLDER / "profiles"


@dataclass
class ProfileRun:
    """A version after its warm-up, ready to train the steps that a profiler watches."""

    request: cli.Request
    model: nn.Module
    optimizer: torch.optim.Optimizer
    runner: trainer.Runner
    range: markers.Range
    record: results.RunResult
    _parts: trainer.Phases

    def step(self) -> None:
        """Trains one step; there are as many as `prepare` was asked for."""
        self.runner.marked_step(self._parts, self.range)

    def eager_step(self) -> None:
        """Trains one step operation by operation, also where `step` replays a graph."""
        self.runner.marked_step(self.runner.eager, self.range)

    def batch(self) -> Tensor:
        """The batch of the last step, on the device: tokens and targets, int64 (2, B, T)."""
        return self.runner.inputs

    def layer_ranges(self) -> ExitStack:
        """The layers' marker ranges, as long as it is entered: none where a compiler or a graph
        has dissolved the layers."""
        stack = ExitStack()
        if self.request.compile_mode == "none" and not self.request.cuda_graph:
            stack.enter_context(markers.layer_ranges(self.model, self.range))
        return stack

    def save_record(self, folder: Path) -> Path:
        """Writes RUN_FILE: what was profiled, and what its last backward pass reached."""
        self.runner.wait()
        self.record.gradients = parity.count_gradients(self.model)
        self.record.losses = []
        return results.save_as(folder / RUN_FILE, self.record)


def make_request(version: Version, model_flags: list[str], steps: int) -> cli.Request:
    """What `tiny_llama_vN.py --profile-steps STEPS` would run with these flags.

    Raises:
        WorkshopError, NotOnThisMachine: it can't run here.
    """
    module = versions.load(version.key)
    parser = cli.build_parser(version, module)
    parser.prog = version.path.name
    flags = [*model_flags, "--profile-steps", str(steps)]
    return cli.check_arguments(version, module, parser.parse_args(flags))


def prepare(request: cli.Request, *, range_: markers.Range) -> ProfileRun:
    """Builds the model with V1's initial weights, trains the warm-up, captures what is captured;
    prints the configuration first.

    A captured step is taken in three graphs, so that marker ranges can tell its parts.
    """
    batches, data_record = cli.load_data(request)
    cli.print_configuration(request, data_record)
    record = cli.new_result(request, data_record)
    record.status = "profiled"
    peaks = hardware.find_peaks(hardware.device_name(request.device))
    if request.device.type == "cuda" and peaks:
        record.peak_tflops = peaks.tflops.get(request.precision.name)
        record.peak_source = peaks.source
    model = request.build()
    arguments = request.arguments
    parity.load_canonical(model, parity.canonical_state(request.config, arguments.seed))
    request.precision.set_matmul_mode()
    optimizer = request.module.configure_optimizer(model, arguments.learning_rate)
    runner = trainer.Runner(
        model, optimizer, batches, request.precision, cuda_graph=request.cuda_graph
    )
    runner.warm_up(request.schedule.warmup)
    parts = runner.parts()
    runner.wait()
    return ProfileRun(request, model, optimizer, runner, range_, record, parts)


def profile(request: cli.Request) -> int:
    """`--profile-steps`: trains the steps between the calls that start and stop NVIDIA's
    profilers; the exit status."""
    return cli.within_memory(request, lambda: _profile(request))


def _profile(request: cli.Request) -> int:
    folder, steps = request.arguments.output_dir, request.schedule.timed
    results.prepare_folder(folder)
    run = prepare(request, range_=markers.for_vendor_tools(request.device))
    # A range belongs to the thread that opened it. In a thread of autograd's own, the backward
    # pass would lie outside of them all, and some tools lose what other threads do.
    with run.layer_ranges(), torch.autograd.set_multithreading_enabled(False):
        _start_profiler(request.device)
        for _ in range(steps):
            run.step()
        run.runner.wait()
        _stop_profiler(request.device)
    path = run.save_record(folder)
    print(f"Profiled: {steps} steps after {request.schedule.warmup} of warm-up; nothing was timed")
    print(f"  {gradients_sentence(run.record)}")
    print(f"Record: {path}")
    return errors.DONE


def gradients_sentence(record: results.RunResult) -> str:
    """Whether the profiled steps really trained the model; for a record that was saved."""
    g = record.gradients
    assert g is not None
    whole = g.params_with_grad == g.params_total
    return (
        f"{'gradients' if whole else 'SEVERED: gradients'} reached {g.tensors_with_grad} of "
        f"{g.tensors_total} tensors, {g.params_with_grad:,} of {g.params_total:,} parameters"
    )


def _start_profiler(device: torch.device) -> None:
    # ROCm has no counterpart: its tools watch the whole run, and the ranges tell the steps.
    if device.type == "cuda" and torch.version.cuda:
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()


def _stop_profiler(device: torch.device) -> None:
    if device.type == "cuda" and torch.version.cuda:
        torch.cuda.profiler.stop()


# --- the runners in Python -----------------------------------------------------------------------


def runner_arguments(
    script: str | Path,
    description: str,
    *,
    steps: int,
    argv: list[str],
    add: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Parses `[--steps N] [--output-dir DIR] [--dry-run] [-- FLAGS OF THE MODEL]`.

    Args:
        script: the runner's file, whose folder tells the version and whose name the tool.
        steps: the default of --steps.
        add: adds the runner's own flags.

    Returns:
        version, steps, output_dir, dry_run, model_flags, and the runner's own.
    """
    script = Path(script).resolve()
    version = next(v for v in versions.VERSIONS.values() if v.folder == script.parent.name)
    tool = script.stem.removeprefix("run_")
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=description,
        usage=f"{script.name} [options] [-- flags of {version.path.name}]",
        epilog="Exit status: 0 done, 1 memory ran out or a counter failed, 2 wrong usage, 77 this "
        "machine lacks what it needs, 130 interrupted.",
    )
    parser.add_argument(
        "--steps", type=int, default=steps, metavar="N", help="training steps (default %(default)s)"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        default=PROFILES / version.key / tool,
        help=f"where the outputs go (default: results/profiles/{version.key}/{tool})",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and stop")
    if add:
        add(parser)
    arguments = parser.parse_args(argv[:split])
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: it must be at least 1")
    arguments.version, arguments.model_flags = version, argv[split + 1 :]
    return arguments


def command_line(script: str | Path, argv: list[str]) -> str:
    """A runner's command as a user would type it."""
    return shlex.join(["python", str(Path(script).name), *argv])


def fresh_folder(folder: Path, command: str) -> Path:
    """An empty folder that holds COMMAND_FILE alone; an earlier one of a runner is replaced.

    Raises:
        WorkshopError: it holds what no runner has written, or can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise WorkshopError(f"--output-dir {folder}: it is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not _filled_by_a_runner(folder):
            raise WorkshopError(
                f"--output-dir {folder}: it is not empty, and no profiler's script filled it; "
                "choose another one"
            )
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    results.prepare_folder(folder)
    script = command.split()[1]
    results.write_text(folder / COMMAND_FILE, f"# {script}\n{command}\n")
    return folder


def _filled_by_a_runner(folder: Path) -> bool:
    try:
        with (folder / COMMAND_FILE).open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(COMMAND_MARK)
    except OSError:
        return False
