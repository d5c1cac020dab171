"""The record that a lab's run begins with: where, when, from which commit and by what command."""

import sys
from collections.abc import Collection
from typing import Any

import torch

from workshop import results
from workshop.labs import LabRun
from workshop.run import hardware


def begin(
    device: torch.device, precision: str, session: str, hidden: Collection[str], **fields: Any
) -> LabRun:
    """A record of a run that has not measured yet.

    Args:
        precision: whose peak, in TFLOP/s, the run is compared with.
        session: "" begins a new one.
        hidden: flags that are left out of the command with their values, as folders of this
            machine.
        fields: the rest of the LabRun.
    """
    command = _command(hidden)
    record = LabRun(
        session=session or results.new_session(),
        device=hardware.describe(device),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        command=command,
        parent_command=command,
        **fields,
    )
    if sheet := hardware.peaks(device):
        record.peak_tflops = sheet.tflops.get(precision)
        record.peak_source = sheet.source
    return record


def _command(hidden: Collection[str]) -> list[str]:
    program, *words = sys.argv
    shown = [program.rpartition("/")[2]]
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before in hidden and not word.startswith("--")
        if not is_value and word.partition("=")[0] not in hidden:
            shown.append(word)
    return shown
