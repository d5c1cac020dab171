"""Attention's kernels one level lower, for Hopper: warps that load and warps that compute.

Gluon, Triton's lower level, leaves to the kernel what Triton's compiler decides elsewhere: which
warps do what, where a tile lies in shared memory, which thread holds which number, and when a
product or a copy is waited for. One warp, the producer, has the copy engine (TMA) fill a ring of
tiles in shared memory. Groups of four warps, the consumers, multiply them (wgmma, asynchronous).
An mbarrier in shared memory counts bytes that have arrived, or consumers that need a tile no more.

The algorithm is that of `triton_attention`, but a block's softmax is computed while the product of
the block before it runs. The backward pass is in `triton_attention_hopper_backward`.

Shapes in the comments: as in `triton_attention`.
"""

from dataclasses import dataclass
from typing import Any

from triton_launch import grid_order, launch_options, new_descriptor

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = gl.constexpr(64)  # queries of a consumer in the forward pass: wgmma's rows


@gluon.jit
def matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile (1, 1, ROWS, COLUMNS) in shared memory as a matrix."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers, each of which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), COUNT)
    return barriers


# --- forward ------------------------------------------------------------------------------------


@gluon.jit
def _load_forward(
    q, k, v, q_tiles, k_tiles, v_tiles, full, free, b, h, kv, first, blocks,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The producer: q and the last keys; then, block by block to the first, keys and the values of
    the keys before, as they are used together."""
    KV_BYTES: gl.constexpr = BLOCK_N * D * 2
    mbarrier.expect(full.index(0), CONSUMERS * LINE * D * 2 + KV_BYTES)
    for w in gl.static_range(CONSUMERS):
        place = [b, h, first + LINE * w, 0]
        tma.async_copy_global_to_shared(q, place, full.index(0), q_tiles.index(w))
    start = (blocks - 1) * BLOCK_N
    tma.async_copy_global_to_shared(k, [b, kv, start, 0], full.index(0), k_tiles.index(0))
    for i in range(1, blocks + 1):
        stage = i % STAGES
        ready = full.index(stage)
        start = (blocks - 1 - i) * BLOCK_N
        more = i < blocks
        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(ready, 2 * KV_BYTES, pred=more)
        mbarrier.expect(ready, KV_BYTES, pred=i == blocks)
        tma.async_copy_global_to_shared(
            k, [b, kv, start, 0], ready, k_tiles.index(stage), pred=more
        )
        values = v_tiles.index((i - 1) % STAGES)
        tma.async_copy_global_to_shared(v, [b, kv, start + BLOCK_N, 0], ready, values)


@gluon.jit
def _by_thread(x, ROWS: gl.constexpr, N: gl.constexpr):
    """(ROWS, N) as (ROWS, N / 8, 4, 2): a thread holds all of the second dimension and the last."""
    return x.reshape([ROWS, N // 8, 4, 2])


@gluon.jit
def _row_max(x, ROWS: gl.constexpr, N: gl.constexpr):
    most = gl.max(gl.max(_by_thread(x, ROWS, N), 1), 2)
    return gl.convert_layout(gl.max(most, 1), gl.SliceLayout(1, x.type.layout))


@gluon.jit
def _thread_sums(x, ROWS: gl.constexpr, N: gl.constexpr):
    """The sums of each row's numbers in each of the four threads that share it: (ROWS, 4)."""
    return gl.sum(gl.sum(_by_thread(x, ROWS, N), 1), 2)


@gluon.jit
def _computed_here(sums):
    """The sums, with all that they come from computed before this point: by a vote of the warp's
    threads, over which the compiler moves nothing. It would move the softmax behind the next wait,
    and by then the product has ended that should run at the same time."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred no; .reg .f32 both; add.f32 both, $2, $3; setp.lt.f32 no, both, 0fBF800000;"
        " vote.sync.any.pred no, no, -1;"
        " selp.f32 $0, 0f7FC00000, $2, no; selp.f32 $1, 0f7FC00000, $3, no; }",
        "=f,=f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _named_barrier(ASM: gl.constexpr, NUMBER: gl.constexpr):
    """Two consumers take turns at the matrix units: bar.sync waits for one's own turn, bar.arrive
    gives the other one its turn. Triton itself uses the first few of the 16 barriers."""
    number = gl.to_tensor(NUMBER + 8)
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


WAIT = gl.constexpr("bar.sync $1, 256; mov.b32 $0, 0;")
PASS_ON = gl.constexpr("bar.arrive $1, 256; mov.b32 $0, 0;")


@gluon.jit
def _attend(
    out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first, blocks, T, scale,
    W: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Consumer W: 64 queries against the keys that they see, from the diagonal to the first."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    TURNS: gl.constexpr = CONSUMERS == 2
    OTHER: gl.constexpr = (W + 1) % CONSUMERS
    dtype: gl.constexpr = q_tiles.dtype
    row = first + LINE * W
    skipped = blocks - gl.minimum(row // BLOCK_N + 1, blocks)  # blocks beyond its diagonal
    m = row + gl.arange(0, LINE, gl.SliceLayout(1, S_LAYOUT))
    q_tile = matrix(q_tiles.index(W), LINE, D)
    zeros = gl.zeros([LINE, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([LINE, D], gl.float32, O_LAYOUT)
    if TURNS and W == 1:
        _named_barrier(PASS_ON, OTHER)
    for i in range(skipped):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(free.index(i % STAGES))

    # The block on the diagonal, the only one that needs a mask.
    mbarrier.wait(full.index(skipped % STAGES), skipped // STAGES & 1)
    if TURNS:
        _named_barrier(WAIT, W)
    keys = matrix(k_tiles.index(skipped % STAGES), BLOCK_N, D).permute((1, 0))
    scores = warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)
    if TURNS:
        _named_barrier(PASS_ON, OTHER)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(free.index(skipped % STAGES))
    n = (blocks - 1 - skipped) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    scores = gl.where(n[None, :] <= m[:, None], scores, float("-inf"))
    row_max = _row_max(scores, LINE, BLOCK_N)
    weights = gl.exp2(scores * scale - (row_max * scale)[:, None])
    row_sum = _thread_sums(weights, LINE, BLOCK_N)
    SUMS: gl.constexpr = row_sum.type.layout
    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    mbarrier.wait(full.index((skipped + 1) % STAGES), (skipped + 1) // STAGES & 1)

    for i in range(skipped + 1, blocks):
        if TURNS:
            _named_barrier(WAIT, W)
        keys = matrix(k_tiles.index(i % STAGES), BLOCK_N, D).permute((1, 0))
        scores = warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)
        values = matrix(v_tiles.index((i - 1) % STAGES), BLOCK_N, D)
        acc = warpgroup_mma(p, values, acc, is_async=True)
        if TURNS:
            _named_barrier(PASS_ON, OTHER)
        scores = warpgroup_mma_wait(1, deps=[scores])
        new_max = gl.maximum(row_max, _row_max(scores, LINE, BLOCK_N))
        weights = gl.exp2(scores * scale - (new_max * scale)[:, None])
        rescale = gl.exp2((row_max - new_max) * scale)
        row_sum *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
        row_sum = _computed_here(row_sum + _thread_sums(weights, LINE, BLOCK_N))
        row_max = new_max
        # The condition, always true, makes a branch of the wait: see `_computed_here`.
        mbarrier.wait(full.index((i + 1) % STAGES), (i + 1) // STAGES & 1, pred=T > 0)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(free.index(i % STAGES))
        acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)

    values = matrix(v_tiles.index((blocks - 1) % STAGES), BLOCK_N, D)
    acc = warpgroup_mma(p, values, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    lse = row_max * scale + gl.log2(row_sum)
    gl.store(lse_ptr + bh.to(gl.int64) * T + m, lse, mask=m < T)
    q_tile.store((acc / gl.convert_layout(row_sum, O_ROWS)[:, None]).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [b, h, row, 0], q_tiles.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "H", "G"])
def _hopper_attention_forward_kernel(
    q, k, v, out, lse_ptr, T, H, G, scale,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 queries a consumer, of one head, against all the keys that they see."""
    bh = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    b = bh // H
    h = bh % H
    first = (gl.num_programs(1) - 1 - gl.program_id(1)) * LINE * CONSUMERS  # the longest first
    blocks = gl.cdiv(gl.minimum(first + LINE * CONSUMERS, T), BLOCK_N)
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, LINE, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    gdc_wait()  # as `wait_for_previous`
    gdc_launch_dependents()
    # The first is run by the warps that are here already. Registers are given out by group of four.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 0, D, BLOCK_N, STAGES, CONSUMERS)),
            (_load_forward, (q, k, v, q_tiles, k_tiles, v_tiles, full, free, b, h, h // G, first,
                             blocks, D, BLOCK_N, STAGES, CONSUMERS)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 0, D, BLOCK_N, STAGES, CONSUMERS)),
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 1, D, BLOCK_N, STAGES, CONSUMERS)),
            (_load_forward, (q, k, v, q_tiles, k_tiles, v_tiles, full, free, b, h, h // G, first,
                             blocks, D, BLOCK_N, STAGES, CONSUMERS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 0, D, BLOCK_N, STAGES, CONSUMERS)),
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 1, D, BLOCK_N, STAGES, CONSUMERS)),
            (_attend, (out, lse_ptr, q_tiles, k_tiles, v_tiles, full, free, b, h, bh, first,
                       blocks, T, scale, 2, D, BLOCK_N, STAGES, CONSUMERS)),
            (_load_forward, (q, k, v, q_tiles, k_tiles, v_tiles, full, free, b, h, h // G, first,
                             blocks, D, BLOCK_N, STAGES, CONSUMERS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """Consumers of 64 queries each, keys of a tile, tiles in flight, registers of a thread at the
    start (None: all that there are); up to a number of tokens."""

    consumers: int
    block_n: int
    stages: int
    max_registers: int | None = None
    up_to: int = 2**31


# By D; swept on an H100 and an H200 (README.md, "One level lower"). With 80 registers a thread
# three programs fit on a multiprocessor: one begins or ends while the others compute.
FORWARD = {
    64: [Forward(1, 64, 3, max_registers=80, up_to=4096), Forward(3, 128, 2)],
    128: [Forward(2, 128, 2)],
}
# The shortest sequences: below, the kernels of `triton_attention` are about as fast, or faster.
FORWARD_FROM = {64: 768, 128: 768}
CONSUMER_REGISTERS = {1: 0, 2: 240, 3: 160}  # of all consumers but the first, which has the rest
FORWARD_TOKENS_AT_ONCE = 2**17  # see `triton_attention`


# --- launches -----------------------------------------------------------------------------------

ROWS_OF_16_BITS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def takes(shortest: dict[int, int], q: Tensor, *others: Tensor) -> bool:
    """Whether the sequence is long enough, by D, and the copy engine can read all of the tensors
    (B, heads, T, D), which must be of 16-bit numbers."""
    T, D = q.shape[2:]
    if D not in shortest or T < shortest[D]:
        return False
    for x in (q, *others):
        b, h, t, _ = x.stride()
        if x.element_size() != 2 or x.data_ptr() % 16 or b % 8 or h % 8 or t % 8 or not b * h * t:
            return False
    return True


def describe(x: Tensor, block: list[int], layout: Any) -> Any:
    """A descriptor for the copy engine of blocks of x, in shared memory in this layout."""
    return new_descriptor(TensorDescriptor, x, block, layout=layout, padding="zero")


def heads(x: Tensor, rows: int) -> Any:
    """The descriptor of tiles (rows, D) of a (B, heads, T, D)."""
    return describe(x, [1, 1, rows, x.shape[-1]], ROWS_OF_16_BITS)


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale_log2: float) -> None:
    """`triton_attention.attend`, causal, into out and lse."""
    B, H, T, D = q.shape
    config = next(config for config in FORWARD[D] if config.up_to >= T)
    rows = LINE.value * config.consumers
    registers = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    _hopper_attention_forward_kernel[grid_order(T, rows, B * H, FORWARD_TOKENS_AT_ONCE)](
        heads(q, LINE.value), heads(k, config.block_n), heads(v, config.block_n),
        heads(out, LINE.value), lse, T, H, H // k.shape[1], scale_log2,
        D=D, BLOCK_N=config.block_n, STAGES=config.stages, CONSUMERS=config.consumers,
        REGISTERS=CONSUMER_REGISTERS[config.consumers], **registers, **launch_options(4),
    )  # fmt: skip
