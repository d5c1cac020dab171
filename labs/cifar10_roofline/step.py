"""The training step: the network, normalise, forward, loss, backward, SGD; its learning rate."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs import shared
from workshop import results
from workshop.errors import WorkshopError
from workshop.run.markers import Range
from workshop.run.precision import PRECISIONS

CLASSES = 10
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
STEPS_BEFORE_CAPTURE = 3
GPU_COMPILER: dict[str, Any] = {
    "combo_kernels": True,
    "coordinate_descent_tuning": True,
}
"""Small kernels that do not depend on each other are one, as the casts of all weights; and kernels'
tiles are tuned on the device, which makes the first compilation longer."""


def build(name: str) -> nn.Module:
    """torchvision's ResNet, in which a 3 x 3 convolution of stride 1 takes the place of the first
    layers: those are for 224 x 224, and would leave 8 x 8 of an image of 32 x 32. Raises
    NotOnThisMachine: torchvision is not installed."""
    models = shared.import_torchvision().models
    model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


@dataclass(frozen=True)
class Variant:
    """How a step runs. All of it is off in the plain one."""

    precision: str = "fp32"
    """A name of workshop.run.precision."""
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = False

    @property
    def label(self) -> str:
        words = [self.precision]
        words += ["channels-last"] * self.channels_last + ["compile"] * self.compile
        return ", ".join(words + ["graph"] * self.cuda_graph)

    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Schedule:
    """The learning rate: `warmup` steps in a line to `highest`, then a cosine to 0 at `total`."""

    highest: float
    warmup: int
    total: int

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup:
            return self.highest * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        return self.highest * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@dataclass(frozen=True)
class Problem:
    """The task, which every variant learns."""

    schedule: Schedule
    label_smoothing: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Training:
    """A network in training. Weights and momentum are fp32 at every precision; in fp16 the loss is
    scaled."""

    def __init__(
        self, model: nn.Module, variant: Variant, problem: Problem, device: torch.device
    ) -> None:
        self.variant, self.problem, self.device = variant, problem, device
        self.model: nn.Module = copy.deepcopy(model).to(device)
        self.model.to(memory_format=variant.layout())  # type: ignore[call-overload]
        mean, std = (
            torch.tensor(v, device=device).view(3, 1, 1) for v in (problem.mean, problem.std)
        )
        self._scale, self._shift = 1 / (255 * std), mean / std
        # In memory of the device, a captured graph reads it anew at each step.
        self._rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=self._rate if device.type == "cuda" else 0.0,
            momentum=MOMENTUM,
            nesterov=True,
            weight_decay=WEIGHT_DECAY,
            fused=device.type == "cuda",
        )
        # If the scaled loss of the first step overflows, PyTorch's fused update skips it and leaves
        # the momentum that it was to write as it was allocated.
        for weight in self.model.parameters():
            self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        precision = PRECISIONS[variant.precision]
        self._autocast = lambda: precision.autocast(device.type)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.loss_scaling)
        self._loss_of: Callable[[Tensor, Tensor], Tensor] = self.loss
        if variant.compile:
            options = GPU_COMPILER if device.type == "cuda" else None
            self._loss_of = torch.compile(self.loss, dynamic=False, options=options)
        self.done = 0
        """Steps, also of a run that this one resumes."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._own_steps = 0

    def logits(self, images: Tensor) -> Tensor:
        """The logits (B, 10) of uint8 images (B, 3, 32, 32)."""
        values = images.float() * self._scale - self._shift
        out: Tensor = self.model(values.contiguous(memory_format=self.variant.layout()))
        return out

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy, a scalar: at fp32, whatever the logits are."""
        logits = self.logits(images).float()
        return F.cross_entropy(logits, labels, label_smoothing=self.problem.label_smoothing)

    def step(self, images: Tensor, labels: Tensor, range_: Range = nullcontext) -> Tensor:
        """Trains one step, with a marker range around each part; its loss, a scalar on the
        device."""
        rate = self.problem.schedule.at(self.done)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.variant.cuda_graph:
            loss = self._graphed(images, labels)
        else:
            loss = self._train(images, labels, range_)
        self.done += 1
        self._own_steps += 1
        return loss

    def _train(self, images: Tensor, labels: Tensor, range_: Range = nullcontext) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with range_("forward"), self._autocast():
            loss = self._loss_of(images, labels)
        with range_("backward"):
            self.scaler.scale(loss).backward()
        with range_("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def _graphed(self, images: Tensor, labels: Tensor) -> Tensor:
        """The first steps run eagerly, on a separate stream, as a capture requires; then the
        step is captured, which runs nothing, and replayed."""
        if self._own_steps < STEPS_BEFORE_CAPTURE:
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                loss = self._train(images, labels)
            torch.cuda.synchronize(self.device)
            return loss
        if self._graph is None:
            self._images, self._labels = images.clone(), labels.clone()
            self.optimizer.zero_grad(set_to_none=True)
            self._graph = torch.cuda.CUDAGraph()
            # The loader's thread may pin memory meanwhile, which would end a "global" capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._graph_loss = self._train(self._images, self._labels)
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._graph_loss.clone()

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        """The logits (B, 10) of images in evaluation mode, on the device."""
        self.model.eval()
        with self._autocast():
            found = self.logits(images.to(self.device))
        self.model.train()
        return found

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.done,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state()`, which may be of another device or variant."""
        self.model.load_state_dict(state["model"])
        own = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would share tensors
        # The fused update wants momentum in its weight's memory format.
        for weight, its in self.optimizer.state.items():
            its["momentum_buffer"] = torch.empty_like(weight).copy_(its["momentum_buffer"])
        for group, kept in zip(self.optimizer.param_groups, own, strict=True):
            group.update(kept)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.done = state["step"]


# --- checkpoints ----------------------------------------------------------------------------------


FORMAT = "cifar10_roofline 1"


def save_file(path: Path, content: dict[str, Any]) -> None:
    """Raises WorkshopError where it can't be written: an older file of that name stays then."""
    with results.atomic_path(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:  # torch.save's, of a disk without room
            raise WorkshopError(f"{path} can't be written: {error!s:.80}") from None


def checkpoint(training: Training, **progress: Any) -> dict[str, Any]:
    """The content of a checkpoint: the training, PyTorch's random numbers, and the given settings,
    number of complete epochs, best accuracy and history."""
    random = {"cpu": torch.get_rng_state()}
    if training.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(training.device)
    return {
        "format": FORMAT,
        "training": training.state(),
        "schedule": asdict(training.problem.schedule),
        "random": random,
        **progress,
    }


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, its tensors to the CPU. Raises WorkshopError: it is not this program's,
    or it is truncated."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] == FORMAT:
            return content
        problem = "of another program"
    except Exception as error:  # what a damaged file raises is not listed anywhere
        problem = type(error).__name__
    raise WorkshopError(
        f"--resume {path}: no checkpoint, or a truncated one ({problem}); those are *_best.pt and "
        "*_epoch_N.pt in --out-dir (*_final_weights.pt has weights alone)"
    )


def restore(path: Path, content: dict[str, Any], training: Training) -> None:
    """Puts a checkpoint's state into a training and PyTorch's random numbers; raises WorkshopError
    where it does not fit."""
    try:
        training.load(content["training"])
        torch.set_rng_state(content["random"]["cpu"])
        if training.device.type == "cuda" and "cuda" in content["random"]:
            torch.cuda.set_rng_state(content["random"]["cuda"], training.device)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise WorkshopError(
            f"--resume {path}: its weights are not those of this network ({error!s:.60})"
        ) from None
