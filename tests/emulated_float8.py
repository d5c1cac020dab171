"""fp8 on a CPU: products in fp32 of the rounded numbers, as PyTorch's own take seconds there; and
V3's rounding kernels in Triton's interpreter, whose own conversion to fp8 rounds wrongly."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workshop.run import float8, precision

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """(rows, K) times (K, columns), with what Hopper's products ask for."""
    assert {a.dtype, b.dtype} <= {E4M3, E5M2} and E4M3 in (a.dtype, b.dtype)
    assert a.is_contiguous() and b.t().is_contiguous(), "K has to lie inside"
    assert not [size for size in (*a.shape, *b.shape) if size % 16]
    assert scale_a.dtype == scale_b.dtype == torch.float32 and out_dtype is not None
    if scale_a.dim():
        assert out_dtype == torch.bfloat16 and a.dtype == b.dtype == E4M3
        assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


def _convert_as_pytorch(patch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.7 forgets the carry: 7.99 becomes 4, not 8, in e5m2."""
    from triton.runtime import interpreter

    true, formats = interpreter._convert_float, {"fp8e4nv": E4M3, "fp8e5": E5M2}

    def convert(numbers: Any, of: Any, to: Any, mode: Any) -> Any:
        if str(to) not in formats or numbers.dtype != np.float32:
            return true(numbers, of, to, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(formats[str(to)])
        return rounded.view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", convert)


@contextmanager
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block the CPU has fp8 products."""
    monkeypatch.setattr(float8, "recipes", lambda _: (float8.TENSORWISE, float8.ROWWISE))
    names = ["fp32", "bf16", *precision.FLOAT8]
    monkeypatch.setattr(precision, "supported", lambda *_: names)
    if importlib.util.find_spec("triton"):
        _convert_as_pytorch(monkeypatch)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm", scaled_product, "CPU")
    try:
        yield
    finally:
        library._destroy()
