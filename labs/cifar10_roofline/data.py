"""Images: CIFAR-10 from its own files, or scikit-learn's digits in the same layout.

CIFAR-10 is pickled. A pickle can run any program, so that these are read by an unpickler that knows
arrays, texts, numbers, lists and dicts alone; the archive is read where it lies and not unpacked.
"""

import importlib.util
import io
import pickle
import socket
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workshop import errors, results
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.run.torchvision import make_importable

ARCHIVE = "cifar-10-python.tar.gz"
UNPACKED = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
MOST_BYTES = 64 * 2**20
"""Of one file: CIFAR-10's have 31 MB."""
PIXELS = 3 * 32 * 32
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
    """Of the training images, for each colour, of values from 0 to 1."""
    flips: bool
    """Whether a mirrored image is one of the same class: no digit is."""


def load(name: str, folder: Path) -> Dataset:
    """CIFAR-10 from the folder, or downloaded to it; digits if that can't be had, which stderr
    says.

    Raises:
        WorkshopError: what lies in the folder is damaged, or no CIFAR-10.
        NotOnThisMachine: digits without scikit-learn.
    """
    if name == "digits":
        return digits()
    if not ((folder / UNPACKED).is_dir() or (folder / ARCHIVE).is_file()):
        problem = _download(folder)
        if problem:
            print(
                f"WARNING: CIFAR-10 can't be downloaded ({errors.printable(problem)}), and is not "
                f"in {folder}.\nWARNING: this run trains on DIGITS instead, 1,797 images that are "
                f"easier. For CIFAR-10 put {ARCHIVE} into that folder.",
                file=sys.stderr,
            )
            return digits()
    return cifar10(folder)


# --- CIFAR-10 ------------------------------------------------------------------------------------


def cifar10(folder: Path) -> Dataset:
    """Reads its batches from the unpacked folder, or from the archive; raises WorkshopError."""
    read = _from_folder if (folder / UNPACKED).is_dir() else _from_archive
    found = read(folder)
    return Dataset(
        "cifar10",
        _joined([found[name] for name in TRAIN_FILES]),
        _joined([found[name] for name in TEST_FILES]),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        flips=True,
    )


def _joined(parts: list[Part]) -> Part:
    return Part(
        torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    )


def _from_folder(folder: Path) -> dict[str, Part]:
    found = {}
    for name in (*TRAIN_FILES, *TEST_FILES):
        path = folder / UNPACKED / name
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise WorkshopError(
                f"{path}: can't be read ({error.strerror}); delete {path.parent}, and it is "
                "read from the archive or downloaded again"
            ) from None
        found[name] = parse_batch(content, str(path))
    return found


def _from_archive(folder: Path) -> dict[str, Part]:
    path, found = folder / ARCHIVE, {}
    remedy = "delete it, and it is downloaded again"
    wanted = {f"{UNPACKED}/{name}": name for name in (*TRAIN_FILES, *TEST_FILES)}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.name not in wanted:
                    continue
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or member.size > MOST_BYTES:
                    raise WorkshopError(f"{path}: {member.name} is no batch of CIFAR-10; {remedy}")
                name = wanted[member.name]
                found[name] = parse_batch(file.read(), f"{path}: {member.name}")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise WorkshopError(f"{path}: the archive is damaged ({error!s:.60}); {remedy}") from None
    missing = sorted(set(wanted.values()) - found.keys())
    if missing:
        raise WorkshopError(f"{path}: {missing[0]} is missing in it; {remedy}")
    return found


class _Unpickler(pickle.Unpickler):
    """Knows NumPy's arrays, and how Python 3 writes bytes for Python 2."""

    _known = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no data")
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        return super().find_class(module, name)


def parse_batch(content: bytes, where: str) -> Part:
    """A batch from CIFAR-10's pickle: a dict with `data`, uint8 (N, 3072), and `labels`.

    Raises:
        WorkshopError: it is damaged, something else, or asks for a program to be run.
    """
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        images, labels = batch["data"], np.asarray(batch["labels"])
        fits = isinstance(images, np.ndarray) and images.shape == (len(labels), PIXELS)
        if not (fits and images.dtype == np.uint8 and labels.dtype.kind == "i" and len(labels)):
            raise ValueError("no images of 3 x 32 x 32 with a label each")
        if labels.min() < 0 or labels.max() > 9:
            raise ValueError("a label is not from 0 to 9")
    except Exception as error:  # what a damaged pickle raises is not listed anywhere
        raise WorkshopError(
            f"{where}: no batch of CIFAR-10 ({errors.printable(str(error)):.90}); delete it, and "
            "it is downloaded again"
        ) from None
    pixels = torch.from_numpy(np.array(images)).view(-1, 3, 32, 32)
    return Part(pixels, torch.from_numpy(labels.astype(np.int64)))


def _download(folder: Path) -> str:
    """By torchvision's address and checksum; what is in the way, or nothing."""
    if not make_importable():
        return "torchvision is missing"
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_url

    results.prepare_folder(folder, "--data")
    print(f"Downloading CIFAR-10 (170 MB) to {folder}", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary, _patience():
            download_url(CIFAR10.url, temporary, ARCHIVE, CIFAR10.tgz_md5)
            Path(temporary, ARCHIVE).replace(folder / ARCHIVE)
    except (OSError, RuntimeError) as error:  # RuntimeError is the checksum's
        return str(error)
    return ""


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
