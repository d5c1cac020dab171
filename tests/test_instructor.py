"""The instructor's guide: its numbers are the result files', its minutes the sheets'."""

import re

from workshop.classroom import courses
from workshop.classroom.instructor import GUIDE
from workshop.exercises import sheet
from workshop.versions import ROOT

TEXT = GUIDE.read_text(encoding="utf-8")


def test_a_course_fits_into_its_day() -> None:
    ends = re.findall(r"\*\*(\d+):(\d\d)\*\* end", TEXT)
    assert len(ends) == len(courses.COURSES) and ("13", "00") in ends
    assert all(int(hour) < 17 for hour, _ in ends)
    assert {*courses.AT_HOME} <= {its.name for its in sheet.read_all(ROOT)[0]}
