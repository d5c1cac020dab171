"""The gate: a fast training trains the network that was asked for.

Four steps of the run are done again (workshop/gate/steps.py) by a plain step that shares no code
with the run's: batches cropped one image at a time, the images' mean and deviation from where they
were published, the ResNet, the loss and the learning rate written out. After the last epoch the
test is done again in evaluation mode, of images that are drawn then.
"""

import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.cifar10_roofline.batches import Plan
from labs.cifar10_roofline.data import Dataset
from workshop.gate import steps
from workshop.gate.parity import Measure, as_recorded
from workshop.gate.steps import State, Watch, plain_arithmetic
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

TESTED = 128
"""Images of the test that are looked at again."""
LOGITS_FLOOR = 2.0**-12
"""Relative to what tells the images' logits apart: what these may always be off."""
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""As published with many networks: of the 50,000 images, each colour of 0 to 1."""
WEIGHTS = {"resnet18": 11_173_962, "resnet34": 21_282_122}
"""The numbers that each network has, with the first convolution of 3 x 3 and ten classes."""
WEIGHT_DECAY = 5e-4
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The training as it was asked for, one plain step at a time."""

    model: str
    dataset: Dataset
    device: torch.device
    batch_size: int
    epoch_images: int
    seed: int
    rate: float
    """The highest."""
    warmup: int
    total: int
    label_smoothing: float

    def sgd(self) -> steps.Sgd:
        return steps.Sgd(0.9, self.learning_rate, WEIGHT_DECAY, nesterov=True)

    def learning_rate(self, number: int) -> float:
        if number < self.warmup:
            return self.rate * (number + 1) / self.warmup
        turn = math.pi * (number - self.warmup) / max(1, self.total - self.warmup)
        return self.rate * (1 + math.cos(min(turn, math.pi))) / 2

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The images, uint8 (B, 3, 32, 32), and labels of a step."""
        epoch, index = divmod(number, self.epoch_images // self.batch_size)
        train, seed = self.dataset.train, self.seed
        drawn = Plan.draw(
            len(train.labels), self.epoch_images, seed, epoch, self.dataset.name == "cifar10"
        )
        images, labels = [], []
        for i in range(index * self.batch_size, (index + 1) * self.batch_size):
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
                out.float(), labels.to(self.device), label_smoothing=self.label_smoothing
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


def of_training(
    reference: Reference, watch: Watch, precision: str, logits: Tensor, accuracy: float
) -> Parity:
    """The verdict on a training at a precision.

    Args:
        logits: of all test images, after the last epoch, (N, 10).
        accuracy: what the run makes of them.
    """
    batch_size = reference.batch_size
    verdict = steps.audit(watch.steps, reference.step, precision, batch_size, WEIGHT_DECAY)
    count = sum(weight.numel() for weight in watch.now.weights.values())
    if count != WEIGHTS[reference.model]:
        verdict.failures.append(
            f"the network has {count:,} weights, {reference.model} {WEIGHTS[reference.model]:,}"
        )
    test = reference.dataset.test
    drawn = random.SystemRandom().sample(range(len(test.labels)), min(TESTED, len(test.labels)))
    true = plain = reference.logits(watch.now, test.images[drawn], "fp32")
    if precision != "fp32":
        plain = reference.logits(watch.now, test.images[drawn], precision)
    set_arithmetic(precision)
    found = logits[drawn].double().cpu()
    scale = (true - true.mean(0)).norm()
    error, own = (float((one - true).norm() / scale) for one in (found, plain))
    measure = Measure(error, steps.MOST_TIMES * own + LOGITS_FLOOR, own)
    verdict.measures["test logits"] = as_recorded(measure)
    if not measure.passed:
        verdict.failures.append(
            f"the logits of {len(drawn)} test images: {error:.1e} from the plain network's in "
            f"evaluation mode, {measure.allowed:.1e} allowed"
        )
    correct = float((logits.argmax(1).cpu() == test.labels).double().mean())
    if abs(correct - accuracy) > 1e-9:
        verdict.failures.append(
            f"test accuracy {accuracy:.2%}: by the logits of the {len(test.labels)} test images it "
            f"is {correct:.2%}"
        )
    verdict.status = "fail" if verdict.failures else "pass"
    return verdict
