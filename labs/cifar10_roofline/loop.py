"""A training from the command line: its epochs, what it prints and saves, its result file."""

import argparse
import copy
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labs import shared
from labs.cifar10_roofline import checkpoints, data, gate, request, step
from labs.cifar10_roofline.data import Batches, Dataset
from labs.cifar10_roofline.step import Problem, Schedule, Training, Variant
from workshop import errors, labs, records, results, tables
from workshop.errors import OutOfMemory, WorkshopError
from workshop.gate.steps import shown
from workshop.judge import lab_record
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRun
from workshop.run import hardware, markers, memory, startup, trainer
from workshop.run.precision import PRECISIONS, set_arithmetic, untuned
from workshop.run.timing import median

SETTLING_STEPS = 5
"""Steps that are not in the time of a training of one epoch: in them memory, compilers and a graph
settle. Of several epochs the first one is not in."""
TEST_BATCH = 500
CIFAR10_IMAGES = 50_000
STEP = "train_step"
"""The range of the profiled step."""
_SAME_ON_RESUME = "model epochs batch_size epoch_images lr label_smoothing seed".split()
"""Settings that must match the checkpoint when training resumes."""
_CURVES = ("loss", "test_accuracy", "learning_rate")


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
    device = hardware.get_device(arguments.device)
    request.check(arguments, device)

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
    precision = request.precision_of(arguments, device)
    if arguments.amp and device.type == "cpu":
        print("--amp is without effect on the CPU", file=sys.stderr)
    saved = checkpoints.load(arguments.resume) if arguments.resume else None
    for folder, flag in ((arguments.out_dir, "--out-dir"), (arguments.output_dir, "--output-dir")):
        results.prepare_folder(folder, flag)
    dataset = data.load(arguments.dataset, arguments.data)
    if arguments.warmup is None and saved:
        arguments.warmup = saved["settings"]["warmup"]
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
        Schedule(arguments.lr, reference.warmup, reference.total),
        arguments.label_smoothing, dataset.mean, dataset.std,
    )  # fmt: skip
    variant = variant_of(arguments, precision.name)
    set_arithmetic(precision.name)
    torch.manual_seed(arguments.seed)
    model = step.build(arguments.model)
    training = Training(model, variant, problem, device)
    settings = {name: getattr(arguments, name) for name in _SAME_ON_RESUME}
    settings |= {"dataset": dataset.name, "warmup": reference.warmup, "precision": precision.name}
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
    for sentence in checkpoints.differences(path, saved["settings"], ready.settings):
        print(sentence, file=sys.stderr)
    checkpoints.restore(path, saved, ready.training)
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
        lab=request.LAB,
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
    r, steps = ready.record, ready.batches.steps
    compiles = "\nthe first step compiles: minutes, the first time"
    return (
        f"{r.subject}: {r.variant}, on {r.device['name']}\n"
        f"epochs: {ready.arguments.epochs}, of {steps} steps each with "
        f"{(r.flops_per_step or 0) / 1e12:.3f} TFLOP"
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
    for images, labels in tables.tracked(batches, f"epoch {ready.epoch + 1}", steps):
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
        content = checkpoints.checkpoint(
            training,
            settings=ready.settings,
            epoch=ready.epoch,
            best_accuracy=ready.best_accuracy,
            history=ready.history,
        )
        names = {"best.pt": best, f"epoch_{ready.epoch}.pt": every and ready.epoch % every == 0}
        for name in (name for name, wanted in names.items() if wanted):
            checkpoints.save(ready.path(name), content)


def _finish(ready: Run, losses: list[Tensor], epochs: int) -> int:
    """Saves weights and curves, answers for the run and writes its result; the exit status.

    Args:
        epochs: how many this run has trained.
    """
    training, record, device = ready.training, ready.record, ready.training.device
    weights = {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}
    checkpoints.save(ready.path("final_weights.pt"), weights)
    draw_curves(record.subject, ready.history, ready.path("curves.png"))
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
    ready.turn.answer(partial(_show, ready), record)
    record.single_step_ms = record.step_ms
    time_epochs(record, epochs)
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


def draw_curves(title: str, history: list[dict[str, float]], target: Path) -> None:
    """Writes a PNG of loss, test accuracy and learning rate over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    epochs = [int(line["epoch"]) for line in history]
    for axes, name in zip(figure.subplots(1, 3), _CURVES, strict=True):
        axes.plot(epochs, [line[name] for line in history], marker="o")
        axes.set(xlabel="epoch", ylabel=name.replace("_", " "))
        axes.grid(alpha=0.3)
    with results.atomic_path(target) as path:
        figure.savefig(path, format="png")


def time_epochs(record: LabRun, epochs: int) -> None:
    """A step's time is an epoch's, divided by its steps. The median step would mislead: workers
    deliver in bursts, so that most steps wait for nothing and one waits for all."""
    times = record.single_step_ms
    steps = len(times) // epochs
    timed = [times[i : i + steps] for i in range(steps, len(times), steps)]
    timed = timed or [times[min(SETTLING_STEPS, steps - 1) :]]
    record.step_ms = [sum(epoch) / len(epoch) for epoch in timed]


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
    stands_in = ready.dataset.name != arguments.dataset
    images = CIFAR10_IMAGES if stands_in else len(ready.dataset.train.labels)
    there = arguments.epochs * (images // arguments.batch_size)
    if wanted > there:
        raise WorkshopError(
            f"iteration {wanted} (--warmup-iters {arguments.warmup_iters}, --profile-iter "
            f"{arguments.profile_iter}) never comes: {arguments.epochs} epochs have {there}; give "
            "more --epochs or a smaller --batch-size"
        )
    print(_headline(ready))
    training.model.train()
    # Digits taken in place of CIFAR-10 have fewer steps an epoch: more epochs follow.
    stream = (batch for epoch in count() for batch in ready.batches.epoch(arguments.seed, epoch))
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
