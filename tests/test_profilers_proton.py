"""Proton: every version of it runs our programs to their end, and its table holds the steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_S
from test_cli import ONE_CORE

from workshop.profilers import proton
from workshop.profilers.table import KernelTable

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "workshop" / "profilers" / "proton_app.py"

# How Proton runs a script up to Triton 3.6, where the end of the program by sys.exit is the end of
# Proton too.
PROTON = """
import os, sys
script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]
sys.path.append(os.path.dirname(os.path.abspath(script)))
names = {"__name__": "__main__", "__file__": os.path.abspath(script), "sys": sys}
try:
    exec(compile(open(script, "rb").read(), script, "exec"), names)
except Exception as error:
    sys.exit(1)
print("finalized")
"""

PROGRAM = """
import sys
import beside
def main(module):
    print(module.NAME, beside.VALUE, sys.argv)
    return int(sys.argv[1])
NAME = "mine"
if __name__ == "__main__":
    END
"""


def run_by_proton(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROTON, *map(str, words)]
    environment = os.environ | ONE_CORE
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )


@pytest.mark.parametrize("end", ["{}", "sys.exit({})"])
def test_a_program_runs_as_python_would_run_it(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "its folder"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7")
    text = PROGRAM.replace("END", end.format("main(sys.modules[__name__])"))
    (folder / "program.py").write_text(text)
    (tmp_path / "beside.py").write_text("VALUE = 'of the folder where it was called'")
    program = Path("its folder") / "program.py"
    answer = run_by_proton(tmp_path, APP, program, "0", "--x")
    assert answer.stdout.splitlines() == [f"mine 7 ['{program}', '0', '--x']", "finalized"]
    assert answer.returncode == 0, answer.stderr
    if "exit" in end:
        assert run_by_proton(tmp_path, APP, program, "77").returncode == 77
        assert "finalized" not in run_by_proton(tmp_path, program, "0").stdout, "it is not needed"


# --- the table -----------------------------------------------------------------------------------


def node(name: str, *children: object, **metrics: object) -> dict[str, Any]:
    metrics = {key.replace("time", "time (ns)"): value for key, value in metrics.items()}
    return {"frame": {"name": name}, "metrics": metrics, "children": list(children)}


def leaf(name: str, calls: float, time: float, **metrics: object) -> dict[str, Any]:
    return node(name, count=calls, time=time, device_id="0", device_type="HIP", **metrics)


def hatchet(*scopes: object) -> str:
    info = {"HIP": {"0": {"arch": "gfx942", "num_sms": 304}}}
    return json.dumps([node("ROOT", *scopes, count=0, time=0), info])


def phases(forward: float, backward: float) -> list[dict[str, Any]]:
    """As our runs' marker ranges: of NVTX they have no metrics; of a captured graph, the kernels
    are in a scope of Proton's below the one of the launch."""
    return [
        node("forward", node("<captured_at>", leaf("gemm", 6, forward)), leaf("embed", 3, 3)),
        node("backward", leaf("gemm", 12, backward)),
        node("optimizer", leaf("adam", 3, 30)),
    ]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., KernelTable]:
    def read(*scopes: object) -> KernelTable:
        path = tmp_path / "proton.hatchet"
        path.write_text(hatchet(*scopes))
        return proton.read(path)

    return read


WARM_UP = [leaf("gemm", 90, 9_000), leaf("autotuned", 400, 70_000)]


def test_the_table_holds_the_steps_and_says_what_it_leaves_out(read) -> None:
    table = read(node("step", leaf("copy", 3, 7), *phases(100, 210)), *WARM_UP)
    assert {k.name: (k.calls, k.total_ns) for k in table.kernels} == {
        "gemm": (18, 310),
        "adam": (3, 30),
        "copy": (3, 7),
        "embed": (3, 3),
    }
    assert table.phases_ns == {"forward": 103, "backward": 210, "optimizer": 30}
    (warning,) = table.warnings
    assert warning.startswith("left out 490 calls of kernels outside of the steps")
    alone = read(node("step", *phases(100, 210)))
    assert (alone.warnings, alone.total_ns) == ([], 343)
    without_ranges = read(*WARM_UP)
    assert (without_ranges.warnings, without_ranges.launches) == ([], 490)


def test_what_another_thread_launched_is_not_lost_with_the_warm_up(read) -> None:
    """Kernels outside of the steps may be the backward pass, if the steps hold next to none."""
    table = read(node("step", *phases(100, 10.2)), *WARM_UP)
    assert (table.phases_ns, table.launches) == ({}, 24 + 490)
    assert "the whole run in the table" in table.warnings[0]
    gemm = next(kernel for kernel in table.kernels if kernel.name == "gemm")
    assert (gemm.calls, gemm.min_ns, gemm.max_ns) == (108, None, None)
    short = read(node("step", *phases(100, 10.4)), *WARM_UP)  # V3's, with a large vocabulary
    assert (short.phases_ns["backward"], short.launches) == (10.4, 24)


def test_scopes_bytes_and_operations(read) -> None:
    step = node(
        "step",
        node(
            "forward",
            node("layers.0.mlp", leaf("gemm", 2, 100, flops16=6e9, bytes=50)),
            leaf("add", 1, 10, bytes=12),
        ),
        node("backward", leaf("gemm", 4, 210, flops16=1e9, flops32=1e9, bytes=100)),
        node("optimizer", leaf("adam", 1, 30)),
        leaf("between", 1, 5),
        # Proton's own.
        node("__proton_launch_metadata", leaf("torch_sum", 9, 900)),
        node("__proton_launch_metadata:gemm", leaf("torch_sum", 9, 900)),
        leaf("<metric>", 9, 900),
        count=2,
    )
    table = read(step)
    assert table.phases_ns == {"forward": 110, "backward": 210, "optimizer": 30}
    assert (table.steps, table.total_ns) == (2, 355)
    assert table.device == "HIP, architecture gfx942, 304 compute units"
    found = {kernel.name: (kernel.calls, kernel.bytes, kernel.flops) for kernel in table.kernels}
    assert (found["gemm"], found["adam"]) == ((6, 150, 8e9), (1, None, None))


def test_what_is_broken_is_left_out(read) -> None:
    table = read(
        {"children": []},
        7,
        node("scope", leaf("good", 1, 10), leaf("no_time", 1, -1)),
        {"children": "x", "frame": {"name": "s"}, "metrics": {}},
        leaf("no_count", 0.5, 3),
        leaf("no_flops", 1, 3, flops32=-4),
        leaf("no_bytes", 1, 3, bytes="many"),
    )
    assert [(kernel.name, kernel.total_ns) for kernel in table.kernels] == [("good", 10)]
    assert table.warnings == [
        f"left out {table.path}, row 2: is no scope with a frame's name, metrics and children"
        " (and 6 more rows)"
    ]
