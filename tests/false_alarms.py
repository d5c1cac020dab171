"""How often timing.speedup calls two sets of processes of the same speed significantly different.

    python tests/false_alarms.py

prints the table of docs/regression.md, in some minutes.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial

from workshop import records, versions
from workshop.compare.rows import variant
from workshop.results import RunResult
from workshop.run import timing
from workshop.versions import ROOT

PROCESSES = (2, 3, 5)
H200 = ROOT / "results" / "reference" / "nvidia_h200"
LEAST_STORED = 2 * max(PROCESSES)
Draw = Callable[[random.Random, int], tuple[list[float], list[float]]]
"""The median steps of `processes` processes of each side, of equal speed."""


def share(draw: Draw, processes: int, trials: int) -> float:
    """The share of significant comparisons, where none should be."""
    rng = random.Random(processes)
    alarms = 0
    for _ in range(trials):
        sides = draw(rng, processes)
        baseline, other = ([[ms] for ms in side] for side in sides)
        alarms += timing.speedup(baseline, other).significant
    return alarms / trials


def normal(scatter: float, other: float) -> Draw:
    """Processes whose logarithms scatter by these two standard deviations."""

    def draw(rng: random.Random, processes: int) -> tuple[list[float], list[float]]:
        one, two = (
            [100 * rng.lognormvariate(0, sd) for _ in range(processes)] for sd in (scatter, other)
        )
        return one, two

    return draw


def stored(medians: Sequence[float]) -> Draw:
    """Two sets of different processes among recorded ones of one version."""

    def draw(rng: random.Random, processes: int) -> tuple[list[float], list[float]]:
        drawn = rng.sample(medians, 2 * processes)
        return drawn[:processes], drawn[processes:]

    return draw


@cache
def recorded(*keys: str) -> list[list[float]]:
    """The processes' medians of each size and kind of some versions of which the H200's results
    hold enough."""
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for path in records.files_in(H200):
        for run in records.load_runs(path, RunResult):
            if run.step_ms and run.version in keys:
                sizes = (*sorted(run.config.items()), run.batch_size, run.seq_len)
                key = (run.version, variant(run), run.precision, sizes)
                found[key].append(timing.median(run.step_ms))
    return [medians for medians in found.values() if len(medians) >= LEAST_STORED]


def mean_share(pools: Sequence[Sequence[float]], processes: int, trials: int) -> float:
    """Over recorded versions and sizes, with this number of trials in all."""
    return statistics.fmean(share(stored(p), processes, trials // len(pools)) for p in pools)


def main(trials: int = 20_000) -> None:
    rows: dict[str, Callable[[int], float]] = {
        "both scatter equally": lambda n: share(normal(0.003, 0.003), n, trials),
        "one three times as much": lambda n: share(normal(0.003, 0.001), n, trials),
        "one ten times as much": lambda n: share(normal(0.003, 0.0003), n, trials),
        "one a hundred times as much": lambda n: share(normal(0.15, 0.0015), n, trials),
        "the four versions, as recorded on H200s": partial(_of_recorded, versions.VERSIONS, trials),
        "their peers, as recorded on H200s": partial(_of_recorded, versions.PEERS, trials),
    }
    print("| processes | " + " | ".join(f"{n} each" for n in PROCESSES) + " |")
    print("| --- |" + " ---: |" * len(PROCESSES))
    for name, of in rows.items():
        print(f"| {name} | " + " | ".join(f"{of(n):.1%}" for n in PROCESSES) + " |", flush=True)


def _of_recorded(keys: Collection[str], trials: int, processes: int) -> float:
    return mean_share(recorded(*keys), processes, trials)


if __name__ == "__main__":
    main()
