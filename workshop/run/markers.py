"""Marker ranges: names for stretches of a run, which profilers show above the kernels.

They are put around the parts of a step, and around the layers by hooks that are there while a
profile is made and at no other time: what is not profiled pays nothing for them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

Range = Callable[[str], AbstractContextManager[Any]]
"""Makes a range of a name, to be entered with `with`."""


@contextmanager
def _pushed(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def for_torch_profiler(name: str) -> AbstractContextManager[Any]:
    """A range that torch.profiler writes into its trace."""
    return record_function(name)


def for_vendor_tools(device: torch.device) -> Range:
    """Ranges that the vendor's tools see: NVTX on NVIDIA, roctx on AMD, which a ROCm build of
    PyTorch calls by the same name. On the CPU there is neither, and the ranges do nothing."""
    return _pushed if device.type == "cuda" else nullcontext


@contextmanager
def layer_ranges(model: nn.Module, range_: Range) -> Iterator[None]:
    """While it lasts, the forward pass of each layer's attention and feed-forward part runs in a
    range with the name of its module: layers.0.self_attn, layers.0.mlp, ...

    The hooks that do it break what torch.compile compiles, and a captured graph does not replay
    them: this is for models that run eagerly.
    """
    open_ranges: list[AbstractContextManager[Any]] = []

    def enter(name: str, module: nn.Module, inputs: Any) -> None:
        open_ranges.append(range_(name))
        open_ranges[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith((".self_attn", ".mlp")):
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield
