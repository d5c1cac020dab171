"""The content of a report and of the dashboard's views, without its origin.

Text from files may hold anything: here it is lines without control characters, and each page
escapes it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workshop import tables
from workshop.collection import StoredLab, StoredRun
from workshop.compare.rows import Row
from workshop.labs import LabRow
from workshop.profilers.names import printable
from workshop.report.pictures import Picture, read_roofline, roofline_picture
from workshop.results import FAIL, RunResult
from workshop.roofline.inputs import STEP
from workshop.roofline.model import flags, sentences

BAD, DIM = "bad", "dim"
"""Tones of lines: an error, and what was not measured."""
_TONES = {"red": BAD, "dim": DIM}
IMPLAUSIBLE = "IMPLAUSIBLE"
SUSPECT = "SUSPECT PROFILE"
_KERNELS_IN_WORDS = 6
"""Kernels whose distance from their roofs is given in words."""


@dataclass(frozen=True)
class Link:
    """To a result file."""

    text: str
    path: Path


@dataclass(frozen=True)
class Cell:
    """A table's cell: text, or links, or both; `anchor` leads to another place of the report. The
    dashboard also shows a `look`, a `title` under the mouse, and a square of a `colour`."""

    text: str
    links: tuple[Link, ...] = ()
    anchor: str = ""
    is_code: bool = False
    look: str | None = None
    title: str = ""
    colour: str = ""


@dataclass
class Line:
    """A table's line."""

    cells: list[Cell]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """The first `texts` columns are words, the others numbers."""

    caption: str
    header: list[str]
    lines: list[Line]
    texts: int = 1


@dataclass(frozen=True)
class Alarm:
    """A reason to quote no number before it is looked into."""

    kind: str
    text: str
    links: tuple[Link, ...]


@dataclass
class Section:
    """A size of the model, a profile, a benchmark: its tables, pictures and sentences."""

    anchor: str
    title: str
    links: tuple[Link, ...] = ()
    intro: str = ""
    tables: list[Table] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    advice: list[tuple[str, str]] = field(default_factory=list)
    """Findings, and what to do."""
    pictures: list[Picture] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)


@dataclass
class Device:
    """All that was measured on one kind of device."""

    anchor: str
    name: str
    facts: list[tuple[str, str]]
    """Hardware, software, code and day."""
    sessions: Table | None
    commands: Table | None
    pictures: list[Picture]
    """Over all sizes."""
    sizes: list[Section]
    others: list[Section]
    """Waterfalls, sweeps, labs, V3's benchmark and the harness's cost."""
    profiles: list[Section]
    profile_pictures: list[Picture]

    @property
    def sections(self) -> list[Section]:
        return [*self.sizes, *self.others, *self.profiles]


@dataclass
class Sheet:
    """Sheet that a participant completes."""

    devices: list[tuple[str, list[tuple[str, str]], list[Section]]]
    """Each one's name, facts, and sizes and labs."""
    exercises: Table


@dataclass
class Report:
    """Everything, in its order on the page."""

    title: str
    devices: list[Device]
    rows: list[Row]
    """Rows of all ladders, waterfalls and sweeps."""
    lab_rows: list[LabRow]
    broken: list[tuple[Link, str]]
    counts: list[str]
    glance: Table | None
    """A line for each size's ladder."""

    @property
    def alarms(self) -> list[Alarm]:
        sections = [section for device in self.devices for section in device.sections]
        return [alarm for section in sections for alarm in section.alarms]

    @property
    def verdicts(self) -> str:
        """How many rows of the versions and of the labs have which verdict, in sentences; empty
        without rows."""
        versions = [(row.verdict, row.plausibility) for row in self.rows]
        of_labs = [(row.verdict, row.plausibility) for row in self.lab_rows]
        return " ".join([*_verdicts("Versions", versions), *_verdicts("Labs", of_labs)])


def _verdicts(of: str, found: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    numbers = Counter(verdict for verdict, _ in found)
    if numbers:
        words = ", ".join(f"{number} {verdict}" for verdict, number in numbers.most_common())
        flagged = sum(bool(sentences) for _, sentences in found)
        also = f"{f'{flagged} with' if flagged else 'no'} implausible numbers"
        yield f"{of}: {words} of {count(len(found), 'row')}; {also}."


def count(number: int, what: str) -> str:
    """As in "3 profiles"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cells(*texts: str) -> list[Cell]:
    return [Cell(printable(text)) for text in texts]


def links(stored: Iterable[StoredRun | StoredLab]) -> tuple[Link, ...]:
    paths = dict.fromkeys(one.path for one in stored)
    return tuple(Link(str(i), path) for i, path in enumerate(paths, 1))


def with_column(caption: str, table: tables.Table, name: str, last: Sequence[Cell]) -> Table:
    """A table of compare/tables.py, with one more column."""
    lines = [
        Line([*cells(*line.cells), cell], _TONES.get(line.style or "", ""))
        for line, cell in zip(table.lines, last, strict=True)
    ]
    return Table(caption, [*table.header, name], lines, texts=max(table.left) + 1)


def alarms(row: Row, where: str, files: tuple[Link, ...]) -> Iterator[Alarm]:
    if row.failed:
        yield Alarm(FAIL, printable(f"{where}: {row.note}"), files)
    for sentence in row.plausibility:
        yield Alarm(IMPLAUSIBLE, printable(f"{where}: {sentence}"), files)


def add_roofline(
    section: Section,
    title: str,
    files: Sequence[Path],
    folder: Path,
    runs: Sequence[RunResult] = (),
    *,
    in_words: bool = True,
) -> None:
    """Adds what bounds the whole steps, or the longest kernels, in words, and a picture of several
    points; the parts of a step are in the picture alone.

    Args:
        folder: of results, with measured ceilings.
        runs: those of the files that are shown; without them all.
    """
    roofline = read_roofline(files, runs, title=title, results_folder=folder)
    if roofline is None:
        return
    steps = sum(point.category == STEP for point in roofline.points)
    if in_words:
        found = sentences(roofline, steps or _KERNELS_IN_WORDS)
        lines = map(printable, (*flags(roofline), *found, *roofline.notes))
        section.sentences = list(dict.fromkeys([*section.sentences, *lines]))
    if steps or len(roofline.points) > 1:
        name = f"{section.anchor}-roofline"
        section.pictures.append(roofline_picture(name, roofline, tuple(files)))
