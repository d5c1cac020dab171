"""Parts that the exercises' tests share: checks in this process, and solutions with something
changed."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workshop.exercises import frame, sheet
from workshop.exercises.answers import Answers, tomllib
from workshop.exercises.frame import Item, Work

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "exercises" / "solutions"
FOLDERS = {folder.name: folder for folder in sheet.folders()}


@functools.cache
def loaded(name: str, file: str = "check") -> ModuleType:
    """A file of an exercise."""
    return frame.import_file(FOLDERS[name] / f"{file}.py")


def checked(name: str, **where: Path) -> list[Item]:
    """The Items of an exercise's check, in this process."""
    return list(Work(FOLDERS[name], **where).each(loaded(name).check))


def solution(name: str) -> dict[str, Path]:
    """Where a solution's files are, as `checked` takes them."""
    files = {"mine": frame.MINE, "answers": frame.MY_ANSWERS, "results": "results"}
    paths = {key: SOLUTIONS / name / file for key, file in files.items()}
    return {key: path for key, path in paths.items() if path.exists()}


def with_answers(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of the solution's answers; of a key that is there twice the last one is changed."""
    text = (SOLUTIONS / name / frame.MY_ANSWERS).read_text(encoding="utf-8")
    for key, value in changes.items():
        *_, last = re.finditer(rf"(?m)^{key} = .*$", text)
        text = f"{text[: last.start()]}{key} = {json.dumps(value)}{text[last.end() :]}"
    path = folder / frame.MY_ANSWERS
    path.write_text(text, encoding="utf-8")
    return path


def changed(name: str, folder: Path, changes: Mapping[str, str]) -> Path:
    """A copy of the solution's code with pieces of its text changed."""
    text = (SOLUTIONS / name / frame.MINE).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / frame.MINE
    path.write_text(text, encoding="utf-8")
    return path


def shown(items: list[Item]) -> str:
    """Output of a check, in lines."""
    return "\n".join(f"{item.what}: {item.why}" for item in items)


def red(items: list[Item]) -> str:
    """Texts of the red Items."""
    return shown([item for item in items if not item.ok])


def only_fault(name: str, folder: Path, changes: Mapping[str, Any], **where: Path) -> str:
    """Text of the one red Item where the solution's answers are changed."""
    answers = with_answers(name, folder, **changes)
    (item,) = [item for item in checked(name, answers=answers, **where) if not item.ok]
    return shown([item])


def unanswered(name: str, **where: Path) -> list[Item]:
    """The Items of the untouched questions; each is named as not answered."""
    questions = FOLDERS[name] / frame.QUESTIONS
    items = checked(name, answers=questions, **where)
    for key in re.findall(r"(?m)^(\w+) = ", questions.read_text(encoding="utf-8")):
        assert re.search(rf"not answered yet: (\w+\.)?{key}\b", red(items)), key
    return items


def wrong_answers(name: str, **where: Path) -> dict[str, list[Any]]:
    """Wrong values of each of the solution's answers: a number that is too large, another text, the
    other words of a choice (of which some may be right, too). Without predictions: none is red."""
    choices: dict[str, tuple[str, ...]] = {}
    true_choice = Answers.choice

    def choice(answers: Answers, key: str, words: tuple[str, ...]) -> str:
        choices[key.rpartition(".")[2]] = words
        return true_choice(answers, key, words)

    right = solution(name)["answers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answers, "choice", choice)
        assert not red(checked(name, answers=right, **where))
    tables = tomllib.loads(right.read_text(encoding="utf-8"))
    answers = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    for table, values in tables.items():
        answers |= values if isinstance(values, dict) and table != "predict" else {}
    return {
        key: [word for word in choices[key] if word.casefold() != value.casefold()]
        if key in choices
        else [value[::-1] if isinstance(value, (str, list)) else 1.5 * value + 2.3]
        for key, value in answers.items()
        if not key.startswith("predicted_")
    }


def check_each_answer(name: str, folder: Path, **where: Path) -> None:
    """Each wrong answer to the solution's questions is the one that is red, with a reason."""
    for key, values in wrong_answers(name, **where).items():
        found = []
        for value in values:
            answers = with_answers(name, folder, **{key: value})
            found.append([item for item in checked(name, answers=answers, **where) if not item.ok])
        assert {1} <= {*map(len, found)} <= {0, 1}, (key, found)
        reasons = [item.why.rpartition(": ")[2] for items in found for item in items]
        assert min(map(len, reasons)) > 5, (key, reasons)
