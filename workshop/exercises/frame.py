"""The interface that an exercise's check is written against.

    def check(work: Work) -> Iterable[Item]:
        ...

yields an Item for everything that it looked at. An error becomes a red Item by itself, with the
line of the participant's file that it comes from.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from workshop.errors import WorkshopError
from workshop.exercises.answers import Answers
from workshop.versions import ROOT

if TYPE_CHECKING:
    from workshop.collection import StoredRun
    from workshop.labs import LabRun
    from workshop.profilers.table import KernelTable
    from workshop.results import RunResult
    from workshop.run.flops import Sizes

STARTER, MINE = "starter.py", "mine.py"
QUESTIONS, MY_ANSWERS = "answers.toml", "my_answers.toml"
DIAGNOSIS, MY_DIAGNOSIS = "diagnosis.toml", "my_diagnosis.toml"
"""The names of performance_debugging's answers."""
COPIES = {STARTER: MINE, QUESTIONS: MY_ANSWERS, DIAGNOSIS: MY_DIAGNOSIS}
"""Files that an exercise gives to fill, and the names of the participant's copies."""
RESULTS = ROOT / "results"
_NOT_OWN = ("reference", "exercises")
"""Folders of results that hold no measurement of the participant's."""


@dataclass(frozen=True)
class Item:
    """One thing that a check looked at."""

    ok: bool
    what: str
    """A short phrase."""
    why: str = ""
    """The finding, where it helps; may have several lines."""


def judged(right: bool, what: str, otherwise: str) -> Item:
    """An Item whose reason is for a wrong answer alone."""
    return Item(right, what, "" if right else otherwise)


Part = Callable[["Work"], Iterable[Item]]


class Missing(WorkshopError):
    """Something that the participant has not measured yet, and the command that does it."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"{what} {command}")
        self.what, self.command = what, command


class Work:
    """A participant's work on one exercise, with what was measured."""

    def __init__(
        self,
        folder: Path,
        *,
        mine: Path | None = None,
        answers: Path | None = None,
        results: Path = RESULTS,
    ) -> None:
        """Reads nothing yet.

        Args:
            folder: of the exercise.
            mine, answers: the participant's files, if they are not the folder's own.
            results: below which the participant's result files and profiles lie.
        """
        self.folder = folder
        self.mine_path = mine or folder / MINE
        own = MY_DIAGNOSIS if (folder / DIAGNOSIS).is_file() else MY_ANSWERS
        self.answers_path = answers or folder / own
        self.results = results
        self._shown: set[Item] = set()

    @cached_property
    def module(self) -> ModuleType:
        """mine.py. What importing it raises is left to the caller: the frame shows it, with its
        line, as a red Item."""
        return import_file(self.mine_path)

    @cached_property
    def answers(self) -> Answers:
        """my_answers.toml (in performance_debugging my_diagnosis.toml).

        Raises:
            WorkshopError: it is missing, or no TOML.
        """
        return Answers(self.answers_path)

    def each(self, *parts: Part) -> Iterator[Item]:
        """The Items of several parts of a check, each of which runs though one before it failed:
        what a part raises becomes one red Item.

        Raises:
            NotOnThisMachine: raised by a part, or it needs Triton and there is none.
        """
        from workshop.exercises import faults

        for part in parts:
            try:
                yield from part(self)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                if missing := faults.missing(error):
                    raise missing from None
                item = faults.as_item(error, self)
                if item not in self._shown:  # a file that can't be read is so for every part
                    self._shown.add(item)
                    yield item

    def stored_runs(self, version: str = "v1", **filters: object) -> list["StoredRun"]:
        """The participant's own result files, each with its path, newest first.

        Args:
            filters: fields of RunResult and the values that they must have, such as
                config_name="tiny". Without `status`, complete runs only.
        """
        wanted = {"version": version, "status": "complete"} | filters
        found = [
            stored
            for stored in self._all_runs
            if all(getattr(stored.run, name) == value for name, value in wanted.items())
        ]
        return sorted(found, key=lambda s: (s.run.created, s.run.session), reverse=True)

    def runs(self, version: str = "v1", **filters: object) -> list["RunResult"]:
        """As `stored_runs`, without the paths."""
        return [stored.run for stored in self.stored_runs(version, **filters)]

    @cached_property
    def _all_runs(self) -> list["StoredRun"]:
        from workshop.collection import Collection

        if not self.results.is_dir():
            return []
        below = (path for path in sorted(self.results.iterdir()) if path.is_dir())
        collection = Collection([path for path in below if path.name not in _NOT_OWN])
        collection.refresh()
        return collection.runs

    def lab_runs(self, lab: str, *, status: str = "complete", **options: object) -> list["LabRun"]:
        """The participant's own result files of a lab, newest first; one that can't be read is left
        out.

        Args:
            lab: the lab's folder, such as "inference_benchmark".
            options: entries of LabRun.options and the values that they must have, such as
                precision="fp32".
        """
        from workshop import labs, records

        found: list[LabRun] = []
        for path in (self.results / lab / "runs").glob("*.jsonl"):
            with contextlib.suppress(WorkshopError):
                found += records.load_runs(path, labs.LabRun)
        found = [
            run for run in found if run.status == status and options.items() <= run.options.items()
        ]
        return sorted(found, key=lambda run: (run.created, run.session), reverse=True)

    def profile(
        self, version: str, tool: str = "pytorch_profiler"
    ) -> tuple["KernelTable", "RunResult | None"] | None:
        """The kernels of the participant's own profile of a version, and the record of the profiled
        run; None without one.

        Raises:
            WorkshopError: there is one, and it can't be read.
        """
        from workshop.profilers import kernel_file, load
        from workshop.profilers.runner_files import COMMAND_FILE

        folder = self.results / "profiles" / version / tool
        if not (folder / COMMAND_FILE).is_file():
            return None
        table = folder / kernel_file.JSON_FILE  # quick to read, where a trace is not
        return load.load(table if table.is_file() else folder), load.recorded_run(folder)


def sizes(run: "RunResult") -> "Sizes":
    """Sizes of the model that a run trained."""
    from workshop.run.flops import Sizes

    return Sizes(**{name: int(run.config[name]) for name in Sizes.__dataclass_fields__})


def setting(run: "RunResult") -> tuple[object, ...]:
    """Settings that two runs must share to be compared, besides their batch and length."""
    options = (run.options.get("compile"), run.options.get("cuda_graph"))
    return run.config, run.precision, run.device.get("name"), options


class _FreshLoader(SourceFileLoader):
    """Compiles a file each time: to Python's cache two changes within a second look alike."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def import_file(path: Path) -> ModuleType:
    """Imports a Python file as the module of its name.

    Raises:
        WorkshopError: it can't be read.
    """
    if not path.is_file():
        raise WorkshopError(f"{path.name}: no such file in {path.parent}")
    loader = _FreshLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up while it is being executed
    loader.exec_module(module)
    return module
