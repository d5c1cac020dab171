"""Processors that other programs use too: short waits between threads, and disturbed runs."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import stored_runs
from test_compare import FEW_STEPS, NEVER_WAITS, SHRINK_PRESET, copy_repository, tool
from test_results import make_result

from workshop import records
from workshop.compare import regression, rows, waterfall
from workshop.results import RunResult
from workshop.run import timing, waiting

TypeCommand = Callable[..., subprocess.CompletedProcess[str]]
SMALL = "--hidden-dim 32 --num-layers 1 --num-heads 2 --num-kv-heads 1 --batch-size 1 --seq-len 8"
VERSION = ["version1_pytorch_baseline/tiny_llama_v1.py", "--device", "cpu", "--no-gate"]
VERSION += [*SMALL.split(), "--num-steps", "1", "--warmup-steps", "1", "--output-dir"]


# --- threads that wait for each other ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's OpenMP runtime is GNU's on Linux")
@pytest.mark.parametrize(
    ("of_the_user", "spin"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
    ids=["as it is", "a count of the user's", "a policy of the user's"],
)
@pytest.mark.parametrize("program", ["a version", "a script that imports PyTorch later"])
def test_waits_are_short_unless_the_user_says_otherwise(
    program: str,
    of_the_user: dict[str, str],
    spin: str,
    type_command: TypeCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in waiting.SPIN:
        monkeypatch.delenv(name)
    words = [*VERSION, tmp_path]
    if program != "a version":
        words = ["-c", "from workshop.needed import import_torch; import_torch()"]
    done = type_command("python", *words, OMP_DISPLAY_ENV="VERBOSE", **of_the_user)
    assert done.returncode == 0, done.stderr
    # The runtime prints what it has read, each time it is loaded.
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[-1] == spin
    for path in tmp_path.rglob("*.jsonl"):
        assert records.load_run(path).command == ["python", *map(str, VERSION), tmp_path.name]


# --- threads that wait for a processor -----------------------------------------------------------


def test_the_wait_is_that_of_the_thread_that_waited_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(**threads: str) -> dict[str, float] | None:
        for name, text in threads.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(text)
        return waiting.seconds_without_processor()

    monkeypatch.setattr(waiting, "_TASKS", str(tmp_path))
    assert write() is None and waiting.longest_share(None, 1.0) is None  # no Linux
    assert write(t1="0 0 0\n") is None  # a kernel that doesn't count
    (tmp_path / "t0").mkdir()  # a thread that has ended
    before = write(t1="5000000000 1000000000 9\n", t2="7000000000 2000000000 9\n")
    assert before == {"t1": 1.0, "t2": 2.0}
    write(t1="6000000000 2500000000 9\n", t2="7000000000 2100000000 9\n", t3="1 3000000000 1\n")
    assert waiting.longest_share(before, 4.0) == pytest.approx(0.75)  # of t3, which is new
    assert waiting.longest_share(before, 40.0) == pytest.approx(0.075)


def test_files_from_before_it_was_measured_are_read(tmp_path: Path) -> None:
    content = dataclasses.asdict(make_result())
    del content["waited_share"]
    path = tmp_path / "run.jsonl"
    path.write_text(stored_runs.lines(content))
    assert records.load_run(path) == make_result() and not make_result().disturbed


STEADY, SLOW = [100.0, 101.0, 99.0], [900.0, 905.0, 910.0]


@pytest.mark.parametrize(
    ("shares", "step_ms", "note"),
    [
        ((None, None), 500.5, ""),  # as measured, where the system doesn't count
        ((0.3, 0.4), 500.5, ""),  # steady and honestly slow
        ((0.0, 0.9), 100.0, "1 of 2 runs disturbed by other programs: not in the times"),
        ((0.8, 0.9), 500.5, "2 of 2 runs disturbed by other programs: the times are too long"),
    ],
)
def test_times_are_those_of_the_undisturbed_runs(
    shares: tuple[float | None, float | None], step_ms: float, note: str
) -> None:
    runs = [
        make_result(step_ms=steps, waited_share=share)
        for steps, share in zip((STEADY, SLOW), shares, strict=True)
    ]
    (row,) = rows.build_rows(runs)
    assert row.step_ms == step_ms and row.speedup == 1.0
    assert (row.note, row.runs, row.parity) == (note, 2, "pass")
    kept = [run.step_ms for run in rows.steady(runs)]
    assert waterfall._times(runs) == kept
    assert len(regression._values(runs, regression.STEP)) == regression.repeats(runs) == len(kept)


# The first process waits; the second does not. The judge asks twice: of itself, too.
FIRST_WAITS = (
    NEVER_WAITS[0],
    "    global _asked\n    _asked = globals().get('_asked', 0) + 1\n"
    "    return 1e3 * (_asked <= 2) + 0.0 * max(waited - before",
)
ALL_WAIT = (NEVER_WAITS[0], "    return 1e3 + 0.0 * max(waited - before")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "waits", "note"),
    [
        (FIRST_WAITS, [False, True], "1 of 2 runs disturbed by other programs: not in the times"),
        (ALL_WAIT, [True, True], "2 of 2 runs disturbed by other programs: the times are too long"),
    ],
    ids=["once", "always"],
)
def test_a_disturbed_run_is_measured_again_once_and_both_are_kept(
    planted: tuple[str, str],
    waits: list[bool],
    note: str,
    type_command: TypeCommand,
    tmp_path: Path,
) -> None:
    changes = {"workshop/run/presets.py": SHRINK_PRESET, "workshop/run/waiting.py": planted}
    changes["workshop/judge/process.py"] = ("max(busy - busy_before, 0.0)", "1e9")
    code, folder = copy_repository(tmp_path / "code", changes), tmp_path / "out"
    words = tool("--config", "tiny", "--versions", "v1", *FEW_STEPS, "--output-dir", folder)
    done = type_command(*words, folder=code)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"run 1 of 1: .* disturbed: ", done.stderr)) == 1
    assert len(re.findall(r"run 1 of 1 again: ", done.stderr)) == 1
    runs = records.load_folder(folder, RunResult)
    assert sorted(bool(run.waited_share) for run in runs) == waits
    (row,) = json.loads((folder / "comparison.json").read_text())["rows"]
    assert (row["parity"], row["note"]) == ("pass", note)
    used = [run.step_ms for run in runs if not run.waited_share] or [run.step_ms for run in runs]
    assert row["step_ms"] == timing.median([ms for steps in used for ms in steps])
