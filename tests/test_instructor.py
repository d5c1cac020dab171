"""The instructor's guide: the times of its courses add up, and their exercises exist."""

import re

from workshop.exercises import sheet
from workshop.versions import ROOT

GUIDE = ROOT / "exercises" / "instructor_guide.md"
CELL = re.compile(r"\*\*(\d+):(\d\d)\*\* (.*?)(?: \((\d+)\))?$")


def test_the_times_of_a_course_add_up() -> None:
    lines = [line for line in GUIDE.read_text("utf-8").splitlines() if "**9:00**" in line]
    table = GUIDE.read_text("utf-8").partition(lines[0])
    rows = [lines[0], *table[2].strip().partition("\n\n")[0].splitlines()]
    columns = zip(*([cell.strip() for cell in row.split("|")[1:-1]] for row in rows), strict=True)
    minutes = {one.name: one.minutes for one in sheet.read_all()}
    for day in columns:
        parts = [match.groups() for match in map(CELL.match, day) if match]
        begins = [60 * int(hour) + int(minute) for hour, minute, *_ in parts]
        ends = [begin + int(its or 0) for begin, (*_, its) in zip(begins, parts, strict=True)]
        assert ends[:-1] == begins[1:] and parts[-1][2] == "end" and ends[-1] < 17 * 60
        for _, _, what, its in parts:
            names = re.findall(r"\b[a-z]+_\w+", what.rpartition(":")[2]) if ":" in what else []
            least = sum(minutes[name] for name in names)
            assert not names or least <= int(its)
