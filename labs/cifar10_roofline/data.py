"""Images: CIFAR-10 by torchvision, or scikit-learn's digits in the same layout."""

import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from labs import shared
from workshop import errors, results
from workshop.errors import NotOnThisMachine

PATIENCE_S = 20
"""For a download that does not answer."""
DIGITS_FOR_TEST = 360
DIGITS_SPLIT_SEED = 20


@dataclass(frozen=True)
class Part:
    """`images` are uint8 (N, 3, 32, 32), `labels` int64 (N,), from 0 to 9."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Part":
        return Part(self.images.to(device), self.labels.to(device))


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


# --- CIFAR-10 ------------------------------------------------------------------------------------


def cifar10(folder: Path) -> Dataset:
    """torchvision's, from the folder or downloaded to it. Its files are pickles, which can run
    programs: torchvision opens them only if their checksums are those that were published.

    Raises:
        OSError, RuntimeError: they can't be downloaded or read.
    """
    from torchvision.datasets import CIFAR10

    with _patience():
        parts = [CIFAR10(folder, train=train, download=True) for train in (True, False)]
    train, test = (
        Part(torch.from_numpy(one.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(one.targets))
        for one in parts
    )
    return Dataset(
        "cifar10", train, test,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        flips=True,
    )  # fmt: skip


@contextmanager
def _patience() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# --- digits --------------------------------------------------------------------------------------


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
    test, train = order[:DIGITS_FOR_TEST], order[DIGITS_FOR_TEST:]
    values = images[train].float() / 255
    return Dataset(
        "digits",
        Part(images[train], labels[train]),
        Part(images[test], labels[test]),
        mean=(float(values.mean()),) * 3,
        std=(float(values.std()),) * 3,
        flips=False,
    )
