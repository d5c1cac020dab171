"""Finds out what a file or folder is, and has the right parser read it."""

import re
import shlex
from collections import defaultdict
from pathlib import Path
from types import ModuleType

from workshop import records
from workshop.errors import WorkshopError
from workshop.labs import LabRun
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
from workshop.profilers.runner_files import COMMAND_FILE, COMMAND_MARK, RUN_FILE
from workshop.profilers.table import KernelTable
from workshop.results import RunResult
from workshop.run.interpreter import NOT_COMPARABLE

_MOST_UNREADABLE = 0.05
"""Share of characters that are unknown or zero bytes: with more, a file is no text."""
_MOST_NAMED = 10
_TEXT_NAME = re.compile(r"\.(?:csv|json|hatchet|txt|log)(?:\.gz)?$")
"""Names of the files in a folder that are looked into."""
_IN_PERFETTO = "a timeline, which no table shows: open it in https://ui.perfetto.dev"
_OTHERS_OPEN = {
    ".nsys-rep": f"its own tool reads it first: {nsys.STATS}",
    ".ncu-rep": "its own tool reads it first: ncu --import {path} --csv --page raw",
    ".pftrace": _IN_PERFETTO,
    ".proto": _IN_PERFETTO,
}
"""Formats that other tools open, and how."""
_STATUS = "# exit status "
"""The beginning of a runner's last line."""
_KNOWN = (
    "rocprofv3's CSV and .db, rocprof-sys's .db, a rocprof-compute workload, ncu's CSV, "
    "nsys's CSV, a trace of torch.profiler, Proton's .hatchet"
)


class _Unread(WorkshopError):
    """A known tool's file that no reader reads, and what to do with it."""


def load(path: Path) -> KernelTable:
    """The kernel table of what a profiler wrote.

    Args:
        path: a file, or a folder with one tool's outputs, such as a runner's.

    Raises:
        WorkshopError: it is nothing that is known, nothing in it is valid, or it is a folder above
            those of several runners.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise WorkshopError(f"{path}: no such file or folder")
    return _reader(path).read(path)


def load_with_doubts(path: Path, *, ended: bool = True) -> KernelTable:
    """As `load`; the table's warnings also say what a runner left that makes its figures doubtful:
    a run that failed or was interrupted, or that Triton's interpreter ran.

    Args:
        ended: whether the runner should have come to its end.
    """
    table = load(path)
    folder = _runners_folder(path)
    if ended and folder is not None and (last := _commands(folder)[-1]) != f"{_STATUS}0":
        is_status = last.startswith(_STATUS)
        how = last.removeprefix("# ") if is_status else "interrupted, or still at work"
        table.warnings.append(f"{folder}: its run did not succeed ({how}): parts may be missing")
    doubt = ""
    try:
        run = recorded_run(path)
        if run is not None and run.interpreted:
            doubt = f"{NOT_COMPARABLE}: times are those of Triton's interpreter, not a GPU's"
    except WorkshopError as error:
        doubt = str(error)
    if doubt and doubt not in table.warnings:
        table.warnings.append(doubt)
    return table


def recorded(path: Path) -> RunResult | LabRun | None:
    """The record that a runner of this workshop left with a profile, in the folder that it filled
    or, where that is not known, beside the profile; None for another program's profile. Raises
    WorkshopError: there is one, and it is broken."""
    folder = _runners_folder(path) or (path if path.is_dir() else path.parent)
    record = folder / RUN_FILE
    return records.load_run(record) if record.is_file() else None


def recorded_run(path: Path) -> RunResult | None:
    """As `recorded`, of a version; None for a lab's profile."""
    run = recorded(path)
    return run if isinstance(run, RunResult) else None


def _runners_folder(path: Path) -> Path | None:
    """The folder that a runner filled with a profile: `path` itself or the nearest one above."""
    path = path.resolve()
    return next((place for place in (path, *path.parents) if _commands(place)), None)


def _commands(folder: Path) -> list[str]:
    """The lines of what a runner ran to fill a folder; none where it wasn't one."""
    try:
        text = (folder / COMMAND_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines() if text.startswith(COMMAND_MARK) else []


def _load_folder(folder: Path) -> KernelTable:
    """Reads the outputs of the one tool that has filled a folder."""
    if not _runners_folder(folder):
        _check_for_one_run(folder)
    if rocprof_compute.recognises(folder):
        return rocprof_compute.read(folder)
    files: defaultdict[ModuleType, list[Path]] = defaultdict(list)
    unread = []
    for path in sorted(folder.rglob("*")):
        if (_TEXT_NAME.search(path.name) or path.suffix in _OTHERS_OPEN) and path.is_file():
            try:
                files[_reader(path)].append(path)
            except WorkshopError as error:
                unread += [error] if isinstance(error, _Unread) else []
    for reader in (proton, nsys, kineto, ncu):
        if found := files[reader]:
            # nsys and torch.profiler leave several files: their readers know which belong together.
            if reader in (nsys, kineto) and len(found) > 1:
                return reader.read(folder)
            table = reader.read(found[0])
            table.warnings += [
                f"{other} holds another profile, which is left out" for other in found[1:]
            ]
            return table
    if rocprofv3.recognises(folder):
        return rocprofv3.read(folder)
    if (folder / kernel_file.JSON_FILE).is_file():
        return kernel_file.read(folder / kernel_file.JSON_FILE)
    nothing = WorkshopError(f"{folder}: no profiler's output in it; known are {_KNOWN}")
    raise next(iter(unread), nothing)


def _check_for_one_run(folder: Path) -> None:
    """Raises WorkshopError where several runners have filled folders below this one."""
    below = sorted(file.parent for file in folder.rglob(COMMAND_FILE))
    filled = [str(place) for place in below if _commands(place)]
    if len(filled) > 1:
        more = f", and {len(filled) - _MOST_NAMED} more" if len(filled) > _MOST_NAMED else ""
        raise WorkshopError(
            f"{folder}: {len(filled)} profiles are in it, name one of them: "
            f"{', '.join(filled[:_MOST_NAMED])}{more}"
        )


def _reader(path: Path) -> ModuleType:
    """The parser of a file. Raises WorkshopError: the file is nothing that is known."""
    if rocprofv3.is_database(path):
        return rocprofv3
    if path.suffix in _OTHERS_OPEN:
        hint = _OTHERS_OPEN[path.suffix].format(path=shlex.quote(str(path)))
        raise _Unread(f"{path}: {hint}")
    start = reading.head(path)
    if start.count("\ufffd") > _MOST_UNREADABLE * len(start):
        raise WorkshopError(f"{path}: a binary file of no profiler that is known here: {_KNOWN}")
    if start.lstrip()[:1] in ("{", "["):
        for reader in (kernel_file, kineto, proton):
            if reader.recognises_json(start):
                return reader
        raise WorkshopError(f"{path}: JSON of no profiler that is known here: {_KNOWN}")
    if ncu.recognises(path):
        return ncu
    columns = list(reading.CsvTable(path, reading.Problems(path)).columns)
    for reader in (rocprofv3, nsys):
        if reader.recognises_header(columns):
            return reader
    if rocprof_compute.recognises(path):
        return rocprof_compute
    raise WorkshopError(
        f"{path}: its columns ({printable(', '.join(columns))[:120]}) are of no profiler that is "
        f"known here: {_KNOWN}"
    )
