"""V2's exercises: an untouched starter fails, the solution passes, wrong answers get a reason."""

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from exercise_cases import (
    FOLDERS,
    changed,
    check_each_answer,
    checked,
    only_fault,
    red,
    shown,
    solution,
    unanswered,
    with_answers,
)

from workshop.exercises import frame
from workshop.exercises.frame import Item

# --- flash_attention -----------------------------------------------------------------------------

FLASH = "flash_attention"


def test_the_flash_starter_fails_and_the_solution_passes() -> None:
    starter = red(checked(FLASH, mine=FOLDERS[FLASH] / frame.STARTER))
    assert "not written yet: starter.py, line" in starter
    assert "in flash_forward" in starter and "in flash_backward" in starter
    items = checked(FLASH, **solution(FLASH))
    assert not red(items)
    assert "done: k and v are not repeated" in shown(items)


WRONG_FLASH = {
    "no running maximum": (
        "now = torch.maximum(before, scores.amax(dim=-1))", "now = torch.zeros_like(before)",
        [r"overflow exp\(\): out: .*\n?.*(NaN|infinite)"],
    ),
    "nothing rescaled": (
        "rescale = (before - now).exp()", "rescale = torch.ones_like(now)",
        [r"T = 64 in blocks of 16: out: ", r"first at \[", "yours", "expected"],
    ),
    "the last block left out": (
        "for start in range(0, T, block):", "for start in range(0, T - T % block, block):",
        ["T = 63 in blocks of 16: the last has 15 keys: out"],
    ),
    "the whole square, in one go": (
        "    q, k, v = _by_group(q, k, v)\n    T = q.shape[-2]\n",
        "    return attention_reference(q, k, v)\n", ["forward: never T x T", "192 x 192"],
    ),
    "an input overwritten": (
        "    q, k, v = _by_group(q, k, v)\n    T = q.shape[-2]\n",
        "    q, k, v = _by_group(q.mul_(1.5), k, v)\n    T = q.shape[-2]\n",
        ["q, an input, was changed"],
    ),
    "no delta": (
        "dscores = weights * (dweights - delta[..., rows, None]) / math.sqrt(D)",
        "dscores = weights * dweights / math.sqrt(D)", ["backward: one block: dq", r"first at \["],
    ),
    "dq not added up": (
        "dq[..., rows, :] += ", "dq[..., rows, :] = ", ["backward: T = 64 in blocks of 16: dq"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_FLASH)
def test_a_wrong_flash_attention_is_red_at_its_place(fault, tmp_path) -> None:
    right, wrong, patterns = WRONG_FLASH[fault]
    found = red(checked(FLASH, mine=changed(FLASH, tmp_path, {right: wrong})))
    for pattern in patterns:
        assert re.search(pattern, found), found


def test_grouped_heads_are_optional(tmp_path) -> None:
    grouped = "    q, k, v = _by_group(q, k, v)\n    T ="
    mine = changed(FLASH, tmp_path, {grouped: f"    assert q.shape == k.shape\n{grouped}"})
    items = checked(FLASH, mine=mine)
    assert not red(items) and [item.counted for item in items].count(False) == 1
    assert "optional: 4 query heads" in shown(items) and "not yet: AssertionError" in shown(items)


# --- fusion_analysis -----------------------------------------------------------------------------

FUSION = "fusion_analysis"
RECORD = stored_runs.REFERENCE / "cpu_amd_epyc/profiles/v2/pytorch_profiler"
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_norm", "fuse_attention", "fuse_gqa", "fuse_optimizer")
STEP_MS = {"": 100.0, "fuse_qkv": 104.0, "fuse_attention": 120.0, "fuse_optimizer": 110.0}
PEAK_MB = {"": 177.6, "fuse_qkv": 171.3, "fuse_attention": 192.2}
OPERATORS = {
    "": {"aten::mm": 51, "aten::pow": 27},
    "fuse_qkv": {"aten::mm": 75, "aten::pow": 27},
    "fuse_norm": {"aten::mm": 51, "aten::pow": 27},
}


def record(without: str, **changes: Any) -> dict[str, Any]:
    """The record of a run of V2 at `tiny`, fp32, without a fusion."""
    content: dict[str, Any] = stored_runs.content(RECORD / "run.jsonl")
    options = content["options"] | ({without: False} if without else {})
    return content | {"options": options} | changes


def write_run(folder: Path, without: str, number: int, **changes: Any) -> None:
    noise = (0.995, 1.0, 1.005, 1.01, 0.99)
    ms = STEP_MS.get(without, 100.0)
    content = record(
        without,
        status="complete",
        session=f"20270101-00000{number}-abcdef",
        step_ms=[ms * factor for factor in noise],
        losses=[6.9] * len(noise),
        memory_mb={"peak": PEAK_MB.get(without, 177.6)},
        **changes,
    )
    stored_runs.write(folder, content, without or "whole")


def write_profile(folder: Path, without: str) -> Path:
    name = f"no-{without.replace('_', '-')}" if without else "v2"
    place = folder / "profiles" / "fusion" / name
    place.mkdir(parents=True)
    shutil.copy(RECORD / "kernels.json", place)
    (place / "command.txt").write_text("# run_pytorch_profiler.py\n# exit status 0\n")
    content = record(without)
    content["options"]["num_steps"] = 2
    (place / "run.jsonl").write_text(stored_runs.lines(content))
    with (place / "operators.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["operator", "count"])
        writer.writerows((name, 2 * calls) for name, calls in OPERATORS[without].items())
    return place


@pytest.fixture
def measured(tmp_path) -> Path:
    """A folder of results as the sheet's commands leave it."""
    folder = tmp_path / "results"
    for number in (1, 2):
        for without in ("", *FUSIONS):
            write_run(folder, without, number)
    for without in OPERATORS:
        write_profile(folder, without)
    return folder


def fusion(measured: Path, **changes: Any) -> list[Item]:
    answers = with_answers(FUSION, measured, **changes)
    return checked(FUSION, answers=answers, results=measured)


def test_empty_and_wrong_answers_are_red_and_the_fusion_solution_passes(measured) -> None:
    assert not any(item.ok for item in unanswered(FUSION))
    items = fusion(measured)
    assert not red(items)
    assert "no clear difference" in shown(items)  # of four switches
    assert "measured 20%" in shown(items)
    check_each_answer(FUSION, measured, results=measured)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dearest_switch": "--no-fuse-norm"}, "clearly longer became: --no-fuse-qkv"),
        ({"memory_switch": "--no-fuse-gqa"}, "--no-fuse-attention +14.6 MB"),
        ({"norm_is_one_kernel": "yes"}, "27 calls a step in V2, 27 with --no-fuse-norm"),
    ],
)
def test_a_wrong_finding_about_fusions_says_why(changes, message, measured) -> None:
    assert message in only_fault(FUSION, measured, changes, results=measured)


def test_where_nothing_is_clearly_slower_none_is_right(measured, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "STEP_MS", {})
    for number in (3, 4):
        for without in ("", *FUSIONS):
            write_run(measured, without, number)
    assert not red(fusion(measured, dearest_switch="none"))
    assert "clearly longer became: none" in red(
        fusion(measured, dearest_switch="--no-fuse-attention")
    )


def test_times_of_disturbed_fusions_are_not_judged(measured) -> None:
    for without in FUSIONS:
        write_run(measured, without, 3, waited_share=0.7)
    assert "disturbed" not in shown(fusion(measured))  # two others are there
    for number in (1, 2, 3):
        write_run(measured, "fuse_norm", number, waited_share=0.7)
    items = fusion(measured, dearest_switch="--no-fuse-gqa")
    assert not red(items)
    assert "disturbed 2 of 14 runs: They waited for a processor up to 70%" in shown(items)
    assert "--no-fuse-norm: a longer step: not judged" in shown(items)
    assert "--no-fuse-qkv: a longer step: predicted" in shown(items)


def test_what_was_not_measured_is_named(tmp_path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    found = red(fusion(folder))
    assert "no result of V2: run the sheet's loop" in found
    assert "profiles/fusion/v2: make it as the sheet says" in found
    write_run(folder, "", 1)
    assert "no result of V2 with --no-fuse-qkv at tiny, fp32" in red(fusion(folder))


def test_a_profile_of_something_else_is_refused(measured) -> None:
    place = measured / "profiles" / "fusion" / "v2"
    shutil.rmtree(place)
    shutil.copytree(measured / "profiles" / "fusion" / "no-fuse-qkv", place)
    assert "is a profile of v2 no-fuse-qkv: make it again" in red(fusion(measured))
