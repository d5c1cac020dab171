"""The kernel to begin with: findings against the roofline of a recorded report."""

from collections.abc import Iterator
from dataclasses import dataclass

from workshop.exercises.frame import Item, Work
from workshop.exercises.hot_list import names
from workshop.exercises.predict import Chosen, Found, Predicted, Question, Written, ask
from workshop.roofline import ceilings, hierarchy, model
from workshop.roofline.model import MAIN_MEMORY, Point, Roofline
from workshop.versions import ROOT

NEARLY = 0.97
"""Share of the largest gain that is enough: the kernel with it depends on how roofs were found."""
REPORT = ROOT / "labs" / "cifar10_roofline" / "roofline" / "recorded" / "ours.csv"


@dataclass(frozen=True)
class Measured:
    """The kernels of a step under the roofs of their chip."""

    roofline: Roofline
    kernels: list[Point]
    """At the memory, longest first."""

    @property
    def longest(self) -> Point:
        return self.kernels[0]

    @property
    def first(self) -> list[Point]:
        """The ones that would save the most time at their roofs, nearly the same."""
        most = max(map(self.saved, self.kernels))
        return [kernel for kernel in self.kernels if self.saved(kernel) >= NEARLY * most]

    def of_roof(self, kernel: Point) -> float:
        return min(1.0, model.share(kernel, self.roofline.roof(kernel)))

    def saved(self, kernel: Point) -> float:
        """Share of the step's time, from 0 to 1."""
        return (kernel.share or 0.0) * (1 - self.of_roof(kernel))

    def percent(self, *parts: str) -> float:
        """Share of the step's time in kernels with one of these in their names."""
        chosen = (k for k in self.kernels if any(part in k.label for part in parts))
        return 100 * sum(k.share or 0.0 for k in chosen)

    @property
    def products_percent(self) -> float:
        return 100 * sum(k.share or 0.0 for k in self.kernels if k.category == "GEMM")


def measured(work: Work) -> Measured:
    roofline = hierarchy.load(REPORT, "step")
    # The data sheet alone: what was measured on the reader's machine must not change the answers.
    roofline.ceilings = ceilings.from_data_sheet(roofline.device or "")
    own = [p for p in roofline.points if p.category != hierarchy.WHOLE and p.level == MAIN_MEMORY]
    return Measured(roofline, own)


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, QUESTIONS)


def _fault(kernels: list[Point], answer: str) -> str:
    """The fault of an answer that should name one of these, with or without its namespace."""
    labels = [kernel.label for kernel in kernels]
    right = any(names(answer, label) or answer == label.rpartition("::")[2] for label in labels)
    return "" if right else "another kernel"


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.products_percent", "predicted: the time of products", "%",
              lambda m: m.products_percent,
              "Tensor cores make products so fast that moving data takes most of the time."),
    Written("found.longest", "the kernel that takes the most time",
            lambda m, text: _fault([m.longest], text)),
    Found("found.longest_of_roof", "its share of its roof", "%",
          lambda m: 100 * m.of_roof(m.longest), "The list beside the picture: `of roof`.",
          margin=1.0),
    Chosen("found.longest_roof", "the roof above it", model.KINDS,
           lambda m: roof.kind if (roof := m.roofline.roof(m.longest)) else "",
           "the limit that it comes closer to"),
    Written("found.first", "the kernel to optimise first", lambda m, text: _fault(m.first, text)),
    Found("found.gain_percent", "the time that it would save", "%",
          lambda m: 100 * m.saved(m.first[0]),
          "Its share of the time x (1 - its share of its roof).", margin=0.5),
    Found("found.layout_percent", "the time of changing layouts", "%",
          lambda m: m.percent("nchwToNhwc", "nhwcToNchw"),
          "The shares of nchwToNhwcKernel and nhwcToNchwKernel, added.", margin=0.3),
    Chosen("found.flag", "the flag that makes them needless",
           ("--channels-last", "--compile", "--data-on-gpu"), lambda m: "--channels-last",
           "tensor cores read images as NHWC: what if they were so from the start?"),
)  # fmt: skip
