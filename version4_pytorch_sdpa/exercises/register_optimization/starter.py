"""SwiGLU's two matrix products and what follows them, in one kernel: silu(x gate') * (x up').

torch.compile leaves this as two products of the library's, which write (M, N) numbers each, and a
kernel that reads them again. Here both products stay in registers until y is ready. That is the
difficulty: two accumulators, and operands for both on their way through shared memory.

Shapes in the comments:
    M tokens   K hidden_dim   N intermediate_dim   (block_m, block_n, block_k) the tile
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: what one program computes, and with how many threads."""

    block_m: int
    """Rows of y that a program computes, and columns: powers of two, at least 16."""
    block_n: int
    block_k: int
    """How much of K each turn of the loop takes: a power of two, at least 16."""
    num_warps: int
    """Waves (NVIDIA: warps) that share a program's tile: a power of two, up to 16."""
    num_stages: int
    """Turns whose operands are on their way at a time, each with a place in shared memory."""


START = Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3)

# YOUR CODE: a tile for each chip. All four are START, which spills, does not fit, or both.
TILES = {
    "gfx90a": Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3),
    "gfx942": Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3),
    "gfx950": Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3),
    "sm_90": Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3),
}


def swiglu_product_reference(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The specification: y (M, N) of x (M, K), gate and up (N, K)."""
    return F.silu(x @ gate.T) * (x @ up.T)


@triton.jit
def _swiglu_product_kernel(  # type: ignore[no-untyped-def]
    x, gate, up, y, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    gates = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        across = first + tl.arange(0, BLOCK_K)[None, :]
        down = first + tl.arange(0, BLOCK_K)[:, None]
        of_weights = (down < K) & (columns < N)
        a = tl.load(x + rows * K + across, mask=(rows < M) & (across < K), other=0.0)
        b = tl.load(gate + columns * K + down, mask=of_weights, other=0.0)
        c = tl.load(up + columns * K + down, mask=of_weights, other=0.0)
        gates = tl.dot(a, b, gates)
        ups = tl.dot(a, c, ups)
    result = gates * tl.sigmoid(gates) * ups
    tl.store(y + rows * N + columns, result, mask=(rows < M) & (columns < N))


def swiglu_product(x: Tensor, gate: Tensor, up: Tensor, tile: Tile) -> Tensor:
    """The result of `swiglu_product_reference`; x, gate and up contiguous."""
    M, K = x.shape
    N = gate.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, tile.block_m), triton.cdiv(N, tile.block_n))
    _swiglu_product_kernel[grid](
        *(x, gate, up, y, M, N, K),
        *(tile.block_m, tile.block_n, tile.block_k, tile.num_stages),
        num_warps=tile.num_warps,
    )
    return y
