"""The data lab's loop, its rungs, their audit, and the command that measures them."""

import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stored_runs import lab_run
from test_judge import TELLS
from torch import Tensor

from labs.data_pipeline import (
    gate,
    loop,
    make_dataset,
    measure_pipeline,
    measure_rung,
    peers,
    reference,
    rungs,
    train_and_test,
)
from labs.data_pipeline.formats import FORMATS, PACKED, Folder
from labs.data_pipeline.gate import Check, PlainLoop
from labs.data_pipeline.loop import Batch, Loop, Settings, Source
from labs.data_pipeline.measure_pipeline import build_parser, main
from labs.data_pipeline.reference import Asked
from workshop import labs, records
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import studies
from workshop.judge.pipe import Closed
from workshop.judge.turn import Turn
from workshop.labs import LabRun
from workshop.profilers import step_time
from workshop.results import Parity

for package in ("PIL", "sklearn", "rich"):
    pytest.importorskip(package)

CPU = torch.device("cpu")
IMAGES, BATCH, WORKERS, EPOCHS = 40, 8, 2, 3
FIRST = 7
"""The number of the first timed epoch, which a process can't know before."""
Fault = Callable[[Loop, pytest.MonkeyPatch], None]
SMALL = [name for name in rungs.BY_NAME if not rungs.is_large(name)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, which tests do not change but for formats that they add."""
    folder = tmp_path_factory.mktemp("made") / "set"
    flags = ["--images", str(IMAGES), "--size", "16", "--output-dir", str(folder)]
    assert make_dataset.main(flags) == 0
    return folder


def judged(ready: Loop, plain: PlainLoop) -> Parity:
    """The verdict on a training."""
    precision = "fp16" if ready.settings.amp else "fp32"
    run = lab_run(options={"precision": precision, "reader": ready.settings.reader})
    turn = Turn(judged=False, check=Check(plain, run))
    turn.answer(measure_rung.train(run, ready, EPOCHS - 1, turn).show, run)
    return run.gate


def start(folder: Path, **settings: Any) -> Loop:
    return Loop(Settings(**{"workers": 0} | settings), Folder(folder), CPU, BATCH)


# --- the audit of a rung -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(made: Path) -> PlainLoop:
    return PlainLoop(Asked(made, CPU, batch_size=BATCH, epochs=EPOCHS, first=FIRST))


@pytest.mark.parametrize("name", SMALL)
def test_a_rung_trains_as_the_plain_loop_does(name: str, made: Path, plain: PlainLoop) -> None:
    try:
        rungs.check(name, CPU, WORKERS)
    except NotOnThisMachine as error:
        pytest.skip(str(error))
    settings = rungs.settings(name, WORKERS)
    kind = FORMATS[settings.format]
    if settings.format in PACKED and not (made / kind.file_name).exists():
        make_dataset.pack(made, kind)
    _, source = measure_rung.open_images(settings, made, open_ms=0)
    found = judged(Loop(settings, source, CPU, BATCH), plain)
    assert found.status == "pass" and share(found) < 0.8, found


def share(found: Parity) -> float:
    """The largest error as a share of what is allowed."""
    closest = found.closest()
    assert closest
    return closest[1] / closest[2]


def test_products_may_round_in_another_way(made: Path, plain: PlainLoop) -> None:
    found = judged(start(made, channels_last=True), plain)
    assert found.status == "pass" and 0 < share(found) < 0.8, found


class Faulty:
    """Images of which some are others: all, or those after `after`."""

    def __init__(
        self, images: Source, item: Callable[[Source, int], tuple[Tensor, int]], after: int = 0
    ) -> None:
        self.images, self.item, self.after, self.given = images, item, after, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.given += 1
        if self.given > self.after:
            return self.item(self.images, index)
        return self.images[index]


def of_item(item: Callable[[Source, int], tuple[Tensor, int]], after: int = 0) -> Fault:
    """A fault of the images: of all, or of the epochs after the first."""

    def fault(ready: Loop, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ready.loader.dataset, "images", Faulty(ready.images, item, after))

    return fault


def cached(key: Callable[[Tensor, int], object]) -> Fault:
    """Images that agree in a part are taken for the same image."""
    known: dict[object, tuple[Tensor, int]] = {}

    def item(images: Source, index: int) -> tuple[Tensor, int]:
        image, label = images[index]
        return known.setdefault(key(image, label), (image, label))[0], label

    return of_item(item)


def of_batches(change: Callable[[list[Batch]], Batch]) -> Fault:
    """A fault of the loader, whose batches become what is made of those so far."""

    class Loader:
        def __init__(self, loader: Iterable[Batch]) -> None:
            self.loader, self.given = loader, list[Batch]()

        def __iter__(self) -> Iterator[Batch]:
            for batch in self.loader:
                self.given.append(batch)
                yield change(self.given)

    def fault(ready: Loop, patch: pytest.MonkeyPatch) -> None:
        ready.loader = Loader(ready.loader)

    return fault


def of_step(change: Callable[[Loop, int, Tensor, Tensor], Tensor]) -> Fault:
    """A fault of the step, which gets the loop, the step's number, images and labels."""

    def fault(ready: Loop, patch: pytest.MonkeyPatch) -> None:
        numbers = itertools.count(1)
        patch.setattr(ready, "_step", lambda *batch: change(ready, next(numbers), *batch))

    return fault


def of_loop(name: str, wrong: object) -> Fault:
    """A fault of one of the loop's functions."""
    return lambda ready, patch: patch.setattr(loop, name, wrong)


def true_draw(epoch: int) -> tuple[Tensor, Tensor]:
    return loop.draw(IMAGES, 16, 42, epoch)


def of_draw(wrong: Callable[[int], tuple[Tensor, Tensor]]) -> Fault:
    return lambda ready, patch: patch.setattr(ready.order, "draw", wrong)


def other_order(ready: Loop, patch: pytest.MonkeyPatch) -> None:
    true = loop.Order.indices
    patch.setattr(loop.Order, "indices", lambda order, epoch: true(order, epoch).flip(0))


true_step, true_batch = Loop._step, loop.crop_batch
true_normalise = loop.normalise


def loss_alone(ready: Loop, number: int, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(ready.forward(images), labels).detach()


def every_second(ready: Loop, number: int, *batch: Tensor) -> Tensor:
    return true_step(ready, *batch) if number % 2 else loss_alone(ready, number, *batch)


def nothing_late(ready: Loop, number: int, *batch: Tensor) -> Tensor:
    if number <= 3:
        ready.last = true_step(ready, *batch)
    return ready.last


def rounded(ready: Loop, number: int, *batch: Tensor) -> Tensor:
    loss = true_step(ready, *batch)
    for weight in ready.model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    return loss


def forgetful(ready: Loop, number: int, *batch: Tensor) -> Tensor:
    if number % 5 == 1:
        ready.optimizer.state.clear()
    return true_step(ready, *batch)


def other_rate(ready: Loop, patch: pytest.MonkeyPatch) -> None:
    ready.optimizer.param_groups[0]["lr"] *= 1.05


def later(ready: Loop, patch: pytest.MonkeyPatch) -> None:
    """The last update waits until the clock has stopped."""
    show = measure_rung.Seen.show

    def update(seen: measure_rung.Seen) -> Any:
        ready.optimizer.step()
        return show(seen)

    def step(ready: Loop, number: int, *batch: Tensor) -> Tensor:
        if number == 15:
            patch.setattr(ready.scaler, "step", lambda _: None)
        return true_step(ready, *batch)

    patch.setattr(measure_rung.Seen, "show", update)
    of_step(step)(ready, patch)


def other_weights(ready: Loop, patch: pytest.MonkeyPatch) -> None:
    next(ready.model.parameters()).data.mul_(1.01)


def a_step_less(ready: Loop, patch: pytest.MonkeyPatch) -> None:
    ready.order.steps -= 1


def constants(mean: float, std: float) -> Fault:
    """The network's MEAN and STD are off by so much."""
    values = (loop.MEAN, mean), (loop.STD, std)
    wrong = tuple(torch.tensor(them).view(3, 1, 1) + off for them, off in values)
    return of_loop("_constants", lambda _: wrong)


def shifted_crop(images: Tensor, corners: Tensor) -> Tensor:
    return true_batch(images, corners.flip(1))


INPUTS, LABELS, LOSS = "inputs of a batch are others", "labels of a batch are others", "the loss of"
MOVED = "the movement of 0.weight"
FAULTS: dict[str, tuple[Fault, str]] = {
    # The images.
    "other images, later": (of_item(lambda images, i: images[len(images) - 1 - i], 40), INPUTS),
    "shifted labels, later": (of_item(lambda them, i: (them[i][0], them[i - 1][1]), 40), LABELS),
    "one image per first pixel": (cached(lambda image, label: int(image[0, 0, 0]) // 8), INPUTS),
    "the crop of each image's first epoch": (
        of_draw(lambda epoch: (true_draw(epoch)[0], true_draw(0)[1])),
        INPUTS,
    ),
    "the epochs that the seed alone would give": (
        of_draw(lambda epoch: true_draw(max(0, epoch - FIRST + 1))),
        "in another order",
    ),
    "another MEAN": (constants(0.001, 0.0), INPUTS),
    # The loader.
    "the last part of each batch is dropped": (
        of_batches(lambda given: tuple(part[:-2] for part in given[-1])),
        "5 batches have another size",
    ),
    "a stale ring buffer": (of_batches(lambda them: (them[-2:][0][0], *them[-1][1:])), INPUTS),
    "another order": (other_order, "in another order"),
    "an epoch is shorter": (a_step_less, "32 images for 40"),
    # The step, which shows the true inputs.
    "half the batch, later": (
        of_step(lambda l, n, x, y: true_step(l, x[: 8 - n // 4], y[: 8 - n // 4])),
        LOSS,
    ),
    "every second update": (of_step(every_second), MOVED),
    "nothing after step 3": (of_step(nothing_late), MOVED),
    "the last update, after the clock": (later, "when the clock stopped is off by"),
    "weights are rounded": (of_step(rounded), "the direction of"),
    "moments are forgotten": (of_step(forgetful), "the movement of"),
    "a rate 5% higher": (other_rate, MOVED),
    "other first weights": (other_weights, "the loss of step"),
    # Work of the device.
    "each row's crop as its column's": (of_loop("crop_batch", shifted_crop), INPUTS),
    "inputs a ten-thousandth larger": (
        of_loop("normalise", lambda pixels: true_normalise(pixels) * 1.0001),
        INPUTS,
    ),
}
ON_DEVICE = [*FAULTS][-2:]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_timed_run_is_red(fault, made, plain, monkeypatch) -> None:
    plant, words = FAULTS[fault]
    ready = start(made, on_device=fault in ON_DEVICE)
    plant(ready, monkeypatch)
    failures = judged(ready, plain).failures
    assert any(words in failure for failure in failures), failures


@pytest.mark.parametrize(
    ("answers", "words"), [([], "before it was judged"), (["finished", "shown"], "something else")]
)
def test_a_process_that_answers_nothing_does_not_pass(
    answers, words, plain, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(studies, "FIXED_MS", 1e6)  # these times are invented
    asks = "".join(f"say({kind!r}); sys.stdin.readline(); " for kind in answers)
    rest = f'say("done", step_ms=[1.0] * 10); {asks}say("measured", gate={{"status": "pass"}})'
    run = lab_run(options={"precision": "fp32", "reader": "ours"}, gate=Parity(), step_ms=[])
    command = [sys.executable, "-c", TELLS.format(rest=rest)]
    plan = studies.Plan(command, [run], tmp_path, check=Check(plain, run))
    (row,) = labs.build_rows(studies.in_turns([plan], 1))
    assert row.first.status == "failed" and words in row.note and not row.times


def test_a_process_has_a_time_for_each_step(made: Path, plain: PlainLoop) -> None:
    """More times, each shorter, would add up to the same clock."""
    words = "--epochs 2 --workers 1 --batch-size 8 --device cpu"
    arguments = build_parser().parse_args(words.split())
    take_times = measure_pipeline.plan(arguments, "1-worker", plain, "s").take_times
    take_times(run := lab_run(), [[1.0, 1.0, 1.0, 1.0, 6.0] + [3.0] * 5])
    assert run.step_ms == [2.0, 3.0]
    with pytest.raises(Closed, match="20 times of 10 steps"):
        take_times(run, [[0.5] * 20])


@pytest.mark.slow
def test_steps_that_the_loss_scale_leaves_out(made, plain, monkeypatch) -> None:
    courses: list[gate.Course] = []
    true = gate.Course
    monkeypatch.setattr(gate, "Course", lambda *m: courses.append(true(*m)) or courses[-1])
    ready = start(made, amp=True)
    ready.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    found = judged(ready, plain)
    moves = [moves for _, moves in courses[0].scales]
    assert moves[:3] == [False] * 3 and moves[-1]
    assert found.status == "pass" and share(found) < 0.8, found
    ready.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    found = judged(ready, plain)
    assert found.failures == ["15 of 15 steps moved no weight"]


def test_a_plain_step_that_overflows_at_its_scale_takes_a_smaller_one(plain) -> None:
    """The fast path's did not, by other roundings."""
    batches = [(0, range(BATCH))] * 2
    one, other = (
        reference.train(plain.asked, plain.images, batches, [(scale, True)] * 2)
        for scale in (1.0, 2.0**140)
    )
    assert other.losses.isfinite().all() and torch.allclose(one.losses, other.losses, rtol=1e-4)


def test_the_order_and_the_crops_follow_from_seed_and_epoch() -> None:
    first, again, other = (loop.draw(100, 32, 1, epoch) for epoch in (3, 3, 4))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert sorted(first[0].tolist()) == list(range(100))
    order = loop.Order(11, 16, 5, seed=1)
    order.epoch, order.last = 3, 4
    assert [epoch for epoch, _ in order] == [3] * 10 + [4] * 10
    image = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    batch = loop.crop_batch(image, first[1][:5])
    assert torch.equal(batch, torch.stack([*map(loop.crop, image, first[1])]))


# --- the rungs -----------------------------------------------------------------------------------


def test_each_rung_changes_one_setting() -> None:
    for rung in rungs.RUNGS:
        if rung.after:
            own, before = (rungs.settings(name, 4).__dict__ for name in (rung.name, rung.after))
            assert [k for k in own if own[k] != before[k]] == list(rung.change), rung.name
            assert len(rung.change) == 1
            names = [*rungs.BY_NAME]
            assert names.index(rung.after) < names.index(rung.name)


# --- slow storage, and a local copy --------------------------------------------------------------


def test_slow_storage_waits_at_each_open(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(peers.time, "sleep", waits.append)
    if not (made / "images.zip").exists():
        make_dataset.pack(made, FORMATS["zip"])
    for key, opens in (("png", 6), ("zip", 1)):
        waits.clear()
        dataset = peers.SlowOpens(FORMATS[key](made), 5)
        plain = FORMATS[key](made)
        for index in (1, 2, 3) * 2:
            assert torch.equal(dataset[index][0], plain[index][0])
        assert waits == [0.005] * opens


@pytest.mark.parametrize(("rung", "opens"), [("local-folder", IMAGES + 2), ("local-zip", 1)])
def test_a_local_copy_waits_alone_and_is_deleted(rung, opens, made, tmp_path, monkeypatch) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, perf_counter=time.perf_counter)
    monkeypatch.setattr(peers, "time", clock)  # others sleep, too
    if not (made / "images.zip").exists():
        make_dataset.pack(made, FORMATS["zip"])
    (tmp_path / "local" / "another's").mkdir(parents=True)
    flags = ["--rung", rung, "--folder", str(made), "--output-dir", str(tmp_path / "out")]
    flags += ["--local-dir", str(tmp_path / "local"), "--open-ms", "5", "--workers", "1"]
    flags += ["--epochs", "1", "--iterations", "2", "--batch-size", "8", "--device", "cpu"]
    assert main(flags) == 0
    (run,) = records.load_folder(tmp_path / "out", LabRun)
    assert run.gate.status == "pass" and run.metrics["copy_s"] > 0
    assert waits == [0.005] * opens  # at the copy's opens, and at no later one
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["another's"]


# --- a training with a test ----------------------------------------------------------------------


def test_accuracy_is_that_of_images_which_no_step_has_seen(
    made, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(train_and_test, "DIGITS", 13)  # all images come again
    monkeypatch.setattr(train_and_test, "TEST_BATCH", 3)
    images = Folder(made)
    parts = train_and_test.split(images)
    train, test = ({index % 13 for index in part.indices} for part in parts)
    assert test == {4, 9} and not train & test and sum(map(len, parts)) == IMAGES
    ready = Loop(train_and_test.SETTINGS, parts[0], CPU, BATCH)
    for _ in ready.epoch(1):
        pass
    loss, accuracy = train_and_test.test(ready, loop.Resident(parts[1], ready.order, CPU))
    inputs = torch.stack([loop.normalise(image) for image, _ in parts[1]])
    labels = torch.tensor([label for _, label in parts[1]])
    logits = ready.model(inputs).detach()
    assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-4)
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    flags = ["--dataset-dir", str(made), "--batch-size", "8", "--device", "cpu", "--epochs", "2"]
    assert main(["--steps", "accuracy", *flags, "--output-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"\nepoch {number}/2  loss " in printed for number in (0, 1, 2))
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


# --- a worker that dies --------------------------------------------------------------------------


def killed(images: Source, index: int) -> tuple[Tensor, int]:
    if torch.utils.data.get_worker_info():
        os.kill(os.getpid(), signal.SIGBUS)
    return images[index]


def test_a_bus_error_is_explained(made: Path) -> None:
    ready = Loop(Settings(workers=1), Faulty(Folder(made), killed), CPU, BATCH)
    with pytest.raises(
        WorkshopError, match=r"bus error.*/dev/shm, which holds [\d,]+ MB.*--workers"
    ):
        list(measure_rung.Waits(ready.loader))


# --- the command ---------------------------------------------------------------------------------


CUT_OFF = {
    "images/000017.png": ("1-worker", "000017.png is damaged"),
    "images.tar": ("webdataset", "images.tar is damaged or cut off"),
}
"""Files, the rung that reads each, and what the answer says."""


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_file_that_is_cut_off_is_a_line(name, made, tmp_path, capsys) -> None:
    rung, words = CUT_OFF[name]
    folder = Path(shutil.copytree(made, tmp_path / "set"))
    make_dataset.pack(folder, FORMATS["webdataset"])
    os.truncate(folder / name, (folder / name).stat().st_size // 2)
    capsys.readouterr()
    flags = ["--dataset-dir", str(folder), "--batch-size", str(BATCH), "--device", "cpu"]
    assert main([*flags, "--steps", rung, "--output-dir", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert words in printed.err and "make_dataset.py" in printed.err


@pytest.mark.slow
def test_the_command_measures_rungs_in_turns(made, tmp_path, capsys) -> None:
    steps = ["--steps", "flat", "ffcv", "--epochs", "1", "--repeats", "1", "--batch-size", "8"]
    rest = ["--device", "cpu", "--open-ms", "1", "--workers", "65", "--iterations", "2"]
    rest += ["--dataset-dir", str(made), "--output-dir", str(tmp_path)]
    workers = measure_rung.cores() + 1
    rest[rest.index("65")] = str(workers)
    assert main([*steps, *rest]) == 0
    printed = capsys.readouterr()
    assert f"WARNING: {workers} workers for {workers - 1} cores" in printed.err
    assert "1 ms at each open (simulated)" in printed.out and "ffcv: skipped" in printed.out
    runs = records.load_folder(tmp_path, LabRun)
    done = [run for run in runs if run.status == "complete"]
    assert sorted(run.variant for run in done) == ["1-worker", "flat"]
    for run in done:
        metrics = run.metrics
        assert run.gate.status == "pass" and len(run.step_ms) == 1 and run.judge_ms
        assert 0 < metrics["wait_share"] < 1
        assert all(metrics[key] for key in ("read_per_s", "worker_per_s", "model_per_s"))
        assert (metrics["decode_per_s"] is None) == (run.variant == "flat")
        shares = [metrics[f"{category.lower()}_share"] for category in step_time.CATEGORIES]
        assert sum(shares) == pytest.approx(1)
        profile = tmp_path / "profiles" / run.session / run.variant
        assert (profile / "steps.png").stat().st_size > 5000
        assert f"\n{run.variant}: " in printed.out  # what bounds it
        assert "simulated" in run.subject and str(made) not in json.dumps(run.command)
    rows = {row.first.variant: row for [*group] in labs.newest(runs) for row in group}
    assert rows["flat"].speedup and rows["flat"].first.baseline == "1-worker"
    assert (tmp_path / "ladder_cnn.png").stat().st_size > 5000
    assert "| flat | " in (tmp_path / "pipeline.md").read_text()


def test_a_red_rung_gets_no_throughput(made, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "crop_batch", shifted_crop)
    flags = ["--rung", "resident", "--folder", str(made), "--output-dir", str(tmp_path)]
    flags += ["--epochs", "1", "--iterations", "2", "--batch-size", "8", "--device", "cpu"]
    profile = tmp_path / "profile"
    assert main([*flags, "--profile-dir", str(profile)]) == 1
    (run,) = records.load_folder(tmp_path, LabRun)
    assert (profile / "steps.png").is_file() and not measure_rung.mean_step(run)
    assert run.status == "gate failed" and labs.build_rows([run])[0].units_per_s is None


ON_GPU = [("resident-graph", False), ("resident-graph", True), ("resnet50-graph", False),
          ("resnet50-ahead", False)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("rung", "faulty"), ON_GPU)
def test_a_graph_trains_the_same(rung, faulty, tmp_path, monkeypatch) -> None:
    true_copy = loop.Loop._replay
    stale: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replay(self: Loop, images: torch.Tensor, labels: torch.Tensor) -> Any:
        stale.append((images, labels))
        return true_copy(self, *(stale[0] if faulty else (images, labels)))

    monkeypatch.setattr(loop.Loop, "_replay", replay)
    folder = str(tmp_path / "set")  # ResNet-50 wants more than 32 x 32
    made = ["--images", "40", "--size", "64", "--output-dir", folder, "--pack", "flat"]
    assert make_dataset.main(made) == 0
    flags = ["--rung", rung, "--folder", folder, "--device", "cuda", "--epochs", "1"]
    flags += ["--iterations", "4", "--batch-size", "8", "--resnet-batch-size", "8"]
    assert main([*flags, "--output-dir", str(tmp_path)]) == faulty


def test_the_number_of_workers_follows_from_the_rates(made, capsys) -> None:
    flags = ["--dataset-dir", str(made), "--batch-size", "8", "--device", "cpu"]
    assert main(["--steps", "rates", *flags]) == 0
    printed = capsys.readouterr().out
    assert "one worker prepares" in printed and "workers that follow: " in printed
    if hasattr(os, "posix_fadvise"):
        assert "from storage, files that are not in memory, one core" in printed
