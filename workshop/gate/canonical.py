"""V1's names: loads V1's weights into any version, and gives any version's gradients back under
V1's names, fused ones taken apart."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from workshop import results, versions


def build_baseline(config: Any) -> nn.Module:
    """V1 with the sizes of `config`, whichever version's `TinyLlamaConfig` that is."""
    return versions.load(versions.BASELINE).TinyLlama(v1_config(config))


def v1_config(config: Any) -> Any:
    """V1's config with the fields of another, which may have more."""
    v1 = versions.load(versions.BASELINE)
    names = (one.name for one in dataclasses.fields(v1.TinyLlamaConfig))
    return v1.TinyLlamaConfig(**{name: getattr(config, name) for name in names})


def differing_defaults(config: Any) -> list[str]:
    """A sentence for each default of a `TinyLlamaConfig` that is not V1's: a run that names no
    other value trains another model than V1."""
    of_v1 = dataclasses.asdict(versions.load(versions.BASELINE).TinyLlamaConfig())
    return [
        f"{type(config).__name__}'s default of {one.name} is {one.default!r}, "
        f"V1's {of_v1[one.name]!r}"
        for one in dataclasses.fields(config)
        if one.name in of_v1 and one.default not in (dataclasses.MISSING, of_v1[one.name])
    ]


def canonical_state(config: Any, seed: int) -> Mapping[str, Tensor]:
    """V1's initial weights for a seed, drawn on the CPU: every version starts from these."""
    return _canonical_state(dataclasses.astuple(v1_config(config)), seed)


@functools.lru_cache(maxsize=1)  # the gate and then the run want the same, which takes seconds
def _canonical_state(sizes: tuple[Any, ...], seed: int) -> Mapping[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        v1 = versions.load(versions.BASELINE)
        return MappingProxyType(v1.TinyLlama(v1.TinyLlamaConfig(*sizes)).state_dict())


def load_canonical(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads weights under V1's names into any version.

    A version that stacks several of V1's weights in one declares `fused_weights`, for example
    {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}; rows are stacked in that order. Raises
    ValueError: a weight is missing, left over, or of another shape.
    """
    remaining = dict(state)
    own = dict(model.named_parameters(remove_duplicate=False))
    if "lm_head.weight" in own and "lm_head.weight" not in remaining:
        remaining["lm_head.weight"] = remaining["embed_tokens.weight"]  # tied
    with torch.no_grad():
        for name, parameter in own.items():
            parts = _canonical_parts(model, name)
            missing = [part for part in parts if part not in remaining]
            if missing:
                raise ValueError(
                    f"{name} of {type(model).__name__}: V1 has no {missing[0]}; take V1's names, "
                    "or fused_weights for one that holds several"
                )
            tensors = [remaining.pop(part) for part in parts]
            value = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{name} is {tuple(parameter.shape)}, the weights to load {tuple(value.shape)}"
                )
            parameter.copy_(value)
    if remaining:
        raise ValueError(f"{type(model).__name__} has no {next(iter(remaining))}, V1 does")


def canonical_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Each parameter's gradient under V1's names, fused ones taken apart; None for a
    parameter without one. The tied head and embedding are one entry, `embed_tokens.weight`."""
    return take_apart(model, lambda parameter: parameter.grad)


def count_gradients(model: nn.Module) -> results.Gradients:
    """How many of V1's tensors, and of their weights, the last backward pass reached."""
    sizes = {name: weight.numel() for name, weight in canonical_weights(model).items()}
    gradients = canonical_gradients(model)
    return results.Gradients.of(sizes, [name for name in sizes if is_gradient(gradients[name])])


def canonical_weights(model: nn.Module) -> dict[str, Tensor]:
    weights = take_apart(model, lambda parameter: parameter.detach())
    return {name: weight for name, weight in weights.items() if weight is not None}


def take_apart(
    model: nn.Module, get: Callable[[nn.Parameter], Tensor | None]
) -> dict[str, Tensor | None]:
    """The tensors that `get` gives for each parameter, under V1's names, fused ones taken apart."""
    version: Any = model
    fused = bool(getattr(model, "fused_weights", None))
    rows = _rows_of_v1(dataclasses.astuple(version.config)) if fused else {}
    tensors: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        parts, tensor = _canonical_parts(model, name), get(parameter)
        if tensor is None or len(parts) == 1:
            tensors.update(dict.fromkeys(parts, tensor))
        else:
            sections = [rows[part] for part in parts]
            tensors.update(zip(parts, tensor.split(sections), strict=True))
    return tensors


def _canonical_parts(model: nn.Module, name: str) -> list[str]:
    """The V1 names of what a parameter holds; its own name if it holds one weight."""
    table: dict[str, tuple[str, ...]] = getattr(model, "fused_weights", {})
    for fused, parts in table.items():
        if name.endswith(f"{fused}.weight"):
            prefix = name.removesuffix(f"{fused}.weight")
            return [f"{prefix}{part}.weight" for part in parts]
    return [name]


@functools.lru_cache(maxsize=1)  # a comparison's clock runs when it is asked for the second time
def _rows_of_v1(sizes: tuple[Any, ...]) -> Mapping[str, int]:
    """Rows of each of V1's weights."""
    v1 = versions.load(versions.BASELINE)
    with torch.device("meta"):  # which takes no memory
        baseline = v1.TinyLlama(v1.TinyLlamaConfig(*sizes))
    rows = {name: parameter.shape[0] for name, parameter in baseline.named_parameters()}
    return MappingProxyType(rows)


def is_gradient(gradient: Tensor | None) -> bool:
    """Whether it is there and not all zeros."""
    return gradient is not None and bool(gradient.count_nonzero())
