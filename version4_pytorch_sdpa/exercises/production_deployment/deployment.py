"""The table of latencies that deploy.py writes and the check reads."""

from pathlib import Path
from typing import Any

from workshop import results
from workshop.errors import WorkshopError

SCHEMA_VERSION = 1
FOLDER = Path("exercises", "production_deployment")
"""Below the folder of results."""
TABLE = "latency.json"
BATCH_SIZES = (1, 2, 4, 8)
SERVICE_LIMIT = 4
"""What the 95th percentile may be, in units of the median at the smallest batch."""
_FIGURES = ("p50_ms", "p95_ms", "max_ms", "tokens_per_s")


def read_table(path: Path, form: str) -> dict[int, dict[str, float]]:
    """The rows of one form ("model", "exported", "compiled") by batch size.

    Raises:
        WorkshopError: there is no table, or they are not in it.
    """
    if not path.is_file():
        raise WorkshopError(f"{path.name} is missing: run deploy.py, as the sheet says")
    content = results.read_json(path)
    rows = {row["batch_size"]: _figures(row) for row in _rows(content) if row.get("form") == form}
    if content.get("schema_version") != SCHEMA_VERSION or not rows:
        raise WorkshopError(
            f"{path.name} has no latencies of the form {form!r}: run deploy.py again"
        )
    return rows


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = content.get("rows")
    return rows if isinstance(rows, list) else []


def _figures(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(row[name]) for name in _FIGURES}
