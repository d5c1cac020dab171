"""my_workshop_results.txt, filled from result files."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from exercise_cases import SOLUTIONS

from labs.inference_benchmark import results_sheet
from workshop import labs, records
from workshop.labs import LabRun

NAMES = sorted(folder.name for folder in SOLUTIONS.glob("inference_*"))


def copied(names: Sequence[str], folder: Path) -> Path:
    """The results of solutions, in one folder."""
    for name in names:
        shutil.copytree(SOLUTIONS / name / "results", folder / "results", dirs_exist_ok=True)
    return folder / "results"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return copied(NAMES, tmp_path)


def written(results: Path, *flags: str) -> str:
    target = results.parent / "mine.txt"
    words = ["--results-dir", str(results), "--output", str(target), *flags]
    assert results_sheet.main(words) == 0
    return target.read_text(encoding="utf-8")


def section(text: str, number: int) -> str:
    after = text.partition(f"\nExercise {number}: ")[2]
    return after.partition("\nExercise ")[0]


SHOWN = {
    1: ["44.1 images/s"],
    2: ["39.9 images/s, no significant difference [0.95, 2.92], -48% memory"],
    3: ["1:                      aten::mkldnn_convolution: 143.193 ms (83.0%)"],
    4: ["batch 8, 224", "29.0 GFLOP"],
    5: ["batch 8, 224 x 224, inference", "31.7 images/s", "65.5%", "training", "88.3%"],
    6: ["compile:                54.6 images/s, 1.33x [1.22, 1.51], compiled in", "paid back",
        "[0.68, 1.72], compiled in 6.4 s\n"],
    7: ["fp32\nFive longest", "428 operators an iteration", "no GPU", "GEMM-bound",
        "bf16\nFive longest"],
}  # fmt: skip


@pytest.mark.parametrize("number", SHOWN)
def test_a_section_has_the_runs_that_its_check_takes(number: int, mine: Path) -> None:
    text = written(mine, "--name", "Ada")
    assert "Name:                   Ada" in text and "Device:                 AMD EPYC" in text
    for words in SHOWN[number]:
        assert words in section(text, number)


def test_what_was_not_measured_has_its_command(tmp_path: Path) -> None:
    text = written(copied(NAMES[4:], tmp_path))
    assert text.count("Not measured yet: ") == 4 and "--compare precision" in section(text, 2)


def test_without_any_result_the_head_is_blank_too(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    text = written(tmp_path / "results")
    assert text.count("Not measured yet: ") == 7
    assert f"Device:                 {results_sheet.BLANK}" in text


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


@pytest.mark.parametrize(
    ("compiled_ms", "says"),
    [
        ([50.0, 51.0], "2.00x"),
        ([100.0, 102.0], "no significant difference"),
        ([200.0, 202.0], "never paid back"),
    ],
)
def test_only_a_speed_up_with_a_verdict_is_paid_back(compiled_ms: list[float], says: str) -> None:
    runs = records.load_folder(SOLUTIONS / "inference_6_compile", LabRun)
    recorded = next(run for run in runs if run.variant.startswith("fp32, compile"))
    run = dataclasses.replace(recorded, baseline="fp32")
    plain = [dataclasses.replace(run, variant="fp32", step_ms=[ms] * 3) for ms in (100.0, 102.0)]
    compiled = [dataclasses.replace(run, step_ms=[ms] * 3) for ms in compiled_ms]
    text = "\n".join(results_sheet._compiled(labs.build_rows([*plain, *compiled])))
    assert says in text and ("paid back after" in text) == (says == "2.00x")


def test_a_folder_that_can_t_be_written_is_one_line(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = mine / "inference_benchmark" / "file.txt"
    target.write_text("")
    words = ["--results-dir", str(mine), "--output", str(target / "mine.txt")]
    assert results_sheet.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
