"""Messages between the judge and a process that it started, over a socket: its standard input.

A message is a line of JSON and the bytes of its tensors. Reading one runs none of the sender's
code, and takes no more memory than MOST_BYTES.
"""

import contextlib
import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor

from workshop.errors import WorkshopError

MOST_BYTES = 2**30
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.int64, torch.int32)
}


NO_MESSAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""The errors that reading something else than what was expected ends in."""


class Closed(WorkshopError):
    """The other side has ended, or does not keep to the protocol."""


class Ended(Closed):
    """The other side has ended."""


@dataclass(frozen=True)
class Message:
    """A question or an answer: its kind, plain values, and tensors on the CPU."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Pipe:
    """One end: it reads messages from one file descriptor and writes them to another."""

    def __init__(self, read: int, write: int) -> None:
        for end in (read, write):  # which no process that is started later shall hold
            os.set_inheritable(end, False)
        self._read: BinaryIO = os.fdopen(read, "rb")
        self._write: BinaryIO = os.fdopen(write, "wb")

    @staticmethod
    def to_judge() -> "Pipe":
        """The judged process's end: its standard input, which is empty from then on, also for what
        it starts."""
        end, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return Pipe(end, os.dup(end))

    def send(
        self, kind: str, tensors: Mapping[str, Tensor] | None = None, /, **values: Any
    ) -> None:
        """Raises Closed: the other side has ended."""
        plain = {
            name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()
        }
        described = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in plain.items()
        }
        head = json.dumps({"kind": kind, "values": values, "tensors": described})
        try:
            self._write.write(head.encode() + b"\n")
            for tensor in plain.values():
                self._write.write(tensor.flatten().numpy().tobytes())
            self._write.flush()
        except (ConnectionError, ValueError) as error:
            raise Ended(f"the process no longer listens ({error})") from None

    def receive(self) -> Message:
        """Waits for the next message. Raises Closed: the other side ended, or sent no message."""
        try:
            line = self._read.readline(MOST_BYTES)
        except ConnectionError:  # it ended with a question unread
            line = b""
        if not line.endswith(b"\n"):
            raise Ended("the process ended without an answer")
        try:
            head = json.loads(line)
            tensors = {
                str(name): self._tensor(_DTYPES[dtype], [int(size) for size in shape])
                for name, (dtype, shape) in head["tensors"].items()
            }
            return Message(str(head["kind"]), dict(head["values"]), tensors)
        except (*NO_MESSAGE, RecursionError) as error:
            raise Closed(f"the process wrote no message ({error!s:.60})") from None

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        wanted = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or wanted > MOST_BYTES:
            raise ValueError(f"a tensor of shape {shape}")
        content = self._read.read(wanted)
        if len(content) < wanted:
            raise ValueError("cut off")
        if not wanted:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)

    def hang_up(self) -> None:
        """Ends the connection, also for a thread that waits for a message."""
        gone = contextlib.suppress(OSError, ValueError)  # it has ended, or is closed
        with gone, socket.socket(fileno=os.dup(self._read.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for file in (self._read, self._write):
            with contextlib.suppress(OSError):  # what was not sent is lost with the other side
                file.close()
