"""All results below some folders, kept up to date while new ones are written.

Runs of versions and labs, and the kernel tables of profilers with the record of what was profiled.
A file is read once, and again when it has changed. One that is broken is listed, and harms no
other.
"""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from workshop import records
from workshop.compare.rows import size_name, variant
from workshop.errors import WorkshopError
from workshop.labs import KERNELS, LabRun
from workshop.profilers import kernel_file
from workshop.profilers.names import printable
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.table import KernelTable
from workshop.results import Run, RunResult
from workshop.versions import VERSIONS

RUNS_FOLDER = "runs"
"""Files of JSON lines below one are comparisons."""
R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A run, and the file of its comparison."""

    path: Path
    run: R


StoredRun = Stored[RunResult]
StoredLab = Stored[LabRun]


@dataclass(frozen=True)
class Profile:
    """A profile: its folder's kernels.json, and RUN_FILE where it has one, of a version (`run`) or
    of a lab (`lab`). `version` is empty if neither the record nor the folder's name gives one of
    VERSIONS."""

    folder: Path
    version: str
    tool: str
    table: KernelTable
    run: RunResult | None
    lab: LabRun | None = None

    @property
    def name(self) -> str:
        """The version, or how the lab ran; else the folder's name."""
        return printable(self.version or (self.lab.variant if self.lab else "") or self.folder.name)

    @property
    def record(self) -> RunResult | LabRun | None:
        return self.run or self.lab

    @property
    def device(self) -> str:
        recorded = self.record.device.get("name") if self.record else None
        return str(recorded or self.table.device or "unknown device")

    @property
    def facts(self) -> list[str]:
        """Size, precision, device, switches, time and folder, which tell profiles apart."""
        run, lab, record = self.run, self.lab, self.record
        size = f"{size_name(run)} {run.batch_size} x {run.seq_len}" if run else ""
        switches = lab.variant if lab else variant(run) if run else ""
        time = record.created[:16].replace("T", " ") if record else ""
        precision = run.precision if run else ""
        facts = lab.subject if lab else size, precision, self.device, switches, time
        return [*map(printable, facts), printable(str(self.folder))]


def distinct_names(profiles: Sequence[Profile]) -> list[str]:
    """The name of each profile; to names that are alike the first fact is added that tells them
    apart."""
    names = [profile.name for profile in profiles]
    for facts in zip(*(profile.facts for profile in profiles), strict=True):
        alike = {name for name in names if names.count(name) > 1}
        for name in alike:
            its = [i for i, other in enumerate(names) if other == name]
            if len({facts[i] for i in its}) > 1:
                for i in its:
                    names[i] += f", {facts[i]}" if facts[i] else ""
    return names


@dataclass(frozen=True)
class Broken:
    """A file of this workshop that can't be read; the reason names it and what is wrong."""

    path: Path
    reason: str


_Content = list[Run] | KernelTable | Broken | None
"""The content of a file; None if it is not this workshop's."""


class Collection:
    """The results below some folders. `refresh` replaces `runs` and `lab_runs` (oldest session
    first), `kernels` (those lab runs that are V3's benchmark's, by file), `profiles` (by folder)
    and `broken` (by path) by new ones; a reader may keep the old ones.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises WorkshopError: one of them is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise WorkshopError(f"results {folder}: no such folder")
        self.folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))
        self.runs: list[StoredRun] = []
        self.lab_runs: list[StoredLab] = []
        self.kernels: dict[Path, list[LabRun]] = {}
        self.profiles: list[Profile] = []
        self.broken: list[Broken] = []
        self.keeps: Callable[[Path], bool] = lambda path: True
        self._files: dict[Path, tuple[tuple[int, int], _Content]] = {}

    def only(self, keep: Callable[[Path], bool]) -> "Collection":
        """The results of the files for which `keep` is true."""
        part = copy.copy(self)
        part.keeps = keep
        part.runs = [one for one in self.runs if keep(one.path)]
        part.lab_runs = [one for one in self.lab_runs if keep(one.path)]
        part.kernels = {path: its for path, its in self.kernels.items() if keep(path)}
        part.profiles = [one for one in self.profiles if keep(one.folder / RUN_FILE)]
        part.broken = [one for one in self.broken if keep(one.path)]
        return part

    def refresh(self) -> bool:
        """Reads what is new or has changed, forgets what is gone; whether anything changed."""
        before = self._files
        self._files = {
            path: before[path]
            if path in before and before[path][0] == stamp
            else (stamp, self._read(path))
            for folder in self.folders
            for path, stamp in _json_files(folder)
        }
        if _stamps(before) == _stamps(self._files):
            return False
        self._sort()
        return True

    def _read(self, path: Path) -> _Content:
        """The content of a kernel table or of a profile's record, which have their names, or of a
        comparison, which has its place."""
        top = next(folder for folder in self.folders if folder in path.parents)
        within = {top.name, *path.parent.relative_to(top).parts}
        is_place = RUNS_FOLDER in within or path.parent in self.folders
        try:
            if path.name == kernel_file.JSON_FILE:
                return kernel_file.read(path)
            if path.name == RUN_FILE or (is_place and path.suffix == records.SUFFIX):
                return records.load(path).runs
        except WorkshopError as error:
            return Broken(path, str(error))
        return None

    def _sort(self) -> None:
        found = [(path, self._files[path][1]) for path in sorted(self._files)]
        files = [(path, content) for path, content in found if isinstance(content, list)]
        runs = [(path, run) for path, its in files if path.name != RUN_FILE for run in its]
        runs.sort(key=lambda one: (one[1].session, one[0]))
        self.runs = [StoredRun(p, run) for p, run in runs if isinstance(run, RunResult)]
        self.lab_runs = [StoredLab(p, run) for p, run in runs if isinstance(run, LabRun)]
        self.kernels = {}
        for one in self.lab_runs:
            if one.run.lab == KERNELS:
                self.kernels.setdefault(one.path, []).append(one.run)
        profiled = {path: its[-1] for path, its in files if path.name == RUN_FILE and its}
        tables = ((path.parent, c) for path, c in found if isinstance(c, KernelTable))
        self.profiles = [_profile(folder, table, profiled) for folder, table in tables]
        self.broken = [c for _, c in found if isinstance(c, Broken)]


def _json_files(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Files of JSON or JSON lines below a folder, with time of change and size. Names that begin
    with a dot are unfinished files. Folders may be links, to a larger disk."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        true_place = os.path.realpath(place)
        if true_place in seen:  # a link back
            folders.clear()
            continue
        seen.add(true_place)
        for name in names:
            if name.endswith((".json", records.SUFFIX)) and name[0] != ".":
                path = Path(place, name)
                try:
                    status = path.stat()
                except OSError:  # gone in the meantime
                    continue
                yield path, (status.st_mtime_ns, status.st_size)


def _stamps(files: dict[Path, tuple[tuple[int, int], _Content]]) -> dict[Path, tuple[int, int]]:
    return {path: stamp for path, (stamp, content) in files.items() if content is not None}


def _profile(folder: Path, table: KernelTable, profiled: dict[Path, Run]) -> Profile:
    record = profiled.get(folder / RUN_FILE) or profiled.get(folder.parent / RUN_FILE)
    run = record if isinstance(record, RunResult) else None
    lab = record if isinstance(record, LabRun) else None
    named = folder.parent.name if record is None and folder.parent.name in VERSIONS else ""
    return Profile(folder, run.version if run else named, table.tool, table, run, lab)
