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

from labs import group as groups
from labs import shared
from labs.group import Group
from labs.scale_out.request import Job
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
    """The settings on which the training's losses depend, except for roundings."""


def start(job: Job, settings: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to continue from, the same for all processes; None to start at the first step.
    Raises WorkshopError: there is none, it does not fit, or it has all steps and this is no
    restart; or the folder of a new training has checkpoints of another one."""
    arguments, folder, group = job.arguments, job.arguments.checkpoints, job.group
    if not (arguments.resume or arguments.save_every):
        return None
    if arguments.save_every:
        results.prepare_folder(folder, "--checkpoints")
    note, newest = folder / _START, next(reversed(complete_ones(folder)), None)
    # This training wrote them, and its launcher has started it again.
    again = group.restarted and note.is_file() and note.read_text("utf-8") == group.start()
    again, newest = groups.of_first((again, newest))
    if newest is None and arguments.resume and not again:
        raise WorkshopError(f"--resume: there is no complete checkpoint in --checkpoints {folder}")
    if newest is not None and not (arguments.resume or again):
        raise WorkshopError(
            f"--checkpoints {folder} has {newest.name} of another training: go on from it with "
            "--resume, or give another folder"
        )
    found = _read(newest, settings) if newest else None
    steps = job.asked.schedule.steps
    if found and found.steps >= steps and not again:
        raise WorkshopError(
            f"--resume: {found.folder} has {found.steps} steps, and --warmup-steps and "
            f"--num-steps make {steps}: nothing is left to train; raise --num-steps"
        )
    if group.is_first and arguments.save_every:
        results.write_text(note, group.start())
    return found


def complete_ones(folder: Path) -> list[Path]:
    """The complete checkpoints below a folder, the newest last."""
    return sorted(path for path in folder.glob("step_*") if path.suffix != _PARTIAL)


def _read(path: Path, settings: dict[str, Any]) -> Checkpoint:
    """Reads a checkpoint's record; raises WorkshopError: it is damaged, or of another model."""
    content = results.read_json(path / _RECORD)
    shared.compare_settings(f"--resume {path}", content["settings"], settings)
    return Checkpoint(path, content["steps"], content["losses"], content["settings"])


def save(
    folder: Path,
    strategy: Strategy,
    group: Group,
    steps: int,
    losses: list[float],
    settings: dict[str, Any],
) -> None:
    """Saves a checkpoint. All processes have to call it. Raises WorkshopError: it can't be written.
    Older ones are kept."""
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
    """Loads a checkpoint's weights and moments into a prepared strategy. Raises WorkshopError: it
    is damaged."""

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
