"""Parts of a pass over a Llama's layers, in plain PyTorch: what a CPU runs, and the reference for
the kernels of triton_ops.py, which has the same functions.

B batch, T prompt, S slots of the cache, C width, D head size, H query heads, K key/value heads,
V vocabulary, M = rows of activations: B x T in the pass over the prompts, B in a decode step.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Weight(NamedTuple):
    """A matrix (out, in), or its int8 values and the fp32 scale of each row (out,). The values are
    stored with 128 added, as uint8, which the kernels read without a conversion."""

    values: Tensor
    scale: Tensor | None = None


def quantised(matrix: Tensor) -> Weight:
    """The matrix in int8; a row's scale gives its largest weight 127."""
    matrix = matrix.float()
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return Weight((matrix / scale).round().add(128).to(torch.uint8), scale[:, 0])


def matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix (out, in); that of int8 values in `dtype`."""
    if weight.scale is None:
        return weight.values
    values = (weight.values ^ 128).view(torch.int8)  # 128 less
    return (values * weight.scale[:, None]).to(dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    return F.linear(x, matrix(weight, x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def project(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    """The product of the normalised rows x (M, C)."""
    return linear(rms_norm(x, norm, eps), weight)


def add_product(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    return residual + linear(x, weight)


def swiglu(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    """silu(gate) * up, of the normalised rows x (M, C); the weight has gate's rows, then up's."""
    gate, up = project(x, norm, weight, eps).chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x (M, heads, D): the first half of a head is turned with the second."""
    x32 = x.float()
    first, second = x32.chunk(2, -1)
    return (x32 * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (M, 1, D) of positions (M,), in fp32."""
    turns = positions.float()[:, None] * frequencies
    turns = torch.cat((turns, turns), -1)[:, None]
    return turns.cos(), turns.sin()


def split_heads(qkv: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (M, H, D), k and v (M, K, D), from their common product."""
    kv_heads, head_dim = cache.shape[2], cache.shape[-1]
    heads = qkv.unflatten(-1, (-1, head_dim))
    return heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def decode_attention(
    qkv: Tensor, cache: Tensor, slot: Tensor, pads: Tensor, frequencies: Tensor
) -> Tensor:
    """Attention of the token in `slot` (1,) to itself and the slots before it; (B, H x D).

    Writes its k and v into the cache (B, 2, K, S, D). The first `pads` (B,) slots of a row are
    padding.
    """
    batch, _, kv_heads, slots, head_dim = cache.shape
    q, k, v = split_heads(qkv, cache)
    cos, sin = angles(slot - pads, frequencies)
    cache.index_copy_(3, slot, torch.stack((rotate(k, cos, sin), v), 1)[:, :, :, None])
    keys, values = cache.float().unbind(1)
    q = rotate(q, cos, sin).float().view(batch, kv_heads, -1, head_dim)
    places = torch.arange(slots, device=slot.device)
    seen = (places <= slot) & (places >= pads[:, None])
    scores = (q @ keys.mT * head_dim**-0.5).masked_fill(~seen[:, None, None], -math.inf)
    return (scores.softmax(-1) @ values).to(qkv.dtype).view(batch, -1)


def store_prompts(qkv: Tensor, cache: Tensor, pads: Tensor, frequencies: Tensor) -> Tensor:
    """Writes the prompts' k and v (M, ...) into the cache's first slots; q, rotated,
    (B, H, T, D)."""
    batch = cache.shape[0]
    q, k, v = split_heads(qkv, cache)
    positions = torch.arange(len(qkv) // batch, device=qkv.device) - pads[:, None]
    cos, sin = angles(positions.clamp(min=0).flatten(), frequencies)
    q, k, v = (
        part.unflatten(0, (batch, -1)).transpose(1, 2)
        for part in (rotate(q, cos, sin), rotate(k, cos, sin), v)
    )
    cache[:, 0, :, : k.shape[2]] = k
    cache[:, 1, :, : k.shape[2]] = v
    return q


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest of each row's logits (B, V); (B, 1)."""
    return logits.argmax(-1, keepdim=True)
