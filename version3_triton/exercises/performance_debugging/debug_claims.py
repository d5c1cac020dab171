"""Find the false claim: the two published tables, and what a participant says of them."""

from collections.abc import Iterator

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Found, ask
from workshop.gate import plausibility
from workshop.gate.plausibility import Claim
from workshop.run import flops
from workshop.versions import ROOT

TABLES = ROOT / "tests" / "fixtures" / "published_tables.json"
EXAMINED = "medium V3"


def check_claims(work: Work) -> Iterator[Item]:
    yield from ask(work, lambda _: _claims()[EXAMINED], (_rows, *ARGUMENTS))


def _claims() -> dict[str, Claim]:
    return {claim.name: claim for claim in plausibility.read_claims(TABLES)}


def _rows(work: Work) -> Iterator[Item]:
    claims, named = _claims(), work.answers["false_claim.impossible_rows"]
    unknown = [name for name in named if name not in claims] if isinstance(named, list) else named
    if unknown or not isinstance(named, list):
        raise WorkshopError(
            f"false_claim.impossible_rows should be a list of {', '.join(claims)}; "
            f"found {unknown!r:.40}"
        )
    impossible = {name for name, claim in claims.items() if plausibility.check(claim)}
    for name in dict.fromkeys(named):
        right = name in impossible
        why = "" if right else f"its numbers can be true: {_defence(claims[name])}"
        yield Item(right, f"{name} can't be true", why)
    if left := impossible.difference(named):
        why = "put every row that you believe through all of your arguments"
        yield Item(False, f"rows that you believe, and that can't be true: {len(left)}", why)


def _defence(claim: Claim) -> str:
    return (
        f"{_step_tflops(claim):,.0f} TFLOP/s of {claim.peak_tflops:,.1f}, a "
        f"backward pass of {_backward_over_forward(claim):.2f} forward passes, and memory "
        "for weights and moments, if it was read after the gradients were freed"
    )


# --- three arguments that need nothing of each other ---------------------------------------------


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


ARGUMENTS = (
    Found(
        "false_claim.step_tflops", f"{EXAMINED}: its step", "TFLOP/s", _step_tflops,
        "the operations of a step over its time", within=0.1,  # 3% are attention's own products
        slips=lambda claim: [
            (_step_tflops(claim) * factor, why)
            for factor, why in (
                (1 / 3, "that is the forward pass alone: the backward pass does twice as much"),
                (1 / 2, "a multiplication and an addition are two operations"),
                (1e-3, "is it in TFLOP/s?"),
                (1e3, "is it in TFLOP/s?"),
            )
        ],
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
        slips=lambda claim: [
            (_adamw_gbs(claim) * factor, why)
            for factor, why in (
                (4 / 7, "reading four numbers a parameter is not all: three are written back"),
                (3 / 7, "writing three numbers a parameter is not all: four are read first"),
                (1 / 7, "AdamW reads weight, gradient and two moments, and writes three of them"),
                (1 / 4, "a number in fp32 has four bytes"),
                (1e-3, "is it in GB/s?"),
            )
        ],
        note=lambda claim: f"{_adamw_gbs(claim):,.0f}; the memory has {claim.bandwidth_gbs:,.0f}",
    ),
)  # fmt: skip
