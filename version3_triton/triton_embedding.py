"""The embedding's gradient in one kernel; PyTorch sorts the tokens first, in more than ten.

Shapes in the comments:
    N tokens   V vocabulary   C width
"""

from triton_launch import (
    as_rows,
    cdiv,
    check,
    check_indices,
    first_order,
    launch_options,
    must_repeat,
    next_power_of_2,
    operator,
    wait_for_previous,
)

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_C = 1024


@triton.jit
def _embedding_backward_kernel(
    dy_ptr, tokens_ptr, dweight_ptr, stride_dy, C, BLOCK_C: tl.constexpr
):
    """Adds a piece of a token's row to the token's own; others may add theirs at the same time."""
    wait_for_previous()
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    dy = tl.load(dy_ptr + n * stride_dy + c, mask=c < C).to(tl.float32)
    row = dweight_ptr + tl.load(tokens_ptr + n) * C
    tl.atomic_add(row + c, dy, mask=c < C, sem="relaxed")


@operator(
    "tiny_llama::embedding_backward",
    fake=lambda dy, tokens, rows: dy.new_empty(rows, dy.shape[-1], dtype=torch.float32),
)
def embedding_backward(dy: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of the weight, (rows, C), fp32."""
    C = dy.shape[-1]
    dy, tokens = as_rows(dy), tokens.reshape(-1).contiguous()
    dweight = dy.new_zeros(rows, C, dtype=torch.float32)
    block = min(BLOCK_C, next_power_of_2(C))
    _embedding_backward_kernel[(len(tokens), cdiv(C, block))](
        dy, tokens, dweight, dy.stride(0), C, BLOCK_C=block, **launch_options(4)
    )
    return dweight


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return embedding_backward(dy, *ctx.saved_tensors, ctx.rows).to(ctx.dtype), None


def embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight[tokens], as `F.embedding`.

    Args:
        weight: (V, C). tokens: (...), int64, each below V.

    Returns:
        (..., C), in weight's dtype.

    Bytes: forward one read and one write of the rows; backward one read of dy, and as much added in
    fp32 to rows that the cache holds. The order of the additions is not fixed, so the gradient's
    last bits vary from run to run, unless PyTorch is to be deterministic: its own gradient, of
    sorted tokens, then takes the kernel's place.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; tokens that are not int64.
        IndexError: a token outside of 0..V-1; on a GPU the device's own assertion.
    """
    check("embedding", weight=weight)
    check_indices("embedding", "tokens", tokens, weight.device)
    if must_repeat():
        return embedding_reference(weight, tokens)
    return _Embedding.apply(weight, tokens)


def embedding_reference(weight: Tensor, tokens: Tensor) -> Tensor:
    """`embedding`, with PyTorch's own gradient."""
    return torch.nn.functional.embedding(tokens, weight)
