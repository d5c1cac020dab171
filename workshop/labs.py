"""The rows of the labs' tables; results.py has their record.

A lab measures something else than the training of a Tiny-LLaMA: a network's inference, a pipeline
of data, a generation of text. What all have in common is here: a step that was timed, how many
units of work it does (images, tokens), what shows that it does the work, and how much memory it
takes. Rows pool the processes of a session, as those of a comparison of versions do.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from workshop.results import LabRun, verdict, worst_status
from workshop.run import timing

KERNELS = "kernels"
"""The `lab` of rows of workshop.kernels.benchmark."""


@dataclass(frozen=True)
class LabRow:
    """The runs of one variant in one session."""

    runs: tuple[LabRun, ...]
    speedup: timing.Ratio | None = None
    """Units a second over the baseline's; None without one, and for the baseline."""
    of: str = ""
    """The part of its subject that other rows of the table don't share, if they have several."""

    @property
    def first(self) -> LabRun:
        return self.runs[0]

    @property
    def label(self) -> str:
        """The variant, and of what where that is not clear."""
        return f"{self.of}: {self.first.variant}" if self.of else self.first.variant

    @property
    def device(self) -> str:
        return _device(self.first)

    @property
    def is_baseline(self) -> bool:
        return self.first.variant == self.first.baseline

    @property
    def gate(self) -> str:
        """The verdict on all processes: "pass", "fail", or "not run" if one of them had no gate."""
        return worst_status(run.gate.status for run in self.runs)

    @property
    def failed(self) -> bool:
        ends = ("gate failed", "audit failed", "failed")
        return any(run.refused or run.status in ends for run in self.runs)

    @property
    def skipped(self) -> bool:
        return any(run.status == "skipped" for run in self.runs)

    @property
    def verdict(self) -> str:
        """PASS, FAIL, SKIPPED, or NOT_AUDITED: without the lab's gate, or an audit that it has."""
        passed = self.gate == "pass" and not any(run.not_audited for run in self.runs)
        return verdict(failed=self.failed, skipped=self.skipped, passed=passed)

    @property
    def times(self) -> list[list[float]]:
        """Step times in ms, a list for each process; none for a row that failed or is not
        proven."""
        if self.failed or self.gate != "pass":
            return []
        return [run.step_ms for run in self.runs if run.step_ms]

    @property
    def pooled(self) -> list[float]:
        return sorted(ms for run in self.times for ms in run)

    def metric(self, name: str) -> float | None:
        """The median of the processes; None for a row without times."""
        found = [run.metrics.get(name) for run in self.runs] if self.times else []
        values = [float(value) for value in found if isinstance(value, (int, float))]
        return timing.median(values) if values else None

    @property
    def step_ms(self) -> float | None:
        return timing.median(self.pooled) if self.times else None

    @property
    def units_per_s(self) -> float | None:
        ms = self.step_ms
        return self.first.units_per_step / ms * 1e3 if ms else None

    @property
    def tflops(self) -> float | None:
        """Useful operations a second, in TFLOP/s."""
        ms, flops = self.step_ms, self.first.flops_per_step
        return flops / ms / 1e9 if ms and flops else None

    @property
    def gbs(self) -> float | None:
        """Bytes a second, in GB/s."""
        ms, moved = self.step_ms, self.first.bytes_per_step
        return moved / ms / 1e6 if ms and moved else None

    @property
    def peak_memory_mb(self) -> float | None:
        """The largest process's; None for a row that failed, which has no numbers."""
        if self.failed:
            return None
        peaks = [run.memory_mb["peak"] for run in self.runs if "peak" in run.memory_mb]
        return max(float(peak) for peak in peaks) if peaks else None

    @property
    def units_per_s_per_gb(self) -> float | None:
        """Units a second for each 10^9 bytes of peak memory, which every process has."""
        rate, peak_mb = self.units_per_s, self.peak_memory_mb
        return rate / peak_mb / self.first.processes * 1e3 if rate and peak_mb else None

    @property
    def peak_share(self) -> float | None:
        """Useful operations a second, as a share of the data sheet's peak, of all devices."""
        return self._share(self.tflops, (run.peak_tflops for run in self.runs))

    @property
    def ceiling_share(self) -> float | None:
        """The same, of what a large matrix product reached, or a large copy."""
        if self.first.bytes_per_step:
            return self._share(self.gbs, (run.ceiling_gbs for run in self.runs))
        return self._share(self.tflops, (run.ceiling_tflops for run in self.runs))

    def _share(self, rate: float | None, limits: Iterable[float | None]) -> float | None:
        # Each process measures anew: a busy minute must not give a greater share.
        limit = max((limit for limit in limits if limit), default=None)
        return rate / limit / self.first.processes if rate and limit else None

    @property
    def plausibility(self) -> list[str]:
        """Contradictions to the physics, in sentences."""
        return sorted({sentence for run in self.runs for sentence in run.plausibility})

    def percentile_ms(self, share: float) -> float | None:
        return percentile(self.pooled, share) if self.times else None

    @property
    def note(self) -> str:
        """Why there is no time, or nothing."""
        for run in self.runs:
            if run.refused:
                check, failures = run.refused
                return f"{check} failed: {'; '.join(failures)}"
            if run.error:
                return run.error
        untimed = "no times" if any(run.step_ms for run in self.runs) else "no timed step"
        return "" if self.times else f"gate {self.gate}: {untimed}"


def percentile(ordered: list[float], share: float) -> float:
    """The smallest of sorted values that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def build_rows(runs: Iterable[LabRun]) -> list[LabRow]:
    """A row for each session, device, subject and variant, in the order in which they first ran."""
    groups: dict[tuple[str, ...], list[LabRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.session, run.created)):
        groups[_device(run), run.lab, run.session, run.subject, run.variant].append(run)
    rows = {key: LabRow(tuple(group)) for key, group in groups.items()}
    found = []
    for key, row in rows.items():
        baseline = rows.get((*key[:-1], row.first.baseline))
        ratio = None if baseline is None or baseline is row else speedup(baseline, row)
        found.append(dataclasses.replace(row, speedup=ratio))
    return found


def newest(runs: Iterable[LabRun]) -> list[list[LabRow]]:
    """The rows of the newest session of each device, lab, subject and precision (or set of them),
    in the order of these names. A list holds those of one session. Runs under a profiler are passed
    over."""
    groups: dict[tuple[str, ...], list[LabRow]] = defaultdict(list)
    for row in build_rows(run for run in runs if run.status != "profiled"):
        groups[row.first.session, row.device, row.first.lab, row.first.subject].append(row)
    found: dict[tuple[object, ...], tuple[tuple[str, ...], list[LabRow]]] = {}
    for (session, device, lab, subject), rows in sorted(groups.items()):
        key = (*map(_numbers_by_value, (device, lab, subject)), precisions(rows))
        found[key] = (device, lab, session), rows  # the newest comes last
    joined: dict[tuple[str, ...], list[LabRow]] = defaultdict(list)
    for _, (names, rows) in sorted(found.items()):
        joined[names] += rows
    for rows in joined.values():
        shared = shared_subject(rows).split(", ")
        for i, row in enumerate(rows):
            own = [part for part in row.first.subject.split(", ") if part not in shared]
            rows[i] = dataclasses.replace(row, of=", ".join(own))
    return list(joined.values())


def shared_subject(rows: Iterable[LabRow]) -> str:
    parts = [row.first.subject.split(", ") for row in rows]
    return ", ".join(part for part in parts[0] if all(part in others for others in parts))


def precisions(rows: Iterable[LabRow]) -> tuple[str, ...]:
    """The precisions of all rows, each once; none where a lab has none."""
    return tuple(sorted({str(row.first.options.get("precision") or "") for row in rows} - {""}))


def _numbers_by_value(text: str) -> tuple[tuple[int, str], ...]:
    """To sort by: "batch 4" comes before "batch 16"."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part)
                 for part in re.split(r"(\d+)", text))  # fmt: skip


def _device(run: LabRun) -> str:
    return str(run.device.get("name"))


def speedup(baseline: LabRow, row: LabRow) -> timing.Ratio | None:
    """Units a second of a row over those of another; None where one of them has no times."""
    if not (row.times and baseline.times):
        return None
    per_unit = (
        [[ms / one.first.units_per_step for ms in times] for times in one.times]
        for one in (baseline, row)
    )
    return timing.speedup(*per_unit)


def implausible(record: LabRun, devices: int = 1) -> list[str]:
    """A sentence if the operations a second are more than the chips can do."""
    if not (record.peak_tflops and record.flops_per_step and record.step_ms):
        return []
    rate = record.flops_per_step / timing.median(record.step_ms) / 1e9
    limit = record.peak_tflops * devices
    if rate <= limit:
        return []
    return [f"{rate:,.0f} TFLOP/s, more than the data sheet's {limit:,.0f}"]
