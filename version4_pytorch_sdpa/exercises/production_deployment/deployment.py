"""The table of latencies that deploy.py writes and the check reads."""

from pathlib import Path

from workshop import results
from workshop.errors import WorkshopError

SCHEMA_VERSION = 1
FOLDER = Path("exercises", "production_deployment")
"""Below the folder of results."""
TABLE = "latency.json"
BATCH_SIZES = (1, 2, 4, 8)
SERVICE_LIMIT = 4
"""Limit of the 95th percentile, in units of the median at the smallest batch."""
FORMS = ("model", "exported")
"""Those that every table has: "compiled" is there with --aot."""
TIMES = ("p50_ms", "p95_ms", "max_ms")
"""Keys of the result of `measure` of mine.py."""
Rows = dict[str, dict[int, dict[str, float]]]
"""Times and tokens_per_s by form and batch size."""


def read_table(path: Path) -> Rows:
    """Raises WorkshopError: there is no table, or not all of it."""
    if not path.is_file():
        raise WorkshopError(f"{path.name} is missing: run deploy.py, as the sheet says")
    content, rows = results.read_json(path), Rows()
    try:
        for row in content["rows"]:
            figures = {name: float(row[name]) for name in (*TIMES, "tokens_per_s")}
            rows.setdefault(row["form"], {})[row["batch_size"]] = figures
        complete = content["schema_version"] == SCHEMA_VERSION and all(rows[f] for f in FORMS)
    except (KeyError, TypeError, ValueError):
        complete = False
    if not complete:
        raise WorkshopError(f"{path.name} is not as deploy.py writes it: run it again")
    return rows
