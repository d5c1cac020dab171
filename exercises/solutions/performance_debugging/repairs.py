#!/usr/bin/env python3
"""The five faulty stages, each repaired by what was missing and nothing else.

    python exercises/solutions/performance_debugging/repairs.py 5 --gate

trains a repaired stage, or puts it through the gate. Each keeps what its author wanted, but for
stage 4, whose idea was the fault.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(
    0,
    str(Path(__file__).resolve().parents[3] / "version3_triton/exercises/performance_debugging"),
)

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from debug_harness import Runner, main

# isort: split

import stage1_scaled_residuals
import stage2_own_swiglu
import stage4_fused_down_projection
import stage5_lean_final_norm
import tiny_llama_v3 as v3
import torch
from torch import Tensor, nn

from workshop import errors


class Stage1(stage1_scaled_residuals.TinyLlama):
    """The override had taken the place of V3's initialisation. Now V3's comes first."""

    def _init_weights(self, module: nn.Module) -> None:
        v3.TinyLlama._init_weights(module)
        super()._init_weights(module)


class Stage2(stage2_own_swiglu.TinyLlama):
    """The kernel counts elements in a line, and chunk's halves are not in a line: F elements of
    gate, then F of up. V3's kernel takes strides, which saves these copies."""

    class FeedForward(v3.FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            gate, up = gate.contiguous(), up.contiguous()
            return self.down_proj(stage2_own_swiglu.SwiGLU.apply(gate, up))

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = self.FeedForward


def timed_steps(runner: Runner, steps: int) -> list[float]:
    """Stage 3: the clock stops when the step is done. `result()` waits for the thread, which has
    only launched the step where there is a GPU, and `wait()` for the GPU."""
    step_ms = []
    with ThreadPoolExecutor(max_workers=1) as launcher:
        for _ in range(steps):
            start = time.perf_counter()
            launcher.submit(runner.advance).result()
            runner.wait()
            step_ms.append((time.perf_counter() - start) * 1e3)
    return step_ms


class Stage4(stage4_fused_down_projection.TinyLlama):
    """A program for each element reads 3 F numbers for one result, and the same rows again for
    every neighbour: the library's tiles read a row once for 64 results or more. Writing SwiGLU's
    result and reading it again costs less than that by far."""

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = v3.FeedForward


class AddRMSNorm(torch.autograd.Function):
    """Stage 5's kernel, with what autograd must know: which inputs it has, and their gradients."""

    @staticmethod
    def forward(ctx, stream: Tensor, branch: Tensor, norm: v3.RMSNorm, weight: Tensor) -> Tensor:
        y, total = stage5_lean_final_norm.FinalNorm.forward(norm, stream, branch)
        ctx.save_for_backward(total, weight)
        ctx.eps = norm.eps
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed = x * rstd
        g = dy * weight
        dx = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
        return dx, dx, None, (dy * normed).flatten(0, -2).sum(0)


class Stage5(v3.TinyLlama):
    """The launch is in an autograd.Function: a kernel that fills an empty tensor leaves no
    trace that a backward pass could follow."""

    class FinalNorm(v3.RMSNorm):
        def forward(self, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
            # The sum goes nowhere else.
            return AddRMSNorm.apply(stream, branch, self, self.weight), stream

    def __init__(self, config: v3.TinyLlamaConfig) -> None:
        super().__init__(config)
        self.norm = self.FinalNorm(config.hidden_dim, config.norm_eps, self.fusions)


REPAIRED = {
    "1": (Stage1, None),
    "2": (Stage2, None),
    "3": (v3.TinyLlama, timed_steps),
    "4": (Stage4, None),
    "5": (Stage5, None),
}
"""By the stage's number: its model, and its clock if that was the fault."""


if __name__ == "__main__":
    number = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if number not in REPAIRED:
        print(f"error: which stage? {', '.join(REPAIRED)}, before any option", file=sys.stderr)
        sys.exit(errors.WRONG_USAGE)
    build, clock = REPAIRED[number]
    sys.exit(main(f"repaired{number}.py", build, timed_steps=clock))
