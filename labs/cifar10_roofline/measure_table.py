"""Measures trainings beside each other: the usual ones and the fast one, by network and batch size.

    python measure_table.py --jobs 9
    python measure_table.py --models resnet18 --batch-sizes 256 -- --epochs 1 --data ~/cifar10

Whole epochs with data loading, in alternating processes; speed-ups are over `--amp --workers 4`.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs import shared
from labs.cifar10_roofline import data, gate, loop, request
from workshop import errors, labs, results
from workshop.arguments import count, parse
from workshop.judge import studies
from workshop.labs import LabRun
from workshop.run import hardware, timing
from workshop.show import lab_table

PROGRAM = Path(__file__).with_name("train.py")
Flags = tuple[str, ...]


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags of train.py, for all trainings, go after --. Exit status: 0 done, 1 a gate "
        "or a training failed,\n2 wrong usage, 77 something is missing on this machine, 130 "
        "interrupted.",
    )
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--models", nargs="+", choices=request.MODELS, default=request.MODELS, help="default: both")
    number("--batch-sizes", nargs="+", default=(128, 256, 1024), help="default: 128 256 1024")
    shared.add_repeats(add)
    shared.add_output_dir(add, request.LAB)
    add("flags", nargs="*", metavar="FLAG", help="of train.py")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: _measure(arguments), interrupted="interrupted")


def variants(device: torch.device) -> list[Flags]:
    """The first is the one that the others are compared with."""
    if device.type == "cpu":
        return [("--workers", "2"), ("--channels-last", "--data-on-gpu")]
    fast = ("--precision", "bf16", "--channels-last", "--compile", "--cuda-graph", "--data-on-gpu")
    return [("--amp", "--workers", "4"), ("--workers", "4"), fast]


def _measure(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    asked = parse(request.build_parser(), arguments.flags)
    device = hardware.get_device(asked.device)
    folder = results.prepare_folder(arguments.output_dir)
    # Read once, so that what is missing is said, and downloaded, once.
    dataset = data.load(asked.dataset, asked.data)
    session = results.new_session()
    kinds = variants(device)
    common = [*arguments.flags, "--dataset", dataset.name]
    baseline = _record([*common, *kinds[0]], device, session).variant
    plans = [
        (*common, "--model", model, "--batch-size", str(batch), *flags)
        for model in arguments.models
        for batch in arguments.batch_sizes
        for flags in kinds
    ]
    with tempfile.TemporaryDirectory() as scratch:

        def plan(flags: Flags, repeat: int) -> studies.Plan:
            record = _record(flags, device, session, baseline)
            return _plan(flags, record, folder, scratch, dataset)

        measured = shared.alternating(plans, arguments.repeats, plan, arguments.jobs)
        runs, interrupted = shared.told(measured, _outcome)
    groups = labs.newest(runs)
    rows = [row for group in groups for row in group]
    shared.show(lab_table.of_labs(groups).tables, rows, folder / "training.md")
    return shared.status_of(rows, interrupted)


def _record(flags: Sequence[str], device: torch.device, session: str, baseline: str = "") -> LabRun:
    """The record of a training that has not begun. Raises WorkshopError for flags that can't be."""
    arguments = request.build_parser().parse_args(flags)
    request.check(arguments, device)
    precision = request.precision_of(arguments, device)
    variant = loop.variant_of(arguments, precision.name)
    command = [PROGRAM.name, *flags]
    record = loop.new_run(arguments, arguments.dataset, variant, device, session, command)
    record.baseline = baseline
    return record


def _plan(
    flags: Flags, record: LabRun, folder: Path, scratch: str, dataset: data.Dataset
) -> studies.Plan:
    files = ["--out-dir", tempfile.mkdtemp(dir=scratch)]
    command = [sys.executable, str(PROGRAM), *flags, *files]
    arguments = request.build_parser().parse_args(flags)

    def take_times(run: LabRun, spans: studies.Spans) -> None:
        run.single_step_ms = list(itertools.chain.from_iterable(spans))
        loop.time_epochs(run, arguments.epochs)

    device, secret = hardware.get_device(arguments.device), random.SystemRandom().getrandbits(64)
    reference = gate.Reference(
        arguments, dataset, device, lambda epoch: random.Random(secret + epoch).getrandbits(40)
    )
    check = gate.TrainingCheck(reference, request.precision_of(arguments, device).name)
    return studies.Plan(command, [record], folder, take_times, check)


def _outcome(run: LabRun) -> str:
    rate = run.units_per_step / timing.median(run.step_ms) * 1e3
    return f"{rate:,.0f} images/s; gate {run.gate.status}"


if __name__ == "__main__":
    sys.exit(main())
