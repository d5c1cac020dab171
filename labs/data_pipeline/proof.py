"""The audit of a rung: does its timed run train as the plain loop does (reference.py)?

From the rung's own process come the loss of every step, the numbers of the images that each step
had, parts of some batches as the network got them, and the final weights. The parts are drawn at
random after their steps, and have to be the plain loop's inputs. Each epoch has every image of its
order once. The plain loop then trains on the same batches in fp32: losses and movements have to be
its own.

Where a rung is further off than FLOORS, the plain loop trains twice more, at the rung's precision
and in both memory formats, whose products round differently: a rung may be MULTIPLE times as far
off. Adam carries roundings on, and ResNet-50's norms amplify them. So the later losses of ResNet-50
show only coarse faults, those of the small network also fine ones.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from labs.data_pipeline import reference
from labs.data_pipeline.loop import Loop, Step
from labs.data_pipeline.reference import Asked, Images, Trained
from workshop import results
from workshop.results import Parity

FLOORS = {"loss": 1e-4, "movement": 0.01, "direction": 0.02}
"""Errors that are always allowed: of a loss as a share of the first one, of how far a weight has
moved, and of its direction. In the two memory formats, 32 steps of the small network (batch 64) are
up to 3e-5, 0.003 and 0.06 apart, 200 steps (batch 8) 0.016, 0.015 and 0.4."""
FP16_FLOOR = 2.0**-10
"""Added to a loss in fp16."""
MULTIPLE = 3.0
MOST = 0.25
"""The largest error of a loss or a movement that is ever allowed."""
INPUT_ROUNDING = 4e-6
"""The largest error of an input, which is at most 2.7."""
MOST_SKIPPED = 16
"""Steps that a loss scale may leave out: it starts high. ResNet-50 in fp16 skips more than three on
an H200."""
KEPT, PART = 8, 8
"""Steps whose inputs are compared, and images of each."""
OWN_ORDER = ("webdataset",)
"""Readers that shuffle by themselves."""
LAYOUTS = (torch.contiguous_format, torch.channels_last)
SHOWN = 3
"""Measures that a record keeps beside the loss: those nearest to their limits."""
Errors = tuple[float, float]
"""An error, and what is allowed."""


@dataclass
class Part:
    """Some images of a step's batch, as the network got them."""

    epoch: int
    indices: Tensor
    inputs: Tensor
    labels: Tensor


@dataclass
class Seen:
    """The course of a rung, taken from its loop while it ran."""

    loop: Loop
    losses: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    """fp16's loss scale after each step."""
    delivered: list[list[Tensor]] = field(default_factory=list)
    """The images' numbers of each step, for each epoch."""
    parts: list[Part] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step, on the CPU."""

    def __post_init__(self) -> None:
        self._chance = random.SystemRandom()
        self.first_scale = self.loop.scaler.get_scale()

    def see(self, epoch: int, step: Step) -> None:
        """To be called after every step; does not wait for the device."""
        if epoch == len(self.delivered):
            self.delivered.append([])
        self.delivered[epoch].append(step.indices)
        if self.loop.settings.amp:
            scale = self.loop.scaler._get_scale_async()  # get_scale waits
            assert scale is not None
            self.scales.append(scale.clone())
        # Vitter's algorithm R: in the end each step has been kept with the same chance.
        number = len(self.losses)
        self.losses.append(step.loss)
        place = number if number < KEPT else self._chance.randrange(number + 1)
        if place < KEPT:
            start = self._chance.randrange(max(1, len(step.indices) - PART + 1))
            kept = (step.indices, step.inputs, step.labels)
            part = Part(epoch, *(tensor[start : start + PART].clone() for tensor in kept))
            self.parts[place : place + 1] = [part]

    def end(self) -> None:
        """To be called after the last step, before the loop trains anything else."""
        self.weights = {
            name: weight.detach().cpu().clone()
            for name, weight in self.loop.model.named_parameters()
        }


def of_run(seen: Seen, asked: Asked, folder: Path | None = None) -> Parity:
    """The verdict on a run.

    Args:
        asked: what it had to train.
        folder: keeps the plain loop's trainings for other runs on the same batches.
    """
    torch.backends.cudnn.benchmark = False  # a search would take longer than these steps
    images, measures = Images(asked), dict[str, Errors]()
    failures = _other_order(seen, asked, images) + _other_images(seen, images)
    moves = [moves for _, moves in _scales(seen)]
    if moves.count(False) > MOST_SKIPPED or not any(moves):
        failures.append(f"{moves.count(False)} of {len(moves)} steps moved no weight")
    if not failures:
        measures = _measure(seen, asked, images, folder)
        failures = [
            f"{name}: {error:.1e} from the plain loop's, {allowed:.1e} allowed"
            for name, (error, allowed) in measures.items()
            if not error <= allowed
        ]
    ordered = sorted(measures, key=lambda name: _share(measures[name]))
    shown = dict.fromkeys([*[*measures][:1], *ordered[-SHOWN:]])  # the loss is the first
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=asked.batch_size,
        reference="PNG files by PIL and a plain loop in fp32, in this process",
        measures={
            name: {"error": _finite(measures[name][0]), "allowed": measures[name][1]}
            for name in shown
        },
    )


def _other_order(seen: Seen, asked: Asked, images: Images) -> list[str]:
    """Each epoch's images against its order: the same, one after the other, or for a loader in
    OWN_ORDER each at most once."""
    failures = []
    if len(seen.delivered) != asked.epochs:
        failures.append(f"{len(seen.delivered)} epochs for {asked.epochs}")
    for epoch, steps in enumerate(seen.delivered):
        if wrong := sum(len(indices) != asked.batch_size for indices in steps):
            failures.append(f"epoch {epoch}: {wrong} batches have another size")
        found = torch.cat(steps).cpu()
        if twice := len(found) - len(found.unique()):
            failures.append(f"epoch {epoch}: {twice} images come twice")
        wanted = images.drawn(epoch)[0][: images.steps * asked.batch_size]
        if len(found) != len(wanted):
            failures.append(f"epoch {epoch}: {len(found):,} images for {len(wanted):,}")
        elif seen.loop.settings.reader not in OWN_ORDER and not torch.equal(found, wanted):
            failures.append(f"epoch {epoch}: the images come in another order")
    return failures


def _other_images(seen: Seen, images: Images) -> list[str]:
    failures = []
    for part in seen.parts:
        inputs, labels = images.batch(part.epoch, part.indices.tolist())
        apart = (part.inputs.cpu() - inputs).abs().flatten(1).amax(1)
        where = f"epoch {part.epoch}: {{}} of {len(labels)} {{}} of a batch are others"
        if wrong := int((~(apart <= INPUT_ROUNDING)).sum()):
            failures.append(where.format(wrong, "inputs"))
        if wrong := int((part.labels.cpu() != labels).sum()):
            failures.append(where.format(wrong, "labels"))
    return failures


def _scales(seen: Seen) -> list[tuple[float, bool]]:
    """Each step's loss scale, and whether the step moved the weights: one that overflows halves the
    scale instead."""
    after = [float(scale) for scale in seen.scales] or [seen.first_scale] * len(seen.losses)
    before = [seen.first_scale, *after[:-1]]
    return [(scale, then >= scale) for scale, then in zip(before, after, strict=True)]


def _measure(seen: Seen, asked: Asked, images: Images, folder: Path | None) -> dict[str, Errors]:
    batches = [(i, step.tolist()) for i, steps in enumerate(seen.delivered) for step in steps]
    scales = _scales(seen)
    facts = f"{asked} {hashlib.sha256(f'{batches} {scales}'.encode()).hexdigest()}"

    def plain(precision: str, layout: torch.memory_format) -> Trained:
        name = hashlib.sha256(f"{facts} {precision} {layout}".encode()).hexdigest()
        path = folder and folder / f"plain_{name[:16]}.pt"
        if path and path.exists():
            return Trained(**torch.load(path, weights_only=True))
        trained = reference.train(asked, images, batches, scales, precision, layout)
        if path:
            with results.atomic_path(path) as temporary:
                torch.save(vars(trained), temporary)
        return trained

    first = reference.network(asked, images.classes)
    moved = {
        name: seen.weights[name] - weight.detach() for name, weight in first.named_parameters()
    }
    found = Trained(torch.stack(seen.losses).float().cpu(), moved)
    truth = plain("fp32", LAYOUTS[0])
    measures = _compare(found, truth, [], asked.precision)
    if any(_share(one) > 1 for one in measures.values()):
        others = [plain(asked.precision, layout) for layout in LAYOUTS]
        measures = _compare(found, truth, others, asked.precision)
    return measures


def _compare(
    found: Trained, truth: Trained, others: Sequence[Trained], precision: str
) -> dict[str, Errors]:
    """The errors of a training and what is allowed, which the plain loop's others widen: those of
    their losses so far, and of their furthest weight, since which one is driven off is luck."""
    floor = FLOORS["loss"] + (FP16_FLOOR if precision == "fp16" else 0.0)
    lost = [torch.zeros_like(truth.losses)]
    lost += [_losses_apart(one, truth).cummax(0).values for one in others]
    allowed = (MULTIPLE * torch.stack(lost).amax(0) + floor).clamp(max=MOST)
    apart = _losses_apart(found, truth)
    step = int((apart / allowed).nan_to_num(nan=math.inf).argmax())
    measures = {f"the loss of step {step + 1}": (float(apart[step]), float(allowed[step]))}
    for what, distance, most in (
        ("movement", _length_apart, MOST),
        ("direction", _direction_apart, math.inf),
    ):
        names = [*truth.moved]
        own = [distance(one.moved[name], truth.moved[name]) for one in others for name in names]
        limit = min(MULTIPLE * max(own, default=0.0) + FLOORS[what], most)
        for name in names:
            error = distance(found.moved[name], truth.moved[name])
            measures[f"the {what} of {name}"] = error, limit
    return measures


def _losses_apart(found: Trained, truth: Trained) -> Tensor:
    return (found.losses - truth.losses).abs() / truth.losses[0]


def _length_apart(found: Tensor, truth: Tensor) -> float:
    return abs(float(found.norm() / truth.norm()) - 1)


def _direction_apart(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def _share(errors: Errors) -> float:
    """The error as a share of what is allowed; infinite where it is not a number."""
    share = errors[0] / errors[1]
    return math.inf if math.isnan(share) else share


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
