"""The judge of one candidate: it asks, times, compares and writes the record.

Nothing that it takes from the candidate is a verdict or a setting: only tensors, which it compares
with V1's, and times, which must add up to its own.
"""

import copy
import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workshop import results, versions
from workshop.errors import WorkshopError, printable
from workshop.gate import audit, parity, plausibility
from workshop.gate.audit import Course
from workshop.gate.canonical import is_gradient
from workshop.judge import wire
from workshop.judge.pipe import Closed
from workshop.judge.plans import LEARNING_RATE, Asked, VersionPlan
from workshop.judge.process import Candidate, Hear
from workshop.judge.references import References, Round
from workshop.results import RunResult
from workshop.run import deterministic, flops, interpreter, timing

SHARE, FIXED_MS = 0.05, 10.0
"""By how much a candidate's step times may differ from the judge's clock, which also counts how the
batches reach it and how the fingerprint comes back: measured as docs/trust.md has it."""
UNEVEN = 1.25
"""The largest ratio of the judge's time to (steps x the candidate's median step).
On an H200, of 500 runs, their mean is at most 1.20 times their median, with FIXED_MS taken off."""
IMPOSSIBLE = 3.0
"""Times the measured peak, at which no step can run."""
PHASES_WITHIN = 0.2, 2.0
"""The sum of a step's phases, which are timed in a separate pass, as a share of the step. On an
H200, of 400 runs, 0.68 to 1.39."""


class VersionProcess(Candidate):
    """The process of a version that is judged."""

    def __init__(
        self,
        plan: VersionPlan,
        references: References,
        round_: Round,
        asked: Asked,
        result: RunResult,
        environment: Mapping[str, str],
        hear: Hear,
    ) -> None:
        """`result` is the record that it will fill."""
        self.plan, self.references, self.round, self.result = plan, references, round_, result
        self._schedule = plan.schedule(asked)
        self.course: Course | None = None
        """Its timed run, to be compared."""
        self.wrong_times: list[str] = []
        """In sentences."""
        self.gate_s = 0.0
        """The seconds that its gate took."""
        command = [sys.executable, str(versions.get_version(plan.version).path), *plan.flags()]
        command += ["--device", asked.device, "--data", asked.data]
        command += ["--seed", str(asked.seed), "--compile", str(result.options["compile"])]
        command.append("--cuda-graph" if result.options["cuda_graph"] else "--no-cuda-graph")
        command += [deterministic.FLAG] if asked.deterministic else []
        super().__init__(command, environment, hear)

    @property
    def stderr(self) -> list[str]:
        return self._process.stderr

    # --- what it is asked ---

    def _get_ready(self) -> None:
        """Has it pass the gate, in its first run, and train the warm-up."""
        setting = self.references.setting
        self._process.ask(
            "build",
            config=dataclasses.asdict(setting.config),
            batch_size=setting.batch_size,
            seq_len=setting.seq_len,
        )
        if self.plan.repeat == 0 and not self.plan.again:
            start = time.monotonic()
            self._gate()
            self.gate_s = time.monotonic() - start
        if self.result.status == "complete" and not self.plan.interpreted:
            self._warm_up()

    def _gate(self) -> None:
        references, plan = self.references, self.plan
        shape = gate_shape(plan, references)
        setting = references.of_shape(shape)
        report = parity.ParityReport(setting)
        for part, where in enumerate(parity.parts(setting)):
            self._process.ask(
                "gate",
                part=part,
                seed=references.setting.seed,
                batch_size=shape[0],
                seq_len=shape[1],
            )
            self._process.answer("answered")
            self._process.ask("sketch", seed=references.gate_seed)
            answer = self._process.answer("outcome", "refused")
            if answer.kind == "refused":
                why = answer.values.get("why") or ["it gives no reason"]
                report.failures += [printable(str(reason)) for reason in why]
            else:
                found = wire.to_outcome(answer)
                with wire.expected():  # of which tensors may be missing
                    parity.add(report, where, found, *references.gate_answers[shape, part])
                self.result.gradients = reach(references.facts["sizes"], found.gradients)
            if not report.passed:
                self.result.status = "gate failed"
                break
        self.result.gate = report.record()
        self._summary = report.summary()

    def _warm_up(self) -> None:
        schedule, references = self._schedule, self.references
        # In the place of the timed steps' batches, which come with "go", stand others.
        batches = references.draw(schedule.batches - schedule.warmup, schedule.warmup)
        self._process.ask(
            "train",
            {"batches": batches},
            seed=references.setting.seed,
            learning_rate=LEARNING_RATE,
            warmup=schedule.warmup,
            timed=schedule.timed,
            phases=schedule.phases,
        )
        self._process.answer("ready")

    def measure(self) -> None:
        """Times the steps, and takes what the audit compares."""
        if self.result.error:
            return
        self._process.resume()
        try:
            if self.result.status == "complete" and not self.plan.interpreted:
                self._measure()
            self._process.end()
        except Closed as closed:
            self._end(closed)

    def _measure(self) -> None:
        schedule, result, round_ = self._schedule, self.result, self.round
        timed = round_.batches[schedule.warmup :]
        done, seconds, waited = self._process.timed(
            "go", {"batches": timed}, "done", seed=round_.probe_seed
        )
        result.judge_ms = seconds * 1e3 / schedule.timed
        result.waited_share = None if waited is None else waited / seconds
        fingerprint = wire.to_fingerprint(done)
        self._process.ask("sketch", seed=round_.sketch_seed)
        course = wire.to_course(self._process.answer("course"))
        self.course = dataclasses.replace(course, fingerprint=fingerprint)
        self._take(self._process.answer("details").values)
        waited_ms = (waited or 0.0) * 1e3
        self.wrong_times = settle_times(self.result, seconds * 1e3, schedule.timed, waited_ms)

    def _take(self, details: dict[str, Any]) -> None:
        """Fills the record with the details that a candidate tells, if they make sense."""
        result, course = copy.copy(self.result), self.course
        assert course is not None
        with wire.expected():
            for name in ("step_ms", *results.PHASE_TIMES):
                setattr(result, name, list(map(float, details[name])))
            result.setup_s = {str(k): float(v) for k, v in details["setup_s"].items()}
            memory = {k: v for k, v in details["memory_mb"].items() if k != "source"}
            result.memory_mb = {str(k): float(v) for k, v in memory.items()}
            result.memory_mb["source"] = str(details["memory_mb"]["source"])
        result.losses = results.finite(course.losses.tolist())
        result.gradients = reach(self.references.facts["sizes"], course.gradients)
        for name in ("peak_tflops", "peak_source"):
            setattr(result, name, self.references.facts[name])
        self.result = wire.sensible(wire.to_record(RunResult, dataclasses.asdict(result)))

    def _end(self, error: WorkshopError) -> None:
        self.course = None
        self.result.status, self.result.error = self._process.failure(error)

    # --- the verdict ---

    @property
    def is_reference(self) -> bool:
        """Whether its run is V1's, which others of its round are compared with."""
        return self.course is not None and not self.plan.again and is_v1(self.plan, self.result)

    @property
    def awaits_reference(self) -> bool:
        """Whether V1's run on its batches is yet to come."""
        missing = self.course is not None and self.references.reference(self.round) is None
        return missing and not self.is_reference

    def judge(self) -> None:
        """Compares the timed run with V1's, and its times with what is possible."""
        result = self.result
        if self.course is None:
            return
        setting = self.references.setting
        reference = self.references.reference(self.round)
        if reference is not None:
            result.audit = audit.judge(self.course, reference, setting)
        else:
            result.audit = results.Audit(why=self.round.why)
        result.plausibility = plausibility.check(plausibility.claim(result))
        if wrong := [*self.wrong_times, *self._impossible()]:
            result.audit.status = "fail"
            result.audit.failures = [*wrong, *result.audit.failures]
        if result.audit.status == "fail":
            result.status = "audit failed"

    def _impossible(self) -> list[str]:
        result = self.result
        if not result.peak_tflops:
            return []
        sizes = results.model_sizes(result.config), result.batch_size, result.seq_len
        rate = flops.step_tflops(*sizes, timing.median(result.step_ms))
        if rate <= IMPOSSIBLE * result.peak_tflops:
            return []
        return [
            f"timed run: {rate:,.3g} TFLOP/s, {rate / result.peak_tflops:,.1f} times what a large "
            f"matrix product reaches here"
        ]

    def line(self) -> str:
        result = self.result
        if result.error:
            return f"skipped: {result.error}" if result.status == "skipped" else result.error
        if result.status == "gate failed":
            return "\n  ".join([f"gate: {self._summary}", *result.gate.failures])
        if self.plan.interpreted:
            return f"{interpreter.NOT_COMPARABLE}; gate: {self._summary}"
        line = f"{timing.median(result.step_ms):.2f} ms a step; {self.verdict()}"
        return f"{line}; {results.DISTURBED}" if result.disturbed else line

    def verdict(self) -> str:
        """The audit's, in a line, with what it found."""
        found = self.result.audit
        later = found.status == "not run" and self.awaits_reference
        summary = "when V1 has trained these batches" if later else audit.summary(found)
        return "\n  ".join([f"audit: {summary}", *found.failures])


def reach(sizes: Mapping[str, int], gradients: Mapping[str, Tensor | None]) -> results.Gradients:
    """The tensors that a backward pass reached, by their gradients or sketches of them."""
    return results.Gradients.of(sizes, [n for n in sizes if is_gradient(gradients.get(n))])


def is_v1(plan: VersionPlan, result: RunResult) -> bool:
    """Whether a plan is V1 as the ladder times it: eager."""
    plain = result.options["compile"] == "none" and not result.options["cuda_graph"]
    return plan.version == versions.BASELINE and plain


def gate_shape(plan: VersionPlan, references: References) -> tuple[int, int]:
    """Batch size and sequence length of a candidate's gate."""
    if plan.interpreted:
        return interpreter.gate_shape(references.setting.batch_size, references.setting.seq_len)
    batch_size, seq_len = references.facts["shape"]
    return batch_size, seq_len


def settle_times(result: RunResult, judge_ms: float, steps: int, waited_ms: float) -> list[str]:
    """Holds the times that a candidate tells against the judge's; what is wrong, in sentences.

    While other programs have the processor an honest candidate's times can't be told from others.
    Then the judge's own time is each step's.

    Args:
        judge_ms: from "go" to the fingerprint's arrival.
        waited_ms: of these, in which other programs kept candidate or judge waiting.
    """
    wrong = wrong_times(result, judge_ms, steps)
    if len(result.step_ms) == steps and wrong and waited_ms > SHARE * judge_ms:
        result.step_ms = [judge_ms / steps] * steps
        return []
    return wrong


def disagree(told_ms: float, judge_ms: float, fixed_ms: float) -> bool:
    """Whether the sum of the told times is not the judge's. A version's run fails then; a lab's
    times are scaled to the judge's (studies.py); the kernels' judge, whose turns are short, allows
    no told time above its own, and counts the turns (kernels/measure.py)."""
    return abs(judge_ms - told_ms) > SHARE * judge_ms + fixed_ms


def wrong_times(result: RunResult, judge_ms: float, steps: int) -> list[str]:
    told = sum(result.step_ms)
    if len(result.step_ms) != steps or not all(0 < ms < math.inf for ms in result.step_ms):
        return [f"timed run: {len(result.step_ms)} step times, of {steps} steps"]
    sentences = []
    if disagree(told, judge_ms, FIXED_MS):
        sentences.append(
            f"timed run: its {steps} step times add up to {told:,.1f} ms, the judge's clock says "
            f"{judge_ms:,.1f} ms"
        )
    step = timing.median(result.step_ms)
    if judge_ms > UNEVEN * steps * step + FIXED_MS:
        sentences.append(
            f"timed run: {steps} steps of its median are {steps * step:,.1f} ms, the judge's clock "
            f"says {judge_ms:,.1f} ms"
        )
    phases = [result.forward_ms, result.backward_ms, result.optimizer_ms]
    if all(phases):
        parts, (low, high) = sum(map(timing.median, phases)), PHASES_WITHIN
        if not low * step <= parts <= high * step + FIXED_MS:
            sentences.append(
                f"timed run: forward, backward and optimizer take {parts:,.2f} ms together, the "
                f"step {step:,.2f} ms"
            )
    return sentences
