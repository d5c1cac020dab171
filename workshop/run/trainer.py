"""Training: the timed loop around a version's own step, its phases, its memory.

The step, its compilation and its capture are in the version's file (`train_step`, `compile_model`,
`make_capturable`, `capture_step`).
"""

import functools
import gc
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workshop import versions
from workshop.errors import OutOfMemory, WorkshopError
from workshop.run import hardware, markers, memory, startup, waiting
from workshop.run.precision import Precision
from workshop.run.timing import StepClock

COMPILE_MODES = (
    *("none", "default", "reduce-overhead", "max-autotune"),
    "max-autotune-no-cudagraphs",
)
EAGER_STEPS_BEFORE_CAPTURE = 3
"""Steps that really train before a graph is captured: they compile, choose kernels and create
the optimizer's state, none of which a capture may do."""
Notify = Callable[[str], object]
Progress = Callable[[int, float, float | None], None]
"""Called some steps late with a timed step's number, its loss and its time in ms; before those with
the first step of the warm-up, which has no time."""


@dataclass(frozen=True)
class Schedule:
    """How many steps a run trains for what, in this order; at least 1 of the first two.

    Steps are numbered from the first of the warm-up, which is step 1, to the last timed one: a
    run's losses are theirs. What is measured in further steps, the times of the phases and on the
    CPU the peak of memory, comes after them, so that all programs train the same.
    """

    warmup: int
    timed: int
    phases: int

    @property
    def steps(self) -> int:
        """The number of the last timed step."""
        return self.warmup + self.timed

    @property
    def batches(self) -> int:
        """All batches, with those of the further steps."""
        return self.steps + self.phases + 1


class NoGradient(WorkshopError):
    """The loss does not depend on any weight that is trained: the whole backward pass is cut."""


Step = Callable[[markers.Range], Tensor]
"""Trains one step with a range around each of its phases; returns its loss."""


def part_of_version(model: nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file that defines the model's class or a base class, such as `train_step`;
    V4's where they have none, so that every version and peer can be compiled and captured."""
    files = (sys.modules.get(base.__module__) for base in type(model).__mro__)
    own: Iterator[Callable[..., Any]] = (getattr(one, name) for one in files if hasattr(one, name))
    return next(own, None) or getattr(versions.load("v4"), name)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream on which steps of this process are captured, and run before that."""
    return torch.cuda.Stream(device)


class GraphedPhases:
    """Forward, backward and update captured apart, so that each can be timed as it runs."""

    def __init__(self, step: Step, stream: torch.cuda.Stream) -> None:
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()

        def capture(phase: str) -> torch.cuda.graph:
            self._graphs[phase] = torch.cuda.CUDAGraph()
            return torch.cuda.graph(self._graphs[phase], pool=pool, stream=stream)

        self._loss = step(capture)

    def __call__(self, range_: markers.Range) -> Tensor:
        for phase, graph in self._graphs.items():
            with range_(phase):
                graph.replay()
        return self._loss


@dataclass
class Training:
    """Measurements of a training run. Times in ms, memory in MB, set-up in seconds: `capture`, and
    `warm_up` without it and without what compilers took meanwhile."""

    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory_mb: dict[str, float | str] = field(default_factory=dict)
    setup_s: dict[str, float] = field(default_factory=dict)
    waited_share: float | None = None
    """As a result has it."""
    interrupted: bool = False
    no_memory_for_phases: bool = False


def missing_for_compile(device: torch.device) -> str | None:
    """A tool that torch.compile needs and does not find here, or None: a C++ compiler ($CXX or the
    system's) for the CPU, a C compiler for the launchers of GPU kernels, Python's headers; and for
    the CPU folders without spaces."""
    if device.type == "cpu":
        names = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    else:
        names = [os.environ.get("CC", "gcc"), "clang"]
    if not any(shutil.which(name) for name in names):
        return f"a compiler ({names[0]})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers (Python.h, in python3-dev or python3-devel)"
    places = (torch.__file__, sysconfig.get_paths()["include"], tempfile.gettempdir())
    spaced = [place for place in places if " " in place]
    if device.type == "cpu" and spaced:  # which PyTorch hands to the compiler without quotes
        return f"a path without spaces to {spaced[0]}"
    return None


def check_options(
    device: torch.device, precision: Precision, compile_mode: str, cuda_graph: bool
) -> None:
    """Raises WorkshopError for a combination that can't run here."""
    missing = missing_for_compile(device) if compile_mode != "none" else None
    if missing:
        raise WorkshopError(f"--compile needs {missing}; install it or use --compile none")
    if not cuda_graph:
        return
    if device.type == "cpu":
        raise WorkshopError("--cuda-graph needs a GPU; use --no-cuda-graph")
    if compile_mode in ("reduce-overhead", "max-autotune"):
        raise WorkshopError(
            f"--compile {compile_mode} captures graphs of its own, which can't be captured again: "
            "use --no-cuda-graph, or --compile default or max-autotune-no-cudagraphs"
        )


class Runner:
    """Carries a model through its batches: load a batch, step, note the loss, all without waiting
    for the device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Tensor,
        precision: Precision,
        *,
        cuda_graph: bool,
    ) -> None:
        parameter = next(model.parameters())
        self.device = parameter.device
        self.model, self.optimizer = model, optimizer
        self.done = 0
        self.capture_s = 0.0
        """Seconds that the capture of the whole step took."""
        self._batches = batches
        self.inputs = torch.empty_like(batches[0], device=self.device)
        self._losses = torch.empty(len(batches), dtype=parameter.dtype)
        if self.device.type == "cuda":
            # From pinned memory, and into it, copies run in the stream while the host goes on.
            self._batches = batches if batches.is_cuda else batches.pin_memory()
            self._losses = self._losses.pin_memory()
        self._stream = capture_stream(self.device) if cuda_graph else None
        if cuda_graph:
            if precision.loss_scaling and not optimizer.defaults.get("fused"):
                raise WorkshopError(
                    "--precision fp16 with --cuda-graph needs a fused optimizer: the plain one "
                    "asks the host at every step whether a gradient overflowed, which a graph can't"
                )
            part_of_version(model, "make_capturable")(optimizer)
        precision.prepare(model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision.loss_scaling)
        self.precision = precision
        self._train_step = part_of_version(model, "train_step")
        self._step: Callable[[], Tensor] = self.eager_step

    def eager_step(self, range_: markers.Range = nullcontext) -> Tensor:
        """The version's own step, launched operation by operation; its loss."""
        dtype = self.precision.dtype
        tokens, targets = self.inputs
        loss: Tensor = self._train_step(
            self.model, self.optimizer, self.scaler, tokens, targets, dtype, range_
        )
        return loss

    def replace_batches(self, first: int, batches: Tensor) -> None:
        """Puts other batches, (n, 2, B, T), in the place of those from `first` on."""
        # One at a time: to wake PyTorch's threads for all at once can take 10 ms.
        for own, other in zip(self._batches[first:], batches, strict=False):
            own.copy_(other)

    def load(self) -> None:
        self.inputs.copy_(self._batches[self.done], non_blocking=True)

    def advance(self) -> None:
        self.load()
        loss = self._step()
        self._losses[self.done].copy_(loss, non_blocking=True)
        self.done += 1

    def loss(self, index: int) -> float:
        """The loss of a step that the device has finished."""
        return float(self._losses[index])

    def losses(self) -> Tensor:
        """The losses so far, (done,), after waiting for the device."""
        self.wait()
        return self._losses[: self.done].clone()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, steps: int) -> None:
        """Trains `steps` steps (at least 1) in which compilers and allocators settle; then the
        graph is captured, if one is wanted, and the peak of memory counted anew."""
        left = self._settle(steps)
        # The allocator sees a graph's memory only while it is captured: the peak counts from here.
        self._count_peak_anew()
        if self._stream is not None:
            start = time.perf_counter()
            self.optimizer.zero_grad(set_to_none=True)  # the graph allocates them in its memory
            capture = part_of_version(self.model, "capture_step")
            self._step = capture(self.eager_step, self._stream)
            self.wait()
            self.capture_s = time.perf_counter() - start
        for _ in range(left):
            self.advance()

    def warm_up_parts(self, steps: int) -> Step:
        """As `warm_up`, for a step whose phases run apart, which it returns: the whole one is
        never captured."""
        left = self._settle(steps)
        step = self.step_in_parts()
        for _ in range(left):
            self.marked_step(step, nullcontext)
        return step

    def _settle(self, steps: int) -> int:
        """Trains those of `steps` that come before a capture, or all; how many are left."""
        if self._stream is None:
            self._first_steps(steps)
            return 0
        eager_steps = min(steps, EAGER_STEPS_BEFORE_CAPTURE)
        # A capture runs on a side stream, and autograd's nodes stay with the first they meet.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._first_steps(eager_steps)
        torch.cuda.current_stream().wait_stream(self._stream)
        return steps - eager_steps

    def _first_steps(self, steps: int) -> None:
        if self.scaler.is_enabled():
            self.load()
            self.settle_scale()
        try:
            for _ in range(steps):
                self.advance()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise NoGradient("the loss has no gradient: the whole backward pass is cut") from None

    def settle_scale(self) -> None:
        """Halves fp16's loss scale until the present batch's gradients don't overflow, and once
        more for the batches to come; trains nothing. A GradScaler would leave out a step each time,
        and not the same in all versions: where a product sums the embedding's gradient in fp16 it
        overflows, in fp32 it does not."""
        fits = False
        while not fits and self.scaler.get_scale() > 1:  # a NaN at any scale is no overflow
            self.optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast(self.device.type):
                loss = self.model(*self.inputs)
            self.scaler.scale(loss).backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            fits = all(bool(gradient.isfinite().all()) for gradient in gradients)
            scale = self.scaler.get_scale() / 2
            self.scaler = torch.amp.GradScaler(self.device.type, init_scale=scale)

    def _count_peak_anew(self) -> None:
        if self.device.type == "cuda":
            self.wait()
            gc.collect()
            # cuBLAS keeps a workspace for every stream that ever called it, also for the gate's.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def memory_mb(self) -> dict[str, float | str]:
        """The peak since the warm-up, and what it is made of. PyTorch keeps none for the CPU: there
        it is that of one more step, trained under the profiler."""
        self.wait()
        if self.device.type == "cpu":
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()  # what the step would release, but earlier ones allocated
            state = memory.optimizer_tensors(self.optimizer)
            live = memory.tensor_bytes([*self.model.parameters(), *self.model.buffers(), *state])
            peak = memory.cpu_step_peak(self.advance, lambda: live)
            return memory.break_down(peak, self.model, self.optimizer, "profiled allocations")
        peak = torch.cuda.max_memory_allocated(self.device)
        breakdown = memory.break_down(peak, self.model, self.optimizer, "allocator")
        breakdown["reserved"] = torch.cuda.max_memory_reserved(self.device) / memory.MB
        return breakdown

    def step_in_parts(self) -> Step:
        """The step with its phases apart: three graphs, if it is captured. Its whole graph is given
        up with the memory that it holds."""
        if self._stream is None:
            return self.eager_step
        self._step = self.eager_step
        self._count_peak_anew()
        self.optimizer.zero_grad(set_to_none=True)
        return GraphedPhases(self.eager_step, self._stream)

    def marked_step(self, step: Step, range_: markers.Range) -> None:
        """Trains one step in a marker range, with ranges around its phases, for a profiler."""
        with range_("step"):
            self.load()
            step(range_)
        self.done += 1

    def phases(self, steps: int) -> tuple[list[float], list[float], list[float]]:
        """Trains `steps` more steps with marks between their phases; the forward, backward and
        optimizer times in ms; clearing the gradients counts as the optimizer's. Kept apart from
        the timed steps, which the marks would slow."""
        step = self.step_in_parts()
        clock = StepClock(self.device)

        @contextmanager
        def marked(phase: str) -> Iterator[None]:
            """A mark at a phase's end, where the next begins; before the first one, too."""
            if phase == "forward":
                clock.mark()
            yield
            clock.mark()

        for _ in range(steps):
            self.load()
            clock.mark()
            step(marked)
            self.done += 1
        self.wait()
        starts = range(0, 5 * steps, 5)
        forward = [clock.between_ms(i + 1, i + 2) for i in starts]
        backward = [clock.between_ms(i + 2, i + 3) for i in starts]
        optimizer = [clock.between_ms(i, i + 1) + clock.between_ms(i + 3, i + 4) for i in starts]
        return forward, backward, optimizer


def train_losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Tensor,
    precision: Precision,
    *,
    cuda_graph: bool = False,
    notify: Notify = lambda _: None,
) -> Tensor:
    """Trains on each of `batches` (n, 2, B, T) once, as `train` does; the losses, (n,).

    Args:
        notify: called with the step that begins, of those after the warm-up.
    """
    runner = Runner(model, optimizer, batches, precision, cuda_graph=cuda_graph)
    runner.warm_up(min(EAGER_STEPS_BEFORE_CAPTURE, len(batches)))
    while runner.done < len(batches):
        notify(f"training step {runner.done + 1}/{len(batches)}")
        runner.advance()
    return runner.losses()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Tensor,
    precision: Precision,
    *,
    schedule: Schedule,
    cuda_graph: bool,
    progress: Progress | None = None,
) -> Training:
    """Trains the schedule's steps, and those in which more is measured.

    Args:
        batches: int64 (n, 2, B, T) on the host, n = `schedule.batches`. Each step copies its own
            batch to the device, and that copy is in its time.

    A KeyboardInterrupt from the timed steps on ends the run: what was completed is returned,
    marked `interrupted`, without phases, and on the CPU without memory. The phases are left out,
    too, if there is no memory for the graphs that they are captured in.
    """
    runner = Runner(model, optimizer, batches, precision, cuda_graph=cuda_graph)
    training = Training(setup_s=warm_up(runner, schedule.warmup))
    if progress:
        progress(1, runner.loss(0), None)
    clock = StepClock(runner.device)
    start, waited = time.perf_counter(), waiting.seconds_without_processor()
    try:
        timed_steps(runner, clock, schedule.timed, progress)
        training.waited_share = waiting.longest_share(waited, time.perf_counter() - start)
        measure_more(runner, schedule, training)
    except KeyboardInterrupt:
        training.interrupted = True
    training.step_ms = clock.durations_ms()
    training.losses = runner.losses()[: schedule.warmup + len(training.step_ms)].tolist()
    if runner.device.type == "cuda" and not training.memory_mb:
        training.memory_mb = runner.memory_mb()
    return training


def warm_up(runner: Runner, steps: int) -> dict[str, float]:
    """`Runner.warm_up`, up to a device that waits; the seconds it took: `capture`, and `warm_up`
    without it and without what compilers took meanwhile."""
    start, compiled = time.perf_counter(), startup.compile_seconds()
    runner.warm_up(steps)
    runner.wait()
    apart = runner.capture_s + startup.compile_seconds() - compiled
    return {
        "capture": runner.capture_s,
        "warm_up": max(0.0, time.perf_counter() - start - apart),
    }


def measure_more(runner: Runner, schedule: Schedule, training: Training) -> None:
    """The peak of memory of the timed steps, which are over, and the times of a step's phases."""
    training.memory_mb = training.memory_mb or runner.memory_mb()
    if not schedule.phases:
        return
    try:
        phases = runner.phases(schedule.phases)
    except (RuntimeError, MemoryError) as error:
        if memory_asked_for(error) is None:
            raise
        training.no_memory_for_phases = True
    else:
        training.forward_ms, training.backward_ms, training.optimizer_ms = phases


def memory_asked_for(error: BaseException) -> str | None:
    """How much the allocation that failed asked for; None for an error of another kind. A capture
    that it breaks off ends in another error, which has it as its cause."""
    match = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if match and match[2] == "bytes":
        return f"{int(match[1]) / 1e9:,.2f} GB"
    if match:
        return f"{match[1]} {match[2]}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "block"
    behind = error.__cause__ or error.__context__
    return None if behind is None else memory_asked_for(behind)


@contextmanager
def memory_failure_as(explain: Callable[[str], OutOfMemory]) -> Iterator[None]:
    """Raises what `explain` makes of an allocation that failed in the block; it gets what was asked
    for, in words."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        asked = memory_asked_for(error)
        if asked is None:
            raise
        raise explain(f"a further {asked} was asked for") from None


def check_memory(
    device: torch.device, needed_bytes: float, explain: Callable[[str], OutOfMemory]
) -> None:
    """Raises what `explain` makes of a need that is larger than the device's memory: a CPU that
    runs out of memory ends the process without a message."""
    available = hardware.memory_bytes(device)
    if available is not None and needed_bytes > available:
        raise explain(f"at least {needed_bytes / 1e9:,.1f} GB of {available / 1e9:,.1f} needed")


def timed_steps(
    runner: Runner,
    clock: StepClock,
    num_steps: int,
    progress: Callable[[int, float, float], None] | None = None,
) -> None:
    """Enqueues the steps; reports those that the device has meanwhile finished, never waiting."""
    warmup, reported = runner.done, 0
    clock.mark()
    for step in range(1, num_steps + 1):
        runner.advance()
        clock.mark()
        if step == num_steps:
            runner.wait()
        while progress and reported < step and clock.reached(reported + 1):
            reported += 1
            number = warmup + reported
            progress(number, runner.loss(number - 1), clock.between_ms(reported - 1, reported))
