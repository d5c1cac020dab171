"""Processes that prepare in parallel and are timed one at a time.

To import, build and compile takes a minute of one core, the timed iterations a second of the whole
device. A process says on stdout that it is ready, and waits for a line on stdin.
"""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workshop import errors, records, results
from workshop.labs import LabRun
from workshop.run import processes

READY, DONE = "ready", "done"
READY_WITHIN_S = 900
SECONDS_TO_STOP = 30


def wait_turn() -> None:
    """Says that this process is ready, and waits until it may use the device alone. Raises
    KeyboardInterrupt if the program that gives the turns is gone."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise KeyboardInterrupt


def end_turn() -> None:
    """Says that this process needs the device no more: to end takes seconds."""
    print(DONE, flush=True)


@dataclass(frozen=True)
class Plan:
    """A process that measures one variant."""

    command: list[str]
    """Takes --result-file, where it leaves its result."""
    planned: LabRun
    """The record for a process that leaves none."""
    folder: Path
    """The folder of results in which the comparison has its file."""


def share_of_compilers(number: int) -> dict[str, str]:
    """Additions to the environment of `number` processes that prepare at the same time: by default
    each has a compiler for every core. Every second one compiles."""
    threads = max(1, 2 * (os.cpu_count() or 1) // number)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}


class Child:
    """The process of a plan."""

    def __init__(self, plan: Plan, environment: Mapping[str, str] | None = None) -> None:
        self.plan = plan
        self._late = False
        self._heard = b""
        self._scratch = tempfile.TemporaryDirectory()
        self._result = Path(self._scratch.name, "result.jsonl")
        # No pipe, which may be full while it is not read.
        self._complaint = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: a Ctrl-C at the terminal reaches us alone.
        self.process = subprocess.Popen(
            [*plan.command, "--result-file", str(self._result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaint,
            env=environment,
            start_new_session=True,
        )

    def hear(self, word: str = READY) -> bool:
        """Takes some output; whether the process has said the word or has ended."""
        assert self.process.stdout is not None
        some = os.read(self.process.stdout.fileno(), 2**16)
        self._heard += some
        return not some or word.encode() in self._heard.splitlines()

    def end_late(self) -> None:
        """Ends a process that did not get ready."""
        self._late = True
        processes.kill_group(self.process)

    def measure(self) -> LabRun:
        """Gives the process its turn, if it waits for one, until it needs the device no more; its
        result, or a record of its failure."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        while not self.hear(DONE):
            pass
        if left := self.take():
            return left
        run = self.plan.planned
        run.created = results.now()
        code = self.process.wait()
        self._complaint.seek(0)
        text = self._complaint.read().decode(errors="replace")
        run.status = "skipped" if code == errors.NOT_ON_THIS_MACHINE else "failed"
        run.error = _message(text)[:300]
        if self._late:
            run.error = f"not ready to be timed after {READY_WITHIN_S:,} s, and ended"
        elif code < 0:
            run.error = f"ended by {signal.Signals(-code).name}"
        records.add(run, self.plan.folder)
        return run

    def take(self) -> LabRun | None:
        """Moves the result that the process left to the comparison's file; None without one."""
        for run in records.load_runs(self._result, LabRun):
            run.parent_command = self.plan.planned.parent_command
            records.add(run, self.plan.folder)
            self._result.unlink()
            return run
        return None


def _message(text: str) -> str:
    """The message of a failed process on stderr: our line, or a traceback's, after which PyTorch
    has lines of advice. Of several processes their launcher has more to say than they."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    own = [line for line in lines if line.startswith("error: ")]
    # PyTorch may write [rank0]: before it; torchrun's own error, the last, has no words.
    found = (re.match(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception): .+)", x) for x in lines)
    raised = [match[1] for match in found if match]
    return (own or raised or lines)[-1].removeprefix("error: ")


def in_turns(plans: Sequence[Plan], jobs: int) -> Iterator[LabRun]:
    """The run of each plan. Up to `jobs` processes prepare in parallel, with --wait-turn; each is
    timed alone."""
    if jobs == 1:
        yield from map(_alone, plans)
        return
    for start in range(0, len(plans), jobs):
        waiting = [
            replace(plan, command=[*plan.command, "--wait-turn"])
            for plan in plans[start : start + jobs]
        ]
        with prepared(waiting) as children:
            for child in children:
                yield child.measure()


def _alone(plan: Plan) -> LabRun:
    child = Child(plan)
    with processes.ended_with_us(child.process):
        try:
            run = child.measure()
            child.process.wait()
            return run
        except KeyboardInterrupt:
            processes.stop(child.process, SECONDS_TO_STOP)
            child.take()
            raise


@contextlib.contextmanager
def prepared(plans: Sequence[Plan]) -> Iterator[list[Child]]:
    """Starts a process for each plan. When the block begins, all are ready or have ended; after it
    none is left, however it ends."""
    environment = share_of_compilers(len(plans)) | os.environ
    children: list[Child] = []
    with contextlib.ExitStack() as watches:
        try:
            for plan in plans:
                children.append(Child(plan, environment))
                watches.enter_context(processes.ended_with_us(children[-1].process))
            _hear(children)
            yield children
        finally:
            _end(children)


def _hear(children: list[Child]) -> None:
    """Waits until each is ready or has ended; ends those that take too long."""
    deadline = time.monotonic() + READY_WITHIN_S
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data.hear():
                    selector.unregister(key.fileobj)
        for key in list(selector.get_map().values()):
            key.data.end_late()


def _end(children: list[Child]) -> None:
    """Ends those that still run: by SIGTERM, and what is not gone after SECONDS_TO_STOP, or at a
    second Ctrl-C, by SIGKILL."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + SECONDS_TO_STOP
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        for child in children:
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        processes.kill_group(child.process)
        child.take()
