"""Names and sentences from files as Markdown shows them, so that none becomes markup."""

import re
from collections.abc import Callable, Collection, Iterable

from workshop.errors import printable

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
    """Text that is Markdown already."""

    __slots__ = ()


def escape(text: str) -> Markdown:
    """Text as part of a line."""
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


def table(
    header: Iterable[str], lines: Iterable[Iterable[str]], words: Collection[int] = (0,)
) -> str:
    """A table of cells that are Markdown; all columns but `words` are aligned at the right."""
    names = list(header)
    aligned = ["---" if i in words else "---:" for i in range(len(names))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, aligned, *lines))


def fill_last_column(block: str, cell: Callable[[str], str | None]) -> str:
    """The table in a block of text, empty without one; the last cell of each row is what
    `cell` gives for the row, or stays."""
    lines = [line for line in block.splitlines() if line.startswith("|")]
    for i, row in enumerate(lines[2:], start=2):
        if (text := cell(row)) is not None:
            lines[i] = f"{row.rsplit(' | ', 1)[0]} | {text} |"
    return "\n".join(lines)
