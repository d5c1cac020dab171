"""Sums up what Nsight Compute counted: time, operations by kind, bytes by level, and what follows.

    ncu --import report.ncu-rep --csv > report.csv
    parse_ncu_csv.py report.csv --label resnet18_bs128 --out summary.txt

Either page of ncu's CSV will do; --page raw has all digits. A table of all kernels follows.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop import results
from workshop.arguments import argument, option, run
from workshop.errors import WorkshopError
from workshop.profilers import ncu
from workshop.profilers.names import display_name, printable
from workshop.profilers.ncu import Report

SEEDS_COUNTERS = tuple(
    f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum" for op in ("fadd", "fmul", "ffma")
)
"""Metrics of operations, without which there is nothing to sum up, as without memory's bytes."""
MOST_OFF = 0.02
"""Share of the model's operations: a larger difference is warned of."""
MOST_FLOPS = 1e21
"""Limit for a profiled step."""
MISSING = "kernels or kinds of operations are missing, or an algorithm needs fewer"
WHOLE_TILES = (
    "tensor cores count whole tiles, also where a layer has fewer channels than its tile; "
    "element-wise kernels count too, and whatever else ran"
)
NAME_WIDTH = 60


@dataclass
class Options:
    """The command line."""

    report: Path = argument("what ncu --import ... --csv printed", metavar="CSV")
    label: str | None = option("of the run (default: the file's name)", metavar="TEXT")
    out: Path | None = option("where the summary goes too (default: screen only)", metavar="FILE")
    flops: float | None = option(
        "operations of the model's layers in what was profiled, to compare with", metavar="N"
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _sum_up,
        argv,
        interrupted="interrupted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 2 wrong usage or a report without the metrics.",
    )


def _sum_up(options: Options) -> int:
    if options.flops is not None and not 1 <= options.flops <= MOST_FLOPS:
        raise WorkshopError(f"--flops {options.flops}: it must lie between 1 and {MOST_FLOPS:g}")
    if options.out:
        results.prepare_file(options.out, "--out")
    report = ncu.read_counts(options.report)
    missing = [metric for metric in SEEDS_COUNTERS if metric not in report.metrics]
    if ncu.DRAM not in report.total.moved:
        missing += ["dram__bytes_read.sum", "dram__bytes_write.sum"]
    if missing:
        raise WorkshopError(
            f"{report.path}: ncu did not collect {', '.join(missing)}: name them under --metrics, "
            "as run_ncu.sh does"
        )
    label = printable(options.label or options.report.stem)
    lines = *summary(report, label), *_doubts(report, options.flops), "", *_table(report)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out:
        results.write_text(options.out, text)
        print(f"Written: {options.out}")
    return errors.DONE


def summary(report: Report, label: str) -> Iterator[str]:
    """The sums over all kernels, in words."""
    total = report.total
    yield f"label: {label}"
    if report.device:
        yield f"device: {printable(report.device)}"
    yield f"kernels: {total.calls} launches of {len(report.kernels)} kernels"
    yield f"time: {total.time_ns / 1e6:.6f} ms, each kernel alone"
    yield f"FLOPs: {total.flops:.6g}"
    yield from (f"  {kind}: {count:.6g}" for kind, count in total.operations.items())
    yield from (f"bytes, {level}: {moved:.6g}" for level, moved in total.moved.items())
    intensities = {level: _ratio(total.flops, moved, 6) for level, moved in total.moved.items()}
    yield from (f"AI, {level}: {ai} FLOP/byte" for level, ai in intensities.items())
    yield f"GFLOP/s: {_ratio(total.flops, total.time_ns, 3)}"
    for part, busy in total.busy_ns.items():
        yield f"{part} throughput: {busy / total.time_ns:.1%} of its peak, by time"


def _ratio(amount: float, divisor: float | None, digits: int) -> str:
    """As --ai and --gflops take it; "-" for a division by nothing."""
    return f"{amount / divisor:.{digits}f}" if divisor else "-"


def _doubts(report: Report, model_flops: float | None) -> Iterator[str]:
    """Sentences on what is not in the figures, and on how far they are from the operations that
    the model's layers do."""
    total = report.total
    yield from (f"warning: {warning}" for warning in report.warnings)
    if not any(kind.endswith(ncu.TENSOR) for kind in total.operations):
        yield (
            "warning: the tensor cores' work is not in these metrics: products in fp16, bf16 and "
            "tf32 count as nothing, so FLOPs, AI and GFLOP/s may be far too low. Collect "
            "sm__ops_path_tensor_src_*.sum, as run_ncu.sh does"
        )
    absent = [level for level in ncu.CACHES if level not in total.moved]
    if absent:
        metrics = ", ".join(ncu.CACHES[level] for level in absent)
        yield f"note: bytes at {' and '.join(absent)} were not collected ({metrics})"
    if model_flops:
        off = total.flops / model_flops - 1
        yield f"model: {model_flops:.6g} FLOPs; counted {off:+.2%}"
        if abs(off) > MOST_OFF:
            why = MISSING if off < 0 else WHOLE_TILES
            yield f"warning: counted and model differ by more than {MOST_OFF:.0%}: {why}"


def _table(report: Report) -> Iterator[str]:
    """A line for each kernel, longest first."""
    levels = list(report.total.moved)
    yield " ".join(
        ["  share", " calls", "        ms", "     GFLOP", "  GFLOP/s",
         *(f"{'AI ' + level:>10}" for level in levels), " kernel"]
    )  # fmt: skip
    for kernel in report.kernels:
        rates = [_ratio(kernel.flops, kernel.time_ns, 3)]
        rates += [_ratio(kernel.flops, kernel.moved.get(level), 3) for level in levels]
        yield (
            f"{kernel.time_ns / report.total.time_ns:7.1%} {kernel.calls:6d} "
            f"{kernel.time_ns / 1e6:10.4f} {kernel.flops / 1e9:10.3f} "
            f"{' '.join(f'{rate:>10}' for rate in rates)}  {display_name(kernel.name, NAME_WIDTH)}"
        )


if __name__ == "__main__":
    sys.exit(main())
