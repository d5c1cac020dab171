"""The audit of a lab's training: some of its steps, done again one at a time.

A lab trains too long to be trained twice, so four of its steps are done again: the first, one that
the judge draws, and the last two, which lead to the final weights. The run stops before and after
each and shows its state. Each is done again from the state that the run itself had before it, with
the batch of its number, whatever the run has read. A plain step that shares no code with the run's
gives the gradients: in fp32, and at the run's precision to see what that costs.

The optimizer needs no second run. From the momentum before and after a step follows the gradient
that was added to it, and from both the new weights, at any precision up to roundings of fp32.
"""

import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workshop.gate.audit import sketch
from workshop.gate.outcome import relative_rms
from workshop.gate.parity import ROUNDING_UNITS, Measure, as_recorded, badness
from workshop.results import Parity, Run
from workshop.run.precision import PRECISIONS, set_arithmetic

MOST_TIMES = 3.0
"""The run's error may be this many times the plain step's at the run's precision."""
LOSS_FLOOR = 2.0**-16
"""Relative: what a loss may always be off, beside the roundings of a mean over the batch."""
FLOOR, GRADIENT_FLOOR = 2.0**-5, 2.0**-4
"""Relative: what a norm's statistics, and gradients, may always be off. A fresh ResNet amplifies
rounding: on digits, in whose even background many ReLUs switch together, channels-last is up to
3.6% from the plain step in fp32, and 4.3% in one tensor (ResNet-18, five seeds)."""
MOST = 1.2
"""However much the plain step loses: another direction is at 1.4."""
ALONG = 0.35
"""Rounding turns a gradient, but its part along the true one stays about the plain step's: the mean
of the steps, for each tensor. Eager channels-last on an H200, three seeds, two learning rates: a
weight of ResNet-34 at batch 256 differs by up to 0.19 in bf16, 0.03 in fp16; of ResNet-18 at batch
128 by up to 0.05 in bf16. A weight whose gradient is zero differs by 0.63 or more."""
DECAY = 0.5
"""The share of the weight decay that may be missing or there twice; in fp32 true runs miss 0.4%."""
NEGLIGIBLE = 1e-5
"""A tensor whose gradient is a smaller share of the norm of all is not compared alone: roundings
are all it has, as a bias before a batch norm."""
UPDATE_ROUNDINGS = 2 * 2.0**-24
"""An update's error that is allowed, as a share of the weight."""
RATE_ROUNDINGS = 2.0**-18
"""The same as a share of the movement, in addition. A rate kept in fp32 is 2^-24 off."""


@dataclass(frozen=True)
class State:
    """All that a step changes, fp32 on the CPU by the names of the network's tensors."""

    weights: dict[str, Tensor]
    momentum: dict[str, Tensor]
    """Zeros where the optimizer has none yet."""
    statistics: dict[str, Tensor]
    """The batch norms' running means and variances."""
    loss_scale: float

    @staticmethod
    def of(shown: Mapping[str, Tensor], loss_scale: float) -> "State":
        def part(kind: str) -> dict[str, Tensor]:
            names = [name for name in shown if name.startswith(kind)]
            return {name.removeprefix(kind): shown[name].float() for name in names}

        return State(part("weight "), part("momentum "), part("statistic "), loss_scale)


def shown(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    statistics: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a training as a message has it: fp32 tensors, and values."""
    tensors = {}
    for name, weight in model.named_parameters():
        name = name.removeprefix("module.")  # DistributedDataParallel's
        found = optimizer.state[weight].get("momentum_buffer")
        tensors[f"weight {name}"] = _kept(weight)
        tensors[f"momentum {name}"] = _kept(torch.zeros_like(weight) if found is None else found)
    for name, buffer in model.named_buffers():
        if statistics and name.endswith(("running_mean", "running_var")):
            tensors[f"statistic {name.removeprefix('module.')}"] = _kept(buffer)
    return tensors, {"loss_scale": scaler.get_scale()}


def shapes_of(model: nn.Module, statistics: bool = True) -> dict[str, torch.Size]:
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tensors, _ = shown(model, optimizer, scaler, statistics)
    return {name: tensor.shape for name, tensor in tensors.items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum, written out."""

    momentum: float
    rate: Callable[[int], float]
    """The learning rate of a step, by its number."""
    weight_decay: float = 0.0
    nesterov: bool = False

    def gradient(self, name: str, before: State, after: State) -> Tensor:
        """The loss's gradient that a step added to the momentum, fp64."""
        added = after.momentum[name].double() - self.momentum * before.momentum[name].double()
        return added - self.weight_decay * before.weights[name].double()

    def movement(self, name: str, before: State, after: State, number: int) -> Tensor:
        """How far the momentum moves the weight, fp64."""
        along = after.momentum[name].double()
        if self.nesterov:
            added = along - self.momentum * before.momentum[name].double()
            along = added + self.momentum * along
        return -self.rate(number) * along


@dataclass(frozen=True)
class StepResult:
    """The effect of one step: loss, sketches of the gradients, changes of the norms' statistics."""

    loss: float
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """A step of the run, counted from 0."""

    number: int
    before: State
    found: StepResult
    updates: dict[str, Measure]
    """The distance of each weight's movement from the one that its momentum asks for."""


_Results = Sequence[StepResult]
Plain = Callable[[State, int, str], tuple[float, dict[str, Tensor], dict[str, Tensor]]]
"""A plain step from a state, on the batch of that number, at a precision: its loss, the gradients
and the norms' new statistics."""


@contextmanager
def plain_arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """A plain forward pass at a precision; the process keeps its switches, also for the backward
    pass. To try all algorithms of a convolution would take longer than one step."""
    set_arithmetic(precision)
    torch.backends.cudnn.benchmark = False
    with PRECISIONS[precision].autocast(device.type):
        yield


class Watch:
    """The judge's side: it draws the steps that are compared, and keeps them.

    Args:
        shapes: of the tensors that the run has to show.
        chance: draws a step.
        total: the number of the run's last step plus 1.
        first: the number of the run's first step.
        every: the run also stops each time that it has done this number of steps.
    """

    def __init__(
        self,
        sgd: Sgd,
        shapes: Mapping[str, torch.Size],
        chance: random.Random,
        total: int,
        first: int = 0,
        every: int = sys.maxsize,
    ) -> None:
        self._sgd, self._shapes, self._first, self._total = sgd, shapes, first, total
        self._every = every
        self._wanted = {chance.randrange(first, total), total - 2, total - 1}
        self.done = self.until = first
        """How many steps were done when the run last stopped, and how many will be when it stops
        again."""
        self.now: State | None = None
        """The newest state that was shown."""
        self.steps: list[Step] = []
        self.failures: list[str] = []
        self._losses: list[float] = []

    def take(self, proof: Mapping[str, Tensor]) -> None:
        """Keeps the losses of the steps since the run last stopped, which have come with its times:
        each depends on all steps before."""
        self._losses += proof.get("losses", torch.zeros(0)).flatten().tolist()

    def see(self, ask: Callable[..., Any], run: Run) -> bool:
        """Looks at a run that has stopped; whether there is nothing more to look at."""
        if run.status == "interrupted":
            return True
        for what, found in (("done", run.step_ms), ("shown the losses of", self._losses)):
            done = self._first + len(found)
            if done != self.until:
                self.failures.append(
                    f"it has {what} {done} steps where {self.until} were asked for"
                )
                return True
        answer = ask(show="state")
        shapes = {name: tensor.shape for name, tensor in answer.tensors.items()}
        scale = answer.values.get("loss_scale")
        if shapes != self._shapes or not isinstance(scale, float):
            self.failures.append("its weights, momentum and statistics are not the network's")
            return True
        before, self.now = self.now, State.of(answer.tensors, scale)
        wanted = done - 1 in self._wanted or not self.steps
        # A scaled loss that overflows leaves the step out and lowers the scale.
        if before and wanted and self.now.loss_scale >= before.loss_scale:
            self.steps.append(self._step(done - 1, self._losses[-1], before, self.now))
        self.done, later = done, (done // self._every + 1) * self._every
        stops = [stop for number in self._wanted for stop in (number, number + 1) if stop > done]
        self.until = min([later, *stops]) if self.steps else done + 1
        return done == self._total

    def verdict(
        self, plain: Plain, precision: str, batch_size: int, weight_decay: float = 0.0
    ) -> Parity:
        found = audit(self.steps, plain, precision, batch_size, weight_decay)
        found.failures += self.failures
        found.status = "fail" if found.failures else "pass"
        return found

    def _step(self, number: int, loss: float, before: State, after: State) -> Step:
        gradients, updates = {}, {}
        for name in before.weights:
            gradients[name] = sketch(self._sgd.gradient(name, before, after), name)
            updates[name] = self._update(name, before, after, number)
        found = StepResult(loss, gradients, _changes(before, after.statistics))
        return Step(number, before, found, updates)

    def _update(self, name: str, before: State, after: State, number: int) -> Measure:
        old, new = before.weights[name].double(), after.weights[name].double()
        movement = self._sgd.movement(name, before, after, number)
        error, size = float((new - old - movement).norm()), float(movement.norm())
        allowed = UPDATE_ROUNDINGS * float(old.norm() + size) + RATE_ROUNDINGS * size
        return Measure(error / size, allowed / size, 0.0) if size else Measure(error, 1e-30, 0.0)


def _changes(before: State, after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name].double() - old.double() for name, old in before.statistics.items()}


def audit(
    steps: Sequence[Step],
    plain: Plain,
    precision: str,
    batch_size: int,
    weight_decay: float = 0.0,
) -> Parity:
    """The verdict on the steps of a run at a precision."""
    if not steps:
        return Parity(status="fail", failures=["no step moved the weights"])
    true = [_again(step, plain, "fp32") for step in steps]
    own = true if precision == "fp32" else [_again(step, plain, precision) for step in steps]
    same = _SameSteps([step.found for step in steps], true, own)
    roundings = ROUNDING_UNITS * PRECISIONS[precision].unit_roundoff / math.sqrt(batch_size)
    measures = {
        "loss": same.within(same.furthest(_loss_distance), LOSS_FLOOR + roundings),
        "gradients": same.within(
            same.furthest(lambda one, true: _distance(one.gradients, true.gradients)),
            GRADIENT_FLOOR,
        ),
    }
    if weight_decay:
        weights = [
            {name: sketch(weight, name) for name, weight in step.before.weights.items()}
            for step in steps
        ]
        missing = functools.partial(_missing_decay, weights, true, weight_decay)
        lost = missing(own)
        measures["weight decay"] = Measure(missing(same.found), MOST_TIMES * lost + DECAY, lost)
    for group in _by_tensor(steps, same):
        if group:  # of each kind the worst is shown
            worst = max(group, key=lambda name: badness(group[name]))
            measures[worst] = max(measures.get(worst, group[worst]), group[worst], key=badness)
    failures = [
        f"{name}: {measure.error:.1e} from the plain step's, {measure.allowed:.1e} allowed"
        for name, measure in measures.items()
        if not measure.passed
    ]
    numbers = ", ".join(str(step.number + 1) for step in steps)
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=batch_size,
        reference=f"plain steps {numbers} in fp32",
        measures={name: as_recorded(measure) for name, measure in measures.items()},
    )


def _again(step: Step, plain: Plain, precision: str) -> StepResult:
    loss, gradients, statistics = plain(step.before, step.number, precision)
    sketches = {name: sketch(gradient.cpu(), name) for name, gradient in gradients.items()}
    after = {name: value.cpu() for name, value in statistics.items()}
    return StepResult(loss, sketches, _changes(step.before, after))


@dataclass(frozen=True)
class _SameSteps:
    """The results of the same steps: the run's, the plain step's in fp32, and the plain step's at
    the run's precision."""

    found: _Results
    true: _Results
    own: _Results

    def within(self, error: Callable[[_Results], float], floor: float) -> Measure:
        own = error(self.own)
        return Measure(error(self.found), min(MOST_TIMES * own + floor, MOST), own)

    def furthest(
        self, distance: Callable[[StepResult, StepResult], float]
    ) -> Callable[[_Results], float]:
        """The largest distance of a step from the true one."""
        return lambda results: max(map(distance, results, self.true))

    def of_all_steps(self, part: str, name: str) -> Callable[[_Results], float]:
        """How far a tensor is from the true one, all steps together."""

        def tensors(results: _Results) -> dict[str, Tensor]:
            return {str(step): getattr(one, part)[name] for step, one in enumerate(results)}

        return lambda results: _distance(tensors(results), tensors(self.true))

    def along(self, name: str, results: _Results) -> float:
        """The part of a tensor's gradient along the true one, as a share of its length: the mean
        of all steps."""
        pairs = [
            (one.gradients[name], true.gradients[name])
            for one, true in zip(results, self.true, strict=True)
        ]
        return sum(float(a @ b / (b @ b)) for a, b in pairs) / len(pairs)


def _by_tensor(steps: Sequence[Step], same: _SameSteps) -> Iterator[dict[str, Measure]]:
    """The measures of each kind, tensor by tensor. A gradient is compared alone where it is more
    than roundings in every step."""
    sizes = [{name: float(g.norm()) for name, g in one.gradients.items()} for one in same.true]
    names = [
        name
        for name in same.true[0].gradients
        if all(step[name] > NEGLIGIBLE * math.hypot(*step.values()) for step in sizes)
    ]
    for what, part, its, floor in (
        ("gradient", "gradients", names, GRADIENT_FLOOR),
        ("change", "statistics", [*same.true[0].statistics], FLOOR),
    ):
        yield {f"{what} of {n}": same.within(same.of_all_steps(part, n), floor) for n in its}
    yield {
        f"part of {name}'s gradient along the true one": Measure(
            _number(abs(same.along(name, same.found) - same.along(name, same.own))), ALONG, 0.0
        )
        for name in names
    }
    for step in steps:
        yield {f"update of {name}": measure for name, measure in step.updates.items()}


def _missing_decay(
    weights: Sequence[dict[str, Tensor]], true: _Results, weight_decay: float, results: _Results
) -> float:
    """The share of the weight decay that is missing. A gradient hardly lies along the weights that
    a norm follows, nor do its roundings, and decay does.

    Args:
        weights: sketches of each step's weights.
    """
    along = asked = 0.0
    for its, one, true_one in zip(weights, results, true, strict=True):
        for name, gradient in true_one.gradients.items():
            weight = its[name]
            along += float((gradient - one.gradients[name]) @ weight)
            asked += weight_decay * float(weight @ weight)
    return _number(abs(along / asked))


def _loss_distance(one: StepResult, true: StepResult) -> float:
    return _number(abs(one.loss - true.loss) / abs(true.loss))


def _distance(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The relative distance of all tensors together; 0 where the true ones are zero."""
    whole, truth = (torch.cat([one[name].flatten() for name in true]) for one in (found, true))
    return _number(relative_rms(whole, truth)) if truth.any() else 0.0


def _number(error: float) -> float:
    """A NaN would compare as smaller."""
    return error if math.isfinite(error) else math.inf
