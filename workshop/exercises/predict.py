"""A participant's predictions and findings against what was measured.

A prediction that is off is never red: it says by how much it was off, and why that is instructive.
A finding was read or computed from the participant's own results: where these say otherwise, it is
red, and says how far it is from the right figure without giving it away.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from workshop.exercises.frame import Item, Work

M = TypeVar("M")
"""What a check has gathered from the participant's results."""


def prediction(
    what: str, predicted: float, measured: float, unit: str, *, within: float = 0.25, why: str
) -> Item:
    """An Item that is green whatever was predicted, and says how far off it was.

    Args:
        what: the quantity, "the time of a step".
        predicted, measured: in `unit`, which may be "".
        within: the share of the measured value up to which a prediction counts as right.
        why: why it is instructive to be off; shown only then. A sentence.
    """
    figures = f"predicted {_number(predicted, unit)}, measured {_number(measured, unit)}"
    if abs(predicted - measured) <= within * abs(measured):
        return Item(True, what, f"{figures}: a good prediction")
    return Item(True, what, f"{figures}: {_how_far(predicted, measured)}\n{why}")


def finding(
    what: str, found: float, measured: float, unit: str, *, within: float = 0.03, how: str
) -> Item:
    """An Item that is red where the participant's results say something else.

    Args:
        what: the quantity.
        found, measured: in `unit`, which may be "".
        within: the share of the measured value by which rounding may change it.
        how: where the figure stands or how it is computed; shown where it is wrong. A sentence.
    """
    if abs(found - measured) <= within * abs(measured):
        return Item(True, what, _number(measured, unit))
    told = f"yours, {_number(found, unit)}, is {_how_far(found, measured)} for your own results"
    return Item(False, what, f"{told}\n{how}")


@dataclass(frozen=True)
class Predicted(Generic[M]):
    """A question of `my_answers.toml` that is answered before measuring."""

    key: str
    what: str
    unit: str
    value: Callable[[M], float]
    """The right answer, of what was measured."""
    why: str
    within: float = 0.25

    def item(self, answer: float, measured: M) -> Item:
        right = self.value(measured)
        return prediction(self.what, answer, right, self.unit, within=self.within, why=self.why)


@dataclass(frozen=True)
class Found(Generic[M]):
    """A question of `my_answers.toml` that is answered from the participant's results."""

    key: str
    what: str
    unit: str
    value: Callable[[M], float]
    """The right answer, of what was measured."""
    how: str
    within: float = 0.03

    def item(self, answer: float, measured: M) -> Item:
        right = self.value(measured)
        return finding(self.what, answer, right, self.unit, within=self.within, how=self.how)


def ask(
    work: Work, measured: Callable[[Work], M], questions: Sequence[Predicted[M] | Found[M]]
) -> Iterator[Item]:
    """An Item a question, also where another has no answer yet.

    Args:
        measured: gathers what the questions are about from the participant's results.
    """
    yield from work.each(*(partial(_ask, measured=measured, question=q) for q in questions))


def _ask(
    work: Work, *, measured: Callable[[Work], M], question: Predicted[M] | Found[M]
) -> Iterator[Item]:
    results = measured(work)
    yield question.item(work.answers().number(question.key), results)


def _how_far(yours: float, measured: float) -> str:
    if yours > 0 and measured > 0:
        ratio = yours / measured
        return f"{ratio:.3g} times too high" if ratio > 1 else f"{1 / ratio:.3g} times too low"
    return f"off by {abs(yours - measured):.3g}"


def _number(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return digits + ("%" if unit == "%" else f" {unit}" if unit else "")
