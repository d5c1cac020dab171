"""Pictures of where the time of training steps goes: a trace's steps, and a ladder's rungs."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workshop import errors, results
from workshop.errors import WorkshopError
from workshop.profilers import kineto, step_time
from workshop.profilers.names import printable
from workshop.profilers.step_time import (
    COPY,
    CPU,
    KERNEL,
    LOADING,
    OTHER,
    RUNTIME,
    TENSOR,
    Activity,
    Span,
    StepTime,
)

# Colours that the colour-blind can distinguish (Okabe and Ito's), and greys.
COLOURS = {
    TENSOR: "#00523B",
    KERNEL: "#009E73",
    COPY: "#D55E00",
    LOADING: "#F0C808",
    RUNTIME: "#5B6770",
    CPU: "#56B4E9",
    OTHER: "#DDE1E5",
}
_DIM, _GRID = "#707070", "#D9DDE2"
_STYLE: Any = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a title may contain dollars
}
_TITLE: Any = {"loc": "left", "fontweight": "bold", "fontsize": 15}
_MOST_DRAWN = 3
"""Steps on a timeline."""
_MOST_NUMBERED = 16
"""Bars that have their step's length above them."""
_NO_STEPS = (
    "no times of steps in it: torch.profiler's traces have them, where its step() follows each, or "
    "ranges named step mark them"
)
_FEWEST_PLACES = 4
"""For bars: a single one would be as wide as the picture."""
_MOST_ROWS = 6
_LEAST_NAMED = 0.06
"""Of the timeline: a shorter step has no room for its name."""
_BINS = 400
"""Of a timeline: each is about three pixels wide."""


def picture(trace: Path, target: Path, title: str = "", *, step: int | None = None) -> None:
    """Writes a PNG: above, a bar a step, divided by what then ran; below, a timeline of up to three
    steps. What could not be read is reported on stderr.

    Args:
        trace: a .json or .json.gz of torch.profiler, or a folder with one (the newest counts).
        title: by default the trace's name.
        step: with which the timeline begins, counted from 1; by default the first.

    Raises:
        WorkshopError: the trace can't be read, has no such steps, or the picture can't be written.
        NotOnThisMachine: there is no matplotlib.
    """
    _check(target)
    activity = kineto.read_activity(trace)
    for warning in activity.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    steps, first = activity.times(), step or 1
    if not steps:
        raise WorkshopError(f"{trace}: {_NO_STEPS}")
    if first > len(steps):
        raise WorkshopError(f"{trace}: no step {first}: it has {len(steps)} steps")
    title = printable(title or trace.name)
    _save(lambda: _draw_trace(activity, steps, first, title), target)


def compare_pictures(means: Sequence[tuple[str, StepTime]], target: Path, title: str = "") -> None:
    """Writes a PNG: a bar for each mean step, divided by what then ran; at the left in ms, at the
    right in shares.

    Args:
        means: name and mean step of each.

    Raises:
        WorkshopError, NotOnThisMachine: the picture can't be written, or matplotlib is missing.
    """
    _check(target)
    named = [(printable(name), step) for name, step in means]
    _save(lambda: _draw_ladder(named, printable(title)), target)


def _check(target: Path) -> None:
    errors.require("matplotlib")
    if target.suffix.lower() != ".png":
        raise WorkshopError(f"{target}: the picture is a PNG: give a name that ends in .png")


def _save(draw: Callable[[], Any], target: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script that is not in the font is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = draw()
        FigureCanvasAgg(figure)
        try:
            with results.atomic_path(target) as path:
                figure.savefig(path, format="png", dpi=100)
        except OSError as error:
            raise WorkshopError(f"{target} can't be written: {error.strerror}") from None


# --- a trace -------------------------------------------------------------------------------------


def _draw_trace(activity: Activity, steps: list[StepTime], first: int, title: str) -> Any:
    from matplotlib.figure import Figure

    shown = activity.spans[first - 1 : first - 1 + _MOST_DRAWN]
    rows = _rows(activity, (shown[0][0], shown[-1][1]))
    below = 1.3 + 0.75 * len(rows)
    figure = Figure(figsize=(16, 5 + below), layout="constrained")
    bars, line = figure.subplots(2, 1, height_ratios=(5, below))
    _draw_bars(bars, steps)
    bars.set_title(title, pad=30, **_TITLE)
    bars.annotate(
        _words(steps), (0, 1), (0, 12), xycoords="axes fraction", textcoords="offset points"
    )
    _draw_rows(line, rows)
    _mark_steps(line, [(_ms_since(a, activity), _ms_since(b, activity)) for a, b in shown], first)
    return figure


def _words(steps: list[StepTime]) -> str:
    """As in "8 steps, on average 41.2 ms. GPU utilisation 12%, ..."."""
    mean = step_time.mean(steps)
    words = f"1 step, {_ms(mean.ns)} ms."
    if len(steps) > 1:
        words = f"{len(steps):,} steps, on average {_ms(mean.ns)} ms."
    if mean.parts_ns[KERNEL]:
        words += (
            f" GPU utilisation {mean.gpu_share:.0%} (a kernel runs); "
            f"{mean.tensor_share:.0%} of the kernels' time on tensor cores."
        )
    return words


def _ms(ns: float) -> str:
    """Three digits, or all before the decimal point."""
    ms = ns / 1e6
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}".rstrip(".")


def _ms_since(instant: float, activity: Activity) -> float:
    """Since the first step began."""
    return (instant - activity.spans[0][0]) / 1e6


def _draw_bars(axis: Any, steps: list[StepTime]) -> None:
    numbers = range(1, len(steps) + 1)
    mean = step_time.mean(steps)
    bottoms = [0.0] * len(steps)
    for category in COLOURS:
        heights = [_part(step, category) / 1e6 for step in steps]
        if not any(heights):
            continue
        part = _part(mean, category)
        label = f"{_name(category)}: {_ms(part)} ms, {part / mean.ns:.1%}"
        axis.bar(numbers, heights, bottom=bottoms, color=COLOURS[category], label=label, width=0.7)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    if len(steps) <= _MOST_NUMBERED:
        axis.bar_label(axis.containers[-1], [_ms(step.ns) for step in steps], padding=3)
        axis.set_xticks(numbers)
    axis.set_xlim(0.4, max(len(steps), _FEWEST_PLACES) + 0.6)
    axis.margins(y=0.12)
    axis.grid(axis="y", color=_GRID)
    axis.set_ylabel("ms a step")
    axis.set_xlabel("step")
    axis.yaxis.set_major_formatter("{x:,.12g}")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1], labels[::-1], title="on average" if len(steps) > 1 else None,
        alignment="left", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0),
    )  # fmt: skip


def _part(step: StepTime, category: str) -> float:
    """Of a step, in ns; kernels on tensor cores and others apart."""
    if category == TENSOR:
        return step.tensor_ns
    return step.parts_ns[category] - (step.tensor_ns if category == KERNEL else 0.0)


def _name(category: str) -> str:
    return "other kernels" if category == KERNEL else category


@dataclass
class _Row:
    """What a thread or a stream did in each of _BINS equal parts of the timeline.

    Attributes:
        edges: of these parts, in ms since the first step.
    """

    name: str
    edges: list[float]
    parts: list[StepTime]

    @property
    def busy_ns(self) -> float:
        return sum(part.ns - part.parts_ns[OTHER] for part in self.parts)


def _rows(activity: Activity, window: Span) -> list[_Row]:
    """Those of the threads and streams that did anything in the window; of many the busiest."""
    width = (window[1] - window[0]) / _BINS
    edges = [window[0] + index * width for index in range(_BINS + 1)]
    shown = [_ms_since(edge, activity) for edge in edges]
    rows = [
        _Row(name, shown, step_time.divide([lane], pairwise(edges)))
        for name, lane in activity.lanes.items()
    ]
    least = sorted((row.busy_ns for row in rows), reverse=True)[:_MOST_ROWS][-1]
    return [row for row in rows if row.busy_ns and row.busy_ns >= least]


def _draw_rows(axis: Any, rows: list[_Row]) -> None:
    """Each a band, as high as the share of the time in which it was active."""
    for place, row in enumerate(rows):
        bottoms = [place + 0.36] * _BINS
        for category in COLOURS:
            if category == OTHER:
                continue
            shares = [_part(part, category) / part.ns for part in row.parts]
            tops = [bottom - 0.72 * share for bottom, share in zip(bottoms, shares, strict=True)]
            if any(shares):
                axis.stairs(tops, row.edges, baseline=bottoms, fill=True, color=COLOURS[category])
            bottoms = tops
        axis.axhline(place + 0.36, color=_GRID, linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.5, -1.0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=_GRID)
    axis.ticklabel_format(axis="x", style="plain", useOffset=False)
    axis.set_xlabel("ms since the first step began; a band's height is the share of the time")


def _mark_steps(axis: Any, steps: list[Span], first: int) -> None:
    least = _LEAST_NAMED * (steps[-1][1] - steps[0][0])
    for number, (start, end) in enumerate(steps, start=first):
        axis.axvline(start, color="black", linewidth=1)
        if end - start >= least:
            axis.text((start + end) / 2, -0.62, f"step {number}", ha="center", color=_DIM)
    axis.set_xlim(steps[0][0], steps[-1][1])


# --- a ladder ------------------------------------------------------------------------------------


def _draw_ladder(means: list[tuple[str, StepTime]], title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 2.2 + 0.55 * len(means)), layout="constrained")
    times, shares = figure.subplots(1, 2, sharey=True)
    steps = [step for _, step in means]
    _draw_rungs(times, steps, [1e6] * len(steps))
    _write_beside(times, [(step.ns / 1e6, f"{_ms(step.ns)} ms") for step in steps])
    times.set_yticks(range(len(means)), [name for name, _ in means])
    times.set_ylim(len(means) - 0.5, -0.5)
    times.margins(x=0.14)
    times.set_xlabel("ms a step")
    _draw_rungs(shares, steps, [step.ns / 100 for step in steps])
    if any(step.parts_ns[KERNEL] for step in steps):
        _write_beside(shares, [(100.0, _used(step)) for step in steps])
        words = "at the right: GPU utilisation; of that on tensor cores"
        shares.set_title(words, loc="right", color=_DIM, fontsize=13)
    shares.set_xlim(0, 100)
    shares.set_xlabel("% of the step")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=15)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", ncols=len(labels), frameon=False,
        handlelength=1.3, columnspacing=1.4,
    )  # fmt: skip
    return figure


def _draw_rungs(axis: Any, steps: list[StepTime], units_ns: list[float]) -> None:
    """A bar for each step, in its unit."""
    lefts = [0.0] * len(steps)
    for category in COLOURS:
        widths = [_part(step, category) / unit for step, unit in zip(steps, units_ns, strict=True)]
        if any(widths):
            look = {"color": COLOURS[category], "label": _name(category), "height": 0.66}
            axis.barh(range(len(steps)), widths, left=lefts, **look)
            lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color=_GRID)
    axis.xaxis.set_major_formatter("{x:,.12g}")


def _write_beside(axis: Any, ends: list[tuple[float, str]]) -> None:
    """A text at the end of each bar."""
    look = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    for row, (end, text) in enumerate(ends):
        axis.annotate(text, (end, row), annotation_clip=False, **look)


def _used(step: StepTime) -> str:
    return f"{step.gpu_share:.0%}, {step.tensor_share:.0%}" if step.parts_ns[KERNEL] else "no GPU"
