"""The functions of plain_ops.py as Triton kernels: what a token costs on a GPU.

A decode step reads every weight once and computes next to nothing with it. So each product is one
kernel that does little but keep the memory busy, and takes along what stands around it: the norm
before (at batch 1), the SiLU or the residual after. Attention is one kernel too, which rotates,
writes the cache and reads only the slots that are filled; a second one adds up the shares where
they are many. A layer is five kernels, or seven with the norms.

Between two kernels the memory idles while one ends and the next one starts. On Hopper and later a
kernel therefore starts while the one before it still runs, and loads what does not depend on it
before it waits for it (programmatic dependent launch): weights at batch 1, and the cached keys and
values, which earlier steps wrote. A step begins with a kernel of PyTorch's, which starts when all
before it have ended, so nothing reaches back into the step before.

Rows of a long prompt are multiplied by cuBLAS or hipBLASLt, with kernels for what is between.
"""

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labs.text_generation import plain_ops
from labs.text_generation.plain_ops import Weight

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4
    gdc_launch_dependents = gdc_wait = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether the kernels run in Triton's interpreter, on the CPU; where bf16 is only stored: all
arithmetic must be in fp32."""
MOST_ROWS = 64
"""Rows that one program multiplies; more are a matter of arithmetic, for a library."""


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _numbers(weight):
    """uint8, 128 added, as fp32, by adding to the bits of 1.5 x 2^23: a GPU converts a quarter as
    many integers as it adds, which would take longer than to read them."""
    if weight.dtype == tl.uint8:
        return (weight.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12583040.0
    return weight.to(tl.float32)


@triton.jit
def _row_sums(weight, x):
    """weight x, in fp32. The bits of a uint8 n, read as fp32, are n x 2^-149, a denormal number:
    no conversion at all. (Triton's code keeps denormal numbers, on NVIDIA and on AMD.)"""
    if weight.dtype == tl.uint8:
        weight = weight.to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.sum(weight.to(tl.float32) * x[None, :], 1)


@triton.jit
def _silu_times(gate, up):
    """As PyTorch rounds: gate and up, of one dtype, and SiLU's result."""
    gate32 = gate.to(tl.float32)
    silu = (gate32 * tl.sigmoid(gate32)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


# --- products -------------------------------------------------------------------------------------


@triton.jit
def _one_row(
    x_ptr, w_ptr, scale_ptr, residual_ptr, y_ptr, rows, columns, norm_ptr, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = W x for some of W's rows, in fp32 without matrix units, which a single row would leave
    idle. The program loads all of its weights at once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    exists, inside = row < rows, column < columns
    here = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = exists[:, None] & inside[None, :]
    w = tl.load(w_ptr + here, mask=mask, other=0)
    scale, up_scale, residual = 1.0, 1.0, 0.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=exists, other=0.0)
    if GATED:
        up = tl.load(w_ptr + tl.cast(rows, tl.int64) * columns + here, mask=mask, other=0)
        if scale_ptr is not None:
            up_scale = tl.load(scale_ptr + rows + row, mask=exists, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row, mask=exists, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
        scale, up_scale = scale * factor, up_scale * factor
        x *= norm
    raised = 0.0
    if w.dtype == tl.uint8:  # 128 is added; products of x raised by 2^90 are far from denormal
        x *= 2.0**90
        raised = tl.sum(x, 0) * (128 * 2.0**-149)
        scale, up_scale = scale * 2.0**59, up_scale * 2.0**59
    y = ((_row_sums(w, x) - raised) * scale).to(y_ptr.dtype.element_ty)
    if GATED:
        y = _silu_times(y, ((_row_sums(up, x) - raised) * up_scale).to(y.dtype))
    tl.store(y_ptr + row, (y.to(tl.float32) + residual).to(y.dtype), mask=exists)


@triton.jit
def _few_rows(
    x_ptr, w_ptr, scale_ptr, residual_ptr, y_ptr, rows, columns, batch, part,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    BATCH: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same for a batch of x, (batch, columns), on matrix units: W is the left factor.

    A sum over thousands of columns in one accumulator would take longer than to read W. So each row
    of W, and of x, counts as SPLITS rows of `part` columns; of the products of every part of W with
    every part of x, those of the same part are added in the end.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    member = tl.arange(0, BATCH)
    exists, mask = row < rows, (row < rows)[:, None] & (member < batch)[None, :]
    w_row = tl.program_id(0) * BLOCK_ROWS * SPLITS + tl.arange(0, BLOCK_ROWS * SPLITS)
    x_row = tl.arange(0, BATCH * SPLITS)
    w_rows = w_ptr + w_row[:, None].to(tl.int64) * part
    up_rows = w_rows + tl.cast(rows, tl.int64) * columns
    if EARLY:
        gdc_wait()
    scale, up_scale, residual = 1.0, 1.0, 0.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=exists, other=0.0)[:, None]
        if GATED:
            up_scale = tl.load(scale_ptr + rows + row, mask=exists, other=0.0)[:, None]
    y_here = member[None, :] * rows + row[:, None]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + y_here, mask=mask, other=0.0).to(tl.float32)
    y = tl.zeros((BLOCK_ROWS * SPLITS, BATCH * SPLITS), tl.float32)
    above = y
    for start in range(0, part, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = (column < part)[None, :]
        x_mask = (x_row < batch * SPLITS)[:, None] & inside
        w_mask = (w_row < rows * SPLITS)[:, None] & inside
        x = tl.load(x_ptr + x_row[:, None] * part + column[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows + column[None, :], mask=w_mask, other=0)
        if w.dtype == tl.uint8:
            w = _numbers(w).to(x.dtype)
        y = _dot(w, tl.trans(x), y, INTERPRETED)
        if GATED:
            up = tl.load(up_rows + column[None, :], mask=w_mask, other=0)
            if up.dtype == tl.uint8:
                up = _numbers(up).to(x.dtype)
            above = _dot(up, tl.trans(x), above, INTERPRETED)
    if EARLY:  # not before: the next kernel's programs would take multiprocessors from this one's
        gdc_launch_dependents()
    y = _same_parts(y, BLOCK_ROWS, BATCH, SPLITS)
    above = _same_parts(above, BLOCK_ROWS, BATCH, SPLITS)
    y = (y * scale).to(y_ptr.dtype.element_ty)
    if GATED:
        y = _silu_times(y, (above * up_scale).to(y.dtype))
    tl.store(y_ptr + y_here, (y.to(tl.float32) + residual).to(y.dtype), mask=mask)


@triton.jit
def _same_parts(y, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr):
    """(ROWS, BATCH), from the products (ROWS x SPLITS, BATCH x SPLITS) of all parts with all."""
    w_part, x_part = tl.arange(0, ROWS * SPLITS) % SPLITS, tl.arange(0, BATCH * SPLITS) % SPLITS
    y = tl.where(w_part[:, None] == x_part[None, :], y, 0.0)
    y = tl.sum(tl.reshape(y, (ROWS, SPLITS, BATCH * SPLITS)), 1)
    return tl.sum(tl.reshape(y, (ROWS, BATCH, SPLITS)), 2)


def _product(
    x: Tensor,
    weight: Weight,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    batch, columns = x.shape
    rows = weight.values.shape[0] // (1 + gated)
    y = x.new_empty(batch, rows)
    itemsize = weight.values.element_size()
    if batch == 1:
        each, block, warps = one_row_tile(columns, itemsize, gated)
        _one_row[(triton.cdiv(rows, each),)](
            x, *weight, residual, y, rows, columns, norm, eps, each, block, gated,
            num_warps=warps, **early(x.device),
        )  # fmt: skip
        return y
    if norm is not None:
        x = rms_norm(x, norm, eps)
    splits, each, block, warps, stages = few_rows_tile(batch, rows, columns, itemsize, gated)
    members = max(triton.next_power_of_2(batch), 16 // splits)
    _few_rows[(triton.cdiv(rows, each),)](
        x, *weight, residual, y, rows, columns, batch, columns // splits, each, block, splits,
        members, gated, INTERPRETED=INTERPRETED, num_warps=warps, num_stages=stages,
        **early(x.device),
    )  # fmt: skip
    return y


def one_row_tile(columns: int, itemsize: int, gated: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's weights, and its warps: 16 KB of a matrix, of `itemsize`
    bytes a weight, and 16,384 weights in all, which registers hold. Found on an H200 and an H100.
    """
    block = triton.next_power_of_2(columns)
    return max(1, 16384 // (block * max(itemsize, 1 + gated))), block, 4


def few_rows_tile(
    batch: int, rows: int, columns: int, itemsize: int, gated: bool
) -> tuple[int, int, int, int, int]:
    """Splits, rows and columns of a tile, warps and stages, for weights of `itemsize` bytes.

    64 rows, parts of rows counted, are what matrix units take at once; fewer whole rows give a
    narrow matrix a program for nearly each multiprocessor. The stages keep loads on their way,
    within the shared memory of smaller GPUs (99 KB) and of AMD's (64 KB). Found on an H200.
    """
    splits = math.gcd(columns, 1 if batch > 16 else 2 if batch > 8 or rows >= 8192 else 4)
    stages = 2 if torch.version.hip or batch > 16 else 4 if itemsize > 1 else 3
    return splits, 64 // splits, 256 // itemsize // (1 + gated), 4, stages


def early(device: torch.device) -> dict[str, Any]:
    """A launch's arguments by which a kernel starts, where the GPU can do that, before the one
    before it has ended."""
    if device.type != "cuda" or torch.version.hip or gdc_wait is None:
        return {"EARLY": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def project(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if len(x) > MOST_ROWS:
        return plain_ops.linear(rms_norm(x, norm, eps), weight)
    return _product(x, weight, norm=norm, eps=eps)


def add_product(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    if len(x) > MOST_ROWS:
        return torch.addmm(residual, x, plain_ops.matrix(weight, x.dtype).T)
    return _product(x, weight, residual)


def swiglu(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if len(x) <= MOST_ROWS:
        return _product(x, weight, norm=norm, eps=eps, gated=True)
    both = project(x, norm, weight, eps)
    y = both.new_empty(len(x), both.shape[1] // 2)
    block = 1024
    grid = (len(x), triton.cdiv(y.shape[1], block))
    _swiglu[grid](both, y, y.shape[1], block)
    return y


@triton.jit
def _swiglu(both_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(both_ptr + 2 * row * columns + column, mask=mask, other=0.0)
    up = tl.load(both_ptr + (2 * row + 1) * columns + column, mask=mask, other=0.0)
    tl.store(y_ptr + row * columns + column, _silu_times(gate, up), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _rms_norm[(len(x),)](x, weight, y, x.shape[1], eps, block, **early(x.device))
    return y


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    mask = column < columns
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)).to(weight.dtype)
    y = (weight.to(tl.float32) * y.to(tl.float32)).to(weight.dtype)
    tl.store(y_ptr + row + column, y, mask=mask)


# --- attention ------------------------------------------------------------------------------------


@triton.jit
def _rotated(x_ptr, row, pair, mask, cos, sin, half):
    """The two halves of rows of heads, rotated."""
    first = tl.load(x_ptr + row + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + row + pair + half, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _decode_attention(
    qkv_ptr, cache_ptr, slot_ptr, pads_ptr, frequencies_ptr, out_ptr, sums_ptr, kv_heads, slots,
    scale,
    GROUP: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One key/value head of one row of the batch, and its GROUP queries; heads as two halves. The
    program sees CHUNK slots; the first one the token itself too. Of several, each writes its share
    of the sums, and the softmax's (largest score, total), for `_combine`."""
    head, member, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, pad = tl.load(slot_ptr), tl.load(pads_ptr + member)
    query, pair = tl.arange(0, QUERIES), tl.arange(0, PAIRS)
    valid = pair < HALF
    turn = (slot - pad).to(tl.float32) * tl.load(frequencies_ptr + pair, mask=valid, other=0.0)
    cos, sin = tl.cos(turn), tl.sin(turn)
    keys = cache_ptr + (member * 2 * kv_heads + head) * slots * 2 * HALF
    values = cache_ptr + ((member * 2 + 1) * kv_heads + head) * slots * 2 * HALF
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    seen = (place >= pad) & (place < slot)
    here = place[:, None] * 2 * HALF + pair[None, :]
    mask = seen[:, None] & valid[None, :]
    key1 = tl.load(keys + here, mask=mask, other=0.0)
    key2 = tl.load(keys + HALF + here, mask=mask, other=0.0)
    value1 = tl.load(values + here, mask=mask, other=0.0)
    value2 = tl.load(values + HALF + here, mask=mask, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    own_ptr = qkv_ptr + member * (GROUP + 2) * kv_heads * 2 * HALF
    q_mask = (query < GROUP)[:, None] & valid[None, :]
    q_row = (head * GROUP + query)[:, None] * 2 * HALF
    q1, q2 = _rotated(own_ptr, q_row, pair[None, :], q_mask, cos[None, :], sin[None, :], HALF)
    scores = _dot(q1, tl.trans(key1), tl.zeros((QUERIES, CHUNK), tl.float32), INTERPRETED)
    scores = _dot(q2, tl.trans(key2), scores, INTERPRETED) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    most = tl.maximum(tl.max(scores, 1), -1e30)  # a chunk may have no slot that counts
    weights = tl.exp(scores - most[:, None])
    total = tl.sum(weights, 1)
    weights = weights.to(value1.dtype)
    out1 = _dot(weights, value1, tl.zeros((QUERIES, PAIRS), tl.float32), INTERPRETED)
    out2 = _dot(weights, value2, tl.zeros((QUERIES, PAIRS), tl.float32), INTERPRETED)
    if chunk == 0:
        k_row = (GROUP * kv_heads + head) * 2 * HALF
        k1, k2 = _rotated(own_ptr, k_row, pair, valid, cos, sin, HALF)
        v_row = own_ptr + ((GROUP + 1) * kv_heads + head) * 2 * HALF
        v1 = tl.load(v_row + pair, mask=valid, other=0.0)
        v2 = tl.load(v_row + HALF + pair, mask=valid, other=0.0)
        tl.store(keys + slot * 2 * HALF + pair, k1, mask=valid)
        tl.store(keys + slot * 2 * HALF + HALF + pair, k2, mask=valid)
        tl.store(values + slot * 2 * HALF + pair, v1, mask=valid)
        tl.store(values + slot * 2 * HALF + HALF + pair, v2, mask=valid)
        own = q1.to(tl.float32) * k1.to(tl.float32)[None, :]
        own += q2.to(tl.float32) * k2.to(tl.float32)[None, :]
        own = tl.sum(own, 1) * scale
        new = tl.maximum(most, own)
        kept, weight = tl.exp(most - new), tl.exp(own - new)
        most, total = new, total * kept + weight
        out1 = out1 * kept[:, None] + weight[:, None] * v1.to(tl.float32)[None, :]
        out2 = out2 * kept[:, None] + weight[:, None] * v2.to(tl.float32)[None, :]
    row = member * GROUP * kv_heads + head * GROUP + query
    if sums_ptr is None:
        out1 /= total[:, None]
        out2 /= total[:, None]
    else:
        row = row * tl.num_programs(2) + chunk
        tl.store(sums_ptr + 2 * row, most, mask=query < GROUP)
        tl.store(sums_ptr + 2 * row + 1, total, mask=query < GROUP)
    out = out_ptr + row[:, None] * 2 * HALF + pair[None, :]
    tl.store(out, out1.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(out + HALF, out2.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _combine(
    parts_ptr, sums_ptr, out_ptr, chunks, columns,
    CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head's output, from all programs that saw some of its slots."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    column = tl.arange(0, COLUMNS)
    there = chunk < chunks
    most = tl.load(sums_ptr + 2 * (row * chunks + chunk), mask=there, other=-1e30)
    total = tl.load(sums_ptr + 2 * (row * chunks + chunk) + 1, mask=there, other=0.0)
    mask = there[:, None] & (column < columns)[None, :]
    here = (row * chunks + chunk)[:, None] * columns + column[None, :]
    part = tl.load(parts_ptr + here, mask=mask, other=0.0)
    weight = tl.exp(most - tl.max(most, 0))
    out = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + row * columns + column, out, mask=column < columns)


def decode_attention(
    qkv: Tensor, cache: Tensor, slot: Tensor, pads: Tensor, frequencies: Tensor
) -> Tensor:
    batch, _, kv_heads, slots, head_dim = cache.shape
    group = qkv.shape[1] // (kv_heads * head_dim) - 2
    out = qkv.new_empty(batch, group * kv_heads * head_dim)
    pairs = max(16, triton.next_power_of_2(head_dim // 2))
    chunk = 8192 // pairs
    chunks = triton.cdiv(slots, chunk)
    parts, sums = out, None
    if chunks > 1:
        parts = out.new_empty(out.numel() * chunks, dtype=torch.float32)
        sums = out.new_empty(out.numel() // head_dim * chunks * 2, dtype=torch.float32)
    _decode_attention[(kv_heads, batch, chunks)](
        qkv, cache, slot, pads, frequencies, parts, sums, kv_heads, slots, head_dim**-0.5,
        group, head_dim // 2, max(16, triton.next_power_of_2(group)), pairs, chunk,
        INTERPRETED=INTERPRETED, num_warps=8, **early(qkv.device),
    )  # fmt: skip
    if sums is not None:
        _combine[(out.numel() // head_dim,)](
            parts, sums, out, chunks, head_dim, triton.next_power_of_2(chunks),
            triton.next_power_of_2(head_dim), num_warps=1, **early(qkv.device),
        )  # fmt: skip
    return out


@triton.jit
def _store_prompts(
    qkv_ptr, cache_ptr, pads_ptr, frequencies_ptr, q_ptr, length, kv_heads, slots,
    GROUP: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token: the queries of a key/value head at a time, all at the same angles."""
    token = tl.program_id(0)
    member, place = (token // length).to(tl.int64), token % length
    query, pair = tl.arange(0, QUERIES), tl.arange(0, PAIRS)
    valid = pair < HALF
    position = tl.maximum(place - tl.load(pads_ptr + member), 0).to(tl.float32)
    turn = position * tl.load(frequencies_ptr + pair, mask=valid, other=0.0)
    cos, sin = tl.cos(turn), tl.sin(turn)
    own_ptr = qkv_ptr + token.to(tl.int64) * (GROUP + 2) * kv_heads * 2 * HALF
    q_out = q_ptr + token.to(tl.int64) * GROUP * kv_heads * 2 * HALF
    q_mask = (query < GROUP)[:, None] & valid[None, :]
    for head in range(kv_heads):
        row = (head * GROUP + query)[:, None] * 2 * HALF
        q1, q2 = _rotated(own_ptr, row, pair[None, :], q_mask, cos[None, :], sin[None, :], HALF)
        tl.store(q_out + row + pair[None, :], q1, mask=q_mask)
        tl.store(q_out + row + HALF + pair[None, :], q2, mask=q_mask)
        k_row = (GROUP * kv_heads + head) * 2 * HALF
        k1, k2 = _rotated(own_ptr, k_row, pair, valid, cos, sin, HALF)
        key = cache_ptr + ((member * 2 * kv_heads + head) * slots + place) * 2 * HALF + pair
        value = cache_ptr + (((member * 2 + 1) * kv_heads + head) * slots + place) * 2 * HALF + pair
        tl.store(key, k1, mask=valid)
        tl.store(key + HALF, k2, mask=valid)
        v_row = own_ptr + ((GROUP + 1) * kv_heads + head) * 2 * HALF + pair
        tl.store(value, tl.load(v_row, mask=valid), mask=valid)
        tl.store(value + HALF, tl.load(v_row + HALF, mask=valid), mask=valid)


def store_prompts(qkv: Tensor, cache: Tensor, pads: Tensor, frequencies: Tensor) -> Tensor:
    batch, _, kv_heads, slots, head_dim = cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(batch, len(qkv) // batch, heads, head_dim)
    _store_prompts[(len(qkv),)](
        qkv, cache, pads, frequencies, q, q.shape[1], kv_heads, slots, heads // kv_heads,
        head_dim // 2, triton.next_power_of_2(heads // kv_heads),
        triton.next_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return q.transpose(1, 2)


# --- the next token -------------------------------------------------------------------------------


@triton.jit
def _likeliest(logits_ptr, token_ptr, columns, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    member = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    most, which = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        here = start + column
        found = tl.load(logits_ptr + member * columns + here, mask=here < columns,
                        other=float("-inf")).to(tl.float32)  # fmt: skip
        which = tl.where(found > most, here, which)
        most = tl.maximum(most, found)
    largest = tl.max(most, 0)
    first = tl.min(tl.where(most == largest, which, columns), 0)
    tl.store(token_ptr + member, first.to(tl.int64))


def likeliest(logits: Tensor) -> Tensor:
    token = torch.empty((len(logits), 1), dtype=torch.int64, device=logits.device)
    block = min(4096, triton.next_power_of_2(logits.shape[1]))
    _likeliest[(len(logits),)](
        logits, token, logits.shape[1], block, num_warps=8, **early(logits.device)
    )
    return token
