"""Measures a training loop that waits for its images, and what makes it faster, rung by rung.

    python measure_pipeline.py --steps all
    python measure_pipeline.py --steps 1-worker n-workers on-device --workers 4 --open-ms 2
    python measure_pipeline.py --steps rates
    python measure_pipeline.py --steps accuracy --epochs 20

Each rung changes one thing and runs in separate processes, which alternate with the others'. It
gets a throughput only if it trains on the plain loop's images, to the plain loop's losses and
weights.
"""

import argparse
import functools
import itertools
import math
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs import shared
from labs.data_pipeline import (
    formats,
    gate,
    make_dataset,
    measure_rung,
    rungs,
    train_and_test,
)
from labs.data_pipeline.formats import FORMATS, PACKED, BadData, Folder
from labs.data_pipeline.loop import Loop
from labs.data_pipeline.measure_rung import LAB, cores
from workshop import errors, labs, results
from workshop.arguments import count, parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import studies
from workshop.judge.pipe import Closed
from workshop.labs import LabRow, LabRun
from workshop.run import deterministic, hardware
from workshop.show import lab_table
from workshop.tables import Line, Table, number, tracked

RATES, ACCURACY = "rates", "accuracy"
MOST_OPEN_MS = 1e4
LARGE_SIDE = 224
DEFAULTS = {  # on a GPU, on a CPU
    "batch_size": (128, 64),
    "iterations": (None, 8),
    "images": (50_000, make_dataset.DIGITS),
    "resnet_images": (4096, 16),
    "resnet_batch_size": (128, 4),
}


def build_parser() -> argparse.ArgumentParser:
    names = textwrap.fill(f"rungs: {', '.join(rungs.BY_NAME)}", 98, break_on_hyphens=False)
    parser = shared.new_parser(__doc__, "a gate or a rung failed", f"{names}\n\n")
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--steps", nargs="+", choices=("all", RATES, ACCURACY, *rungs.BY_NAME), default=["all"],
        metavar="NAME",
        help="all (default), rungs by name, rates (how many workers a model wants), or accuracy (a "
        "training with a test after each epoch)")  # fmt: skip
    number("--workers", help="where a rung has many (default: the cores)")
    number("--batch-size", help="images a step (default 128, CPU 64)")
    number("--iterations", help="steps of an epoch, at most (default: all, CPU 8)")
    number("--epochs", default=3, help="that are timed, or of the accuracy (default 3)")
    shared.add_repeats(add)
    add("--seed", type=int, default=42, help="of weights, order and crops (default 42)")
    add(deterministic.FLAG, action="store_true", help=deterministic.HELP)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    shared.add_output_dir(add, LAB)
    for flag in ("--rung", "--folder"):  # what one process measures
        add(flag, help=argparse.SUPPRESS)
    add("--profile-dir", type=Path, help=argparse.SUPPRESS)
    add("--candidate", action="store_true", help=argparse.SUPPRESS)
    add = parser.add_argument_group("images").add_argument
    number = partial(add, type=count, metavar="N")
    number("--images", help="digits that are made (default 50,000, CPU 1,797)")
    number("--size", help="their side in pixels (default 32)")
    number("--resnet-images", help=f"of side {LARGE_SIDE}, for ResNet-50 (default 4,096, CPU 16)")
    number("--resnet-batch-size", help="default 128, CPU 4")
    add("--dataset-dir", type=Path, metavar="FOLDER",
        help="a set that make_dataset.py wrote, for all rungs, in place of these")  # fmt: skip
    add("--open-ms", type=float, default=0.0, metavar="X",
        help="slow storage, simulated: each open of a file takes X ms longer "
        "(default 0)")  # fmt: skip
    add("--local-dir", type=Path, metavar="FOLDER", default=Path(tempfile.gettempdir()),
        help="where the rungs local-* copy their files, and delete them at the end "
        "(default: $TMPDIR)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures from a command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: run(arguments), interrupted="interrupted: what was measured is saved"
    )


def run(arguments: argparse.Namespace) -> int:
    errors.require("rich", "PIL")
    device = hardware.get_device(arguments.device)
    if arguments.dataset_dir and (arguments.images or arguments.size or arguments.resnet_images):
        raise WorkshopError("--dataset-dir has its own images: leave out their number and size")
    if not 0 <= arguments.open_ms <= MOST_OPEN_MS:
        limits = f"it must lie between 0 and {MOST_OPEN_MS:,.0f}"
        raise WorkshopError(f"--open-ms {arguments.open_ms}: {limits}")
    if not arguments.local_dir.is_dir():
        raise WorkshopError(f"--local-dir {arguments.local_dir} is not a folder")
    make_dataset.check_seed(arguments.seed)
    defaults = {name: pair[device.type != "cuda"] for name, pair in DEFAULTS.items()}
    if ACCURACY in arguments.steps:
        defaults["iterations"] = None
    for name, value in ({"size": 32, "workers": cores()} | defaults).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.rung:
        if arguments.deterministic:
            deterministic.switch_on()
        return measure_rung.measure(arguments, arguments.rung, Path(arguments.folder))
    if RATES in arguments.steps:
        return show_rates(arguments, device)
    if ACCURACY in arguments.steps:
        return show_accuracy(arguments, device)
    return measure_all(arguments, device)


# --- the images ----------------------------------------------------------------------------------


def _digits(arguments: argparse.Namespace, large: bool) -> tuple[int, int]:
    """The number of the images that are made, and their side."""
    return (arguments.resnet_images, LARGE_SIDE) if large else (arguments.images, arguments.size)


def _folder(arguments: argparse.Namespace, large: bool) -> Path:
    images, size = _digits(arguments, large)
    return arguments.dataset_dir or make_dataset.FOLDER / "data" / f"digits_{images}_{size}"


def prepare(arguments: argparse.Namespace, large: bool, keys: set[str]) -> Path:
    """The folder of the images in these formats: what is missing is written first, and what is
    there is read once. Raises WorkshopError: an image or a packed file is damaged, or there are too
    few images."""
    folder = _folder(arguments, large)
    if not arguments.dataset_dir:
        images, size = map(str, _digits(arguments, large))
        asked = ["--images", images, "--size", size]
        make_dataset.make(make_dataset.build_parser().parse_args(asked))
    elif "sha256" not in formats.manifest(folder):
        raise WorkshopError(
            f"--dataset-dir {folder}: no images of make_dataset.py; make a set of yours with "
            "make_dataset.py --from IMAGES --output-dir SET"
        )
    elif damaged := make_dataset.find_damaged(folder):
        how = formats.how_to_make(folder)
        raise BadData(f"{damaged} is damaged or missing: run {how} again")
    for key in sorted(keys & {*PACKED}):
        if not (folder / FORMATS[key].file_name).exists():
            make_dataset.pack(folder, FORMATS[key])
            continue
        packed = FORMATS[key](folder)
        for index in tracked(range(len(packed)), f"reading {key}"):
            packed[index]
    flag = "--resnet-batch-size" if large else "--batch-size"
    there, batch = len(Folder(folder)), measure_rung.batch_size(arguments, large)
    if batch > there:
        raise WorkshopError(f"{flag} {batch}: there are {there:,} images in {folder}")
    return folder


# --- the rungs -----------------------------------------------------------------------------------


def chosen(arguments: argparse.Namespace, device: torch.device) -> list[str]:
    """The rungs that are asked for, each with the one that it is compared with, in their order."""
    if "all" not in arguments.steps:
        names = {*arguments.steps, *map(rungs.first, arguments.steps)}
        return [name for name in rungs.BY_NAME if name in names]
    if device.type == "cuda":
        return list(rungs.BY_NAME)
    print("Left out: ResNet-50, which takes a CPU minutes; --steps resnet50 measures it")
    return [name for name in rungs.BY_NAME if not rungs.is_large(name)]


def measure_all(arguments: argparse.Namespace, device: torch.device) -> int:
    folder = results.prepare_folder(arguments.output_dir)
    names, reasons = chosen(arguments, device), {}
    most = max(rungs.settings(name, arguments.workers).workers for name in names)
    if most > cores():
        print(
            f"WARNING: {most} workers for {cores()} cores: they take turns on these, and with the "
            "training process; more of them prepare nothing sooner, unless they wait for storage",
            file=sys.stderr,
        )
    for name in names:
        try:
            rungs.check(name, device, arguments.workers)
        except NotOnThisMachine as error:
            reasons[name] = str(error)
    left = [name for name in names if name not in reasons]
    folders = {}
    for large, own in itertools.groupby(left, rungs.is_large):
        keys = {rungs.settings(name, 1).format for name in own}
        folders[large] = prepare(arguments, large, keys)
    session = results.new_session()
    profiles = folder / "profiles" / session

    @functools.lru_cache(len(folders))  # those of one repeat
    def plain(large: bool, repeat: int) -> gate.PlainLoop:
        return gate.PlainLoop(measure_rung.asked(arguments, large, folders[large], device))

    def plan_of(name: str, repeat: int) -> studies.Plan:
        more = [] if repeat else ["--profile-dir", str(profiles / name)]
        return plan(arguments, name, plain(rungs.is_large(name), repeat), session, more)

    def skipped(name: str) -> LabRun:
        made = _folder(arguments, rungs.is_large(name))
        run = measure_rung.new_run(arguments, name, made, device, session)
        return studies.Plan([], [run], folder).skipped(reasons[name])

    measured = shared.alternating(left, arguments.repeats, plan_of, arguments.jobs)
    runs, interrupted = shared.told(itertools.chain(map(skipped, reasons), measured), _outcome)
    groups = [sorted(group, key=rungs.place) for group in labs.newest(runs)]
    rows = [row for group in groups for row in group]
    shown = [table for group in groups for table in (*speed_tables(group), rates_table(group))]
    shared.show(shown, rows, folder / "pipeline.md")
    _show_profiles(rows, folder, profiles)
    return shared.status_of(rows, interrupted)


def plan(
    arguments: argparse.Namespace,
    name: str,
    plain: gate.PlainLoop,
    session: str,
    more: Sequence[str] = (),
) -> studies.Plan:
    """A process that measures a rung; `more` are further words of its command."""
    folder, device = plain.asked.folder, plain.asked.device
    flags = {"steps": name, "rung": name, "folder": folder, "device": device}
    for flag in (
        "workers", "batch-size", "resnet-batch-size", "epochs", "seed", "open-ms", "local-dir",
    ):  # fmt: skip
        flags[flag] = getattr(arguments, flag.replace("-", "_"))
    if arguments.iterations:
        flags["iterations"] = arguments.iterations
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    words += [deterministic.FLAG] * arguments.deterministic
    command = [__file__, *words, *more]
    record = measure_rung.new_run(arguments, name, folder, device, session, command)

    def take_times(run: LabRun, spans: studies.Spans) -> None:
        (times,), asked = spans, arguments.epochs * plain.images.steps
        if len(times) != asked:
            raise Closed(f"the process told {len(times)} times of {asked} steps")
        run.step_ms = shared.epoch_means(times, arguments.epochs)

    check = gate.Check(plain, record)
    return studies.Plan(
        [sys.executable, *command], [record], arguments.output_dir, take_times, check
    )


def _outcome(run: LabRun) -> str:
    copied = run.metrics.get("copy_s")
    told = "" if copied is None else f"; copied in {copied:.2f} s, before the clock"
    return f"{shared.images_and_gate(run)}; waits {run.metrics['wait_share']:.0%}{told}"


# --- what is printed -----------------------------------------------------------------------------


def _show_profiles(rows: list[LabRow], folder: Path, profiles: Path) -> None:
    """Prints what bounds each rung, and draws where the time of its steps goes. A red one has no
    times here either."""
    found = [row for row in rows if any(map(measure_rung.mean_step, row.runs))]
    for row in found:
        name = row.first.variant
        print(f"{name}: {measure_rung.advice(profiles / name)}")
    for model, own in itertools.groupby(
        found, lambda row: rungs.settings(row.first.variant, 1).model
    ):
        picture = folder / f"ladder_{model}.png"
        measure_rung.draw_ladder(list(own), picture)
        print(f"Written: {picture}")
    if found:
        print(f"Written: of each rung {profiles}/RUNG/{measure_rung.PICTURE}")


def speed_tables(rows: Sequence[LabRow]) -> list[Table]:
    """Speed, and on a GPU memory and the share of its peak."""
    speed, cost = lab_table.of_labs([rows]).tables
    if any(row.peak_memory_mb for row in rows):
        return [speed, cost]
    return [replace(speed, notes=cost.notes)]


def rates_table(rows: Sequence[LabRow]) -> Table:
    """The rate of each part alone, by rung: the median of its processes."""
    columns = {
        "from storage": "storage_per_s",
        "1 core reads": "read_per_s",
        "decodes": "decode_per_s",
        "prepares": "worker_per_s",
        "the model": "model_per_s",
    }
    lines = [
        Line([row.label, *(number(row.metric(key), ",.0f") for key in columns.values()),
              number(row.metric("wait_share"), ".0%"),
              number(row.metric("kernel_share") or None, ".0%")])
        for row in rows
        if row.times
    ]  # fmt: skip
    notes = [
        "from storage: one core, files that are not in memory; --open-ms is in `prepares` alone",
        "waits: the share of whole epochs in which the loop waits for its next batch",
        "GPU busy: the share of the profiled steps, within an epoch, with a kernel running",
    ]
    notes += [
        f"{row.label}: the copy took {number(row.metric('copy_s'), '.2f')} s, once, before the "
        "clock: it is not in the times"
        for row in rows
        if row.metric("copy_s") is not None
    ]
    header = ("images/s of a part", *columns, "waits", "GPU busy")
    return Table("alone", header, lines, notes, continues=True)


def show_rates(arguments: argparse.Namespace, device: torch.device) -> int:
    """Prints how fast one worker and the model are, and the number of workers that follows."""
    settings = rungs.settings("1-worker", 1)
    folder = prepare(arguments, False, {settings.format})
    images, source = measure_rung.open_images(settings, folder, arguments.open_ms)
    loop = Loop(settings, source, device, arguments.batch_size, classes=images.classes)
    worker, model = measure_rung.worker_rate(source, loop), measure_rung.model_rate(loop)
    stored = measure_rung.storage_rate(images)
    if stored:
        print(f"from storage, files that are not in memory, one core reads {stored:,.0f} images/s")
    print(
        f"one core reads {measure_rung.read_rate(images):,.0f} images/s and decodes "
        f"{measure_rung.decode_rate(images):,.0f}\n"
        f"one worker prepares {worker:,.0f} images/s: it reads, decodes, crops, normalises\n"
        f"the model takes {model:,.0f} images/s of batches that lie on the device\n"
        f"workers that follow: {math.ceil(model / worker)}, on {cores()} cores"
    )
    return errors.DONE


def show_accuracy(arguments: argparse.Namespace, device: torch.device) -> int:
    """Trains and tests on images that are held out."""
    errors.require("matplotlib")
    output = results.prepare_folder(arguments.output_dir)
    train_and_test.run(
        Folder(prepare(arguments, False, set())), device,
        epochs=arguments.epochs, batch_size=arguments.batch_size, steps=arguments.iterations,
        seed=arguments.seed, target=output / "accuracy.png",
    )  # fmt: skip
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
