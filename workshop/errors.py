"""The errors that a user can mend, and the exit codes of every tool."""

import importlib.util
import os
import sys
from collections.abc import Callable

DONE = 0
ANSWER_IS_NO = 1  # the gate is red, a regression was found, a run ran out of memory
WRONG_USAGE = 2
NOT_ON_THIS_MACHINE = 77
INTERRUPTED = 130


class WorkshopError(Exception):
    """Something the user can mend; its text is one line: what, where, what to do.

    Command lines print it on stderr and exit with `exit_code`, without a traceback.
    """

    exit_code = WRONG_USAGE


class NotOnThisMachine(WorkshopError):
    """The machine lacks what was asked for: whoever runs many counts this one as skipped."""

    exit_code = NOT_ON_THIS_MACHINE


class OutOfMemory(WorkshopError):
    """The device has not the memory that a run of this size asks for."""

    exit_code = ANSWER_IS_NO


def exit_status(work: Callable[[], int], *, interrupted: str) -> int:
    """Does a command's work; its exit status. An error that the user can mend, and Ctrl-C, become
    one line on stderr. Where nobody reads the output to its end, as in `... | head -1`, the
    command ends at once, with status 1 as rich has it.

    Args:
        interrupted: what to say of Ctrl-C, above all what is saved.
    """
    try:
        status = work()
        sys.stdout.flush()
        return status
    except WorkshopError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python writes what is left of the output when it ends, and would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ANSWER_IS_NO


def printable(text: str) -> str:
    """The text in one line, without the characters that steer a terminal or can't be encoded;
    U+FFFD where it is nothing but such."""
    if text.isprintable():
        return text
    kept = (c if c.isprintable() else " " if c.isspace() else "" for c in text)
    return " ".join("".join(kept).split()) or "\ufffd"


def require(*packages: str) -> None:
    """Raises NotOnThisMachine where a package is missing that the work can't do without."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise NotOnThisMachine(
            f"{' and '.join(missing)} {verb} missing: run `make setup`, or pip install "
            f"{' '.join(missing)}"
        )
