"""Processors that other programs use too: short waits between threads, and disturbed runs."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_compare import FEW_STEPS, SHRINK_PRESET, copy_repository, tool
from test_results import make_result

from workshop import progress, records
from workshop.compare import regression, rows, waterfall
from workshop.results import RunResult
from workshop.run import timing, waiting

TypeCommand = Callable[..., subprocess.CompletedProcess[str]]


def test_the_wait_is_that_of_the_thread_that_waited_longest(tmp_path, monkeypatch) -> None:
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


def test_a_process_that_ends_while_it_is_counted_costs_nothing(monkeypatch) -> None:
    def ended(path: Path, **_: object) -> bool:
        raise ProcessLookupError(path)

    monkeypatch.setattr(Path, "exists", ended)
    monkeypatch.setattr(Path, "stat", ended)
    assert waiting.busy_seconds(1) is not None


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
def test_times_are_those_of_the_undisturbed_runs(shares, step_ms, note) -> None:
    runs = [
        make_result(step_ms=steps, waited_share=share)
        for steps, share in zip((STEADY, SLOW), shares, strict=True)
    ]
    (row,) = rows.build_rows(runs)
    assert row.step_ms == step_ms and row.speedup.value == 1.0
    assert (row.note, row.runs, row.parity) == (note, 2, "pass")
    kept = [run.step_ms for run in rows.steady(runs)]
    rung, undisturbed = waterfall.Rung("V1", "v1", "fp32"), [make_result(step_ms=STEADY)] * 2
    assert waterfall._steps([(rung, undisturbed), (rung, runs)])[1].gain.value == 100.0 / step_ms
    assert len(regression._values(runs, regression.STEP)) == regression.repeats(runs) == len(kept)


# The first process waits; the second does not. The judge asks twice: of itself, too.
WAIT = "    return max(waited - before"
FIRST_WAITS = (
    WAIT,
    "    global _asked\n    _asked = globals().get('_asked', 0) + 1\n"
    "    return 1e3 * (_asked <= 2) + 0.0 * max(waited - before",
)
ALL_WAIT = (WAIT, "    return 1e3 + 0.0 * max(waited - before")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "repeats", "waits", "note"),
    [
        (FIRST_WAITS, 1, [False, True], "1 of 2 runs disturbed by other programs: not in"),
        (ALL_WAIT, 3, [True] * 5, "5 of 5 runs disturbed by other programs: the times are"),
    ],
    ids=["once", "always, and two of three again"],
)
def test_a_disturbed_run_is_measured_again_once_and_both_are_kept(
    planted, repeats, waits, note, type_command, tmp_path
) -> None:
    changes = {"workshop/run/presets.py": SHRINK_PRESET, "workshop/run/waiting.py": planted}
    changes["workshop/judge/process.py"] = ("max(busy - busy_before, 0.0)", "1e9")
    code, folder = copy_repository(tmp_path / "code", changes), tmp_path / "out"
    words = tool("--config", "tiny", "--versions", "v1", *FEW_STEPS, "--output-dir", folder)
    words += ["--repeats", str(repeats)]
    done = type_command(*words, folder=code)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"run 1 of \d: .* disturbed: ", done.stderr)) == 1
    assert len(re.findall(r"run \d of \d again: ", done.stderr)) == len(waits) - repeats
    runs = records.load_folder(folder, RunResult)
    assert sorted(bool(run.waited_share) for run in runs) == waits
    (row,) = json.loads((folder / "comparison.json").read_text())["rows"]
    assert row["parity"] == "pass" and row["note"].startswith(note)
    used = [
        run for run in runs if not run.waited_share or (all(waits) and "again" not in run.options)
    ]
    assert row["step_ms"] == timing.median([ms for run in used for ms in run.step_ms])


def test_long_work_says_now_and_then_how_far_it_is(monkeypatch, capsys) -> None:
    """Ten items of 15 s each."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in progress.told(range(10), "epoch 1", 10):
        now[0] += 15
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"epoch 1: {n} of 10" for n in (2, 4, 6, 8)]
    assert lines[0] == "epoch 1: 2 of 10, about 2 min left"
