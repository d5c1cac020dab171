"""A lab's process in a study: it prepares, waits for its turn, works while the judge's clock runs,
and tells what it measured."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from workshop.judge.pipe import Pipe
from workshop.labs import TOLD, LabRun
from workshop.run.timing import StepClock


class Turn:
    """The turn of one process in a study. Without a judge it is always this process's turn.

    The methods raise Closed when the judge is gone.
    """

    def __init__(self, judged: bool) -> None:
        self.judged = judged
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

    def begin(self) -> dict[str, Any]:
        """Asks for the judge's clock, and waits until it runs; what comes with that, such as a
        seed, was drawn then."""
        if self._pipe is None:
            return {}
        self._pipe.send("begin")
        return self._pipe.receive().values

    def end(self, step_ms: Sequence[float]) -> None:
        """Stops the clock that `begin` asked for, when the device has nothing left to do.

        Args:
            step_ms: by this process's own clock, the times of all that it has done since.
        """
        if self._pipe:
            self._pipe.send("done", step_ms=list(step_ms))

    def tell(self, record: LabRun) -> None:
        """Sends what this process measured for a record."""
        if not self._came:  # it failed before
            self.wait()
        if self._pipe:
            values = dataclasses.asdict(record)
            self._pipe.send("measured", **{name: values[name] for name in TOLD})


class Clock:
    """The clock of timed steps on a device. From `start` to `stop` the judge's clock runs, too."""

    def __init__(self, device: torch.device, turn: Turn) -> None:
        self._device, self._turn = device, turn
        self.step_ms: list[float] = []
        """Up to the last `stop`."""

    def start(self) -> dict[str, Any]:
        """Returns what the judge sends, as Turn.begin."""
        sent = self._turn.begin()
        self._clock = StepClock(self._device)
        self._clock.mark()
        return sent

    def mark(self) -> None:
        """Marks the end of a step."""
        self._clock.mark()

    def stop(self) -> None:
        """Waits for the device."""
        times = self._clock.durations_ms()
        self._turn.end(times)
        self.step_ms += times
