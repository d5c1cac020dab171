"""Errors in a participant's file, each in one line with the line of the file."""

import traceback
from collections.abc import Iterator
from pathlib import Path

from workshop import versions
from workshop.errors import NotOnThisMachine, WorkshopError, printable
from workshop.exercises.answers import Unanswered
from workshop.exercises.frame import Item, Missing, Work

_MOST = 400
"""Characters of an error's text that are shown."""


def as_item(error: BaseException, work: Work) -> Item:
    """The red Item of an error which ended a check, or a part of one."""
    if isinstance(error, Unanswered):
        return Item(False, f"not answered yet: {error}")
    if isinstance(error, Missing):
        return Item(False, error.what, error.command)
    if isinstance(error, WorkshopError):
        return Item(False, printable(str(error)))
    if isinstance(error, SyntaxError) and error.filename == str(work.mine_path):
        code = f": {printable(error.text)}" if error.text and error.text.strip() else ""
        line = f", line {error.lineno}" if error.lineno else ""
        return Item(False, f"{work.mine_path.name}{line} is no Python", f"{error.msg}{code}")
    if isinstance(error, AttributeError) and getattr(error.obj, "__file__", "") == str(
        work.mine_path
    ):
        return Item(False, f"{work.mine_path.name} has no {error.name}", "keep the starter's names")
    return _of_running(error, work)


def missing(error: BaseException) -> NotOnThisMachine | None:
    """Names what this machine lacks, if the error comes from that."""
    if isinstance(error, NotOnThisMachine):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return NotOnThisMachine(versions.missing(versions.VERSIONS["v3"]) or str(error))
    return None


def _of_running(error: BaseException, work: Work) -> Item:
    """An error of code that ran: the participant's innermost line has the blame, if any."""
    blamed = [
        (link, found) for link in _chain(error) if (found := _innermost(link, work.mine_path))
    ]
    if not blamed:
        place = _innermost(error, work.folder / "check.py")
        return Item(False, "the check could not go on", f"{_text(error)} ({place or 'check.py'})")
    cause, where = blamed[-1]
    if isinstance(cause, NotImplementedError):
        return Item(False, f"not written yet: {where}", printable(str(cause)[:_MOST]))
    if isinstance(cause, SystemExit):
        return Item(False, f"{where} ends Python", "leave out sys.exit(): the check goes on after")
    return Item(False, where, _text(cause))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from: Triton's interpreter wraps a kernel's own."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _innermost(error: BaseException, path: Path) -> str:
    """The last line of a file that an error went through, in words; "" for none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if not frames:
        return ""
    last = frames[-1]
    function = "" if last.name == "<module>" else f", in {last.name}"
    return f"{path.name}, line {last.lineno}{function}"


def _text(error: BaseException) -> str:
    text = printable(str(error)[:_MOST]) if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
