"""The data lab's loop, its rungs, what proves them, and the command that measures them."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from labs.data_pipeline import (
    documents,
    loop,
    make_dataset,
    measure_rung,
    profiling,
    proof,
    rungs,
    slow,
)
from labs.data_pipeline.formats import FORMATS, PACKED, Folder
from labs.data_pipeline.loop import Loop, Settings, Source
from labs.data_pipeline.measure_pipeline import main
from labs.data_pipeline.proof import Seen
from workshop import labs, records
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.labs import LabRun
from workshop.profilers import step_time
from workshop.results import Parity

for package in ("PIL", "sklearn", "rich"):
    pytest.importorskip(package)

CPU = torch.device("cpu")
IMAGES, BATCH, WORKERS = 40, 8, 2
IMAGES_WRONG = "images of a batch are others"
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


def train(ready: Loop, epochs: int = 1) -> Seen:
    seen = Seen(ready)
    for epoch in range(epochs):
        ready.order.epoch = epoch
        for step in ready.train(ready.loader, epoch):
            seen.see(epoch, step)
    return seen


def verdict(ready: Loop, folder: Path, epochs: int = 1) -> Parity:
    return proof.of_run(train(ready, epochs), folder)


# --- what proves a rung --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_a_rung_trains_on_the_plain_loops_images(name: str, made: Path) -> None:
    try:
        rungs.check(name, CPU, WORKERS)
    except NotOnThisMachine as error:
        pytest.skip(str(error))
    settings = rungs.settings(name, WORKERS)
    kind = FORMATS[settings.format]
    if settings.format in PACKED and not (made / kind.file_name).exists():
        make_dataset.pack(made, kind)
    _, source = measure_rung.open_images(settings, made, open_ms=0)
    found = verdict(Loop(settings, source, CPU, BATCH), made, epochs=2)
    assert found.status == "pass", found.failures


class Faulty:
    """Images of which some are others."""

    def __init__(self, images: Source, item: Callable[[Source, int], tuple[Tensor, int]]) -> None:
        self.images, self.item = images, item

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.item(self.images, index)


class Late(Faulty):
    """As Faulty, in the second epoch."""

    seen = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.seen += 1
        late = self.seen > IMAGES
        return self.item(self.images, index) if late else self.images[index]


FAULTS: dict[str, tuple[Callable[[Source, int], tuple[Tensor, int]], str]] = {
    "the same image twice": (lambda images, i: images[i - i % 2], IMAGES_WRONG),
    "another order": (
        lambda images, i: images[len(images) - 1 - i],
        IMAGES_WRONG,
    ),
    "labels shifted by one": (
        lambda images, i: (images[i][0], images[(i + 1) % len(images)][1]),
        "labels of a batch are others",
    ),
}


@pytest.mark.parametrize("kind", [Faulty, Late])
@pytest.mark.parametrize("fault", FAULTS)
def test_other_images_or_labels_are_found(fault: str, kind: type[Faulty], made: Path) -> None:
    item, words = FAULTS[fault]
    ready = Loop(Settings(workers=0), kind(Folder(made), item), CPU, BATCH)
    if kind is Late:
        ready.images.seen = 0  # type: ignore[attr-defined]
    found = verdict(ready, made, epochs=2)
    assert found.status == "fail" and any(words in failure for failure in found.failures)


def test_a_worker_that_gives_an_image_twice_is_found(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(order: loop.Order) -> Iterator[loop.Key]:
        indices = order.indices(order.epoch).tolist()
        return ((order.epoch, i) for i in [*indices[:-1], indices[0]])

    monkeypatch.setattr(loop.Order, "__iter__", twice)
    found = verdict(Loop(Settings(workers=0), Folder(made), CPU, BATCH), made)
    assert any("1 images come twice" in failure for failure in found.failures)


def shifted_crop(images: Tensor, corners: Tensor) -> Tensor:
    return true_crop(images, corners.flip(1))


def other_normalise(pixels: Tensor) -> Tensor:
    return true_normalise(pixels) * 1.02


true_crop, true_normalise = loop.crop_batch, loop.normalise


@pytest.mark.parametrize(
    ("name", "fault"), [("crop_batch", shifted_crop), ("normalise", other_normalise)]
)
def test_what_the_device_does_otherwise_is_found(
    name: str, fault: Any, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, name, fault)
    found = verdict(Loop(Settings(workers=0, on_device=True), Folder(made), CPU, BATCH), made)
    assert any(IMAGES_WRONG in failure for failure in found.failures)


def slower(ready: Loop) -> None:
    for group in ready.optimizer.param_groups:
        group["lr"] *= 0.9


def other_weights(ready: Loop) -> None:
    with torch.no_grad():
        next(ready.model.parameters()).mul_(1.01)


def frozen_layer(ready: Loop) -> None:
    next(ready.model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (slower, "the loss of step 2"),
        (other_weights, "the loss of step 1"),
        (frozen_layer, "1 weights get no gradient"),
    ],
)
def test_another_training_is_found(fault: Callable[[Loop], None], words: str, made: Path) -> None:
    ready = Loop(Settings(workers=0), Folder(made), CPU, BATCH)
    fault(ready)
    failures = verdict(ready, made).failures
    assert any(failure.startswith(words) for failure in failures), failures


@pytest.mark.slow
def test_steps_that_the_loss_scale_skips_are_none_of_the_first_updates(made: Path) -> None:
    ready = Loop(Settings(workers=0, amp=True), Folder(made), CPU, BATCH)
    ready.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    seen = train(ready, epochs=2)
    assert seen.moved.index(True) > 3 and sum(seen.moved) == 3
    found = proof.of_run(seen, made)
    assert found.status == "pass", found.failures


def test_the_order_and_the_crops_follow_from_seed_and_epoch() -> None:
    first, again, other = (loop.draw(100, 32, 1, epoch) for epoch in (3, 3, 4))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert sorted(first[0].tolist()) == list(range(100))
    image = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    batch = loop.crop_batch(image, first[1][:5])
    assert torch.equal(batch, torch.stack([*map(loop.crop, image, first[1])]))
    assert torch.equal(proof.pixels_of(loop.normalise(image)), image)


# --- the rungs -----------------------------------------------------------------------------------


def test_each_rung_changes_one_setting() -> None:
    for rung in rungs.RUNGS:
        if rung.after:
            own, before = (rungs.settings(name, 4).__dict__ for name in (rung.name, rung.after))
            assert [k for k in own if own[k] != before[k]] == list(rung.change), rung.name
            assert len(rung.change) == 1
            names = [*rungs.BY_NAME]
            assert names.index(rung.after) < names.index(rung.name)


# --- slow storage, and too little shared memory --------------------------------------------------


def test_slow_storage_waits_at_each_open(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(slow.time, "sleep", waits.append)
    if not (made / "images.zip").exists():
        make_dataset.pack(made, FORMATS["zip"])
    for key, opens in (("png", 6), ("zip", 1)):
        waits.clear()
        dataset = slow.SlowOpens(FORMATS[key](made), 5)
        plain = FORMATS[key](made)
        for index in (1, 2, 3) * 2:
            assert torch.equal(dataset[index][0], plain[index][0])
        assert waits == [0.005] * opens


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


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeros_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    path.write_bytes(content)


WRONG: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "a damaged PNG": ("images/000017.png", cut_off, "1-worker", "000017.png is damaged"),
    "no labels": ("images/labels.json", Path.unlink, "1-worker", "labels.json is damaged or"),
    "a PNG is missing": ("images/000003.png", Path.unlink, "1-worker", "000003.png is damaged"),
    "a tar is cut off": ("images.tar", cut_off, "webdataset", "images.tar is damaged or cut off"),
    "a zip in the middle": ("images.zip", zeros_in_the_middle, "zip", "images.zip"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_a_line(
    case: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage, rung, words = WRONG[case]
    folder = Path(shutil.copytree(made, tmp_path / "set"))
    for key in ("zip", "webdataset"):
        make_dataset.pack(folder, FORMATS[key])
    damage(folder / name)
    capsys.readouterr()
    flags = ["--dataset-dir", str(folder), "--batch-size", str(BATCH), "--device", "cpu"]
    assert main([*flags, "--steps", rung, "--output-dir", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert words in printed.err and "make_dataset.py" in printed.err


@pytest.mark.slow
def test_the_command_measures_rungs_in_turns(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert run.gate.status == "pass" and len(run.step_ms) == 1
        assert 0 < metrics["wait_share"] < 1  # type: ignore[operator]
        assert all(metrics[key] for key in ("read_per_s", "worker_per_s", "model_per_s"))
        assert (metrics["decode_per_s"] is None) == (run.variant == "flat")
        shares = [metrics[f"{category.lower()}_share"] for category in step_time.CATEGORIES]
        assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]
        profile = tmp_path / "profiles" / run.session / run.variant
        assert (profile / "steps.png").stat().st_size > 5000
        assert f"\n{run.variant}: " in printed.out  # what bounds it
        assert "simulated" in run.subject and str(made) not in json.dumps(run.command)
    rows = {row.first.variant: row for [*group] in labs.newest(runs) for row in group}
    assert rows["flat"].speedup and rows["flat"].first.baseline == "1-worker"
    assert (tmp_path / "ladder_cnn.png").stat().st_size > 5000
    written = (tmp_path / "pipeline.md").read_text()
    assert "| flat | on-device | flat in place of PNG files |" in written


def test_a_red_rung_gets_no_throughput(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "crop_batch", shifted_crop)
    path = tmp_path / "result.jsonl"
    flags = ["--rung", "resident", "--folder", str(made), "--result-file", str(path)]
    flags += ["--epochs", "1", "--iterations", "2", "--batch-size", "8", "--device", "cpu"]
    profile = tmp_path / "profile"
    assert main([*flags, "--profile-dir", str(profile)]) == 1
    (run,) = records.load_runs(path, LabRun)
    assert (profile / "steps.png").is_file() and not profiling.mean_step(run)
    assert run.status == "gate failed" and labs.build_rows([run])[0].units_per_s is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rung", "faulty"),
    [
        ("resident-graph", False),
        ("resident-graph", True),
        ("resnet50-graph", False),
        ("resnet50-ahead", False),
    ],
)
def test_a_graph_trains_the_same(
    rung: str, faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert main([*flags, "--result-file", str(tmp_path / "result.jsonl")]) == faulty


def test_the_number_of_workers_follows_from_the_rates(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dataset-dir", str(made), "--batch-size", "8", "--device", "cpu"]
    assert main(["--steps", "rates", *flags]) == 0
    printed = capsys.readouterr().out
    assert "one worker prepares" in printed and "workers that follow: " in printed
    if hasattr(os, "posix_fadvise"):
        assert "the storage gives one core" in printed


def test_documents_say_what_is_not_measured() -> None:
    parts = documents.parts([])
    assert "Not measured yet: `python measure_pipeline.py" in parts[documents.README]["pipeline"]
