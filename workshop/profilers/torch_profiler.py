"""What run_pytorch_profiler.py makes of a profile: tables of operators, the memory's history, and
of the trace the kernel table.

Python needs torch for it; the trace itself is read by kineto.py.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from workshop import results
from workshop.profilers.profile_run import ProfileRun, gradients_sentence

SNAPSHOT_FILE = "memory_snapshot.pickle"
SNAPSHOT_STEPS = 1
"""Steps trained for the snapshot of memory, after the profile: recording slows the host."""
_SNAPSHOT_EVENTS = 200_000
_TABLE_ROWS = 40
_COLUMNS = (
    "count",
    "self_cpu_time_total",
    "cpu_time_total",
    "self_device_time_total",
    "device_time_total",
    "self_cpu_memory_usage",
    "self_device_memory_usage",
)
"""Of an operator's row, by the names that PyTorch gives them: times in µs, memory in bytes."""


def write_operators(profiler: profile, folder: Path, *, stacks: bool) -> None:
    """Writes operators.csv and operators.txt (by name), operators_by_shape.csv, and with `stacks`
    operators_by_line.txt (by the functions that called them, each with its first line); longest
    own time on the device first, on a CPU its own time there."""
    by_name = profiler.key_averages()
    on_device = any(row.self_device_time_total for row in by_name)
    sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
    by_shape = profiler.key_averages(group_by_input_shape=True)
    _write_csv(folder / "operators.csv", by_name, ["key"], sort_by)
    _write_csv(folder / "operators_by_shape.csv", by_shape, ["key", "input_shapes"], sort_by)
    tables = {"operators.txt": by_name}
    if stacks:
        tables["operators_by_line.txt"] = profiler.key_averages(group_by_stack_n=5)
    for name, rows in tables.items():
        table = rows.table(sort_by=sort_by, row_limit=_TABLE_ROWS, max_name_column_width=60)
        results.write_text(folder / name, table + "\n")


def _write_csv(target: Path, rows: Iterable[Any], what: list[str], sort_by: str) -> None:
    # A range on the GPU lasts from its first kernel to its last, gaps and all: no operator's time.
    operators = (row for row in rows if not getattr(row, "is_user_annotation", False))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["operator", *what[1:], *_COLUMNS])
    for row in sorted(operators, key=lambda row: -getattr(row, sort_by)):
        writer.writerow(getattr(row, column) for column in (*what, *_COLUMNS))
    results.write_text(target, text.getvalue())


def write_memory_snapshot(run: ProfileRun, folder: Path) -> None:
    """Trains one more step, operation by operation, while PyTorch's allocator notes each block
    that is taken and given back, and the Python lines that did it: SNAPSHOT_FILE, for
    https://pytorch.org/memory_viz. On a CPU there is no such allocator, and nothing to do."""
    if run.runner.device.type != "cuda":
        return
    record, dump = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot
    record(max_entries=_SNAPSHOT_EVENTS)
    try:
        run.eager_step()
        run.runner.wait()
        with results.atomic_path(folder / SNAPSHOT_FILE) as path:
            dump(str(path))
    finally:
        record(enabled=None)


def show(run: ProfileRun, folder: Path) -> int:
    """Prints the hot list of the trace, and what it says of the run; the exit status."""
    from rich.console import Console

    from workshop.profilers import advisor, kernel_file
    from workshop.profilers import show as tables

    status = tables.show(folder, output_dir=folder)
    print(gradients_sentence(run.record))
    table = kernel_file.read(folder / kernel_file.JSON_FILE)  # a trace takes long to read
    Console().print(advisor.render(advisor.advise(table, run.record)))
    if run.runner.device.type == "cpu":
        print("The profiler slows every operator on a CPU: read shares and counts, not times.")
    return status
