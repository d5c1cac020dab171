"""A training from the command line: its epochs, what it prints and saves, its result file."""

import argparse
import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labs import shared
from labs.cifar10_roofline import data, gate, step
from labs.cifar10_roofline.data import Batches, Dataset
from labs.cifar10_roofline.step import Problem, Schedule, Training, Variant
from workshop import errors, labs, records, results, tables
from workshop.arguments import MOST, count
from workshop.errors import OutOfMemory, WorkshopError
from workshop.gate.steps import shown
from workshop.judge import lab_record
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRun
from workshop.run import deterministic, hardware, markers, memory, startup, trainer
from workshop.run.precision import PRECISIONS, Precision, get_precision, set_arithmetic, untuned
from workshop.run.timing import median
from workshop.run.trainer import missing_for_compile

SETTLING_STEPS = 5
"""Steps that are not in the time of a training of one epoch."""
TEST_BATCH = 500
STEP = "train_step"
"""The range of the profiled step."""
_SAME_ON_RESUME = "model epochs batch_size epoch_images lr label_smoothing seed".split()
"""Settings that must match the checkpoint when training resumes."""
_CURVES = ("loss", "test_accuracy", "learning_rate")


# --- the command line -----------------------------------------------------------------------------


LAB = "cifar10_roofline"
FOLDER = Path(__file__).resolve().parent
MODELS = ("resnet18", "resnet34")
DATASETS = ("cifar10", "digits")
_BOUNDS = {
    "lr": (1e-9, 1e3),
    "label_smoothing": (0, 0.99),
    "warmup": (0, MOST),
    "seed": (0, MOST),
    "workers": (0, 64),
    "save_every": (0, MOST),
    "warmup_iters": (0, MOST),
}
Add = Callable[..., Any]
DESCRIPTION = """\
Trains ResNet-18 or ResNet-34 on CIFAR-10, with the first convolution for images of 32 x 32.

Four steps, the last two among them, are compared with a plain step in fp32 on the same images: a
fast path that trains something else gets no throughput.

    python train.py --model resnet18 --epochs 5 --batch-size 128
    python train.py --model resnet18 --epochs 20 --batch-size 256 --amp --workers 4
    python train.py --dataset digits --epochs 4 --batch-size 32 --channels-last
    python train.py --epochs 1 --batch-size 128 --profile-one-step --warmup-iters 20
"""


def build_parser() -> argparse.ArgumentParser:
    parser = shared.new_parser(DESCRIPTION, "the gate failed or memory ran out")
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--model", choices=MODELS, default="resnet18", help="default resnet18")
    number("--epochs", default=20, help="passes over the images (default 20)")
    number("--batch-size", default=128, help="images a step (default 128)")
    add("--lr", type=float, metavar="X",
        help="highest learning rate (default 0.1 for CIFAR-10, 0.02 for digits)")  # fmt: skip
    add("--warmup", type=int, metavar="N", help="steps in which the learning rate rises to --lr; a "
        "cosine to 0 follows (default: one epoch, at most half of all steps)")  # fmt: skip
    add("--label-smoothing", type=float, default=0.1, metavar="X",
        help="of the cross-entropy (default 0.1)")  # fmt: skip
    add("--seed", type=int, default=42, help="of weights, order and augmentation (default 42)")
    add(deterministic.FLAG, action="store_true", help=deterministic.HELP)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    _add_data(parser.add_argument_group("data").add_argument)
    _add_files(parser.add_argument_group("files").add_argument)
    _add_speed(parser.add_argument_group("what makes it fast").add_argument)
    add = parser.add_argument_group("profilers").add_argument
    add("--profile-one-step", action="store_true",
        help="warm up, mark one training step for the profiler, and end")  # fmt: skip
    add("--warmup-iters", type=int, default=20, metavar="N", help="before it (default 20)")
    add("--profile-iter", type=count, default=1, metavar="N",
        help="which iteration after those is marked (default 1, the first)")  # fmt: skip
    return parser


def _add_data(add: Add) -> None:
    add("--dataset", choices=DATASETS, default="cifar10", help="default cifar10")
    add("--data", type=Path, default=FOLDER / "data", metavar="FOLDER", help="of CIFAR-10, which "
        "is downloaded there if it is missing (default: data/ beside train.py)")  # fmt: skip
    add("--epoch-images", type=count, metavar="N", help="images of an epoch: part of them, or some "
        "more than once (default: each once)")  # fmt: skip
    add("--workers", type=int, default=0, metavar="N",
        help="processes that prepare batches (default 0: the training process does)")  # fmt: skip
    add("--data-on-gpu", action="store_true",
        help="all images are on the device, which also crops and flips them")  # fmt: skip


def _add_files(add: Add) -> None:
    add("--out-dir", type=Path, metavar="FOLDER", default=FOLDER / "artifacts",
        help="for checkpoints, weights, curves (default: artifacts/ beside train.py)")  # fmt: skip
    shared.add_output_dir(add, LAB)
    add("--save-every", type=int, default=0, metavar="N", help="epochs (default 0: never)")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint of this program")
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure_table.py


def _add_speed(add: Add) -> None:
    add("--amp", action="store_true", help="--precision fp16 on a GPU; without effect on the CPU")
    add("--precision", choices=tuple(PRECISIONS), help="of the operations (default fp32)")
    add("--channels-last", action="store_true", help="images and weights as NHWC")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--cuda-graph", action="store_true", help="capture the whole training step in a graph")


def precision_of(arguments: argparse.Namespace, device: torch.device) -> Precision:
    """Raises WorkshopError for --amp beside another precision, or one that the device does not
    have."""
    name = arguments.precision
    if arguments.amp and name not in (None, "fp16"):
        raise WorkshopError(f"--amp is --precision fp16, not {name}: give one of them")
    if arguments.amp and device.type == "cuda":
        name = "fp16"
    return get_precision(name or "fp32", device)


def check(arguments: argparse.Namespace, device: torch.device) -> None:
    """Raises WorkshopError for numbers out of bounds, and flags that do not go together or can't
    run on this device."""
    rules: dict[str, object] = {}
    for name, (low, high) in _BOUNDS.items():
        value, flag = getattr(arguments, name), name.replace("_", "-")
        sentence = f"--{flag} {value}: it must lie between {low:g} and {high:,}"
        rules[sentence] = value is not None and not low <= value <= high
    missing = missing_for_compile(device) if arguments.compile else None
    shared.refuse(
        rules
        | {
            "--cuda-graph needs a GPU": arguments.cuda_graph and device.type != "cuda",
            "--workers and --data-on-gpu: the device prepares the batches itself": (
                arguments.workers and arguments.data_on_gpu
            ),
            f"--compile needs {missing}; install it": missing,
        }
    )


@dataclass
class Run:
    """A training that is ready to start."""

    arguments: argparse.Namespace
    dataset: Dataset
    batches: Batches
    training: Training
    record: LabRun
    settings: dict[str, Any]
    history: list[dict[str, float]]
    """A line for each complete epoch."""
    turn: Turn = field(init=False)
    epoch: int = 0
    """How many are complete."""
    best_accuracy: float = 0.0
    test_logits: Tensor | None = None
    """The test images' logits (N, 10) after the newest complete epoch."""

    def path(self, ending: str) -> Path:
        name = f"{self.arguments.model}_{self.dataset.name}_{ending}"
        return Path(self.arguments.out_dir) / name


def run(arguments: argparse.Namespace) -> int:
    """Trains, or profiles a step; the exit status."""
    errors.require("rich", "matplotlib")
    if arguments.deterministic:
        deterministic.switch_on()
    device = hardware.get_device(arguments.device)
    check(arguments, device)

    def too_large(asked: str) -> OutOfMemory:
        return OutOfMemory(
            f"--batch-size {arguments.batch_size} does not fit in memory: {asked} was asked for "
            "beyond it; take a smaller one"
        )

    with trainer.memory_failure_as(too_large):
        ready = prepare(arguments, device)
        return profile(ready) if arguments.profile_one_step else train(ready)


# --- before the first step -----------------------------------------------------------------------


def prepare(arguments: argparse.Namespace, device: torch.device) -> Run:
    """Reads the images, builds the network, takes up a checkpoint; raises WorkshopError."""
    precision = precision_of(arguments, device)
    if arguments.amp and device.type == "cpu":
        print("--amp is without effect on the CPU", file=sys.stderr)
    saved = step.read_checkpoint(arguments.resume) if arguments.resume else None
    for name in ("lr", "warmup"):
        if saved and getattr(arguments, name) is None:
            setattr(arguments, name, saved["settings"][name])
    for folder, flag in ((arguments.out_dir, "--out-dir"), (arguments.output_dir, "--output-dir")):
        results.prepare_folder(folder, flag)
    dataset = data.load(arguments.dataset, arguments.data)
    reference = gate.Reference(arguments, dataset, device, lambda epoch: arguments.seed)
    if not reference.epoch_steps:
        raise WorkshopError(
            f"--batch-size {arguments.batch_size}: an epoch of {dataset.name} has "
            f"{reference.epoch_images} images"
        )
    batches = Batches(
        dataset.train, arguments.batch_size, reference.epoch_images, dataset.flips, device,
        arguments.workers, arguments.data_on_gpu,
    )  # fmt: skip
    problem = Problem(
        Schedule(reference.highest_rate, reference.warmup, reference.total),
        arguments.label_smoothing, dataset.mean, dataset.std,
    )  # fmt: skip
    variant = variant_of(arguments, precision.name)
    set_arithmetic(precision.name)
    torch.manual_seed(arguments.seed)
    model = step.build(arguments.model)
    training = Training(model, variant, problem, device)
    settings = {name: getattr(arguments, name) for name in _SAME_ON_RESUME}
    settings |= {"lr": reference.highest_rate, "warmup": reference.warmup}
    settings |= {"dataset": dataset.name, "precision": precision.name}
    record = new_run(arguments, dataset.name, variant, device)
    record.options |= settings
    record.flops_per_step = shared.flops_per_image(model, 32) * arguments.batch_size
    ready = Run(arguments, dataset, batches, training, record, settings, [])
    if saved:
        _resume(ready, saved)
    check = gate.TrainingCheck(reference, precision.name, training.done)
    ready.turn = Turn(arguments.candidate, check)
    return ready


def _resume(ready: Run, saved: dict[str, Any]) -> None:
    path, epochs = ready.arguments.resume, ready.arguments.epochs
    shared.compare_settings(f"--resume {path}", saved["settings"], ready.settings)
    step.restore(path, saved, ready.training)
    ready.epoch, ready.best_accuracy = saved["epoch"], saved["best_accuracy"]
    ready.history = saved["history"]
    ready.record.options["resumed_after_epoch"] = ready.epoch
    if ready.epoch >= epochs:
        raise WorkshopError(
            f"--resume {path}: {ready.epoch} epochs are done, --epochs {epochs} leaves nothing "
            "to do; give more"
        )


def variant_of(arguments: argparse.Namespace, precision: str) -> Variant:
    return Variant(precision, arguments.channels_last, arguments.compile, arguments.cuda_graph)


def new_run(
    arguments: argparse.Namespace,
    dataset: str,
    variant: Variant,
    device: torch.device,
    session: str = "",
    command: Sequence[str] = (),
) -> LabRun:
    """A record of a run that has not measured yet."""
    where = "data on the GPU" if device.type == "cuda" else "data on the device"
    plural = "" if arguments.workers == 1 else "s"
    source = where if arguments.data_on_gpu else f"{arguments.workers} worker{plural}"
    return lab_record.begin(
        device,
        variant.precision,
        session,
        ("--output-dir", "--out-dir", "--data", "--resume"),
        command,
        lab=LAB,
        subject=f"{arguments.model}, {dataset}, batch {arguments.batch_size}, training",
        variant=f"{variant.label}, {source}",
        unit="images",
        units_per_step=arguments.batch_size,
        options={
            **asdict(variant),
            "asked_for_dataset": arguments.dataset,
            "workers": arguments.workers,
            "data_on_gpu": arguments.data_on_gpu,
        },
    )


# --- epochs --------------------------------------------------------------------------------------


def train(ready: Run) -> int:
    """Trains all epochs, saves, checks, writes the result; the exit status."""
    training, record, arguments = ready.training, ready.record, ready.arguments
    startup.watch_compilers(torch_compile=training.variant.compile)
    if ready.turn.judged:  # trains a step, beside other processes, and takes it back
        before = copy.deepcopy(training.state())
        with untuned(training.variant.precision):
            training.step(*next(ready.batches.epoch(arguments.seed, 0)))
        training.load(before)
        ready.turn.wait()
    clock, losses = Clock(training.device, ready.turn), list[Tensor]()
    record.step_ms = clock.step_ms
    first, steps = ready.epoch, ready.batches.steps
    print(_headline(ready), flush=True)
    start = time.perf_counter()
    while ready.epoch < arguments.epochs:
        _epoch(ready, clock, losses)
        _end_epoch(ready, clock.step_ms[-steps:], torch.stack(losses[-steps:]).tolist())
    record.setup_s["training"] = time.perf_counter() - start
    return _finish(ready, losses, ready.epoch - first)


def _headline(ready: Run) -> str:
    r, steps, rate = ready.record, ready.batches.steps, ready.training.problem.schedule.highest
    chosen = ready.arguments.lr is None and ready.dataset.name == "digits"
    compiles = "\nthe first step compiles: minutes, the first time"
    return (
        f"{r.subject}: {r.variant}, on {r.device['name']}\n"
        f"epochs: {ready.arguments.epochs}, of {steps} steps each with "
        f"{(r.flops_per_step or 0) / 1e12:.3f} TFLOP\n"
        f"highest learning rate: {rate:g}{' (the default for digits)' * chosen}"
    ) + compiles * ready.training.variant.compile


def _epoch(ready: Run, clock: Clock, losses: list[Tensor]) -> None:
    """Trains one epoch; a step's time has the wait for its batch in it."""
    training, steps = ready.training, ready.batches.steps

    def go() -> dict[str, Any]:
        ready.turn.answer(partial(_show, ready), ready.record)
        return clock.start().values

    def stop() -> None:
        clock.stop({"losses": torch.stack(losses[len(clock.step_ms) :])})

    training.model.train()
    drawn = go()
    batches = ready.batches.epoch(drawn["seed"], ready.epoch)
    name, judged = f"epoch {ready.epoch + 1}", ready.turn.judged
    for images, labels in tables.tracked(batches, name, steps, quiet=judged):
        losses.append(training.step(images, labels))
        clock.mark()
        if training.done == drawn["until"] and training.done % steps:
            stop()
            drawn = go()
    stop()


def _show(ready: Run, show: str) -> Shown:
    """The state after the newest step, or the test images' logits."""
    if show == "test logits":
        assert ready.test_logits is not None
        return {"logits": ready.test_logits.float()}, {}
    training = ready.training
    return shown(training.model, training.optimizer, training.scaler)


def _end_epoch(ready: Run, times: list[float], losses: list[float]) -> None:
    """Tests, prints the epoch's line, saves what is to be saved."""
    training, test = ready.training, ready.dataset.test
    parts = [training.evaluate(images).cpu() for images in test.images.split(TEST_BATCH)]
    ready.test_logits = torch.cat(parts)
    correct = int((ready.test_logits.argmax(1) == test.labels).sum())
    ready.epoch += 1
    line = {
        "epoch": float(ready.epoch),
        "loss": sum(losses) / len(losses),
        "test_accuracy": correct / len(test.labels),
        "images_per_s": len(times) * ready.arguments.batch_size / sum(times) * 1e3,
        "learning_rate": training.problem.schedule.at(training.done - 1),
    }
    ready.history.append(line)
    print(
        f"epoch {ready.epoch}/{ready.arguments.epochs}  loss {line['loss']:.4f}  "
        f"test accuracy {line['test_accuracy']:.2%}  {line['images_per_s']:,.0f} images/s  "
        f"learning rate {line['learning_rate']:.5f}",
        flush=True,
    )
    best = line["test_accuracy"] > ready.best_accuracy
    ready.best_accuracy = max(ready.best_accuracy, line["test_accuracy"])
    every = ready.arguments.save_every
    if best or (every and ready.epoch % every == 0):
        content = step.checkpoint(
            training,
            settings=ready.settings,
            epoch=ready.epoch,
            best_accuracy=ready.best_accuracy,
            history=ready.history,
        )
        names = {"best.pt": best, f"epoch_{ready.epoch}.pt": every and ready.epoch % every == 0}
        for name in (name for name, wanted in names.items() if wanted):
            step.save_file(ready.path(name), content)


def _finish(ready: Run, losses: list[Tensor], epochs: int) -> int:
    """Saves weights and curves, answers for the run and writes its result; the exit status.

    Args:
        epochs: how many this run has trained.
    """
    training, record, device = ready.training, ready.record, ready.training.device
    weights = {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}
    step.save_file(ready.path("final_weights.pt"), weights)
    curves = {name.replace("_", " "): [name] for name in _CURVES}
    shared.draw_curves(record.subject, ready.history, curves, ready.path("curves.png"))
    steps = ready.batches.steps
    settling = record.step_ms[: steps if epochs > 1 else min(SETTLING_STEPS, steps - 1)]
    record.setup_s |= {"compile": startup.compile_seconds(), "warm_up": sum(settling) / 1e3}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        parts = memory.break_down(peak, training.model, training.optimizer, "allocator")
        record.memory_mb = parts
    record.losses = results.finite(torch.stack(losses).tolist())
    record.metrics |= {
        "test_accuracy": ready.history[-1]["test_accuracy"],
        "best_accuracy": ready.best_accuracy,
        "epochs": ready.epoch,
        "images_per_s_last_epoch": ready.history[-1]["images_per_s"],
    }
    torch.cuda.empty_cache()  # the judge's network has the same device
    print("gate: training some of the steps again, in fp32 ...", flush=True)
    ready.turn.answer(partial(_show, ready), record)
    time_epochs(record, record.step_ms, epochs)
    dtype = PRECISIONS[training.variant.precision].autocast_dtype
    record.ceiling_tflops = hardware.measure_matmul_tflops(device, dtype)
    record.plausibility = labs.implausible(record)
    passed = record.gate.status != "fail"
    record.status = "complete" if passed else "gate failed"
    if ready.turn.judged:
        ready.turn.tell(record)
    else:
        path = records.path_in(ready.arguments.output_dir, record.session)
        records.save(record, path)
        _summary(ready, path)
    return errors.DONE if passed else errors.ANSWER_IS_NO


def time_epochs(record: LabRun, times: list[float], epochs: int) -> None:
    """Fills in the times of the steps: of several epochs without the first, of one without the
    first steps, in which memory, compilers and a graph settle."""
    record.single_step_ms = times
    record.step_ms = shared.epoch_means(times, epochs)[1:]
    if epochs == 1:
        record.step_ms = shared.epoch_means(times[min(SETTLING_STEPS, len(times) - 1) :], 1)


def _summary(ready: Run, path: Path) -> None:
    record = ready.record
    if record.gate.status == "fail":
        print(f"FAIL: {'; '.join(record.gate.failures)}")
    else:
        ms = median(record.step_ms)
        rate, tflops = record.units_per_step / ms * 1e3, (record.flops_per_step or 0) / ms / 1e9
        print(
            f"pass (against {record.gate.reference}); {ms:.2f} ms a step: {rate:,.0f} images/s, "
            f"{tflops:.2f} TFLOP/s, data loading included"
        )
        for sentence in record.plausibility:
            print(f"IMPLAUSIBLE: {sentence}")
    print(f"test accuracy {record.metrics['test_accuracy']:.2%} on {ready.dataset.name}, "
          f"best {ready.best_accuracy:.2%}; {record.setup_s['training']:.1f} s")  # fmt: skip
    print(f"Written: {path}, and to {ready.arguments.out_dir}: {ready.path('*').name}")


# --- the profiled step ---------------------------------------------------------------------------


def profile(ready: Run) -> int:
    """Runs up to the asked-for iteration and marks it: a range for who reads the profile, and the
    profiler's start and stop for the tool, which collect what other threads launch too, as autograd
    does in the backward pass."""
    arguments, training = ready.arguments, ready.training
    wanted = arguments.warmup_iters + arguments.profile_iter
    print(f"{_headline(ready)}\nwarm-up: {wanted - 1} iterations ...", flush=True)
    training.model.train()
    stream = (
        batch for epoch in itertools.count() for batch in ready.batches.epoch(arguments.seed, epoch)
    )
    for _, batch in zip(range(wanted - 1), stream, strict=False):
        training.step(*batch)
    images_, labels = next(stream)
    on_gpu = training.device.type == "cuda"
    range_ = markers.for_vendor_tools(training.device)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    with range_(STEP):
        loss = training.step(images_, labels, nullcontext if arguments.cuda_graph else range_)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    if not math.isfinite(float(loss)):
        raise WorkshopError(f"the loss is {float(loss)}: take a smaller --lr")
    ready.record.status = "profiled"
    ready.record.losses = results.finite([float(loss)])
    path = records.add(ready.record, arguments.output_dir)
    print(
        f"Profiled iteration {wanted}, in the range {STEP}: {arguments.batch_size} images, loss "
        f"{float(loss):.4f}.\nWritten: {path}"
    )
    return errors.DONE
