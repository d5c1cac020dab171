"""From a trained V4 to files that others can run, and to numbers that they can rely on.

Shapes in the comments:
    B batch   T tokens of a sequence   V vocabulary
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workshop import versions

v4 = versions.load("v4")
"""tiny_llama_v4.py: v4.TinyLlama, v4.TinyLlamaConfig."""

Model = Callable[[Tensor], Tensor]
"""Gives the logits (B, T, V) of tokens (B, T)."""


def save_weights(model: Any, path: Path) -> None:
    """Writes a file that holds data and no code, so that its sender need not be trusted."""
    torch.save({"config": dataclasses.asdict(model.config), "weights": model.state_dict()}, path)


def load_model(path: Path) -> nn.Module:
    """The model of a file of `save_weights`, on the CPU, ready to infer."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    model = v4.TinyLlama(v4.TinyLlamaConfig(**content["config"]))
    # Copies into the model's own tensors: with assign=True head and embedding would come apart.
    model.load_state_dict(content["weights"])
    return model.eval()


def export_model(model: Any, path: Path) -> None:
    """Writes the computation itself: a program that runs without V4's source code."""
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=model.config.max_seq_len)
    # Not 1: a size of 1 is taken for a constant.
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=next(model.parameters()).device)
    program = torch.export.export(
        model.eval(), (tokens,), dynamic_shapes={"tokens": {0: batch, 1: length}}
    )
    torch.export.save(program, path)


def load_exported(path: Path) -> Model:
    """The program of a file of `export_model`."""
    program: Model = torch.export.load(path).module()
    return program


def measure(
    model: Model, tokens: Tensor, wait: Callable[[], None], *, repeats: int = 30
) -> dict[str, float]:
    """Latency of `model(tokens)` over `repeats` calls, in ms, after one that is not counted."""
    model(tokens)
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(tokens)
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "p50_ms": statistics.median(times),
        "p95_ms": statistics.quantiles(times, n=20, method="inclusive")[-1],
        "max_ms": max(times),
    }


def release_verdict(exit_status: int) -> str:
    """A release pipeline's reading of `regression_tester.py check`'s exit status."""
    return {0: "pass", 77: "unknown"}.get(exit_status, "fail")
