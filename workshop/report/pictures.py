"""Pictures of a report: charts as SVG in a page's colours, others as PNG, each with its content in
words."""

import abc
import base64
import functools
import html
import io
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from workshop.errors import WorkshopError
from workshop.results import RunResult
from workshop.roofline import ceilings
from workshop.roofline import figures as roofline_figures
from workshop.roofline import inputs as roofline_inputs
from workshop.roofline.model import Roofline, sentences

INK, LINE, PAPER = "#1a2027", "#d4dae1", "#fefefe"
"""Colours of letters, grids and the background: on a page they follow its theme."""
_THEME = {INK: "var(--ink)", LINE: "var(--line)", PAPER: "var(--panel)"}
_COLOURS_OF_PNG = 128
"""A chart has few: with a palette it takes a quarter of the space."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE = {
    "font.size": 14,
    "font.family": "DejaVu Sans",  # which matplotlib brings along
    "text.parse_math": False,
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


_ONE_AT_A_TIME = threading.Lock()
"""Matplotlib's settings are those of the whole process."""


@dataclass(frozen=True)
class Picture(abc.ABC):
    """A picture that `markup` draws into a page, or `source` as an image by itself."""

    name: str
    """Unique in a page."""
    title: str
    alt: str
    """All of its numbers, in words."""
    files: tuple[Path, ...]
    """The result files that it shows."""
    wide = False
    """Whether it needs all of a page's width."""
    in_markdown = False
    """Whether Markdown gives its `alt`, since no table or sentence beside it has that."""

    @abc.abstractmethod
    def markup(self) -> str:
        """An HTML element, all text in it escaped."""

    @functools.cached_property
    def source(self) -> str:
        """A data URL, for the source of an image."""
        with _ONE_AT_A_TIME:
            kind, content = self._image()
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

    @abc.abstractmethod
    def _image(self) -> tuple[str, bytes]:
        """Its kind, and its content."""


@dataclass(frozen=True)
class Chart(Picture):
    """A chart of matplotlib, as SVG."""

    draw: Callable[[Any], None] = field(repr=False)
    """Draws it on a matplotlib Figure of `size`."""
    size: tuple[float, float] = (7.5, 4.3)
    """Width and height in inches."""
    in_markdown: bool = False

    def markup(self) -> str:
        return _inline(self._svg(), f"{self.title}. {self.alt}")

    def _image(self) -> tuple[str, bytes]:
        # An image can't use the page's fonts.
        return "svg+xml", self._svg(**{"svg.fonttype": "path"}).encode()

    def _svg(self, **look: str) -> str:
        import matplotlib
        from matplotlib.figure import Figure

        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        text = io.StringIO()
        # The salt goes into all identifiers that the drawing refers to.
        style: Any = _STYLE | {"svg.hashsalt": self.name} | look
        with matplotlib.rc_context(style), warnings.catch_warnings():
            # Letters missing in its font: a page has more fonts.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            figure.savefig(text, format="svg", transparent=True, metadata=none)
        return text.getvalue()


@dataclass(frozen=True)
class DrawnPicture(Picture):
    """A picture that another tool writes to a file, as PNG."""

    draw: Callable[[Path], None] = field(repr=False)
    wide = True

    def markup(self) -> str:
        words = html.escape(f"{self.title}. {self.alt}")
        return f'<img src="{self.source}" alt="{words}">'

    def _image(self) -> tuple[str, bytes]:
        from PIL import Image  # which matplotlib brings along

        content = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "picture.png"
            self.draw(target)
            with Image.open(target) as drawn:
                flat = drawn.convert("RGB").quantize(_COLOURS_OF_PNG, dither=Image.Dither.NONE)
                flat.save(content, format="png", optimize=True)
        return "png", content.getvalue()


def roofline_picture(name: str, roofline: Roofline, files: tuple[Path, ...]) -> Picture:
    """As roofline_analysis.py draws it."""
    alt = f"Roofline: {'; '.join(sentences(roofline, 6))}."

    def draw(target: Path) -> None:
        roofline_figures.draw(roofline, target)

    return DrawnPicture(name, "How far from the chip's limits", alt, files, draw)


def read_roofline(
    paths: Sequence[Path], runs: Sequence[RunResult], *, title: str, results_folder: Path
) -> Roofline | None:
    """The roofline of some files, or of some runs in them, with all known ceilings of their device,
    measured ones from the results' folder; None if nothing in them has a place on one, or no
    ceiling is known."""
    try:
        roofline = roofline_inputs.load(paths, runs)
    except WorkshopError:  # broken files are listed anyway
        return None
    ceilings.attach(roofline, folder=results_folder)
    roofline.title = title
    return roofline if roofline.ceilings else None


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
