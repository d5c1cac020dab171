"""Studies of a lab: processes prepare in parallel, and are timed one at a time.

To import, build and compile takes a minute of one core, the timed steps a second of the whole
device. The judge writes the record from what it asked for; the process adds what it measured, and
its step times have to add up to the judge's clock, or are made to.
"""

import copy
import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import records, results
from workshop.errors import WorkshopError
from workshop.judge import wire
from workshop.judge.judge import FIXED_MS, UNEVEN, disagree
from workshop.judge.pipe import Closed, Message
from workshop.judge.process import Candidate, in_parallel, share_of_compilers
from workshop.judge.turn import Check
from workshop.results import TOLD, LabRun
from workshop.run import timing

READY_WITHIN_S = 900
Spans = list[list[float]]
"""The times in ms of all that a process did, in a list for each time that the judge's clock ran."""


def each_step(run: LabRun, spans: Spans) -> None:
    run.step_ms = list(itertools.chain.from_iterable(spans))


@dataclass(frozen=True)
class Plan:
    """A process that measures one variant, or several."""

    command: list[str]
    """Takes --candidate."""
    planned: Sequence[LabRun]
    """The records of what it is asked for, in that order."""
    folder: Path
    """The folder of results in which the comparison has its file."""
    take_times: Callable[[LabRun, Spans], None] = each_step
    """Fills in the record's times."""
    check: Check | None = None
    """Compares the work with a reference. Without one the process's own gate counts."""

    def skipped(self, reason: str) -> LabRun:
        """The record of a process that can't run here, saved."""
        (run,) = self.planned
        run.status, run.error = "skipped", reason
        records.add(run, self.folder)
        return run


class VariantProcess(Candidate):
    """The process of a plan."""

    def __init__(self, plan: Plan, beside: int, environment: Mapping[str, str]) -> None:
        super().__init__(plan.command, environment)
        self.plan, self._beside = plan, beside
        self._run = plan.planned[0]
        """The record of what it is doing."""
        self._judged = copy.deepcopy(self._run)
        self._late = ""

    def _get_ready(self) -> None:
        """Waits until the process is ready; ends one that takes too long."""
        timer = threading.Timer(READY_WITHIN_S, self._end_late)
        timer.start()
        try:
            while self._process.answer("ready", "finished").kind == "finished":
                if self.plan.check:
                    self.plan.check.prove(self._ask, self._judged)
                self._process.ask("enough", passed=self._judged.gate.status == "pass")
        finally:
            timer.cancel()

    def _end_late(self) -> None:
        self._late = f"not ready to be timed after {READY_WITHIN_S:,} s, and ended"
        self._process.stop()

    def _end(self, error: WorkshopError) -> None:
        if not isinstance(error, Closed):
            self._process.stop()
        self._run.status, reason = self._process.failure(error)
        self._run.error = self._late or reason[:300]

    def measure(self) -> Iterator[LabRun]:
        """Gives the process its turn; its records, each saved when it is complete, up to the first
        that fails."""
        if not self._run.error:
            self._process.resume()
            try:
                self._process.ask("turn", beside=self._beside)
                for run in self.plan.planned:
                    self._run = run
                    run.created = results.now()  # rows are in this order
                    yield self._saved(self._measured(run))
                self._process.end()
                return
            except WorkshopError as error:
                self._end(error)
        yield self._saved(self._run)

    def _ask(self, **question: Any) -> Message:
        self._process.ask("show", **question)
        return self._process.answer("shown")

    def _saved(self, run: LabRun) -> LabRun:
        records.add(run, self.plan.folder)
        return run

    def _measured(self, planned: LabRun) -> LabRun:
        spans: Spans = []
        judge_ms = 0.0
        check, judged = self.plan.check, copy.deepcopy(self._judged)
        kinds = ("begin", "finished", "measured")
        while (message := self._process.answer(*kinds)).kind != "measured":
            if message.kind == "finished":
                if check:
                    check.judge(self._ask, judged)
                self._process.ask("enough")
                continue
            tensors, values = check.draw() if check else ({}, {})
            done, seconds, _ = self._process.timed("go", tensors, "done", **values)
            spans.append(_times(done))
            judged.step_ms += spans[-1]
            judge_ms += seconds * 1e3
            if check:
                check.take(done.tensors)
        # The request stays; the measurements are added.
        asked = dataclasses.asdict(planned)
        told = {name: message.values[name] for name in TOLD if name in message.values}
        run = wire.to_record(LabRun, {**asked, **told})
        for name in ("options", "metrics", "software"):
            setattr(run, name, {**getattr(run, name), **asked[name]})
        if check:  # the judge's verdict comes in the place of the process's own
            if run.status == "complete" and judged.gate.status == judged.audit.status == "not run":
                raise Closed("the process told what it measured before it was judged")
            run.gate, run.audit = judged.gate, judged.audit
            run.metrics |= judged.metrics
            run.error = judged.error or run.error
            if run.refused:
                run.status = "gate failed" if run.gate.status == "fail" else "audit failed"
        if any(spans):
            self.plan.take_times(run, spans)
            _settle(run, spans, judge_ms)
        return wire.sensible(run)


def _times(done: Message) -> list[float]:
    with wire.expected():
        times = [float(ms) for ms in done.values["step_ms"]]
    if not all(0 < ms < math.inf for ms in times):
        raise Closed(f"the process told no times: {times!s:.60}")
    return times


def _settle(run: LabRun, spans: Spans, judge_ms: float) -> None:
    """Holds a run's times against the judge's, in all in ms. Times that do not add up to it, since
    other programs kept the process waiting or since they are not true, become longer or shorter
    until they do; where the median says little of steps that differ, the mean counts."""
    times = list(itertools.chain.from_iterable(spans))
    run.judge_ms = judge_ms / len(times)
    told, fixed = sum(times), FIXED_MS * len(spans)
    if disagree(told, judge_ms, fixed):
        run.step_ms = [ms * judge_ms / told for ms in run.step_ms]
    if run.step_ms:
        mean = sum(run.step_ms) / len(run.step_ms)
        if mean > UNEVEN * timing.median(run.step_ms) + fixed / len(times):
            run.step_ms = [mean] * len(run.step_ms)


def in_turns(plans: Sequence[Plan], jobs: int) -> Iterator[LabRun]:
    """The runs of each plan. Up to `jobs` processes prepare in parallel; each is timed alone."""
    for start in range(0, len(plans), jobs):
        batch = plans[start : start + jobs]
        beside, environment = len(batch) - 1, share_of_compilers(len(batch)) | os.environ
        with in_parallel(VariantProcess(plan, beside, environment) for plan in batch) as candidates:
            for one in candidates:
                yield from one.measure()
