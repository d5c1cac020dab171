"""SwiGLU in the epilogue of a product, forward and backward, for Hopper.

    forward    gate, up = x weight';  y = silu(gate) up
    backward   dh = dout weight;  dgate, dup and y again, from dh, gate and up

An epilogue is what a kernel does with a tile of the product before it writes it. Here it runs while
the matrix units compute another tile: dh is never stored, and SwiGLU adds little time. See
`triton_attention_hopper` for what Gluon leaves to the kernel. A program stays on its multiprocessor
and takes tile after tile. One warp, the producer, fills a ring of slots with tiles of the product's
factors. Two groups of four warps, the consumers, take turns at the tiles: while one is in its
epilogue, the other multiplies.

Shapes in the comments:
    M tokens   C width of x and dout   F width of gate, up and y
"""

from typing import Any

from triton_launch import cdiv, launch_options, multiprocessors

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton_attention_hopper import barriers, describe

TILE = gl.constexpr(128)  # rows and columns of the sums that a consumer has in registers
HALF = gl.constexpr(64)  # the epilogue's tiles: it takes HALF x HALF at a time
STEP = gl.constexpr(64)  # of the sum over C
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # from Triton 3.7 on

# --- the product --------------------------------------------------------------------------------


@gluon.jit
def _place(tile, M_TILES, N_TILES, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """The first row and column of a tile. GROUP tiles below each other come before the next column,
    so that what is read again is still in L2."""
    group = tile // (GROUP * N_TILES)
    within = tile - group * (GROUP * N_TILES)
    rows = gl.minimum(M_TILES - group * GROUP, GROUP)
    return (group * GROUP + within % rows) * TILE, within // rows * COLUMNS


@gluon.jit
def _load(
    a, b, a_tiles, b_tiles, full, free, M_TILES, N_TILES, F, STEPS,
    FORWARD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer. A forward tile of b has HALF rows of gate's weight, then those of up's."""
    halves = b_tiles._reinterpret(b_tiles.dtype, [2 * STAGES, HALF, STEP], SWIZZLED)
    i = 0
    for tile in range(gl.program_id(0), M_TILES * N_TILES, gl.num_programs(0)):
        m, n = _place(tile, M_TILES, N_TILES, HALF if FORWARD else TILE, GROUP)
        for k in range(0, STEPS * STEP, STEP):
            slot = i % STAGES
            ready = full.index(slot)
            mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
            mbarrier.expect(ready, 2 * TILE * STEP * 2)
            tma.async_copy_global_to_shared(a, [m, k], ready, a_tiles.index(slot))
            if FORWARD:
                tma.async_copy_global_to_shared(b, [n, k], ready, halves.index(2 * slot))
                tma.async_copy_global_to_shared(b, [F + n, k], ready, halves.index(2 * slot + 1))
            else:
                tma.async_copy_global_to_shared(b, [k, n], ready, b_tiles.index(slot))
            i += 1


@gluon.jit
def _multiply(
    sums, j, a_tiles, b_tiles, full, free, turn, STEPS,
    W: gl.constexpr, FORWARD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W's product for the program's tile j, when the other consumer has issued its whole
    one: a barrier tells a round of the ring from the next one only, not from the one after it."""
    mbarrier.wait(turn.index(W), (j // 2 + W + 1) & 1)
    i = j * STEPS
    for k in range(STEPS):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        b = b_tiles.index(slot).permute((1, 0)) if FORWARD else b_tiles.index(slot)
        sums = warpgroup_mma(a_tiles.index(slot), b, sums, use_acc=k > 0, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        i += 1
    mbarrier.arrive(turn.index(1 - W))
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((i + STAGES - 1) % STAGES))
    return sums


# --- the epilogue -------------------------------------------------------------------------------


@gluon.jit
def _quarter(sums, Q: gl.constexpr):
    """A quarter of the sums: above left, below left, above right or below right."""
    rows = sums.reshape([2, HALF, TILE]).permute((1, 2, 0)).split()[Q % 2]
    columns = rows.reshape([HALF, 2, HALF]).permute((0, 2, 1)).split()[Q // 2]
    return gl.convert_layout(columns, QUARTER)


@gluon.jit
def _sigmoid(x):
    """As 1 / (1 + exp(-x)), in four instructions."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _rounded(x):
    """As x.to(bfloat16).to(float32), two at a time; Triton's own conversion takes one at a time, on
    the units for exponentials."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16;"
        " and.b32 $1, t, 0xffff0000; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _write(x, out, row, column, tile):
    """Copies x to `out` by way of a tile. Calls alternate between two tiles, so that the copy from
    the other one may still be under way."""
    tma.store_wait(1)
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    synchronize()
    tma.async_copy_shared_to_global(out, [row, column], tile)


@gluon.jit
def _finish_forward(gate_up, y, sums, tiles, m, n, F, W: gl.constexpr, Q: gl.constexpr):
    """Half of the rows: gate is on the left of the sums, up on the right."""
    first, second = tiles.index(2 * W + Q), tiles.index(2 * W + 1 - Q)
    gate = _rounded(_quarter(sums, Q))
    up = _rounded(_quarter(sums, Q + 2))
    row = m + Q * HALF
    _write(gate, gate_up, row, n, first)
    _write(up, gate_up, row, F + n, second)
    _write(gate * _sigmoid(gate) * up, y, row, n, first)


@gluon.jit
def _fetch(gate_up, tiles, arrived, m, n, F, W: gl.constexpr, Q: gl.constexpr):
    """Has gate and up of quarter Q copied into consumer W's tiles for it."""
    ready = arrived.index(2 * W + Q % 2)
    place = 5 * W + 2 * (Q % 2)
    row, column = m + Q % 2 * HALF, n + Q // 2 * HALF
    mbarrier.expect(ready, 2 * HALF * HALF * 2)
    tma.async_copy_global_to_shared(gate_up, [row, column], ready, tiles.index(place))
    tma.async_copy_global_to_shared(gate_up, [row, F + column], ready, tiles.index(place + 1))


@gluon.jit
def _finish_backward(
    gate_up, dgate_up, y, sums, tiles, arrived, m, n, F, W: gl.constexpr, Q: gl.constexpr
):
    """Quarter Q. The gradients take the place of gate and up; the next quarter but one takes theirs
    when they have been written. See `triton_swiglu.swiglu_tile_backward`."""
    place = 5 * W + 2 * (Q % 2)
    gate_tile, up_tile, y_tile = tiles.index(place), tiles.index(place + 1), tiles.index(5 * W + 4)
    row, column = m + Q % 2 * HALF, n + Q // 2 * HALF
    dh = _rounded(_quarter(sums, Q))
    mbarrier.wait(arrived.index(2 * W + Q % 2), Q // 2)
    gate = gate_tile.load(QUARTER)
    up = up_tile.load(QUARTER)
    tma.store_wait(0)  # the tiles of the quarter before have been read
    if Q == 1 or Q == 2:
        _fetch(gate_up, tiles, arrived, m, n, F, W, Q + 1)
    gate = gate.to(gl.float32)
    up = up.to(gl.float32)
    s = _sigmoid(gate)
    silu = gate * s
    gate_tile.store((dh * up * (s + silu * (1 - s))).to(tiles.dtype))
    up_tile.store((dh * silu).to(tiles.dtype))
    y_tile.store((silu * up).to(tiles.dtype))
    fence_async_shared()
    synchronize()
    tma.async_copy_shared_to_global(dgate_up, [row, column], gate_tile)
    tma.async_copy_shared_to_global(dgate_up, [row, F + column], up_tile)
    tma.async_copy_shared_to_global(y, [row, column], y_tile)


# --- kernels ------------------------------------------------------------------------------------


@gluon.jit
def _consume_forward(
    gate_up, y, tiles, a_tiles, b_tiles, full, free, turn, M_TILES, N_TILES, F, STEPS,
    W: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Consumer W: every second tile of this program."""
    sums = gl.zeros([TILE, TILE], gl.float32, SUMS)
    tile = gl.program_id(0) + W * gl.num_programs(0)
    j = W
    while tile < M_TILES * N_TILES:
        m, n = _place(tile, M_TILES, N_TILES, HALF, GROUP)
        sums = _multiply(sums, j, a_tiles, b_tiles, full, free, turn, STEPS, W, True, STAGES)
        for q in gl.static_range(2):
            _finish_forward(gate_up, y, sums, tiles, m, n, F, W, q)
        tile += 2 * gl.num_programs(0)
        j += 2
    tma.store_wait(0)


@gluon.jit
def _consume_backward(
    gate_up, dgate_up, y, tiles, arrived, a_tiles, b_tiles, full, free, turn,
    M_TILES, N_TILES, F, STEPS, W: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Consumer W: every second tile of this program."""
    sums = gl.zeros([TILE, TILE], gl.float32, SUMS)
    tile = gl.program_id(0) + W * gl.num_programs(0)
    j = W
    while tile < M_TILES * N_TILES:
        m, n = _place(tile, M_TILES, N_TILES, TILE, GROUP)
        tma.store_wait(0)  # of the tile before
        _fetch(gate_up, tiles, arrived, m, n, F, W, 0)
        _fetch(gate_up, tiles, arrived, m, n, F, W, 1)
        sums = _multiply(sums, j, a_tiles, b_tiles, full, free, turn, STEPS, W, False, STAGES)
        for q in gl.static_range(4):
            _finish_backward(gate_up, dgate_up, y, sums, tiles, arrived, m, n, F, W, q)
        tile += 2 * gl.num_programs(0)
        j += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M_TILES", "N_TILES", "F", "STEPS"])
def _hopper_matmul_swiglu_forward_kernel(
    x, weight, gate_up, y, M_TILES, N_TILES, F, STEPS, STAGES: gl.constexpr, GROUP: gl.constexpr
):
    a_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, TILE, STEP], SWIZZLED)
    b_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, TILE, STEP], SWIZZLED)
    tiles = gl.allocate_shared_memory(x.dtype, [4, HALF, HALF], SWIZZLED)
    full, free, turn = barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1)
    fence_async_shared()
    gdc_wait()  # as `wait_for_previous`
    gdc_launch_dependents()
    gl.warp_specialize([
        (_consume_forward, (gate_up, y, tiles, a_tiles, b_tiles, full, free, turn,
                            M_TILES, N_TILES, F, STEPS, 0, STAGES, GROUP)),
        (_consume_forward, (gate_up, y, tiles, a_tiles, b_tiles, full, free, turn,
                            M_TILES, N_TILES, F, STEPS, 1, STAGES, GROUP)),
        (_load, (x, weight, a_tiles, b_tiles, full, free,
                 M_TILES, N_TILES, F, STEPS, True, STAGES, GROUP)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit(do_not_specialize=["M_TILES", "N_TILES", "F", "STEPS"])
def _hopper_matmul_swiglu_backward_kernel(
    dout, weight, gate_up, dgate_up, y, M_TILES, N_TILES, F, STEPS,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES, TILE, STEP], SWIZZLED)
    b_tiles = gl.allocate_shared_memory(dout.dtype, [STAGES, STEP, TILE], SWIZZLED)
    # For each consumer: gate and up of two quarters, which their gradients replace, and y of one.
    tiles = gl.allocate_shared_memory(dout.dtype, [10, HALF, HALF], SWIZZLED)
    full, free, turn = barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1)
    arrived = barriers(4, 1)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize([
        (_consume_backward, (gate_up, dgate_up, y, tiles, arrived, a_tiles, b_tiles, full, free,
                             turn, M_TILES, N_TILES, F, STEPS, 0, STAGES, GROUP)),
        (_consume_backward, (gate_up, dgate_up, y, tiles, arrived, a_tiles, b_tiles, full, free,
                             turn, M_TILES, N_TILES, F, STEPS, 1, STAGES, GROUP)),
        (_load, (dout, weight, a_tiles, b_tiles, full, free,
                 M_TILES, N_TILES, F, STEPS, False, STAGES, GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip


# --- launch -------------------------------------------------------------------------------------

FORWARD_STAGES, BACKWARD_STAGES = 6, 4  # slots of the ring: what shared memory holds
GROUP = 16
LEAST_TILES = 512  # below, the library's product and a kernel are about as fast


def takes(a: Tensor, weight: Tensor, F: int) -> bool:
    """Whether a (M, C) and the weight can be read by the copy engine, and there are enough tiles,
    whole in their columns."""
    M, C = a.shape
    return (
        all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (a, weight))
        and all(x.data_ptr() % 16 == 0 for x in (a, weight))
        and C % STEP.value == 0
        and F % TILE.value == 0
        and cdiv(M, TILE.value) * F // TILE.value >= LEAST_TILES
    )


def _launch(
    kernel: Any, a: Tensor, weight: Tensor, columns: int, block: list[int], STAGES: int,
    *outer: Tensor,
) -> None:  # fmt: skip
    (M, C), F = a.shape, outer[-1].shape[1]
    tile, step, half, layout = TILE.value, STEP.value, HALF.value, SWIZZLED.value
    m_tiles, n_tiles = cdiv(M, tile), F // columns
    kernel[(min(multiprocessors(a.device), m_tiles * n_tiles),)](
        describe(a, [tile, step], layout), describe(weight, block, layout),
        *(describe(x, [half, half], layout) for x in outer), m_tiles, n_tiles, F, C // step,
        STAGES=STAGES, GROUP=GROUP, **launch_options(4),
    )  # fmt: skip


def forward(x: Tensor, weight: Tensor, gate_up: Tensor, y: Tensor) -> None:
    """x (M, C), weight (2F, C), gate_up (M, 2F), y (M, F), all contiguous."""
    columns, step = HALF.value, STEP.value
    _launch(
        _hopper_matmul_swiglu_forward_kernel, x, weight, columns, [columns, step],
        FORWARD_STAGES, gate_up, y,
    )  # fmt: skip


def backward(dout: Tensor, weight: Tensor, gate_up: Tensor, dgate_up: Tensor, y: Tensor) -> None:
    """dout (M, C), weight (C, F), gate_up and dgate_up (M, 2F), y (M, F), all contiguous."""
    columns, step = TILE.value, STEP.value
    _launch(
        _hopper_matmul_swiglu_backward_kernel, dout, weight, columns, [step, columns],
        BACKWARD_STAGES, gate_up, dgate_up, y,
    )  # fmt: skip
