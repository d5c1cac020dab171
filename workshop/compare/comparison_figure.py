"""A comparison as a picture: throughput, the parts of a step, and memory, for a projector."""

from pathlib import Path
from typing import Any

from workshop.compare.comparison import Row
from workshop.compare.comparison_tables import groups, title
from workshop.errors import printable
from workshop.run import interpreter

PHASES = (("forward_ms", "forward", "#3b7dd8"), ("backward_ms", "backward", "#e07b39"))
PHASE_COLOURS = (*PHASES, ("optimizer_ms", "optimizer", "#5aa469"))
MEMORY_COLOURS = (
    ("weights", "weights", "#3b7dd8"),
    ("gradients", "gradients", "#e07b39"),
    ("optimizer_state", "AdamW moments", "#5aa469"),
    ("rest", "activations and rest", "#b8b8b8"),
)
_STYLE: Any = {
    "font.size": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a device may have any name
}


def plot(rows: list[Row], target: Path) -> None:
    """Throughput, the step's parts and memory, a line of panels a group, for a projector. An
    interpreted version has words in the place of its times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [
        [row for row in group if row.status in ("timed", "interpreted")]
        for group in groups(rows)
        if any(row.step_ms for row in group)
    ]
    with plt.rc_context(_STYLE):
        figure = _draw(shown)
        figure.savefig(target, dpi=100)
        plt.close(figure)


def _draw(shown: list[list[Row]]) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(shown), 3, figsize=(19.2, 5.4 * len(shown)), squeeze=False, layout="constrained"
    )
    for line, group in zip(axes, shown, strict=True):
        _plot_throughput(line[0], group)
        _plot_stack(line[1], group, PHASE_COLOURS, "time of a step, ms", _phase_value)
        _plot_stack(line[2], group, MEMORY_COLOURS, "peak memory, MB", _memory_value)
        for axis in line[:2]:
            _write_in_place_of_times(axis, group)
        line[0].set_title(title(group), loc="left", fontweight="bold", fontsize=15)
    return figure


def _phase_value(row: Row, name: str) -> float:
    return getattr(row, name) or 0.0


def _memory_value(row: Row, name: str) -> float:
    return float(row.memory_mb.get(name, 0.0))


def _plot_throughput(axis, group: list[Row]) -> None:  # type: ignore[no-untyped-def]
    values = [row.tokens_per_s or 0.0 for row in group]
    bars = axis.bar([printable(row.label) for row in group], values, color="#44546a", width=0.6)
    verdicts = [row.short_verdict() if row.step_ms else "" for row in group]
    axis.bar_label(bars, verdicts, padding=4, fontweight="bold")
    axis.set_ylabel("tokens a second")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.15)


def _plot_stack(axis, group, parts, label, value) -> None:  # type: ignore[no-untyped-def]
    names = [printable(row.label) for row in group]
    bottoms = [0.0] * len(group)
    for field, legend, colour in parts:
        heights = [value(row, field) for row in group]
        axis.bar(names, heights, bottom=bottoms, color=colour, label=legend, width=0.6)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        if not total:  # not measured
            continue
        axis.annotate(
            f"{total:,.3g}" if total < 1000 else f"{total:,.0f}",
            (index, total),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axis.set_ylabel(label)
    if max(bottoms) >= 1000:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.3)
    axis.legend(frameon=False, fontsize=13, loc="upper right", ncols=2)


def _write_in_place_of_times(axis, group: list[Row]) -> None:  # type: ignore[no-untyped-def]
    for index, row in enumerate(group):
        if row.status == "interpreted":
            axis.annotate(
                interpreter.NOT_COMPARABLE.replace(", ", ",\n"),
                (index, 0),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                color="#707070",
                fontsize=14,
            )
