"""Pictures of a report: charts as SVG that takes a page's colours, rooflines as PNG. Every one says
in words what it shows."""

import abc
import base64
import html
import io
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from workshop.errors import WorkshopError
from workshop.roofline import ceilings
from workshop.roofline import figures as roofline_figures
from workshop.roofline import inputs as roofline_inputs
from workshop.roofline.model import Roofline, sentences

INK, LINE, PAPER = "#1a2027", "#d4dae1", "#fefefe"
"""Of letters, of grids and of what lies behind: on a page they follow its theme."""
_THEME = {INK: "var(--ink)", LINE: "var(--line)", PAPER: "var(--panel)"}
DPI = 100
_COLOURS_OF_PNG = 128
"""A chart has few: with a palette it takes a quarter of the space."""
_POINTS_TOLD = 6
"""Of a roofline, in its words."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_DRAWN_ID = re.compile(r"(?<=url\(#)[^)]+(?=\))")
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


@dataclass(frozen=True)
class Picture(abc.ABC):
    """A picture that is drawn when it is asked for."""

    name: str
    """No other picture of the report has it."""
    title: str
    alt: str
    """All of its figures, in words."""
    files: tuple[Path, ...]
    """That it is made from."""

    wide = False
    """Whether it needs all of a page's width."""
    tells_more = False
    """Than the tables and sentences beside it."""

    @abc.abstractmethod
    def markup(self) -> str:
        """An element that can stand in an HTML page: all text in it is escaped."""


@dataclass(frozen=True)
class Chart(Picture):
    """A chart of a report's own, as SVG."""

    draw: Callable[[Any], None] = field(repr=False)
    """Draws it on a matplotlib Figure of `size`."""
    size: tuple[float, float] = (7.5, 4.3)
    """Width and height in inches, of DPI pixels each."""
    tells_more: bool = False

    def markup(self) -> str:
        import matplotlib
        from matplotlib.figure import Figure

        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        text = io.StringIO()
        style: Any = _STYLE | {"svg.hashsalt": self.name}
        with matplotlib.rc_context(style), warnings.catch_warnings():
            # Letters that its own font lacks: a page has more fonts.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure = Figure(figsize=self.size, dpi=DPI)
            self.draw(figure)
            figure.savefig(text, format="svg", transparent=True, metadata=none)
        return _inline(text.getvalue(), self.name, f"{self.title}. {self.alt}")


@dataclass(frozen=True)
class RooflinePicture(Picture):
    """A roofline as roofline_analysis.py draws it, as PNG."""

    roofline: Roofline = field(repr=False)
    wide = True

    @classmethod
    def of(cls, name: str, roofline: Roofline, files: tuple[Path, ...]) -> "RooflinePicture":
        told = "; ".join(sentences(roofline, _POINTS_TOLD))
        return cls(name, "How far from the chip's limits", f"Roofline: {told}.", files, roofline)

    def markup(self) -> str:
        return _png(self, lambda target: roofline_figures.draw(self.roofline, target))


@dataclass(frozen=True)
class DrawnPicture(Picture):
    """A picture that another tool writes to a file, as PNG."""

    draw: Callable[[Path], None] = field(repr=False)
    wide = True

    def markup(self) -> str:
        return _png(self, self.draw)


def _png(picture: Picture, draw: Callable[[Path], None]) -> str:
    """An image element with all of the picture in it."""
    from PIL import Image  # which matplotlib brings along

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "picture.png"
        draw(target)
        with Image.open(target) as drawn:
            width, height = drawn.size
        image = base64.b64encode(_with_a_palette(target)).decode()
    words = html.escape(f"{picture.title}. {picture.alt}")
    return (
        f'<img src="data:image/png;base64,{image}" alt="{words}" width="{width}" height="{height}">'
    )


def read_roofline(paths: list[Path], *, title: str, results_folder: Path) -> Roofline | None:
    """The roofline of some files, with all ceilings that are known of their device; None where
    nothing in them has a place on one, or no ceiling is known.

    Args:
        results_folder: in which measured ceilings are looked for.
    """
    try:
        roofline = roofline_inputs.load(paths)
    except WorkshopError:  # what is broken, the report names anyway
        return None
    ceilings.attach(roofline, folder=results_folder)
    roofline.title = title
    return roofline if roofline.ceilings else None


def _with_a_palette(path: Path) -> bytes:
    from PIL import Image  # which matplotlib brings along

    content = io.BytesIO()
    with Image.open(path) as picture:
        flat = picture.convert("RGB").quantize(_COLOURS_OF_PNG, dither=Image.Dither.NONE)
        flat.save(content, format="png", optimize=True)
    return content.getvalue()


def _inline(document: str, name: str, words: str) -> str:
    """The <svg> of matplotlib's document, fit to stand among others in a page: no style that holds
    for all of the page, no identifier that two of them have, colours of the page's theme."""
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
    used = _used_identifiers(root)
    for element in root.iter():
        identifier = element.attrib.pop("id", None)
        if identifier in used:
            element.set("id", f"{name}-{identifier}")
        for key, value in element.attrib.items():
            if key == f"{{{_XLINK}}}href":
                element.set(key, f"#{name}-{value[1:]}")
            elif key in ("style", "clip-path"):
                element.set(key, _of_the_page(value, name))
    return ElementTree.tostring(root, encoding="unicode")


def _used_identifiers(root: ElementTree.Element) -> set[str]:
    used = set()
    for element in root.iter():
        used.add(element.get(f"{{{_XLINK}}}href", "#")[1:])
        for value in element.attrib.values():
            used |= set(_REFERENCE.findall(value))
    return used


def _of_the_page(value: str, name: str) -> str:
    value = _DRAWN_ID.sub(lambda match: f"{name}-{match[0]}", value)
    for colour, variable in _THEME.items():
        value = value.replace(colour, variable)
    return re.sub(r"font-family:[^;]*", "font-family: inherit", value)
