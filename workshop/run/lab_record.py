"""The record that a lab's run begins with: where, when, from which commit and by what command."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from workshop import results
from workshop.labs import LabRun
from workshop.run import hardware


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
    own = _shown(sys.argv, hidden)
    record = LabRun(
        session=session or results.new_session(),
        device=hardware.describe(device),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        command=_shown(command, hidden) if command else own,
        parent_command=own,
        **fields,
    )
    if sheet := hardware.peaks(device):
        record.peak_tflops = sheet.tflops.get(precision)
        record.peak_source = sheet.source
    return record


def _shown(command: Sequence[str], hidden: Collection[str]) -> list[str]:
    program, *words = command
    shown = [program.rpartition("/")[2]]
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before in hidden and not word.startswith("--")
        if not is_value and word.partition("=")[0] not in hidden:
            shown.append(word)
    return shown
