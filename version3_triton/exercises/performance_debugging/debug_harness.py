"""The sizes, weights, batches and clock that all stages share, and a result file each.

A stage imports this first, since V3 chooses between Triton's compiler and its interpreter before
Triton is imported.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # a stage was started
    from workshop.needed import import_torch

    import_torch()

import torch
from debug_results import Flags, StageResult, save
from torch import Tensor, nn

from workshop import errors, progress, results, versions
from workshop.arguments import option, run
from workshop.cli import leave_if_missing
from workshop.gate import canonical, parity
from workshop.kernels import launches
from workshop.run import data, hardware, interpreter, presets, timing
from workshop.run.precision import get_precision
from workshop.run.trainer import Runner, Schedule
from workshop.versions import ROOT

leave_if_missing("v3")
v3: Any = versions.load("v3")

Build = Callable[[Any], nn.Module]
"""Makes a stage's model from a `TinyLlamaConfig`, with the weights that the stage starts from."""
TimedSteps = Callable[[Runner, int], list[float]]
"""Trains a number of steps; the time of each in ms."""

SEED, LEARNING_RATE = 42, 1e-3


@dataclass(frozen=True)
class Size:
    """A model, its batch and how long it is trained."""

    name: str
    model: dict[str, int]
    batch_size: int
    seq_len: int
    schedule: Schedule
    text: Path | None = None
    """None: the workshop's usual one."""


_SMALL = presets.get_preset("small")
GPU_SIZE = Size(
    "small",
    _SMALL.model(),
    _SMALL.batch_size,
    _SMALL.seq_len,
    schedule=Schedule(warmup=10, timed=30, phases=10),
)
# Small enough for the interpreter, with two of everything that has an order. On few tokens chance
# decides the loss, so they are the same ones on every machine.
INTERPRETED_SIZE = Size(
    "custom",
    {
        "vocab_size": 1000, "hidden_dim": 192, "intermediate_dim": 768, "num_layers": 2,
        "num_heads": 6, "num_kv_heads": 3, "max_seq_len": 64,
    },
    batch_size=2,
    seq_len=6,
    schedule=Schedule(warmup=1, timed=2, phases=0),
    text=ROOT / "LICENSE",
)  # fmt: skip


@dataclass
class Options(Flags):
    gate: bool = option(
        "train nothing: compare logits, gradients and a short training with V1's, from V1's weights"
    )


def main(stage: str, build: Build, *, timed_steps: TimedSteps | None = None) -> int:
    """The command line of a stage; the exit status.

    Args:
        stage: the stage's `__file__`.
        build: its model.
        timed_steps: its clock; the workshop's own if there is none.
    """
    return run(
        Options,
        partial(_main, Path(stage).stem, build, timed_steps or clocked_steps),
        interrupted="interrupted: nothing saved",
        prog=Path(stage).name,
        description="Trains one stage and saves what was measured.",
        epilog="Exit status: 0 done, 1 --gate: the gate failed, 2 wrong usage, 77 Triton is "
        "missing, 130 interrupted.",
    )


def _main(stage: str, build: Build, timed_steps: TimedSteps, options: Options) -> int:
    device = hardware.get_device(options.device)
    version = versions.get_version("v3")
    interpreter.check_device(version, device)
    size = INTERPRETED_SIZE if interpreter.serves(version, device) else GPU_SIZE
    where = hardware.device_name(device)
    print(f"{size.batch_size} x {size.seq_len} tokens, {where}", flush=True)
    if options.gate:
        return _gate(build, size, device)
    results.prepare_folder(options.output_dir)
    measured = measure(stage, build, size, device, timed_steps=timed_steps)
    print(f"Result: {save(measured, options.output_dir)}")
    return errors.DONE


def _gate(build: Build, size: Size, device: torch.device) -> int:
    print("comparing with V1 ...", flush=True)
    report = parity.check(
        build,
        v3.TinyLlamaConfig(**size.model),
        precision="fp32",
        device=device,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        configure_optimizer=v3.configure_optimizer,
    )
    print(f"gate: {report.summary()}", *report.failures, sep="\n  ")
    return errors.DONE if report.passed else errors.ANSWER_IS_NO


# --- measuring -----------------------------------------------------------------------------------


class ToldRunner(Runner):
    """Says in Triton's interpreter, where a step takes up to a minute, how far it is."""

    begin = time.monotonic()
    steps = 0
    """All steps of the run; 0 says nothing, as on a GPU, whose times that would change."""

    def advance(self) -> None:
        super().advance()
        if self.steps:
            per_step = (time.monotonic() - self.begin) / self.done
            left = progress.left(self.steps - self.done, per_step)
            print(f"step {self.done} of {self.steps} done{left}", flush=True)


def measure(
    stage: str, build: Build, size: Size, device: torch.device, *, timed_steps: TimedSteps
) -> StageResult:
    """Trains a stage, from the weights that it draws itself, and says what was seen. On a GPU the
    step is replayed from a graph, as V3's is by default: what small kernels take would else be lost
    in what launching them takes."""
    precision = get_precision("fp32", device)  # two right versions agree to six digits
    precision.set_matmul_mode()
    config, schedule = v3.TinyLlamaConfig(**size.model), size.schedule
    captures = device.type == "cuda"
    batches = data.text_batches(
        data.read_corpus(size.text),
        steps=schedule.batches,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        vocab_size=config.vocab_size,
        seed=SEED,
    )
    run = results.RunResult(
        version="v3",
        session=results.new_session(),
        config_name=size.name,
        config=dataclasses.asdict(config),
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        precision=precision.name,
        warmup_steps=schedule.warmup,
        device=hardware.describe(device),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        options={
            "stage": stage,
            "interpreted": interpreter.serves(versions.get_version("v3"), device),
            "cuda_graph": captures,
            "learning_rate": LEARNING_RATE,
            "seed": SEED,
        },
        command=results.own_command(),
    )
    print("comparing its logits with V1's ...", flush=True)
    logits_error = _logits_error(build(config).to(device), batches[0, 0].to(device))
    torch.manual_seed(SEED)
    model = build(config).to(device)
    optimizer = v3.configure_optimizer(model, LEARNING_RATE)
    runner = ToldRunner(model, optimizer, batches, precision, cuda_graph=captures)
    if run.interpreted:  # one step more measures the memory
        runner.begin, runner.steps = time.monotonic(), schedule.steps + 1
    print(f"training {schedule.steps} steps ...", flush=True)
    with counted_launches() as grids:
        runner.warm_up(1)
    if schedule.warmup > 1:
        runner.warm_up(schedule.warmup - 1)
    runner.wait()
    done, start = runner.done, time.perf_counter()
    run.step_ms = timed_steps(runner, schedule.timed)
    runner.wait()
    loop_ms = (time.perf_counter() - start) * 1e3
    assert runner.done == done + schedule.timed, "a step was lost"
    run.losses = results.finite(runner.losses().tolist())
    run.memory_mb = runner.memory_mb()
    if schedule.phases:
        run.forward_ms, run.backward_ms, run.optimizer_ms = runner.phases(schedule.phases)
    run.gradients = canonical.count_gradients(model)
    return StageResult(stage, loop_ms, logits_error, len(grids), sum(grids), run)


def clocked_steps(runner: Runner, steps: int) -> list[float]:
    """Trains `steps` steps; the time of each in ms, as every version of the workshop is timed: on
    a GPU by events in its queue."""
    clock = timing.StepClock(runner.device)
    clock.mark()
    for _ in range(steps):
        runner.advance()
        clock.mark()
    return clock.durations_ms()


def _logits_error(model: nn.Module, tokens: Tensor) -> float | None:
    """How far a stage's logits are from V1's, from the same weights: relative RMS; None where they
    are no numbers."""
    state = canonical.canonical_state(model.config, SEED)
    baseline = canonical.build_baseline(model.config).to(tokens.device)
    for one in (model, baseline):
        canonical.load_canonical(one, state)
    with torch.no_grad():
        yours, true = (one(tokens).double() for one in (model, baseline))
    error = float((yours - true).norm() / true.norm())
    return error if math.isfinite(error) else None


@contextlib.contextmanager
def counted_launches() -> Iterator[list[int]]:
    """Gives a list that gets the programs of each launch of a Triton kernel; of those of a capture,
    which starts nothing, it gets none."""
    grids: list[int] = []

    def see(kernel: Any, grid: Any) -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            grids.append(math.prod(grid))

    with launches.watched(see):
        yield grids
