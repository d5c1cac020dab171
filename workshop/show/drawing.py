"""The parts that all charts share: the palette, the look, bars and curves, a chart on a page.

`Bars` and `Curves` are what a chart shows; matplotlib draws them here, and slides as charts of
PowerPoint. A `Chart` is a figure on a page, with its numbers in words.
"""

import base64
import functools
import html
import io
import multiprocessing
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from workshop.errors import printable
from workshop.profilers.metrics import digits

INK, LINE, PAPER = "#1a2027", "#d4dae1", "#fefefe"
"""Colours of letters, grids and the background: on a page they follow its theme."""
GREEN, RED, GREY, WHOLE, DIM = "#009E73", "#D55E00", "#B8B8B8", "#44546a", "#707070"
"""A gain, a loss, neither, a whole step, and words in place of a number."""
_STYLE: Any = {
    "font.size": 14,
    "font.family": "DejaVu Sans",  # which matplotlib brings along
    "text.parse_math": False,  # a device's name may contain dollars
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
INTERVAL = "95% interval of the speed-up over V1"
MOST_BARS = 24
"""In one chart: more can't be read."""
_LETTER, _SMALL_LETTER = 0.115, 0.095
"""Widths in inches of a bold letter at a bar's end, and of one in a bar's part."""
_DASHES = (("-", 6.0), ("-", 2.6), ("--", 2.2), (":", 2.6), ("-.", 2.0), ("--", 1.5))
"""Dashes and width of each curve: curves on top of each other all stay visible."""
_ONE_AT_A_TIME = threading.Lock()
"""Matplotlib's settings are those of the whole process."""


# --- a chart on a page ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A figure, and its numbers in words."""

    name: str
    """Unique on a page."""
    title: str
    alt: str
    files: tuple[Path, ...]
    """The result files that it shows."""
    draw: Callable[[], Any] = field(repr=False)
    """Makes the matplotlib figure."""
    wide: bool = False
    """Whether it needs all of a page's width."""
    as_png: bool = False
    """For figures whose words have places in pixels; others are SVG, in the page's colours."""

    @functools.cached_property
    def markup(self) -> str:
        """An HTML element, all text in it escaped."""
        words = f"{self.title}. {self.alt}"
        if self.as_png:
            with _styled():
                source = base64.b64encode(_png(self.draw())).decode()
            return f'<img src="data:image/png;base64,{source}" alt="{html.escape(words)}">'
        # The salt goes into all identifiers that the drawing refers to.
        with _styled(**{"svg.hashsalt": self.name}):
            return _inline(_svg(self.draw()), words)


_charts: Sequence[Chart] = ()
"""The charts under way, for the processes that `draw_all` forks: they can't be sent."""


def _markup(number: int) -> str:
    return _charts[number].markup


def _leave_signals() -> None:
    """Ctrl-C is for the program alone, which then ends its processes by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def draw_all(charts: Sequence[Chart]) -> Iterator[Chart]:
    """Draws charts in a process for each core; gives each, in order, when its `markup` is there."""
    global _charts
    _charts = charts
    cores = min(os.cpu_count() or 1, len(charts))
    if cores < 2 or not hasattr(os, "fork"):
        return iter(charts)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: those of numpy's library, which a fork does not harm.
        warnings.simplefilter("ignore", DeprecationWarning)
        processes = multiprocessing.get_context("fork").Pool(cores, _leave_signals)
    return _collected(charts, processes)


def _collected(charts: Sequence[Chart], processes: Any) -> Iterator[Chart]:
    with processes:
        for chart, markup in zip(charts, processes.imap(_markup, range(len(charts))), strict=True):
            chart.__dict__["markup"] = markup
            yield chart


def save(draw: Callable[[Any], Any], what: Any, target: Path) -> None:
    """Writes the figure that a function draws as PNG, large enough for a projector."""
    with _styled():
        draw(what).savefig(target, format="png", dpi=150)


@contextmanager
def _styled(**more: Any) -> Iterator[None]:
    import matplotlib

    with _ONE_AT_A_TIME, matplotlib.rc_context(_STYLE | more), warnings.catch_warnings():
        # Letters that are missing in its font are drawn as boxes; a page has more fonts.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


# `savefig` would draw a figure twice, and a report has nearly a hundred.


def _svg(drawn: Any) -> str:
    """A figure as an SVG document without a background."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for patch in (drawn.patch, *(axes.patch for axes in drawn.axes)):
        patch.set(facecolor="none", edgecolor="none")
    text, none = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(drawn).print_svg(text, metadata=none)
    return text.getvalue()


def _png(drawn: Any) -> bytes:
    """A figure as a PNG with a palette of few colours, which takes a quarter of the space."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # which matplotlib brings along

    drawn.set_dpi(100)
    canvas, content = FigureCanvasAgg(drawn), io.BytesIO()
    canvas.draw()
    size = canvas.get_width_height()
    image = Image.frombuffer("RGBA", size, canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    flat = image.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    flat.save(content, format="png")
    return content.getvalue()


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_THEME = {INK: "var(--ink)", LINE: "var(--line)", PAPER: "var(--panel)"}


def _inline(document: str, words: str) -> str:
    """The <svg> of matplotlib's document, to be one of several in a page: without a style for the
    whole page and without identifiers that all of them have, in the colours of the page."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(document)
    for size in ("width", "height"):
        root.attrib.pop(size)
    root.attrib |= {"role": "img", "aria-label": words}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
        if "_" in parent.get("id", ""):  # as in "axes_1"; those that are referred to have a salt
            del parent.attrib["id"]
        if style := parent.get("style"):
            for colour, variable in _THEME.items():
                style = style.replace(colour, variable)
            parent.set("style", re.sub(r"font-family:[^;]*", "font-family: inherit", style))
    return ElementTree.tostring(root, encoding="unicode")


def figure(width: float, height: float) -> Any:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# --- bars and curves -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """Values at labels, of one or several series; None leaves a gap."""

    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    axis: str
    """The meaning of the values, with their unit."""
    colours: Sequence[str]
    """The colours of the series; of a single series' bars."""
    words: Sequence[str] = ()
    """Texts at the ends of the bars; without them the sums."""
    numbers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Texts in the parts of the bars; without them their lengths."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """Ends of the 95% intervals of the bars' lengths."""
    form: str = ""
    """A spreadsheet's format of the numbers at a slide's bars; without one the axis has numbers."""
    stacked: bool = False
    across: bool = False
    """On a slide bars lie, the first on top: for long labels. Elsewhere all do."""

    @property
    def alt(self) -> str:
        """All values in words, as in "ms a step: v1 67.2 ms (forward 20, backward 40)"."""
        texts = []
        for i, label in enumerate(self.labels[:MOST_BARS]):
            parts = {name: own[i] or 0.0 for name, own in self.series.items()}
            of = ", ".join(f"{name} {self.number(name, i)}" for name, x in parts.items() if x)
            total = self.words[i] if self.words else digits(sum(parts.values()))
            texts.append(f"{label} {total}" + (f" ({of})" if len(parts) > 1 and of else ""))
        return f"{self.axis[0].upper()}{self.axis[1:]}: {'; '.join(texts)}.{more(self.labels)}"

    def number(self, series: str, place: int) -> str:
        """The text in a part of a bar."""
        texts = self.numbers.get(series)
        return texts[place] if texts else digits(self.series[series][place] or 0.0)


@dataclass(frozen=True)
class Curves:
    """Points (x, y): a series of one is a mark, one of several a line."""

    series: Mapping[str, Sequence[tuple[float, float]]]
    x: str
    y: str
    colours: Sequence[str]
    logarithmic: bool = False
    """Whether both axes are; on a page x doubles from tick to tick."""
    markers: Sequence[str] = ()


def plot_bars(axis: Any, bars: Bars) -> None:
    """Bars that lie, the first on top, with a number in each part that has room for it, and a
    whisker for each interval."""
    count = min(len(bars.labels), MOST_BARS)
    one, starts = len(bars.series) == 1, [0.0] * count
    lengths = {name: [v or 0.0 for v in own[:count]] for name, own in bars.series.items()}
    totals = [sum(parts) for parts in zip(*lengths.values(), strict=True)]
    words = [bars.words[i] if bars.words else digits(totals[i]) for i in range(count)]
    known = dict(enumerate(own for own in bars.intervals[:count]))
    ends = [max(total, *(known.get(i) or (0.0,))) for i, total in enumerate(totals)]
    # The axis has room for each bar's words. Its place is a little wider when it is drawn.
    inches = 1.1 * axis.get_position().width * axis.figure.get_figwidth()
    rooms = [max(0.3, 0.94 - _LETTER * len(text) / inches) for text in words]
    reach = max((end / room for end, room in zip(ends, rooms, strict=True)), default=0.0) or 1.0
    for (name, own), colour in zip(lengths.items(), [bars.colours] if one else bars.colours,
                                   strict=False):  # fmt: skip
        label = "_" if one else name
        look = {"color": colour, "edgecolor": PAPER, "label": label, "height": 0.68}
        drawn = axis.barh(range(count), own, left=starts, **look)
        if not one:
            texts = [bars.number(name, i) for i in range(count)]
            numbers = [
                text if x / reach * inches > _SMALL_LETTER * len(text) + 0.08 else ""
                for x, text in zip(own, texts, strict=True)
            ]
            axis.bar_label(drawn, numbers, label_type="center", color="#10151a", fontsize=11.5)
        starts = [start + length for start, length in zip(starts, own, strict=True)]
    for place, (total, end, text) in enumerate(zip(totals, ends, words, strict=True)):
        look = {"fontweight": "bold"} if total else {"color": DIM}
        write_beside(axis, printable(text), (end, place), **look)
    whiskers = [(place, *own) for place, own in known.items() if own]
    if whiskers:
        places, lows, highs = zip(*whiskers, strict=True)
        axis.hlines(places, lows, highs, color=INK, linewidth=1.8, label=INTERVAL)
        axis.plot((*lows, *highs), places * 2, "|", color=INK, markersize=9, markeredgewidth=1.8)
    labels = [cut(printable(label)) for label in bars.labels[:count]]
    axis.set_yticks(range(count), labels)
    axis.set_ylim(count - 0.4, -0.6)
    axis.set_xlim(0, reach)
    axis.xaxis.get_major_locator().set_params(nbins=4)
    axis.xaxis.set_major_formatter("{x:,.10g}")
    axis.set_xlabel(bars.axis)
    grid(axis, "x")


def write_legend(axis: Any, *others: Any, ncols: int = 2) -> None:
    """A legend on top of an axis: of the bars there, or of those of other axes."""
    entries = {
        label: handle
        for one in others or (axis,)
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    place = {"loc": "upper left"} if others else {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    look = {"fontsize": 12, "handlelength": 1.1, "columnspacing": 1.2, "borderaxespad": 0.2}
    if entries:
        axis.legend(entries.values(), entries.keys(), ncols=ncols, **place, **look)


def plot_curves(axis: Any, curves: Curves) -> None:
    for i, (name, points) in enumerate(curves.series.items()):
        dashes, width = ("-", 2.5) if curves.markers else _DASHES[i % len(_DASHES)]
        marker = curves.markers[i] if curves.markers else ""
        axis.plot(*zip(*points, strict=True) if points else ((), ()), dashes, linewidth=width,
                  color=curves.colours[i], marker=marker, markersize=9, label=name)  # fmt: skip
    axis.set_xlabel(curves.x)
    axis.set_ylabel(curves.y)
    grid(axis, "y")


def write_beside(axis: Any, text: str, place: tuple[float, float], **look: Any) -> None:
    axis.annotate(text, place, xytext=(7, 0), va="center", textcoords="offset points", **look)


def grid(axis: Any, direction: str) -> None:
    axis.grid(axis=direction, color=LINE)
    axis.tick_params(length=0)


def cut(label: str, width: int = 34) -> str:
    """A label that is not too long, cut after a word if it has several."""
    if len(label) <= width:
        return label
    head = label[:width]
    end = max(head.rfind(mark) for mark in " ,_-")
    return head[: end if end > 0 else -1].rstrip(" ,_-") + "…"


def more(bars: Sequence[object]) -> str:
    """A sentence on the bars that are not drawn."""
    count = len(bars) - MOST_BARS
    return f" {count} more in the table." if count > 0 else ""


def bars_chart(name: str, heading: str, bars: Bars, files: tuple[Path, ...]) -> Chart:
    """A chart of bars alone; parts that no bar has are left out."""
    colours = dict(zip(bars.series, bars.colours, strict=True))
    series = {what: own for what, own in bars.series.items() if any(own)}
    kept = Bars(bars.labels, series, bars.axis, [colours[what] for what in series])

    def draw() -> Any:
        drawn = figure(7.5, 1.6 + 0.25 * len(series) + 0.5 * min(len(bars.labels), MOST_BARS))
        axis = drawn.subplots()
        plot_bars(axis, kept)
        write_legend(axis)
        return drawn

    return Chart(name, heading, kept.alt, files, draw)
