"""Runs an exercise's check in a separate process, with limits of time and of a file's size.

What the process finds it writes to a file, an Item a line: so what it had found is known, too,
if the participant's code never ends, ends Python, or brings it down.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from workshop.errors import NotOnThisMachine
from workshop.exercises import frame
from workshop.exercises.frame import Item, Work
from workshop.run import processes, waiting
from workshop.versions import ROOT

LIMIT_S = 120.0
"""Several times what the longest check takes on a quiet machine."""
_GRACE_S = 10.0
"""Time for the process to end by itself, which shows the line that it was at."""
_ITEMS, _STACK, _PRINTED = "items.jsonl", "stack.txt", "printed.txt"
_DONE, _MISSING = "done", "missing"
_MOST_PRINTED = 20
"""Lines of what the participant's code printed that are shown."""
_MOST_READ = 1 << 16
_MOST_WRITTEN = 10**9
"""Bytes of a file, and so of all that is printed: torch.compile's header alone takes 150 MB."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a check."""

    items: list[Item]
    missing: str | None = None
    """Names what is missing here for it; None if nothing."""
    printed: list[str] = dataclasses.field(default_factory=list)
    """The last lines of what the participant's code printed."""

    @property
    def passed(self) -> bool:
        return self.missing is None and self.green > 0 and not self.red

    @property
    def green(self) -> int:
        return sum(item.ok and item.counted for item in self.items)

    @property
    def red(self) -> int:
        return sum(not item.ok for item in self.items)


# --- outside -------------------------------------------------------------------------------------


def run(
    folder: Path,
    *,
    mine: Path | None = None,
    answers: Path | None = None,
    results: Path = frame.RESULTS,
    limit_s: float,
) -> Outcome:
    """Checks an exercise.

    Args:
        folder: of the exercise.
        mine, answers: the participant's files, if they are not the folder's own.
        results: below which the participant's result files are.
        limit_s: seconds from the start of the process.
    """
    work = Work(folder, mine=mine, answers=answers, results=results)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        status = _run_process(work, place, limit_s)
        items, done, missing = [], False, None
        for line in _read(place / _ITEMS).splitlines():
            record = json.loads(line)
            missing = record.get(_MISSING, missing)
            done = done or _DONE in record
            if record.keys().isdisjoint((_MISSING, _DONE)):
                items.append(Item(**record))
        if not done:
            items.append(_broken_off(work, _read(place / _STACK), status, limit_s))
        printed = [line for line in _read(place / _PRINTED).splitlines() if line.strip()]
        return Outcome(items, missing, printed[-_MOST_PRINTED:])


def _run_process(work: Work, place: Path, limit_s: float) -> int | None:
    """The process's exit status; None if its time was over."""
    paths = (work.folder, work.mine_path, work.answers_path, work.results, place)
    # -u: what it printed is there however it ends.
    command = [sys.executable, "-u", "-m", __spec__.name]
    with (place / _PRINTED).open("wb") as printed:
        process = subprocess.Popen(
            [*command, *(str(path.resolve()) for path in paths)],
            cwd=ROOT,
            env=os.environ | waiting.short_spin(),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with processes.ended_with_us(process):
            try:
                return process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler notes the line that it was at
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_GRACE_S)
                return None
    finally:
        processes.kill_group(process)


def _read(path: Path) -> str:
    """The end of a file's text; "" without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        if path.name == _PRINTED:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_READ))
        return file.read().decode("utf-8", errors="replace")


def _broken_off(work: Work, stack: str, status: int | None, limit_s: float) -> Item:
    """The red Item of a process that did not come to its end, with the line that it was at."""
    # Python writes a stack in ASCII.
    path = str(work.mine_path.resolve()).encode("ascii", "backslashreplace").decode()
    at = re.search(rf'File "{re.escape(path)}", line (\d+) in (\S+)', stack)
    where = "the check"
    if at:
        function = "" if at[2] == "<module>" else f", in {at[2]}"
        where = f"{work.mine_path.name}, line {at[1]}{function}"
    if status is None:
        why = "Does a loop never end? For a slow machine: --limit 600"
        return Item(False, f"{where}: still running after {limit_s:.0f} s", why)
    if status < 0:
        why = "out of memory?" if -status == signal.SIGKILL else ""
        return Item(False, f"{where}: Python was ended by {signal.Signals(-status).name}", why)
    return Item(False, f"{work.mine_path.name}: Python ended with status {status}")  # os._exit


# --- inside --------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Writes an Item a line, and ends the process without waiting for threads."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    for name in ("folder", "mine", "answers", "results", "place"):
        parser.add_argument(name, type=Path)
    a = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = _MOST_WRITTEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_WRITTEN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (a.place / _STACK).open("w") as stack, (a.place / _ITEMS).open("w") as file:
        faulthandler.enable(stack)
        work = Work(a.folder, mine=a.mine, answers=a.answers, results=a.results)

        def write(record: dict[str, object]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        try:
            for item in check_here(work):
                write(dataclasses.asdict(item) | {"ok": bool(item.ok)})  # a tensor's truth, too
        except NotOnThisMachine as error:
            write({_MISSING: str(error)})
        write({_DONE: True})
    os._exit(0)  # a thread of the participant's may never end


def check_here(work: Work) -> Iterator[Item]:
    """The Items of an exercise's check, in this process.

    Raises:
        NotOnThisMachine: the check, or what it uses, says so.
    """
    import torch

    if not torch.cuda.is_available():  # before Triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(work.folder), str(work.folder.parents[1])]  # the version's folder
    yield from work.each(lambda work: frame.import_file(work.folder / frame.CHECK).check(work))


if __name__ == "__main__":
    main()
