"""Draws slides into a .pptx file: where things go, and how large they are.

Text is never smaller than SMALLEST, except for the line at the bottom that names the source.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

from pptx import Presentation
from pptx.chart.data import CategoryChartData, XyChartData
from pptx.dml.color import RGBColor
from pptx.enum import chart as kinds
from pptx.enum.shapes import MSO_SHAPE
from pptx.enum.text import MSO_ANCHOR, PP_ALIGN
from pptx.opc.constants import RELATIONSHIP_TYPE
from pptx.oxml import parse_xml
from pptx.oxml.ns import qn
from pptx.util import Emu, Inches, Pt

from workshop.show.drawing import Bars, Curves

FONT, CODE_FONT = "Arial", "Courier New"
"""Every PowerPoint has them, and LibreOffice fonts as wide."""
SMALLEST, TEXT, FIRST, SOURCE = 24, 32, 44, 14
LINE = 1.2
"""Height of a line, in its font's size."""
MARGIN, BETWEEN = 4, 18
"""Points at each side of a text, and between the texts of a list."""
CODE_COLUMNS = 58
INK, MUTED, ACCENT, PALE = "1F2933", "5F6B76", "0072B2", "EEF2F6"
_LEFT, _WIDTH = Inches(0.5), Inches(12.33)
_TITLE = (_LEFT, Inches(0.35), _WIDTH, Inches(1.25))
_TOP, _BOTTOM = Inches(1.75), Inches(6.85)
_FOOT = (_LEFT, Inches(6.93), _WIDTH, Inches(0.47))
_GAP = Inches(0.25)
Box = tuple[int, int, int, int]
"""Left, top, width, height in EMU."""


@dataclass(frozen=True)
class Code:
    """Lines as they are in the file."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Points:
    """A short list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Cards:
    """Boxes in a row: the heading of each, then its texts."""

    cards: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Lanes:
    """Rows of slices on one axis of time, as in a trace: (start, end, colour, label), both times
    from 0 to 1. A label is left out where its slice is too short."""

    rows: Mapping[str, Sequence[tuple[float, float, str, str]]]
    legend: Mapping[str, str]
    """Names of colours."""


Body = Bars | Curves | Code | Points | Cards | Lanes


@dataclass(frozen=True)
class Slide:
    """A statement, what shows it, and a sentence or two below; without bodies an opening."""

    title: str
    bodies: Sequence[Body] = ()
    caption: str = ""
    notes: str = ""
    source: str = ""


class Writer:
    """A .pptx file that is being made."""

    def __init__(self) -> None:
        self._deck = Presentation()
        self._deck.slide_width, self._deck.slide_height = Inches(13.333), Inches(7.5)
        master = self._deck.slide_master
        theme = master.part.part_related_by(RELATIONSHIP_TYPE.THEME)
        theme._blob = theme.blob.replace(b'"Calibri"', f'"{FONT}"'.encode())
        self._layout = master.slide_layouts.get_by_name("Title Only")
        for layout in [one for one in master.slide_layouts if one is not self._layout]:
            master.slide_layouts.remove(layout)
        # Slides inherit the title's place: edit the layout to move all of them.
        _place(self._layout.placeholders[0], _TITLE)

    def add(self, slide: Slide) -> None:
        page = self._deck.slides.add_slide(self._layout)
        page.notes_slide.notes_text_frame.text = slide.notes
        if not slide.bodies:
            _open(page, slide)
            return
        _fill(page.shapes.title, [slide.title], TEXT, bold=True, middle=True)
        bottom: int = _BOTTOM
        if slide.caption:
            room = Pt((1 + len(slide.caption) // 66) * SMALLEST * LINE)
            bottom -= room + Pt(4)
            _write(page, (_LEFT, _BOTTOM - room, _WIDTH, room), [slide.caption], SMALLEST)
        top: int = _TOP
        for body in slide.bodies:
            height = min(_height(body) or bottom - top, bottom - top)
            _draw(body, page, (_LEFT, top, _WIDTH, height))
            top += height + Pt(8)
        if slide.source:
            text = textwrap.shorten(slide.source, 200, placeholder=" ...")
            _write(page, _FOOT, [text], SOURCE, colour=MUTED).name = "Source"

    def save(self, path: Path) -> None:
        self._deck.save(str(path))


# --- text ----------------------------------------------------------------------------------------


def _open(page: Any, slide: Slide) -> None:
    _colour(page.shapes.add_shape(MSO_SHAPE.RECTANGLE, 0, 0, Inches(0.6), Inches(7.5)), ACCENT)
    _place(page.shapes.title, (Inches(1.2), Inches(2.2), Inches(11), Inches(1.5)))
    _fill(page.shapes.title, [slide.title], FIRST, bold=True, middle=True)
    _write(page, (Inches(1.2), Inches(3.9), Inches(11), Inches(1.6)), [slide.caption], TEXT)


def _place(shape: Any, box: Box) -> None:
    shape.left, shape.top, shape.width, shape.height = map(Emu, box)


def _write(page: Any, box: Box, texts: Sequence[str], size: int, **look: Any) -> Any:
    shape = page.shapes.add_textbox(*map(Emu, box))
    _fill(shape, texts, size, **look)
    return shape


def _fill(
    shape: Any, texts: Sequence[str], size: int, *, bold: bool = False, colour: str = INK,
    middle: bool = False, font: str | None = None, bullets: bool = False, margin: int = MARGIN,
) -> None:  # fmt: skip
    frame = shape.text_frame
    frame.word_wrap = True
    frame.margin_left = frame.margin_right = Pt(margin)
    frame.margin_top = frame.margin_bottom = 0
    frame.vertical_anchor = MSO_ANCHOR.MIDDLE if middle else MSO_ANCHOR.TOP
    for index, text in enumerate(texts):
        paragraph = frame.paragraphs[0] if index == 0 else frame.add_paragraph()
        paragraph.alignment = PP_ALIGN.LEFT
        if bullets:
            _bullet(paragraph)
        run = paragraph.add_run()
        run.text, run.font.size, run.font.bold, run.font.name = text, Pt(size), bold, font
        run.font.color.rgb = RGBColor.from_string(colour.lstrip("#"))


def _bullet(paragraph: Any) -> None:
    paragraph.space_after = Pt(BETWEEN)
    properties = paragraph._p.get_or_add_pPr()
    properties.set("marL", str(Pt(28)))
    properties.set("indent", str(-Pt(28)))
    properties.append(parse_xml(
        '<a:buChar xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" char="&#8226;"/>'
    ))  # fmt: skip


def _paint(fill: Any, colour: str) -> None:
    fill.solid()
    fill.fore_color.rgb = RGBColor.from_string(colour.lstrip("#"))


def _colour(shape: Any, colour: str) -> None:
    _paint(shape.fill, colour)
    shape.line.fill.background()
    shape._element.remove(shape._element.find(qn("p:style")))  # the theme's shadow


# --- bodies --------------------------------------------------------------------------------------


def _height(body: Body) -> int:
    """The height that a body needs; 0 if it takes what is left."""
    if not isinstance(body, Code):
        return 0
    return int(Pt(sum(len(wrapped(line)) for line in body.lines) * SMALLEST * LINE + 16))


@singledispatch
def _draw(body: Body, page: Any, box: Box) -> None:
    """Draws a body into a box of a page."""
    raise TypeError(body)


@_draw.register
def _(body: Points, page: Any, box: Box) -> None:
    _write(page, box, body.texts, TEXT, bullets=True)


@_draw.register
def _(body: Cards, page: Any, box: Box) -> None:
    left, top, width, height = box
    own, head = (width - _GAP * (len(body.cards) - 1)) // len(body.cards), Inches(0.9)
    height = min(height, Inches(3.6))
    for index, (heading, *texts) in enumerate(body.cards):
        x = left + index * (own + _GAP)
        for y, tall, fill in ((top, head, ACCENT), (top + head, height - head, PALE)):
            area = (x, y, own, tall)
            _colour(page.shapes.add_shape(MSO_SHAPE.RECTANGLE, *map(Emu, area)), fill)
        look = {"bold": True, "colour": "FFFFFF", "middle": True, "margin": 12}
        _write(page, (x, top, own, head), [heading], SMALLEST, **look)
        inner = (x, top + head + Inches(0.2), own, height - head - Inches(0.2))
        _write(page, inner, texts, SMALLEST, margin=12, bullets=len(texts) > 1)


@_draw.register
def _(body: Code, page: Any, box: Box) -> None:
    left, top, width, height = box
    _colour(page.shapes.add_shape(MSO_SHAPE.RECTANGLE, *map(Emu, box)), PALE)
    lines = [part for line in body.lines for part in wrapped(line)]
    inner = (left, top + Pt(8), width, height - Pt(16))
    _write(page, inner, lines, SMALLEST, font=CODE_FONT, bold=True, margin=10).name = "Code"


def wrapped(line: str) -> list[str]:
    """A line of code; a longer one than CODE_COLUMNS as several, broken within as few brackets as
    possible. A comment at its end goes before it.
    """
    if len(line) <= CODE_COLUMNS:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    code, _, comment = line.partition("  # ")
    if comment:
        return wrapped(f"{indent}# {comment}") + wrapped(code)
    if line.lstrip().startswith("#"):
        return textwrap.wrap(line, CODE_COLUMNS, subsequent_indent=f"{indent}# ")
    depth, places = 0, []
    for index, letter in enumerate(line[: CODE_COLUMNS + 1]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and index > CODE_COLUMNS // 2:
            places.append((depth, line[index - 1] != ",", -index))
    at = -min(places)[2]
    return [line[:at], *wrapped(f"{indent}    {line[at + 1 :]}")]


@_draw.register
def _(body: Lanes, page: Any, box: Box) -> None:
    left, top, width, height = box
    names, foot, gap = Pt(140), Pt(SMALLEST * LINE), Pt(8)
    tall, room = (height - foot) // len(body.rows) - gap, width - names
    for index, (name, slices) in enumerate(body.rows.items()):
        y = top + index * (tall + gap)
        _write(page, (left, y, names, tall), [name], SMALLEST, middle=True)
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for start, end, colour, label in slices:
            x, wide = left + names + int(start * room), max(int((end - start) * room), Pt(1))
            spans.setdefault(colour, []).append((x, x + wide, label))
        for colour, its in spans.items():  # one shape of each colour stays quick to edit
            outline = page.shapes.build_freeform(its[0][0], y)
            for x, end, _ in its:
                if x != its[0][0]:
                    outline.move_to(x, y)
                corners = [(end, y), (end, y + tall), (x, y + tall)]
                outline.add_line_segments(corners, close=True)
            _colour(outline.convert_to_shape(), colour)
        for x, end, label in (one for its in spans.values() for one in its if one[2]):
            if end - x > Pt(len(label) * SMALLEST * 0.64 + 2 * MARGIN):
                _write(page, (x, y, end - x, tall), [label], SMALLEST, middle=True)
    texts = _write(page, (left, top + height - foot, width, foot), [], SMALLEST)
    for name, colour in body.legend.items():
        run = texts.text_frame.paragraphs[0].add_run()
        run.text, run.font.size = f"■ {name} ", Pt(SMALLEST)
        run.font.color.rgb = RGBColor.from_string(colour.lstrip("#"))


# --- charts --------------------------------------------------------------------------------------


@_draw.register
def _(body: Bars, page: Any, box: Box) -> None:
    turned = -1 if body.across else 1  # the first category of lying bars is drawn at the bottom
    data = CategoryChartData(number_format="General")
    data.categories = body.labels[::turned]
    for name, values in body.series.items():
        data.add_series(name, values[::turned])
    kind = f"{'BAR' if body.across else 'COLUMN'}_{'STACKED' if body.stacked else 'CLUSTERED'}"
    chart = _add_chart(page, kinds.XL_CHART_TYPE[kind], box, data)
    plot, amount, axis = chart.plots[0], chart.value_axis, chart.category_axis
    plot.gap_width, plot.overlap = 40 if body.across else 60, 100 if body.stacked else -5
    one = len(body.series) == 1
    parts = [plot.series[0].points[i] for i in range(len(body.labels))] if one else plot.series
    for part, colour in zip(parts, body.colours[:: turned if one else 1], strict=True):
        _paint(part.format.fill, colour)
    amount.minimum_scale, amount.has_major_gridlines = 0, False
    if body.form:  # the numbers at the bars say more than an axis
        plot.has_data_labels = True
        plot.data_labels.number_format, plot.data_labels.number_format_is_linked = body.form, False
        most = max(value or 0.0 for values in body.series.values() for value in values)
        amount.visible, amount.maximum_scale = False, 1.18 * most or None
        _name(chart, "chart_title", body.axis)
    else:
        amount.maximum_scale = 100 if body.axis.startswith("%") else None
        _name(amount, "axis_title", body.axis)
    axis.tick_label_position = kinds.XL_TICK_LABEL_POSITION.LOW
    axis.format.line.color.rgb = RGBColor.from_string(MUTED)
    # Every category has its name. The schema wants the element right before this one.
    axis._element.find(qn("c:noMultiLvlLbl")).addprevious(_element(axis, "tickLblSkip", "1"))


@_draw.register
def _(body: Curves, page: Any, box: Box) -> None:
    data = XyChartData(number_format="General")
    for name, points in body.series.items():
        series = data.add_series(name)
        for x, y in points:
            series.add_data_point(x, y)
    chart = _add_chart(page, kinds.XL_CHART_TYPE.XY_SCATTER_LINES, box, data)
    for series, colour in zip(chart.plots[0].series, body.colours, strict=True):
        mark, line = (len(body.series[series.name]) == count for count in (1, 2))
        styles = kinds.XL_MARKER_STYLE
        series.smooth, series.marker.style = False, styles.NONE if line else styles.CIRCLE
        series.marker.size, series.format.line.width = 16 if mark else 10, Pt(0 if mark else 4)
        _paint(series.marker.format.fill, colour)
        series.marker.format.line.fill.background()
        series.format.line.color.rgb = RGBColor.from_string(colour.lstrip("#"))
    axes = (chart.category_axis, body.x), (chart.value_axis, body.y)
    for index, (axis, name) in enumerate(axes):
        ends = [
            pick(point[index] for points in body.series.values() for point in points)
            for pick in (min, max)
        ]
        _name(axis, "axis_title", name)
        axis.has_major_gridlines = False
        axis.tick_labels.number_format, axis.tick_labels.number_format_is_linked = "#,##0", False
        if body.logarithmic:
            axis._element.scaling.insert(0, _element(axis, "logBase", "10"))
            axis.minimum_scale = 10 ** math.floor(math.log10(ends[0]))
            axis.maximum_scale = 10 ** math.ceil(math.log10(ends[1]))
        elif index == 0:
            axis.minimum_scale, axis.maximum_scale, axis.major_unit = 0, ends[1], ends[1] / 4


def _add_chart(page: Any, kind: Any, box: Box, data: Any) -> Any:
    chart = page.shapes.add_chart(kind, *map(Emu, box), data).chart
    chart.font.size, chart.font.color.rgb = Pt(SMALLEST), RGBColor.from_string(INK)
    chart.has_title, chart.has_legend = False, len(data) > 1
    if chart.has_legend:
        chart.legend.position, chart.legend.include_in_layout = (
            kinds.XL_LEGEND_POSITION.RIGHT,
            False,
        )
    return chart


def _name(owner: Any, title: str, text: str) -> None:
    """The title of a chart or an axis."""
    owner.has_title = True
    frame = getattr(owner, title).text_frame
    frame.text = text
    frame.paragraphs[0].font.size, frame.paragraphs[0].font.bold = Pt(SMALLEST), False


def _element(axis: Any, name: str, value: str) -> Any:
    """A part of an axis' XML, for what python-pptx has no property."""
    return axis._element.makeelement(qn(f"c:{name}"), {"val": value})
