"""The data pipeline's exercises: a recorded trace and the loop that it is of, and the number of
workers."""

import dataclasses
import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exercise_cases import (
    FOLDERS,
    checked,
    loaded,
    only_fault,
    red,
    solution,
    unanswered,
)
from torch.utils.data import TensorDataset

from workshop import records
from workshop.labs import LabRun

WORKERS, TRACE = "pipeline_1_workers", "pipeline_2_trace"


@pytest.mark.parametrize("name", [WORKERS, TRACE])
def test_the_empty_answers_fail_and_the_solution_passes(name: str) -> None:
    results = {key: path for key, path in solution(name).items() if key == "results"}
    unanswered(name, **results)
    assert not red(checked(name, **solution(name)))


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        (WORKERS, {"waiting_percent": 5}, "The latency over"),
        (WORKERS, {"workers": 1}, "`workers that follow`"),
        (WORKERS, {"workers": 16}, "`workers that follow`"),
        (WORKERS, {"per_s": 38}, "with 5 workers"),
        (WORKERS, {"doubled_per_s": 380}, "with 10 workers"),
        (WORKERS, {"one_bound": "decoding"}, "a small part"),
        (WORKERS, {"one_bound": "model"}, "it waits most of the time"),
        (WORKERS, {"doubled_bound": "storage"}, "the same for each"),
        (WORKERS, {"doubled_bound": "decoding"}, "a small part"),
        (TRACE, {"waiting_percent": 80}, "The line `loading data`"),
        (TRACE, {"step_ms": 135}, "its end less its start"),
        (TRACE, {"between_ms": 0.5}, "From the end of the range"),
        (TRACE, {"rounds": 8}, "one round"),
        (TRACE, {"bottleneck": "DataLoader"}, "its range is short"),
        (TRACE, {"bottleneck": "network"}, "is it the longest part?"),
        (TRACE, {"bottleneck": "item"}, "how long does it wait there?"),
        (TRACE, {"loader_gain": 4}, "1 / (1 - p)"),
        (TRACE, {"between_gain": 1.02}, "what is left of it"),
        (TRACE, {"remedy": "workers"}, "in time already"),
        (TRACE, {"remedy": "pin_memory"}, "how long does it take?"),
        (TRACE, {"remedy": "no item"}, "nothing waits in it"),
    ],
)
def test_a_wrong_answer_is_the_one_that_is_red(
    name: str, answer: dict[str, Any], says: str, tmp_path: Path
) -> None:
    results = {key: path for key, path in solution(name).items() if key == "results"}
    assert says in only_fault(name, tmp_path, answer, **results)


# --- how many workers ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [(), (1,), (5,), (5, 10), (5, 10, 20), (20, 40)])
def test_what_is_not_measured_yet_is_asked_for(workers: tuple[int, ...], tmp_path: Path) -> None:
    runs = records.load_folder(solution(WORKERS)["results"] / "data_pipeline", LabRun)
    source = next(run for run in runs if "persistent" in run.variant)
    for number in workers:
        options = source.options | {"workers": number}
        records.add(dataclasses.replace(source, options=options), tmp_path / "data_pipeline")
    items = checked(WORKERS, answers=solution(WORKERS)["answers"], results=tmp_path)
    if {5, 10} <= {*workers}:
        assert len(items) == 9
        return
    (item,) = items
    wanted = {(): "--steps rates", (5,): "--workers 10"}.get(workers, "--workers 5")
    assert item.why.startswith("python labs/data_pipeline/") and wanted in item.why


# --- which part of the loop is slow --------------------------------------------------------------


def test_the_recorded_trace_shows_the_fault_and_nothing_of_its_machine() -> None:
    path = FOLDERS[TRACE] / loaded(TRACE).TRACE
    found, loop = loaded(TRACE).read(path), loaded(TRACE, "training_loop")
    assert found.rounds == loop.BATCH and found.loading.batches == 3
    assert found.waiting < 0.1 and found.between_ms / found.step_ms > 0.4
    text = gzip.decompress(path.read_bytes()).decode()
    assert path.stat().st_size < 500_000
    assert not re.search(r"/(tmp|root|home|work|usr)/|\.py\b|host_?name", text, re.IGNORECASE)


@pytest.fixture
def images() -> TensorDataset:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (512, 3, 16, 16), dtype=torch.uint8)
    return TensorDataset(pixels, torch.randint(0, 10, (512,)))


def test_the_loop_without_its_fault_trains_the_same(images: TensorDataset) -> None:
    training_loop = loaded(TRACE, "training_loop")
    batch = images[:64]
    slow, fixed = (
        training_loop.Loop(torch.device("cpu"), 16, fixed=fixed) for fixed in (False, True)
    )
    losses = [[loop.step(*batch) for _ in range(5)] for loop in (slow, fixed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert training_loop.timed(fixed, training_loop.batches(images, 0), 2) > 0
