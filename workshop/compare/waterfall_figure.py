"""Waterfalls as a picture: what each change takes off the step, and the memory of each rung."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop.compare.comparison import ONE_PROCESS
from workshop.compare.waterfall import Step, Waterfall
from workshop.compare.waterfall_tables import SAME, in_place_of_time, ratio

SAVED, LOST, NEITHER = "#009E73", "#D55E00", "#B8B8B8"
WHOLE, DIM, MEMORY = "#44546a", "#707070", "#8FA8C8"
_LEGEND = (
    (WHOLE, "the whole step"),
    (SAVED, "saved"),
    (LOST, "lost"),
    (NEITHER, f"no significant difference, or {ONE_PROCESS}"),
)
_INCHES_A_RUNG = 0.56
_INCHES_OF_LEGEND = 0.4
_STYLE: Any = {
    "font.size": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a device may have any name
}


def plot(waterfalls: Sequence[Waterfall], target: Path) -> None:
    """A line of two panels each: time from V1 down to the version, and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure = _draw(waterfalls)
        figure.savefig(target, dpi=100)
        plt.close(figure)


def _draw(waterfalls: Sequence[Waterfall]) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    heights = [_INCHES_A_RUNG * len(waterfall.steps) + 1.5 for waterfall in waterfalls]
    figure, axes = plt.subplots(
        len(waterfalls), 2, figsize=(18, sum(heights) + _INCHES_OF_LEGEND), squeeze=False,
        layout="constrained", gridspec_kw={"width_ratios": (3.2, 1), "height_ratios": heights},
    )  # fmt: skip
    for line, waterfall in zip(axes, waterfalls, strict=True):
        _plot_times(line[0], waterfall)
        _plot_memory(line[1], waterfall)
        line[0].set_title(waterfall.title, loc="left", fontweight="bold", fontsize=15)
    # Below all bars, which may be as long as their axis whatever the figures are.
    figure.legend(
        handles=[Patch(color=colour, label=words) for colour, words in _LEGEND],
        loc="outside lower left", ncols=len(_LEGEND), frameon=False, fontsize=13,
    )  # fmt: skip
    return figure


def _plot_times(axis: Any, waterfall: Waterfall) -> None:
    """Bars from the last rung's time to this one's; whole ones for V1 and the last."""
    steps, before = waterfall.steps, 0.0
    longest = max((step.step_ms for step in steps if step.step_ms is not None), default=1.0)
    last = next((step for step in reversed(steps) if step.timed), None)
    for place, step in enumerate(steps):
        if step.step_ms is None:
            words = in_place_of_time(step)
            colour = LOST if step.row is not None and step.row.failed else DIM
            axis.text(before or 0.0, place, f" {words}", va="center", color=colour)
            continue
        whole = step.before is None or step is last
        _bar(axis, place, step, whole)
        right = max(step.step_ms, step.step_ms + (step.saved_ms or 0.0))
        axis.text(right + 0.01 * longest, place, _words(step), va="center", fontsize=13)
        if before:
            axis.plot([before, before], [place - 1, place], color=DIM, linewidth=1, zorder=1)
        before = step.step_ms
    axis.set_yticks(range(len(steps)), [step.rung.title for step in steps])
    axis.set_ylim(len(steps) - 0.4, -0.6)
    axis.set_xlim(0, 1.55 * longest)
    axis.set_xlabel("ms a step, median; at the right of a bar what the change is worth")


def _bar(axis: Any, place: int, step: Step, whole: bool) -> None:
    assert step.step_ms is not None
    if whole:
        axis.barh(place, step.step_ms, color=WHOLE, height=0.62, zorder=2)
    if step.saved_ms is not None:
        low, high = step.gain_ci or (1.0, 1.0)
        colour = SAVED if low > 1 else LOST if high < 1 else NEITHER
        start = min(step.step_ms, step.step_ms + step.saved_ms)
        axis.barh(place, abs(step.saved_ms), left=start, color=colour, height=0.62, zorder=3)


def _words(step: Step) -> str:
    """As in "13.57 ms   −10.75 ms   1.79x [1.75, 1.83]"."""
    words = f"{step.step_ms:,.4g} ms"
    if step.saved_ms is None:
        return words
    gain = ratio(step.gain, step.gain_ci).replace(SAME, "no difference")
    return f"{words}   {-step.saved_ms:+,.3g}   {gain}"


def _plot_memory(axis: Any, waterfall: Waterfall) -> None:
    amounts = [
        step.row.peak_memory_mb if step.row and step.row.peak_memory_mb else 0.0
        for step in waterfall.steps
    ]
    bars = axis.barh(range(len(amounts)), amounts, color=MEMORY, height=0.62)
    axis.bar_label(bars, [f"{mb:,.0f}" if mb else "" for mb in amounts], padding=4, fontsize=13)
    axis.set_yticks([])
    axis.set_ylim(len(amounts) - 0.4, -0.6)
    axis.margins(x=0.25)
    axis.xaxis.get_major_locator().set_params(nbins=4)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("peak memory, MB")
