"""The errors that a user can fix, and the exit codes of every tool."""

import atexit
import contextlib
import importlib.util
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

DONE = 0
ANSWER_IS_NO = 1  # the gate failed, a regression was found, a run ran out of memory
WRONG_USAGE = 2
NOT_ON_THIS_MACHINE = 77
INTERRUPTED = 130
_ROOT = Path(__file__).resolve().parents[1]


class WorkshopError(Exception):
    """Something the user can fix; its text is one line: what, where, what to do.

    Command lines print it on stderr and exit with `exit_code`, without a traceback.
    """

    exit_code = WRONG_USAGE


class NotOnThisMachine(WorkshopError):
    """The machine does not have what was asked for: a run of many counts this one as skipped."""

    exit_code = NOT_ON_THIS_MACHINE


class OutOfMemory(WorkshopError):
    """The device has less memory than a run of this size needs."""

    exit_code = ANSWER_IS_NO


def begin() -> None:
    """For a program to call before the imports that take seconds: it ends without a traceback.

    From now on Ctrl-C ends the process at once, with a line and status INTERRUPTED, except where
    `exit_status` has it raise KeyboardInterrupt: raised in an import, that may be taken for a
    package that is broken. And output that is not read to its end, as that of `--help | head -1`,
    is no error when Python ends.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave)
    atexit.register(_flush_at_exit)


def _leave(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _flush_at_exit() -> None:
    try:
        _flush()
    except BrokenPipeError:
        discard_output()


def _flush() -> None:
    if sys.stdout is not None:  # as after `>&-`
        sys.stdout.flush()


def discard_output() -> None:
    """For what is left of an output that is no longer read."""
    # Python writes what is left of the output when it ends, and would complain once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_status(work: Callable[[], int], *, interrupted: str) -> int:
    """Does a command's work; its exit status. An error that the user can fix, an operator that
    --deterministic refuses, Ctrl-C, SIGTERM and a full disk become one line on stderr. What stdout
    can't encode is printed as `?`. Where the output is not read to its end, as in
    `... | head -1`, the command ends at once, with status 1 as rich has it.

    Args:
        interrupted: what to say of Ctrl-C or SIGTERM, above all what is saved.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with _signals_raise():
            status = work()
            _flush()
        return status
    except WorkshopError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return ANSWER_IS_NO
    except RuntimeError as error:
        if not (line := _not_deterministic(error)):
            raise
        print(f"error: {printable(line)}", file=sys.stderr)
        return ANSWER_IS_NO
    except OSError as error:  # such as a full disk, or a name of 300 letters
        what = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {printable(f'{what}{error.strerror or error}')}", file=sys.stderr)
        return WRONG_USAGE


def _not_deterministic(error: RuntimeError) -> str:
    """Names the operator that PyTorch refused, and the line of ours that called it; "" for another
    error."""
    match = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if not match:
        return ""
    own = [
        (place, call)
        for call in traceback.extract_tb(error.__traceback__)
        if not (place := os.path.relpath(call.filename, _ROOT)).startswith("..")
        and "site-packages" not in place
    ]
    place, call = own[-1]  # `exit_status` is one
    where = f"{place}, line {call.lineno}, in {call.name}"
    return f"--deterministic: {match[1]} has no deterministic form ({where}): leave the flag out"


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """In the block Ctrl-C (after `begin` too) and SIGTERM, with which a batch system ends a job,
    raise KeyboardInterrupt. What comes after a SIGTERM is ignored: the system may send it twice,
    and the first one's answer is to save.
    """
    if threading.current_thread() is not threading.main_thread():  # which may not set handlers
        yield
        return

    def end(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        # The system ends a DataLoader's workers, too, and its handler of that would raise as well.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def printable(text: str) -> str:
    """The text in one line, without the characters that steer a terminal or can't be encoded;
    U+FFFD where it is nothing but such."""
    if text.isprintable():
        return text
    kept = (c if c.isprintable() else " " if c.isspace() else "" for c in text)
    return " ".join("".join(kept).split()) or "\ufffd"


_OTHER_NAMES = {"PIL": "pillow", "cv2": "opencv-python-headless", "pptx": "python-pptx",
                "sklearn": "scikit-learn"}  # fmt: skip
"""pip's names of packages that are imported under another name."""


_NOT_IN_SETUP = ("transformers", "tokenizers", "safetensors", "deepspeed", "accelerate",
                 "bitsandbytes", "vllm", "selenium")  # fmt: skip
"""Packages that are large, or of few."""


def require(*packages: str, instead: str = "") -> None:
    """Raises NotOnThisMachine where a package is missing that the work can't do without.

    Args:
        instead: another way to do the work, which the message ends with.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        setup = "" if set(missing) <= {*_NOT_IN_SETUP} else "run `make setup`, or "
        other = f", or {instead}" if instead else ""
        raise NotOnThisMachine(
            f"{' and '.join(missing)} {verb} missing: {setup}pip install "
            f"{' '.join(_OTHER_NAMES.get(name, name) for name in missing)}{other}"
        )
