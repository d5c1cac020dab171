"""Questions about a participant's measurements: predictions and findings.

A prediction that is off is never red: it says by how much it was off, and why that is instructive.
It waits for the findings, which the measured value would give away.
A finding was read or computed from results: where these say otherwise it is red. The first check
that finds either off says only in which direction; the next one by how much.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from workshop.exercises.answers import Answers
from workshop.exercises.frame import Item, Part, Work, note
from workshop.results import LabRun, RunResult
from workshop.run import timing

M = TypeVar("M")
"""Values that a check has gathered from the participant's results."""
UNEVEN = 0.25
"""Interquartile range of a lab's step times over their median, above which other programs probably
ran: a lab's record does not say how long its process waited for a processor."""
NEARLY_RIGHT = 1.2
"""Up to this factor a difference is said in percent."""
FAR = 3.0
"""From this factor on a first miss is called far off."""


class NotCompared(Exception):
    """Raised by a question's `value` where the results have no answer: the text says why, and the
    question becomes a note."""


def disturbed(runs: Iterable[RunResult | LabRun]) -> Iterator[Item]:
    """A warning if other programs disturbed some of a participant's runs."""
    runs = list(runs)
    versions = [run for run in runs if isinstance(run, RunResult)]
    if shares := [run.waited_share or 0.0 for run in versions if run.disturbed]:
        yield note(
            f"warning: other programs disturbed {len(shares)} of {len(runs)} runs",
            f"They waited for a processor up to {max(shares):.0%} of the time: nothing is judged "
            "by their times. Close what else runs, and measure again.",
        )
    labs = [run for run in runs if isinstance(run, LabRun) and run.step_ms]
    if uneven := [run.variant for run in labs if timing.spread(run.step_ms) > UNEVEN]:
        yield note(
            f"warning: the steps of {len(uneven)} of {len(runs)} runs differ much in time",
            f"{uneven[0]}: if other programs ran, repeat it on a quiet machine.",
        )


def step_ms(run: RunResult) -> float:
    """Median time of a step. Raises NotCompared if other programs disturbed the run."""
    if run.disturbed:
        raise NotCompared("not judged: other programs disturbed the run")
    return timing.median(run.step_ms)


def prediction(
    what: str, predicted: float, measured: float, unit: str, *, within: float = 0.25, why: str
) -> Item:
    """An Item that is always green, and says how far off a prediction was.

    Args:
        what: the quantity, "the time of a step".
        predicted, measured: in `unit`, which may be "".
        within: the share of the measured value up to which a prediction counts as right.
        why: why it is instructive to be off; shown only then. A sentence.
    """
    numbers = f"predicted {_number(predicted, unit)}, measured {_number(measured, unit)}"
    if abs(predicted - measured) <= within * abs(measured):
        return Item(True, what, f"{numbers}: a good prediction")
    off = f"{numbers}: {_how_far(predicted, measured)}\n{why}"
    first = f"predicted {_number(predicted, unit)}, is {_which_way(predicted, measured)}"
    return Item(True, what, off, at_first=first)


@dataclass(frozen=True)
class Found(Generic[M]):
    """A number of `my_answers.toml` that is read or computed from results."""

    key: str
    what: str
    unit: str
    value: Callable[[M], float]
    """The right answer, of what was measured."""
    how: str | Callable[[M], str]
    """Where to find the number or how to compute it: for a wrong answer."""
    within: float = 0.03
    """The share of the right number by which rounding may change it."""
    margin: float = 0.0
    """Or by how much, in `unit`."""
    slips: Callable[[M], Iterable[tuple[float, str]]] = lambda _: ()
    """The numbers that well-known mistakes give, each with what to say then."""
    note: Callable[[M], str] | None = None
    """Shown for a right answer instead of the number."""

    def item(self, answers: Answers, m: M) -> Item:
        yours, right = answers.number(self.key), self.value(m)
        if self._near(yours, right):
            return Item(True, self.what, self.note(m) if self.note else _number(right, self.unit))
        shown = f"yours, {_number(yours, self.unit)}"
        for wrong, why in self.slips(m):
            if self._near(yours, wrong):
                return Item(False, self.what, f"{shown}: {why}")
        how = _text(self.how, m)
        first = f"{shown}, is {_which_way(yours, right)}\n{how}"
        off = f"{shown}, is {_how_far(yours, right)}\n{how}"
        return Item(False, self.what, off, at_first=first)

    def _near(self, yours: float, number: float) -> bool:
        return abs(yours - number) <= max(self.margin, self.within * abs(number))


@dataclass(frozen=True)
class Predicted(Found[M]):
    """A number of `my_answers.toml` that is written down before measuring; `how` says why it is
    instructive to be off."""

    within: float = 0.25

    def item(self, answers: Answers, m: M) -> Item:
        yours, right = answers.number(self.key), self.value(m)
        why = _text(self.how, m)
        return prediction(self.what, yours, right, self.unit, within=self.within, why=why)


@dataclass(frozen=True)
class Chosen(Generic[M]):
    """A word of `my_answers.toml`, one of several."""

    key: str
    what: str
    choices: Collection[str]
    """A mapping has a sentence for each, which is shown with that answer, right or wrong."""
    value: Callable[[M], str | Collection[str]]
    """The right answer, of what was measured, or several."""
    how: str | Callable[[M], str] = ""
    """Shown for a wrong answer."""
    note: Callable[[M], str] | None = None
    """Shown for a right one."""

    def item(self, answers: Answers, m: M) -> Item:
        yours, right = answers.choice(self.key, tuple(self.choices)), self.value(m)
        ok = yours in ((right,) if isinstance(right, str) else right)
        if isinstance(self.choices, Mapping):
            why = self.choices[yours]
        elif ok:
            why = self.note(m) if self.note else yours
        else:
            why = f"not {yours}: {_text(self.how, m)}"
        return Item(ok, self.what, why)


@dataclass(frozen=True)
class Written(Generic[M]):
    """A text of `my_answers.toml`."""

    key: str
    what: str
    fault: Callable[[M, str], str]
    """Returns what is wrong with a text; "" for a right one."""

    def item(self, answers: Answers, m: M) -> Item:
        why = self.fault(m, answers.text(self.key))
        return Item(not why, self.what, why)


Question = Found[M] | Chosen[M] | Written[M]


def ask(
    work: Work, measured: Callable[[Work], M], questions: Iterable[Question[M] | Part]
) -> Iterator[Item]:
    """An Item per question, also where another has no answer yet, and those of further parts.

    Args:
        measured: gathers what the questions are about from the participant's results, once.
    """
    once = functools.cache(measured)
    parts = list(questions)
    kinds = (Found, Chosen, Written)
    findings = [p.key for p in parts if isinstance(p, kinds) and not isinstance(p, Predicted)]

    def answered(question: Question[M], work: Work) -> Iterator[Item]:
        m = once(work)
        if isinstance(question, Predicted) and not all(map(work.answers.has, findings)):
            yours = _number(work.answers.number(question.key), question.unit)
            why = f"predicted {yours}: compared when all else is answered"
            yield Item(True, question.what, why)
            return
        try:
            yield question.item(work.answers, m)
        except NotCompared as reason:
            yield note(question.what, str(reason))

    yield from work.each(
        *(functools.partial(answered, p) if isinstance(p, kinds) else p for p in parts)
    )


def _text(how: str | Callable[[M], str], m: M) -> str:
    return how if isinstance(how, str) else how(m)


def _which_way(yours: float, measured: float) -> str:
    way = f"too {'high' if yours > measured else 'low'}"
    if yours <= 0 or measured <= 0:
        return way
    ratio = max(yours / measured, measured / yours)
    return f"far {way}" if ratio >= FAR else f"a little {way}" if ratio < NEARLY_RIGHT else way


def _how_far(yours: float, measured: float) -> str:
    if yours > 0 and measured > 0:
        way, ratio = ("high", yours / measured) if yours > measured else ("low", measured / yours)
        if ratio >= NEARLY_RIGHT:
            return f"{_number(ratio, '')} times too {way}"
        return f"{100 * abs(yours / measured - 1):.2g}% too {way}"
    return f"off by {abs(yours - measured):.3g}"


def _number(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}" if unit not in ("", "%", "x") else f"{digits}{unit}"
