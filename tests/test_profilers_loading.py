"""Waiting for data: live traces of loops that wait for a part of their time, traces by hand, and
what the advisor makes of both."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_runs import lab_run
from test_profilers_advisor import find, found_in, names, table
from test_profilers_advisor import kernel as rows
from test_profilers_kineto import AUTOGRAD, MAIN, event, kernel, launch, mark
from test_profilers_kineto import read as read_events
from torch import profiler
from torch.utils.data import DataLoader, Dataset

from workshop.profilers import kineto, step_time
from workshop.profilers.advisor import LEAST_LOADING, advise
from workshop.profilers.metrics import LEAST_LOADING_BOUND
from workshop.profilers.show import summary
from workshop.profilers.table import KernelTable, Loading

# --- live ----------------------------------------------------------------------------------------

BATCH, WARMUP, STEPS = 4, 2, 8
STEP_S = 0.03


class Sleeping(Dataset[torch.Tensor]):
    """Samples that take `seconds` each to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCH * (WARMUP + STEPS)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((64,), float(index))


def seconds_a_batch(share: float, workers: int) -> float:
    """Time to load a batch, with which a loop waits for this share of its time: workers load while
    it runs."""
    if workers == 0 or share == 0:
        return STEP_S * share / (1 - share)
    return workers * STEP_S / (1 - share)


def record_loop(loader: DataLoader, marked: bool, path: Path) -> list[tuple[float, float, float]]:
    """Writes the trace of an epoch; with `marked` the warm-up is left out; by the clock,
    when each of the steps asked for its batch, got it and ended."""
    # One step more than there are batches: as in any loop, the last wait is for none.
    steps = profiler.schedule(wait=0, warmup=WARMUP, active=STEPS + 1) if marked else None
    model, clock, seen = torch.nn.Linear(64, 64), time.perf_counter, []
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], schedule=steps) as recorder:
        batches = iter(loader)
        asked = clock()
        while (batch := next(batches, None)) is not None:
            got = clock()
            time.sleep(STEP_S)
            model(batch).square().mean().backward()
            seen.append((asked, got, clock()))
            recorder.step()
            asked = clock()
    recorder.export_chrome_trace(str(path))
    return seen[WARMUP:] if marked else seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("share", "marked"), [(0.0, True), (0.7, True), (0.2, False)])
def test_the_share_is_the_clocks(share: float, marked: bool, workers: int, tmp_path: Path) -> None:
    dataset = Sleeping(seconds_a_batch(share, workers) / BATCH)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    seen = record_loop(loader, marked, tmp_path / "trace.json")
    waited, took = sum(got - asked for asked, got, _ in seen), seen[-1][-1] - seen[0][0]
    profile = kineto.read(tmp_path / "trace.json")
    found = profile.loading
    assert found is not None
    found_share = found.wait_ns / found.span_ns
    assert found_share == pytest.approx(waited / took, abs=0.05)
    assert found.span_ns == pytest.approx(took * 1e9, rel=0.1)
    assert (found.batches, found.in_thread) == (len(seen), workers == 0)
    assert found.gpu_idle_ns is None
    if marked:
        mean = step_time.mean(profile.step_times)
        assert len(profile.step_times) == len(seen)
        assert mean.parts_ns["DataLoader"] / mean.ns == pytest.approx(found_share, abs=0.01)
        assert mean.ns * len(seen) == pytest.approx(found.span_ns, rel=0.01)

    # A busy machine makes a loop wait for more than it should: then that is found.
    advices = advise(profile)
    said = {"data", "data-bound"} & set(names(advices))
    bound = "data-bound" if found_share >= LEAST_LOADING_BOUND else "data"
    assert said == ({bound} if found_share >= LEAST_LOADING else set())
    if share == 0.7:
        sentence = find(advices, "data-bound").sentence
        assert f"{found_share:.0%} of the step in the DataLoader" in sentence
        assert ("num_workers=" in sentence) is (workers == 0)


# --- by hand, times in µs ------------------------------------------------------------------------


def wait(ts: float, us: float, tid: int = MAIN, of: str = "SingleProcess") -> dict:
    name = f"enumerate(DataLoader)#_{of}DataLoaderIter.__next__"
    return event("user_annotation", name, ts, us, tid)


def operator(ts: float, us: float, tid: int = MAIN) -> dict:
    return event("cpu_op", "aten::mm", ts, us, tid)


TWO_STEPS = [
    operator(10, 10),
    wait(50, 30),
    mark("ProfilerStep#1", 100, 100),
    wait(100, 60),
    wait(110, 20),  # of a dataset that has another loader
    operator(120, 5),
    operator(165, 10),
    mark("ProfilerStep#2", 200, 100),
    wait(200, 40),
    operator(250, 10),
    mark("ProfilerStep#3", 300, 90),
    wait(310, 70),  # for no batch: the workers end
    operator(320, 5),
    wait(100, 200, AUTOGRAD),  # a thread that loads ahead
    operator(305, 80, AUTOGRAD),
]
NO_STEPS = [
    operator(0, 20),
    wait(50, 30, of="MultiProcessing"),
    operator(85, 10),
    wait(100, 20, of="MultiProcessing"),
    operator(125, 15),
    wait(150, 100, of="MultiProcessing"),
]
ON_GPU = [
    mark("step", 100, 100),
    wait(100, 60),
    launch(170, 9),
    kernel("k", 180, 50, 9),
    kernel("left over", 90, 40, 5),
    kernel("on another GPU", 100, 60, 0, device=1),
]
BOTH_KINDS = [wait(0, 10), wait(20, 11, of="MultiProcessing"), operator(40, 10)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (TWO_STEPS, Loading(200e3, 100e3, 2, in_thread=True)),
        (NO_STEPS, Loading(90e3, 50e3, 2, in_thread=False)),
        (ON_GPU, Loading(100e3, 60e3, 1, in_thread=True, gpu_idle_ns=30e3)),
        (BOTH_KINDS, Loading(50e3, 21e3, 2, in_thread=False)),
        ([wait(0, 50, AUTOGRAD), operator(60, 10, AUTOGRAD)], None),
        ([mark("step", 0, 70), wait(0, 50, AUTOGRAD), operator(60, 10, AUTOGRAD)], None),
        ([wait(0, 50), operator(10, 10)], None),
        ([operator(0, 10)], None),
    ],
)
def test_the_waits_of_the_thread_that_trains(
    events: list[dict], expected: Loading | None, tmp_path: Path
) -> None:
    random.Random(0).shuffle(events)
    assert read_events(tmp_path, *events).loading == expected


# --- what is said of it --------------------------------------------------------------------------


def waiting(share: float, idle: float | None = None, **fields) -> KernelTable:
    """A loop of ten steps of 10 ms that waits for this share of them; meanwhile a GPU idles for
    the share `idle` of the wait."""
    lost = None if idle is None else share * idle * 100e6
    loading = Loading(100e6, share * 100e6, 10, in_thread=True, gpu_idle_ns=lost)
    return table([rows("GEMM", 100, 20.0)], steps=10, loading=loading, **fields)


@pytest.mark.parametrize(
    ("profile", "finding"),
    [
        (waiting(LEAST_LOADING - 0.002), None),
        (waiting(LEAST_LOADING + 0.002), "data"),
        (waiting(LEAST_LOADING_BOUND - 0.002), "data"),
        (waiting(LEAST_LOADING_BOUND + 0.002), "data-bound"),
        (waiting(0.9, idle=0.05), None),  # the GPU has work from before
        (waiting(0.9, idle=0.06), "data"),
        (waiting(0.9, idle=0.56), "data-bound"),
        (waiting(0.9, idle=0.9, span_ms=100), "data-bound"),  # not for the host's launches
        (waiting(1.0), None),  # nothing but loading: there is no model to wait
    ],
)
def test_only_time_that_is_lost_counts(profile: KernelTable, finding: str | None) -> None:
    found = {"data", "data-bound", "idle", "launch-bound", "host-bound"} & set(found_in(profile))
    assert found == ({finding} if finding else set())


def test_what_is_said() -> None:
    profile = waiting(0.73, idle=0.5)
    assert profile.loading is not None
    advice = find(advise(profile), "data")
    assert "The main thread spends 73% of the step in the DataLoader" in advice.sentence
    assert "makes the batches there: 7.3 ms a batch. The GPU idles 50% of that. " in advice.sentence
    # 10 ms less 3.65: a worker takes 7.3.
    assert advice.sentence.endswith("takes 6.35 ms a batch: num_workers=2 would load as fast.")
    assert advice.at_stake_ns == pytest.approx(36.5e6)
    assert "loading data 73.000 of 100.000 ms (73.0%), 10 batches" in summary(profile)
    profile.loading = replace(profile.loading, in_thread=False, gpu_idle_ns=None)
    profile.steps = None
    advice = find(advise(profile), "data-bound")
    assert "data-bound: the main thread spends 73% of the time" in advice.sentence
    assert "GPU" not in advice.sentence
    assert advice.sentence.endswith("2.7 ms a batch: the workers have to load 3.7 times as fast.")
    assert advice.treatment.startswith("More workers first")


def test_the_rates_of_a_labs_pipeline_and_model() -> None:
    """The record's own, else the trace's: 32 images in 7.3 ms of waiting, in the 2.7 of the rest,
    and in all 10."""
    profile = waiting(0.73)
    assert profile.loading is not None
    by_workers = waiting(0.73)
    by_workers.loading = replace(profile.loading, in_thread=False)
    measured = {"worker_per_s": 1900.0, "model_per_s": 25000}
    for one, metrics, expected in (
        (profile, {}, "The main thread makes 4,384 images/s, the model takes 11,852."),
        (by_workers, {}, "The workers bring 3,200 images/s, the model takes 11,852."),
        (by_workers, measured, "One worker prepares 1,900 images/s, the model takes 25,000."),
    ):
        lab = lab_run("rung 1", 10.0, lab="data_pipeline", metrics=metrics)
        sentence = find(advise(one, lab), "data-bound").sentence
        assert "spends 73% of the step in the DataLoader" in sentence
        assert sentence.endswith(expected)
