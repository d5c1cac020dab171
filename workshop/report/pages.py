"""Writes a report as one self-contained HTML page, and as Markdown.

All text that does not come from a template is escaped, so that no name from a file becomes markup.
"""

import os
import re
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workshop.report.content import Shown
from workshop.report.parts import Cell, Link, Report, Sheet, Table
from workshop.report.pictures import Picture
from workshop.tables import Markdown, code, escape, escape_block
from workshop.tables import markdown_rows as markdown_table

TEMPLATES = Path(__file__).parent
HOW_TO_READ = (
    ("step ms", "is the median over all steps of all processes, ± half of the interquartile range. "
     "Forward, backward and optimizer come from a separate pass with marks between them."),
    ("speed-up", "is V1's median step over this version's, from the same session, with the 95% "
     "interval: Student's t on the processes' medians; one process has no interval."),
    ("verdict", "says whether it trained V1's model: `pass`, `FAIL` or `not audited`. The "
     "gate runs before the clock: logits, loss, each gradient and a short training run may be no "
     "further from the truth than about twice what the precision costs V1. The audit checks the "
     "timed steps: the loss of each, and the distance and direction in which they moved each "
     "weight. A row that fails either has no speed-up. `not audited`: no run of V1 was in its "
     "comparison, or it was measured before the audit existed."),
    ("gradients", "counts the tensors, under V1's names, that the timed run's backward pass "
     "reached."),
    ("error, of allowed", "is the largest of the gate's errors, as a share of its tolerance."),
    ("peak MB", "(10^6 bytes) is the true peak of the timed steps, a captured graph's memory "
     "included."),
    ("of peak", "compares the useful operations (causal attention counts half) with the chip's "
     "peak, whose source is below the table."),
)  # fmt: skip
QUESTIONS = (
    "Which version gained most over the one before it, and what was it that its change removed?",
    "What bounds V1 here, and which line of a profile says so?",
    "What bounds the fastest version now, and how far is it from the chip's limit?",
    "What surprised me",
    "What I will try in my own code",
)
"""At the end of a participant's sheet."""


# --- HTML ----------------------------------------------------------------------------------------


def html_page(report: Report, folder: Path, progress: Shown = lambda what: None) -> str:
    """The page of a folder, to which its links are relative, with all of its pictures inside;
    `progress` is called with the title of each before it is drawn."""
    from markupsafe import Markup

    def draw(picture: Picture) -> Markup:
        progress(picture.title)
        return Markup(picture.markup())  # which escapes its own texts

    template = _environment(autoescape=True).get_template("report.html.j2")
    return template.render(
        report=report, how_to_read=HOW_TO_READ, href=lambda path: href(path, folder), draw=draw
    )


def href(path: Path, folder: Path) -> str:
    """A relative link to a file, from a page in a folder."""
    return urllib.parse.quote(os.path.relpath(path, folder.resolve()).replace(os.sep, "/"))


# --- Markdown ------------------------------------------------------------------------------------


def markdown_page(report: Report, folder: Path) -> str:
    """The report as GitHub's Markdown, with words in place of its pictures."""
    return _markdown("report.md.j2", folder, report=report, how_to_read=HOW_TO_READ)


def participants_pages(sheet: Sheet, folder: Path) -> tuple[str, str]:
    """The sheet that a participant completes, as HTML and as Markdown."""
    template = _environment(autoescape=True).get_template("my_results.html.j2")
    page = template.render(sheet=sheet, questions=QUESTIONS, href=lambda path: href(path, folder))
    return page, _markdown("my_results.md.j2", folder, sheet=sheet, questions=QUESTIONS)


def _markdown(template: str, folder: Path, **content: object) -> str:
    """All that a template prints is escaped, except the result of References and of these filters:
    text at the beginning of a block, and Markdown."""

    def finalize(value: object) -> str:
        return value if isinstance(value, Markdown) else escape(str(value))

    references = References(folder)
    environment = _environment(autoescape=False, finalize=finalize)
    environment.filters |= {"block": escape_block, "raw": Markdown}
    text = environment.get_template(template).render(references=references, **content)
    return tidy(text) + references.definitions()


class References:
    """Links that are defined once, at the end of a document, however often they are used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[Path, str] = {}

    def link(self, text: str, path: Path) -> Markdown:
        name = self._names.setdefault(path, f"f{len(self._names) + 1}")
        return Markdown(f"[{escape(text)}][{name}]")

    def links(self, links: Iterable[Link]) -> Markdown:
        return Markdown(" ".join(self.link(link.text, link.path) for link in links))

    def table(self, table: Table) -> Markdown:
        """Its caption is left to the template."""
        cells = (map(self._cell, line.cells) for line in table.lines)
        return Markdown(markdown_table(map(escape, table.header), cells, range(table.texts)))

    def definitions(self) -> str:
        lines = [f"[{name}]: {href(path, self._folder)}" for path, name in self._names.items()]
        return "\n" + "\n".join(lines) + "\n" if lines else ""

    def _cell(self, cell: Cell) -> str:
        text = code(cell.text) if cell.is_code else escape(cell.text)
        if cell.anchor:
            return f"[{text}](#{cell.anchor})"
        return " ".join(filter(None, (text, self.links(cell.links))))


def tidy(text: str) -> str:
    """Without the empty lines that a template leaves, but for one at a time."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment(**options: Any) -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
