"""From result files to the rows of a comparison: one a version, size, precision and device."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workshop.results import (
    NOT_AUDITED,
    PHASE_TIMES,
    SKIPPED,
    RunResult,
    model_sizes,
    verdict,
    worst_status,
)
from workshop.run import flops, presets, timing
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.versions import ALL, BASELINE

SCHEMA_VERSION = 1
STARTUP = {"compile", "capture"}
"""The parts of a run's `setup_s` that are the version's own cost before its first fast step."""
ONE_PROCESS = "1 process"
"""Note of a speed-up without interval: V1 or the version ran in one process only."""
DETERMINISTIC = "deterministic"
"""Part of the variant of such runs, which are compared among themselves."""
PLAIN = ("", DETERMINISTIC)
"""Variants of the baseline."""
Peaks = Mapping[tuple[object, ...], tuple[float, str | None]]
"""TFLOP/s and their source, by device, session and precision."""
K = TypeVar("K")


@dataclass
class Row:
    """One line of the table; None where there is nothing that may be printed.

    Only a row whose `status` is "timed" has times. A "failed" one (its gate or audit failed, or it
    ended in an error) has no numbers, nor has a "skipped" one, which this machine can't run; an
    "interpreted" one has the gate's gradients alone. `note` says why. `speedup` is V1's median step
    over this one's in the same session; with one process of either it has no interval.
    """

    version: str
    variant: str
    config: str
    precision: str
    device: str
    batch_size: int
    seq_len: int
    session: str
    runs: int
    parity: str
    audit: str = "not run"
    """Verdict on all timed runs: "pass", "fail", or "not run" if one of them was not audited."""
    gate_shape: tuple[int, int] | None = None
    """Batch size and sequence length that the gate was run on."""
    status: str = "timed"
    plausibility: list[str] = field(default_factory=list)
    note: str = ""
    disturbed: bool = False
    """Whether other programs disturbed all of its runs, so that its times are too long."""
    step_ms: float | None = None
    judge_ms: float | None = None
    """The time of a step by the judge's clock, with what it takes to hand over the batches and to
    read the weights."""
    step_spread: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    speedup: timing.Ratio | None = None
    peak_memory_mb: float | None = None
    memory_mb: dict[str, float | str] = field(default_factory=dict)
    memory_reduction: float | None = None
    loss_first: float | None = None
    """Loss of step 1, the first of the warm-up."""
    loss_last: float | None = None
    """Loss of the last timed step, whose number is `steps`."""
    steps: int | None = None
    params_total: int | None = None
    params_with_grad: int | None = None
    tensors_total: int | None = None
    tensors_with_grad: int | None = None
    tflops: float | None = None
    peak_tflops: float | None = None
    peak_share: float | None = None
    peak_source: str | None = None
    setup_s: dict[str, float] = field(default_factory=dict)
    prepared_beside: int = 0
    startup_s: float | None = None
    """Seconds to compile and capture, of the slowest process: a later one finds the compilers'
    caches filled, and `startup_least_s` is the fastest."""
    startup_least_s: float | None = None
    break_even: str | None = None
    """When the startup is made up for against V1: `after N steps`, `at once` or `never`; `unknown`
    without a significant difference."""
    break_even_steps: int | None = None

    @property
    def label(self) -> str:
        return f"{self.version} {self.variant}".strip()

    @property
    def step_parts(self) -> dict[str, float]:
        """The median step, divided as forward, backward and optimizer were in the pass that timed
        them apart, for a picture: their own medians may sum to more or less than the step. By the
        names of the fields; empty without them."""
        parts = {name: ms for name in PHASE_TIMES if (ms := getattr(self, name)) is not None}
        total = sum(parts.values())
        if self.step_ms is None or len(parts) < len(PHASE_TIMES) or total <= 0:  # of a broken file
            return {}
        return {name: self.step_ms / total * ms for name, ms in parts.items()}

    @property
    def group(self) -> tuple[str, str, int, int, str]:
        """Rows of one group are comparable: same device, size and precision."""
        return (self.device, self.config, self.batch_size, self.seq_len, self.precision)

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    @property
    def gate_is_smaller(self) -> bool:
        """Than the run: V1 in high precision would not fit, or an interpreter runs the version."""
        return self.gate_shape not in (None, (self.batch_size, self.seq_len))

    @property
    def refused(self) -> str:
        """The check that failed, "gate" or "audit"; else empty."""
        return "gate" if self.parity == "fail" else "audit" if self.audit == "fail" else ""

    @property
    def verdict(self) -> str:
        """PASS if gate and audit passed, FAIL, NOT_AUDITED, or SKIPPED."""
        passed = self.parity == self.audit == "pass"
        return verdict(failed=self.failed, skipped=self.status == SKIPPED, passed=passed)

    @property
    def starred_verdict(self) -> str:
        """The verdict, with a star if the gate was smaller than the run."""
        return f"{self.verdict} *" if self.gate_is_smaller else self.verdict

    def speedup_text(self) -> str:
        """The speed-up in words: `1.80x [1.75, 1.84]`, `no significant difference [0.97, 1.02]`,
        `1.80x (1 process)`, or a dash; or why there can be none."""
        if self.status in ("interpreted", "skipped"):
            return NOT_COMPARABLE if self.status == "interpreted" else self.status
        if self.version == BASELINE and self.variant in PLAIN and self.speedup is not None:
            return "baseline"
        return ratio(self.speedup)


def ratio(of: timing.Ratio | None, same: str = "no significant difference") -> str:
    """`1.80x [1.75, 1.84]`; `same` in place of the value where the interval contains 1;
    `1.80x (1 process)` without an interval; a dash for None."""
    if of is None:
        return "-"
    if of.interval is None:
        return f"{of.value:.2f}x ({ONE_PROCESS})"
    low, high = of.interval
    return f"{f'{of.value:.2f}x' if of.significant else same} [{low:.2f}, {high:.2f}]"


def ratio_fields(name: str, of: timing.Ratio | None) -> dict[str, Any]:
    """A ratio as files have it: its value under `name`, its interval under `name` and `_ci`."""
    interval = list(of.interval) if of and of.interval else None
    return {name: of.value if of else None, f"{name}_ci": interval}


def grouped(runs: Iterable[RunResult], key: Callable[[RunResult], K]) -> dict[K, list[RunResult]]:
    """The runs by what `key` says of each, in the order in which they come."""
    found: dict[K, list[RunResult]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def ordinary(runs: Iterable[RunResult]) -> list[RunResult]:
    """The runs of whole versions: rungs of waterfalls and points of sweeps would fill a table of
    versions with single changes and odd sizes."""
    return [run for run in runs if run.kind == "run"]


def preferred(runs: Iterable[RunResult]) -> list[RunResult]:
    """The ordinary runs; all of them if none is."""
    runs = list(runs)
    return ordinary(runs) or runs


def build_rows(runs: Iterable[RunResult], peaks: Peaks | None = None) -> list[Row]:
    """The rows of the newest session of each version and group, in the ladder's order.

    Only runs of one session are set against each other: across sessions the machine may have
    changed. An older session counts instead if it has V1 and the newer one has not, or if it has
    several processes and the newer one only one, which gives no interval, and did not fail.

    Args:
        peaks: `session_peaks` of more runs than these, where their sessions have more.
    """
    runs = list(runs)
    peaks = session_peaks(runs) if peaks is None else peaks
    rows: list[Row] = []
    for group in grouped(runs, _compared).values():
        plain_v1 = [run for run in group if run.version == BASELINE and variant(run) in PLAIN]
        baselines = grouped(plain_v1, lambda run: run.session)
        chosen = [
            _newest(own, baselines)
            for own in grouped(group, lambda run: (run.version, variant(run))).values()
        ]
        shown_v1 = {own[0].session for own in chosen if own[0].version == BASELINE} & {*baselines}
        for own in chosen:
            row = build_row(own, baselines.get(own[0].session, []))
            if row.speedup and row.step_ms and row.session not in shown_v1:
                of_v1 = f"{row.speedup.value * row.step_ms:,.2f} ms"
                row.note = join(row.note, f"speed-up over V1 of its own session, {of_v1}")
            _fill_peak(row, peaks)
            rows.append(row)
    return sorted(rows, key=_order)


def _compared(run: RunResult) -> tuple[object, ...]:
    """Equal for runs that are set against each other."""
    return (*size_of(run), run.precision, bool(run.options.get(DETERMINISTIC)))


def _newest(runs: list[RunResult], baselines: Mapping[str, object]) -> list[RunResult]:
    """The runs of the newest session, as `build_rows` prefers them."""

    sessions = grouped(runs, lambda run: run.session)
    newest = max(sessions, key=lambda session: (session in baselines, session))
    own = sessions[newest]
    if len(own) == 1 and own[0].status in ("complete", "interrupted"):
        several = (
            session
            for session, its in sessions.items()
            if len(its) > 1 and (session in baselines) == (newest in baselines)
        )
        newest = max(several, default=newest)
    return sessions[newest]


def _order(row: Row) -> tuple[object, ...]:
    size = (presets.rank(row.config), row.batch_size * row.seq_len, row.config)
    return (row.device, *size, row.precision, list(ALL).index(row.version), row.variant)


def session_peaks(runs: Iterable[RunResult]) -> Peaks:
    """The highest peak of each session: each process measures an unlisted chip's anew, and a busy
    minute must not give a row a greater share."""
    found: dict[tuple[object, ...], tuple[float, str | None]] = {}
    for run in runs:
        key = (str(run.device.get("name")), run.session, run.precision)
        if run.peak_tflops and run.peak_tflops > found.get(key, (0.0, None))[0]:
            found[key] = run.peak_tflops, run.peak_source
    return found


def _fill_peak(row: Row, peaks: Peaks) -> None:
    peak = peaks.get((row.device, row.session, row.precision))
    if row.tflops is not None and peak is not None:
        row.peak_tflops, row.peak_source = peak
        row.peak_share = row.tflops / row.peak_tflops


def size_of(run: RunResult) -> tuple[object, ...]:
    """Equal for runs of one device and size."""
    sizes = tuple(sorted(run.config.items()))
    return (str(run.device.get("name")), sizes, run.batch_size, run.seq_len)


def size_name(run: RunResult) -> str:
    """The preset, or the measures of another model: several of those may be side by side."""
    layers, width = run.config.get("num_layers"), run.config.get("hidden_dim")
    if run.config_name in presets.PRESETS or layers is None or width is None:
        return run.config_name
    return f"{run.config_name} ({layers} layers of {width})"


def variant(run: RunResult) -> str:
    """A run's differences from its version's defaults, for example `no-fuse-qkv`; where more of
    its switches are off than on, those that are on: `only fuse-qkv`, or `unfused`."""
    version, options = ALL[run.version], run.options
    switches = {n.replace("_", "-"): on for n, on in options.items() if n.startswith("fuse_")}
    left = [name for name, on in switches.items() if on]
    parts = [f"no-{name}" for name, on in switches.items() if not on]
    if len(parts) > len(left) > 0:
        parts = [f"only {' '.join(left)}"]
    elif len(parts) > 1 and not left:
        parts = ["unfused"]
    if options.get("compile", version.compile) != version.compile:
        parts.append(f"compile={options['compile']}")
    on_gpu = run.device.get("type") == "cuda"
    default_graph = version.cuda_graph and on_gpu and not run.interpreted
    if options.get("cuda_graph", default_graph) != default_graph:
        parts.append("cuda-graph" if options["cuda_graph"] else "no-cuda-graph")
    return " ".join([*parts, *[DETERMINISTIC] * bool(options.get(DETERMINISTIC))])


# --- one row -------------------------------------------------------------------------------------


def build_row(runs: list[RunResult], baseline: list[RunResult]) -> Row:
    """One row, except its share of the peak, which is its session's: `build_rows` fills it in.

    Args:
        runs: at least one, all of one session and kind.
        baseline: V1's, for the speed-up; without them the row has no speed-up.
    """
    first = runs[0]
    shapes = ((run.gate.batch_size, run.gate.seq_len) for run in runs)
    row = Row(
        version=first.version,
        variant=variant(first),
        config=first.config_name,
        precision=first.precision,
        device=str(first.device.get("name")),
        batch_size=first.batch_size,
        seq_len=first.seq_len,
        session=first.session,
        runs=len(runs),
        parity=_parity(runs),
        audit=_audit(runs),
        gate_shape=next(((b, t) for b, t in shapes if b is not None and t is not None), None),
    )
    if _has_failed(row, runs):
        return row
    timed = [run for run in runs if run.step_ms or run.interpreted]
    if timed[0].gradients is not None:
        for name, value in vars(timed[0].gradients).items():
            setattr(row, name, value)
    row.plausibility = sorted({sentence for run in timed for sentence in run.plausibility})
    interrupted = sum(run.status == "interrupted" for run in timed)
    cut = f"{interrupted} of {len(timed)} runs interrupted" if interrupted else ""
    if any(run.interpreted for run in timed):
        row.status = "interpreted"
        how = (
            "Triton's interpreter runs its kernels hundreds of times slower, so the gate checked "
            "it, and nothing was timed or audited"
        )
        row.note = join(f"{NOT_COMPARABLE}: {how}", cut)
        return row
    row.disturbed = all(run.disturbed for run in timed)
    row.note = join(cut, _disturbance(timed))
    _fill_memory_and_losses(row, timed)
    _fill_times(row, steady(timed))
    _fill_speedup(row, steady(timed), baseline)
    _fill_startup(row, timed)
    return row


def _has_failed(row: Row, runs: list[RunResult]) -> bool:
    """Whether a run was refused or broke: the row's status and note say so then."""
    refused = next((run.refused for run in runs if run.refused), None)
    if refused is not None:
        check, failures = refused
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        row.status, row.note = "failed", f"{check} failed: {failures[0]}{more}"
        return True
    broken = [run for run in runs if run.error]
    if broken or not any(run.step_ms or run.interpreted for run in runs):
        skipped = bool(broken) and all(run.status == "skipped" for run in broken)
        row.status = "skipped" if skipped else "failed"
        row.note = (broken[0].error if broken else None) or "no timed step"
        return True
    return False


def _disturbance(timed: list[RunResult]) -> str:
    disturbed = sum(run.disturbed for run in timed)
    if not disturbed:
        return ""
    effect = "the times are too long" if disturbed == len(timed) else "not in the times"
    return f"{disturbed} of {len(timed)} runs disturbed by other programs: {effect}"


def steady(runs: list[RunResult]) -> list[RunResult]:
    """The runs whose times count: without those that other programs disturbed; if that were all,
    the first of each repeat, since a second one makes no second process."""
    first = [run for run in runs if not run.options.get("again")]
    return [run for run in runs if not run.disturbed] or first or runs


def _parity(runs: list[RunResult]) -> str:
    """The gate's verdict: only a comparison's first repeat passes it."""
    return worst_status((run.gate.status for run in runs), ("fail", "pass"))


def _audit(runs: list[RunResult]) -> str:
    return worst_status(run.audit.status for run in runs if run.step_ms)


def _fill_memory_and_losses(row: Row, timed: list[RunResult]) -> None:
    measured = [run.memory_mb for run in timed if run.memory_mb]
    if measured:
        row.memory_mb = max(measured, key=lambda memory: float(memory["peak"]))
        row.peak_memory_mb = float(row.memory_mb["peak"])
    losses = timed[0].losses
    row.loss_first, row.loss_last, row.steps = losses[0], losses[-1], len(losses)


def _fill_times(row: Row, timed: list[RunResult]) -> None:
    """Times, and the rates that follow from them."""
    steps = [milliseconds for run in timed for milliseconds in run.step_ms]
    row.step_ms = timing.median(steps)
    row.step_spread = timing.spread(steps)
    judged = [run.judge_ms for run in timed if run.judge_ms is not None]
    row.judge_ms = timing.median(judged) if judged else None
    row.samples_per_s = row.batch_size / row.step_ms * 1e3
    row.tokens_per_s = row.samples_per_s * row.seq_len
    for name in PHASE_TIMES:
        samples = [milliseconds for run in timed for milliseconds in getattr(run, name)]
        setattr(row, name, timing.median(samples) if samples else None)
    sizes = model_sizes(timed[0].config), row.batch_size, row.seq_len
    row.tflops = flops.step_tflops(*sizes, row.step_ms)


def _fill_speedup(row: Row, timed: list[RunResult], baseline: list[RunResult]) -> None:
    baseline_steps = [run.step_ms for run in steady(baseline) if run.step_ms]
    broken = any(run.error for run in baseline) or _audit(baseline) == "fail"
    reason = ""
    if row.parity != "pass":
        reason = "gate not run"
    elif not baseline:
        reason = "no V1 in the same session"
    elif broken or _parity(baseline) != "pass" or not baseline_steps:
        reason = "V1 failed in this session"
    if reason:
        row.note = join(row.note, f"{reason}: no speed-up")
        return
    row.speedup = timing.speedup(baseline_steps, [run.step_ms for run in timed])
    peaks = [float(run.memory_mb["peak"]) for run in baseline if run.memory_mb]
    if peaks and row.peak_memory_mb is not None:
        row.memory_reduction = 1 - row.peak_memory_mb / max(peaks)


def _fill_startup(row: Row, timed: list[RunResult]) -> None:
    def seconds(setup_s: dict[str, float]) -> float:
        return sum(setup_s[name] for name in STARTUP)

    measured = [run.setup_s for run in timed if STARTUP <= run.setup_s.keys()]
    if not measured:
        return
    row.prepared_beside = max(run.prepared_beside for run in timed)
    row.setup_s = max(measured, key=seconds)
    row.startup_s, row.startup_least_s = seconds(row.setup_s), min(map(seconds, measured))
    if row.speedup is None or row.step_ms is None or row.speedup_text() == "baseline":
        return
    low, high = row.speedup.interval or (1.0, 1.0)
    if low <= 1:
        row.break_even = "never" if high < 1 else "unknown"
        return
    saved_s = row.step_ms * (row.speedup.value - 1) / 1e3
    row.break_even_steps = math.ceil(row.startup_s / saved_s)
    row.break_even = f"after {row.break_even_steps:,} steps" if row.break_even_steps else "at once"


# --- notes ---------------------------------------------------------------------------------------


def join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def verdict_notes(rows: Iterable[Row]) -> list[str]:
    """Notes on what qualifies verdicts and speed-ups: smaller gates, runs that were not audited,
    and ratios without an interval."""
    rows = list(rows)
    lines = without_interval(rows)
    shapes = dict.fromkeys(row.gate_shape for row in rows if row.gate_is_smaller)
    if shapes:
        named = ", ".join(f"{shape[0]} x {shape[1]}" for shape in shapes if shape is not None)
        lines.append(f"*: the gate ran on fewer tokens than the run: {named}")
    if any(row.verdict == NOT_AUDITED and row.status != "interpreted" for row in rows):
        lines.append(f"{NOT_AUDITED}: the timed run itself was not compared with a run of V1")
    return lines


def without_interval(rows: Iterable[Row]) -> list[str]:
    """Why some ratios have no interval, in a sentence; empty if all have."""
    note = f"({ONE_PROCESS}): no interval, which takes two processes of each version"
    return [note] if any(row.speedup_text().endswith(f"({ONE_PROCESS})") for row in rows) else []


def trained_differently(runs: Iterable[RunResult]) -> list[str]:
    """Those of seed, learning rate and data in which some runs differ: none if all started from the
    same weights and saw the same batches, so that their losses may be compared step by step."""
    runs = list(runs)
    values = {
        "seed": {str(run.options.get("seed")) for run in runs},
        "learning rate": {str(run.options.get("learning_rate")) for run in runs},
        "data": {str(run.data.get("sha256") or run.data.get("name")) for run in runs},
    }
    return [name for name, different in values.items() if len(different) > 1]
