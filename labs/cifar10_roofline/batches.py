"""Batches of an epoch: shuffled, cropped and flipped, by worker processes or on the device.

What an epoch sees follows from the seed and the epoch alone: it is the same with any number of
workers, on the device, and after a resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from labs.cifar10_roofline.data import Part

PADDING = 4
"""Black pixels around an image, out of which 32 x 32 are cropped."""
Batch = tuple[Tensor, Tensor]
"""Images, uint8 (B, 3, 32, 32), and labels, int64 (B,)."""


@dataclass(frozen=True)
class Plan:
    """The draws of an epoch, one for each of its images. All int64 (N,)."""

    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor
    """1 for an image that is mirrored, else 0."""

    @staticmethod
    def draw(images: int, count: int, seed: int, epoch: int, flips: bool) -> "Plan":
        """`count` out of so many images: each is drawn once before any is drawn again."""
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        rounds = -(-count // images)
        order = torch.cat([torch.randperm(images, generator=generator) for _ in range(rounds)])
        order = order[:count]
        top, left = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
        flip = torch.randint(2, (count,), generator=generator) * flips
        return Plan(order, top, left, flip)

    def to(self, device: torch.device) -> "Plan":
        return Plan(*(part.to(device) for part in (self.order, self.top, self.left, self.flip)))

    def batch(self, images: Part, index: int, size: int) -> Batch:
        """The batch of that number, on the images' device."""
        rows = slice(index * size, (index + 1) * size)
        chosen = self.order[rows]
        cropped = crop(images.images[chosen], self.top[rows], self.left[rows], self.flip[rows])
        return cropped, images.labels[chosen]


def crop(images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Crops of images with black borders, some mirrored, all gathered at once."""
    padded = F.pad(images, (PADDING,) * 4)
    edge = torch.arange(32, device=images.device)
    across = torch.where(flip[:, None] > 0, 31 - edge, edge) + left[:, None]
    down = edge + top[:, None]
    each = torch.arange(len(images), device=images.device)
    colour = torch.arange(3, device=images.device)
    return padded[
        each[:, None, None, None],
        colour[:, None, None],
        down[:, None, :, None],
        across[:, None, None, :],
    ]


@dataclass
class _Prepared(Dataset[Batch]):
    """Batches by (seed, epoch, index), for DataLoader's workers."""

    part: Part
    size: int
    count: int
    """Images of an epoch."""
    flips: bool
    _plan: tuple[list[int], Plan] | None = None

    def __getitem__(self, key: tuple[int, int, int]) -> Batch:
        *drawn, index = key
        if self._plan is None or self._plan[0] != drawn:
            self._plan = drawn, self.plan(*drawn)
        return self._plan[1].batch(self.part, index, self.size)

    def plan(self, seed: int, epoch: int) -> Plan:
        return Plan.draw(len(self.part.labels), self.count, seed, epoch, self.flips)


class _Order:
    """DataLoader's sampler: the keys of an epoch's batches, in order."""

    def __init__(self, steps: int) -> None:
        self.steps, self.drawn = steps, (0, 0)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return ((*self.drawn, index) for index in range(self.steps))

    def __len__(self) -> int:
        return self.steps


class Batches:
    """Whole batches of the training images; the remainder of an epoch is left out."""

    def __init__(
        self,
        part: Part,
        size: int,
        count: int,
        flips: bool,
        device: torch.device,
        workers: int = 0,
        on_device: bool = False,
    ) -> None:
        self.steps = count // size
        self._device, self._on_device = device, on_device
        self._prepared = _Prepared(part.to(device) if on_device else part, size, count, flips)
        self._order = _Order(self.steps)
        self._loader = DataLoader(
            self._prepared,
            batch_size=None,
            sampler=self._order,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            # A draw from the global one would change what a resumed run draws.
            generator=torch.Generator(),
        )

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Its batches, on the device."""
        if self._on_device:
            # All crops of the epoch at once: for each batch the host would launch a dozen kernels.
            p = self._prepared
            whole = p.plan(seed, epoch).to(self._device).batch(p.part, 0, self.steps * p.size)
            yield from zip(*(part.split(p.size) for part in whole), strict=True)
            return
        self._order.drawn = seed, epoch
        for images, labels in self._loader:
            yield (
                images.to(self._device, non_blocking=True),
                labels.to(self._device, non_blocking=True),
            )
