"""The instructor's guide: the times of its courses add up, and its exercises fit into them."""

import re
from typing import Any

import pytest

from workshop.exercises import frame, sheet
from workshop.exercises.answers import tomllib
from workshop.versions import ROOT

GUIDE = ROOT / "exercises" / "instructor_guide.md"
CELL = re.compile(r"\*\*(\d+):(\d\d)\*\* (.*?)(?: \((\d+)\))?$")


def test_the_times_of_a_course_add_up() -> None:
    lines = [line for line in GUIDE.read_text("utf-8").splitlines() if "**9:00**" in line]
    table = GUIDE.read_text("utf-8").partition(lines[0])
    rows = [lines[0], *table[2].strip().partition("\n\n")[0].splitlines()]
    columns = zip(*([cell.strip() for cell in row.split("|")[1:-1]] for row in rows), strict=True)
    exercises = {one.name: one for one in sheet.read_all()}
    profilers = 0
    for day in columns:
        parts = [match.groups() for match in map(CELL.match, day) if match]
        begins = [60 * int(hour) + int(minute) for hour, minute, *_ in parts]
        ends = [begin + int(its or 0) for begin, (*_, its) in zip(begins, parts, strict=True)]
        assert ends[:-1] == begins[1:] and parts[-1][2] == "end" and ends[-1] < 17 * 60
        for _, _, what, its in parts:
            names = re.findall(r"\b[a-z]+_\w+", what.rpartition(":")[2]) if ":" in what else []
            assert not names or sum(exercises[name].minutes for name in names) + 10 <= int(its)
            if session := re.match(r"session \d", what):
                assert {exercises[name].when for name in names} == {session[0]}
            profilers += names == ["rocm_tools_intro"] and its == "45"
    assert profilers == 4  # all but a second day


def answering(table: dict[str, Any], minutes: float = 0.75) -> float:
    """Minutes for the answers of a table: 45 s each, 22 s for a prediction."""
    return sum(
        answering(value, 0.37 if key == "predict" else minutes)
        if isinstance(value, dict)
        else minutes
        for key, value in table.items()
    )


@pytest.mark.parametrize("one", sheet.read_all(), ids=lambda one: one.name)
def test_a_sheet_can_be_read_and_answered_in_its_minutes(one) -> None:
    text = (one.folder / sheet.README).read_text("utf-8").partition("## Hints")[0]
    words = re.findall(r"\w[^\s|]*", re.sub(r"(?ms)^ *```.*?^ *```$|\]\([^)]*\)", "", text))
    least = len(words) / 150
    for given in (frame.QUESTIONS, frame.DIAGNOSIS):
        if (one.folder / given).is_file():
            least += answering(tomllib.loads((one.folder / given).read_text("utf-8")))
    assert least <= one.minutes
