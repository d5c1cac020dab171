"""The interface that an exercise's check is written against.

    def check(work: Work) -> Iterable[Item]:
        ...

yields an Item for everything that it looked at. An error becomes a red Item by itself, with the
line of the participant's file that it comes from.
"""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from workshop import versions
from workshop.errors import NotOnThisMachine, WorkshopError, printable
from workshop.exercises.answers import Answers, Unanswered

if TYPE_CHECKING:
    from workshop.collection import StoredRun
    from workshop.labs import LabRun
    from workshop.profilers.table import KernelTable
    from workshop.results import RunResult

STARTER, MINE = "starter.py", "mine.py"
QUESTIONS, MY_ANSWERS = "answers.toml", "my_answers.toml"
DIAGNOSIS, MY_DIAGNOSIS = "diagnosis.toml", "my_diagnosis.toml"
"""The names of performance_debugging's answers."""
COPIES = {STARTER: MINE, QUESTIONS: MY_ANSWERS, DIAGNOSIS: MY_DIAGNOSIS}
"""Files that an exercise gives to fill, and the names of the participant's copies."""
CHECK = "check.py"
RESULTS = versions.ROOT / "results"
_NOT_OWN = ("reference", "exercises")
"""Folders of results that hold no measurement of the participant's."""
_MOST = 400
"""Characters of an error's text that are shown."""


@dataclass(frozen=True)
class Item:
    """One thing that a check looked at."""

    ok: bool
    what: str
    """A short phrase."""
    why: str = ""
    """The finding, where it helps; may have several lines."""
    at_first: str = ""
    """The finding without the numbers that would give the answer away: for the first check that
    finds it."""
    counted: bool = True
    """False for a note: a warning, something optional, an answer that nothing can judge."""


def note(what: str, why: str) -> Item:
    """An Item that is neither right nor wrong."""
    return Item(True, what, why, counted=False)


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
            results: below which the participant's result files and profiles are.
        """
        self.folder = folder
        self.mine_path = mine or folder / MINE
        own = MY_DIAGNOSIS if (folder / DIAGNOSIS).is_file() else MY_ANSWERS
        self.answers_path = answers or folder / own
        self.results = results
        self._shown: set[Item] = set()

    @cached_property
    def module(self) -> ModuleType:
        """mine.py; importing it may raise anything."""
        return import_file(self.mine_path)

    @cached_property
    def answers(self) -> Answers:
        """The answers; WorkshopError if the file is missing or no TOML."""
        return Answers(self.answers_path)

    def each(self, *parts: Part) -> Iterator[Item]:
        """The Items of several parts of a check, each of which runs though one before it failed:
        what a part raises becomes one red Item.

        Raises:
            NotOnThisMachine: raised by a part, or it needs Triton and there is none.
        """
        for part in parts:
            try:
                yield from part(self)
            except (KeyboardInterrupt, GeneratorExit, NotOnThisMachine):
                raise
            except BaseException as error:
                if isinstance(error, ModuleNotFoundError) and error.name == "triton":
                    missing = versions.missing(versions.VERSIONS["v3"])
                    raise NotOnThisMachine(missing or str(error)) from None
                item = red_item(error, self)
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

        below = sorted(self.results.iterdir()) if self.results.is_dir() else []
        collection = Collection([p for p in below if p.is_dir() and p.name not in _NOT_OWN])
        collection.refresh()
        return collection.runs

    def lab_runs(self, lab: str, *, status: str = "complete", **options: object) -> list["LabRun"]:
        """The participant's own readable result files of a lab, newest first.

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


def setting(run: "RunResult") -> tuple[object, ...]:
    """Settings that two runs must share to be compared, besides their batch and length."""
    options = (run.options.get("compile"), run.options.get("cuda_graph"))
    return run.config, run.precision, run.device.get("name"), options


def import_file(path: Path) -> ModuleType:
    """Imports a Python file as the module of its name, compiled anew each time: to Python's cache
    two changes within a second look alike.

    Raises:
        WorkshopError: it can't be read.
    """
    if not path.is_file():
        raise WorkshopError(f"{path.name}: no such file in {path.parent}")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # dataclasses look their module up while it is being executed
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


# --- errors in a participant's file --------------------------------------------------------------


def red_item(error: BaseException, work: Work) -> Item:
    """The red Item of an error which ended a check or a part of one, with the line of mine.py."""
    mine = work.mine_path
    if isinstance(error, Unanswered):
        return Item(False, f"not answered yet: {error}")
    if isinstance(error, Missing):
        return Item(False, error.what, error.command)
    if isinstance(error, WorkshopError):
        return Item(False, printable(str(error)))
    if isinstance(error, SyntaxError) and error.filename == str(mine):
        line = f", line {error.lineno}" if error.lineno else ""
        code = f": {printable(error.text)}" if error.text and error.text.strip() else ""
        return Item(False, f"{mine.name}{line} is no Python", f"{error.msg}{code}")
    if isinstance(error, AttributeError) and getattr(error.obj, "__file__", "") == str(mine):
        return Item(False, f"{mine.name} has no {error.name}", "keep the starter's names")
    # Triton's interpreter wraps a kernel's own error: the innermost with a line of mine.py counts.
    blamed = [(link, line) for link in _chain(error) if (line := _last_line(link, mine))]
    if not blamed:
        place = _last_line(error, work.folder / CHECK) or CHECK
        return Item(False, "the check could not go on", f"{_text(error)} ({place})")
    cause, where = blamed[-1]
    if isinstance(cause, NotImplementedError):
        return Item(False, f"not written yet: {where}", printable(str(cause)[:_MOST]))
    if isinstance(cause, SystemExit):
        return Item(False, f"{where} ends Python", "leave out sys.exit(): the check goes on after")
    return Item(False, where, _text(cause))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _last_line(error: BaseException, path: Path) -> str:
    """The last line of a file that an error went through, in words; "" for none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if not frames:
        return ""
    function = "" if frames[-1].name == "<module>" else f", in {frames[-1].name}"
    return f"{path.name}, line {frames[-1].lineno}{function}"


def _text(error: BaseException) -> str:
    text = printable(str(error)[:_MOST]) if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
