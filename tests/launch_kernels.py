"""Launches every kernel of V3 once, on small odd shapes: what compute-sanitizer looks at.

One case of each kind and dtype, forward and backward. Run by test_gpu.py, in a process of its own
and without PyTorch's caching allocator, in whose large blocks a stray access would not be seen.
"""

import torch
from kernel_cases import DEVICE, all_cases
from triton_kernels import __dict__ as operators


def main() -> None:
    for case in all_cases():
        for dtype in (torch.float32, torch.bfloat16):
            arguments = [x.detach().to(dtype).requires_grad_() for x in case.make()]
            outputs = operators[case.op](*arguments, **case.fixed)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main()
