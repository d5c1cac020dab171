"""A regression check: a stored comparison against a new one.

Each process counts once, with its median step, as in `timing.speedup`: the steps of a process share
its clock, its memory layout and its neighbours, and say little about the next process. Neighbours
only slow a process down, so the slowest three of ten on either side are set aside, and the change
is the difference of the other logarithms' means. It is judged by Student's t on their winsorized
scatter: the trimmed t-test (Yuen and Dixon, The approximate behaviour and performance of the
two-sample trimmed t, Biometrika 60, 1973), trimmed at the slow end alone.

A change is reported if it is at least the threshold and its interval does not contain 0. All
comparisons of a check share FALSE_ALARMS between them (Bonferroni). Where the interval is too wide
for a change by the threshold to be seen, the verdict is not "no difference" but "too noisy to
tell", with the least visible change and the number of processes that would show the threshold.

A bootstrap of a few processes draws from too few values for such small probabilities, and a rank
test of 5 against 5 has none below 1 in 252. docs/regression.md shows how this rule does with
processes that scatter as recorded ones do; tests/test_regression.py repeats that.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from workshop import errors, records
from workshop.compare import rows
from workshop.errors import WorkshopError
from workshop.results import PHASE_TIMES, RunResult
from workshop.run import timing
from workshop.versions import ALL

SCHEMA_VERSION = 2
FALSE_ALARMS = 0.005
"""The share of checks of unchanged code with a "slower" among the verdicts, if processes scatter
normally. They do not, and it may reach 0.01."""
LEAST_PROCESSES, MOST_PROCESSES = 2, 50
"""Processes of each side: with fewer the scatter is unknown, and more are never advised."""

SLOWER = "slower"
FASTER = "faster"
SAME = "no significant difference"
TOO_NOISY = "too noisy to tell"
NOT_COMPARABLE = "not comparable"
NOT_TIMED = "not timed"
NEW = "new"
GONE = "gone"
FAILED = "failed"
VERDICTS = (SLOWER, FAILED, NOT_COMPARABLE, TOO_NOISY, FASTER, GONE, NEW, NOT_TIMED, SAME)
"""The worst first."""
ALARMS = (SLOWER, FAILED)
STEP, MEMORY = "step_ms", "peak_memory_mb"
METRICS = {STEP: "step"}
METRICS |= {name: name.removesuffix("_ms") for name in PHASE_TIMES} | {MEMORY: "memory"}
"""The quantities that are compared, by their names in a comparison's rows, with their headings."""


# --- statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """From `before` to `after`, geometric means of the processes' values in the metric's unit.

    `low` and `high` bound the ratio of the two. `scatter` is the (winsorized) standard deviation
    of the logarithms between the processes of one side, and `tail` the probability on each side
    of the interval.
    """

    before: float
    after: float
    low: float
    high: float
    scatter: float
    tail: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def visible(self) -> float:
        """The least slow-down that these processes can show: 0.02 is 2%."""
        return self.high / self.ratio - 1

    def verdict(self, threshold: float) -> str:
        """SLOWER, FASTER, SAME or TOO_NOISY for changes by the threshold or more: 0.03 is 3%."""
        if self.low > 1 and self.ratio >= 1 + threshold:
            return SLOWER
        if self.high < 1 and self.ratio <= 1 / (1 + threshold):
            return FASTER
        return TOO_NOISY if self.visible > threshold else SAME

    def processes_needed(self, threshold: float) -> int | None:
        """How many of each side would show a change by the threshold, if they scatter as these
        do; None if more than MOST_PROCESSES."""
        for count in range(LEAST_PROCESSES, MOST_PROCESSES + 1):
            kept = _kept(count)
            if _half_width(self.scatter, (kept, kept), self.tail) <= math.log1p(threshold):
                return count
        return None


def compare(before: Sequence[float], after: Sequence[float], *, comparisons: int = 1) -> Change:
    """The change between two sets of processes.

    Args:
        before, after: one positive value a process, LEAST_PROCESSES or more each.
        comparisons: of the whole check, which share FALSE_ALARMS between them.
    """
    means, kept, squares = [], [], 0.0
    for values in (before, after):
        logs = sorted(map(math.log, values))
        faster = logs[: _kept(len(logs))]
        # Those set aside count in the scatter like the slowest of the others.
        winsorized = faster + [faster[-1]] * (len(logs) - len(faster))
        centre = statistics.fmean(winsorized)
        means.append(statistics.fmean(faster))
        kept.append(len(faster))
        squares += sum((value - centre) ** 2 for value in winsorized)
    scatter, tail = math.sqrt(squares / (sum(kept) - 2)), FALSE_ALARMS / comparisons
    half, log_ratio = _half_width(scatter, kept, tail), means[1] - means[0]
    bounds = math.exp(log_ratio - half), math.exp(log_ratio + half)
    return Change(math.exp(means[0]), math.exp(means[1]), *bounds, scatter, tail)


def _kept(processes: int) -> int:
    """How many are left when the slowest three of ten are set aside."""
    return processes - processes * 3 // 10


def _half_width(scatter: float, kept: Sequence[int], tail: float) -> float:
    """Half the interval of a difference of means of `kept` values, in the unit of `scatter`."""
    deviation = scatter * math.sqrt(sum(1 / count for count in kept))
    return timing.t_quantile(tail, sum(kept) - len(kept)) * deviation


# --- series --------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Equal for runs of one version, size and precision: a series."""

    version: str
    variant: str
    config: str
    precision: str
    batch_size: int
    seq_len: int
    sizes: tuple[tuple[str, float], ...]

    @property
    def order(self) -> tuple[object, ...]:
        """Small sizes first, and of one size the ladder's order."""
        size = (self.batch_size * self.seq_len, self.config, self.precision)
        return (*size, list(ALL).index(self.version), self.variant, self.sizes)


def _key(run: RunResult) -> Key:
    name = (run.version, rows.variant(run), run.config_name, run.precision)
    return Key(*name, run.batch_size, run.seq_len, tuple(sorted(run.config.items())))


def _newest(runs: Iterable[RunResult], like: RunResult | None = None) -> dict[Key, list[RunResult]]:
    """The newest session of each series, preferably on the device and software of `like`."""

    def order(run: RunResult) -> tuple[bool, str]:
        return (like is None or not differing(like, run), run.session)

    newest = {}
    for key, series in rows.grouped(runs, _key).items():
        session = max(series, key=order).session
        newest[key] = [run for run in series if run.session == session]
    return newest


def repeats(runs: Iterable[RunResult]) -> int:
    """The most processes that a series has."""
    return max(len(rows.steady(series)) for series in rows.grouped(runs, _key).values())


def differing(before: RunResult, after: RunResult) -> list[str]:
    """The differences of device and software, each with both values."""
    found = []
    for heading in ("device", "software"):
        then, now = getattr(before, heading), getattr(after, heading)
        found += [
            f"{heading} {name}: {then.get(name)} then, {now.get(name)} now"
            for name in sorted({*then, *now} - {"peaks_source"})
            if then.get(name) != now.get(name)
        ]
    return found


def _fitness(runs: list[RunResult]) -> tuple[str | None, str]:
    """FAILED or NOT_TIMED with the reason, or None for runs with proven times."""
    row = rows.build_row(runs, [])
    if row.failed:
        return FAILED, row.note
    if row.status != "timed":
        return NOT_TIMED, f"{row.status}: {row.note}"
    if row.parity != "pass":
        return FAILED, "gate not run: a time without a verdict"
    return None, ""


# --- the check -----------------------------------------------------------------------------------


@dataclass
class Finding:
    """A verdict on a metric of a version at a size and precision, or on the version itself where
    `metric` is None. Numbers are None where nothing was compared.

    `change` is 0.05 for 5% more than `before`, `interval` its bounds, and `visible` the least
    visible slow-down; `before` and `after` are in `unit`.
    """

    version: str
    variant: str
    config: str
    precision: str
    batch_size: int
    seq_len: int
    verdict: str
    note: str = ""
    metric: str | None = None
    unit: str | None = None
    processes: list[int] = field(default_factory=list)
    before: float | None = None
    after: float | None = None
    change: float | None = None
    interval: list[float] | None = None
    visible: float | None = None

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.version, self.variant, self.config, self.precision)))

    @property
    def heading(self) -> str:
        return METRICS.get(self.metric or "", "")


def make_baseline(
    folders: Iterable[Sequence[RunResult]],
) -> tuple[list[RunResult], list[Finding]]:
    """The runs of a baseline: each folder's newest session of each series; and the findings on
    those that are skipped, as they did not pass the gate or have no times.

    Args:
        folders: the runs of one or several folders. Several show how far sessions drift apart.

    Raises:
        WorkshopError: nothing is left, or they are of several devices or software versions.
    """
    skipped: list[Finding] = []
    kept: list[RunResult] = []
    for runs in folders:
        for key, series in _newest(runs).items():
            verdict, note = _fitness(series)
            if verdict is None:
                kept += series
            else:
                skipped.append(Finding(*key[:-1], verdict, note))
    if not kept:
        reasons = "; ".join(f"{f.label}: {f.note}" for f in skipped)
        raise WorkshopError(f"no run is fit for a baseline: {reasons}")
    for run in kept:
        if differences := differing(kept[0], run):
            raise WorkshopError(
                f"a baseline is of one machine, but its runs differ in {', '.join(differences)}: "
                "save one for each"
            )
    return kept, skipped


def load_baseline(path: Path) -> list[RunResult]:
    """Raises WorkshopError: the file is no comparison, or has no run of a version."""
    runs = records.load_runs(path, RunResult)
    if not runs:
        how = "make a baseline with `regression_tester.py baseline save`"
        raise WorkshopError(f"{path}: there is no run of a version in it: {how}")
    return runs


def check(
    baseline: Sequence[RunResult],
    runs: Iterable[RunResult],
    *,
    threshold: float,
    force: bool = False,
) -> list[Finding]:
    """The verdicts on each series of the baseline, then on those that are new.

    Args:
        runs: of which each series' newest session counts.
        threshold: the least change that is reported, 0.03 for 3%.
        force: compare other devices and software versions too.
    """
    before, after = rows.grouped(baseline, _key), _newest(runs, baseline[0])
    findings: list[Finding] = []
    compared: list[tuple[Finding, list[list[float]]]] = []
    for key in sorted({*before, *after}, key=lambda key: key.order):
        then, now = before.get(key), after.get(key)
        verdict, note = _without_times(then, now, force)
        if verdict is not None or then is None or now is None:
            findings.append(Finding(*key[:-1], str(verdict), note))
            continue
        for metric in METRICS:
            sides = [_values(side, metric) for side in (then, now)]
            if any(sides):
                unit = "MB" if metric == MEMORY else "ms"
                findings.append(Finding(*key[:-1], NOT_COMPARABLE, note, metric, unit))
                compared.append((findings[-1], sides))
    for finding, sides in compared:
        _fill(finding, *sides, threshold=threshold, comparisons=len(compared))
    return findings


def _without_times(
    before: list[RunResult] | None, after: list[RunResult] | None, force: bool
) -> tuple[str | None, str]:
    """A verdict on a series that can't be compared metric by metric, else None; and a note."""
    if after is None:
        return GONE, ""
    verdict, note = _fitness(after)
    if verdict == NOT_TIMED and before is not None:
        return NOT_COMPARABLE, f"timed then, and now {note}"
    if verdict is not None:
        return verdict, note
    if before is None:
        step = timing.median([value for run in after for value in run.step_ms])
        return NEW, f"{step:,.2f} ms a step"
    differences = "; ".join(differing(before[0], after[0]))
    return (NOT_COMPARABLE if differences and not force else None), differences


def _values(runs: list[RunResult], metric: str) -> list[float]:
    """One value a process, of those that measured any."""
    used = rows.steady(runs)
    if metric == MEMORY:
        values = [float(run.memory_mb.get("peak", 0)) for run in used]
    else:
        values = [timing.median(ms) for run in used if (ms := getattr(run, metric))]
    return [value for value in values if value > 0]


def _fill(
    finding: Finding,
    before: list[float],
    after: list[float],
    *,
    threshold: float,
    comparisons: int,
) -> None:
    finding.processes = [len(before), len(after)]
    if min(finding.processes) < LEAST_PROCESSES:
        finding.note = f"{min(finding.processes)} of {LEAST_PROCESSES} processes that it takes"
        return
    change = compare(before, after, comparisons=comparisons)
    finding.before, finding.after = change.before, change.after
    finding.change, finding.visible = change.ratio - 1, change.visible
    finding.interval = [change.low - 1, change.high - 1]
    finding.verdict = change.verdict(threshold)
    if finding.verdict == TOO_NOISY:
        needed = change.processes_needed(threshold)
        remedy = "calm the machine, or take a larger --config"
        if needed is not None:
            remedy = f"use --repeats {needed} for the baseline and the check"
        least = format(change.visible, ".1%" if change.visible < 0.1 else ".0%")
        with_these = f"with {len(before)} and {len(after)} processes"
        advice = f"can't see less than {least} {with_these}: {remedy}"
        finding.note = rows.join(finding.note, advice)


def exit_status(findings: Sequence[Finding]) -> int:
    """ANSWER_IS_NO where something is slower or failed; else NOT_ON_THIS_MACHINE where something
    could not be compared, or the noise hid every version's step; else DONE."""
    verdicts = [finding.verdict for finding in findings]
    if not set(ALARMS).isdisjoint(verdicts):
        return errors.ANSWER_IS_NO
    steps = [finding.verdict for finding in findings if finding.metric == STEP]
    blind = bool(steps) and all(verdict == TOO_NOISY for verdict in steps)
    return errors.NOT_ON_THIS_MACHINE if NOT_COMPARABLE in verdicts or blind else errors.DONE
