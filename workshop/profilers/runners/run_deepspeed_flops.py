#!/usr/bin/env python3
"""How many floating-point operations a training step needs, by three counters side by side:
PyTorch's FlopCounterMode, DeepSpeed's flops profiler, and the model's sizes multiplied. And what
share of the chip's peak the step reaches (MFU). Works on a CPU too, and without DeepSpeed.

    ./run_deepspeed_flops.py --steps 10 -- --config medium --precision bf16
"""

import argparse
import sys

if __name__ == "__main__":  # PyTorch is not everywhere
    from workshop.needed import import_torch

    import_torch()

from workshop import errors
from workshop.errors import NotOnThisMachine
from workshop.profilers import flop_counts, profile_run
from workshop.request import Data, print_configuration


def main(arguments: argparse.Namespace) -> int:
    version = arguments.program.version
    if version is None:
        raise NotOnThisMachine(
            "this script explains the operations of a Tiny-LLaMA; of any other network "
            f"`python {arguments.program.path.name} --flops-prof-step N` counts them by layer"
        )
    request = profile_run.make_request(version, arguments.model_flags, arguments.steps)

    def count(data: Data) -> int:
        folder, (batches, data_record) = arguments.output_dir, data
        print_configuration(request, data_record)
        record = flop_counts.count(request, batches[0], folder / "deepspeed_profile.txt")
        if not request.interpreted:
            record |= flop_counts.measure_utilisation(request, batches)
        return flop_counts.write(record, folder, arguments.command)

    return profile_run.run(profile_run.plan_of(request), arguments, count)


if __name__ == "__main__":
    arguments = profile_run.runner_arguments(
        "Counts the FLOP of a training step with FlopCounterMode, DeepSpeed and from the model's "
        "sizes, says why they differ, and times steps for the MFU.",
        steps=10,
        argv=sys.argv,
    )
    message = "interrupted before anything was run"
    sys.exit(errors.exit_status(lambda: main(arguments), interrupted=message))
