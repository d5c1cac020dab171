"""Operations: findings against the participant's own runs, counts from the network's shapes, and
the guide's own figures with the batch put right."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.counts import WHOLE, Layer
from labs.inference_benchmark.own_runs import true_counts
from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import (
    Chosen,
    Found,
    Predicted,
    Question,
    Written,
    ask,
    disturbed,
)
from workshop.labs import LabRun
from workshop.run import timing

PROFILE = "--batch-size {} --iterations 10 --flops-prof-step 5"
HALF = "{} --precision bf16"
CONV, LINEAR = "layer1.0.conv1", "fc"
FP32_BYTES = 4

# The guide's figures for ResNet-50 in fp32, batch 32, on an MI325X.
GUIDE_BATCH = 32
GUIDE_GFLOP, GUIDE_MS, GUIDE_GB = 8.20, 10.52, 4.1
GUIDE_PEAK_TFLOPS, GUIDE_TBS = 163.0, 6.0
GUIDE_TFLOPS = GUIDE_BATCH * GUIDE_GFLOP / GUIDE_MS
GUIDE_INTENSITY = GUIDE_BATCH * GUIDE_GFLOP / GUIDE_GB
RIDGE = GUIDE_PEAK_TFLOPS / GUIDE_TBS


@dataclass(frozen=True)
class Measured:
    """The newest run with --flops-prof-step, the newest one of another batch size, and that of the
    larger batch at half precision."""

    large: LabRun
    small: LabRun
    half: LabRun

    @property
    def rate_gflops(self) -> float:
        return rate_gflops(self.large)

    @property
    def share_percent(self) -> float:
        return share_percent(self.large)

    @property
    def gain(self) -> float:
        return rate_gflops(self.half) / self.rate_gflops

    @property
    def outer_ms(self) -> dict[str, float]:
        """Times of the layers in the table that are part of no other, at half precision."""
        times = self.half.phase_ms
        return {name: ms for name, (ms,) in times.items() if "." not in name and name != WHOLE}

    @property
    def slowest(self) -> str:
        return max(self.outer_ms, key=self.outer_ms.__getitem__)

    @property
    def slowest_percent(self) -> float:
        return 100 * self.outer_ms[self.slowest] / self.half.phase_ms[WHOLE][0]

    @property
    def most_operations(self) -> str:
        """The layer with the most of them."""
        sums: Counter[str] = Counter()
        for one in true_counts(self.half).layers:
            sums[one.name.partition(".")[0]] += int(one.flops)
        return sums.most_common(1)[0][0]

    @property
    def growth(self) -> float:
        return self.large.units_per_step / self.small.units_per_step

    def layer(self, name: str) -> Layer:
        found = [one for one in true_counts(self.large).layers if one.name == name]
        if not found:
            raise WorkshopError(f"this network has no layer {name}: take a ResNet")
        return found[0]

    def intensity(self, name: str) -> float:
        return self.layer(name).intensity(self.large.units_per_step, FP32_BYTES)

    @property
    def linear_batch(self) -> float:
        """At which the linear layer's intensity is RIDGE: flops B = RIDGE bytes (moved B + weights)
        solved for B."""
        one = self.layer(LINEAR)
        each = one.flops - RIDGE * FP32_BYTES * one.moved
        return RIDGE * FP32_BYTES * one.weights / each


def gflop(run: LabRun) -> float:
    """Operations of a batch, in GFLOP."""
    return true_counts(run).flops * run.units_per_step / 1e9


def rate_gflops(run: LabRun) -> float:
    """Rate of the timed iterations."""
    return gflop(run) / timing.median(run.step_ms) * 1e3


def share_percent(run: LabRun) -> float:
    """Share of a large matrix product's rate at the run's precision."""
    return rate_gflops(run) / (run.ceiling_tflops or float("nan")) / 10


def measured(work: Work) -> Measured:
    """Raises Missing: a run is not there."""
    profiled = own_runs.with_flag("--flops-prof-step")
    runs = [run for run in own_runs.plain_runs(work, precision="fp32") if profiled(run)]
    first = own_runs.newest(runs, "with --flops-prof-step", PROFILE.format(2))
    others = [
        run
        for run in runs
        if run.units_per_step != first.units_per_step
        and run.options["network"] == first.options["network"]
    ]
    if not others:
        flags = PROFILE.format(4 * first.units_per_step)
        raise Missing("one more, with another batch size:", f"{own_runs.PROGRAM} {flags}")
    small, large = sorted((first, others[0]), key=lambda run: run.units_per_step)
    halves = [
        run
        for run in own_runs.plain_runs(work, network=large.options["network"])
        if run.options["precision"] in ("fp16", "bf16")
        and run.units_per_step == large.units_per_step
        and run.phase_ms
    ]
    flags = PROFILE.format(large.units_per_step)
    half = own_runs.newest(halves, "of the larger batch in fp16 or bf16", HALF.format(flags))
    return Measured(large, small, half)


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_quiet, *QUESTIONS))


def _quiet(work: Work) -> Iterator[Item]:
    m = measured(work)
    return disturbed((m.large, m.small, m.half))


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.gflop_an_image", "predicted: operations of an image", "GFLOP",
              lambda m: true_counts(m.large).flops / 1e9,
              "A convolution does 2 x weights operations for each pixel that it gives. ResNet-18 "
              "has 1.8 billion multiplications, and as many additions."),
    Predicted("predict.share_percent", "predicted: the share of a large product's rate", "%",
              lambda m: m.share_percent,
              "A CPU comes near in fp32. A GPU needs a batch that fills it, and waits for norms "
              "and ReLUs, which do no products."),
    Found("found.gflop_batch", "operations of the larger batch", "GFLOP", lambda m: gflop(m.large),
          "`fwd FLOPs per GPU` of the larger batch.",
          slips=lambda m: [
              (gflop(m.large) / 2, "those are MACs: a multiplication and an addition each"),
              (gflop(m.large) / m.large.units_per_step, "that is one image"),
          ]),
    Found("found.gflop_an_image", "operations of an image", "GFLOP",
          lambda m: true_counts(m.large).flops / 1e9, "Those of a batch over its images.",
          slips=lambda m: [(true_counts(m.large).flops / 2e9, "those are MACs")]),
    Found("found.growth", "operations of the larger batch over those of the smaller", "x",
          lambda m: m.growth, "The two runs' `fwd FLOPs per GPU`, one over the other.",
          within=0.01),
    Found("found.rate_gflops", "what the timed iterations reached", "GFLOP/s",
          lambda m: m.rate_gflops,
          "Operations of the larger batch over its median time; `Achieved` has it in TFLOP/s. Not "
          "the profiler's FLOPS: its pass is slower.",
          slips=lambda m: [(m.rate_gflops / m.large.units_per_step,
                            "with one image's operations")]),
    Found("found.share_percent", "the share of a large product's rate", "%",
          lambda m: m.share_percent, "The line `Share of a large product's`."),
    Found("found.share_of_one_image_percent", "the same, as the guide has it", "%",
          lambda m: m.share_percent / m.large.units_per_step,
          "With the operations of one image, and the time of the whole batch.", within=0.05),
    Found("half.gflops", "what half precision reached", "GFLOP/s",
          lambda m: rate_gflops(m.half),
          "`fwd FLOPS of the timed iterations` of the run in fp16 or bf16."),
    Found("half.gain", "half precision over fp32", "x", lambda m: m.gain,
          "The two rates, one over the other.",
          slips=lambda m: [(1 / m.gain, "that is fp32's over half precision's")]),
    Found("half.ceiling_percent", "half precision's share of a large product's rate", "%",
          lambda m: share_percent(m.half),
          "The line `Share of a large product's`; the product is in half precision too.",
          slips=lambda m: [(100 * rate_gflops(m.half) / 1e3 / (m.large.ceiling_tflops or 1),
                            "that is a share of fp32's product")]),
    Written("half.bottleneck", "the bottleneck",
            lambda m, text: "" if text == m.slowest else
            f"{text} is not it: look for the longest forward time at the left margin"),
    Found("half.bottleneck_percent", "its share of the time", "%", lambda m: m.slowest_percent,
          "The share behind its milliseconds; the one before these is that of the operations.",
          margin=0.1),
    Chosen("half.most_operations", "whether it has the most operations too", ("yes", "no"),
           lambda m: "yes" if m.slowest == m.most_operations else "no",
           lambda m: f"{m.most_operations} has the largest share of the MACs",
           lambda m: f"{m.most_operations} has the most"),
    Found("guide.tflops", "what the guide's GPU reached", "TFLOP/s", lambda _: GUIDE_TFLOPS,
          "GFLOP over ms are TFLOP/s; 10.52 ms is the time of the batch: whose are 8.20 GFLOP?",
          slips=lambda _: [(GUIDE_TFLOPS / GUIDE_BATCH, "32 images ran in that time, not one")]),
    Found("guide.share_percent", "its share of the peak", "%",
          lambda _: 100 * GUIDE_TFLOPS / GUIDE_PEAK_TFLOPS, "What it reached over 163 TFLOP/s.",
          slips=lambda _: [(0.48, "the guide's own: too small by the batch size")]),
    Found("guide.flop_per_byte", "its arithmetic intensity", "FLOP a byte",
          lambda _: GUIDE_INTENSITY,
          "Its 4.1 GB are those of 32 images: so must the operations be.",
          slips=lambda _: [(2.0, "the guide's own: operations of one image, bytes of 32")]),
    Found("guide.ridge", "its GPU's ridge point", "FLOP a byte", lambda _: RIDGE,
          "The peak over the bandwidth: 163 TFLOP/s over 6 TB/s."),
    Chosen("guide.bound", "the limit that the network would meet first", ("compute", "memory"),
           lambda _: "compute" if GUIDE_INTENSITY > RIDGE else "memory",
           f"{GUIDE_INTENSITY:.0f} FLOP a byte, and the ridge point is {RIDGE:.0f}",
           lambda _: f"{GUIDE_INTENSITY:.0f} FLOP a byte, and the ridge point is {RIDGE:.0f}"),
    Found("layers.conv", f"the intensity of {CONV}", "FLOP a byte", lambda m: m.intensity(CONV),
          "Images in and out, batch x channels x height x width, and the weights; 4 bytes each. "
          "Operations: 2 x weights x batch x height x width."),
    Found("layers.linear", f"the intensity of {LINEAR}", "FLOP a byte",
          lambda m: m.intensity(LINEAR),
          "Each weight is read once for the whole batch: with a small one, weights are most of the "
          "bytes."),
    Found("layers.linear_batch", f"the batch at which {LINEAR} is at the ridge point", "images",
          lambda m: m.linear_batch,
          f"2 x weights x B / (4 x (in x B + out x B + weights)) = {RIDGE:.1f}, solved for B.",
          within=0.08),
    Chosen("layers.relu", "what bounds a ReLU", ("compute", "memory"), lambda _: "memory",
           "it reads and writes a number for each comparison, at any batch size"),
)  # fmt: skip
