"""The kinds of files that pages show, recognised by their first keys.

All begin with `schema_version`; the one or two keys after it are those of one kind alone.
"""

import re
from pathlib import Path

from workshop.errors import WorkshopError

RUNS, KERNEL_TABLE, CEILINGS = "runs of a comparison", "kernel table", "measured ceilings"
KINDS = {
    ("session", "device"): RUNS,
    ("kernel_table",): KERNEL_TABLE,
    ("ceilings",): CEILINGS,
}
_START = re.compile(
    r'\s*\{\s*"schema_version":\s*\d+,\s*"(\w+)":(?:\s*"(?:[^"\\]|\\.)*",\s*"(\w+)":)?'
)
_LENGTH = 4096
"""Characters that the first keys and their values have room in."""


def kind_of(path: Path) -> str:
    """One of KINDS' values; empty for another file.

    Raises:
        WorkshopError: it can't be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = _START.match(file.read(_LENGTH))
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    keys = match.groups() if match else ()
    return KINDS.get(keys) or KINDS.get(keys[:1], "")
