"""The folder that a runner fills with a profile: what it leaves there beside the tool's outputs."""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workshop import errors, results
from workshop.errors import WorkshopError

COMMAND_FILE = "command.txt"
"""In every folder that a runner fills: what was run. profile_lib.sh writes it, and profile_run for
Python. A folder may be replaced if its first line begins with COMMAND_MARK."""
COMMAND_MARK = "# run_"
RUN_FILE = "run.jsonl"
"""The record of what was profiled: a results.RunResult, or a labs.LabRun."""


def fill(folder: Path, command: str, work: Callable[[], int]) -> int:
    """Does the work of a runner in Python whose outputs go to a folder, as profile_lib.sh does
    those of the others: empties the folder, and writes COMMAND_FILE; the exit status."""
    results.prepare_folder(folder)
    with locked(folder):
        _empty(folder)
        record = f"# {Path(shlex.split(command)[1]).name}\n{command}\n"
        results.write_text(folder / COMMAND_FILE, record)
        status = errors.ANSWER_IS_NO  # as of an unexpected error
        try:
            status = work()
        except WorkshopError as error:
            status = error.exit_code
            raise
        except KeyboardInterrupt:
            print(f"interrupted: {folder} is not complete", file=sys.stderr)
            status = errors.INTERRUPTED
        finally:
            results.write_text(folder / COMMAND_FILE, f"{record}# exit status {status}\n")
    return status


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, in which two would mix their files, by a lock on a file
    beside it, which ends with the process at the latest. profile_lib.sh does the same."""
    from filelock import FileLock, Timeout

    folder = folder.resolve()
    path = folder.parent / f".{folder.name}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise WorkshopError(
            f"another run is filling {folder}: wait for it, or choose another --output-dir"
        ) from None
    except (OSError, NotImplementedError):  # no right to write there, or no locks in it
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _empty(folder: Path) -> None:
    """Deletes what a runner has left in a folder. Raises WorkshopError: no runner filled it."""
    mark = folder / COMMAND_FILE
    by_a_runner = mark.is_file() and mark.read_bytes().startswith(COMMAND_MARK.encode())
    if any(folder.iterdir()) and not by_a_runner:
        raise WorkshopError(
            f"--output-dir {folder}: it is not empty, and no profiler's script filled it; "
            "choose another one"
        )
    # The mark goes last: deleting can be interrupted too.
    for path in folder.iterdir():
        if path != mark:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
