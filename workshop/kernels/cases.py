"""The operations that the benchmark measures, their sizes, and their implementations.

Each function below describes one operation at one size: random arguments, V3's kernel, a plain
version, which is the reference, other implementations, and the least work that a call must do. The
work is counted from sizes alone, so that every rate is one for the same work: element-wise
operations in passes over the tensor, attention and products in FLOPs.

V3's kernels are imported when one is called, which the judge never does.
"""

import functools
import importlib
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workshop import versions

EPS = 1e-5
ROPE_THETA = 10000.0
OURS, PLAIN, COMPILED, LIGER = "Triton (V3)", "plain", "torch.compile", "Liger"
FLASH, QUACK = "FlashAttention (CuTe)", "quack (CuTe)"
MINE = "yours"
"""A participant's own function."""
FORWARD, BACKWARD, BOTH, HOST = "forward", "backward", "forward + backward", "host"
GBS, TFLOPS = "GB/s", "TFLOP/s"
UNITS = {GBS: 1e9, TFLOPS: 1e12}
NORMAL, WEIGHT, HEADS, COS, SIN, TARGETS = "normal", "weight", "heads", "cos", "sin", "targets"

Tensors = tuple[Tensor, ...]
Function = Callable[..., Any]  # of a case's arguments; gives a tensor or a tuple of tensors


class Skipped(Exception):
    """An implementation that is not on this machine or can't do this case; the text says why."""


class Drawn(NamedTuple):
    """How an argument is drawn.

    NORMAL numbers, also of HEADS (B, heads, T, D), in memory (B, T, heads, D) as a projection
    leaves them; WEIGHTs from 0.5 to 1.5: at 1 a forgotten norm weight would not show; the tables
    COS and SIN, fp32 (T, D) as the model keeps them; TARGETS below `scale`.
    """

    kind: str
    shape: tuple[int, ...]
    scale: float = 1.0

    @property
    def differentiable(self) -> bool:
        return self.kind not in (COS, SIN, TARGETS)

    def draw(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        how: dict[str, Any] = {"device": device, "generator": generator}
        if self.kind == TARGETS:
            return torch.randint(int(self.scale), self.shape, **how)
        if self.kind in (COS, SIN):
            tokens, head_dim = self.shape
            steps = torch.arange(0, head_dim, 2, device=device) / head_dim
            positions = torch.arange(tokens, device=device, dtype=torch.float32)
            angles = torch.outer(positions, ROPE_THETA**-steps).repeat(1, 2)
            return angles.cos() if self.kind == COS else angles.sin()
        if self.kind == WEIGHT:
            return ((torch.rand(self.shape, **how) + 0.5) * self.scale).to(dtype)
        if self.kind == HEADS:
            B, heads, T, D = self.shape
            return torch.randn(B, T, heads, D, **how).to(dtype).transpose(1, 2)
        return (torch.randn(self.shape, **how) * self.scale).to(dtype)


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    op: str
    sizes: tuple[int, ...]
    size: str
    """The same in words."""
    arguments: dict[str, Drawn]
    results: tuple[str, ...]
    plain: Function
    others: dict[str, Function]
    unit: str
    amounts: Callable[[int], dict[str, float]]
    """Bytes or FLOPs of each phase that is timed, by the bytes of an element."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Arguments of V3's operator after its tensors."""
    upstream_scale: float = 1.0
    parts: int = 1
    """The number of parts in which the reference is computed, so that it fits into memory."""
    cut: dict[str, int] = field(default_factory=dict)
    """The axis along which an argument or result is cut into them; others are needed whole."""

    @property
    def signature(self) -> str:
        """How V3's operator, and a participant's function, is called."""
        return f"{self.op}({', '.join((*self.arguments, *self.constants))})"

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.amounts(1))

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The arguments with a gradient."""
        return tuple(name for name, drawn in self.arguments.items() if drawn.differentiable)

    def kernel(self, *tensors: Tensor) -> Any:
        """V3's operator."""
        call = getattr(kernels(), self.op)
        return call(*tensors, *self.constants.values())

    def mine(self, place: str) -> Function:
        """A participant's function, FILE.py:NAME, which is called as V3's operator is."""
        find = functools.cache(lambda: versions.load_mine(place)[1])  # once: the host is timed
        return lambda *tensors: find()(*tensors, *self.constants.values())


@functools.cache
def kernels() -> ModuleType:
    """V3's `triton_kernels`. Raises NotOnThisMachine: Triton is not installed."""
    versions.load("v3")  # imports them from its folder
    return sys.modules["triton_kernels"]


PACKAGES = ("liger-kernel", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
"""Those of the peers, whose versions a record has."""


def peer(module: str, name: str) -> Function:
    """A function of a package, or a method of its class (CLASS.NAME). A call raises Skipped where
    it is not installed, or there is no GPU for it."""

    @functools.cache  # looked up once: the host is timed
    def find() -> Function:
        if not torch.cuda.is_available():
            raise Skipped("needs a GPU")
        try:
            function: Function = operator.attrgetter(name)(importlib.import_module(module))
        except ImportError as error:
            raise Skipped(f"not installed ({error})") from None
        except AttributeError:
            raise Skipped(f"the installed version has no {name}") from None
        return function

    return lambda *arguments, **named: find()(*arguments, **named)


def liger(name: str, *constants: Any) -> Function:
    """One of Liger-Kernel's autograd functions (signatures as of 0.8.5)."""
    call = peer("liger_kernel.ops", f"{name}.apply")
    return lambda *tensors: call(*tensors, *constants)


# Signatures as of quack-kernels 0.6.5 and flash-attn-4 4.0.0b36. FlashAttention's backward pass
# uses quack's copies, and beside quack 0.6.1 waits forever.
quack_norm = peer("quack.rmsnorm", "rmsnorm")
quack_cross_entropy = peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
quack_mlp = peer("quack.mlp", "mlp_func")
flash_attn = peer("flash_attn.cute.interface", "flash_attn_func")


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention's newest, in CuTe, whose tensors are (B, T, heads, D)."""
    heads_inside = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn(*heads_inside, causal=True)[0]
    return out.transpose(1, 2)


# --- element-wise and by rows --------------------------------------------------------------------


def row_case(
    op: str,
    size: tuple[int, int],
    passes: tuple[int, int],
    arguments: tuple[str, ...],
    plain: Function,
    others: dict[str, Function],
    results: tuple[str, ...] = ("y",),
) -> Case:
    """An operator on tensors (rows, width), and on the weights of a row if there is a "weight".
    `passes`: such tensors that forward and backward read and write in all."""
    rows, width = size
    drawn = {name: Drawn(NORMAL, (rows, width)) for name in arguments}
    with_weight = "weight" in arguments
    if with_weight:
        drawn["weight"] = Drawn(WEIGHT, (width,))

    def amounts(itemsize: int) -> dict[str, float]:
        each = float(rows * width * itemsize)
        return {FORWARD: passes[0] * each, BACKWARD: passes[1] * each}

    return Case(
        *(op, size, f"{rows} x {width}", drawn, results, plain, others, GBS, amounts),
        constants={"eps": EPS} if with_weight else {},
        parts=min(rows, 8),
        cut=dict.fromkeys([*(name for name in arguments if name != "weight"), *results], 0),
    )


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rms_norm(rows: int, width: int) -> Case:
    """x (rows, width) -> y. Forward 2 passes (x, y), backward 3 (x, dy, dx)."""
    others: dict[str, Function] = {
        "F.rms_norm": lambda x, weight: F.rms_norm(x, (width,), weight, EPS),
        LIGER: liger("LigerRMSNormFunction", EPS),
        QUACK: lambda x, weight: quack_norm(x, weight, eps=EPS),
    }
    return row_case("rms_norm", (rows, width), (2, 3), ("x", "weight"), plain_norm, others)


def add_rms_norm(rows: int, width: int) -> Case:
    """branch, stream (rows, width) -> normed, new stream.

    Forward 4 passes: both are read, both results written. Backward 4: the new stream and both
    gradients are read; branch and stream have one and the same gradient, which is written once.
    """

    def plain(branch: Tensor, stream: Tensor, weight: Tensor) -> Tensors:
        return plain_norm(stream + branch, weight), stream + branch

    def pytorch(branch: Tensor, stream: Tensor, weight: Tensor) -> Tensors:
        stream = stream + branch
        return F.rms_norm(stream, (width,), weight, EPS), stream

    others: dict[str, Function] = {
        "add, F.rms_norm": pytorch,
        LIGER: liger("LigerFusedAddRMSNormFunction", EPS),
        QUACK: lambda branch, stream, weight: quack_norm(
            branch, weight, residual=stream, eps=EPS, prenorm=True
        ),
    }
    sizes, arguments = ((rows, width), (4, 4)), ("branch", "stream", "weight")
    return row_case(
        "add_rms_norm", *sizes, arguments, plain, others, results=("normed", "new stream")
    )


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def pytorch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu(rows: int, width: int) -> Case:
    """silu(gate) x up, all (rows, width). Forward 3 passes, backward 5 (gate, up, dy, dgate,
    dup)."""
    others = {"F.silu, product": pytorch_swiglu, LIGER: liger("LigerSiLUMulFunction")}
    return row_case("swiglu", (rows, width), (3, 5), ("gate", "up"), plain_swiglu, others)


# --- rotary embedding and attention --------------------------------------------------------------
# Sizes: B batch, T tokens, H query heads, K key/value heads, D head size.


def heads_case(op: str, sizes: tuple[int, ...], *described: Any, **more: Any) -> Case:
    """A case whose size is written as "16 x 512, H16 K8 D64"."""
    B, T, H, K, D = sizes
    return Case(op, sizes, f"{B} x {T}, H{H} K{K} D{D}", *described, **more)


def apply_rope(B: int, T: int, H: int, K: int, D: int) -> Case:
    """q (B, H, T, D) and k (B, K, T, D) rotated: both read and written, either way, and the two
    fp32 tables (T, D) read."""

    def amounts(itemsize: int) -> dict[str, float]:
        read_and_written = 2 * itemsize * B * T * (H + K) * D
        return dict.fromkeys((FORWARD, BACKWARD), float(read_and_written + 2 * 4 * T * D))

    arguments = {
        "q": Drawn(HEADS, (B, H, T, D)),
        "k": Drawn(HEADS, (B, K, T, D)),
        "cos": Drawn(COS, (T, D)),
        "sin": Drawn(SIN, (T, D)),
    }
    rotate = liger("LigerRopeFunction")
    others: dict[str, Function] = {LIGER: lambda q, k, cos, sin: rotate(q, k, cos[None], sin[None])}
    sizes = (B, T, H, K, D)
    return heads_case("apply_rope", sizes, arguments, ("q", "k"), plain_rope, others, GBS, amounts)


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    """As in V1: fp32 tables make the products fp32, and the results are rounded."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotate(q), rotate(k)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the scores (B, H, T, T) in memory."""
    T, D = q.shape[2:]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * D**-0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash_attention(B: int, T: int, H: int, K: int, D: int) -> Case:
    """Causal attention of q (B, H, T, D) over k, v (B, K, T, D).

    Forward 2 B H T^2 D FLOPs: two products of 2 B H T^2 D each; the causal half is
    needed. Backward 2.5 times that (five products for two), as the FlashAttention papers count.
    """
    forward = 2.0 * B * H * T**2 * D

    def sdpa(backend: SDPBackend) -> Function:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return pytorch_attention(q, k, v)

        return attend

    arguments = {
        name: Drawn(HEADS, (B, heads, T, D)) for name, heads in (("q", H), ("k", K), ("v", K))
    }
    others = {name: sdpa(backend) for name, backend in SDPA.items()} | {FLASH: flash}
    return heads_case(
        *("flash_attention", (B, T, H, K, D), arguments, ("out",), plain_attention, others),
        *(TFLOPS, lambda _: {FORWARD: forward, BACKWARD: 2.5 * forward}),
        parts=K,
        cut=dict.fromkeys(("q", "k", "v", "out"), 1),
    )


def qkv_attention(B: int, T: int, H: int, K: int, D: int) -> Case:
    """The heads of x weight' for x (B, T, C = H D), rotated, and their causal attention.

    Forward 2 B T C (H + 2 K) D FLOPs for the product and attention's; backward twice and 2.5 times
    as many.
    """
    C, rows = H * D, (H + 2 * K) * D
    product, attention = 2.0 * B * T * C * rows, 2.0 * B * H * T**2 * D

    def with_product(attend: Function) -> Function:
        def call(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            parts = F.linear(x, weight).view(B, T, -1, D).transpose(1, 2)
            q, k, v = parts.split((H, K, K), dim=1)
            out: Tensor = attend(*plain_rope(q, k, cos, sin), v)
            return out.transpose(1, 2).flatten(2)

        return call

    arguments = {
        "x": Drawn(NORMAL, (B, T, C)),
        "weight": Drawn(NORMAL, (rows, C), C**-0.5),
        "cos": Drawn(COS, (T, D)),
        "sin": Drawn(SIN, (T, D)),
    }
    others = {
        "F.linear, rotation, SDPA": with_product(pytorch_attention),
        "F.linear, rotation, FlashAttention": with_product(flash),
    }
    plain, forward = with_product(plain_attention), product + attention
    return heads_case(
        *("qkv_attention", (B, T, H, K, D), arguments, ("out",), plain, others),
        *(TFLOPS, lambda _: {FORWARD: forward, BACKWARD: 2 * product + 2.5 * attention}),
        constants={"num_heads": H, "num_kv_heads": K},
    )


# --- feed-forward layer, linear and cross-entropy ------------------------------------------------


def feed_forward(N: int, C: int, I: int) -> Case:
    """down(silu(gate) x up) for x (N, C), the weights of gate and up in one (2 I, C), and that of
    down (C, I): 6 N C I FLOPs forward, twice as many backward."""

    def with_products(swiglu: Function) -> Function:
        return lambda x, gate_up, down: F.linear(swiglu(*F.linear(x, gate_up).chunk(2, -1)), down)

    arguments = {
        "x": Drawn(NORMAL, (N, C)),
        "gate_up": Drawn(NORMAL, (2 * I, C), C**-0.5),
        "down": Drawn(NORMAL, (C, I), I**-0.5),
    }
    others = {
        "F.linear, F.silu, product": with_products(pytorch_swiglu),
        QUACK: lambda *tensors: quack_mlp(*tensors, activation="swiglu", concat_layout=True),
    }
    forward = 6.0 * N * C * I
    return Case(
        *("feed_forward", (N, C, I), f"{N} x {C} x {I}", arguments, ("y",)),
        *(with_products(plain_swiglu), others, TFLOPS),
        lambda _: {FORWARD: forward, BACKWARD: 2 * forward},
    )


def linear_cross_entropy(N: int, C: int, V: int) -> Case:
    """Mean loss of hidden (N, C), weight (V, C), targets (N): 6 N C V FLOPs forward and backward.

    Both are timed as one, because a fused kernel may compute gradients in its forward pass.
    """
    by_liger = liger("LigerFusedLinearCrossEntropyFunction")

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.t(), targets)

    def pytorch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), targets)

    arguments = {
        "hidden": Drawn(NORMAL, (N, C)),
        "weight": Drawn(NORMAL, (V, C), C**-0.5),  # logits of size 1
        "targets": Drawn(TARGETS, (N,), V),
    }
    others = {
        "F.linear, F.cross_entropy": pytorch,
        LIGER: lambda *tensors: by_liger(*tensors)[0],
        QUACK: quack_cross_entropy,
    }
    return Case(
        *("linear_cross_entropy", (N, C, V), f"{N} x {C} x {V}", arguments, ("loss",)),
        *(plain, others, TFLOPS, lambda _: {BOTH: 6.0 * N * C * V}),
        upstream_scale=float(N),  # as a loss scale does: gradients / N underflow in fp16
    )


# --- which sizes ---------------------------------------------------------------------------------


def _between(random: Random, low: float, high: float) -> int:
    """From 2^low to 2^high, small ones as often as large ones."""
    return round(2 ** random.uniform(low, high))


def draw_rows(random: Random) -> tuple[int, int]:
    """Rows and width: up to 2^16 tokens and 2^28 numbers."""
    width = 128 * _between(random, 2, 6.5)
    return min(_between(random, 10, 16), 2**28 // width), width


def draw_heads(random: Random) -> tuple[int, int, int, int, int]:
    """B, T, H, K and D: 2^12 to 2^15 tokens, or one sequence more."""
    T, K, D = _between(random, 8, 13), 2 ** random.randint(1, 3), random.choice((64, 128))
    return -(-_between(random, 12, 15) // T), T, K * 2 ** random.randint(0, 3), K, D


def draw_layer(random: Random) -> tuple[int, int, int]:
    """N, C and I of a feed-forward layer."""
    C = 128 * _between(random, 2, 5)
    return _between(random, 10, 14), C, 128 * _between(random, 3, 7)


def draw_head(random: Random) -> tuple[int, int, int]:
    """N, C and V of the model's head."""
    return _between(random, 10, 14), 128 * _between(random, 2, 5), _between(random, 10, 17)


class Sizes(NamedTuple):
    """An operation's sizes: any that a training step may have; those timed on a GPU; those checked
    in the interpreter, which are small and fit no tile; and others that do, for functions that are
    right at these alone, or at others alone."""

    make: Callable[..., Case]
    draw: Callable[[Random], tuple[int, ...]]
    timed: tuple[tuple[int, ...], ...]
    odd: tuple[tuple[int, ...], ...]
    even: tuple[tuple[int, ...], ...]


_NORMS = ((8192, 1024), (16384, 4096), (65536, 2048))
_SWIGLU = ((8192, 4096), (16384, 11008))
_MEDIUM = (16, 512, 16, 8, 64)
_LONG = ((8, 2048, 16, 8, 64), (2, 8192, 16, 8, 64), (1, 16384, 16, 8, 64), (4, 2048, 32, 16, 128))
_LAYERS = ((8192, 1024, 4096), (8192, 4096, 14336))
_HEAD = ((8192, 1024, 32000), (8192, 1024, 1000))
_ODD_ROWS = ((13, 72), (5, 257))
_ODD_HEADS = ((2, 37, 6, 2, 32), (1, 150, 3, 1, 64))
_ODD_LAYERS = ((37, 72, 40), (65, 24, 136))
_ODD_HEAD = ((37, 72, 311), (65, 24, 1000))
_EVEN_ROWS = ((16, 1024), (2, 8192))
_EVEN_HEADS = ((1, 256, 4, 2, 64),)
_EVEN_LAYERS = ((64, 128, 256),)
_EVEN_HEAD = ((64, 128, 2048),)

OPS = {
    "rms_norm": Sizes(rms_norm, draw_rows, _NORMS, _ODD_ROWS, _EVEN_ROWS),
    "add_rms_norm": Sizes(add_rms_norm, draw_rows, _NORMS, _ODD_ROWS, _EVEN_ROWS),
    "apply_rope": Sizes(apply_rope, draw_heads, (_MEDIUM,), _ODD_HEADS, _EVEN_HEADS),
    "swiglu": Sizes(swiglu, draw_rows, _SWIGLU, _ODD_ROWS, _EVEN_ROWS),
    "flash_attention": Sizes(
        flash_attention, draw_heads, (_MEDIUM, *_LONG), _ODD_HEADS, _EVEN_HEADS
    ),
    "qkv_attention": Sizes(qkv_attention, draw_heads, (_MEDIUM, _LONG[0]), _ODD_HEADS, _EVEN_HEADS),
    "feed_forward": Sizes(feed_forward, draw_layer, _LAYERS, _ODD_LAYERS, _EVEN_LAYERS),
    "linear_cross_entropy": Sizes(linear_cross_entropy, draw_head, _HEAD, _ODD_HEAD, _EVEN_HEAD),
}


def draw_cases(ops: list[str], number: int, seed: int) -> list[Case]:
    """Cases at `number` sizes that no tile was tuned for, of the operations in turn."""
    random = Random(seed)
    names = sorted((ops[i % len(ops)] for i in range(number)), key=list(OPS).index)
    return [OPS[name].make(*OPS[name].draw(random)) for name in names]


def make_cases(ops: list[str], *, timed: bool, quick: bool) -> list[Case]:
    """The cases of some operations in OPS's order; `quick` takes the first size of each."""
    cases = []
    for name, sizes in OPS.items():
        if name in ops:
            chosen = sizes.timed if timed else sizes.odd
            cases += [sizes.make(*size) for size in (chosen[:1] if quick else chosen)]
    return cases


def checked_cases(op: str) -> list[Case]:
    """Those at which a participant's function is checked."""
    return [OPS[op].make(*size) for size in (*OPS[op].odd, *OPS[op].even)]
