"""Finds out what a file or folder is, and has the right parser read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workshop.errors import WorkshopError
from workshop.profilers import (
    kernel_file,
    kineto,
    ncu,
    nsys,
    proton,
    reading,
    rocprof_compute,
    rocprofv3,
)
from workshop.profilers.names import printable
from workshop.profilers.table import KernelTable

if TYPE_CHECKING:
    from workshop.results import RunResult

_START = 1 << 16
"""Characters of a JSON text that tell what it is."""
_OTHERS_OPEN = {
    ".nsys-rep": "nsys stats --report cuda_gpu_kern_sum --format csv {path}",
    ".ncu-rep": "ncu --import {path} --csv --page raw",
    ".pftrace": None,
    ".proto": None,
}
"""Formats that their own tools open: the command that makes what can be read here of them, or
None for a timeline, which Perfetto shows."""
_KNOWN = (
    "rocprofv3's CSV, JSON and .db, a rocprof-compute workload, ncu's CSV, nsys's CSV, a trace of "
    "torch.profiler, Proton's .hatchet"
)


def load(path: Path) -> KernelTable:
    """The kernel table of what a profiler wrote.

    Args:
        path: a file, or a folder with one tool's outputs, such as a runner's.

    Raises:
        WorkshopError: it is nothing that is known, or nothing in it is valid.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise WorkshopError(f"{path}: no such file or folder")
    if rocprofv3.is_database(path):
        return rocprofv3.read(path)
    if path.suffix in _OTHERS_OPEN:
        raise WorkshopError(_to_open(path))
    start = _start(path)
    if start.lstrip()[:1] in ("{", "["):
        return _load_json(path, start)
    return _load_csv(path)


def recorded_run(path: Path) -> RunResult | None:
    """The record that a runner of this workshop put beside a profile, in its folder or in the one
    above; None for another program's profile.

    Raises:
        WorkshopError: there is one, and it is broken.
    """
    from workshop import profile_run, results  # which import torch: not to be waited for by all

    folder = path if path.is_dir() else path.parent
    for place in (folder, folder.parent):
        if (place / profile_run.RUN_FILE).is_file():
            return results.load(place / profile_run.RUN_FILE)
    return None


def _load_folder(folder: Path) -> KernelTable:
    """Reads the outputs of the one tool that has filled a folder."""
    if rocprof_compute.recognises(folder):
        return rocprof_compute.read(folder)
    for pattern, reader in (
        ("*.hatchet", proton),
        ("*_cuda_gpu_kern_sum.csv", nsys),
        ("*_cuda_gpu_trace.csv", nsys),
        ("*trace.json*", kineto),
        ("*_kernel_trace.csv", rocprofv3),
        ("*_kernel_stats.csv", rocprofv3),
        ("*_counter_collection.csv", rocprofv3),
        ("*_results.db", rocprofv3),
        ("*_results.json", rocprofv3),
    ):
        found = sorted(folder.rglob(pattern))
        if found:
            # Proton's is one file; the others know how their files belong together.
            return proton.read(found[0]) if reader is proton else reader.read(folder)
    for path in sorted(folder.rglob("*.csv")):
        if ncu.recognises(path):
            return ncu.read(path)
    if (folder / kernel_file.JSON_FILE).is_file():
        return kernel_file.read(folder / kernel_file.JSON_FILE)
    raise WorkshopError(f"{folder}: no profiler's output in it; known are {_KNOWN}")


def _start(path: Path) -> str:
    start = ""
    for line in reading.lines(path):
        start += line
        if len(start) >= _START:
            break
    return start


def _load_json(path: Path, start: str) -> KernelTable:
    for reader in (kernel_file, rocprofv3, kineto, proton):
        if reader.recognises_json(start):
            return reader.read(path)
    raise WorkshopError(f"{path}: JSON of no profiler that is known here: {_KNOWN}")


def _load_csv(path: Path) -> KernelTable:
    if ncu.recognises(path):
        return ncu.read(path)
    columns = list(reading.CsvTable(path, reading.Problems(path)).columns)
    for reader in (rocprofv3, nsys):
        if reader.recognises_header(columns):
            return reader.read(path)
    for workload in (path, path.parent / "pmc_perf.csv"):  # any file of one stands for it
        if workload.is_file() and rocprof_compute.recognises(workload):
            return rocprof_compute.read(workload)
    raise WorkshopError(
        f"{path}: its columns ({printable(', '.join(columns))[:120]}) are of no profiler that is "
        f"known here: {_KNOWN}"
    )


def _to_open(path: Path) -> str:
    command = _OTHERS_OPEN[path.suffix]
    if command is None:
        return f"{path}: a timeline, which no table shows: open it in https://ui.perfetto.dev"
    return f"{path}: its own tool reads it first: {command.format(path=path)}"
