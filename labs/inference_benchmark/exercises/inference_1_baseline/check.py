"""The baseline: predictions and findings against the participant's own runs of one network."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.own_runs import images_per_s, memory_mb, p50_ms, true_counts
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask, disturbed
from workshop.labs import LabRun

BASE = "--batch-size 4 --iterations 20 --warmup-iterations 1"
PARTS = ("weights", "images", "rest")


@dataclass(frozen=True)
class Measured:
    """The later and the earlier of two runs that are alike, and runs of one and of many images."""

    later: LabRun
    earlier: LabRun
    single: LabRun
    large: LabRun

    @property
    def first_ms(self) -> float:
        """Time of the only warm-up iteration."""
        return self.later.setup_s["warm_up"] * 1e3

    @property
    def mean_with_first_ms(self) -> float:
        return fmean([self.first_ms, *self.later.step_ms])

    @property
    def runs_differ(self) -> float:
        """The longer median over the shorter one."""
        a, b = images_per_s(self.later), images_per_s(self.earlier)
        return max(a, b) / min(a, b)

    def per_gb(self, run: LabRun) -> float:
        """Images a second for each GB of the peak."""
        return images_per_s(run) / memory_mb(run, "peak") * 1e3


def measured(work: Work) -> Measured:
    """Raises Missing: a run is not there."""
    runs = [run for run in own_runs.plain_runs(work, precision="fp32") if not run.baseline]
    alike = [run for run in runs if own_runs.with_flag("--warmup-iterations 1")(run)]
    later = own_runs.newest(alike, "with one warm-up iteration", BASE)
    same = [r for r in runs if _place(r) == _place(later)]
    twice = [r for r in alike if r in same and r.units_per_step == later.units_per_step]
    if len(twice) < 2:
        raise Missing("a second run of the same, please:", f"{own_runs.PROGRAM} {BASE}")
    single = [r for r in same if r.units_per_step == 1]
    most = max(r.units_per_step for r in same)
    large = [r for r in same if r.units_per_step == most > later.units_per_step]
    return Measured(
        later,
        twice[1],
        own_runs.newest(single, "of one image", "--batch-size 1 --iterations 10"),
        own_runs.newest(large, "of a larger batch", "--batch-size 16 --iterations 10"),
    )


def _place(run: LabRun) -> tuple[object, object]:
    return run.options["network"], run.device.get("name")


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_quiet, *QUESTIONS))


def _quiet(work: Work) -> Iterator[Item]:
    m = measured(work)
    return disturbed((m.later, m.earlier, m.single, m.large))


def _split(m: Measured) -> str:
    return ", ".join(f"{part} {memory_mb(m.later, part):,.0f} MB" for part in PARTS)


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.million_weights", "predicted: weights, in millions", "",
              lambda m: true_counts(m.later).parameters / 1e6,
              "A convolution has in x out x height x width weights: the last blocks, with the most "
              "channels and the smallest images, have nearly all of them.", within=0.1),
    Predicted("predict.first_over_median", "predicted: the warm-up iteration", "x",
              lambda m: m.first_ms / p50_ms(m.later),
              "What it does beside its work, such as choosing algorithms and asking for memory, "
              "depends on the device: measure it, and leave it out."),
    Predicted("predict.large_over_single", "predicted: images a second, large batch over one image",
              "", lambda m: images_per_s(m.large) / images_per_s(m.single),
              "Near 1: one image already fills the device, as on a CPU. Near the batch size: one "
              "image leaves it idle, as on a GPU."),
    Found("found.weights_mb", "the weights' memory", "MB",
          lambda m: 4 * true_counts(m.later).parameters / 1e6,
          "Four bytes for each weight. The summary's figure has the norms' statistics in it, which "
          "are small."),
    Found("found.batch_mb", "the memory of one batch of images", "MB",
          lambda m: memory_mb(m.later, "images") / 3,
          "batch x 3 x height x width numbers of four bytes. The summary counts three such "
          "batches.",
          slips=lambda m: [(memory_mb(m.later, "images"), "three batches, and one was asked for")]),
    Found("found.p50_ms", "the median time of a batch", "ms", lambda m: p50_ms(m.later),
          "p50 in the line `Latency`, of the later of your two runs that are alike."),
    Found("found.images_per_s", "images a second", "", lambda m: images_per_s(m.later),
          "The line `Throughput`: batch size over the median time in seconds.",
          slips=lambda m: [(1e3 / p50_ms(m.later), "that is batches a second: x batch size")]),
    Found("found.spread_percent", "the spread", "%",
          lambda m: 100 * stdev(m.later.step_ms) / fmean(m.later.step_ms),
          "The line `Standard deviation`: its share of the mean, in brackets.", within=0.05,
          margin=0.2),
    Found("found.mean_with_first_ms", "the mean with the warm-up iteration in it", "ms",
          lambda m: m.mean_with_first_ms,
          "The warm-up iteration and all timed ones, added up, over their number: 21 if 20 were "
          "timed.", within=0.01,
          note=lambda m: f"{m.mean_with_first_ms / p50_ms(m.later) - 1:+.1%} against the median"),
    Found("found.runs_differ_percent", "how far apart two runs are", "%",
          lambda m: 100 * (m.runs_differ - 1),
          "The higher throughput over the lower one, less 1, in percent.", within=0.1, margin=0.3),
    Chosen("found.largest_part", "the largest part of the memory", PARTS,
           lambda m: max(PARTS, key=lambda part: memory_mb(m.later, part)), _split, _split),
    Found("found.single_ms", "the latency of one image", "ms", lambda m: p50_ms(m.single),
          "p50 of the run with --batch-size 1."),
    Found("found.large_over_single", "images a second, large batch over one image", "x",
          lambda m: images_per_s(m.large) / images_per_s(m.single),
          "The throughput of the largest batch over that of a single image."),
    Found("found.per_gb_large", "images a second per GB, large batch", "",
          lambda m: m.per_gb(m.large),
          "The line `Images per second per GB` of the largest batch: images a second over the peak "
          "memory in GB (10^9 bytes)."),
)  # fmt: skip
