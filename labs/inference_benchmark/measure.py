"""Times a network, in inference or training, and checks what the timed iterations gave."""

import copy
import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

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
from workshop.labs import LabRun
from workshop.profilers.table import STEP
from workshop.run import memory, startup, timing
from workshop.run.markers import Range
from workshop.run.precision import set_arithmetic, untuned
from workshop.run.timing import StepClock

BATCHES = 2
"""Different batches of images, which take turns: each iteration reads a new one."""
KEPT_BYTES = 256e6
"""Most logits of the timed iterations that are kept."""
PLAIN_ITERATIONS = 5
Notify = Callable[[str], object]
Iteration = Callable[[int], object]
WaitTurn = Callable[[], object]


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


class Inference:
    """Iterations of inference: a batch comes in, its logits go out."""

    def __init__(self, bench: Bench) -> None:
        setting, variant = bench.setting, bench.variant
        self.bench = bench
        network, batch = setting.network, setting.batch_size
        self.targets = [
            network.targets(batch, setting.images_seed() + 10 * index) for index in range(BATCHES)
        ]
        layout = variant.layout()
        images = [images_of(setting, index) for index in range(BATCHES)]
        self.sample = torch.cat([batch[sample_of(bench)] for batch in images])
        self._batches = [
            batch.to(setting.device, variant.dtype).to(memory_format=layout) for batch in images
        ]
        self._input = torch.empty_like(self._batches[0], memory_format=torch.preserve_format)
        self._input.copy_(self._batches[0])
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
        """Makes room for the logits of the iterations, or of as many as fit."""
        output = self._step()
        each = output.numel() * output.element_size()
        self._ring = min(iterations, max(BATCHES, int(KEPT_BYTES / each)))
        self._kept = [torch.empty_like(output) for _ in range(self._ring)]

    def __call__(self, index: int, range_: Range = nullcontext) -> None:
        self._input.copy_(self._batches[index % BATCHES], non_blocking=True)
        with range_("forward"):
            output = self._step()
        if self._kept:
            self._kept[index % self._ring].copy_(output, non_blocking=True)

    def live_bytes(self) -> int:
        return self.weights_bytes + memory.tensor_bytes([*self._batches, self._input, *self._kept])

    def losses(self, done: int) -> list[float]:
        """The loss of each iteration whose logits are kept; NaN for the others."""
        found = [math.nan] * done
        for index in range(max(0, done - self._ring), done):
            output = self._kept[index % self._ring].detach().cpu().float()
            targets = self.targets[index % BATCHES]
            found[index] = float(self.bench.setting.network.loss(output, targets))
        return found

    def timed_samples(self, done: int) -> list[Tensor]:
        """The logits of all iterations that are kept, for the images of `sample`, or of its first
        batch where that ran alone: a tensor for each iteration and the one after it."""
        chosen = sample_of(self.bench).to(self.bench.setting.device)
        found = []
        for first in range(max(0, done - self._ring), max(1, done - BATCHES + 1)):
            both = range(first, min(first + BATCHES, done))
            by_batch = sorted(both, key=lambda index: index % BATCHES)
            found.append(torch.cat([self._kept[i % self._ring][chosen].cpu() for i in by_batch]))
        return found


def sample_of(bench: Bench) -> Tensor:
    """The images of each batch that are compared."""
    return proof.sample_of(bench.setting.batch_size, bench.setting.seed)


def images_of(setting: Setting, index: int) -> Tensor:
    """A batch of images, fp32 on the CPU."""
    return setting.network.images(setting.batch_size, setting.images_seed() + 10 * index)


def measure_inference(
    bench: Bench, iterations: int, warmup: int, say: Notify, wait_turn: WaitTurn | None = None
) -> Measured:
    """Warms up, times, and compares the timed logits with the truth; fills in the bench's run.

    Args:
        wait_turn: waits until the device is free; called when all is compiled.
    """
    run, device = bench.run, bench.setting.device
    startup.watch_compilers(torch_compile=bench.variant.compile is not None)
    if bench.variant.compile is not None or bench.variant.export:
        say("Compiling model (this may take minutes the first time) ...")
    start = time.perf_counter()
    inference = Inference(bench)
    prepared_s = time.perf_counter() - start
    truth = proof.find_truth(bench.model, bench.variant, inference.sample.to(device))
    count_peak_anew(device)
    take_turn(lambda: inference(0), bench, wait_turn)
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
    _timed(inference, device, iterations, measured, bench.range_)
    done = len(measured.step_ms)
    measured.losses = [math.nan] * warmup + inference.losses(done)
    timed = inference.timed_samples(done)  # before another iteration takes the place of one
    run.memory_mb = memory_of(bench, inference, inference.weights_bytes, inference.live_bytes)
    run.gate, run.metrics["top1_agreement"] = proof.of_all(bench.variant, truth, timed)
    bench.iteration = inference
    return measured


# --- training ------------------------------------------------------------------------------------


def measure_training(
    bench: Bench,
    iterations: int,
    warmup: int,
    say: Notify,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Measured:
    """As `measure_inference`. The network learns one batch, without dropout, so that its losses can
    be compared; `wrap` makes it a part of a group of processes."""
    run, setting, device = bench.run, bench.setting, bench.setting.device
    startup.watch_compilers(torch_compile=bench.variant.compile is not None)
    training = make_training(bench, wrap)
    model, images, targets = training.model, training.images, training.targets
    losses: list[Tensor] = []

    def iteration(index: int) -> None:
        losses.append(training.step())

    measured = Measured()
    _warm_up(iteration, device, warmup, measured)
    run.setup_s |= {
        "compile": startup.compile_seconds(),
        "warm_up": sum(measured.warmup_ms) / 1e3,
    }
    count_peak_anew(device)
    before = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    _timed(iteration, device, iterations, measured, bench.range_)
    after = (parameter.detach().cpu() for parameter in model.parameters())
    stayed = list(map(torch.equal, before, after))
    measured.losses = [float(loss) for loss in losses]
    weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
    live = partial(_training_bytes, training)
    run.memory_mb = memory_of(bench, iteration, weights, live, training, copies=1)
    run.gate = proof.of_training(
        bench.model, bench.variant, setting, images, targets, measured.losses, stayed
    )
    bench.iteration = iteration
    return measured


def make_training(
    bench: Bench, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Training:
    """A copy of the bench's network, which loses its own dropout, ready to learn a batch."""
    setting, variant = bench.setting, bench.variant
    without_chance(bench.model)
    images = setting.network.images(setting.batch_size, setting.images_seed()).to(setting.device)
    images = images.to(memory_format=variant.layout())
    targets = setting.network.targets(setting.batch_size, setting.images_seed()).to(setting.device)
    return Training(wrap(copy.deepcopy(bench.model)), variant, setting, images, targets)


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


def _training_bytes(training: Training) -> int:
    tensors = [*training.model.parameters(), *training.model.buffers(), training.images]
    return memory.tensor_bytes([*tensors, *memory.optimizer_tensors(training.optimizer)])


# --- both ----------------------------------------------------------------------------------------


def _warm_up(iteration: Iteration, device: torch.device, count: int, measured: Measured) -> None:
    """Runs iterations, waiting for each: in them compilers and allocators settle."""
    for index in range(count):
        start = time.perf_counter()
        iteration(index)
        wait(device)
        measured.warmup_ms.append((time.perf_counter() - start) * 1e3)


def take_turn(iterate: Callable[[], object], bench: Bench, wait_turn: WaitTurn | None) -> None:
    """Compiles, by an iteration, and waits until the device is free."""
    if wait_turn is None:
        return
    with untuned(bench.variant.precision):
        iterate()
    wait(bench.setting.device)
    wait_turn()
    if bench.variant.captures_itself:
        import torch._inductor.config

        # Its next call would capture, during which no algorithm can be searched.
        with torch._inductor.config.patch({"triton.force_cudagraphs_warmup": True}):
            iterate()


def _timed(
    iteration: Iteration,
    device: torch.device,
    count: int,
    measured: Measured,
    range_: Range = nullcontext,
) -> None:
    """Times iterations on the device's own clock, waiting once, after the last. Ctrl-C keeps what
    is complete."""
    clock = StepClock(device)
    clock.mark()
    try:
        for index in range(count):
            with range_(STEP):
                iteration(index)
            clock.mark()
    except KeyboardInterrupt:
        measured.interrupted = True
    measured.step_ms = clock.durations_ms()
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
    _timed(inference, bench.setting.device, PLAIN_ITERATIONS, measured)
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
    training: Training | None = None,
    *,
    copies: int = BATCHES + 1,
) -> dict[str, float | str]:
    """The peak in MB, split into weights (and buffers), gradients, optimizer's state, images (so
    many copies of a batch), and the rest: activations, workspaces, logits. The fp32 network, which
    waits there for the proof, is no part of it."""
    device = bench.setting.device
    parts = {"weights": weights}
    if training is not None:
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        parts["gradients"] = memory.tensor_bytes(gradients)
        state = memory.optimizer_tensors(training.optimizer)
        parts["optimizer_state"] = memory.tensor_bytes(state)
    edge, images = bench.setting.network.edge, bench.setting.batch_size
    size = 4 if training else bench.variant.dtype.itemsize
    parts["images"] = copies * images * 3 * edge * edge * size
    if device.type == "cuda":
        peak, source = torch.cuda.max_memory_allocated(device), "allocator"
        peak -= memory.tensor_bytes([*bench.model.parameters(), *bench.model.buffers()])
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
    network, device = setting.network, setting.device
    shape = (setting.batch_size, 3, network.edge, network.edge)
    dtype = torch.float32 if training else variant.dtype

    def black() -> Tensor:
        images = torch.empty(shape, dtype=dtype, device=device, memory_format=variant.layout())
        return images.zero_()

    if training:
        targets = network.targets(setting.batch_size, setting.seed).to(device)
        return Training(copy.deepcopy(model), variant, setting, black(), targets).step
    # To the network's own input each iteration copies one of the batches, which wait beside it.
    inputs, *batches = (black() for _ in range(BATCHES + 1))
    step = inference_step(prepare(model, variant), variant, inputs, setting.device)
    if variant.cuda_graph:
        step = captured(step, setting.device)

    def iteration() -> None:
        inputs.copy_(batches[0])
        step()

    return iteration
