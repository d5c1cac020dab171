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
"""The longest time in a profile (30 years): what is longer comes from a corrupt file."""
MOST_COUNTED = 1e24
"""The most operations or bytes that a program has."""
BEFORE_HEADER = 1 << 22
"""Characters within which a header is looked for: a tool or its program may print before it."""
_BLOCK_BYTES, _HEAD = 1 << 20, 1 << 16

csv.field_size_limit(1 << 24)  # a templated kernel name can pass the default of 128 KiB


class Invalid(ValueError):
    """A field, a row or an event makes no sense."""


class Problems:
    """Rows and files of a profile that can't be read. Of a file's rows the first is named and the
    others are counted.

    Attributes:
        errors: of files that gave nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.errors: list[WorkshopError] = []
        self._first = ""
        self._files: list[Problems] = []

    def of(self, path: Path) -> "Problems":
        """The problems of one file among several."""
        self._files.append(Problems(path))
        return self._files[-1]

    def add(self, row: int, what: str) -> None:
        """Args:
        row: the line of the file, from 1, or of a database's or a JSON list's entries.
        """
        if not self.count:
            self._first = f"{self.path}, row {row}: {what}"
        self.count += 1

    @contextmanager
    def noted(self, row: int) -> Iterator[None]:
        """Adds a row that makes no sense, instead of raising Invalid."""
        try:
            yield
        except Invalid as error:
            self.add(row, str(error))

    def warnings(self) -> list[str]:
        """Sentences: one for each file."""
        sentences = [str(error) for error in self.errors]
        if self.count:
            others = f" (and {self.count - 1:,} more rows)" if self.count > 1 else ""
            sentences.append(f"left out {self._first}{others}")
        return sentences + [line for file in self._files for line in file.warnings()]

    def error(self, wanted: str) -> WorkshopError:
        """The error to raise where nothing valid was found.

        Args:
            wanted: what should have been there, as in "kernels".
        """
        if self.errors:
            return self.errors[0]
        bad = next((one for one in (self, *self._files) if one.count), self)
        first = f"; {bad._first}" if bad.count else ""
        return WorkshopError(f"{bad.path}: no {wanted} in it{first}")


def number(text: str | float | None) -> float:
    """A finite number: from JSON, or from a tool's CSV, which may group thousands with commas.
    Raises Invalid: it is no number."""
    try:
        value = float(text.replace(",", "") if isinstance(text, str) else text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{text!r:.40} is no number") from None
    if not math.isfinite(value) or isinstance(text, bool):
        raise Invalid(f"{text!r:.40} is no finite number")
    return value


def nanoseconds(text: str | float | None, unit_ns: float = 1.0) -> float:
    """A duration from its value in a unit of `unit_ns`. Raises Invalid: it is no number, negative,
    or longer than any profile."""
    value = number(text) * unit_ns
    if not 0 <= value <= MOST_NS:
        raise Invalid(f"{text!r:.40} is no duration")
    return value


def amount(text: str | float | None, unit: float = 1.0) -> float:
    """Bytes, operations or a hardware counter, from its value in a unit of `unit` of them. Raises
    Invalid: it is no number, negative, or more than any program has."""
    value = number(text) * unit
    if not 0 <= value <= MOST_COUNTED:
        raise Invalid(f"{text!r:.40} is no count")
    return value


def count(text: str | float | None) -> int:
    """A number of calls, at least 1. Raises Invalid: it is no such number."""
    value = number(text)
    if not 1 <= value <= MOST_NS or value != int(value):
        raise Invalid(f"{text!r:.40} is no number of calls")
    return int(value)


def name(text: object) -> str:
    """A name in printable form. Raises Invalid: it is empty, or no text."""
    if not isinstance(text, str) or not text:
        raise Invalid(f"{text!r:.40} is no name")
    return printable(text)


def sums(
    text: object,
    calls: str,
    total: str,
    least: str | None,
    most: str | None,
    units_ns: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> dict[str, Any]:
    """Arguments of table.Sums.add, from a row of a tool's own sums of a kernel.

    Args:
        least, most: the extremes of its calls, where the tool has them.
        units_ns: of the total and the extremes.

    Raises:
        Invalid: a value makes no sense, or the mean is not between the extremes.
    """
    number_of_calls, total_ns = count(calls), nanoseconds(total, units_ns[0])
    found = {"name": name(text), "total_ns": total_ns, "calls": number_of_calls}
    if least is None or most is None:
        return found
    least_ns, most_ns = nanoseconds(least, units_ns[1]), nanoseconds(most, units_ns[2])
    mean, rounding = total_ns / number_of_calls, units_ns[0]
    if not least_ns - rounding <= mean <= most_ns + rounding:
        raise Invalid(f"a mean of {mean:.0f} ns is not between {least_ns:.0f} and {most_ns:.0f}")
    return found | {"min_ns": least_ns, "max_ns": most_ns}


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
    `most`-th character is; a truncated gzip gives what can be unpacked. Raises WorkshopError: it
    can't be read."""
    opener = _Gzip if starts_with(path, b"\x1f\x8b") else open
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


def starts_with(path: Path, magic: bytes) -> bool:
    """Whether a file begins with these bytes."""
    with readable(path), path.open("rb") as file:
        return file.read(len(magic)) == magic


class CsvTable:
    """A CSV file read by the names of its columns, row by row.

    Attributes:
        columns: index by name, from the header.
    """

    def __init__(self, path: Path, problems: Problems, *, first_column: str | None = None) -> None:
        """Reads the header: the first line, or the first that begins with `first_column` where
        a program's own output may precede it. Raises WorkshopError: there is no such line, or the
        file can't be read."""
        self.path, self._problems = path, problems
        self._lines_before = 0
        self._reader = csv.reader(self._from_header(first_column))
        names = [name.strip().lstrip("\ufeff") for name in next(self._rows(), [])]
        if not any(names):
            wanted = f" (a line that begins with {first_column!r})" if first_column else ""
            raise WorkshopError(f"{path}: no header{wanted} in it; is the file empty or cut off?")
        self.columns: dict[str, int] = {}
        for index, column in enumerate(names):
            self.columns.setdefault(column, index)

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

    def select(
        self, *columns: str, optional: Iterable[str] = ()
    ) -> Iterator[tuple[int, list[Any]]]:
        """(line number, fields of these columns) of every row; None where the file has not got an
        optional column. Rows that are too short count as problems, except lines that ncu prints
        between the rows ("==PROF== Disconnected from process 4711").

        Raises:
            WorkshopError: a column is missing.
        """
        for missing in (one for one in columns if one not in self.columns):
            has = printable(", ".join(list(self.columns)[:12]))
            raise WorkshopError(f"{self.path}: no column {missing:.80}; its columns are {has:.200}")
        indices = [self.columns.get(column) for column in (*columns, *optional)]
        last = max(index for index in indices if index is not None)
        for fields in self._rows():
            row = self._line()
            if len(fields) > last:
                yield row, [None if index is None else fields[index] for index in indices]
            elif fields and not fields[0].startswith("=="):
                self._problems.add(row, f"has only {len(fields)} fields")

    def _line(self) -> int:
        return self._lines_before + self._reader.line_num

    def _rows(self) -> Iterator[list[str]]:
        while True:
            try:
                yield next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._problems.add(self._line(), str(error))
