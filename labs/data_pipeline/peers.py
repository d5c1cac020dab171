"""Other sources of the same images: torchvision's ImageFolder, WebDataset's own loader, slow
storage, simulated, and a copy on a local disk."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from labs import shared
from labs.data_pipeline.formats import Folder, Images, Tar
from labs.data_pipeline.loop import Batch, Order, Settings, Source
from workshop import errors

SHUFFLE = 1000
"""Images among which WebDataset draws the next one: its documentation's number."""
SHARDS_PER_WORKER = 4


def _beside(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    """A folder for as long as its object lives; make_dataset.py deletes what a killed run left."""
    return tempfile.TemporaryDirectory(prefix=".images.", dir=folder)


class TorchvisionImages:
    """torchvision's ImageFolder. It takes a folder for each class: here links to the PNG files."""

    key = Folder.key

    def __init__(self, folder: Path) -> None:
        shared.import_torchvision()
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import PILToTensor

        source = Folder(folder)
        self._links = _beside(folder)
        for name, label in zip(source.names, source.labels, strict=True):
            of_class = Path(self._links.name) / f"{label:06}"  # sorted names are sorted labels
            of_class.mkdir(exist_ok=True)
            (of_class / name).symlink_to((source.path / name).resolve())
        self.images = ImageFolder(self._links.name, transform=PILToTensor())
        self.labels = [int(name) for name in self.images.classes]
        self.places = np.argsort([Path(path).name for path, _ in self.images.samples])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[self.places[index]]
        return image, self.labels[label]


class WebDatasetLoader:
    """As WebDataset's documentation has it: each worker reads shards, in random order; images are
    shuffled in a buffer, and batches of all workers mixed anew. The order is its own."""

    def __init__(self, settings: Settings, images: Source, order: Order) -> None:
        errors.require("webdataset")
        import webdataset

        assert isinstance(images, Tar)
        self.order = order
        source = Folder(images.path.parent)
        self._shards = _beside(images.path.parent)
        count = SHARDS_PER_WORKER * max(1, settings.workers)
        paths = [str(Path(self._shards.name) / f"{shard:04}.tar") for shard in range(count)]
        for shard, path in enumerate(paths):
            Tar.write(Path(path), source, range(len(source))[shard::count])
        samples = webdataset.WebDataset(paths, shardshuffle=count, empty_check=False)
        samples = samples.shuffle(SHUFFLE).decode("pil").to_tuple("png", "cls", "__key__")
        samples = samples.map_tuple(_pixels, int, int).batched(order.batch_size, default_collate)
        loader = webdataset.WebLoader(
            samples,
            batch_size=None,
            num_workers=settings.workers,
            persistent_workers=settings.persistent and settings.workers > 0,
            prefetch_factor=settings.prefetch if settings.workers else None,
        )
        mixed = loader.unbatched().shuffle(SHUFFLE)
        self.batches = mixed.batched(order.batch_size, default_collate, partial=False)

    def __iter__(self) -> Iterator[Batch]:
        for _, (images, labels, indices) in zip(
            range(self.order.steps), self.batches, strict=False
        ):
            yield images, labels, indices


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class SlowOpens(Dataset[tuple[Tensor, int]]):
    """The same images after a wait at each open of a file, as on a cluster's shared file system. In
    the folder each image is an open; a packed file is opened once in each process.

    The wait is a sleep, which no other process feels. A real server also slows down with many
    clients.
    """

    def __init__(self, images: Images | TorchvisionImages, open_ms: float) -> None:
        self.images, self.open_ms = images, open_ms
        self._opened_in = -1
        """The process that has opened the packed file."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.images.key == Folder.key or self._opened_in != os.getpid():
            self._opened_in = os.getpid()
            time.sleep(self.open_ms / 1e3)
        return self.images[index]


@contextlib.contextmanager
def local_copy(
    images: Path, local_dir: Path, open_ms: float, threads: int
) -> Iterator[tuple[Path, float]]:
    """Copies a format's files. Yields a dataset's folder that has these alone, and the seconds of
    the copy; the folder is deleted at the end.

    Args:
        images: one file, or a folder of them.
        open_ms: the wait at each open, as in SlowOpens.
        threads: copies at a time.
    """
    files = sorted(images.iterdir()) if images.is_dir() else [images]
    with tempfile.TemporaryDirectory(prefix="data_pipeline.", dir=local_dir) as local:
        target = Path(local) / images.name
        if images.is_dir():
            target.mkdir()

        def copy(path: Path) -> None:
            time.sleep(open_ms / 1e3)
            shutil.copyfile(path, target / path.name if images.is_dir() else target)

        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(copy, files):  # raises what a copy raised
                pass
        yield Path(local), time.perf_counter() - start
