"""The entries of a long array in a JSON file, one at a time.

A trace of a million kernels is half a gigabyte of text, and several gigabytes as Python objects:
decoded entry by entry it needs no more than a block of the text. Unlike ijson, this accepts the NaN
that some traces hold, gives all entries before the end of a text that was cut off, and needs no
package that a site's PyTorch does not come with.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop.profilers.reading import Problems, lines

_SEPARATOR = re.compile(r"[\s,]*")
_BARE_ARRAY = re.compile(r"\A\ufeff?\s*\[")
_decode = json.JSONDecoder().raw_decode

_BLOCK = 1 << 20
"""Characters."""
_LONGEST_KEY = 1 << 10
"""Characters from the quote before a key to the bracket after it."""
_LONGEST_ENTRY = 1 << 24
"""Characters. An entry that isn't over by then is broken, and no reason to hold the whole file."""


def items(
    path: Path, key: str, problems: Problems, *, every: bool = False
) -> Iterator[tuple[int, Any]]:
    """(number from 1, entry) of the first array that is the value of `key`, or of the text itself
    where that is an array; gzip or not. What follows an entry that can't be read is left out, and
    noted in `problems`.

    Args:
        every: of all such arrays; the numbers go on from one to the next.

    Raises:
        WorkshopError: the file can't be read.
    """
    blocks = _blocks(path)
    held = next(blocks, "")
    # Inside a JSON string the quotes would be escaped, and this would not match.
    array = re.compile(rf'"{re.escape(key)}"\s*:\s*\[')
    start = _BARE_ARRAY.match(held) or array.search(held)
    position, number = 0, 1
    while True:
        while not start:
            block = next(blocks, "")
            if not block:
                return
            held, position = held[position:][-_LONGEST_KEY:] + block, 0
            start = array.search(held)
        position = start.end()
        while True:
            position = _SEPARATOR.match(held, position).end()  # type: ignore[union-attr]
            if held.startswith("]", position):
                break
            try:
                entry, position = _decode(held, position)
            except (ValueError, RecursionError) as error:
                too_long = len(held) - position > _LONGEST_ENTRY
                block = "" if too_long else next(blocks, "")
                if not block:
                    ended = position == len(held)
                    what = "the text ends here" if ended else f"no JSON ({error!s:.60})"
                    problems.add(number, what)
                    return
                held, position = held[position:] + block, 0
                continue
            yield number, entry
            number += 1
        if not every:
            return
        start = array.search(held, position)


def value(text: str, key: str) -> Any:
    """The value of the first `key` in a JSON text; None where there is none or it can't be read."""
    match = re.search(rf'"{re.escape(key)}"\s*:\s*', text)
    try:
        return _decode(text, match.end())[0] if match else None
    except (ValueError, RecursionError):
        return None


def _blocks(path: Path) -> Iterator[str]:
    """A file's text in pieces of at least _BLOCK characters, but for the last."""
    parts, size = [], 0
    for line in lines(path):
        parts.append(line)
        size += len(line)
        if size >= _BLOCK:
            yield "".join(parts)
            parts, size = [], 0
    yield "".join(parts)
