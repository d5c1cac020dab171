"""The exercises of the labs: their empty answers, their solutions, and wrong answers."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import FOLDERS, checked, loaded, only_fault, red, solution, unanswered

from labs.inference_benchmark import request
from workshop import records
from workshop.exercises.frame import Work
from workshop.labs import LabRun
from workshop.versions import ROOT

NAMES = sorted(name for name in FOLDERS if name.startswith("inference_"))
WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("inference_1_baseline", {"weights_mb": 11.7}, "Four bytes for each weight"),
    ("inference_1_baseline", {"batch_mb": 7.225}, "three batches, and one was asked for"),
    ("inference_1_baseline", {"p50_ms": 0.0907}, "p50 in the line `Latency`"),
    ("inference_1_baseline", {"images_per_s": 11.03}, "that is batches a second"),
    ("inference_1_baseline", {"spread_percent": 1.2}, "Standard deviation"),
    ("inference_1_baseline", {"mean_with_first_ms": 90.7}, "over their number"),
    ("inference_1_baseline", {"runs_differ_percent": 109}, "less 1, in percent"),
    ("inference_1_baseline", {"largest_part": "images"}, "weights 47 MB"),
    ("inference_1_baseline", {"single_ms": 90.7}, "--batch-size 1"),
    ("inference_1_baseline", {"large_over_single": 16}, "of the largest batch over"),
    ("inference_1_baseline", {"per_gb_large": 0.221}, "per second per GB"),
    ("inference_2_precision", {"weights_half_mb": 46.8}, "that is fp32, with four bytes"),
    ("inference_2_precision", {"speedup": 0.5}, "Images a second of half"),
    ("inference_2_precision", {"verdict": "faster"}, "not faster: half is"),
    ("inference_2_precision", {"peak_less_percent": 52}, "1 - peak of half"),
    ("inference_2_precision", {"error_ratio": 65536}, "`error` under `gate`"),
    ("inference_2_precision", {"top1_percent": 87.5}, "`top1_agreement`"),
    ("inference_2_precision", {"loss_percent": 0}, "the last entries of `losses`"),
    ("inference_2_precision", {"zeros_loss": 6.89}, "natural logarithm"),
    ("inference_2_precision", {"loss_is_proof": "yes"}, "looks at no image has 6.908"),
    ("inference_2_precision", {"max_batch_fp32": 2496.5}, "a whole number of images"),
    ("inference_2_precision", {"max_batch_half": 3904.5}, "a whole number of images"),
    ("inference_2_precision", {"max_batch_half": 1408}, "in each other's place"),
    ("inference_2_precision", {"max_batch_half": 999999}, "do not make it 401 times"),
    ("inference_3_profiler", {"top_five": ["aten::conv2d"]}, "a list of 5 names"),
    ("inference_3_profiler", {"conv_calls": 100}, "that is 5 iterations"),
    ("inference_3_profiler", {"calls": 856}, "that is all iterations of the trace"),
    ("inference_3_profiler", {"calls": 420}, "1.9% too low"),
    ("inference_3_profiler", {"idle_percent": 50}, "0 without a GPU"),
    ("inference_3_profiler", {"products_percent": 83.0}, "GEMM in the line"),
    ("inference_3_profiler", {"norms_percent": 12.3}, "norm in the line"),
    ("inference_3_profiler", {"products_twice_as_fast": 2}, "the rest of the time stays"),
    ("inference_3_profiler", {"larger_gain": "rest"}, "against all of"),
    ("inference_4_flops", {"gflop_batch": 14.5}, "those are MACs"),
    ("inference_4_flops", {"gflop_an_image": 1.81}, "those are MACs"),
    ("inference_4_flops", {"growth": 1}, "one over the other"),
    ("inference_4_flops", {"rate_gflops": 17.8}, "with one image's operations"),
    ("inference_4_flops", {"share_of_one_image_percent": 73.4}, "operations of one image"),
    ("inference_4_flops", {"tflops": 0.779}, "32 images ran in that time"),
    ("inference_4_flops", {"share_percent": 0.48}, "too small by the batch size"),
    ("inference_4_flops", {"flop_per_byte": 2.0}, "operations of one image, bytes of 32"),
    ("inference_4_flops", {"ridge": 0.04}, "163 TFLOP/s over 6 TB/s"),
    ("inference_4_flops", {"bound": "memory"}, "64 FLOP a byte"),
    ("inference_4_flops", {"conv": 2.0}, "Images in and out"),
    ("inference_4_flops", {"linear": 142}, "read once for the whole batch"),
    ("inference_4_flops", {"linear_batch": 32}, "solved for B"),
    ("inference_4_flops", {"relu": "compute"}, "a number for each comparison"),
    ("inference_5_gpus", {"efficiency_percent": 130.9}, "divide it by the number of processes"),
    ("inference_5_gpus", {"most_percent": 100}, "the process with fewer images waits"),
    ("inference_5_gpus", {"second_has": 3}, "together they have the whole batch"),
    ("inference_5_gpus", {"exchanged_mb": 93.5}, "One for each weight"),
    ("inference_5_gpus", {"exchange": "logits"}, "what must be equal are the weights"),
    ("inference_5_gpus", {"with_batch": "grow"}, "depends on the network, not on the batch"),
    ("inference_5_gpus", {"training_percent": 25}, "times too low"),
    ("inference_6_compile", {"compile_s": 1}, "Compilation time"),
    ("inference_6_compile", {"break_even_s": 0.001}, "plain network's time"),
    ("inference_6_compile", {"speedup": 9}, "times too high"),
    ("inference_6_compile", {"speedup_half": 9}, "likewise"),
    ("inference_6_compile", {"fastest": "reduce-overhead"}, "the column of images/s"),
    ("inference_6_compile", {"short_script": "yes"}, "until it is paid back"),
    ("inference_6_compile", {"both": 0.1}, "over those of plain fp32"),
    ("inference_7_kernels", {"launches": 856}, "it holds several iterations"),
    ("inference_7_kernels", {"launches": 34}, "a row has many calls"),
    ("inference_7_kernels", {"hottest": "aten::native_batch_norm"}, "number 3 by its total time"),
    ("inference_7_kernels", {"hottest": "conv"}, "no row of the hot list"),
    ("inference_7_kernels", {"five_percent": 81.8}, "The first five rows"),
    ("inference_7_kernels", {"half_time": 1.61}, "fp32's over half precision's"),
    ("inference_7_kernels", {"bound": "launches"}, "weighs them"),
    ("inference_7_kernels", {"copies_percent": 0}, "by category"),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_empty_answers_fail_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    unanswered(name, results=solution(name)["results"])
    assert not red(checked(name, **solution(name)))
    nothing_measured = checked(name, answers=solution(name)["answers"], results=tmp_path)
    assert "labs/inference_benchmark/micro_benchmarking" in nothing_measured[0].why
    assert not any(item.ok for item in nothing_measured) and len(nothing_measured) == 1


@pytest.mark.parametrize(
    ("name", "changes", "says"), WRONG, ids=[f"{n[10]}-{'-'.join(c)}" for n, c, _ in WRONG]
)
def test_a_wrong_answer_is_the_one_that_is_red(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    text = only_fault(name, tmp_path, changes, results=solution(name)["results"])
    assert says.casefold() in text.casefold()


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([0, 1, 2, 3, 3], "one of them is there twice"),
        ([0, 1, 2, 3, 9], "not among them: aten::"),
        ([0, 1, 3, 2, 4], "the longest comes first"),
        ([1, 0, 2, 3, 4], "the longest comes first"),
    ],
)
def test_the_hottest_are_compared_by_name_and_order(
    places: list[int], says: str, tmp_path: Path
) -> None:
    name = "inference_3_profiler"
    kernels = loaded(name).measured(Work(FOLDERS[name], **solution(name))).table.kernels
    answers = {"top_five": [kernels[place].name for place in places]}
    assert says in only_fault(name, tmp_path, answers, results=solution(name)["results"])


def test_later_exercises_leave_the_answers_of_earlier_ones_right(tmp_path: Path) -> None:
    for year, name in enumerate(NAMES, start=2031):  # whatever was recorded again since
        mine = solution(name)["results"]
        shutil.copytree(mine, tmp_path, dirs_exist_ok=True)
        for path in mine.rglob("runs/*.jsonl"):
            text = path.read_text(encoding="utf-8").replace(
                '"created": "2026', f'"created": "{year}'
            )
            (tmp_path / path.relative_to(mine)).write_text(text, encoding="utf-8")
    for name in NAMES:
        assert not red(checked(name, answers=solution(name)["answers"], results=tmp_path)), name


def is_training(run: LabRun) -> bool:
    return run.options["mode"] == "training"


MISSING = [
    ("inference_5_gpus", lambda run: False, "--batch-size 8"),
    ("inference_5_gpus", lambda run: run.units_per_step == 8, "--batch-size 5"),
    ("inference_5_gpus", lambda run: not is_training(run), "--mode training"),
    ("inference_6_compile", lambda run: bool(run.baseline), "--compile"),
    ("inference_6_compile", lambda run: not run.baseline, "--compare compile --precision fp32"),
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
    for path in mine.glob("*/runs/*.jsonl"):
        comparison = records.load(path)
        comparison.runs = [run for run in comparison.runs if kept(run)]
        comparison.write(path)
    assert command in red(checked(name, answers=solution(name)["answers"], results=mine))


DOCUMENTS = [
    *(FOLDERS[name] / "README.md" for name in NAMES),
    ROOT / "labs" / "inference_benchmark" / "CHECKLIST.md",
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.parent.name)
def test_the_benchmark_knows_the_flags_of_all_commands(path: Path) -> None:
    text = re.sub(r"\n +", " ", path.read_text(encoding="utf-8"))
    commands = re.findall(r"(?:micro_benchmarking_pytorch\.py|run_\w+\.sh --) ([^`\n]+)", text)
    commands += [f"--network resnet50 {flags}" for flags in re.findall(r"`B ([^`]+)`", text)]
    assert commands
    for command in commands:
        request.build_parser().parse_args(shlex.split(command))
