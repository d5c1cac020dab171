#!/usr/bin/env python3
"""How many floating-point operations a training step needs, by three counters side by side:
PyTorch's FlopCounterMode, DeepSpeed's flops profiler, and the model's sizes multiplied. And what
share of the chip's peak the step reaches (MFU). Works on a CPU too, and without DeepSpeed.

    ./run_deepspeed_flops.py --steps 10 -- --config medium --precision bf16
"""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from workshop.needed import import_torch

    import_torch()

import torch

from workshop import errors
from workshop.profilers import flop_counts, profile_run
from workshop.profilers.flop_counts import CountedStep, Operators
from workshop.request import Data, Request, print_configuration


def count_with_torch(step: CountedStep) -> tuple[Operators, Operators]:
    """FLOP of the operators that PyTorch dispatches, forward and backward, by formulas for each."""
    # Not above: it imports Triton, which V3's kernels must have done first.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        loss = step.forward()
    with FlopCounterMode(display=False) as backward:
        step.backward(loss)
    return flop_counts.by_operator(forward), flop_counts.by_operator(backward)


def count_with_deepspeed(step: CountedStep, report: Path) -> tuple[int, int]:
    """FLOP and multiply-accumulates of a forward pass, in the functions that DeepSpeed patches."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(step.model)
    profiler.start_profile()
    try:
        with torch.no_grad():  # in training, V3 computes gradients in this pass already
            step.forward()
        profiler.print_model_profile(output_file=str(report))  # module by module
        return profiler.get_total_flops(), profiler.get_total_macs()
    finally:
        profiler.end_profile()  # which forgets the counts


def main(arguments: argparse.Namespace) -> int:
    request = profile_run.make_request(arguments.version, arguments.model_flags, arguments.steps)
    return profile_run.run(request, arguments, partial(count, request, arguments))


def count(request: Request, arguments: argparse.Namespace, data: Data) -> int:
    folder, (batches, data_record) = arguments.output_dir, data
    print_configuration(request, data_record)
    report = flop_counts.count(
        request,
        batches[0],
        count_with_torch,
        count_with_deepspeed,
        folder / "deepspeed_profile.txt",
    )
    if not request.interpreted:
        report.utilisation = flop_counts.measure_utilisation(request, batches)
    return flop_counts.write(report, folder, arguments.command)


if __name__ == "__main__":
    arguments = profile_run.runner_arguments(
        "Counts the FLOP of a training step with FlopCounterMode, DeepSpeed and from the model's "
        "sizes, explains the differences, and times steps for the MFU.",
        steps=10,
        argv=sys.argv,
    )
    message = "interrupted before anything was run"
    sys.exit(errors.exit_status(lambda: main(arguments), interrupted=message))
