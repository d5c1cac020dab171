"""One rung in this process: opens the images, trains, shows the judge what it did, and writes the
result file."""

import argparse
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from labs import shared
from labs.data_pipeline import gate, peers, profiling, rates, rungs
from labs.data_pipeline.formats import FORMATS, Images
from labs.data_pipeline.loop import Batch, Loop, Settings, Source, Step
from labs.data_pipeline.reference import Asked
from workshop import errors, labs, records, results
from workshop.errors import NotOnThisMachine, OutOfMemory, WorkshopError
from workshop.judge import lab_record
from workshop.judge.turn import Clock, Shown, Turn
from workshop.labs import LabRun
from workshop.profilers.runner_files import RUN_FILE
from workshop.run import hardware, memory, startup, trainer
from workshop.run.precision import set_arithmetic

LAB = "data_pipeline"
SHARED_MEMORY = Path("/dev/shm")
HIDDEN = ("--output-dir", "--dataset-dir", "--rung", "--folder", "--profile-dir")
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

    with trainer.memory_failure_as(too_large):
        images, source = open_images(settings, folder, arguments.open_ms)
        loop = Loop(
            settings, source, device, size, arguments.iterations, images.classes, arguments.seed
        )
        plain = gate.PlainLoop(asked(arguments, rungs.is_large(name), folder, device))
        turn = Turn(arguments.candidate, gate.Check(plain, record))
        turn.wait()
        record.metrics |= {  # of one core
            "storage_per_s": rates.storage_rate(images),  # first: what is mapped can't be dropped
            "read_per_s": rates.read_rate(images),
            "decode_per_s": rates.decode_rate(images),
            "worker_per_s": rates.worker_rate(source, loop),
        }
        turn.answer(train(record, loop, arguments.epochs, turn).show, record)
        set_arithmetic("fp32")  # as before: a judge in this process changes it
        record.metrics["model_per_s"] = rates.model_rate(loop)  # trains on
        if arguments.profile_dir:
            profiling.profile_rung(loop, loop.order.epoch + 1, record, arguments.profile_dir)
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
    time_epochs(record, times, epochs)
    record.losses = results.finite(torch.stack(seen.losses).tolist())
    record.setup_s |= {"warm_up": sum(settling) / 1e3, "compile": startup.compile_seconds()}
    record.options |= {"steps_per_epoch": len(times) // epochs, "epochs": epochs}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(loop.device)
        record.memory_mb = memory.break_down(peak, loop.model, loop.optimizer, "allocator")
    return seen


def time_epochs(record: LabRun, times: list[float], epochs: int) -> None:
    """A sample is an epoch's time divided by its steps, with the start of its workers: single steps
    come in bursts, as workers finish together, and their median would leave out the wait."""
    steps = len(times) // epochs
    record.step_ms = [sum(times[i : i + steps]) / steps for i in range(0, len(times), steps)]


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
