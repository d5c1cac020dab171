"""Compares trainings, the usual ones and the fast one, by network and batch size.

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
from labs.cifar10_roofline import data, gate, loop
from workshop import errors, labs, results
from workshop.arguments import count, parse
from workshop.judge import studies
from workshop.labs import LabRun
from workshop.run import hardware
from workshop.show import lab_table

PROGRAM = Path(__file__).with_name("train.py")
Flags = tuple[str, ...]


def build_parser() -> argparse.ArgumentParser:
    more = "Flags of train.py, for all trainings, go after --. "
    parser = shared.new_parser(__doc__, "a gate or a training failed", more)
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--models", nargs="+", choices=loop.MODELS, default=loop.MODELS, help="default: both")
    number("--batch-sizes", nargs="+", default=(128, 256, 1024), help="default: 128 256 1024")
    shared.add_repeats(add)
    shared.add_output_dir(add, loop.LAB)
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
    asked = parse(loop.build_parser(), arguments.flags)
    device = hardware.get_device(asked.device)
    folder = results.prepare_folder(arguments.output_dir)
    # Read once, so that what is missing is said, and downloaded, once.
    dataset = data.load(asked.dataset, asked.data)
    session, kinds = results.new_session(), variants(device)
    common = [*arguments.flags, "--dataset", dataset.name]
    cases = [
        (*common, "--model", model, "--batch-size", str(batch), *flags)
        for model in arguments.models
        for batch in arguments.batch_sizes
        for flags in kinds
    ]
    with tempfile.TemporaryDirectory() as scratch:

        def plan(flags: Sequence[str], repeat: int) -> studies.Plan:
            return _plan(flags, device, session, folder, scratch, dataset)

        baseline = plan((*common, *kinds[0]), 0).planned[0].variant

        def compared(flags: Flags, repeat: int) -> studies.Plan:
            made = plan(flags, repeat)
            made.planned[0].baseline = baseline
            return made

        measured = shared.alternating(cases, arguments.repeats, compared, arguments.jobs)
        runs, interrupted = shared.told(measured, shared.images_and_gate)
    groups = labs.newest(runs)
    rows = [row for group in groups for row in group]
    shared.show(lab_table.of_labs(groups).tables, rows, folder / "training.md")
    return shared.status_of(rows, interrupted)


def _plan(
    flags: Sequence[str],
    device: torch.device,
    session: str,
    folder: Path,
    scratch: str,
    dataset: data.Dataset,
) -> studies.Plan:
    """A training that has not begun. Raises WorkshopError for flags that can't be."""
    arguments = loop.build_parser().parse_args(flags)
    loop.check(arguments, device)
    precision = loop.precision_of(arguments, device)
    variant = loop.variant_of(arguments, precision.name)
    command = [PROGRAM.name, *flags]
    record = loop.new_run(arguments, arguments.dataset, variant, device, session, command)

    def take_times(run: LabRun, spans: studies.Spans) -> None:
        loop.time_epochs(run, [*itertools.chain.from_iterable(spans)], arguments.epochs)

    secret = random.SystemRandom().getrandbits(64)
    reference = gate.Reference(
        arguments, dataset, device, lambda epoch: random.Random(secret + epoch).getrandbits(40)
    )
    files = ["--out-dir", tempfile.mkdtemp(dir=scratch)]
    started = [sys.executable, str(PROGRAM), *flags, *files]
    check = gate.TrainingCheck(reference, precision.name)
    return studies.Plan(started, [record], folder, take_times, check)


if __name__ == "__main__":
    sys.exit(main())
