"""The scale-out lab's exercises: an efficiency that bytes and bandwidth predict, planted faults."""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from exercise_cases import (
    FOLDERS,
    changed,
    checked,
    loaded,
    red,
    shown,
    solution,
    unanswered,
)

from labs.scale_out import request
from workshop import records
from workshop.labs import LabRun

EFFICIENCY, FAULTS = "scale_1_efficiency", "scale_2_faults"

# --- an efficiency that bytes and bandwidth predict ----------------------------------------------


def change(folder: Path, changed: Callable[[LabRun], LabRun | None]) -> None:
    """Writes all runs below a folder anew, without those that become None."""
    for path in folder.rglob("runs/*.jsonl"):
        comparison = records.load(path)
        runs = map(changed, records.load_runs(path, LabRun))
        comparison.runs = [run for run in runs if run is not None]
        comparison.write(path)


def test_runs_with_other_work_are_not_compared(tmp_path: Path) -> None:
    shutil.copytree(solution(EFFICIENCY)["results"], tmp_path / "mine")

    def twice(run: LabRun) -> LabRun:
        if "1 process, 1 sequence" in run.variant:
            run.metrics["sequences"] = 2
        return run

    change(tmp_path / "mine", twice)
    (item,) = checked(
        EFFICIENCY, answers=solution(EFFICIENCY)["answers"], results=tmp_path / "mine"
    )
    assert "1 process: not measured yet" in f"{item.what} {item.why}"


@pytest.mark.parametrize(
    ("slowed", "factors", "ok", "says"),
    [
        ("1 process, 1 sequence", (2.0,), False, "an efficiency is above 100%"),
        ("2 processes, 8", (2.0,), False, "8 parts are less efficient than one"),
        ("1 process, 1 sequence", (1.0, 1.5), True, "if other programs ran, repeat it"),
        ("1 process, 8", (1.0,), True, "the runs were not disturbed"),
    ],
)
def test_runs_that_were_disturbed_are_to_be_repeated(
    slowed: str, factors: tuple[float, ...], ok: bool, says: str, tmp_path: Path
) -> None:
    shutil.copytree(solution(EFFICIENCY)["results"], tmp_path / "mine")

    def slow(run: LabRun) -> LabRun:
        if slowed not in run.variant:
            return run
        pairs = zip(run.step_ms, itertools.cycle(factors), strict=False)
        return dataclasses.replace(run, step_ms=[ms * factor for ms, factor in pairs])

    change(tmp_path / "mine", slow)
    found = checked(EFFICIENCY, answers=solution(EFFICIENCY)["answers"], results=tmp_path / "mine")
    assert found[0].ok == ok and says in shown(found[:1])


def test_train_and_the_sheet_know_the_commands_of_the_check() -> None:
    check, sheet = loaded(EFFICIENCY), (FOLDERS[EFFICIENCY] / "README.md").read_text("utf-8")
    words = re.sub(r"\s*\\\n\s*", " ", sheet)
    for processes, parts in ((1, 1), (2, 1), (1, 8), (2, 8)):
        command = check._command(processes, parts)
        assert command in words
        arguments = request.build_parser().parse_args(command.partition("train.py ")[2].split())
        assert (arguments.accumulate, arguments.batch_size) == (parts, processes * parts)


# --- a group that hangs, and one that averages wrongly -------------------------------------------

EVEN, UNEVEN, THREE = ("2 processes, batches of 4", "2 processes, batches of 5", "3 processes, b")
ALL = (EVEN, UNEVEN, THREE)
WEIGHT = " * len(own_x) / len(x)  # its part of the mean"
OWN = "x.tensor_split(size)[rank], y.tensor_split(size)[rank]"
WRONG: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "the mean of the means": ({WEIGHT: " / size"}, (UNEVEN, THREE)),
    "a sum": ({WEIGHT: ""}, ALL),
    "right gradients, and the mean of the losses": (
        {"mean = loss.detach().clone()": "mean = loss.detach() * len(x) / len(own_x) / size"},
        (UNEVEN, THREE),
    ),
    "each keeps the weights of its own lowest loss": (
        {"if losses[-1] < lowest": "if loss.item() < lowest", "lowest = losses[-1]":
         "lowest = loss.item()", "            dist.barrier()": "            pass"}, ALL,
    ),
    "no weights are kept": ({"losses[-1] < lowest": "losses[-1] < 0"}, ALL),
    "each computes whole batches": ({OWN: "x, y", WEIGHT: " / size"}, ALL),
}  # fmt: skip


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that hangs is ended soon."""
    monkeypatch.setattr(loaded(FAULTS).run_group, "HANGS_S", 1.0)


def test_the_untouched_program_hangs(soon: None) -> None:
    found = red(unanswered(FAULTS, mine=FOLDERS[FAULTS] / "starter.py"))
    assert f"{EVEN}: process 0 waits in all_reduce: starter.py" in found and UNEVEN not in found
    outcomes = loaded(FAULTS).run_group.together(FOLDERS[FAULTS] / "starter.py", 4, 2)
    assert "barrier: starter.py" in outcomes[1].message


def test_the_corrected_program_and_the_answers_pass() -> None:
    assert not red(checked(FAULTS, **solution(FAULTS)))


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_correction_is_red_where_it_shows(fault: str, tmp_path: Path) -> None:
    changes, where = WRONG[fault]
    mine = changed(FAULTS, tmp_path, changes)
    found = red(checked(FAULTS, mine=mine, answers=solution(FAULTS)["answers"]))
    for part in ALL:
        assert (part in found) == (part in where), found
