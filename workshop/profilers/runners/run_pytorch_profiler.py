#!/usr/bin/env python3
"""PyTorch's profiler: which operators and kernels a step runs, when, on which shapes,
and with how much memory. Works on a CPU too.

    ./run_pytorch_profiler.py --steps 3 -- --config medium --precision bf16
"""

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere
    from workshop.needed import import_torch

    import_torch()

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from workshop import errors, results
from workshop.profilers import profile_run
from workshop.profilers.profile_run import Prepare, Watched
from workshop.run import markers

WAIT, WARMUP = 1, 1
"""Steps that are not recorded, and steps whose records are thrown away: a profiler starts slow."""
SNAPSHOT_STEPS = 1
"""Steps run for the snapshot of memory, after the profile: recording slows the host."""
SNAPSHOT_EVENTS = 200_000
TABLE_ROWS = 40
COLUMNS = (
    "count",
    "self_cpu_time_total",
    "cpu_time_total",
    "self_device_time_total",
    "device_time_total",
    "self_cpu_memory_usage",
    "self_device_memory_usage",
)
"""Columns of an operator's row, by PyTorch's names: times in µs, memory in bytes."""


def main(arguments: argparse.Namespace) -> int:
    steps = WAIT + WARMUP + arguments.steps + SNAPSHOT_STEPS
    plan = profile_run.plan(arguments.program, arguments.model_flags, steps)
    if not arguments.dry_run:
        errors.require("rich")  # which draws the tables
    return profile_run.run(plan, arguments, partial(profile_program, arguments))


def profile_program(arguments: argparse.Namespace, prepare: Prepare) -> int:
    folder, stacks = arguments.output_dir, arguments.stacks
    run = prepare(markers.for_torch_profiler)
    with run.layer_ranges():
        profiler = profile_steps(run, arguments)
    write_operators(profiler, folder, stacks=stacks)
    if run.device.type == "cuda":  # a CPU has no such allocator
        write_memory_snapshot(run, folder / "memory_snapshot.pickle")
    run.record.options["num_steps"] = arguments.steps
    run.save_record(folder)
    return show(run, folder)


def profile_steps(run: Watched, arguments: argparse.Namespace) -> profile:
    """Runs WAIT + WARMUP + `steps` steps, and records the last `steps` into `trace`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    steps, stacks = arguments.steps, arguments.stacks
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":  # so it is called on AMD too
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(
            str(arguments.output_dir / "trace"), worker_name=arguments.program.key, use_gzip=True
        ),
        record_shapes=True,  # of every operator's inputs
        profile_memory=True,  # what every operator allocates and frees
        with_stack=stacks,  # the Python functions behind it: slow, so only on request
        # Or the trace alone has the stacks, as separate lanes, and no operator has its callers.
        experimental_config=_ExperimentalConfig(verbose=stacks),
    ) as profiler:
        for done in range(1, WAIT + WARMUP + steps + 1):
            run.step()
            if done == WAIT + WARMUP:
                run.wait()  # or kernels of these steps would be recorded as well
            profiler.step()
    return profiler


def write_operators(profiler: profile, folder: Path, *, stacks: bool) -> None:
    """Writes operators.csv and operators.txt (by name), operators_by_shape.csv, and with `stacks`
    operators_by_line.txt (by the functions that called them, each with its first line); longest
    own time on the device first, on a CPU its own time there."""
    by_name = profiler.key_averages()
    on_device = any(row.self_device_time_total for row in by_name)
    sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
    by_shape = profiler.key_averages(group_by_input_shape=True)
    write_csv(folder / "operators.csv", by_name, ["key"], sort_by)
    write_csv(folder / "operators_by_shape.csv", by_shape, ["key", "input_shapes"], sort_by)
    tables = {"operators.txt": by_name}
    if stacks:
        tables["operators_by_line.txt"] = profiler.key_averages(group_by_stack_n=5)
    for name, rows in tables.items():
        table = rows.table(sort_by=sort_by, row_limit=TABLE_ROWS, max_name_column_width=60)
        results.write_text(folder / name, table + "\n")


def write_csv(target: Path, rows: Iterable[Any], what: list[str], sort_by: str) -> None:
    # A range on the GPU lasts from its first kernel to its last, gaps and all: no operator's time.
    operators = (row for row in rows if not getattr(row, "is_user_annotation", False))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["operator", *what[1:], *COLUMNS])
    for row in sorted(operators, key=lambda row: -getattr(row, sort_by)):
        writer.writerow(getattr(row, column) for column in (*what, *COLUMNS))
    results.write_text(target, text.getvalue())


def write_memory_snapshot(run: Watched, target: Path) -> None:
    """Runs one more step, operation by operation, while PyTorch's allocator notes each block
    that is taken and given back, and the Python lines that did it: for
    https://pytorch.org/memory_viz."""
    record, dump = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot
    record(max_entries=SNAPSHOT_EVENTS)
    try:
        run.eager_step()
        run.wait()
        with results.atomic_path(target) as path:
            dump(str(path))
    finally:
        record(enabled=None)


def show(run: Watched, folder: Path) -> int:
    """Prints the trace's hot list and the advice on it; the exit status."""
    from rich.console import Console

    from workshop.profilers import advisor, kernel_file
    from workshop.profilers import show as tables

    status = tables.show(folder, output_dir=folder)
    print(run.verdict())
    table = kernel_file.read(folder / kernel_file.JSON_FILE)  # a trace takes long to read
    Console().print(advisor.render(advisor.advise(table, run.record)))
    if run.device.type == "cpu":
        print("The profiler slows every operator on a CPU: read shares and counts, not times.")
        print("PyTorch's warning is about memory older than the profile: it changes no time.")
    return status


if __name__ == "__main__":
    stacks = "also record the Python functions behind every operator (slower, larger trace)"
    arguments = profile_run.runner_arguments(
        "Profiles steps with torch.profiler: trace, operators, kernels, memory.",
        steps=3,
        argv=sys.argv,
        switches={"--stacks": stacks},
    )
    message = "interrupted before anything was run"
    sys.exit(errors.exit_status(lambda: main(arguments), interrupted=message))
