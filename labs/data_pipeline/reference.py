"""The plain training that every rung is compared with: PNG files by PIL, a loop in one process.

Nothing here comes from the programs that are measured (loop.py, formats.py): a mistake
of theirs would else be the reference's too. What a training sees and does is written down a second
time: the order of the images, their crops, MEAN and STD, the network, Adam and its rate.
"""

import functools
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workshop.run.precision import PRECISIONS
from workshop.run.torchvision import make_importable

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Asked:
    """The training that a rung has to do."""

    folder: Path
    """The dataset's."""
    device: torch.device
    model: str = "cnn"
    """Or resnet50."""
    batch_size: int = 64
    steps: int | None = None
    """The most of an epoch; None for all whole batches."""
    epochs: int = 1
    """With the warm-up's, whose number is 0."""
    seed: int = 42
    first: int = field(default_factory=lambda: random.SystemRandom().randrange(1, 2**40))
    """The number of the first timed epoch; the others follow it."""

    @property
    def numbers(self) -> list[int]:
        """The epochs'."""
        return [0, *range(self.first, self.first + self.epochs - 1)]


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, (n,), and the movement of each weight by its name; on the CPU."""

    losses: Tensor
    moved: dict[str, Tensor]


class Images:
    """The dataset's images, each decoded once."""

    def __init__(self, asked: Asked) -> None:
        self.folder, self.seed = asked.folder / "images", asked.seed
        labels: dict[str, int] = json.loads((self.folder / "labels.json").read_bytes())["labels"]
        self.names = sorted(labels)
        self.labels = torch.tensor([labels[name] for name in self.names])
        self.classes = int(self.labels.max()) + 1
        self.pixels = functools.cache(self._pixels)
        self.steps = len(self.names) // asked.batch_size
        self.steps = min(asked.steps or self.steps, self.steps)
        self.drawn = functools.cache(self._drawn)

    def _pixels(self, index: int) -> Tensor:
        from PIL import Image

        with Image.open(self.folder / self.names[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    def _drawn(self, epoch: int) -> tuple[Tensor, Tensor]:
        """An epoch's order, (N,), and the corner of each image's crop, (N, 2)."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        order = torch.randperm(len(self.names), generator=generator)
        most = 2 * (self.pixels(0).shape[-1] // 8)
        return order, torch.randint(most + 1, (len(order), 2), generator=generator)

    def batch(self, epoch: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The network's inputs, fp32 (B, 3, S, S), and labels: each image with a black edge of an
        eighth of its side, cropped to its size again, and normalised."""
        corners = self.drawn(epoch)[1].tolist()
        crops = []
        for index in indices:
            size = self.pixels(index).shape[-1]
            edge = size // 8
            padded = torch.zeros(3, size + 2 * edge, size + 2 * edge)
            padded[:, edge : edge + size, edge : edge + size] = self.pixels(index)
            top, left = corners[index]
            crops.append(padded[:, top : top + size, left : left + size])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return (torch.stack(crops) / 255 - mean) / std, self.labels[list(indices)]


def network(asked: Asked, classes: int) -> nn.Module:
    """The network with its first weights, on the CPU."""
    torch.manual_seed(asked.seed)
    if asked.model == "resnet50" and make_importable():
        from torchvision.models import resnet50

        model: nn.Module = resnet50(num_classes=classes)
        return model
    channels = (3, 8, 32, 64, 128)
    layers: list[nn.Module] = []
    for i, (given, made) in enumerate(itertools.pairwise(channels)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * (i > 0)]
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, classes))


def train(
    asked: Asked,
    images: Images,
    batches: Sequence[tuple[int, Sequence[int]]],
    scales: Sequence[tuple[float, bool]],
    precision: str = "fp32",
    layout: torch.memory_format = torch.contiguous_format,
) -> Trained:
    """Trains a step on each batch, an epoch and its images' numbers.

    Args:
        scales: of each step's loss, and whether the step moves the weights: fp16's scale starts
            high, and a step that overflows moves nothing. One that overflows here, by other
            roundings, and is to move the weights takes a smaller scale.
    """
    model = network(asked, images.classes)
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.to(asked.device, memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for (epoch, indices), (scale, moves) in zip(batches, scales, strict=True):
        inputs, labels = (part.to(asked.device) for part in images.batch(epoch, indices))
        with PRECISIONS[precision].autocast(asked.device.type):
            loss = F.cross_entropy(model(inputs.to(memory_format=layout)), labels)
        losses.append(loss.detach())
        gradients = _gradients(loss, model, scale)
        while moves and scale > 1 and not all(bool(g.isfinite().all()) for g in gradients):
            scale /= 2
            gradients = _gradients(loss, model, scale)
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        if moves:
            optimizer.step()
    moved = {name: weight.detach().cpu() - first[name] for name, weight in model.named_parameters()}
    return Trained(torch.stack(losses).float().cpu(), moved)


def _gradients(loss: Tensor, model: nn.Module, scale: float) -> list[Tensor]:
    scaled = torch.autograd.grad(loss * scale, list(model.parameters()), retain_graph=True)
    return [gradient / scale for gradient in scaled]
