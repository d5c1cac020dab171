"""What the exercises' checks look up: the participant's runs, and the true counts of a network."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labs.inference_benchmark import counts, networks
from labs.inference_benchmark.counts import Counts
from labs.inference_benchmark.request import LAB
from workshop.exercises.frame import Missing, Work
from workshop.labs import LabRun, percentile
from workshop.run import timing

PROGRAM = "python labs/inference_benchmark/micro_benchmarking_pytorch.py --network resnet18"
_PLAIN: dict[str, Any] = {
    "mode": "inference",
    "autocast": False,
    "channels_last": False,
    "fold": False,
    "compile": None,
    "cuda_graph": False,
    "export": False,
}


def plain_runs(work: Work, **options: Any) -> list[LabRun]:
    """Of inference in eager mode on one device, proven, newest first."""
    runs = work.lab_runs(LAB, **_PLAIN, **options)
    return [r for r in runs if r.proof.status == "pass" and "processes" not in r.metrics]


def newest(runs: Sequence[LabRun], what: str, flags: str) -> LabRun:
    """Raises Missing: there is none; `flags` are those of the program that make one."""
    if not runs:
        raise Missing(f"no run {what} yet:", f"{PROGRAM} {flags}")
    return runs[0]


def with_flag(flag: str) -> Callable[[LabRun], bool]:
    """Whether a run's command had a flag, with its value if one is given: "--iterations 5"."""
    words = flag.split()
    return lambda run: any(
        run.command[i : i + len(words)] == words for i in range(len(run.command))
    )


def text_option(run: LabRun, name: str) -> str:
    return str(run.options[name])


def p50_ms(run: LabRun) -> float:
    """As the summary prints it."""
    return percentile(sorted(run.step_ms), 0.5)


def images_per_s(run: LabRun) -> float:
    return run.units_per_step / timing.median(run.step_ms) * 1e3


def memory_mb(run: LabRun, part: str) -> float:
    return float(run.memory_mb[part])


@functools.cache
def counts_of(name: str) -> Counts:
    """Of a network by its name, from shapes alone."""
    network = networks.get_network(name)
    with torch.device("meta"):
        return counts.count(network.build(), torch.empty(1, 3, network.edge, network.edge))


def true_counts(run: LabRun) -> Counts:
    return counts_of(text_option(run, "network"))
