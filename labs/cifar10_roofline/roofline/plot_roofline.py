"""Draws a roofline: of one point that is typed, or of every kernel that a profiler counted.

    plot_roofline.py --ai 15.624057 --gflops 1466.556 --peak-compute 30.0 --peak-bw 300.0 \\
        --label resnet18_bs128_L4 --out resnet18_bs128_L4.png
    plot_roofline.py --report report.csv --peak-l2 5500 --label resnet18 --out resnet18.png

A report is ncu's CSV, or the folder that rocprof-compute or rocprofv3 filled. With ncu's metrics of
the caches each kernel is a point at L1, L2 and memory. What follows is printed in words.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, results
from workshop.arguments import option, run
from workshop.errors import WorkshopError
from workshop.profilers.metrics import digits
from workshop.profilers.names import printable
from workshop.roofline import ceilings, hierarchy, inputs
from workshop.roofline.model import (
    COMPUTE,
    MEMORY,
    Point,
    Roofline,
    flags,
    rate_text,
    sentences,
)
from workshop.show import roofline_chart

DESCRIBED = 12
"""Points, at most, that are described in words."""


@dataclass
class Options:
    """The command line."""

    ai: float | None = option("FLOP per byte of memory traffic")
    gflops: float | None = option("10^9 FLOP/s")
    report: Path | None = option("instead of --ai and --gflops", metavar="PATH")
    peak_compute: float | None = option("TFLOP/s at --precision")
    peak_bw: float | None = option("GB/s of the memory")
    peak_l2: float | None = option("GB/s of the L2 cache")
    peak_l1: float | None = option("GB/s of the L1 cache")
    precision: str | None = option(
        "of --peak-compute (default: that of most operations, else fp32)",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    label: str | None = option(
        "of the point, or of all kernels (default: the file's name)", metavar="TEXT"
    )
    out: Path = option("the picture, a PNG", Path("roofline.png"), metavar="FILE")


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _plot,
        argv,
        interrupted="interrupted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 2 wrong usage or no counters, 77 a package is missing.",
    )


def _plot(options: Options) -> int:
    roofline = _roofline(options)
    errors.require("matplotlib")
    results.prepare_file(options.out, "--out")
    main_point = roofline.points[0]
    precision = options.precision or main_point.precision
    caches = {"L2": options.peak_l2, "L1": options.peak_l1}
    given = inputs.given_ceilings(options.peak_compute, options.peak_bw, precision, caches)
    ceilings.attach(roofline, given=given)
    with results.atomic_path(options.out) as path:
        roofline_chart.draw(roofline, path, labels=min(DESCRIBED, roofline_chart.MOST_DRAWN))
    for line in (*sentences(roofline, DESCRIBED), *ridge(roofline, main_point), *flags(roofline)):
        print(line)
    for note in roofline.notes:
        print(f"note: {note}")
    print(f"Written: {options.out}")
    return errors.DONE


def _roofline(options: Options) -> Roofline:
    """Raises WorkshopError: neither a report nor both numbers are given, or all of them."""
    ai, gflops, report = options.ai, options.gflops, options.report
    if report is not None and ai is None and gflops is None:
        label = printable(options.label or report.stem)
        return hierarchy.load(report, label, precision=options.precision)
    if report is not None or ai is None or gflops is None:
        raise WorkshopError("give --ai and --gflops, or --report alone (see --help)")
    label = options.label or "point"
    return inputs.from_numbers(ai, gflops, label, options.precision or "fp32")


def ridge(roofline: Roofline, point: Point) -> list[str]:
    """On which side of the ridge a point lies, and its share of the roof there, in sentences; none
    where a ceiling or its intensity is not known."""
    memory, compute = (roofline.limit(point, kind) for kind in (MEMORY, COMPUTE))
    if not (memory and compute and point.intensity and point.flops_per_s):
        return []
    at, reached = compute.rate / memory.rate, min(compute.rate, point.intensity * memory.rate)
    side, limit = ("left", "memory") if point.intensity < at else ("right", "compute")
    return [
        f"ridge point: {rate_text(compute.rate, COMPUTE)} / {rate_text(memory.rate, MEMORY)} = "
        f"{digits(at)} FLOP/byte; {digits(point.intensity)} lies {side} of it, where {limit} is "
        "the lower roof",
        f"the roof there: {rate_text(reached, COMPUTE)}; "
        f"{rate_text(point.flops_per_s, COMPUTE)} is {point.flops_per_s / reached:.0%} of it",
    ]


if __name__ == "__main__":
    sys.exit(main())
