"""A participant's own runs, for the exercises' checks and the results sheet: which of them answers
which question, what it measured, and the true counts of its network."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labs.inference_benchmark import counts, networks
from labs.inference_benchmark.counts import Counts
from labs.inference_benchmark.request import LAB
from workshop import labs
from workshop.exercises.frame import Missing, Work
from workshop.labs import LabRow, LabRun
from workshop.profilers import kernel_file, load
from workshop.profilers.table import KernelTable
from workshop.run import timing

PROGRAM = "python labs/inference_benchmark/micro_benchmarking_pytorch.py --network resnet18"
TRACES = "traces"
_VARIANT = (
    *("precision", "autocast", "channels_last", "fold", "fuse", "compile", "cuda_graph"),
    *("export", "peer"),
)


@dataclass(frozen=True)
class Profile:
    """A trace of --kineto, and the run that it is of."""

    table: KernelTable
    run: LabRun

    def five_share(self) -> float:
        """The five longest kernels' share of the time of all, from 0 to 1."""
        return sum(kernel.total_ns for kernel in self.table.kernels[:5]) / self.table.total_ns

    def share(self, category: str) -> float:
        """The category's share of the time of all kernels, from 0 to 1."""
        return self.table.category_ns().get(category, 0.0) / self.table.total_ns

    def launches(self) -> float:
        """Kernels (and copies) of an iteration; on a CPU operators."""
        return self.table.launches / (self.table.steps or 1)

    def idle_share(self) -> float:
        """The share of the time in which the GPU has nothing to do; 0 on a CPU."""
        line = self.table.timeline
        return line.idle_ns / line.span_ns if line else 0.0


def is_of_peer(run: LabRun) -> bool:
    return bool(run.options.get("peer"))


def is_plain(run: LabRun) -> bool:
    """Whether it is fp32 with everything switched off, by a single process."""
    return run.options["precision"] == "fp32" and _switches_nothing_on(run)


def _switches_nothing_on(run: LabRun) -> bool:
    return not any(run.options.get(name) for name in _VARIANT[1:]) and run.processes == 1


def comparisons(runs: Sequence[LabRun], option: str) -> list[list[LabRow]]:
    """The rows of sessions in which this option varies and no other, newest first; in a session
    the baseline comes first."""
    found = []
    for session in dict.fromkeys(run.session for run in runs):
        rows = labs.build_rows(run for run in runs if run.session == session)
        others = {tuple(row.first.options.get(n) for n in _VARIANT if n != option) for row in rows}
        if len(rows) > 1 and len(others) == 1:
            found.append(sorted(rows, key=lambda row: not row.is_baseline))
    return found


def profiles(results: Path, runs: Sequence[LabRun]) -> Iterator[Profile]:
    """The traces below a folder of results, newest first; a group has its first process's. Raises
    WorkshopError: a trace can't be read."""
    for run in runs:
        folder = results / LAB / TRACES / run.session
        for name in (kernel_file.JSON_FILE, "trace*_rank0.json", "trace*.json"):
            if path := next(iter(sorted(folder.glob(name))), None):
                yield Profile(load.load(path), run)
                break


def plain_runs(work: Work, **options: Any) -> list[LabRun]:
    """Proven runs of inference in eager mode on one device, newest first."""
    runs = work.lab_runs(LAB, mode="inference", **options)
    return [run for run in runs if run.gate.status == "pass" and _switches_nothing_on(run)]


def newest(runs: Sequence[LabRun], what: str, flags: str) -> LabRun:
    """Raises Missing without any; `flags` are those of the program that make one."""
    if not runs:
        raise Missing(f"no run {what} yet:", f"{PROGRAM} {flags}")
    return runs[0]


def with_flag(flag: str) -> Callable[[LabRun], bool]:
    """Whether a run's command had a flag, with its value if one is given: "--iterations 5"."""
    return lambda run: f" {flag} " in f" {' '.join(run.command)} "


def text_option(run: LabRun, name: str) -> str:
    return str(run.options[name])


def p50_ms(run: LabRun) -> float:
    return timing.median(run.step_ms)


def images_per_s(run: LabRun) -> float:
    return run.units_per_step / p50_ms(run) * 1e3


def memory_mb(run: LabRun, part: str) -> float:
    return float(run.memory_mb[part])


def true_counts(run: LabRun) -> Counts:
    """The counts of a run's network, from shapes alone."""
    return _counts_of(text_option(run, "network"))


@functools.cache
def _counts_of(name: str) -> Counts:
    network = networks.get_network(name)
    with torch.device("meta"):
        return counts.count(network.build(), torch.empty(1, 3, network.edge, network.edge))
