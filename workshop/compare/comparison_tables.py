"""A comparison's rows in words: tables for the terminal and for Markdown, JSON, CSV."""

import dataclasses
import json

from workshop import results
from workshop.compare import comparison
from workshop.compare.comparison import Row
from workshop.compare.markdown import escape, escape_block, table_line
from workshop.errors import printable

FORMATS = ("table", "markdown", "json", "csv")


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that may be compared with each other, together."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return list(found.values())


def title(rows: list[Row]) -> str:
    row = rows[0]
    size = f"{row.config}: {row.batch_size} x {row.seq_len} tokens"
    return printable(f"{size}, {row.precision}, {row.device}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def speed_cells(row: Row) -> list[str]:
    spread = "" if row.step_spread is None else f" ±{row.step_spread / 2:.1%}"
    return [
        printable(row.label),
        _number(row.samples_per_s, ",.1f"),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.step_ms, ",.2f") + spread,
        _number(row.forward_ms, ",.2f"),
        _number(row.backward_ms, ",.2f"),
        _number(row.optimizer_ms, ",.2f"),
        row.verdict(),
    ]


SPEED_HEADER = [
    "version",
    "samples/s",
    "tokens/s",
    "step ms",
    "forward",
    "backward",
    "optimizer",
    "speed-up [95%]",
]


def proof_cells(row: Row) -> list[str]:
    gradients = "-" if row.tensors_total is None else f"{row.tensors_with_grad}/{row.tensors_total}"
    loss = (
        "-" if row.loss_first is None else f"{row.loss_first:.3f} → {_number(row.loss_last, '.3f')}"
    )
    compared = row.memory_reduction is not None and row.verdict() != "baseline"
    reduction = f"{-row.memory_reduction:+.0%}" if compared and row.memory_reduction else "-"
    return [
        printable(row.label),
        row.proof(red="FAIL"),
        gradients,
        loss,
        _number(row.peak_memory_mb, ",.0f"),
        reduction,
        _number(row.tflops, ",.3g"),
        "-" if row.peak_share is None else f"{row.peak_share:.1%}",
    ]


PROOF_HEADER = [
    "version",
    "proof",
    "gradients",
    "loss",
    "peak MB",
    "memory",
    "TFLOP/s",
    "of peak",
]


def notes(rows: list[Row]) -> list[str]:
    """What the figures alone would not say."""
    lines = [f"{row.label}: {row.note}" for row in rows if row.note]
    lines += [f"IMPLAUSIBLE: {sentence}" for row in rows for sentence in row.plausibility]
    lines += [f"{row.label}: first use {_first_use(row)}" for row in rows if row.first_use_s]
    sources = {
        f"{row.peak_tflops:,.3g} TFLOP/s ({row.peak_source})" for row in rows if row.peak_tflops
    }
    if len(sources) == 1:
        lines.append(f"peak: {sources.pop()}")
    elif sources:
        lines.append("peak: the highest a large matrix product reached in each row's session")
    lines += comparison.proof_notes(rows)
    if any(row.peak_share is not None and row.peak_share > 1 for row in rows):
        lines.append("more than 100% of peak: other programs ran while the peak was measured")
    return list(map(printable, lines))


def _first_use(row: Row) -> str:
    """As in "12.7 s (compile 12.3, capture 0.4), paid back after 1,234 steps"."""
    assert row.first_use_s is not None and row.first_use_least_s is not None
    parts = [f"{name} {row.setup_s[name]:.1f}" for name in ("compile", "capture")]
    told = f"{row.first_use_s:.1f} s ({', '.join(parts)})"
    if row.first_use_least_s < 0.9 * row.first_use_s:
        told += f", {row.first_use_least_s:.1f} s where the caches were filled"
    if row.pays_back_steps is not None:
        return f"{told}; paid back against V1 {row.pays_back}"
    if row.pays_back == "never":
        return f"{told}; never paid back: its step is not shorter than V1's"
    return f"{told}; not known when it is paid back" if row.pays_back else told


def show(rows: list[Row], form: str) -> None:
    if form == "json":
        print(json.dumps(as_json(rows), indent=1, allow_nan=False))
    elif form == "csv":
        print(as_csv(rows), end="")
    elif form == "markdown":
        print(as_markdown(rows))
    else:
        _show_tables(rows)


STYLES = {"failed": "red", "skipped": "dim"}


def _show_tables(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=120, highlight=False, markup=False)
    for group in groups(rows):
        for header, cells, caption in (
            (SPEED_HEADER, speed_cells, title(group)),
            (PROOF_HEADER, proof_cells, "the same model? and at what cost"),
        ):
            table = Table(title=caption, title_justify="left", title_style="bold")
            for index, name in enumerate(header):
                table.add_column(name, justify="left" if index == 0 else "right")
            for row in group:
                table.add_row(*cells(row), style=STYLES.get(row.status))
            console.print(table)
        for line in notes(group):
            console.print(line, markup=False)


def as_markdown(rows: list[Row]) -> str:
    parts = []
    for group in groups(rows):
        parts += [f"### {escape(title(group))}", ""]
        for header, cells in ((SPEED_HEADER, speed_cells), (PROOF_HEADER, proof_cells)):
            parts.append(table_line(map(escape, header)))
            parts.append("|" + " --- |" + " ---: |" * (len(header) - 1))
            parts += [table_line(map(escape, cells(row))) for row in group]
            parts.append("")
        parts += [f"- {escape_block(line)}" for line in notes(group)]
        parts.append("")
    return "\n".join(parts).rstrip()


def as_json(rows: list[Row]) -> dict[str, object]:
    return {
        "schema_version": comparison.SCHEMA_VERSION,
        "created": results.now(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def as_csv(rows: list[Row]) -> str:
    import csv
    import io

    skipped = ("gate_shape", "plausibility", "memory_mb", "setup_s")
    fields = [f.name for f in dataclasses.fields(Row) if f.name not in skipped]
    text = io.StringIO()
    writer = csv.DictWriter(text, fields)
    writer.writeheader()
    for row in rows:
        line = {name: getattr(row, name) for name in fields}
        writer.writerow({k: printable(v) if isinstance(v, str) else v for k, v in line.items()})
    return text.getvalue()
