"""A loop's bottleneck: findings against a recorded trace of its steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.profilers import kineto, timeline
from workshop.profilers.table import Loading
from workshop.profilers.timeline import OPERATORS, RANGES, Slice

TRACE = "recorded_trace.json.gz"
STEP = 2
"""The one that the sheet asks for."""
LOADER, CONVOLUTION, EACH_ROUND = "enumerate(DataLoader)", "aten::conv2d", "aten::grid_sampler"


@dataclass(frozen=True)
class Measured:
    """Some steps, of one of which the main thread was looked at closely. Times in ms."""

    loading: Loading
    step_ms: float
    between_ms: float
    """From the batch's arrival to the network's first convolution."""
    rounds: int
    """How often the same was done in that time."""

    @property
    def waiting(self) -> float:
        """The part of the steps' time in the DataLoader."""
        return self.loading.wait_ns / self.loading.span_ns

    @property
    def loader_gain(self) -> float:
        """How many times as fast the loop would be if the DataLoader cost nothing."""
        return 1 / (1 - self.waiting)

    @property
    def between_gain(self) -> float:
        """The same if what lies between cost nothing."""
        return self.step_ms / (self.step_ms - self.between_ms)


def read(path: Path) -> Measured:
    """Reads a trace of the loop."""
    loading = kineto.read(path).loading
    if loading is None:
        raise WorkshopError(f"{path}: no DataLoader's ranges in it")
    trace = timeline.read(path)
    window = timeline.choose_window(trace, STEP, None, None)
    main = timeline.arrange(trace, window)[0].slices
    step = min(_named(main[RANGES], "ProfilerStep"), key=lambda s: abs(s.start - window.start))
    inside = [s for s in main[RANGES] + main[OPERATORS] if step.start <= s.start < step.end]
    arrived = max(s.end for s in _named(inside, LOADER))
    convolution = min(s.start for s in _named(inside, CONVOLUTION))
    rounds = sum(s.name == EACH_ROUND for s in inside)
    return Measured(loading, step.end - step.start, convolution - arrived, rounds)


def _named(slices: list[Slice], start: str) -> list[Slice]:
    return [s for s in slices if s.name.startswith(start)]


def measured(work: Work) -> Measured:
    return read(work.folder / TRACE)


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, QUESTIONS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.waiting_percent", "predicted: the time in the DataLoader", "%",
              lambda m: 100 * m.waiting,
              "Its workers load the next batches while the loop works on this one. What the loop "
              "itself does with a batch is another matter."),
    Found("found.waiting_percent", "the time in the DataLoader", "%",
          lambda m: 100 * m.waiting, "The line `loading data` of `show`.", margin=0.2),
    Found("found.step_ms", f"the length of step {STEP}", "ms", lambda m: m.step_ms,
          f"The range ProfilerStep of the picture of step {STEP}: its end less its start.",
          within=0.05),
    Found("found.between_ms", "from the batch's arrival to the first convolution", "ms",
          lambda m: m.between_ms,
          "From the end of the range enumerate(DataLoader) to the start of the first "
          f"{CONVOLUTION}, in step {STEP}.", within=0.1),
    Found("found.rounds", "how often the same is done in that time", "",
          lambda m: m.rounds,
          "Count one operator, such as the one that samples a grid, or divide the whole stretch "
          "by the length of one round.", within=0.2),
    Chosen("found.bottleneck", "the bottleneck",
           {
               "DataLoader": "its range is short: the batch is there when the loop asks for it",
               "preparation": "the main thread prepares image after image; all else waits for it",
               "network": "from the first convolution to the end of the backward pass: is it the "
                          "longest part?",
               "item": "loss.item() is at the step's end: how long does it wait there?",
           },
           lambda m: "preparation"),
    Found("found.loader_gain", "if the DataLoader cost nothing", "x", lambda m: m.loader_gain,
          "1 / (1 - p), where p is its part of the time, as a fraction.", within=0.02),
    Found("found.between_gain", "if the preparation cost nothing", "x", lambda m: m.between_gain,
          "The step's length over what is left of it.", within=0.25),
    Chosen("found.remedy", "what helps",
           {
               "workers": "they load the batch sooner, which is there in time already",
               "pin_memory": "the copy to the GPU gets faster: how long does it take?",
               "batch": "one operator for the whole batch, on the GPU: a hundredth of the calls",
               "no item": "nothing waits in it that would not wait later",
           },
           lambda m: "batch"),
)  # fmt: skip
