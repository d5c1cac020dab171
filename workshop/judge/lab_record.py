"""The record that a lab's run begins with: where, when, from which commit and by what command."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from workshop.request import begun
from workshop.results import LabRun, Value
from workshop.run import hardware
from workshop.run.precision import Precision


def begin(
    device: torch.device,
    precision: str,
    session: str,
    hidden: Collection[str],
    command: Sequence[str] = (),
    **fields: Any,
) -> LabRun:
    """A record of a run that has not measured yet.

    Args:
        precision: whose peak, in TFLOP/s, the run is compared with.
        session: "" begins a new one.
        hidden: flags that are left out of the command with their values, as folders of this
            machine.
        command: of the process that measures, if it is not this one.
        fields: the rest of the LabRun.
    """
    shown = {"parent_command": _shown(sys.argv, hidden)}
    shown["command"] = _shown(command, hidden) if command else shown["parent_command"]
    record = LabRun(**begun(device, session) | shown | fields)
    if torch.are_deterministic_algorithms_enabled():
        record.variant += ", deterministic"
        record.options["deterministic"] = True
    if sheet := hardware.peaks(device):
        record.peak_tflops = sheet.tflops.get(precision)
        record.peak_source = sheet.source
    return record


def of_calls(
    device: torch.device, precision: Precision, lab: str, *, timed: bool = True, **options: Value
) -> LabRun:
    """A record of a benchmark whose steps are calls, with what a large copy and product reach.

    Args:
        timed: whether it will have times; else nothing is measured.
    """
    record = begin(
        *(device, precision.name, "", ("--output-dir",)),
        lab=lab,
        subject="",
        variant="",
        unit="calls",
        units_per_step=1,
        options={"precision": precision.name, **options},
    )
    if timed:
        record.ceiling_gbs = hardware.measure_copy_gbs(device)
        record.ceiling_tflops = hardware.measure_matmul_tflops(device, precision.autocast_dtype)
    return record


def _shown(command: Sequence[str], hidden: Collection[str]) -> list[str]:
    program, *words = command
    shown = [program.rpartition("/")[2]]
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before in hidden and not word.startswith("--")
        if not is_value and word.partition("=")[0] not in hidden:
            shown.append(word)
    return shown
