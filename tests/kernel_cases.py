"""V3's operators with arguments that find mistakes, and their comparison with plain fp64."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton_kernels
from torch import Tensor

from workshop.gate.parity import MULTIPLE

DEVICE = "cpu" if triton_kernels.INTERPRETED else "cuda"
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MODULES = {
    public.__module__: sys.modules[public.__module__]
    for public in vars(triton_kernels).values()
    if getattr(public, "__module__", "").startswith("triton_")
}
"""Those that have V3's operators and its optimizer."""


@dataclass(frozen=True)
class Case:
    """A call of one operator: the arguments that get gradients, made in fp32, and the others."""

    op: str
    name: str
    make: Callable[[], tuple[Tensor, ...]]
    fixed: dict[str, Any] = field(default_factory=dict)
    roundings: float = 8.0
    """Allowed beyond twice the plain version's error, which may be nil by luck: at T = 2 the
    backward pass of attention, which subtracts the same sums in another order, needs 5."""

    @property
    def label(self) -> str:
        return f"{self.op}-{self.name}"

    @property
    def module(self) -> str:
        return str(getattr(triton_kernels, self.op).__module__)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def heads(B: int, H: int, T: int, D: int) -> Tensor:
    """(B, H, T, D), in memory (B, T, H, D) with other numbers between the tokens."""
    return normal(B, T, H + 1, D)[:, :, :H].transpose(1, 2)


def rows(*shape: int) -> Tensor:
    """Rows from tiny to large, so that the place of eps shows."""
    return normal(*shape) * torch.logspace(-4, 1, shape[-2], device=DEVICE)[:, None]


def drawn(*shapes: tuple[int, ...], how: Callable[..., Tensor] = normal) -> Callable[[], Any]:
    return lambda: tuple(how(*shape) for shape in shapes)


def by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def norm_cases() -> Iterator[Case]:
    fixed = {"eps": 1e-5}
    for s in ((1, 1, 64), (3, 63, 72), (2, 129, 1000), (1, 5, 8191)):
        yield Case("rms_norm", by(*s), lambda s=s: (rows(*s), normal(s[-1])), fixed)
        yield Case(
            *("add_rms_norm", by(*s), lambda s=s: (1e-3 * normal(*s), rows(*s), normal(s[-1]))),
            fixed,
        )
    for op, inputs in (("rms_norm", "x"), ("add_rms_norm", "xx")):
        yield Case(
            *(op, "rows of a view"),
            lambda xs=inputs: (*(normal(9, 7, 200)[:, ::2, 40:140] for _ in xs), normal(100)),
            fixed,
        )
        yield Case(
            *(op, "transposed"),
            lambda xs=inputs: (*(normal(90, 31).t() for _ in xs), normal(200)[::2][:90]),
            fixed,
        )


def swiglu_cases() -> Iterator[Case]:
    for s in ((1, 1, 2), (3, 63, 152), (5, 1376), (1, 35, 2500)):
        yield Case("swiglu", by(*s), drawn(s, s))
    yield Case("swiglu", "halves", lambda: normal(2, 63, 304).chunk(2, dim=-1))
    yield Case("swiglu", "transposed", lambda: (normal(70, 9).t(), normal(9, 70)))
    yield Case("swiglu", "views", lambda: normal(9, 63, 140)[:, ::2, 20:120].chunk(2, dim=-1))


def tables(T: int, D: int) -> dict[str, Tensor]:
    return {"cos": normal(T, D), "sin": normal(T, D)}


def rope_cases() -> Iterator[Case]:
    sizes = ((1, 2, 1, 1, 64), (2, 6, 2, 63, 32), (1, 4, 4, 129, 24), (3, 3, 3, 5, 32))
    for B, H, K, T, D in sizes:
        make = drawn((B, H, T, D), (B, K, T, D), how=heads)
        yield Case("apply_rope", f"B{B} H{H} K{K} T{T} D{D}", make, tables(T, D))


def qkv_attention_cases() -> Iterator[Case]:
    sizes = ((1, 2, 1, 2, 64, 40), (2, 6, 2, 63, 32, 72), (1, 2, 2, 129, 32, 64))
    for B, H, K, T, D, C in (*sizes, (3, 1, 1, 5, 32, 8)):
        x, w = (B, T, C), ((H + 2 * K) * D, C)
        name = f"B{B} H{H} K{K} T{T} D{D} C{C}"
        fixed = {**tables(T, D), "num_heads": H, "num_kv_heads": K}
        make = partial(lambda x, w: (normal(*x), normal(*w) / w[1] ** 0.5), x, w)
        yield Case("qkv_attention", name, make, fixed)


def linear_cases() -> Iterator[Case]:
    for (*N, I), O in (((1, 1, 8), 5), ((3, 63, 72), 40), ((129, 24), 1), ((130, 64), 128)):
        yield Case("linear", by(*N, I, O), drawn((*N, I), (O, I)))
        yield Case("feed_forward", by(*N, I, O), drawn((*N, I), (2 * O, I), (I, O)))


def embedding_cases() -> Iterator[Case]:
    for N, V, C in ((1, 1, 8), (63, 11, 40), (129, 311, 1100)):
        tokens = torch.randint(V, (N,), device=DEVICE)
        yield Case("embedding", f"{N}x{C} of {V}", drawn((V, C)), {"tokens": tokens})


def attention_cases() -> Iterator[Case]:
    sizes = (
        *((1, 2, 1, 2, 32, True), (2, 4, 2, 63, 32, True), (1, 3, 1, 129, 64, True)),
        *((1, 2, 2, 200, 128, True), (1, 2, 1, 129, 32, False), (1, 2, 1, 1, 64, False)),
        *((1, 3, 3, 65, 64, True), (3, 3, 3, 5, 32, True)),
    )
    for B, H, K, T, D, causal in sizes:
        q, k = (B, H, T, D), (B, K, T, D)
        name = f"B{B} H{H} K{K} T{T} D{D} {'causal' if causal else 'full'}"
        yield Case("flash_attention", name, drawn(q, k, k, how=heads), {"causal": causal})

    def low(first: float, count: int) -> Tensor:
        """Heads whose product with those of the opposite sign is very negative."""
        x = heads(1, count, 70, 32)
        x[..., 0] = first
        return x

    # The weight of a key beyond T would be exp(0 - a large negative number). What the first numbers
    # of k give to dq cancels, except for the rounding of a score of -160.
    yield Case(
        *("flash_attention", "low scores"),
        lambda: (low(+30, 2), low(-30, 1), heads(1, 1, 70, 32)),
        {"causal": False},
        roundings=1e4,
    )


def cross_entropy_cases() -> Iterator[Case]:
    for N, C, V in ((1, 8, 5), (63, 40, 311), (129, 24, 5000)):
        targets = torch.randint(V, (N,), device=DEVICE)
        targets[0], targets[-1] = 0, V - 1
        make = drawn((N, C), (V, C))
        yield Case("linear_cross_entropy", by(N, C, V), make, {"targets": targets})


def all_cases() -> dict[str, Case]:
    """By label."""
    groups = (
        *(norm_cases, swiglu_cases, rope_cases, attention_cases, qkv_attention_cases),
        *(cross_entropy_cases, linear_cases, embedding_cases),
    )
    torch.manual_seed(0)
    return {case.label: case for group in groups for case in group()}


CASES = all_cases()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that PyTorch hands out holds NaN until something is written to it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def call(
    function: Callable[..., Any], case: Case, arguments: tuple[Tensor, ...], upstream: list[Tensor]
) -> list[Tensor]:
    """Outputs and the arguments' gradients."""
    arguments = tuple(argument.requires_grad_() for argument in arguments)
    outputs = as_tuple(function(*arguments, **case.fixed))
    given = [g.to(output.dtype) for g, output in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, arguments, given)
    return [*(output.detach() for output in outputs), *gradients]


def relative_rms(found: Tensor, true: Tensor, upstream: float) -> float:
    """|found - true| / |true|; where nothing is true, as in the gradient of the softmax of one
    number, / |upstream|."""
    error = (found.double() - true.double()).norm().item()
    return error / (true.double().norm().item() or upstream)


def worst_excess(
    case: Case, dtype: torch.dtype, module: ModuleType | None = None, seed: int = 0
) -> float:
    """How far an output or gradient, of another module than the operator's own if one is given, is
    from fp64, in units of what is allowed: twice what the plain version loses at this precision,
    plus a few roundings."""
    torch.manual_seed(seed)
    arguments = case.make()
    own = MODULES[case.module]
    plain = getattr(own, f"{case.op}_reference")

    def copies(to: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(_like(argument, argument.to(dtype).to(to)) for argument in arguments)

    exact = copies(torch.float64)
    with torch.no_grad():
        outputs = as_tuple(plain(*exact, **case.fixed))
    # Upstream gradients are random; rounded once, since every version is handed the same ones.
    upstream = [torch.randn_like(output).to(dtype).double() for output in outputs]
    true = call(plain, case, exact, upstream)
    usual = call(plain, case, copies(dtype), upstream)
    with poisoned_memory():
        found = call(getattr(module or own, case.op), case, copies(dtype), upstream)
    size = max(g.norm().item() for g in upstream)
    worst = 0.0
    for ours, theirs, truth in zip(found, usual, true, strict=True):
        lost = relative_rms(theirs, truth, size)
        lost = lost if math.isfinite(lost) else 0.0  # where the plain version overflows in fp16
        allowed = MULTIPLE * lost + case.roundings * ROUNDOFF[dtype]
        excess = relative_rms(ours, truth, size) / allowed
        worst = max(worst, math.inf if math.isnan(excess) else excess)
    return worst


def _like(argument: Tensor, values: Tensor) -> Tensor:
    """The values with the argument's strides."""
    copy = torch.empty_strided(
        argument.shape, argument.stride(), dtype=values.dtype, device=values.device
    )
    return copy.copy_(values)


KERNELS_OF = {"triton_qkv_attention": "triton_attention", "triton_attention": "triton_rope"}


def with_fault(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """The module with one line changed, its operators in a separate namespace. A line that it
    does not have is that of the module whose kernels it takes."""
    text = Path(MODULES[module].__file__).read_text(encoding="utf-8")
    name = f"fault_{module}_{abs(hash((old, new)))}"
    if old not in text:
        kernels = KERNELS_OF[module]
        faulty = with_fault(kernels, old, new, folder)
        text = text.replace(f"from {kernels} import", f"from {faulty.__name__} import")
        old = new = '"""'
    assert text.count(old) >= 1, f"{module}.py has no line with {old!r}"
    changed = text.replace(old, new).replace("tiny_llama::", f"{name}::")
    changed = changed.replace("torch.ops.tiny_llama.", f"torch.ops.{name}.")
    path = folder / f"{name}.py"
    path.write_text(changed, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    small_tiles(loaded, pytest.MonkeyPatch())
    return loaded


def small_tiles(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """In the interpreter one program may take all there is: with these several share the work."""
    if hasattr(module, "INTERPRETED_TILE"):
        patch.setattr(module, "INTERPRETED_TILE", module.Tile(64, 32, 1, 1))
    if hasattr(module, "CHUNK"):
        patch.setattr(module, "CHUNK", 64)
    if hasattr(module, "CHUNK_ROWS"):
        patch.setattr(module, "CHUNK_ROWS", 32)
        patch.setattr(module, "CHUNK_LOGITS", 0)
    entry: tuple[Any, ...] = (16, 3 if "rope" in module.__name__ else 512, 1)
    if hasattr(module, "Block"):
        entry = ((2**16, module.Block(2**12, 2**12, 3)),)
    for name in ("BLOCKS", "FORWARD_BLOCKS", "BACKWARD_BLOCKS"):
        if hasattr(module, name):
            patch.setitem(getattr(module, name), "interpreter", entry)
