"""The entries of a long array in a JSON file, one at a time.

A trace of a million kernels is half a gigabyte of text, and several gigabytes as Python objects:
decoded entry by entry it needs no more than a block of the text. Unlike ijson, this accepts the NaN
that some traces hold, goes on after an entry that is no JSON, gives all entries before the end of a
text that was cut off, and needs no package that a site's PyTorch does not come with.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from workshop.profilers.reading import Problems, lines

_SEPARATOR = re.compile(r"[\s,]*")
_BARE_ARRAY = re.compile(r"\A\ufeff?\s*\[")
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_LISTED_OBJECT = re.compile(r'([\[,}\n])\s*(\{\s*"([^"]*)"\s*:)')
"""An object in a list, or at the beginning of a line: before a member's value comes a colon."""
_decode = json.JSONDecoder().raw_decode

_BLOCK = 1 << 20
"""Characters."""
_LONGEST_KEY = 1 << 10
"""Characters from the quote before a key to the bracket after it."""
_LONGEST_ENTRY = 1 << 24
"""Characters. An entry that isn't over by then is broken, and no reason to hold the whole file."""
_LONGEST_TOKEN = 16
"""Characters: a number, or an escape in a string, after which the decoder wants more text."""


def items(path: Path, key: str, problems: Problems) -> Iterator[tuple[int, Any]]:
    """(number from 1, entry) of the first array that is the value of `key`, or of the text itself
    where that is an array; gzip or not. An entry that is no JSON is left out, has a number too, and
    is noted in `problems`.

    Quotes and brackets in such an entry mean nothing. So the next entry is the next object of a
    list whose first key is that of the broken entry, or a key of the one before.

    Raises:
        WorkshopError: the file can't be read.
    """
    blocks = _blocks(path)
    held, position, number = next(blocks, ""), 0, 1
    # Inside a JSON string the quotes would be escaped, and this would not match.
    array = re.compile(rf'"{re.escape(key)}"\s*:\s*\[')
    start, entry = _BARE_ARRAY.match(held), None
    if not start:
        held, position, start = _find(array.search, held, position, blocks)
        if not start:
            return
    position = start.end()
    while True:
        position = _SEPARATOR.match(held, position).end()  # type: ignore[union-attr]
        if held.startswith("]", position):
            return
        try:
            entry, position = _decode(held, position)
        except (ValueError, RecursionError) as error:
            is_cut = _is_cut(error, held)
            may_go_on = is_cut and len(held) - position <= _LONGEST_ENTRY
            if may_go_on and (block := next(blocks, "")):
                held, position = held[position:] + block, 0
                continue
            what = f"no JSON ({getattr(error, 'msg', error)})"
            begins = partial(_next_object, _keys(entry, held, position))
            held, position, found = _find(begins, held, position + 1, blocks)
            if not found:
                lost = "the text ends here" if is_cut else f"{what}, nor any entry after it"
                problems.add(number, lost)
                return
            problems.add(number, what)
            number += 1
            if found[1] == "[":  # of another array: this one ended with the broken entry
                return
            position = found.start(2)
            continue
        yield number, entry
        number += 1


def _find(
    search: Callable[[str, int], re.Match[str] | None],
    held: str,
    position: int,
    blocks: Iterator[str],
) -> tuple[str, int, re.Match[str] | None]:
    """Reads on until `search` finds something: the text then held, where in it the search began,
    and what it found; None at the end of the text."""
    while not (found := search(held, position)) and (block := next(blocks, "")):
        held, position = held[position:][-_LONGEST_KEY:] + block, 0
    return held, position, found


def _is_cut(error: Exception, held: str) -> bool:
    """Whether an entry may only be broken because the text held ends within it."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated") or error.pos + _LONGEST_TOKEN > len(held)
    )


def _keys(before: Any, held: str, position: int) -> set[str]:
    """The keys with which the entry after a broken one may begin."""
    first = _FIRST_KEY.match(held, position)
    return {*(before if isinstance(before, dict) else ()), *((first[1],) if first else ())}


def _next_object(keys: set[str], held: str, position: int) -> re.Match[str] | None:
    found = _LISTED_OBJECT.finditer(held, position)
    return next((one for one in found if one[3] in keys), None)


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
