"""The training loop that this lab measures and profiles: a loader, a network, a step.

    loop = Loop(Settings(workers=4), Folder(path), torch.device("cuda"), batch_size=128)
    for epoch in range(3):
        for step in loop.epoch(epoch):
            ...                            # step.loss is on the device: to read it waits for it

What an epoch sees follows from the seed and its number alone. Its order and its crops are the same
for every format, decoder, number of workers and device.
"""

import copy
import functools
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from labs import shared
from workshop.errors import WorkshopError

LEARNING_RATE = 1e-4
STEPS_BEFORE_CAPTURE = 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Batch = tuple[Tensor, Tensor, Tensor]
"""Images, labels int64 (B,), and which images these are, int64 (B,). As a loader gives them, images
are uint8 (B, 3, H, W), or float32 where the workers crop and normalise."""
Key = tuple[int, int]
"""An epoch, and an image in it."""


class Source(Sized, Protocol):
    """As labs.data_pipeline.formats.Images: an image, uint8 (3, H, W), and its label."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class Settings:
    """The loop's choices. The defaults are the slowest."""

    model: str = "cnn"  # or resnet50
    format: str = "png"  # a key of formats.FORMATS
    reader: str = "ours"  # or a peer's that reads the format: torchvision, webdataset
    decoder: str = "pil"  # a key of formats.PACKAGES
    workers: int = 1  # processes that prepare batches; 0 is the training process itself
    persistent: bool = False  # workers stay for the next epoch
    pinned: bool = False  # batches in memory from which a GPU copies while the loop goes on
    prefetch: int = 2  # batches that each worker prepares ahead
    local: bool = False  # the files are copied to a local disk first, and read there
    on_device: bool = False  # crop and normalise whole batches there, not each image in the workers
    resident: bool = False  # all images are on the device: there is no loader
    channels_last: bool = False
    amp: bool = False  # fp16 where it is safe, and a loss that is scaled
    compile: bool = False
    graph: bool = False  # a step is one graph of its kernels, captured once; on a GPU
    ahead: bool = False
    """A batch is copied to the GPU while the step before it runs, and the workers go on into the
    next epoch while one ends, up to `Order.last`."""


@dataclass(frozen=True)
class Step:
    """The inputs and results of one training step, on the device."""

    loss: Tensor
    inputs: Tensor
    """Cropped and normalised (B, 3, H, W)."""
    labels: Tensor
    indices: Tensor


# --- what an epoch sees --------------------------------------------------------------------------


def draw(images: int, size: int, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The order of an epoch's images (N,), and the corner of each image's crop, (N, 2): row and
    column in the padded image."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(images, generator=generator)
    return order, torch.randint(2 * padding(size) + 1, (images, 2), generator=generator)


def padding(size: int) -> int:
    """Black pixels around an image, out of which its size is cropped again."""
    return size // 8


def crop(image: Tensor, corner: Tensor) -> Tensor:
    """One image (3, S, S), as a worker crops it."""
    size = image.shape[-1]
    top, left = corner.tolist()
    return F.pad(image, (padding(size),) * 4)[:, top : top + size, left : left + size]


def crop_batch(images: Tensor, corners: Tensor) -> Tensor:
    """Images (B, 3, S, S), each at its own corner (B, 2), all gathered at once."""
    size = images.shape[-1]
    edge = torch.arange(size, device=images.device)
    rows, columns = (corners[:, i, None] + edge for i in (0, 1))
    each = torch.arange(len(images), device=images.device)[:, None, None, None]
    colour = torch.arange(3, device=images.device)[:, None, None]
    padded = F.pad(images, (padding(size),) * 4)
    return padded[each, colour, rows[:, None, :, None], columns[:, None, None, :]]


def normalise(pixels: Tensor) -> Tensor:
    """From uint8 (..., 3, H, W) to float32 around 0."""
    mean, std = _constants(pixels.device)
    return (pixels / 255 - mean) / std


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device once: a copy for each batch would wait for the GPU."""
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))
    return mean, std


# --- the loader ----------------------------------------------------------------------------------


class Order(Sampler[Key]):
    """DataLoader's sampler: an epoch's whole batches, in the order that `draw` gives. A worker that
    stays can't see the epoch change, so that it comes with each image."""

    def __init__(self, images: int, size: int, batch_size: int, seed: int) -> None:
        self.images, self.size, self.batch_size, self.seed = images, size, batch_size, seed
        self.steps = images // batch_size
        self.epoch = 0
        self.last = 0
        """Where it is more than `epoch`, the epochs up to it follow without a pause."""

    def draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        return draw(self.images, self.size, self.seed, epoch)

    def indices(self, epoch: int) -> Tensor:
        return self.draw(epoch)[0][: self.steps * self.batch_size]

    def __iter__(self) -> Iterator[Key]:
        epochs = range(self.epoch, max(self.epoch, self.last) + 1)
        return ((epoch, index) for epoch in epochs for index in self.indices(epoch).tolist())

    def __len__(self) -> int:
        return self.steps * self.batch_size


class Items(Dataset[tuple[Tensor, int, int]]):
    """A worker's task for one image: read, decode, and, if asked, crop and normalise."""

    def __init__(self, images: Source, order: Order, prepare: bool) -> None:
        self.images, self.order, self.prepare = images, order, prepare
        self._corners = (-1, torch.empty(0))

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int]:
        epoch, index = key
        image, label = self.images[index]
        if self.prepare:
            if self._corners[0] != epoch:
                self._corners = epoch, self.order.draw(epoch)[1]
            image = normalise(crop(image, self._corners[1][index]))
        return image, label, index


class Resident:
    """All images on the device: a batch is gathered there."""

    def __init__(self, images: Source, order: Order, device: torch.device) -> None:
        items = [images[index] for index in range(len(images))]
        self.images = torch.stack([image for image, _ in items]).to(device)
        self.labels = torch.tensor([label for _, label in items], device=device)
        self.order = order

    def __iter__(self) -> Iterator[Batch]:
        indices = self.order.indices(self.order.epoch).to(self.labels.device)
        for chosen in indices.split(self.order.batch_size):
            yield self.images[chosen], self.labels[chosen], chosen


class Ahead:
    """A loader's batches, on the GPU: each is copied by another stream while the step before
    it runs. The order goes on into later epochs, which start with batches that are ready."""

    def __init__(self, loader: Iterable[Batch], order: Order, device: torch.device) -> None:
        self.loader, self.order, self.device = loader, order, device
        self.stream = torch.cuda.Stream(device)
        self._copied: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        stream = torch.cuda.current_stream(self.device)
        if self._copied is None:
            self._batches = iter(self.loader)
            self._copied = self._copy()
        for _ in range(self.order.steps):
            assert self._copied is not None
            stream.wait_stream(self.stream)
            for part in self._copied:
                part.record_stream(stream)  # its memory is free only when the step is done
            yield self._copied
            self._copied = self._copy()

    def _copy(self) -> Batch | None:
        """The next batch; None after the last one of the order."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            images, labels, indices = (part.to(self.device, non_blocking=True) for part in batch)
        return images, labels, indices


def make_loader(
    settings: Settings, images: Source, order: Order, device: torch.device
) -> Iterable[Batch]:
    """Batches of the epoch that `order.epoch` names, each time that it is iterated over."""
    if settings.resident:
        return Resident(images, order, device)
    if settings.reader == "webdataset":
        from labs.data_pipeline import peers

        return peers.WebDatasetLoader(settings, images, order)
    loader = DataLoader(
        Items(images, order, prepare=not settings.on_device),
        batch_size=order.batch_size,
        sampler=order,
        num_workers=settings.workers,
        persistent_workers=settings.persistent and settings.workers > 0,
        pin_memory=settings.pinned and device.type == "cuda",
        prefetch_factor=settings.prefetch if settings.workers else None,
    )
    return Ahead(loader, order, device) if settings.ahead else loader


# --- the network and the step --------------------------------------------------------------------


class SmallCNN(nn.Sequential):
    """Four convolutions and two dense layers. It returns logits: cross_entropy takes the
    softmax itself."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(4),  # of 32 x 32, 4 x 4 are left: nothing to do
            nn.Flatten(),
            nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, classes),
        )  # fmt: skip


def build_model(name: str, classes: int, seed: int) -> nn.Module:
    """On the CPU, with the weights that follow from the seed. Raises NotOnThisMachine: torchvision
    is missing."""
    torch.manual_seed(seed)
    if name == "cnn":
        return SmallCNN(classes)
    model: nn.Module = shared.import_torchvision().models.resnet50(num_classes=classes)
    return model


class Loop:
    """A training that is ready to start.

    Args:
        steps: of an epoch, at most; by default all whole batches.

    Raises:
        WorkshopError: there are fewer images than a batch has.
    """

    def __init__(
        self,
        settings: Settings,
        images: Source,
        device: torch.device,
        batch_size: int,
        steps: int | None = None,
        classes: int = 10,
        seed: int = 42,
    ) -> None:
        if batch_size > len(images):
            raise WorkshopError(f"--batch-size {batch_size}: there are {len(images):,} images")
        self.settings, self.images, self.device = settings, images, device
        self.classes, self.seed = classes, seed
        size = images[0][0].shape[-1]
        self.order = Order(len(images), size, batch_size, seed)
        self.order.steps = min(steps or self.order.steps, self.order.steps)
        self.loader = make_loader(settings, images, self.order, device)
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        model = build_model(settings.model, classes, seed).to(device)
        self.model = model.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.forward = torch.compile(self.model, dynamic=False) if settings.compile else self.model
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=LEARNING_RATE,
            capturable=settings.graph,
            # Else the host asks whether the scaled loss overflowed, which a graph can't.
            fused=settings.graph and settings.amp,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.amp)
        self._graph: torch.cuda.CUDAGraph | None = None

    def epoch(self, number: int) -> Iterator[Step]:
        """Trains an epoch; a step each time that the next one is asked for."""
        self.order.epoch = number
        return self.train(self.loader, number)

    def train(self, batches: Iterable[Batch], epoch: int) -> Iterator[Step]:
        """Trains a step on each batch."""
        corners = self.order.draw(epoch)[1].to(self.device)
        self.model.train()
        for batch in batches:
            images, labels, indices = (part.to(self.device, non_blocking=True) for part in batch)
            if images.dtype == torch.uint8:
                images = normalise(crop_batch(images, corners[indices]))
            images = images.contiguous(memory_format=self.layout)
            if self.settings.graph:
                loss, images, labels = self._replay(images, labels)
            else:
                loss = self._step(images, labels)
            yield Step(loss, images, labels, indices)

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Trains one step; its loss."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.settings.amp):
            loss = F.cross_entropy(self.forward(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same step as a graph: its loss, and the images and labels that it has read."""
        if self._graph is None:
            self._capture(images, labels)
        assert self._graph is not None
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss.clone(), self._images.clone(), self._labels.clone()

    def _capture(self, images: Tensor, labels: Tensor) -> None:
        """Captures the step, after some in which memory settles; what these changed is put back."""
        self._images, self._labels = images.clone(), labels.clone()
        before = copy.deepcopy((self.model.state_dict(), self.scaler.state_dict()))
        own = torch.cuda.Stream(self.device)
        own.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(own):
            for _ in range(STEPS_BEFORE_CAPTURE):
                self._step(self._images, self._labels)
        torch.cuda.current_stream(self.device).wait_stream(own)
        self.optimizer.zero_grad()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats(self.device)  # its memory is counted only while captured
        # The loader's thread may pin memory meanwhile, which would end a "global" capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = self._step(self._images, self._labels)
        self.model.load_state_dict(before[0])
        if self.settings.amp:
            self.scaler.load_state_dict(before[1])
        for state in self.optimizer.state.values():  # zeros, as before the first step
            for tensor in state.values():
                tensor.zero_()
