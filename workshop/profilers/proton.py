"""Triton's own profiler, Proton: NAME.hatchet, a tree of scopes with the kernels as its leaves.

    proton -n NAME script.py

Its times are sums over the calls of a kernel in a scope: there is no timeline. A marker range, NVTX
or roctx, is a scope too. Kernels' names are as the compiler made them, C++ ones mangled. Bytes and
operations are there where the program gave them at the launch, as Triton kernels can.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers.reading import Problems, amount, count, lines, nanoseconds
from workshop.profilers.table import PHASES, STEP, KernelTable, Sums

_TIME = "time (ns)"
_OUTSIDE = ""
"""The phase of a kernel in no scope of a step."""
_LEAST_BACKWARD = 0.1
"""Part of the forward pass's time. A backward pass that another thread launches leaves less in its
scope: the gradient of the loss by itself."""
_OWN_SCOPES = ("__proton_launch_metadata", "<metric>")
"""How the scopes begin that hold what Proton itself launches: to find out about a launch, whose
kernel may be named after it, and to store a metric."""
_PROCESSORS = {"CUDA": "SMs", "HIP": "compute units"}


def recognises_json(start: str) -> bool:
    """Whether a JSON text that begins so is one of Proton's."""
    return start.lstrip()[:1] == "[" and '"children"' in start and '"frame"' in start


def read(path: Path) -> KernelTable:
    """The kernels of a .hatchet file: those in scopes named "step", if there are any. Raises
    WorkshopError: it can't be read, is no such file, or has no kernels."""
    problems = Problems(path)
    trees, device_info = _load(path)
    in_steps, elsewhere, everywhere = Sums(), Sums(), Sums()
    calls_elsewhere = 0
    phases: dict[str, float] = {}
    table = KernelTable(path, "proton", [])
    for node in _nodes(trees, problems):
        metrics = node.metrics
        with problems.noted(node.row):
            if node.name == STEP and "count" in metrics:
                table.steps = (table.steps or 0) + count(metrics["count"])
            elif _TIME in metrics and metrics.get("count") != 0:  # the root has 0 calls
                calls, ns = count(metrics.get("count")), nanoseconds(metrics[_TIME])
                moved = amount(metrics["bytes"]) if "bytes" in metrics else None
                operations = [amount(n) for key, n in metrics.items() if key.startswith("flops")]
                flops = sum(operations) if operations else None
                for sums in (in_steps if node.in_step else elsewhere, everywhere):
                    sums.add(node.name, ns, calls=calls, bytes=moved, flops=flops)
                calls_elsewhere += 0 if node.in_step else calls
                phases[node.phase] = phases.get(node.phase, 0.0) + ns
                table.device = table.device or _device(metrics, device_info)
    table.warnings = problems.warnings()
    backward_is_short = phases.get("backward", 0.0) < _LEAST_BACKWARD * phases.get("forward", 0.0)
    if backward_is_short and phases.get(_OUTSIDE):
        table.kernels = everywhere.kernels()
        table.warnings.append(
            "no times of the phases, and the whole run in the table: Proton gives a kernel to the "
            "scope of the thread that launched it, and PyTorch launches the backward pass from "
            "another"
        )
    else:
        table.kernels = (in_steps if len(in_steps) else elsewhere).kernels()
        table.phases_ns = {phase: phases[phase] for phase in PHASES if phase in phases}
        if len(in_steps) and calls_elsewhere:
            table.warnings.append(
                f"left out {calls_elsewhere:,} calls of kernels outside of the steps' ranges: "
                "Proton watches the whole run, the warm-up too"
            )
    if not table.kernels:
        raise problems.error("kernels")
    return table


class _Node(NamedTuple):
    row: int
    """Its number in the tree, from 1, parents before children."""
    name: str
    phase: str
    """The innermost scope above it that is a step or a part of one; else _OUTSIDE."""
    in_step: bool
    metrics: dict[str, Any]


def _load(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """The trees of a file, and what it says of the devices, by type and number."""
    try:
        content = json.loads("".join(lines(path)))
    except RecursionError:
        raise WorkshopError(f"{path}: its scopes are nested too deeply to be read") from None
    except ValueError as error:
        raise WorkshopError(f"{path}: no JSON, or cut off: {error!s:.80}") from None
    if not isinstance(content, list) or not content:
        raise WorkshopError(f"{path}: no tree of Proton's: a list of scopes should be in it")
    last = content[-1]
    if isinstance(last, dict) and "frame" not in last:
        return content[:-1], last
    return content, {}


def _nodes(trees: list[Any], problems: Problems) -> Iterator[_Node]:
    """All nodes that are whole, parents before children."""
    # A stack of our own: a tree of Python frames is deeper than Python lets functions call.
    stack = [(tree, _OUTSIDE, False) for tree in reversed(trees)]
    row = 0
    while stack:
        node, phase, in_step = stack.pop()
        row += 1
        try:
            name, metrics, children = node["frame"]["name"], node["metrics"], node["children"]
        except (KeyError, TypeError):
            problems.add(row, "is no scope with a frame's name, metrics and children")
            continue
        if not (isinstance(name, str) and isinstance(metrics, dict) and isinstance(children, list)):
            problems.add(row, "has a name, metrics or children of the wrong type")
            continue
        if name.startswith(_OWN_SCOPES):
            continue
        yield _Node(row, name, phase, in_step, metrics)
        below = name if name in PHASES or (name == STEP and phase == _OUTSIDE) else phase
        stack += ((child, below, in_step or name == STEP) for child in reversed(children))


def _device(metrics: dict[str, Any], info: dict[str, Any]) -> str | None:
    """A description of a kernel's device: "CUDA, architecture 90, 132 SMs"."""
    kind, index = metrics.get("device_type"), metrics.get("device_id")
    devices = info.get(kind) if isinstance(kind, str) else None
    device = devices.get(index) if isinstance(devices, dict) and isinstance(index, str) else None
    if not isinstance(device, dict):
        return None
    parts = [f"architecture {device.get('arch')}"]
    if isinstance(device.get("num_sms"), int):
        parts.append(f"{device['num_sms']} {_PROCESSORS.get(str(kind), 'processors')}")
    return ", ".join([str(kind), *parts])
