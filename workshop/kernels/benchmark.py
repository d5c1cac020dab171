"""Times V3's kernels and other implementations, forward and backward; correct ones only.

The others are each operation's plain version, PyTorch's own operation, torch.compile of the plain
version, and, where they are installed, Liger-Kernel, FlashAttention and quack (the last two in
CuTe); with --mine also a function of yours. First all results and gradients are compared with the
plain version in fp64, and later those of a timed call; one that is wrong gets a red row and no
times. Rates are shown with what a large copy or product reaches on the same device in the same run.
A column has the device's time for a forward and backward pass, and the host's to launch it from
Python: a caller without a graph waits for the longer one.

Without a GPU the kernels run in Triton's interpreter, on small sizes, and nothing is timed.

    python -m workshop.kernels.benchmark --op rms_norm swiglu --quick
    python -m workshop.kernels.benchmark --op rms_norm --mine my_norm.py:rms_norm
"""

import argparse
import contextlib
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch

from workshop import errors, records, results, tables, versions
from workshop.arguments import count, option, run, seed_number, some_of
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import lab_record
from workshop.kernels import rows
from workshop.kernels.calls import Setting
from workshop.kernels.cases import (
    MINE,
    OPS,
    OURS,
    PACKAGES,
    PLAIN,
    checked_cases,
    draw_cases,
    make_cases,
)
from workshop.kernels.measure import Judge
from workshop.kernels.rows import Row
from workshop.labs import KERNELS
from workshop.run import hardware, interpreter
from workshop.run.precision import get_precision

ROUNDS, QUICK_ROUNDS = 20, 5
"""Timed turns of each implementation."""


@dataclass
class Options:
    op: list[str] = some_of(OPS, "NAME")
    mine: str = option(
        "a function of yours for that --op, which is called as below",
        "",
        metavar="FILE.py:NAME",
    )
    quick: bool = option("the first size of each operation, fewer rounds")
    drawn: int | None = option(
        "N sizes drawn by --seed, of the operations in turn, in the place of ours", type=count
    )
    precision: str = option(
        "of the tensors; auto is bf16 on a GPU that has it, else fp32 (default auto)",
        "auto",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    seed: int = option("of the sizes that --drawn draws", 42, type=seed_number)
    output_dir: Path = option(
        "for the result file, with all samples (default: results/kernels of this checkout)",
        results.DEFAULT_FOLDER / "kernels",
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _benchmark,
        argv,
        interrupted="interrupted before a size was complete: nothing saved",
        description=(__doc__ or "").split("\n\n    python")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Functions:\n  "
        + "\n  ".join(checked_cases(op)[0].signature for op in OPS)
        + "\n\nExit status: 0 done, 1 a kernel of ours, or yours, is wrong or does not run, "
        "2 wrong usage,\n77 Triton or rich is missing, or --drawn has no GPU, 130 interrupted "
        "(what was completed is\nsaved and shown).",
    )


def _benchmark(options: Options) -> int:
    errors.require("rich")
    if options.mine:
        if len(options.op) > 1:
            raise WorkshopError("--mine needs the operation that it does: --op NAME")
        versions.mine_file(options.mine)
    if reason := versions.missing(versions.get_version("v3")):
        raise NotOnThisMachine(reason)
    interpreted = interpreter.asked_for() or not torch.cuda.is_available()
    if options.drawn and interpreted:
        raise NotOnThisMachine("--drawn: these sizes take a GPU, and the kernels are interpreted")
    timed, device = not interpreted, hardware.get_device("cpu" if interpreted else "auto")
    precision = get_precision(options.precision, device)
    precision.set_matmul_mode()
    setting = Setting(device, precision)
    results.prepare_folder(options.output_dir)
    if options.drawn:
        cases = draw_cases(options.op, options.drawn, options.seed)
    else:
        cases = make_cases(options.op, timed=timed, quick=options.quick)
    first = lab_record.of_calls(device, precision, KERNELS, timed=timed, seed=options.seed)
    first.baseline = PLAIN
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            first.software[package] = importlib.metadata.version(package)
    path = records.path_in(options.output_dir, first.session)
    measured: list[Row] = []
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    judge = Judge(setting, rounds if timed else 0, first, options.mine)
    interrupted = False
    try:
        for case in tables.tracked(cases, "operations"):
            for record in judge.measure(case):
                records.save(record, path)
                measured.append(Row((record,)))
    except KeyboardInterrupt:
        interrupted = True
        if not measured:
            raise
    finally:
        judge.stop()
    rows.show(measured)
    print(f"Written: {path}")
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    ours_failed = any(row.failed for row in measured if row.implementation in (OURS, MINE))
    return errors.ANSWER_IS_NO if ours_failed else errors.DONE


if __name__ == "__main__":
    sys.exit(main())
