"""What reading a huge profile costs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import HANGS_S

ROOT = Path(__file__).resolve().parents[1]
READ = """
import json, sys
from importlib import import_module
from pathlib import Path

parser = import_module("workshop.profilers." + sys.argv[1])
table = parser.read(Path(sys.argv[2]))
busy_ns = table.timeline.busy_ns if table.timeline else None
figures = [table.launches, table.total_ns, busy_ns, table.phases_ns]
status = Path("/proc/self/status").read_text()
print(json.dumps([*figures, 1024 * int(status.split("VmHWM:")[1].split()[0])]))
"""


class Reading(NamedTuple):
    """Figures of the table, and what it took to read it."""

    launches: int
    total_ns: float
    busy_ns: float | None
    phases_ns: dict[str, float]
    peak_bytes: int
    """Of the process's memory. Not its ru_maxrss, which starts with that of the process that
    started it: here with that of all tests before this one."""


def read(parser: str, path: Path) -> Reading:
    """Reads a profile in a process of its own.

    Args:
        parser: a module of workshop.profilers.
    """
    if not Path("/proc/self/status").is_file():
        pytest.skip("no /proc, which tells a process's peak of memory")
    done = subprocess.run(
        [sys.executable, "-c", READ, parser, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANGS_S,
    )
    return Reading(*json.loads(done.stdout))
