"""The head's product and the cross-entropy behind it, a chunk of tokens at a time.

Shapes in the comments:
    N tokens   C width of the hidden states   V vocabulary   R tokens of a chunk
"""

from triton_launch import (
    autocast_dtype,
    cdiv,
    check,
    check_indices,
    check_shape,
    first_order,
    launch_options,
    next_power_of_2,
    operator,
    tuned,
    wait_for_previous,
)

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton_linear import has_wide_products

# A chunk has 4096 tokens, which fill the chip with a product; more while its logits are few.
CHUNK_ROWS = 4096
CHUNK_LOGITS = 2**26
# cuBLAS multiplies matrices several times as fast if all sides are multiples, and the loss's kernel
# takes 8 neighbours at once.
ALIGNED = 8


# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, R, V, width_groups,
    GRADIENT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The losses of ROWS tokens; their logits make way for their gradient, softmax - one_hot.

    The first walk over a row carries the running maximum and sum of the softmax, the second one
    writes. In between, the row is in the cache. A thread has 8 neighbours, which it reads at once
    and adds up for itself: so a running maximum is corrected once for 8 logits. A row has
    `width_groups` times 8; the last ones may be padding.
    """
    wait_for_previous()
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    existing = tl.minimum(r, R - 1)  # beyond the last token it is read again, and not written
    row = logits_ptr + existing.to(tl.int64) * width_groups * 8
    target = tl.load(targets_ptr + existing)
    valid = (target >= 0) & (target < V)
    # Before the sums, whose barriers keep other warps from writing the gradient in its place.
    of_target = tl.load(row + target, mask=valid, other=float("nan")).to(tl.float32)
    group = tl.arange(0, GROUPS)
    v = (group[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
    places = row[:, None, None] + v
    largest = tl.full((ROWS, GROUPS), -1e30, tl.float32)  # -inf - -inf would be no number
    total = tl.zeros((ROWS, GROUPS), tl.float32)
    for start in range(0, width_groups, GROUPS):
        inside = (start + group < width_groups)[None, :, None]
        x = tl.load(places + start * 8, mask=inside, other=float("-inf")).to(tl.float32)
        if PADDED:
            x = tl.where(start * 8 + v < V, x, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(x, 2))
        weights = tl.exp(x - new_largest[:, :, None])
        total = total * tl.exp(largest - new_largest) + tl.sum(weights, 2)
        largest = new_largest
    row_max = tl.max(largest, 1)
    log_sum = row_max + tl.log(tl.sum(total * tl.exp(largest - row_max[:, None]), 1))
    tl.store(losses_ptr + r, log_sum - of_target, mask=r < R)
    if GRADIENT:
        for start in range(0, width_groups, GROUPS):
            inside = (r < R)[:, None, None] & (start + group < width_groups)[None, :, None]
            x = tl.load(places + start * 8, mask=inside, other=float("-inf")).to(tl.float32)
            softmax = tl.exp(x - log_sum[:, None, None])
            if PADDED:
                softmax = tl.where(start * 8 + v < V, softmax, 0.0)
            tl.store(places + start * 8, softmax.to(logits_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # after the other warps' writing
        gradient = (tl.exp(of_target - log_sum) - 1.0).to(logits_ptr.dtype.element_ty)
        tl.store(row + target, gradient, mask=valid & (r < R))


# By architecture or vendor: tokens of a program, the groups of 8 logits of a step, and warps. sm:
# swept on an H200. gfx: unmeasured.
BLOCKS = {"sm": (1, 1024, 32), "gfx": (1, 1024, 16), "interpreter": (256, 512, 1)}


def launch(R: int, width_groups: int) -> tuple[int, dict[str, int]]:
    """Programs, and the kernel's block sizes and warps. A short row gets fewer threads: it
    takes about 4 steps too then, and more rows are under way at once."""
    rows, groups, warps = tuned(BLOCKS)
    fewer = max(1, groups // max(64, next_power_of_2(width_groups) // 4))
    options = launch_options(max(1, warps // fewer))
    return cdiv(R, rows), {"ROWS": rows, "GROUPS": groups // fewer, **options}


@triton.jit
def _scaled(x_ptr, y_ptr, block, numel, factor, BLOCK: tl.constexpr):
    """y = factor x of one block."""
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numel).to(tl.float32)
    tl.store(y_ptr + i, (factor * x).to(y_ptr.dtype.element_ty), mask=i < numel)


@triton.jit
def _cross_entropy_backward_kernel(
    dloss_ptr, N, a_ptr, b_ptr, scaled_a_ptr, scaled_b_ptr, numel_a, numel_b, BLOCK: tl.constexpr
):
    """Both gradients of the mean from those of the sum, times dloss."""
    wait_for_previous()
    factor = tl.load(dloss_ptr) / N
    block, blocks_a = tl.program_id(0), tl.cdiv(numel_a, BLOCK)
    if block < blocks_a:
        _scaled(a_ptr, scaled_a_ptr, block, numel_a, factor, BLOCK)
    else:
        _scaled(b_ptr, scaled_b_ptr, block - blocks_a, numel_b, factor, BLOCK)


# Elements of a program, and its warps. sm: swept on an H200. gfx: unmeasured.
SCALE_BLOCKS = {"sm": (4096, 8), "gfx": (4096, 8), "interpreter": (2**16, 1)}


# --- operators ----------------------------------------------------------------------------------


def chunk_rows(N: int, V: int) -> int:
    """Tokens of a chunk, all chunks of about the same size."""
    most = max(CHUNK_ROWS, CHUNK_LOGITS // V)
    return cdiv(N, cdiv(N, most))


def pad_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (V, C) in `dtype`, with rows of zeros up to the next multiple of ALIGNED. The
    loss's kernel leaves their logits out, and their gradients are zeros."""
    V, C = weight.shape
    missing = -V % ALIGNED
    if not missing:
        return weight.to(dtype)
    padded = weight.new_empty(V + missing, C, dtype=dtype)
    padded[:V] = weight
    padded[V:] = 0
    return padded


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or = for the first of them, gathered in fp32 for any type of a and b."""
    beta = 0 if first else 1  # at 0 total is not read
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda and has_wide_products():
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def _fake_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dhidden = hidden.new_empty(hidden.shape if gradients else 0, dtype=dtype)
    dweight = weight.new_empty(weight.shape if gradients else 0, dtype=torch.float32)
    return hidden.new_empty((), dtype=torch.float32), dhidden, dweight


@operator("tiny_llama::linear_cross_entropy", fake=_fake_linear_cross_entropy)
def linear_cross_entropy_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss; and, of the sum of losses, the gradients of hidden (in `dtype`) and of weight
    (in fp32), or empty tensors if they are not asked for.

    Sums, not means: a mean's gradient, softmax / N, would underflow in fp16.
    """
    N, C = hidden.shape
    V = weight.shape[0]
    losses = hidden.new_empty(N, dtype=torch.float32)
    dhidden = hidden.new_empty((N, C) if gradients else 0, dtype=dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        weight = pad_rows(weight, dtype)
        dweight = weight.new_empty(weight.shape if gradients else 0, dtype=torch.float32)
        size = chunk_rows(N, V)
        for start in range(0, N, size):
            rows = slice(start, start + size)
            chunk = hidden[rows].to(dtype)
            logits = chunk @ weight.t()  # (R, V), and the padding's
            programs, constants = launch(len(chunk), len(weight) // ALIGNED)
            _cross_entropy_kernel[(programs,)](
                logits, targets[rows], losses[rows], len(chunk), V, len(weight) // ALIGNED,
                GRADIENT=gradients, PADDED=len(weight) > V, **constants,
            )  # fmt: skip
            if gradients:
                torch.mm(logits, weight, out=dhidden[rows])
                _add_product(dweight, logits.t(), chunk, first=start == 0)
            del logits  # before the next chunk's are allocated
    return losses.mean(), dhidden, dweight[:V]


@operator(
    "tiny_llama::linear_cross_entropy_backward",
    fake=lambda dloss, dhidden, dweight, hidden_dtype, weight_dtype: (
        torch.empty_like(dhidden, dtype=hidden_dtype),
        torch.empty_like(dweight, dtype=weight_dtype),
    ),
)
def linear_cross_entropy_backward(
    dloss: Tensor,
    dhidden: Tensor,
    dweight: Tensor,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradients of the mean loss, from those of the sum of losses. In one kernel of ours, since
    PyTorch's product takes several times as long where the result has another dtype."""
    hidden_gradient = torch.empty_like(dhidden, dtype=hidden_dtype)
    weight_gradient = torch.empty_like(dweight, dtype=weight_dtype)
    block, warps = tuned(SCALE_BLOCKS)
    _cross_entropy_backward_kernel[(cdiv(dhidden.numel(), block) + cdiv(dweight.numel(), block),)](
        dloss, len(dhidden), dhidden, dweight, hidden_gradient, weight_gradient,
        dhidden.numel(), dweight.numel(), BLOCK=block, **launch_options(warps),
    )  # fmt: skip
    return hidden_gradient, weight_gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradients: bool
    ) -> Tensor:
        loss, dhidden, dweight = linear_cross_entropy_forward(
            hidden, weight, targets, dtype, gradients
        )
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        gradients = linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.dtypes)
        return *gradients, None, None, None


@register_flop_formula(torch.ops.tiny_llama.linear_cross_entropy)
def _flops(hidden_shape, weight_shape, targets_shape, dtype, gradients, **_) -> int:
    """2 N C V for the logits, and as many for each of the two gradients, which the forward pass
    computes too."""
    product = 2 * hidden_shape[0] * hidden_shape[1] * weight_shape[0]
    return 3 * product if gradients else product


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """mean over n of logsumexp(logits[n]) - logits[n, targets[n]], where logits = hidden weight'.

    The forward pass takes a chunk of tokens at a time: its logits, their loss, in their place
    their gradient, and from that its share of both gradients. The backward pass only scales them.

    Args:
        hidden: (..., C). weight: (V, C). Under autocast the products are computed in its dtype,
            else in hidden's.
        targets: hidden's shape without C, int64. One outside 0..V-1 makes the loss NaN.

    Returns:
        A scalar, fp32.

    Products: 6 N C V operations in the forward pass, none in the backward; without gradients
    2 N C V. Memory: the logits of a chunk (`chunk_rows`), the weight in the products' dtype, both
    gradients; the weight's gathers in fp32. The logits are written once and read and written once
    more, in part from L2.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; targets that are not int64; shapes that
            do not fit.
    """
    check("linear_cross_entropy", hidden=hidden, weight=weight)
    C = hidden.shape[-1]
    check_shape("linear_cross_entropy", "weight", weight, "V", C)
    check_indices("linear_cross_entropy", "targets", targets, hidden.device)
    check_shape("linear_cross_entropy", "targets", targets, *hidden.shape[:-1])
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(
        hidden.reshape(-1, C), weight, targets.reshape(-1).contiguous(), autocast_dtype(hidden),
        gradients,
    )  # fmt: skip


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`linear_cross_entropy` with all logits in memory."""
    logits = hidden.flatten(0, -2) @ weight.t()  # (N, V)
    return F.cross_entropy(logits, targets.flatten())
