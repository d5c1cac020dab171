"""my_answers.toml: what a participant wrote down."""

import math
import re
import sys
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Unanswered(Exception):
    """A question whose answer is empty still; its text is the key."""


class Answers:
    """The answers of one file. A key in a table is written with a dot, "stage_1.cause".

    To read an answer raises Unanswered where it is empty ("", nan, an empty list), and
    WorkshopError where it is missing or something else.
    """

    def __init__(self, path: Path) -> None:
        """Raises WorkshopError: the file can't be read, or is no TOML."""
        self.path = path
        try:
            self._text = path.read_text(encoding="utf-8")
            self._values = tomllib.loads(self._text)
        except (OSError, UnicodeDecodeError) as error:
            raise WorkshopError(f"{path.name}: can't be read, save it as UTF-8: {error}") from None
        except tomllib.TOMLDecodeError as error:
            hint = "text goes in quotes, closed on the same line; a number has no comma"
            raise WorkshopError(f"{path.name}: {error}; {hint}") from None

    def __getitem__(self, key: str) -> Any:
        """The value as TOML has it."""
        value: Any = self._values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise WorkshopError(
                    f"{self.path.name}: {key} is missing; "
                    f"`python -m workshop.exercises reset {self.path.parent.name}` makes the "
                    "questions again"
                )
            value = value[part]
        empty = isinstance(value, str) and not value.strip()
        if empty or value == [] or (isinstance(value, float) and math.isnan(value)):
            raise Unanswered(key)
        return value

    def has(self, key: str) -> bool:
        """Whether there is an answer, right or wrong."""
        try:
            self[key]
        except Unanswered:
            return False
        return True

    def number(self, key: str) -> float:
        """A finite number."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            hint = ", without quotes" if isinstance(value, str) else ""
            raise self._wrong(key, f"should be a number{hint}", value)
        if not abs(value) <= sys.float_info.max:
            raise self._wrong(key, "should be a finite number", value)
        return float(value)

    def text(self, key: str) -> str:
        """A text, without space around it."""
        value = self[key]
        if not isinstance(value, str):
            raise self._wrong(key, "should be a text in quotes", value)
        return value.strip()

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of `choices`, upper or lower case."""
        value = self.text(key)
        found = next((one for one in choices if one.casefold() == value.casefold()), None)
        if found is None:
            raise self._wrong(key, f"should be one of {', '.join(choices)}", value)
        return found

    def names(self, key: str, known: tuple[str, ...]) -> list[str]:
        """A list of some of the `known` names, each once."""
        value = self[key]
        unknown = [n for n in value if n not in known] if isinstance(value, list) else value
        if unknown or not isinstance(value, list):
            raise self._wrong(key, f"should be a list of {', '.join(known)}", unknown)
        return list(dict.fromkeys(value))

    def _wrong(self, key: str, should: str, value: object) -> WorkshopError:
        """The line is named where the file is written as its template is."""
        table, _, name = key.rpartition(".")
        current, where = "", ""
        for number, line in enumerate(self._text.splitlines(), start=1):
            if match := re.match(r"\s*\[([\w.\-]+)\]", line):
                current = match[1]
            elif current == table and re.match(rf"\s*{re.escape(name)}\s*=", line):
                where = f", line {number}"
                break
        return WorkshopError(f"{self.path.name}{where}: {key} {should}, found {value!r:.40}")
