"""Several processes, a GPU each, as the flags describe them; and how they meet."""

import argparse
import os
import re
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from labs import shared
from labs.group import ENVIRONMENT, VARIABLES, Group, device_name, find_group
from workshop.errors import WorkshopError
from workshop.run import hardware


def find(arguments: argparse.Namespace) -> Group:
    """The group that torchrun has made, or that --rank and --world-size describe.

    Raises:
        WorkshopError: the rank is outside the group, the batch smaller than it, or there is another
            number of GPUs.
    """
    ids = _device_ids(arguments.device_ids)
    rank, world_size = arguments.rank, arguments.world_size
    # A cluster may set some of the variables; the flags count then.
    group = find_group() if all(name in os.environ for name in VARIABLES[:3]) else Group()
    if group.launched:
        group = replace(group, gpus=_own(ids, group.local_rank, group.local_size))
    elif arguments.distributed_dataparallel:
        # A single number is this process's own: a list can't tell which machine it is of.
        gpus = ids if len(ids) == 1 else _own(ids, rank, world_size)
        # How many of them are on this machine is not known.
        group = Group(rank, rank, world_size, method=arguments.dist_url, gpus=gpus)
    elif arguments.dataparallel:
        group = Group(gpus=ids or tuple(range(torch.cuda.device_count())))
    else:
        group = Group(gpus=_own(ids, 0, 1))
    rules = {
        f"--rank {group.rank}: it must lie between 0 and --world-size": (
            not 0 <= group.rank < group.size
        ),
        f"--rank {rank} --world-size {world_size}: they go with --distributed_dataparallel; "
        "torchrun has its own": (rank, world_size) not in (
            (0, 1), (group.rank, group.size)
        ),
        "--dataparallel is for one process and needs two GPUs or more: those of --device_ids, or "
        "all": arguments.dataparallel and (group.size > 1 or len(group.gpus) < 2),
        f"--batch-size {arguments.batch_size}: it is the batch of all {group.size} processes "
        "together, so that each needs an image of its own": (
            arguments.batch_size < group.size
        ),
    }  # fmt: skip
    shared.refuse(rules)
    return group


def _device_ids(text: str | None) -> tuple[int, ...]:
    """The GPUs of `--device_ids 0,1`; raises WorkshopError for other text, a GPU that is there
    twice, and one that this machine does not have."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    ids = tuple(int(word) if word.isdecimal() else -1 for word in words)
    count = torch.cuda.device_count() if ids else 0
    shared.refuse({
        f"--device_ids {text!r:.40}: give numbers of GPUs, as in 0,1": -1 in ids,
        f"--device_ids {text}: it has a GPU twice": len(set(ids)) < len(ids),
        f"--device_ids {text}: PyTorch sees {count} GPUs on this machine, numbered from 0": (
            ids and max(ids) >= count
        ),
    })  # fmt: skip
    return ids


def _own(ids: tuple[int, ...], place: int, processes: int) -> tuple[int, ...]:
    """The GPU of one of the processes that share a list; empty without a list."""
    if ids and len(ids) != processes:
        raise WorkshopError(
            f"--device_ids {','.join(map(str, ids))}: give a GPU for each process, of which there "
            f"are {processes} here; --dataparallel drives several GPUs from one process"
        )
    return ids[place : place + 1]


def device_of(group: Group, name: str) -> torch.device:
    """The process's own device: that of --device_ids, with `auto` the GPU of its local rank."""
    shared.refuse({
        f"--device {name}: --device_ids and --dataparallel have GPUs of their own; leave it out": (
            group.gpus and name not in ("auto", "cuda")
        ),
        f"--device {name}: it is one GPU for {group.size} processes; give --device_ids": (
            group.size > 1 and re.fullmatch(r"cuda:\d+", name)
        ),
    })  # fmt: skip
    if group.gpus:
        name = f"cuda:{group.gpus[0]}"
    return hardware.get_device(device_name(group, name))


def join(group: Group, device: torch.device, backend: str | None) -> None:
    """Raises WorkshopError if the processes can't meet at --dist-url."""
    if group.size == 1:
        return
    by_hand = {} if group.method == ENVIRONMENT else {
        "init_method": group.method, "rank": group.rank, "world_size": group.size
    }  # fmt: skip
    try:
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            **by_hand,  # type: ignore[arg-type]
        )
    except (RuntimeError, ValueError) as error:
        raise WorkshopError(f"--dist-url {group.method}: no group ({error!s:.100})") from None


def leave(group: Group) -> None:
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def replica(group: Group, device: torch.device, model: nn.Module) -> nn.Module:
    """The network for training as one of a group's replicas."""
    if group.size == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)
