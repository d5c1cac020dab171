"""my_workshop_results.txt, filled from result files."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import SOLUTIONS

from labs.inference_benchmark import own_runs, results_sheet
from workshop import labs
from workshop.exercises.frame import Work
from workshop.labs import LabRun

NAMES = ("inference_5_gpus", "inference_6_compile", "inference_7_kernels")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The results of the three solutions, in one folder."""
    for name in NAMES:
        shutil.copytree(SOLUTIONS / name / "results", tmp_path / "results", dirs_exist_ok=True)
    return tmp_path / "results"


def written(results: Path, *flags: str) -> str:
    target = results.parent / "mine.txt"
    words = ["--results-dir", str(results), "--output", str(target), *flags]
    assert results_sheet.main(words) == 0
    return target.read_text(encoding="utf-8")


def section(text: str, number: int) -> str:
    after = text.partition(f"\nExercise {number}: ")[2]
    return after.partition("\nExercise ")[0]


SHOWN = {
    3: ["1:                      aten::mkldnn_convolution: 240.247 ms (71.4%)"],
    5: ["resnet18, batch 5, 224 x 224, inference, fp32, 2 processes", "7.6 images/s", "48.9%",
        "training", "84.4%"],
    6: ["fp32, compile", "compiled in", "paid back"],
    7: ["98.0% of the operators' time", "437 operators an iteration", "no GPU", "GEMM-bound"],
}  # fmt: skip


def test_the_sheet_has_what_was_measured_and_the_commands_of_the_rest(mine: Path) -> None:
    text = written(mine, "--name", "Ada")
    assert "Name:                   Ada" in text and "Device:                 AMD EPYC" in text
    for number in range(1, 8):
        for words in SHOWN.get(number, ()):
            assert words in section(text, number), number
    for number, flag in ((2, "--compare precision"), (4, "--flops-prof-step 10")):
        assert results_sheet.BLANK in section(text, number)
        assert f"{flag}\nNotes:" in section(text, number)
    assert text.count("Measure it: ") == 2


def test_without_any_result_all_is_blank(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    text = written(folder)
    assert text.count("Measure it: ") == 7 and "images/s" not in text


def test_notes_and_the_name_stay(mine: Path) -> None:
    first = written(mine, "--name", "Ada")
    noted = first.replace("Notes:\n", "Notes:\nthe fan was loud\nlook again\n", 1)
    noted = noted.rstrip("\n") + "\nthe last one\n"
    (mine.parent / "mine.txt").write_text(noted, encoding="utf-8")
    again = written(mine)
    assert "Name:                   Ada" in again
    assert "Notes:\nthe fan was loud\nlook again\n" in section(again, 1)
    assert "Notes:\nthe last one\n" in again and again.count("the last one") == 1
    assert written(mine) == again


def run_of(mine: Path, number: int = 0, **changes: Any) -> LabRun:
    """A plain fp32 run of a solution, changed and stored as the newest."""
    (path,) = mine.glob("*/runs/*/*fp32_d117a2.json")
    run = labs.load(path)
    run.options |= changes.pop("options", {})
    run = dataclasses.replace(run, session=f"2040-{number}", created="2040-01-01", **changes)
    labs.save(run, labs.new_path(run, mine / "inference_benchmark"))
    return run


def test_a_red_run_has_no_throughput(mine: Path) -> None:
    red_one = dataclasses.replace(run_of(mine).proof, status="fail", failures=["wrong logits"])
    run_of(mine, 1, status="proof failed", proof=red_one)
    assert f"Throughput:             {results_sheet.RED}" in section(written(mine), 1)


def test_a_peer_s_run_is_not_the_participant_s(mine: Path) -> None:
    own, peer = run_of(mine, 1), run_of(mine, 2, options={"peer": "timm"})
    sessions = [run.session for run in own_runs.own_runs(Work(mine, results=mine))]
    assert own.session in sessions and peer.session not in sessions


def test_precisions_of_a_comparison_are_shown_with_their_speed_ups(mine: Path) -> None:
    run_of(mine, step_ms=[400.0, 400.0], baseline="fp32")
    half: dict[str, Any] = {
        "step_ms": [100.0, 100.0],
        "baseline": "fp32",
        "options": {"precision": "bf16"},
    }
    run_of(mine, variant="bf16", memory_mb={"peak": 40.0}, **half)
    text = section(written(mine), 2)
    assert "fp32:                   10.0 images/s, top-1" in text
    assert "bf16:                   40.0 images/s, 4.00x, -50% memory, top-1" in text


def test_a_folder_that_can_t_be_written_is_one_line(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = mine / "inference_benchmark" / "file.txt"
    target.write_text("")
    words = ["--results-dir", str(mine), "--output", str(target / "mine.txt")]
    assert results_sheet.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
