"""The search for tiles, with a clock of our own: times themselves need a GPU."""

import dataclasses
import sys

import pytest
import torch

pytest.importorskip("triton")


from kernel_cases import DEVICE

from workshop.kernels import autotune
from workshop.run import presets


@pytest.fixture
def small_jobs() -> dict[str, autotune.Job]:
    preset = dataclasses.replace(presets.get_preset("tiny"), batch_size=1, seq_len=33)
    found = autotune.jobs(preset, torch.float32, torch.device(DEVICE))
    return {job.name: job for job in found}


@pytest.mark.skipif(DEVICE == "cuda", reason="needs entries of the interpreter's kind")
def test_the_fastest_right_candidate_wins_and_the_table_is_left_alone(small_jobs) -> None:
    job = small_jobs["triton_swiglu.FORWARD_BLOCKS"]
    before = dict(job.table)
    job.candidates = [(1, 64, 1), (2, 128, 1), (0, 64, 1), (4, 256, 1)]
    milliseconds = {(256, 4096, 1): 9.0, (1, 64, 1): 3.0, (2, 128, 1): 1.0, (4, 256, 1): 2.0}
    clock = lambda call: milliseconds[job.table["interpreter"]]  # noqa: E731
    outcome = autotune.tune(job, clock)
    assert (outcome.best, outcome.best_ms, outcome.dropped) == ((2, 128, 1), 1.0, 1)
    assert job.table == before
    assert '"interpreter": (2, 128, 1),' in autotune.describe(outcome)

    wrong = dataclasses.replace(job, candidates=[(2, 128, 1)])
    right = job.call
    wrong.call = lambda: right() * (1.0 if job.table["interpreter"][0] == 256 else 1.5)
    outcome = autotune.tune(wrong, clock)
    assert outcome.best is None and outcome.dropped == 1
    assert "nothing better" in autotune.describe(outcome)


def test_every_call_returns_results_to_compare(small_jobs) -> None:
    for name, job in small_jobs.items():
        assert autotune._tensors(job.call()), name


def test_an_entry_keeps_those_of_other_widths(small_jobs) -> None:
    job = small_jobs["triton_rms_norm.BACKWARD_BLOCKS"]
    present = dict(sys.modules["triton_launch"].tuned(job.table))
    entry = dict(job.entry(job.candidates[0]))
    assert entry.items() > present.items() and max(entry) == max(present)
