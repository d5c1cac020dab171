"""The gate, the judge's side: the timed iterations did the network's work.

Process and judge make the same images from the same seed. To make them takes seconds, in which a
process could compute their logits: so with "go" comes a pattern that is added to all images.
Inference: after the clock the judge draws images, and the logits that any timed iteration left for
them are compared with the fp32 network's in fp64. They may be no further from them than a small
multiple of what plain eager mode loses at the same precision. Training: four of its steps, the last
two among them, are done again (workshop/gate/steps.py) by a plain step that has only the network in
common with the run's.
"""

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labs.inference_benchmark import networks
from labs.inference_benchmark.modes import Setting, Variant
from labs.inference_benchmark.networks import AUXILIARY_WEIGHT, Network, logits, run_once
from workshop.gate import steps
from workshop.gate.parity import Measure, as_recorded, badness
from workshop.gate.steps import State, Watch, plain_arithmetic
from workshop.judge.pipe import Message
from workshop.judge.turn import Check, Shown
from workshop.labs import LabRun
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

SAME_PIXELS = 8
"""In the first row of each image."""
MOST_PLACES = 1000
"""Iterations with different images; with a larger batch, as many as it has images."""
KEPT_BYTES = 256e6
"""Most logits of the timed iterations that are kept."""
MOST_TIMES = 3.0
"""The timed network's error may be this many times the plain one's at the same precision. True runs
of 65 networks had 0.8 to 1.1 of it in fp16 on an H200, and up to 2.0 in bf16 on a CPU."""
FLOOR = 8 * 2.0**-24
"""Relative to the logits: the plain network may by luck be nearer to fp64 than fp32 rounds."""
MOST_ERROR = 0.7
"""Relative to the logits: however much the plain network loses, the timed one may not be further
from fp64. Logits of other images are at 1.4. In bf16 random MobileNets and ShuffleNets lose up to
0.66, since their depthwise convolutions cancel what is smooth, and not the rounding."""
SAMPLE = 8
"""Images of a batch that are drawn at most: the last, and others."""
SUM_ROUNDINGS = 1e-4
"""Relative to the sum of an image's absolute logits: what two sums of these may differ by."""
PATTERN = 0.5
"""The strength of the pattern, as a share of an image's. Logits of images without it are then 0.86
to 1.6 off, which MOST_ERROR does not allow, and bf16 loses as much as without: 11 networks, two
seeds. At 0.25 they are 0.48 off in Swin."""
MOST_LAYERS_OF_A_BLOCK = 12
SGD = steps.Sgd(0.9, lambda number: 0.01)
Timed = tuple[Sequence[int], Tensor]
"""The drawn images that an iteration had, by number, and its logits for them, fp64 on the CPU."""


class Images:
    """Images and targets of all iterations of a process. Each iteration reads a window that no
    other has, but shares most of its images with some; and all images begin with the same pixels.
    So what an earlier iteration left is never the answer."""

    def __init__(
        self, setting: Setting, iterations: int, rank: int | None = None, *, fixed: bool = False
    ) -> None:
        """
        Args:
            rank: of a process of a group, by default this one's.
            fixed: all iterations read the same window.
        """
        self.network, self._seed = setting.network, setting.images_seed(rank)
        self.batch = setting.batch_size
        if rank is not None and setting.parts:
            self.batch = setting.parts[rank]
        self._fixed = fixed
        self._places = max(self.batch, min(iterations, MOST_PLACES)) + 1
        self.count = self.batch + self._places - 1
        candidates = itertools.count(max(1, self.batch // 3))
        self._step = next(step for step in candidates if math.gcd(step, self._places) == 1)

    @functools.cached_property
    def images(self) -> Tensor:
        found = self.network.images(self.count, self._seed)
        found[:, :, 0, :SAME_PIXELS] = found[0, :, 0, :SAME_PIXELS].clone()
        return found

    @functools.cached_property
    def targets(self) -> Tensor:
        return self.network.targets(self.count, self._seed)

    def window(self, index: int) -> slice:
        """The images of an iteration."""
        first = 0 if self._fixed else index * self._step % self._places
        return slice(first, first + self.batch)

    def kept(self, iterations: range) -> range:
        """The newest of these iterations, whose logits are kept: KEPT_BYTES of fp32 numbers."""
        if self._fixed:
            return iterations[-1:]
        numbers = self.batch * self.network.classes
        numbers *= self.network.edge**2 if self.network.segments else 1
        return iterations[-max(2, int(KEPT_BYTES / (4 * numbers))) :]


class InferenceCheck(Check):
    """Compares the logits that timed iterations have left."""

    def __init__(
        self,
        setting: Setting,
        variant: Variant,
        timed: range,
        build: Callable[[], nn.Module],
        seed: int,
    ) -> None:
        """
        Args:
            timed: the numbers of the timed iterations.
            build: makes the fp32 network, or has it.
            seed: of all that is drawn, which the process does not know.
        """
        self._setting, self._variant, self._timed = setting, variant, timed
        self._build, self._chance = build, random.Random(seed)
        self._sums = torch.zeros(0)
        """Sums of each image's logits, (kept iterations, B), from when the clock stopped."""
        self._patterns: dict[int, Tensor] = {}
        """Each fp32 (1, 3, edge, edge), by the last iteration that has it."""

    def draw(self) -> Shown:
        return self._drawn(self._timed.stop)

    def _drawn(self, until: int) -> Shown:
        pattern = PATTERN * self._setting.network.images(1, self._chance.randrange(2**62))
        self._patterns[until - 1] = pattern
        return {"pattern": pattern}, {"until": until}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._sums = proof.get("sums", torch.zeros(0)).double().cpu()

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        done, whole = self._timed[: len(run.step_ms)], run.status != "interrupted"
        if len(run.step_ms) != len(self._timed) and whole:
            sentence = f"it has done {len(run.step_ms)} iterations of {len(self._timed)}"
            run.gate = Parity("fail", [sentence])
            return
        data = Images(self._setting, self._timed.stop, fixed=self._variant.peer == "timm")
        kept = data.kept(done)
        numbers = self._draw_images(data, kept)
        rows: dict[str, list[int]] = {}  # of the drawn images, by iteration
        places: dict[str, list[int]] = {}  # the same in its batch
        for index in kept:
            window = data.window(index)
            inside = [n for n in numbers if window.start <= n < window.stop]
            if inside:
                rows[str(index)] = [numbers.index(n) for n in inside]
                places[str(index)] = [n - window.start for n in inside]
        shown = ask(places=places).tensors
        set_arithmetic("fp32")
        model = self._build()
        set_arithmetic(self._variant.precision)
        pattern = self._patterns[self._timed.stop - 1]
        known = find_reference(model, self._variant, data.images[numbers], pattern)
        torch.cuda.empty_cache()
        shapes = {index: known.logits[which].shape for index, which in rows.items()}
        if {name: tensor.shape for name, tensor in shown.items()} != shapes:
            run.gate = Parity("fail", ["it does not show the logits of the images that are drawn"])
        elif whole and not self._as_timed(shown, places, (len(kept), data.batch)):
            sentence = "it shows other logits than it had when its clock stopped"
            run.gate = Parity("fail", [sentence])
        else:
            timed = [(which, shown[index].double().cpu()) for index, which in rows.items()]
            run.gate, agreement = of_inference(self._variant, known, timed)
            run.metrics["top1_agreement"] = agreement

    def _as_timed(
        self, shown: Mapping[str, Tensor], places: Mapping[str, list[int]], shape: tuple[int, int]
    ) -> bool:
        """Whether the logits of some images have the sums that came when the clock stopped."""
        if self._sums.shape != shape:
            return False
        for index, which in places.items():
            output, sums = shown[index].double().cpu().flatten(1), self._sums[int(index) % shape[0]]
            near = (output.sum(1) - sums[which]).abs() <= SUM_ROUNDINGS * output.abs().sum(1)
            if not near.all():
                return False
        return True

    def _draw_images(self, data: Images, kept: range) -> list[int]:
        """Numbers of images in the pool: the last one of a batch and others, of two batches."""
        drawn = set()
        for index in self._chance.choices(kept, k=2):
            window = data.window(index)
            numbers = range(window.start, window.stop)
            drawn |= {numbers[-1], *self._chance.sample(numbers, min(SAMPLE - 1, data.batch))}
        return sorted(drawn)


@dataclass(frozen=True)
class Reference:
    """Logits of some images, fp64 on the CPU, (N, classes) or (N, classes, H, W)."""

    logits: Tensor
    """The fp32 network's, computed in fp64."""
    plain: Tensor
    """Plain eager mode's, at the variant's precision."""


@torch.no_grad()
def find_reference(
    model: nn.Module, variant: Variant, images: Tensor, pattern: Tensor
) -> Reference:
    """Runs the fp32 network in fp64, and as it is at the variant's precision, on the sum of images
    (N, 3, H, W) and pattern, both fp32."""
    device = next(model.parameters()).device
    with run_once():
        exact = (images + pattern).to(device)
        reference = logits(copy.deepcopy(model).double()(exact.double())).cpu()
        plain = copy.deepcopy(model).to(variant.dtype)
        with variant.context(device):
            read = images.to(variant.dtype) + pattern.to(variant.dtype)
            eager = logits(plain(read.to(device))).double().cpu()
    return Reference(reference, eager)


def of_inference(
    variant: Variant, known: Reference, timed: Sequence[Timed]
) -> tuple[Parity, float]:
    """The verdict on what timed iterations gave for the drawn images, and the share of these (of
    segmentation: pixels) for which the class with the largest logit is the reference's."""
    true, eager = known.logits, known.plain
    # The part that all images share says nothing of whether each was looked at.
    center = true.mean(0, keepdim=True) if len(true) > 1 else 0.0
    scale = (true - center).square().mean().sqrt()

    def measure(which: Sequence[int], output: Tensor) -> Measure:
        rows = list(which)
        error, lost = (
            float((x - true[rows]).square().mean().sqrt() / scale) for x in (output, eager[rows])
        )
        return Measure(error, min(MOST_ERROR, MOST_TIMES * lost + FLOOR), lost)

    worst = max((measure(*one) for one in timed), key=badness)
    same = [output.argmax(1) == true[list(which)].argmax(1) for which, output in timed]
    far = (
        f"a timed iteration's logits are {worst.error:.1e} from the fp32 network's in fp64, "
        f"{worst.allowed:.1e} allowed"
    )
    gate = Parity(
        status="pass" if worst.passed else "fail",
        failures=[] if worst.passed else [far],
        batch_size=len(true),
        reference=f"fp64; plain eager {variant.precision} is {worst.baseline:.1e} from it",
        measures={"logits": as_recorded(worst)},
    )
    return gate, float(torch.cat([one.flatten() for one in same]).double().mean())


class TrainingCheck(InferenceCheck):
    """Does some of the steps of a training again. Of a group's training one process does all: the
    gradients of a step are those of all parts, each with its share of the whole batch."""

    @functools.cached_property
    def _watch(self) -> Watch:
        shapes = steps.shapes_of(self._build(), statistics=not self._setting.rank)
        return Watch(SGD, shapes, self._chance, self._timed.stop, self._timed.start)

    def draw(self) -> Shown:
        return self._drawn(self._watch.until)

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._watch.take(proof)

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        if self._watch.see(ask, run):
            setting, precision = self._setting, self._variant.precision
            ranks = range(len(setting.parts) or 1)
            data = [Images(setting, self._timed.stop, rank) for rank in ranks]
            set_arithmetic("fp32")
            plain = functools.partial(self._plain, networks.without_chance(self._build()), data)
            run.gate = self._watch.verdict(plain, precision, setting.batch_size)
            del self._watch  # whose states are large
            set_arithmetic(precision)
            torch.cuda.empty_cache()

    def _plain(
        self, model: nn.Module, images: list[Images], before: State, number: int, precision: str
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """As steps.Plain, on the images of each process of the group."""
        setting = self._setting
        parts = setting.parts or (setting.batch_size,)
        network = recomputing(copy.deepcopy(model)).train()
        network.load_state_dict(before.weights | before.statistics, strict=False)
        for rank in sorted(range(len(parts)), key=lambda rank: rank != setting.rank):
            window = images[rank].window(number)
            batch = (images[rank].images[window] + self._patterns[number]).to(setting.device)
            targets = images[rank].targets[window].to(setting.device)
            with plain_arithmetic(precision, setting.device):
                loss = _loss(setting.network, network(batch), targets)
            if rank == setting.rank:  # before a recomputed block sees the batch again
                own_loss = loss.item()
                buffers = dict(network.named_buffers())
                statistics = {name: buffers[name].clone() for name in before.statistics}
            (loss * (parts[rank] / sum(parts)) * before.loss_scale).backward()
        gradients = {
            name: torch.zeros_like(weight)
            if weight.grad is None
            else weight.grad / before.loss_scale
            for name, weight in network.named_parameters()
        }
        return own_loss, gradients, statistics


def _loss(network: Network, output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy, and that of auxiliary classifiers by the weight of their paper."""
    outputs = output["out"] if isinstance(output, dict) else output
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    first, *others = (F.cross_entropy(one.float(), targets) for one in outputs)
    loss: Tensor = first + AUXILIARY_WEIGHT.get(network.name, 0.0) * sum(others)
    return loss


def recomputing(model: nn.Module) -> nn.Module:
    """The network, which computes the activations of its blocks again in the backward pass in the
    place of keeping them: fp32 ones of a batch that just fits at half precision would not fit."""
    for child in model.children():
        layers = sum(next(module.children(), None) is None for module in child.modules())
        if 1 < layers <= MOST_LAYERS_OF_A_BLOCK:
            child.forward = functools.partial(_recomputed, child.forward)
        else:
            recomputing(child)
    return model


def _recomputed(forward: Callable[..., object], *inputs: object) -> object:
    # A list may have grown until the backward pass: DenseNet's does.
    held = [list(one) if isinstance(one, list) else one for one in inputs]
    return checkpoint(forward, *held, use_reentrant=False, preserve_rng_state=False)
