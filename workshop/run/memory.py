"""Peak memory of a training step and what it is made of, in MB (10^6 bytes)."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

MB = 1e6


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind the tensors, of a DTensor behind this process's shard; storage that several
    share counts once."""
    own = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}
    return sum(storages.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state: for AdamW two moments and a step count a parameter."""
    states = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def break_down(
    peak_bytes: int, model: nn.Module, optimizer: torch.optim.Optimizer, source: str
) -> dict[str, float | str]:
    """The peak split into weights (and buffers), gradients, optimizer state and the rest:
    activations kept for the backward pass, workspaces, batches."""
    weights = tensor_bytes([*model.parameters(), *model.buffers()])
    gradients = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
    state = tensor_bytes(optimizer_tensors(optimizer))
    return {
        "peak": peak_bytes / MB,
        "weights": weights / MB,
        "gradients": gradients / MB,
        "optimizer_state": state / MB,
        "rest": (peak_bytes - weights - gradients - state) / MB,
        "source": source,
    }


def cpu_step_peak(step: Callable[[], object], live: Callable[[], int]) -> int:
    """Peak bytes of tensors over one call of `step`, which begins with `live()` bytes.

    PyTorch keeps no peak for the CPU, and the process's resident size mixes in the interpreter
    and the compiler. The profiler reports every allocation and release, so the peak is the
    highest running sum.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    start = live()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    )
    running = highest = 0
    for _, change in changes:
        running += change
        highest = max(highest, running)
    return start + highest
