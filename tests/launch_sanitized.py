"""Launches one of V3's kernels for Hopper under Triton's concurrency sanitizer (ConSan).

    python tests/launch_sanitized.py {attend,swiglu}_{forward,backward} [fault]

ConSan checks what compute-sanitizer cannot see: that a warp, the copy engine or wgmma touches a
tile in shared memory only after a barrier has signalled the end of its earlier use. With `fault`
one wait of the forward kernels is taken out first. Run by test_gpu.py.
"""

import os
import re
import sys

os.environ["TRITON_INSTRUMENTATION_MODE"] = "consan"

import torch
import triton
import triton_attention_hopper as attention
import triton_attention_hopper_backward as attention_backward
import triton_swiglu_hopper as swiglu
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

WAITS = {  # by kernel: who waits, and for what: a tile that the copy engine brings
    "attend_forward": (
        attention._attend, "mbarrier.wait(full.index(skipped % STAGES), skipped // STAGES & 1)",
    ),
    "swiglu_forward": (swiglu._multiply, "mbarrier.wait(full.index(slot), i // STAGES & 1)"),
}  # fmt: skip


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """The memory that ConSan asks for."""
    return torch.zeros(size, device="cuda", dtype=torch.int8)


def heads(D: int) -> tuple[Tensor, ...]:
    """q, k, v, an output, its log-sum-exps and its gradient."""
    q, k, v, out, dout = (new(1, H, 333, D) for H in (2, 1, 1, 2, 2))
    return q, k, v, out, new(1, 2, 333, dtype=torch.float32), dout


def attend_forward() -> None:
    """In each form, whatever the length that it is meant for."""
    for D, forms in attention.FORWARD.items():
        for form in forms:
            attention.FORWARD[D] = [form]
            q, k, v, out, lse, _ = heads(D)
            attention.attend(q, k, v, out, lse, 0.1)


def attend_backward() -> None:
    for D, apart_from in ((64, 2**31), (128, 2**31), (128, 1)):
        attention_backward.APART_FROM = apart_from
        q, k, v, out, lse, dout = heads(D)
        gradients = map(torch.empty_like, (q, k, v))
        attention_backward.attend_backward(dout, q, k, v, out, lse, 0.1, 0.1, *gradients, None)


# SwiGLU: one program with eight or four tiles, and more steps than slots, which are two.
M, C, F = 250, 192, 256


def swiglu_forward() -> None:
    swiglu.forward(new(M, C), new(2 * F, C), new(M, 2 * F), new(M, F))


def swiglu_backward() -> None:
    swiglu.backward(new(M, C), new(C, F), new(M, 2 * F), new(M, 2 * F), new(M, F))


def main(kernel: str, fault: str = "") -> None:
    # ConSan's functions need more registers than setmaxnreg leaves to a group of warps: NVIDIA's
    # assembler would take many minutes. Triton leaves it out too, after 3.7.
    make_cubin = CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda backend, ptx, *rest: make_cubin(
        backend, re.sub("setmaxnreg[^;]*;", "", ptx), *rest
    )
    triton.set_allocator(allocate)
    if fault:
        function, wait = WAITS[kernel]
        assert function.src.count(wait) == 1
        function._unsafe_update_src(function.src.replace(wait, "pass"))
    swiglu.multiprocessors = lambda device: 1
    swiglu.FORWARD_STAGES = swiglu.BACKWARD_STAGES = 2  # for each, ConSan adds code
    launches = (attend_forward, attend_backward, swiglu_forward, swiglu_backward)
    {launch.__name__: launch for launch in launches}[kernel]()
    torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main(*sys.argv[1:])
