"""Launches every kernel of V3 once, on small odd shapes: what compute-sanitizer looks at.

One case of each kind and dtype, forward and backward. Run by test_gpu.py, in a separate process
and without PyTorch's caching allocator, in whose large blocks a stray access would not be seen.
"""

import sys
from collections.abc import Iterable

import torch
from kernel_cases import CASES, DEVICE, Case, as_tuple
from triton_kernels import __dict__ as operators
from triton_linear import rounded


def launch(cases: Iterable[Case]) -> None:
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            arguments = [x.detach().to(dtype).requires_grad_() for x in case.make()]
            outputs = as_tuple(operators[case.op](*arguments, **case.fixed))
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def main() -> None:
    # With one multiprocessor a program of the norm's backward pass takes several turns, as at real
    # sizes.
    sys.modules["triton_rms_norm"].multiprocessors = lambda device: 1
    if sys.modules["triton_swiglu"].hopper is not None:  # the kernels for Hopper, from any size on
        sys.modules["triton_swiglu"].hopper.LEAST_TILES = 1
        for suffix, table in (("", "FORWARD_FROM"), ("_backward", "BACKWARD_FROM")):
            vars(sys.modules[f"triton_attention_hopper{suffix}"])[table] = {64: 1, 128: 1}
    launch(CASES.values())
    if sys.modules["triton_swiglu"].hopper is not None:  # and as at thousands of tokens
        sys.modules["triton_attention_hopper"].FORWARD[64].pop(0)
        sys.modules["triton_attention_hopper_backward"].APART_FROM = 1
        launch(case for case in CASES.values() if case.op == "flash_attention")
    weights = [torch.ones(shape, device=DEVICE, requires_grad=True) for shape in ((5,), (17, 9))]
    optimizer = operators["AdamW"](weights)
    for weight in weights:
        weight.grad = rounded(weight, torch.bfloat16).float()
    optimizer.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main()
