"""One table for all outputs: on a terminal, in Markdown and HTML, as JSON and CSV.

Names and sentences come from files and may hold anything: each form escapes them.
"""

import csv
import dataclasses
import html as markup
import importlib.util
import io
import itertools
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from workshop import progress, results
from workshop.errors import printable

T = TypeVar("T")
FORMATS = ("table", "markdown", "json", "csv")
SCHEMA_VERSION = 1
SAME = "~1"
"""Short for no significant difference."""
WIDE = 110
"""Columns of a terminal from which on tables have lines between their columns."""
_WIDTH_OF_A_FILE = 120


class Link(NamedTuple):
    """A link to a result file."""

    text: str
    path: Path


class Cell(str):
    """A cell with more than text: links after it, or an anchor of the page that it leads to."""

    links: tuple[Link, ...]
    is_code: bool
    anchor: str

    def __new__(
        cls, text: str = "", links: Iterable[Link] = (), *, is_code: bool = False, anchor: str = ""
    ) -> "Cell":
        cell = super().__new__(cls, text)
        cell.links, cell.is_code, cell.anchor = tuple(links), is_code, anchor
        return cell


@dataclass(frozen=True)
class Line:
    """A row of a table; `style` is rich's. Lines with the same `section` belong together."""

    cells: Sequence[str]
    style: str | None = None
    section: object = None


@dataclass(frozen=True)
class Table:
    """A table with the notes below it."""

    title: str
    header: Sequence[str]
    lines: Sequence[Line]
    notes: Sequence[str] = ()
    left: Collection[int] = (0,)
    """The columns of words, which are aligned at the left."""
    only_wide: Collection[int] = ()
    """The columns that only a wide terminal shows."""
    wraps: Collection[int] | None = None
    """The columns that may be wrapped; None for all."""
    continues: bool = False
    """Whether it belongs to the table before it, and has no heading in Markdown."""

    def with_column(self, name: str, cells: Iterable[str], **changes: Any) -> "Table":
        """The table with one more column at its right end, without notes."""
        lines = [
            dataclasses.replace(line, cells=[*line.cells, cell])
            for line, cell in zip(self.lines, cells, strict=True)
        ]
        header = [*self.header, name]
        return dataclasses.replace(self, header=header, lines=lines, notes=(), **changes)

    def columns(self, wanted: Sequence[int], **changes: Any) -> "Table":
        """The table with some of its columns; `changes` are those of other fields."""
        lines = [
            dataclasses.replace(line, cells=[line.cells[i] for i in wanted]) for line in self.lines
        ]
        header = [self.header[i] for i in wanted]
        return dataclasses.replace(self, header=header, lines=lines, **changes)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# --- terminal ------------------------------------------------------------------------------------


def print_tables(tables: Iterable[Table]) -> None:
    """Prints to the terminal, or without colours to a file."""
    from rich import box
    from rich import table as rich_table

    console = terminal()
    wide = console.width >= WIDE
    for table in tables:
        shown = [i for i in range(len(table.header)) if wide or i not in table.only_wide]
        drawn = rich_table.Table(title=table.title, title_justify="left", title_style="bold")
        if not wide:
            drawn.box, drawn.padding, drawn.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
        for i in shown:
            wraps = table.wraps is None or i in table.wraps
            justify = "left" if i in table.left else "right"
            drawn.add_column(table.header[i], justify=justify, no_wrap=not wraps)  # type: ignore[arg-type]
        for line, following in itertools.zip_longest(table.lines, table.lines[1:]):
            ends = following is not None and line.section != following.section
            cells = [printable(line.cells[i]) for i in shown]
            drawn.add_row(*cells, style=line.style, end_section=ends)
        console.print(drawn)
        print_notes(table.notes)


def print_notes(notes: Iterable[str]) -> None:
    """Prints sentences: to the terminal folded, to a file a line each."""
    console = terminal()
    for note in notes:
        console.print(printable(note), soft_wrap=not console.is_terminal)


def terminal() -> Any:
    """Rich's console, of a fixed width for a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(width=_WIDTH_OF_A_FILE, highlight=False, markup=False)


def tracked(
    items: Iterable[T], what: str, total: int | None = None, *, quiet: bool = False
) -> Iterable[T]:
    """The items, with progress: a bar where stderr is a terminal and there is rich, else a line now
    and then."""
    if quiet:
        return items
    total = len(items) if isinstance(items, Sized) else total
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return items if total is None else progress.told(items, what, total)
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, console=Console(stderr=True), transient=True)


# --- Markdown ------------------------------------------------------------------------------------

_INTERVAL = r"\[[\d.]+(?:%|, [\d.]+)\](?![(\[:])"
"""As in "1.79x [1.15, 2.54]" and "[95%]": no link can be meant, and it reads better as it is."""
_OWN_MARKS = r"(?<!\S)~(?=\d)|(?<=\s)\*(?=[\s:]|$)|^\*(?=:)"
"""As in "~1" and "pass *": no letter before it, so that it closes nothing."""
_ACTIVE = re.compile(
    rf"(?P<kept>{_INTERVAL}|{_OWN_MARKS})|[\\`*<>\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#|\w)"
    r"|(?<=\w):(?=//)|(?<=www)\.",
    re.IGNORECASE,
)
"""Characters that Markdown, GitHub's included, takes for markup inside of a line."""
_OPENING = re.compile(r"^(?:\d+(?=[.)])|(?=[-+=#]))")
"""The start of a line that Markdown takes for a list's item or a heading."""


class Markdown(str):
    """Text that is Markdown already, and is not escaped."""

    __slots__ = ()


def escape(text: str) -> Markdown:
    """Text as part of a line of Markdown."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_ACTIVE.sub(lambda m: m[0] if m["kept"] else f"\\{m[0]}", printable(text)))


def escape_block(text: str) -> Markdown:
    """Text at the beginning of a paragraph or of a list's item."""
    return Markdown(_OPENING.sub(lambda match: f"{match[0]}\\", escape(text)))


def code(text: str) -> Markdown:
    """Text as code in a table, between more backticks than it has itself in a row."""
    plain = printable(text).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", plain)), default=0) + 1)
    space = " " if "`" in plain else ""
    return Markdown(f"{fence}{space}{plain}{space}{fence}")


def href(path: Path, folder: Path) -> str:
    """A relative link to a file, from a page in a folder."""
    return urllib.parse.quote(os.path.relpath(path, folder.resolve()).replace(os.sep, "/"))


def markdown(tables: Iterable[Table], heading: str = "###") -> str:
    """Tables below their headings, each with its notes."""
    parts = []
    for table in tables:
        if not table.continues:
            parts += [f"{heading} {escape(table.title)}", ""]
        parts += [markdown_body(table), ""]
        parts += [f"- {escape_block(note)}" for note in table.notes]
        parts += [""] if table.notes else []
    return "\n".join(parts).rstrip()


def markdown_body(table: Table) -> str:
    """The table without heading, notes and links."""
    cells = (
        [code(cell) if getattr(cell, "is_code", False) else escape(cell) for cell in line.cells]
        for line in table.lines
    )
    return markdown_rows(map(escape, table.header), cells, table.left)


def markdown_rows(
    header: Iterable[str], lines: Iterable[Iterable[str]], words: Collection[int] = (0,)
) -> str:
    """A table of cells that are Markdown; all columns but `words` are aligned at the right."""
    names = list(header)
    aligned = ["---" if i in words else "---:" for i in range(len(names))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, aligned, *lines))


def fill_last_column(block: str, cell: Callable[[str], str | None]) -> str:
    """The table in a block of Markdown, empty without one; the last cell of each row is what
    `cell` gives for the row, or stays."""
    lines = [line for line in block.splitlines() if line.startswith("|")]
    for i, row in enumerate(lines[2:], start=2):
        if (text := cell(row)) is not None:
            lines[i] = f"{row.rsplit(' | ', 1)[0]} | {text} |"
    return "\n".join(lines)


# --- HTML ----------------------------------------------------------------------------------------

_TONES = {"red": "bad", "dim": "dim"}
"""Classes of the page's style sheet, by rich's styles."""


def html(table: Table, folder: Path | None) -> str:
    """A <table> with its title as caption, without notes. Links are relative to a folder. Without
    a folder links are left out, and so are columns of nothing but links."""
    if folder is None:
        filled = [i for i in range(len(table.header)) if any(line.cells[i] for line in table.lines)]
        table = table.columns(filled, left=[filled.index(i) for i in table.left if i in filled])
    title = markup.escape(printable(table.title))
    numbers = [' class="number"' * (i not in table.left) for i in range(len(table.header))]
    head = "".join(
        f'<th scope="col"{look}>{markup.escape(name)}</th>'
        for name, look in zip(table.header, numbers, strict=True)
    )
    rows = []
    for line in table.lines:
        tone = f' class="{_TONES[line.style]}"' if line.style in _TONES else ""
        first, *others = (_html_cell(cell, folder) for cell in line.cells)
        cells = "".join(
            f"<td{look}>{cell}</td>" for cell, look in zip(others, numbers[1:], strict=True)
        )
        rows.append(f'<tr{tone}><th scope="row"{numbers[0]}>{first}</th>{cells}</tr>')
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="region" aria-label="{title}" tabindex="0"><table>'
        f"<caption>{title}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _html_cell(cell: str, folder: Path | None) -> str:
    text = markup.escape(printable(cell)) if cell else ""
    if not isinstance(cell, Cell):
        return text
    text = f"<code>{text}</code>" if cell.is_code else text
    text = f'<a href="#{cell.anchor}">{text}</a>' if cell.anchor else text
    return " ".join(filter(None, (text, html_links(cell.links, folder))))


def html_links(links: Iterable[Link], folder: Path | None) -> str:
    if folder is None:
        return ""
    return " ".join(
        f'<a href="{href(link.path, folder)}">{markup.escape(printable(link.text))}</a>'
        for link in links
    )


# --- JSON and CSV --------------------------------------------------------------------------------


def _leaves(item: dict[str, Any]) -> list[dict[str, Any]]:
    """An item, or the entries of the list of records in it, each with the item's other values."""
    for name, value in item.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            head = {k: v for k, v in item.items() if k != name}
            return [head | leaf for entry in value for leaf in _leaves(entry)]
    return [item]


@dataclass(frozen=True)
class Report:
    """The forms in which a comparison is shown and written: `name` is the key of its `items` in
    JSON. CSV has a line for each item, or for each entry of the lists inside of it."""

    name: str
    tables: list[Table]
    items: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        head = {"schema_version": SCHEMA_VERSION, "created": results.now()}
        return head | {self.name: self.items}

    def as_csv(self) -> str:
        """All values but records and sentences."""
        text, lines = io.StringIO(), [line for item in self.items for line in _leaves(item)]
        left_out = {k for line in lines for k, v in line.items() if isinstance(v, dict)}
        left_out.add("plausibility")
        names = [name for name in dict.fromkeys(itertools.chain(*lines)) if name not in left_out]
        writer = csv.DictWriter(text, names, extrasaction="ignore")
        writer.writeheader()
        for line in lines:
            texts = {k: printable(v) for k, v in line.items() if isinstance(v, str)}
            writer.writerow(line | texts)
        return text.getvalue()

    def show(self, form: str) -> None:
        if form == "json":
            print(json.dumps(self.as_json(), indent=1, allow_nan=False))
        elif form == "csv":
            print(self.as_csv(), end="")
        elif form == "markdown":
            print(markdown(self.tables))
        else:
            print_tables(self.tables)
