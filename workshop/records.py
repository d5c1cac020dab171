"""Stored results: a file of JSON lines for each comparison, `OUTPUT/runs/SESSION.jsonl`.

The first line is what all its processes share: schema_version, session, device, software,
git_commit and the command. Each further line is one process, with those of the shared fields in
which it differs. The file is written anew, whole, when a process ends.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from workshop import errors, results
from workshop.errors import WorkshopError
from workshop.results import LabRun, Run, RunResult, Value

SCHEMA_VERSION = 2
SUFFIX = ".jsonl"
_SHARED = {
    "session": "session",
    "device": "device",
    "software": "software",
    "git_commit": "git_commit",
    "command": "parent_command",
}
"""Fields of the first line, and a run's for the same."""

R = TypeVar("R", bound=Run)


@dataclass
class Comparison:
    """The runs of one command, in the order in which they ended."""

    session: str
    device: dict[str, Value]
    software: dict[str, str | None]
    git_commit: str | None
    command: list[str]
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> "Comparison":
        """One without runs, which shares what this run has."""
        return cls(**{name: getattr(run, own) for name, own in _SHARED.items()})

    def write(self, path: Path) -> None:
        """Raises WorkshopError where there is no room or no right to write; the old file stays."""
        shared = {name: getattr(self, name) for name in _SHARED}
        lines = [{"schema_version": SCHEMA_VERSION, **shared}, *map(self._line, self.runs)]
        results.prepare_folder(path.parent)
        texts = [json.dumps(line, allow_nan=False, ensure_ascii=False) for line in lines]
        # A file's name in the command may have bytes that no encoding has.
        text = "\n".join([*texts, ""]).encode(errors="replace").decode()
        results.write_text(path, text)

    def _line(self, run: Run) -> dict[str, Any]:
        line = dataclasses.asdict(run)
        for name, own in _SHARED.items():
            if line[own] == getattr(self, name):
                del line[own]
        return line

    def add(self, run: Run, path: Path) -> Path:
        """Adds a run, or a change to one that it has, and writes the file anew; its path."""
        if not any(run is one for one in self.runs):
            self.runs.append(run)
        self.write(path)
        return path


def path_in(folder: Path, session: str) -> Path:
    """The file of a comparison below a folder of results."""
    return folder / "runs" / f"{session}{SUFFIX}"


def add(run: Run, folder: Path) -> Path:
    """Adds a run to its comparison's file below a folder; its path."""
    return save(run, path_in(folder, run.session))


def save(run: Run, path: Path) -> Path:
    """Adds a run to the comparison in a file, which need not be there yet; its path."""
    comparison = load(path) if path.exists() else Comparison.of(run)
    return comparison.add(run, path)


def write(run: Run, path: Path) -> Path:
    """Writes a file of this run alone, such as the record of a profile; its path."""
    return Comparison.of(run).add(run, path)


def load(path: Path) -> Comparison:
    """Reads one file.

    Raises:
        WorkshopError: it can't be read, is no JSON, has another schema, or a field is missing, has
            the wrong type or an impossible value; the message names the file, line and field.
        NotOnThisMachine: msgspec is not installed.
    """
    (where, head), *rest = _objects(path)
    version = head.get("schema_version")
    if version != SCHEMA_VERSION:
        raise WorkshopError(
            f"{path}: schema_version is {version!r:.40}, this workshop reads {SCHEMA_VERSION}; "
            "run it again with this checkout"
        )
    del head["schema_version"]
    comparison = results.convert(Comparison, head, where)
    shared = {own: head[name] for name, own in _SHARED.items()}
    comparison.runs = [_run(shared | line, where) for where, line in rest]
    return comparison


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object in each line, with the words that name the line; at least one."""
    errors.require("msgspec")
    import msgspec

    try:
        lines = path.read_bytes().splitlines() or [b""]
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WorkshopError(f"{where}: no valid JSON ({error!s:.60})") from None
        if not isinstance(content, dict):
            raise WorkshopError(f"{where}: expected a JSON object")
        yield where, content


def _run(content: dict[str, Any], where: str) -> Run:
    run: Run = results.convert(LabRun if "lab" in content else RunResult, content, where)
    for wrong in run.wrong():
        raise WorkshopError(f"{where}: {wrong}")
    return run


def load_runs(path: Path, kind: type[R]) -> list[R]:
    """The runs of one kind in a file; none where there is no such file."""
    runs = load(path).runs if path.exists() else []
    return [run for run in runs if isinstance(run, kind)]


def load_run(path: Path) -> RunResult | LabRun:
    """The run of a file that has one, such as the record of a profile."""
    runs = load(path).runs
    if not runs:
        raise WorkshopError(f"{path}: there is no run in it")
    return cast(RunResult | LabRun, runs[-1])


def files_in(folder: Path) -> list[Path]:
    """The files of comparisons in a folder: its own, and those of any `runs` folder below it."""
    pattern = f"[!.]*{SUFFIX}"
    return sorted({*folder.glob(pattern), *folder.rglob(f"runs/{pattern}")})


def load_folder(folder: Path, kind: type[R]) -> list[R]:
    """All runs of one kind in a file or in `files_in` a folder, oldest session first. Raises
    WorkshopError: no run is found, or a file is broken."""
    if not folder.exists():
        raise WorkshopError(f"results {folder}: no such folder")
    paths = [folder] if folder.is_file() else files_in(folder)
    runs = [run for path in paths for run in load_runs(path, kind)]
    if not runs:
        raise WorkshopError(f"results {folder}: no result files (runs/SESSION{SUFFIX}) in it")
    return sorted(runs, key=lambda run: run.session)
