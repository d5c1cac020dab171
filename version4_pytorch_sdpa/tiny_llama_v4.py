"""Tiny-LLaMA, version 4: the library and the compiler.

Changed since V2: the large pieces are the library's (matrix products, scaled_dot_product_attention,
fused AdamW); what lies between them is written plainly again, for torch.compile to join; and the
host launches a whole training step as one CUDA/HIP graph.
    Attention             V2's fused form, unconditionally: one QKV product, SDPA, native GQA
    compile_model         torch.compile, which the harness calls first (`--compile none`: not)
    make_capturable,
    capture_step          the graph, on a GPU (`--no-cuda-graph`: not)
    RMSNorm               V2's fused form, unconditionally
    apply_rope            V1's again, in fp32: inside a compiled kernel that costs nothing
    FeedForward           V1's again: two products suit the compiler better than one of both
    Block, TinyLlama      no switches to hand down
    Fusions, WideLinear   an extra: the gradients of weights come out of their product in fp32
                          (`--no-fuse-weight-grads`: not)

Shapes in the comments:
    B batch   T tokens of a sequence   V vocabulary
    C hidden_dim   F intermediate_dim   H query heads   K key/value heads   D head size = C / H
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from workshop.needed import import_torch

    import_torch()

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class TinyLlamaConfig:
    """Sizes of the model; the defaults are the workshop's `small` preset."""

    vocab_size: int = 1000
    hidden_dim: int = 512  # C
    intermediate_dim: int = 2048  # F
    num_layers: int = 8
    num_heads: int = 8  # H
    num_kv_heads: int = 4  # K: each key/value head serves H / K query heads
    max_seq_len: int = 2048  # rows of the RoPE tables
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads


@dataclass(frozen=True)
class Fusions:
    """Parts that can be left out of this version, beside the compiler and the graph."""

    fuse_weight_grads: bool = True  # WideLinear


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: TinyLlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each (max_seq_len, D); the two halves of D are equal."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + D/2]) of x (B, heads, T, D) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped query heads; the (T, T) scores are never stored."""

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, q_rows + 2 * kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden_dim, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, K, T, D) of x (B, T, C); q and k rotated."""
        B, T, _ = x.shape
        qkv = self.qkv_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = apply_rope(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k' / sqrt(D), no future) v, (B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attend(*self.project(x, cos, sin))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    Two products, not one of both: the compiler would have to join the two gradients for that one,
    and it computes either half of what it joins from all inputs, again for each.
    """

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Decoder-only Llama with tied embeddings.

    `model(tokens)` gives the logits (B, T, V); `model(tokens, targets)` the mean cross-entropy,
    a scalar. `targets[b, t]` is the token that follows `tokens[b, t]`: shifted once, by the data.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    # V1's weights that are stacked, row upon row, in each of ours: parity.py reads this.
    fused_weights = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    }

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions = Fusions()) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.apply(self._init_weights)
        if fusions.fuse_weight_grads:
            use_wide_gradients(self.layers)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        # PyTorch draws embeddings from N(0, 1): as the head too, it would start at a loss of 100s.
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        T = tokens.shape[1]
        if T > self.config.max_seq_len:
            limit = self.config.max_seq_len
            raise ValueError(f"sequence of {T} tokens is longer than the model's {limit}")
        cos, sin = self.rope_cos[:T], self.rope_sin[:T]
        x = self.embed_tokens(tokens)  # (B, T, C)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def configure_optimizer(model: TinyLlama, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW in one kernel, which passes once over the parameters and both moments."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    tokens: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float32,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """One training step; its loss, from before the update.

    Args:
        scaler: multiplies the loss at fp16, where small gradients would vanish; else does nothing.
        dtype: of the products under autocast. Weights, gradients and AdamW's moments stay fp32.
        phase: what the harness puts around each part: a marker range, a clock, a graph's capture.
    """
    optimizer.zero_grad(set_to_none=True)
    autocast = torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32)
    with phase("forward"), autocast:
        loss: Tensor = model(tokens, targets)
    with phase("backward"):
        scaler.scale(loss).backward()
    with phase("optimizer"):
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def compile_model(model: nn.Module, mode: str = "default") -> None:
    """Lets torch.compile join what lies between the library's operations into a few kernels, in
    both passes, when they first run. They are made for one shape of batch."""
    model.compile(mode=mode, dynamic=False)  # torch.compile, but the model stays the same object


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Keeps the learning rate and step count on the device, where each replay of a graph reads them
    anew. Call it before the first step."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)


def capture_step(step: Callable[[], Tensor], stream: torch.cuda.Stream) -> Callable[[], Tensor]:
    """The whole step as one CUDA/HIP graph: hundreds of kernels, one launch by the host.

    A replay runs the same kernels on the same addresses, so what changes from step to step must
    be on the device: the batch is copied into the tensors that `step` reads, the loss comes out
    in one tensor. Capturing trains nothing. Before it, `step` has run on `stream` a few times: it
    has compiled its kernels and allocated the optimizer's state.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


# --- an extra: gradients of weights that are not rounded to 16 bits ---------------------------

HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype_out") and torch.version.hip is None
"""Whether PyTorch can leave a product of 16-bit matrices in fp32: from 2.8 on, not on ROCm."""


class WideLinear(nn.Linear):
    """A linear layer without bias whose weight's gradient leaves its product in fp32.

    Autocast's own backward pass rounds that gradient to 16 bits and copies it to fp32: one more
    pass over every weight, which the compiler can't join to a library's product.
    """

    def forward(self, x: Tensor) -> Tensor:
        is_training = x.is_cuda and torch.is_grad_enabled() and torch.is_autocast_enabled("cuda")
        if HAS_WIDE_PRODUCTS and is_training:
            return _WideProduct.apply(x, self.weight, torch.get_autocast_dtype("cuda"))
        return super().forward(x)


class _WideProduct(torch.autograd.Function):
    """x weight'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.x_dtype = x.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dweight = torch.mm(dy.flatten(0, -2).t(), x.flatten(0, -2), out_dtype=torch.float32)
        return (dy @ weight).to(ctx.x_dtype), dweight, None


def use_wide_gradients(layers: nn.ModuleList) -> None:
    """Turns the linear layers of `layers` into WideLinear; their weights stay what they are."""
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
