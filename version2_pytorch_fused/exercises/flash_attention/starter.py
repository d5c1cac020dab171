"""Flash attention in plain PyTorch: block by block over the keys, the (T, T) scores never whole.

Shapes in the comments:
    B batch   H query heads   T tokens   D head size   N keys of a block (the last may have fewer)
"""

import math
from typing import Any

import torch
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The specification: what V1 computes, and the logarithm of each row's softmax denominator.

    Args:
        q, k, v: (B, H, T, D).

    Returns:
        out (B, H, T, D) = softmax(q k' / sqrt(D), no future) v, and
        lse (B, H, T) = log(sum(exp(scores))), the "log-sum-exp" of each row of scores.
    """
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (B, H, T, T): what flash attention avoids
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The result of `attention_reference`, with the scores of `block` keys at a time.

    For each query three things are carried from block to block: the highest score so far, the sum
    of exp(score - highest), and the sum of exp(score - highest) v, which becomes `out`.

    Args:
        q, k, v: (B, H, T, D); not always contiguous, and not to be changed.
        block: N, at least 1; T need not be a multiple of it.

    Returns:
        out (B, H, T, D) and lse (B, H, T).
    """
    # YOUR CODE
    raise NotImplementedError("the forward pass: a loop over blocks of keys")


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, with the softmax computed again, block by block, from lse.

    Args:
        grad_out: (B, H, T, D), the gradient of `out`.
        q, k, v, block: as given to `flash_forward`.
        out, lse: as it returned them.

    Returns:
        dq, dk, dv, each (B, H, T, D).
    """
    # YOUR CODE
    raise NotImplementedError("the backward pass: the same loop over blocks of keys")


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
