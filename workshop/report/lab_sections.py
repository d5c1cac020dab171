"""The parts of a report that labs wrote: a section for each device, lab and subject."""

from collections.abc import Iterator, Sequence

from workshop import labs
from workshop.collection import StoredLab, StoredOperators
from workshop.compare import lab_table
from workshop.labs import LabRow
from workshop.profilers.names import printable
from workshop.report.parts import (
    BAD,
    IMPLAUSIBLE,
    Alarm,
    Cell,
    Line,
    Link,
    Section,
    Table,
    cells,
    links,
    with_column,
)
from workshop.results import FAIL

INTRO = (
    "labs/{lab}, session {session}: percentiles over all steps of all processes, in ms a step of "
    "{units}. A row that did not pass its gate has no times."
)


def build(stored: Sequence[StoredLab]) -> list[tuple[Section, list[LabRow]]]:
    """A section for each of `labs.newest`, and its rows."""
    groups = labs.newest(one.run for one in stored)
    files = {id(one.run): one for one in stored}
    return [(_section(f"lab-{number}", rows, files), rows) for number, rows in enumerate(groups, 1)]


def operators(stored: Sequence[StoredOperators]) -> list[tuple[str, Section]]:
    """A section for the newest run of each kind of the operator bench, with its device."""
    newest = {one.bench.title: one for one in stored}
    found = []
    for number, one in enumerate(newest.values(), 1):
        link = Link(one.path.name, one.path)
        table = lab_table.operator_table(one.bench)
        section = Section(f"operators-{number}", table.title, (link,), sentences=[*table.notes])
        lines = [Line(cells(*line.cells), BAD * (line.style == "red")) for line in table.lines]
        section.tables.append(Table("How near to the ceiling", list(table.header), lines, texts=2))
        for row in one.bench.rows:
            if row.status in (FAIL, IMPLAUSIBLE):
                text = printable(f"{section.title}: {row.op} {row.shapes}: {row.note}")
                section.alarms.append(Alarm(row.status, text, (link,)))
        found.append((one.bench.device, section))
    return found


def _section(anchor: str, rows: list[LabRow], files: dict[int, StoredLab]) -> Section:
    first = rows[0].first
    units = " or ".join(f"{n:,}" for n in sorted({row.first.units_per_step for row in rows}))
    intro = INTRO.format(lab=first.lab, session=first.session, units=f"{units} {first.unit}")
    section = Section(anchor, lab_table.title(rows), intro=printable(intro))
    table = lab_table.lab_table(rows)
    found = [links(files[id(run)] for run in row.runs) for row in rows]
    last = [Cell("", own) for own in found]
    section.tables.append(with_column("How fast, and proven", table, "result files", last))
    section.sentences += table.notes
    for row, own in zip(rows, found, strict=True):
        section.alarms += _alarms(row, section.title, own)
    return section


def _alarms(row: LabRow, title: str, files: tuple[Link, ...]) -> Iterator[Alarm]:
    if row.failed:
        yield Alarm(FAIL, f"{title}: {lab_table.failure(row)}", files)
    for line in lab_table.implausible(row):
        yield Alarm(IMPLAUSIBLE, f"{title}: {line}", files)
