"""The exercise on the profilers of one's own GPU: right and wrong answers to recorded outputs, and
to those of AMD's tools in the forms of several versions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_runs
import test_profilers_amd as amd
from exercise_cases import SOLUTIONS, checked, only_fault, red, unanswered, with_answers

from workshop.exercises.frame import MY_ANSWERS
from workshop.profilers.load import load

NAME = "rocm_tools_intro"
INVENTED_RUN = Path(__file__).parent / "fixtures/profilers/rocprofv3_invented"
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
        ("hottest_percent", 0.112, "times too low"),
        ("kernels_a_step", 6498, "of all profiled steps together"),
        ("idle_percent", 63.4, "that is the busy share"),
        ("category", "GEMM", "by category"),
        ("script", "run_rocprofv3.sh", "records when each kernel runs"),
        ("launch_us", 12.8, "kernels.json"),
        ("waits", "host", "idle for 37%"),
        ("fastest_gbs", 1535, "the first row's"),
        ("ridge", 0.206, "a thousand GFLOP/s"),
        ("intensity", 0.446, "a thousand GFLOP/s"),
        ("side", "memory", "not memory"),
        ("deepspeed_percent", 103, "of a whole step, not of forward"),
        ("left_out", "attention", "functions that DeepSpeed patches"),
    ],
)
def test_a_wrong_answer_says_why(
    key: str, answer: Any, says: str, results: Path, tmp_path: Path
) -> None:
    assert says in only_fault(NAME, tmp_path, {key: answer}, results=results)


# --- AMD's tools, in the forms of their versions -------------------------------------------------


def profile(results: Path, tool: str) -> Path:
    """The folder of a tool, with the record of a run on an AMD GPU."""
    folder = results / "profiles/v1" / tool
    folder.mkdir(parents=True)
    recorded = stored_runs.REFERENCE / "cpu_amd_epyc/profiles/v2/pytorch_profiler/run.jsonl"
    content = stored_runs.content(recorded)
    content |= {"version": "v1", "device": DEVICE, "precision": "bf16"}
    (folder / "run.jsonl").write_text(stored_runs.lines(content))
    return folder


def check_answers(results: Path, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """The right answers pass; each wrong one is the only red Item."""
    answers = with_answers(NAME, results.parent, **right)
    assert not red(checked(NAME, answers=answers, results=results))
    for key, value in wrong.items():
        answers = with_answers(NAME, results.parent, **right | {key: value})
        assert len(red(checked(NAME, answers=answers, results=results)).splitlines()) >= 1, key


STEP = {"hottest": amd.GEMM, "kernels_a_step": 7, "idle_percent": 36.2, "hottest_percent": 90.6}
DATABASE = {"hottest": amd.GEMM, "kernels_a_step": 3, "idle_percent": 22.2, "hottest_percent": 57.1}
INVENTED = {"hottest": "", "hottest_percent": 24.07, "kernels_a_step": 42, "idle_percent": 14.3}
TRACES: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "CSV of ROCm 6.4": (amd.write_step, STEP),
    "CSV of ROCm 7": (lambda to: shutil.copytree(INVENTED_RUN, to, dirs_exist_ok=True), INVENTED),
    "rocpd of 7.0": (lambda to: amd.build_database(to / "a.db", *amd.NO_COUNTERS), DATABASE),
    "rocpd with HSA": (
        lambda to: amd.build_database(to / "a.db", *amd.NO_COUNTERS, *amd.UNDER_HSA), DATABASE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TRACES)
def test_rocprofv3s_outputs(form: str, results: Path) -> None:
    write, right = TRACES[form]
    folder = profile(results, "rocprofv3")
    write(folder)
    hottest = load(folder).kernels[0].name
    right = {"category": "GEMM", "waits": "host", **right, "hottest": hottest}
    right["waits"] = "GPU" if right["idle_percent"] > 20 else "host"
    wrong = {"hottest": "add", "hottest_percent": 1, "kernels_a_step": 84, "idle_percent": 70}
    check_answers(results, right, wrong | {"category": "norm"})


@pytest.mark.parametrize("name", ["rocpd-77.db", "rocpd.db"])
@pytest.mark.parametrize("more", [(), amd.UNDER_HSA])
def test_rocprof_syss_outputs(name: str, more: tuple[str, ...], results: Path) -> None:
    folder = profile(results, "rocprof_sys") / "trace"
    folder.mkdir()
    amd.build_database(folder / name, *more, *amd.OF_ROCPROF_SYS)
    check_answers(results, {"launch_us": 0.0035}, {"launch_us": 0.007})


COUNTED = {"FETCH_SIZE": 2, "WRITE_SIZE": 1, "SQ_INSTS_VALU_MFMA_MOPS_BF16": 10}
"""Counters of a dispatch of 100 ns: 3 KiB, 30.72 GB/s, and 5,120 operations."""


def wide(to: Path) -> None:
    columns = f"Dispatch_ID Kernel_Name GPU_ID {' '.join(COUNTED)} Start_Timestamp End_Timestamp"
    row = {"Dispatch_ID": 1, "Kernel_Name": amd.GEMM, "GPU_ID": 0, **COUNTED, **amd.span(0, 100)}
    amd.write_workload(to, pmc_perf=(columns, [row]))


def long(to: Path, *names: str, packed: bool = False) -> None:
    """All counters in one file, or one in each."""
    rows = [
        row | {"Kernel_Name": amd.GEMM}
        for counter, value in COUNTED.items()
        for row in amd.long_rows(counter, [value], 100)
    ]
    parts = [rows] if len(names) == 1 else [[row] for row in rows]
    tables = {name: (amd.LONG, part) for name, part in zip(names, parts, strict=True)}
    amd.write_workload(to, packed, **tables)


REPLAYS = [f"results_pmc_perf_{number}" for number in range(3)]
WORKLOADS: dict[str, Callable[[Path], None]] = {
    "3.1": wide,
    "3.5": lambda to: long(to, "pmc_perf"),
    "3.6": lambda to: long(to, *REPLAYS),
    "3.9": lambda to: long(to, *REPLAYS, packed=True),
}


@pytest.mark.parametrize("version", WORKLOADS)
def test_rocprof_computes_outputs(version: str, results: Path) -> None:
    folder = profile(results, "rocprof_compute") / "workloads" / "roofline" / "MI300X_A1"
    WORKLOADS[version](folder)
    ceilings = [0, 4000, 1, 1, 5000, 1, 1, 21000, 1, 1, 600000, 1, 1, 1, 1, 1]
    (folder / "roofline.csv").write_text(amd.roofline_text(amd.MI200_CEILINGS, ceilings))
    right = {"fastest_gbs": 30.7, "ridge": 150, "intensity": 1.67, "side": "memory"}
    wrong = {"fastest_gbs": 40, "ridge": 206, "intensity": 446, "side": "arithmetic"}
    check_answers(results, right, wrong)
