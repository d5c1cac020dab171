"""Checkpoints: all that a resumed training needs to go on bit for bit, written whole or not at all.

They are read with `weights_only`, so that a file from elsewhere can't run a program.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from labs.cifar10_roofline.step import Training
from workshop import results
from workshop.errors import WorkshopError

FORMAT = "cifar10_roofline 1"


def save(path: Path, content: dict[str, Any]) -> None:
    """Raises WorkshopError where it can't be written: an older file of that name stays then."""
    with results.atomic_path(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:  # torch.save's, of a disk without room
            raise WorkshopError(f"{path} can't be written: {error!s:.80}") from None


def checkpoint(training: Training, **progress: Any) -> dict[str, Any]:
    """The content of a checkpoint: the training, PyTorch's random numbers, and the given settings,
    number of complete epochs, best accuracy and history."""
    random = {"cpu": torch.get_rng_state()}
    if training.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(training.device)
    return {
        "format": FORMAT,
        "training": training.state(),
        "schedule": asdict(training.problem.schedule),
        "random": random,
        **progress,
    }


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, its tensors to the CPU.

    Raises:
        WorkshopError: it can't be read, is truncated or no checkpoint of this program.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise WorkshopError(f"--resume {path}: can't be read ({error.strerror})") from None
    try:
        with file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # what a damaged file raises is not listed anywhere
        raise WorkshopError(
            f"--resume {path}: no checkpoint, or a truncated one; give another"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise WorkshopError(
            f"--resume {path}: no checkpoint of this program; those are *_best.pt and "
            "*_epoch_N.pt in --out-dir (*_final_weights.pt has weights alone)"
        )
    return content


def differences(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Flags that change the training that goes on, in sentences.

    Raises:
        WorkshopError: it is of another model or other images, with which it can't go on.
    """
    for name in ("model", "dataset"):
        if saved.get(name) != settings[name]:
            raise WorkshopError(
                f"--resume {path}: it is of --{name} {saved.get(name)}, not {settings[name]}"
            )
    return [
        f"--{name.replace('_', '-')} is {value}, it was {saved.get(name)}: the training goes on "
        "otherwise than it would have"
        for name, value in settings.items()
        if saved.get(name) != value
    ]


def restore(path: Path, content: dict[str, Any], training: Training) -> None:
    """Puts a checkpoint's state into a training and PyTorch's random numbers; raises WorkshopError
    where it does not fit."""
    try:
        training.load(content["training"])
        torch.set_rng_state(content["random"]["cpu"])
        if training.device.type == "cuda" and "cuda" in content["random"]:
            torch.cuda.set_rng_state(content["random"]["cuda"], training.device)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise WorkshopError(
            f"--resume {path}: its weights are not those of this network ({error!s:.60})"
        ) from None
