"""What shows that a fast training step trains the same network as the plain one.

Each of the first steps is done again from the same state on the same images, in fp64 and by the
plain step at the same precision: what the plain step loses says how much may differ. Compared are
the loss and what the step changed: weights, momentum, the norms' statistics; and how far each
weight's momentum moved along fp64's. The loss must fall, and every weight must have a gradient.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labs.cifar10_roofline.step import Batch, Training, Variant
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

FIRST_STEPS = 3
MOST_TIMES = 3.0
"""The plain step's error at the same precision, of which the fast one may have this many."""
LOSS_FLOOR, FLOOR = 2.0**-10, 2.0**-5
"""Relative: by luck the plain step may be nearer to the truth. A fresh ResNet amplifies rounding:
on digits, in whose even background many ReLUs switch together, plain fp32 is 0.5% from fp64's step
and channels-last 2.2%; both are 38% from it in bf16."""
MOST = 1.2
"""However much the plain step loses: another direction is at 1.4. What stays as it is, at 1, is
found by ALONG. A fresh ResNet-34's true step in bf16 is up to 0.89 from fp64's."""
ALONG = 0.35
"""Rounding turns a step, but the part of it along fp64's stays about the plain step's: compared is
the mean of three steps, of each weight. Eager channels-last on an H200, three seeds, two learning
rates: a weight of ResNet-34 at batch 256 differs by up to 0.19 in bf16, 0.03 in fp16; of ResNet-18
at batch 128 by up to 0.05 in bf16. A weight whose gradient is zero, or that is not updated, differs
by 0.63 or more (bf16 at batch 16 on a CPU: 0.63 in ResNet-34, 0.79 in ResNet-18)."""
LOSS, WEIGHTS, MOMENTUM = "the loss", "the weights", "the momentum"
LEAST_STEPS = 8
"""Of which the mean loss at the beginning and at the end can be compared."""


@dataclass
class First:
    """The first steps that moved the weights: with a scaled loss others are left out, which change
    the norms' statistics alone."""

    now: dict[str, Any]
    """The state after the last step."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seen: int = 0
    """Steps, with those that are left out."""

    def see(self, training: Training, images: Tensor, labels: Tensor, loss: Tensor) -> None:
        """To be called after every step."""
        if len(self.batches) == FIRST_STEPS:
            return
        self.seen += 1
        start, self.now = self.now, copy.deepcopy(training.state())
        if not any(_moved(_parts(self.now)[WEIGHTS], _parts(start)[WEIGHTS])):
            return
        self.starts.append(start)
        self.ends.append(self.now)
        self.batches.append((images.clone(), labels.clone()))
        self.losses.append(float(loss))


def _parts(state: dict[str, Any]) -> dict[str, list[Tensor]]:
    """What a step changes."""
    network = state["model"]
    statistics = [name for name in network if name.endswith(("running_mean", "running_var"))]
    counters = [name for name in network if name.endswith("num_batches_tracked")]
    return {
        WEIGHTS: [network[name] for name in network if name not in {*statistics, *counters}],
        MOMENTUM: [own["momentum_buffer"] for own in state["optimizer"]["state"].values()],
        "the norms' statistics": [network[name] for name in statistics],
    }


def of_training(model: nn.Module, trained: Training, first: First, losses: list[float]) -> Parity:
    """The verdict.

    Args:
        model: the network; its weights do not matter.
        trained: after its last step.
        losses: of all steps of this run.
    """
    if not first.batches:
        return Parity(status="fail", failures=["no step moved the weights"])
    precision = trained.variant.precision
    truth = _plain(model, "fp64", trained, first)
    plain = _plain(model, precision, trained, first)
    set_arithmetic(precision)
    own = list(zip(first.losses, first.ends, strict=True))
    errors, lost = (_distances(steps, truth, first.starts) for steps in (own, plain))
    limits = {
        name: min(MOST_TIMES * error + (LOSS_FLOOR if name == LOSS else FLOOR), MOST)
        for name, error in lost.items()
    }
    failures = [
        f"{name} of the first steps: {error:.1e} from fp64's, {limits[name]:.1e} allowed"
        for name, error in errors.items()
        if not error <= limits[name]
    ]
    ours, plainly = (_along(steps, truth, first.starts) for steps in (own, plain))
    apart = max(map(_apart, ours, plainly))
    if apart > ALONG:
        failures.append(
            f"a weight's momentum of the first steps: along fp64's {apart:.2f} of its way from the "
            f"plain one's, {ALONG} allowed"
        )
    if trained.done == len(losses):  # a resumed one may have learned all there is
        failures += _not_falling(losses)
    parameters = list(trained.model.parameters())
    reached = sum(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters)
    bare = len(parameters) - reached
    if bare:
        failures.append(f"{bare} of {len(parameters)} weights get no gradient")
    measures: dict[str, dict[str, float | str | None]] = {
        name: {"error": _finite(error), "allowed": _finite(limits[name])}
        for name, error in errors.items()
    }
    measures["a weight's momentum, along"] = {"error": _finite(apart), "allowed": ALONG}
    measures["weights without a gradient"] = {"error": bare, "allowed": 0}
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=len(first.batches[0][1]),
        reference=f"fp64; plain {precision}'s loss is {lost[LOSS]:.1e} from it",
        measures=measures,
    )


_Steps = list[tuple[float, dict[str, Any]]]
"""Of each step, its loss and the state after it."""


def _plain(model: nn.Module, precision: str, trained: Training, first: First) -> _Steps:
    set_arithmetic("fp32" if precision == "fp64" else precision)
    torch.backends.cudnn.benchmark = False  # a search would take longer than these steps
    plain = Training(model, Variant(precision), trained.problem, trained.device)
    steps = []
    for state, batch in zip(first.starts, first.batches, strict=True):
        plain.load(state)
        loss = float(plain.step(*batch))
        steps.append((loss, copy.deepcopy(plain.state())))
    return steps


def _distances(one: _Steps, truth: _Steps, starts: list[dict[str, Any]]) -> dict[str, float]:
    """The largest of any step: of the loss, and of what changed; relative."""
    found: dict[str, float] = {}
    for (loss, ours), (true_loss, true), start in zip(one, truth, starts, strict=True):
        distances = {LOSS: abs(loss - true_loss) / abs(true_loss)}
        for name, tensors in _parts(true).items():
            apart = sum(_moved(_parts(ours)[name], tensors))
            way = sum(_moved(_parts(start)[name], tensors))
            distances[name] = math.sqrt(apart / way) if way else math.inf
        for name, error in distances.items():
            # A NaN would compare as smaller.
            found[name] = max(found.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return found


def _along(one: _Steps, truth: _Steps, starts: list[dict[str, Any]]) -> list[float]:
    """Of each weight, how far its momentum moved along the true movement, of whose length it is a
    share; the mean of the steps."""
    shares = []
    for (_, ours), (_, true), start in zip(one, truth, starts, strict=True):
        momenta = (_parts(state)[MOMENTUM] for state in (ours, true, start))
        shares.append([_share(*tensors) for tensors in zip(*momenta, strict=True)])
    return [sum(steps) / len(steps) for steps in zip(*shares, strict=True)]


def _share(ours: Tensor, true: Tensor, start: Tensor) -> float:
    way = true.double() - start
    length = float(way.square().sum())
    return float(((ours.double() - start) * way).sum()) / length if length else 1.0


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a - b) else math.inf


def _moved(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """The squared distance of each pair."""
    return [float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)]


def _not_falling(losses: list[float]) -> list[str]:
    if len(losses) < LEAST_STEPS:
        return []
    quarter = len(losses) // 4
    begin, end = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
    return [] if end < begin else [f"the loss does not fall: {begin:.4f} to {end:.4f}"]


def _finite(value: float) -> float | None:
    """JSON has no NaN: null is an infinite error."""
    return value if math.isfinite(value) else None
