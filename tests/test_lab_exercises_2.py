"""The lab's exercises on several GPUs, on compilation and on kernels; my_workshop_results.txt."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import FOLDERS, SOLUTIONS, checked, only_fault, red, solution, unanswered

from labs.inference_benchmark import request, results_sheet
from workshop import labs
from workshop.labs import LabRun

NAMES = ("inference_5_gpus", "inference_6_compile", "inference_7_kernels")
LAB = Path(results_sheet.__file__).parent
WRONG = {
    "inference_5_gpus": [
        ({"efficiency_percent": 113.4}, "divide it by the number of processes"),
        ({"most_percent": 100}, "the process with fewer images waits"),
        ({"second_has": 3}, "together they have the whole batch"),
        ({"exchanged_mb": 93.5}, "One for each weight"),
        ({"exchange": "logits"}, "what must be equal are the weights"),
        ({"with_batch": "grow"}, "says the network, not the batch"),
        ({"training_percent": 25}, "times too low"),
    ],
    "inference_6_compile": [
        ({"compile_s": 1}, "Compilation time"),
        ({"break_even_s": 0.001}, "plain network's time"),
        ({"speedup_resnet50": 9}, "times too high"),
        ({"speedup_resnet18": 9}, "its own comparison"),
        ({"fastest": "reduce-overhead"}, "the column of images/s"),
        ({"short_script": "yes"}, "until it is paid back"),
        ({"both": 0.1}, "over those of plain fp32"),
    ],
    "inference_7_kernels": [
        ({"launches": 856}, "it holds several iterations"),
        ({"launches": 34}, "a row has many calls"),
        ({"hottest": "aten::native_batch_norm"}, "number 3 by its total time"),
        ({"hottest": "conv"}, "no row of the hot list"),
        ({"five_percent": 81.8}, "The first five rows"),
        ({"half_time": 1.8}, "fp32's over half precision's"),
        ({"bound": "launches"}, "weighs them"),
        ({"copies_percent": 5}, "by category"),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_green_and_the_questions_are_red(name: str) -> None:
    assert not red(checked(name, **solution(name)))
    unanswered(name, results=solution(name)["results"])


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_a_wrong_answer_is_red(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    said = only_fault(name, tmp_path, changes, results=solution(name)["results"])
    assert says in said.replace("\n", " ")


def is_training(run: LabRun) -> bool:
    return run.options["mode"] == "training"


MISSING = [
    ("inference_5_gpus", lambda run: False, "--batch-size 8"),
    ("inference_5_gpus", lambda run: run.units_per_step == 8, "--batch-size 5"),
    ("inference_5_gpus", lambda run: not is_training(run), "--mode training"),
    ("inference_6_compile", lambda run: bool(run.baseline), "--compile"),
    ("inference_6_compile", lambda run: run.options["network"] == "resnet18", "resnet50"),
    ("inference_6_compile", lambda run: run.options["precision"] == "fp32", "--precision bf16"),
    ("inference_7_kernels", lambda run: False, "--kineto"),
    ("inference_7_kernels", lambda run: run.options["precision"] == "fp32", "--precision bf16"),
]


@pytest.mark.parametrize(("name", "kept", "command"), MISSING)
def test_what_is_not_measured_is_named_with_its_command(
    tmp_path: Path, name: str, kept: Any, command: str
) -> None:
    mine = tmp_path / "results"
    shutil.copytree(solution(name)["results"], mine)
    for path in mine.glob("*/runs/*/*.json"):
        if not kept(labs.load(path)):
            path.unlink()
    assert command in red(checked(name, answers=solution(name)["answers"], results=mine))


DOCUMENTS = [*(FOLDERS[name] / "README.md" for name in NAMES), LAB / "CHECKLIST.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.parent.name)
def test_the_benchmark_knows_the_flags_of_all_commands(path: Path) -> None:
    text = re.sub(r"\n +", " ", path.read_text(encoding="utf-8"))
    commands = re.findall(r"(?:micro_benchmarking_pytorch\.py|run_\w+\.sh --) ([^`\n]+)", text)
    commands += [f"--network resnet50 {flags}" for flags in re.findall(r"`B ([^`]+)`", text)]
    assert len(commands) >= 4
    for command in commands:
        request.build_parser().parse_args(shlex.split(command))


# --- my_workshop_results.txt ---------------------------------------------------------------------


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
