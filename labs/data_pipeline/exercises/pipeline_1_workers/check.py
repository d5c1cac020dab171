"""Workers for slow storage: predictions and findings against the participant's own runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.labs import LabRun
from workshop.run.timing import median

LAB = "data_pipeline"
RUNG = "persistent"
PROGRAM = "python labs/data_pipeline/measure_pipeline.py"
BATCH = 8
COMMON = f"--device cpu --batch-size {BATCH}"
RATES = f"{PROGRAM} --steps rates {COMMON}"
ONE_PROCESS = "--iterations 100 --epochs 1 --repeats 1"
LEAST, MOST = 0.7, 1.5
"""Shares of the workers that the rates ask for: rates change while others use the machine."""


@dataclass(frozen=True)
class Measured:
    """Runs with the answered number of workers and with twice that number, and their rates."""

    workers: int
    open_ms: float
    per_s: float
    """Images a second with that number."""
    doubled_per_s: float
    worker_per_s: float
    model_per_s: float

    @property
    def gain(self) -> float:
        return self.doubled_per_s / self.per_s

    @property
    def waiting_percent(self) -> float:
        """Share of a worker's time in which it waits for the storage."""
        return 100 * self.open_ms * self.worker_per_s / 1000

    @property
    def needed(self) -> float:
        return self.model_per_s / self.worker_per_s


def measured(work: Work) -> Measured:
    """Raises Missing: there are no runs with slow storage, or none with enough workers."""
    runs = [
        run for run in work.lab_runs(LAB)
        if run.options.get("open_ms") and run.units_per_step == BATCH
    ]  # fmt: skip
    if not runs:
        raise Missing("no runs with slow storage yet: begin with the rates", RATES)
    runs = [run for run in runs if (run.subject, run.device) == (runs[0].subject, runs[0].device)]
    worker, model = (_median(runs, name) for name in ("worker_per_s", "model_per_s"))
    per_s = {  # the newest of each
        int(run.options["workers"] or 0): _per_s(run) for run in reversed(runs)
        if run.variant == RUNG
    }  # fmt: skip
    needed, open_ms = model / worker, float(runs[0].options["open_ms"] or 0)
    pairs = [
        number for number in per_s
        if 2 * number in per_s and LEAST * needed <= number <= MOST * needed + 1
    ]  # fmt: skip
    if not pairs:
        number = math.ceil(needed)
        wanted = next(one for one in (number, 2 * number) if one not in per_s)
        raise Missing(
            f"the model takes {model:,.0f} images/s, and a worker prepares {worker:,.0f}: measure "
            f"{number} workers and {2 * number}",
            f"{PROGRAM} --steps {RUNG} {COMMON} {ONE_PROCESS} --open-ms {open_ms:g} "
            f"--workers {wanted}",
        )
    best = min(pairs, key=lambda number: abs(number - needed))
    return Measured(best, open_ms, per_s[best], per_s[2 * best], worker, model)


def _median(runs: list[LabRun], name: str) -> float:
    return median([float(run.metrics[name] or 0) for run in runs])


def _per_s(run: LabRun) -> float:
    return 1000 * run.units_per_step / median(run.step_ms)


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, QUESTIONS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.worker_per_s", "predicted: one worker with slow storage", "images/s",
              lambda m: m.worker_per_s,
              "It waits for the file, then prepares the image: the two times add up."),
    Predicted("predict.workers", "predicted: the number of workers", "", lambda m: m.needed,
              "The model's images a second over one worker's.", within=0.35),
    Predicted("predict.gain", "predicted: with twice as many", "x", lambda m: m.gain,
              "Once the model is busy all the time, images wait for the model.", within=0.15),
    Found("found.waiting_percent", "a worker's time that it waits for the storage", "%",
          lambda m: m.waiting_percent,
          "The latency over the time for an image, which is 1,000 ms over its images a second.",
          within=0.1,
          note=lambda m: "that is why there may be more workers than cores"),
    Found("found.workers", "the number of workers that the rates ask for", "",
          lambda m: m.workers,
          lambda m: f"`workers that follow`, with slow storage: {m.needed:.1f} by all your runs. "
          f"Your runs are of {m.workers}.",
          within=0.0),
    Found("found.per_s", "with so many workers", "images/s", lambda m: m.per_s,
          lambda m: f"The row `{RUNG}` of the run with {m.workers} workers."),
    Found("found.doubled_per_s", "with twice as many", "images/s", lambda m: m.doubled_per_s,
          lambda m: f"The row `{RUNG}` of the run with {2 * m.workers} workers."),
    Chosen("found.one_bound", "what bounds the loop with one worker",
           {
               "storage": "the worker waits for it, image after image: nothing else is at work",
               "decoding": "it takes a small part of the worker's time: see above",
               "model": "it waits most of the time: see the column `waits`",
           },
           lambda m: "storage"),
    Chosen("found.doubled_bound", "what bounds it with twice as many",
           {
               "storage": "its latency is the same for each, and they wait for it at the same time",
               "decoding": "it takes a small part of the workers' time: see above",
               "model": "the workers could prepare more, and wait until it takes the next batch",
           },
           lambda m: "model"),
)  # fmt: skip
