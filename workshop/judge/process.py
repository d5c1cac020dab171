"""A process that the judge has started, the judge's end of its pipe, and what it prints."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from workshop import errors, results
from workshop.errors import WorkshopError
from workshop.judge.pipe import Closed, Ended, Message, Pipe
from workshop.run import processes, waiting
from workshop.versions import ROOT

SECONDS_TO_STOP = 40
MOST_AT_A_TIME = 1000
"""Processes that may prepare in parallel, at the most."""


Hear = Callable[[str], object]
"""Takes a line that the process has printed."""


class Process:
    """Answers questions until the judge ends it; the process ends with the judge, too."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], hear: Hear = lambda _: None
    ) -> None:
        try:
            with _held_back_interrupt():
                self._start(command, environment, hear)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _start(self, command: Sequence[str], environment: Mapping[str, str], hear: Hear) -> None:
        # As standard input it also reaches the processes of a launcher.
        ours, theirs = socket.socketpair()
        self.stderr: list[str] = []
        self._lock, self._stopping = threading.Lock(), False
        # In a new session: a Ctrl-C at the terminal reaches the judge alone.
        self._process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # Its output is read here as UTF-8, in any locale.
            env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        theirs.close()
        end = ours.detach()
        self._pipe = Pipe(end, os.dup(end))
        self._watch = contextlib.ExitStack()
        self._watch.enter_context(processes.ended_with_us(self._process))

        def read(stream: Any, hear: Hear) -> None:
            for line in filter(None, map(str.rstrip, stream)):
                hear(errors.printable(line))

        self._readers = [
            threading.Thread(target=read, args=one, daemon=True)
            for one in ((self._process.stdout, hear), (self._process.stderr, self.stderr.append))
        ]
        for reader in self._readers:
            reader.start()

    @classmethod
    def of_module(
        cls, name: str, environment: Mapping[str, str], hear: Hear = lambda _: None
    ) -> "Process":
        """A process that is the `main` of a module of this checkout, which need not be
        installed."""
        program = f"import sys; import {name} as module; sys.exit(module.main())"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return cls([sys.executable, "-c", program], {**environment, "PYTHONPATH": path}, hear)

    def ask(self, kind: str, tensors: Mapping[str, Tensor] | None = None, /, **values: Any) -> None:
        """Raises Closed: the process has ended."""
        self._pipe.send(kind, tensors, **values)

    def answer(self, *kinds: str) -> Message:
        """The next message, of one of these kinds. Raises Closed: the process has
        ended, or answers something else."""
        message = self._pipe.receive()
        if message.kind not in kinds:
            raise Closed(f"the process answered {message.kind!r:.40}, not {' or '.join(kinds)}")
        return message

    def timed(
        self, kind: str, tensors: Mapping[str, Tensor], *kinds: str, **values: Any
    ) -> tuple[Message, float, float | None]:
        """Asks and takes the answer; it, the seconds from one to the other, and for how many of
        them other programs kept a thread, of the process or of the judge, from a processor."""
        pids = (self._process.pid, os.getpid())
        busy_before = waiting.busy_seconds(self._process.pid)
        before = [waiting.seconds_without_processor(pid) for pid in pids]
        start = time.perf_counter()
        self.ask(kind, tensors, **values)
        message = self.answer(*kinds)
        seconds = time.perf_counter() - start
        waited = [
            waiting.longest_wait(then, waiting.seconds_without_processor(pid))
            for pid, then in zip(pids, before, strict=True)
        ]
        busy = waiting.busy_seconds(self._process.pid)
        if waited[0] is None or busy is None or busy_before is None:
            return message, seconds, None
        # A process can also keep itself waiting, with more threads than there are processors.
        return message, seconds, min(sum(filter(None, waited)), max(busy - busy_before, 0.0))

    def pause(self) -> None:
        """Stops the process until `resume`, with what it has started."""
        with self._lock:  # one that is being ended, by another thread, would not end
            if not self._stopping:
                self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def end(self) -> int:
        """Tells the process that there are no more questions, and waits; its exit status. One that
        goes on all the same is ended, and what it leaves behind."""
        with contextlib.suppress(Closed):
            self.ask("end")
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_STOP)
        processes.kill_group(self._process)
        status = self._process.wait()
        self._watch.close()
        for reader in self._readers:
            reader.join(timeout=SECONDS_TO_STOP)
        return status

    def stop(self) -> None:
        """Ends the process now, and what it has started, if it has not ended."""
        with self._lock:
            self._stopping = True
        if self._process.poll() is None:
            # One that waits for a message ends for this. SIGTERM alone may reach another of its
            # threads, just after a pause.
            self._pipe.hang_up()
            self.resume()
            processes.stop(self._process, SECONDS_TO_STOP)
            processes.kill_group(self._process)  # which may hold the pipe open
        self._watch.close()
        self._pipe.close()

    def kill(self) -> None:
        """Ends the process, and what it has started, for which another thread waits."""
        processes.kill_group(self._process)

    def failure(self, error: WorkshopError) -> tuple[results.Status, str]:
        """Ends a process that gave no answer, or a wrong one: "skipped" or "failed", and why in
        words: what it said, what ended it, or what was wrong with its answer."""
        status = self.end()
        if not status or not isinstance(error, Ended):
            return "failed", str(error)
        skipped = status == errors.NOT_ON_THIS_MACHINE
        return "skipped" if skipped else "failed", self._reason(status)

    def _reason(self, status: int) -> str:
        """Names what ended the process, or its message: our line on stderr, or a traceback's, after
        which PyTorch has lines of advice. Of several processes their launcher has more to say."""
        if status == -signal.SIGKILL:
            return "killed from outside (SIGKILL): most likely the machine ran out of memory"
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        lines = self.stderr
        own = [line for line in lines if line.startswith("error: ")]
        # PyTorch may write [rank0]: before it; torchrun's own error, the last, has no words.
        found = (re.match(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception): .+)", x) for x in lines)
        raised = [match[1] for match in found if match]
        message = [*(own or raised or lines or ["no message"])][-1].removeprefix("error: ")
        told = (errors.ANSWER_IS_NO, errors.WRONG_USAGE, errors.NOT_ON_THIS_MACHINE)
        return message if status in told else f"exit {status}: {message}"


class Candidate:
    """A process that is judged. Its kinds say what it does to get ready, and how it is timed."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], hear: Hear = lambda _: None
    ) -> None:
        """`command` takes --candidate."""
        self._process = Process([*command, "--candidate"], environment, hear)

    def stop(self) -> None:
        self._process.stop()

    def prepare(self) -> None:
        """Has it build, compile and warm up. Then it waits, stopped, so that it takes nothing from
        those that are timed before it."""
        try:
            self._get_ready()
            self._process.pause()
        except WorkshopError as error:
            self._end(error)

    def _get_ready(self) -> None:
        raise NotImplementedError

    def _end(self, error: WorkshopError) -> None:
        """Records why the process gave no answer, or a wrong one, and ends it."""
        raise NotImplementedError


C = TypeVar("C", bound=Candidate)


@contextlib.contextmanager
def in_parallel(candidates: Iterable[C]) -> Iterator[list[C]]:
    """Has candidates, which start as they are taken, prepare in parallel: then each waits to be
    timed alone. None of their processes is left when this ends, however it ends."""
    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(MOST_AT_A_TIME)
        stack.callback(pool.shutdown)
        started = []
        for one in candidates:
            started.append(one)
            stack.callback(one.stop)
        list(pool.map(lambda one: one.prepare(), started))
        yield started


def share_of_compilers(number: int) -> dict[str, str]:
    """Additions to the environment of `number` processes that prepare at the same time: by default
    each has a compiler for every core. Every second one compiles."""
    threads = max(1, 2 * (os.cpu_count() or 1) // number)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}


@contextlib.contextmanager
def _held_back_interrupt() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, so that the process that it starts can be
    ended."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
