"""The charts of comparisons, waterfalls and sweeps: functions of rows give `Bars`, `draw_*` give
matplotlib figures, `*_chart` charts of a page."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.compare.rows import ONE_PROCESS, Row, ratio
from workshop.compare.sweep import AXES, Point, Sweep
from workshop.compare.waterfall import Step, Waterfall
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.show.comparisons import groups, limits, title, without_time
from workshop.show.drawing import (
    DIM,
    GREEN,
    GREY,
    INK,
    MOST_BARS,
    RED,
    WHOLE,
    Bars,
    Chart,
    Curves,
    cut,
    figure,
    grid,
    more,
    plot_bars,
    plot_curves,
    write_beside,
    write_legend,
)  # fmt: skip
from workshop.versions import ALL, MARKERS

PHASES = (
    ("forward_ms", "forward", "#3b7dd8"),
    ("backward_ms", "backward", "#e07b39"),
    ("optimizer_ms", "optimizer", "#5aa469"),
)
MEMORY = (
    ("weights", "weights", "#3b7dd8"),
    ("gradients", "gradients", "#e07b39"),
    ("optimizer_state", "AdamW moments", "#5aa469"),
    ("rest", "activations and rest", "#b8b8b8"),
)
SPLIT = (
    "A step's bar is as long as the median step. The numbers in it are from a pass that timed the "
    "parts alone; they need not add up to the step."
)
DISTURBED = "disturbed: other programs ran in all of its runs, so its times are too long."
_MEMORY_BAR, _LIMIT, _UNKNOWN = "#8FA8C8", "#9C2C77", "#FFFFFF"
_TITLE: Mapping[str, Any] = {"loc": "left", "fontweight": "bold", "fontsize": 14}


# --- the rows of a comparison --------------------------------------------------------------------


def throughput(rows: Sequence[Row]) -> Bars:
    """Tokens a second, with the speed-up over V1."""
    words = [
        _without_number(row)
        or row.speedup_text().replace("no significant difference", "not significant")
        for row in rows
    ]
    words = ["" if text in ("-", "baseline") else text for text in words]
    rates = [row.tokens_per_s for row in rows]
    colours = [ALL[row.version].colour for row in rows]
    axis, intervals = "tokens a second", list(map(_interval, rows))
    return Bars(_labels(rows), {"tokens/s": rates}, axis, colours, words, intervals=intervals)


def _labels(rows: Sequence[Row]) -> list[str]:
    return [f"{row.label}, disturbed" if row.disturbed else row.label for row in rows]


def _interval(row: Row) -> tuple[float, float] | None:
    """The rates of V1 times the ends of the speed-up's interval."""
    if row.speedup is None or row.speedup.interval is None or row.speedup_text() == "baseline":
        return None
    low, high = (
        end / row.speedup.value * (row.tokens_per_s or 0.0) for end in row.speedup.interval
    )
    return low, high


def steps(rows: Sequence[Row]) -> Bars:
    """The median step in its phases, as far as these were timed."""
    parts, totals = [row.step_parts for row in rows], [row.step_ms for row in rows]
    bars = _divided(rows, PHASES, parts, totals, "ms a step, median", "{:,.2f}")
    numbers = {
        label: [f"{getattr(row, key) or 0.0:,.2f}" for row in rows] for key, label, _ in PHASES
    }
    return dataclasses.replace(bars, numbers=numbers)


def memory(rows: Sequence[Row]) -> Bars:
    """The peak memory in MB, in its parts."""
    parts, totals = [row.memory_mb for row in rows], [row.peak_memory_mb for row in rows]
    return _divided(rows, MEMORY, parts, totals, "MB at the peak", "{:,.0f}")


def _divided(
    rows: Sequence[Row],
    kinds: Sequence[tuple[str, str, str]],
    parts: Sequence[Mapping[str, float | str]],
    totals: Sequence[float | None],
    axis: str,
    form: str,
) -> Bars:
    series = {
        label: [
            _length(total) and _length(own.get(key))
            for own, total in zip(parts, totals, strict=True)
        ]
        for key, label, _ in kinds
    }
    known = [sum(own) for own in zip(*series.values(), strict=True)]
    left = [
        total - part if total and total - part > 1e-3 * total else 0.0
        for total, part in zip(totals, known, strict=True)
    ]
    colours = [colour for *_, colour in kinds]
    if any(left):
        series["not divided"] = left
        colours.append(WHOLE)
    words = [
        form.format(total) if total else _without_number(row)
        for row, total in zip(rows, totals, strict=True)
    ]
    return Bars(_labels(rows), series, axis, colours, words, stacked=True)


def _length(value: float | str | None) -> float:
    """The length of a part of a bar: a broken file may have any."""
    return min(max(0.0, float(value or 0.0)), 1e15)


def _without_number(row: Row) -> str:
    if row.step_ms is not None:
        return ""
    return NOT_COMPARABLE if row.status == "interpreted" else without_time(row)


def draw_rows(rows: Sequence[Row]) -> Any:
    """Throughput, the step's parts and memory, a line of panels a group. A row without numbers has
    words in place of its bars."""
    shown = [group for group in groups(rows) if any(row.step_ms for row in group)]
    heights = [0.6, *(1.3 + 0.44 * min(len(group), MOST_BARS) for group in shown)]
    drawn = figure(14.5, sum(heights) + 0.4)
    drawn.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    ratios = {"width_ratios": (1.5, 1, 1), "height_ratios": heights}
    legends, *lines = drawn.subplots(len(heights), 3, sharey="row", **ratios)
    for axes, group in zip(lines, shown, strict=True):
        for axis, kind in zip(axes, (throughput, steps, memory), strict=True):
            plot_bars(axis, kind(group))
        axes[0].set_title(title(group), **_TITLE)
    for legend, *column in zip(legends, *lines, strict=True):
        write_legend(legend, *column)
        legend.axis("off")
    notes = [SPLIT, DISTURBED] if any(row.disturbed for row in rows) else [SPLIT]
    drawn.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=12)
    return drawn


def rows_chart(name: str, rows: Sequence[Row], files: tuple[Path, ...]) -> Chart:
    """`draw_rows` of rows that may be compared; one at least has a time."""
    alt = " ".join(kind(rows).alt for kind in (throughput, steps, memory))
    draw = functools.partial(draw_rows, rows)
    return Chart(name, "Throughput, time and memory", alt, files, draw, wide=True)


def losses_chart(
    name: str,
    curves: Mapping[str, Sequence[float]],
    differences: Mapping[str, Sequence[float]],
    files: tuple[Path, ...],
) -> Chart:
    """All versions' losses over each other, and below them their differences from V1's.

    Args:
        curves: the loss of each step by version, NaN where it was not finite.
        differences: of the versions whose loss should be V1's.
    """
    ends: dict[int, list[str]] = {}
    for label, own in curves.items():
        ends.setdefault(len(own), []).append(f"{label} {_loss(own[0])} to {_loss(own[-1])}")
    alt = " ".join(f"Loss of the first and the last of {count} steps: {', '.join(own)}."
                   for count, own in ends.items())  # fmt: skip
    if differences:
        largest = (
            f"{label} {max((abs(d) for d in own if not math.isnan(d)), default=math.nan):.2g}"
            for label, own in differences.items()
        )
        alt += f" Largest difference from V1 at any step: {', '.join(largest)}."

    def draw() -> Any:
        shown = [(curves, "loss"), (differences, "minus V1's")][: 2 if differences else 1]
        drawn = figure(7.5, 4.9)
        axes = drawn.subplots(len(shown), sharex=True, squeeze=False,
                              height_ratios=(5, 3)[: len(shown)])[:, 0]  # fmt: skip
        for axis, (own, words) in zip(axes, shown, strict=True):
            points = {label: list(enumerate(own.get(label, ()), 1)) for label in curves}
            colours = [ALL[label].colour for label in curves]
            plot_curves(axis, Curves(points, "", words, colours))
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].legend(loc="upper right", handlelength=3)
        axes[-1].set_xlabel("step, the warm-up's first")
        if differences:
            axes[1].axhline(0, color=INK, linewidth=1, zorder=1)
            axes[1].yaxis.set_major_formatter("{x:g}")
        return drawn

    heading = "The loss of every version, and its distance from V1's"
    return Chart(name, heading, alt, files, draw)


def _loss(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.3f}"


def speedups_chart(name: str, rows: Sequence[tuple[str, Row]], files: tuple[Path, ...]) -> Chart:
    """Speed-ups over V1 with their 95% intervals, which all rows have, on a logarithmic axis."""
    shown = [
        (f"{size}: {row.label}", row.speedup.value, *row.speedup.interval)
        for size, row in rows[:MOST_BARS]
        if row.speedup and row.speedup.interval
    ]
    texts = [f"{label} {value:.2f}x [{low:.2f}, {high:.2f}]" for label, value, low, high in shown]
    alt = f"Speed-up over V1 with its 95% interval: {'; '.join(texts)}.{more(rows)}"

    def draw() -> Any:
        drawn = figure(7.5, 1.3 + 0.36 * len(shown))
        axis = drawn.subplots()
        for place, (_, value, low, high) in enumerate(shown):
            differs = not low <= 1 <= high
            colour = GREY if not differs else GREEN if value > 1 else RED
            axis.plot([low, high], [place] * 2, color=colour, linewidth=4, solid_capstyle="butt")
            axis.plot(value, place, "o", color=colour, markersize=9)
            text = f"{value:.2f}x" if differs else "not significant"
            write_beside(axis, text, (high, place))
        axis.set_xscale("log", base=2)
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_yticks(range(len(shown)), [cut(label, 30) for label, *_ in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        lowest, highest = min(low for *_, low, _ in shown), max(high for *_, high in shown)
        axis.set_xlim(min(1.0, lowest) / 1.1, max(1.0, highest) * 1.6)
        axis.xaxis.set_major_formatter("{x:,.3g}x")
        axis.xaxis.set_minor_formatter("")
        axis.set_xlabel("speed-up over V1, with the 95% interval")
        grid(axis, "x")
        return drawn

    return Chart(name, "Speed-up over V1", alt, files, draw)


# --- waterfalls ----------------------------------------------------------------------------------

_LEGEND = (
    (WHOLE, "the whole step"),
    (GREEN, "saved"),
    (RED, "lost"),
    (GREY, "no significant difference"),
    (_UNKNOWN, f"{ONE_PROCESS}: no interval"),  # the last: left out where all have one
)


def draw_waterfalls(waterfalls: Sequence[Waterfall]) -> Any:
    """A line of two panels each: time from V1 down to the version, and peak memory."""
    from matplotlib.patches import Patch

    heights = [0.56 * len(waterfall.steps) + 1.5 for waterfall in waterfalls]
    drawn = figure(18, sum(heights) + 0.4)
    axes = drawn.subplots(
        len(waterfalls), 2, squeeze=False, width_ratios=(3.2, 1), height_ratios=heights
    )
    all_known = True
    for (times, memory_axis), waterfall in zip(axes, waterfalls, strict=True):
        _plot_rungs(times, waterfall)
        _plot_rung_memory(memory_axis, waterfall)
        gains = [step.gain for step in waterfall.steps if step.gain]
        all_known &= all(gain.interval for gain in gains)
        once = gains and not any(gain.interval for gain in gains)
        words = (
            f"{waterfall.title}; {ONE_PROCESS} a rung, so no intervals" if once else waterfall.title
        )
        times.set_title(words, **_TITLE)
    # Below all bars, which may be as long as their axis.
    legend = _LEGEND[:-1] if all_known else _LEGEND
    drawn.legend(
        handles=[Patch(**_look(colour), label=words) for colour, words in legend],
        loc="outside lower left", ncols=len(legend), fontsize=13,
    )  # fmt: skip
    return drawn


def _plot_rungs(axis: Any, waterfall: Waterfall) -> None:
    """Bars from the last rung's time to this one's; whole ones for V1 and the last."""
    rungs, before = waterfall.steps, 0.0
    longest = max((step.step_ms for step in rungs if step.step_ms is not None), default=1.0)
    last = next((step for step in reversed(rungs) if step.timed), None)
    for place, step in enumerate(rungs):
        if step.step_ms is None:
            words = step.note if step.row is None else without_time(step.row)
            colour = RED if step.row is not None and step.row.failed else DIM
            axis.text(before, place, f" {words}", va="center", color=colour)
            continue
        _plot_rung(axis, place, step, whole=step.before is None or step is last)
        right = max(step.step_ms, step.step_ms + (step.saved_ms or 0.0))
        axis.text(right + 0.01 * longest, place, _rung_words(step), va="center", fontsize=13)
        if before:
            axis.plot([before, before], [place - 1, place], color=DIM, linewidth=1, zorder=1)
        before = step.step_ms
    axis.set_yticks(range(len(rungs)), [step.rung.title for step in rungs])
    axis.set_ylim(len(rungs) - 0.4, -0.6)
    axis.set_xlim(0, 1.55 * longest)
    axis.set_xlabel("ms a step, median; at the right of a bar what the change is worth")


def _plot_rung(axis: Any, place: int, step: Step, *, whole: bool) -> None:
    assert step.step_ms is not None
    if whole:
        axis.barh(place, step.step_ms, color=WHOLE, height=0.62, zorder=2)
    if step.saved_ms is not None:
        start = min(step.step_ms, step.step_ms + step.saved_ms)
        low, high = (step.gain and step.gain.interval) or (math.nan, math.nan)
        colour = GREEN if low > 1 else RED if high < 1 else _UNKNOWN if math.isnan(low) else GREY
        axis.barh(place, abs(step.saved_ms), left=start, height=0.62, zorder=3, **_look(colour))


def _look(colour: str) -> dict[str, Any]:
    hatched = {"hatch": "////", "edgecolor": DIM} if colour == _UNKNOWN else {}
    return {"facecolor": colour, **hatched}


def _rung_words(step: Step) -> str:
    """As in "13.57 ms   -10.75   1.79x [1.75, 1.83]"."""
    words = f"{step.step_ms:,.2f} ms"
    if step.saved_ms is None:
        return words
    return f"{words}   {-step.saved_ms:+,.2f}   {ratio(step.gain, 'not significant')}"


def _plot_rung_memory(axis: Any, waterfall: Waterfall) -> None:
    rows = [step.row for step in waterfall.steps]
    amounts = [row.peak_memory_mb or 0.0 if row else 0.0 for row in rows]
    bars = axis.barh(range(len(amounts)), amounts, color=_MEMORY_BAR, height=0.62)
    axis.bar_label(bars, [f"{mb:,.0f}" if mb else "" for mb in amounts], padding=4, fontsize=13)
    axis.set_yticks([])
    axis.set_ylim(len(amounts) - 0.4, -0.6)
    axis.margins(x=0.25)
    axis.xaxis.get_major_locator().set_params(nbins=4)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("peak memory, MB")


# --- sweeps --------------------------------------------------------------------------------------


def draw_sweeps(sweeps: Sequence[Sweep]) -> Any:
    """A line of three panels each, and below it where each version's memory ends. A panel without
    measurements is empty."""
    heights = [h for one in sweeps for h in (5.8, 0.3 * (len(one.curves) + 1))]
    drawn = figure(19.2, sum(heights))
    grid = drawn.add_gridspec(len(heights), 3, height_ratios=heights)
    for index, sweep in enumerate(sweeps):
        time, speed, peak = (drawn.add_subplot(grid[2 * index, column]) for column in range(3))
        words = drawn.add_subplot(grid[2 * index + 1, :])
        words.axis("off")
        words.text(0, 1, "\n".join(limits(sweep)), va="top", fontsize=14)
        _plot_sweep(time, sweep, "ms a step, median", lambda point: point.row.step_ms)
        _plot_sweep(speed, sweep, "tokens a second", lambda point: point.row.tokens_per_s)
        _plot_sweep(peak, sweep, "peak memory, MB", lambda point: point.row.peak_memory_mb)
        points = [point for curve in sweep.curves for point in curve.points]
        memory_mb = sweep.memory_mb or next((p.free_mb for p in points if p.free_mb), None)
        if memory_mb is not None and any(point.beyond_memory for point in points):
            peak.axhline(memory_mb, color=_LIMIT, linestyle="--", linewidth=2)
            peak.annotate(
                "memory of the device", (0.02, memory_mb), xytext=(0, 5), color=_LIMIT,
                textcoords="offset points", xycoords=("axes fraction", "data"), fontsize=13,
            )  # fmt: skip
        speed.set_ylim(bottom=0)
        time.set_title(sweep.title, **_TITLE)
        time.legend()
    return drawn


def _plot_sweep(
    axis: Any, sweep: Sweep, label: str, value: Callable[[Point], float | None]
) -> None:
    """Curves over sizes that double from tick to tick; only the throughput is not logarithmic."""
    known = [ALL[curve.version] for curve in sweep.curves]
    series = {
        curve.label: [(point.size, y) for point in curve.points if (y := value(point))]
        for curve in sweep.curves
    }
    colours, markers = [v.colour for v in known], [MARKERS[v.marker] for v in known]
    plot_curves(axis, Curves(series, AXES[sweep.axis].words, label, colours, markers=markers))
    sizes = sorted({point.size for curve in sweep.curves for point in curve.points})
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    ticks = [f"{size:,}" for size in sizes]
    axis.set_xticks(sizes, ticks, rotation=45, ha="right", rotation_mode="anchor")
    if not any(series.values()):
        axis.set_yticks([])
    elif not label.startswith("tokens"):
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:,.12g}")
    axis.minorticks_off()
