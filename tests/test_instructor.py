"""The instructor's guide: its numbers are the result files', its minutes the sheets'."""

import re

from workshop.classroom import courses
from workshop.classroom.instructor import GUIDE
from workshop.exercises import sheet
from workshop.versions import ROOT

TEXT = GUIDE.read_text(encoding="utf-8")
SESSION = re.compile(r"^## Session (\d): [^\n]* \((\d+) minutes\)$(.*?)(?=^## )", re.M | re.S)
EXERCISE = re.compile(r"^\| \[(\w+)\]\(\.\./(\S+)/\) \| (\d+) \|$", re.M)


def test_the_sessions_have_the_exercises_of_the_sheets() -> None:
    found = {int(number): (int(minutes), part) for number, minutes, part in SESSION.findall(TEXT)}
    assert {number: minutes for number, (minutes, _) in found.items()} == sheet.SESSION_MINUTES
    sheets, problems = sheet.read_all(ROOT)
    assert problems == []
    for number, (minutes, part) in found.items():
        listed = {name: int(its) for name, _, its in EXERCISE.findall(part)}
        assert listed == {s.name: s.minutes for s in sheets if s.session == number}
        assert sum(listed.values()) == minutes


def test_a_course_fits_into_its_day() -> None:
    ends = re.findall(r"^\| (\d+):\d\d \| end \|", TEXT, re.MULTILINE)
    assert len(ends) == len(courses.COURSES) and int(ends[0]) <= 13
    assert all(int(hour) < 17 for hour in ends)
    assert {*courses.AT_HOME} <= {its.name for its in sheet.read_all(ROOT)[0]}
