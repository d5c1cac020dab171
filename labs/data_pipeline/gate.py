"""The gate, the judge's side: a rung trains as the plain loop does (reference.py).

When the clock starts the judge names the timed epochs, and the steps whose inputs it wants to see,
in part. When it stops there come the loss of every step and the size of every weight. Then the
judge asks for the numbers of the images that each step had, the parts, and the final weights. The
parts have to be the plain loop's inputs. Each epoch has every image of its order once. The plain
loop then trains on the same batches in fp32: losses and movements have to be its own.

Where a rung is further off than FLOORS, the plain loop trains twice more, at the rung's precision
and in both memory formats, whose products round differently: a rung may be MULTIPLE times as far
off. Adam carries roundings on, and ResNet-50's norms amplify them. So the later losses of ResNet-50
show only coarse faults, those of the small network also fine ones.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from labs.data_pipeline import reference
from labs.data_pipeline.reference import Asked, Images, Trained
from workshop import results
from workshop.errors import OutOfMemory
from workshop.judge import turn
from workshop.judge.pipe import Closed, Message
from workshop.judge.turn import Shown
from workshop.judge.wire import expected
from workshop.labs import LabRun
from workshop.results import Parity
from workshop.run import trainer
from workshop.run.precision import set_arithmetic

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
SIZE_ROUNDING = 1e-9
"""The largest error of a weight's norm, as a share: it is a sum in fp64, in any order."""
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


class Course:
    """A rung's run, as its process shows it.

    Args:
        stopped: what came when the clock stopped.

    Raises:
        Closed: it is no run.
    """

    def __init__(self, stopped: Mapping[str, Tensor], shown: Message) -> None:
        self.tensors = shown.tensors
        with expected():
            sizes = [[int(size) for size in steps] for steps in shown.values["sizes"]]
            self.losses, self.norms = (stopped[name].cpu() for name in ("losses", "norms"))
            scales = self.tensors["scales"].tolist()
            self.scales = [(scale, then >= scale) for scale, then in itertools.pairwise(scales)]
            """Each step's loss scale, and whether the step moved the weights: one that overflows
            halves the scale instead."""
            steps = iter(self.tensors["delivered"].long().split([*itertools.chain(*sizes)]))
            self.delivered = [[next(steps) for _ in epoch] for epoch in sizes]
            """The images' numbers of each step, for each epoch."""
            if not self.losses.shape == (len(self.scales),) == (sum(map(len, sizes)),):
                raise ValueError(f"{len(self.losses)} losses of {sum(map(len, sizes))} steps")


class PlainLoop:
    """The plain loop, whose trainings are kept: rungs with the same batches share them."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.images = asked, Images(asked)
        self._trained: dict[object, Trained] = {}

    def train(self, course: Course, precision: str, layout: torch.memory_format) -> Trained:
        """Trains on the course's batches, with its loss scales."""
        epochs = zip(self.asked.numbers, course.delivered, strict=True)
        batches = tuple((i, tuple(step.tolist())) for i, steps in epochs for step in steps)
        key = batches, tuple(course.scales), precision, layout
        if key not in self._trained:
            with trainer.memory_failure_as(lambda asked: OutOfMemory(f"the plain loop: {asked}")):
                self._trained[key] = reference.train(
                    self.asked, self.images, batches, course.scales, precision, layout
                )
            torch.cuda.empty_cache()  # the next rung needs the device's memory
        return self._trained[key]


class Check(turn.Check):
    """Compares a rung with the plain loop.

    Args:
        run: the rung's record, with its options.
    """

    def __init__(self, plain: PlainLoop, run: LabRun) -> None:
        self._plain, self._asked, self._images = plain, plain.asked, plain.images
        self._precision = str(run.options["precision"])
        self._own_order = run.options["reader"] in OWN_ORDER
        self._kept: dict[int, int] = {}
        self._stopped: Mapping[str, Tensor] = {}

    def draw(self) -> Shown:
        """The number of the first timed epoch; of some steps, and the first image of the part that
        is to be kept. Raises Closed: they are known already."""
        if self._kept:
            raise Closed("the process asked for its epochs twice")
        chance, steps = random.SystemRandom(), self._images.steps
        numbers = range(steps, steps * self._asked.epochs)
        most = max(1, self._asked.batch_size - PART + 1)
        chosen = sorted(chance.sample(numbers, min(KEPT, len(numbers))))
        self._kept = {number: chance.randrange(most) for number in chosen}
        return {}, {"first": self._asked.first, "kept": [*self._kept.items()]}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._stopped = proof

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        set_arithmetic("fp32")
        torch.backends.cudnn.benchmark = False  # a search would take longer than these steps
        course, measures = Course(self._stopped, ask()), dict[str, Errors]()
        failures = self._other_order(course.delivered) or self._other_images(course)
        moves = [moves for _, moves in course.scales]
        if moves.count(False) > MOST_SKIPPED or not any(moves):
            failures.append(f"{moves.count(False)} of {len(moves)} steps moved no weight")
        if not failures:
            measures = self._measure(course)
            failures = [
                f"{name} is off by {error:.1e}, {allowed:.1e} allowed"
                for name, (error, allowed) in measures.items()
                if not error <= allowed
            ]
        ordered = sorted(measures, key=lambda name: _share(measures[name]))
        shown = dict.fromkeys([*[*measures][:1], *ordered[-SHOWN:]])  # the loss is the first
        run.gate = Parity(
            status="fail" if failures else "pass",
            failures=failures,
            batch_size=self._asked.batch_size,
            reference="PNG files by PIL and a plain loop in fp32",
            measures={
                name: dict(
                    zip(("error", "allowed"), results.finite([*measures[name]]), strict=True)
                )
                for name in shown
            },
        )

    def _other_order(self, delivered: list[list[Tensor]]) -> list[str]:
        """Sentences about epochs whose images are not those of their order, one after the other, or
        for a loader in OWN_ORDER each at most once."""
        failures, batch_size = [], self._asked.batch_size
        if len(delivered) != self._asked.epochs:
            return [f"{len(delivered)} epochs for {self._asked.epochs}"]
        for epoch, (number, steps) in enumerate(zip(self._asked.numbers, delivered, strict=True)):
            found = torch.cat([torch.empty(0, dtype=torch.long), *steps])
            order = self._images.drawn(number)[0]
            wanted = order[: self._images.steps * batch_size]
            own = self._own_order
            if wrong := sum(len(indices) != batch_size for indices in steps):
                failures.append(f"epoch {epoch}: {wrong} batches have another size")
            if twice := len(found) - len(found.unique()):
                failures.append(f"epoch {epoch}: {twice} images come twice")
            if len(found) != len(wanted):
                failures.append(f"epoch {epoch}: {len(found):,} images for {len(wanted):,}")
            elif not (torch.isin(found, order).all() if own else torch.equal(found, wanted)):
                failures.append(f"epoch {epoch}: the images come in another order, or are others")
        return failures

    def _other_images(self, course: Course) -> list[str]:
        """Sentences about parts that are not the plain loop's. Raises Closed: one is missing."""
        failures = []
        for step, start in self._kept.items():
            epoch, place = divmod(step, self._images.steps)
            indices = course.delivered[epoch][place][start : start + PART].tolist()
            inputs, labels = self._images.batch(self._asked.numbers[epoch], indices)
            with expected():
                own = (course.tensors[f"inputs {step}"].view_as(inputs) - inputs).abs()
                others = course.tensors[f"labels {step}"].view_as(labels) != labels
            where = f"step {step + 1}: {{}} of {len(labels)} {{}} of a batch are others"
            if wrong := int((~(own.flatten(1).amax(1) <= INPUT_ROUNDING)).sum()):
                failures.append(where.format(wrong, "inputs"))
            if wrong := int(others.sum()):
                failures.append(where.format(wrong, "labels"))
        return failures

    def _measure(self, course: Course) -> dict[str, Errors]:
        first, moved = reference.network(self._asked, self._images.classes), dict[str, Tensor]()
        later = dict[str, Errors]()
        with expected():
            for (name, weight), norm in zip(first.named_parameters(), course.norms, strict=True):
                last = course.tensors[f"weight {name}"].view_as(weight)
                moved[name] = last - weight.detach()
                change = abs(float(last.double().norm() / norm) - 1)
                later[f"the size of {name} when the clock stopped"] = change, SIZE_ROUNDING
        found = Trained(course.losses, moved)
        truth = self._plain.train(course, "fp32", LAYOUTS[0])
        measures = _compare(found, truth, [], self._precision)
        if any(_share(one) > 1 for one in measures.values()):
            others = [self._plain.train(course, self._precision, layout) for layout in LAYOUTS]
            measures = _compare(found, truth, others, self._precision)
        return measures | later


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
