"""Runs an exercise's check in a process of its own, with limits of time and of what it writes.

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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from workshop.errors import NotOnThisMachine
from workshop.exercises import frame
from workshop.exercises.frame import Item, Work
from workshop.exercises.sheet import CHECK
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
"""Bytes that the process may print and write in all: torch.compile's header alone takes 150 MB."""
_LOOK_S = 0.1
"""How often its writes are counted."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a check."""

    items: list[Item]
    missing: str | None = None
    """Names what this machine lacks for it; None if nothing."""
    printed: list[str] = dataclasses.field(default_factory=list)
    """The last lines of what the participant's code printed."""

    @property
    def passed(self) -> bool:
        return self.missing is None and bool(self.items) and all(item.ok for item in self.items)


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
        results: below which the participant's result files lie.
        limit_s: seconds from the start of the process.
    """
    work = Work(folder, mine=mine, answers=answers, results=results)
    with tempfile.TemporaryDirectory() as place:
        return _run_process(work, Path(place), limit_s)


def _run_process(work: Work, place: Path, limit_s: float) -> Outcome:
    paths = (work.folder, work.mine_path, work.answers_path, work.results, place)
    # -u: what it printed is there however it ends.
    command = [sys.executable, "-u", "-m", __spec__.name]
    command += [str(path.resolve()) for path in paths]
    with (place / _PRINTED).open("wb") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | waiting.short_spin(),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with processes.ended_with_us(process):
                problem, why = _wait(process, limit_s)
        finally:
            processes.kill_group(process)
    items, done, missing = [], False, None
    lines = (place / _ITEMS).read_text(encoding="utf-8") if (place / _ITEMS).is_file() else ""
    for line in lines.splitlines():
        record = json.loads(line)
        if _MISSING in record:
            missing = record[_MISSING]
        elif _DONE in record:
            done = True
        else:
            items.append(Item(**record))
    if not done:
        items.append(_broken_off(work, place, problem, why, process.returncode))
    return Outcome(items, missing, _last_printed(place))


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> tuple[str, str]:
    """Waits until the process ends, has written too much, or its time is over; in that case what is
    wrong, and why it may be."""
    deadline, why = time.monotonic() + limit_s, "Does a loop never end?"
    problem = ""
    while not problem:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_LOOK_S)
            return "", ""
        if _written(process.pid) > _MOST_WRITTEN:
            problem = f"wrote more than {_MOST_WRITTEN // 10**6:,} MB"
        elif time.monotonic() > deadline:
            problem = f"still running after {limit_s:.0f} s"
            why += " For a slow machine: --limit 600"
    process.send_signal(signal.SIGABRT)  # faulthandler notes the line that it was at
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE_S)
    return problem, why


def _written(process: int) -> int:
    """Bytes that a process has written, to any file; 0 where the system does not say."""
    try:
        counts = Path(f"/proc/{process}/io").read_text(encoding="utf-8")
    except OSError:  # not Linux, or the process has just ended
        return 0
    found = re.search(r"wchar: (\d+)", counts)
    return int(found[1]) if found else 0


def _broken_off(work: Work, place: Path, problem: str, why: str, status: int) -> Item:
    """The red Item of a process that did not come to its end."""
    written = (place / _STACK).is_file()
    stack = (place / _STACK).read_text(encoding="utf-8", errors="replace") if written else ""
    # Python writes a stack in ASCII.
    path = str(work.mine_path.resolve()).encode("ascii", "backslashreplace").decode()
    at = re.search(rf'File "{re.escape(path)}", line (\d+) in (\S+)', stack)
    where = "the check"
    if at:
        function = "" if at[2] == "<module>" else f", in {at[2]}"
        where = f"{work.mine_path.name}, line {at[1]}{function}"
    if not problem and status < 0:
        problem = f"Python was ended by {signal.Signals(-status).name}"
        why = "out of memory?" if -status == signal.SIGKILL else ""
    elif not problem:  # os._exit, which leaves no stack
        where, problem = work.mine_path.name, f"Python ended with status {status}"
    return Item(False, f"{where}: {problem}", why)


def _last_printed(place: Path) -> list[str]:
    with (place / _PRINTED).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_READ))
        text = file.read().decode("utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_MOST_PRINTED:]


# --- inside --------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Writes an Item a line, and ends the process without waiting for threads."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    for name in ("folder", "mine", "answers", "results", "place"):
        parser.add_argument(name, type=Path)
    a = parser.parse_args(argv)
    _limit_files()
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of the participant's may never end


def _limit_files() -> None:
    """Limits the size of a file of this process and of those that it starts; no core dumps."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = _MOST_WRITTEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_WRITTEN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def check_here(work: Work) -> Iterator[Item]:
    """The Items of an exercise's check, in this process.

    Raises:
        NotOnThisMachine: the check, or what it uses, says so.
    """
    import torch

    if not torch.cuda.is_available():  # before Triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    version = work.folder.parents[1]
    sys.path[:0] = [str(work.folder), str(version)]
    yield from work.each(_check)


def _check(work: Work) -> Iterable[Item]:
    items: Iterable[Item] = frame.import_file(work.folder / CHECK).check(work)
    return items


if __name__ == "__main__":
    main()
