"""Efficiency from bytes and bandwidth: predictions and findings against the participant's runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from labs.scale_out.collectives import UNIT, bus_factor
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask, disturbed
from workshop.labs import LabRun
from workshop.run import flops, presets
from workshop.run.timing import median
from workshop.versions import load

PARTS = 8
MARGIN = 1.03
"""How far an efficiency may exceed what is possible: no two runs take the same time."""
CPU = "--config tiny --batch-size {} --seq-len 64 --compile none --num-steps 40 --device cpu"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
FOLDER = "labs/scale_out"


@dataclass(frozen=True)
class Measured:
    """One process, several with as much work each, both again with PARTS parts per step, and the
    bandwidth between them."""

    alone: LabRun
    pair: LabRun
    parts_alone: LabRun
    parts: LabRun
    link: LabRun
    """An all-reduce, of the message whose size is nearest to the gradients'."""
    gradients_mb: float

    @property
    def gbs(self) -> float:
        return self.link.units_per_step / median(self.link.step_ms) / 1e6

    @property
    def sending_ms(self) -> float:
        return self.gradients_mb * bus_factor("all-reduce", self.pair.processes) / self.gbs

    @property
    def alone_ms(self) -> float:
        return median(self.alone.step_ms)

    @property
    def pair_ms(self) -> float:
        return median(self.pair.step_ms)

    @property
    def percent(self) -> float:
        """Efficiency."""
        return 100 * self.alone_ms / self.pair_ms

    @property
    def parts_percent(self) -> float:
        return 100 * median(self.parts_alone.step_ms) / median(self.parts.step_ms)

    @property
    def not_hidden_percent(self) -> float:
        """Efficiency, if computation waits for all of the sending."""
        return 100 * self.alone_ms / (self.alone_ms + self.sending_ms)


def measured(work: Work) -> Measured:
    """The newest runs that can be compared. Raises Missing: a run is not there."""
    runs = work.lab_runs("scale_out")
    trained = [run for run in runs if run.unit == "tokens" and run.options["strategy"] == "ddp"]
    pairs = (run for run in trained if run.processes > 1 and run.options["accumulate"] == 1)
    pair = next(pairs, None)
    if pair is None:
        raise Missing("two processes are not measured yet", _command(2, 1))

    def find(processes: int, parts: int) -> LabRun:
        """The newest run that differs from the pair only in this."""
        wanted = (processes, parts, *_same(pair))
        its = (run for run in trained
               if (run.processes, run.options["accumulate"], *_same(run)) == wanted)  # fmt: skip
        if found := next(its, None):
            return found
        what = f"{processes} process{'es' * (processes > 1)}" + f", {parts} parts" * (parts > 1)
        where = pair.device["name"]
        raise Missing(f"{what}: not measured yet on {where}", _command(min(2, processes), parts))

    alone, parts_alone, parts = find(1, 1), find(1, PARTS), find(pair.processes, PARTS)
    links = [run for run in runs
             if run.unit == UNIT and run.metrics["collective"] == "all-reduce"
             and (run.processes, run.device) == (pair.processes, pair.device)]  # fmt: skip
    if not links:
        raise Missing("the links are not measured yet", f"{TORCHRUN} {FOLDER}/collectives.py")
    model = load("v1").TinyLlamaConfig(**presets.get_preset(str(pair.options["config"])).model())
    mb = 4e-6 * flops.parameter_count(model)
    newest = [run for run in links if run.session == links[0].session]
    near = min(newest, key=lambda run: abs(math.log(_message_mb(run) / mb)))
    return Measured(alone, pair, parts_alone, parts, near, mb)


def _same(run: LabRun) -> tuple[object, ...]:
    """The facts that runs share which are compared: each process has as much in a part."""
    share = float(run.metrics["sequences"] or 0) / int(run.options["accumulate"] or 1)
    options = [run.options[name] for name in ("version", "precision", "compile", "config")]
    return (run.subject, run.device, share, *options)


def _message_mb(run: LabRun) -> float:
    return float(run.metrics["message_bytes"] or 0) / 1e6


def _command(processes: int, accumulate: int) -> str:
    flags = CPU.format(processes * accumulate)
    parts = f" --accumulate {accumulate}" if accumulate > 1 else ""
    launcher = TORCHRUN if processes > 1 else "python"
    return f"{launcher} {FOLDER}/train.py {flags}{parts}"


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_quiet, *QUESTIONS))


def _quiet(work: Work) -> Iterator[Item]:
    """Whether the runs show that other programs disturbed them. What is impossible is red; uneven
    steps are not, since some machines are never quiet."""
    m, what = measured(work), "the runs were not disturbed"
    again = "other programs disturbed a run: repeat both on a quiet machine"
    if max(m.percent, m.parts_percent) > 100 * MARGIN:
        yield Item(False, what, f"an efficiency is above 100%: {again}")
    elif m.parts_percent * MARGIN < m.percent:
        yield Item(False, what, f"{PARTS} parts are less efficient than one: {again}")
    else:
        warnings = list(disturbed((m.alone, m.pair, m.parts_alone, m.parts)))
        yield from warnings or [Item(True, what)]


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.percent", "predicted: efficiency", "%", lambda m: m.percent,
              "If nothing hides the sending: one process's step, divided by that step plus the "
              "time of sending. What else do two processes share: cores, memory?", within=0.1),
    Predicted("predict.parts_percent", f"predicted: efficiency with {PARTS} parts", "%",
              lambda m: m.parts_percent,
              f"There is {PARTS} times as much to compute, and no more to send.", within=0.1),
    Found("found.gradients_mb", "gradients of a step", "MB", lambda m: m.gradients_mb,
          "One number per weight, in fp32: the line `model` has the number of weights.",
          slips=lambda m: [(m.gradients_mb / 4, "a number has four bytes"),
                           (m.gradients_mb / 2, "they are sent in fp32, at bf16 too")]),
    Found("found.gbs", "what all-reduce reaches", "GB/s", lambda m: m.gbs,
          lambda m: f"collectives.py: all-reduce of {_message_mb(m.link):.3g} MB, the message "
          "nearest to the gradients."),
    Found("found.sending_ms", "the time of sending them", "ms", lambda m: m.sending_ms,
          "Their bytes times 2 (n - 1) / n, which is 1 for two, divided by the bandwidth. 1 MB at "
          "1 GB/s takes 1 ms.", within=0.05),
    Found("found.alone_ms", "a step of one process", "ms", lambda m: m.alone_ms,
          "The line `step` of your newest such run."),
    Found("found.pair_ms", "a step of all", "ms", lambda m: m.pair_ms,
          "The line `step` of your newest such run."),
    Found("found.percent", "efficiency", "%", lambda m: m.percent,
          "Each process has as much to do as the one: one process's step divided by theirs.",
          slips=lambda m: [(m.percent * m.pair.processes, "that is the speed-up in percent")]),
    Found("found.not_hidden_percent", "efficiency, if nothing hid the sending", "%",
          lambda m: m.not_hidden_percent,
          "The step of one process, divided by that step plus the time of sending."),
    Found("found.parts_percent", f"efficiency with {PARTS} parts", "%", lambda m: m.parts_percent,
          f"Of the two runs with --accumulate {PARTS}: one process's step divided by that of all."),
    Chosen("found.eight", "what a link carries with 8 processes, for each byte of gradients",
           {
               "1": "that is with two processes",
               "1.75": "2 (n - 1) / n: each process sends n - 1 parts to be added, then n - 1 sums",
               "8": "each process sends parts, not the whole message to every other one",
           },
           lambda m: "1.75"),
    Chosen("found.remedy", "what sends fewer bytes for each token",
           {
               "buckets": "larger ones are fewer messages with the same number of bytes",
               "parts": "the same number of bytes for more tokens",
               "processes": "each of them sends all gradients of a step",
           },
           lambda m: "parts"),
)  # fmt: skip
