"""The parts of a report that labs wrote: a section for each device, lab and subject."""

from collections.abc import Iterator, Mapping, Sequence

from workshop import labs
from workshop.collection import StoredLab
from workshop.labs import LabRow
from workshop.profilers.names import printable
from workshop.report.parts import (
    IMPLAUSIBLE,
    Alarm,
    Cell,
    Link,
    Section,
    links,
    with_column,
)
from workshop.results import FAIL
from workshop.show import lab_table

INTRO = (
    "labs/{lab}, session {session}: percentiles over all steps of all processes, in ms a step of "
    "{units}. A row that did not pass its gate has no times."
)


def build(stored: Sequence[StoredLab]) -> list[tuple[Section, list[LabRow]]]:
    """A section for each of `labs.newest`, and its rows; V3's benchmark has its own."""
    groups = labs.newest(one.run for one in stored if one.run.lab != labs.KERNELS)
    files = {id(one.run): one for one in stored}
    return [(section(f"lab-{number}", rows, files), rows) for number, rows in enumerate(groups, 1)]


def section(anchor: str, rows: list[LabRow], files: Mapping[int, StoredLab]) -> Section:
    """All of one of `labs.newest`.

    Args:
        files: the stored runs, by the identity of each run.
    """
    first = rows[0].first
    units = " or ".join(f"{n:,}" for n in sorted({row.first.units_per_step for row in rows}))
    intro = INTRO.format(lab=first.lab, session=first.session, units=f"{units} {first.unit}")
    part = Section(anchor, lab_table.title(rows), intro=printable(intro))
    table = lab_table.lab_table(rows)
    found = [links(files[id(run)] for run in row.runs) for row in rows]
    last = [Cell("", own) for own in found]
    part.tables.append(with_column("How fast, and proven", table, "result files", last))
    part.sentences += table.notes
    for row, own in zip(rows, found, strict=True):
        part.alarms += alarms(row, part.title, own)
    return part


def alarms(row: LabRow, title: str, files: tuple[Link, ...]) -> Iterator[Alarm]:
    if row.failed:
        yield Alarm(FAIL, f"{title}: {lab_table.failure(row)}", files)
    for line in lab_table.implausible(row):
        yield Alarm(IMPLAUSIBLE, f"{title}: {line}", files)
