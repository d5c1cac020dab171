"""Measures how fast all processes together send a message, by its size.

    torchrun --standalone --nproc-per-node 2 collectives.py

Bus bandwidth is as nccl-tests defines it (doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests): what
a link has to carry at least, for any number of processes. The size is that of the whole message,
which all-gather and reduce-scatter split. The result is checked before and after it is timed.
"""

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch
import torch.distributed as dist
from torch import Tensor

from labs import group as groups
from labs import shared
from labs.group import Group, device_name, find_group, of_all
from labs.scale_out.request import LAB
from workshop import errors, records, results
from workshop.arguments import count, parse
from workshop.judge import lab_record
from workshop.judge.turn import Turn
from workshop.labs import LabRow, LabRun
from workshop.run import hardware
from workshop.run.timing import StepClock, median
from workshop.tables import Line, Table, number

SIZES = {
    "cuda": [2**power for power in range(16, 31, 2)],
    "cpu": [2**power for power in range(14, 25, 2)],
}
"""Bytes of the messages, by type of device."""
WARM_UP = 5
UNIT = "bus bytes"
_PATTERN = 251
"""The message has whole numbers below it: their sums over the processes are exact in fp32."""


# --- what is measured ----------------------------------------------------------------------------


class Collective:
    """A collective over a message of equal parts: `send` holds this process's data, `receive` the
    result. In-place for all-reduce."""

    def __init__(self, name: str, numbers: int, group: Group, device: torch.device) -> None:
        self.name, self.group = name, group
        self.whole = torch.arange(numbers, device=device, dtype=torch.float32) % _PATTERN
        own = group.part(self.whole, dim=0)
        self.send = torch.empty_like(own if name == "all-gather" else self.whole)
        self.receive = {
            "all-reduce": self.send,
            "all-gather": torch.empty_like(self.whole),
            "reduce-scatter": torch.empty_like(own),
        }[name]

    def run(self) -> None:
        OPERATIONS[self.name](self.receive, self.send)

    def is_right(self) -> bool:
        """Runs it on a message of known result, and compares."""
        n, rank = self.group.size, self.group.rank
        if self.name == "all-gather":
            self.send.copy_(self.group.part(self.whole, dim=0))
            expected = self.whole
        else:
            self.send.copy_(self.whole + rank)
            expected = self.whole * n + n * (n - 1) / 2
            if self.name == "reduce-scatter":
                expected = self.group.part(expected, dim=0)
        self.run()
        right = torch.equal(self.receive, expected)
        self.send.zero_()  # so that repeated sums don't grow
        return right


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all-gather": dist.all_gather_into_tensor,
    "reduce-scatter": dist.reduce_scatter_tensor,
    "all-reduce": lambda receive, send: dist.all_reduce(receive),
}


def bus_factor(name: str, processes: int) -> float:
    """Bytes that a link carries for each byte of the message: each process sends (n - 1) / n of the
    message once, for all-reduce twice."""
    once = (processes - 1) / processes
    return 2 * once if name == "all-reduce" else once


def measure(
    record: LabRun, device: torch.device, group: Group, iterations: int, turn: Turn
) -> None:
    """Records the times of the slowest process, in ms. All processes have to call it."""
    name, size = str(record.metrics["collective"]), int(record.metrics["message_bytes"] or 0)
    one = Collective(name, size // 4 // group.size * group.size, group, device)
    right = one.is_right()
    for _ in range(WARM_UP):
        one.run()
    groups.begin(group, turn)
    clock = StepClock(device)
    clock.mark()
    for _ in range(iterations):
        one.run()
        clock.mark()
    record.step_ms = max(of_all(clock.durations_ms()), key=median)
    turn.end(record.step_ms)
    still_right = one.is_right()  # a collective: all processes call it, even if already wrong
    verdicts = enumerate(of_all(right and still_right))
    wrong = [f"{name}: rank {rank} has a wrong result" for rank, ok in verdicts if not ok]
    record.gate.status, record.gate.failures = "fail" if wrong else "pass", wrong
    record.status = "gate failed" if wrong else "complete"


def new_records(
    device: torch.device,
    session: str,
    processes: int,
    command: Sequence[str] = (),
) -> list[LabRun]:
    """The records of all collectives with messages of SIZES, before they are sent."""
    return [
        lab_record.begin(
            device, "fp32", session, ("--output-dir",), command,
            lab=LAB,
            subject=f"collectives, {processes} processes",
            variant=f"{name}, {size_text(size)}",
            unit=UNIT,
            units_per_step=round(size * bus_factor(name, processes)),
            metrics={"processes": processes, "collective": name, "message_bytes": size},
        )
        for name in OPERATIONS
        for size in SIZES[device.type]
    ]  # fmt: skip


def size_text(size: int) -> str:
    """As in "64 KiB"."""
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


# --- the program ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Measures from the command line; returns the exit status."""
    return groups.speak_as_one(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--iterations", type=count, default=20, metavar="N", help="of each message (default 20)")
    add("--device", default="auto", help="auto, cpu or cuda (default auto: GPU if any)")
    shared.add_output_dir(add, LAB)
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure.py
    arguments = parse(parser, argv)
    return errors.exit_status(lambda: _measure_all(arguments), interrupted="interrupted")


def _measure_all(arguments: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated")  # new names in 2.13
    group = find_group()
    device = hardware.get_device(device_name(group, arguments.device))
    results.prepare_folder(arguments.output_dir)
    if group.size == 1:
        raise errors.WorkshopError(
            "collectives take several processes: torchrun --standalone --nproc-per-node 2 "
            "collectives.py"
        )
    status = errors.DONE
    with groups.member(group, device):
        turn = Turn(arguments.candidate and group.is_first)
        turn.wait()
        session = groups.of_first(results.new_session())
        for record in new_records(device, session, group.size):
            measure(record, device, group, arguments.iterations, turn)
            if record.status != "complete":
                status = errors.ANSWER_IS_NO
            if group.is_first:
                turn.tell(record)
                if not turn.judged:
                    records.add(record, arguments.output_dir)
                rate = record.units_per_step / median(record.step_ms) / 1e6
                said = f"{rate:9.2f} GB/s" if record.status == "complete" else record.failure
                print(f"{record.variant:<24} {said}", flush=True)
    return status


# --- the table -----------------------------------------------------------------------------------


def table(rows: Iterable[LabRow]) -> Table:
    """Bus bandwidth by size, a column for each collective of each device and number of processes;
    only rows with a right result, and of several of one message the last."""
    found: dict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.first.unit == UNIT and row.units_per_s:
            metrics, processes = row.first.metrics, row.first.processes
            column = found[row.device, processes, str(metrics["collective"])]
            column[int(metrics["message_bytes"] or 0)] = row.units_per_s / 1e9
    names = [*OPERATIONS]
    keys = sorted(found, key=lambda key: (*key[:2], names.index(key[2])))
    lines = [
        Line([size_text(size), *(number(found[key].get(size), ",.1f") for key in keys)])
        for size in sorted({size for column in found.values() for size in column})
    ]
    header = [f"{device}, {processes}: {name}" for device, processes, name in keys]
    return Table("Bus bandwidth in GB/s", ("message", *header), lines)


if __name__ == "__main__":
    sys.exit(main())
