"""Comparisons, waterfalls and sweeps as pictures, for a projector."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.compare.rows import ONE_PROCESS, Row, ratio
from workshop.compare.sweep import AXES, Point, Sweep
from workshop.compare.waterfall import Step, Waterfall
from workshop.errors import printable
from workshop.run import interpreter
from workshop.show.comparisons import groups, limits, title, without_time
from workshop.versions import ALL, MARKERS

PHASE_COLOURS = (
    ("forward_ms", "forward", "#3b7dd8"),
    ("backward_ms", "backward", "#e07b39"),
    ("optimizer_ms", "optimizer", "#5aa469"),
)
MEMORY_COLOURS = (
    ("weights", "weights", "#3b7dd8"),
    ("gradients", "gradients", "#e07b39"),
    ("optimizer_state", "AdamW moments", "#5aa469"),
    ("rest", "activations and rest", "#b8b8b8"),
)
SAVED, LOST, NEITHER, UNKNOWN = "#009E73", "#D55E00", "#B8B8B8", "#FFFFFF"
"""Effects of a change on the step, in a waterfall; UNKNOWN, of one process, is hatched."""
_WHOLE, _DIM, _MEMORY, _LIMIT = "#44546a", "#707070", "#8FA8C8", "#9C2C77"
_STYLE: Any = {
    "font.size": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a device's name may contain dollars
}
_TITLE: Any = {"loc": "left", "fontweight": "bold", "fontsize": 15}


def save(draw: Callable[[Any], Any], what: Any, target: Path) -> None:
    """Writes the picture that one of the functions below draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure = draw(what)
        figure.savefig(target, dpi=100)
        plt.close(figure)


# --- the rows of a comparison --------------------------------------------------------------------

_INCHES_A_VERSION = 1.15
SPLIT = "A step's bar is the table's median step, divided as the separate pass timed its parts."


def draw_rows(rows: Sequence[Row]) -> Any:
    """Throughput, the step's parts and memory, a line of panels a group. An interpreted version has
    words in place of its bars."""
    import matplotlib.pyplot as plt

    shown = [
        [row for row in group if row.status in ("timed", "interpreted")]
        for group in groups(rows)
        if any(row.step_ms for row in group)
    ]
    width = max(6.4, _INCHES_A_VERSION * max(map(len, shown)))
    figure, axes = plt.subplots(
        len(shown), 3, figsize=(3 * width, 5.4 * len(shown)), squeeze=False, layout="constrained"
    )
    for (speed, phases, memory), group in zip(axes, shown, strict=True):
        _plot_throughput(speed, group)
        steps = [row.step_ms or 0.0 for row in group]
        _plot_stack(phases, group, PHASE_COLOURS, [row.step_parts for row in group], steps,
                    "median step, ms", ",.2f")  # fmt: skip
        peaks = [row.peak_memory_mb or 0.0 for row in group]
        _plot_stack(memory, group, MEMORY_COLOURS, [row.memory_mb for row in group], peaks,
                    "peak memory, MB", ",.0f")  # fmt: skip
        words = interpreter.NOT_COMPARABLE.replace(", ", ",\n")
        look = {"ha": "center", "va": "bottom", "rotation": 90, "color": _DIM, "fontsize": 14}
        for axis, (index, row) in itertools.product((speed, phases, memory), enumerate(group)):
            if row.status == "interpreted":  # words in place of its bars
                _write_above(axis, words, (index, 0), 8, **look)
        speed.set_title(title(group), **_TITLE)
    figure.supxlabel(SPLIT, x=0.01, ha="left", fontsize=14)
    return figure


def _plot_throughput(axis: Any, group: list[Row]) -> None:
    values = [row.tokens_per_s or 0.0 for row in group]
    bars = axis.bar([printable(row.label) for row in group], values, color=_WHOLE, width=0.6)
    verdicts = [row.short_speedup_text() if row.step_ms else "" for row in group]
    axis.bar_label(bars, verdicts, padding=4, fontweight="bold")
    axis.set_ylabel("tokens a second")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.15)


def _plot_stack(
    axis: Any,
    group: list[Row],
    colours: Sequence[tuple[str, str, str]],
    parts: Sequence[Mapping[str, float | str]],
    totals: Sequence[float],
    label: str,
    form: str,
) -> None:
    """Bars of each row's total, in its parts where these are known; `form` is the table's."""
    names = [printable(row.label) for row in group]
    bottoms = [0.0] * len(group)
    for key, legend, colour in colours:
        heights = [float(own.get(key, 0.0)) for own in parts]
        axis.bar(names, heights, bottom=bottoms, color=colour, label=legend, width=0.6)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    left = [a - b if a - b > 1e-3 * a else 0.0 for a, b in zip(totals, bottoms, strict=True)]
    if any(left):
        axis.bar(names, left, bottom=bottoms, color=_WHOLE, label="not divided", width=0.6)
    for index, total in enumerate(totals):
        if total:  # else it was not measured
            _write_above(axis, format(total, form), (index, total), 4, ha="center")
    axis.set_ylabel(label)
    if max(totals) >= 1000:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.3)
    axis.legend(frameon=False, fontsize=13, loc="upper right", ncols=2)


def _write_above(
    axis: Any, text: str, place: tuple[float, float], points: int, **look: Any
) -> None:
    axis.annotate(text, place, xytext=(0, points), textcoords="offset points", **look)


# --- waterfalls ----------------------------------------------------------------------------------

_LEGEND = (
    (_WHOLE, "the whole step"),
    (SAVED, "saved"),
    (LOST, "lost"),
    (NEITHER, "no significant difference"),
    (UNKNOWN, f"{ONE_PROCESS}: no interval"),
)
_INCHES_A_RUNG, _INCHES_OF_LEGEND = 0.56, 0.4


def draw_waterfalls(waterfalls: Sequence[Waterfall]) -> Any:
    """A line of two panels each: time from V1 down to the version, and peak memory."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    heights = [_INCHES_A_RUNG * len(waterfall.steps) + 1.5 for waterfall in waterfalls]
    figure, axes = plt.subplots(
        len(waterfalls), 2, figsize=(18, sum(heights) + _INCHES_OF_LEGEND), squeeze=False,
        layout="constrained", gridspec_kw={"width_ratios": (3.2, 1), "height_ratios": heights},
    )  # fmt: skip
    for (times, memory), waterfall in zip(axes, waterfalls, strict=True):
        _plot_steps(times, waterfall)
        _plot_memory(memory, waterfall)
        times.set_title(waterfall.title, **_TITLE)
    # Below all bars, which may be as long as their axis.
    figure.legend(
        handles=[Patch(**_look(colour), label=words) for colour, words in _LEGEND],
        loc="outside lower left", ncols=len(_LEGEND), frameon=False, fontsize=13,
    )  # fmt: skip
    return figure


def _plot_steps(axis: Any, waterfall: Waterfall) -> None:
    """Bars from the last rung's time to this one's; whole ones for V1 and the last."""
    steps, before = waterfall.steps, 0.0
    longest = max((step.step_ms for step in steps if step.step_ms is not None), default=1.0)
    last = next((step for step in reversed(steps) if step.timed), None)
    for place, step in enumerate(steps):
        if step.step_ms is None:
            words = step.note if step.row is None else without_time(step.row)
            colour = LOST if step.row is not None and step.row.failed else _DIM
            axis.text(before, place, f" {words}", va="center", color=colour)
            continue
        _bar(axis, place, step, whole=step.before is None or step is last)
        right = max(step.step_ms, step.step_ms + (step.saved_ms or 0.0))
        axis.text(right + 0.01 * longest, place, _words(step), va="center", fontsize=13)
        if before:
            axis.plot([before, before], [place - 1, place], color=_DIM, linewidth=1, zorder=1)
        before = step.step_ms
    axis.set_yticks(range(len(steps)), [step.rung.title for step in steps])
    axis.set_ylim(len(steps) - 0.4, -0.6)
    axis.set_xlim(0, 1.55 * longest)
    axis.set_xlabel("ms a step, median; at the right of a bar what the change is worth")


def _bar(axis: Any, place: int, step: Step, *, whole: bool) -> None:
    assert step.step_ms is not None
    if whole:
        axis.barh(place, step.step_ms, color=_WHOLE, height=0.62, zorder=2)
    if step.saved_ms is not None:
        start = min(step.step_ms, step.step_ms + step.saved_ms)
        low, high = step.gain_ci or (math.nan, math.nan)
        colour = SAVED if low > 1 else LOST if high < 1 else NEITHER if step.gain_ci else UNKNOWN
        look = _look(colour)
        axis.barh(place, abs(step.saved_ms), left=start, height=0.62, zorder=3, **look)


def _look(colour: str) -> dict[str, Any]:
    hatched = {"hatch": "////", "edgecolor": _DIM} if colour == UNKNOWN else {}
    return {"facecolor": colour, **hatched}


def _words(step: Step) -> str:
    """As in "13.57 ms   -10.75   1.79x [1.75, 1.83]"."""
    words = f"{step.step_ms:,.2f} ms"
    if step.saved_ms is None:
        return words
    return f"{words}   {-step.saved_ms:+,.2f}   {ratio(step.gain, step.gain_ci, 'no difference')}"


def _plot_memory(axis: Any, waterfall: Waterfall) -> None:
    rows = [step.row for step in waterfall.steps]
    amounts = [row.peak_memory_mb or 0.0 if row else 0.0 for row in rows]
    bars = axis.barh(range(len(amounts)), amounts, color=_MEMORY, height=0.62)
    axis.bar_label(bars, [f"{mb:,.0f}" if mb else "" for mb in amounts], padding=4, fontsize=13)
    axis.set_yticks([])
    axis.set_ylim(len(amounts) - 0.4, -0.6)
    axis.margins(x=0.25)
    axis.xaxis.get_major_locator().set_params(nbins=4)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("peak memory, MB")


# --- sweeps --------------------------------------------------------------------------------------

_INCHES_A_LINE = 0.3


def draw_sweeps(sweeps: Sequence[Sweep]) -> Any:
    """A line of three panels each, and below it where each version's memory ends. A panel without
    measurements is empty."""
    import matplotlib.pyplot as plt

    heights = [h for s in sweeps for h in (5.8, _INCHES_A_LINE * (len(s.curves) + 1))]
    figure = plt.figure(figsize=(19.2, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    for index, sweep in enumerate(sweeps):
        time, speed, memory = (figure.add_subplot(grid[2 * index, column]) for column in range(3))
        words = figure.add_subplot(grid[2 * index + 1, :])
        words.axis("off")
        words.text(0, 1, "\n".join(limits(sweep)), va="top", fontsize=14)
        _panel(time, sweep, "ms a step, median", lambda point: point.row.step_ms)
        _panel(speed, sweep, "tokens a second", lambda point: point.row.tokens_per_s)
        _panel(memory, sweep, "peak memory, MB", lambda point: point.row.peak_memory_mb)
        points = [point for curve in sweep.curves for point in curve.points]
        memory_mb = sweep.memory_mb or next((p.free_mb for p in points if p.free_mb), None)
        if memory_mb is not None and any(point.beyond_memory for point in points):
            memory.axhline(memory_mb, color=_LIMIT, linestyle="--", linewidth=2)
            place = {"xycoords": ("axes fraction", "data"), "color": _LIMIT, "fontsize": 13}
            _write_above(memory, "memory of the device", (0.02, memory_mb), 5, **place)
        speed.set_ylim(bottom=0)
        time.set_title(sweep.title, **_TITLE)
        time.legend(frameon=False)
    return figure


def _panel(axis: Any, sweep: Sweep, label: str, value: Callable[[Point], float | None]) -> None:
    """Curves over sizes that double from tick to tick; only the throughput is not logarithmic."""
    for curve in sweep.curves:
        amounts = {point.size: value(point) for point in curve.points if value(point)}
        version = ALL[curve.version]
        style = {"color": version.colour, "marker": MARKERS[version.marker], "label": curve.label}
        axis.plot(list(amounts), list(amounts.values()), markersize=9, linewidth=2.5, **style)
    every = [point for curve in sweep.curves for point in curve.points]
    sizes = sorted({point.size for point in every})
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    labels = [f"{size:,}" for size in sizes]
    axis.set_xticks(sizes, labels, rotation=45, ha="right", rotation_mode="anchor")
    if not any(value(point) for point in every):
        axis.set_yticks([])
    elif not label.startswith("tokens"):
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:,.12g}")
    axis.minorticks_off()
    axis.grid(axis="y", color="#D9DDE2")
    axis.set_axisbelow(True)
    axis.set_xlabel(AXES[sweep.axis].words)
    axis.set_ylabel(label)
