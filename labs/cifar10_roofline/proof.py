"""What shows that a fast training step trains the same network as the plain one.

The losses of the first steps, and how far these moved the weights, are compared with those of fp64
from the same state on the same images. What the plain step loses against it at the same precision
says how much may differ. The loss must fall, and every weight must have a gradient.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labs.cifar10_roofline.step import Batch, Training, Variant
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

FIRST_STEPS = 3
"""Later ones amplify the rounding of earlier ones."""
MOST_TIMES = 3.0
"""The plain step's error at the same precision, of which the fast one may have this many."""
LOSS_FLOOR, MOVE_FLOOR = 2.0**-10, 2.0**-4
"""Relative: by luck the plain step may be nearer to the truth. A fresh ResNet amplifies rounding:
on digits plain fp32 is 0.4% from fp64's first gradient and channels-last 1.8%, since in an even
background many ReLUs switch together; after three steps they are 11% and 22% from its movement."""
MOST_MOVED = 0.7
"""However much the plain step loses: weights at rest are at 1, another direction at 1.4."""
LOSSES = f"the worst loss of the first {FIRST_STEPS} steps"
LEAST_STEPS = 8
"""Of which the mean loss at the beginning and at the end can be compared."""


@dataclass
class First:
    """What the first steps saw and did."""

    state: dict[str, Any]
    """Before them."""
    batches: list[Batch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    """After each of them."""

    def see(self, training: Training, images: Tensor, labels: Tensor, loss: Tensor) -> None:
        """To be called after every step."""
        if len(self.batches) < FIRST_STEPS:
            self.batches.append((images.clone(), labels.clone()))
            self.losses.append(loss)
            self.weights.append(_copies(training))


def _copies(training: Training) -> list[Tensor]:
    return [p.detach().clone() for p in training.model.parameters()]


def of_training(model: nn.Module, trained: Training, first: First, losses: list[float]) -> Parity:
    """The verdict.

    Args:
        model: the network; its weights do not matter.
        trained: after its last step.
        losses: of all steps of this run.
    """
    precision = trained.variant.precision
    truth = _plain(model, "fp64", trained, first)
    plain = _plain(model, precision, trained, first)
    own = [float(loss) for loss in first.losses], first.weights
    set_arithmetic(precision)
    start = [first.state["model"][name] for name, _ in trained.model.named_parameters()]
    errors, lost = _distances(own, truth, start), _distances(plain, truth, start)
    limits = {
        name: min(MOST_TIMES * error + (LOSS_FLOOR if name == LOSSES else MOVE_FLOOR), MOST_MOVED)
        for name, error in lost.items()
    }
    failures = [
        f"{name} is {error:.1e} from fp64's, {limits[name]:.1e} allowed"
        for name, error in errors.items()
        if not error <= limits[name]
    ]
    if first.state["step"] == 0:  # a resumed one may have learned all there is
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
    measures["weights without a gradient"] = {"error": bare, "allowed": 0}
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=len(first.batches[0][1]),
        reference=f"fp64; the losses of plain {precision} are {lost[LOSSES]:.1e} from it",
        measures=measures,
    )


_Steps = tuple[list[float], list[list[Tensor]]]
"""Losses, and the weights after each step."""


def _plain(model: nn.Module, precision: str, trained: Training, first: First) -> _Steps:
    set_arithmetic("fp32" if precision == "fp64" else precision)
    torch.backends.cudnn.benchmark = False  # a search would take longer than these steps
    plain = Training(model, Variant(precision), trained.problem, trained.device)
    plain.load(first.state)
    losses, weights = [], []
    for batch in first.batches:
        losses.append(float(plain.step(*batch)))
        weights.append(_copies(plain))
    return losses, weights


def _distances(one: _Steps, truth: _Steps, start: list[Tensor]) -> dict[str, float]:
    """Of the losses, and of the weights' movement in the first step and in all; relative."""
    losses = max(abs(a - b) for a, b in zip(one[0], truth[0], strict=True)) / abs(truth[0][0])
    found = {LOSSES: losses if math.isfinite(losses) else math.inf}
    for count in sorted({1, len(truth[1])}):
        pairs = list(zip(one[1][count - 1], truth[1][count - 1], start, strict=True))
        apart = sum(float((a - b).square().sum()) for a, b, _ in pairs)
        way = sum(float((b - s).square().sum()) for _, b, s in pairs)
        found[f"the movement of the weights in {count} step{'s' * (count > 1)}"] = (
            math.sqrt(apart / way) if way else math.inf
        )
    return found


def _not_falling(losses: list[float]) -> list[str]:
    if len(losses) < LEAST_STEPS:
        return []
    quarter = len(losses) // 4
    begin, end = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
    return [] if end < begin else [f"the loss does not fall: {begin:.4f} to {end:.4f}"]


def _finite(value: float) -> float | None:
    """JSON has no NaN: null is an infinite error."""
    return value if math.isfinite(value) else None
