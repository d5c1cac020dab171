"""rocprof-compute's output: a workload folder with the counters of every dispatch, and the
measured ceilings of the machine's GPUs.

It replays the program for each group of counters, with kernels one at a time: a kernel's times are
true, but nothing shows when the GPU idles, nor which step or phase a kernel belongs to.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.profilers import amd_counters, reading
from workshop.profilers.amd_counters import Counters
from workshop.profilers.reading import CsvTable, Invalid, Problems
from workshop.profilers.rocprofv3_formats import from_database, interval
from workshop.profilers.table import KernelTable, Sums

_MERGED = "pmc_perf.csv"
_TABLES = re.compile(r"(?:pmc_perf(?:_.+)?|results_.+)\.csv(?:\.gz)?")
"""The merged one, and what 7.13 and later leave, one for each replay, until `analyze` merges them;
compressed from 10.1."""
_SYSINFO = "sysinfo.csv"
_OWN_COUNTERS = "_native_counter_collection.csv.gz"
"""The end of the name of a process's counters, where the databases have none."""
_ROOFLINE = "roofline.csv"
_CEILING = re.compile(r"(?P<name>\w+?)(?P<unit>bw|flops|ops)", re.IGNORECASE)


def read(path: Path) -> KernelTable:
    """The kernels of a workload: the folder `path`, or the first by name that lies below it, or
    that of the file `path`. A counter's figure is the mean over a kernel's dispatches, times its
    calls. Raises WorkshopError: there is no workload, or no kernel in it."""
    workloads = _workloads(path)
    if not workloads:
        raise WorkshopError(
            f"{path}: no workload in it, a folder with {_MERGED} or results_*.csv, which "
            "`rocprof-compute profile` writes; --bench-only leaves ceilings and no kernels"
        )
    folder, *others = workloads
    table = _table(folder, path)
    table.warnings += [f"{other} holds another workload, which is left out" for other in others]
    return table


def recognises(path: Path) -> bool:
    """Whether a folder, or one below it, is a workload of rocprof-compute's, or a file lies in
    one."""
    return bool(_workloads(path)) or (path.is_dir() and any(path.rglob(_ROOFLINE)))


def _workloads(path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent] if _replays(path.parent) else []
    names = (file for file in path.rglob("*.csv*") if file.name == _SYSINFO or _is_table(file))
    return [folder for folder in sorted({file.parent for file in names}) if _replays(folder)]


def _is_table(file: Path) -> bool:
    return _TABLES.fullmatch(file.name) is not None


def _replays(workload: Path) -> list[list[Path]]:
    """The files of each replay: the merged table alone, or else the tables that it would be made
    of, or else the databases, one for each process."""
    tables = sorted(file for file in workload.glob("*.csv*") if _is_table(file))
    merged = [file for file in tables if file.name.removesuffix(".gz") == _MERGED]
    if merged:
        return [merged[:1]]
    tables = [file for file in tables if _has_columns(file, "Dispatch_ID", "Kernel_Name")]
    if tables or not _has_columns(workload / _SYSINFO, "gpu_arch"):
        return [[table] for table in tables]
    replays = defaultdict(list)
    for database in sorted(workload.rglob("*.db")):  # as out/REPLAY/HOST/PROCESS.db
        replays[database.relative_to(workload).parts[:2]].append(database)
    return list(replays.values())


def _has_columns(file: Path, *columns: str) -> bool:
    with contextlib.suppress(WorkshopError):
        return set(columns) <= CsvTable(file, Problems(file)).columns.keys()
    return False


def _table(folder: Path, path: Path) -> KernelTable:
    """The table of one workload.

    Args:
        path: the table's.
    """
    replays, counters = _replays(folder), Counters()
    problems = Problems(replays[0][0])
    # Every replay is of the same kernels, so one of them gives the times.
    found = [sums for files in replays if len(sums := _sums(files, counters, problems))]
    chosen = next(filter(_total_ns, found), next(iter(found), Sums()))
    kernels = chosen.kernels()
    if not kernels:
        raise problems.error("kernels")
    counters.fill(kernels)
    table = KernelTable(path, "rocprof-compute", kernels, device=_device(folder))
    if not _total_ns(chosen):
        table.warnings.append(f"{folder}: all times are 0: they are missing, or rounded")
    table.warnings += chosen.warnings() + counters.warnings(table.device) + problems.warnings()
    return table


def _sums(files: list[Path], counters: Counters, problems: Problems) -> Sums:
    """The kernels of one replay, with their times; adds its counters."""
    sums = Sums()
    for file in files:
        try:
            if file.suffix == ".db":
                _add_database(file, sums, counters, problems)
            else:
                _add_rows(file, problems.of(file), sums, counters)
        except WorkshopError as error:
            problems.errors.append(error)
    return sums


def _add_rows(file: Path, problems: Problems, sums: Sums, counters: Counters) -> None:
    """A counter has a separate column, or a separate row; a dispatch has only those of its
    replay, and its times with every one of them."""
    table = CsvTable(file, problems)
    used = list(filter(amd_counters.is_used, table.columns))  # of about a thousand
    optional = ("GPU_ID", "Start_Timestamp", "End_Timestamp", "Counter_Name", "Counter_Value")
    rows = table.select("Kernel_Name", "Dispatch_ID", *used, optional=optional)
    seen: set[tuple[str, str | None]] = set()
    for row, (kernel, dispatch, *values, gpu, start, end, counter, value) in rows:
        with problems.noted(row):
            name = amd_counters.plain_name(reading.name(kernel))
            if (dispatch, gpu) not in seen:
                # Those of a table without times count all the same.
                ns = 0 if start is None or end is None else interval(start, end)[1]
                sums.add(name, ns, device=gpu and f"GPU {gpu}")
                seen.add((dispatch, gpu))
            for column, counted in (*zip(used, values, strict=True), (counter, value)):
                if column and counted:
                    counters.add(name, column, reading.amount(counted))


def _add_database(path: Path, sums: Sums, counters: Counters, problems: Problems) -> None:
    """The processes of a rocpd database. Its counters may be in a file beside the folder that it
    lies in, by the number of the dispatch."""
    beside = path.parent.with_name(path.stem.partition("_")[0] + _OWN_COUNTERS)
    with contextlib.ExitStack() as stack:
        for process in from_database(path, path.stem, stack, problems):
            kernels = {}
            for event in process.kernels or ():
                name = amd_counters.plain_name(event.name)
                sums.add(name, event.ns, device=event.device, process=process.name)
                kernels[str(event.dispatch)] = name
            if beside.is_file():
                _add_own_counts(beside, problems.of(beside), kernels, counters)
                continue
            for count in process.counts or ():
                counters.add(amd_counters.plain_name(count.kernel), count.counter, count.value)


def _add_own_counts(
    path: Path, problems: Problems, kernels: dict[str, str], counters: Counters
) -> None:
    """Adds the counters of a file, summed over the instances of a hardware block, which have a row
    each.

    Args:
        kernels: names by the number of the dispatch.
    """
    totals: dict[tuple[str, str], float] = {}
    rows = CsvTable(path, problems).select("dispatch_id", "counter_name", "counter_value")
    for row, (dispatch, counter, value) in rows:
        with problems.noted(row):
            if dispatch not in kernels:
                raise Invalid(f"no kernel was dispatch {dispatch:.40}")
            key = dispatch, counter
            totals[key] = totals.get(key, 0.0) + reading.amount(value)
    for (dispatch, counter), total in totals.items():
        counters.add(kernels[dispatch], counter, total)


def _total_ns(sums: Sums) -> float:
    return sum(kernel.total_ns for kernel in sums.kernels())


def _device(workload: Path) -> str | None:
    """As "MI300X_A1 (gfx942)"."""
    path = workload / _SYSINFO
    with contextlib.suppress(WorkshopError):
        for _, (model, chip) in CsvTable(path, Problems(path)).select("gpu_model", "gpu_arch"):
            return f"{model} ({chip})"
    return None


# --- ceilings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """Rates that micro-benchmarks reached on one GPU; what was not measured is absent."""

    device: int
    """The GPU's number."""
    bandwidths_gbs: Mapping[str, float]
    """GB/s by level: "HBM", "MALL", "L2", "L1", "LDS"."""
    rates_gflops: Mapping[str, float]
    """10^9 operations a second by type, those of the matrix units under "MFMA...": "FP32",
    "MFMABF16", "MFMAI8", ..."""


def ceilings(folder: Path) -> list[Ceilings]:
    """The ceilings of the first roofline.csv in a folder or below it; none without one. As
    `read_roofline`."""
    found = min(folder.rglob(_ROOFLINE), default=None)
    return [] if found is None else read_roofline(found)


def read_roofline(path: Path) -> list[Ceilings]:
    """The ceilings in a roofline.csv, one entry for each GPU. The bounds of their confidence
    intervals, in columns of their own, are left out. Raises WorkshopError: it can't be read, or has
    no ceilings in it."""
    problems = Problems(path)
    table = CsvTable(path, problems)
    columns = {name: match for name in table.columns if (match := _CEILING.fullmatch(name))}
    found = []
    for row, (device, *values) in table.select("device", *columns):
        kinds: dict[str, dict[str, float]] = {"bw": {}, "flops": {}, "ops": {}}
        with problems.noted(row):
            gpu = int(reading.number(device))
            for match, text in zip(columns.values(), values, strict=True):
                if (value := reading.number(text)) > 0:
                    kinds[match["unit"].lower()][match["name"].upper()] = value
            if any(kinds.values()):
                found.append(Ceilings(gpu, kinds["bw"], kinds["flops"] | kinds["ops"]))
    if not found:
        raise problems.error("ceilings")
    return found
