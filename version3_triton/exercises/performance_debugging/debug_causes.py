"""Causes that a diagnosis may name, each with the answer of a stage's own metrics to it.

No stage has its cause written down here. A cause holds where the metrics show it, and a wrong one
is answered with the metric that contradicts it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from debug_results import COUNTS, METRICS, StageResult

DIFFERS_BY = {"loss_first": 5e-5, "loss_last": 5e-3, "timed_share": 0.5, "logits_error": 100.0}
"""Relative differences from which two stages' metrics count as different: two sums in another order
agree to six digits at first, and drift apart in training. Counts must be equal; else 10%."""
_USUALLY = 0.1
NONE = "none"


@dataclass(frozen=True)
class Sight:
    """A stage beside the healthy one, and the metrics of both; NaN for one that there is none of,
    which compares as false."""

    stage: StageResult
    healthy: StageResult

    @cached_property
    def here(self) -> dict[str, float]:
        return self.stage.metrics()

    @cached_property
    def there(self) -> dict[str, float]:
        return self.healthy.metrics()

    @property
    def tensors(self) -> int:
        gradients = self.stage.run.gradients
        return gradients.tensors_total if gradients else 0

    @property
    def expected_loss(self) -> float:
        """Loss of a model that knows nothing yet: ln(vocabulary)."""
        return math.log(self.stage.run.config["vocab_size"])

    def differs(self, metric: str) -> bool:
        """Whether the two stages differ in the metric; false where there is none."""
        here, there = self.here[metric], self.there[metric]
        if metric in COUNTS:
            return here != there and not math.isnan(here + there)
        return abs(here - there) > DIFFERS_BY.get(metric, _USUALLY) * abs(there)

    def fill(self, answer: str) -> str:
        """A cause's answer with this stage's numbers."""
        differing = [
            f"{name} {self.stage.text(name)} against {self.healthy.text(name)}"
            for name in METRICS
            if self.differs(name)
        ]
        return answer.format(
            here={name: self.stage.text(name) for name in self.here},
            there={name: self.healthy.text(name) for name in self.there},
            tensors=self.tensors,
            expected_loss=self.expected_loss,
            differing=", ".join(differing[:3]),
        )


@dataclass(frozen=True)
class Cause:
    """A fault that a stage may have."""

    clause: str
    answer: str
    """Sentence on the metrics where the cause does not hold, for `Sight.fill`."""
    holds: Callable[[Sight], bool] = lambda _: False
    """Whether the metrics show it."""
    metrics: tuple[str, ...] = ()
    """The metrics that give it away, any one of them."""


_FAULTS = {
    "default_initialisation": Cause(
        "weights start as PyTorch's layers draw them",
        "then the logits would be large from the start. Its first loss is {here[loss_first]}, and "
        "ln(vocabulary) = {expected_loss:.2f} is where a model begins whose weights were drawn "
        "small",
        lambda s: s.here["loss_first"] > 2 * s.expected_loss,
        ("loss_first",),
    ),
    "strides_ignored": Cause(
        "a kernel takes a view for a contiguous tensor",
        "a kernel that reads the wrong elements computes other logits. From the same weights these "
        "are V1's up to {here[logits_error]}",
        lambda s: s.here["logits_error"] > 1e-3,
        ("logits_error", "loss_first"),
    ),
    "clock_does_not_wait": Cause(
        "the clock is read before the work is done",
        "then the steps' times would not add up. They make {here[timed_share]} of the time that "
        "the whole loop took",
        lambda s: s.here["timed_share"] < 0.5,
        ("timed_share", "step_ms", "samples_per_s"),
    ),
    "program_per_element": Cause(
        "a matrix product is cut into one program for each element of the result",
        "a step starts {here[programs]} programs, stage 6's {there[programs]}: a product cut that "
        "small would take many times as many",
        lambda s: s.here["programs"] > 5 * s.there["programs"],
        ("programs",),
    ),
    "severed_gradient": Cause(
        "the backward pass ends at an operation that autograd does not see",
        "the backward pass reached {here[tensors_with_grad]} of its {tensors} tensors",
        lambda s: s.here["tensors_with_grad"] < s.tensors,
        ("tensors_with_grad", "optimizer_state_mb", "backward_ms", "optimizer_ms"),
    ),
}
_RED_HERRINGS = {
    "learning_rate_too_high": Cause(
        "the learning rate is too high",
        "all stages have the same one, and the first loss, here {here[loss_first]}, is taken "
        "before any update",
    ),
    "slow_memory_layout": Cause(
        "a tensor that is not contiguous makes memory slow",
        "a slow layout gives the right numbers late, with the same programs. Here the logits are "
        "off by {here[logits_error]}, and a step starts {here[programs]} programs where stage 6's "
        "starts {there[programs]}",
    ),
    "compilation_timed": Cause(
        "the compilation of the kernels is in the times",
        "all stages warm up before the clock starts. And compiling would make steps longer, while "
        "the times add up to {here[timed_share]} of the loop's",
    ),
    "too_many_launches": Cause(
        "too many small kernels are launched",
        "a step launches {here[launches]} kernels of Triton's, stage 6's {there[launches]}",
    ),
    "activations_not_stored": Cause(
        "activations are computed again rather than stored, a true saving",
        "AdamW's state takes {here[optimizer_state_mb]} MB here, {there[optimizer_state_mb]} in "
        "stage 6: no activation is part of it",
    ),
}


def found_in(sight: Sight) -> str:
    """The cause that a stage's metrics show, or NONE."""
    return next((name for name, cause in _FAULTS.items() if cause.holds(sight)), NONE)


CAUSES = {
    **_FAULTS,
    **_RED_HERRINGS,
    NONE: Cause(
        "nothing is wrong",
        "its metrics are not those of stage 6: {differing}",
        lambda s: found_in(s) == NONE,
    ),
}
REPAIRS = {
    "initialise_all_weights": "default_initialisation",
    "pass_strides_or_make_contiguous": "strides_ignored",
    "wait_for_the_work": "clock_does_not_wait",
    "tiles_or_the_library": "program_per_element",
    "autograd_function": "severed_gradient",
    "nothing": NONE,
}
"""Changes to a script, and the cause that each takes away."""
NO_REPAIRS = {
    "lower_the_learning_rate": "the first loss comes before any update, and would be the same",
    "larger_blocks": "that shares the same elements out among fewer programs: the same ones are "
    "read",
    "more_warm_up_steps": "a step that is only handed over is as quickly handed over after a "
    "hundred others",
    "tune_the_warps": "a program with other warps computes one element still, and reads a row for "
    "it",
    "requires_grad": "requires_grad_() makes the result a leaf: a gradient arrives there, and goes "
    "no further",
}
"""Changes that take away no cause, and why not."""
