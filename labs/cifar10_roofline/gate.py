"""The gate, the judge's side: a fast training trains the network that was asked for.

The order of an epoch and its crops follow from a seed that comes when the epoch's clock starts.
Four steps of the run are done again (workshop/gate/steps.py) by a plain step that shares no code
with the run's: batches cropped one image at a time, the images' mean and deviation from where they
were published, the ResNet, the loss and the learning rate written out. After the last epoch the
test is done again in evaluation mode, of images that are drawn then.
"""

import argparse
import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.cifar10_roofline import step
from labs.cifar10_roofline.data import Dataset, Plan
from workshop.gate import steps
from workshop.gate.parity import Measure, as_recorded
from workshop.gate.steps import State, Watch, plain_arithmetic
from workshop.judge.pipe import Message
from workshop.judge.turn import Check, Shown
from workshop.labs import LabRun
from workshop.run.precision import set_arithmetic

TESTED = 128
"""Images of the test that are looked at again."""
LOGITS_FLOOR = 2.0**-12
"""Relative to what tells the images' logits apart: what these may always be off."""
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""As published with many networks: of the 50,000 images, each colour of 0 to 1."""
WEIGHT_DECAY = 5e-4
LEARNING_RATES = {"cifar10": 0.1, "digits": 0.02}
"""Highest learning rate of each dataset, without --lr."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The training as it was asked for, one plain step at a time."""

    arguments: argparse.Namespace
    dataset: Dataset
    device: torch.device
    seed: Callable[[int], int]
    """Gives the seed of an epoch's order and crops."""

    @property
    def epoch_images(self) -> int:
        return self.arguments.epoch_images or len(self.dataset.train.labels)

    @property
    def epoch_steps(self) -> int:
        return self.epoch_images // self.arguments.batch_size

    @property
    def total(self) -> int:
        """Steps of all epochs."""
        return self.arguments.epochs * self.epoch_steps

    @property
    def highest_rate(self) -> float:
        given: float | None = self.arguments.lr
        return LEARNING_RATES[self.dataset.name] if given is None else given

    @property
    def warmup(self) -> int:
        """Steps in which the learning rate rises; a cosine to 0 follows."""
        given: int | None = self.arguments.warmup
        return min(self.epoch_steps, self.total // 2) if given is None else given

    def sgd(self) -> steps.Sgd:
        return steps.Sgd(0.9, self.learning_rate, WEIGHT_DECAY, nesterov=True)

    def learning_rate(self, number: int) -> float:
        rate = self.highest_rate
        if number < self.warmup:
            return rate * (number + 1) / self.warmup
        turn = math.pi * (number - self.warmup) / max(1, self.total - self.warmup)
        return rate * (1 + math.cos(min(turn, math.pi))) / 2

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The images, uint8 (B, 3, 32, 32), and labels of a step."""
        epoch, index = divmod(number, self.epoch_steps)
        train, mirrored = self.dataset.train, self.dataset.name == "cifar10"
        of_epoch, size = self.epoch_images, self.arguments.batch_size
        drawn = Plan.draw(len(train.labels), of_epoch, self.seed(epoch), epoch, mirrored)
        images, labels = [], []
        for i in range(index * size, (index + 1) * size):
            image = F.pad(train.images[drawn.order[i]], (4, 4, 4, 4))
            image = image[:, drawn.top[i] :, drawn.left[i] :][:, :32, :32]
            images.append(image.flip(-1) if drawn.flip[i] else image)
            labels.append(train.labels[drawn.order[i]])
        return torch.stack(images), torch.stack(labels)

    def values(self, images: Tensor) -> Tensor:
        """The network's input, fp32 (N, 3, 32, 32)."""
        mean, std = torch.tensor(CIFAR10_MEAN), torch.tensor(CIFAR10_STD)
        if self.dataset.name != "cifar10":  # digits are grey
            scaled = self.dataset.train.images / 255
            mean, std = scaled.mean().expand(3), scaled.std().expand(3)
        return ((images / 255 - mean[:, None, None]) / std[:, None, None]).to(self.device)

    def step(self, before: State, number: int, precision: str) -> tuple[float, Tensors, Tensors]:
        """steps.Plain."""
        images, labels = self.batch(number)
        weights = {name: w.to(self.device).requires_grad_() for name, w in before.weights.items()}
        statistics = {name: s.to(self.device, copy=True) for name, s in before.statistics.items()}
        with plain_arithmetic(precision, self.device):
            out = resnet(weights | statistics, self.values(images), training=True)
            loss = F.cross_entropy(
                out.float(), labels.to(self.device), label_smoothing=self.arguments.label_smoothing
            )
        scaled = torch.autograd.grad(loss * before.loss_scale, list(weights.values()))
        gradients = [gradient / before.loss_scale for gradient in scaled]
        return loss.item(), dict(zip(weights, gradients, strict=True)), statistics

    @torch.no_grad()
    def logits(self, state: State, images: Tensor, precision: str) -> Tensor:
        """The logits of test images, (N, 10) fp64 on the CPU."""
        kept = state.weights | state.statistics
        tensors = {name: tensor.to(self.device) for name, tensor in kept.items()}
        with plain_arithmetic(precision, self.device):
            return resnet(tensors, self.values(images), training=False).double().cpu()


def resnet(tensors: Tensors, x: Tensor, *, training: bool) -> Tensor:
    """A ResNet of basic blocks, whose tensors have torchvision's names; in training it changes the
    running statistics among them."""

    def norm(x: Tensor, name: str) -> Tensor:
        parts = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (tensors[f"{name}.{part}"] for part in parts)
        return F.batch_norm(x, mean, variance, weight, bias, training=training)

    x = norm(F.conv2d(x, tensors["conv1.weight"], padding=1), "bn1").relu()
    for block in dict.fromkeys(name[:8] for name in tensors if name.startswith("layer")):
        stride = 2 if block.endswith(".0") and block != "layer1.0" else 1
        out = F.conv2d(x, tensors[f"{block}.conv1.weight"], stride=stride, padding=1)
        out = norm(out, f"{block}.bn1").relu()
        out = F.conv2d(out, tensors[f"{block}.conv2.weight"], padding=1)
        if f"{block}.downsample.0.weight" in tensors:
            x = F.conv2d(x, tensors[f"{block}.downsample.0.weight"], stride=stride)
            x = norm(x, f"{block}.downsample.1")
        x = (norm(out, f"{block}.bn2") + x).relu()
    return F.linear(x.mean((2, 3)), tensors["fc.weight"], tensors["fc.bias"])


class TrainingCheck(Check):
    """Does some steps of a training again, and a part of its test."""

    def __init__(self, reference: Reference, precision: str, first: int = 0) -> None:
        """
        Args:
            first: the number of the training's first step.
        """
        self._reference, self._precision, self._first = reference, precision, first
        self._chance = random.SystemRandom()

    @functools.cached_property
    def _watch(self) -> Watch:
        reference = self._reference
        shapes = steps.shapes_of(step.build(reference.arguments.model))
        counts = reference.total, self._first, reference.epoch_steps
        return Watch(reference.sgd(), shapes, self._chance, *counts)

    def draw(self) -> Shown:
        """The seed of the present epoch."""
        epoch = self._watch.done // self._reference.epoch_steps
        return {}, {"seed": self._reference.seed(epoch), "until": self._watch.until}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._watch.take(proof)

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        if not self._watch.see(ask, run):
            return
        reference, precision = self._reference, self._precision
        batch_size = reference.arguments.batch_size
        run.gate = self._watch.verdict(reference.step, precision, batch_size, WEIGHT_DECAY)
        if self._watch.now and not self._watch.failures:
            shown = ask(show="test logits").tensors
            self._test(shown.get("logits", torch.zeros(0)).cpu(), self._watch.now, run)
        del self._watch  # whose states are large
        set_arithmetic(precision)
        torch.cuda.empty_cache()

    def _test(self, logits: Tensor, state: State, run: LabRun) -> None:
        """Compares logits of some test images, chosen after all logits had arrived."""
        reference, test = self._reference, self._reference.dataset.test
        drawn = self._chance.sample(range(len(test.labels)), min(TESTED, len(test.labels)))
        true = plain = reference.logits(state, test.images[drawn], "fp32")
        if self._precision != "fp32":
            plain = reference.logits(state, test.images[drawn], self._precision)
        if logits.shape != (len(test.labels), step.CLASSES):
            logits = torch.full((len(test.labels), step.CLASSES), torch.nan)
        found = logits[drawn].double()
        scale = (true - true.mean(0)).norm()
        error, own = (float((one - true).norm() / scale) for one in (found, plain))
        measure = Measure(error, steps.MOST_TIMES * own + LOGITS_FLOOR, own)
        run.gate.measures["test logits"] = as_recorded(measure)
        if not measure.passed:
            run.gate.status = "fail"
            run.gate.failures.append(
                f"the logits of {len(drawn)} test images: {error:.1e} from the plain network's in "
                f"evaluation mode, {measure.allowed:.1e} allowed"
            )
        correct = (logits.argmax(1) == test.labels).double().mean()
        run.metrics["test_accuracy"] = float(correct)
