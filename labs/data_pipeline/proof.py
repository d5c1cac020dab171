"""What shows that a rung trains on the same images as the plain loop, and to the same loss.

The plain loop reads the PNG files itself with PIL, crops each image on the CPU, and trains in fp32.
From the rung's own timed process come the inputs of the network and the losses. The pixels of the
first steps and of the last one are the plain loop's, bit for bit; each epoch has every image of its
order once. The losses are compared with those of fp64 on the plain loop's images: plain training at
the same precision says how much they may differ.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.data_pipeline import loop as plain
from labs.data_pipeline.formats import Folder
from labs.data_pipeline.loop import Loop, Step
from workshop.results import Parity
from workshop.run.precision import PRECISIONS

FIRST_UPDATES = 3
MOST_FIRST_STEPS = 16
"""The loss scale starts high, and a step that overflows halves it and moves nothing: ResNet-50 in
fp16 skips more than three on an H200."""
MOST_TIMES = (3.0, 10.0, 10.0)
"""The plain step's error at the same precision, of which a rung may have this many: in the first
step, and after one and two of Adam's, which moves a weight as far for a gradient of rounding alone
as for a large one."""
FLOOR = {"fp32": 2.0**-18, "fp16": 2.0**-10}
"""Relative: by luck the plain step may be nearer to the truth."""
MOST = 0.25
"""However much the plain step loses: the norms of ResNet-50 amplify rounding if the batch is small.
On a CPU plain fp32 is 2e-6 from fp64's loss in the first step and 0.3% in the third (batch 4,
224 x 224), channels-last 2e-5 and 3%; the small network is 2e-7 in all."""
OWN_ORDER = ("webdataset",)
"""Readers that shuffle by themselves."""


@dataclass
class Seen:
    """What a rung did, taken from its loop while it ran."""

    loop: Loop
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """The first ones with their epochs, and the last one."""
    moved: list[bool] = field(default_factory=list)
    """Of the first ones, up to the third that moved the weights."""
    scales: list[float] = field(default_factory=list)
    """Of the first ones' losses."""
    delivered: list[list[Tensor]] = field(default_factory=list)
    """The images' numbers of each step, for each epoch."""

    def __post_init__(self) -> None:
        self._next_scale = self.loop.scaler.get_scale()

    def see(self, epoch: int, step: Step) -> None:
        """To be called after every step."""
        if epoch == len(self.delivered):
            self.delivered.append([])
        self.delivered[epoch].append(step.indices)
        if sum(self.moved) < FIRST_UPDATES and len(self.moved) < MOST_FIRST_STEPS:
            self.scales.append(self._next_scale)
            self._next_scale = self.loop.scaler.get_scale()
            self.moved.append(self._next_scale >= self.scales[-1])
            own = replace(step, inputs=step.inputs.cpu(), labels=step.labels.cpu())
            self.steps.append((epoch, own))
        else:
            self.steps[len(self.moved) :] = [(epoch, step)]


def of_run(seen: Seen, folder: Path) -> Parity:
    """The verdict on a run.

    Args:
        folder: of the dataset, with its PNG files.
    """
    own = seen.loop.settings
    precision = "fp16" if own.amp else "fp32"
    source = Folder(folder)
    torch.backends.cudnn.benchmark = False  # a search would take longer than these steps
    batches = [reference_batch(source, seen.loop, epoch, step) for epoch, step in seen.steps]
    failures = _other_images(seen, batches) + _other_order(seen)
    wrong = len(failures)
    truth = _losses(seen, batches, "fp64")
    layouts = (torch.contiguous_format, torch.channels_last)  # whose products round differently
    plainly = [_apart(_losses(seen, batches, precision, layout), truth) for layout in layouts]
    lost = [max(errors) for errors in zip(*plainly, strict=True)]
    apart = _apart([float(step.loss) for _, step in seen.steps[: len(seen.moved)]], truth)
    updates = [sum(seen.moved[:i]) for i in range(len(seen.moved))]  # before each step
    allowed = [
        min(MOST_TIMES[done] * error + FLOOR[precision], MOST)
        for done, error in zip(updates, lost, strict=True)
    ]
    failures += [
        f"the loss of step {i + 1}: {apart[i]:.1e} from fp64's on the plain images, "
        f"{allowed[i]:.1e} allowed"
        for i in range(len(truth))
        if apart[i] > allowed[i]
    ]
    if bare := sum(parameter.grad is None for parameter in seen.loop.model.parameters()):
        failures.append(f"{bare} weights get no gradient")
    if not any(seen.moved):
        failures.append("none of the first steps moved the weights")
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=seen.loop.order.batch_size,
        reference=f"PNG files by PIL in this process; fp64, from which plain {precision}'s losses "
        f"are up to {max(lost):.1e}",
        measures={
            **{
                f"the loss of step {i + 1}": {"error": _finite(apart[i]), "allowed": allowed[i]}
                for i in range(len(truth))
            },
            "batches and epochs with other images": {"error": wrong, "allowed": 0},
        },
    )


def reference_batch(source: Folder, loop: Loop, epoch: int, step: Step) -> tuple[Tensor, Tensor]:
    """The images that a step says it had, uint8 and cropped, and their labels, on the CPU."""
    corners = loop.order.draw(epoch)[1]
    indices = step.indices.tolist()
    items = [source[index] for index in indices]
    pixels = [plain.crop(image, corners[i]) for (image, _), i in zip(items, indices, strict=True)]
    return torch.stack(pixels), torch.tensor([label for _, label in items])


def pixels_of(inputs: Tensor) -> Tensor:
    """What was normalised, exactly: rounding takes away what fp32 lost."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (plain.MEAN, plain.STD))
    return ((inputs.cpu() * std + mean) * 255).round().to(torch.uint8)


def _other_images(seen: Seen, batches: list[tuple[Tensor, Tensor]]) -> list[str]:
    failures = []
    for (epoch, step), (pixels, labels) in zip(seen.steps, batches, strict=True):
        wrong = int((pixels_of(step.inputs) != pixels).flatten(1).any(1).sum())
        if wrong:
            failures.append(f"epoch {epoch}: {wrong} of {len(pixels)} images of a batch are others")
        if wrong := int((step.labels.cpu() != labels).sum()):
            failures.append(f"epoch {epoch}: {wrong} of {len(labels)} labels of a batch are others")
    return failures


def _other_order(seen: Seen) -> list[str]:
    """Each epoch's images against its order: the same, one after the other, or for a loader with an
    order of its own each at most once."""
    order, failures = seen.loop.order, []
    for epoch, steps in enumerate(seen.delivered):
        found = torch.cat(steps).cpu()
        twice = len(found) - len(found.unique())
        if twice:
            failures.append(f"epoch {epoch}: {twice} images come twice")
        wanted = order.draw(epoch)[0][: order.steps * order.batch_size]
        if len(found) != len(wanted):
            failures.append(f"epoch {epoch}: {len(found):,} images for {len(wanted):,}")
        elif seen.loop.settings.reader not in OWN_ORDER and not torch.equal(found, wanted):
            failures.append(f"epoch {epoch}: the images come in another order")
    return failures


def _losses(
    seen: Seen,
    batches: list[tuple[Tensor, Tensor]],
    precision: str,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[float]:
    """Of the first steps, trained anew from the same weights on the plain loop's images, eagerly;
    a step that moved nothing moves nothing here."""
    loop, exact = seen.loop, precision == "fp64"
    dtype = torch.float64 if exact else torch.float32
    model = plain.build_model(loop.settings.model, loop.classes, loop.seed).to(loop.device, dtype)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=plain.LEARNING_RATE)
    arithmetic = PRECISIONS["fp32" if exact else precision]
    losses = []
    for (pixels, labels), moved, scale in zip(batches, seen.moved, seen.scales, strict=False):
        images = plain.normalise(pixels.to(loop.device)).to(dtype, memory_format=layout)
        with arithmetic.autocast(loop.device.type):
            loss = F.cross_entropy(model(images), labels.to(loop.device))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss * scale).backward()  # small gradients vanish in fp16 without it
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        if moved:
            optimizer.step()
    return losses


def _apart(losses: list[float], truth: list[float]) -> list[float]:
    """The relative distance of each pair; infinite where a loss is not a number."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)]
    return [error if math.isfinite(error) else math.inf for error in apart]


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
