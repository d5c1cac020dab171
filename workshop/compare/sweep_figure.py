"""Sweeps as a picture: time, throughput and memory of every version as the work grows."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workshop.compare import colours
from workshop.compare.sweep import AXES, Curve, Point, Sweep
from workshop.compare.sweep_tables import limits

MARKS = {"v1": "o", "v2": "s", "v3": "D", "v4": "^", "hf": "P", "hf-liger": "X"}
Value = Callable[[Point], float | None]
_INCHES_A_LINE = 0.3
_MOST_LEVEL = 5
"""Sizes whose labels stand side by side in a panel; those of more are turned."""
_MOST_LABELS = 12
_MARK_POINTS = 13


def plot(sweeps: Sequence[Sweep], target: Path) -> None:
    """A line of three panels each, and below it where each version's memory ends. A panel of which
    nothing was measured is empty."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    look = plt.rc_context(
        {
            "font.size": 15,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.parse_math": False,  # a device's name may hold dollars
        }
    )
    with look:
        figure = _draw(sweeps)
        figure.savefig(target, dpi=100)
    plt.close(figure)


def _draw(sweeps: Sequence[Sweep]) -> Any:
    import matplotlib.pyplot as plt

    heights = [h for s in sweeps for h in (5.8, _INCHES_A_LINE * (len(s.curves) + 1))]
    figure = plt.figure(figsize=(19.2, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    for index, sweep in enumerate(sweeps):
        line = [figure.add_subplot(grid[2 * index, column]) for column in range(3)]
        words = figure.add_subplot(grid[2 * index + 1, :])
        words.axis("off")
        words.text(0, 1, "\n".join(limits(sweep)), va="top", fontsize=14)
        _panel(line[0], sweep, "ms a step, median", lambda point: point.row.step_ms)
        _panel(line[1], sweep, "tokens a second", lambda point: point.row.tokens_per_s)
        _panel(line[2], sweep, "peak memory, MB", lambda point: point.row.peak_memory_mb)
        _mark_ends(line[2], sweep)
        line[1].set_ylim(bottom=0)
        line[0].set_title(sweep.title, loc="left", fontweight="bold", fontsize=15)
        line[0].legend(frameon=False)
    return figure


def _panel(axis: Any, sweep: Sweep, label: str, value: Value) -> None:
    """Curves over sizes that double from tick to tick; the throughput alone is not logarithmic."""
    curves = [
        (curve, [(point.size, value(point)) for point in curve.points if value(point)])
        for curve in sweep.curves
    ]
    for curve, told in curves:
        axis.plot(
            [size for size, _ in told],
            [amount for _, amount in told],
            color=colours.OF_VERSION.get(curve.version, colours.OTHER),
            marker=MARKS.get(curve.version, "o"),
            markersize=9,
            linewidth=2.5,
            label=curve.label,
        )
    sizes = sorted({point.size for curve in sweep.curves for point in curve.points})
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    labelled = sizes[:: -(-len(sizes) // _MOST_LABELS)]
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    look = turned if len(labelled) > _MOST_LEVEL else {}
    axis.set_xticks(labelled, [f"{size:,}" for size in labelled], **look)
    if not any(told for _, told in curves):
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


def _mark_ends(axis: Any, sweep: Sweep) -> None:
    """The device's memory as a line, and on it a cross where a version was out of memory, an open
    ring where it was not tried."""
    from matplotlib.transforms import offset_copy

    free = [point.free_mb for curve in sweep.curves for point in curve.points if point.free_mb]
    memory_mb = sweep.memory_mb or next(iter(free), None)
    ends = [end for curve in sweep.curves for end in _ends(curve)]
    if memory_mb is None or not ends:
        return
    axis.axhline(memory_mb, color="#9C2C77", linestyle="--", linewidth=2)
    axis.annotate(
        "memory of the device", (0.02, memory_mb), xycoords=("axes fraction", "data"),
        xytext=(0, 5), textcoords="offset points", color="#9C2C77", fontsize=13,
    )  # fmt: skip
    ends.sort(key=lambda end: end[1].size)
    for _, beside in itertools.groupby(ends, key=lambda end: end[1].size):
        own = list(beside)
        for index, (version, point) in enumerate(own):
            # Side by side, about their size: in points, since the sizes are logarithmic.
            shift = (index - (len(own) - 1) / 2) * 0.7 * _MARK_POINTS
            look = {"marker": "x"} if point.out_of_memory else {"marker": "o", "fillstyle": "none"}
            axis.plot(point.size, memory_mb, color=colours.OF_VERSION.get(version, colours.OTHER),
                      markersize=_MARK_POINTS, markeredgewidth=3, linestyle="none", clip_on=False,
                      transform=offset_copy(axis.transData, axis.figure, x=shift, units="points"),
                      **look)  # fmt: skip


def _ends(curve: Curve) -> list[tuple[str, Point]]:
    return [
        (curve.version, point)
        for point in curve.points
        if point.out_of_memory or point.predicted_mb is not None
    ]
