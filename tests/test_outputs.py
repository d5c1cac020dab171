"""What holds for every tool that writes files and prints: it writes first, all or nothing, and
prints on any terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS_S
from test_results import files, make_result

from workshop import results
from workshop.versions import ROOT

Finished = subprocess.CompletedProcess[str]
PROFILES = ROOT / "results" / "reference" / "cpu_amd_epyc" / "profiles"
OLD, NEW = (PROFILES / key / "pytorch_profiler" for key in ("v1", "v2"))


def commands(here: Path) -> dict[str, list[str | Path]]:
    """Of each tool, which writes to `here/out`."""
    tools, profilers = ROOT / "analysis_tools", ("-m", "workshop.profilers")
    out = ("--output-dir", here / "out")
    numbers = "--ai 10 --gflops 100 --label ± --peak-compute 1 --peak-bw 50".split()
    judged = ("--from-results", here / "in", "--baseline", here / "baseline.json")
    return {
        "comparison": [tools / "compare_versions.py", "--from-results", here / "in", *out],
        "roofline": [tools / "roofline_analysis.py", *numbers, *out],
        "regression": [
            *(tools / "regression_tester.py", "check", *judged, *out),
            *("--markdown", here / "out" / "check.md"),
        ],
        "report": [tools / "report_generator.py", "--results", here / "in", *out],
        "show": [*profilers, "show", OLD, *out],
        "diff": [*profilers, "diff", OLD, NEW, *out],
        "advise": [*profilers, "advise", OLD, *out],
    }


TOOLS = list(commands(ROOT))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs in `in` and a baseline of them."""
    here = tmp_path_factory.mktemp("inputs")
    for factor in (1.0, 1.001, 1.002):
        for version in ("v1", "v2"):
            steps = [factor * step for step in (99.0, 100.0, 101.0)]
            results.save(make_result(version, step_ms=steps), here / "in")
    words = (
        "baseline",
        "save",
        "--from-results",
        here / "in",
        "--baseline",
        here / "baseline.json",
    )
    tool = ROOT / "analysis_tools" / "regression_tester.py"
    subprocess.run([sys.executable, tool, *words], check=True, stdout=subprocess.DEVNULL)
    return here


@pytest.fixture
def here(inputs: Path, tmp_path: Path) -> Path:
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def command(tool: str, here: Path) -> list[str]:
    return [sys.executable, *map(str, commands(here)[tool])]


def written(here: Path) -> dict[str, int]:
    out = here / "out"
    return {name: (out / name).stat().st_mtime_ns for name in files(out)}


def run(words: list[str], **options: object) -> Finished:
    return subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, timeout=HANGS_S, **options
    )  # type: ignore[call-overload,no-any-return]


# A file must not grow beyond a size, as on a disk that has no more room.
LIMITED = """
import os, resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_any_terminal_shows_it_and_a_full_disk_leaves_the_files_from_before(
    tool: str, here: Path
) -> None:
    done = run(command(tool, here), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and done.stdout.strip()
    before = written(here)
    sizes = sorted((here / "out" / name).stat().st_size for name in before)
    *_, second, largest = [0, *sizes]
    limit = str((second + largest) // 2)
    done = run([sys.executable, "-c", LIMITED, limit, *command(tool, here)])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "can't be written: " in line
    assert written(here) == before


@pytest.mark.parametrize("tool", TOOLS)
def test_files_are_written_though_the_output_is_not_read(tool: str, here: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command(tool, here),
        cwd=ROOT,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANGS_S,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")
    assert written(here)
