"""Cost of a program before its first fast step: the compilers' time, apart from all else.

torch.compile says when it starts and ends, for forward and backward passes alike (PyTorch 2.6 for
forward passes alone); Triton says what the compilation of each kernel took. A compiler that finds
its work done in its cache takes less.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()  # backward passes are compiled in a thread of autograd's
_seconds = 0.0
_started: float | None = None
_count_graphs = _count_kernels = True
_watched: set[str] = set()


def watch_compilers(*, torch_compile: bool) -> None:
    """Counts from now on what compilers take in this process.

    Args:
        torch_compile: whether it will be used; importing it takes a second or two.
    """
    if torch_compile and "torch" not in _watched:
        _watched.add("torch")
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(_start)
        callback_handler.register_end_callback(_end)
    if "triton" in sys.modules and "triton" not in _watched:
        knobs = getattr(sys.modules["triton"], "knobs", None)  # from Triton 3.4 on
        if knobs is not None:
            _watched.add("triton")
            knobs.compilation.listener = _kernel_compiled


def compile_seconds() -> float:
    """Seconds of compilers since `watch_compilers`, without code that training never calls."""
    return _seconds


@contextlib.contextmanager
def not_counted(*, kernels: bool = True, graphs: bool = False) -> Iterator[None]:
    """Leaves the time of torch.compile in the block out of the count: its graphs are for other
    shapes or without a backward pass, and training never calls them.

    Args:
        kernels: whether training calls Triton's kernels of the block, not so if they are of another
            precision: they are not counted then.
        graphs: whether training calls torch.compile's graphs of the block.
    """
    global _count_graphs, _count_kernels
    before = _count_graphs, _count_kernels
    _count_graphs, _count_kernels = graphs and _count_graphs, kernels and _count_kernels
    try:
        yield
    finally:
        _count_graphs, _count_kernels = before


def _start(*_: object) -> None:
    global _started
    with _lock:
        _started = time.perf_counter()


def _end(*_: object) -> None:
    global _seconds, _started
    with _lock:
        if _started is not None and _count_graphs:
            _seconds += time.perf_counter() - _started
        _started = None


def _kernel_compiled(*, times: Any, **_: object) -> None:
    """Called by Triton after each kernel; those that torch.compile asks for are in its time."""
    global _seconds
    with _lock:
        if _started is None and _count_kernels:
            _seconds += times.total / 1e6
