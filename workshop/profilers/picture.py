"""Draws the rows that timeline.py makes of a trace."""

import functools
import itertools
import math
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workshop import errors, results
from workshop.errors import WorkshopError
from workshop.profilers import names, timeline
from workshop.profilers.timeline import CALLS, KERNELS, OPERATORS, RANGES, Lane, Slice, Window

BUSY = "GPU busy"
"""A row below a stream's kernels: the share of the time in which it ran any."""

_DARK, _STRIP, _LINE = "#5B6770", "#EEF1F4", "#B5B5B5"
"""The second is behind a lane's title."""
# Colours that the colour-blind can distinguish (Okabe and Ito's), with the hues that the categories
# have on the terminal, and greys.
COLOURS = {
    "GEMM": "#009E73",
    "attention": "#56B4E9",
    "norm": "#CC79A7",
    "elementwise": "#E69F00",
    "optimizer": "#0072B2",
    "copy": "#D55E00",
    "communication": "#F0E442",
    "other": _LINE,
    timeline.RANGE: "#C3CFDC",
    timeline.CALL: _DARK,
    timeline.SYNCHRONISATION: "#000000",
}
_LEVELS = {RANGES: 5, OPERATORS: 3, CALLS: 1, KERNELS: 2}
"""Levels of nesting that are drawn, of each kind."""
_OPERATOR_LEVELS_WITHOUT_GPU = 7
_MOST_ARROWS = 7

# In pixels, except the font's size.
WIDTH, HEIGHT, DPI = 1600, 900, 100
"""Height of the picture; it is lower where few rows are to be drawn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 56, 46, 84
_PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
_TITLE_HEIGHT, _LANE_GAP, _TALLEST_ROW = 22, 12, 46
_WEIGHTS = {KERNELS: 1.5, BUSY: 1.5}
"""Heights of rows in those of others, where they aren't 1."""
_BUSY_WIDTH = 4
_FONT_SIZE, _SMALLER = 10, 8
"""The second one for names that do not fit otherwise."""
_LINE_HEIGHT = 1.7
"""Pixels of a line of text for each point of its size."""
_NAMESPACE = re.compile(r"::|: |\.(?=\w)")
"""As in "autograd::engine::evaluate_function: MulBackward0" and "layers.0.mlp"."""
_END_OF_WORD = re.compile(r"(?<=[^\W_])(?=[_<#(, :-]|Backward\d)")


def draw(
    trace: Path,
    target: Path,
    *,
    step: int | None = None,
    start_ms: float | None = None,
    end_ms: float | None = None,
) -> None:
    """Draws one step of a trace, or a stretch of it, as a PNG of WIDTH by at most HEIGHT pixels.
    What could not be read or has no room is reported on stderr.

    Args:
        trace: a .json or .json.gz, or a folder with one (the newest counts).
        step: which one, counted from 1; by default the first. A trace without step ranges is
            drawn whole.
        start_ms: since the trace began; as on the picture's axis and on Perfetto's.
        end_ms: likewise.

    Raises:
        WorkshopError: the trace can't be read or has nothing to draw, there is no such step or
            stretch, or the picture can't be written.
        NotOnThisMachine: there is no matplotlib.
    """
    check_target(target)
    recorded = timeline.read(trace)
    window = timeline.choose_window(recorded, step, start_ms, end_ms)
    lanes = timeline.arrange(recorded, window)
    from matplotlib.figure import Figure

    figure = Figure(dpi=DPI)
    _draw(figure, f"{names.printable(recorded.path.name)}: {window.what}", window, lanes)
    write(figure, target)
    for warning in recorded.warnings:
        print(f"warning: {names.printable(warning)}", file=sys.stderr)


def check_target(target: Path) -> None:
    """Raises WorkshopError for a picture that is no PNG, NotOnThisMachine without matplotlib."""
    errors.require("matplotlib")
    if target.suffix.lower() != ".png":
        raise WorkshopError(f"{target}: the picture is a PNG: give a name that ends in .png")


def write(figure: Any, target: Path) -> None:
    """Writes a figure of matplotlib's as a PNG. Raises WorkshopError: it can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # A name in a script that is not in the font is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        try:
            with results.atomic_path(target) as path:
                figure.savefig(path, format="png", dpi=DPI)
        except OSError as error:
            raise WorkshopError(f"{target} can't be written: {error.strerror}") from None


@dataclass
class _Band:
    """The rows of one kind of slices in a lane."""

    kind: str
    rows: list[list[Slice]]
    height: float = 0.0
    """Height of a row, in pixels; `top`: from the top of the axes."""
    top: float = 0.0

    @property
    def middle(self) -> float:
        return self.top + len(self.rows) * self.height / 2


def _draw(figure: Any, title: str, window: Window, lanes: list[Lane]) -> None:
    """Draws lanes on axes whose x is time in ms, and whose y is pixels from their top."""
    pixel = (window.end - window.start) / _PLOT_WIDTH
    bands = [_stack(lane, pixel, any(lane.on_gpu for lane in lanes)) for lane in lanes]
    plot = _lay_out(bands)
    height = _TOP + plot + _BOTTOM
    figure.set_size_inches(WIDTH / DPI, height / DPI)
    box = (_LEFT / WIDTH, _BOTTOM / height, _PLOT_WIDTH / WIDTH, plot / height)
    axes = figure.add_axes(box, xlim=window[:2], ylim=(plot, 0))
    number = 0
    for lane, its in zip(lanes, bands, strict=True):
        _draw_title(axes, lane, window, its[0].top, pixel)
        for band in its:
            number += 1
            _draw_name(axes, number, band, window.start, pixel)
            for index, row in enumerate(band.rows):
                _draw_row(axes, row, replace(band, top=band.top + index * band.height), window)
            if band.kind == BUSY:
                _draw_busy(axes, lane, band, window)
            if band.kind == KERNELS:
                _draw_gaps(axes, lane, band, window)
    arrows = timeline.flows(lanes, _MOST_ARROWS)
    _draw_arrows(axes, arrows, bands, window)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_yticks([])
    axes.tick_params(labelsize=11)
    axes.grid(axis="x", color="#D5D5D5", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel("ms since the trace began", fontsize=11)
    look = {"fontsize": 14, "fontweight": "bold", "va": "center", "parse_math": False}
    figure.text(10 / WIDTH, 1 - 24 / height, title, **look)
    _draw_legend(figure, bands, bool(arrows))


def _stack(lane: Lane, pixel: float, has_gpu: bool) -> list[_Band]:
    levels = _LEVELS if has_gpu else _LEVELS | {OPERATORS: _OPERATOR_LEVELS_WITHOUT_GPU}
    bands = []
    for kind in (kind for kind in levels if kind in lane.slices):
        rows = timeline.nest(lane.slices[kind])[: levels[kind]]
        bands.append(_Band(kind, [timeline.merge(row, pixel) for row in rows]))
    return [*bands, _Band(BUSY, [[]])] if KERNELS in lane.slices else bands


def _lay_out(lanes: list[list[_Band]]) -> int:
    """Gives every band its height and its place; the height of all."""
    room = HEIGHT - _TOP - _BOTTOM - len(lanes) * (_TITLE_HEIGHT + _LANE_GAP)
    weight = sum(_WEIGHTS.get(b.kind, 1.0) * len(b.rows) for bands in lanes for b in bands)
    y = 0.0
    for bands in lanes:
        y += _TITLE_HEIGHT
        for band in bands:
            band.height = _WEIGHTS.get(band.kind, 1.0) * min(_TALLEST_ROW, room / weight)
            band.top = y
            y += len(band.rows) * band.height
        y += _LANE_GAP
    return math.ceil(y)


def _text(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    style = {"ha": "center", "va": "center_baseline", "fontsize": _FONT_SIZE} | style
    axes.text(x, y, text, parse_math=False, zorder=5, **style)


def _draw_title(axes: Any, lane: Lane, window: Window, top: float, pixel: float) -> None:
    """The lane's title and its contents in words."""
    counts = ((len(lane.slices.get(kind, ())), kind) for kind in _LEVELS)
    words = ", ".join(f"{n:,} {kind if n > 1 else kind[:-1]}" for n, kind in counts if n)
    if KERNELS in lane.slices:
        share = timeline.busy_shares(lane.slices[KERNELS], window, 1)[0]
        span = window.end - window.start
        words += f", busy {_duration(share * span)} of {_duration(span)} ({share:.1%})"
    axes.axhspan(top - _TITLE_HEIGHT, top - 2, color=_STRIP, zorder=0)
    # Arrows pass below the title's box.
    style = {"ha": "left", "fontweight": "bold", "bbox": {"color": _STRIP, "pad": 1.5}}
    x, y = window.start + 5 * pixel, top - _TITLE_HEIGHT / 2 - 1
    _text(axes, x, y, f"{lane.title}:  {words}", **style)


def _draw_name(axes: Any, number: int, band: _Band, x: float, pixel: float) -> None:
    _text(axes, x - 14 * pixel, band.middle, band.kind, ha="right", fontsize=11)
    box = {"boxstyle": "circle,pad=0.25", "color": "#333333"}
    style = {"color": "white", "fontweight": "bold", "bbox": box}
    _text(axes, x - 134 * pixel, band.middle, str(number), **style)


def _draw_row(axes: Any, row: list[Slice], band: _Band, window: Window) -> None:
    """Args:
    band: placed where this row is.
    """
    pixel = (window.end - window.start) / _PLOT_WIDTH
    by_colour: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for s in row:
        start = max(s.start, window.start)
        width = min(s.end, window.end) - start
        # Operators are paler than kernels: they only ask for work.
        colour = _paler(COLOURS[s.category]) if band.kind == OPERATORS else COLOURS[s.category]
        # A line of background separates neighbours.
        by_colour[colour].append((start, max(width - pixel, pixel)))
        middle = start + width / 2, band.top + band.height / 2
        if s.name:
            look = _text_in(s.name, width / pixel, band.height)
            _text(axes, *middle, color=_readable_on(colour), clip_on=True, **look)
    place = (band.top + 1, band.height - 2)
    for colour, spans in by_colour.items():
        axes.broken_barh(spans, place, facecolor=colour, linewidth=0, zorder=2)


def _text_in(name: str, width: float, height: float) -> dict[str, Any]:
    """A name in a box of some pixels: of the usual size, else smaller, else upright; cut if need
    be, or none."""
    upright = {"rotation": 90, "va": "center"}
    looks: tuple[tuple[int, float, float, dict[str, Any]], ...] = (
        (_FONT_SIZE, width, height, {}),
        (_SMALLER, width, height, {}),
        (_SMALLER, height, width, upright),
    )
    for cut, (size, room, across, look) in itertools.product((False, True), looks):
        if across > _LINE_HEIGHT * size and (text := fit(name, room - 4, size, cut=cut)):
            return {"text": text, "fontsize": size, **look}
    return {"text": ""}


def _draw_busy(axes: Any, lane: Lane, band: _Band, window: Window) -> None:
    bins = _PLOT_WIDTH // _BUSY_WIDTH
    shares = timeline.busy_shares(lane.slices[KERNELS], window, bins)
    length = window.end - window.start
    edges = [window.start + i * length / bins for i in range(bins + 1)]
    bottom, height = band.top + band.height - 1, band.height - 4
    tops = [bottom - share * height for share in shares]
    axes.stairs(tops, edges, baseline=bottom, fill=True, color=_DARK, zorder=2)
    for share, y in (("0%", bottom), ("100%", bottom - height)):
        axes.axhline(y, color=_LINE, linewidth=0.6, zorder=1)
        _text(axes, window.end + 4 * length / _PLOT_WIDTH, y, share, ha="left")


def _draw_gaps(axes: Any, lane: Lane, band: _Band, window: Window) -> None:
    pixel = (window.end - window.start) / _PLOT_WIDTH
    for start, end in timeline.gaps(lane.slices[KERNELS], window):
        text = f"idle {_duration(end - start)}"
        if end - start > (text_width(text, _FONT_SIZE) + 8) * pixel:
            middle = band.top + band.height / 2
            _text(axes, (start + end) / 2, middle, text, color="#8A1C1C", fontstyle="italic")


def _draw_arrows(
    axes: Any, arrows: list[tuple[int, Slice, int, Slice]], bands: list[list[_Band]], window: Window
) -> None:
    """From launches to the kernels that they launched."""
    places = {(i, band.kind): band for i, its in enumerate(bands) for band in its}
    style = {"arrowstyle": "-|>", "color": "#222222", "shrinkA": 0, "shrinkB": 0}
    for host, call, stream, kernel in arrows:
        calls, kernels = places[host, CALLS], places[stream, KERNELS]
        tip = max(kernel.start, window.start), kernels.top + 1
        tail = max(call.start, window.start), calls.top + calls.height - 1
        axes.annotate("", tip, tail, arrowprops=style, zorder=4)


def _draw_legend(figure: Any, bands: list[list[_Band]], has_arrows: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {s.category for its in bands for band in its for row in band.rows for s in row}
    handles: list[Any] = [
        Patch(color=c, label=name) for name, c in COLOURS.items() if name in shown
    ]
    if has_arrows:
        handles.append(Line2D([], [], color="#222222", marker=">", label="launch to kernel"))
    look = {"handlelength": 1.3, "handletextpad": 0.5, "columnspacing": 1.2, "fontsize": 10.5}
    columns = len(handles)
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, **look)


def _duration(ms: float) -> str:
    if ms >= 1e3:
        return f"{ms / 1e3:,.2f} s"
    return f"{ms:.2f} ms" if ms >= 1 else f"{ms * 1e3:.3g} µs"


def fit(name: str, width: float, size: float, *, cut: bool = True) -> str:
    """A name in at most `width` pixels: whole, or without its namespaces, or if it may be cut its
    first words and an ellipsis; "" where none of them fits."""
    whole = names.display_name(name, len(name))
    spaces = _NAMESPACE.finditer(whole.partition("<")[0])
    tails = [whole, *(whole[space.end() :] for space in spaces)]
    ends = [end.start() for end in _END_OF_WORD.finditer(tails[-1])]
    heads = (tails[-1][:end] + names.ELLIPSIS for end in reversed(ends) if cut and end > 1)
    return next((text for text in (*tails, *heads) if text_width(text, size) <= width), "")


def text_width(text: str, size: float) -> float:
    """In pixels, in the font of the pictures."""
    return sum(map(_letter_width, text)) * size


@functools.cache
def _letter_width(letter: str) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        points, *_ = text_to_path.get_text_width_height_descent(
            letter, FontProperties(size=1), False
        )
    return float(points) * DPI / 72


def _paler(colour: str) -> str:
    return "#" + "".join(f"{(part + 255) // 2:02X}" for part in bytes.fromhex(colour[1:]))


def _readable_on(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "white"
