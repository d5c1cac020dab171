"""The functions of plain_ops.py as Triton kernels: what a token costs on a GPU.

A decode step reads every weight once and computes next to nothing with it. So each product is one
kernel that does little but keep the memory busy, and takes along what stands around it: the norm
before, the SiLU or the residual after. Attention is one kernel too, which rotates, writes the cache
and reads only the slots that are filled. A layer is five kernels.

Between two kernels the memory idles while one ends and the next one starts. On Hopper and later a
kernel therefore starts while the one before it still runs, and loads its weights, which do not
depend on it, before it waits for it (programmatic dependent launch).

Rows of a long prompt are multiplied by cuBLAS or hipBLASLt, with kernels for what is between.
"""

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
def _as_number(weight, dtype: tl.constexpr):
    """int8 goes by way of fp32, as on a GPU: the interpreter can't turn it into bf16 directly."""
    return weight.to(tl.float32).to(dtype) if weight.dtype == tl.int8 else weight


@triton.jit
def _silu_times(gate, up):
    """As PyTorch rounds: gate and up, of one dtype, and SiLU's result."""
    gate32 = gate.to(tl.float32)
    silu = (gate32 * tl.sigmoid(gate32)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


# --- products -------------------------------------------------------------------------------------


@triton.jit
def _one_row(
    x_ptr, norm_ptr, w_ptr, scale_ptr, residual_ptr, y_ptr, rows, columns, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = W x for some of W's rows, in fp32 without matrix units, which a single row would leave
    idle. The program loads all of its weights at once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < columns
    here = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    w = tl.load(w_ptr + here, mask=mask, other=0)
    if GATED:
        up = tl.load(w_ptr + tl.cast(rows, tl.int64) * columns + here, mask=mask, other=0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
        x *= norm
    y = tl.sum(w.to(tl.float32) * x[None, :], 1) * factor
    if GATED:
        above = tl.sum(up.to(tl.float32) * x[None, :], 1) * factor
    _finish(
        y, above if GATED else y, row, 0, row < rows, scale_ptr, residual_ptr, y_ptr, rows, GATED
    )


@triton.jit
def _few_rows(
    x_ptr, norm_ptr, w_ptr, scale_ptr, residual_ptr, y_ptr, rows, columns, eps, batch,
    BATCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same for a batch of x, (batch, columns), on matrix units: W is the left factor."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    member = tl.arange(0, BATCH)
    y = tl.zeros((BLOCK_ROWS, BATCH), tl.float32)
    above = y
    squares = tl.zeros((BATCH,), tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        here = row[:, None].to(tl.int64) * columns + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        x_mask = (member < batch)[:, None] & inside[None, :]
        x = tl.load(x_ptr + member[:, None] * columns + column[None, :], mask=x_mask, other=0.0)
        if norm_ptr is not None:
            x32 = x.to(tl.float32)
            squares += tl.sum(x32 * x32, 1)
            norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = (x32 * norm[None, :]).to(x.dtype)
        w = _as_number(tl.load(w_ptr + here, mask=mask, other=0), x.dtype)
        y = _dot(w, tl.trans(x), y, INTERPRETED)
        if GATED:
            up_ptr = w_ptr + tl.cast(rows, tl.int64) * columns
            up = _as_number(tl.load(up_ptr + here, mask=mask, other=0), x.dtype)
            above = _dot(up, tl.trans(x), above, INTERPRETED)
    if norm_ptr is not None:
        factor = tl.rsqrt(squares / columns + eps)[None, :]
        y *= factor
        above *= factor
    mask = (member < batch)[None, :] & (row < rows)[:, None]
    offset = member[None, :] * rows
    _finish(y, above, row[:, None], offset, mask, scale_ptr, residual_ptr, y_ptr, rows, GATED)


@triton.jit
def _finish(y, above, row, offset, mask, scale_ptr, residual_ptr, y_ptr, rows, GATED: tl.constexpr):
    """Scales, and multiplies by SiLU or adds the residual, rounding where PyTorch would."""
    dtype = y_ptr.dtype.element_ty
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    y = y.to(dtype)
    if GATED:
        if scale_ptr is not None:
            above *= tl.load(scale_ptr + rows + row, mask=row < rows, other=0.0)
        y = _silu_times(y, above.to(dtype))
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset + row, mask=mask, other=0.0)
        y = (y.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(y_ptr + offset + row, y, mask=mask)


def _product(
    x: Tensor,
    weight: Weight,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    batch, columns = x.shape
    rows = weight.values.shape[0] // (1 + gated)
    y = x.new_empty(batch, rows)
    given = (x, norm, weight.values, weight.scale, residual, y, rows, columns, eps)
    early = starts_early(x.device)
    if batch == 1:
        block, each, warps = one_row_tile(columns, gated)
        _one_row[(triton.cdiv(rows, each),)](
            *given, each, block, gated, early, num_warps=warps, **launch(early)
        )
        return y
    each, block, warps, stages = few_rows_tile(rows, x.element_size(), gated)
    _few_rows[(triton.cdiv(rows, each),)](
        *given, batch, max(16, triton.next_power_of_2(batch)), each, block, gated, early,
        INTERPRETED, num_warps=warps, num_stages=stages, **launch(early),
    )  # fmt: skip
    return y


def one_row_tile(columns: int, gated: bool) -> tuple[int, int, int]:
    """Columns and rows of a program's weights, and its warps: some 8,192 weights at once. Not
    tuned yet."""
    block = triton.next_power_of_2(columns)
    each = max(1, 8192 // (block * (1 + gated)))
    return block, each, 4 if block < 8192 else 8


def few_rows_tile(rows: int, itemsize: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages. Few rows give a narrow matrix a program for
    nearly each multiprocessor; the stages keep loads on their way, within the shared memory of
    smaller GPUs (99 KB) and of AMD's (64 KB). Not tuned yet."""
    columns = 512 // itemsize // (1 + gated)
    return (16 if rows <= 4096 else 32), columns, 4, 2 if torch.version.hip else 4


def starts_early(device: torch.device) -> bool:
    """Whether kernels start before the ones before them have ended."""
    if device.type != "cuda" or torch.version.hip or gdc_wait is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch(early: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if early else {}


def project(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if len(x) > MOST_ROWS:
        return plain_ops.linear(rms_norm(x, norm, eps), weight)
    return _product(x, weight, norm, eps)


def add_product(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    if len(x) > MOST_ROWS:
        if weight.scale is None:
            return torch.addmm(residual, x, weight.values.T)
        return plain_ops.add_product(residual, x, weight)
    return _product(x, weight, residual=residual)


def swiglu(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if len(x) <= MOST_ROWS:
        return _product(x, weight, norm, eps, gated=True)
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
    _rms_norm[(len(x),)](x, weight, y, x.shape[1], eps, triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
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
    qkv_ptr, cache_ptr, slot_ptr, pads_ptr, frequencies_ptr, out_ptr, kv_heads, slots, scale,
    GROUP: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One key/value head of one row of the batch, and its GROUP queries; heads as two halves."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, pad = tl.load(slot_ptr), tl.load(pads_ptr + member)
    query, pair = tl.arange(0, QUERIES), tl.arange(0, PAIRS)
    valid = pair < HALF
    turn = (slot - pad).to(tl.float32) * tl.load(frequencies_ptr + pair, mask=valid, other=0.0)
    cos, sin = tl.cos(turn), tl.sin(turn)
    own_ptr = qkv_ptr + member * (GROUP + 2) * kv_heads * 2 * HALF
    q_mask = (query < GROUP)[:, None] & valid[None, :]
    q_row = (head * GROUP + query)[:, None] * 2 * HALF
    q1, q2 = _rotated(own_ptr, q_row, pair[None, :], q_mask, cos[None, :], sin[None, :], HALF)
    k1, k2 = _rotated(own_ptr, (GROUP * kv_heads + head) * 2 * HALF, pair, valid, cos, sin, HALF)
    v_row = own_ptr + ((GROUP + 1) * kv_heads + head) * 2 * HALF
    v1 = tl.load(v_row + pair, mask=valid, other=0.0)
    v2 = tl.load(v_row + HALF + pair, mask=valid, other=0.0)
    keys = cache_ptr + (member * 2 * kv_heads + head) * slots * 2 * HALF
    values = cache_ptr + ((member * 2 + 1) * kv_heads + head) * slots * 2 * HALF
    tl.store(keys + slot * 2 * HALF + pair, k1, mask=valid)
    tl.store(keys + slot * 2 * HALF + HALF + pair, k2, mask=valid)
    tl.store(values + slot * 2 * HALF + pair, v1, mask=valid)
    tl.store(values + slot * 2 * HALF + HALF + pair, v2, mask=valid)

    # The softmax starts with the token itself, which need not be read back from the cache.
    own = q1.to(tl.float32) * k1.to(tl.float32)[None, :]
    own += q2.to(tl.float32) * k2.to(tl.float32)[None, :]
    most = tl.sum(own, 1) * scale
    total = tl.full((QUERIES,), 1.0, tl.float32)
    out1 = tl.zeros((QUERIES, PAIRS), tl.float32) + v1.to(tl.float32)[None, :]
    out2 = tl.zeros((QUERIES, PAIRS), tl.float32) + v2.to(tl.float32)[None, :]
    for start in range(pad // BLOCK * BLOCK, slot, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (place >= pad) & (place < slot)
        here = place[:, None] * 2 * HALF + pair[None, :]
        mask = seen[:, None] & valid[None, :]
        key1 = tl.load(keys + here, mask=mask, other=0.0)
        key2 = tl.load(keys + HALF + here, mask=mask, other=0.0)
        scores = _dot(q1, tl.trans(key1), tl.zeros((QUERIES, BLOCK), tl.float32), INTERPRETED)
        scores = _dot(q2, tl.trans(key2), scores, INTERPRETED) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        weights, kept = tl.exp(scores - new[:, None]), tl.exp(most - new)
        most, total = new, total * kept + tl.sum(weights, 1)
        value1 = tl.load(values + here, mask=mask, other=0.0)
        value2 = tl.load(values + HALF + here, mask=mask, other=0.0)
        weights = weights.to(value1.dtype)
        out1 = _dot(weights, value1, out1 * kept[:, None], INTERPRETED)
        out2 = _dot(weights, value2, out2 * kept[:, None], INTERPRETED)
    out = out_ptr + member * GROUP * kv_heads * 2 * HALF + q_row + pair[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out, (out1 / total[:, None]).to(dtype), mask=q_mask)
    tl.store(out + HALF, (out2 / total[:, None]).to(dtype), mask=q_mask)


def decode_attention(
    qkv: Tensor, cache: Tensor, slot: Tensor, pads: Tensor, frequencies: Tensor
) -> Tensor:
    batch, _, kv_heads, slots, head_dim = cache.shape
    group = qkv.shape[1] // (kv_heads * head_dim) - 2
    out = qkv.new_empty(batch, group * kv_heads * head_dim)
    early = starts_early(qkv.device)
    _decode_attention[(kv_heads, batch)](
        qkv, cache, slot, pads, frequencies, out, kv_heads, slots, head_dim**-0.5,
        group, head_dim // 2, max(16, triton.next_power_of_2(group)),
        max(16, triton.next_power_of_2(head_dim // 2)), 128, early, INTERPRETED,
        num_warps=4, num_stages=2, **launch(early),
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
    early = starts_early(logits.device)
    block = min(4096, triton.next_power_of_2(logits.shape[1]))
    _likeliest[(len(logits),)](
        logits, token, logits.shape[1], block, early, num_warps=8, **launch(early)
    )
    return token
