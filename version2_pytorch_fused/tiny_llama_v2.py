"""Tiny-LLaMA, version 2: fused operations.

Changed since V1: the same arithmetic in fewer, larger kernels, still eager PyTorch.
    RMSNorm              F.rms_norm, one kernel instead of five
    apply_rope           tables in the data's precision: half the bytes at bf16
    Attention            one product for q, k and v, one rotation for q and k;
                         scaled_dot_product_attention, which never stores the (T, T) scores
                         and reads the K key/value heads without repeating them
    FeedForward          one product for gate and up
    configure_optimizer  AdamW in one kernel that passes once over the parameters
`Fusions` names them; each can be switched off alone (`--no-fuse-qkv`, ...), and V1's lines
then run instead. `Block` and `TinyLlama` only hand the switches down.

Shapes in the comments:
    B batch   T tokens of a sequence   V vocabulary
    C hidden_dim   F intermediate_dim   H query heads   K key/value heads   D head size = C / H
"""

import math
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
    """The parts that V2 fuses. Off means V1's code for that part."""

    fuse_qkv: bool = True  # one (C, (H + 2K) D) product instead of three
    fuse_gate_up: bool = True  # one (C, 2F) product instead of two
    fuse_norm: bool = True  # F.rms_norm
    fuse_attention: bool = True  # scaled_dot_product_attention
    fuse_gqa: bool = True  # its native grouped heads; needs fuse_attention
    fuse_optimizer: bool = True  # AdamW(fused=True)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float, fusions: Fusions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.fusions = fusions

    def forward(self, x: Tensor) -> Tensor:
        if self.fusions.fuse_norm:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(config: TinyLlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each (max_seq_len, D); the two halves of D are equal."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + D/2]) of x (B, heads, T, D) by its position's angle."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped query heads; the (T, T) scores are never stored."""

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        self.fusions = fusions
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if fusions.fuse_qkv:
            self.qkv_proj = nn.Linear(config.hidden_dim, q_rows + 2 * kv_rows, bias=False)
        else:
            self.q_proj = nn.Linear(config.hidden_dim, q_rows, bias=False)
            self.k_proj = nn.Linear(config.hidden_dim, kv_rows, bias=False)
            self.v_proj = nn.Linear(config.hidden_dim, kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden_dim, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, K, T, D) of x (B, T, C); q and k rotated."""
        B, T, _ = x.shape
        if self.fusions.fuse_qkv:
            qkv = self.qkv_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
            qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
            q, k = apply_rope(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
            return q, k, v
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k' / sqrt(D), no future) v, (B, H, T, D)."""
        if self.fusions.fuse_attention and self.fusions.fuse_gqa:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        T = q.shape[2]
        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=1)  # (B, H, T, D)
        v = v.repeat_interleave(group, dim=1)
        if self.fusions.fuse_attention:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)  # (B, H, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
        scores.masked_fill_(future, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attend(*self.project(x, cos, sin))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        self.fusions = fusions
        if fusions.fuse_gate_up:
            rows = 2 * config.intermediate_dim
            self.gate_up_proj = nn.Linear(config.hidden_dim, rows, bias=False)
        else:
            self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
            self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fusions.fuse_gate_up:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.mlp = FeedForward(config, fusions)

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
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions = Fusions()) -> None:
        super().__init__()
        self.config = config
        self.fusions = fusions
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config, fusions) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.apply(self._init_weights)

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
    fused = True if model.fusions.fuse_optimizer else None  # None leaves the choice to PyTorch
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=fused)


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


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
