"""SwiGLU's two matrix products and what follows them in one kernel, the starter's: tiles that fit.

Shapes in the comments:
    M tokens   K hidden_dim   N intermediate_dim   (block_m, block_n, block_k) the tile
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


START = Tile(block_m=256, block_n=128, block_k=64, num_warps=4, num_stages=3)

# 128 x 128 loads each number for more FLOP than any other tile of which AMD's registers hold four
# waves. On sm_90 a lane has no second kind of registers: half of the columns, and a third stage.
TILES = {
    "gfx90a": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2),
    "gfx942": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2),
    "gfx950": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3),
    "sm_90": Tile(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3),
}


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
    """y (M, N) = silu(x gate') * (x up') of x (M, K), gate and up (N, K), all contiguous."""
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
