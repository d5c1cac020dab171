"""Checkpoints from which any number of processes and any strategy can resume.

PyTorch's distributed checkpoint holds weights and AdamW's moments under the version's own names:
each process writes what it has, and reads the parts that it needs. A checkpoint is a folder
`step_00000020`. It is written as `step_00000020.partial` and renamed when all processes have
finished: a folder without `.partial` is complete.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from labs.scale_out import group as groups
from labs.scale_out.group import Group
from labs.scale_out.strategies import Strategy
from workshop import results
from workshop.errors import WorkshopError

KEPT = 2
"""The newest ones; older ones are deleted."""
_RECORD = "training.json"
_PARTIAL = ".partial"
_START = "start"
"""A file beside the checkpoints that identifies the launcher's start."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    steps: int
    """Trained before it was saved."""
    losses: list[float]
    """Losses of these steps, each of the whole batch."""
    settings: dict[str, Any]


def complete_ones(folder: Path) -> list[Path]:
    """The complete checkpoints below a folder, the newest last."""
    return sorted(path for path in folder.glob("step_*") if path.suffix != _PARTIAL)


def is_again(folder: Path, group: Group) -> bool:
    """Whether this training wrote the folder's checkpoints, and was restarted by its launcher."""
    note = folder / _START
    return group.restarted and note.is_file() and note.read_text(encoding="utf-8") == group.start()


def begin(folder: Path, group: Group) -> None:
    """Notes to which training the folder's checkpoints belong."""
    results.write_text(folder / _START, group.start())


def refuse(folder: Path) -> None:
    """Removes the note, so that a training that was refused is refused again after a restart."""
    (folder / _START).unlink(missing_ok=True)


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint's record. Raises WorkshopError: it is damaged."""
    content = results.read_json(path / _RECORD)
    return Checkpoint(path, content["steps"], content["losses"], content["settings"])


def check(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[str]:
    """The differences from the training that was saved, as sentences.

    Raises:
        WorkshopError: it is of another model.
    """
    saved = checkpoint.settings
    differ = [name for name, value in settings.items() if saved.get(name) != value]
    if other := [name for name in differ if name in ("version", "config")]:
        name, there, here = other[0], saved.get(other[0]), settings[other[0]]
        if isinstance(there, dict):
            size = next(size for size in here if there.get(size) != here[size])
            name, there, here = f"{name}: {size}", there.get(size), here[size]
        raise WorkshopError(
            f"--resume: {checkpoint.folder} is of another model: {name} is {there} there, "
            f"{here} here"
        )
    return [
        f"note: {name} is {settings[name]}, in the checkpoint {saved.get(name)}: the losses will "
        "differ from those of an uninterrupted training"
        for name in differ
    ]


def save(
    folder: Path,
    strategy: Strategy,
    group: Group,
    steps: int,
    losses: list[float],
    settings: dict[str, Any],
) -> None:
    """Saves a checkpoint. All processes have to call it.

    Raises:
        WorkshopError: it can't be written. Older ones are kept.
    """
    complete = folder / f"step_{steps:08}"
    partial = complete.with_name(complete.name + _PARTIAL)
    if group.is_first:
        for left in folder.glob(f"step_*{_PARTIAL}"):  # by processes that were killed
            shutil.rmtree(left)
        partial.mkdir()
    torch.distributed.barrier()
    with _failure_as(f"{partial} can't be written"):
        dcp.save(strategy.state(), checkpoint_id=partial)
    if group.is_first:
        content = {"steps": steps, "losses": losses, "settings": settings}
        results.write_json(partial / _RECORD, content)
        partial.rename(complete)
        for old in complete_ones(folder)[:-KEPT]:
            shutil.rmtree(old)


def load(checkpoint: Checkpoint, strategy: Strategy) -> None:
    """Loads a checkpoint's weights and moments into a prepared strategy.

    Raises:
        WorkshopError: it is damaged.
    """

    def fill(state: dict[str, Tensor]) -> None:
        with _failure_as(f"--resume: {checkpoint.folder} can't be read"):
            dcp.load(state, checkpoint_id=checkpoint.folder)

    strategy.resume(checkpoint.steps, fill)


@contextmanager
def _failure_as(what: str) -> Iterator[None]:
    """Raises WorkshopError for anything that DCP raises: which exceptions a damaged file or a full
    disk cause is not documented."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        # DCP lists what each process met.
        own = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        if groups.is_peers_end(own):
            raise own from None
        cause = f"{type(own).__name__}: {own!s:.100}".replace("\n", " ")
        raise WorkshopError(f"{what}: {cause}") from None
