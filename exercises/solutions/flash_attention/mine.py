"""Flash attention in plain PyTorch: block by block over the keys, the (T, T) scores never whole. A
solution, which serves grouped heads too; what each function gives is written in the starter.

Shapes in the comments:
    B batch   H query heads   T tokens   D head size   N keys of a block (the last may have fewer)
    K key/value heads   G query heads that share one of them = H / K
"""

import math
from typing import Any

import torch
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (B, H, T, T): what flash attention avoids
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    q, k, v = _by_group(q, k, v)
    T = q.shape[-2]
    out = torch.zeros_like(q)  # (B, K, G, T, D)
    highest = torch.full_like(q[..., 0], float("-inf"))  # (B, K, G, T)
    total = torch.zeros_like(highest)
    for start in range(0, T, block):
        rows, keys = slice(start, None), slice(start, start + block)
        scores = _scores(q[..., rows, :], k[..., keys, :])  # (B, K, G, T - start, N)
        before = highest[..., rows]
        now = torch.maximum(before, scores.amax(dim=-1))
        rescale = (before - now).exp()  # 0 at the first block, where `before` is -inf
        weights = (scores - now[..., None]).exp()
        total[..., rows] = total[..., rows] * rescale + weights.sum(dim=-1)
        sums = out[..., rows, :] * rescale[..., None]
        out[..., rows, :] = sums + weights @ v[..., keys, :]
        highest[..., rows] = now
    out = out / total[..., None]
    return out.flatten(1, 2), (highest + total.log()).flatten(1, 2)


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    D = q.shape[-1]
    delta = _heads_by_group((grad_out * out).sum(dim=-1), k)  # (B, K, G, T)
    grad_out, lse = _heads_by_group(grad_out, k), _heads_by_group(lse, k)
    q, k, v = _by_group(q, k, v)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for start in range(0, q.shape[-2], block):
        rows, keys = slice(start, None), slice(start, start + block)
        scores = _scores(q[..., rows, :], k[..., keys, :])  # (B, K, G, T - start, N)
        weights = (scores - lse[..., rows, None]).exp()  # the softmax, already divided
        dweights = grad_out[..., rows, :] @ v[..., keys, :].transpose(-2, -1)
        dscores = weights * (dweights - delta[..., rows, None]) / math.sqrt(D)
        dq[..., rows, :] += dscores @ k[..., keys, :]
        # The heads of a group share k and v: their gradients add up.
        dv[..., keys, :] = (weights.mT @ grad_out[..., rows, :]).sum(2, keepdim=True)
        dk[..., keys, :] = (dscores.mT @ q[..., rows, :]).sum(2, keepdim=True)
    return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores (..., R, N) of queries (..., R, D) and keys (..., N, D) from the same first token."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores.masked_fill(future, float("-inf"))


def _by_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as (B, K, G, T, D), k and v as (B, K, 1, T, D): products then serve grouped heads too."""
    return _heads_by_group(q, k), k.unsqueeze(2), v.unsqueeze(2)


def _heads_by_group(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, ...) as (B, K, G, ...)."""
    return x.unflatten(1, (k.shape[1], -1))


class FlashAttention(torch.autograd.Function):
    """Joins the two: it saves q, k, v, out and lse, and nothing of the size T x T."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        out, lse = flash_forward(q, k, v, block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *flash_backward(grad_out, q, k, v, out, lse, ctx.block), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 64) -> Tensor:
    """Causal attention, differentiable: what a model would call."""
    attended: Tensor = FlashAttention.apply(q, k, v, block)
    return attended
