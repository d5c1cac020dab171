"""The baseline: predictions and findings against the participant's own three runs of V1."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop.collection import StoredRun
from workshop.exercises.frame import Item, Missing, Work, note, setting
from workshop.exercises.predict import (
    Chosen,
    Found,
    NotCompared,
    Predicted,
    Question,
    ask,
    disturbed,
    step_ms,
)
from workshop.results import RunResult, model_sizes
from workshop.run import flops, presets, timing

RUN = "python version1_pytorch_baseline/tiny_llama_v1.py"
CLAIM = 1.05
PARTS = ("tokens", "fixed")
UNDECIDED = (1.4, 1.6)
"""Ratios at which twice the batch says neither clearly."""
QUIET = 1.25
"""The factor by which the times of two equal runs on a CPU, or the peaks measured before two runs,
may differ on a machine as busy in both."""


@dataclass(frozen=True)
class Measured:
    """The later and the earlier of two runs that are alike, and one with twice their batch."""

    later: RunResult
    earlier: RunResult
    doubled: RunResult
    files: tuple[Path, ...]
    """Result files of the three runs."""


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_runs, *QUESTIONS))


def gflop(run: RunResult) -> float:
    """Operations of a step."""
    return flops.step_flops(model_sizes(run.config), run.batch_size, run.seq_len).total / 1e9


def share_of_peak(run: RunResult) -> float:
    """The share of its peak that a run reached; above 1 the peak was measured too low."""
    return gflop(run) / (run.peak_tflops or float("nan")) / timing.median(run.step_ms)


def least_ms(m: Measured) -> float:
    """Time of a step's operations at the peak of the later run."""
    if share_of_peak(m.later) > 1 or impossible_times(m):
        raise NotCompared("not judged: other programs ran while the peak was measured")
    return gflop(m.later) / (m.later.peak_tflops or float("nan"))


def impossible_times(m: Measured) -> str:
    """Sentences on times that a quiet CPU doesn't give; "" for none. On a GPU small steps wait for
    launches: there equal runs do differ, and more tokens take no longer."""
    if m.later.device.get("type") != "cpu":
        return ""
    later, earlier, doubled = (timing.median(r.step_ms) for r in (m.later, m.earlier, m.doubled))
    apart = max(later, earlier) / min(later, earlier)
    found = "Twice the work can't take less time. " if doubled < later else ""
    return found + (f"Your two equal runs differ by {apart - 1:.0%}. " if apart > QUIET else "")


def quiet_ms(m: Measured, run: RunResult) -> float:
    """Median time of a step of a run. Raises NotCompared if other programs disturbed the runs."""
    if impossible_times(m):
        raise NotCompared("not judged: see the warning")
    return step_ms(run)


def backward_over_forward(m: Measured) -> float:
    quiet_ms(m, m.later)  # the phases of such a run say as little as its steps
    return timing.median(m.later.backward_ms) / timing.median(m.later.forward_ms)


def runs_differ(m: Measured) -> float:
    """The longer median over the shorter one."""
    a, b = quiet_ms(m, m.later), quiet_ms(m, m.earlier)
    return max(a, b) / min(a, b)


def growth(m: Measured) -> float:
    """The time of a step with twice the batch over that with the batch."""
    return quiet_ms(m, m.doubled) / quiet_ms(m, m.later)


def larger_part(m: Measured) -> set[str]:
    """The right answers; NotCompared if what the machine reached in a large matrix product shows
    that it was busier in one of the two runs."""
    peaks = [run.peak_tflops for run in (m.later, m.doubled) if run.peak_tflops]
    if peaks and max(peaks) > QUIET * min(peaks):
        both = " and ".join(f"{peak:.3g}" for peak in peaks)
        raise NotCompared(
            f"{growth(m):.2f} times as long says nothing: the machine was busier in one of the two "
            f"runs (a large matrix product reached {both} TFLOP/s); run both again, with nothing "
            "else beside them"
        )
    least, most = UNDECIDED
    return (
        {"tokens"} if growth(m) > most else {"fixed"} if growth(m) < least else {"tokens", "fixed"}
    )


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.million_weights", "predicted: weights, in millions", "",
        lambda m: flops.parameter_count(model_sizes(m.later.config)) / 1e6,
        "A layer has about 3 C^2 weights in its attention and 12 C^2 in its feed-forward part: "
        "most of the model is where few people look.", within=0.1,
    ),
    Predicted(
        "predict.gflop_a_step", "predicted: operations of a step", "GFLOP",
        lambda m: gflop(m.later),
        "6 x weights x tokens: a factor of 3 is the backward pass, a factor of 2 the addition that "
        "comes with every multiplication, a factor of 8 the batch.", within=0.1,
    ),
    Predicted(
        "predict.first_loss", "predicted: the first loss", "",
        lambda m: m.later.losses[0] or float("inf"),
        "A model that knows nothing gives each of V tokens 1/V: the loss is ln(V). A first loss "
        "far from that is a fault before any training.", within=0.05,
    ),
    Predicted(
        "predict.step_ms", "predicted: the time of a step", "ms", lambda m: quiet_ms(m, m.later),
        "A guess without a count behind it is seldom within a factor of three, which is why one "
        "measures. From the operations alone comes the least that it can be: see least_ms.",
    ),
    Predicted(
        "predict.backward_over_forward", "predicted: backward over forward", "",
        backward_over_forward,
        "The backward pass has twice the products. A ratio far from 2 says that something else "
        "takes the time; one far below 1, that a part of the backward pass did not run.",
    ),
    Predicted(
        "predict.twice_the_batch", "predicted: twice the batch", "x", growth,
        "2 says that the step's time is work; 1, that it is overhead, which more work would fill.",
        within=0.15,
    ),
    Found(
        "found.step_ms", "the time of a step", "ms", lambda m: quiet_ms(m, m.later),
        "The line `step` of the summary: the median, of the later of the two runs.",
    ),
    Found(
        "found.tokens_per_s", "tokens a second", "tokens/s",
        lambda m: m.later.batch_size * m.later.seq_len / quiet_ms(m, m.later) * 1e3,
        "The line `speed` of the summary; batch x tokens over the time of a step.",
    ),
    Found(
        "found.backward_over_forward", "backward over forward", "",
        backward_over_forward,
        "The line `backward` over the line `forward`, of the later of the two runs.",
    ),
    Found(
        "found.least_ms", "the least time of a step", "ms", least_ms,
        "The operations of a step, in GFLOP, over the peak in the line `rate`, in TFLOP/s. Not "
        "over the rate, which is what the step reached.", within=0.06,
    ),
    Found(
        "found.twice_the_batch", "twice the batch", "x", growth,
        "The median of the run with twice the batch over that of the later of the other two.",
    ),
    Found(
        "found.runs_differ_percent", "how far apart two runs are", "%",
        lambda m: 100 * (runs_differ(m) - 1),
        "The longer median over the shorter one, less 1, in percent.", within=0.1, margin=0.3,
    ),
    Chosen(
        "found.one_version_shows_1_05", f"whether one version can show {CLAIM}x against itself",
        ("yes", "no"), lambda m: "yes" if runs_differ(m) >= CLAIM else "no",
        lambda m: f"they differ by a factor of {runs_differ(m):.3f}",
        lambda m: "One run each proves nothing here: compare_versions.py alternates and repeats."
        if runs_differ(m) >= CLAIM
        else "This time not. But two runs are few: compare_versions.py gives an interval.",
    ),
    Chosen(
        "found.larger_part", "the larger part of a step's time", PARTS, larger_part,
        lambda m: f"twice the tokens took {growth(m):.2f} times as long",
        # t = fixed + tokens, growth x t = fixed + 2 tokens
        lambda m: f"about {min(max(growth(m) - 1, 0.0), 1.0):.0%} grows with the tokens",
    ),
)  # fmt: skip


def _runs(work: Work) -> Iterator[Item]:
    """Whether the three runs are there, and whether their numbers may be believed."""
    m = measured(work)
    run, three = m.later, (m.later, m.earlier, m.doubled)
    later, earlier, doubled = (timing.median(one.step_ms) for one in three)
    times = (
        f"{later:.4g} and {earlier:.4g} ms with {run.batch_size} sequences, "
        f"{doubled:.4g} ms with {m.doubled.batch_size}"
    )
    times += "".join(f"\n{path.relative_to(work.results)}" for path in m.files)
    what = f"{run.config_name}, {run.precision}, {run.device.get('name')}"
    yield Item(True, f"your three runs: {what}", times)
    yield from disturbed(three)
    if why := impossible_times(m):
        why += "Run the three again on a quiet machine."
        yield note("warning: nothing is judged by these times", why)
    if fast := [one for one in three if share_of_peak(one) > 1 and not one.plausibility]:
        shares = (
            f"{one.batch_size} sequences: {share_of_peak(one):.1%} of {one.peak_tflops:.3g} TFLOP/s"
            for one in fast
        )
        why = "Other programs ran while the peak was measured."
        yield note(f"warning: {len(fast)} of 3 runs beat their peak", "\n".join([*shares, why]))
    doubts = [sentence for one in three for sentence in one.plausibility]
    if any(one.gate.status != "pass" for one in three):
        doubts.append("The gate failed: see its result file.")
    what = "they passed the gate" + ("" if fast else ", and no number is impossible")
    yield Item(not doubts, what, "\n".join(doubts))


# --- the participant's runs ----------------------------------------------------------------------


def measured(work: Work) -> Measured:
    """The newest runs, undisturbed ones if there are enough. Raises Missing: a run is not there."""
    # A comparison's repeats of the same code skip the gate: they have no verdict.
    gated = [one for one in work.stored_runs("v1") if one.run.gate.status != "not run"]
    with contextlib.suppress(Missing):
        return _newest([one for one in gated if not one.run.disturbed])
    return _newest(gated)


def _newest(gated: list[StoredRun]) -> Measured:
    """Raises Missing: a run is not there."""
    alike = [stored for stored in gated if _is_base(stored.run)]
    if not alike:
        raise Missing("no run of V1 with its gate yet; twice:", f"{RUN} --num-steps 20")
    later = alike[0].run
    earlier = _first(alike[1:], later, batch=later.batch_size)
    if earlier is None:
        raise Missing("one run of V1 so far, and none like it; again:", f"{RUN} --num-steps 20")
    twice = 2 * later.batch_size
    doubled = _first(gated, later, batch=twice)
    if doubled is None:
        command = f"{RUN} --config {later.config_name} --num-steps 10 --batch-size {twice}"
        raise Missing("no run of V1 with twice the batch yet:", command)
    files = (alike[0].path, earlier.path, doubled.path)
    return Measured(later, earlier.run, doubled.run, files)


def _is_base(run: RunResult) -> bool:
    """Whether it trained a preset's model on a preset's batch, as V1 does by itself."""
    preset = presets.PRESETS.get(run.config_name)
    of_preset = preset and (run.batch_size, run.seq_len) == (preset.batch_size, preset.seq_len)
    return bool(of_preset) and bool(run.forward_ms) and run.peak_tflops is not None


def _first(runs: list[StoredRun], like: RunResult, *, batch: int) -> StoredRun | None:
    """The newest run that differs from another in its batch size alone."""
    wanted = (setting(like), like.seq_len, batch)
    found = (s for s in runs if (setting(s.run), s.run.seq_len, s.run.batch_size) == wanted)
    return next(found, None)
