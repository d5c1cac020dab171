"""One rung in this process: opens the images, trains, shows the judge what it did, measures each
part alone, profiles some steps, and writes the result file."""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from labs import shared
from labs.data_pipeline import gate, peers, rungs
from labs.data_pipeline.formats import FORMATS, Images
from labs.data_pipeline.loop import Batch, Items, Loop, Settings, Source, Step
from labs.data_pipeline.reference import Asked
from workshop import errors, labs, records, results
from workshop.errors import NotOnThisMachine, OutOfMemory, WorkshopError
from workshop.judge import lab_record
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRow, LabRun
from workshop.profilers import advisor, kernel_file, step_time
from workshop.profilers.load import load
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.step_time import StepTime
from workshop.run import hardware, memory, startup, trainer
from workshop.run.precision import set_arithmetic
from workshop.show import step_pictures

LAB = "data_pipeline"
SHARED_MEMORY = Path("/dev/shm")
HIDDEN = ("--output-dir", "--dataset-dir", "--local-dir", "--rung", "--folder", "--profile-dir")
_OUT_OF_SHARED_MEMORY = "Bus error|unable to (allocate|write|resize) .*shm|No space left on device"


def measure(arguments: argparse.Namespace, name: str, folder: Path) -> int:
    """Measures a rung on the dataset of that folder; the exit status."""
    device = hardware.get_device(arguments.device)
    record = new_run(arguments, name, folder, device)
    rungs.check(name, device, arguments.workers)
    settings, size = rungs.settings(name, arguments.workers), record.units_per_step
    set_arithmetic("fp32")
    startup.watch_compilers(torch_compile=settings.compile)

    def too_large(asked: str) -> OutOfMemory:
        return OutOfMemory(f"{name}: out of memory: {asked}; take a smaller batch than {size}")

    plain = gate.PlainLoop(asked(arguments, rungs.is_large(name), folder, device))
    turn = Turn(arguments.candidate, gate.Check(plain, record))
    with contextlib.ExitStack() as stack:
        stack.enter_context(trainer.memory_failure_as(too_large))
        open_ms = arguments.open_ms
        if settings.local:
            turn.wait()  # the copy is timed alone
            copied = peers.local_copy(
                folder / FORMATS[settings.format].file_name,
                arguments.local_dir, open_ms, max(1, settings.workers),
            )  # fmt: skip
            folder, record.metrics["copy_s"] = stack.enter_context(copied)
            open_ms = 0.0
        images, source = open_images(settings, folder, open_ms)
        loop = Loop(
            settings, source, device, size, arguments.iterations, images.classes, arguments.seed
        )
        if not settings.local:
            turn.wait()
        record.metrics |= {  # of one core
            "storage_per_s": storage_rate(images),  # first: what is mapped can't be dropped
            "read_per_s": read_rate(images),
            "decode_per_s": decode_rate(images),
            "worker_per_s": worker_rate(source, loop),
        }
        turn.answer(train(record, loop, arguments.epochs, turn).show, record)
        set_arithmetic("fp32")  # as before: a judge in this process changes it
        record.metrics["model_per_s"] = model_rate(loop)  # trains on
        if arguments.profile_dir:
            profile_rung(loop, loop.order.epoch + 1, record, arguments.profile_dir)
    record.flops_per_step = size * shared.flops_per_image(loop.model, loop.order.size)
    record.plausibility = labs.implausible(record)
    red = record.gate.status == "fail"
    record.status = "gate failed" if red else "complete"
    if turn.judged:
        turn.tell(record)
    else:
        records.add(record, arguments.output_dir)
    if arguments.profile_dir:
        records.write(record, arguments.profile_dir / RUN_FILE)
    return errors.ANSWER_IS_NO if red else errors.DONE


def batch_size(arguments: argparse.Namespace, large: bool) -> int:
    return int(arguments.resnet_batch_size if large else arguments.batch_size)


def asked(arguments: argparse.Namespace, large: bool, folder: Path, device: torch.device) -> Asked:
    """The training that the rungs of a network have to do."""
    return Asked(
        folder, device, "resnet50" if large else "cnn", batch_size(arguments, large),
        steps=arguments.iterations, epochs=1 + arguments.epochs, seed=arguments.seed,
    )  # fmt: skip


def new_run(
    arguments: argparse.Namespace,
    name: str,
    folder: Path,
    device: torch.device,
    session: str = "",
    command: Sequence[str] = (),
) -> LabRun:
    """A record of a rung that has not been measured yet."""
    settings = rungs.settings(name, arguments.workers)
    batch = batch_size(arguments, rungs.is_large(name))
    subject = f"{settings.model}, {folder.name}, batch {batch}"
    if arguments.open_ms:
        subject += f", {arguments.open_ms:g} ms at each open (simulated)"
    precision = "fp16" if settings.amp else "fp32"
    options = asdict(settings) | {"precision": precision, "cores": cores()}
    options |= {"open_ms": arguments.open_ms, "seed": arguments.seed}
    return lab_record.begin(
        device, precision, session, HIDDEN, command,
        lab=LAB, subject=subject, variant=name, unit="images", units_per_step=batch,
        baseline=rungs.first(name), options=options,
    )  # fmt: skip


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_images(settings: Settings, folder: Path, open_ms: float) -> tuple[Images, Source]:
    """The images of the format; and those that the loader gets, of a peer or slower to open."""
    images = FORMATS[settings.format](folder, settings.decoder)
    source: Images | peers.TorchvisionImages = images
    if settings.reader == "torchvision":
        source = peers.TorchvisionImages(folder)
    if not open_ms:
        return images, source
    if settings.reader == "webdataset":
        raise NotOnThisMachine("--open-ms does not reach WebDataset, which opens its files itself")
    return images, peers.SlowOpens(source, open_ms)


# --- the timed epochs ----------------------------------------------------------------------------


@dataclass
class Seen:
    """The course of a rung, taken from its loop while it ran."""

    loop: Loop
    kept: dict[int, int] = field(default_factory=dict)
    """The numbers of the steps whose inputs are kept in part, and the first image of each part."""
    losses: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    """fp16's loss scale, first and after each step."""
    delivered: list[list[Tensor]] = field(default_factory=list)
    """The images' numbers of each step, for each epoch."""
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scales.append(torch.tensor(self.loop.scaler.get_scale(), device=self.loop.device))

    def see(self, step: Step) -> None:
        """To be called after every step; does not wait for the device."""
        self.delivered[-1].append(step.indices)
        if self.loop.settings.amp:
            scale = self.loop.scaler._get_scale_async()  # get_scale waits
            assert scale is not None
            self.scales.append(scale.clone())
        number = len(self.losses)
        self.losses.append(step.loss)
        if (start := self.kept.get(number)) is not None:
            for name, tensor in (("inputs", step.inputs), ("labels", step.labels)):
                self.parts[f"{name} {number}"] = tensor[start : start + gate.PART].clone()

    def show(self) -> Shown:
        """The course as gate.Course reads it; to be called before the loop trains on."""
        scales, weights = torch.stack(self.scales), self.loop.model.named_parameters()
        course = {
            "scales": scales if len(scales) > 1 else scales.expand(1 + len(self.losses)),
            "delivered": torch.cat([step for steps in self.delivered for step in steps]),
            **self.parts,
            **{f"weight {name}": weight.detach() for name, weight in weights},
        }
        sizes = [[*map(len, steps)] for steps in self.delivered]
        return {name: tensor.cpu() for name, tensor in course.items()}, {"sizes": sizes}


def train(record: LabRun, loop: Loop, epochs: int, turn: Turn) -> Seen:
    """Trains an epoch in which compilers, workers and memory settle, then those that are timed,
    whose numbers come when the clock starts."""
    seen, waited = Seen(loop), Waits(loop.loader)
    on_gpu = loop.device.type == "cuda"

    def timed(count: int, turn: Turn) -> list[float]:
        clock = Clock(loop.device, turn)
        drawn = clock.start().values
        seen.kept = dict(drawn.get("kept", ()))
        first = drawn.get("first", 0)
        if loop.settings.ahead:
            loop.order.last = first + count - 1
        for epoch in range(first, first + count):
            loop.order.epoch = epoch
            seen.delivered.append([])
            for number, step in enumerate(loop.train(waited, epoch), 1):
                seen.see(step)
                if number < loop.order.steps:
                    clock.mark()
            clock.mark()  # an epoch's time has the end of its workers
        # A number for each weight, which its last update changes, too.
        norms = [w.detach().norm(dtype=torch.float64) for w in loop.model.parameters()]
        clock.stop({"losses": torch.stack(seen.losses).float(), "norms": torch.stack(norms)})
        return clock.step_ms

    settling = timed(1, Turn(judged=False))
    if on_gpu and not loop.settings.graph:  # whose capture starts the count
        torch.cuda.reset_peak_memory_stats(loop.device)
    waited.seconds = 0.0
    times = timed(epochs, turn)
    record.metrics["wait_share"] = waited.seconds / (sum(times) / 1e3)
    record.step_ms = shared.epoch_means(times, epochs)
    record.losses = results.finite(torch.stack(seen.losses).tolist())
    record.setup_s |= {"warm_up": sum(settling) / 1e3, "compile": startup.compile_seconds()}
    record.options |= {"steps_per_epoch": len(times) // epochs, "epochs": epochs}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(loop.device)
        record.memory_mb = memory.break_down(peak, loop.model, loop.optimizer, "allocator")
    return seen


class Waits:
    """A loader's batches, and how long the loop waited for them on the host."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self) -> Iterator[Batch]:
        start = time.perf_counter()
        batches = iter(self.loader)
        try:
            for batch in batches:
                self.seconds += time.perf_counter() - start
                yield batch
                start = time.perf_counter()
        except Exception as error:  # a worker's
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                batches._shutdown_workers()  # garbage collection would take 5 s for each worker
            raise _explained(error) from None


def _explained(error: Exception) -> Exception:
    """A worker that was killed since /dev/shm is full, in a line; others as they are."""
    # The worker's end by a signal is behind the error that its queue is closed.
    if not re.search(_OUT_OF_SHARED_MEMORY, f"{error} {error.__cause__}"):
        return error
    total = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.exists() else 0
    return WorkshopError(
        "a worker ended by a bus error or without room: workers hand their batches over in "
        f"{SHARED_MEMORY}, which holds {total / 1e6:,.0f} MB; take fewer --workers or a smaller "
        "--batch-size, or enlarge it (docker run --shm-size=8g, or mount -o remount,size=8g "
        f"{SHARED_MEMORY})"
    )


# --- the rate of each part alone ------------------------------------------------------------------


SECONDS = 0.5
"""The time for which a rate is measured."""
LEAST_STEPS = 5
STORED_FILES, STORED_BYTES = 500, 2**26
"""How many PNG files, and how much of a packed one, are read from the storage."""


def storage_rate(images: Images) -> float | None:
    """Images a second that one core reads from the storage, in the files' order: they are dropped
    from the system's memory before. None where the system has no way to do that, as macOS. Caches
    of the storage itself, as of a file server, are in it."""
    if not hasattr(os, "posix_fadvise"):
        return None
    pngs = sorted(images.path.glob("*.png"))[:STORED_FILES]
    files = pngs or (sorted(images.path.iterdir()) if images.path.is_dir() else [images.path])
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not yet written can't be dropped
            os.posix_fadvise(file.fileno(), 0, STORED_BYTES, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    read = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            read += len(file.read(STORED_BYTES))
    per_s = read / (time.perf_counter() - start)
    return per_s * len(pngs or images) / sum(path.stat().st_size for path in files)


def read_rate(images: Images) -> float:
    """Images a second whose bytes one core reads: a PNG file's, or the pixels where the format
    keeps these."""
    keeps_pixels = type(images).image is not Images.image
    read: Callable[[int], object] = images.image if keeps_pixels else images.encoded
    return _per_second(read, range(len(images)))


def decode_rate(images: Images) -> float | None:
    """PNG files a second that one core decodes; None for a format that keeps pixels."""
    if type(images).image is not Images.image:
        return None
    some = [images.encoded(index) for index in range(min(len(images), 64))]
    return _per_second(images.decode, some)


def worker_rate(images: Source, loop: Loop) -> float:
    """Images a second that one core makes ready for a batch: all that a worker of this loop does,
    except the way to the training process."""
    items = Items(images, loop.order, prepare=not loop.settings.on_device)
    size = loop.order.batch_size
    keys = list(itertools.islice(loop.order, size * max(1, 256 // size)))
    batches = [keys[start : start + size] for start in range(0, len(keys), size)]
    return size * _per_second(lambda batch: default_collate([items[key] for key in batch]), batches)


def model_rate(loop: Loop) -> float:
    """Images a second of the same loop on one batch that lies on the device. Trains on it."""
    items = Items(loop.images, loop.order, prepare=not loop.settings.on_device)
    keys = itertools.islice(loop.order, loop.order.batch_size)
    batch = [part.to(loop.device) for part in default_collate([items[key] for key in keys])]
    steps = loop.train(itertools.repeat(tuple(batch)), loop.order.epoch)
    for _ in range(LEAST_STEPS):
        next(steps)
    _wait(loop.device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS or count < LEAST_STEPS:
        next(steps)
        count += 1
        if count % 50 == 0:
            _wait(loop.device)  # the loop runs ahead of a GPU
    _wait(loop.device)
    return count * loop.order.batch_size / (time.perf_counter() - start)


def _per_second(work: Callable[..., object], items: Iterable[object]) -> float:
    """Calls a second, on one thread as in a worker; the first one, which opens files, is left
    out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rest = itertools.cycle(items)
        work(next(rest))
        start, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < SECONDS:
            work(next(rest))
            count += 1
        return count / spent
    finally:
        torch.set_num_threads(threads)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- a short profile ------------------------------------------------------------------------------


TRACE, PICTURE = "trace.json.gz", "steps.png"
LEAST_STEPS, MOST_STEPS = 6, 48


def profile_rung(loop: Loop, epoch: int, record: LabRun, folder: Path) -> None:
    """Trains a part of an epoch. The folder gets a trace of its later steps, the hot list and a
    picture; the record gets the share of a step of each of step_time.CATEGORIES.

    The first steps get what the workers prepared ahead. Several times as many steps as workers are
    recorded, since batches come in bursts. An epoch of one step has no profile.
    """
    workers = loop.settings.workers
    wanted = min(max(LEAST_STEPS, 3 * workers), MOST_STEPS)
    ahead = 2 + workers * loop.settings.prefetch
    steps = min(len(loop.images) // loop.order.batch_size, ahead + wanted)
    if steps < 2:  # one warms the profiler up
        return
    results.prepare_folder(folder)
    timed_steps, loop.order.steps = loop.order.steps, steps
    skipped = max(1, steps - wanted)
    shared.record_trace(
        loop.device, loop.epoch(epoch), folder / TRACE, skipped=skipped, recorded=steps - skipped
    )
    loop.order.steps = timed_steps
    table = load(folder / TRACE)
    kernel_file.write(table, folder)
    mean = step_time.mean(table.step_times)
    shares = {f"{name.lower()}_share": ns / mean.ns for name, ns in mean.parts_ns.items()}
    record.metrics |= {**shares, "tensor_share": mean.tensor_share, "profiled_ms": mean.ns / 1e6}
    step_pictures.draw_steps(folder / TRACE, folder / PICTURE, record.variant)


def advice(folder: Path) -> str:
    """The limit of a rung, in a sentence: its wait for data, if there is one."""
    table = kernel_file.read(folder / kernel_file.JSON_FILE)
    record = records.load_run(folder / RUN_FILE)
    found = advisor.advise(table, record)
    first = next((one for one in found if one.finding == "data"), advisor.headline(found))
    return first.sentence if first else ""


def draw_ladder(rows: Sequence[LabRow], target: Path) -> None:
    """A picture of the mean step of each rung that was profiled. All are of one device."""
    found = ((row.first.variant, mean_step(run)) for row in rows for run in row.runs)
    means = [(name, step) for name, step in found if step]
    title = f"Where a step's time goes: {rows[0].device}"
    step_pictures.compare_pictures(means, target, title)


def mean_step(run: LabRun) -> StepTime | None:
    """As `profile_rung` recorded it."""
    length = run.metrics.get("profiled_ms")
    if run.status != "complete" or not isinstance(length, float):
        return None

    def part(name: str) -> float:
        share = run.metrics[f"{name}_share"]
        assert isinstance(share, (int, float))
        return float(share)

    parts_ns = {name: part(name.lower()) * length * 1e6 for name in step_time.CATEGORIES}
    return StepTime(parts_ns, part("tensor") * parts_ns[step_time.KERNEL])
