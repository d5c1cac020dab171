"""The commands of the exercises, and their output."""

import argparse
import difflib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from workshop import errors
from workshop.errors import WorkshopError, printable
from workshop.exercises import runner, sheet
from workshop.exercises.frame import Item
from workshop.exercises.progress import Progress
from workshop.exercises.runner import Outcome
from workshop.exercises.sheet import README, Sheet
from workshop.versions import ROOT

COMMAND = "python -m workshop.exercises"
_TYPED = re.compile(r"python |\S+\.(sh|py)( |$)")
"""How commands begin that are to be typed."""


def run(arguments: argparse.Namespace, root: Path) -> int:
    """Runs one command; its exit status.

    Raises:
        WorkshopError: there is no such exercise.
    """
    progress, sheets = Progress(arguments.results_dir), sheet.read_all(root)
    if arguments.command in ("list", "progress"):
        return _show(Group(_table(sheets, progress), "", _what_comes_next(sheets, progress)))
    name, known = arguments.name, [one.name for one in sheets]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0))
        raise WorkshopError(
            f"no exercise is called {name!r}; the nearest: {near}; all of them: {COMMAND}"
        )
    one = sheets[known.index(name)]
    if arguments.command == "hint":
        return _show(_next_hint(one, progress))
    if arguments.command == "reset":
        kept = sheet.set_aside(one.folder)
        progress.forget(one.name)
        return _show(_begun(one, sheet.make_copies(one.folder), kept))
    made = sheet.make_copies(one.folder)
    if made:
        _show(_begun(one, made))
        return errors.ANSWER_IS_NO
    with Console(stderr=True).status(f"checking {one.name} ..."):
        outcome = runner.run(one.folder, results=arguments.results_dir, limit_s=arguments.limit)
    off = {item.what for item in outcome.items if item.at_first}
    new = off - set(progress[one.name].missed)
    progress.miss(one.name, off)
    _show(_verdict(one, outcome, new))
    if outcome.missing is not None:
        return errors.NOT_ON_THIS_MACHINE
    progress.checked(one.name, outcome.green, outcome.green + outcome.red)
    if not outcome.passed:
        return errors.ANSWER_IS_NO
    return _show(_what_comes_next(sheets, progress, behind=one.name))


# --- output --------------------------------------------------------------------------------------


def _show(what: RenderableType) -> int:
    Console(highlight=False).print(what, crop=False)
    return errors.DONE


def _table(sheets: Sequence[Sheet], progress: Progress) -> Table:
    """All exercises, by session; each session with its minutes, and how many are passed."""
    drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for justify in ("left", "right", "left"):
        drawn.add_column(justify=justify, no_wrap=True)
    for session, group in itertools.groupby(sheets, key=lambda one: one.when):
        its = list(group)
        passed = sum(progress[one.name].passed is not None for one in its)
        minutes = f"{sum(one.minutes for one in its)} min"
        drawn.add_row(session, minutes, "", f"{passed} of {len(its)} passed", style="bold")
        for one in its:
            state = progress[one.name]
            green = f"{state.green} green" if state.checks else ""
            drawn.add_row(
                f"  {one.name}",
                f"{one.minutes} min",
                Text("passed", style="green") if state.passed else Text(green, style="yellow"),
                one.title + (" (GPU is better)" if "better" in one.needs else ""),
            )
    return drawn


def _what_comes_next(sheets: Sequence[Sheet], progress: Progress, behind: str = "") -> Text:
    """The first open exercise; behind a name, the first one behind it, if any is open there."""
    start = [one.name for one in sheets].index(behind) + 1 if behind else 0
    in_turn = (*sheets[start:], *sheets[:start])
    left = next((one for one in in_turn if not progress[one.name].passed), None)
    if left is None:
        return Text("All exercises are passed.", style="green")
    where = _from_root(left.folder / README)
    return Text.assemble("Next: ", (left.name, "bold"), f", {left.minutes} minutes, {where}")


def _from_root(path: Path) -> str:
    """A path as a participant in the repository's root would type it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _begun(one: Sheet, made: Sequence[Path], kept: Sequence[Path] = ()) -> Text:
    """Says what to do with new copies, and where the old ones are."""
    text = Text.assemble((one.title, "bold"), "\n")
    for word, paths in (("kept", kept), ("made", made)):
        text.append("".join(f"  {word} {_from_root(path)}\n" for path in paths))
    fill = {".py": "write what is missing", ".toml": "answer the questions"}
    todo = " and ".join(fill[path.suffix] for path in made)
    text.append(f"Read {_from_root(one.folder / README)}, {todo}, and then:\n")
    return text.append(f"  {COMMAND} check {one.name}", style="bold")


def _verdict(one: Sheet, outcome: Outcome, new: set[str]) -> Group:
    """Every Item of a check, and what to do about the red ones; `new` are those that are off for
    the first time."""
    lines: list[RenderableType] = [Text(one.title, style="bold")]
    for item in outcome.items:
        hides = item.what in new and not outcome.passed
        lines += _item(item, item.at_first if hides else item.why)
    if outcome.printed and not outcome.passed:
        lines.append(Text("Printed meanwhile, at the end:", style="dim"))
        lines += [_indented(line, style="dim") for line in outcome.printed]
    if outcome.missing is not None:
        lines.append(Text(f"Not on this machine: {printable(outcome.missing)}", style="yellow"))
    elif outcome.passed:
        unjudged = sum(not item.counted for item in outcome.items)
        lines.append(Text(f"Passed: all {outcome.green} green", style="bold green"))
        if unjudged:
            lines.append(Text(f"Not judged: {unjudged} marked --", style="yellow"))
    else:
        # No total: what a red Item holds back is not known yet.
        lines.append(Text(f"{outcome.green} green, {outcome.red} red", style="bold red"))
        lines.append(Text(f"Stuck? {COMMAND} hint {one.name}"))
    return Group(*lines)


def _item(item: Item, why: str) -> list[RenderableType]:
    mark = Text("ok", style="green") if item.ok else Text("no", style="bold red")
    mark = mark if item.counted else Text("--", style="yellow")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(mark, Text(printable(item.what)))
    return [grid, *(_indented(line) for line in why.splitlines())]


def _indented(line: str, style: str = "") -> RenderableType:
    line = printable(line)
    if _TYPED.match(line):  # to be copied: a separate line, however long
        return Text(f"    {line}", style=style, no_wrap=True, overflow="ignore")
    return Padding(Text(line, style=style), (0, 0, 0, 4), expand=False)


def _next_hint(one: Sheet, progress: Progress) -> Group:
    """The next hint, the last one again and again, and what follows it."""
    if not one.hints:
        raise WorkshopError(f"{one.name} has no hints: its sheet is all there is")
    number = min(progress[one.name].hints, len(one.hints) - 1)
    progress.hinted(one.name)
    left = len(one.hints) - number - 1
    last = f"that is the last one; the solution: exercises/solutions/{one.name}/"
    return Group(
        Text(f"{one.title} - {one.hints[number].title.lower()}", style="bold"),
        Markdown(one.hints[number].text),
        Text(f"({left} more: type it again)" if left else f"({last})", style="dim"),
    )
