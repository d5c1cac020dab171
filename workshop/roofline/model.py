"""The roofline: how fast a kernel runs, and how near it comes to each of the chip's limits.

A kernel that does F operations and moves B bytes has the arithmetic intensity F / B. Its rate can
exceed neither the chip's rate at its precision nor intensity x bandwidth: the two roofs (Williams,
Waterman, Patterson: Roofline, Communications of the ACM 52(4), 2009). The lower one at its
intensity, which its rate comes closer to, is its roof, and the share says how close it is.

No share makes a kernel "bound" by its roof: what the rest of its time went to is not in the figure,
and a threshold would say opposite things of two kernels a percent apart. RULE tells readers so.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from workshop.profilers.metrics import digits, duration
from workshop.profilers.names import display_name

SCHEMA_VERSION = 1
MEMORY, COMPUTE = "memory", "compute"
KINDS = (MEMORY, COMPUTE)
MAIN_MEMORY = "memory"
"""The level that bytes are counted at, where nothing else is said; others are caches."""
GIVEN, DATA_SHEET, MEASURED = "given", "data sheet", "measured"
_LONGEST_NAME = 60
"""In a sentence."""
ORIGINS = (GIVEN, DATA_SHEET, MEASURED)
"""Where a ceiling is from; the first that is known is the roof."""
RULE = (
    "a roof is the lower of both limits at a point's intensity, and a percentage is the share of a "
    "limit that was reached; what the rest of the time went to (launches, latency, other work), a "
    "roofline does not show, but a profile may"
)


@dataclass(frozen=True)
class Ceiling:
    """One limit of a chip."""

    kind: str
    """MEMORY or COMPUTE."""
    name: str
    """The level ("memory", "L2", ...) or the precision ("bf16", ...)."""
    rate: float
    """Bytes or operations a second."""
    origin: str
    """One of ORIGINS."""
    source: str
    """The data sheet; or when and by what it was measured."""


@dataclass(frozen=True)
class Point:
    """The rates of one kernel, or of one part of a training step. A rate that was not counted is
    None; 0 is one that was counted."""

    label: str
    category: str
    """A kernel's is one of profilers.categories.CATEGORIES."""
    precision: str
    """The one whose compute ceiling is its roof."""
    flops_per_s: float | None
    bytes_per_s: float | None
    seconds: float | None = None
    """The sum over all its calls."""
    share: float | None = None
    """Its part of the time of everything that was seen, from 0 to 1."""
    calls: int | None = None
    at_least: bool = False
    """Whether its bytes follow from sizes and no tool counted them: a lower bound, so that its
    intensity is an upper one."""
    level: str = MAIN_MEMORY
    """Where its bytes were counted, whose ceiling holds for them."""

    @property
    def intensity(self) -> float | None:
        """FLOP a byte; infinite for what stays in the caches, None if a rate is not known."""
        if self.flops_per_s is None or self.bytes_per_s is None:
            return None
        if not self.bytes_per_s:
            return math.inf if self.flops_per_s else None
        return self.flops_per_s / self.bytes_per_s

    @property
    def is_measured(self) -> bool:
        """Whether a tool counted both its operations and its bytes."""
        return not self.at_least and None not in (self.flops_per_s, self.bytes_per_s)

    def rate(self, kind: str) -> float | None:
        """Bytes (MEMORY) or operations (COMPUTE) a second."""
        return self.bytes_per_s if kind == MEMORY else self.flops_per_s


def point(
    label: str,
    category: str,
    precision: str,
    seconds: float,
    operations: float | None,
    moved: float | None,
    **more: Any,
) -> Point:
    """The point of some operations and bytes in a time; None for what was not counted."""
    flops_per_s, bytes_per_s = (
        None if amount is None else amount / seconds for amount in (operations, moved)
    )
    return Point(label, category, precision, flops_per_s, bytes_per_s, seconds, **more)


@dataclass
class Roofline:
    """Points under the ceilings of one device: steps by version, kernels by time."""

    title: str
    device: str | None
    points: list[Point]
    ceilings: list[Ceiling] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences: what was assumed, what is left out."""
    warnings: list[str] = field(default_factory=list)
    """Sentences: numbers that can't be true."""
    threads: object = None
    """The number on a CPU, where it is known: with others it has other ceilings."""

    @property
    def heading(self) -> str:
        return f"{self.device}: {self.title}" if self.device else self.title

    def limit(self, point: Point, kind: str, origins: tuple[str, ...] = ORIGINS) -> Ceiling | None:
        """The ceiling of a kind that holds for a point, from the first origin that has it: that of
        the level at which its bytes were counted, or of its precision."""
        name = point.level if kind == MEMORY else point.precision
        known = [c for c in self.ceilings if (c.kind, c.name) == (kind, name)]
        return next((c for origin in origins for c in known if c.origin == origin), None)

    def roof(self, point: Point) -> Ceiling | None:
        """The one of a point's two limits that it comes closest to; None where none is known."""
        limits = (self.limit(point, kind) for kind in KINDS if point.rate(kind) is not None)
        known = [ceiling for ceiling in limits if ceiling is not None]
        return max(known, key=lambda ceiling: share(point, ceiling), default=None)

    def measured(self, point: Point, kind: str) -> Ceiling | None:
        """The measured ceiling of a kind, where that is not its limit anyway."""
        ceiling = self.limit(point, kind, (MEASURED,))
        return None if ceiling == self.limit(point, kind) else ceiling


def share(point: Point, ceiling: Ceiling | None) -> float:
    """The part of a ceiling that was reached: above 1 where the numbers can't be true; 0 without
    a ceiling."""
    return (point.rate(ceiling.kind) or 0.0) / ceiling.rate if ceiling else 0.0


def exceeded(roofline: Roofline, point: Point) -> list[Ceiling]:
    """Limits that a point is above. What was measured is none: something faster may be run."""
    limits = (roofline.limit(point, kind, (GIVEN, DATA_SHEET)) for kind in KINDS)
    return [ceiling for ceiling in limits if ceiling and share(point, ceiling) > 1]


# --- in words ------------------------------------------------------------------------------------


def scaled(rate: float, kind: str) -> tuple[float, str]:
    """A rate in the unit that makes it readable: GB/s, GFLOP/s or TFLOP/s."""
    if kind == MEMORY:
        return rate / 1e9, "GB/s"
    return (rate / 1e12, "TFLOP/s") if rate >= 1e12 else (rate / 1e9, "GFLOP/s")


def rate_text(rate: float, kind: str) -> str:
    """As in "4,100 GB/s"."""
    number, unit = scaled(rate, kind)
    return f"{digits(number)} {unit}"


def ceiling_text(ceiling: Ceiling) -> str:
    """As in "bf16 989 TFLOP/s" and "memory 4,800 GB/s"."""
    return f"{ceiling.name} {rate_text(ceiling.rate, ceiling.kind)}"


def flags(roofline: Roofline) -> list[str]:
    """A sentence for each figure that can't be true: those that came with the points, and every
    rate above a limit."""
    found = [f"IMPLAUSIBLE: {warning}" for warning in roofline.warnings]
    for point in roofline.points:
        for ceiling in exceeded(roofline, point):
            rate = rate_text(point.rate(ceiling.kind) or 0.0, ceiling.kind)
            found.append(
                f"IMPLAUSIBLE: {_name(point)}: {_least(point, ceiling.kind)}{rate}, more than the "
                f"chip's {ceiling_text(ceiling)} ({ceiling.source})"
            )
    return found


def sentences(roofline: Roofline, limit: int = 10) -> list[str]:
    """For each of the first points: its roof, and how near it comes to each limit."""
    return [f"{_name(point)}: {in_words(roofline, point)}" for point in roofline.points[:limit]]


def _name(point: Point) -> str:
    return display_name(point.label, _LONGEST_NAME)


def in_words(roofline: Roofline, point: Point) -> str:
    """As in "memory roof: 4,100 of 4,800 GB/s, 85% (99% of the measured 4,139); 1.3 of 989 TFLOP/s
    (bf16), 0%; a call takes 12.4 µs"."""
    roof = roofline.roof(point)
    if roof is None:
        rates = [(point.rate(kind), kind) for kind in KINDS]
        achieved = [_least(point, kind) + rate_text(rate, kind) for rate, kind in rates if rate]
        return f"{' and '.join(achieved) or 'nothing counted'}; no ceiling is known for it"
    name = COMPUTE if roof.kind == COMPUTE else roof.name
    text = f"{name} roof: {_of(point, roof)}"
    measured = roofline.measured(point, roof.kind)
    if measured:
        reached = digits(scaled(measured.rate, roof.kind)[0])
        text += f" ({share(point, measured):.0%} of the measured {reached})"
    if roof.origin == MEASURED and share(point, roof) > 1:
        text += "; that is more than was measured: measure again with nothing else running"
    for other in (roofline.limit(point, kind) for kind in KINDS if kind != roof.kind):
        if other and point.rate(other.kind):
            text += f"; {_of(point, other)}"
    if point.calls and point.seconds:
        text += f"; a call takes {duration(point.seconds / point.calls * 1e9)}"
    return f"above what the chip can do: {text}" if exceeded(roofline, point) else text


def _of(point: Point, ceiling: Ceiling) -> str:
    """As in "4,100 of 4,800 GB/s, 85%"; the same unit for both."""
    number, unit = scaled(ceiling.rate, ceiling.kind)
    achieved = digits(share(point, ceiling) * number)
    precision = f" ({ceiling.name})" if ceiling.kind == COMPUTE else ""
    of_limit = f"{achieved} of {digits(number)} {unit}{precision}, {share(point, ceiling):.0%}"
    return _least(point, ceiling.kind) + of_limit


def _least(point: Point, kind: str) -> str:
    return "at least " if point.at_least and kind == MEMORY else ""


# --- for programs --------------------------------------------------------------------------------


def _record(roofline: Roofline, point: Point) -> dict[str, Any]:
    """A point in plain values, with what follows from the ceilings. Rates in GB/s and GFLOP/s; None
    for what is not known, and for an intensity that is infinite."""
    roof = roofline.roof(point)
    measured = roofline.measured(point, roof.kind) if roof else None
    intensity = point.intensity
    return {
        "label": point.label,
        "category": point.category,
        "precision": point.precision,
        "calls": point.calls,
        "seconds": point.seconds,
        "share": point.share,
        "flop_per_byte": intensity if intensity != math.inf else None,
        "gflops": None if point.flops_per_s is None else point.flops_per_s / 1e9,
        "gbs": None if point.bytes_per_s is None else point.bytes_per_s / 1e9,
        "bytes_are": "at least" if point.at_least else "all",
        "roof": roof.kind if roof else None,
        "ceiling": ceiling_text(roof) if roof else None,
        "ceiling_from": roof.origin if roof else None,
        "of_roof": share(point, roof) if roof else None,
        "of_measured": share(point, measured) if measured else None,
        "implausible": bool(exceeded(roofline, point)),
    }


def as_json(roofline: Roofline) -> dict[str, Any]:
    """Points, ceilings and all sentences."""
    return {
        "schema_version": SCHEMA_VERSION,
        "roofline": roofline.title,
        "device": roofline.device,
        "points": [_record(roofline, point) for point in roofline.points],
        "ceilings": [dataclasses.asdict(ceiling) for ceiling in roofline.ceilings],
        "sentences": sentences(roofline, len(roofline.points)),
        "implausible": flags(roofline),
        "notes": roofline.notes,
    }
