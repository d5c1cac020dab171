"""Tiny-LLaMA, version 3: hand-written Triton kernels.

Changed since V2: between the matrix products, which stay with the vendor's library, every operation
is a kernel of ours, forward and backward (triton_kernels.py lists them).
    RMSNorm              rms_norm; add_rms_norm adds what a sub-layer returned to the residual
                         stream in the same pass
    apply_rope           gone: qkv_attention rotates q and k where the product left them
    Attention            qkv_attention, which reads the K key/value heads without repeating them
    FeedForward          feed_forward: both products and SwiGLU; it keeps the first product's result
                         alone, and on Hopper two products are kernels that compute SwiGLU as well
    Block                hands the residual stream and the last branch on unadded
    TinyLlama            embedding, whose gradient PyTorch would sort the tokens for;
                         linear_cross_entropy, which keeps no logits
    the other products   linear: the weight's gradient comes out of it in fp32
    configure_optimizer  AdamW writes the weights that the products read, in 16 bits, as well
`Fusions` names them; each can be switched off alone (`--no-fuse-norm`, ...), and plain PyTorch, the
operator's `*_reference`, then runs instead. A module takes one or the other when it is made.
Without a GPU the kernels run in Triton's interpreter: slowly, but the same kernels.

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

if __name__ == "__main__":  # PyTorch and Triton are not everywhere, and take seconds to import
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("v3")

import torch
import triton_kernels as tk
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
    """The operators that are kernels. Off means plain PyTorch for that part."""

    fuse_norm: bool = True  # rms_norm, add_rms_norm
    fuse_swiglu: bool = True  # feed_forward
    fuse_attention: bool = True  # qkv_attention
    fuse_embedding: bool = True  # embedding
    fuse_loss: bool = True  # linear_cross_entropy
    fuse_linear: bool = True  # linear
    fuse_optimizer: bool = True  # AdamW


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float, fusions: Fusions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.norm = tk.rms_norm if fusions.fuse_norm else tk.rms_norm_reference
        self.add_norm = tk.add_rms_norm if fusions.fuse_norm else tk.add_rms_norm_reference

    def forward(self, stream: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the branch, if there is one, to the residual stream: the sum's norm, and the sum."""
        if branch is None:
            return self.norm(stream, self.weight, self.eps), stream
        return self.add_norm(branch, stream, self.weight, self.eps)


def rope_tables(config: TinyLlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each (max_seq_len, D); the two halves of D are equal."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal self-attention with grouped query heads; the (T, T) scores are never stored."""

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        if config.head_dim not in tk.HEAD_SIZES:
            raise ValueError(
                f"head size {config.head_dim} (hidden_dim / num_heads): V3's attention has kernels "
                f"for {', '.join(map(str, tk.HEAD_SIZES))}"
            )
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, q_rows + 2 * kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden_dim, bias=False)
        self.attend = tk.qkv_attention if fusions.fuse_attention else tk.qkv_attention_reference
        self.linear = tk.linear if fusions.fuse_linear else tk.linear_reference

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.num_heads, self.num_kv_heads
        y = self.attend(x, self.qkv_proj.weight, cos, sin, *heads)  # (B, T, H D)
        return self.linear(y, self.o_proj.weight)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        rows = 2 * config.intermediate_dim
        self.gate_up_proj = nn.Linear(config.hidden_dim, rows, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)
        self.feed_forward = tk.feed_forward if fusions.fuse_swiglu else tk.feed_forward_reference

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(x, self.gate_up_proj.weight, self.down_proj.weight)


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + ffn(norm(x)).

    Takes and returns x in two parts, the residual stream and the branch that the next norm adds to
    it while it reads both.
    """

    def __init__(self, config: TinyLlamaConfig, fusions: Fusions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.mlp = FeedForward(config, fusions)

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
        self.embed = tk.embedding if fusions.fuse_embedding else tk.embedding_reference
        self.loss = (
            tk.linear_cross_entropy if fusions.fuse_loss else tk.linear_cross_entropy_reference
        )
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
        stream, branch = self.embed(self.embed_tokens.weight, tokens), None  # (B, T, C)
        for layer in self.layers:
            stream, branch = layer(stream, branch, cos, sin)
        x, _ = self.norm(stream, branch)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        return self.loss(x, self.lm_head.weight, targets)


def configure_optimizer(model: TinyLlama, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW in one kernel, which also leaves the weights rounded for the next step's products."""
    if model.fusions.fuse_optimizer:
        return tk.AdamW(model.parameters(), lr=learning_rate)
    return torch.optim.AdamW(model.parameters(), lr=learning_rate)


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


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
