"""Precision: predictions and findings against the participant's own comparison of precisions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from labs.inference_benchmark import networks, own_runs
from labs.inference_benchmark.own_runs import memory_mb, text_option, true_counts
from workshop import labs
from workshop.exercises.frame import Item, Work, judged
from workshop.exercises.predict import (
    Chosen,
    Found,
    NotCompared,
    Predicted,
    Question,
    ask,
    disturbed,
)
from workshop.labs import LabRow, LabRun
from workshop.run import timing

COMPARE = "--compare precision --batch-size 4 --iterations 10"
HALF = ("fp16", "bf16")
VERDICTS = ("faster", "slower", "not clear")
LAST_LINE = "what --find-max-batch prints last: a whole number of images"
MOST_GROWTH = 4
"""Growth of the largest batch: numbers of half the size make it about twice as large, and on a CPU
the free memory changes meanwhile."""
UNIT_ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Measured:
    """A session's rows, by precision: fp32 and the first of HALF that it has are compared."""

    rows: dict[str, LabRow]

    @property
    def full(self) -> LabRow:
        return self.rows["fp32"]

    @property
    def half(self) -> LabRow:
        return next(self.rows[name] for name in HALF if name in self.rows)

    @property
    def speedup(self) -> timing.Ratio:
        return timing.speedup(self.full.times, self.half.times)

    @property
    def verdict(self) -> str:
        ratio = self.speedup
        if ratio.interval is None:
            raise NotCompared("one process of each says nothing of noise: give --repeats 2 or more")
        if not ratio.significant:
            return "not clear"
        return "faster" if ratio.value > 1 else "slower"

    @property
    def error_ratio(self) -> float:
        return error(self.half.first) / error(self.full.first)

    @property
    def loss_percent(self) -> float:
        """By how much the losses of the last iterations differ."""
        full, half = (row.first.losses[-1] or math.inf for row in (self.full, self.half))
        return 100 * abs(half - full) / full

    @property
    def zeros_loss(self) -> float:
        return math.log(networks.get_network(text_option(self.full.first, "network")).classes)

    @property
    def image_ratio(self) -> float:
        """Memory of an image beside the weights in fp32, over the same in half precision."""
        full, half = (
            memory_mb(row.first, "peak") - memory_mb(row.first, "weights")
            for row in (self.full, self.half)
        )
        return full / half


def error(run: LabRun) -> float:
    """Error of the logits, relative to their spread."""
    return float(run.gate.measures["logits"]["error"] or math.inf)


def measured(work: Work) -> Measured:
    """Raises Missing: no session has both."""
    runs = own_runs.plain_runs(work)
    sessions = {run.session: {r.options["precision"] for r in runs if r.session == run.session}
                for run in runs}  # fmt: skip
    both = [r for r in runs if "fp32" in sessions[r.session] and sessions[r.session] & {*HALF}]
    session = own_runs.newest(both, "that compares precisions", COMPARE).session
    rows = labs.build_rows(r for r in runs if r.session == session)
    return Measured({text_option(row.first, "precision"): row for row in rows})


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_compared, *QUESTIONS, _largest_full, _largest_half))


def _compared(work: Work) -> Iterator[Item]:
    m = measured(work)
    half = m.half.first.options["precision"]
    yield Item(
        True, f"your comparison: fp32 and {half}, which is `half` here", m.full.first.subject
    )
    yield from disturbed(run for row in (m.full, m.half) for run in row.runs)


def _largest_full(work: Work) -> Iterator[Item]:
    measured(work)
    found = work.answers.number("found.max_batch_fp32")
    yield judged(found >= 1 and found.is_integer(), "the largest batch in fp32", LAST_LINE)


def _largest_half(work: Work) -> Iterator[Item]:
    m = measured(work)
    half, full = (work.answers.number(f"found.max_batch_{name}") for name in ("half", "fp32"))
    growth = half / max(full, 1)
    note = (
        f"{growth:.2f} times that of fp32; beside its weights, an image takes "
        f"{m.image_ratio:.2f} times the memory in fp32"
    )
    faults = {
        LAST_LINE: not half.is_integer(),
        "smaller than in fp32: are the two in each other's place?": half < full,
        f"half the bytes do not make it {growth:,.0f} times as large": growth > MOST_GROWTH,
    }
    fault = next((why for why, found in faults.items() if found), "")
    yield Item(not fault, "the largest batch in half", fault or note)


def _peak_less_percent(m: Measured) -> float:
    full, half = (row.peak_memory_mb or math.nan for row in (m.full, m.half))
    return 100 * (1 - half / full)


def _interval(m: Measured) -> str:
    ratio = m.speedup
    low, high = ratio.interval or (math.nan, math.nan)
    return f"half is {ratio.value:.2f} times as fast [{low:.2f}, {high:.2f}]"


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.speedup", "predicted: half over fp32", "x", lambda m: m.speedup.value,
              "It depends on the units: matrix cores have many times the fp32 rate, and a CPU "
              "without units for 16 bits converts every number."),
    Predicted("predict.peak_less_percent", "predicted: less peak memory", "%", _peak_less_percent,
              "Numbers of half the size are half the memory. What is more or less is workspaces, "
              "which each precision's algorithms choose for themselves."),
    Predicted("predict.error_ratio", "predicted: the error of half over that of fp32", "x",
              lambda m: m.error_ratio,
              "Rounding is relative: 2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16. The ratio of "
              "errors is of that order, and smaller: fp32 rounds at each addition of a sum, half "
              "once a sum.", within=0.75),
    Found("found.weights_half_mb", "the weights' memory in half", "MB",
          lambda m: 2 * true_counts(m.half.first).parameters / 1e6, "Two bytes for each weight.",
          slips=lambda m: [(memory_mb(m.full.first, "weights"), "that is fp32, with four bytes")]),
    Found("found.speedup", "half over fp32", "x", lambda m: m.speedup.value,
          "Images a second of half over those of fp32, in the comparison's table, also where its "
          "column `speed-up` has no number."),
    Chosen("found.verdict", "what the interval says", VERDICTS, lambda m: m.verdict, _interval,
           _interval),
    Found("found.peak_less_percent", "less peak memory", "%", _peak_less_percent,
          "1 - peak of half / peak of fp32, in percent; negative if half needs more.", margin=0.7),
    Found("found.error_ratio", "the error of half over that of fp32", "x", lambda m: m.error_ratio,
          "`error` under `gate` of the two runs: half's over fp32's.", within=0.1,
          note=lambda m: "of unit roundings {:,.0f}, of logits {:,.0f}".format(
              UNIT_ROUNDING[text_option(m.half.first, "precision")] / UNIT_ROUNDING["fp32"],
              m.error_ratio)),
    Found("found.top1_percent", "top-1 agreement of half", "%",
          lambda m: 100 * float(m.half.first.metrics["top1_agreement"] or 0),
          "`top1_agreement` under `metrics` of the run of half, in percent."),
    Found("found.loss_percent", "the difference of the losses", "%", lambda m: m.loss_percent,
          "The last entries of `losses` of the two runs: the difference over fp32's, in percent.",
          within=0.1),
    Found("found.zeros_loss", "the loss of a network that answers zeros", "",
          lambda m: m.zeros_loss,
          "All classes equally likely: the natural logarithm of their number.", within=0.0015),
    Chosen("found.loss_is_proof", "whether a loss as near as this proves the logits", ("yes", "no"),
           lambda m: "no",
           lambda m: f"a network that looks at no image has {m.zeros_loss:.3f}, "
           f"{abs((m.full.first.losses[-1] or math.inf) / m.zeros_loss - 1):.1%} away",
           lambda m: "the proof compares the logits of each image with the truth"),
)  # fmt: skip
