"""The processes of a program: the place of each among all, how they meet and end, messages."""

import contextlib
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workshop import errors
from workshop.errors import WorkshopError
from workshop.judge.turn import Turn

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun and the deepspeed launcher set in each process."""
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ENVIRONMENT = "env://"
"""Where the processes of a launcher meet: at the address in its variables."""
PATIENCE_S = 10.0
"""How long a process with an error waits for the launcher to end it, before it prints the error."""
LAST_WORDS_S = 5.0
"""How long a process that waits for others may run after Ctrl-C. NCCL would wait for minutes."""
_PEER_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe",
              "remote process exited", "connection refused")  # fmt: skip

T = TypeVar("T")


class PeerGone(WorkshopError):
    """Another process of the group has ended, so that this one can't continue."""

    exit_code = errors.ANSWER_IS_NO


@dataclass(frozen=True)
class Group:
    """This process's place among all. `local_rank` and `local_size` count those of its machine."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launched: bool = False
    """Whether a launcher, or a user's flags, made it one of a group."""
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
    """The group that a launcher has started; without a launcher, one process. Raises WorkshopError:
    a variable of the launcher is missing."""
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
    """The device of a process: for `auto` and `cuda` the GPU of its local rank. Raises
    WorkshopError: there are more processes than GPUs."""
    if asked not in ("auto", "cuda") or not torch.cuda.is_available() or group.size == 1:
        return asked
    gpus = torch.cuda.device_count()
    if group.local_size > gpus:
        raise WorkshopError(
            f"{group.local_size} processes on a machine with {gpus} GPU{'s' * (gpus > 1)}: each "
            f"needs its own; start {gpus} (torchrun --nproc-per-node {gpus}), or use --device cpu"
        )
    return f"cuda:{group.local_rank}"


def launcher(size: int) -> list[str]:
    """The command that starts `size` processes of this machine; 0 is one without a launcher."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [sys.executable, *(words if size else ())]


# --- how they meet, and end ----------------------------------------------------------------------


def join(group: Group, device: torch.device) -> None:
    """Connects to the other processes. A process without a launcher is a group of one. Raises
    WorkshopError: there is no connection at the group's address."""
    # DDP imports this, and its functions would keep the group that exists then as their default.
    import torch.distributed.nn.functional  # noqa: F401

    on_gpu, store = device.type == "cuda", None
    try:
        if group.launched:
            # torchrun keeps the store over a restart, and with it addresses of killed processes.
            shared, _, _ = next(dist.rendezvous(group.method, group.rank, group.size))
            store = dist.PrefixStore(f"attempt_{os.environ.get(RESTARTS[0], '0')}", shared)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=group.rank, world_size=group.size,
            store=store or dist.HashStore(), device_id=device if on_gpu else None,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        where = ", ".join(f"{name} {os.environ.get(name)}" for name in VARIABLES[3:])
        where = where if group.method == ENVIRONMENT else f"--dist-url {group.method}"
        in_use = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        what = "the port is in use: give the launcher another" if in_use else f"{error!s:.100}"
        raise WorkshopError(f"{where}: {what}") from None


@contextlib.contextmanager
def member(group: Group, device: torch.device) -> Iterator[None]:
    """Joins the group for the block. In the block, the end of another process becomes an error of
    one line, and Ctrl-C or SIGTERM also ends a process that waits for others. A process without
    launcher and GPU stays in its group for the next block. Raises PeerGone: another process has
    ended, and no launcher has ended this one."""
    if not dist.is_initialized():
        join(group, device)
    try:
        with _ended_by_signals() if group.launched else contextlib.nullcontext():
            yield
    except RuntimeError as error:
        if not (group.launched and is_peers_end(error)):
            raise
        _leave_it_to_the_launcher()
        raise PeerGone(
            f"rank {group.rank}: another process of this group has ended ({error!s:.80})"
        ) from None
    if group.launched or device.type == "cuda":  # PyTorch 2.6 may wait forever for gloo's threads
        # A model of DDP's, in a cycle, would keep the group and its threads. A thread that lets go
        # of a result when Python has ended aborts the process.
        gc.collect()
        dist.destroy_process_group()


def is_peers_end(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended."""
    return any(words in str(error).lower() for words in _PEER_GONE)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ends the process soon after a signal. Python runs a signal's handler only between two
    bytecodes, which a process that waits in a collective does not reach."""

    def watch() -> None:
        if os.read(ended, 1) in (bytes([signal.SIGINT]), bytes([signal.SIGTERM])):
            time.sleep(LAST_WORDS_S)
            os._exit(errors.INTERRUPTED)

    ended, signalled = os.pipe()
    os.set_blocking(signalled, False)
    before = signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(signalled)


def speak_as_one(main: Callable[[], int]) -> int:
    """Runs a program's main in one of several processes; returns its exit status.

    Only the first process prints. An error that all processes meet is printed by the first, and
    the launcher then ends the others. One that only another process meets is printed by that
    process, if it has not been ended after PATIENCE_S.
    """
    if os.environ.get("RANK", "0") == "0":
        return main()
    sys.stdout, sys.stderr, terminal = io.StringIO(), io.StringIO(), sys.stderr
    try:
        status = main()
    except SystemExit as ended:  # argparse's
        status = ended.code if isinstance(ended.code, int) else errors.ANSWER_IS_NO
    except Exception:
        traceback.print_exc()
        status = errors.ANSWER_IS_NO
    if status not in (errors.DONE, errors.INTERRUPTED):
        _leave_it_to_the_launcher()
        terminal.write(sys.stderr.getvalue())
    return status


def _leave_it_to_the_launcher() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE_S)


# --- messages between them -----------------------------------------------------------------------


def begin(group: Group, turn: Turn) -> dict[str, Tensor]:
    """Waits until the judge's clock runs, for which the first process asks; what came with that."""
    return of_first(turn.begin().tensors if group.is_first else {})


def of_all(value: T) -> list[T]:
    """The values of all processes, by rank; waits for all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def of_first(value: T) -> T:
    """The first process's value, for all of them."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def joined(tensor: Tensor) -> Tensor:
    """The tensors of all processes, of one shape, concatenated along dimension 0."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


@contextlib.contextmanager
def threads_of_all(group: Group) -> Iterator[None]:
    """In the block this process has the threads of all processes of its machine, which wait."""
    own = torch.get_num_threads()
    torch.set_num_threads(own * group.local_size)
    try:
        yield
    finally:
        torch.set_num_threads(own)
