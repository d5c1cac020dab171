"""What rocprof-compute writes: a workload folder with the counters of every dispatch, and the
measured ceilings of the machine's GPUs.

It replays the program for each group of counters, with kernels one at a time: a kernel's times are
true, but nothing shows when the GPU idles, nor which step or phase a kernel belongs to.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.profilers import amd_counters
from workshop.profilers.amd_counters import Counters
from workshop.profilers.reading import CsvTable, NoNumber, Problems, number
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
        raise WorkshopError(f"{path}: no workload in it, a folder with {_MERGED}; {_lead(path)}")
    folder, *others = workloads
    table = _Workload(folder).table(path)
    table.warnings += [f"{other} holds another workload, which is left out" for other in others]
    return table


def recognises(path: Path) -> bool:
    """Whether a folder, or one below it, is a workload of rocprof-compute's."""
    return bool(_workloads(path)) or _has_ceilings(path)


def _has_ceilings(folder: Path) -> bool:
    return any(_has_columns(file, "device", "HBMBw") for file in folder.rglob(_ROOFLINE))


def _lead(path: Path) -> str:
    if _has_ceilings(path):
        return "it has ceilings and no kernels: profile without --roof-only"
    return "give what `rocprof-compute profile` wrote"


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


class _Workload:
    """Adds up what the files of a workload hold, and keeps what can't be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counters = Counters()
        self._problems: list[Problems] = []
        self._errors: list[WorkshopError] = []

    def table(self, path: Path) -> KernelTable:
        """Args:
        path: what the table shall say that it was read from.
        """
        files = _files(self._folder)
        # Every file is a replay of the same kernels, so one of them gives the times.
        replays = [kernels for file in files if (kernels := self._kernels(file))]
        times = self._folder / _TIMES
        if not any(map(_total_ns, replays)) and times.is_file():
            replays.append(self._kernels(times))
        kernels = next(filter(_total_ns, replays), next(iter(replays), []))
        if not kernels:
            raise self._nothing_found(files)
        self._counters.fill(kernels)
        table = KernelTable(path, "rocprof-compute", kernels, device=_device(self._folder))
        if not _total_ns(kernels):
            table.warnings.append(f"{self._folder}: all times are 0: they are missing, or rounded")
        table.warnings += self._counters.warnings(table.device)
        table.warnings += [str(error) for error in self._errors]
        for problems in self._problems:
            table.warnings += problems.warnings()
        return table

    def _nothing_found(self, files: list[Path]) -> WorkshopError:
        if self._errors:
            return self._errors[0]
        bad = next((problems for problems in self._problems if problems.count), None)
        return (bad or Problems(files[0])).error("kernels")

    def _kernels(self, file: Path) -> list[Kernel]:
        """The kernels of one file, with their times; adds its counters."""
        problems = Problems(file)
        self._problems.append(problems)
        sums = Sums()
        try:
            self._add_rows(CsvTable(file, problems), problems, sums)
        except WorkshopError as error:
            self._errors.append(error)
        return sums.kernels()

    def _add_rows(self, table: CsvTable, problems: Problems, sums: Sums) -> None:
        kernel, dispatch = table.index("Kernel_Name"), table.index("Dispatch_ID")
        gpu = table.find("GPU_ID")
        times = table.find("Start_Timestamp"), table.find("End_Timestamp")
        columns = _CounterColumns(table)
        at_least = 1 + max(kernel, dispatch, gpu or 0, *(time or 0 for time in times), columns.last)
        seen: set[tuple[str, str]] = set()
        for row, fields in table.rows(at_least):
            # A replay gives a dispatch's times with every counter of it.
            key = (fields[dispatch], "" if gpu is None else fields[gpu])
            try:
                name = amd_counters.plain_name(fields[kernel])
                if not name:
                    raise NoNumber("has no kernel name")
                if key not in seen:
                    sums.add(name, _duration(fields, *times))
                    seen.add(key)
                for counter, value in columns.values(fields):
                    self._counters.add(name, counter, value)
            except NoNumber as error:
                problems.add(row, str(error))


class _CounterColumns:
    """Where a table has its counters: each in a column of its own, or in a row of its own."""

    def __init__(self, table: CsvTable) -> None:
        self._name, self._value = table.find("Counter_Name"), table.find("Counter_Value")
        # Of about a thousand, so only those that serve.
        self._columns = [
            (name, index) for name, index in table.columns.items() if amd_counters.is_used(name)
        ]
        indices = [index for _, index in self._columns]
        self.last = max(self._name or 0, self._value or 0, *indices, 0)

    def values(self, fields: list[str]) -> Iterator[tuple[str, str]]:
        """(counter, value); a dispatch has only those of its replay."""
        if self._name is not None and self._value is not None:
            yield fields[self._name], fields[self._value]
        for name, index in self._columns:
            if fields[index]:
                yield name, fields[index]


def _duration(fields: list[str], start: int | None, end: int | None) -> int:
    """Nanoseconds; 0 in a table without times, whose dispatches count all the same."""
    if start is None or end is None:
        return 0
    return interval(fields[start], fields[end])[1]


def _total_ns(kernels: list[Kernel]) -> float:
    return sum(kernel.total_ns for kernel in kernels)


def _device(workload: Path) -> str | None:
    """As "MI300X_A1 (gfx942)"."""
    path = workload / "sysinfo.csv"
    with contextlib.suppress(WorkshopError):
        table = CsvTable(path, Problems(path))
        model, architecture = table.index("gpu_model"), table.index("gpu_arch")
        for _, fields in table.rows(1 + max(model, architecture)):
            return f"{fields[model]} ({fields[architecture]})"
    return None


# --- ceilings ---


@dataclass(frozen=True)
class Ceiling:
    """What a micro-benchmark reached, with the bounds of its confidence interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """The measured ceilings of one GPU; what was not measured is absent."""

    device: int
    """The GPU's number."""
    bandwidths_gbs: Mapping[str, Ceiling]
    """GB/s by level: "HBM", "MALL", "L2", "L1", "LDS"."""
    rates_gflops: Mapping[str, Ceiling]
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
    """The ceilings in a roofline.csv, one entry for each GPU.

    Raises:
        WorkshopError: it can't be read, or has no ceilings in it.
    """
    problems = Problems(path)
    table = CsvTable(path, problems)
    device = table.index("device")
    columns = {index: column for column, index in table.columns.items()}
    found = []
    for row, fields in table.rows(1 + max(columns)):
        kinds: dict[str, dict[str, Ceiling]] = {"bw": {}, "flops": {}, "ops": {}}
        try:
            gpu = int(number(fields[device]))
            for index, column in columns.items():
                match = _CEILING.fullmatch(column)
                if match and (value := number(fields[index])) > 0:
                    ceiling = Ceiling(value, *_bounds(index, columns, fields))
                    kinds[match["unit"].lower()][match["name"].upper()] = ceiling
        except NoNumber as error:
            problems.add(row, str(error))
            continue
        if any(kinds.values()):
            found.append(Ceilings(gpu, kinds["bw"], kinds["flops"] | kinds["ops"]))
    if not found:
        raise problems.error("ceilings")
    return found


def _bounds(
    index: int, columns: Mapping[int, str], fields: list[str]
) -> tuple[float | None, float | None]:
    """They follow the value's column, under names some of which the tool misspells."""
    low, high = (
        number(fields[at]) if columns.get(at, "").lower().endswith(bound) else None
        for at, bound in ((index + 1, "low"), (index + 2, "high"))
    )
    return low, high
