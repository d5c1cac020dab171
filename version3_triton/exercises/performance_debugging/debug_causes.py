"""Causes that a diagnosis may name, each with the answer of a stage's own metrics to it.

No stage has its cause written down here. A cause holds where the metrics show it, and a wrong one
is answered with the metric that contradicts it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from debug_results import COUNTS, METRICS, StageResult, shown

DIFFERS_BY = {"loss_first": 5e-5, "loss_last": 5e-3, "timed_share": 0.5, "logits_error": 100.0}
"""Relative differences from which two stages' metrics count as different: two sums in another order
agree to six digits at first, and drift apart in training. Counts must be equal; else 10%."""
_USUALLY = 0.1


@dataclass(frozen=True)
class Sight:
    """A stage beside the healthy one."""

    stage: StageResult
    healthy: StageResult

    def __getitem__(self, metric: str) -> float:
        """The stage's metric; NaN for one that there is none of, which compares as false."""
        value = self.stage.metrics()[metric]
        return math.nan if value is None else value

    def of_healthy(self, metric: str) -> float:
        value = self.healthy.metrics()[metric]
        return math.nan if value is None else value

    def text(self, metric: str) -> str:
        return shown(metric, self.stage.metrics()[metric])

    def healthy_text(self, metric: str) -> str:
        return shown(metric, self.healthy.metrics()[metric])

    def differs(self, metric: str) -> bool:
        """Whether the two stages differ in the metric; false where there is none."""
        here, there = self[metric], self.of_healthy(metric)
        if metric in COUNTS:
            return here != there and not math.isnan(here + there)
        return abs(here - there) > DIFFERS_BY.get(metric, _USUALLY) * abs(there)

    @property
    def tensors(self) -> int:
        gradients = self.stage.run.gradients
        return gradients.tensors_total if gradients else 0

    @property
    def expected_loss(self) -> float:
        """Loss of a model that knows nothing yet: ln(vocabulary)."""
        return math.log(self.stage.run.config["vocab_size"])


def _never(sight: Sight) -> bool:
    return False


@dataclass(frozen=True)
class Cause:
    """A fault that a stage may have.

    Attributes:
        clause: what is wrong.
        answer: what the metrics say where it does not hold.
        holds: whether they show it.
        metrics: those that give it away, any one of them.
    """

    clause: str
    answer: Callable[[Sight], str]
    holds: Callable[[Sight], bool] = _never
    metrics: tuple[str, ...] = ()


_FAULTS = {
    "default_initialisation": Cause(
        "weights start as PyTorch's layers draw them",
        lambda s: (
            f"then the logits would be large from the start. Its first loss is "
            f"{s.text('loss_first')}, and ln(vocabulary) = {s.expected_loss:.2f} is where a model "
            "begins whose weights were drawn small"
        ),
        lambda s: s["loss_first"] > 2 * s.expected_loss,
        ("loss_first",),
    ),
    "strides_ignored": Cause(
        "a kernel takes a view for a contiguous tensor",
        lambda s: (
            "a kernel that reads the wrong elements computes other logits. From the same weights "
            f"these are V1's up to {s.text('logits_error')}"
        ),
        lambda s: s["logits_error"] > 1e-3,
        ("logits_error", "loss_first"),
    ),
    "clock_does_not_wait": Cause(
        "the clock is read before the work is done",
        lambda s: (
            f"then the steps' times would not add up. They make {s.text('timed_share')} of the "
            "time that the whole loop took"
        ),
        lambda s: s["timed_share"] < 0.5,
        ("timed_share", "step_ms", "samples_per_s"),
    ),
    "program_per_element": Cause(
        "a matrix product is cut into one program for each element of the result",
        lambda s: (
            f"a step starts {s.text('programs')} programs, stage 6's "
            f"{s.healthy_text('programs')}: a product cut that small would take many times as "
            "many"
        ),
        lambda s: s["programs"] > 5 * s.of_healthy("programs"),
        ("programs",),
    ),
    "severed_gradient": Cause(
        "the backward pass ends at an operation that autograd does not see",
        lambda s: (
            f"the backward pass reached {s.text('tensors_with_grad')} of its {s.tensors} tensors"
        ),
        lambda s: s["tensors_with_grad"] < s.tensors,
        ("tensors_with_grad", "optimizer_state_mb", "backward_ms", "optimizer_ms"),
    ),
}
_RED_HERRINGS = {
    "learning_rate_too_high": Cause(
        "the learning rate is too high",
        lambda s: (
            "all stages have the same one, and the first loss, here "
            f"{s.text('loss_first')}, is taken before any update"
        ),
    ),
    "slow_memory_layout": Cause(
        "a tensor that is not contiguous makes memory slow",
        lambda s: (
            "a slow layout gives the right numbers late, with the same programs. Here the logits "
            f"are off by {s.text('logits_error')}, and a step starts {s.text('programs')} programs "
            f"where stage 6's starts {s.healthy_text('programs')}"
        ),
    ),
    "compilation_timed": Cause(
        "the compilation of the kernels is in the times",
        lambda s: (
            "all stages warm up before the clock starts. And compiling would make steps longer, "
            f"while the times add up to {s.text('timed_share')} of the loop's"
        ),
    ),
    "too_many_launches": Cause(
        "too many small kernels are launched",
        lambda s: (
            f"a step launches {s.text('launches')} kernels of Triton's, stage 6's "
            f"{s.healthy_text('launches')}"
        ),
    ),
    "activations_not_stored": Cause(
        "activations are computed again rather than stored, a true saving",
        lambda s: (
            f"AdamW's state takes {s.text('optimizer_state_mb')} MB here, "
            f"{s.healthy_text('optimizer_state_mb')} in stage 6: no activation is part of it"
        ),
    ),
}
NONE = "none"


def _healthy(sight: Sight) -> bool:
    return not any(cause.holds(sight) for cause in _FAULTS.values())


def _what_differs(sight: Sight) -> str:
    names = [name for name in METRICS if sight.differs(name)]
    pairs = [f"{n} {sight.text(n)} against {sight.healthy_text(n)}" for n in names[:3]]
    return f"its metrics are not those of stage 6: {', '.join(pairs)}"


CAUSES = _FAULTS | _RED_HERRINGS | {NONE: Cause("nothing is wrong", _what_differs, _healthy)}


def found_in(sight: Sight) -> str:
    """The cause that a stage's metrics show, or NONE."""
    return next((name for name, cause in _FAULTS.items() if cause.holds(sight)), NONE)


@dataclass(frozen=True)
class Fix:
    """A change to a script: the cause that it takes away, if any, or why it takes away none."""

    repairs: str | None
    why_not: str = ""


FIXES = {
    "initialise_all_weights": Fix("default_initialisation"),
    "lower_the_learning_rate": Fix(
        None, "the first loss comes before any update, and would be the same"
    ),
    "pass_strides_or_make_contiguous": Fix("strides_ignored"),
    "larger_blocks": Fix(
        None, "that shares the same elements out among fewer programs: the same ones are read"
    ),
    "wait_for_the_work": Fix("clock_does_not_wait"),
    "more_warm_up_steps": Fix(
        None, "a step that is only handed over is as quickly handed over after a hundred others"
    ),
    "tiles_or_the_library": Fix("program_per_element"),
    "tune_the_warps": Fix(
        None, "a program with other warps computes one element still, and reads a row for it"
    ),
    "autograd_function": Fix("severed_gradient"),
    "requires_grad": Fix(
        None,
        "requires_grad_() makes the result a leaf: a gradient arrives there, and goes no further",
    ),
    "nothing": Fix(NONE),
}
