"""Training in which the GPUs of one host write straight into each other's memory.

NCCL's kernels run on multiprocessors, which the backward pass needs: a matrix product that has a
block for each of them takes twice as long beside NCCL. A GPU's copy engines need none. They move
gradients to the process that updates these rows while the backward pass goes on, and the updated
rows to all others while AdamW updates the next ones. PyTorch calls such memory symmetric; without a
GPU the processes share files.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.scale_out import group as groups
from labs.scale_out.strategies import MOMENTS, Strategy
from workshop.errors import NotOnThisMachine
from workshop.run import markers

ALIGNMENT = 64
"""Tensors in the shared memory begin at multiples of so many numbers."""


class Memory:
    """A buffer of fp32 numbers in each process, which all processes can write.

    Attributes:
        of: the buffer of each process, by rank.
        barrier: waits for all processes; on a GPU its stream waits, and the host goes on.
        unseen_bytes: what PyTorch's allocator does not count of this process's buffer.

    Raises:
        NotOnThisMachine: a GPU can't write into the memory of another.
    """

    def __init__(self, numbers: int, device: torch.device) -> None:
        self.barrier: Callable[[], object] = dist.barrier
        self.unseen_bytes = 0
        self.of = self._on_gpus(numbers, device) if device.type == "cuda" else self._files(numbers)

    def _on_gpus(self, numbers: int, device: torch.device) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        assert device.index is not None
        for other in range(dist.get_world_size()):
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                raise NotOnThisMachine(
                    f"--strategy p2p: {device} can't write into the memory of cuda:{other}; use ddp"
                )
        before = torch.cuda.memory_allocated(device)
        own = symmetric.empty(numbers, dtype=torch.float32, device=device)
        self.unseen_bytes = own.nbytes - (torch.cuda.memory_allocated(device) - before)
        handle = symmetric.rendezvous(own, dist.group.WORLD)  # type: ignore[arg-type]
        self.barrier = handle.barrier
        return [handle.get_buffer(i, (numbers,), own.dtype) for i in range(dist.get_world_size())]

    def _files(self, numbers: int) -> list[Tensor]:
        first = dist.get_rank() == 0
        # Not in /dev/shm: a container's has 64 MB, and a process that writes beyond is killed.
        folder = groups.of_first(tempfile.mkdtemp() if first else "")
        paths = [f"{folder}/{rank}" for rank in range(dist.get_world_size())]

        def opened(path: str) -> Tensor:
            return torch.from_file(path, shared=True, size=numbers, dtype=torch.float32)

        opened(paths[dist.get_rank()])
        dist.barrier()
        found = list(map(opened, paths))
        dist.barrier()
        if first:
            shutil.rmtree(folder)
        return found


@dataclass(frozen=True, eq=False)
class Shared:
    """A weight of which each process updates some rows."""

    own: nn.Parameter
    """This process's rows, a view of the weight."""
    elsewhere: list[Tensor]
    """The same rows in the memory of each other process."""
    arrived: list[Tensor]
    """Gradients of these rows, as each other process has sent them."""
    outboxes: list[tuple[int, Tensor]]
    """For each other process its rank, and where the gradient of its rows goes."""


def share(weights: Sequence[nn.Parameter], device: torch.device) -> tuple[Memory, list[Shared]]:
    """Moves weights into a new shared memory.

    Each process's memory has, for each weight, the weight and then an inbox for each other process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    # The first process has the most rows.
    inboxes = [_aligned(weight.tensor_split(size)[0].numel()) for weight in weights]
    numbers = [_aligned(weight.numel()) for weight in weights]
    memory = Memory(sum(numbers) + (size - 1) * sum(inboxes), device)
    shared, begin = [], 0
    for weight, number, inbox in zip(weights, numbers, inboxes, strict=True):
        copies = [one[begin:][: weight.numel()].view_as(weight) for one in memory.of]
        rows = [copy.tensor_split(size)[i] for i, copy in enumerate(copies)]
        begin += number

        def inbox_of(
            owner: int, sender: int, begin: int = begin, inbox: int = inbox, like: Any = rows
        ) -> Tensor:
            place = begin + (sender - owner - 1) % size * inbox
            return memory.of[owner][place:][: like[owner].numel()].view_as(like[owner])

        begin += (size - 1) * inbox
        weight.data = copies[rank].copy_(weight.detach())
        shared.append(
            Shared(
                nn.Parameter(rows[rank]),
                elsewhere=[copies[other].tensor_split(size)[rank] for other in others],
                arrived=[inbox_of(rank, other) for other in others],
                outboxes=[(other, inbox_of(other, rank)) for other in others],
            )
        )
    return memory, shared


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


class PeerToPeer(Strategy):
    """All weights on all processes; each updates its rows of them, as with ZeRO 1. A gradient goes
    to the processes that have its rows as soon as it is computed. For GPUs of one host."""

    _memory: Memory | None = None
    _shared: dict[nn.Parameter, Shared]
    _parts: list[list[Shared]]
    _each: list[torch.optim.Optimizer]
    """The optimizer of each part."""

    def build(self) -> nn.Module:
        self._memory, self._shared, self._parts, self._each = None, {}, [], []  # of an earlier one
        return super().build()

    def wrap(self, plain: nn.Module) -> nn.Module:
        weights = list(plain.parameters())
        device = self.asked.device
        self._memory, shared = share(weights, device)
        self.unseen_bytes = self._memory.unseen_bytes
        self._shared = dict(zip(weights, shared, strict=True))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        send = WeakMethod(self._send)  # PyTorch holds hooks where Python's collector can't see them
        for weight in weights:
            weight.register_post_accumulate_grad_hook(
                partial(_if_alive, send, self._shared[weight])
            )
        return plain

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        most = (self.sending.bucket_mb or 32) * 2**20
        self._parts = _in_parts(self._shared.values(), most)
        options = getattr(self.plain, "fusions", None)  # what the versions ask a model for
        self._each = [
            self.asked.module.configure_optimizer(
                SimpleNamespace(
                    parameters=lambda part=part: iter([one.own for one in part]), fusions=options
                ),
                learning_rate,
            )
            for part in self._parts
        ]
        return _AsOne(self._each)

    # --- the step

    def clear_gradients(self) -> None:
        self.plain.zero_grad(set_to_none=True)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        self._sends = last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / dist.get_world_size())

    def _send(self, shared: Shared, weight: Tensor) -> None:
        """Sends a gradient's rows to the processes that update them."""
        if self._sends and weight.grad is not None:
            rows = weight.grad.tensor_split(dist.get_world_size())
            with self._beside():
                for other, outbox in shared.outboxes:
                    outbox.copy_(rows[other], non_blocking=True)

    def passes(self, tokens: Tensor, targets: Tensor, phase: markers.Range = nullcontext) -> Tensor:
        loss = super().passes(tokens, targets, phase)
        self._wait_for_all()
        for weight, shared in self._shared.items():
            shared.own.grad = None if weight.grad is None else self._rows(weight.grad)
        self._unsummed = [*self._parts]
        return loss

    def _sum(self, part: list[Shared]) -> None:
        """Adds the others' gradients of a part to this process's own."""
        self._unsummed.remove(part)
        found = [shared for shared in part if shared.own.grad is not None]
        own = [shared.own.grad for shared in found]
        for arrived in zip(*(shared.arrived for shared in found), strict=True):
            torch._foreach_add_(own, arrived)  # type: ignore[arg-type]

    def update(self) -> None:
        for part, optimizer in zip(self._parts, self._each, strict=True):
            self._sum(part)
            optimizer.step()
            with self._beside():
                for shared in part:
                    for copy in shared.elsewhere:
                        copy.copy_(shared.own.detach(), non_blocking=True)
        self._wait_for_all()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU the block runs after what it has been given so far, and beside what comes."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _wait_for_all(self) -> None:
        """Waits until what all processes have sent has arrived."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        assert self._memory is not None
        self._memory.barrier()

    # --- whole tensors, for the proof and for checkpoints

    def _rows(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        return whole.tensor_split(dist.get_world_size())[dist.get_rank()]

    def _gathered(self, tensor: Tensor) -> Tensor:
        """A copy with each process's own rows in it."""
        whole = tensor.detach().clone()
        for rank, rows in enumerate(whole.tensor_split(dist.get_world_size())):
            if rows.numel():
                dist.broadcast(rows, rank)
        return whole

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        for part in [*self._unsummed]:
            self._sum(part)
        return None if weight.grad is None else self._gathered(weight.grad)

    def state(self) -> dict[str, Tensor]:
        state = {}
        for name, weight in self.plain.named_parameters():
            state[f"weight.{name}"] = weight.detach()
            of_rows = self.optimizer.state[self._shared[weight].own]
            for moment in MOMENTS:
                whole = torch.zeros_like(weight)
                self._rows(whole).copy_(of_rows[moment])
                state[f"{moment}.{name}"] = self._gathered(whole)
        return state

    def resume(self, steps: int, read: Callable[[dict[str, Tensor]], object]) -> None:
        self._begin_state((shared.own for shared in self._shared.values()), steps)
        state = self.state()
        read(state)
        for name, weight in self.plain.named_parameters():
            for moment in MOMENTS:
                of_rows = self.optimizer.state[self._shared[weight].own][moment]
                of_rows.copy_(self._rows(state[f"{moment}.{name}"]))


def _if_alive(
    send: Callable[[], Callable[[Shared, Tensor], None] | None], shared: Shared, weight: Tensor
) -> None:
    if method := send():
        method(shared, weight)


def _in_parts(weights: Iterable[Shared], most: int) -> list[list[Shared]]:
    """The weights in their order, in parts of which this process updates at most `most` bytes, or
    one weight."""
    parts: list[list[Shared]] = []
    size = most
    for weight in weights:
        if size + weight.own.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(weight)
        size += weight.own.nbytes
    return parts


class _AsOne(torch.optim.Optimizer):
    """Several optimizers to those who read or set what an optimizer has: groups and state."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in each for group in one.param_groups], each[0].defaults)
        for one in each:
            one.state = self.state
