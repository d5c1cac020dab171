"""Launches of Triton's kernels, as they happen."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def watched(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """In the block calls `see` with kernel and grid before each launch."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import KernelInterface

    def watching(launch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def get_item(kernel: Any, grid: Any) -> Any:
            see(kernel, grid)
            return launch(kernel, grid)

        return get_item

    with contextlib.ExitStack() as stack:
        for owner in (KernelInterface, InterpretedFunction):
            if launch := vars(owner).get("__getitem__"):  # the latter has its own in Triton 3.2
                stack.enter_context(mock.patch.object(owner, "__getitem__", watching(launch)))
        yield
