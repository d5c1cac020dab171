"""Times a network, in inference or training, and has the gate check the timed iterations.

`make_bench` builds the network, `measure` prepares, warms up, times and answers for the work.
"""

import copy
import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labs.inference_benchmark import counts, modes, networks
from labs.inference_benchmark.gate import Images
from labs.inference_benchmark.modes import Setting, Training, Variant
from workshop import results
from workshop.gate.steps import shown
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRun
from workshop.profilers.table import STEP
from workshop.run import memory, startup, timing
from workshop.run.markers import Range
from workshop.run.precision import set_arithmetic, untuned

PLAIN_ITERATIONS = 5
Wrap = Callable[[nn.Module], nn.Module]


@dataclass
class Bench:
    """A network in one variant, ready to run, and what this process measured."""

    setting: Setting
    variant: Variant
    model: nn.Module
    """fp32."""
    counts: counts.Counts
    run: LabRun
    training: bool
    range_: Range = nullcontext
    """Around each timed iteration."""
    turn: Turn = field(default_factory=lambda: Turn(judged=False))
    iteration: Callable[[int], object] = lambda index: None
    warmup_ms: list[float] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0
    """Bytes that a GPU's allocator gave at most, and held at most, up to the last iteration."""


def make_bench(setting: Setting, variant: Variant, run: LabRun, training: bool) -> Bench:
    """Builds the network and counts its operations."""
    start = time.perf_counter()
    set_arithmetic("fp32")
    model = networks.build(setting.network, setting.seed, setting.device)
    counted = counts.count(model, setting.network.images(1, setting.seed))
    run.flops_per_step = counted.flops * setting.batch_size * (3 if training else 1)
    element = 4 if training else variant.dtype.itemsize
    run.metrics["flop_per_byte"] = counted.intensity(setting.batch_size, element)
    run.setup_s["model"] = time.perf_counter() - start
    set_arithmetic(variant.precision)
    return Bench(setting, variant, model, counted, run, training)


class Inputs:
    """The images of all iterations on the device, and the batch that the network reads: an
    iteration's images and the judge's pattern, added up."""

    def __init__(
        self, setting: Setting, iterations: int, variant: Variant, dtype: torch.dtype, black: bool
    ) -> None:
        self.fixed = variant.peer == "timm"
        self.data = Images(setting, iterations, fixed=self.fixed)
        layout = variant.layout()
        if black:
            shape = (self.data.count, 3, setting.network.edge, setting.network.edge)
            pool = torch.zeros(shape, dtype=dtype, device=setting.device)
        else:
            pool = self.data.images.to(setting.device, dtype)
        self._pool = pool.to(memory_format=layout)
        self.batch = self._pool[: self.data.batch].clone(memory_format=layout)
        self._pattern = torch.zeros_like(self._pool[:1])

    def take(self, drawn: dict[str, Tensor]) -> None:
        """Takes the pattern that came with "go", where a judge has drawn one."""
        if drawn:
            self._pattern.copy_(drawn["pattern"])
        if self.fixed:
            self._add(0)

    def read(self, index: int) -> None:
        if not self.fixed:
            self._add(index)

    def _add(self, index: int) -> None:
        torch.add(self._pool[self.data.window(index)], self._pattern, out=self.batch)

    @property
    def batch_bytes(self) -> int:
        return memory.tensor_bytes([self.batch])

    @property
    def pool_bytes(self) -> int:
        return memory.tensor_bytes([self._pool])


class Inference:
    """Iterations of inference: a batch comes in, its logits go out. timm's benchmark has one fixed
    batch, waits for the device after each step, and keeps nothing."""

    def __init__(
        self,
        setting: Setting,
        variant: Variant,
        model: nn.Module,
        iterations: int = 1,
        *,
        black: bool = False,
    ) -> None:
        """
        Args:
            model: the fp32 network, which stays as it is.
            black: all images are zeros, which takes no memory of the host.
        """
        self.setting, self.variant = setting, variant
        self.inputs = Inputs(setting, iterations, variant, variant.dtype, black)
        if variant.peer == "timm":
            model = networks.timm_network(setting.network.name, model)
        model = modes.prepare(model, variant)
        self._weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
        model = setting.spread(model)
        self._step = modes.inference_step(model, variant, self.inputs.batch, setting.device)
        self._kept = torch.zeros(0, 1, 1)

    def capture(self) -> None:
        """Makes a graph of the step, where the variant wants one."""
        if self.variant.cuda_graph:
            self._step = modes.captured(self._step, self.setting.device)

    def keep(self, iterations: range) -> None:
        """Makes room for the logits of the newest iterations."""
        if not self.inputs.fixed:
            output = self._step()
            self._kept = output.new_empty((len(self.inputs.data.kept(iterations)), *output.shape))

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self.inputs.read(index)
        with range_("forward"):
            output = self._step()
        if self.inputs.fixed:
            self._kept = output[None]
            wait(self.setting.device)
        elif len(self._kept):
            self._kept[index % len(self._kept)].copy_(output, non_blocking=True)

    def parts(self) -> dict[str, int]:
        """Bytes by name: the weights, the input and two of the batches that wait."""
        batches = 1 if self.inputs.fixed else 3
        return {"weights": self._weights, "images": batches * self.inputs.batch_bytes}

    @property
    def spare_bytes(self) -> int:
        """Images that wait for the gate alone."""
        batches = 0 if self.inputs.fixed else 2
        return self.inputs.pool_bytes - batches * self.inputs.batch_bytes

    def live_bytes(self) -> int:
        kept = [] if self.inputs.fixed else [self._kept]
        return sum(self.parts().values()) + memory.tensor_bytes(kept)

    def losses(self, iterations: range) -> list[float]:
        """The loss of each iteration whose logits are kept; NaN for the others."""
        data, found = self.inputs.data, [math.nan] * len(iterations)
        for index in data.kept(iterations):
            output = self._kept[index % len(self._kept)].detach().cpu().float()
            loss = self.setting.network.loss(output, data.targets[data.window(index)])
            found[index - iterations.start] = float(loss)
        return found

    def proof(self, iterations: int) -> dict[str, Tensor]:
        """The sums of each image's logits, of all iterations whose logits are kept."""
        return {"sums": self._kept.flatten(2).sum(2, dtype=torch.float32)}

    def show(self, places: dict[str, list[int]]) -> Shown:
        """The logits of some images of some iterations, by the iterations' numbers."""
        return {
            index: self._kept[int(index) % len(self._kept)][which].float()
            for index, which in places.items()
        }, {}


class Learning:
    """Iterations of training, without dropout, which the given network loses too."""

    def __init__(
        self,
        setting: Setting,
        variant: Variant,
        model: nn.Module,
        iterations: int = 1,
        *,
        black: bool = False,
        wrap: Wrap = lambda model: model,
    ) -> None:
        """As Inference; `wrap` makes the network a part of a group of processes."""
        networks.without_chance(model)
        self.inputs = Inputs(setting, iterations, variant, torch.float32, black)
        self._targets = self.inputs.data.targets.to(setting.device)
        self.training = Training(wrap(copy.deepcopy(model)), variant, setting)
        self._losses: list[Tensor] = []

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self.inputs.read(index)
        targets = self._targets[self.inputs.data.window(index)]
        self._losses.append(self.training.step(self.inputs.batch, targets, range_))

    def parts(self) -> dict[str, int]:
        model, optimizer = self.training.model, self.training.optimizer
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return {
            "weights": memory.tensor_bytes([*model.parameters(), *model.buffers()]),
            "gradients": memory.tensor_bytes(gradients),
            "optimizer_state": memory.tensor_bytes(memory.optimizer_tensors(optimizer)),
            "images": self.inputs.batch_bytes,
        }

    @property
    def spare_bytes(self) -> int:
        return self.inputs.pool_bytes

    def live_bytes(self) -> int:
        """Without the gradients, which a step begins by freeing."""
        return sum(size for name, size in self.parts().items() if name != "gradients")

    def losses(self, iterations: range) -> list[float]:
        return [float(loss) for loss in self._losses[iterations.start : iterations.stop]]

    def proof(self, iterations: int) -> dict[str, Tensor]:
        """The losses of the newest iterations, each of which depends on all before."""
        return {"losses": torch.stack(self._losses[-iterations:])}

    def show(self, show: str) -> Shown:
        """The state after the newest step."""
        training = self.training
        # DDP overwrites the others' statistics with those of the first process.
        parts = training.model, training.optimizer, training.scaler
        return shown(*parts, statistics=not training.rank)


Work = Inference | Learning

# --- the measurement -----------------------------------------------------------------------------


def measure(
    bench: Bench,
    iterations: int,
    warmup: int,
    say: Callable[[str], object] = lambda line: None,
    wrap: Wrap = lambda model: model,
) -> None:
    """Prepares, warms up, times, and answers for the timed work; fills in the bench's run.

    Args:
        wrap: makes a network that learns a part of a group of processes.
    """
    run, device, variant = bench.run, bench.setting.device, bench.variant
    startup.watch_compilers(torch_compile=variant.compile is not None)
    if variant.compile is not None or variant.export:
        say("Compiling model (this may take minutes the first time) ...")
    start, timed = time.perf_counter(), range(warmup, warmup + iterations)
    about = bench.setting, variant, bench.model, timed.stop
    work = Learning(*about, wrap=wrap) if bench.training else Inference(*about)
    prepared_s = time.perf_counter() - start
    count_peak_anew(device)
    _take_turn(work, bench)
    for index in range(warmup):  # in these compilers and allocators settle
        start = time.perf_counter()
        work(index)
        wait(device)
        bench.warmup_ms.append((time.perf_counter() - start) * 1e3)
    if isinstance(work, Inference):
        work.keep(timed)
    run.setup_s |= {
        "compile": prepared_s if variant.export else startup.compile_seconds(),
        "warm_up": sum(bench.warmup_ms) / 1e3,
    }
    if not (variant.cuda_graph or variant.captures_itself) or bench.training:
        count_peak_anew(device)  # a graph's memory is seen only while it is captured
    if isinstance(work, Learning):
        bench.turn.answer(work.show, run)  # the state before the first timed step
    _time(work, bench, timed)
    done = range(warmup + len(run.step_ms))
    losses = work.losses(done if bench.training else done[warmup:])
    run.losses = results.finite([math.nan] * (len(done) - len(losses)) + losses)
    run.memory_mb = memory_of(bench, work)
    bench.iteration = work


def _take_turn(work: Work, bench: Bench) -> None:
    """Compiles, by an iteration, waits until the device is free, and captures."""
    if isinstance(work, Learning):  # an iteration would train
        bench.turn.wait()
        return
    if bench.turn.judged:
        with untuned(bench.variant.precision):
            work(0)
        wait(bench.setting.device)
        bench.turn.wait()
        if bench.variant.captures_itself:
            from torch._inductor import config

            # Its next call would capture, during which no algorithm can be searched.
            with config.patch({"triton.force_cudagraphs_warmup": True}):
                work(0)
    work.capture()


def _time(work: Work, bench: Bench, iterations: range) -> None:
    """Times iterations on the device's own clock, waiting once, after the last: or where the judge
    wants to see what they did. Meanwhile the clock stands still. Ctrl-C keeps what is complete."""
    device, run, done = bench.setting.device, bench.run, iterations.start
    clock = Clock(device, bench.turn)
    while done < iterations.stop and run.status != "interrupted":
        go = clock.start()
        work.inputs.take(go.tensors)
        proof: dict[str, Tensor] = {}
        try:
            for index in range(done, go.values.get("until", iterations.stop)):
                with bench.range_(STEP):
                    work(index)
                clock.mark()
            proof = work.proof(index + 1 - done)
        except KeyboardInterrupt:
            run.status = "interrupted"
        clock.stop(proof)
        done = iterations.start + len(clock.step_ms)
        if device.type == "cuda":
            bench.peak = torch.cuda.max_memory_allocated(device)
            bench.reserved = torch.cuda.max_memory_reserved(device)
        run.step_ms = clock.step_ms
        if not clock.step_ms:
            raise KeyboardInterrupt
        if done == iterations.stop:
            torch.cuda.empty_cache()  # the judge's network has the same device
        bench.turn.answer(work.show, run)


def time_plain(bench: Bench) -> float | None:
    """The median ms of a few iterations of the plain network at the same precision: what compiling
    has to win against. None for the plain network itself."""
    plain, setting = bench.variant.plain(), bench.setting
    if bench.variant == plain:
        return None
    other = Bench(setting, plain, bench.model, bench.counts, copy.deepcopy(bench.run), False)
    inference = Inference(setting, plain, bench.model)
    for _ in range(2):
        inference(0)
        wait(setting.device)
    _time(inference, other, range(PLAIN_ITERATIONS))
    return timing.median(other.run.step_ms)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_peak_anew(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_of(bench: Bench, work: Work) -> dict[str, float | str]:
    """The peak in MB, split into weights (and buffers), gradients, optimizer's state, images, and
    the rest: activations, workspaces, logits. The fp32 network and spare images, which wait there
    for the gate, are no part of it."""
    parts = work.parts()
    if bench.setting.device.type == "cuda":
        fp32 = memory.tensor_bytes([*bench.model.parameters(), *bench.model.buffers()])
        peak, source = bench.peak - fp32 - work.spare_bytes, "allocator"
    else:
        peak = memory.cpu_step_peak(lambda: work(0), work.live_bytes)
        source = "profiled allocations"
    found: dict[str, float | str] = {"peak": peak / memory.MB}
    found |= {name: amount / memory.MB for name, amount in parts.items()}
    found["rest"] = (peak - sum(parts.values())) / memory.MB
    if bench.setting.device.type == "cuda":
        found["reserved"] = bench.reserved / memory.MB
    return found | {"source": source}
