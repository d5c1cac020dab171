"""Tiny-LLaMA, version 3: hand-written Triton kernels.

Changed since V2: no switches. Between the matrix products, which stay with the vendor's library,
every operation is a kernel of ours, forward and backward (triton_kernels.py lists them).
    RMSNorm              rms_norm; add_rms_norm adds what a sub-layer returned to the residual
                         stream in the same pass
    apply_rope           gone: rope_qkv rotates q and k where the product left them
    Attention            flash_attention, which reads the K key/value heads without repeating them
    FeedForward          swiglu_fused takes the gate-up product as it is
    Block                hands the residual stream and the last branch on unadded
    TinyLlama            linear_cross_entropy, which never holds all the logits
    configure_optimizer  V2's fused form, unconditionally
Without a GPU the kernels run in Triton's interpreter: slowly, but the same kernels.

Shapes in the comments:
    B batch   T tokens of a sequence   V vocabulary
    C hidden_dim   F intermediate_dim   H query heads   K key/value heads   D head size = C / H
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # Triton is not everywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from workshop.cli import leave_if_missing

    leave_if_missing("v3")

from triton_kernels import (
    HEAD_SIZES,
    add_rms_norm,
    flash_attention,
    linear_cross_entropy,
    rms_norm,
    rope_qkv,
    swiglu_fused,
)


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

    def __post_init__(self) -> None:
        """Raises ValueError, one line, for sizes that do not make a model."""
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be positive")
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"hidden_dim {self.hidden_dim} is not divisible by num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head size {self.head_dim} (hidden_dim / num_heads) is odd: RoPE rotates pairs"
            )


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, stream: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the branch, if there is one, to the residual stream: the sum's norm, and the sum."""
        if branch is None:
            return rms_norm(stream, self.weight, self.eps), stream
        return add_rms_norm(branch, stream, self.weight, self.eps)


def rope_tables(config: TinyLlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each (max_seq_len, D); the two halves of D are equal."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal self-attention with grouped query heads; the (T, T) scores are never stored."""

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        if config.head_dim not in HEAD_SIZES:
            raise ValueError(
                f"head size {config.head_dim} (hidden_dim / num_heads): V3's attention has kernels "
                f"for {', '.join(map(str, HEAD_SIZES))}"
            )
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, q_rows + 2 * kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)  # (B, T, (H + 2K) D)
        q, k, v = rope_qkv(qkv, cos, sin, self.num_heads, self.num_kv_heads)
        y = flash_attention(q, k, v)  # (B, H, T, D), in memory (B, T, H, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        rows = 2 * config.intermediate_dim
        self.gate_up_proj = nn.Linear(config.hidden_dim, rows, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu_fused(self.gate_up_proj(x)))


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + ffn(norm(x)).

    Takes and returns x in two parts, the residual stream and the branch that the next norm adds to
    it while it reads both.
    """

    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, stream: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_layernorm(stream, branch)
        x, stream = self.post_attention_layernorm(stream, self.self_attn(x, cos, sin))
        return stream, self.mlp(x)


class TinyLlama(nn.Module):
    """Decoder-only Llama with tied embeddings.

    `model(tokens)` gives the logits (B, T, V); `model(tokens, targets)` the mean cross-entropy,
    a scalar. `targets[b, t]` is the token that follows `tokens[b, t]`: shifted once, by the data.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    # Which of V1's weights are stacked, row upon row, in which of ours: parity.py reads it.
    fused_weights = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }

    def __init__(self, config: TinyLlamaConfig) -> None:
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
        stream, branch = self.embed_tokens(tokens), None  # (B, T, C)
        for layer in self.layers:
            stream, branch = layer(stream, branch, cos, sin)
        x, _ = self.norm(stream, branch)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        return linear_cross_entropy(x, self.lm_head.weight, targets)


def configure_optimizer(model: TinyLlama, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW in one kernel, which passes once over the parameters and both moments."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
