"""The processes of a program: the place of each among all, its GPU, and its part of the batch."""

import os
import socket
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workshop.errors import WorkshopError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun and the deepspeed launcher set in each process."""
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ENVIRONMENT = "env://"
"""Where the processes of a launcher meet: at the address in its variables."""

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process's place among all. `local_rank` and `local_size` count those of its machine."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launched: bool = False
    """Whether a launcher started it."""
    method: str = ENVIRONMENT
    gpus: tuple[int, ...] = ()
    """Numbers of the GPUs that flags give this process."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether torchrun or the batch system has restarted it after a failure."""
        return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS)

    @staticmethod
    def start() -> str:
        """Identifies the launcher's start, or the batch job, that all attempts belong to."""
        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        agent = f"{socket.gethostname()} {os.getppid()}"
        return os.environ.get("SLURM_JOB_ID") or (agent if run == "none" else run)

    def part(self, batch: Tensor, dim: int) -> Tensor:
        """This process's sequences of a whole batch: the same number for each process."""
        own = batch.shape[dim] // self.size
        return batch.narrow(dim, self.rank * own, own)

    def parts(self, batch_size: int) -> tuple[int, ...]:
        """Images of each process, by rank: the first ones take the remainder, one each."""
        whole, rest = divmod(batch_size, self.size)
        return tuple(whole + (rank < rest) for rank in range(self.size))


def find_group() -> Group:
    """The group that a launcher has started; without a launcher, one process.

    Raises:
        WorkshopError: a variable of the launcher is missing.
    """
    environment = os.environ
    given = [name for name in VARIABLES if environment.get(name)]
    if not {*VARIABLES[:3]} & {*given}:
        return Group()
    if missing := [name for name in VARIABLES if name not in given]:
        raise WorkshopError(
            f"{missing[0]} is not set, but {given[0]} is: start all processes with torchrun or "
            f"deepspeed, which set {', '.join(VARIABLES)}; for one process unset {given[0]}"
        )
    rank, local_rank, size = (int(environment[name]) for name in VARIABLES[:3])
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or size
    return Group(rank, local_rank, size, int(local), launched=True)


def device_name(group: Group, asked: str) -> str:
    """The device of a process: for `auto` and `cuda` the GPU of its local rank.

    Raises:
        WorkshopError: there are more processes than GPUs.
    """
    if asked not in ("auto", "cuda") or not torch.cuda.is_available() or group.size == 1:
        return asked
    gpus = torch.cuda.device_count()
    if group.local_size > gpus:
        raise WorkshopError(
            f"{group.local_size} processes on a machine with {gpus} GPU{'s' * (gpus > 1)}: each "
            f"needs its own; start {gpus} (torchrun --nproc-per-node {gpus}), or use --device cpu"
        )
    return f"cuda:{group.local_rank}"


def of_all(value: T) -> list[T]:
    """The values of all processes, by rank; waits for all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
