"""Several processes, a GPU each: who they are, and each one's part of the batch."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from workshop.errors import WorkshopError
from workshop.run import hardware

TORCHRUN_METHOD = "env://"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Group:
    """This process among all. `local_rank` counts on its own machine, `rank` over all machines."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    method: str = TORCHRUN_METHOD

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def parts(self, batch_size: int) -> tuple[int, ...]:
        """Images of each process, by rank: the first ones take the remainder, one each."""
        whole, rest = divmod(batch_size, self.world_size)
        return tuple(whole + (rank < rest) for rank in range(self.world_size))


def find(arguments: argparse.Namespace) -> Group:
    """The group that torchrun has made, or that --rank and --world-size describe.

    Raises:
        WorkshopError: the rank is outside the group, or the batch smaller than it.
    """
    given = device_ids(arguments.device_ids)
    if all(name in os.environ for name in TORCHRUN):
        rank, local_rank, world_size = (int(os.environ[name]) for name in TORCHRUN)
        group = Group(rank, local_rank, world_size)
    elif arguments.distributed_dataparallel:
        ids = given
        local_rank = ids[0] if len(ids) == 1 else arguments.rank
        group = Group(arguments.rank, local_rank, arguments.world_size, arguments.dist_url)
    else:
        group = Group()
    if not 0 <= group.rank < group.world_size:
        raise WorkshopError(f"--rank {group.rank}: it must lie between 0 and --world-size")
    if arguments.batch_size < group.world_size:
        raise WorkshopError(
            f"--batch-size {arguments.batch_size}: it is the batch of all {group.world_size} "
            "processes together, so that each needs an image of its own"
        )
    return group


def device_ids(text: str | None) -> list[int]:
    """Of `--device_ids 0,1`; raises WorkshopError for anything but numbers."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise WorkshopError(f"--device_ids {text!r:.40}: give numbers of GPUs, as in 0,1")
    return [int(word) for word in words]


def device_of(group: Group, name: str) -> torch.device:
    """The process's own device: with `auto` the GPU of its local rank."""
    if name == "auto" and group.world_size > 1 and torch.cuda.is_available():
        name = f"cuda:{group.local_rank}"
    return hardware.get_device(name)


def join(group: Group, device: torch.device, backend: str | None) -> None:
    """Raises WorkshopError if the processes can't meet at --dist-url."""
    if group.world_size == 1:
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if group.method == TORCHRUN_METHOD:
        dist.init_process_group(backend)
        return
    try:
        dist.init_process_group(
            backend, init_method=group.method, rank=group.rank, world_size=group.world_size
        )
    except (RuntimeError, ValueError) as error:
        raise WorkshopError(f"--dist-url {group.method}: no group ({error!s:.100})") from None


def leave(group: Group) -> None:
    if group.world_size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def meet(group: Group) -> None:
    """Waits for all processes."""
    if group.world_size > 1:
        dist.barrier()


def of_first(group: Group, value: str) -> str:
    """The first process's value, for all of them."""
    values = [value]
    if group.world_size > 1:
        dist.broadcast_object_list(values)
    return values[0]


def wrapper(group: Group, device: torch.device) -> Callable[[nn.Module], nn.Module]:
    """Makes a network for training one of a group's replicas."""

    def wrap(model: nn.Module) -> nn.Module:
        if group.world_size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    return wrap


def slowest(group: Group, step_ms: list[float]) -> list[list[float]]:
    """The times of all processes, by rank; an iteration of the group is as long as its slowest."""
    if group.world_size == 1:
        return [step_ms]
    gathered: list[list[float] | None] = [None] * group.world_size
    dist.all_gather_object(gathered, step_ms)
    return [times for times in gathered if times is not None]


def all_pass(group: Group, passed: bool) -> bool:
    """Whether every process passed its gate."""
    if group.world_size == 1:
        return passed
    gathered: list[bool | None] = [None] * group.world_size
    dist.all_gather_object(gathered, passed)
    return all(gathered)
