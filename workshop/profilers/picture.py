"""Draws the rows that timeline.py makes of a trace."""

import math
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import errors, results
from workshop.errors import WorkshopError
from workshop.profilers import names, timeline
from workshop.profilers.timeline import CALLS, KERNELS, OPERATORS, RANGES, Lane, Slice, Window

BUSY = "GPU busy"
"""A row below a stream's kernels: the share of the time in which it ran any."""

_DARK = "#5B6770"
_STRIP = "#EEF1F4"
"""Behind a lane's title."""
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
    "other": "#B5B5B5",
    timeline.RANGE: "#C3CFDC",
    timeline.CALL: _DARK,
    timeline.SYNCHRONISATION: "#000000",
}

_LEVELS = {RANGES: 5, OPERATORS: 3, CALLS: 1, KERNELS: 2}
"""Levels of nesting that are drawn, of each kind."""
_OPERATOR_LEVELS_WITHOUT_GPU = 7
_MOST_ARROWS = 7

# In pixels, but for the font's size.
WIDTH, HEIGHT = 1600, 900
"""Height of the picture; it is lower where few rows are to be drawn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 46, 46, 84
_PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
_TITLE_HEIGHT, _LANE_GAP, _TALLEST_ROW = 22, 12, 46
_WEIGHTS = {KERNELS: 1.5, BUSY: 1.5}
"""Heights of rows in those of others, where they aren't 1."""
_BUSY_WIDTH = 4
_FONT_SIZE = 10
_LETTER = 8.5
"""Width of a letter, of the wider ones."""
_FEWEST_LETTERS = 6
"""Letters of a name that is cut: with fewer it is useless."""
_NAMESPACE = re.compile(r"::|: ")
"""As in "autograd::engine::evaluate_function: MulBackward0"."""


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
    errors.require("matplotlib")
    if target.suffix.lower() != ".png":
        raise WorkshopError(f"{target}: the picture is a PNG: give a name that ends in .png")
    recorded = timeline.read(trace)
    window = timeline.choose_window(recorded, step, start_ms, end_ms)
    lanes = timeline.arrange(recorded, window)
    _write(f"{names.printable(recorded.path.name)}: {window.what}", window, lanes, target)
    for warning in recorded.warnings:
        print(f"warning: {names.printable(warning)}", file=sys.stderr)


def _write(title: str, window: Window, lanes: list[Lane], target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=100)
    with warnings.catch_warnings():
        # A name in a script that is not in the font is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        _Picture(FigureCanvasAgg(figure), window, lanes).draw(title)
        try:
            with results.atomic_path(target) as path:
                figure.savefig(path, format="png")
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


class _Picture:
    """Lanes on a figure. The x of its axes is time in ms, the y pixels from their top."""

    def __init__(self, canvas: Any, window: Window, lanes: list[Lane]) -> None:
        self._window, self._lanes = window, lanes
        self._pixel = (window.end - window.start) / _PLOT_WIDTH
        self._figure = canvas.figure
        self._bands = [self._stack(lane) for lane in lanes]
        plot = self._lay_out()
        self._height = _TOP + plot + _BOTTOM
        self._figure.set_size_inches(WIDTH / 100, self._height / 100)
        self._axes = self._figure.add_axes(
            (_LEFT / WIDTH, _BOTTOM / self._height, _PLOT_WIDTH / WIDTH, plot / self._height),
            xlim=window[:2],
            ylim=(plot, 0),
        )

    def _stack(self, lane: Lane) -> list[_Band]:
        levels = dict(_LEVELS)
        if not any(lane.on_gpu for lane in self._lanes):
            levels[OPERATORS] = _OPERATOR_LEVELS_WITHOUT_GPU
        bands = [
            _Band(
                kind,
                [
                    timeline.merge(row, self._pixel)
                    for row in timeline.nest(lane.slices[kind])[:most]
                ],
            )
            for kind, most in levels.items()
            if kind in lane.slices
        ]
        if KERNELS in lane.slices:
            bands.append(_Band(BUSY, [[]]))
        return bands

    def _lay_out(self) -> int:
        """Gives every band its height and its place; the height of all."""
        room = HEIGHT - _TOP - _BOTTOM - len(self._lanes) * (_TITLE_HEIGHT + _LANE_GAP)
        everything = [band for bands in self._bands for band in bands]
        weight = sum(_WEIGHTS.get(band.kind, 1.0) * len(band.rows) for band in everything)
        y = 0.0
        for bands in self._bands:
            y += _TITLE_HEIGHT
            for band in bands:
                band.height = _WEIGHTS.get(band.kind, 1.0) * min(_TALLEST_ROW, room / weight)
                band.top = y
                y += len(band.rows) * band.height
            y += _LANE_GAP
        return math.ceil(y)

    def draw(self, title: str) -> None:
        number = 0
        for lane, bands in zip(self._lanes, self._bands, strict=True):
            self._draw_title(lane, bands[0].top)
            for band in bands:
                number += 1
                self._draw_name(number, band)
                for index, row in enumerate(band.rows):
                    self._draw_row(row, band, band.top + index * band.height)
                if band.kind == BUSY:
                    self._draw_busy(lane, band)
                if band.kind == KERNELS:
                    self._draw_gaps(lane, band)
        self._draw_arrows()
        self._draw_axis(title)
        self._draw_legend()

    def _draw_title(self, lane: Lane, top: float) -> None:
        self._axes.axhspan(top - _TITLE_HEIGHT, top - 2, color=_STRIP, zorder=0)
        self._write(
            self._window.start + 5 * self._pixel,
            top - _TITLE_HEIGHT / 2 - 1,
            f"{lane.title}:  {_figures(lane, self._window)}",
            ha="left",
            fontweight="bold",
            fontsize=_FONT_SIZE,
            bbox={"color": _STRIP, "pad": 1.5},  # arrows pass below it
        )

    def _draw_name(self, number: int, band: _Band) -> None:
        middle = band.top + len(band.rows) * band.height / 2
        x = self._window.start
        self._write(x - 14 * self._pixel, middle, band.kind, ha="right", fontsize=11)
        self._write(
            x - 134 * self._pixel,
            middle,
            str(number),
            color="white",
            fontsize=10,
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "color": "#333333"},
        )

    def _draw_row(self, row: list[Slice], band: _Band, top: float) -> None:
        by_colour: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for s in row:
            start, width = max(s.start, self._window.start), self._width(s)
            # A line of background separates neighbours.
            by_colour[_colour(s, band)].append((start, max(width - self._pixel, self._pixel)))
            letters = int(width / self._pixel / _LETTER)
            if s.name and letters and (text := _label(s.name, letters)):
                middle, ink = top + band.height / 2, _readable_on(_colour(s, band))
                self._write(start + width / 2, middle, text, color=ink, clip_on=True)
        for colour, spans in by_colour.items():
            self._axes.broken_barh(
                spans, (top + 1, band.height - 2), facecolor=colour, linewidth=0, zorder=2
            )

    def _width(self, s: Slice) -> float:
        return min(s.end, self._window.end) - max(s.start, self._window.start)

    def _draw_busy(self, lane: Lane, band: _Band) -> None:
        bins = _PLOT_WIDTH // _BUSY_WIDTH
        shares = timeline.busy_shares(lane.slices[KERNELS], self._window, bins)
        width = (self._window.end - self._window.start) / bins
        edges = [self._window.start + i * width for i in range(bins + 1)]
        bottom, height = band.top + band.height - 1, band.height - 4
        tops = [bottom - share * height for share in shares]
        self._axes.stairs(tops, edges, baseline=bottom, fill=True, color=_DARK, zorder=2)
        for share, y in (("0%", bottom), ("100%", bottom - height)):
            self._axes.axhline(y, color="#B5B5B5", linewidth=0.6, zorder=1)
            self._write(self._window.end + 4 * self._pixel, y, share, ha="left")

    def _draw_gaps(self, lane: Lane, band: _Band) -> None:
        for start, end in timeline.gaps(lane.slices[KERNELS], self._window):
            text = f"idle {_duration(end - start)}"
            if end - start > len(text) * _LETTER * self._pixel:
                middle = band.top + band.height / 2
                self._write((start + end) / 2, middle, text, color="#8A1C1C", fontstyle="italic")

    def _draw_arrows(self) -> None:
        """From launches to the kernels that they launched."""
        places = {(i, band.kind): band for i, bands in enumerate(self._bands) for band in bands}
        style = {"arrowstyle": "-|>", "color": "#222222", "shrinkA": 0, "shrinkB": 0}
        for host, call, stream, kernel in timeline.flows(self._lanes, _MOST_ARROWS):
            calls, kernels = places[host, CALLS], places[stream, KERNELS]
            tip = max(kernel.start, self._window.start), kernels.top + 1
            tail = max(call.start, self._window.start), calls.top + calls.height - 1
            self._axes.annotate("", tip, tail, arrowprops=style, zorder=4)

    def _draw_axis(self, title: str) -> None:
        axes = self._axes
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_yticks([])
        axes.tick_params(labelsize=11)
        axes.grid(axis="x", color="#D5D5D5", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.set_xlabel("ms since the trace began", fontsize=11)
        self._figure.text(
            10 / WIDTH, 1 - 24 / self._height, title, fontsize=14, fontweight="bold", va="center",
            parse_math=False,
        )  # fmt: skip

    def _draw_legend(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        rows = (row for bands in self._bands for band in bands for row in band.rows)
        shown = {s.category for row in rows for s in row}
        handles: list[Any] = [
            Patch(color=c, label=name) for name, c in COLOURS.items() if name in shown
        ]
        if timeline.flows(self._lanes, _MOST_ARROWS):
            handles.append(Line2D([], [], color="#222222", marker=">", label="launch to kernel"))
        self._figure.legend(
            handles=handles,
            loc="lower center",
            ncols=len(handles),
            frameon=False,
            fontsize=10.5,
            handlelength=1.3,
            handletextpad=0.5,
            columnspacing=1.2,
        )

    def _write(self, x: float, y: float, text: str, **style: Any) -> None:
        style = {"ha": "center", "va": "center_baseline", "fontsize": _FONT_SIZE} | style
        self._axes.text(x, y, text, parse_math=False, zorder=5, **style)


def _figures(lane: Lane, window: Window) -> str:
    """Contents of a lane, in words."""
    counts = ((len(lane.slices.get(kind, ())), kind) for kind in _LEVELS)
    words = ", ".join(f"{n:,} {kind if n > 1 else kind[:-1]}" for n, kind in counts if n)
    if KERNELS not in lane.slices:
        return words
    share, span = (
        timeline.busy_shares(lane.slices[KERNELS], window, 1)[0],
        window.end - window.start,
    )
    return f"{words}, busy {_duration(share * span)} of {_duration(span)} ({share:.1%})"


def _duration(ms: float) -> str:
    if ms >= 1e3:
        return f"{ms / 1e3:,.2f} s"
    return f"{ms:.2f} ms" if ms >= 1 else f"{ms * 1e3:.3g} µs"


def _label(name: str, letters: int) -> str:
    """A name in at most so many letters, if need be without its namespaces, then cut; "" where it
    would be useless."""
    whole = names.display_name(name, len(name))
    if len(whole) <= letters:
        return whole
    short = names.display_name(_NAMESPACE.split(whole)[-1], letters)
    return short if letters >= _FEWEST_LETTERS or names.ELLIPSIS not in short else ""


def _colour(s: Slice, band: _Band) -> str:
    """Operators are paler than kernels: they only ask for work."""
    return _paler(COLOURS[s.category]) if band.kind == OPERATORS else COLOURS[s.category]


def _paler(colour: str) -> str:
    return "#" + "".join(f"{(part + 255) // 2:02X}" for part in bytes.fromhex(colour[1:]))


def _readable_on(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "white"
