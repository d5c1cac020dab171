"""The statistics: how often they raise a false alarm, and what they find."""

import random
import time

import pytest
import torch
from false_alarms import PROCESSES, mean_share, normal, recorded, share

from workshop.run import timing
from workshop.versions import VERSIONS


@pytest.mark.parametrize(
    "processes",
    [
        number if number == 3 else pytest.param(number, marks=pytest.mark.slow)
        for number in PROCESSES
    ],
)
def test_a_version_differs_from_itself_in_one_of_twenty_comparisons(processes) -> None:
    """As docs/regression.md has it, with fewer trials."""
    assert 0.04 <= share(normal(0.003, 0.003), processes, 4000) <= 0.06
    assert 0.03 <= mean_share(recorded(*VERSIONS), processes, 20_000) <= 0.07
    # V1 at `small` beside V3: the one waits for the host, the other does not.
    assert 0.03 <= share(normal(0.15, 0.0015), processes, 2000) <= 0.075
    worst = share(normal(0.003, 0.0003), processes, 1000)
    assert worst <= {2: 0.11, 3: 0.085, 5: 0.075}[processes]


def test_a_difference_beyond_the_scatter_is_found() -> None:
    draw, found = normal(0.003, 0.003), 0
    rng = random.Random(0)
    for _ in range(200):
        baseline, other = draw(rng, 3)
        ratio = timing.speedup([[ms] for ms in baseline], [[0.98 * ms] for ms in other])
        found += ratio.significant and ratio.value > 1
    assert found >= 198


def test_a_process_counts_once_however_many_steps_it_has() -> None:
    """Two processes that differ between themselves as much as from the other version."""
    few, many = (
        timing.speedup([[100.0] * steps, [104.0]], [[101.0] * steps, [103.0]]) for steps in (1, 500)
    )
    assert not few.significant and few.interval == pytest.approx(many.interval)


def test_the_interval_holds_the_ratio_of_the_medians() -> None:
    """Four of ten processes of the one are slow: the mean is far from the median."""
    uneven = [[ms] for ms in [100.0] * 6 + [200.0] * 4]
    ratio = timing.speedup(uneven, [[100.0]] * 9 + [[100.1]])
    assert ratio.interval is not None and ratio.value == 1.0
    assert ratio.interval[0] <= 1.0 <= ratio.interval[1]


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
