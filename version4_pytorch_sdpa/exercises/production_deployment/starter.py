"""From a trained V4 to files that others can run, and to numbers that they can rely on.

Shapes in the comments:
    B batch   T tokens of a sequence   V vocabulary
"""

# ruff: noqa: F401 (some of these are for your code)
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
    """Writes a file that holds data and no code, so that its sender need not be trusted.

    It is one dict with two entries: "config", the sizes in `model.config` as a plain dict, and
    "weights", the model's state_dict. `torch.load(path, weights_only=True)` reads it.
    """
    # YOUR CODE (one line; dataclasses.asdict helps)
    raise NotImplementedError("save the sizes and the weights")


def load_model(path: Path) -> nn.Module:
    """The model of a file of `save_weights`, on the CPU, ready to infer.

    It is in evaluation mode, and it is whole: the head's weight is the embedding's, one tensor,
    and the RoPE tables are there, which no state_dict of V4 holds.
    """
    # YOUR CODE (four lines)
    raise NotImplementedError("build a model of the file's sizes and load the file's weights")


def export_model(model: Any, path: Path) -> None:
    """Writes the computation itself: a program that runs without V4's source code.

    It takes tokens (B, T) for every B >= 1 and T from 1 to `model.config.max_seq_len`, and it
    computes as in evaluation mode, in any mode that the model is in now.
    """
    # YOUR CODE (torch.export.export with dynamic_shapes, torch.export.save)
    raise NotImplementedError("export the model for any batch and length")


def load_exported(path: Path) -> Model:
    """The program of a file of `export_model`."""
    program: Model = torch.export.load(path).module()
    return program


def measure(
    model: Model, tokens: Tensor, wait: Callable[[], None], *, repeats: int = 30
) -> dict[str, float]:
    """Latency of `model(tokens)`: the median, the 95th percentile and the maximum of `repeats`
    calls, in ms, as {"p50_ms": ..., "p95_ms": ..., "max_ms": ...}.

    A first call may compile or choose kernels, so there is one before the clock starts. A call on
    a GPU returns before its work is done: `wait()` returns when it is.
    """
    # YOUR CODE (time.perf_counter; statistics.median; statistics.quantiles with n=20 and
    # method="inclusive" ends with the 95th percentile)
    raise NotImplementedError("time each call")


def release_verdict(exit_status: int) -> str:
    """A release pipeline's reading of `regression_tester.py check`'s exit status: "pass",
    "fail", or "unknown" if nothing was judged. Anything else, such as wrong usage or a
    crash, is no pass.
    """
    # YOUR CODE (docs/regression.md has the statuses)
    raise NotImplementedError("distinguish the exit statuses")
