"""Operations and bytes of a network, by layer: what a batch must compute and move.

Counted on one image and multiplied by the batch, operation by operation, with a multiplication and
an addition as two. The bytes of a layer are those of its inputs, outputs and weights, each once, as
if it ran alone: a compiler that joins layers moves fewer.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_UNITS = (nn.MultiheadAttention,)
"""Modules that call their children's functions past the children."""


@dataclass(frozen=True)
class Layer:
    """One module without children. `flops` and `moved` are of one image, `weights` are elements."""

    name: str
    kind: str
    flops: float
    moved: int
    """Elements that go in and come out."""
    weights: int

    def intensity(self, batch_size: int, element_bytes: int) -> float:
        """FLOP for each byte."""
        return self.flops * batch_size / self.bytes(batch_size, element_bytes)

    def bytes(self, batch_size: int, element_bytes: int) -> float:
        return float(element_bytes * (self.moved * batch_size + self.weights))


@dataclass(frozen=True)
class Counts:
    """Of a forward pass of one image."""

    flops: float
    layers: tuple[Layer, ...]
    parameters: int

    def bytes(self, batch_size: int, element_bytes: int) -> float:
        """That all layers move for a batch, each alone."""
        return sum(layer.bytes(batch_size, element_bytes) for layer in self.layers)

    def intensity(self, batch_size: int, element_bytes: int) -> float:
        """FLOP for each byte, of a whole batch."""
        return self.flops * batch_size / self.bytes(batch_size, element_bytes)


@torch.no_grad()
def count(model: nn.Module, image: Tensor) -> Counts:
    """Counts a forward pass of an fp32 network in inference mode; image is (1, 3, H, W). Nothing is
    computed: shapes are enough."""
    model, image = copy.deepcopy(model).to("meta").eval(), image.to("meta")
    layers: list[Layer] = []
    with _no_fast_path(), FlopCounterMode(display=False) as counter:
        for name, module in model.named_modules():
            if _is_unit(module):
                _watch(name, module, counter, layers)
        model(image)
        flops = float(counter.get_total_flops())
    return Counts(flops, tuple(layers), sum(p.numel() for p in model.parameters()))


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, _UNITS) or next(module.children(), None) is None


def _watch(name: str, module: nn.Module, counter: FlopCounterMode, layers: list[Layer]) -> None:
    start = 0

    def before(*_: object) -> None:
        nonlocal start
        start = counter.get_total_flops()

    def after(module: nn.Module, inputs: object, outputs: object) -> None:
        flops = counter.get_total_flops() - start
        moved = _elements(inputs) + _elements(outputs)
        weights = sum(p.numel() for p in module.parameters())
        layers.append(Layer(name, type(module).__name__, float(flops), moved, weights))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _elements(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, (tuple, list)) else 0


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Otherwise a transformer's layer is one operation in inference, which no counter knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
