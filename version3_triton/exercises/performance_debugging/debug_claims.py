"""Find the false claim: the two published tables, and what a participant says of them."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from workshop.exercises.frame import Item, Work, judged
from workshop.exercises.predict import Found, ask
from workshop.gate import plausibility
from workshop.gate.plausibility import Claim
from workshop.run import flops
from workshop.versions import ROOT

TABLES = ROOT / "tests" / "fixtures" / "published_tables.json"
EXAMINED = "medium V3"
Slips = Callable[[Claim], Iterable[tuple[float, str]]]


def check_claims(work: Work) -> Iterator[Item]:
    claims = {claim.name: claim for claim in plausibility.read_claims(TABLES)}
    yield from ask(work, lambda _: claims[EXAMINED], (partial(_rows, claims=claims), *ARGUMENTS))


def _rows(work: Work, *, claims: dict[str, Claim]) -> Iterator[Item]:
    named = work.answers.names("false_claim.impossible_rows", tuple(claims))
    impossible = {name for name, claim in claims.items() if plausibility.check(claim)}
    for name in named:
        why = f"its numbers can be true: {_defence(claims[name])}"
        yield judged(name in impossible, f"{name} can't be true", why)
    if left := impossible.difference(named):
        why = "put every row that you believe through all of your arguments"
        yield Item(False, f"rows that you believe, and that can't be true: {len(left)}", why)


def _defence(claim: Claim) -> str:
    return (
        f"{_step_tflops(claim):,.0f} TFLOP/s of {claim.peak_tflops:,.1f}, a "
        f"backward pass of {_backward_over_forward(claim):.2f} forward passes, and memory "
        "for weights and moments, if it was read after the gradients were freed"
    )


def _step_tflops(claim: Claim) -> float:
    assert claim.step_ms
    work = flops.step_flops(claim.model, claim.batch_size, claim.seq_len)
    return work.total / claim.step_ms / 1e9


def _backward_over_forward(claim: Claim) -> float:
    assert claim.forward_ms and claim.backward_ms
    return claim.backward_ms / claim.forward_ms


def _adamw_gbs(claim: Claim) -> float:
    assert claim.optimizer_ms
    moved = flops.parameter_count(claim.model) * flops.ADAMW_BYTES_PER_PARAMETER
    return moved / claim.optimizer_ms / 1e6


def _scaled(value: Callable[[Claim], float], slips: dict[float, str]) -> Slips:
    """The numbers that well-known mistakes give: a factor of the right one each."""
    return lambda claim: [(value(claim) * factor, why) for factor, why in slips.items()]


ARGUMENTS = (
    Found(
        "false_claim.step_tflops", f"{EXAMINED}: its step", "TFLOP/s", _step_tflops,
        "the operations of a step over its time", within=0.1,  # 3% are attention's own products
        slips=_scaled(_step_tflops, {
            1 / 3: "that is the forward pass alone: the backward pass does twice as much",
            1 / 2: "a multiplication and an addition are two operations",
            1e-3: "is it in TFLOP/s?",
            1e3: "is it in TFLOP/s?",
        }),
        note=lambda claim: f"{_step_tflops(claim):,.0f}; the chip has {claim.peak_tflops:,.1f}",
    ),
    Found(
        "false_claim.backward_over_forward", f"{EXAMINED}: its backward pass over its forward pass",
        "", _backward_over_forward, "the one time over the other", within=0.05,
        slips=lambda claim: [
            (1 / _backward_over_forward(claim), "that is the forward pass over the backward pass")
        ],
        note=lambda claim: f"{_backward_over_forward(claim):.3g}; about 2, by the operations; less "
        "than 0.5 can't be",
    ),
    Found(
        "false_claim.adamw_gbs", f"{EXAMINED}: its AdamW update", "GB/s", _adamw_gbs,
        "the bytes that it reads and writes over its time", within=0.05,
        slips=_scaled(_adamw_gbs, {
            4 / 7: "reading four numbers a parameter is not all: three are written back",
            3 / 7: "writing three numbers a parameter is not all: four are read first",
            1 / 7: "AdamW reads weight, gradient and two moments, and writes three of them",
            1 / 4: "a number in fp32 has four bytes",
            1e-3: "is it in GB/s?",
        }),
        note=lambda claim: f"{_adamw_gbs(claim):,.0f}; the memory has {claim.bandwidth_gbs:,.0f}",
    ),
)  # fmt: skip
