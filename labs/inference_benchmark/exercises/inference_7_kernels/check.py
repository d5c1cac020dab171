"""Kernels: predictions and findings against the participant's own two traces of --kineto."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.own_runs import Profile
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.hot_list import not_the_hottest
from workshop.exercises.predict import Chosen, Found, Predicted, Question, Written, ask
from workshop.labs import LabRun
from workshop.profilers import advisor

PROGRAM = "python labs/inference_benchmark/micro_benchmarking_pytorch.py --kineto"
BOUNDS = {
    "products": ("GEMM-bound", "attention-bound"),
    "passes": ("elementwise-bound", "copy-bound", "norm-bound"),
    "launches": ("launch-bound", "latency-bound", "host-bound"),
    "mixed": (advisor.MIXED,),
}
HALVES = ("fp16", "bf16")


@dataclass(frozen=True)
class Measured:
    """The newest trace of fp32, and the newest of the same network and batch at half precision."""

    plain: Profile
    half: Profile

    @property
    def advice(self) -> advisor.Advice | None:
        return advisor.headline(advisor.advise(self.plain.table, self.plain.run))

    @property
    def idle_percent(self) -> float:
        return 100 * self.plain.idle_share()


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_traces, *QUESTIONS))


def iteration_ns(one: Profile) -> float:
    """The time of an iteration's kernels."""
    return one.table.total_ns / (one.table.steps or 1)


def bounds(m: Measured) -> list[str]:
    """The answers that the advisor's finding agrees with; all, if it has none."""
    finding = m.advice.finding if m.advice else ""
    return [answer for answer, findings in BOUNDS.items() if finding in findings] or list(BOUNDS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.five_percent", "predicted: the share of the first five", "%",
              lambda m: 100 * m.plain.five_share(),
              "A few kernels take most of the time of nearly every network: to make the others "
              "faster gains little.", within=0.1),
    Predicted("predict.launches", "predicted: kernels of an iteration", "calls",
              lambda m: m.plain.launches(),
              "Each layer is at least one kernel, a convolution often several; on a CPU operators "
              "that call others count too.", within=0.5),
    Written("found.hottest", "the hottest row",
            lambda m, answer: not_the_hottest(m.plain.table, answer)),
    Found("found.hottest_percent", "its share", "%",
          lambda m: 100 * m.plain.table.share(m.plain.table.kernels[0]),
          "The column `share` of the first row."),
    Found("found.five_percent", "the share of the first five", "%",
          lambda m: 100 * m.plain.five_share(), "The first five rows of `show`, added up.",
          within=0.01),
    Found("found.launches", "kernels of an iteration", "calls", lambda m: m.plain.launches(),
          "The line under the hot list: `N ... calls a step`.",
          slips=lambda m: [
              (float(m.plain.table.launches),
               "that is the whole trace: it holds several iterations"),
              (float(len(m.plain.table.kernels)), "those are the rows: a row has many calls"),
          ]),
    Found("found.products_percent", "products and convolutions", "%",
          lambda m: 100 * m.plain.share("GEMM"), "GEMM in the line `by category`."),
    Found("found.copies_percent", "copies", "%", lambda m: 100 * m.plain.share("copy"),
          "`copy` in the line `by category`; 0 if it is not there.", within=0.0, margin=0.1),
    Found("found.idle_percent", "how much of the time the GPU is idle", "%",
          lambda m: m.idle_percent,
          "the line `GPU busy A of B ms (busy%), idle ...`; 0 without a GPU", within=0, margin=1),
    Chosen("found.bound", "what bounds the iteration", tuple(BOUNDS), bounds,
           lambda m: f"products {100 * m.plain.share('GEMM'):.0f}%, idle {m.idle_percent:.0f}%; "
           "`python -m workshop.profilers advise` weighs them",
           lambda m: m.advice.sentence if m.advice else ""),
    Found("found.half_time", "time at half precision, over fp32's", "x",
          lambda m: iteration_ns(m.half) / iteration_ns(m.plain),
          "The ms of one step, under the two hot lists: half precision's over fp32's.",
          slips=lambda m: [(
              iteration_ns(m.plain) / iteration_ns(m.half), "that is fp32's over half precision's",
          )]),
    Found("found.half_products_percent", "products and convolutions at half precision", "%",
          lambda m: 100 * m.half.share("GEMM"), "GEMM in the line `by category` of that trace."),
)  # fmt: skip


def _traces(work: Work) -> Iterator[Item]:
    m = measured(work)
    what = m.plain.table.what
    note = (
        f"{m.plain.launches():,.0f} {what}s take {iteration_ns(m.plain) / 1e6:,.1f} ms an "
        f"iteration in fp32, {m.half.launches():,.0f} take {iteration_ns(m.half) / 1e6:,.1f} ms in "
        f"{m.half.run.options['precision']}"
    )
    yield Item(True, f"your two traces: {m.plain.run.subject}", note)


# --- the participant's traces --------------------------------------------------------------------


def measured(work: Work) -> Measured:
    """Raises Missing: one of the two traces is not there."""
    runs = work.lab_runs("inference_benchmark", mode="inference")
    tables = own_runs.with_flag("--autograd-profiler")  # exercise 3's
    runs = [run for run in runs if not tables(run)]
    plain = _newest(work, [run for run in runs if own_runs.is_plain(run)])
    if plain is None:
        flags = "--network resnet18 --batch-size 4 --iterations 5"
        raise Missing("no trace of a plain network in fp32 yet:", f"{PROGRAM} {flags}")
    like = plain.run
    halves = [run for run in runs if run.subject == like.subject
              and run.options["precision"] in HALVES and run.processes == 1]  # fmt: skip
    half = _newest(work, halves)
    if half is None:
        flags = f"--network {like.options['network']} --batch-size {like.units_per_step}"
        raise Missing(
            "no trace of the same network at half precision yet:",
            f"{PROGRAM} {flags} --iterations 5 --precision bf16",
        )
    return Measured(plain, half)


def _newest(work: Work, runs: Sequence[LabRun]) -> Profile | None:
    return next(own_runs.profiles(work.results, runs), None)
