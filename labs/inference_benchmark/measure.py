"""Times a network, in inference or training, and checks what the timed iterations gave."""

import copy
import gc
import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labs.inference_benchmark import counts, networks, proof
from labs.inference_benchmark.modes import (
    Setting,
    Training,
    Variant,
    captured,
    inference_step,
    prepare,
)
from workshop.gate.steps import State, Watch
from workshop.judge.turn import Clock, Turn
from workshop.labs import LabRun
from workshop.profilers.table import STEP
from workshop.run import memory, startup, timing
from workshop.run.markers import Range
from workshop.run.precision import set_arithmetic, untuned

SAME_PIXELS = 8
"""In the first row of each image."""
MOST_PLACES = 1000
"""Iterations, or images of a batch if it has more, of which no two have the same images."""
KEPT_BYTES = 256e6
"""Most logits of the timed iterations that are kept."""
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
    interrupted: bool = False


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


# --- inference -----------------------------------------------------------------------------------


class Images:
    """Images and targets of all iterations, those of a process of a group. Each iteration reads a
    window that no other has, but shares most of its images with some; and all images begin with
    the same pixels. So what an earlier iteration left is never the answer."""

    def __init__(self, setting: Setting, iterations: int, rank: int | None = None) -> None:
        network, seed = setting.network, setting.images_seed(rank)
        self.batch = setting.batch_size
        if rank is not None and setting.parts:
            self.batch = setting.parts[rank]
        self._places = max(self.batch, min(iterations, MOST_PLACES)) + 1
        count = self.batch + self._places - 1
        self.images = network.images(count, seed)
        self.images[:, :, 0, :SAME_PIXELS] = self.images[0, :, 0, :SAME_PIXELS].clone()
        self.targets = network.targets(count, seed)
        steps = itertools.count(max(1, self.batch // 3))
        self._step = next(step for step in steps if math.gcd(step, self._places) == 1)

    def window(self, index: int) -> slice:
        """The images of an iteration."""
        first = index * self._step % self._places
        return slice(first, first + self.batch)


class Inference:
    """Iterations of inference: a batch comes in, its logits go out."""

    def __init__(self, bench: Bench, iterations: int = 1) -> None:
        setting, variant = bench.setting, bench.variant
        self.bench = bench
        self.data = Images(setting, iterations)
        layout = variant.layout()
        pool = self.data.images.to(setting.device, variant.dtype)
        self._pool = pool.to(memory_format=layout)
        self._input = self._pool[: setting.batch_size].clone(memory_format=layout)
        model = prepare(bench.model, variant)
        self.weights_bytes = memory.tensor_bytes([*model.parameters(), *model.buffers()])
        model = setting.spread(model)
        self._step = inference_step(model, variant, self._input, setting.device)
        self._kept: list[Tensor] = []
        self._ring = 1

    def capture(self) -> None:
        """Makes a graph of the step, where the variant wants one."""
        if self.bench.variant.cuda_graph:
            self._step = captured(self._step, self.bench.setting.device)

    def keep(self, iterations: int) -> None:
        """Makes room for the logits of the newest iterations, up to KEPT_BYTES."""
        output = self._step()
        each = output.numel() * output.element_size()
        self._ring = min(iterations, max(2, int(KEPT_BYTES / each)))
        self._kept = [torch.empty_like(output) for _ in range(self._ring)]

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self._input.copy_(self._pool[self.data.window(index)], non_blocking=True)
        with range_("forward"):
            output = self._step()
        if self._kept:
            self._kept[index % self._ring].copy_(output, non_blocking=True)

    def images_bytes(self) -> int:
        """Three batches: the input, and two of those that wait. What else waits is for the gate."""
        return 3 * memory.tensor_bytes([self._input])

    def spare_bytes(self) -> int:
        return memory.tensor_bytes([self._pool, self._input]) - self.images_bytes()

    def live_bytes(self) -> int:
        return self.weights_bytes + self.images_bytes() + memory.tensor_bytes(self._kept)

    def losses(self, iterations: range) -> list[float]:
        """The loss of each iteration whose logits are kept; NaN for the others."""
        found = [math.nan] * len(iterations)
        for place, index in list(enumerate(iterations))[-self._ring :]:
            output = self._kept[index % self._ring].detach().cpu().float()
            targets = self.data.targets[self.data.window(index)]
            found[place] = float(self.bench.setting.network.loss(output, targets))
        return found

    def drawn(self, iterations: range) -> tuple[Tensor, list[proof.Timed]]:
        """Images that are drawn after the clock, fp32 (N, 3, edge, edge): some of two iterations;
        and where any iteration that is kept had one of them, what it gave."""
        kept = iterations[-self._ring :]
        chosen = [kept[i] for i in torch.randint(len(kept), (2,), generator=_by_chance())]
        numbers = sorted({
            self.data.window(index).start + place
            for index in chosen
            for place in proof.sample_of(self.data.batch, _by_chance()).tolist()
        })  # fmt: skip
        timed: list[proof.Timed] = []
        for index in kept:
            window = self.data.window(index)
            which = [i for i, n in enumerate(numbers) if window.start <= n < window.stop]
            places = torch.tensor([numbers[i] - window.start for i in which], dtype=torch.long)
            output = self._kept[index % self._ring]
            timed += [(which, output[places.to(output.device)].double().cpu())] if which else []
        return self.data.images[torch.tensor(numbers)], timed


def _by_chance() -> torch.Generator:
    """Draws what no seed of the run tells, and leaves PyTorch's own random numbers as they are."""
    generator = torch.Generator()
    generator.seed()
    return generator


def measure_inference(bench: Bench, iterations: int, warmup: int, say: Notify) -> Measured:
    """Warms up, times, and compares the timed logits with the truth; fills in the bench's run."""
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
    inference.keep(iterations)
    compile_s = startup.compile_seconds()
    if bench.variant.export:
        compile_s = prepared_s
    run.setup_s |= {"compile": compile_s, "warm_up": sum(measured.warmup_ms) / 1e3}
    if not (bench.variant.cuda_graph or bench.variant.captures_itself):
        count_peak_anew(device)  # a graph's memory is seen only while it is captured
    _timed(inference, bench, range(warmup, warmup + iterations), measured)
    done = range(warmup, warmup + len(measured.step_ms))
    measured.losses = [math.nan] * warmup + inference.losses(done)
    images, timed = inference.drawn(done)  # before another iteration takes the place of one
    images_bytes, spare = inference.images_bytes(), inference.spare_bytes()
    run.memory_mb = memory_of(
        bench, inference, inference.weights_bytes, inference.live_bytes, images_bytes, spare
    )
    truth = proof.find_truth(bench.model, bench.variant, images.to(device))
    run.gate, run.metrics["top1_agreement"] = proof.of_inference(bench.variant, truth, timed)
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
        without_chance(bench.model)
        self.data = Images(setting, iterations)
        self._images = self.data.images.to(setting.device).to(memory_format=variant.layout())
        self._targets = self.data.targets.to(setting.device)
        self.training = Training(wrap(copy.deepcopy(bench.model)), variant, setting)
        self.losses: list[Tensor] = []

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        window = self.data.window(index)
        loss = self.training.step(self._images[window], self._targets[window], range_)
        self.losses.append(loss)

    def images_bytes(self) -> int:
        """One batch: the images of the other iterations are for the gate."""
        return memory.tensor_bytes([self._images]) // len(self._images) * self.data.batch

    def spare_bytes(self) -> int:
        return memory.tensor_bytes([self._images]) - self.images_bytes()

    def live_bytes(self) -> int:
        model, optimizer = self.training.model, self.training.optimizer
        tensors = [*model.parameters(), *model.buffers(), *memory.optimizer_tensors(optimizer)]
        return memory.tensor_bytes(tensors) + self.images_bytes()

    def state(self) -> State:
        found = State.of(self.training.model, self.training.optimizer, self.training.scaler)
        if self.training.rank:  # DDP overwrites its statistics with those of the first process
            found.statistics.clear()
        return found


def measure_training(
    bench: Bench,
    iterations: int,
    warmup: int,
    say: Notify,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Measured:
    """As `measure_inference`; `wrap` makes the network a part of a group of processes."""
    run, setting, device = bench.run, bench.setting, bench.setting.device
    startup.watch_compilers(torch_compile=bench.variant.compile is not None)
    total = warmup + iterations
    learning = Learning(bench, total, wrap)
    watch = Watch(learning.state, proof.SGD, total)

    def see(index: int) -> None:
        watch.see(index, learning.losses[-1])

    measured = Measured()
    bench.turn.wait()
    _warm_up(learning, device, warmup, measured, see)
    run.setup_s |= {
        "compile": startup.compile_seconds(),
        "warm_up": sum(measured.warmup_ms) / 1e3,
    }
    count_peak_anew(device)
    _timed(learning, bench, range(warmup, total), measured, watch.wants, see)
    measured.losses = [float(loss) for loss in learning.losses]
    model = learning.training.model
    weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
    images_bytes, spare = learning.images_bytes(), learning.spare_bytes()
    run.memory_mb = memory_of(
        *(bench, learning, weights, learning.live_bytes, images_bytes, spare, learning.training)
    )
    run.gate = proof.of_training(
        bench.model, bench.variant, setting, watch, lambda rank: Images(setting, total, rank)
    )
    bench.iteration = learning
    return measured


def without_chance(model: nn.Module) -> None:
    """Switches off dropout and its like."""
    for module in model.modules():
        if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        for name in ("drop_rate", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


# --- both ----------------------------------------------------------------------------------------


def _see_nothing(index: int) -> bool:
    """Looks at no iteration."""
    return False


def _warm_up(
    iteration: Iteration,
    device: torch.device,
    count: int,
    measured: Measured,
    see: Callable[[int], object] = _see_nothing,
) -> None:
    """Runs iterations, waiting for each: in them compilers and allocators settle."""
    for index in range(count):
        start = time.perf_counter()
        iteration(index)
        wait(device)
        measured.warmup_ms.append((time.perf_counter() - start) * 1e3)
        see(index)


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
    iteration: Iteration,
    bench: Bench,
    iterations: range,
    measured: Measured,
    wants: Callable[[int], bool] = _see_nothing,
    see: Callable[[int], object] = _see_nothing,
) -> None:
    """Times iterations on the device's own clock, waiting once, after the last. Ctrl-C keeps what
    is complete. While `see` looks at an iteration that it wants, the clock stands still."""
    clock = Clock(bench.setting.device, bench.turn)
    clock.start()
    try:
        for index in iterations:
            with bench.range_(STEP):
                iteration(index)
            clock.mark()
            if wants(index):
                clock.stop()
                see(index)
                clock.start()
    except KeyboardInterrupt:
        measured.interrupted = True
    clock.stop()
    measured.step_ms = clock.step_ms
    if not measured.step_ms:
        raise KeyboardInterrupt


def time_plain(bench: Bench) -> float | None:
    """The median ms of a few iterations of the plain network at the same precision: what compiling
    has to win against. None for the plain network itself."""
    if bench.variant == bench.variant.plain():
        return None
    plain = Bench(bench.setting, bench.variant.plain(), bench.model, bench.counts, bench.run)
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
        peak, source = torch.cuda.max_memory_allocated(device), "allocator"
        peak -= memory.tensor_bytes([*bench.model.parameters(), *bench.model.buffers()]) + spare
    else:
        peak = memory.cpu_step_peak(lambda: iteration(0), live)
        source = "profiled allocations"
    found: dict[str, float | str] = {"peak": peak / memory.MB}
    found |= {name: amount / memory.MB for name, amount in parts.items()}
    found["rest"] = (peak - sum(parts.values())) / memory.MB
    if device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved(device) / memory.MB
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
