"""results/exercises/progress.json: what a participant has passed, and the hints that were shown."""

from dataclasses import dataclass, field
from pathlib import Path

from workshop import results
from workshop.errors import WorkshopError

FILE = Path("exercises", "progress.json")
"""Below the folder of results."""
SCHEMA_VERSION = 1


@dataclass
class State:
    """Progress in one exercise."""

    checks: int = 0
    green: int = 0
    """Items of the last check that were green, of `items`."""
    items: int = 0
    passed: str | None = None
    """When a check was all green for the first time, ISO 8601."""
    hints: int = 0
    """The number that was shown."""
    missed: list[str] = field(default_factory=list)
    """Items that an earlier check found to be off, by their names."""


@dataclass
class _Stored:
    schema_version: int = SCHEMA_VERSION
    exercises: dict[str, State] = field(default_factory=dict)


class Progress:
    """The states of all exercises, kept in a file that is rewritten at each change."""

    def __init__(self, folder: Path) -> None:
        """Raises WorkshopError: the file in the folder of results is broken."""
        self.path = folder / FILE
        self._states: dict[str, State] = {}
        if self.path.is_file():
            try:
                content = results.read_json(self.path)
                self._states = results.convert(_Stored, content, str(self.path)).exercises
            except WorkshopError as error:
                raise WorkshopError(f"{error}; delete the file to start again") from None

    def __getitem__(self, name: str) -> State:
        return self._states.setdefault(name, State())

    def checked(self, name: str, green: int, items: int) -> None:
        """Notes a check in which `green` of `items` were green."""
        state = self[name]
        state.checks, state.green, state.items = state.checks + 1, green, items
        if green == items and state.passed is None:
            state.passed = results.now()
        self._save()

    def miss(self, name: str, items: set[str]) -> None:
        """Notes Items that a check found to be off."""
        self[name].missed = sorted(items | set(self[name].missed))
        self._save()

    def hinted(self, name: str) -> None:
        """Notes that one more hint was shown."""
        self[name].hints += 1
        self._save()

    def forget(self, name: str) -> None:
        """Starts an exercise again."""
        self._states.pop(name, None)
        self._save()

    def _save(self) -> None:
        results.prepare_folder(self.path.parent, "--results-dir")
        states = {name: vars(state) for name, state in sorted(self._states.items())}
        results.write_json(self.path, {"schema_version": SCHEMA_VERSION, "exercises": states})
