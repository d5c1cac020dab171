"""Attention that never stores its (T, T) scores, with grouped query heads, causal or not.

The forward pass carries a running softmax over tiles of keys, so that a tile of scores lives and
dies in registers; it leaves one number a query behind, the log-sum-exp of its scores. The backward
pass computes each tile of scores again from q, k and that number, and does so twice: by queries for
dq, by keys for dk and dv. So every gradient gathers in the registers of one program.

Long causal sequences take the kernels of `triton_attention_hopper` on an H100 or H200.

Shapes in the comments:
    B batch   H query heads   K key/value heads   G = H / K   T tokens   D head size
    M queries of a tile (BLOCK_M)   N keys of a tile (BLOCK_N)
"""

import math
from dataclasses import dataclass
from typing import Any

from triton_launch import (
    GLUON,
    autocast_dtype,
    check,
    check_dtypes,
    check_shape,
    describe_tiles,
    dot_precision,
    first_order,
    grid_order,
    launch_options,
    must_repeat,
    new_heads,
    on_hopper,
    operator,
    tuned,
    wait_for_previous,
)

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton_rope import store_gradient
from triton_tiles import dot, load_tile, store_tile

hopper: Any = None  # the module with the kernels for it
hopper_backward: Any = None
if GLUON:
    import triton_attention_hopper as hopper  # type: ignore[no-redef]
    import triton_attention_hopper_backward as hopper_backward  # type: ignore[no-redef]

HEAD_SIZES = (32, 64, 128)
LOG2_E = math.log2(math.e)  # exp(x) = exp2(x log2(e)), and exp2 is what the hardware has
MAX_OFFSET = 2**31 - 1  # from the first token of a head to the last: the kernels add 32-bit offsets


# --- forward ------------------------------------------------------------------------------------


@triton.jit
def _attend(
    out, row_max, row_sum, q_tile, k, v, b, kv,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    m, first, last, T, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Carries the running softmax of queries m over the keys first..last."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k_tile = load_tile(k, stride_kb, stride_kh, stride_kt, b, kv, start, T, BLOCK_N, D, TMA)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scores = dot(q_tile, tl.trans(k_tile), scores, PRECISION)
        if MASK:
            n = start + tl.arange(0, BLOCK_N)
            visible = n[None, :] < T
            if CAUSAL:
                visible = visible & (n[None, :] <= m[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        # The sums so far were weighted against the old maximum.
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None]
        v_tile = load_tile(v, stride_vb, stride_vh, stride_vt, b, kv, start, T, BLOCK_N, D, TMA)
        out = dot(weights.to(v_tile.dtype), v_tile, out, PRECISION)
        row_max = new_max
    return out, row_max, row_sum


@triton.jit
def _attention_forward_kernel(
    q, k, v, out, lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_ob, stride_oh, stride_ot,
    T, H, G, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head against all the keys that it sees."""
    wait_for_previous()
    bh = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    b, h = bh // H, bh % H
    # The last queries see the most keys: they start first (`grid_order`).
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q, stride_qb, stride_qh, stride_qt, b, h, first, T, BLOCK_M, D, TMA)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    # Keys that every query of the tile sees need no mask; those above the diagonal are skipped.
    if CAUSAL:
        unmasked = first // BLOCK_N * BLOCK_N
        last = tl.minimum(first + BLOCK_M, T)
    else:
        unmasked = T // BLOCK_N * BLOCK_N
        last = T
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, k, v, b, h // G,
        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
        m, 0, unmasked, T, scale, False, CAUSAL, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, k, v, b, h // G,
        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
        m, unmasked, last, T, scale, True, CAUSAL, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
    )  # fmt: skip
    acc = acc / row_sum[:, None]
    store_tile(out, stride_ob, stride_oh, stride_ot, b, h, first, T, acc, BLOCK_M, D)
    lse = row_max + tl.log2(row_sum)
    tl.store(lse_ptr + bh.to(tl.int64) * T + m, lse, mask=m < T)


# --- backward -----------------------------------------------------------------------------------


@triton.jit
def _gather_dq(
    dq, q_tile, dout_tile, lse, delta, k, v, b, kv,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    m, first, last, T, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds to dq of queries m what the keys first..last give."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k_tile = load_tile(k, stride_kb, stride_kh, stride_kt, b, kv, start, T, BLOCK_N, D, TMA)
        v_tile = load_tile(v, stride_vb, stride_vh, stride_vt, b, kv, start, T, BLOCK_N, D, TMA)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scores = dot(q_tile, tl.trans(k_tile), zeros, PRECISION)
        dweights = dot(dout_tile, tl.trans(v_tile), zeros, PRECISION)
        weights = tl.exp2(scores * scale - lse[:, None])
        if MASK:
            n = start + tl.arange(0, BLOCK_N)
            visible = n[None, :] < T
            if CAUSAL:
                visible = visible & (n[None, :] <= m[:, None])
            weights = tl.where(visible, weights, 0.0)
        dscores = weights * (dweights - delta[:, None])
        dq = dot(dscores.to(k_tile.dtype), k_tile, dq, PRECISION)
    return dq


@triton.jit
def _attention_backward_dq_kernel(
    q, k, v, out, dout, lse_ptr, delta_ptr, dq, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_ob, stride_oh, stride_ot,
    stride_db, stride_dh, stride_dt, stride_dqb, stride_dqh, stride_dqt,
    stride_cos, stride_sin, T, H, G, scale, scale_log2,
    CAUSAL: tl.constexpr, ROTATED: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head against all the keys that it sees, for dq; and for the other
    kernel delta = sum over D of out * dout, which the softmax's backward subtracts."""
    wait_for_previous()
    bh = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    b, h = bh // H, bh % H
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # as in the forward pass
    m = first + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q, stride_qb, stride_qh, stride_qt, b, h, first, T, BLOCK_M, D, TMA)
    out_tile = load_tile(out, stride_ob, stride_oh, stride_ot, b, h, first, T, BLOCK_M, D, TMA)
    dout_tile = load_tile(dout, stride_db, stride_dh, stride_dt, b, h, first, T, BLOCK_M, D, TMA)
    rows = bh.to(tl.int64) * T
    lse = tl.load(lse_ptr + rows + m, mask=m < T, other=float("inf"))
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta_ptr + rows + m, delta, mask=m < T)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    if CAUSAL:
        unmasked = first // BLOCK_N * BLOCK_N
        last = tl.minimum(first + BLOCK_M, T)
    else:
        unmasked = T // BLOCK_N * BLOCK_N
        last = T
    acc = _gather_dq(
        acc, q_tile, dout_tile, lse, delta, k, v, b, h // G,
        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
        m, 0, unmasked, T, scale_log2,
        False, CAUSAL, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
    )  # fmt: skip
    acc = _gather_dq(
        acc, q_tile, dout_tile, lse, delta, k, v, b, h // G,
        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
        m, unmasked, last, T, scale_log2,
        True, CAUSAL, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
    )  # fmt: skip
    store_gradient(
        dq, stride_dqb, stride_dqh, stride_dqt, cos_ptr, sin_ptr, stride_cos, stride_sin,
        b, h, first, T, acc * scale, ROTATED, BLOCK_M, D,
    )  # fmt: skip


@triton.jit
def _gather_dk_dv(
    dk, dv, k_tile, v_tile, q, dout, lse_ptr, delta_ptr, b, h,
    stride_qb, stride_qh, stride_qt, stride_db, stride_dh, stride_dt,
    n, first, last, T, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv of keys n what the queries first..last of head h give.

    The scores are transposed, (N, M): as the left factors of dk's and dv's products they then
    stay in registers. Keys beyond T need no mask: what they gather is not written.
    """
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        m = start + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, stride_qb, stride_qh, stride_qt, b, h, start, T, BLOCK_M, D, TMA)
        dout_tile = load_tile(
            dout, stride_db, stride_dh, stride_dt, b, h, start, T, BLOCK_M, D, TMA
        )
        zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        scores = dot(k_tile, tl.trans(q_tile), zeros, PRECISION)
        dweights = dot(v_tile, tl.trans(dout_tile), zeros, PRECISION)
        # A query beyond T has weight exp2(-inf) = 0.
        lse = tl.load(lse_ptr + m, mask=m < T, other=float("inf"))
        weights = tl.exp2(scores * scale - lse[None, :])
        if DIAGONAL:
            weights = tl.where(n[:, None] <= m[None, :], weights, 0.0)
        dv = dot(weights.to(dout_tile.dtype), dout_tile, dv, PRECISION)
        delta = tl.load(delta_ptr + m, mask=m < T, other=0.0)
        dscores = weights * (dweights - delta[None, :])
        dk = dot(dscores.to(q_tile.dtype), q_tile, dk, PRECISION)
    return dk, dv


@triton.jit
def _attention_backward_dk_dv_kernel(
    q, k, v, dout, lse_ptr, delta_ptr, dk, dv, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_db, stride_dh, stride_dt,
    stride_dkb, stride_dkh, stride_dkt,
    stride_cos, stride_sin, T, H, G, scale, scale_log2,
    CAUSAL: tl.constexpr, ROTATED: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values against all the queries that see it, of all heads in its
    group."""
    wait_for_previous()
    K = H // G
    bkv = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    b, kv = bkv // K, bkv % K
    n_first = tl.program_id(1) * BLOCK_N  # the first keys, which the most queries see, come first
    n = n_first + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k, stride_kb, stride_kh, stride_kt, b, kv, n_first, T, BLOCK_N, D, TMA)
    v_tile = load_tile(v, stride_vb, stride_vh, stride_vt, b, kv, n_first, T, BLOCK_N, D, TMA)
    dk_acc = tl.zeros((BLOCK_N, D), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, D), tl.float32)
    for g in range(G):
        h = kv * G + g
        rows = (b * H + h).to(tl.int64) * T
        first = 0
        if CAUSAL:  # queries before the diagonal see none of the keys; those on it, some
            diagonal = n_first // BLOCK_M * BLOCK_M
            first = tl.cdiv(n_first + BLOCK_N, BLOCK_M) * BLOCK_M
            dk_acc, dv_acc = _gather_dk_dv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_ptr + rows, delta_ptr + rows, b, h,
                stride_qb, stride_qh, stride_qt, stride_db, stride_dh, stride_dt,
                n, diagonal, tl.minimum(first, T), T, scale_log2,
                True, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
            )  # fmt: skip
        dk_acc, dv_acc = _gather_dk_dv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_ptr + rows, delta_ptr + rows, b, h,
            stride_qb, stride_qh, stride_qt, stride_db, stride_dh, stride_dt,
            n, first, T, T, scale_log2,
            False, D, BLOCK_M, BLOCK_N, PRECISION, STAGES, TMA,
        )  # fmt: skip
    store_gradient(
        dk, stride_dkb, stride_dkh, stride_dkt, cos_ptr, sin_ptr, stride_cos, stride_sin,
        b, kv, n_first, T, dk_acc * scale, ROTATED, BLOCK_N, D,
    )  # fmt: skip
    store_tile(dv, stride_dkb, stride_dkh, stride_dkt, b, kv, n_first, T, dv_acc, BLOCK_N, D)


# --- configurations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a program, tiles in flight; the most tokens."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    up_to: int = 2**31


# By architecture or vendor, bytes of a number and D; of several tiles, the first whose `up_to` is
# T or more. sm_90: swept on an H200 and an H100, in bf16 at D 64 and 128, the backward pass in fp32
# at D = 64 too. sm, gfx: the largest tiles that spill little or nothing and fit everywhere
# (workshop.kernels.inspect), unmeasured.
Tiles = dict[str, dict[int, dict[int, list[Tile]]]]
FORWARD_TILES: Tiles = {
    "sm_90": {
        2: {
            32: [Tile(64, 64, 4, 2)],
            64: [Tile(64, 64, 4, 2, up_to=1024), Tile(64, 128, 4, 2)],
            128: [Tile(64, 64, 4, 3)],
        },
        4: {32: [Tile(32, 32, 4, 2)], 64: [Tile(32, 32, 4, 2)], 128: [Tile(32, 32, 4, 1)]},
    },
    "sm": {
        2: {32: [Tile(64, 64, 4, 2)], 64: [Tile(64, 64, 4, 2)], 128: [Tile(64, 64, 4, 2)]},
        4: {32: [Tile(32, 32, 4, 2)], 64: [Tile(32, 32, 4, 2)], 128: [Tile(32, 32, 4, 1)]},
    },
    "gfx": {
        2: {32: [Tile(128, 64, 4, 1)], 64: [Tile(128, 64, 8, 1)], 128: [Tile(128, 64, 8, 1)]},
        4: {32: [Tile(64, 32, 4, 1)], 64: [Tile(64, 32, 4, 1)], 128: [Tile(32, 32, 4, 1)]},
    },
    "interpreter": {},
}
DQ_TILES: Tiles = {
    "sm_90": {
        2: {
            32: [Tile(64, 64, 4, 2)],
            64: [
                Tile(64, 64, 4, 2, up_to=512),
                Tile(64, 32, 4, 3, up_to=2048),
                Tile(128, 64, 4, 3),
            ],
            128: [Tile(64, 32, 4, 2, up_to=1024), Tile(64, 32, 4, 3)],
        },
        4: {32: [Tile(32, 32, 4, 1)], 64: [Tile(64, 32, 4, 2)], 128: [Tile(32, 32, 8, 1)]},
    },
    "sm": {
        2: {32: [Tile(64, 64, 4, 2)], 64: [Tile(64, 32, 4, 2)], 128: [Tile(64, 32, 4, 2)]},
        4: {32: [Tile(32, 32, 4, 1)], 64: [Tile(32, 16, 4, 1)], 128: [Tile(16, 16, 4, 1)]},
    },
    "gfx": {
        2: {32: [Tile(64, 32, 4, 1)], 64: [Tile(64, 32, 4, 1)], 128: [Tile(64, 32, 4, 1)]},
        4: {32: [Tile(32, 32, 4, 1)], 64: [Tile(32, 32, 4, 1)], 128: [Tile(32, 16, 4, 1)]},
    },
    "interpreter": {},
}
DK_DV_TILES: Tiles = {
    "sm_90": {
        2: {32: [Tile(32, 64, 4, 2)], 64: [Tile(128, 64, 4, 2)], 128: [Tile(64, 64, 4, 2)]},
        4: {32: [Tile(16, 32, 4, 1)], 64: [Tile(32, 32, 4, 1)], 128: [Tile(16, 16, 4, 1)]},
    },
    "sm": {
        2: {32: [Tile(32, 64, 4, 2)], 64: [Tile(32, 64, 4, 2)], 128: [Tile(32, 32, 4, 2)]},
        4: {32: [Tile(16, 32, 4, 1)], 64: [Tile(16, 32, 4, 1)], 128: [Tile(16, 16, 4, 1)]},
    },
    "gfx": {
        2: {32: [Tile(32, 64, 4, 1)], 64: [Tile(32, 64, 4, 1)], 128: [Tile(32, 64, 4, 1)]},
        4: {32: [Tile(32, 32, 4, 1)], 64: [Tile(32, 32, 4, 1)], 128: [Tile(16, 32, 4, 1)]},
    },
    "interpreter": {},
}
INTERPRETED_TILE = Tile(128, 128, 1, 1)  # large: each program costs milliseconds


def _tile(table: Tiles, q: Tensor) -> Tile:
    sizes = tuned(table)
    if not sizes:
        return INTERPRETED_TILE
    T, D = q.shape[2:]
    return next(tile for tile in sizes[q.element_size()][D] if tile.up_to >= T)


# Tokens of all heads that are in work at once: about what the L2 cache of a large GPU (50 MB) holds
# of q, k, v, out, and in the backward pass of dout and the gradients too.
FORWARD_TOKENS_AT_ONCE = 2**17
BACKWARD_TOKENS_AT_ONCE = 2**15


# --- launches -----------------------------------------------------------------------------------


def _prepare(
    table: Tiles, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> tuple[Tile, list[Any], list[int], dict[str, Any]]:
    """The table's tile; the tensors, of which the others go by queries as q does, as the kernels
    take them; their strides; and what the kernels are compiled for."""
    tile = _tile(table, q)
    of_queries = ((x, tile.block_m) for x in others)
    tma, inputs = describe_tiles(
        tile.num_stages, (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), *of_queries
    )
    strides = [stride for x in (q, k, v, *others) for stride in x.stride()[:3]]
    constants = {
        "D": q.shape[-1], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "PRECISION": dot_precision(q.dtype), "STAGES": tile.num_stages, "TMA": tma,
        **launch_options(tile.num_warps),
    }  # fmt: skip
    return tile, inputs, strides, constants


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each query's scores to base 2, (B, H, T)."""
    B, H, T, _ = q.shape
    out = new_heads(q)
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    if causal and on_hopper() and hopper.takes(hopper.FORWARD_FROM, q, k, v):
        hopper.attend(q, k, v, out, lse, scale * LOG2_E)
        return out, lse
    tile, inputs, strides, constants = _prepare(FORWARD_TILES, q, k, v)
    _attention_forward_kernel[grid_order(T, tile.block_m, B * H, FORWARD_TOKENS_AT_ONCE)](
        *inputs, out, lse, *strides, *out.stride()[:3], T, H, H // k.shape[1], scale * LOG2_E,
        CAUSAL=causal, **constants,
    )  # fmt: skip
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    tables: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Writes the gradients into dq, and into dk and dv, which have the same strides. With RoPE's
    tables, cos and sin (T, D): of q and k as they were before they were turned."""
    B, H, T, _ = q.shape
    K = k.shape[1]
    tensors = q, k, v, dout, dk, dv
    varies = causal and on_hopper() and hopper.takes(hopper_backward.BACKWARD_FROM, *tensors)
    if varies and not must_repeat():
        hopper_backward.attend_backward(
            dout, q, k, v, out, lse, scale, scale * LOG2_E, dq, dk, dv, tables
        )
        return
    delta = torch.empty_like(lse)
    cos, sin = tables or (delta[0], delta[0])  # not read
    numbers = cos.stride(0), sin.stride(0), T, H, H // K, scale, scale * LOG2_E
    switches = {"CAUSAL": causal, "ROTATED": tables is not None}

    tile, inputs, strides, constants = _prepare(DQ_TILES, q, k, v, out, dout)
    _attention_backward_dq_kernel[grid_order(T, tile.block_m, B * H, BACKWARD_TOKENS_AT_ONCE)](
        *inputs, lse, delta, dq, cos, sin, *strides, *dq.stride()[:3], *numbers,
        **switches, **constants,
    )  # fmt: skip

    tile, inputs, strides, constants = _prepare(DK_DV_TILES, q, k, v, dout)
    _attention_backward_dk_dv_kernel[grid_order(T, tile.block_n, B * K, BACKWARD_TOKENS_AT_ONCE)](
        *inputs, lse, delta, dk, dv, cos, sin, *strides, *dk.stride()[:3], *numbers,
        **switches, **constants,
    )  # fmt: skip


# --- operators ----------------------------------------------------------------------------------


flash_attention_forward = operator(
    "tiny_llama::flash_attention",
    fake=lambda q, *_: (new_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)(attend)


@operator(
    "tiny_llama::flash_attention_backward",
    fake=lambda dout, q, k, *_: (new_heads(q), new_heads(k), new_heads(k)),
)
def flash_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    dq, dk, dv = new_heads(q), new_heads(k), new_heads(k)
    attend_backward(dout, q, k, v, out, lse, causal, scale, dq, dk, dv)
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, lse = flash_attention_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        if dout.stride(-1) != 1 or dout.shape[2] * dout.stride(2) > MAX_OFFSET:
            dout = dout.contiguous()
        gradients = flash_attention_backward(dout, *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *gradients, None, None


def attention_flops(q_shape: tuple[int, ...], causal: bool) -> int:
    """Operations of q k' and of weights x v: 2 products x 2 x B H T T D; causal, half of it."""
    B, H, T, D = q_shape
    square = 4 * B * H * T * T * D
    return square // 2 if causal else square


def backward_attention_flops(q_shape: tuple[int, ...], causal: bool) -> int:
    """Seven products where the forward pass has two: scores and dweights, twice; dq, dk, dv."""
    return attention_flops(q_shape, causal) * 7 // 2


@register_flop_formula(torch.ops.tiny_llama.flash_attention)
def _forward_flops(q_shape, k_shape, v_shape, causal, scale, *, out_shape=None, **_) -> int:
    return attention_flops(q_shape, causal)


@register_flop_formula(torch.ops.tiny_llama.flash_attention_backward)
def _backward_flops(dout_shape, q_shape, k_shape, v_shape, o_shape, lse_shape, causal, scale, **_):
    return backward_attention_flops(q_shape, causal)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> Tensor:
    """softmax(scale q k' [no future]) v for each head, the scores in fp32.

    Query head h uses key/value head h // (H / K), which is read where it lies, not repeated.

    Args:
        q: (B, H, T, D), D one of 32, 64, 128. k, v: (B, K, T, D), K a divisor of H. All of one
            dtype (under autocast they are cast to its dtype, as matrix products are), with any
            strides as long as the last dimension is contiguous.
        causal: whether token t sees tokens 0..t alone.
        scale: positive; default 1 / sqrt(D).

    Returns:
        (B, H, T, D) in q's dtype; in memory (B, T, H, D), so that joining the heads is free.

    Forward 4 B H T^2 D operations, backward 14 B H T^2 D, causal half of each. Bytes: q, k, v and
    out once, and 4 B H T of log-sum-exp; k and v come from the L2 cache for all tiles of queries
    but the first. Backward: twice q, k, v and dout, once out and each gradient. One pass for all
    three gradients would save 4 of the 14, and would have to add dq up in memory, in fp32, tile of
    keys by tile of keys: on an H200 that took longer at 128 to 4,096 tokens (README.md, "tried").
    `triton_attention_hopper_backward` does so, for long sequences.

    Raises:
        TypeError, ValueError: see `triton_launch.check`; shapes that do not fit; a head size that
            the kernels do not have; a stride in the last dimension; tokens of q, k, v or the
            result more than MAX_OFFSET numbers apart; scale <= 0.
    """
    check("flash_attention", q=q, k=k, v=v)
    check_shape("flash_attention", "q", q, "B", "H", "T", "D")
    B, H, T, D = q.shape
    check_shape("flash_attention", "k", k, B, "K", T, D)
    check_shape("flash_attention", "v", v, *k.shape)
    K = k.shape[1]
    if D not in HEAD_SIZES:
        raise ValueError(f"flash_attention: head size {D} is not one of {HEAD_SIZES}")
    if H % K:
        raise ValueError(f"flash_attention: {H} query heads do not share {K} key/value heads")
    dtype = autocast_dtype(q)
    if dtype == q.dtype:  # else all three are cast
        check_dtypes("flash_attention", q=q, k=k, v=v)
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("flash_attention: the last dimension of q, k and v must be contiguous")
    if T * max(H * D, *(x.stride(2) for x in (q, k, v))) > MAX_OFFSET:
        raise ValueError(f"flash_attention: {T} tokens lie more than {MAX_OFFSET} numbers apart")
    scale = D**-0.5 if scale is None else float(scale)
    if not scale > 0:
        raise ValueError(f"flash_attention: scale {scale} must be positive")
    return _FlashAttention.apply(q.to(dtype), k.to(dtype), v.to(dtype), causal, scale)


def flash_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> Tensor:
    """`flash_attention` with the (T, T) scores in memory and k and v repeated."""
    T, D = q.shape[2:]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) * (D**-0.5 if scale is None else scale)  # (B, H, T, T)
    if causal:
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v
