"""How fast each part of the pipeline is alone: the storage, reading, decoding, a worker, the model.

The loop can go no faster than the slowest: the model, or all workers together.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import default_collate

from labs.data_pipeline.formats import Images
from labs.data_pipeline.loop import Items, Loop, Source

SECONDS = 0.5
"""The time for which a rate is measured."""
LEAST_STEPS = 5
STORED_FILES, STORED_BYTES = 500, 2**26
"""How many PNG files, and how much of a packed one, are read from the storage."""


def storage_rate(images: Images) -> float | None:
    """Images a second that one core reads from the storage, in the files' order: they are dropped
    from the system's memory before. None where the system has no way to do that, as macOS. Caches
    of the storage itself, as of a file server, are in it."""
    if not hasattr(os, "posix_fadvise"):
        return None
    pngs = sorted(images.path.glob("*.png"))[:STORED_FILES]
    files = pngs or (sorted(images.path.iterdir()) if images.path.is_dir() else [images.path])
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not yet written can't be dropped
            os.posix_fadvise(file.fileno(), 0, STORED_BYTES, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    read = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            read += len(file.read(STORED_BYTES))
    per_s = read / (time.perf_counter() - start)
    return per_s * len(pngs or images) / sum(path.stat().st_size for path in files)


def read_rate(images: Images) -> float:
    """Images a second whose bytes one core reads: a PNG file's, or the pixels where the format
    keeps these."""
    keeps_pixels = type(images).image is not Images.image
    read: Callable[[int], object] = images.image if keeps_pixels else images.encoded
    return _per_second(read, range(len(images)))


def decode_rate(images: Images) -> float | None:
    """PNG files a second that one core decodes; None for a format that keeps pixels."""
    if type(images).image is not Images.image:
        return None
    some = [images.encoded(index) for index in range(min(len(images), 64))]
    return _per_second(images.decode, some)


def worker_rate(images: Source, loop: Loop) -> float:
    """Images a second that one core makes ready for a batch: all that a worker of this loop does,
    but for the way to the training process."""
    items = Items(images, loop.order, prepare=not loop.settings.on_device)
    size = loop.order.batch_size
    keys = list(itertools.islice(loop.order, size * max(1, 256 // size)))
    batches = [keys[start : start + size] for start in range(0, len(keys), size)]
    return size * _per_second(lambda batch: default_collate([items[key] for key in batch]), batches)


def model_rate(loop: Loop) -> float:
    """Images a second of the same loop on one batch that lies on the device. Trains on it."""
    items = Items(loop.images, loop.order, prepare=not loop.settings.on_device)
    keys = itertools.islice(loop.order, loop.order.batch_size)
    batch = [part.to(loop.device) for part in default_collate([items[key] for key in keys])]
    steps = loop.train(itertools.repeat(tuple(batch)), loop.order.epoch)
    for _ in range(LEAST_STEPS):
        next(steps)
    _wait(loop.device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS or count < LEAST_STEPS:
        next(steps)
        count += 1
        if count % 50 == 0:
            _wait(loop.device)  # the loop runs ahead of a GPU
    _wait(loop.device)
    return count * loop.order.batch_size / (time.perf_counter() - start)


def _per_second(work: Callable[..., object], items: Iterable[object]) -> float:
    """Calls a second, on one thread as in a worker; the first one, which opens files, is left
    out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rest = itertools.cycle(items)
        work(next(rest))
        start, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < SECONDS:
            work(next(rest))
            count += 1
        return count / spent
    finally:
        torch.set_num_threads(threads)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
