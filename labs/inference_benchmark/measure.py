"""Times a network, in inference or training, and checks what the timed iterations gave."""

import copy
import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labs.inference_benchmark import counts, networks
from labs.inference_benchmark.batches import Images
from labs.inference_benchmark.modes import (
    Setting,
    Training,
    Variant,
    captured,
    inference_step,
    prepare,
)
from workshop.gate.steps import shown
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRun
from workshop.profilers.table import STEP
from workshop.run import memory, startup, timing
from workshop.run.markers import Range
from workshop.run.precision import set_arithmetic, untuned

PLAIN_ITERATIONS = 5
Notify = Callable[[str], object]
Iteration = Callable[[int], object]


@dataclass
class Measured:
    """Measurements of one process. Times in ms."""

    warmup_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Warm-up iterations first, then timed ones; NaN for one whose logits were not kept."""
    peak: int = 0
    reserved: int = 0
    """Bytes that a GPU's allocator gave at most, and held at most, up to the last iteration."""

    def take_peak(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(device)
            self.reserved = torch.cuda.max_memory_reserved(device)


@dataclass
class Bench:
    """A network in one variant, ready to run."""

    setting: Setting
    variant: Variant
    model: nn.Module
    """fp32."""
    counts: counts.Counts
    run: LabRun
    range_: Range = nullcontext
    """Around each timed iteration."""
    turn: Turn = field(default_factory=lambda: Turn(judged=False))
    iteration: Iteration = lambda index: None


def make_bench(setting: Setting, variant: Variant, run: LabRun, training: bool) -> Bench:
    """Builds the network and counts its operations."""
    start = time.perf_counter()
    set_arithmetic("fp32")
    model = networks.build(setting.network, setting.seed, setting.device)
    counted = counts.count(model, setting.network.images(1, setting.seed))
    run.flops_per_step = counted.flops * setting.batch_size * (3 if training else 1)
    run.setup_s["model"] = time.perf_counter() - start
    set_arithmetic(variant.precision)
    return Bench(setting, variant, model, counted, run)


class Inputs:
    """The images of all iterations on the device, and the batch that the network reads: an
    iteration's images and the judge's pattern, added up."""

    def __init__(self, setting: Setting, iterations: int, variant: Variant, dtype: torch.dtype):
        self.data = Images(setting, iterations)
        layout = variant.layout()
        pool = self.data.images.to(setting.device, dtype)
        self._pool = pool.to(memory_format=layout)
        self.batch = self._pool[: self.data.batch].clone(memory_format=layout)
        self._pattern = torch.zeros_like(self._pool[:1])

    def take(self, drawn: dict[str, Tensor]) -> None:
        """Takes the pattern that came with "go", where a judge has drawn one."""
        if drawn:
            self._pattern.copy_(drawn["pattern"])

    def read(self, index: int) -> None:
        torch.add(self._pool[self.data.window(index)], self._pattern, out=self.batch)

    def bytes(self) -> tuple[int, int]:
        """The batch's size, and the size of all that waits."""
        return memory.tensor_bytes([self.batch]), memory.tensor_bytes([self._pool])


# --- inference -----------------------------------------------------------------------------------


class Inference:
    """Iterations of inference: a batch comes in, its logits go out."""

    def __init__(self, bench: Bench, iterations: int = 1) -> None:
        setting, variant = bench.setting, bench.variant
        self.bench = bench
        self.inputs = Inputs(setting, iterations, variant, variant.dtype)
        model = prepare(bench.model, variant)
        self.weights_bytes = memory.tensor_bytes([*model.parameters(), *model.buffers()])
        model = setting.spread(model)
        self._step = inference_step(model, variant, self.inputs.batch, setting.device)
        self._kept = torch.zeros(0, 1, 1)

    def capture(self) -> None:
        """Makes a graph of the step, where the variant wants one."""
        if self.bench.variant.cuda_graph:
            self._step = captured(self._step, self.bench.setting.device)

    def keep(self, iterations: range) -> None:
        """Makes room for the logits of the newest iterations."""
        output = self._step()
        self._kept = output.new_empty((len(self.inputs.data.kept(iterations)), *output.shape))

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self.inputs.read(index)
        with range_("forward"):
            output = self._step()
        if len(self._kept):
            self._kept[index % len(self._kept)].copy_(output, non_blocking=True)

    def live_bytes(self) -> int:
        return self.weights_bytes + 3 * self.inputs.bytes()[0] + memory.tensor_bytes([self._kept])

    def losses(self, iterations: range) -> list[float]:
        """The loss of each iteration whose logits are kept; NaN for the others."""
        data, found = self.inputs.data, [math.nan] * len(iterations)
        for index in data.kept(iterations):
            output = self._kept[index % len(self._kept)].detach().cpu().float()
            targets = data.targets[data.window(index)]
            loss = self.bench.setting.network.loss(output, targets)
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


def measure_inference(bench: Bench, iterations: int, warmup: int, say: Notify) -> Measured:
    """Warms up, times, and answers for the timed logits; fills in the bench's run."""
    run, device = bench.run, bench.setting.device
    startup.watch_compilers(torch_compile=bench.variant.compile is not None)
    if bench.variant.compile is not None or bench.variant.export:
        say("Compiling model (this may take minutes the first time) ...")
    start = time.perf_counter()
    inference = Inference(bench, warmup + iterations)
    prepared_s = time.perf_counter() - start
    count_peak_anew(device)
    take_turn(lambda: inference(0), bench)
    inference.capture()
    measured = Measured()
    _warm_up(inference, device, warmup, measured)
    timed = range(warmup, warmup + iterations)
    inference.keep(timed)
    compile_s = startup.compile_seconds()
    if bench.variant.export:
        compile_s = prepared_s
    run.setup_s |= {"compile": compile_s, "warm_up": sum(measured.warmup_ms) / 1e3}
    if not (bench.variant.cuda_graph or bench.variant.captures_itself):
        count_peak_anew(device)  # a graph's memory is seen only while it is captured
    _timed(inference, bench, timed, measured)
    losses = inference.losses(timed[: len(measured.step_ms)])
    measured.losses = [math.nan] * warmup + losses
    batch, pool = inference.inputs.bytes()
    # The input, and two of the batches that wait. What else waits is for the gate.
    run.memory_mb = memory_of(
        *(bench, measured, inference, inference.weights_bytes, inference.live_bytes),
        *(3 * batch, pool - 2 * batch),
    )
    bench.iteration = inference
    return measured


# --- training ------------------------------------------------------------------------------------


class Learning:
    """Iterations of training, without dropout, which the bench's network loses too."""

    def __init__(
        self,
        bench: Bench,
        iterations: int = 1,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        setting, variant = bench.setting, bench.variant
        networks.without_chance(bench.model)
        self.inputs = Inputs(setting, iterations, variant, torch.float32)
        self._targets = self.inputs.data.targets.to(setting.device)
        self.training = Training(wrap(copy.deepcopy(bench.model)), variant, setting)
        self.losses: list[Tensor] = []

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self.inputs.read(index)
        targets = self._targets[self.inputs.data.window(index)]
        self.losses.append(self.training.step(self.inputs.batch, targets, range_))

    def live_bytes(self) -> int:
        model, optimizer = self.training.model, self.training.optimizer
        tensors = [*model.parameters(), *model.buffers(), *memory.optimizer_tensors(optimizer)]
        return memory.tensor_bytes(tensors) + self.inputs.bytes()[0]

    def show(self, show: str) -> Shown:
        """The state after the newest step."""
        training = self.training
        # DDP overwrites the others' statistics with those of the first process.
        parts = training.model, training.optimizer, training.scaler
        return shown(*parts, statistics=not training.rank)

    def proof(self, iterations: int) -> dict[str, Tensor]:
        """The losses of the newest iterations, each of which depends on all before."""
        return {"losses": torch.stack(self.losses[-iterations:])}


def measure_training(
    bench: Bench,
    iterations: int,
    warmup: int,
    say: Notify,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Measured:
    """As `measure_inference`; `wrap` makes the network a part of a group of processes."""
    run, device = bench.run, bench.setting.device
    startup.watch_compilers(torch_compile=bench.variant.compile is not None)
    total = warmup + iterations
    learning = Learning(bench, total, wrap)
    measured = Measured()
    bench.turn.wait()
    _warm_up(learning, device, warmup, measured)
    run.setup_s |= {
        "compile": startup.compile_seconds(),
        "warm_up": sum(measured.warmup_ms) / 1e3,
    }
    count_peak_anew(device)
    bench.turn.answer(learning.show, run)
    _timed(learning, bench, range(warmup, total), measured)
    measured.losses = [float(loss) for loss in learning.losses]
    model = learning.training.model
    weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
    # The images of the other iterations are for the gate.
    run.memory_mb = memory_of(
        *(bench, measured, learning, weights, learning.live_bytes),
        *(*learning.inputs.bytes(), learning.training),
    )
    bench.iteration = learning
    return measured


# --- both ----------------------------------------------------------------------------------------


def _warm_up(iteration: Iteration, device: torch.device, count: int, measured: Measured) -> None:
    """Runs iterations, waiting for each: in them compilers and allocators settle."""
    for index in range(count):
        start = time.perf_counter()
        iteration(index)
        wait(device)
        measured.warmup_ms.append((time.perf_counter() - start) * 1e3)


def take_turn(iterate: Callable[[], object], bench: Bench) -> None:
    """Compiles, by an iteration, and waits until the device is free."""
    if not bench.turn.judged:
        return
    with untuned(bench.variant.precision):
        iterate()
    wait(bench.setting.device)
    bench.turn.wait()
    if bench.variant.captures_itself:
        import torch._inductor.config

        # Its next call would capture, during which no algorithm can be searched.
        with torch._inductor.config.patch({"triton.force_cudagraphs_warmup": True}):
            iterate()


def _timed(
    work: "Inference | Learning", bench: Bench, iterations: range, measured: Measured
) -> None:
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
        measured.take_peak(device)
        measured.step_ms = run.step_ms = clock.step_ms
        if not clock.step_ms:
            raise KeyboardInterrupt
        if done == iterations.stop:
            torch.cuda.empty_cache()  # the judge's network has the same device
        bench.turn.answer(work.show, run)


def time_plain(bench: Bench) -> float | None:
    """The median ms of a few iterations of the plain network at the same precision: what compiling
    has to win against. None for the plain network itself."""
    if bench.variant == bench.variant.plain():
        return None
    run = copy.deepcopy(bench.run)
    plain = Bench(bench.setting, bench.variant.plain(), bench.model, bench.counts, run)
    measured = Measured()
    inference = Inference(plain)
    _warm_up(inference, bench.setting.device, 2, measured)
    _timed(inference, plain, range(PLAIN_ITERATIONS), measured)
    return timing.median(measured.step_ms)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_peak_anew(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_of(
    bench: Bench,
    measured: Measured,
    iteration: Iteration,
    weights: int,
    live: Callable[[], int],
    images: int,
    spare: int = 0,
    training: Training | None = None,
) -> dict[str, float | str]:
    """The peak in MB, split into weights (and buffers), gradients, optimizer's state, images, and
    the rest: activations, workspaces, logits. The fp32 network and spare images, which wait there
    for the gate, are no part of it.

    Args:
        images, spare: bytes.
    """
    device = bench.setting.device
    parts = {"weights": weights}
    if training is not None:
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        parts["gradients"] = memory.tensor_bytes(gradients)
        state = memory.optimizer_tensors(training.optimizer)
        parts["optimizer_state"] = memory.tensor_bytes(state)
    parts["images"] = images
    if device.type == "cuda":
        peak, source = measured.peak, "allocator"
        peak -= memory.tensor_bytes([*bench.model.parameters(), *bench.model.buffers()]) + spare
    else:
        peak = memory.cpu_step_peak(lambda: iteration(0), live)
        source = "profiled allocations"
    found: dict[str, float | str] = {"peak": peak / memory.MB}
    found |= {name: amount / memory.MB for name, amount in parts.items()}
    found["rest"] = (peak - sum(parts.values())) / memory.MB
    if device.type == "cuda":
        found["reserved"] = measured.reserved / memory.MB
    return found | {"source": source}


def make_iteration(
    model: nn.Module, variant: Variant, setting: Setting, training: bool
) -> Callable[[], object]:
    """One iteration as the benchmark runs it, on black images, to see what memory it takes."""
    network, device, batch = setting.network, setting.device, setting.batch_size
    dtype = torch.float32 if training else variant.dtype

    def black(count: int) -> Tensor:
        shape = (count, 3, network.edge, network.edge)
        images = torch.empty(shape, dtype=dtype, device=device, memory_format=variant.layout())
        return images.zero_()

    pool = black(2 * batch)
    if training:
        targets = network.targets(batch, setting.seed).to(device)
        step = Training(copy.deepcopy(model), variant, setting).step
        return lambda: step(pool[:batch], targets)
    inputs = black(batch)
    run = inference_step(prepare(model, variant), variant, inputs, setting.device)
    if variant.cuda_graph:
        run = captured(run, setting.device)

    def iteration() -> None:
        inputs.copy_(pool[:batch])
        run()

    return iteration
