"""kernels.json and kernels.csv: a kernel table on its own, small enough to keep and to share."""

import csv
import dataclasses
import io
from pathlib import Path

from workshop import results
from workshop.errors import WorkshopError
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.names import printable
from workshop.profilers.table import Kernel, KernelTable

CSV_FILE, JSON_FILE = "kernels.csv", "kernels.json"
SCHEMA_VERSION = 1
_DERIVED = ("mean_ns", "share")
"""Written for readers of the file other than this module."""
_CSV_COLUMNS = [*(field.name for field in dataclasses.fields(Kernel)), *_DERIVED]


def write(table: KernelTable, folder: Path) -> tuple[Path, Path]:
    """Writes CSV_FILE and JSON_FILE; their paths."""
    results.prepare_folder(folder)
    rows = [
        dataclasses.asdict(kernel) | {"mean_ns": kernel.mean_ns, "share": table.share(kernel)}
        for kernel in table.kernels
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    content = {"schema_version": SCHEMA_VERSION, "kernel_table": table.tool}
    content |= dataclasses.asdict(table) | {"path": table.path.name, "kernels": rows}
    results.write_together(
        {folder / CSV_FILE: text.getvalue(), folder / JSON_FILE: results.json_text(content)}
    )
    return folder / CSV_FILE, folder / JSON_FILE


def recognises_json(start: str) -> bool:
    """Whether a JSON text begins as JSON_FILE does."""
    return '"kernel_table"' in start[:200]


def read(path: Path) -> KernelTable:
    """Reads JSON_FILE. Raises WorkshopError: it is broken; the message names the file and the
    field."""
    content = results.read_json(path)
    if content.pop("schema_version", None) != SCHEMA_VERSION:
        raise WorkshopError(
            f"{path}: this workshop reads schema_version {SCHEMA_VERSION}; make it again with this "
            "checkout"
        )
    content.pop("kernel_table", None)
    kernels = content.get("kernels")
    for kernel in kernels if isinstance(kernels, list) else []:
        for name in _DERIVED if isinstance(kernel, dict) else []:
            kernel.pop(name, None)
    table = results.convert(KernelTable, content | {"path": path}, str(path))
    for index, kernel in enumerate(table.kernels):
        if kernel.calls < 1 or kernel.total_ns < 0 or kernel.category not in CATEGORIES:
            raise WorkshopError(f"{path}: field kernels[{index}] has no calls, time or category")
        kernel.name = printable(kernel.name)
    table.tool, table.device = printable(table.tool), table.device and printable(table.device)
    table.phases_ns = {printable(name): ns for name, ns in table.phases_ns.items()}
    table.host_calls = {printable(name): call for name, call in table.host_calls.items()}
    table.warnings = list(map(printable, table.warnings))
    return table
