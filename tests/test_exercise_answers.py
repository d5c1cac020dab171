"""Exercises that are answered in a file: the empty answers fail, the solution passes, and a wrong
answer is the one that is red, with a reason."""

import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import (
    FOLDERS,
    check_each_answer,
    checked,
    loaded,
    only_fault,
    red,
    solution,
    unanswered,
)

from version3_triton.exercises.gluon_attention import count as gluon_count
from workshop import records
from workshop.exercises.frame import Work
from workshop.labs import LabRun

EXERCISES = """
baseline_analysis memory_analysis bottleneck_identification same_bits gluon_attention
inference_1_baseline inference_2_precision inference_3_profiler inference_4_flops inference_5_gpus
inference_6_compile inference_7_kernels pipeline_1_workers pipeline_2_trace roofline_1_unseen
roofline_2_first scale_1_efficiency scale_2_faults text_1_floor text_2_padding
""".split()
SLIPS: list[tuple[str, str, Any, str]] = [
    ("baseline_analysis", "larger_part", "fixed", "twice the tokens took"),
    ("bottleneck_identification", "hottest", "aten::mul", "it is number 2"),
    ("bottleneck_identification", "bound", "launches", "the step: not launches: products"),
    ("gluon_attention", "triton_exponentials", 34, "that is all of the loop's"),
    ("gluon_attention", "gluon_exponentials", 64, "the diagonal's block"),
    ("inference_1_baseline", "batch_mb", 7.225, "three batches, and one was asked for"),
    ("inference_1_baseline", "images_per_s", 11.03, "that is batches a second"),
    ("inference_1_baseline", "largest_part", "images", "weights 47 MB"),
    ("inference_2_precision", "weights_half_mb", 46.8, "that is fp32, with four bytes"),
    ("inference_2_precision", "verdict", "faster", "not faster: half is"),
    ("inference_2_precision", "loss_is_proof", "yes", "looks at no image has 6.908"),
    ("inference_3_profiler", "top_five", ["aten::conv2d"], "a list of 5 names"),
    ("inference_3_profiler", "conv_calls", 100, "that is 5 iterations"),
    ("inference_3_profiler", "calls", 856, "that is all iterations of the trace"),
    ("inference_3_profiler", "products_twice_as_fast", 2, "the rest of the time stays"),
    ("inference_3_profiler", "larger_gain", "rest", "against all of"),
    ("inference_4_flops", "gflop_batch", 14.5, "those are MACs"),
    ("inference_4_flops", "gflop_an_image", 1.81, "those are MACs"),
    ("inference_4_flops", "rate_gflops", 15.2, "with one image's operations"),
    ("inference_4_flops", "bottleneck", "relu", "the longest forward time"),
    ("inference_4_flops", "tflops", 0.779, "32 images ran in that time"),
    ("inference_4_flops", "share_percent", 0.48, "too small by the batch size"),
    ("inference_4_flops", "flop_per_byte", 2.0, "operations of one image, bytes of 32"),
    ("inference_5_gpus", "efficiency_percent", 182.2, "divide it by the number of processes"),
    ("inference_5_gpus", "most_percent", 100, "the process with fewer images waits"),
    ("inference_6_compile", "short_script", "yes", "until it is paid back"),
    ("inference_6_compile", "deeper_gains_more", "yes", "resnet34: 0.20 to 5.95"),
    ("inference_7_kernels", "launches", 856, "it holds several iterations"),
    ("inference_7_kernels", "hottest", "aten::native_batch_norm", "number 3 by its total time"),
    ("inference_7_kernels", "half_time", 1.61, "fp32's over half precision's"),
    ("inference_7_kernels", "bound", "launches", "weighs them"),
    ("pipeline_1_workers", "workers", 1, "`workers that follow`"),
    ("pipeline_1_workers", "per_s", 38, "with 5 workers"),
    ("pipeline_1_workers", "doubled_per_s", 380, "with 10 workers"),
    ("roofline_2_first", "longest", "cudnn::bn_bw_1C11_kernel_new<float2>", "another kernel"),
    ("roofline_2_first", "first", "nhwcToNchwKernel", "another kernel"),
    ("scale_1_efficiency", "gradients_mb", 4.19, "a number has four bytes"),
    ("scale_1_efficiency", "gbs", 0.44, "all-reduce of 16.8 MB"),
    ("scale_1_efficiency", "percent", 117, "that is the speed-up"),
    ("scale_2_faults", "percent", 50, "of both"),
    ("text_1_floor", "copied_mb", 135, "the reading alone"),
]
"""Answers that well-known mistakes give, or whose hint has figures or names that were measured."""
WITHOUT_CODE = {
    "scale_2_faults": {"_groups": lambda work: ()},
    "gluon_attention": {
        "_hidden": {"attention_forward": (0, 34), "hopper_attention_forward": (66, 66)}.get,
    },
    "text_2_padding": {
        "CASES": (), "_pad_inside": lambda work: (), "_work": lambda work: (),
    },
}  # fmt: skip
"""Parts of a check that run the participant's code or compile, which other tests do: the answers
alone."""


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """A trace and V3's lines, which take seconds to read, are read once."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((loaded("pipeline_2_trace"), "read"), (gluon_count, "lines")):
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
        yield


def stored(name: str) -> dict[str, Path]:
    """The results that a solution's answers were read from."""
    return {key: path for key, path in solution(name).items() if key == "results"}


@pytest.mark.parametrize("name", [name for name in EXERCISES if name not in WITHOUT_CODE])
def test_the_empty_answers_fail_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    unanswered(name, **stored(name))
    assert not red(checked(name, **solution(name)))
    if stored(name):
        nothing = checked(name, answers=solution(name)["answers"], results=tmp_path)
        assert not any(item.ok for item in nothing) and len(nothing) <= 2
        assert re.search(r"(python|torchrun) ", nothing[0].why)


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parts in WITHOUT_CODE.items():
        for part, value in parts.items():
            monkeypatch.setattr(loaded(name), part, value)


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", EXERCISES)
def test_each_wrong_answer_is_the_one_that_is_red(name: str, tmp_path: Path) -> None:
    check_each_answer(name, tmp_path, **stored(name))


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(("name", "key", "answer", "says"), SLIPS)
def test_a_slip_is_named(name: str, key: str, answer: Any, says: str, tmp_path: Path) -> None:
    text = only_fault(name, tmp_path, {key: answer}, **stored(name))
    assert says.casefold() in text.casefold()


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([0, 1, 2, 3, 3], "one of them is there twice"),
        ([0, 1, 2, 3, 9], "not among them: aten::"),
        ([1, 0, 2, 3, 4], "the longest comes first"),
    ],
)
def test_the_hottest_are_compared_by_name_and_order(places, says, tmp_path) -> None:
    name = "inference_3_profiler"
    kernels = loaded(name).measured(Work(FOLDERS[name], **solution(name))).table.kernels
    answers = {"top_five": [kernels[place].name for place in places]}
    assert says in only_fault(name, tmp_path, answers, **stored(name))


def test_later_exercises_leave_the_answers_of_earlier_ones_right(tmp_path: Path) -> None:
    names = [name for name in EXERCISES if name.startswith("inference_")]
    for year, name in enumerate(names, start=2031):  # whatever was recorded again since
        mine = solution(name)["results"]
        shutil.copytree(mine, tmp_path, dirs_exist_ok=True)
        for path in mine.rglob("runs/*.jsonl"):
            text = path.read_text(encoding="utf-8")
            (tmp_path / path.relative_to(mine)).write_text(
                text.replace('"created": "2026', f'"created": "{year}'), encoding="utf-8"
            )
    for name in names:
        assert not red(checked(name, answers=solution(name)["answers"], results=tmp_path)), name


# --- what is not measured ------------------------------------------------------------------------

MISSING: list[tuple[str, Callable[[LabRun], bool], str]] = [
    ("inference_4_flops", lambda run: run.options["precision"] == "fp32", "--precision bf16"),
    ("inference_5_gpus", lambda run: run.options["network"] == "resnet18", "--network resnet50"),
    ("inference_5_gpus", lambda run: run.units_per_step in (5, 8), "--batch-size 16"),
    ("inference_5_gpus", lambda run: run.units_per_step == 8, "--batch-size 5"),
    ("inference_5_gpus", lambda run: run.options["mode"] != "training", "--mode training"),
    ("inference_6_compile", lambda run: bool(run.baseline), "--compile"),
    ("inference_6_compile", lambda run: not run.baseline, "--compare compile --precision fp32"),
    ("inference_6_compile", lambda run: run.options["precision"] == "fp32", "--precision bf16"),
    ("inference_6_compile", lambda run: run.options["network"] == "resnet18", "resnet18,resnet34"),
    ("inference_7_kernels", lambda run: run.options["precision"] == "fp32", "--precision bf16"),
    ("pipeline_1_workers", lambda run: run.options["workers"] == 5, "--workers 10"),
    ("pipeline_1_workers", lambda run: run.options["workers"] != 5, "--workers 5"),
    ("scale_1_efficiency", lambda run: "2 processes, 1 seq" not in run.variant, "two processes"),
    ("scale_1_efficiency", lambda run: "2 processes, 8" not in run.variant, "--batch-size 16"),
    ("scale_1_efficiency", lambda run: "all-reduce" not in run.variant, "collectives.py"),
]
"""The runs that a participant has, and what is asked for."""


@pytest.mark.parametrize(("name", "kept", "asked"), MISSING)
def test_what_is_not_measured_is_named_with_its_command(name, kept, asked, tmp_path) -> None:
    mine = tmp_path / "results"
    shutil.copytree(solution(name)["results"], mine)
    for path in mine.glob("*/runs/*.jsonl"):
        comparison = records.load(path)
        comparison.runs = [run for run in comparison.runs if kept(run)]
        comparison.write(path)
    assert asked in red(checked(name, answers=solution(name)["answers"], results=mine))
