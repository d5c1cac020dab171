"""The statistics: how often they cry wolf, and what they find."""

import time

import pytest
import torch

from workshop import timing


def noisy_runs(generator: torch.Generator, *, step_ms: float) -> list[list[float]]:
    """Three processes of 20 steps: each process 1% off, each step 2%, now and then a hiccup."""
    runs = []
    for _ in range(3):
        offset = 1 + 0.01 * torch.randn((), generator=generator)
        steps = step_ms * offset * (1 + 0.02 * torch.randn(20, generator=generator))
        hiccups = torch.rand(20, generator=generator) < 0.05
        runs.append(torch.where(hiccups, 3 * steps, steps).tolist())
    return runs


def test_equal_versions_are_rarely_told_apart_and_a_tenth_nearly_always() -> None:
    generator = torch.Generator().manual_seed(0)
    false_alarms = found = 0
    trials = 100
    for seed in range(trials):
        baseline = noisy_runs(generator, step_ms=100.0)
        same = timing.speedup(baseline, noisy_runs(generator, step_ms=100.0), seed=seed)
        faster = timing.speedup(baseline, noisy_runs(generator, step_ms=90.0), seed=seed)
        false_alarms += same.significant
        found += faster.significant and faster.low > 1
    assert false_alarms <= 12  # three processes a side leave the interval a little narrow
    assert found >= 99


def test_steps_of_one_process_alone_would_claim_too_much() -> None:
    """Two processes that differ between themselves as much as from the other version."""
    steady = [[100.0] * 20, [104.0] * 20]
    ratio = timing.speedup(steady, [[101.0] * 20, [103.0] * 20])
    assert not ratio.significant
    assert ratio.value == pytest.approx(1.0, abs=0.02)


def test_the_ratio_is_that_of_the_medians_whatever_the_lengths() -> None:
    ratio = timing.speedup([[10.0, 10.0, 90.0], [10.0]], [[5.0, 5.0, 5.0, 5.0]])
    assert ratio.value == 2.0
    assert ratio.low <= 2.0 <= ratio.high


def test_median_and_spread() -> None:
    assert timing.median([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert timing.spread([10.0] * 5) == 0.0
    assert timing.spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)


def test_the_clock_measures_between_marks() -> None:
    clock = timing.StepClock(torch.device("cpu"))
    start = time.perf_counter()
    for pause in (0.0, 0.02, 0.05):
        time.sleep(pause)
        clock.mark()
    first, second = clock.durations_ms()
    assert first >= 20 and second >= 50
    assert first + second <= (time.perf_counter() - start) * 1e3
    assert clock.reached(1)
