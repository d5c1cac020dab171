"""The CIFAR-10 lab's training: its images, its step, its checkpoints, the gate, the program."""

import copy
import dataclasses
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from stored_runs import the_run
from torch import Tensor, nn

from labs import shared
from labs.cifar10_roofline import data, documents, measure_table, step
from labs.cifar10_roofline.data import Batches, Plan, crop
from labs.cifar10_roofline.step import Problem, Schedule, Training, Variant
from labs.cifar10_roofline.train import main
from workshop import labs, records
from workshop.labs import LabRun

CPU = torch.device("cpu")
IMAGES = 10
"""In each of the six files."""


class Small(nn.Module):
    """In the place of a ResNet, with its names: milliseconds a step."""

    severed = False

    def __init__(self) -> None:
        super().__init__()
        block = shared.import_torchvision().models.resnet.BasicBlock
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(block(8, 8))
        halved = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
        self.layer2 = nn.Sequential(block(8, 16, 2, halved))
        self.fc = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        found = self.layer1(torch.relu(self.bn1(self.conv1(images))))
        found = self.layer2(found.detach() if self.severed else found)
        out: Tensor = self.fc(found.mean((2, 3)))
        return out


def batch_file(seed: int, **other: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    labels = [int(label) for label in random.integers(0, 10, IMAGES)]
    pixels = random.integers(0, 256, (IMAGES, 3072)).astype(np.uint8)
    pixels[:, :1024] = np.array(labels)[:, None] * 25  # something to learn
    return {"batch_label": "a batch", "labels": labels, "data": pixels} | other


def write_cifar(folder: Path) -> Path:
    """Six files of CIFAR-10's format, as Python 2 wrote them, and the classes' names."""
    shared.import_torchvision()
    from torchvision.datasets import CIFAR10

    unpacked = folder / CIFAR10.base_folder
    unpacked.mkdir(parents=True)
    for seed, (name, _) in enumerate((*CIFAR10.train_list, *CIFAR10.test_list)):
        (unpacked / name).write_bytes(pickle.dumps(batch_file(seed), protocol=2))
    meta = {CIFAR10.meta["key"]: list("0123456789")}
    (unpacked / CIFAR10.meta["filename"]).write_bytes(pickle.dumps(meta))
    return folder


@pytest.fixture(autouse=True)
def any_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' files pass for CIFAR-10's."""
    shared.import_torchvision()
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).is_file()
    )


@pytest.fixture
def train(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Runs the program on a small network and 50 images; its status and all that it printed."""
    monkeypatch.setattr(step, "build", lambda name: Small())
    monkeypatch.setattr("workshop.run.hardware.measure_matmul_tflops", lambda *_: 1.0)
    write_cifar(tmp_path / "data")

    def run(*flags: str | Path, out: str = "out", lr: str = "--lr=0.05") -> tuple[int, str]:
        where = ["--data", tmp_path / "data", "--out-dir", tmp_path / out]
        usual = ["--device", "cpu", "--batch-size", "8", "--epochs", "4", *lr.split()]
        words = [*usual, "--output-dir", tmp_path / "results", *where, *flags]
        status = main([str(word) for word in words])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


# --- networks ------------------------------------------------------------------------------------


def test_the_networks_are_those_for_small_images() -> None:
    model = step.build("resnet18")
    assert sum(weight.numel() for weight in model.parameters()) == 11_173_962
    macs = shared.flops_per_image(model, 32, training=False) / 2
    assert macs == pytest.approx(0.5555e9, rel=0.01)
    forward = shared.flops_per_image(model, 32, training=False)
    first = 2 * 3 * 9 * 64 * 32 * 32  # whose gradient for the image is not computed
    assert shared.flops_per_image(model, 32) == 3 * forward - first
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


# --- images --------------------------------------------------------------------------------------


def test_digits_have_cifars_layout_and_a_fixed_split() -> None:
    found, again = data.digits(), data.digits()
    assert found.train.images.shape == (1437, 3, 32, 32) and len(found.test.labels) == 360
    assert found.train.images.dtype == torch.uint8 and not found.flips
    assert torch.equal(found.test.images, again.test.images)
    assert found.test.labels[:8].tolist() == [3, 2, 4, 3, 2, 1, 1, 0]
    assert found.test.labels.bincount().min() >= 20
    assert found.train.images.max() == 255


@pytest.mark.parametrize(
    ("flag", "rate"), [("", "0.02 (the default for digits)"), ("--lr=0.1", "0.1")]
)
def test_digits_stand_in_loudly(flag, rate, monkeypatch, tmp_path, train) -> None:
    """Where CIFAR-10 can't be downloaded."""
    other = data.cifar10(tmp_path / "data")
    values = other.train.images / 255
    mean, std = (float(values.mean()),) * 3, (float(values.std()),) * 3
    stand_in = data.Dataset("digits", other.train, other.test, mean, std, False)
    monkeypatch.setattr(data, "digits", lambda: stand_in)

    def download(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", download)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: False)
    status, printed = train("--epochs", "2", lr=flag)
    assert status == 0, printed
    assert "WARNING" in printed and "no network" in printed and "DIGITS" in printed
    assert f"highest learning rate: {rate}\n" in printed
    options = the_run(tmp_path / "results").options
    assert (options["dataset"], options["asked_for_dataset"]) == ("digits", "cifar10")
    assert f"{options['lr']:g}" == rate.split()[0]


# --- batches -------------------------------------------------------------------------------------


def test_crops_are_those_of_each_image_alone() -> None:
    images = torch.randint(1, 256, (5, 3, 32, 32), dtype=torch.uint8)
    top, left = torch.tensor([0, 4, 8, 3, 1]), torch.tensor([8, 4, 0, 5, 2])
    flip = torch.tensor([0, 0, 1, 1, 0])
    found = crop(images, top, left, flip)
    for i in range(5):
        padded = nn.functional.pad(images[i], (4,) * 4)
        expected = padded[:, top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert torch.equal(found[i], expected.flip(-1) if flip[i] else expected)
    assert torch.equal(found[1], images[1])


def test_batches_are_the_same_from_workers_and_on_the_device(tmp_path: Path) -> None:
    part = data.cifar10(write_cifar(tmp_path)).train
    kinds = [
        Batches(part, 8, 50, True, CPU, workers, on_device)
        for workers, on_device in ((0, False), (2, False), (0, True))
    ]
    for epoch in (0, 1):
        for a, b, c in zip(*(kind.epoch(1, epoch) for kind in kinds), strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[0], c[0])
            assert torch.equal(a[1], b[1]) and torch.equal(a[1], c[1])
    first, *others = (
        torch.cat([y for _, y in kinds[0].epoch(*drawn)]) for drawn in ((1, 0), (1, 1), (2, 0))
    )
    assert len(first) == 48 and not any(torch.equal(first, other) for other in others)


def test_an_epoch_has_each_image_once_and_mirrors_no_digit() -> None:
    plan, digits = (Plan.draw(500, 500, 3, 0, flips) for flips in (True, False))
    assert plan.order.sort().values.tolist() == list(range(500))
    assert {*plan.top.tolist()} == {*plan.left.tolist()} == set(range(9))
    assert 200 < int(plan.flip.sum()) < 300 and not digits.flip.any()


# --- step ----------------------------------------------------------------------------------------


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    schedule = Schedule(0.4, warmup=4, total=12)
    rates = [schedule.at(step) for step in (0, 1, 3, 4, 8, 12)]
    assert rates == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.2, 0.0])
    assert Schedule(0.4, warmup=0, total=2).at(0) == 0.4


PROBLEM = Problem(Schedule(0.05, 2, 20), 0.1, (0.5,) * 3, (0.25,) * 3)


def test_a_state_of_another_memory_format_can_be_trained_on() -> None:
    """PyTorch's fused update, of GPUs, refuses momentum laid out otherwise than its weight."""
    one, other = (
        Training(Small(), Variant(channels_last=last), PROBLEM, CPU) for last in (True, False)
    )
    one.step(torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4))
    other.load(one.state())
    for weight, kept in other.optimizer.state.items():
        assert kept["momentum_buffer"].stride() == weight.stride()


# --- the gate ------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
true_step, true_loss, true_evaluate = Training.step, Training.loss, Training.evaluate
true_batch, true_at = Plan.batch, Schedule.at


Fault = Callable[[Patch], object]


def replacing(owner: type, name: str, wrong: Any) -> Fault:
    return lambda patch: patch.setattr(owner, name, wrong)


def stepping(wrong: Callable[..., tuple[Tensor, Tensor]]) -> Fault:
    """Each step trains something else than the images and labels that it is given."""
    return replacing(Training, "step", lambda self, x, y: true_step(self, *wrong(self, x, y)))


def updating(wrong: Callable[[Any], object]) -> Fault:
    """A fault of a training that has just been made."""
    true_init = Training.__init__

    def init(self: Training, *parts: Any) -> None:
        true_init(self, *parts)
        wrong(self)

    return replacing(Training, "__init__", init)


def forgotten_momentum(self: Training, *batch: Tensor) -> Any:
    for own in self.optimizer.state.values():
        own["momentum_buffer"].zero_()
    return batch


def every_second_update(self: Training, images: Tensor, labels: Tensor) -> Tensor:
    if self.done % 2:
        self.done += 1
        return true_loss(self, images, labels).detach()
    return true_step(self, images, labels)


def nothing_after_step_3(self: Any, images: Tensor, labels: Tensor) -> Tensor:
    if self.done < 3:
        self.last = true_step(self, images, labels)
        return self.last
    self.done += 1
    return self.last * 0.9**self.done


def other_settings(**wrong: Any) -> Fault:
    return updating(lambda training: training.optimizer.param_groups[0].update(wrong))


def normalised_with(**wrong: Any) -> Fault:
    true_cifar10 = data.cifar10
    return lambda patch: patch.setattr(
        data, "cifar10", lambda folder: dataclasses.replace(true_cifar10(folder), **wrong)
    )


def not_cropped(plan: Plan, part: data.Part, index: int, size: int) -> tuple[Tensor, Tensor]:
    chosen = plan.order[index * size : (index + 1) * size]
    return part.images[chosen], part.labels[chosen]


def not_mirrored(plan: Plan, part: data.Part, index: int, size: int) -> tuple[Tensor, Tensor]:
    plain = dataclasses.replace(plan, flip=torch.zeros_like(plan.flip))
    return true_batch(plain, part, index, size)


def drawn_with(wrong: Callable[[int, int], tuple[int, int]]) -> Fault:
    """An epoch's batches come from another seed and epoch."""
    true_epoch = Batches.epoch
    return replacing(Batches, "epoch", lambda self, *drawn: true_epoch(self, *wrong(*drawn)))


def no_smoothing(self: Training, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(self.logits(images).float(), labels)


def evaluating(wrong: Callable[[Training, Tensor], Tensor]) -> Fault:
    return replacing(Training, "evaluate", torch.no_grad()(wrong))


FAULTS: dict[str, Fault] = {
    "half the batch": stepping(lambda _, x, y: (x[: len(x) // 2], y[: len(y) // 2])),
    "forgotten momentum": stepping(forgotten_momentum),
    "every second update": replacing(Training, "step", every_second_update),
    "nothing after step 3": replacing(Training, "step", nothing_after_step_3),
    "severed": updating(lambda t: setattr(t.model, "severed", True)),
    "one weight severed": updating(lambda t: t.model.bn1.bias.register_hook(torch.zeros_like)),
    "stale gradients": updating(lambda t: setattr(t.optimizer, "zero_grad", lambda **_: None)),
    "statistics at rest": updating(lambda t: setattr(t.model.bn1, "momentum", 0.0)),
    "no Nesterov": other_settings(nesterov=False),
    "no weight decay": other_settings(weight_decay=0.0),
    "wrong mean": normalised_with(mean=(0.485, 0.456, 0.406)),
    "not cropped": replacing(Plan, "batch", not_cropped),
    "not mirrored": replacing(Plan, "batch", not_mirrored),
    "epochs alike": drawn_with(lambda seed, epoch: (seed, 0)),
    "batches known before go": drawn_with(lambda seed, epoch: (7, epoch)),
    "rate 5% high": replacing(Schedule, "at", lambda self, step: 1.05 * true_at(self, step)),
    "no label smoothing": replacing(Training, "loss", no_smoothing),
    "tested in training mode": evaluating(lambda self, images: self.logits(images)),
    "tested on one image": evaluating(
        lambda self, images: true_evaluate(self, images[:1]).expand(len(images), -1)
    ),
}
UNSEEN_IN_BF16 = ("no weight decay",)
"""Smaller than what a plain step in bf16 loses."""


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_training_that_does_other_work_is_red(fault, precision, train, monkeypatch) -> None:
    if fault in UNSEEN_IN_BF16 and precision == "bf16":
        pytest.skip("smaller than the roundings")
    if fault:
        FAULTS[fault](monkeypatch)
    status, printed = train("--channels-last", "--precision", precision)
    assert status == (1 if fault else 0) and ("FAIL: " in printed) == bool(fault), printed
    assert ("images/s, " in printed) == (fault is None)


# --- checkpoints ---------------------------------------------------------------------------------


def weights(folder: Path, name: str = "resnet18_cifar10_final_weights.pt") -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / name, weights_only=True)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flags", [(), ("--channels-last", "--precision", "bf16")])
def test_a_resumed_training_is_the_uninterrupted_one(train, tmp_path, flags) -> None:
    status, printed = train("--save-every", "1", *flags)
    assert status == 0, printed
    middle = tmp_path / "out" / "resnet18_cifar10_epoch_2.pt"
    status, printed = train("--resume", middle, "--save-every", "1", *flags, out="resumed", lr="")
    assert status == 0 and "note: " not in printed, printed
    assert same(weights(tmp_path / "out"), weights(tmp_path / "resumed"))
    last = "resnet18_cifar10_epoch_4.pt"
    ends = [weights(tmp_path / folder, last) for folder in ("out", "resumed")]
    moments = [end["training"]["optimizer"]["state"] for end in ends]
    assert all(
        torch.equal(moments[0][i]["momentum_buffer"], moments[1][i]["momentum_buffer"])
        for i in moments[0]
    )
    assert [line["loss"] for line in ends[0]["history"]] == [
        line["loss"] for line in ends[1]["history"]
    ]


class Malicious:
    """A pickle that runs a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_other_checkpoints_are_one_line(train, tmp_path) -> None:
    assert train("--epochs", "1", "--save-every", "1")[0] == 0
    good = tmp_path / "out" / "resnet18_cifar10_best.pt"
    short = tmp_path / "short.pt"
    short.write_bytes(good.read_bytes()[:-500])
    evil = tmp_path / "evil.pt"
    torch.save({"format": step.FORMAT, "more": Malicious(tmp_path / "ran")}, evil)
    other = weights(tmp_path / "out", good.name)
    other["training"]["model"]["conv1.weight"] = torch.zeros(2, 3)
    torch.save(other, tmp_path / "other.pt")
    for flags, said in (
        ((good, "--model", "resnet34"), "another model: resnet18 there, resnet34 here"),
        ((short,), "truncated"),
        ((evil,), "no checkpoint"),
        ((tmp_path / "other.pt",), "not those of this network"),
    ):
        status, printed = train("--resume", *flags)
        assert status == 2 and said in printed and "Traceback" not in printed, printed
    assert not (tmp_path / "ran").exists()


# --- program -------------------------------------------------------------------------------------


def test_a_training_leaves_its_weights_curves_and_result(train, tmp_path) -> None:
    status, printed = train("--data-on-gpu", "--amp")
    assert status == 0, printed
    assert printed.count("images/s") >= 4 and "--amp is without effect on the CPU" in printed
    names = {path.name.removeprefix("resnet18_cifar10_") for path in (tmp_path / "out").iterdir()}
    assert names == {"best.pt", "final_weights.pt", "curves.png"}
    assert (tmp_path / "out" / "resnet18_cifar10_curves.png").read_bytes()[:4] == b"\x89PNG"
    result = the_run(tmp_path / "results")
    assert len(result.single_step_ms) == len(result.losses) == 24
    epochs = len(result.step_ms) + 1  # the first is left out
    of_one = 24 // epochs
    last = result.single_step_ms[-of_one:]
    assert epochs > 1 and result.step_ms[-1] == pytest.approx(sum(last) / of_one)
    assert result.losses[-1] is not None and result.losses[0] is not None
    assert result.losses[-1] < result.losses[0]
    (row,) = labs.build_rows([result])
    assert row.gate == "pass" and row.units_per_s and row.tflops
    assert 0 <= float(str(result.metrics["test_accuracy"])) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        "--amp --workers 2",
        "--precision tf32",
        "--cuda-graph --data-on-gpu",
        "--cuda-graph --data-on-gpu --amp --channels-last",
        "--compile --precision bf16 --channels-last --data-on-gpu",
        "--compile --cuda-graph --precision bf16 --channels-last --data-on-gpu",
        "--profile-one-step --warmup-iters 5",
    ],
)
def test_fast_paths_train_the_same_on_a_gpu(train, flags) -> None:
    status, printed = train("--device", "cuda", *flags.split())
    assert status == 0, printed


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), *measure_table.variants(torch.device("cuda"))])
def test_the_real_network_is_proven_on_a_gpu(flags: tuple[str, ...], tmp_path: Path) -> None:
    folders = ["--out-dir", str(tmp_path), "--output-dir", str(tmp_path)]
    few = ["--dataset", "digits", "--epochs", "2", "--batch-size", "32"]
    assert main([*few, *folders, *flags]) == 0
    assert the_run(tmp_path).metrics["best_accuracy"] > 0.7


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_first_step_that_overflows_changes_nothing(graph: bool) -> None:
    device = torch.device("cuda")
    problem = Problem(Schedule(0.1, 1, 100), 0.1, (0.5,) * 3, (0.2,) * 3)
    training = Training(Small(), Variant("fp16", False, False, graph), problem, device)
    training.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    held = torch.full((10**7,), torch.nan, device=device)
    del held  # memory that is handed out next holds NaN
    before = copy.deepcopy(training.state())
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (8,), device=device)
    training.step(images, labels)
    weights = training.model.state_dict()
    assert torch.equal(weights["fc.weight"], before["model"]["fc.weight"])
    for _ in range(40):
        loss = training.step(images, labels)
    assert torch.isfinite(loss) and not torch.equal(
        training.model.state_dict()["fc.weight"], before["model"]["fc.weight"]
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--batch-size", "51"), "has 50 images"), (("--precision", "fp16"), "does not have it")],
)
def test_flags_that_can_not_be_are_one_line(train, flags, said) -> None:
    status, printed = train(*flags)
    assert status == 2 and said in printed and "Traceback" not in printed


def test_one_step_is_marked_and_no_other(train, tmp_path, monkeypatch) -> None:
    from contextlib import contextmanager

    events: list[str] = []

    @contextmanager
    def range_(name: str) -> Any:
        events.append(name)
        yield
        events.append(f"/{name}")

    true_step = Training.step

    def step(self: Training, *more: Any) -> Tensor:
        events.append(f"step {self.done}")
        return true_step(self, *more)

    monkeypatch.setattr(Training, "step", step)
    monkeypatch.setattr("workshop.run.markers.for_vendor_tools", lambda device: range_)
    status, printed = train("--profile-one-step", "--warmup-iters", "7", "--profile-iter", "2")
    assert status == 0 and "Profiled iteration 9" in printed
    parts = [word for part in ("forward", "backward", "optimizer") for word in (part, f"/{part}")]
    before = [f"step {index}" for index in range(8)]
    assert events == [*before, "train_step", "step 8", *parts, "/train_step"]
    result = the_run(tmp_path / "results")
    assert result.status == "profiled" and result.flops_per_step and not result.step_ms


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_is_of_trainings_in_turns(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the program needs no installation
    few = ["--models", "resnet18", "--batch-sizes", "4", "--repeats", "1", "--jobs", "2"]
    flags = "--dataset digits --epochs 1 --epoch-images 12 --device cpu --lr 0.003"
    assert measure_table.main([*few, "--output-dir", str(tmp_path), "--", *flags.split()]) == 0
    runs = records.load_folder(tmp_path, LabRun)
    assert {run.variant for run in runs} == {
        "fp32, 2 workers",
        "fp32, channels-last, data on the device",
    }
    assert all(len(run.losses) == 3 and run.options["epoch_images"] == 12 for run in runs)
    (text,) = documents.parts(runs)[documents.README].values()
    assert "| fp32, 2 workers |" in text and text.count("| pass |") == 2
    assert f"`python {Path(sys.argv[0]).name}" in text  # the command of the study
