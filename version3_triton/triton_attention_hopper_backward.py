"""Attention's backward pass for Hopper, on the parts of `triton_attention_hopper`.

It is one kernel, where `triton_attention` has two: five products instead of seven, but dq is added
up in memory, in fp32, in no fixed order. A kernel before it prepares the sums; those behind it
round them and turn rotated heads back.

Shapes in the comments: as in `triton_attention`.
"""

from triton_launch import cdiv, grid_order, launch_options, wait_for_previous

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton_attention_hopper import barriers, describe, heads, matrix
from triton_rope import rotate, store_gradient
from triton_tiles import head_of

# --- kernels ------------------------------------------------------------------------------------
# A program has 128 keys and takes 64 queries at a time. Of dq it adds up its part in memory.

BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)


@builtin
def _add_shared_to_global(descriptor, coordinates, tile, _semantic=None):
    """Has the copy engine add a tile to memory; Gluon 3.6 has the operation, but no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.jit
def _fragments(m, d, DOWN: gl.constexpr, ACROSS: gl.constexpr, D: gl.constexpr):
    """Where number (m, d) of a product lies in fp32 sums in memory, of DOWN x ACROSS warps: four
    numbers of a thread side by side, then the same four of the next thread."""
    PART: gl.constexpr = D // ACROSS
    thread = ((d // PART) * DOWN + m // 16 % DOWN) * 32 + m % 8 * 4 + d % 8 // 2
    group = (m // (16 * DOWN)) * (PART // 8) + (d % PART) // 8
    return group * (DOWN * ACROSS * 128) + thread * 4 + (m % 16) // 8 * 2 + d % 2


_fragments_in_triton = triton.jit(_fragments.fn)


@triton.jit
def _hopper_attention_prepare_kernel(
    out, dout, lse_ptr, stats_ptr, acc_ptr,
    stride_ob, stride_oh, stride_ot, stride_db, stride_dh, stride_dt, T, H,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """For 64 queries: their log-sum-exps and deltas (see `triton_attention`) side by side, as the
    copy engine will read them, infinity and zero beyond T; and zeros where dq will be added up."""
    wait_for_previous()
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    rows, d = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    t = block * ROWS + rows
    inside = t[:, None] < T
    out_ptr = head_of(out, stride_ob, stride_oh, b, h) + t[:, None] * stride_ot + d
    dout_ptr = head_of(dout, stride_db, stride_dh, b, h) + t[:, None] * stride_dt + d
    out_tile = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    dout_tile = tl.load(dout_ptr, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=float("inf"))
    tile = bh.to(tl.int64) * tl.num_programs(0) + block
    tl.store(stats_ptr + tile * (2 * ROWS) + rows, lse)
    tl.store(stats_ptr + tile * (2 * ROWS) + ROWS + rows, tl.sum(out_tile * dout_tile, 1))
    zeros = tl.zeros((ROWS, D), tl.float32)
    tl.store(acc_ptr + tile * (ROWS * D) + rows[:, None] * D + d, zeros)


@triton.jit
def _hopper_attention_finish_kernel(
    acc_ptr, tile_stride, x, cos_ptr, sin_ptr, stride_xb, stride_xh, stride_xt,
    stride_cos, stride_sin, T, H, scale,
    ROTATED: tl.constexpr, FRAGMENTS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A gradient from its fp32 sums, which lie row by row or as `_fragments` says; of heads that
    RoPE has turned, turned back."""
    wait_for_previous()
    block, bh = tl.program_id(0), tl.program_id(1)
    m, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    offsets = _fragments_in_triton(m, d, DOWN, ACROSS, D) if FRAGMENTS else m * D + d
    tile = bh.to(tl.int64) * tl.num_programs(0) + block
    gradient = tl.load(acc_ptr + tile * tile_stride + offsets) * scale
    store_gradient(
        x, stride_xb, stride_xh, stride_xt, cos_ptr, sin_ptr, stride_cos, stride_sin,
        bh // H, bh % H, block * ROWS, T, gradient, ROTATED, ROWS, D,
    )  # fmt: skip


@gluon.jit
def _load_backward(
    q, k, v, dout, stats, q_tiles, k_tile, v_tile, dout_tiles, stats_tiles,
    kv_full, q_full, q_free, dout_full, dout_free,
    b, kv, h_first, HEADS, n_first, first, H, M_BLOCKS,
    D: gl.constexpr, STAGES: gl.constexpr, ADD_SHARED: gl.constexpr,
):  # fmt: skip
    """The producer: keys and values, then block by block of each head queries and gradients."""
    mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * D * 2)
    tma.async_copy_global_to_shared(k, [b, kv, n_first, 0], kv_full.index(0), k_tile)
    tma.async_copy_global_to_shared(v, [b, kv, n_first, 0], kv_full.index(0), v_tile)
    h = h_first
    block = first
    for i in range(HEADS * (M_BLOCKS - first)):
        stage = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        ready = q_full.index(stage)
        place = [b, h, block * BLOCK_M, 0]
        mbarrier.wait(q_free.index(stage), phase)
        mbarrier.expect(ready, BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
        tma.async_copy_global_to_shared(q, place, ready, q_tiles.index(stage))
        tile = (b * H + h) * M_BLOCKS + block
        tma.async_copy_global_to_shared(stats, [tile, 0], ready, stats_tiles.index(stage))
        if not ADD_SHARED:
            mbarrier.wait(dout_free.index(stage), phase)
        ready = dout_full.index(stage)
        mbarrier.expect(ready, BLOCK_M * D * 2)
        tma.async_copy_global_to_shared(dout, place, ready, dout_tiles.index(stage))
        block += 1
        if block == M_BLOCKS:
            block = first
            h += 1


@gluon.jit
def _statistic(tile, FIRST: gl.constexpr, layout: gl.constexpr):
    """The log-sum-exps (FIRST = 0) or the deltas (BLOCK_M) of a block of queries."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return tile._reinterpret(gl.float32, [2 * BLOCK_M], flat).slice(FIRST, BLOCK_M).load(layout)


@gluon.jit
def _add(pointer, offsets, x):
    """Adds x to memory, four numbers of a thread at a time."""
    addresses = pointer.to(gl.int64) + (offsets * 4).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [addresses, x], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _gather(
    dk, dv, acc_ptr, acc, kv_acc_ptr, q_tiles, k_shared, v_shared, dout_tiles, stats_tiles,
    ds_tiles, dq_shared, kv_full, q_full, q_free, dout_full, dout_free,
    b, kv, h_first, HEADS, n_first, first, H, K, M_BLOCKS, N_BLOCKS, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, ADD_SHARED: gl.constexpr,
    ADD_KV: gl.constexpr,
):  # fmt: skip
    """The consumers, eight warps: dk and dv of 128 keys gather in their registers, their parts of
    dq in memory. The scores are transposed, (N, M), as in `triton_attention`.

    AHEAD: the next scores are computed before this block's dk, if the registers suffice.
    ADD_SHARED: dq goes through shared memory, and the copy engine adds it to memory; else the
    threads do, from their registers.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dtype: gl.constexpr = q_tiles.dtype
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, Q_LAYOUT))[:, None]
    offsets = _fragments(rows, gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))[None, :], 4, 2, D)
    n = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_LAYOUT))
    columns = gl.arange(0, BLOCK_M, COLUMNS)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, S_LAYOUT)
    zeros_q = gl.zeros([BLOCK_M, D], gl.float32, Q_LAYOUT)
    dk_acc = gl.zeros([BLOCK_N, D], gl.float32, KV_LAYOUT)
    dv_acc = gl.zeros([BLOCK_N, D], gl.float32, KV_LAYOUT)
    k_tile = matrix(k_shared, BLOCK_N, D)
    v_tile = matrix(v_shared, BLOCK_N, D)
    total = HEADS * (M_BLOCKS - first)
    mbarrier.wait(kv_full.index(0), 0)
    scores = zeros
    if AHEAD:
        mbarrier.wait(q_full.index(0), 0)
        queries = matrix(q_tiles.index(0), BLOCK_M, D).permute((1, 0))
        scores = warpgroup_mma(k_tile, queries, scores, use_acc=False, is_async=True)
    h = h_first
    block = first
    for i in range(total):
        stage = i % STAGES
        phase = i // STAGES & 1
        start = block * BLOCK_M
        q_tile = matrix(q_tiles.index(stage), BLOCK_M, D)
        dout_tile = matrix(dout_tiles.index(stage), BLOCK_M, D)
        if not AHEAD:
            mbarrier.wait(q_full.index(stage), phase)
            queries = q_tile.permute((1, 0))
            scores = warpgroup_mma(k_tile, queries, zeros, use_acc=False, is_async=True)
        lse = _statistic(stats_tiles.index(stage), 0, COLUMNS)
        mbarrier.wait(dout_full.index(stage), phase)
        douts = dout_tile.permute((1, 0))
        dweights = warpgroup_mma(v_tile, douts, zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if start < n_first + BLOCK_N:
            weights = gl.where(n[:, None] <= (start + columns)[None, :], weights, 0.0)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        delta = _statistic(stats_tiles.index(stage), BLOCK_M, COLUMNS)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        dscores = (weights * (dweights - delta[None, :])).to(dtype)
        ds_tile = matrix(ds_tiles.index(i % 2), BLOCK_N, BLOCK_M)
        ds_tile.store(dscores)  # dq's product needs those of all warps
        ds = gl.convert_layout(dscores, P_LAYOUT)
        dv_acc = warpgroup_mma(p, dout_tile, dv_acc, is_async=True)
        fence_async_shared()
        if ADD_SHARED:
            tma.store_wait(0)
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, zeros_q, use_acc=False, is_async=True)
        if AHEAD:
            following = (i + 1) % STAGES
            mbarrier.wait(q_full.index(following), (i + 1) // STAGES & 1, pred=i + 1 < total)
            queries = matrix(q_tiles.index(following), BLOCK_M, D).permute((1, 0))
            # Into the same registers: a copy at the loop's end would have to wait for the product.
            scores = warpgroup_mma(k_tile, queries, scores, use_acc=False, is_async=True)
            dk_acc = warpgroup_mma(ds, q_tile, dk_acc, is_async=True)
            dq, dv_acc, p = warpgroup_mma_wait(2, deps=[dq, dv_acc, p])
        else:
            dk_acc = warpgroup_mma(ds, q_tile, dk_acc, is_async=True)
            dq, dv_acc, p = warpgroup_mma_wait(1, deps=[dq, dv_acc, p])
        tile = (b * H + h) * M_BLOCKS + block
        if ADD_SHARED:
            dq_shared.store(dq)
            fence_async_shared()
            dk_acc, ds = warpgroup_mma_wait(0, deps=[dk_acc, ds])
            mbarrier.arrive(q_free.index(stage))
            _add_shared_to_global(acc, [tile * BLOCK_M, 0], dq_shared)
        else:
            mbarrier.arrive(dout_free.index(stage))
            _add(acc_ptr + tile.to(gl.int64) * (BLOCK_M * D), offsets, dq)
            dk_acc, ds = warpgroup_mma_wait(0, deps=[dk_acc, ds])
            mbarrier.arrive(q_free.index(stage))
        block += 1
        if block == M_BLOCKS:
            block = first
            h += 1
    if AHEAD:
        scores = warpgroup_mma_wait(0, deps=[scores])
    if ADD_SHARED:
        tma.store_wait(0)
    dk_acc = dk_acc * scale
    if ADD_KV:
        rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, KV_LAYOUT))[:, None]
        places = _fragments(rows, gl.arange(0, D, gl.SliceLayout(0, KV_LAYOUT))[None, :], 8, 1, D)
        tile = (b * K + kv) * N_BLOCKS + n_first // BLOCK_N
        kv_acc_ptr += tile.to(gl.int64) * (2 * BLOCK_N * D)
        _add(kv_acc_ptr, places, dk_acc)
        _add(kv_acc_ptr + BLOCK_N * D, places, dv_acc)
    else:
        k_tile.store(dk_acc.to(dtype))
        v_tile.store(dv_acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk, [b, kv, n_first, 0], k_shared)
        tma.async_copy_shared_to_global(dv, [b, kv, n_first, 0], v_shared)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "K", "HEADS", "M_BLOCKS", "N_BLOCKS"])
def _hopper_attention_backward_kernel(
    q, k, v, dout, stats, dk, dv, acc_ptr, acc, kv_acc_ptr,
    H, K, HEADS, M_BLOCKS, N_BLOCKS, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, ADD_SHARED: gl.constexpr,
    ADD_KV: gl.constexpr,
):  # fmt: skip
    """128 keys and values against the queries that see them, of HEADS heads of their group: of all
    of them, or with ADD_KV of a part, whose dk and dv are added up in memory too."""
    bh = (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) * HEADS
    b = bh // H
    h_first = bh % H
    kv = h_first // (H // K)
    n_first = gl.program_id(1) * BLOCK_N  # the longest first
    first = n_first // BLOCK_M
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, D], q.layout)
    dout_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, D], q.layout)
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 1, BLOCK_N, D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1, 1, BLOCK_N, D], v.layout)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_N, BLOCK_M], q.layout)
    stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BLOCK_M], stats.layout)
    if ADD_SHARED:
        dq_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_M, D], acc.layout)
    else:
        dq_tile = stats_tiles  # not used
    kv_full = barriers(1, 1)
    q_full, q_free = barriers(STAGES, 1), barriers(STAGES, 1)
    dout_full, dout_free = barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize([
        (_gather, (dk, dv, acc_ptr, acc, kv_acc_ptr, q_tiles, k_tile, v_tile, dout_tiles,
                   stats_tiles, ds_tiles, dq_tile, kv_full, q_full, q_free, dout_full, dout_free,
                   b, kv, h_first, HEADS, n_first, first, H, K, M_BLOCKS, N_BLOCKS,
                   scale, scale_log2, D, STAGES, AHEAD, ADD_SHARED, ADD_KV)),
        (_load_backward, (q, k, v, dout, stats, q_tiles, k_tile, v_tile, dout_tiles, stats_tiles,
                          kv_full, q_full, q_free, dout_full, dout_free,
                          b, kv, h_first, HEADS, n_first, first, H, M_BLOCKS,
                          D, STAGES, ADD_SHARED)),
    ], [1], [24])  # fmt: skip


# --- configurations -----------------------------------------------------------------------------

BACKWARD_FROM = {64: 1280, 128: 1024}  # as FORWARD_FROM of `triton_attention_hopper`, on an H200
# Heads of a group x tokens from which each head has a separate program (D 128): programs that take
# all of them one by one drift apart, and no longer find in the cache what others read.
APART_FROM = 16384
BACKWARD_TOKENS_AT_ONCE = 2**15  # see `triton_attention`
ROWS_OF_32_BITS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
AS_IN_MEMORY = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


# --- launches -----------------------------------------------------------------------------------


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, scale_log2: float, dq: Tensor, dk: Tensor, dv: Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """`triton_attention.attend_backward`, causal."""
    (B, H, T, D), K = q.shape, k.shape[1]
    M, N = BLOCK_M.value, BLOCK_N.value
    blocks, key_blocks = cdiv(T, M), cdiv(T, N)
    wide = D == 128
    apart = wide and H > K and H // K * T >= APART_FROM
    stats = q.new_empty(B * H * blocks, 2 * M, dtype=torch.float32)
    acc = q.new_empty(B * H * blocks * M, D, dtype=torch.float32)
    kv_acc = q.new_zeros(B * K * key_blocks, 2 * N * D, dtype=torch.float32) if apart else acc
    _hopper_attention_prepare_kernel[(blocks, B * H)](
        out, dout, lse, stats, acc, *out.stride()[:3], *dout.stride()[:3], T, H,
        ROWS=M, D=D, **launch_options(4),
    )  # fmt: skip
    own_heads = 1 if apart else H // K
    at_once, least = (0, 1) if apart else (BACKWARD_TOKENS_AT_ONCE, 8)
    order = grid_order(T, N, B * H // own_heads, at_once, least)
    _hopper_attention_backward_kernel[order](
        heads(q, M), heads(k, N), heads(v, N), heads(dout, M),
        describe(stats, [1, 2 * M], AS_IN_MEMORY), heads(dk, N), heads(dv, N),
        acc, describe(acc, [M, D], ROWS_OF_32_BITS), kv_acc,
        H, K, own_heads, blocks, key_blocks, scale, scale_log2,
        D=D, STAGES=2, AHEAD=not wide, ADD_SHARED=wide, ADD_KV=apart, **launch_options(8),
    )  # fmt: skip

    cos, sin = tables or (lse[0], lse[0])  # not read
    angles = cos, sin, *dq.stride()[:3], cos.stride(0), sin.stride(0)
    _hopper_attention_finish_kernel[(blocks, B * H)](
        acc, M * D, dq, *angles, T, H, scale,
        ROTATED=tables is not None, FRAGMENTS=not wide, DOWN=4, ACROSS=2, ROWS=M, D=D,
        **launch_options(D // 16),
    )  # fmt: skip
    if apart:
        angles = cos, sin, *dk.stride()[:3], cos.stride(0), sin.stride(0)
        for sums, x, rotated in ((kv_acc, dk, tables is not None), (kv_acc[:, N * D :], dv, False)):
            _hopper_attention_finish_kernel[(key_blocks, B * K)](
                sums, 2 * N * D, x, *angles, T, K, 1.0,
                ROTATED=rotated, FRAGMENTS=True, DOWN=8, ACROSS=1, ROWS=N, D=D,
                **launch_options(8),
            )  # fmt: skip
    elif tables is not None:
        alone = dk, dk[:, :0]
        rotate(alone, alone, cos, sin, backward=True)
