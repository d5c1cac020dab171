"""The exercise on the profilers of one's own GPU: right and wrong answers to recorded outputs, and
to those of AMD's tools."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_runs
import test_profilers_amd as amd
from exercise_cases import (
    SOLUTIONS,
    check_each_answer,
    checked,
    only_fault,
    red,
    unanswered,
    with_answers,
)

from workshop.exercises.frame import MY_ANSWERS

NAME = "rocm_tools_intro"
COUNTS = {
    "FlopCounterMode": {"forward": 34e9, "backward": 68e9},
    "DeepSpeed": {"forward": 34e9, "backward": None, "error": None},
    "analytic": {"forward": 33e9, "backward": 67e9},
}
DEVICE = {"type": "cuda", "name": "AMD Instinct MI300X", "architecture": "gfx942"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A participant's folder who has counted the operations, and profiled nothing."""
    folder = tmp_path / "results"
    path = folder / "profiles/v1/deepspeed_flops/flops.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"counts": COUNTS}))
    return folder


def test_without_a_gpu_the_recorded_outputs_are_compared(results: Path) -> None:
    unanswered(NAME, results=results)
    check_each_answer(NAME, results, results=results)
    right = {"answers": SOLUTIONS / NAME / MY_ANSWERS, "results": results}
    items = checked(NAME, **right)
    assert not red(items)
    assert [item.what for item in items][:3] == [
        "trace: pytorch_profiler, recorded on an H200",
        "host: pytorch_profiler, recorded on an H200",
        "counters: ncu, recorded on an H200",
    ]
    shutil.rmtree(results)
    assert "run_deepspeed_flops.py" in red(checked(NAME, **right))


@pytest.mark.parametrize(
    ("key", "answer", "says"),
    [
        ("hottest", "nvjet", "no row of the hot list"),
        ("hottest", "softmax_warp_backward", "it is number 9"),
        ("kernels_a_step", 6498, "of all profiled steps together"),
        ("idle_percent", 63.4, "that is the busy share"),
        ("waits", "host", "idle for 37%"),
        ("fastest_gbs", 1535, "the first row's"),
        ("ridge", 0.206, "a thousand GFLOP/s"),
        ("intensity", 0.446, "a thousand GFLOP/s"),
        ("deepspeed_percent", 103, "of a whole step, not of forward"),
    ],
)
def test_a_wrong_answer_says_why(
    key: str, answer: Any, says: str, results: Path, tmp_path: Path
) -> None:
    assert says in only_fault(NAME, tmp_path, {key: answer}, results=results)


# --- AMD's tools ---------------------------------------------------------------------------------


def profile(results: Path, tool: str) -> Path:
    """The folder of a tool, with the record of a run on an AMD GPU."""
    folder = results / "profiles/v1" / tool
    folder.mkdir(parents=True)
    recorded = stored_runs.REFERENCE / "cpu_amd_epyc/profiles/v2/pytorch_profiler/run.jsonl"
    content = stored_runs.content(recorded)
    content |= {"version": "v1", "device": DEVICE, "precision": "bf16"}
    (folder / "run.jsonl").write_text(stored_runs.lines(content))
    return folder


def write_workload(to: Path) -> None:
    """A dispatch of 100 ns with 3 KiB, 30.72 GB/s, and 5,120 operations; and measured ceilings."""
    counted = {"FETCH_SIZE": 2, "WRITE_SIZE": 1, "SQ_INSTS_VALU_MFMA_MOPS_BF16": 10}
    rows = [
        row | {"Kernel_Name": amd.GEMM}
        for counter, value in counted.items()
        for row in amd.long_rows(counter, [value], 100)
    ]
    folder = to / "workloads" / "roofline" / "MI300X_A1"
    amd.write_workload(folder, pmc_perf=(amd.LONG, rows))
    ceilings = [0, 4000, 1, 1, 5000, 1, 1, 21000, 1, 1, 600000, 1, 1, 1, 1, 1]
    (folder / "roofline.csv").write_text(amd.roofline_text(amd.MI200_CEILINGS, ceilings))


def write_sample(to: Path) -> None:
    amd.build_database(to / "rocpd-77.db", *amd.OF_ROCPROF_SYS)


TOOLS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "rocprofv3": (
        amd.write_step,
        {"hottest": amd.GEMM, "hottest_percent": 90.6, "kernels_a_step": 7, "idle_percent": 36.2,
         "category": "GEMM", "waits": "GPU"},
    ),
    "rocprof_sys": (write_sample, {"launch_us": 0.0035}),
    "rocprof_compute": (
        write_workload, {"fastest_gbs": 30.7, "ridge": 150, "intensity": 1.67, "side": "memory"},
    ),
}  # fmt: skip
"""The writer of a tool's outputs, and the right answers to these, not to the recorded ones."""


@pytest.mark.parametrize("tool", TOOLS)
def test_the_outputs_of_amds_tools(tool: str, results: Path, tmp_path: Path) -> None:
    """In one form each: test_profilers_amd.py has those of the tools' versions."""
    write, right = TOOLS[tool]
    write(profile(results, tool))
    assert not red(checked(NAME, answers=with_answers(NAME, tmp_path, **right), results=results))
