"""How much of a step is communication, and how much of that is hidden by computation: from a
torch.profiler trace, read as the workshop's profilers do."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile, schedule

from labs.group import Group
from labs.scale_out import group as groups
from workshop import results
from workshop.profilers import kineto
from workshop.profilers.step_time import Communication
from workshop.run import markers

if TYPE_CHECKING:
    from labs.scale_out.loop import Training

WARM_UP, STEPS = 2, 5
"""Steps before the recorded ones, and recorded steps."""


def record(training: "Training", group: Group, target: Path) -> dict[str, float]:
    """Profiles some more steps of all processes, whose clock has stopped; writes rank 0's trace.

    Returns:
        `shares` of that trace. Profiling slows the host, which makes these times longer.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints each start on stderr
    activities = [ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def save(profiler: profile) -> None:
        if group.is_first:
            with results.atomic_path(target) as path:
                profiler.export_chrome_trace(str(path))

    plan = schedule(wait=WARM_UP - 1, warmup=1, active=STEPS, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiler:
        for done in range(1, WARM_UP + STEPS + 1):
            training.once_more(markers.for_torch_profiler)
            if done == WARM_UP:
                training.wait()  # or kernels of these steps would be recorded as well
            profiler.step()
    found = shares(kineto.read_communication(target)) if group.is_first else {}
    return groups.of_first(found)


def shares(steps: list[Communication]) -> dict[str, float]:
    """Over all steps: `communication_share`, `hidden_share` of that, `profiled_ms` a step."""
    whole, ns = (sum(getattr(step, name) for step in steps) for name in ("step_ns", "ns"))
    hidden = sum(step.hidden_ns for step in steps)
    return {
        "communication_share": ns / whole,
        "hidden_share": hidden / ns if ns else 0.0,
        "profiled_ms": whole / len(steps) / 1e6,
    }
