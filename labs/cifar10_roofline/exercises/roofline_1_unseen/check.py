"""Parts of a step that a profiler did not see: findings against two recorded reports of the same
step."""

from collections.abc import Iterator
from dataclasses import dataclass

from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.profilers import ncu
from workshop.profilers.ncu import Report
from workshop.versions import ROOT

RECORDED = ROOT / "labs" / "cifar10_roofline" / "roofline" / "recorded"


@dataclass(frozen=True)
class Measured:
    """One training step under the guide's command, and under run_ncu.sh."""

    guide: Report
    ours: Report

    @property
    def seen_percent(self) -> float:
        """Share of the step's launches that is in the guide's report."""
        return 100 * self.guide.total.calls / self.ours.total.calls

    @property
    def counted_percent(self) -> float:
        """Share of the step's operations that is in the guide's report."""
        return 100 * self.guide.total.flops / self.ours.total.flops

    @property
    def fp32_percent(self) -> float:
        """Share of the step's operations that the guide's metrics count in all its kernels."""
        return 100 * self.ours.total.operations["FP32"] / self.ours.total.flops


def measured(work: Work) -> Measured:
    return Measured(*(ncu.read_counts(RECORDED / f"{name}.csv") for name in ("guide", "ours")))


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, QUESTIONS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.seen_percent", "predicted: the launches that the range holds", "%",
        lambda m: m.seen_percent,
        "A push/pop range belongs to the thread that opened it; autograd runs the backward pass "
        "on another.",
    ),
    Found("found.guide_launches", "launches in the guide's report", "",
          lambda m: m.guide.total.calls, "The line `kernels:` of guide.csv.", within=0.0),
    Found("found.our_launches", "launches of the whole step", "", lambda m: m.ours.total.calls,
          "The line `kernels:` of ours.csv.", within=0.0),
    Chosen("found.missing", "what is not in the guide's report",
           ("forward", "backward", "optimizer"), lambda m: "backward",
           "fprop and FusedSgd are in the names of its kernels"),
    Found("found.counted_percent", "the operations in the guide's report", "%",
          lambda m: m.counted_percent, "FLOPs of guide.csv over FLOPs of ours.csv."),
    Found("found.fp32_percent", "the operations that the guide's metrics count", "%",
          lambda m: m.fp32_percent, "The line `FP32:` of ours.csv over its FLOPs."),
    Chosen("found.larger_loss", "what hides more operations", ("range", "metrics"),
           lambda m: "metrics", "the range kept two fifths of the launches; the metrics?"),
)  # fmt: skip
