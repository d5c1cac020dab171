#!/usr/bin/env python3
"""PyTorch's profiler: which operators and kernels a training step runs, when, on which shapes,
and with how much memory. Works on a CPU too.

    ./run_pytorch_profiler.py --steps 3 -- --config medium --precision bf16
"""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from workshop.needed import import_torch

    import_torch()

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from workshop import errors
from workshop.profilers import profile_run, torch_profiler
from workshop.request import Data, Request
from workshop.run import markers

WAIT, WARMUP = 1, 1
"""Steps that are not recorded, and steps whose records are thrown away: a profiler starts slow."""


def profile_steps(
    run: profile_run.ProfileRun, steps: int, *, stacks: bool, folder: Path
) -> profile:
    """Trains WAIT + WARMUP + `steps` steps, of which the last ones are recorded into `folder`."""
    activities = [ProfilerActivity.CPU]
    if run.runner.device.type == "cuda":  # so it is called on AMD too
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(
            str(folder), worker_name=run.request.version.key, use_gzip=True
        ),
        record_shapes=True,  # of every operator's inputs
        profile_memory=True,  # what every operator allocates and frees
        with_stack=stacks,  # the Python functions behind it: slow, so only on request
        # Or the trace alone has the stacks, as lanes of its own, and no operator has its callers.
        experimental_config=_ExperimentalConfig(verbose=stacks),
    ) as profiler:
        for done in range(1, WAIT + WARMUP + steps + 1):
            run.step()
            if done == WAIT + WARMUP:
                run.runner.wait()  # or kernels of these steps would be recorded as well
            profiler.step()
    return profiler


def main(arguments: argparse.Namespace) -> int:
    steps = WAIT + WARMUP + arguments.steps + torch_profiler.SNAPSHOT_STEPS
    request = profile_run.make_request(arguments.version, arguments.model_flags, steps)
    if not arguments.dry_run:
        errors.require("rich")  # which draws the tables
    return profile_run.run(request, arguments, partial(profile_version, request, arguments))


def profile_version(request: Request, arguments: argparse.Namespace, data: Data) -> int:
    folder = arguments.output_dir
    run = profile_run.prepare(request, data, range_=markers.for_torch_profiler)
    with run.layer_ranges():
        profiler = profile_steps(
            run, arguments.steps, stacks=arguments.stacks, folder=folder / "trace"
        )
    torch_profiler.write_operators(profiler, folder, stacks=arguments.stacks)
    torch_profiler.write_memory_snapshot(run, folder)
    run.record.options["num_steps"] = arguments.steps
    run.save_record(folder)
    return torch_profiler.show(run, folder)


if __name__ == "__main__":
    arguments = profile_run.runner_arguments(
        "Profiles training steps with torch.profiler: trace, operators, kernels, memory.",
        steps=3,
        argv=sys.argv,
        switches={
            "--stacks": "also record the Python functions behind every operator (slower, larger "
            "trace)"
        },
    )
    message = "interrupted before anything was run"
    sys.exit(errors.exit_status(lambda: main(arguments), interrupted=message))
