"""Training in which the GPUs of one host write straight into each other's memory.

NCCL's kernels run on multiprocessors, which the backward pass needs: a matrix product that has a
block for each of them takes twice as long beside NCCL. A GPU's copy engines need none. They move
gradients to the process that updates these rows while the backward pass goes on, and updated rows
to all others: those of the first layers while AdamW updates the next ones, those of a later layer
during the next forward pass, before it gets there. What is compiled can't wait there: then all rows
are sent beside AdamW. PyTorch calls such memory symmetric; without a GPU the processes share files.
"""

import functools
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
from labs.scale_out.strategies import MOMENTS, Strategy, layers_of
from workshop.errors import NotOnThisMachine
from workshop.run import markers

ALIGNMENT = 64
"""Tensors in the shared memory begin at multiples of so many numbers."""
MOST_ADDED = 8
"""Tensors that PyTorch's jiterator adds in one kernel."""


class Memory:
    """A buffer of numbers in each process, which all processes can write.

    Attributes:
        of: the buffer of each process, by rank.
        barrier: waits for all processes; on a GPU its stream waits, and the host goes on.
        barrier_beside: a second one, for another stream.
        unseen_bytes: what PyTorch's allocator does not count of this process's buffer.

    Raises:
        NotOnThisMachine: a GPU can't write into the memory of another.
    """

    def __init__(
        self, numbers: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.barrier: Callable[[], object] = dist.barrier
        self.barrier_beside: Callable[[], object] = dist.barrier
        self.unseen_bytes = 0
        on_gpu = device.type == "cuda"
        self.of = self._on_gpus(numbers, device, dtype) if on_gpu else self._files(numbers, dtype)

    def _on_gpus(self, numbers: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        assert device.index is not None
        for other in range(dist.get_world_size()):
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                raise NotOnThisMachine(
                    f"--strategy p2p: {device} can't write into the memory of cuda:{other}; use ddp"
                )
        before = torch.cuda.memory_allocated(device)
        own = symmetric.empty(numbers, dtype=dtype, device=device)
        self.unseen_bytes = own.nbytes - (torch.cuda.memory_allocated(device) - before)
        handle = symmetric.rendezvous(own, dist.group.WORLD)  # type: ignore[arg-type]
        self.barrier, self.barrier_beside = handle.barrier, partial(handle.barrier, 1)
        return [handle.get_buffer(i, (numbers,), own.dtype) for i in range(dist.get_world_size())]

    def _files(self, numbers: int, dtype: torch.dtype) -> list[Tensor]:
        first = dist.get_rank() == 0
        # Not in /dev/shm: a container's has 64 MB, and a process that writes beyond is killed.
        folder = groups.of_first(tempfile.mkdtemp() if first else "")
        paths = [f"{folder}/{rank}" for rank in range(dist.get_world_size())]

        def opened(path: str) -> Tensor:
            return torch.from_file(path, shared=True, size=numbers, dtype=dtype)

        opened(paths[dist.get_rank()])
        dist.barrier()
        found = list(map(opened, paths))
        dist.barrier()
        if first:
            shutil.rmtree(folder)
        return found


@dataclass(eq=False)
class Shared:
    """A weight of which each process updates some rows."""

    own: nn.Parameter
    """This process's rows, a view of the weight."""
    sent: Tensor
    """These rows as the others get them: as they are, or rounded."""
    elsewhere: list[Tensor]
    """Where they go, in the memory of each other process."""
    arrived: list[Tensor]
    """Gradients of these rows, as each other process has sent them."""
    outboxes: list[tuple[int, Tensor]]
    """For each other process its rank, and where the gradient of its rows goes."""
    late: bool = False
    """Its rows are sent during the next forward pass."""


def share(weights: Sequence[nn.Parameter], device: torch.device) -> tuple[Memory, list[Shared]]:
    """Moves weights into a new shared memory.

    Each process's memory has, for each weight, the weight and then an inbox for each other process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    others = _others()
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
                nn.Parameter(rows[rank].data),  # with a version counter of its own
                sent=rows[rank],
                elsewhere=[copies[other].tensor_split(size)[rank] for other in others],
                arrived=[inbox_of(rank, other) for other in others],
                outboxes=[(other, inbox_of(other, rank)) for other in others],
            )
        )
    return memory, shared


def _others() -> list[int]:
    """The other processes, in the order in which this one sends to them: at any time each process
    gets from one other. If all sent to rank 0 first, they would share its link."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [(rank + i) % size for i in range(1, size)]


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


class PeerToPeer(Strategy):
    """All weights on all processes; each updates its rows of them, as with ZeRO 1. A gradient goes
    to the processes that have its rows as soon as it is computed. For GPUs of one host."""

    _memories: list[Memory]
    _rounded: dict[nn.Parameter, Tensor] | None = None
    """After the first update: of weights whose copies all processes share, this process's copy."""
    _shared: dict[nn.Parameter, Shared]
    _parts: list[list[Shared]]
    _each: list[torch.optim.Optimizer]
    """The optimizer of each part."""
    _late: list[list[Shared]]
    """The weights of each later layer whose rows are sent during the next forward pass."""
    _arrivals: list[Callable[[], object]]
    """During that pass: wait until such a layer's rows have arrived."""
    _stale: bool
    """Rows of an update are still to be sent."""
    _embedding: Shared
    """The first weight. Its gradient is the last, and large: other weights are updated while it is
    on its way."""
    _sent: int
    """Gradients that the present backward pass has sent."""
    _arrived: list[Callable[[], object]]
    """Wait until all gradients but the embedding's have arrived, and until that one has; none where
    it was not the last."""

    def build(self) -> nn.Module:
        self._memories, self._shared, self._parts, self._each = [], {}, [], []  # of an earlier one
        self._late, self._arrivals, self._stale = [], [], False
        self._rounded = None
        return super().build()

    def wrap(self, plain: nn.Module) -> nn.Module:
        weights = list(plain.parameters())
        device = self.asked.device
        memory, shared = share(weights, device)
        self._memories = [memory]
        self._shared = dict(zip(weights, shared, strict=True))
        self._embedding = shared[0]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        send = WeakMethod(self._send)  # PyTorch holds hooks where Python's collector can't see them
        for weight in weights:
            weight.register_post_accumulate_grad_hook(
                partial(_if_alive, send, self._shared[weight])
            )
        if self.asked.compile_mode == "none":
            self._hook_layers(plain)
        return plain

    def _hook_layers(self, plain: nn.Module) -> None:
        """The first layer sends the late rows: a captured step starts its parallel parts in their
        order, and the embedding comes first. For the first quarter of the layers they would be too
        late; these rows leave beside AdamW, which is busy for about as long."""
        layers = [*layers_of(plain)]
        send, wait = WeakMethod(self._send_late), WeakMethod(self._wait_for_layer)
        layers[0].register_forward_pre_hook(lambda *_: _if_alive(send))
        for i, layer in enumerate(layers[max(1, len(layers) // 4) :]):
            layer.register_forward_pre_hook(lambda *_, i=i: _if_alive(wait, i))
            # The norms' rows are few, and each is a copy of its own.
            weights = [self._shared[one] for one in layer.parameters() if one.dim() > 1]
            for shared in weights:
                shared.late = True
            self._late.append(weights)

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        most = (self.sending.bucket_mb or 32) * 2**20
        # Nothing runs beside the last part's rows on their way: they should be late, or few and not
        # the norms', each of which is a copy of its own.
        others = [one for one in self._shared.values() if one is not self._embedding]
        others.sort(key=lambda one: (one.late, one.own.dim() > 1, -one.own.numel()))
        self._parts = _in_parts(others, most)
        # Its gradient arrives beside the parts before it, its rows leave beside those behind it.
        self._parts.insert(len(self._parts) // 2, [self._embedding])
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
        if keeps := self._keeps_rounded():
            for weight in self._shared:
                keeps.keep_rounded(weight)
        return _AsOne(self._each)

    def _keeps_rounded(self) -> Any:
        """V3's module that keeps the weights rounded for the products, if its AdamW renews them."""
        fusions: Any = getattr(self.plain, "fusions", None)
        if self.asked.version.key != "v3" or not fusions.fuse_optimizer:
            return None
        import triton_linear

        return triton_linear

    def _share_rounded(self) -> dict[nn.Parameter, Tensor]:
        """Moves the rounded copies that the passes have made into a memory of all processes: only
        they are sent from now on, and the weights themselves are up to date in their owner alone.
        """
        keeps, rank, size = self._keeps_rounded(), dist.get_rank(), dist.get_world_size()
        copies = {weight: keeps.rounded_copy(weight) for weight in self._shared} if keeps else {}
        copies = {weight: copy for weight, copy in copies.items() if copy is not None}
        if not copies:
            return {}
        numbers = sum(_aligned(weight.numel()) for weight in copies)
        memory = Memory(numbers, self.asked.device, next(iter(copies.values())).dtype)
        self._memories.append(memory)
        begin = 0
        for weight, copy in copies.items():
            places = [one[begin:][: weight.numel()].view_as(weight) for one in memory.of]
            begin += _aligned(weight.numel())
            copies[weight] = places[rank].copy_(copy)
            rows = [place.tensor_split(size)[rank] for place in places]
            shared = self._shared[weight]
            shared.sent = rows[rank]
            shared.elsewhere = [rows[other] for other in _others()]
            keeps.keep_rounded(weight, copies[weight])
            keeps.keep_rounded(shared.own, shared.sent)
        self._wait_for_all()
        return copies

    @property
    def unseen_bytes(self) -> int:
        return sum(memory.unseen_bytes for memory in self._memories)

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
        if not self._sends or weight.grad is None:
            return
        rows = weight.grad.tensor_split(dist.get_world_size())
        self._sent += 1
        last = shared is self._embedding and self._sent == len(self._shared)
        with self._beside():
            if last:
                self._arrived.append(self._arrival())
            for other, outbox in shared.outboxes:
                outbox.copy_(rows[other], non_blocking=True)
            if last:
                self._arrived.append(self._arrival())

    def _arrival(self) -> Callable[[], object]:
        """For use beside the passes: what makes these wait until all that has been sent so far, by
        all processes, has arrived."""
        self._memories[0].barrier_beside()
        return self._stream.record_event().wait if self._stream is not None else lambda: None

    def passes(self, tokens: Tensor, targets: Tensor, phase: markers.Range = nullcontext) -> Tensor:
        self._sent, self._arrived = 0, []
        loss = super().passes(tokens, targets, phase)
        if self._arrived:
            self._arrived[0]()
        else:
            self._wait_for_all()
        for weight, shared in self._shared.items():
            shared.own.grad = None if weight.grad is None else self._rows(weight.grad)
        self._unsummed = [*self._parts]
        return loss

    def _sum(self, part: list[Shared]) -> None:
        """Adds the others' gradients of a part to this process's own."""
        self._unsummed.remove(part)
        if self._embedding in part and self._arrived:
            self._arrived[1]()
        for shared in part:
            if shared.own.grad is not None:
                shared.own.grad = added(shared.own.grad, *shared.arrived)

    def update(self) -> None:
        if self._rounded is None:
            self._rounded = self._share_rounded()
        for part, optimizer in zip(self._parts, self._each, strict=True):
            self._sum(part)
            optimizer.step()
            for shared in part:
                shared.own.grad = None
            with self._beside():
                _send_rows(shared for shared in part if not shared.late)
        self._wait_for_all()
        self._stale = bool(self._late)

    def _send_late(self) -> None:
        """Sends the later layers' rows, if they have not been sent since the update."""
        if not self._stale:
            return
        self._stale = False
        with self._beside():
            for layer in self._late:
                _send_rows(layer)
                self._arrivals.append(self._arrival())

    def _wait_for_layer(self, i: int) -> None:
        if self._arrivals:
            self._arrivals[i]()

    def weights(self) -> dict[str, Tensor]:
        if self._stale:
            self._send_late()
            self._wait_for_all()
        return super().weights()

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
        self._memories[0].barrier()
        self._arrivals.clear()

    # --- whole tensors, for gate, audit and checkpoints

    def _rows(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        return whole.tensor_split(dist.get_world_size())[dist.get_rank()]

    def _gather(self, tensor: Tensor) -> Tensor:
        """Puts each process's own rows into the tensor of all; returns it."""
        for rank, rows in enumerate(tensor.tensor_split(dist.get_world_size())):
            if rows.numel():
                dist.broadcast(rows, rank)
        return tensor

    def weight(self, weight: nn.Parameter) -> Tensor:
        copy = (self._rounded or {}).get(weight)
        if copy is None:
            return weight.detach()
        # `data`: the copy would be made anew for a weight that PyTorch has seen change.
        whole = self._gather(weight.data)
        return torch.where(whole.to(copy.dtype) == copy, whole, copy.to(whole.dtype))

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        for part in [*self._unsummed]:
            self._sum(part)
        rows = self._shared[weight].own.grad
        if weight.grad is None or rows is None:
            return None
        whole = weight.grad.clone()
        self._rows(whole).copy_(rows)
        return self._gather(whole)

    def state(self) -> dict[str, Tensor]:
        state = {}
        for name, weight in self.plain.named_parameters():
            state[f"weight.{name}"] = self._gather(weight.data)
            of_rows = self.optimizer.state[self._shared[weight].own]
            for moment in MOMENTS:
                whole = torch.zeros_like(weight)
                self._rows(whole).copy_(of_rows[moment])
                state[f"{moment}.{name}"] = self._gather(whole)
        return state

    def resume(self, steps: int, read: Callable[[dict[str, Tensor]], object]) -> None:
        self._begin_state((shared.own for shared in self._shared.values()), steps)
        state = self.state()
        read(state)
        self._rounded, self._stale = None, False
        for name, weight in self.plain.named_parameters():
            torch.autograd.graph.increment_version(weight)
            for moment in MOMENTS:
                of_rows = self.optimizer.state[self._shared[weight].own][moment]
                of_rows.copy_(self._rows(state[f"{moment}.{name}"]))


def _if_alive(method: WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if found := method():
        found(*arguments)


def added(*tensors: Tensor) -> Tensor:
    """The sum of tensors of one shape, each read once."""
    if not tensors[0].is_cuda:
        return torch.stack(tensors).sum(0)
    while len(tensors) > 1:
        first, tensors = tensors[:MOST_ADDED], tensors[MOST_ADDED:]
        tensors = (_adder(len(first))(*first), *tensors)
    return tensors[0]


@functools.cache
def _adder(number: int) -> Any:
    names = [f"x{i}" for i in range(number)]
    arguments = ", ".join(f"T {name}" for name in names)
    return torch.cuda.jiterator._create_jit_fn(
        f"template <typename T> T added({arguments}) {{ return {' + '.join(names)}; }}"
    )


def _send_rows(weights: Iterable[Shared]) -> None:
    for shared in weights:
        for place in shared.elsewhere:
            place.copy_(shared.sent, non_blocking=True)


def _in_parts(weights: Sequence[Shared], most: int) -> list[list[Shared]]:
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
