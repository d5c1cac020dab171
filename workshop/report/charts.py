"""The charts of a report and of the notebook, drawn with matplotlib: each function returns a Chart.

The dashboard draws its own with plotly (dashboard/figures.py), for the pointer.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.compare.rows import Row
from workshop.profilers.metrics import digits
from workshop.profilers.names import printable
from workshop.report.pictures import INK, LINE, PAPER, Chart
from workshop.versions import ALL

_GREEN, _RED, _GREY = "#5aa469", "#d1495b", "#9aa3ad"
_LINES = (("-", 6.0), ("-", 2.6), ("--", 2.2), (":", 2.6), ("-.", 2.0), ("--", 1.5))
"""Dashes and width of each curve: curves on top of each other all stay visible."""
_MOST_BARS = 24
"""In one chart: more can't be read."""
_READABLE = 0.11
"""A part of a bar from this share of the axis on has its number inside."""
_LETTERS_OF_A_LEGEND = 40
"""In one line."""

Part = tuple[str, str, Sequence[float]]
"""A part of all bars: its name, its colour, and its length in each."""


def speedups(name: str, rows: Sequence[tuple[str, Row]], files: tuple[Path, ...]) -> Chart:
    """Speed-ups over V1 with their 95% intervals, which all rows have, on a logarithmic axis."""
    shown = [
        (f"{size}: {row.label}", row.speedup, row.speedup_ci[0], row.speedup_ci[1])
        for size, row in rows[:_MOST_BARS]
        if row.speedup and row.speedup_ci
    ]
    texts = [f"{label} {value:.2f}x [{low:.2f}, {high:.2f}]" for label, value, low, high in shown]
    alt = f"Speed-up over V1 with its 95% interval: {'; '.join(texts)}.{_left_out(rows)}"

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        for place, (_, value, low, high) in enumerate(shown):
            differs = not low <= 1 <= high
            colour = _GREY if not differs else _GREEN if value > 1 else _RED
            axis.plot([low, high], [place] * 2, color=colour, linewidth=4, solid_capstyle="butt")
            axis.plot(value, place, "o", color=colour, markersize=9)
            text = f"{value:.2f}x" if differs else "not significant"
            _write_beside(axis, text, (high, place))
        axis.set_xscale("log", base=2)
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_yticks(range(len(shown)), [_cut(label, 30) for label, *_ in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        lowest, highest = min(low for *_, low, _ in shown), max(high for *_, high in shown)
        axis.set_xlim(min(1.0, lowest) / 1.1, max(1.0, highest) * 1.45)
        axis.xaxis.set_major_formatter("{x:,.3g}x")
        axis.xaxis.set_minor_formatter("")
        axis.set_xlabel("speed-up over V1, with the 95% interval")
        _grid(axis, "x")

    return Chart(name, "Speed-up over V1", alt, files, draw, (7.5, 1.3 + 0.36 * len(shown)))


def stack(
    name: str,
    title: str,
    unit: str,
    labels: Sequence[str],
    parts: Sequence[Part],
    files: tuple[Path, ...],
    *,
    in_markdown: bool = True,
) -> Chart:
    """Bars made of parts, those left out that no bar has."""
    shown = [printable(label) for label in labels[:_MOST_BARS]]
    parts = [(legend, colour, own[:_MOST_BARS]) for legend, colour, own in parts if any(own)]
    totals = [sum(own[i] for *_, own in parts) for i in range(len(shown))]
    texts = []
    for i, label in enumerate(shown):
        lengths = (f"{legend} {digits(own[i])}" for legend, _, own in parts if own[i])
        texts.append(f"{label} {digits(totals[i])} ({', '.join(lengths)})")
    alt = f"{unit[0].upper()}{unit[1:]}: {'; '.join(texts)}.{_left_out(labels)}"
    letters = sum(len(legend) for legend, *_ in parts)
    columns = len(parts) if letters <= _LETTERS_OF_A_LEGEND else 3
    legend_lines = math.ceil(len(parts) / max(1, columns))

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        places = range(len(shown))
        longest = max(totals)
        starts = [0.0] * len(shown)
        for legend, colour, own in parts:
            drawn = axis.barh(places, own, left=starts, height=0.66, color=colour,
                              edgecolor=PAPER, label=legend)  # fmt: skip
            numbers = [digits(x) if x >= _READABLE * longest else "" for x in own]
            axis.bar_label(drawn, numbers, label_type="center", color="#10151a", fontsize=13)
            starts = [start + length for start, length in zip(starts, own, strict=True)]
        for place, total in zip(places, totals, strict=True):
            _write_beside(axis, digits(total), (total, place), fontweight="bold")
        axis.set_yticks(places, [_cut(label) for label in shown])
        axis.invert_yaxis()
        axis.set_xlim(0, longest * 1.14)
        axis.xaxis.get_major_locator().set_params(nbins=6)
        axis.xaxis.set_major_formatter("{x:,.6g}")
        axis.set_xlabel(unit)
        figure.legend(loc="outside upper left", ncols=columns, handlelength=1.1, columnspacing=1.2)
        _grid(axis, "x")

    height = 1.25 + 0.32 * legend_lines + 0.5 * len(shown)
    return Chart(name, title, alt, files, draw, (7.5, height), in_markdown)


def losses(
    name: str,
    curves: Mapping[str, Sequence[float]],
    differences: Mapping[str, Sequence[float]],
    files: tuple[Path, ...],
    caution: str,
) -> Chart:
    """All versions' losses over each other, and below them their differences from V1's.

    Args:
        curves: the loss of each step by version, NaN where it was not finite.
        differences: of the versions whose loss should be V1's.
        caution: a sentence on the differences, or nothing.
    """
    ends: dict[int, list[str]] = {}
    for label, own in curves.items():
        ends.setdefault(len(own), []).append(f"{label} {_loss(own[0])} to {_loss(own[-1])}")
    largest = {label: [abs(d) for d in own if not math.isnan(d)]
               for label, own in differences.items()}  # fmt: skip
    texts = [f"{label} {max(own, default=math.nan):.2g}" for label, own in largest.items()]
    alt = " ".join(f"Loss of the first and the last of {steps} steps: {', '.join(own)}."
                   for steps, own in ends.items())  # fmt: skip
    if texts:
        alt += f" Largest difference from V1 at any step: {', '.join(texts)}. {caution}".rstrip()

    def draw(figure: Any) -> None:
        shown = [curves, differences][: 2 if differences else 1]
        axes = figure.subplots(len(shown), sharex=True, squeeze=False,
                               height_ratios=(5, 3)[: len(shown)])[:, 0]  # fmt: skip
        for axis, own in zip(axes, shown, strict=True):
            for i, label in enumerate(curves):
                dashes, width = _LINES[i % len(_LINES)]
                axis.plot(range(1, len(own.get(label, ())) + 1), own.get(label, ()), dashes,
                          color=ALL[label].colour, linewidth=width, label=label)  # fmt: skip
            axis.xaxis.get_major_locator().set_params(integer=True)
            _grid(axis, "y")
        axes[0].set_ylabel("loss")
        axes[0].legend(loc="upper right", handlelength=3)
        axes[-1].set_xlabel("step, the warm-up's first")
        if differences:
            axes[1].set_ylabel("minus V1's")
            axes[1].axhline(0, color=INK, linewidth=1, zorder=1)
            axes[1].yaxis.set_major_formatter("{x:g}")

    title = "The loss of every version, and its distance from V1's"
    return Chart(name, title, alt, files, draw, (7.5, 4.9), in_markdown=True)


def _write_beside(axis: Any, text: str, place: tuple[float, float], **look: Any) -> None:
    axis.annotate(text, place, xytext=(8, 0), va="center", textcoords="offset points", **look)


def _grid(axis: Any, direction: str) -> None:
    axis.grid(axis=direction, color=LINE)
    axis.tick_params(length=0)


def _loss(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.3f}"


def _cut(label: str, width: int = 26) -> str:
    return label if len(label) <= width else label[: width - 1] + "…"


def _left_out(bars: Sequence[object]) -> str:
    more = len(bars) - _MOST_BARS
    return f" {more} more in the table." if more > 0 else ""
