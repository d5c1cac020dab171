"""Which of a participant's own runs answer which question: the newest of each kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labs.inference_benchmark.request import LAB
from workshop import labs
from workshop.exercises.frame import Work
from workshop.labs import LabRow, LabRun
from workshop.profilers import kernel_file, load
from workshop.profilers.table import KernelTable

TRACES = "traces"
_VARIANT = ("precision", "autocast", "channels_last", "fold", "compile", "cuda_graph", "export")


@dataclass(frozen=True)
class Profile:
    """A trace of --kineto, and the run that it is of."""

    table: KernelTable
    run: LabRun

    def five_share(self) -> float:
        """Of the time of all kernels, the part of the five that take the most, from 0 to 1."""
        return sum(kernel.total_ns for kernel in self.table.kernels[:5]) / self.table.total_ns

    def share(self, *categories: str) -> float:
        """Of the time of all kernels, from 0 to 1."""
        of = self.table.category_ns()
        return sum(of.get(name, 0.0) for name in categories) / self.table.total_ns

    def launches(self) -> float:
        """Kernels (and copies) of an iteration; on a CPU operators."""
        return self.table.launches / (self.table.steps or 1)

    def idle_share(self) -> float | None:
        """Of the time, in which the GPU has nothing to do; None on a CPU."""
        line = self.table.timeline
        return line.idle_ns / line.span_ns if line else None


def own_runs(work: Work) -> list[LabRun]:
    """Complete runs and those whose proof is red, newest first."""
    found = [*work.lab_runs(LAB), *work.lab_runs(LAB, status="proof failed")]
    return sorted(found, key=lambda run: (run.created, run.session), reverse=True)


def processes(run: LabRun) -> int:
    return int(run.metrics.get("processes") or 1)


def is_plain(run: LabRun) -> bool:
    """Whether it is fp32 with everything switched off, by a single process."""
    precision, *rest = (run.options[name] for name in _VARIANT)
    return precision == "fp32" and not any(rest) and processes(run) == 1


def of_group(runs: Sequence[LabRun], mode: str) -> LabRun | None:
    """The newest run of several processes."""
    found = (run for run in runs if processes(run) > 1 and run.options["mode"] == mode)
    return next(found, None)


def comparisons(runs: Sequence[LabRun], option: str) -> list[list[LabRow]]:
    """The rows of sessions in which this option varies and no other, newest first; in a session
    the baseline comes first."""
    found = []
    for session in dict.fromkeys(run.session for run in runs):
        rows = labs.build_rows(run for run in runs if run.session == session)
        others = {tuple(row.first.options[n] for n in _VARIANT if n != option) for row in rows}
        if len(rows) > 1 and len(others) == 1:
            found.append(sorted(rows, key=lambda row: not row.is_baseline))
    return found


def compile_seconds(row: LabRow) -> float:
    """The longest of its processes: later ones find parts of the work in the compiler's cache."""
    return max(run.setup_s.get("compile", 0.0) for run in row.runs)


def break_even(compile_s: float, plain_ms: float, compiled_ms: float) -> float | None:
    """Batches after which compiling is paid back; None if it never is."""
    return compile_s * 1e3 / (plain_ms - compiled_ms) if compiled_ms < plain_ms else None


def profiles(results: Path, runs: Sequence[LabRun]) -> Iterator[Profile]:
    """Of the traces below a folder of results, newest first; of a group's, the first process's.

    Raises:
        WorkshopError: a trace can't be read.
    """
    for run in runs:
        folder = results / LAB / TRACES / run.session
        for name in (kernel_file.JSON_FILE, "trace*_rank0.json", "trace*.json"):
            if path := next(iter(sorted(folder.glob(name))), None):
                yield Profile(load.load(path), run)
                break
