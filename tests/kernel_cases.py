"""V3's operators with arguments that find mistakes, and their comparison with plain fp64."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton_adamw
import triton_attention
import triton_cross_entropy
import triton_embedding
import triton_kernels
import triton_linear
import triton_qkv_attention
import triton_rms_norm
import triton_rope
import triton_swiglu
from torch import Tensor

from workshop.gate.parity import MULTIPLE

DEVICE = "cpu" if triton_kernels.INTERPRETED else "cuda"
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MODULES = {
    module.__name__: module
    for module in (
        triton_rms_norm,
        triton_rope,
        triton_swiglu,
        triton_attention,
        triton_qkv_attention,
        triton_cross_entropy,
        triton_linear,
        triton_embedding,
        triton_adamw,
    )
}


@dataclass(frozen=True)
class Case:
    """A call of one operator: the arguments that get gradients, made in fp32, and the others."""

    name: str
    module: str
    op: str
    make: Callable[[], tuple[Tensor, ...]]
    fixed: dict[str, Any]
    roundings: float = 8.0
    """Allowed beyond twice the plain version's error, which may be nil by luck: at T = 2 the
    backward pass of attention, which subtracts the same sums in another order, needs 5."""

    @property
    def label(self) -> str:
        return f"{self.op}-{self.name}"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def heads(B: int, H: int, T: int, D: int) -> Tensor:
    """(B, H, T, D), in memory (B, T, H, D) with other numbers between the tokens."""
    return normal(B, T, H + 1, D)[:, :, :H].transpose(1, 2)


def rows(*shape: int) -> Tensor:
    """Rows from tiny to large, so that the place of eps can be told."""
    scales = torch.logspace(-4, 1, shape[-2], device=DEVICE)[:, None]
    return normal(*shape) * scales


def norm_cases() -> Iterator[Case]:
    module, fixed = "triton_rms_norm", {"eps": 1e-5}
    for shape in ((1, 1, 64), (3, 63, 72), (2, 129, 1000), (1, 5, 8191)):
        name = "x".join(map(str, shape))
        make = partial(lambda s: (rows(*s), normal(s[-1])), shape)
        yield Case(name, module, "rms_norm", make, fixed)
        make = partial(lambda s: (normal(*s) * 1e-3, rows(*s), normal(s[-1])), shape)
        yield Case(name, module, "add_rms_norm", make, fixed)
    for op, count in (("rms_norm", 1), ("add_rms_norm", 2)):
        make = partial(
            lambda n: (*(normal(9, 7, 200)[:, ::2, 40:140] for _ in range(n)), normal(100)), count
        )
        yield Case("rows of a view", module, op, make, fixed)
        make = partial(
            lambda n: (*(normal(90, 31).t() for _ in range(n)), normal(200)[::2][:90]), count
        )
        yield Case("transposed", module, op, make, fixed)


def swiglu_cases() -> Iterator[Case]:
    module = "triton_swiglu"
    for shape in ((1, 1, 2), (3, 63, 152), (5, 1376), (1, 35, 2500)):
        name = "x".join(map(str, shape))
        yield Case(name, module, "swiglu", partial(lambda s: (normal(*s), normal(*s)), shape), {})
        yield Case(name, module, "swiglu_fused", partial(lambda s: (normal(*s),), shape), {})
    yield Case("halves", module, "swiglu", lambda: normal(2, 63, 304).chunk(2, dim=-1), {})
    yield Case("transposed", module, "swiglu", lambda: (normal(70, 9).t(), normal(9, 70)), {})
    yield Case("a view", module, "swiglu_fused", lambda: (normal(9, 63, 140)[:, ::2, 20:120],), {})


def tables(T: int, D: int) -> dict[str, Tensor]:
    return {"cos": normal(T, D), "sin": normal(T, D)}


def rope_cases() -> Iterator[Case]:
    module = "triton_rope"
    for B, H, K, T, D in ((1, 2, 1, 1, 64), (2, 6, 2, 63, 32), (1, 4, 4, 129, 24)):
        name = f"B{B} H{H} K{K} T{T} D{D}"
        make = partial(lambda *s: (heads(*s[0]), heads(*s[1])), (B, H, T, D), (B, K, T, D))
        yield Case(name, module, "apply_rope", make, tables(T, D))


def qkv_attention_cases() -> Iterator[Case]:
    sizes = ((1, 2, 1, 2, 64, 40), (2, 6, 2, 63, 32, 72), (1, 2, 2, 129, 32, 64))
    for B, H, K, T, D, C in sizes:
        name = f"B{B} H{H} K{K} T{T} D{D} C{C}"
        shapes = (B, T, C), ((H + 2 * K) * D, C)
        make = partial(lambda x, w: (normal(*x), normal(*w) / w[1] ** 0.5), *shapes)
        fixed = {**tables(T, D), "num_heads": H, "num_kv_heads": K}
        yield Case(name, "triton_qkv_attention", "qkv_attention", make, fixed)


def linear_cases() -> Iterator[Case]:
    for shape, outputs in (((1, 1, 8), 5), ((3, 63, 72), 40), ((129, 24), 1)):
        name = "x".join(map(str, (*shape, outputs)))
        make = partial(lambda s, o: (normal(*s), normal(o, s[-1])), shape, outputs)
        yield Case(name, "triton_linear", "linear", make, {})
        make = partial(lambda s, o: (normal(*s[:-1], 2 * s[-1]), normal(o, s[-1])), shape, outputs)
        yield Case(name, "triton_swiglu", "swiglu_linear", make, {})


def embedding_cases() -> Iterator[Case]:
    for N, V, C in ((1, 1, 8), (63, 11, 40), (129, 311, 1100)):
        tokens = torch.randint(V, (N,), device=DEVICE)
        make = partial(lambda v, c: (normal(v, c),), V, C)
        name = f"{N}x{C} of {V}"
        yield Case(name, "triton_embedding", "embedding", make, {"tokens": tokens})


def attention_cases() -> Iterator[Case]:
    sizes = (
        (1, 2, 1, 2, 32, True),
        (2, 4, 2, 63, 32, True),
        (1, 3, 1, 129, 64, True),
        (1, 2, 2, 200, 128, True),
        (1, 2, 1, 129, 32, False),
        (1, 2, 1, 1, 64, False),
        (1, 3, 3, 65, 64, True),
    )
    for B, H, K, T, D, causal in sizes:
        make = partial(
            lambda *s: (heads(*s[0]), heads(*s[1]), heads(*s[1])), (B, H, T, D), (B, K, T, D)
        )
        name = f"B{B} H{H} K{K} T{T} D{D} {'causal' if causal else 'full'}"
        yield Case(name, "triton_attention", "flash_attention", make, {"causal": causal})
    # The weight of a key beyond T would be exp(0 - a large negative number).
    yield Case(
        "low scores",
        "triton_attention",
        "flash_attention",
        lambda: (low(+30, 2), low(-30, 1), heads(1, 1, 70, 32)),
        {"causal": False},
        # What the first numbers of k give to dq cancels, but for the rounding of a score of -160.
        roundings=1e4,
    )


def low(first: float, count: int) -> Tensor:
    """Heads whose product with those of the opposite sign is very negative."""
    x = heads(1, count, 70, 32)
    x[..., 0] = first
    return x


def cross_entropy_cases() -> Iterator[Case]:
    for N, C, V in ((1, 8, 5), (63, 40, 311), (129, 24, 5000)):
        targets = torch.randint(V, (N,), device=DEVICE)
        targets[0], targets[-1] = 0, V - 1
        make = partial(lambda n, c, v: (normal(n, c), normal(v, c)), N, C, V)
        fixed = {"targets": targets}
        yield Case(f"{N}x{C}x{V}", "triton_cross_entropy", "linear_cross_entropy", make, fixed)


def all_cases() -> list[Case]:
    groups = (
        *(norm_cases, swiglu_cases, rope_cases, attention_cases, qkv_attention_cases),
        *(cross_entropy_cases, linear_cases, embedding_cases),
    )
    torch.manual_seed(0)
    return [case for group in groups for case in group()]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that PyTorch hands out holds NaN until something is written to it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(
    function: Callable[..., Any], case: Case, arguments: tuple[Tensor, ...], upstream: list[Tensor]
) -> list[Tensor]:
    """Outputs and the arguments' gradients."""
    arguments = tuple(argument.requires_grad_() for argument in arguments)
    outputs = function(*arguments, **case.fixed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [g.to(output.dtype) for g, output in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, arguments, given)
    return [*(output.detach() for output in outputs), *gradients]


def relative_rms(found: Tensor, true: Tensor, upstream: float) -> float:
    """|found - true| / |true|; where nothing is true, as in the gradient of the softmax of one
    number, / |upstream|."""
    error = (found.double() - true.double()).norm().item()
    return error / (true.double().norm().item() or upstream)


def worst_excess(case: Case, module: ModuleType, dtype: torch.dtype, seed: int = 0) -> float:
    """How far an output or gradient is from fp64, in units of what is allowed: twice what the plain
    version loses at this precision, plus a few roundings."""
    torch.manual_seed(seed)
    arguments = case.make()
    plain = getattr(MODULES[case.module], f"{case.op}_reference")

    def copies(to: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(_like(argument, argument.to(dtype).to(to)) for argument in arguments)

    exact = copies(torch.float64)
    with torch.no_grad():
        outputs = plain(*exact, **case.fixed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Upstream gradients are random; rounded once, since every version is handed the same ones.
    upstream = [torch.randn_like(output).to(dtype).double() for output in outputs]
    true = call(plain, case, exact, upstream)
    usual = call(plain, case, copies(dtype), upstream)
    with poisoned_memory():
        found = call(getattr(module, case.op), case, copies(dtype), upstream)
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
    """The module with one line changed, its operators in a namespace of their own. A line that it
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
    # In the interpreter one program may take all there is: here several share the work.
    if module == "triton_rms_norm":
        loaded.BACKWARD_BLOCKS["interpreter"] = ((2**16, loaded.Block(2**12, 2**12, 3)),)
    elif module == "triton_cross_entropy":
        loaded.BLOCKS["interpreter"] = (16, 512, 1)
    elif module == "triton_adamw":
        loaded.CHUNK = 64
    elif module == "triton_attention":
        loaded.INTERPRETED_TILE = loaded.Tile(64, 32, 1, 1)
    return loaded
