"""The rows of a lab as a table for the terminal, Markdown and the page, and as JSON."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from workshop import labs
from workshop.compare.rows import ONE_PROCESS, ratio, ratio_fields
from workshop.errors import printable
from workshop.labs import LabRow
from workshop.results import FAIL, NOT_AUDITED, SKIPPED
from workshop.tables import Line, Report, Table, escape, markdown_body, number

T = TypeVar("T")
_STYLES = {FAIL: "red", "IMPLAUSIBLE": "red", SKIPPED: "dim", NOT_AUDITED: "dim"}
_ONE_PROCESS = f"({ONE_PROCESS}): no interval, which takes two processes of each variant"


def of_labs(groups: Sequence[Sequence[LabRow]]) -> Report:
    """All forms of some groups' rows: `labs.newest` makes groups, or `[labs.build_rows(runs)]` is
    one. A terminal has no room for all columns, so that a group has two tables."""
    tables = [table for group in groups for table in _in_two(lab_table(group))]
    return Report("rows", tables, [_record(row) for group in groups for row in group])


def lab_table(rows: Sequence[LabRow]) -> Table:
    """A line for each row; these are of one session, device and subject, as in `labs.newest`."""
    lines = [Line(_cells(row), _STYLES.get(row.verdict)) for row in rows]
    unit = printable(rows[0].first.unit)
    header = ("variant", "verdict", f"{unit}/s", "p50 ms", "p90", "p99", "speed-up [95%]",
              "peak MB", f"{unit}/s per GB", "of peak", "of ceiling")  # fmt: skip
    return Table(title(rows), header, lines, _notes(rows), left=(0, 1))


def _in_two(table: Table) -> list[Table]:
    """Speed, then memory and the shares of peak and ceiling."""
    cost = (0, *range(7, 11))
    return [
        table.columns(range(7), notes=(), only_wide=(4,), wraps=(0, 6)),
        table.columns(cost, title="at what cost", left=(0,), wraps=(0,), continues=True),
    ]


def title(rows: Sequence[LabRow]) -> str:
    """As in "inference_benchmark: resnet50, 32 x 3 x 224 x 224, fp16, NVIDIA H200": with the
    precision, if it is that of all rows."""
    subjects, precisions = {row.first.subject for row in rows}, labs.precisions(rows)
    shared = [f"{len(subjects)} subjects"] * (len(subjects) > 1) + [labs.shared_subject(rows)]
    shared += [*(precisions if len(precisions) == 1 else ()), rows[0].device]
    return printable(f"{rows[0].first.lab}: {', '.join(filter(None, shared))}")


def source(rows: Sequence[LabRow], command: str = "") -> str:
    """Where rows come from, Markdown: "NVIDIA H200, PyTorch 2.13.0, commit 0123456: `...`".
    Without a command it is that of their study, or a list of all, oldest first."""
    runs = sorted((run for row in rows for run in row.runs), key=lambda run: run.created)
    parents = [shlex.join(run.parent_command) for run in runs if run.parent_command]
    shown = [command] if command else [f"python {parent}" for parent in dict.fromkeys(parents)]
    commands = [f"`{each}`" for each in shown]
    listed = f" {commands[0]}" if len(commands) == 1 else "\n\n- " + "\n- ".join(commands)
    commits = sorted({run.git_commit[:7] for run in runs if run.git_commit})
    versions = sorted({str(run.software.get("torch")) for run in runs})
    words = [rows[0].device, f"PyTorch {', '.join(versions)}", f"commit {', '.join(commits)}"]
    return f"{escape(', '.join(words))}:{listed}"


def columns(rows: Iterable[T], cells: Mapping[str, Callable[[T], str]]) -> str:
    """A Markdown table with a line for each row, and its columns by heading. The first column and
    the last one have words, the others numbers."""
    lines = [Line([cell(row) for cell in cells.values()]) for row in rows]
    return markdown_body(Table("", list(cells), lines, left=(0, len(cells) - 1)))


def rate(row: LabRow) -> str:
    return number(row.units_per_s, ",.0f")


def verdict(row: LabRow) -> str:
    return row.verdict


def not_measured(command: str) -> str:
    return f"Not measured yet: `{command}`."


def speedup_text(row: LabRow) -> str:
    """The speed-up in words: `1.80x [1.75, 1.84]`, `no significant difference [0.97, 1.02]`,
    `1.80x (1 process)`, `baseline`, or a dash."""
    if row.is_baseline and row.times:
        return "baseline"
    return ratio(row.speedup)


def _cells(row: LabRow) -> list[str]:
    return [
        row.label,
        row.verdict,
        number(row.units_per_s, ",.1f"),
        *(number(ms, ",.3f") for ms in _percentiles(row)),
        speedup_text(row),
        number(row.peak_memory_mb, ",.0f"),
        number(row.units_per_s_per_gb, ",.1f"),
        number(row.peak_share, ".1%"),
        number(row.ceiling_share, ".1%"),
    ]


def _percentiles(row: LabRow) -> tuple[float | None, ...]:
    return row.step_ms, row.percentile_ms(0.9), row.percentile_ms(0.99)


def _notes(rows: Sequence[LabRow]) -> list[str]:
    """Lines on what the numbers alone do not say."""
    lines = [f"{row.label}: {row.note}" for row in rows if row.note and not row.failed]
    lines += [
        f"{row.label}: no speed-up, since {row.first.baseline} has no time in this session"
        for row in rows
        if row.times and row.first.baseline and not row.is_baseline and not row.speedup
    ]
    lines += [
        f"{row.first.variant}: of ceiling above 100%: the ceiling was measured at a busier moment"
        for row in rows
        if (row.ceiling_share or 0.0) > 1
    ]
    if any(row.speedup and row.speedup.interval is None for row in rows):
        lines.append(_ONE_PROCESS)
    limits = [(run.peak_tflops, run.peak_source) for row in rows for run in row.runs]
    sources = {f"{peak:,.3g} TFLOP/s ({source})": None for peak, source in limits if peak}
    lines += [f"peak: {'; '.join(sources)}"] if sources else []
    return [*alarms(rows), *map(printable, lines)]


def alarms(rows: Sequence[LabRow]) -> list[str]:
    """Lines to look into before a number is quoted."""
    lines = [failure(row) for row in rows if row.failed]
    return lines + [f"IMPLAUSIBLE: {line}" for row in rows for line in implausible(row)]


def failure(row: LabRow) -> str:
    return printable(f"{row.label}: {row.note}")


def implausible(row: LabRow) -> list[str]:
    return [printable(f"{row.label}: {sentence}") for sentence in row.plausibility]


def _record(row: LabRow) -> dict[str, Any]:
    first = row.first
    p50, p90, p99 = _percentiles(row)
    return {
        "lab": first.lab,
        "session": first.session,
        "device": row.device,
        "subject": first.subject,
        "variant": first.variant,
        "baseline": first.baseline,
        "unit": first.unit,
        "units_per_step": first.units_per_step,
        "runs": len(row.runs),
        "verdict": row.verdict,
        "note": row.note,
        "units_per_s": row.units_per_s,
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        **ratio_fields("speedup", row.speedup),
        "peak_memory_mb": row.peak_memory_mb,
        "units_per_s_per_gb": row.units_per_s_per_gb,
        "tflops": row.tflops,
        "peak_share": row.peak_share,
        "ceiling_share": row.ceiling_share,
        "plausibility": row.plausibility,
    }
