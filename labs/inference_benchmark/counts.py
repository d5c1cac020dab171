"""Operations and bytes of a network, by layer: what a batch must compute and move.

Counted on one image and multiplied by the batch, operation by operation, with a multiplication and
an addition as two. The bytes of a layer are those of its inputs, outputs and weights, each once, as
if it ran alone: a compiler that joins layers moves fewer. A layer is a module without children, or
an operation that runs outside of those, as a residual addition does; views move nothing.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

WHOLE = "network"
"""Among the names of layers, the one of all together."""
_UNITS = (nn.MultiheadAttention,)
"""Modules that call their children's functions past the children."""


@dataclass(frozen=True)
class Layer:
    """A module without children, or an operation outside of those. `flops` and `moved` are of one
    image, `weights` are elements."""

    name: str
    """The module's that calls the operation; `kind` is its own in PyTorch, such as "aten.add_"."""
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
    """Counts of a forward pass of one image."""

    flops: float
    layers: tuple[Layer, ...]
    parameters: int

    def intensity(self, batch_size: int, element_bytes: int) -> float:
        """FLOP for each byte that the layers move, each alone, of a whole batch."""
        moved = sum(layer.bytes(batch_size, element_bytes) for layer in self.layers)
        return self.flops * batch_size / moved


@torch.no_grad()
def count(model: nn.Module, image: Tensor) -> Counts:
    """Counts a forward pass of an fp32 network in inference mode; image is (1, 3, H, W). Nothing is
    computed: shapes are enough."""
    model, image = copy.deepcopy(model).to("meta").eval(), image.to("meta")
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    # A transformer layer's fast path is one operation, which no counter knows.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter, _Layers(model, counter) as found:
            model(image)
            flops = float(counter.get_total_flops())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return Counts(flops, tuple(found.layers), sum(p.numel() for p in model.parameters()))


class _Layers(TorchDispatchMode):
    """Lists a network's layers as they run: modules without children by their hooks, and each
    operation outside of them."""

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self._counter = counter
        self._weights = {_storage(p) for p in model.parameters()}
        self._start = 0
        self._inside = False
        self._callers: list[str] = []
        for name, module in model.named_modules():
            self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(*_: object) -> None:
            self._start, self._inside = self._counter.get_total_flops(), True

        def after(module: nn.Module, inputs: object, outputs: object) -> None:
            weights = sum(p.numel() for p in module.parameters())
            moved = _elements(_tensors((inputs, outputs)))
            self._add(name, type(module).__name__, moved, weights)
            self._inside = False

        if isinstance(module, _UNITS) or next(module.children(), None) is None:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(lambda *_: self._callers.append(name))
            module.register_forward_hook(lambda *_: self._callers.remove(name))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._start = self._start if self._inside else self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        places = {_storage(tensor) for tensor in inputs}
        if func._schema.is_mutable or any(_storage(out) not in places for out in outputs):
            weights = [tensor for tensor in inputs if _storage(tensor) in self._weights]
            moved = _elements(inputs) - _elements(weights) + _elements(outputs)
            self._add(self._callers[-1], str(func.overloadpacket), moved, _elements(weights))
        return result

    def _add(self, name: str, kind: str, moved: int, weights: int) -> None:
        flops = float(self._counter.get_total_flops() - self._start)
        self.layers.append(Layer(name, kind, flops, moved, weights))


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    """Number that a tensor and its views have in common; on the meta device as well."""
    return tensor.untyped_storage()._cdata
