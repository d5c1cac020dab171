"""Find the false claim: the two published tables, and what a participant says of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work
from workshop.gate import plausibility
from workshop.gate.plausibility import Claim
from workshop.run import flops
from workshop.versions import ROOT

TABLES = ROOT / "tests" / "fixtures" / "published_tables.json"
EXAMINED = "medium V3"


@dataclass(frozen=True)
class Argument:
    """A number that a row implies, and the limit that it contradicts.

    Attributes:
        key: in the diagnosis.
        what: in a phrase.
        value: as the row implies it.
        limit: what the machine allows, with its unit.
        within: the relative error that a calculation by hand may have.
        slips: factors by which a well-known mistake is off, and what it is.
    """

    key: str
    what: str
    value: float
    limit: str
    within: float
    slips: tuple[tuple[float, str], ...]


def arguments(claim: Claim) -> tuple[Argument, ...]:
    """Three that need nothing of each other."""
    assert claim.step_ms and claim.forward_ms and claim.backward_ms and claim.optimizer_ms
    work = flops.step_flops(claim.model, claim.batch_size, claim.seq_len)
    adam_bytes = flops.parameter_count(claim.model) * flops.ADAMW_BYTES_PER_PARAMETER
    backward = claim.backward_ms / claim.forward_ms
    return (
        Argument(
            "step_tflops",
            "TFLOP/s of its step",
            work.total / claim.step_ms / 1e9,
            f"the chip has {claim.peak_tflops:,.1f}",
            0.1,  # without attention's own products it is 3% less
            (
                (1 / 3, "that is the forward pass alone: the backward pass does twice as much"),
                (1 / 2, "a multiplication and an addition are two operations"),
                (1e-3, "is it in TFLOP/s?"),
                (1e3, "is it in TFLOP/s?"),
            ),
        ),
        Argument(
            "backward_over_forward",
            "its backward pass over its forward pass",
            backward,
            "about 2, by the operations; less than 0.5 can't be",
            0.05,
            ((1 / backward**2, "that is the forward pass over the backward pass"),),
        ),
        Argument(
            "adamw_gbs",
            "GB/s of its AdamW update",
            adam_bytes / claim.optimizer_ms / 1e6,
            f"the memory has {claim.bandwidth_gbs:,.0f}",
            0.05,
            (
                (4 / 7, "reading four numbers a parameter is not all: three are written back"),
                (3 / 7, "writing three numbers a parameter is not all: four are read first"),
                (1 / 7, "AdamW reads weight, gradient and two moments, and writes three of them"),
                (1 / 4, "a number in fp32 has four bytes"),
                (1e-3, "is it in GB/s?"),
            ),
        ),
    )


def check_claims(work: Work) -> Iterator[Item]:
    claims = {claim.name: claim for claim in plausibility.read_claims(TABLES)}
    parts = [partial(_argument, one=one) for one in arguments(claims[EXAMINED])]
    yield from work.each(partial(_rows, claims=claims), *parts)


def _rows(work: Work, *, claims: dict[str, Claim]) -> Iterator[Item]:
    named = work.answers()["false_claim.impossible_rows"]
    known = list(claims)
    is_list = isinstance(named, list)
    unknown = [name for name in named if name not in known] if is_list else named
    if not is_list or unknown:
        raise WorkshopError(
            f"false_claim.impossible_rows should be a list of {', '.join(known)}; "
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
    work = flops.step_flops(claim.model, claim.batch_size, claim.seq_len)
    assert claim.step_ms and claim.forward_ms and claim.backward_ms
    return (
        f"{work.total / claim.step_ms / 1e9:,.0f} TFLOP/s of {claim.peak_tflops:,.1f}, a "
        f"backward pass of {claim.backward_ms / claim.forward_ms:.2f} forward passes, and memory "
        "for weights and moments, if it was read after the gradients were freed"
    )


def _argument(work: Work, *, one: Argument) -> Iterator[Item]:
    found = work.answers().number(f"false_claim.{one.key}")
    if _near(found, one.value, one.within):
        value = f"{one.value:,.0f}" if one.value >= 1000 else f"{one.value:.3g}"
        yield Item(True, f"{EXAMINED}: {one.what}", f"{value}; {one.limit}")
        return
    slip = next((why for by, why in one.slips if _near(found, by * one.value, one.within)), None)
    yield Item(False, f"{EXAMINED}: {one.what}", slip or f"{found:,.4g} is not what the row says")


def _near(found: float, value: float, within: float) -> bool:
    return abs(found - value) <= within * abs(value)
