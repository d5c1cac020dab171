"""The judge of the kernels' benchmark: it draws, times, compares and records.

It never runs an implementation: these have another process, all those of a case together, so that
they are timed in turn and drift hits all alike. The process gets a seed when it has to use it, and
draws its arguments from that.

The check: results and every gradient against the plain version in fp64, which the judge computes,
by relative RMS. The allowance calibrates itself on what the plain version loses at the same
precision. What the process sends are sketches, whose seed it gets when the work is done.

The clock: from "go" to the answer of each turn. The process's own times, by events on the device,
are kept, and must agree with the judge's. Arguments are drawn anew for each turn. Of one turn,
which the process can't know, one call is compared as in the check: if it is wrong, the row has no
times.

What it misses: work that begins when the arguments are there, before "go", or ends after the
answer, when a sketch is asked for; times that are too short by less than TURN_MS, or in fewer than
half of the turns; false figures of memory and of the host's time; an implementation that changes
another.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workshop.errors import WorkshopError
from workshop.gate.audit import BUCKETS, sketch
from workshop.gate.outcome import relative_rms
from workshop.judge.judge import IMPOSSIBLE, SHARE
from workshop.judge.pipe import Closed, Message
from workshop.judge.process import Hear, Process
from workshop.kernels.calls import (
    GRADIENT,
    LAYOUTS,
    NO_GRAPH,
    Data,
    Setting,
    draw_data,
    lay_out,
    names,
    outcome,
)
from workshop.kernels.cases import COMPILED, GBS, HOST, MINE, OURS, PLAIN, Case, checked_cases
from workshop.kernels.rows import NOTHING_TIMED, Row
from workshop.labs import LabRun
from workshop.results import LEAST, MOST, Parity, Status
from workshop.run import chips, interpreter, timing
from workshop.run.precision import PRECISIONS, Precision

MULTIPLE = 2.0
"""An implementation's distance from the reference may be this multiple of the plain version's."""
ROUNDING_UNITS = 2.0
"""Added to it: roundings of one number, for what the plain version gets by luck."""
ORDER_OF_SUMS = 2.0**-20
"""And what fp32 sums of some thousand terms differ by when they are added in another order."""

TURN_MS = 2.0
"""The part of the judge's time of a turn in which no implementation runs: two messages, the reading
of more memory than the cache holds, the launch, and the wait for the device: up to 1.2 ms beside an
H200. A sample can be understated by as much, and a shorter one can take any time."""
OUTLASTED_MS = 0.2
"""The longest time for which other streams may be at work after a sample: a wait for nothing."""

PATIENCE_S = 300.0
"""How long an implementation may take for an answer, with all that it compiles and tunes."""


# --- the check -------------------------------------------------------------------------------


def allowances(
    case: Case, data: Data, reference: Mapping[str, Tensor], setting: Setting
) -> dict[str, float]:
    """How far from the plain version in fp64 an implementation may be."""
    plain = in_parts(case, data, None)
    own = {name: relative_rms(plain[name], true) for name, true in reference.items()}
    # One tensor's error may be small by luck; the typical one says what the precision costs.
    typical = timing.median(list(own.values()))
    floor = ROUNDING_UNITS * setting.precision.unit_roundoff + ORDER_OF_SUMS
    return {name: MULTIPLE * max(error, typical) + floor for name, error in own.items()}


def in_parts(case: Case, data: Data, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The plain version's outcome in a floating-point type (None: the arguments' own), one part
    after the other: what is cut into parts is put together again, other gradients are summed."""
    cut = [
        tensor.tensor_split(case.parts, case.cut[name]) if name in case.cut else [tensor]
        for name, tensor in zip((*case.arguments, *case.results), data.tensors, strict=True)
    ]
    pieces: list[dict[str, Any]] = []
    for index in range(case.parts):
        own = [tensors[index % len(tensors)] for tensors in cut]
        own = [x.to(dtype) if dtype and x.is_floating_point() else x for x in own]
        arguments = [
            tensor.detach().requires_grad_(name in case.differentiable)
            for tensor, name in zip(own, case.arguments, strict=False)
        ]
        part = outcome(case, case.plain, Data(tuple(arguments), tuple(own[len(arguments) :])))
        pieces.append({name: x.detach() for name, x in part.items() if x is not None})
    return {
        name: torch.cat([piece[name] for piece in pieces], case.cut[argument])
        if (argument := name.removeprefix(GRADIENT)) in case.cut
        else torch.stack([piece[name].double() for piece in pieces]).sum(0)
        for name in pieces[0]
    }


Sketches = tuple[dict[str, Tensor], int]
"""Sketches of tensors by name, and their seed."""


def compare(
    verdict: Parity,
    found: Sketches,
    reference: Mapping[str, Tensor],
    allowed: Mapping[str, float],
    where: str = "",
) -> None:
    """Adds to a verdict how far sketches are from the reference's tensors. A missing one fails.
    `where` begins each name."""
    tensors, seed = found
    for name, true in reference.items():
        error, limit = math.inf, allowed[name]
        if name in tensors:
            error = float((tensors[name] - sketch(true, name, seed)).norm() / true.double().norm())
        verdict.measures[where + name] = {
            "error": error if math.isfinite(error) else None,
            "allowed": limit,
        }
        if not error <= limit:
            verdict.failures.append(
                f"{where}{name} is missing or has another shape"
                if name not in tensors
                else f"{where}{name} is off by {error:.1e} of its size, allowed {limit:.1e}"
            )
    verdict.status = "fail" if verdict.failures else "pass"


# --- a case ----------------------------------------------------------------------------------


class Refused(Closed):
    """An implementation does not do what it is asked for; the text says why."""


@dataclass
class Turns:
    """One implementation's turns in one phase."""

    run: LabRun
    calls: int
    compared: int
    """The round of which a call is compared."""
    told_ms: list[float] = field(default_factory=list)
    judge_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    """How many of these contradict each other."""
    outlasted_ms: list[float] = field(default_factory=list)
    """The time of other streams after each turn."""
    seed: int = 0
    """Seed of the arguments in the turn whose call `index` is compared."""
    index: int = 0
    found: Sketches = field(default_factory=lambda: ({}, 0))


class Judge:
    """The judge of one case after the other."""

    def __init__(self, setting: Setting, rounds: int, blank: LabRun, mine: str = "") -> None:
        """
        Args:
            rounds: timed turns of each, 0 if nothing is timed.
            blank: how a row begins.
            mine: a participant's function, FILE.py:NAME, which gets a row, too.
        """
        self.setting, self.rounds, self._blank, self.mine = setting, rounds, blank, mine
        self._checked: tuple[Parity, str] | None = None
        """The verdict on `mine`, which is checked once, and a note."""
        self._running: Process | None = None
        self._asked = ""
        self._silent = dict[str, str]()
        """Implementations that gave no answer once, and why they are not asked again."""

    @property
    def _process(self) -> Process:
        if self._running is None:
            self._running = start_process(
                self.setting.device, show_line if self.mine else lambda _: None
            )
            precision = self.setting.precision.name
            self._running.ask("setting", device=str(self.setting.device), precision=precision)
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def measure(self, case: Case) -> list[LabRun]:
        own = (MINE,) if self.mine else ()
        variants = (OURS, *own, PLAIN, *case.others, COMPILED)
        runs = {name: self._record(case, name) for name in variants}
        lost = {name: why for name, why in self._silent.items() if name in runs}
        while left := [run for name, run in runs.items() if name not in lost]:
            self._asked = left[0].variant
            try:
                self._measure(case, left)
                break
            except Closed as closed:
                process, self._running = self._process, None
                _, why = process.failure(closed)
                lost[self._asked] = self._silent.get(self._asked, why)
                again = (run.variant for run in left if run.variant not in lost)
                runs |= {name: self._record(case, name) for name in again}
            except torch.OutOfMemoryError:
                self.stop()
                for run in left:
                    drop(run, "skipped", "this device has no memory for the check")
                break
        for name, why in lost.items():
            drop(runs[name], "failed" if name in (OURS, MINE) else "skipped", why)
        if any(NO_GRAPH in str(run.metrics.get("note")) for run in runs.values()):
            self.stop()  # PyTorch's allocator no longer gives its cache back when memory runs out
        for run in runs.values():
            self._settle(case, run)
        return list(runs.values())

    def _record(self, case: Case, name: str) -> LabRun:
        amounts = case.amounts(self.setting.precision.dtype.itemsize)
        subject = f"{case.op}, {case.size}"
        run = dataclasses.replace(copy.deepcopy(self._blank), subject=subject, variant=name)
        total = "bytes_per_step" if case.unit == GBS else "flops_per_step"
        setattr(run, total, sum(amounts.values()))
        run.metrics |= amounts
        return run

    def _ask(self, kind: str, run: LabRun, /, **values: Any) -> Message:
        """The answer. Raises Refused, Closed."""
        self._asked = run.variant
        with self._patience(run):
            self._process.ask(kind, name=run.variant, **values)
            answer = self._process.answer("answered", "refused")
        if answer.kind == "refused":
            raise Refused(str(answer.values.get("why")))
        return answer

    @contextlib.contextmanager
    def _patience(self, run: LabRun) -> Iterator[None]:
        """Ends a process that gives no answer in the block: its kernel may wait forever."""
        process = self._process

        def give_up() -> None:
            self._silent[run.variant] = f"no answer for {PATIENCE_S:g} s at {run.subject}"
            process.kill()

        timer = threading.Timer(PATIENCE_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _measure(self, case: Case, runs: list[LabRun]) -> None:
        for run in runs:
            if run.variant == MINE:
                self._check_mine(case, run)
        self._begin(case)
        seed = secrets.randbits(62)
        data = draw_data(case, self.setting, seed)
        reference = in_parts(case, data, torch.float64)
        allowed = allowances(case, data, reference, self.setting)
        torch.cuda.empty_cache()  # leaves the implementations what is not needed here any more
        for run in runs:
            if run.gate.status == "fail":
                continue
            try:
                answer = self._ask("check", run, seed=seed)
            except Refused as refused:
                run.status = "failed" if run.variant in (OURS, MINE) else "skipped"
                run.error = str(refused)
                continue
            compare(run.gate, self._sketches(run, None), reference, allowed)
            run.gate.reference = "the plain version in float64"
            if run.gate.status == "pass" and answer.values.get("peak_mb"):
                run.memory_mb = {"peak": _number(answer, "peak_mb")}
        del data, reference
        right = [run for run in runs if run.gate.status == "pass"]
        for phase in (*case.phases, HOST) if self.rounds else ():
            self._time(case, phase, right, allowed)

    def _begin(self, case: Case) -> None:
        self._process.ask("case", op=case.op, sizes=case.sizes, mine=self.mine)
        self._process.answer("answered")

    def _check_mine(self, case: Case, run: LabRun) -> None:
        """Checks a participant's function once, as our tests check V3's operators: at odd and even
        sizes, with other strides, with NaN in memory that nothing has been written to; up to the
        first failure. One for 16 bits is also checked in fp32, where 1% more is no rounding; since
        it may multiply in TF32 there, with that precision's allowance.

        Raises WorkshopError: there is no such function.
        """
        if self._checked is None:
            self._begin(case)
            try:
                self._ask("find_mine", run)
            except Refused as refused:
                raise WorkshopError(f"--mine {refused}") from None
            own, notes = self.setting.precision.name, list[str]()
            for name in (own,) if own == "fp32" else ("tf32", own):
                if run.gate.status != "fail":
                    notes.append(self._check_mine_in(PRECISIONS[name], case.op, run))
            self._checked = copy.deepcopy(run.gate), "; ".join(filter(None, notes))
        gate, note = self._checked
        run.gate = copy.deepcopy(gate)
        add_note(run, note)

    def _check_mine_in(self, precision: Precision, op: str, run: LabRun) -> str:
        """Fails the run's gate, or returns a note on what was found right."""
        setting, cases = dataclasses.replace(self.setting, precision=precision), checked_cases(op)
        dtype = str(precision.dtype).removeprefix("torch.")
        for case, layout in itertools.product(cases, LAYOUTS):
            where, seed = f"{dtype}, {case.size}, {layout}: ", secrets.randbits(62)
            self._begin(case)
            how = {"seed": seed, "layout": layout, "precision": precision.name}
            try:
                answer = self._ask("check_mine", run, **how)
            except Refused as refused:
                if precision.name == "tf32":
                    return f"not checked in {dtype} ({refused})"
                run.gate.status, run.gate.failures = "fail", [f"{where}{refused}"]
                return ""
            data = lay_out(draw_data(case, setting, seed), layout)
            reference = in_parts(case, data, torch.float64)
            allowed = allowances(case, data, reference, setting)
            for name in answer.values.get("overwritten") or ():
                run.gate.failures.append(f"{where}{name} was overwritten")
            compare(run.gate, self._sketches(run, None), reference, allowed, where)
            if run.gate.failures:
                return ""
        return f"right in {dtype} at {', '.join(case.size for case in cases)}"

    def _sketches(self, run: LabRun, index: int | None) -> Sketches:
        """Those of the check (None) or of a timed call."""
        seed = secrets.randbits(62)
        tensors = self._ask("sketch", run, index=index, seed=seed).tensors
        if any(x.shape != (BUCKETS,) for x in tensors.values()):
            raise Closed("the process answered something else than sketches")
        return tensors, seed

    # --- the clock ---

    def _time(
        self, case: Case, phase: str, right: list[LabRun], allowed: Mapping[str, float]
    ) -> None:
        torch.cuda.empty_cache()
        timed = [turns for run in right if (turns := self._prepare(phase, run))]
        for number in range(self.rounds + 1):
            for turns in timed if number % 2 == 0 else timed[::-1]:
                self._turn(turns, number)
        self._process.ask("release")
        self._process.answer("answered")
        for turns in timed:
            self._finish(case, phase, turns, allowed)

    def _prepare(self, phase: str, run: LabRun) -> Turns | None:
        try:
            answer = self._ask("prepare", run, phase=phase, seed=secrets.randbits(62))
        except Refused as refused:
            add_note(run, f"{phase} not timed: {refused}")
            return None
        add_note(run, str(answer.values.get("note") or ""))
        calls = int(_number(answer, "calls"))
        return Turns(run, calls, compared=1 + secrets.randbelow(self.rounds))

    def _turn(self, turns: Turns, number: int) -> None:
        seed, run = secrets.randbits(62), turns.run
        self._ask("load", run, seed=seed)
        with self._patience(run):
            answers = "answered", "refused"
            done, seconds, waited = self._process.timed("go", {}, *answers, name=run.variant)
        if done.kind == "refused":
            raise Refused(str(done.values.get("why")))
        if number:  # the first is not counted
            told, judge = _number(done, "ms"), seconds * 1e3
            turns.told_ms.append(told)
            turns.judge_ms.append(judge)
            turns.outlasted_ms.append(float(done.values.get("outlasted_ms") or 0.0))
            more = SHARE * judge + TURN_MS + (waited or 0.0) * 1e3
            turns.wrong += not told <= judge <= told + more
        if number == turns.compared:
            turns.seed, turns.index = seed, secrets.randbelow(turns.calls)
            turns.found = self._sketches(run, turns.index)

    def _finish(self, case: Case, phase: str, turns: Turns, allowed: Mapping[str, float]) -> None:
        """Records a phase, and compares the timed call, and the times with the judge's."""
        run = turns.run
        run.phase_ms[phase] = [ms / turns.calls for ms in turns.told_ms]
        if phase == HOST:
            return
        run.judge_ms = (run.judge_ms or 0.0) + timing.median(turns.judge_ms) / turns.calls
        run.audit.failures += wrong_times(turns, phase)
        outlasted = timing.median(turns.outlasted_ms)
        if outlasted > OUTLASTED_MS:
            words = "other streams are at work after its end, for"
            run.audit.failures.append(f"timed {phase}: {words} {outlasted:.3g} ms")
        data = draw_data(case, self.setting, turns.seed)
        moved = data.fresh()
        moved.fill(data, turns.index)
        reference = in_parts(case, moved, torch.float64)
        wanted = {name: reference[name] for name in names(case, phase)}
        compare(run.audit, turns.found, wanted, allowed, f"timed {phase}: ")

    # --- the verdict ---

    def _settle(self, case: Case, run: LabRun) -> None:
        """Gives a record its status, and what follows from its times."""
        row, peaks = Row((run,)), chips.find_peaks(str(run.device["name"]))
        limit = peaks and (peaks.bandwidth_gbs if case.unit == GBS else run.peak_tflops)
        for phase in case.phases:
            rate = row.rate(phase) or 0.0
            words = f"{phase}: {rate:,.0f} {case.unit}, more than"
            if limit and rate > limit:
                run.plausibility.append(f"{words} the chip's {limit:,.0f}")
            if row.ceiling and rate > IMPOSSIBLE * row.ceiling:
                times = f"{IMPOSSIBLE:g} times what a large copy or product reaches here"
                run.audit.failures.append(f"timed {words} {times}")
                run.audit.status = "fail"
        if run.refused:
            run.status = "gate failed" if run.gate.status == "fail" else "audit failed"
            run.phase_ms, run.memory_mb, run.judge_ms = {}, {}, None
        elif run.gate.status == "pass":
            phases = (run.phase_ms.get(phase, []) for phase in case.phases)
            run.step_ms = list(map(sum, zip(*phases, strict=False)))
            if not run.step_ms:
                untimed = f"not timed: {run.metrics.get('note')}"
                run.status, run.error = "skipped", untimed if self.rounds else NOTHING_TIMED


def start_process(device: torch.device, hear: Hear) -> Process:
    interpreted = {interpreter.VARIABLE: "1"} if device.type == "cpu" else {}
    return Process.of_module("workshop.kernels.implementations", os.environ | interpreted, hear)


def show_line(line: str) -> None:
    """Shows a line that a participant's function, or another implementation, has printed."""
    print(f"  | {line}", file=sys.stderr)


def _number(answer: Message, name: str) -> float:
    """A positive number of an answer. Raises Closed: it is not one."""
    value = answer.values.get(name)
    if not isinstance(value, (int, float)) or not LEAST <= value <= MOST:
        raise Closed(f"the process answered that {name} is {value!r:.40}")
    return value


def drop(run: LabRun, status: Status, why: str) -> None:
    """Records why there is nothing more of an implementation, unless it has been refused."""
    if not run.refused:
        run.gate, run.phase_ms, run.status, run.error = Parity(), {}, status, why


def add_note(run: LabRun, note: str) -> None:
    if note:
        run.metrics["note"] = "; ".join(filter(None, (str(run.metrics.get("note", "")), note)))


def wrong_times(turns: Turns, phase: str) -> list[str]:
    """A sentence if the process's times contradict the judge's in half of the turns or more. In a
    single one something else may have held it up, and the median does not count that."""
    if 2 * turns.wrong < len(turns.told_ms):
        return []
    told, judge = map(timing.median, (turns.told_ms, turns.judge_ms))
    return [f"timed {phase}: a turn takes {told:,.3g} ms, the judge's clock says {judge:,.3g} ms"]
