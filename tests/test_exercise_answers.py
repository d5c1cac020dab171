"""Exercises that are answered in a file: the empty answers fail, the solution passes, and a wrong
answer is the one that is red, with a hint."""

import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import FOLDERS, checked, loaded, only_fault, red, solution, unanswered

from workshop import records
from workshop.exercises.frame import Work
from workshop.labs import LabRun

WRONG: dict[str, list[tuple[str, Any, str]]] = {
    "baseline_analysis": [
        ("step_ms", 1.0, "the time of a step: yours, 1 ms, is"),
        ("backward_over_forward", 0.5, "times too low"),
        ("least_ms", 10000.0, "Not over the rate"),
        ("runs_differ_percent", 77, "The longer median over the shorter"),
        ("larger_part", "fixed", "twice the tokens took"),
    ],
    "memory_analysis": [
        ("state_mb", 17, "the state: yours, 17 MB, is 3.97 times too low"),
        ("square_mb", 33.6, "2 times too low"),
        ("square", "logits", "are its columns tokens too?"),
        ("square_percent", 0.376, "not as a fraction"),
        ("sequences_in_16_gb", 89, "2.01 times too low"),
    ],
    "bottleneck_identification": [
        ("calls_a_step", 9394, "2 times too high"),
        ("hottest", "aten::mul", "it is number 2"),
        ("products_twice_as_fast", 2, "1 / (1 - p / 2)"),
        ("bound", "launches", "the step: not launches: products"),
        ("idle_percent", 40, "0 without a GPU"),
    ],
    "same_bits": [
        ("v4_differ", 38, "the column `weights`, row v4, off"),
        ("v4_differ_on", 37, "row v4, on; equal is 0"),
        ("adds", "norm", "has its operation in its name"),
        ("first_other_loss", 1, "`losses` of the second table"),
        ("growth", 47, "the weights' share over the gradients'"),
    ],
    "gluon_attention": [
        ("triton_lines", 593, "the column `all`"),
        ("gluon_lines", 323, "the column `all`"),
        ("gluon_algorithm", 46, "the row of the forward pass in Gluon"),
        ("triton_exponentials", 34, "that is all of the loop's"),
        ("gluon_exponentials", 64, "the diagonal's block"),
        ("summed", "dk", "Whose gradient needs all keys?"),
        ("triton_products", 3.5, "in _gather_dq and in _gather_dk_dv"),
        ("gluon_products", 8, "all calls, of both branches"),
        ("adders", 32, "64 are the queries of a block"),
        ("last_bits", "bf16", "the same in each run"),
        ("deterministic", "gluon", "must_repeat"),
        ("forward_64", 1.17, "the column of the pass"),
        ("backward_128", 1.61, "the last two rows"),
        ("forward", "both", "a median of 1.05 or more"),
        ("backward", "128", "a median of 1.05 or more"),
    ],
    "inference_1_baseline": [
        ("weights_mb", 11.7, "Four bytes for each weight"),
        ("batch_mb", 7.225, "three batches, and one was asked for"),
        ("p50_ms", 0.0907, "p50 in the line `Latency`"),
        ("images_per_s", 11.03, "that is batches a second"),
        ("spread_percent", 1.2, "Standard deviation"),
        ("mean_with_first_ms", 90.7, "over their number"),
        ("runs_differ_percent", 109, "less 1, in percent"),
        ("largest_part", "images", "weights 47 MB"),
        ("single_ms", 90.7, "--batch-size 1"),
        ("large_over_single", 16, "of the largest batch over"),
        ("per_gb_large", 0.221, "per second per GB"),
    ],
    "inference_2_precision": [
        ("weights_half_mb", 46.8, "that is fp32, with four bytes"),
        ("speedup", 0.5, "Images a second of half"),
        ("verdict", "faster", "not faster: half is"),
        ("peak_less_percent", 52, "1 - peak of half"),
        ("error_ratio", 65536, "`error` under `gate`"),
        ("top1_percent", 87.5, "`top1_agreement`"),
        ("loss_percent", 0, "the last entries of `losses`"),
        ("zeros_loss", 6.89, "natural logarithm"),
        ("loss_is_proof", "yes", "looks at no image has 6.908"),
        ("max_batch_fp32", 2496.5, "a whole number of images"),
        ("max_batch_half", 3904.5, "a whole number of images"),
    ],
    "inference_3_profiler": [
        ("top_five", ["aten::conv2d"], "a list of 5 names"),
        ("conv_calls", 100, "that is 5 iterations"),
        ("calls", 856, "that is all iterations of the trace"),
        ("idle_percent", 50, "0 without a GPU"),
        ("products_percent", 83.0, "GEMM in the line"),
        ("norms_percent", 12.3, "norm in the line"),
        ("products_twice_as_fast", 2, "the rest of the time stays"),
        ("larger_gain", "rest", "against all of"),
    ],
    "inference_4_flops": [
        ("gflop_batch", 14.5, "those are MACs"),
        ("gflop_an_image", 1.81, "those are MACs"),
        ("growth", 1, "one over the other"),
        ("rate_gflops", 15.2, "with one image's operations"),
        ("gflops", 1.0, "of the run in fp16 or bf16"),
        ("gain", 0.1, "one over the other"),
        ("bottleneck", "relu", "the longest forward time"),
        ("bottleneck_percent", 99, "that of the operations"),
        ("share_of_one_image_percent", 95.1, "operations of one image"),
        ("tflops", 0.779, "32 images ran in that time"),
        ("share_percent", 0.48, "too small by the batch size"),
        ("flop_per_byte", 2.0, "operations of one image, bytes of 32"),
        ("ridge", 0.04, "163 TFLOP/s over 6 TB/s"),
        ("bound", "memory", "64 FLOP a byte"),
        ("conv", 2.0, "Images in and out"),
        ("linear", 142, "read once for the whole batch"),
        ("linear_batch", 32, "solved for B"),
        ("relu", "compute", "a number for each comparison"),
    ],
    "inference_5_gpus": [
        ("efficiency_percent", 182.2, "divide it by the number of processes"),
        ("most_percent", 100, "the process with fewer images waits"),
        ("second_has", 3, "together they have the whole batch"),
        ("exchanged_mb", 93.5, "One for each weight"),
        ("exchange", "logits", "what must be equal are the weights"),
        ("with_batch", "grow", "depends on the network, not on the batch"),
        ("training_percent", 25, "times too low"),
        ("batch_points", 150, "last batch less that of its first"),
        ("network_points", 150, "last network less that of its first"),
        ("by_exchange", "yes", "send each other nothing"),
    ],
    "inference_6_compile": [
        ("compile_s", 1, "Compilation time"),
        ("break_even_s", 0.001, "plain network's time"),
        ("speedup", 9, "times too high"),
        ("speedup_half", 9, "likewise"),
        ("fastest", "reduce-overhead", "the column of images/s"),
        ("short_script", "yes", "until it is paid back"),
        ("both", 0.1, "over those of plain fp32"),
        ("speedup_deepest", 9, "images/s over images/s"),
        ("deeper_gains_more", "yes", "resnet34: 0.20 to 5.95"),
    ],
    "inference_7_kernels": [
        ("launches", 856, "it holds several iterations"),
        ("hottest", "aten::native_batch_norm", "number 3 by its total time"),
        ("five_percent", 81.8, "The first five rows"),
        ("half_time", 1.61, "fp32's over half precision's"),
        ("bound", "launches", "weighs them"),
        ("copies_percent", 0, "by category"),
    ],
    "pipeline_1_workers": [
        ("waiting_percent", 5, "The latency over"),
        ("workers", 1, "`workers that follow`"),
        ("per_s", 38, "with 5 workers"),
        ("doubled_per_s", 380, "with 10 workers"),
        ("one_bound", "decoding", "a small part"),
        ("doubled_bound", "storage", "the same for each"),
    ],
    "pipeline_2_trace": [
        ("waiting_percent", 80, "The line `loading data`"),
        ("step_ms", 135, "its end less its start"),
        ("between_ms", 0.5, "From the end of the range"),
        ("rounds", 8, "one round"),
        ("bottleneck", "DataLoader", "its range is short"),
        ("loader_gain", 4, "1 / (1 - p)"),
        ("between_gain", 1.02, "what is left of it"),
        ("remedy", "workers", "in time already"),
    ],
    "roofline_1_unseen": [
        ("our_launches", 191, "of ours.csv"),
        ("missing", "optimizer", "FusedSgd"),
        ("counted_percent", 0.82, "FLOPs of guide.csv over"),
        ("larger_loss", "range", "two fifths of the launches"),
    ],
    "roofline_2_first": [
        ("longest", "cudnn::bn_bw_1C11_kernel_new<float2>", "another kernel"),
        ("longest_roof", "compute", "comes closer to"),
        ("first", "nhwcToNchwKernel", "another kernel"),
        ("layout_percent", 16.4, "added"),
    ],
    "scale_1_efficiency": [
        ("gradients_mb", 4.19, "a number has four bytes"),
        ("gbs", 0.44, "all-reduce of 16.8 MB"),
        ("sending_ms", 16.8, "Their bytes times"),
        ("alone_ms", 146, "of your newest such run"),
        ("pair_ms", 85.1, "of your newest such run"),
        ("percent", 117, "that is the speed-up"),
        ("not_hidden_percent", 100, "divided by that step plus the time of sending"),
        ("parts_percent", 58.5, "Of the two runs with --accumulate 8"),
        ("eight", "1", "with two"),
        ("remedy", "buckets", "the same number of bytes"),
    ],
    "scale_2_faults": [
        ("first", "barrier", "run_group.py shows it"),
        ("second", "all_reduce", "run_group.py shows it"),
        ("why", "slow", "it gets there"),
        ("evenly", "wrong", "compare two means"),
        ("percent", 50, "of both"),
    ],
    "text_1_floor": [
        ("wide_ms", 41.7, "the median, of your newest"),
        ("deep_ms", 0.7, "the median, of your newest"),
        ("long_ms", 22.0, "the median, of your newest"),
        ("static_ms", 47.1, "the median, of your newest"),
        ("cache_percent", 39, "the cache over the sum"),
        ("copied_mb", 135, "the reading alone"),
        ("layer_ms", 0.193, "less the time that its bytes take"),
        ("int8", "deep", "a small part of its time"),
        ("kv_heads", "wide", "the prompt is short"),
        ("graph", "wide", "take long each"),
    ],
    "text_2_padding": [
        ("right", 3, "with the starter's code"),
        ("first", 1, "The smallest number"),
        ("call", "prompts", "and is right"),
        ("fault", "side", "in the last column"),
        ("shifted", "gpt2", "a vector for each position"),
    ],
}
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
def trace_read_once() -> Iterator[None]:
    check = loaded("pipeline_2_trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "read", functools.cache(check.read))
        yield


def stored(name: str) -> dict[str, Path]:
    """The results that a solution's answers were read from."""
    return {key: path for key, path in solution(name).items() if key == "results"}


@pytest.mark.parametrize("name", [name for name in WRONG if name not in WITHOUT_CODE])
def test_the_empty_answers_fail_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    unanswered(name, **stored(name))
    assert not red(checked(name, **solution(name)))
    if stored(name):
        nothing = checked(name, answers=solution(name)["answers"], results=tmp_path)
        assert not any(item.ok for item in nothing) and len(nothing) <= 2
        assert re.search(r"(python|torchrun) ", nothing[0].why)


@pytest.mark.parametrize(
    ("name", "key", "answer", "says"),
    [(name, *row) for name, rows in WRONG.items() for row in rows],
    ids=[f"{name}-{row[0]}" for name, rows in WRONG.items() for row in rows],
)
def test_a_wrong_answer_is_the_one_that_is_red(
    name, key, answer, says, tmp_path, monkeypatch
) -> None:
    for part, value in WITHOUT_CODE.get(name, {}).items():
        monkeypatch.setattr(loaded(name), part, value)
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
    names = [name for name in WRONG if name.startswith("inference_")]
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
