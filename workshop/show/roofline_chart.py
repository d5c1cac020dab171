"""The roofline: a PNG for a projector, and its points as a table.

A point is drawn where a tool counted its operations and bytes. One whose bytes are known from sizes
alone, or not at all, is a line: its rate is measured, its intensity is somewhere on it.
"""

import itertools
import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.profilers.metrics import digits
from workshop.profilers.names import display_name
from workshop.profilers.picture import COLOURS as KERNEL_COLOURS
from workshop.profilers.picture import fit, text_width
from workshop.roofline import model
from workshop.roofline.model import COMPUTE, MAIN_MEMORY, MEASURED, MEMORY, Point, Roofline, share
from workshop.show.charts import PHASES
from workshop.show.drawing import DIM
from workshop.tables import Line as TableLine
from workshop.tables import Table

COLOURS = KERNEL_COLOURS | {"step": "#222222", "numbers": "#0072B2"}
COLOURS |= dict(zip(("forward", "backward", "AdamW"), (c for *_, c in PHASES), strict=True))
"""By category: a kernel's as in other pictures, a step's parts as in the comparisons'."""
MOST_DRAWN = 200
"""Points in a picture. Those that follow are the shortest kernels."""
WIDTH, HEIGHT, DPI = 1600, 900, 100
"""Size of the PNG, in pixels."""
_FLAG = "#B3261E"
_CEILING_COLOURS = dict.fromkeys(model.ORIGINS, "#1A1F24") | {MEASURED: "#9C2C77"}
_MARKERS = {-1: "<", 0: "o", 1: ">"}
"""By edge: a point is at its intensity (0), or at the plot's left or right edge."""
_LEVELS = {"L2": "s", "L1": "D"}
"""Markers of points in the plot whose bytes are those of a cache."""
_EDGES = {-1: "few or no operations", 1: "few or no bytes"}
_LINE = {"linestyle": ":", "linewidth": 3.0}
"""A point whose intensity is not measured."""
_FONT_SIZE, _TITLE_SIZE, _LIST_SIZES, _LIST_WIDTH = 13, 17, (11, 9), 382
"""The last one in pixels."""
_SMALLEST_AREA, _LARGEST_AREA = 60.0, 1500.0
"""Areas of a marker, in square points: the least that is visible, and that of the longest time."""
_LOWEST_INTENSITY, _HIGHEST_INTENSITY = 1e-3, 1e6
_LEFT_OUT = 1e5
"""Points further below the highest roof are drawn at the lower edge."""


# --- where things are ----------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """Limits of the axes: FLOP a byte, and FLOP a second."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, point: Point) -> tuple[float, float, int] | None:
        """x, y and edge of a point that was measured. Without operations it is at the left edge, as
        far below the memory's roof there as its bandwidth is below the memory's; without bytes at
        the right edge. None for a point without either, and for others."""
        if not point.is_measured:
            return None
        left, right = self.x[0] * 1.12, self.x[1] / 1.12
        intensity = point.intensity
        if point.flops_per_s and (intensity is None or intensity > right):
            return right, max(point.flops_per_s, self.y[0]), 1
        if point.bytes_per_s and (not point.flops_per_s or (intensity or 0) < left):
            return left, max(point.bytes_per_s * left, self.y[0]), -1
        if not point.flops_per_s or intensity is None:
            return None
        return intensity, max(point.flops_per_s, self.y[0]), 0

    def reach(self, roofline: Roofline, point: Point) -> tuple[float, float] | None:
        """The intensities that a point may have whose operations alone were measured: from the
        memory's roof on, up to that of its least bytes, or with unknown ones infinity. None for
        others."""
        if point.is_measured or not point.flops_per_s:
            return None
        roof = roofline.limit(point, MEMORY)
        left = point.flops_per_s / roof.rate if roof else 0.0
        right = point.intensity or math.inf
        return min(max(left, self.x[0]), right), right


@dataclass(frozen=True)
class Line:
    """A ceiling as a straight line on the logarithmic axes."""

    text: str
    origin: str
    kind: str
    is_main: bool
    """Whether it is the main memory's or a compute ceiling, and no cache's."""
    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """A point as it is drawn. Its area, in square points, is in proportion to its time; all are
    alike where no times are known, and at the caches. One that is a line begins at `start`, and has
    no area."""

    rank: int
    point: Point
    x: float
    y: float
    edge: int
    area: float
    implausible: bool
    start: float | None = None

    @property
    def radius(self) -> float:
        """In pixels of the PNG."""
        return math.sqrt(self.area / math.pi) * DPI / 72

    @property
    def marker(self) -> str:
        return _MARKERS[self.edge] if self.edge else _LEVELS.get(self.point.level, _MARKERS[0])


def view(roofline: Roofline) -> View:
    """Around all points and the ridges where the roofs meet, with room for labels."""
    main = [c for c in roofline.ceilings if c.kind == COMPUTE or c.name == MAIN_MEMORY]
    bandwidths = [ceiling.rate for ceiling in main if ceiling.kind == MEMORY]
    rates = [ceiling.rate for ceiling in main if ceiling.kind == COMPUTE]
    shown = [point.intensity for point in roofline.points]
    xs = [x for x in shown if x and _LOWEST_INTENSITY < x < _HIGHEST_INTENSITY]
    on_lines = [p.flops_per_s for p in roofline.points if p.flops_per_s and not p.is_measured]
    on_lines = [max(rate, max(rates, default=rate) / _LEFT_OUT) for rate in on_lines]
    xs += [rate / bandwidth for rate in (*rates, *on_lines) for bandwidth in bandwidths]
    x = min(xs, default=1.0) / 4, max(xs, default=100.0) * 8
    frame = View(x, (0.0, math.inf))
    ys = on_lines + [place[1] for p in roofline.points if (place := frame.place(p))]
    top = max([*ys, *rates, *(b * x[0] for b in bandwidths)], default=1e12)
    bottom = max(min([*ys, top / 100]), top / _LEFT_OUT)
    return View(x, (bottom / 2, top * 3))


def lines(roofline: Roofline, frame: View) -> list[Line]:
    """All ceilings: of each origin the memory's levels up to the highest compute ceiling, and from
    where the main memory's meets it each rate; precisions with the same rate as one line."""
    found = []
    for origin in model.ORIGINS:
        own = [ceiling for ceiling in roofline.ceilings if ceiling.origin == origin]
        memories = [ceiling for ceiling in own if ceiling.kind == MEMORY]
        by_rate: dict[float, list[str]] = {}
        for ceiling in own:
            if ceiling.kind == COMPUTE:
                by_rate.setdefault(ceiling.rate, []).append(ceiling.name)
        highest = max(by_rate, default=frame.y[1])
        for memory in memories:
            start = max(frame.x[0], frame.y[0] / memory.rate)
            end = min(frame.x[1], highest / memory.rate)
            ends = (start, start * memory.rate), (end, end * memory.rate)
            is_main = memory.name == MAIN_MEMORY
            found.append(Line(model.ceiling_text(memory), origin, MEMORY, is_main, *ends))
        main = max((m.rate for m in memories if m.name == MAIN_MEMORY), default=math.inf)
        for rate, names in by_rate.items():
            ends = (max(frame.x[0], rate / main), rate), (frame.x[1], rate)
            text = f"{', '.join(names)} {model.rate_text(rate, COMPUTE)}"
            found.append(Line(text, origin, COMPUTE, True, *ends))
    return found


def marks(roofline: Roofline, frame: View) -> list[Mark]:
    """The first points, but those without a count of operations, which have no place."""
    longest = max((p.seconds for p in roofline.points if p.seconds), default=None)
    found = []
    for rank, point in enumerate(roofline.points[:MOST_DRAWN], 1):
        part = (point.seconds or 0.0) / longest if longest else 0.2
        # A kernel's points at the caches are small, or they would cover each other.
        size = _LARGEST_AREA if point.level == MAIN_MEMORY else 0.0
        area = max(_SMALLEST_AREA, size * part)
        implausible = bool(model.exceeded(roofline, point))
        if place := frame.place(point):
            found.append(Mark(rank, point, *place, area, implausible))
        elif reach := frame.reach(roofline, point):
            start, end = reach[0], min(reach[1], frame.x[1] / 2)
            edge, rate = int(end < reach[1]), point.flops_per_s or 0.0
            found.append(Mark(rank, point, end, rate, edge, 0.0, implausible, start))
    return found


# --- the PNG -------------------------------------------------------------------------------------


def draw(roofline: Roofline, target: Path, *, labels: int = 12) -> None:
    """Writes a PNG of WIDTH by HEIGHT pixels; the first `labels` points have a number, which a list
    beside the plot explains. Of those that are lines, no others are drawn."""
    with warnings.catch_warnings():
        # A name in a script that the font does not have is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        picture(roofline, labels).savefig(target, format="png", dpi=DPI)


def picture(roofline: Roofline, labels: int) -> Any:
    """The roofline as a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    frame = view(roofline)
    every, ceilings = marks(roofline, frame), lines(roofline, frame)
    drawn = [mark for mark in every if mark.start is None or mark.rank <= labels]
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
    axes = figure.add_axes(
        (0.06, 0.185, 0.44, 0.735), xscale="log", yscale="log", xlim=frame.x, ylim=frame.y
    )
    size = _FONT_SIZE + 1
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(which="major", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=size)
    axes.set_xlabel("arithmetic intensity, FLOP per byte of memory traffic", fontsize=size)
    axes.set_ylabel("FLOP/s", fontsize=size)
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_major_formatter("{x:,.10g}")
    title = fit(roofline.heading, 0.85 * WIDTH, _TITLE_SIZE)  # bold letters are wider
    _write(figure, 0.012, 0.965, title, fontsize=_TITLE_SIZE, fontweight="bold")
    _draw_ceilings(axes, ceilings)
    _draw_marks(axes, drawn)
    _number(axes, drawn, labels)
    ranks = {mark.rank for mark in drawn}
    _explain(figure, roofline, labels, ranks)
    not_drawn = len([r for r in ranks if r <= labels]) < len(roofline.points[:labels])
    _draw_legend(
        figure, drawn, dict.fromkeys(line.origin for line in ceilings), not_drawn=not_drawn
    )
    return figure


def _write(figure: Any, x: float, y: float, text: str, **style: Any) -> None:
    figure.text(x, y, text, **{"va": "center", "fontsize": _FONT_SIZE, "parse_math": False} | style)


def _draw_ceilings(axes: Any, ceilings: Sequence[Line]) -> None:
    for line in ceilings:
        look = {"color": _CEILING_COLOURS[line.origin], "linewidth": 2.2 if line.is_main else 1.2}
        dashes = "--" if line.origin == MEASURED else "-"
        axes.plot(*zip(line.start, line.end, strict=True), dashes, zorder=2, **look)
    for kind in model.KINDS:
        own = sorted((line for line in ceilings if line.kind == kind), key=lambda one: -one.end[1])
        lowest = math.inf
        for line in own:
            colour = _CEILING_COLOURS[line.origin]
            right, end = axes.transData.transform(line.end)
            # Each a line of text below the one before, or at its own height.
            lowest = min(end, lowest - 1.6 * _FONT_SIZE)
            if kind == COMPUTE:  # beside the plot
                spot, anchor = (right + 22, lowest), "left"
                axes.annotate(
                    "", (right + 20, lowest), xytext=(right + 2, end), xycoords="figure pixels",
                    textcoords="figure pixels", arrowprops={"arrowstyle": "-", "color": colour},
                )  # fmt: skip
            else:  # above its own line, where no point is
                height = axes.transData.inverted().transform((0, lowest))[1]
                across = height * line.end[0] / line.end[1]
                spot, anchor = (axes.transData.transform((across, height))[0] - 8, lowest), "right"
            axes.annotate(
                line.text, spot, xycoords="figure pixels", ha=anchor, va="center", color=colour,
                fontsize=_FONT_SIZE, annotation_clip=False, parse_math=False, zorder=2,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip


def _draw_marks(axes: Any, drawn: Sequence[Mark]) -> None:
    for mark in drawn:
        colour = _FLAG if mark.implausible else COLOURS[mark.point.category]
        if mark.start is not None:
            axes.plot([mark.start, mark.x], [mark.y] * 2, color=colour, zorder=3, **_LINE)
            if mark.edge:
                axes.plot(mark.x, mark.y, mark.marker, color=colour, markersize=8, zorder=3)
            continue
        axes.scatter(
            mark.x, mark.y, s=mark.area, marker=mark.marker, color=COLOURS[mark.point.category],
            alpha=0.85, edgecolors=_FLAG if mark.implausible else "white",
            linewidths=2.5 if mark.implausible else 1.0, clip_on=False,
            zorder=4 - mark.area / (2 * _LARGEST_AREA),  # the smaller in front
        )  # fmt: skip


def _number(axes: Any, drawn: Sequence[Mark], labels: int) -> None:
    """Writes the ranks of the first points beside their markers, where there is room: on no other
    number, and on as few markers as possible. Those of lines are at their right, below each other.
    """
    box = axes.get_window_extent()
    places = {mark.rank: axes.transData.transform((mark.x, mark.y)) for mark in drawn}
    sides = [side for side in itertools.product((1, 0, -1), repeat=2) if any(side)]
    taken: list[tuple[float, float]] = []
    lowest = math.inf
    for mark in sorted((m for m in drawn if m.start is not None), key=lambda mark: -mark.y):
        x, y = places[mark.rank]
        lowest = min(y, lowest - 18)
        taken.append((x + 26, lowest))
        _write_rank(axes, mark, (x, y), taken[-1])
    for mark in (mark for mark in drawn if mark.rank <= labels and mark.start is None):
        x, y = places[mark.rank]
        spots = [
            (x + across * (mark.radius + reach + 12), y + up * (mark.radius + reach + 9))
            for reach in range(2, 280, 14)
            for across, up in sorted(sides, key=lambda side: abs(side[0] * side[1]))
        ]
        free = [
            spot for spot in spots
            if box.x0 + 12 <= spot[0] <= box.x1 - 12 and box.y0 + 9 <= spot[1] <= box.y1 - 9
            if not any(abs(spot[0] - a) < 24 and abs(spot[1] - b) < 18 for a, b in taken)
        ]  # fmt: skip
        if not free:
            continue
        spot = min(free, key=lambda spot: sum(  # of those with the fewest markers the nearest
            math.dist(spot, places[other.rank]) < other.radius + 12 for other in drawn
        ))  # fmt: skip
        taken.append(spot)
        _write_rank(axes, mark, (x, y), spot)


def _write_rank(axes: Any, mark: Mark, at: tuple[float, float], spot: tuple[float, float]) -> None:
    axes.annotate(
        str(mark.rank), at, xytext=spot, xycoords="figure pixels", fontweight="bold",
        textcoords="figure pixels", ha="center", va="center", fontsize=_FONT_SIZE, zorder=6,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        arrowprops={"arrowstyle": "-", "color": "#8A939C", "shrinkB": mark.radius * 0.72},
    )  # fmt: skip


def _explain(figure: Any, roofline: Roofline, labels: int, drawn: Collection[int]) -> None:
    """A list of the first points beside the plot, each with its share of its roof."""
    texts = [point.label for point in roofline.points[:labels]]
    fitting = (
        s for s in _LIST_SIZES if all(fit(text, _LIST_WIDTH, s, cut=False) for text in texts)
    )
    size = next(fitting, _LIST_SIZES[-1])
    _write(figure, 0.75, 0.915, "of roof" if roofline.ceilings else "", fontsize=11, ha="right")
    for rank, point in enumerate(roofline.points[:labels], 1):
        height = 0.915 - min(0.042, 0.75 / labels) * rank
        roof, look = roofline.roof(point), {} if rank in drawn else {"color": DIM}
        _write(figure, 0.717, height, str(rank), fontweight="bold", ha="right", **look)
        text = f"{share(point, roof):.0%}" if roof else ""
        _write(figure, 0.75, height, text, ha="right", **look)
        text = fit(point.label, _LIST_WIDTH, size)
        _write(figure, 0.754, height, text, fontsize=size, **look)


def _draw_legend(
    figure: Any, drawn: Sequence[Mark], origins: Iterable[str], *, not_drawn: bool
) -> None:
    from matplotlib.lines import Line2D

    lines = {mark.point.category for mark in drawn if mark.start is not None}
    points = {mark.point.category for mark in drawn if mark.start is None}
    edges = {m.edge for m in drawn if m.start is None}
    levels = {m.point.level for m in drawn if not m.edge}
    line = "bytes not counted: it is somewhere on the line"
    line += ", or right of its arrow" if any(m.edge and m.start for m in drawn) else ""
    flagged = {"marker": "o", "color": "white", "markeredgecolor": _FLAG, "markeredgewidth": 2.5}
    grey = {"color": "#777777"}
    entries: dict[str, Any] = {
        name: {"color": colour} | ({"marker": "o"} if name in points else _LINE)
        for name, colour in COLOURS.items() if name in points | lines
    }  # fmt: skip
    entries |= {_EDGES[e]: grey | {"marker": _MARKERS[e]} for e in _EDGES if e in edges}
    entries |= {f"bytes at {n}": grey | {"marker": m} for n, m in _LEVELS.items() if n in levels}
    for text, look, shown in (
        (line, _LINE | grey, lines),
        ("grey in the list: operations not counted", {}, not_drawn),
        ("above a limit: implausible", flagged, any(m.implausible for m in drawn)),
        ("area: time", {}, any(m.area and m.point.seconds for m in drawn)),
    ):
        entries |= {text: look} if shown else {}
    for origin in origins:
        style = "--" if origin == MEASURED else "-"
        entries[origin] = {"color": _CEILING_COLOURS[origin], "linestyle": style, "linewidth": 2.2}
    plain: dict[str, Any] = {"linestyle": "", "markersize": 11}
    handles = [Line2D([], [], label=label, **plain | look) for label, look in entries.items()]
    widths = sorted((50 + text_width(label, _FONT_SIZE) for label in entries), reverse=True)
    columns = max(n for n in range(1, 7) if sum(widths[:n]) < 0.97 * WIDTH)
    figure.legend(
        handles=handles, loc="lower center", ncols=min(len(handles), columns), frameon=False,
        fontsize=_FONT_SIZE, handletextpad=0.4, columnspacing=1.6,
    )  # fmt: skip


# --- the table -----------------------------------------------------------------------------------

_HEADER = (
    "", "name", "category", "ms", "share", "FLOP/B", "GB/s", "GFLOP/s", "roof", "of roof",
    "of measured",
)  # fmt: skip
_WORDS, _WIDE = ("name", "category", "roof"), ("category", "ms", "of measured")
"""Columns of words, and those that only a wide terminal shows."""
_LONGEST_IN_TABLE = 20


def table(roofline: Roofline, most: int) -> Table:
    """The first points in words and numbers, without the columns that none of them fills."""
    lines = [TableLine(_cells(roofline, i, p)) for i, p in enumerate(roofline.points[:most], 1)]
    left = len(roofline.points) - most
    notes = [f"and {left} more, in roofline.json"] if left > 0 else []
    kept = [i for i in range(len(_HEADER)) if any(line.cells[i] != "-" for line in lines)]
    names = [_HEADER[i] for i in kept]
    words, wide = ([i for i, name in enumerate(names) if name in its] for its in (_WORDS, _WIDE))
    whole = Table(roofline.heading, _HEADER, lines, notes)
    return whole.columns(kept, left=words, only_wide=wide)


def _cells(roofline: Roofline, rank: int, point: Point) -> list[str]:
    roof = roofline.roof(point)
    measured = roofline.measured(point, roof.kind) if roof else None
    below, above = ("≤ ", "≥ ") if point.at_least else ("", "")
    return [
        str(rank),
        display_name(point.label, _LONGEST_IN_TABLE),
        point.category,
        "-" if point.seconds is None else f"{point.seconds * 1e3:,.3f}",
        "-" if point.share is None else f"{point.share:.1%}",
        "-" if point.intensity is None else below + digits(point.intensity),
        "-" if point.bytes_per_s is None else above + digits(point.bytes_per_s / 1e9),
        "-" if point.flops_per_s is None else digits(point.flops_per_s / 1e9),
        roof.kind if roof else "-",
        f"{share(point, roof):.0%}" if roof else "-",
        f"{share(point, measured):.0%}" if measured else "-",
    ]
