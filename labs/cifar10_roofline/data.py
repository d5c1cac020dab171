"""Images and batches: CIFAR-10 by torchvision, or scikit-learn's digits in the same layout;
shuffled, cropped and flipped, by worker processes or on the device.

An epoch's batches follow from the seed and the epoch alone: they are the same with any number of
workers, on the device, and after a resume.
"""

import functools
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from labs import shared
from workshop import errors, results
from workshop.errors import NotOnThisMachine

PATIENCE_S = 20
"""For a download that does not answer."""
DIGITS_FOR_TEST = 360
DIGITS_SPLIT_SEED = 20
PADDING = 4
"""Black pixels around an image, out of which 32 x 32 are cropped."""
Batch = tuple[Tensor, Tensor]
"""Images, uint8 (B, 3, 32, 32), and labels, int64 (B,)."""


@dataclass(frozen=True)
class Part:
    """`images` are uint8 (N, 3, 32, 32), `labels` int64 (N,), from 0 to 9."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Part
    test: Part
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Deviation of the training images, for each colour, of values from 0 to 1."""
    flips: bool
    """Whether a mirrored image is one of the same class: no digit is."""


def load(name: str, folder: Path) -> Dataset:
    """CIFAR-10 from the folder, or downloaded to it; digits if it is not available, which stderr
    says.

    Raises:
        WorkshopError: the folder can't be made.
        NotOnThisMachine: CIFAR-10 without torchvision, or digits without scikit-learn.
    """
    if name == "digits":
        return digits()
    shared.import_torchvision()
    if not os.path.isdir(folder):  # noqa: PTH112 (Path raises for a name that is too long)
        results.prepare_folder(folder, "--data")
    try:
        return cifar10(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError is the checksum's
        print(
            f"WARNING: CIFAR-10 can't be downloaded ({errors.printable(str(error))}), and is not "
            f"in {folder}.\nWARNING: this run trains on DIGITS instead, 1,797 images that are "
            f"easier. For CIFAR-10 put cifar-10-python.tar.gz into that folder.",
            file=sys.stderr,
        )
        return digits()


def cifar10(folder: Path, download: bool = True) -> Dataset:
    """torchvision's, from the folder or downloaded to it. Its files are pickles, which can run
    programs: torchvision opens them only if their checksums are those that were published. Raises
    OSError, RuntimeError: they can't be downloaded or read."""
    from torchvision.datasets import CIFAR10

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_S)
    try:
        parts = [CIFAR10(folder, train=train, download=download) for train in (True, False)]
    finally:
        socket.setdefaulttimeout(before)
    train, test = (
        Part(torch.from_numpy(one.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(one.targets))
        for one in parts
    )
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Dataset("cifar10", train, test, mean, std, flips=True)


def digits() -> Dataset:
    """1,797 digits, written by 43 people and scanned to 8 x 8; enlarged to CIFAR-10's layout. The
    split into 1,437 for training and 360 for the test is the same in every run."""
    if importlib.util.find_spec("sklearn") is None:
        raise NotOnThisMachine("digits come with scikit-learn: run `make setup`")
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.images).float()[:, None] * (255 / 16)
    images = F.interpolate(small, size=32, mode="bilinear").round().to(torch.uint8)
    images = images.expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(DIGITS_SPLIT_SEED))
    test, train = (
        Part(images[chosen], labels[chosen])
        for chosen in (order[:DIGITS_FOR_TEST], order[DIGITS_FOR_TEST:])
    )
    values = train.images.float() / 255
    mean, std = (float(values.mean()),) * 3, (float(values.std()),) * 3
    return Dataset("digits", train, test, mean, std, flips=False)


# --- batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The draws of an epoch, one for each of its images. All int64 (N,)."""

    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor
    """1 for an image that is mirrored, else 0."""

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def draw(images: int, count: int, seed: int, epoch: int, flips: bool) -> "Plan":
        """Draws `count` times from `images`: each is drawn once before any is drawn again."""
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        rounds = -(-count // images)
        order = torch.cat([torch.randperm(images, generator=generator) for _ in range(rounds)])
        top, left = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
        flip = torch.randint(2, (count,), generator=generator) * flips
        return Plan(order[:count], top, left, flip)

    def batch(self, images: Part, index: int, size: int) -> Batch:
        """The batch of that number, on the images' device."""
        rows, device = slice(index * size, (index + 1) * size), images.images.device
        chosen, *drawn = (part[rows].to(device)
                          for part in (self.order, self.top, self.left, self.flip))  # fmt: skip
        return crop(images.images[chosen], *drawn), images.labels[chosen]


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
class _Prepared(torch.utils.data.Dataset[Batch]):
    """Batches by (seed, epoch, index), for DataLoader's workers."""

    part: Part
    size: int
    count: int
    """Images of an epoch."""
    flips: bool

    def __getitem__(self, key: tuple[int, int, int]) -> Batch:
        seed, epoch, index = key
        return self.plan(seed, epoch).batch(self.part, index, self.size)

    def plan(self, seed: int, epoch: int) -> Plan:
        return Plan.draw(len(self.part.labels), self.count, seed, epoch, self.flips)


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
        if on_device:
            part = Part(part.images.to(device), part.labels.to(device))
        self._prepared = _Prepared(part, size, count, flips)
        self._keys: list[tuple[int, int, int]] = []
        self._loader = DataLoader(
            self._prepared,
            batch_size=None,
            sampler=self._keys,
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
            whole = p.plan(seed, epoch).batch(p.part, 0, self.steps * p.size)
            yield from zip(*(part.split(p.size) for part in whole), strict=True)
            return
        self._keys[:] = [(seed, epoch, index) for index in range(self.steps)]
        for batch in self._loader:
            images, labels = (part.to(self._device, non_blocking=True) for part in batch)
            yield images, labels
