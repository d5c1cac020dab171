"""Checkpoints that any number of processes and any strategy go on from.

PyTorch's distributed checkpoint holds weights and AdamW's moments under the version's own names:
each process writes what it has, and reads the parts that it needs. A checkpoint is a folder
`step_00000020`. It is written beside that as `step_00000020.partial` and gets its name when all
processes have written: what has the name is complete.
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
"""A file beside them that names the start of the launcher."""
_SAME = ("version", "config")
"""Of the settings, those without which a checkpoint does not fit."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    steps: int
    """Trained before it was saved."""
    losses: list[float]
    """Of these steps, each of the whole batch."""
    settings: dict[str, Any]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint below a folder."""
    found = sorted(path for path in folder.glob("step_*") if path.suffix != _PARTIAL)
    return found[-1] if found else None


def is_again(folder: Path, group: Group) -> bool:
    """Whether the training is one of this folder that its launcher has started again."""
    note = folder / _START
    return group.restarted and note.is_file() and note.read_text(encoding="utf-8") == group.start()


def begin(folder: Path, group: Group) -> None:
    """Notes whose training the folder's checkpoints are."""
    results.write_text(folder / _START, group.start())


def refuse(folder: Path) -> None:
    """Forgets it, so that a training that was refused is refused again, when its launcher starts
    it again."""
    (folder / _START).unlink(missing_ok=True)


def read(path: Path) -> Checkpoint:
    """What a checkpoint says of itself.

    Raises:
        WorkshopError: it is none, or damaged.
    """
    record = path / _RECORD
    content = results.read_json(record)
    kinds = {"steps": int, "losses": list, "settings": dict}
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise WorkshopError(f"{record}: {name} is missing; give another checkpoint")
    return Checkpoint(path, **{name: content[name] for name in kinds})


def check(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[str]:
    """What is different from the training that was saved, in sentences.

    Raises:
        WorkshopError: it is of another model.
    """
    saved = checkpoint.settings
    for name in _SAME:
        if saved.get(name) != settings[name]:
            raise WorkshopError(
                f"--resume: {checkpoint.folder} is of another model: {name} is "
                f"{_difference(saved.get(name), settings[name])}"
            )
    return [
        f"note: {name} is {value}, in the checkpoint {saved.get(name)}: the training goes on "
        "otherwise than it would have"
        for name, value in settings.items()
        if saved.get(name) != value
    ]


def _difference(saved: Any, own: Any) -> str:
    if isinstance(saved, dict) and isinstance(own, dict):
        name = next(name for name in own if saved.get(name) != own[name])
        return f"{name} {saved.get(name)} there, {own[name]} here"
    return f"{saved} there, {own} here"


def save(
    folder: Path,
    strategy: Strategy,
    group: Group,
    steps: int,
    losses: list[float],
    settings: dict[str, Any],
) -> None:
    """All processes have to call it.

    Raises:
        WorkshopError: it can't be written. Older ones stay.
    """
    complete = folder / f"step_{steps:08}"
    partial = complete.with_name(complete.name + _PARTIAL)
    if group.is_first:
        for left in folder.glob(f"step_*{_PARTIAL}"):  # by processes that were ended
            shutil.rmtree(left)
        partial.mkdir()
    torch.distributed.barrier()
    with _failure_as(f"{partial} can't be written"):
        dcp.save(strategy.state(), checkpoint_id=partial)
    if group.is_first:
        content = {"steps": steps, "losses": losses, "settings": settings}
        results.write_json(partial / _RECORD, content)
        partial.rename(complete)
        done = sorted(path for path in folder.glob("step_*") if path.suffix != _PARTIAL)
        for old in done[:-KEPT]:
            shutil.rmtree(old)


def load(checkpoint: Checkpoint, strategy: Strategy) -> None:
    """Puts a checkpoint's weights and moments into a strategy that is prepared.

    Raises:
        WorkshopError: it is damaged.
    """

    def fill(state: dict[str, Tensor]) -> None:
        with _failure_as(f"--resume: {checkpoint.folder} can't be read"):
            dcp.load(state, checkpoint_id=checkpoint.folder)

    strategy.resume(checkpoint.steps, fill)


@contextmanager
def _failure_as(what: str) -> Iterator[None]:
    """Raises WorkshopError for what DCP raises: what a damaged file or a full disk lead to is not
    listed anywhere."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        # DCP lists what each process met.
        own = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        if groups.is_peers_end(own):
            raise own from None
        cause = f"{type(own).__name__}: {own!s:.100}".replace("\n", " ")
        raise WorkshopError(f"{what}: {cause}") from None
