"""The cost of a token: predictions and findings against the participant's own runs."""

from collections.abc import Iterator
from dataclasses import dataclass

from labs.text_generation.exercises.text_1_floor.make_models import NEW, SIZES
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask, disturbed
from workshop.labs import LabRun
from workshop.run.timing import median

LAB = "text_generation"
PROGRAMS = "python labs/text_generation"
MAKE = f"{PROGRAMS}/exercises/text_1_floor/make_models.py"
FLOOR = f"results/{LAB}/floor"
STATIC = "static"
RUNS = {**{name: (name, "hf") for name in SIZES}, STATIC: ("long", "static")}
"""The model and the engine of each run."""


@dataclass(frozen=True)
class Measured:
    """The newest run of each of RUNS."""

    runs: dict[str, LabRun]

    def ms(self, name: str) -> float:
        """Time of a token."""
        return median(self.runs[name].step_ms)

    def metric(self, name: str, metric: str) -> float:
        return float(self.runs[name].metrics[metric] or 0)

    def cache_mb(self, name: str) -> float:
        return self.metric(name, "kv_cache_read_mb")

    def mb(self, name: str) -> float:
        return self.metric(name, "weights_read_mb") + self.cache_mb(name)

    @property
    def layer_ms(self) -> float:
        _, _, layers, _, _ = SIZES["deep"]
        return (self.ms("deep") - self.metric("deep", "floor_ms")) / layers


def measured(work: Work) -> Measured:
    """Raises Missing: a run is not there."""
    found = [
        run for run in work.lab_runs(LAB)
        if (run.device["type"], run.device.get("threads")) == ("cpu", 1)
    ]  # fmt: skip
    newest = {(run.subject, run.options["engine"]): run for run in reversed(found)}
    runs = {}
    for name, (model, engine) in RUNS.items():
        run = newest.get((f"{model}, batch 1, {SIZES[model][-1]} + {NEW} tokens", engine))
        if run is None:
            what = f"`{name}` is not measured yet on one core (export OMP_NUM_THREADS=1)"
            raise Missing(what, command(name) if found else MAKE)
        runs[name] = run
    return Measured(runs)


def command(name: str) -> str:
    model, engine = RUNS[name]
    words = f"--num_tokens {NEW} --engine {engine} --device cpu --output_file {FLOOR}/texts"
    paths = f"--model_path {FLOOR}/{model} --input_file {FLOOR}/{model}.txt"
    return f"{PROGRAMS}/lm_gen.py {paths} {words}"


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_quiet, *QUESTIONS))


def _quiet(work: Work) -> Iterator[Item]:
    return disturbed(measured(work).runs.values())


def _bytes(name: str) -> Question[Measured]:
    how = (
        "Weights: L x (4 C C + 3 C F) and the table of 256 x C, 4 bytes each. Cache: 2 x L x C x 4 "
        f"bytes for each of {SIZES[name][-1] + NEW // 2:,} tokens."
    )
    return Predicted(f"predict.{name}_mb", f"predicted: what `{name}` reads", "MB",
                     lambda m: m.mb(name), how, within=0.05)  # fmt: skip


def _time(name: str, how: str) -> Question[Measured]:
    return Predicted(f"predict.{name}_ms", f"predicted: a token of `{name}`", "ms",
                     lambda m: m.ms(name), how, within=0.35)  # fmt: skip


def _found(name: str) -> Question[Measured]:
    return Found(f"found.{name}_ms", f"a token of `{name}`", "ms", lambda m: m.ms(name),
                 "`a token after it`, the median, of your newest such run.")  # fmt: skip


QUESTIONS: tuple[Question[Measured], ...] = (
    *map(_bytes, SIZES),
    _time("wide", "A token is one read of all weights, and little else. To read is somewhat faster "
          "than to copy. Did others use the memory in one of the measurements?"),
    _time("deep", "The bytes say little here: Python starts about 50 operators a layer one by one, "
          "and to start one takes longer than to read its few KB."),
    _time("long", "The bytes are those that a token needs. Hugging Face's loop moves more: its "
          "cache grows by a copy. See `static`."),
    *map(_found, RUNS),
    Found("found.cache_percent", "the share of `long`'s bytes that is the cache", "%",
          lambda m: 100 * m.cache_mb("long") / m.mb("long"),
          "`bytes read for a token`: the cache over the sum of both.", margin=1.0),
    Found("found.copied_mb", "what the growing cache copies", "MB",
          lambda m: 2 * m.cache_mb("long"),
          "All of the cache is read, and as much is written.",
          slips=lambda m: [(m.cache_mb("long"), "that is the reading alone; as much is written")],
          note=lambda m: f"besides the {m.mb('long'):.0f} MB that a token needs; without the copy "
          f"it takes {m.ms(STATIC) / m.ms('long'):.0%} of the time"),
    Found("found.layer_ms", "what a layer of `deep` takes beside its bytes", "ms",
          lambda m: m.layer_ms,
          f"The token's time less the time that its bytes take, over {SIZES['deep'][2]} layers.",
          within=0.05,
          note=lambda m: f"{1000 * m.layer_ms:.0f} µs: of about 50 operators, "
          f"{1000 * m.layer_ms / 50:.0f} µs each"),
    Chosen("found.int8", "what gains most from int8 weights",
           {
               "wide": "three quarters of its bytes go, and it does nothing but read them",
               "deep": "reading its weights is a small part of its time",
               "long": "its weights are the smaller part of its bytes",
           },
           lambda m: "wide"),
    Chosen("found.kv_heads", "what gains most from fewer key/value heads",
           {
               "wide": "its cache is small beside its weights: the prompt is short",
               "deep": "reading its cache is a small part of its time",
               "long": "its cache is most of what it reads, and a quarter of it remains",
           },
           lambda m: "long"),
    Chosen("found.graph", "what gains most from a single call",
           {
               "wide": "its few operators take long each: starting them is a small part",
               "deep": "nearly all of its time is spent between operators and on starting them",
               "long": "with the static cache most of its time is reading",
           },
           lambda m: "deep"),
)  # fmt: skip
