"""Reading what other programs wrote: any line of it may be missing, cut off or made up.

Each parser keeps the valid part and counts the rest in `Problems`; where nothing is valid, that
becomes one error, which names the file and the row.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers.names import printable

MOST_NS = 1e18
"""No time in a profile is longer (30 years): what is comes from a corrupt file."""
MOST_COUNTED = 1e24
"""No program computes or moves more, in operations or bytes."""
BEFORE_HEADER = 1 << 22
"""Characters within which a header is looked for: a tool or its program may print before it."""
_BLOCK_BYTES, _HEAD = 1 << 20, 1 << 16

csv.field_size_limit(1 << 24)  # a templated kernel name can pass the default of 128 KiB


class Problems:
    """The rows of a file that can't be read: the first is named, the others are counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._first = ""

    def add(self, row: int, what: str) -> None:
        """Args:
        row: the line of the file, from 1, or of a database's or a JSON list's entries.
        """
        if not self.count:
            self._first = f"{self.path}, row {row}: {what}"
        self.count += 1

    @contextmanager
    def noted(self, row: int) -> Iterator[None]:
        """Adds a row in which a number is missing, instead of raising NoNumber."""
        try:
            yield
        except NoNumber as error:
            self.add(row, str(error))

    def warnings(self) -> list[str]:
        """One sentence, or none."""
        if not self.count:
            return []
        others = f" (and {self.count - 1:,} more rows)" if self.count > 1 else ""
        return [f"left out {self._first}{others}"]

    def error(self, wanted: str) -> WorkshopError:
        """The error to raise where nothing valid was found.

        Args:
            wanted: what should have been there, as in "kernels".
        """
        first = f"; {self._first}" if self.count else ""
        return WorkshopError(f"{self.path}: no {wanted} in it{first}")


class Notes:
    """Faults of the files that make up one profile.

    Attributes:
        errors: of files that gave nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: list[Problems] = []
        self.errors: list[WorkshopError] = []

    def warnings(self) -> list[str]:
        sentences = [str(error) for error in self.errors]
        return sentences + [line for problems in self.problems for line in problems.warnings()]

    def nothing_found(self, wanted: str) -> WorkshopError:
        """The error to raise where no file held what was wanted, as `Problems.error`."""
        if self.errors:
            return self.errors[0]
        bad = next((problems for problems in self.problems if problems.count), None)
        return (bad or Problems(self._path)).error(wanted)


class NoNumber(ValueError):
    """A field that should hold a number holds something else."""


def number(text: str | float | None) -> float:
    """A finite number: from JSON, or from a tool's CSV, which may group thousands with commas.
    Raises NoNumber: it is none."""
    try:
        value = float(text.replace(",", "") if isinstance(text, str) else text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise NoNumber(f"{text!r:.40} is no number") from None
    if not math.isfinite(value) or isinstance(text, bool):
        raise NoNumber(f"{text!r:.40} is no finite number")
    return value


def nanoseconds(text: str | float | None, unit_ns: float = 1.0) -> float:
    """A duration from its value in a unit of `unit_ns`. Raises NoNumber: it is none, negative, or
    longer than any profile."""
    value = number(text) * unit_ns
    if not 0 <= value <= MOST_NS:
        raise NoNumber(f"{text!r:.40} is no duration")
    return value


def amount(text: str | float | None, unit: float = 1.0) -> float:
    """Bytes, operations or a hardware counter, from its value in a unit of `unit` of them. Raises
    NoNumber: it is none, negative, or more than any program has."""
    value = number(text) * unit
    if not 0 <= value <= MOST_COUNTED:
        raise NoNumber(f"{text!r:.40} is no count")
    return value


def count(text: str | float | None) -> int:
    """A number of calls, at least 1. Raises NoNumber: it is none."""
    value = number(text)
    if not 1 <= value <= MOST_NS or value != int(value):
        raise NoNumber(f"{text!r:.40} is no number of calls")
    return int(value)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is read into one line that names it."""
    try:
        yield
    except FileNotFoundError:
        raise WorkshopError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, zlib.error):
        raise WorkshopError(f"{path}: its gzip compression is corrupt") from None
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror or error}") from None


def lines(path: Path, most: float = math.inf) -> Iterator[str]:
    """The lines of a text file, gzip or not, unknown bytes replaced, up to the one in which its
    `most`-th character is; a truncated gzip gives what can be unpacked.

    Raises:
        WorkshopError: it can't be read.
    """
    opener = _Gzip if is_gzip(path) else open
    with (
        readable(path),
        opener(path, "rb") as file,
        io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="") as text,
    ):
        seen = 0
        while seen < most and (line := text.readline(_BLOCK_BYTES)):
            yield line.replace("\0", "\ufffd")
            seen += len(line)


class _Gzip(gzip.GzipFile):
    """A gzip file that ends where it was cut off."""

    def read1(self, size: int = -1) -> bytes:
        try:
            return super().read1(size)
        except EOFError:
            return b""


def head(path: Path) -> str:
    """The text with which a file begins, as `lines`: at least 64 KiB, or all there is."""
    return "".join(lines(path, _HEAD))


def text(path: Path) -> str:
    """The whole text of a file; as `lines`."""
    return "".join(lines(path))


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does."""
    with readable(path), path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


class CsvTable:
    """A CSV file read by the names of its columns, row by row.

    Attributes:
        columns: index by name, from the header.
    """

    def __init__(self, path: Path, problems: Problems, *, first_column: str | None = None) -> None:
        """Reads the header: the first line, or the first that begins with `first_column` where
        a program's own output may precede it.

        Raises:
            WorkshopError: there is no such line, or the file can't be read.
        """
        self.path, self._problems = path, problems
        self._lines_before = 0
        self._reader = csv.reader(self._from_header(first_column))
        header = next(self._safely(), [])
        names = [name.strip().lstrip("\ufeff") for name in header]
        if not any(names):
            wanted = f" (a line that begins with {first_column!r})" if first_column else ""
            raise WorkshopError(f"{path}: no header{wanted} in it; is the file empty or cut off?")
        self.columns: dict[str, int] = {}
        for index, name in enumerate(names):
            self.columns.setdefault(name, index)

    def _from_header(self, first_column: str | None) -> Iterator[str]:
        """The file's lines without those before the header, whose quotes need not match."""
        after = lines(self.path)
        for line in after:
            start = line.lstrip('\ufeff \t"')
            if start.strip() and (first_column is None or start.startswith(first_column)):
                yield line
                break
            self._lines_before += 1
        yield from after

    def index(self, name: str) -> int:
        """The index of a column.

        Raises:
            WorkshopError: the file has not got it.
        """
        if name not in self.columns:
            has = printable(", ".join(list(self.columns)[:12]))
            raise WorkshopError(f"{self.path}: no column {name:.80}; its columns are {has:.200}")
        return self.columns[name]

    def select(
        self, *columns: str, optional: Iterable[str] = ()
    ) -> Iterator[tuple[int, list[Any]]]:
        """(line number, fields of these columns) of every row; None where the file has not got an
        optional column. Rows that are too short count as problems.

        Raises:
            WorkshopError: a column is missing.
        """
        indices = [self.index(name) for name in columns] + [*map(self.columns.get, optional)]
        for row, fields in self.rows(1 + max(index for index in indices if index is not None)):
            yield row, [None if index is None else fields[index] for index in indices]

    def rows(self, at_least: int = 1) -> Iterator[tuple[int, list[str]]]:
        """(line number, fields) of every row that has `at_least` fields; shorter ones, but for
        empty lines, are counted as problems."""
        for row in self._safely():
            if len(row) >= at_least:
                yield self._line(), row
            elif row:
                self._problems.add(self._line(), f"has only {len(row)} fields")

    def _line(self) -> int:
        return self._lines_before + self._reader.line_num

    def _safely(self) -> Iterator[list[str]]:
        while True:
            try:
                yield next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._problems.add(self._line(), str(error))
