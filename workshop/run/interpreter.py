"""Triton's interpreter: which runs it serves, and what their results may be used for.

Where the kernels can't be compiled for a GPU, it runs them program by program on the CPU, in
numpy. They compute the same, so the gate can judge them; they take hundreds of times longer, so
no time of such a run may be compared with anything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from workshop.errors import WorkshopError
from workshop.versions import Version

if TYPE_CHECKING:
    import torch

NOT_COMPARABLE = "interpreted, not comparable"
VARIABLE = "TRITON_INTERPRET"
"""Triton reads it when a kernel is defined; V3 sets it on a machine without a GPU."""


def gate_shape(batch_size: int, seq_len: int) -> tuple[int, int]:
    """Batch size and length of such a run's gate: no more than two sequences of 65 tokens, an odd
    number that crosses the border of a tile."""
    return min(batch_size, 2), min(seq_len, 65)


def asked_for() -> bool:
    """Whether the environment turns the interpreter on, read as Triton reads it."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def serves(version: Version, device: torch.device) -> bool:
    """Whether the interpreter runs the version's kernels on this device."""
    return version.triton and (device.type == "cpu" or asked_for())


def check_device(version: Version, device: torch.device) -> None:
    """Call it when the version's module is loaded, which decided how its kernels are run. Raises
    WorkshopError: they are compiled for a GPU, and the device is the CPU."""
    if version.triton and device.type == "cpu" and not asked_for():
        raise WorkshopError(
            f"--device cpu: the kernels of version {version.key} are compiled for a GPU here; use "
            f"a GPU device, or set {VARIABLE}=1 to check them in Triton's interpreter (slow)"
        )
