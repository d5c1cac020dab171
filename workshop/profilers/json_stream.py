"""The entries of the long arrays in a JSON text, one at a time.

A trace of a million kernels is half a gigabyte of text, and several gigabytes as Python objects:
decoded entry by entry it never needs more than the text, and read from its file block by block not
even that. A text that ends too early, as that of an interrupted profiler does, gives the entries
before its end.
"""

import codecs
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers.reading import MOST_BYTES, Problems, is_gzip, readable

_SEPARATOR = re.compile(r"[\s,]*")
_BARE_ARRAY = re.compile(r"\A\ufeff?\s*\[")
_decode = json.JSONDecoder().raw_decode

_BLOCK_BYTES = 1 << 20
_LONGEST_KEY = 1 << 10
"""Characters from the quote before a key to the bracket after it."""
_LONGEST_ENTRY = 1 << 24
"""Characters. An entry that isn't over by then is broken, and no reason to hold the whole file."""


def items(text: str, key: str, problems: Problems) -> Iterator[tuple[int, Any]]:
    """(number, entry) of every array that is the value of `key`, wherever it stands; the numbers,
    from 1, go on from one array to the next. What follows an entry that can't be read is left
    out, and noted in `problems`."""
    return _entries(_Window([text]), _array(key), problems)


def file_items(path: Path, key: str, problems: Problems) -> Iterator[tuple[int, Any]]:
    """As `items`, of a file's text, gzip or not, of which only a block is held at a time. Where
    the text is nothing but an array, the entries are that array's.

    Raises:
        WorkshopError: it can't be read, or its text is longer than MOST_BYTES.
    """
    window = _Window(_blocks(path))
    array = _BARE_ARRAY if _BARE_ARRAY.match(window.text) else _array(key)
    return _entries(window, array, problems)


def head(path: Path) -> str:
    """The text with which a file begins, gzip or not: at least 64 KiB, or all there is.

    Raises:
        WorkshopError: it can't be read.
    """
    text = ""
    for block in _blocks(path):
        text += block
        if len(text) >= 1 << 16:
            break
    return text


def value(text: str, key: str) -> Any:
    """The value of the first `key` in a JSON text; None where there is none or it can't be read."""
    match = re.search(rf'"{re.escape(key)}"\s*:\s*', text)
    if match is None:
        return None
    try:
        return _decode(text, match.end())[0]
    except (ValueError, RecursionError):
        return None


class _Window:
    """The part of a text that is held, and a position in it."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self._blocks = iter(blocks)
        self.text = next(self._blocks, "")
        self.position = 0

    def extend(self) -> bool:
        """Adds the text's next blocks and drops what lies before the position; False, and nothing
        done, at the end of the text. What is held at least doubles, so that to try an entry again
        after each time takes no longer, in all, than a few times its length."""
        held = self.text[self.position :]
        blocks, added = [held], 0
        for block in self._blocks:
            blocks.append(block)
            added += len(block)
            if added >= len(held):
                break
        if not added:
            return False
        self.text, self.position = "".join(blocks), 0
        return True

    def pass_over(self, pattern: re.Pattern) -> bool:
        """Moves behind the next match, if there is one."""
        while True:
            if match := pattern.search(self.text, self.position):
                self.position = match.end()
                return True
            self.position = max(self.position, len(self.text) - _LONGEST_KEY)
            if not self.extend():
                return False

    def next_character(self) -> str:
        """Moves behind separators; what stands there, "" at the end of the text."""
        while True:
            self.position = _SEPARATOR.match(self.text, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.text) or not self.extend():
                return self.text[self.position : self.position + 1]

    def decode(self) -> Any:
        """Moves behind the entry that begins at the position, which it returns.

        Raises:
            ValueError, RecursionError: it is no JSON, or its end is missing.
        """
        while True:
            try:
                entry, end = _decode(self.text, self.position)
            except ValueError:
                too_long = len(self.text) - self.position > _LONGEST_ENTRY
                if too_long or not self.extend():
                    raise
                continue
            # A number that ends with the block, but for its "." or "e+", may go on in the next.
            if end + 2 < len(self.text) or not self.extend():
                self.position = end
                return entry


def _entries(window: _Window, array: re.Pattern, problems: Problems) -> Iterator[tuple[int, Any]]:
    """Of all arrays of whose beginnings `array` is the pattern."""
    number = 0
    while window.pass_over(array):
        while (character := window.next_character()) != "]":
            number += 1
            if not character:
                problems.add(number, "the text ends here")
                break
            try:
                entry = window.decode()
            except (ValueError, RecursionError) as error:
                problems.add(number, f"no JSON ({error!s:.60})")
                break
            yield number, entry


def _array(key: str) -> re.Pattern:
    # Inside a JSON string the quotes would be escaped, and this would not match.
    return re.compile(rf'"{re.escape(key)}"\s*:\s*\[')


def _blocks(path: Path) -> Iterator[str]:
    """A file's text, gzip or not, unknown bytes replaced; of a truncated gzip what can be
    unpacked."""
    opener: Callable = gzip.open if is_gzip(path) else open
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    left = MOST_BYTES
    with readable(path), opener(path, "rb") as file:
        while True:
            try:
                block = file.read1(_BLOCK_BYTES)
            except EOFError:  # gzip's word for a file that ends too early
                return
            if not block:
                return
            left -= len(block)
            if left < 0:
                raise WorkshopError(f"{path}: its text is longer than {MOST_BYTES >> 30} GiB")
            yield decoder.decode(block).replace("\0", "\ufffd")
