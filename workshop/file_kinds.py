"""The kinds of JSON files that the workshop's programs write, recognised by their first keys.

All begin with `schema_version`, and the one or two keys after it are those of one kind alone.
results.json_text refuses what is not listed here, so that no reader takes a new kind of file for
another one.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from workshop.errors import WorkshopError

RUNS, OPERATORS = "runs of a comparison", "operator bench"
BENCHMARK, KERNEL_TABLE, CEILINGS = "kernels' benchmark", "kernel table", "measured ceilings"
KINDS = {
    ("session", "device"): RUNS,
    ("operators",): OPERATORS,
    ("session", "created"): BENCHMARK,
    ("kernel_table",): KERNEL_TABLE,
    ("ceilings",): CEILINGS,
    # No page shows the rest: it is made from those above, or is no measurement.
    ("version", "config_name"): "count of operations",
    ("created", "rows"): "comparison",
    ("created", "waterfalls"): "waterfall",
    ("created", "sweeps"): "sweep",
    ("created", "threshold"): "regression check",
    ("created", "git_commit"): "regression baseline",
    ("created", "version"): "summary of profiles",
    ("created", "software"): "inspection of kernels",
    ("created", "device"): "deployment exercise",
    ("roofline",): "roofline",
    ("advice",): "advice on profiles",
    ("unit",): "difference of profiles",
    ("exercises",): "progress in the exercises",
    ("name", "checked"): "check of a machine",
    ("stage",): "stage of the debugging exercise",
}
_START = re.compile(
    r'\s*\{\s*"schema_version":\s*\d+,\s*"(\w+)":(?:\s*"(?:[^"\\]|\\.)*",\s*"(\w+)":)?'
)
_LENGTH = 4096
"""Characters that the first keys and their values have room in."""


def kind_of(path: Path) -> str:
    """One of KINDS' values; empty for a file that is not the workshop's.

    Raises:
        WorkshopError: it can't be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = _START.match(file.read(_LENGTH))
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    return _kind(match.groups()) if match else ""


def check(content: Iterable[str]) -> None:
    """Raises ValueError for a content with a schema_version whose keys are not in KINDS."""
    first, *keys = [*content, ""][:3]
    if first == "schema_version" and not _kind(keys):
        raise ValueError(f"no kind of file begins with {keys}: list it in {__name__}.KINDS")


def _kind(keys: Iterable[str | None]) -> str:
    second, third = [*keys, None][:2]
    return KINDS.get((second or "", third or "")) or KINDS.get((second or "",), "")
