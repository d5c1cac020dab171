"""Output of the exercises' commands."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from workshop.errors import printable
from workshop.exercises.frame import Item
from workshop.exercises.progress import Progress, State
from workshop.exercises.runner import Outcome
from workshop.exercises.sheet import README, SESSIONS, Sheet, session_name
from workshop.versions import ROOT

COMMAND = "python -m workshop.exercises"
_TYPED = re.compile(r"python |\S+\.(sh|py)( |$)")
"""How commands begin that are to be typed."""


def show(what: RenderableType) -> None:
    Console(highlight=False).print(what, crop=False)


def waiting(what: str) -> AbstractContextManager[object]:
    """Shows that something is at work, in a terminal; elsewhere nothing."""
    return Console(stderr=True).status(what)


def table(sheets: Sequence[Sheet], progress: Progress) -> Table:
    """All exercises, by session."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("session", "exercise", "min", "GPU", "kind", "so far"):
        drawn.add_column(column, justify="right" if column == "min" else "left", no_wrap=True)
    before = 0
    for sheet in sheets:
        first = sheet.session != before
        if first and before:
            drawn.add_row()
        before = sheet.session
        drawn.add_row(
            session_name(sheet.session).removeprefix("session ") if first else "",
            sheet.name,
            str(sheet.minutes),
            "better" if sheet.needs == "better with a GPU" else "",
            sheet.kind,
            _so_far(progress[sheet.name]),
        )
    return drawn


def _so_far(state: State) -> Text:
    if state.passed:
        return Text("passed", style="green")
    return Text(f"{state.green} of {state.items}" if state.checks else "", style="yellow")


def summary(sheets: Sequence[Sheet], progress: Progress) -> Group:
    """A line a session, and what comes next."""
    lines = Table(box=None, pad_edge=False, show_header=False)
    for number in SESSIONS:
        its = [sheet for sheet in sheets if sheet.session == number]
        if its:
            passed = sum(progress[sheet.name].passed is not None for sheet in its)
            lines.add_row(
                session_name(number), _bar(passed, len(its)), f"{passed} of {len(its)} passed"
            )
    return Group(lines, "", what_comes_next(sheets, progress))


def _bar(done: int, of: int) -> Text:
    return Text("#" * done, style="green") + Text("-" * (of - done), style="dim")


def what_comes_next(sheets: Sequence[Sheet], progress: Progress, behind: str = "") -> Text:
    """The first open exercise; behind a name, the first one behind it, if any is open there."""
    names = [sheet.name for sheet in sheets]
    start = names.index(behind) + 1 if behind else 0
    in_turn = (*sheets[start:], *sheets[:start])
    left = next((sheet for sheet in in_turn if not progress[sheet.name].passed), None)
    if left is None:
        return Text("All exercises are passed.", style="green")
    return Text.assemble(
        "Next: ", (left.name, "bold"), f", {left.minutes} minutes, {_typed(left.folder / README)}"
    )


def _typed(path: Path) -> str:
    """A path as a participant in the repository's root would type it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def begun(sheet: Sheet, made: Sequence[Path], kept: Sequence[Path] = ()) -> Text:
    """Says what to do with new copies, and where the old ones are."""
    text = Text.assemble((sheet.title, "bold"), "\n")
    text.append("".join(f"  kept {_typed(path)}\n" for path in kept))
    text.append("".join(f"  made {_typed(path)}\n" for path in made))
    fill = {".py": "write what is missing", ".toml": "answer the questions"}
    todo = " and ".join(fill[path.suffix] for path in made)
    text.append(f"Read {_typed(sheet.folder / README)}, {todo}, and then:\n")
    return text.append(f"  {COMMAND} check {sheet.name}", style="bold")


def verdict(sheet: Sheet, outcome: Outcome) -> Group:
    """Every Item of a check, and what to do about the red ones."""
    lines: list[RenderableType] = [Text(sheet.title, style="bold")]
    for item in outcome.items:
        lines += _item(item)
    if outcome.printed and not outcome.passed:
        lines.append(Text("Printed meanwhile, at the end:", style="dim"))
        lines += [_indented(line, style="dim") for line in outcome.printed]
    green, total = sum(item.ok for item in outcome.items), len(outcome.items)
    if outcome.missing is not None:
        lines.append(Text(f"Not on this machine: {printable(outcome.missing)}", style="yellow"))
    elif outcome.passed:
        lines.append(Text(f"Passed: {total} of {total} green", style="bold green"))
    else:
        lines.append(Text(f"{green} of {total} green", style="bold red"))
        lines.append(Text(f"Stuck? {COMMAND} hint {sheet.name}"))
    return Group(*lines)


def _item(item: Item) -> list[RenderableType]:
    mark = Text("ok", style="green") if item.ok else Text("no", style="bold red")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(mark, Text(printable(item.what)))
    return [grid, *(_indented(line) for line in item.why.splitlines())]


def _indented(line: str, style: str = "") -> RenderableType:
    line = printable(line)
    if _TYPED.match(line):  # to be copied: a line of its own, however long
        return Text(f"    {line}", style=style, no_wrap=True, overflow="ignore")
    return Padding(Text(line, style=style), (0, 0, 0, 4), expand=False)


def hint(sheet: Sheet, number: int) -> Group:
    """A hint, counted from 0, and what follows it."""
    one, left = sheet.hints[number], len(sheet.hints) - number - 1
    if left:
        more = f"{left} more: type it again"
    else:
        more = f"that is the last one; the solution: exercises/solutions/{sheet.name}/"
    return Group(
        Text(f"{sheet.title}: {one.title.lower()}", style="bold"),
        Markdown(one.text),
        Text(f"({more})", style="dim"),
    )
