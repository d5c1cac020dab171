"""Processes that hang and average wrongly: mine.py in groups, against one process."""

from collections.abc import Iterator

from labs.scale_out.exercises.scale_2_faults import run_group
from labs.scale_out.exercises.scale_2_faults.run_group import STEPS
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask

GROUPS = ((4, 2), (5, 2), (7, 3))
"""Sequences of a batch, and the processes that share it."""


def check(work: Work) -> Iterator[Item]:
    return ask(work, lambda work: None, (*QUESTIONS, _groups))


QUESTIONS: tuple[Question[None], ...] = (
    Predicted("predict.percent", "predicted: by how much one of two sequences counts too much", "%",
              lambda _: 25.0,
              "Of 5 sequences each should count a fifth. The second process has two, and its mean "
              "is half of the result."),
    Chosen("found.first", "where the first process waits",
           ("all_reduce", "barrier"), lambda _: "all_reduce",
           "run_group.py shows it, with the starter's code in mine.py"),
    Chosen("found.second", "where the second process waits",
           ("all_reduce", "barrier"), lambda _: "barrier",
           "run_group.py shows it, with the starter's code in mine.py"),
    Chosen("found.why", "why they are not in the same one",
           {
               "slow": "the others wait for a slow process, and it gets there",
               "order": "both run the same lines in the same order",
               "branch": "each decides by its own loss, and these fall in different steps",
           },
           lambda _: "branch"),
    Chosen("found.evenly", "with 4 sequences, once it does not hang, the gradients are",
           {
               "right": "equal parts: the mean of the means is the mean",
               "wrong": "compare two means of two sequences with the mean of four",
           },
           lambda _: "right"),
    Found("found.percent", "by how much a sequence of the second process counts too much", "%",
          lambda _: 25.0,
          "Of 5 sequences each should count a fifth. The second process has two: what does one of "
          "them count in its mean, and in the mean of both?",
          slips=lambda _: [(50.0, "half is what the second process's mean counts, of both"),
                           (20.0, "a fifth is what it should count")], within=0.01),
)  # fmt: skip


def _groups(work: Work) -> Iterator[Item]:
    for batch_size, size in GROUPS:
        outcomes = run_group.together(work.mine_path, batch_size, size)
        yield from _compared(outcomes, batch_size, size)
        if any(outcome.hangs for outcome in outcomes):
            break


def _compared(outcomes: list[run_group.Outcome], batch_size: int, size: int) -> Iterator[Item]:
    what = f"{size} processes, batches of {batch_size}"
    right = run_group.alone(run_group.make_batches(batch_size))
    for rank, outcome in enumerate(outcomes):
        if outcome.trained is None:
            yield Item(False, what, f"process {rank} {outcome.message}")
            return
        if differs := run_group.difference(outcome.trained, right):
            yield Item(False, what, f"process {rank} differs {differs}")
            return
    yield Item(True, what, "train as one process does")
    parts = [len(range(batch_size)[rank::size]) * STEPS for rank in range(size)]
    rows = [outcome.rows for outcome in outcomes]
    if rows != parts:
        why = f"their models got {rows} sequences; {parts} are their parts"
        yield Item(False, f"{what}: each computes its own part, once", why)
