"""The rows of the kernels' benchmark, as its tables, pages and documents show them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workshop import records
from workshop.errors import WorkshopError
from workshop.kernels.cases import BACKWARD, BOTH, FORWARD, GBS, HOST, OPS, OURS, TFLOPS, UNITS
from workshop.labs import KERNELS, LabRow, LabRun
from workshop.results import FAIL, PASS, SKIPPED
from workshop.run import timing
from workshop.tables import Line, Table, number, print_tables

_STYLES = {FAIL: "red", SKIPPED: "dim"}
NOTHING_TIMED = "interpreted: correctness only, nothing is timed"


@dataclass(frozen=True)
class Row(LabRow):
    """One implementation of one operation at one size, which one process has measured."""

    @property
    def op(self) -> str:
        return self.first.subject.partition(", ")[0]

    @property
    def size(self) -> str:
        return self.first.subject.partition(", ")[2]

    @property
    def implementation(self) -> str:
        return self.first.variant

    @property
    def precision(self) -> str:
        return str(self.first.options.get("precision"))

    @property
    def timed(self) -> bool:
        """Whether rows of its file were timed: not those in Triton's interpreter."""
        return self.first.ceiling_gbs is not None

    @property
    def unit(self) -> str:
        return GBS if self.first.bytes_per_step else TFLOPS

    @property
    def ceiling(self) -> float | None:
        """The rate of a large copy or product in the same run, in `unit`."""
        return self.first.ceiling_gbs if self.unit == GBS else self.first.ceiling_tflops

    @property
    def amounts(self) -> dict[str, float]:
        """Bytes or FLOPs of each phase."""
        phases = (phase for phase in (FORWARD, BACKWARD, BOTH) if phase in self.first.metrics)
        return {phase: float(self.first.metrics[phase] or 0) for phase in phases}

    @property
    def skipped(self) -> bool:
        """One that is right and was not timed is not skipped."""
        return self.gate != "pass" and super().skipped

    @property
    def note(self) -> str:
        """Why it is wrong or skipped, and what else is to be known of it."""
        why = "" if self.verdict == PASS else super().note
        return "; ".join(filter(None, [why, str(self.first.metrics.get("note") or "")]))

    def median_ms(self, phase: str) -> float | None:
        samples = self.first.phase_ms.get(phase)
        return timing.median(samples) if samples else None

    @property
    def step_ms(self) -> float | None:
        """All phases together."""
        medians = [self.median_ms(phase) for phase in self.amounts]
        return None if None in medians else sum(filter(None, medians))

    def rate(self, phase: str) -> float | None:
        """GB/s or TFLOP/s, as `unit` says."""
        median = self.median_ms(phase)
        return self.amounts[phase] / (median / 1e3) / UNITS[self.unit] if median else None

    def share(self, phase: str) -> float | None:
        rate = self.rate(phase)
        return rate / self.ceiling if rate and self.ceiling else None


def load(place: Path) -> list[Row]:
    """The rows of a file or a folder, operators in the benchmark's order: for each size, precision
    and device those of the newest session. Operators that it no longer has are left out.

    Raises:
        WorkshopError: nothing is found, or a file is broken.
    """
    runs = (run for run in records.load_folder(place, LabRun) if run.lab == KERNELS)
    found = [row for row in (Row((run,)) for run in runs) if row.op in OPS]
    if not found:
        raise WorkshopError(f"{place}: no result of the kernels' benchmark")

    def what(row: Row) -> tuple[str, str, object]:
        return row.first.subject, row.precision, row.first.device.get("name")

    newest = {what(row): row.first.session for row in found}
    rows = [row for row in found if row.first.session == newest[what(row)]]
    return sorted(rows, key=lambda row: [*OPS].index(row.op))


def by_op(rows: list[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.op == op] for op in dict.fromkeys(r.op for r in rows)]


class Best(NamedTuple):
    """Our operator at one size beside the fastest right implementation there, forward and backward
    pass together."""

    ours: Row
    other: Row

    @property
    def gain(self) -> float:
        """How many times as fast ours is."""
        return (self.other.step_ms or math.inf) / (self.ours.step_ms or math.inf)


def against_fastest(rows: list[Row]) -> list[Best]:
    """Each operator that has a time, at its largest size."""
    found = {}
    for best in sorted(at_each_size(rows), key=lambda best: sum(best.ours.amounts.values())):
        found[best.ours.op] = best
    return [found[op] for op in dict.fromkeys(row.op for row in rows) if op in found]


def at_each_size(rows: list[Row]) -> list[Best]:
    """Ours and the fastest other one at each size of each operator."""
    found = []
    for subject in dict.fromkeys(row.first.subject for row in rows):
        timed = [row for row in rows if row.first.subject == subject and row.step_ms]
        others = [row for row in timed if row.implementation != OURS]
        for ours in (row for row in timed if row.implementation == OURS and others):
            found.append(Best(ours, min(others, key=lambda row: row.step_ms or math.inf)))
    return found


def table(group: list[Row]) -> Table:
    first, phases = group[0], list(group[0].amounts)
    together = phases == [BOTH]
    header = ["size", "implementation"]
    if first.timed:
        header += [first.unit, "peak MB"] if together else [f"{p}, {first.unit}" for p in phases]
        header += ["of ceiling", "device / host, µs"]
    header += ["error (allowed)", "status"]
    lines = [Line(_cells(row), _STYLES.get(row.verdict), section=row.size) for row in group]
    what = f"{first.op} {BOTH}" if together else first.op
    title = f"{what}, {first.precision}, {first.device}"
    return Table(title, header, lines, _notes(group), left=(0, 1))


def _cells(row: Row) -> list[str]:
    texts = [row.size, row.implementation]
    if row.timed:
        texts += [_rate(row, phase) for phase in row.amounts]
        if BOTH in row.amounts:
            texts.append(number(row.peak_memory_mb, ",.0f"))
        texts.append(_pair([row.share(phase) for phase in row.amounts], ".0%"))
        both = row.step_ms, row.median_ms(HOST)
        texts.append(_pair([ms and 1e3 * ms for ms in both], ",.0f"))
    worst = row.first.gate.closest()
    texts.append(f"{worst[1]:.1e} ({worst[2]:.1e})" if worst else "-")
    return [*texts, row.verdict]


def _rate(row: Row, phase: str) -> str:
    """The rate at the median, and half of the interquartile range."""
    rate = row.rate(phase)
    if rate is None:
        return "-"
    form = ",.0f" if rate >= 100 else ",.3g"
    return f"{rate:{form}} ±{timing.spread(row.first.phase_ms[phase]) / 2:.1%}"


def _pair(values: list[float | None], form: str) -> str:
    texts = [number(value, form) for value in values]
    return " / ".join(texts) if set(texts) != {"-"} else "-"


def _notes(rows: list[Row]) -> list[str]:
    """The notes on one operation's rows, each sentence once, with its sizes."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.note:
            found.setdefault((row.implementation, row.verdict, row.note), []).append(row.size)
    everywhere = {row.size for row in rows}
    lines = []
    for (name, status, note), sizes in found.items():
        where = "" if set(sizes) == everywhere else f" at {'; '.join(sizes)}"
        verdict = "" if status == PASS else f" {status}"
        lines.append(f"{name}{where}{verdict}: {note}")
    return lines + [
        f"IMPLAUSIBLE: {row.implementation} at {row.size}, {sentence}"
        for row in rows for sentence in row.first.plausibility
    ]  # fmt: skip


def summary(row: Row) -> str:
    gbs, tflops = row.first.ceiling_gbs, row.first.ceiling_tflops
    if gbs is None or tflops is None:
        return NOTHING_TIMED
    return (
        f"ceilings of this run: copy {gbs:,.0f} GB/s, {row.precision} product {tflops:,.0f} TFLOP/s"
    )


def behind(rows: list[Row]) -> list[str]:
    """At how many sizes ours is the fastest, forward and backward together, and the others."""
    found = at_each_size(rows)
    slower = sorted((one for one in found if one.gain < 1), key=lambda one: one.gain)
    lines = [
        f"  {best.ours.op} at {best.ours.size}: {best.ours.step_ms:.4f} ms, "
        f"{best.other.implementation} {best.other.step_ms:.4f} ms ({best.gain:.2f}x)"
        for best in slower
    ]
    head = f"{OURS} is the fastest at {len(found) - len(slower)} of {len(found)} sizes"
    return [head + (", not at" if slower else ""), *lines] if found else []


def show(rows: list[Row]) -> None:
    print_tables(map(table, by_op(rows)))
    for line in (summary(rows[0]), *behind(rows)):
        print(line)
