"""Every tool that writes files and prints writes first, all or nothing, and prints on any
terminal."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import HANGS_S
from test_results import files, make_result

from workshop import records
from workshop.results import RunResult
from workshop.versions import ROOT

PROFILE = ROOT / "results/reference/cpu_amd_epyc/profiles/v1/pytorch_profiler"


def commands(here: Path) -> dict[str, list[str | Path]]:
    """The command of each tool, which writes to `here/out`."""
    tools = ROOT / "analysis_tools"
    out = ("--output-dir", here / "out")
    numbers = (ROOT / "tests/fixtures/profilers/ncu/ncu_raw_h200.csv", "--peak-compute", "1")
    judged = ("--from-results", here / "in", "--baseline", here / "baseline.jsonl")
    return {
        "comparison": [tools / "compare_versions.py", "--from-results", here / "in", *out],
        "roofline": [tools / "roofline_analysis.py", *numbers, *out],
        "regression": [
            *(tools / "regression_tester.py", "check", *judged, *out),
            *("--markdown", here / "out" / "check.md"),
        ],
        "report": [tools / "report_generator.py", "--results", here / "in", *out],
        "hot list": ["-m", "workshop.profilers", "show", PROFILE, *out],
    }


FAST = ("comparison", "hot list")
pytestmark = pytest.mark.parametrize(
    "tool", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in commands(ROOT)]
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with runs in `in` and a baseline of them."""
    here = tmp_path_factory.mktemp("inputs")
    for factor in (1.0, 1.001, 1.002):
        for version in ("v1", "v2"):
            steps = [factor * step for step in (99.0, 100.0, 101.0)]
            records.add(make_result(version, step_ms=steps), here / "in")
    for run in records.load_folder(here / "in", RunResult):
        records.save(run, here / "baseline.jsonl")
    return here


@pytest.fixture
def here(inputs, tmp_path) -> Path:
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def written(here: Path) -> dict[str, int]:
    out = here / "out"
    return {name: (out / name).stat().st_mtime_ns for name in files(out)}


def run(
    tool: str, here: Path, before: Sequence[str] = (), out: int = subprocess.PIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *before, *map(str, commands(here)[tool])]
    return subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env=os.environ | more, timeout=HANGS_S)  # fmt: skip


# A file must not grow beyond a size, as on a disk that has no more room.
LIMITED = """
import os, resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.slow
def test_any_terminal_shows_it_and_a_full_disk_leaves_the_files_from_before(tool, here) -> None:
    done = run(tool, here, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and done.stdout.strip()
    before = written(here)
    sizes = sorted((here / "out" / name).stat().st_size for name in before)
    *_, second, largest = [0, *sizes]
    done = run(tool, here, ["-c", LIMITED, str((second + largest) // 2), sys.executable])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "can't be written: " in line
    assert written(here) == before


def test_files_are_written_though_the_output_is_not_read(tool, here) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run(tool, here, out=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")
    assert written(here)
