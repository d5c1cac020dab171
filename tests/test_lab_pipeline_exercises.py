"""The data pipeline's exercises: a recorded trace and the loop that it is of, and the number of
workers."""

import gzip
import re

import pytest
import torch
from exercise_cases import (
    FOLDERS,
    loaded,
)
from torch.utils.data import TensorDataset

TRACE = "pipeline_2_trace"


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
