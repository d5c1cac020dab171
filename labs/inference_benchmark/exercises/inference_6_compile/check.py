"""Compilation: predictions and findings against the participant's own comparisons of its modes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.inference_benchmark import own_runs
from workshop.exercises.frame import Item, Missing, Work
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

PROGRAM = "python labs/inference_benchmark/micro_benchmarking_pytorch.py"
MODES = ("none", "default", "reduce-overhead", "max-autotune")
AS_FAST = 0.97
"""Share of the fastest mode's throughput: above it the order may be chance."""
WIDE = 2.0
"""An interval whose ends are further apart says little."""
SCRIPT_BATCHES = 20


@dataclass(frozen=True)
class Comparison:
    """The rows of --compare compile; the first is not compiled."""

    rows: Sequence[LabRow]

    def row(self, mode: str) -> LabRow | None:
        found = (row for row in self.rows if mode_of(row.first) == mode)
        return next(found, None)

    @property
    def difference(self) -> timing.Ratio:
        """Speed-up of the default mode. Raises NotCompared: one of the two has no throughput."""
        row = self.row("default")
        if row is None or row.speedup is None:
            raise NotCompared(f"{self.rows[0].first.subject}: no speed-up to compare")
        return row.speedup

    @property
    def verdict(self) -> str:
        low, high = self.difference.interval or (1.0, 1.0)
        return "faster" if low > 1 else "slower" if high < 1 else "none"

    def rate(self, mode: str) -> float:
        """Images a second; 0 of a mode that has none."""
        row = self.row(mode)
        return (row.units_per_s or 0.0) if row else 0.0


@dataclass(frozen=True)
class Measured:
    """The newest single run with --compile, the newest comparison in fp32, and the newest of the
    same network and batch at half precision."""

    single: LabRun
    full: Comparison
    half: Comparison
    networks: Sequence[Comparison]
    """One of several networks, the one with the fewest operations first."""

    @property
    def deeper_gains_more(self) -> bool:
        first, last = (one.difference for one in (self.networks[0], self.networks[-1]))
        return bool(first.interval and last.interval and last.interval[0] > first.interval[1])

    @property
    def compile_s(self) -> float:
        return self.single.setup_s["compile"]

    @property
    def batches(self) -> float:
        """Until compiling is paid back; 0 if it never is."""
        return float(self.single.metrics["break_even_batches"] or 0)

    @property
    def seconds(self) -> float:
        """Until then, of the plain program, which has had the same time."""
        return self.batches * float(self.single.metrics["plain_ms"] or 0) / 1e3


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_runs, *QUESTIONS))


def mode_of(run: LabRun) -> str:
    """One of MODES."""
    compiled = run.options["compile"]
    if compiled is None:
        return "none"
    return next((mode for mode in MODES if f"'{mode}'" in str(compiled)), "default")


def fastest(m: Measured) -> list[str]:
    most = max(m.full.rate(mode) for mode in MODES)
    return [mode for mode in MODES if m.full.rate(mode) >= AS_FAST * most]


def _never(m: Measured) -> list[tuple[float, str]]:
    if m.batches:
        return [(0.0, "it is paid back: compiled batches take less time than plain ones")]
    return [(m.compile_s, "compiled batches take no less time than plain ones: it never is")]


def _interval(difference: timing.Ratio) -> str:
    if difference.interval is None:
        return "a single process of each shows nothing"
    low, high = difference.interval
    few = ": too few processes, or too restless a machine" if high > WIDE * low else ""
    return f"{low:.2f} to {high:.2f} times as fast{few}"


def _intervals(m: Measured) -> str:
    return "; ".join(
        f"{own_runs.text_option(one.rows[0].first, 'network')}: {_interval(one.difference)}"
        for one in (m.networks[0], m.networks[-1])
    )


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.speedup", "predicted: the speed-up of compiling", "x",
              lambda m: m.full.difference.value,
              "Convolutions stay with the vendor's library. The compiler joins the operations "
              "between them, and cannot save more time than these take."),
    Predicted("predict.compile_s", "predicted: seconds to compile", "s", lambda m: m.compile_s,
              "It traces the network, writes kernels and calls a compiler for each: the time "
              "follows the number of different operations, not their size.", within=0.5),
    Found("found.compile_s", "seconds to compile", "s", lambda m: m.compile_s,
          "The line `Compilation time`, of the newest run with --compile and without --compare."),
    Found("found.break_even_batches", "batches until it is paid back", "batches",
          lambda m: m.batches,
          "The compiler's seconds over what a batch saves, or the line `Break-even`; 0 if never.",
          slips=_never),
    Found("found.break_even_s", "seconds of service until then", "s", lambda m: m.seconds,
          "That many batches at the plain network's time for each, which `Break-even` gives too.",
          within=0.05,
          slips=lambda m: [(m.compile_s, "that is the compiler's time; in it the plain program has "
                                         "served batches")]),
    Found("found.speedup", "the speed-up in fp32", "x", lambda m: m.full.difference.value,
          "The column `speed-up` of the comparison in fp32, of `compile` without a mode's name; "
          "where it has no number, images/s over images/s of plain fp32."),
    Chosen("found.difference", "whether compiling makes a difference in fp32",
           ("faster", "slower", "none"), lambda m: m.full.verdict,
           "an interval that contains 1 shows none; above 1 it is faster, below slower",
           lambda m: _interval(m.full.difference)),
    Chosen("found.fastest", "the fastest mode in fp32", MODES, fastest,
           "the column of images/s says so",
           lambda m: ", ".join(f"{mode} {m.full.rate(mode):,.1f}" for mode in MODES
                               if m.full.rate(mode))),
    Found("found.speedup_half", "the speed-up at half precision", "x",
          lambda m: m.half.difference.value,
          "Of the comparison with --precision fp16 or bf16, likewise."),
    Found("found.both", "both changes together", "x",
          lambda m: m.half.rate("default") / m.full.rate("none"),
          "Images/s of the compiled network at half precision over those of plain fp32.",
          within=0.05,
          slips=lambda m: [(
              m.half.difference.value,
              "that is over plain at the same precision: divide by plain fp32's",
          )]),
    Chosen("found.short_script", f"{SCRIPT_BATCHES} batches", ("yes", "no"),
           lambda m: "yes" if 0 < m.batches < SCRIPT_BATCHES else "no",
           lambda m: f"compare {SCRIPT_BATCHES} batches with the number until it is paid back"),
    Found("networks.speedup_deepest", "the speed-up of the deepest network", "x",
          lambda m: m.networks[-1].difference.value,
          "The last network's column `speed-up`; where it has no number, images/s over images/s.",
          within=0.05),
    Chosen("networks.deeper_gains_more", "whether deeper networks gain more", ("yes", "no"),
           lambda m: "yes" if m.deeper_gains_more else "no", _intervals, _intervals),
)  # fmt: skip


def _runs(work: Work) -> Iterator[Item]:
    m = measured(work)
    first = m.full.rows[0].first
    half = m.half.rows[0].first.options["precision"]
    ms = timing.median(m.single.step_ms)
    note = (
        f"compiled in {m.compile_s:.1f} s, then {ms:,.1f} ms a batch where plain takes "
        f"{float(m.single.metrics['plain_ms'] or 0):,.1f}"
    )
    yield Item(True, f"your runs: {first.subject}, fp32 and {half}, {first.device['name']}", note)
    rows = (*m.full.rows, *m.half.rows)
    yield from disturbed((m.single, *(run for row in rows for run in row.runs)))


# --- the participant's runs ----------------------------------------------------------------------


def measured(work: Work) -> Measured:
    """Raises Missing: one of the three measurements is not there."""
    runs = work.lab_runs("inference_benchmark", mode="inference")
    own = (run for run in runs if not own_runs.is_of_peer(run))
    alone = (run for run in own if "plain_ms" in run.metrics and not run.baseline)
    single = next((run for run in alone if run.options["compile"] is not None), None)
    if single is None:
        raise Missing(
            "no single run with --compile yet:", f"{own_runs.PROGRAM} --batch-size 4 --compile"
        )
    full = _comparison(runs, ("fp32",))
    like = full.rows[0].first
    same = [run for run in runs if _what(run) == _what(like)]
    half = _comparison(same, ("fp16", "bf16"), *_what(like))
    return Measured(single, full, half, _networks(runs))


def _networks(runs: Sequence[LabRun]) -> list[Comparison]:
    """Those of the newest session that has several networks. Raises Missing without one."""
    for rows in own_runs.comparisons(runs, "compile"):
        by_network: dict[str, list[LabRow]] = defaultdict(list)
        for row in rows:
            by_network[own_runs.text_option(row.first, "network")].append(row)
        if len(by_network) > 1:
            found = map(Comparison, by_network.values())
            return sorted(found, key=lambda one: one.rows[0].first.flops_per_step or 0.0)
    program = PROGRAM + " --network resnet18,resnet34 --batch-size 4 --iterations 5"
    raise Missing(
        "no comparison of several networks yet:", f"{program} --compare compile --compile"
    )


def _what(run: LabRun) -> tuple[str, int]:
    return own_runs.text_option(run, "network"), run.units_per_step


def _comparison(
    runs: Sequence[LabRun],
    precisions: tuple[str, ...],
    network: str = "resnet18",
    batch_size: int = 4,
) -> Comparison:
    """The newest one; network and batch are for the command that makes it."""
    for rows in own_runs.comparisons(runs, "compile"):
        one_network = len({row.first.subject for row in rows}) == 1
        if one_network and rows[0].first.options["precision"] in precisions:
            return Comparison(rows)
    flags = f"--network {network} --batch-size {batch_size} --iterations 10"
    raise Missing(
        f"no comparison in {' or '.join(precisions)} yet:",
        f"{PROGRAM} {flags} --compare compile --precision {precisions[-1]}",
    )
