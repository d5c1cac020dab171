"""A participant's predictions and findings against what was measured.

A prediction that is off is never red: it says by how much it was off, and why that is instructive.
A finding was read or computed from results: where these say otherwise it is red, and says how far
off it is without giving the right number away.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from workshop.exercises.answers import Answers
from workshop.exercises.frame import Item, Work

M = TypeVar("M")
"""What a check has gathered from the participant's results."""


def prediction(
    what: str, predicted: float, measured: float, unit: str, *, within: float = 0.25, why: str
) -> Item:
    """An Item that is always green, and says how far off it was.

    Args:
        what: the quantity, "the time of a step".
        predicted, measured: in `unit`, which may be "".
        within: the share of the measured value up to which a prediction counts as right.
        why: why it is instructive to be off; shown only then. A sentence.
    """
    numbers = f"predicted {_number(predicted, unit)}, measured {_number(measured, unit)}"
    if abs(predicted - measured) <= within * abs(measured):
        return Item(True, what, f"{numbers}: a good prediction")
    return Item(True, what, f"{numbers}: {_how_far(predicted, measured)}\n{why}")


def finding(
    what: str, found: float, measured: float, unit: str, *, within: float = 0.03, how: str
) -> Item:
    """An Item that is red where the results say something else.

    Args:
        what: the quantity.
        found, measured: in `unit`, which may be "".
        within: the share of the measured value by which rounding may change it.
        how: where to find the number or how to compute it; shown where it is wrong. A sentence.
    """
    if abs(found - measured) <= within * abs(measured):
        return Item(True, what, _number(measured, unit))
    distance = _how_far(found, measured)
    return Item(False, what, f"yours, {_number(found, unit)}, is {distance}\n{how}")


@dataclass(frozen=True)
class Found(Generic[M]):
    """A number of `my_answers.toml` that is read or computed from results."""

    key: str
    what: str
    unit: str
    value: Callable[[M], float]
    """The right answer, of what was measured."""
    how: str
    within: float = 0.03

    def item(self, answers: Answers, measured: M) -> Item:
        yours, right = answers.number(self.key), self.value(measured)
        return finding(self.what, yours, right, self.unit, within=self.within, how=self.how)


@dataclass(frozen=True)
class Predicted(Found[M]):
    """A number of `my_answers.toml` that is written down before measuring; `how` says why it is
    instructive to be off."""

    within: float = 0.25

    def item(self, answers: Answers, measured: M) -> Item:
        yours, right = answers.number(self.key), self.value(measured)
        return prediction(self.what, yours, right, self.unit, within=self.within, why=self.how)


@dataclass(frozen=True)
class Chosen(Generic[M]):
    """A word of `my_answers.toml`, one of several."""

    key: str
    what: str
    choices: tuple[str, ...]
    value: Callable[[M], str]
    """The right answer, of what was measured."""
    how: str | Callable[[str], str]
    """Shown for a wrong answer; may depend on it."""

    def item(self, answers: Answers, measured: M) -> Item:
        yours, right = answers.choice(self.key, self.choices), self.value(measured)
        how = self.how if isinstance(self.how, str) else self.how(yours)
        return Item(yours == right, self.what, right if yours == right else f"not {yours}: {how}")


def ask(
    work: Work, measured: Callable[[Work], M], questions: Sequence[Found[M] | Chosen[M]]
) -> Iterator[Item]:
    """An Item per question, also where another has no answer yet.

    Args:
        measured: gathers what the questions are about from the participant's results.
    """
    yield from work.each(*(partial(_ask, measured=measured, question=q) for q in questions))


def _ask(work: Work, *, measured: Callable[[Work], M], question: Any) -> Iterator[Item]:
    results = measured(work)
    yield question.item(work.answers(), results)


def _how_far(yours: float, measured: float) -> str:
    if yours > 0 and measured > 0:
        ratio = yours / measured
        return f"{ratio:.3g} times too high" if ratio > 1 else f"{1 / ratio:.3g} times too low"
    return f"off by {abs(yours - measured):.3g}"


def _number(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return digits + ("%" if unit == "%" else f" {unit}" if unit else "")
