"""The ladder: each rung changes one thing about the rung that it names."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from labs.data_pipeline.formats import FORMATS, PACKED, get_decoder
from labs.data_pipeline.loop import Settings
from workshop import errors
from workshop.errors import NotOnThisMachine
from workshop.labs import LabRow
from workshop.run.trainer import missing_for_compile

ALL_WORKERS = -1
"""Replaced by the number that is asked for."""
PREFETCH = 8
ALONE = ""


@dataclass(frozen=True)
class Rung:
    name: str
    after: str
    """The rung that it changes; ALONE for the first of a ladder, to which all others of it are
    compared."""
    change: dict[str, Any] = field(default_factory=dict)
    """New values of fields of Settings."""
    needs_gpu: str = ""
    """Why it needs one, if it does."""


RUNGS = (
    Rung("1-worker", ALONE),
    Rung("n-workers", "1-worker", {"workers": ALL_WORKERS}),
    Rung("persistent", "n-workers", {"persistent": True}),
    Rung("pinned", "persistent", {"pinned": True}, "pinned memory is for copies to a GPU"),
    Rung("prefetched", "pinned", {"prefetch": PREFETCH}),
    Rung("decode-torchvision", "prefetched", {"decoder": "torchvision"}),
    Rung("decode-opencv", "prefetched", {"decoder": "opencv"}),
    Rung("torchvision-dataset", "prefetched", {"reader": "torchvision"}),
    Rung("on-device", "prefetched", {"on_device": True}),
    *(Rung(key, "on-device", {"format": key}) for key in PACKED),
    Rung("local-folder", "on-device", {"local": True}),
    Rung("local-zip", "zip", {"local": True}),
    Rung("webdataset-loader", "webdataset", {"reader": "webdataset"}),
    Rung("ffcv", "on-device", {"reader": "ffcv"}),
    Rung("dali", "on-device", {"reader": "nvidia.dali"}),
    Rung("resident", "on-device", {"resident": True}),
    Rung("resident-graph", "resident", {"graph": True}, "graphs of kernels are for GPUs"),
    Rung("resnet50", ALONE,
         {"model": "resnet50", "format": "flat", "workers": ALL_WORKERS, "persistent": True,
          "pinned": True, "prefetch": PREFETCH, "on_device": True}),
    Rung("resnet50-channels-last", "resnet50", {"channels_last": True}),
    Rung("resnet50-amp", "resnet50", {"amp": True}, "fp16 is for GPUs"),
    Rung("resnet50-both", "resnet50-channels-last", {"amp": True}, "fp16 is for GPUs"),
    Rung("resnet50-compiled", "resnet50-both", {"compile": True},
         "it builds on fp16, which is for GPUs"),
    Rung("resnet50-graph", "resnet50-compiled", {"graph": True}, "graphs of kernels are for GPUs"),
    Rung("resnet50-ahead", "resnet50-graph", {"ahead": True}, "it copies to a GPU"),
)  # fmt: skip
"""The table of README.md says what each changes."""
BY_NAME = {rung.name: rung for rung in RUNGS}
PEERS_WITHOUT_A_LOADER = {"ffcv": "FFCV", "nvidia.dali": "DALI"}


def settings(name: str, workers: int) -> Settings:
    """The settings of a rung, with all changes before it."""
    rung = BY_NAME[name]
    before = settings(rung.after, workers) if rung.after else Settings()
    values: dict[str, Any] = {k: workers if v == ALL_WORKERS else v for k, v in rung.change.items()}
    return replace(before, **values)


def first(name: str) -> str:
    """The rung with which this one is compared."""
    rung = BY_NAME[name]
    return first(rung.after) if rung.after else name


def is_large(name: str) -> bool:
    """Whether it trains ResNet-50, on larger images."""
    return settings(name, 1).model == "resnet50"


def check(name: str, device: torch.device, workers: int) -> None:
    """Raises NotOnThisMachine where the rung can't run on this device, something is not installed,
    or no loader for it is written."""
    rung, own = BY_NAME[name], settings(name, workers)
    if rung.needs_gpu and device.type != "cuda":
        raise NotOnThisMachine(f"a GPU is missing: {rung.needs_gpu}")
    if own.reader in PEERS_WITHOUT_A_LOADER:
        raise NotOnThisMachine(
            f"{PEERS_WITHOUT_A_LOADER[own.reader]} did not install where this lab was written: it "
            "has no loader for it"
        )
    packages = {"webdataset": ["webdataset"], "torchvision": ["torchvision"]}.get(own.reader, [])
    errors.require(*packages, *FORMATS[own.format].packages)
    get_decoder(own.decoder)
    if own.compile and (missing := missing_for_compile(device)):
        raise NotOnThisMachine(f"torch.compile needs {missing}")


def place(row: LabRow) -> int:
    """The place of a row of results in the ladder."""
    return [*BY_NAME].index(row.first.variant)
