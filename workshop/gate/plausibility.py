"""The physics: results that no machine could give, ours or others'.

The gate asks whether a version trains the right model; this asks whether its figures can be true
at all, from nothing but the sizes, the times and the chip. It needs no access to the code, so it
judges published tables as well as our own runs.

    python -m workshop.gate.plausibility claims.json
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop import results
from workshop.arguments import argument, run
from workshop.errors import WorkshopError
from workshop.run import chips, flops, timing

LEAST_BACKWARD_SHARE = 0.5
"""A backward pass multiplies twice as much as its forward. Where launches and not products take
the time it may come out somewhat shorter (autograd launches from C++), but not by half."""

FIRST_LOSS_MARGIN = 2.0
"""How far from ln(vocab) the loss of a freshly initialised model may be, in nats."""


@dataclass(frozen=True)
class Claim:
    """Published or measured figures of one training run; None for what is not given.

    `memory_mb` is in 10^6 bytes. If `memory_is_peak`, it was taken while weights, gradients and
    both AdamW moments existed; otherwise it may have been read after the gradients were freed.
    `peak_tflops` and `bandwidth_gbs` are the chip's limits at the precision of the run.
    """

    name: str
    model: flops.Sizes
    batch_size: int
    seq_len: int
    step_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    memory_mb: float | None = None
    memory_is_peak: bool = False
    params_with_grad: int | None = None
    loss_first: float | None = None
    peak_tflops: float | None = None
    bandwidth_gbs: float | None = None


def claim(run: results.RunResult) -> Claim:
    """A run's claims in figures, to be held against its device's data sheet."""
    sheet = chips.find_peaks(str(run.device.get("name")))
    step_ms = [] if run.interpreted else run.step_ms  # an interpreted run claims no time

    def median(samples: list[float]) -> float | None:
        return timing.median(samples) if samples else None

    return Claim(
        name=f"{run.version} {run.config_name} {run.precision}",
        model=results.model_sizes(run.config),
        batch_size=run.batch_size,
        seq_len=run.seq_len,
        step_ms=median(step_ms),
        forward_ms=median(run.forward_ms),
        backward_ms=median(run.backward_ms),
        optimizer_ms=median(run.optimizer_ms),
        memory_mb=float(run.memory_mb["peak"]) if run.memory_mb else None,
        memory_is_peak=True,
        params_with_grad=run.gradients.params_with_grad if run.gradients else None,
        loss_first=run.losses[0],
        # A product that was measured here is no law of nature: only data sheets refute a figure.
        peak_tflops=sheet.tflops.get(run.precision) if sheet else None,
        bandwidth_gbs=sheet.bandwidth_gbs if sheet else None,
    )


def check(claim: Claim) -> list[str]:
    """One sentence for each figure that can't be true; none if all can."""
    senseless = list(_senseless(claim))
    if senseless:  # the other checks would divide by it
        return senseless
    checks = (_rates, _optimizer_traffic, _memory, _learning)
    return [f"{claim.name}: {sentence}" for check_one in checks for sentence in check_one(claim)]


def _senseless(claim: Claim) -> Iterator[str]:
    """Values that no run has on any chip: times below zero, an empty batch."""
    counts = {"batch_size": claim.batch_size, "seq_len": claim.seq_len}
    counts |= {f"model.{name}": getattr(claim.model, name) for name in results.MODEL_SIZES}
    names = "step_ms forward_ms backward_ms optimizer_ms memory_mb peak_tflops bandwidth_gbs"
    amounts = {name: getattr(claim, name) for name in names.split()}
    reached = {"params_with_grad": claim.params_with_grad}
    for least, figures in ((1, counts), (results.LEAST, amounts), (0, reached)):
        for name, figure in figures.items():
            if figure is not None and not least <= figure <= results.MOST:
                yield (
                    f"{claim.name}: {name} is {figure!r:.20}, and in any run lies between "
                    f"{least:g} and {results.MOST:g}"
                )


def _rates(claim: Claim) -> Iterator[str]:
    """Operations over time may not exceed the chip's rate, in the step or in any part of it; nor
    may a backward pass take much less than its forward."""
    work = flops.step_flops(claim.model, claim.batch_size, claim.seq_len)
    for part, operations, milliseconds in (
        ("step", work.total, claim.step_ms),
        ("forward pass", work.forward, claim.forward_ms),
        ("backward pass", work.backward, claim.backward_ms),
    ):
        if claim.peak_tflops is None or milliseconds is None:
            continue
        rate = operations / (milliseconds / 1e3) / 1e12
        if rate > claim.peak_tflops:
            yield (
                f"a {part} of {milliseconds:.3g} ms means {rate:,.0f} TFLOP/s "
                f"({operations / 1e12:.3g} TFLOP), more than the chip's {claim.peak_tflops:,.0f}"
            )
    forward, backward = claim.forward_ms, claim.backward_ms
    if forward and backward and backward < LEAST_BACKWARD_SHARE * forward:
        yield (
            f"the backward pass takes {backward:.3g} ms, {backward / forward:.2f} of the forward's "
            f"{forward:.3g} ms, yet has twice its operations to do"
        )


def _optimizer_traffic(claim: Claim) -> Iterator[str]:
    """AdamW reads and writes 28 bytes a parameter, however it is written."""
    parameters = flops.parameter_count(claim.model)
    in_cache = parameters * flops.ADAMW_STATE_BYTES_PER_PARAMETER <= chips.LAST_LEVEL_CACHE_BYTES
    if claim.optimizer_ms is None or claim.bandwidth_gbs is None or in_cache:
        return
    gigabytes = parameters * flops.ADAMW_BYTES_PER_PARAMETER / 1e9
    rate = gigabytes / (claim.optimizer_ms / 1e3)
    if rate > claim.bandwidth_gbs:
        yield (
            f"an AdamW update in {claim.optimizer_ms:.3g} ms moves {gigabytes:.3g} GB at "
            f"{rate:,.0f} GB/s, more than the memory's {claim.bandwidth_gbs:,.0f}: it can't have "
            f"updated all {parameters / 1e6:,.1f} M parameters"
        )


def _memory(claim: Claim) -> Iterator[str]:
    if claim.memory_mb is None:
        return
    needed = flops.ADAMW_STATE_BYTES_PER_PARAMETER
    what, unit = "weights, gradients and AdamW's two moments", 1.0
    if not claim.memory_is_peak:
        # A table that does not say so may count in MiB, whose figures are 4.6% smaller.
        needed, what, unit = needed - 4, "weights and AdamW's two moments", 2**20 / 1e6
    parameters = flops.parameter_count(claim.model)
    least_mb = parameters * needed / 1e6
    if claim.memory_mb * unit < least_mb:
        yield (
            f"{claim.memory_mb:,.0f} MB can't hold the {what} of {parameters / 1e6:,.1f} M "
            f"parameters, {least_mb:,.0f} MB in fp32"
        )


def _learning(claim: Claim) -> Iterator[str]:
    """All parameters receive a gradient, and the first loss is that of a fresh model."""
    total, found = flops.parameter_count(claim.model), claim.params_with_grad
    if found is not None and found > total:
        yield f"{found:,} parameters received a gradient, of {total:,} there are"
    elif found is not None and found < total:
        share = found / total
        yield f"only {found:,} of {total:,} parameters ({share:.1%}) received a gradient"
    expected = math.log(claim.model.vocab_size)
    if claim.loss_first is not None and not (
        abs(claim.loss_first - expected) <= FIRST_LOSS_MARGIN  # not for NaN
    ):
        yield (
            f"the first loss is {claim.loss_first:.4g}, where a freshly initialised model gives "
            f"about ln({claim.model.vocab_size}) = {expected:.2f}"
        )


# --- command line ------------------------------------------------------------------------------


def read_claims(path: Path) -> list[Claim]:
    """Claims from a JSON list of objects with Claim's fields. Raises WorkshopError: the file or one
    of its fields is not as it should be."""
    entries = results.parse_json(path)
    if not isinstance(entries, list) or not entries:
        raise WorkshopError(f"{path}: expected a list of claims, each an object")
    numbered = enumerate(entries, start=1)
    return [results.convert(Claim, entry, f"{path}: claim {i}") for i, entry in numbered]


@dataclass
class Options:
    """The command line."""

    claims: Path = argument("JSON list of objects with Claim's fields")


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        lambda options: _show(options.claims),
        argv,
        interrupted="interrupted",
        prog="python -m workshop.gate.plausibility",
        description="Says which claims of a JSON list can't be true. Exit 0: all can; 1: some not.",
    )


def _show(path: Path) -> int:
    claims = read_claims(path)
    for claim in claims:
        for sentence in check(claim) or [f"{claim.name}: nothing here is impossible"]:
            print(errors.printable(sentence))
    return errors.ANSWER_IS_NO if any(map(check, claims)) else errors.DONE


if __name__ == "__main__":
    sys.exit(main())
