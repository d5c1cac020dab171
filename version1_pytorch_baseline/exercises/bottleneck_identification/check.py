"""The bottleneck: predictions and findings against the participant's own two profiles of V1."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from workshop.exercises.frame import Item, Missing, Work, setting
from workshop.exercises.hot_list import not_the_hottest
from workshop.exercises.predict import Chosen, Found, Predicted, Question, Written, ask
from workshop.profilers import advisor
from workshop.profilers.table import KernelTable
from workshop.results import RunResult
from workshop.run.presets import PRESETS

RUNNER = "python version1_pytorch_baseline/run_pytorch_profiler.py --steps 2"
SINGLE = "batch_1"
"""The folder, beside the runner's own, of the profile with a single sequence."""
PRODUCTS, PASSES = ("GEMM",), ("elementwise", "copy")
BOUNDS = {
    "products": ("GEMM-bound", "attention-bound"),
    "passes": ("elementwise-bound", "copy-bound"),
    "launches": ("launch-bound", "latency-bound", "host-bound"),
    "mixed": (advisor.MIXED,),
}


@dataclass(frozen=True)
class Measured:
    """The profile with the whole batch and the one with a single sequence."""

    table: KernelTable
    run: RunResult
    single: KernelTable

    def percent(self, categories: tuple[str, ...]) -> float:
        """Share of the kernels' time."""
        of = self.table.category_ns()
        return 100 * sum(of.get(name, 0.0) for name in categories) / self.table.total_ns

    @property
    def busy(self) -> float:
        """The part of the time in which the device worked; 1 on a CPU."""
        line = self.table.timeline
        return line.busy_ns / line.span_ns if line else 1.0

    @cached_property
    def advice(self) -> advisor.Advice | None:
        return advisor.headline(advisor.advise(self.table, self.run))

    def twice_as_fast(self, categories: tuple[str, ...]) -> float:
        """Greatest speed-up of a step if these took half of their time."""
        part = self.percent(categories) / 100 * self.busy
        return 1 / (1 - part / 2)


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_profiles, *QUESTIONS))


def calls(table: KernelTable) -> float:
    """Kernel launches of one step."""
    return table.launches / (table.steps or 1)


def call_ns(table: KernelTable) -> float:
    return table.total_ns / table.launches


def bounds(m: Measured) -> list[str]:
    """The answers that the advisor's finding agrees with."""
    finding = m.advice.finding if m.advice else ""
    return [answer for answer, findings in BOUNDS.items() if finding in findings] or list(BOUNDS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.products_percent", "predicted: the products' share", "%",
        lambda m: m.percent(PRODUCTS),
        "Products do nearly all of a step's arithmetic, yet passes over memory take time too, "
        "which no count of operations shows.", within=0.2,
    ),
    Predicted(
        "predict.calls_a_step", "predicted: calls of a step", "calls", lambda m: calls(m.table),
        "Written-out formulas are many small operations, each with a backward pass, and AdamW has "
        "several for each tensor. On a CPU, operators that only describe memory count too.",
        within=0.5,
    ),
    Predicted(
        "predict.batch_1_calls", "predicted: calls with a single sequence", "x",
        lambda m: calls(m.single) / calls(m.table),
        "A batch makes calls longer, not more: what a call costs at the least is the same for one "
        "sequence as for many.", within=0.1,
    ),
    Found(
        "found.calls_a_step", "calls of a step", "calls", lambda m: calls(m.table),
        "The line under the hot list: `N ... calls a step`.",
    ),
    Found(
        "found.products_percent", "the products' share", "%", lambda m: m.percent(PRODUCTS),
        "GEMM in the line `by category`, of the profile with the whole batch.",
    ),
    Found(
        "found.passes_percent", "the share of passes over memory", "%",
        lambda m: m.percent(PASSES),
        "elementwise and copy in the line `by category`, added up.",
    ),
    Found(
        "found.products_twice_as_fast", "if products were twice as fast", "x",
        lambda m: m.twice_as_fast(PRODUCTS),
        "1 / (1 - p / 2), where p is their part of the whole time, as a fraction. On a GPU the "
        "whole time has idle time in it.",
    ),
    Found(
        "found.passes_twice_as_fast", "if passes over memory were twice as fast", "x",
        lambda m: m.twice_as_fast(PASSES), "As for the products, with the other share.",
    ),
    Found(
        "found.batch_1_calls", "calls with a single sequence, over those with the batch", "x",
        lambda m: calls(m.single) / calls(m.table),
        "From the lines under the two hot lists: calls of one step.",
    ),
    Found(
        "found.batch_1_call_time",
        "the time of a call with a single sequence, over that with the batch", "x",
        lambda m: call_ns(m.single) / call_ns(m.table),
        "In each profile the ms of a step over its calls; then the one over the other.",
        within=0.06,
    ),
    Found(
        "found.idle_percent", "how much of the time the GPU is idle", "%",
        lambda m: 100 * (1 - m.busy),
        "the line `GPU busy A of B ms (busy%), idle ...`; 0 without a GPU", within=0, margin=1,
    ),
    Chosen(
        "found.bound", "what bounds the step", tuple(BOUNDS), bounds,
        lambda m: f"products {m.percent(PRODUCTS):.0f}%, passes {m.percent(PASSES):.0f}%, idle "
        f"{100 * (1 - m.busy):.0f}%",
        lambda m: m.advice.sentence if m.advice else "",
    ),
    Written("found.hottest", "the hottest row",
            lambda m, answer: not_the_hottest(m.table, answer)),
)  # fmt: skip


def _profiles(work: Work) -> Iterator[Item]:
    m = measured(work)
    what = f"{m.run.config_name}, {m.run.precision}, {m.run.device['name']}"
    ratio = call_ns(m.single) / call_ns(m.table)
    note = (
        f"{calls(m.table):,.0f} {m.table.what} calls a step with {m.run.batch_size} sequences. "
        f"A single one has {1 / m.run.batch_size:.3g} of the work; its calls take {ratio:.3g} of "
        "the time"
    )
    yield Item(True, f"your two profiles: {what}", note)


# --- the participant's profiles ------------------------------------------------------------------


def measured(work: Work) -> Measured:
    """Raises Missing: a profile is not there, or it is one of something else."""
    table, run = work.profile("v1") or (None, None)
    preset = PRESETS.get(run.config_name) if run else None
    if table is None or run is None or preset is None or run.batch_size != preset.batch_size:
        raise Missing("no profile of V1 with its own batch yet:", RUNNER)
    single, of = work.profile("v1", tool=SINGLE) or (None, None)
    wanted = (1, setting(run), run.seq_len)
    if single is None or of is None or (of.batch_size, setting(of), of.seq_len) != wanted:
        folder = f"--output-dir results/profiles/v1/{SINGLE}"
        size = f"--config {run.config_name} --batch-size 1 --precision {run.precision}"
        command = f"{RUNNER} {folder} -- {size}"
        raise Missing("no profile of the same model with a single sequence yet:", command)
    return Measured(table, run, single)
