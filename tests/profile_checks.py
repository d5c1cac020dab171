"""Checks of every kernel table, however damaged its file is, and of the cost to read a huge one."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import HANGS_S

from workshop.errors import WorkshopError
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.table import KernelTable

ROOT = Path(__file__).resolve().parents[1]


def check_refused_or_sane(read: Callable[[Path], KernelTable], path: Path) -> None:
    """One line that names what is wrong, or a table that a run could have."""
    try:
        table = read(path)
    except WorkshopError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return
    of_amd = table.tool.startswith("rocprof")
    assert table.kernels or (of_amd and (table.host_calls or table.steps))
    assert len({kernel.name for kernel in table.kernels}) == len(table.kernels)
    for kernel in table.kernels:
        assert kernel.name and kernel.category in CATEGORIES and kernel.calls >= 1
        assert 0 <= kernel.total_ns < 1e24
        if kernel.min_ns is not None and kernel.max_ns is not None:
            assert 0 <= kernel.min_ns <= kernel.max_ns
            assert kernel.min_ns * (1 - 1e-9) - 1 <= kernel.mean_ns
            assert kernel.mean_ns <= kernel.max_ns * (1 + 1e-9) + 1
        for amount in (kernel.bytes, kernel.flops):
            assert amount is None or 0 <= amount < math.inf
    if table.timeline is not None:
        assert 0 <= table.timeline.busy_ns <= table.timeline.span_ns < 1e21
    assert all(call.calls >= 1 and 0 <= call.total_ns < 1e24 for call in table.host_calls.values())
    assert table.steps is None or table.steps >= 1
    if of_amd or table.tool == "torch.profiler":  # the others' phases come from other kernels too
        assert sum(table.phases_ns.values()) <= table.total_ns * (1 + 1e-9)
    assert all("\n" not in warning for warning in table.warnings)


READ = """
import json, sys
from pathlib import Path
from workshop.profilers import kineto

table = kineto.read(Path(sys.argv[1]))
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(json.dumps([table.launches, table.phases_ns, 1024 * int(peak)]))
"""


class Reading(NamedTuple):
    """Numbers of the table, and the peak of the memory that it took to read it. (Not ru_maxrss,
    which starts with that of the process that started it: here with that of all tests.)"""

    launches: int
    phases_ns: dict[str, float]
    peak_bytes: int


def read_trace(path: Path) -> Reading:
    """Reads a trace in a separate process."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("no /proc, which has a process's peak of memory")
    done = subprocess.run(
        [sys.executable, "-c", READ, path],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANGS_S,
    )  # fmt: skip
    return Reading(*json.loads(done.stdout))
