"""What the report's own charts show, and how: each function takes figures and gives a Picture."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.profilers.figures import digits
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.report.pictures import INK, LINE, PAPER, Chart

_BLUE, _GREEN, _RED, _GREY = "#4a86d8", "#5aa469", "#d1495b", "#9aa3ad"
PHASES = (("forward", _BLUE), ("backward", "#e07b39"), ("optimizer", _GREEN))
MEMORY = (
    ("weights", _BLUE),
    ("gradients", "#e07b39"),
    ("AdamW moments", _GREEN),
    ("rest", _GREY),
)
_LINES = ((_GREY, "-", 6.0), ("#e07b39", "-", 2.6), (_GREEN, "--", 2.2), (_BLUE, ":", 2.6),
          ("#b565a7", "-.", 2.0))  # fmt: skip
"""Colour, dashes and width of each curve: those that lie on each other are all seen."""
_LETTER = 0.105
"""Inches, of a letter at the font's size."""
_LEGEND_WIDTH = 6.9
_LONGEST_LABEL = 26
_MOST_BARS = 24
"""In one chart: more can't be read."""
_READABLE = 0.11
"""Of the axis: a part of a bar from this width on has its figure inside."""


@dataclass(frozen=True)
class Bar:
    """A bar that is made of parts, in the order of the chart's legend."""

    label: str
    parts: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class Interval:
    """A speed-up with its interval."""

    label: str
    value: float
    low: float
    high: float
    size: str
    """Whose V1 it is held against."""


@dataclass(frozen=True)
class Curve:
    """The loss of each step; NaN where it was not finite."""

    label: str
    losses: tuple[float, ...]
    differences: tuple[float, ...] = ()
    """From V1's, step by step; none for V1, and where the two need not be the same."""

    @property
    def largest(self) -> float:
        return max((abs(d) for d in self.differences if not math.isnan(d)), default=math.nan)


def speedups(name: str, intervals: Sequence[Interval], files: tuple[Path, ...]) -> Chart:
    """Speed-ups over V1 with their intervals, on a logarithmic axis."""
    shown = intervals[:_MOST_BARS]
    told = [f"{i.label} {i.size} {i.value:.2f}x [{i.low:.2f}, {i.high:.2f}]" for i in shown]
    alt = f"Speed-up over V1 with its 95% interval: {'; '.join(told)}.{_left_out(intervals)}"

    def draw(figure: Any) -> None:
        axis = _axis(figure, left=2.9, bottom=0.75, top=0.15, right=0.75)
        places = [-place for place in _with_gaps([interval.size for interval in shown])]
        for place, interval in zip(places, shown, strict=True):
            differs = not interval.low <= 1 <= interval.high
            colour = _GREY if not differs else _GREEN if interval.value > 1 else _RED
            axis.plot([interval.low, interval.high], [place] * 2, color=colour, linewidth=4,
                      solid_capstyle="butt")  # fmt: skip
            axis.plot(interval.value, place, "o", color=colour, markersize=9)
            text = f"{interval.value:.2f}x" if differs else "not significant"
            axis.annotate(text, (interval.high, place), xytext=(8, 0), va="center",
                          textcoords="offset points")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_yticks(places, [_cut(f"{i.size}: {i.label}", 30) for i in shown])
        low, high = min(1.0, *(i.low for i in shown)), max(1.0, *(i.high for i in shown))
        axis.set_xlim(low / 1.1, high * 1.45)
        axis.xaxis.set_major_formatter("{x:,.3g}x")
        axis.xaxis.set_minor_formatter("")
        axis.set_xlabel("speed-up over V1, with the 95% interval")
        _grid(axis, "x")

    height = 1.3 + 0.36 * max(_with_gaps([interval.size for interval in shown]))
    return Chart(name, "Speed-up over V1", alt, files, draw, (7.5, height))


def phases(name: str, bars: Sequence[Bar], files: tuple[Path, ...]) -> Chart:
    title = "Where the time of a step goes"
    return _stack(name, title, "ms of a step", bars, PHASES, files, tells_more=False)


def memory(name: str, bars: Sequence[Bar], files: tuple[Path, ...]) -> Chart:
    return _stack(name, "What fills the memory at its peak", "MB at the peak", bars, MEMORY, files)


def categories(
    name: str,
    title: str,
    unit: str,
    bars: Sequence[Bar],
    kinds: Sequence[str],
    files: tuple[Path, ...],
) -> Chart:
    """Profiles of the same work beside each other; `kinds` are the categories that are the parts
    of the bars."""
    parts = [(kind, CATEGORY_COLOURS[kind]) for kind in kinds]
    return _stack(name, title, unit, bars, parts, files)


def losses(name: str, curves: Sequence[Curve], files: tuple[Path, ...], caution: str) -> Chart:
    """All versions' losses over each other, and below what they differ from V1's by; `caution` is
    said of them."""
    told = [f"{c.label} {_loss(c.losses[0])} to {_loss(c.losses[-1])}" for c in curves]
    largest = [f"{c.label} {c.largest:.2g}" for c in curves if c.differences]
    alt = f"Loss of the first and the last of {len(curves[0].losses)} steps: {', '.join(told)}."
    if largest:
        alt += f" Largest difference from V1 at any step: {', '.join(largest)}. {caution}".rstrip()

    def draw(figure: Any) -> None:
        below = 1.55 if largest else 0.0
        upper = _axis(figure, left=1.1, bottom=0.75 + below, top=0.15)
        axes = [upper]
        if largest:
            height = figure.get_size_inches()[1]
            axes.append(_axis(figure, left=1.1, bottom=0.75, top=height - below - 0.5))
        for curve, (colour, dashes, width) in zip(curves, _LINES * len(curves), strict=False):
            look = {"color": colour, "linestyle": dashes, "linewidth": width}
            upper.plot(_steps(curve.losses), curve.losses, label=_cut(curve.label), **look)
            if largest:
                axes[-1].plot(_steps(curve.differences), curve.differences, **look)
        upper.set_ylabel("loss")
        upper.legend(loc="upper right", handlelength=3)
        axes[-1].set_xlabel("step, the warm-up's first")
        if largest:
            _share_steps(axes[-1], upper)
        for axis in axes:
            axis.xaxis.get_major_locator().set_params(integer=True)
            _grid(axis, "y")

    title = "The loss of every version, and its distance from V1's"
    return Chart(name, title, alt, files, draw, (7.5, 4.9), tells_more=True)


def _share_steps(lower: Any, upper: Any) -> None:
    """Of the axes of differences, below those of losses."""
    lower.set_ylabel("minus V1's")
    lower.set_xlim(upper.get_xlim())
    lower.axhline(0, color=INK, linewidth=1, zorder=1)
    lower.yaxis.set_major_formatter("{x:g}")
    upper.tick_params(labelbottom=False)


# --- drawing -------------------------------------------------------------------------------------


def _stack(
    name: str,
    title: str,
    unit: str,
    bars: Sequence[Bar],
    parts: Sequence[tuple[str, str]],
    files: tuple[Path, ...],
    *,
    tells_more: bool = True,
) -> Chart:
    """Bars side by side, made of the parts with these names and colours."""
    shown = bars[:_MOST_BARS]
    kept = [i for i in range(len(parts)) if any(bar.parts[i] for bar in shown)]
    told = [
        f"{bar.label} {digits(bar.total)} ("
        + ", ".join(f"{parts[i][0]} {digits(bar.parts[i])}" for i in kept if bar.parts[i])
        + ")"
        for bar in shown
    ]
    alt = f"{unit[0].upper()}{unit[1:]}: {'; '.join(told)}.{_left_out(bars)}"
    columns = _columns([parts[i][0] for i in kept])
    lines = math.ceil(len(kept) / columns)

    def draw(figure: Any) -> None:
        axis = _axis(figure, left=_label_width(shown), bottom=0.75, top=0.2 + 0.32 * lines)
        places = list(range(len(shown)))[::-1]
        longest = max(bar.total for bar in shown)
        starts = [0.0] * len(shown)
        for i in kept:
            lengths = [bar.parts[i] for bar in shown]
            axis.barh(places, lengths, left=starts, height=0.66, color=parts[i][1],
                      edgecolor=PAPER, linewidth=1, label=parts[i][0])  # fmt: skip
            for place, start, length in zip(places, starts, lengths, strict=True):
                if length >= _READABLE * longest:
                    axis.text(start + length / 2, place, digits(length), ha="center",
                              va="center", color="#10151a", fontsize=13)  # fmt: skip
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        for place, total in zip(places, starts, strict=True):
            axis.annotate(digits(total), (total, place), xytext=(7, 0), va="center",
                          textcoords="offset points", fontweight="bold")  # fmt: skip
        axis.set_yticks(places, [_cut(bar.label) for bar in shown])
        axis.set_xlim(0, longest * 1.14)
        axis.xaxis.get_major_locator().set_params(nbins=6)
        axis.xaxis.set_major_formatter("{x:,.6g}")
        axis.set_xlabel(unit)
        axis.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderpad=0,
            handlelength=1.1, columnspacing=1.2, handletextpad=0.5,
        )  # fmt: skip
        _grid(axis, "x")

    height = 1.25 + 0.32 * lines + 0.5 * len(shown)
    return Chart(name, title, alt, files, draw, (7.5, height), tells_more)


def _axis(figure: Any, *, left: float, bottom: float, top: float, right: float = 0.15) -> Any:
    """The axes of a figure, between margins in inches."""
    width, height = figure.get_size_inches()
    box = (left / width, bottom / height,
           1 - (left + right) / width, 1 - (bottom + top) / height)  # fmt: skip
    return figure.add_axes(box)


def _label_width(bars: Sequence[Bar]) -> float:
    """Inches for the labels beside bars, at the font's size."""
    return 0.35 + _LETTER * max(len(_cut(bar.label)) for bar in bars)


def _columns(names: Sequence[str]) -> int:
    """Of a legend above the bars: one line of names, or as many columns as the widest allows."""
    widths = [0.55 + _LETTER * len(name) for name in names]
    if sum(widths) <= _LEGEND_WIDTH:
        return len(names)
    return max(1, int(_LEGEND_WIDTH / max(widths)))


def _with_gaps(sizes: Sequence[str]) -> list[float]:
    """Places of lines, with a gap where another size begins."""
    places = [0.0]
    for before, size in itertools.pairwise(sizes):
        places.append(places[-1] + (1.0 if size == before else 1.6))
    return places


def _grid(axis: Any, direction: str) -> None:
    axis.grid(axis=direction, color=LINE)
    axis.tick_params(length=0)


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _loss(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.3f}"


def _cut(label: str, width: int = _LONGEST_LABEL) -> str:
    return label if len(label) <= width else label[: width - 1] + "…"


def _left_out(shown: Sequence[object]) -> str:
    more = len(shown) - _MOST_BARS
    return f" {more} more stand in the table alone." if more > 0 else ""
