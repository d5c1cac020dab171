"""All results below some folders, kept up to date while new ones are written.

Runs of versions and labs, and the kernel tables of profilers with the record of what was profiled.
A file is read once, and again when it has changed. One that is
broken is listed, and harms no other.
"""

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def distinct_names(profiles: Sequence[Profile], names: Iterable[str] | None = None) -> list[str]:
    """A name for each profile that none of the others has: where names are alike, what differs is
    added to them (size, precision, device, switches, time, and at last the folder).

    Args:
        names: what they begin with (default: `Profile.name`).
    """
    found = [profile.name for profile in profiles] if names is None else list(names)
    top = os.path.commonpath([profile.folder for profile in profiles] or [Path()])
    for facts in zip(*(_facts(profile, top) for profile in profiles), strict=True):
        alike = defaultdict(list)
        for index, name in enumerate(found):
            alike[name].append(index)
        for its in alike.values():
            if len({facts[index] for index in its}) > 1:
                for index in its:
                    found[index] += f", {facts[index]}" if facts[index] else ""
    return found


def _facts(profile: Profile, top: str) -> list[str]:
    run, lab = profile.run, profile.lab
    size = f"{size_name(run)} {run.batch_size} x {run.seq_len}" if run else ""
    record = profile.record
    facts = (
        lab.subject if lab else size,
        run.precision if run else "",
        profile.device,
        lab.variant if lab else variant(run) if run else "",
        record.created[:16].replace("T", " ") if record else "",
        os.path.relpath(profile.folder, top),
    )
    return list(map(printable, facts))


@dataclass(frozen=True)
class Broken:
    """A file of this workshop that can't be read; the reason names it and what is wrong."""

    path: Path
    reason: str


_Content = list[Run] | KernelTable | Broken | None


@dataclass(frozen=True)
class _File:
    """A file as it was read; `content` is None if it is none of this workshop's."""

    stamp: tuple[int, int]
    content: _Content


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
        self._files: dict[Path, _File] = {}

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
        stamps = {path: stamp for folder in self.folders for path, stamp in _json_files(folder)}
        before = self._files
        self._files = {
            path: before[path]
            if path in before and before[path].stamp == stamp
            else _File(stamp, self._read(path))
            for path, stamp in stamps.items()
        }
        if _contents(before) == _contents(self._files):
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
        found = [(path, self._files[path].content) for path in sorted(self._files)]
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


def _contents(files: dict[Path, _File]) -> dict[Path, tuple[int, int]]:
    return {path: file.stamp for path, file in files.items() if file.content is not None}


def _profile(folder: Path, table: KernelTable, profiled: dict[Path, Run]) -> Profile:
    record = profiled.get(folder / RUN_FILE) or profiled.get(folder.parent / RUN_FILE)
    run = record if isinstance(record, RunResult) else None
    lab = record if isinstance(record, LabRun) else None
    named = folder.parent.name if record is None and folder.parent.name in VERSIONS else ""
    return Profile(folder, run.version if run else named, table.tool, table, run, lab)
