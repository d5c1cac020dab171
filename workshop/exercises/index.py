"""The exercises as Markdown tables, which `make docs` writes into the documents."""

import os
from collections.abc import Sequence
from pathlib import Path

from workshop.exercises.sheet import LAB, SESSIONS, TAKE_HOME, Sheet


def tables(sheets: Sequence[Sheet], folder: Path) -> str:
    """A table a session, with its minutes added up.

    Args:
        sheets: in their order.
        folder: of the document, from which links start.
    """
    its = {number: [s for s in sheets if s.session == number] for number in SESSIONS}
    return "\n\n".join(_session(number, found, folder) for number, found in its.items() if found)


def _session(number: int, sheets: Sequence[Sheet], folder: Path) -> str:
    name = {TAKE_HOME: "To take home", LAB: "The labs"}.get(number, f"Session {number}")
    lines = [
        f"### {name}: {sum(one.minutes for one in sheets)} minutes",
        "",
        "| exercise | what | minutes | needs | kind |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for one in sheets:
        cells = (_link(one, folder), one.title, str(one.minutes), one.needs, one.kind)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def of_version(sheets: Sequence[Sheet], folder: Path) -> str:
    """One table of a version's exercises, for the document in its folder; one line if it has
    none."""
    if not sheets:
        return "It has no exercises."
    lines = ["| exercise | what | when | minutes |", "| --- | --- | --- | ---: |"]
    for one in sheets:
        lines.append(f"| {_link(one, folder)} | {one.title} | {one.when} | {one.minutes} |")
    return "\n".join(lines)


def _link(sheet: Sheet, folder: Path) -> str:
    return f"[{sheet.name}]({Path(os.path.relpath(sheet.folder, folder)).as_posix()}/)"
