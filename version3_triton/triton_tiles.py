"""Tiles of x[b, h], a (T, D) matrix, and their products: parts of V3's attention and RoPE kernels.

A tensor (B, heads, T, D) reaches a kernel as a pointer with three strides. On NVIDIA GPUs from
Hopper on it is a descriptor instead, from which the copy engine (TMA) computes the addresses and
clips what lies beyond T: that leaves registers and instructions to the products.
"""

import triton_launch  # noqa: F401  # before Triton: it chooses the interpreter

import triton
import triton.language as tl


@triton.jit
def head_of(x, stride_b, stride_h, b, h):
    """Where x[b, h] begins. Indices are multiplied by strides in 64 bits: a tensor may have more
    numbers than 32 bits count."""
    return x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h


@triton.jit
def load_tile(
    x, stride_b, stride_h, stride_t, b, h, first, T,
    ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows first..first + ROWS of x[b, h], (ROWS, D); those beyond T are zeros."""
    if TMA:
        tile = x.load([b, h, first, 0]).reshape(ROWS, D)
    else:
        t = first + tl.arange(0, ROWS)
        base = head_of(x, stride_b, stride_h, b, h)
        offsets = t[:, None] * stride_t + tl.arange(0, D)[None, :]
        tile = tl.load(base + offsets, mask=t[:, None] < T, other=0.0)
    return tile


@triton.jit
def store_tile(
    x, stride_b, stride_h, stride_t, b, h, first, T, tile, ROWS: tl.constexpr, D: tl.constexpr
):
    """Writes the rows of a tile that lie below T."""
    t = first + tl.arange(0, ROWS)
    base = head_of(x, stride_b, stride_h, b, h)
    offsets = t[:, None] * stride_t + tl.arange(0, D)[None, :]
    tl.store(base + offsets, tile.to(x.dtype.element_ty), mask=t[:, None] < T)


@triton.jit
def _to_tf32(x):
    """The nearest numbers of tf32, as fp32: the matrix units cut the lower bits off, and all
    products would be too small."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc, gathered in fp32."""
    if PRECISION == "interpreted":  # the interpreter would multiply the bits of bf16 numbers
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PRECISION == "tf32":
        acc = tl.dot(_to_tf32(a), _to_tf32(b), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
