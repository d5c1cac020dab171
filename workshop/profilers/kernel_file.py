"""kernels.json and kernels.csv: a kernel table on its own, small enough to keep and to share."""

import csv
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workshop import results
from workshop.errors import WorkshopError
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.names import printable
from workshop.profilers.table import HostCall, Kernel, KernelTable, Timeline, as_records

CSV_FILE, JSON_FILE = "kernels.csv", "kernels.json"
SCHEMA_VERSION = 1
_DERIVED = ("mean_ns", "share")
"""Written for those who read the file without us."""
_CSV_COLUMNS = [*(field.name for field in dataclasses.fields(Kernel)), *_DERIVED]


def write(table: KernelTable, folder: Path) -> tuple[Path, Path]:
    """Writes CSV_FILE and JSON_FILE; their paths."""
    results.prepare_folder(folder)
    records = as_records(table)
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    content = {"schema_version": SCHEMA_VERSION, "kernel_table": table.tool}
    content |= dataclasses.asdict(table) | {"path": table.path.name, "kernels": records}
    results.write_together(
        {folder / CSV_FILE: text.getvalue(), folder / JSON_FILE: results.json_text(content)}
    )
    return folder / CSV_FILE, folder / JSON_FILE


def recognises_json(start: str) -> bool:
    """Whether a JSON text begins as JSON_FILE does."""
    return '"kernel_table"' in start[:200]


def recognises_header(columns: list[str]) -> bool:
    """Whether a CSV file with these columns is a CSV_FILE."""
    return columns == _CSV_COLUMNS


def read(path: Path) -> KernelTable:
    """Reads JSON_FILE.

    Raises:
        WorkshopError: it is broken; the message names the file and the field.
    """
    content = results.read_json(path)
    if content.get("schema_version") != SCHEMA_VERSION:
        raise WorkshopError(
            f"{path}: schema_version is {content.get('schema_version')!r:.40}, this workshop reads "
            f"{SCHEMA_VERSION}; make it again with this checkout"
        )
    table = results.decode(_Stored, _without_derived(content), path, "")
    for index, kernel in enumerate(table.kernels):
        if kernel.calls < 1 or kernel.total_ns < 0 or kernel.category not in CATEGORIES:
            raise WorkshopError(f"{path}: field kernels[{index}] has no calls, time or category")
    return KernelTable(
        path=path,
        tool=printable(table.tool),
        kernels=[dataclasses.replace(k, name=printable(k.name)) for k in table.kernels],
        what=table.what,
        device=table.device and printable(table.device),
        timeline=table.timeline,
        steps=table.steps,
        phases_ns={printable(name): ns for name, ns in table.phases_ns.items()},
        host_calls={printable(name): call for name, call in table.host_calls.items()},
        warnings=[printable(warning) for warning in table.warnings],
    )


@dataclasses.dataclass
class _Stored:
    """The fields of JSON_FILE, by type."""

    schema_version: int
    kernel_table: str
    path: str
    tool: str
    kernels: list[Kernel]
    what: str
    device: str | None
    timeline: Timeline | None
    steps: int | None
    phases_ns: dict[str, float]
    host_calls: dict[str, HostCall]
    warnings: list[str]


def _without_derived(content: Mapping[str, Any]) -> dict[str, Any]:
    kernels = content.get("kernels")
    if not isinstance(kernels, list) or not all(isinstance(kernel, dict) for kernel in kernels):
        return dict(content)  # which decoding will refuse, by the field's name
    kept = [{k: v for k, v in kernel.items() if k not in _DERIVED} for kernel in kernels]
    return {**content, "kernels": kept}
