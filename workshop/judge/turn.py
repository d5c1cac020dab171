"""A lab's process: it prepares, waits for its turn, works while the judge's clock runs, answers
what the judge asks about the work, and tells what it measured.

A lab's check is the judge's side of this. A process that no study has started is its own judge:
then both sides are in it, and no verdict of another process is on the work.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from workshop.judge.pipe import Message, Pipe
from workshop.results import TOLD, LabRun
from workshop.run.timing import StepClock

Shown = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors, fp64, fp32, int64 or int32, and plain values, by name."""


class Check(Protocol):
    """Compares the work of one process with a reference."""

    def prove(self, ask: Callable[..., Message], run: LabRun) -> None:
        """Fills in the run's gate, for a lab that has one before the clock: as `judge`."""
        return  # others inherit this

    def draw(self) -> Shown:
        """Draws what the process is given when the clock starts, each time it does: inputs that it
        can't have seen before, or their seed."""

    def take(self, proof: Mapping[str, Tensor]) -> None:
        """Keeps what came when the clock stopped. It has to depend on all the work, so that no work
        is left for later, and to be compared in `judge`."""

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        """Asks the process for what it did, and fills in the run's gate, its audit, and the metrics
        that follow from what it compares. Called each time that the process has stopped to answer:
        it may do so between spans.

        Args:
            ask: takes values by name, for the process, and returns its answer.
            run: has the times of all steps so far.
        """


class Turn:
    """The turn of one process in a study, or of a process that judges itself.

    The methods raise Closed when the judge is gone.
    """

    def __init__(self, judged: bool, check: Check | None = None) -> None:
        """
        Args:
            check: judges the work if no study does.
        """
        self.judged, self.check = judged, check
        self.beside = 0
        """Other processes that prepared at the same time."""
        self._pipe = Pipe.to_judge() if judged else None
        self._came = False

    def wait(self) -> None:
        """Says that this process is prepared, and waits until it has the device to itself."""
        if self._pipe:
            self._pipe.send("ready")
            self.beside = int(self._pipe.receive().values["beside"])
            self._came = True

    def begin(self) -> Message:
        """Asks for the judge's clock, and waits until it runs; what comes with that was drawn
        then."""
        if self._pipe:
            self._pipe.send("begin")
            return self._pipe.receive()
        tensors, values = self.check.draw() if self.check else ({}, {})
        return Message("go", dict(values), dict(tensors))

    def end(self, step_ms: Sequence[float], proof: Mapping[str, Tensor] | None = None) -> None:
        """Stops the clock that `begin` asked for, when the device has nothing left to do.

        Args:
            step_ms: by this process's own clock, the times of all that it has done since.
            proof: as Check.take has it.
        """
        if self._pipe:
            self._pipe.send("done", proof, step_ms=list(step_ms))
        elif self.check:
            self.check.take(proof or {})

    def prove(self, show: Callable[..., Shown], run: LabRun) -> bool:
        """Answers what the judge asks before the clock; whether the run may go on. Alone, fills in
        the run's gate.

        Args:
            show: takes the values of a question by name.
            run: alone, has the times of all steps so far.
        """
        if self._pipe:
            return bool(self._answer(self._pipe, show).values["passed"])
        if self.check:
            self.check.prove(asking(show), run)
        return run.gate.status == "pass"

    def answer(self, show: Callable[..., Shown], run: LabRun) -> None:
        """Answers what the judge asks about the work; alone, fills in the run's verdict."""
        if self._pipe:
            self._answer(self._pipe, show)
        elif self.check:
            self.check.judge(asking(show), run)

    @staticmethod
    def _answer(pipe: Pipe, show: Callable[..., Shown]) -> Message:
        pipe.send("finished")
        while (asked := pipe.receive()).kind == "show":
            tensors, values = show(**asked.values)
            pipe.send("shown", tensors, **values)
        return asked

    def tell(self, record: LabRun) -> None:
        """Sends what this process measured for a record."""
        if not self._came:  # it failed before
            self.wait()
        if self._pipe:
            values = dataclasses.asdict(record)
            self._pipe.send("measured", **{name: values[name] for name in TOLD})


def asking(show: Callable[..., Shown]) -> Callable[..., Message]:
    """Asks within this process."""

    def ask(**question: Any) -> Message:
        tensors, values = show(**question)
        return Message("shown", dict(values), dict(tensors))

    return ask


class Clock:
    """The clock of timed steps on a device. From `start` to `stop` the judge's clock runs, too."""

    def __init__(self, device: torch.device, turn: Turn) -> None:
        self._device, self._turn = device, turn
        self.step_ms: list[float] = []
        """Up to the last `stop`."""

    def start(self) -> Message:
        """Returns what the judge sends, as Turn.begin."""
        sent = self._turn.begin()
        self._clock = StepClock(self._device)
        self._clock.mark()
        return sent

    def mark(self) -> None:
        self._clock.mark()

    def stop(self, proof: Mapping[str, Tensor] | None = None) -> None:
        """Waits for the device; `proof` is as Turn.end has it."""
        times = self._clock.durations_ms()
        self._turn.end(times, proof)
        self.step_ms += times
