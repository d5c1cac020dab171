"""The profiler: predictions and findings against the participant's own trace of one network."""

import itertools
from collections.abc import Iterable, Iterator

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.own_runs import Profile, true_counts
from labs.inference_benchmark.profiling import ITERATIONS
from workshop.exercises.frame import Item, Missing, Work, judged
from workshop.exercises.hot_list import names
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.profilers.table import Kernel

PROFILE = "--batch-size 4 --iterations 5 --autograd-profiler --kineto"
TOP = 5
NEARLY = 0.9
"""Share of a row's time: a row with more may be in its place."""


def conv_calls(m: Profile) -> int:
    """Calls of convolutions in one iteration."""
    return sum(layer.kind.startswith("Conv") for layer in true_counts(m.run).layers)


def products(m: Profile) -> float:
    """Their part of the whole time, in which the GPU also waits."""
    return m.share("GEMM") * (1 - m.idle_share())


def measured(work: Work) -> Profile:
    """Raises Missing: there is no run with tables and a trace."""
    tables = own_runs.with_flag("--autograd-profiler")
    runs = [run for run in own_runs.plain_runs(work, precision="fp32") if tables(run)]
    found = next(own_runs.profiles(work.results, runs), None)
    if found is None:
        raise Missing("no tables with a trace yet:", f"{own_runs.PROGRAM} {PROFILE}")
    return found


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_top_five, *QUESTIONS))


def _top_five(work: Work) -> Iterator[Item]:
    kernels = measured(work).table.kernels
    answers = work.answers["found.top_five"]
    what = "the five that take the most time"
    if not isinstance(answers, list) or len(answers) != TOP:
        yield Item(False, what, f'write a list of {TOP} names: ["first", "second", ...]')
        return
    least = NEARLY * kernels[min(TOP, len(kernels)) - 1].total_ns
    found = [_named(str(answer), kernels) for answer in answers]
    wrong = [
        str(answer)
        for answer, kernel in zip(answers, found, strict=True)
        if kernel is None or kernel.total_ns < least
    ]
    if wrong:
        yield Item(False, what, f"not among them: {', '.join(wrong):.200}")
        return
    times = [kernel.total_ns for kernel in found if kernel]
    in_order = all(a >= NEARLY * b for a, b in itertools.pairwise(times))
    twice = len({kernel.name for kernel in found if kernel}) < TOP
    why = "one of them is there twice" if twice else "the longest comes first"
    yield judged(in_order and not twice, what, why)


def _named(answer: str, kernels: Iterable[Kernel]) -> Kernel | None:
    return next((kernel for kernel in kernels if names(answer, kernel.name)), None)


def gain(part: float) -> float:
    """How many times as fast everything gets if this part of the time is twice as fast."""
    return 1 / (1 - part / 2)


QUESTIONS: tuple[Question[Profile], ...] = (
    Predicted("predict.products_percent", "predicted: the convolutions' share", "%",
              lambda m: 100 * m.share("GEMM"),
              "They do nearly all operations. Norms, ReLU and pooling do next to none, and read "
              "and write as many numbers.", within=0.15),
    Predicted("predict.conv_calls", "predicted: convolutions of an iteration", "",
              lambda m: conv_calls(m),
              "The number in the name counts convolutions and the linear layer; those of the "
              "shortcuts come on top.", within=0.0),
    Found("found.conv_calls", "convolutions of an iteration", "", lambda m: conv_calls(m),
          f"`# of Calls` of a convolution: the tables are of {ITERATIONS} iterations.", within=0.0,
          slips=lambda m: [(ITERATIONS * conv_calls(m), f"that is {ITERATIONS} iterations")]),
    Found("found.calls", "calls of an iteration", "", lambda m: m.launches(),
          "The line under the hot list: `N ... calls a step`.", within=0.0,
          slips=lambda m: [(m.table.launches, "that is all iterations of the trace")]),
    Found("found.products_percent", "the share of convolutions and the linear layer", "%",
          lambda m: 100 * m.share("GEMM"), "GEMM in the line `by category`.", within=0.0,
          margin=0.3),
    Found("found.norms_percent", "the norms' share", "%", lambda m: 100 * m.share("norm"),
          "norm in the line `by category`.", within=0.0, margin=0.3),
    Found("found.idle_percent", "the time in which the GPU waits", "%",
          lambda m: 100 * m.idle_share(),
          "The line `GPU busy A of B ms`: 1 - A / B; 0 without a GPU.", within=0.0, margin=1.0),
    Found("found.products_twice_as_fast", "if products were twice as fast", "x",
          lambda m: gain(products(m)),
          "1 / (1 - p / 2), where p is their part of the whole time, as a fraction. On a GPU the "
          "whole time has idle time in it.",
          slips=lambda m: [(2.0, "the rest of the time stays as it is")]),
    Chosen("found.larger_gain", "which gains more", ("products", "rest"),
           lambda m: "products" if products(m) / 2 > 1 - products(m) else "rest",
           lambda m: f"half of {products(m):.0%} against all of {1 - products(m):.0%}",
           lambda m: f"half of {products(m):.0%} against all of {1 - products(m):.0%}"),
)  # fmt: skip
