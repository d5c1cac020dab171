"""Draws a roofline: a PNG for a projector, and an interactive page that needs no network."""

import html
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.profilers.figures import digits
from workshop.profilers.names import display_name
from workshop.profilers.picture import COLOURS as KERNEL_COLOURS
from workshop.roofline.labels import MARGIN, Box, Place, Segment, along, around, choose, stack
from workshop.roofline.model import (
    COMPUTE,
    KINDS,
    MAIN_MEMORY,
    MEASURED,
    MEMORY,
    ORIGINS,
    Ceiling,
    Point,
    Roofline,
    exceeded,
    flags,
    rate_text,
    sentences,
    share,
    verdict,
)

COLOURS = KERNEL_COLOURS | {
    "step": "#222222",
    "forward": "#3B7DD8",
    "backward": "#E07B39",
    "AdamW": "#5AA469",
    "numbers": "#0072B2",
}
"""By category: a kernel's as in other pictures, a step's parts as in the comparisons'."""
_X_TITLE, _Y_TITLE = "arithmetic intensity, FLOP per byte of memory traffic", "FLOP/s"
_OTHER, _FLAG = "#B5B5B5", "#B3261E"
_MARKERS = {-1: "<", 0: "o", 1: ">"}
"""By the edge that a point stands at."""
_SYMBOLS = {-1: "triangle-left", 0: "circle", 1: "triangle-right"}
_LEFT_EDGE, _RIGHT_EDGE = "no operations, or not counted", "no bytes, or not counted"
_CEILING_COLOURS = dict.fromkeys(ORIGINS, "#1A1F24") | {MEASURED: "#9C2C77"}

WIDTH, HEIGHT, DPI = 1600, 900, 100
"""Of the PNG, in pixels."""
_FONT_SIZE, _LONGEST_NAME = 13, 40
_SMALLEST_AREA, _LARGEST_AREA = 60.0, 1500.0
"""Of a marker, in square points: that of the longest time, and the least that is seen."""
_LEFT_OUT = 1e5
"""What lies further below the highest roof is drawn at the lower edge."""
MOST_DRAWN = 200
"""Points in a picture and in the page's table. Those that follow are the shortest kernels."""
_LOWEST_INTENSITY, _HIGHEST_INTENSITY = 1e-3, 1e6


@dataclass(frozen=True)
class View:
    """What the axes show, and where a point stands that has only one of its two rates."""

    x: tuple[float, float]
    """FLOP a byte."""
    y: tuple[float, float]
    """FLOP a second."""

    def place(self, point: Point) -> tuple[float, float] | None:
        """Of a point in the axes' units. Without operations (or their count) it stands at the left
        edge, as far below the memory's roof there as its bandwidth is below the memory's; without
        bytes at the right edge. None for a point without either."""
        left, right = self.x[0] * 1.12, self.x[1] / 1.12
        intensity = point.intensity
        if point.flops_per_s and (intensity is None or intensity > right):
            return right, max(point.flops_per_s, self.y[0])
        if point.bytes_per_s and (not point.flops_per_s or (intensity or 0) < left):
            return left, max(point.bytes_per_s * left, self.y[0])
        if not point.flops_per_s or intensity is None:
            return None
        return intensity, max(point.flops_per_s, self.y[0])

    def edge(self, point: Point) -> int:
        """-1 at the left edge, 1 at the right one, 0 where its intensity is its place."""
        place = self.place(point)
        if place is None or place[0] == point.intensity:
            return 0
        return -1 if place[0] < math.sqrt(self.x[0] * self.x[1]) else 1


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


def view(roofline: Roofline) -> View:
    """Around all points and the ridges where the roofs meet, with room for labels."""
    shown = [point.intensity for point in roofline.points]
    xs = [x for x in shown if x and _LOWEST_INTENSITY < x < _HIGHEST_INTENSITY]
    bandwidths = _rates(roofline, MEMORY)
    rates = _rates(roofline, COMPUTE)
    xs += [rate / bandwidth for rate in rates for bandwidth in bandwidths]
    x = min(xs, default=1.0) / 4, max(xs, default=100.0) * 8
    frame = View(x, (0.0, math.inf))
    ys = [place[1] for point in roofline.points if (place := frame.place(point))]
    top = max([*ys, *rates, *(b * x[0] for b in bandwidths)], default=1e12)
    bottom = max(min([*ys, top / 100]), top / _LEFT_OUT)
    return View(x, (bottom / 2, top * 3))


def lines(roofline: Roofline, frame: View) -> list[Line]:
    """All ceilings: of each origin the memory's levels up to the highest compute ceiling, and from
    where the main memory's meets it each rate; precisions with the same rate as one line."""
    found = []
    for origin in ORIGINS:
        own = [ceiling for ceiling in roofline.ceilings if ceiling.origin == origin]
        memories = [ceiling for ceiling in own if ceiling.kind == MEMORY]
        by_rate: dict[float, list[Ceiling]] = {}
        for ceiling in own:
            if ceiling.kind == COMPUTE:
                by_rate.setdefault(ceiling.rate, []).append(ceiling)
        highest = max(by_rate, default=frame.y[1])
        for memory in memories:
            start = max(frame.x[0], frame.y[0] / memory.rate)
            end = min(frame.x[1], highest / memory.rate)
            found.append(
                Line(_text([memory]), origin, MEMORY, memory.name == MAIN_MEMORY,
                     (start, start * memory.rate), (end, end * memory.rate))
            )  # fmt: skip
        main = max((m.rate for m in memories if m.name == MAIN_MEMORY), default=math.inf)
        for rate, ceilings in by_rate.items():
            start = max(frame.x[0], rate / main)
            found.append(
                Line(_text(ceilings), origin, COMPUTE, True, (start, rate), (frame.x[1], rate))
            )
    return found


def _rates(roofline: Roofline, kind: str) -> list[float]:
    """Of compute ceilings and of the main memory."""
    return [
        ceiling.rate
        for ceiling in roofline.ceilings
        if ceiling.kind == kind and (kind == COMPUTE or ceiling.name == MAIN_MEMORY)
    ]


def _text(ceilings: Sequence[Ceiling]) -> str:
    """As in "bf16, fp16 989 TFLOP/s"."""
    names = ", ".join(ceiling.name for ceiling in ceilings)
    return f"{names} {rate_text(ceilings[0].rate, ceilings[0].kind)}"


def _shown_categories(roofline: Roofline) -> list[str]:
    present = {point.category for point in roofline.points[:MOST_DRAWN]}
    return [category for category in COLOURS if category in present]


# --- the PNG -------------------------------------------------------------------------------------


def draw(roofline: Roofline, target: Path, *, labels: int = 12) -> None:
    """Writes a PNG of WIDTH by HEIGHT pixels.

    Args:
        labels: so many points have their name beside them, those that take longest.
    """
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        _Picture(roofline, labels).figure.savefig(target, format="png", dpi=DPI)


class _Picture:
    """A roofline on a figure. `labels` are the boxes that its labels take, in pixels from the
    lower left."""

    def __init__(self, roofline: Roofline, most_labels: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import FontProperties

        self._roofline, self._view = roofline, view(roofline)
        self.figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        self._renderer = FigureCanvasAgg(self.figure).get_renderer()
        self._font = FontProperties(size=_FONT_SIZE)
        self._axes = self.figure.add_axes(
            (0.075, 0.16, 0.76, 0.76),
            xscale="log", yscale="log", xlim=self._view.x, ylim=self._view.y,
        )  # fmt: skip
        extent = self._axes.get_window_extent(self._renderer)
        self._area = Box(extent.x0, extent.y0, extent.x1, extent.y1)
        self._lines = lines(roofline, self._view)
        self._segments = [(self._pixel(line.start), self._pixel(line.end)) for line in self._lines]
        self._markers: list[tuple[Point, tuple[float, float], float]] = []
        self.labels: list[Place] = []
        self._draw_axes()
        self._draw_lines()
        self._draw_points()
        self._draw_legend()
        self._label_rates()
        self._label_bandwidths()
        self._label_points(most_labels)

    def _pixel(self, place: tuple[float, float]) -> tuple[float, float]:
        x, y = self._axes.transData.transform(place)
        return float(x), float(y)

    def _draw_axes(self) -> None:
        axes, size = self._axes, _FONT_SIZE + 1
        axes.spines[["right", "top"]].set_visible(False)
        axes.grid(which="major", color="#E3E6EA", linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=size)
        axes.set_xlabel(_X_TITLE, fontsize=size)
        axes.set_ylabel(_Y_TITLE, fontsize=size)
        axes.yaxis.set_major_formatter(lambda value, _: _si(value))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        device = f"{self._roofline.device}: " if self._roofline.device else ""
        title = display_name(device + self._roofline.title, 110)
        self.figure.text(
            0.012, 0.965, title, fontsize=17, fontweight="bold", va="center", parse_math=False
        )

    def _draw_lines(self) -> None:
        for line in self._lines:
            xs, ys = zip(line.start, line.end, strict=True)
            self._axes.plot(
                xs, ys,
                color=_CEILING_COLOURS[line.origin],
                linestyle="--" if line.origin == MEASURED else "-",
                linewidth=2.2 if line.is_main else 1.2,
                zorder=2,
            )  # fmt: skip

    def _draw_points(self) -> None:
        for point in self._roofline.points[:MOST_DRAWN]:
            place = self._view.place(point)
            if place is None:
                continue
            area = _area(self._roofline, point)
            pixel, radius = self._pixel(place), math.sqrt(area / math.pi) * DPI / 72
            self._markers.append((point, pixel, radius))
            above = bool(exceeded(self._roofline, point))
            self._axes.scatter(
                *place,
                s=area,
                marker=_MARKERS[self._view.edge(point)],
                color=COLOURS.get(point.category, _OTHER),
                alpha=0.85,
                edgecolors=_FLAG if above else "white",
                linewidths=2.5 if above else 1.0,
                zorder=3 - area / (2 * _LARGEST_AREA),  # the smaller in front
                clip_on=False,
            )
            if point.at_least and not self._view.edge(point):
                start = pixel[0] - radius, pixel[1]
                arrow = start, (start[0] - 30, start[1])
                self._draw_line(arrow, marker="<", markevery=[1])
                self._segments.append(arrow)

    def _draw_line(self, segment: Segment, **style: Any) -> None:
        """Between two pixels."""
        from matplotlib.lines import Line2D
        from matplotlib.transforms import IdentityTransform

        xs, ys = zip(*segment, strict=True)
        look: dict[str, Any] = {"color": "#8A939C", "linewidth": 1.0, "zorder": 5} | style
        self.figure.add_artist(Line2D(xs, ys, transform=IdentityTransform(), **look))

    def _draw_legend(self) -> None:
        from matplotlib.lines import Line2D

        points = [point for point, _, _ in self._markers]

        def entry(label: str, **style: Any) -> Any:
            look: dict[str, Any] = {"linestyle": "", "markersize": 11} | style
            return Line2D([], [], label=label, **look)

        handles = [
            entry(name, marker="o", color=COLOURS[name])
            for name in _shown_categories(self._roofline)
        ]
        edges = {self._view.edge(point) for point in points}
        if -1 in edges:
            handles.append(entry(_LEFT_EDGE, marker=_MARKERS[-1], color="#777777"))
        if 1 in edges:
            handles.append(entry(_RIGHT_EDGE, marker=_MARKERS[1], color="#777777"))
        if any(point.at_least and not self._view.edge(point) for point in points):
            handles.append(
                entry("bytes are a lower bound", marker="$\\leftarrow$", color="#777777")
            )
        if any(exceeded(self._roofline, point) for point in points):
            handles.append(entry("above a limit: implausible", marker="o", color="white",
                                 markeredgecolor=_FLAG, markeredgewidth=2.5))  # fmt: skip
        if any(point.seconds for point in points):
            handles.append(entry("area: time"))
        for origin in dict.fromkeys(line.origin for line in self._lines):
            style = "--" if origin == MEASURED else "-"
            colour = _CEILING_COLOURS[origin]
            handles.append(entry(origin, color=colour, linestyle=style, linewidth=2.2))
        self.figure.legend(
            handles=handles, loc="lower center", ncols=min(len(handles), 6), frameon=False,
            fontsize=_FONT_SIZE, handletextpad=0.4, columnspacing=1.6,
        )  # fmt: skip

    def _label_rates(self) -> None:
        """Beside the axes, where the compute ceilings end."""
        own = [
            (line, segment[1])
            for line, segment in zip(self._lines, self._segments, strict=False)
            if line.kind == COMPUTE
        ]
        height = self._size("bf16")[1] + 2 * MARGIN
        heights = stack([end[1] for _, end in own], height + 1)
        for (line, end), middle in zip(own, heights, strict=True):
            left = end[0] + 22
            box = Box(
                left, middle - height / 2, left + self._size(line.text)[0], middle + height / 2
            )
            colour = _CEILING_COLOURS[line.origin]
            self._draw_line(((end[0] + 2, end[1]), (left - 4, middle)), color=colour)
            self._write(Place((box,)), line.text, color=colour)

    def _label_bandwidths(self) -> None:
        taken = self._marker_boxes()
        for line, segment in zip(self._lines, self._segments, strict=False):
            if line.kind == COMPUTE:
                continue
            others = [other for other in self._segments if other != segment]
            side = -1 if line.origin == MEASURED and line.is_main else 1
            places = along(segment, self._size(line.text), side)
            place = choose(places, self._area, [*taken, *self._label_boxes()], others)
            if place:
                angle = math.degrees(math.atan2(segment[1][1] - segment[0][1],
                                                segment[1][0] - segment[0][0]))  # fmt: skip
                colour = _CEILING_COLOURS[line.origin]
                self._write(place, line.text, color=colour, rotation=angle)

    def _label_points(self, most: int) -> None:
        for point, pixel, radius in self._markers[:most]:
            text = _label(self._roofline, point)
            taken = [*self._marker_boxes(), *self._label_boxes()]
            place = choose(
                around(pixel, radius, self._size(text)), self._area, taken, self._segments
            )
            if place:
                self._write(place, text)
            if place and place.lead:
                self._draw_line(place.lead)
                self._segments.append(place.lead)

    def _marker_boxes(self) -> list[Box]:
        return [
            Box(x - radius, y - radius, x + radius, y + radius)
            for _, (x, y), radius in self._markers
        ]

    def _label_boxes(self) -> list[Box]:
        return [box for place in self.labels for box in place.boxes]

    def _size(self, text: str) -> tuple[float, float]:
        """Width and height, in pixels: a line is as high as these letters, whichever it has."""
        (width, height), (_, least) = (
            self._renderer.get_text_width_height_descent(letters, self._font, False)[:2]
            for letters in (text, "lp")
        )
        return width, max(height, least)

    def _write(self, place: Place, text: str, **style: Any) -> None:
        from matplotlib.transforms import IdentityTransform

        self.labels.append(place)
        first, last = place.boxes[0], place.boxes[-1]
        look: dict[str, Any] = {"color": "#111111", "rotation": 0} | style
        self.figure.text(
            (first.left + last.right) / 2,
            (min(first.bottom, last.bottom) + max(first.top, last.top)) / 2,
            text,
            **look,
            transform=IdentityTransform(),
            rotation_mode="anchor",
            ha="center",
            va="center_baseline",
            fontproperties=self._font,
            parse_math=False,
            zorder=6,
        )


def _area(roofline: Roofline, point: Point) -> float:
    """In proportion to its time; where no times are known, all alike."""
    longest = max((p.seconds for p in roofline.points if p.seconds), default=None)
    if longest is None:
        return _LARGEST_AREA / 5
    return max(_SMALLEST_AREA, _LARGEST_AREA * (point.seconds or 0.0) / longest)


def _label(roofline: Roofline, point: Point) -> str:
    name = display_name(point.label, _LONGEST_NAME)
    roof = roofline.roof(point)
    return f"{name}  {share(point, roof):.0%}" if roof else name


def _si(value: float) -> str:
    """As in "100 T"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:,.3g} {prefix}"
    return f"{value:,.3g}"


# --- the page ------------------------------------------------------------------------------------


def plotly_figure(roofline: Roofline) -> Any:
    """The roofline as a plotly Figure: every point and ceiling tells its figures when pointed at.
    Names from files are escaped."""
    import plotly.graph_objects as go

    frame = view(roofline)
    figure = go.Figure()
    for line in lines(roofline, frame):
        figure.add_trace(
            go.Scatter(
                x=[line.start[0], line.end[0]],
                y=[line.start[1], line.end[1]],
                mode="lines",
                name=html.escape(f"{line.text} ({line.origin})"),
                line={
                    "color": _CEILING_COLOURS[line.origin],
                    "dash": "dash" if line.origin == MEASURED else "solid",
                    "width": 2.5 if line.is_main else 1.2,
                },
                hoverinfo="name",
                hoverlabel={"namelength": -1},
            )
        )
    positions = _number_positions(roofline, frame)
    for category in _shown_categories(roofline):
        figure.add_trace(_plotly_points(roofline, frame, category, positions))
    figure.update_layout(
        template="plotly_white",
        font={"size": 15},
        height=680,
        margin={"t": 20, "r": 20},
        legend={"itemsizing": "constant", "font": {"size": 13}},
        hoverlabel={"align": "left", "font": {"size": 14}},
    )
    for update, edges, title, text in (
        (figure.update_xaxes, frame.x, _X_TITLE, lambda value: f"{value:,.10g}"),
        (figure.update_yaxes, frame.y, _Y_TITLE, _si),
    ):
        first, last = (math.floor(math.log10(edge)) for edge in edges)
        decades = [10.0**exponent for exponent in range(first - 1, last + 2)]
        update(
            type="log",
            title=title,
            range=[math.log10(edge) for edge in edges],
            tickvals=decades,
            ticktext=[text(value) for value in decades],
        )
    return figure


_PAGE_PLOT = 950.0, 560.0
"""About the size of the page's plot, in pixels; a browser's window decides."""
_POSITIONS = {
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top center": (0, 1),
    "bottom center": (0, -1),
}


def _number_positions(roofline: Roofline, frame: View) -> dict[int, str]:
    """On which side of its marker each point's number stands, by rank; absent where every side is
    taken, so that only pointing at it tells."""

    def pixel(value: float, edges: tuple[float, float], length: float) -> float:
        return math.log(value / edges[0]) / math.log(edges[1] / edges[0]) * length

    area = Box(-100, -100, _PAGE_PLOT[0] + 100, _PAGE_PLOT[1] + 100)
    found: dict[int, str] = {}
    taken: list[Box] = []
    for rank, point in enumerate(roofline.points[:MOST_DRAWN], 1):
        spot = frame.place(point)
        if spot is None:
            continue
        x, y = pixel(spot[0], frame.x, _PAGE_PLOT[0]), pixel(spot[1], frame.y, _PAGE_PLOT[1])
        out = _diameter(roofline, point) / 2 + 10
        for position, (across, up) in _POSITIONS.items():
            a, b = x + across * out, y + up * out
            place = Place((Box(a - 12, b - 8, a + 12, b + 8),))
            if choose([place], area, taken, ()):
                found[rank] = position
                taken += place.boxes
                break
    return found


def _diameter(roofline: Roofline, point: Point) -> float:
    """Of a marker on the page, in pixels."""
    return math.sqrt(_area(roofline, point)) * 0.9


def _plotly_points(
    roofline: Roofline, frame: View, category: str, positions: dict[int, str]
) -> Any:
    import plotly.graph_objects as go

    own = [
        (rank, point, place)
        for rank, point in enumerate(roofline.points[:MOST_DRAWN], 1)
        if point.category == category and (place := frame.place(point))
    ]
    red = [bool(exceeded(roofline, point)) for _, point, _ in own]
    return go.Scatter(
        x=[place[0] for _, _, place in own],
        y=[place[1] for _, _, place in own],
        mode="markers+text",
        text=[str(rank) if rank in positions else "" for rank, _, _ in own],
        textposition=[positions.get(rank, "top center") for rank, _, _ in own],
        name=html.escape(category),
        hovertext=[_hover(roofline, point, rank) for rank, point, _ in own],
        hoverinfo="text",
        cliponaxis=False,
        marker={
            "color": COLOURS[category],
            "size": [_diameter(roofline, point) for _, point, _ in own],
            "symbol": [_SYMBOLS[frame.edge(point)] for _, point, _ in own],
            "opacity": 0.85,
            "line": {
                "color": [_FLAG if above else "white" for above in red],
                "width": [3 if above else 1 for above in red],
            },
        },
    )  # fmt: skip


def _hover(roofline: Roofline, point: Point, rank: int) -> str:
    rows = [f"<b>{rank} {html.escape(point.label)}</b>", html.escape(verdict(roofline, point))]
    rows += [rate_text(rate, kind) for kind in KINDS if (rate := point.rate(kind))]
    if point.intensity is not None:
        rows.append(f"{point.intensity:.3g} FLOP/byte")
    if point.seconds is not None:
        part = f", {point.share:.1%}" if point.share is not None else ""
        rows.append(f"{point.seconds * 1e3:,.4g} ms{part}")
    return "<br>".join(rows)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 90rem; padding: 1.5rem; color: #1a1f24; background: #fff;
  font: 1.05rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #d5dae0; }}
th:nth-child(2), td:nth-child(2), td:nth-child(3), th:nth-child(3) {{ text-align: left; }}
td:nth-child(2) {{ overflow-wrap: anywhere; }}
.flag {{ color: #b3261e; font-weight: 600; }}
.wide {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Numbers are those of the table below. Click a name in the legend to hide it, drag to zoom,
double-click to see all again.</p>
{flags}
{figure}
<h2>What bounds them</h2>
<ol>{sentences}</ol>
<h2>All points</h2>
<div class="wide"><table>{table}</table></div>
<h2>Ceilings</h2>
<ul>{ceilings}</ul>
<h2>Notes</h2>
<ul>{notes}</ul>
</body>
</html>
"""


def page(roofline: Roofline, *, limit: int = 10) -> str:
    """A self-contained HTML page: the figure with all of plotly.js, the sentences for the first
    `limit` points, a table of all."""
    device = f"{roofline.device}: " if roofline.device else ""
    more = len(roofline.points) - MOST_DRAWN
    left_out = [f"{more:,} shorter kernels stand in roofline.csv alone"] if more > 0 else []
    figure = plotly_figure(roofline).to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}
    )
    return _PAGE.format(
        title=html.escape(f"Roofline of {device}{roofline.title}"),
        figure=figure,
        flags=_items(flags(roofline), '<p class="flag">', "</p>"),
        sentences=_items(sentences(roofline, limit)),
        table=_html_table(table_cells(roofline)[: MOST_DRAWN + 1]),
        ceilings=_items(f"{_text([c])} ({c.origin}): {c.source}" for c in roofline.ceilings),
        notes=_items([*roofline.notes, *left_out]),
    )


def _items(texts: Iterable[str], before: str = "<li>", after: str = "</li>") -> str:
    return "\n".join(f"{before}{html.escape(text)}{after}" for text in texts)


def _html_table(rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + _items(cells, f"<{tag}>", f"</{tag}>") + "</tr>"

    return "\n".join([line(rows[0], "th"), *(line(row, "td") for row in rows[1:])])


HEADER = (
    "", "name", "category", "ms", "share", "FLOP/B", "GB/s", "GFLOP/s", "roof", "of roof",
    "of measured",
)  # fmt: skip


def table_cells(roofline: Roofline) -> list[list[str]]:
    """The points in words and figures: HEADER, then a row each."""
    return [list(HEADER), *(_cells(roofline, i, p) for i, p in enumerate(roofline.points, 1))]


def _cells(roofline: Roofline, rank: int, point: Point) -> list[str]:
    roof = roofline.roof(point)
    measured = roofline.measured(point, roof.kind) if roof else None
    below, above = ("≤ ", "≥ ") if point.at_least else ("", "")
    return [
        str(rank),
        point.label,
        point.category,
        _cell(point.seconds, 1e-3, ",.3f"),
        _cell(point.share, 1, ".1%"),
        "-" if point.intensity is None else below + digits(point.intensity),
        "-" if point.bytes_per_s is None else above + digits(point.bytes_per_s / 1e9),
        "-" if point.flops_per_s is None else digits(point.flops_per_s / 1e9),
        roof.kind if roof else "-",
        f"{share(point, roof):.0%}" if roof else "-",
        f"{share(point, measured):.0%}" if measured else "-",
    ]


def _cell(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)
