"""What a report is made of; nothing of where it comes from, nothing of how it looks.

Text comes from files, so it may hold anything: it has become lines without control characters
here, and whoever writes a page escapes it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from workshop.compare.rows import Row
from workshop.profilers.names import printable
from workshop.report.pictures import Picture

BAD, DIM = "bad", "dim"
"""Tones of what stands out, and of what stands back."""
_VERDICTS = {"gate only": "the gate only", "fail": "failed", "not run": "ran neither"}
FAILED, IMPLAUSIBLE, WRONG = "FAILED", "IMPLAUSIBLE", "WRONG"
SUSPECT = "SUSPECT PROFILE"


@dataclass(frozen=True)
class Link:
    """To a result file."""

    text: str
    path: Path


@dataclass(frozen=True)
class Cell:
    """Of a table: text, or links, or both; `anchor` leads to another place of the report."""

    text: str
    links: tuple[Link, ...] = ()
    anchor: str = ""
    is_code: bool = False


@dataclass(frozen=True)
class Line:
    """Of a table."""

    cells: list[Cell]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """The first `texts` columns are words, the others figures."""

    caption: str
    header: list[str]
    lines: list[Line]
    texts: int = 1


@dataclass(frozen=True)
class Alarm:
    """Something for which no figure may be believed before it is looked into."""

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
    """What was measured, by what."""
    sessions: Table | None
    commands: Table | None
    pictures: list[Picture]
    """Over all sizes."""
    sizes: list[Section]
    others: list[Section]
    """Waterfalls, sweeps, V3's benchmark and the harness's cost."""
    profiles: list[Section]
    profile_pictures: list[Picture]

    @property
    def sections(self) -> list[Section]:
        return [*self.sizes, *self.others, *self.profiles]


@dataclass
class Report:
    """Everything, in the order in which it is told."""

    title: str
    devices: list[Device]
    rows: list[Row]
    """Of all ladders, waterfalls and sweeps."""
    broken: list[tuple[Link, str]]
    counts: list[str]
    glance: Table | None
    """Every size's ladder in a line."""

    @property
    def alarms(self) -> list[Alarm]:
        return [
            alarm
            for device in self.devices
            for section in device.sections
            for alarm in section.alarms
        ]

    @property
    def proof(self) -> str:
        """Whether the figures have passed what they must pass, in a sentence."""
        verdicts = [row.proof(red="fail").removesuffix(" *") for row in self.rows]
        told = [f"{verdicts.count('pass')} of {count(len(verdicts), 'row')} passed gate and audit"]
        for verdict, what in _VERDICTS.items():
            number = verdicts.count(verdict)
            told += [f"{number} {what}"] if number else []
        flagged = sum(bool(row.plausibility) for row in self.rows)
        return f"{', '.join(told)}; {f'{flagged} with' if flagged else 'no'} implausible figures."


def count(number: int, what: str) -> str:
    """As in "3 profiles"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cells(*texts: str) -> list[Cell]:
    return [Cell(printable(text)) for text in texts]
