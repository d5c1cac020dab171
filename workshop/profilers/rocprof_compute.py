"""What rocprof-compute writes: a workload folder with the counters of every dispatch, and the
measured ceilings of the machine's GPUs.

It replays the program for each group of counters, with kernels one at a time: a kernel's times are
true, but nothing shows when the GPU idles, nor which step or phase a kernel belongs to.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.profilers import amd_counters
from workshop.profilers.amd_counters import Counters
from workshop.profilers.reading import CsvTable, NoNumber, Notes, Problems, number
from workshop.profilers.rocprofv3_formats import interval
from workshop.profilers.table import Kernel, KernelTable, Sums

_MERGED = "pmc_perf.csv"
_UNMERGED = ("pmc_perf_*.csv", "results_*.csv")
"""What 7.13 and later leave, one for each replay, until `analyze` merges them."""
_TIMES = "timestamps.csv"
_ROOFLINE = "roofline.csv"
_CEILING = re.compile(r"(?P<name>\w+?)(?P<unit>bw|flops|ops)", re.IGNORECASE)


def read(path: Path) -> KernelTable:
    """The kernels of a workload: the folder `path`, or the first by name that lies below it, or
    that of the file `path`. A counter's figure is the mean over a kernel's dispatches, times its
    calls.

    Raises:
        WorkshopError: there is no workload, or no kernel in it.
    """
    workloads = _workloads(path)
    if not workloads:
        hint = (
            "it has ceilings and no kernels: profile without --roof-only"
            if _has_ceilings(path)
            else "give what `rocprof-compute profile` wrote"
        )
        raise WorkshopError(f"{path}: no workload in it, a folder with {_MERGED}; {hint}")
    folder, *others = workloads
    table = _table(folder, path)
    table.warnings += [f"{other} holds another workload, which is left out" for other in others]
    return table


def recognises(path: Path) -> bool:
    """Whether a folder, or one below it, is a workload of rocprof-compute's."""
    return bool(_workloads(path)) or _has_ceilings(path)


def _has_ceilings(folder: Path) -> bool:
    return any(_has_columns(file, "device", "HBMBw") for file in folder.rglob(_ROOFLINE))


def _workloads(path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent] if path in _files(path.parent) else []
    files = (file for pattern in (_MERGED, *_UNMERGED) for file in path.rglob(pattern))
    return [folder for folder in sorted({file.parent for file in files}) if _files(folder)]


def _files(workload: Path) -> list[Path]:
    """The tables of counters in a folder: the merged one, or else all that it would be made of."""
    merged = workload / _MERGED
    if merged.is_file():
        return [merged]
    files = {file for pattern in _UNMERGED for file in workload.glob(pattern)}
    return [file for file in sorted(files) if _has_columns(file, "Dispatch_ID", "Kernel_Name")]


def _has_columns(file: Path, *columns: str) -> bool:
    with contextlib.suppress(WorkshopError):
        return set(columns) <= CsvTable(file, Problems(file)).columns.keys()
    return False


def _table(folder: Path, path: Path) -> KernelTable:
    """Of one workload.

    Args:
        path: the table's.
    """
    files, counters = _files(folder), Counters()
    notes = Notes(files[0])
    # Every file is a replay of the same kernels, so one of them gives the times.
    replays = [kernels for file in files if (kernels := _kernels(file, counters, notes))]
    times = folder / _TIMES
    if not any(map(_total_ns, replays)) and times.is_file():
        replays.append(_kernels(times, counters, notes))
    kernels = next(filter(_total_ns, replays), next(iter(replays), []))
    if not kernels:
        raise notes.nothing_found("kernels")
    counters.fill(kernels)
    table = KernelTable(path, "rocprof-compute", kernels, device=_device(folder))
    if not _total_ns(kernels):
        table.warnings.append(f"{folder}: all times are 0: they are missing, or rounded")
    table.warnings += counters.warnings(table.device) + notes.warnings()
    return table


def _kernels(file: Path, counters: Counters, notes: Notes) -> list[Kernel]:
    """The kernels of one file, with their times; adds its counters."""
    problems, sums = Problems(file), Sums()
    notes.problems.append(problems)
    try:
        _add_rows(CsvTable(file, problems), problems, sums, counters)
    except WorkshopError as error:
        notes.errors.append(error)
    return sums.kernels()


def _add_rows(table: CsvTable, problems: Problems, sums: Sums, counters: Counters) -> None:
    """A counter has a column of its own, or a row of its own; a dispatch has only those of its
    replay, and its times with every one of them."""
    used = list(filter(amd_counters.is_used, table.columns))  # of about a thousand
    optional = ("GPU_ID", "Start_Timestamp", "End_Timestamp", "Counter_Name", "Counter_Value")
    rows = table.select("Kernel_Name", "Dispatch_ID", *used, optional=optional)
    seen: set[tuple[str, str | None]] = set()
    for row, (kernel, dispatch, *values, gpu, start, end, counter, value) in rows:
        with problems.noted(row):
            name = amd_counters.plain_name(kernel)
            if not name:
                raise NoNumber("has no kernel name")
            if (dispatch, gpu) not in seen:
                # Those of a table without times count all the same.
                sums.add(name, 0 if start is None or end is None else interval(start, end)[1])
                seen.add((dispatch, gpu))
            if counter is not None and value is not None:
                counters.add(name, counter, value)
            for column, counted in zip(used, values, strict=True):
                if counted:
                    counters.add(name, column, counted)


def _total_ns(kernels: list[Kernel]) -> float:
    return sum(kernel.total_ns for kernel in kernels)


def _device(workload: Path) -> str | None:
    """As "MI300X_A1 (gfx942)"."""
    path = workload / "sysinfo.csv"
    with contextlib.suppress(WorkshopError):
        for _, (model, chip) in CsvTable(path, Problems(path)).select("gpu_model", "gpu_arch"):
            return f"{model} ({chip})"
    return None


# --- ceilings ---


@dataclass(frozen=True)
class Ceilings:
    """What micro-benchmarks reached on one GPU; what was not measured is absent."""

    device: int
    """The GPU's number."""
    bandwidths_gbs: Mapping[str, float]
    """GB/s by level: "HBM", "MALL", "L2", "L1", "LDS"."""
    rates_gflops: Mapping[str, float]
    """10^9 operations a second by type, those of the matrix units under "MFMA...": "FP32",
    "MFMABF16", "MFMAI8", ..."""


def ceilings(folder: Path) -> list[Ceilings]:
    """The ceilings of the first roofline.csv in a folder or below it; none without one.

    Raises:
        WorkshopError: it can't be read, or has no ceilings in it.
    """
    found = min(folder.rglob(_ROOFLINE), default=None)
    return [] if found is None else read_roofline(found)


def read_roofline(path: Path) -> list[Ceilings]:
    """The ceilings in a roofline.csv, one entry for each GPU. The bounds of their confidence
    intervals, in columns of their own, are left out.

    Raises:
        WorkshopError: it can't be read, or has no ceilings in it.
    """
    problems = Problems(path)
    table = CsvTable(path, problems)
    columns = {name: match for name in table.columns if (match := _CEILING.fullmatch(name))}
    found = []
    for row, (device, *values) in table.select("device", *columns):
        kinds: dict[str, dict[str, float]] = {"bw": {}, "flops": {}, "ops": {}}
        with problems.noted(row):
            gpu = int(number(device))
            for match, text in zip(columns.values(), values, strict=True):
                if (value := number(text)) > 0:
                    kinds[match["unit"].lower()][match["name"].upper()] = value
            if any(kinds.values()):
                found.append(Ceilings(gpu, kinds["bw"], kinds["flops"] | kinds["ops"]))
    if not found:
        raise problems.error("ceilings")
    return found
