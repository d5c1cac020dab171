"""The hierarchical roofline: every kernel under the roofs of memory and caches.

A kernel has the same rate at every level, and an intensity at each: the closer its points at two
levels, the less the cache between them saves. ncu counts the caches' bytes under --metrics
lts__t_bytes.sum,l1tex__t_bytes.sum; what other tools give here is the memory's.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.profilers import ncu
from workshop.profilers.categories import CATEGORIES, categorize
from workshop.profilers.names import display_name, printable
from workshop.profilers.ncu import Counted, Report
from workshop.roofline import inputs, model
from workshop.roofline.model import (
    COMPUTE,
    MAIN_MEMORY,
    MEMORY,
    Point,
    Roofline,
    point,
)

WHOLE = "step"
"""Category of the point that is all kernels together."""
_VECTOR = {"FP32": "fp32", "FP64": "fp64", "FP16/BF16": "fp16 vector"}
"""Precisions of what the vector units do. Only fp32's ceiling is theirs: the others that are
listed are the tensor cores'."""


def load(path: Path, label: str, *, precision: str | None = None) -> Roofline:
    """The roofline of a profile with counters: all kernels together come first, then each, longest
    first, then the same at the caches.

    Args:
        path: ncu's CSV, or what rocprof-compute or rocprofv3 wrote.
        label: of all kernels together.
        precision: of the products, where the profile does not say.

    Raises:
        WorkshopError: it can't be read, or has no counters.
    """
    if path.is_file() and ncu.recognises(path):
        return _of_report(ncu.read_counts(path), label)
    roofline = inputs.load([path], precision=precision)
    if not all(p.category in CATEGORIES and p.seconds and not p.at_least for p in roofline.points):
        raise WorkshopError(f"{path}: no kernels with counters in it; {inputs.NEEDS_COUNTERS}")
    roofline.title = label
    roofline.points.insert(0, _whole(roofline.points, label))
    return roofline


def _of_report(report: Report, label: str) -> Roofline:
    device = printable(report.device) if report.device else None
    points: list[Point] = []
    for level in ncu.LEVELS:
        points += _points(report, label, level)
    roofline = Roofline(label, device, points, notes=[model.RULE, *report.warnings])
    if not set(ncu.CACHES) <= report.total.moved.keys():
        roofline.notes.append(
            "bytes are those of the memory alone: the caches' take the metrics "
            + ", ".join(ncu.CACHES.values())
        )
    return roofline


def _whole(kernels: list[Point], label: str) -> Point:
    """The sum of kernels, at the precision of the longest that is a product."""
    products = (p.precision for p in kernels if p.precision != "fp32")
    seconds = sum(p.seconds or 0.0 for p in kernels)
    flops, moved = (_amount(kernels, kind) for kind in (COMPUTE, MEMORY))
    whole = point(label, WHOLE, next(products, "fp32"), seconds, flops, moved, share=1.0)
    return _untimed(whole)


def _amount(kernels: list[Point], kind: str) -> float | None:
    """Operations or bytes of those kernels that have them counted; None where none has."""
    rates = [(rate, p.seconds or 0.0) for p in kernels if (rate := p.rate(kind)) is not None]
    return sum(rate * seconds for rate, seconds in rates) if rates else None


def _points(report: Report, label: str, level: str) -> Iterator[Point]:
    """Those at one level; at a cache only of kernels with operations: others have no height."""
    whole = [(label, WHOLE, report.total)]
    for name, category, counted in whole + [
        (k.name, categorize(k.name), k) for k in report.kernels
    ]:
        moved = counted.moved.get(level)
        if not counted.time_ns or moved is None or (level != ncu.DRAM and not counted.flops):
            continue
        found = point(
            display_name(name, len(name)) + ("" if level == ncu.DRAM else f", {level}"),
            category,
            precision_of(counted),
            counted.time_ns / 1e9,
            counted.flops,
            moved,
            share=counted.time_ns / report.total.time_ns,
            calls=counted.calls,
            level=MAIN_MEMORY if level == ncu.DRAM else level,
        )
        yield _untimed(found) if category == WHOLE else found


def _untimed(whole: Point) -> Point:
    """Without its time, which would make every kernel's marker small."""
    return dataclasses.replace(whole, seconds=None, calls=None)


def precision_of(counted: Counted) -> str:
    """Precision of most of its operations, as ceilings have it."""
    kinds = counted.operations
    most = max(kinds, key=kinds.__getitem__, default="FP32")
    return _VECTOR.get(most) or most.removesuffix(ncu.TENSOR).lower()
