"""The measured numbers of exercises/instructor_guide.md, each with the file that it comes from.

`make docs` writes them between the guide's markers; the words around them are the guide's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from workshop.collection import Collection
from workshop.show import ladders
from workshop.tables import markdown_rows as table
from workshop.versions import ROOT, VERSIONS

GUIDE = ROOT / "exercises" / "instructor_guide.md"
PUBLISHED = ROOT / "tests" / "fixtures" / "published_tables.json"
_SIZES, _PRECISION = ("small", "medium"), "bf16"


def parts(recorded: Collection) -> dict[str, str]:
    """Markdown for each pair of the guide's markers, by the markers' name."""
    steps = (
        *("version", "size", "step ms", "forward", "backward", "optimizer", "speed-up [95%]"),
        *("peak MB", "of it activations and rest", "of peak", "files"),
    )
    return {"steps": table(steps, _steps(recorded), range(2))}


def _steps(recorded: Collection) -> Iterator[tuple[str, ...]]:
    """Rows of the versions as they are, in processes that passed the gate."""
    for group in ladders.ladders(recorded.runs):
        for row, stored in group.pairs():
            is_shown = row.version in VERSIONS and not row.variant and row.step_ms is not None
            if not is_shown or row.config not in _SIZES or row.precision != _PRECISION:
                continue
            times = (row.step_ms, row.forward_ms, row.backward_ms, row.optimizer_ms)
            rest, path = row.memory_mb.get("rest"), stored[0].path
            yield (
                row.label,
                f"{group.size}, {row.device}",
                *("-" if ms is None else f"{ms:,.2f}" for ms in times),
                row.speedup_text(),
                "-" if row.peak_memory_mb is None else f"{row.peak_memory_mb:,.0f}",
                f"{rest:,.0f}" if isinstance(rest, (int, float)) else "-",
                "-" if row.peak_share is None else f"{row.peak_share:.1%}",
                f"[{path.name}]({Path(os.path.relpath(path, GUIDE.parent)).as_posix()})",
            )
