#!/usr/bin/env python3
"""Checks the profilers: torch.profiler by profiling something, the others by their version.

A script, not a pytest test: python3 setup/validation_scripts/test_profiling_tools.py
Ends with status 77 where torch.profiler works and no GPU profiler is installed.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, Dict, List

from report_table import (
    BROKEN,
    MISSING,
    OK,
    Row,
    answer_probe,
    conclude,
    parser,
    probe,
    report,
    start,
    tool_row,
)

SETUP = "setup/environment_setup.sh"
OPTIONAL = "requirements-profiling.txt in setup/ says how"
ROCM_BIN = str(Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / "bin")
NVIDIA_PARAMETERS = Path("/proc/driver/nvidia/params")
# A name each, as they are since ROCm 6.3; there is no program `rocprof-sys`.
GPU_PROFILERS = {
    "rocprofv3": (
        "AMD: kernel and API traces, counters",
        "ROCm 6.3 or newer: module load rocm, or the package rocprofiler-sdk",
    ),
    "rocprof-sys-sample": (
        "AMD: timeline of the whole program, sampled",
        "module load rocprofiler-systems, or the package of that name",
    ),
    "rocprof-sys-run": (
        "AMD: the same, traced",
        "module load rocprofiler-systems, or the package of that name",
    ),
    "rocprof-compute": (
        "AMD: a kernel's counters, roofline",
        "module load rocprofiler-compute, or the package of that name, with its own Python "
        "requirements; its roofline takes ROCm 6.4.2",
    ),
    "ncu": ("NVIDIA: a kernel's counters, roofline", "Nsight Compute; with the CUDA toolkit"),
    "nsys": ("NVIDIA: timeline of the whole program", "Nsight Systems; with the CUDA toolkit"),
}


def probe_torch_profiler() -> Dict[str, Any]:
    """Profiles one matrix product: the operator must be in the table and, on a GPU, its kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    x = torch.ones(64, 64, device=device)
    with profile(activities=activities) as recorded:
        (x @ x).sum().item()
    rows = recorded.key_averages()
    return {
        "operator": any(row.key == "aten::mm" for row in rows),
        "kernel": not on_gpu or any(row.self_device_time_total > 0 for row in rows),
        "device": device,
        "torch": str(torch.__version__),
    }


def probe_proton() -> Dict[str, Any]:
    import triton
    import triton.profiler as proton

    return {"version": str(triton.__version__), "usable": callable(proton.start)}


def probe_deepspeed() -> Dict[str, Any]:
    """Counts the FLOPs of a layer whose count is known."""
    import deepspeed
    import torch
    from deepspeed.profiling.flops_profiler import get_model_profile

    layer = torch.nn.Linear(16, 32, bias=False)
    flops, _, _ = get_model_profile(
        layer, args=[torch.ones(4, 16)], print_profile=False, as_string=False
    )
    return {"version": str(deepspeed.__version__), "flops": int(flops), "expected": 2 * 4 * 16 * 32}


PROBES = {
    "torch_profiler": probe_torch_profiler,
    "proton": probe_proton,
    "deepspeed": probe_deepspeed,
}


def torch_profiler_row() -> Row:
    what, purpose = "torch.profiler", "time by operator and kernel, on every machine"
    if importlib.util.find_spec("torch") is None:
        return Row(what, MISSING, "", purpose, SETUP, needed=True)
    facts = probe(__file__, "torch_profiler")
    problem = facts.get("problem", "")
    if not problem and not facts["operator"]:
        problem = "did not record aten::mm"
    if not problem and not facts["kernel"]:
        problem = "recorded no GPU kernel"
    if problem:
        remedy = "is another profiler attached? else " + SETUP
        return Row(what, BROKEN, problem, purpose, remedy, needed=True)
    return Row(what, OK, f"torch {facts['torch']}, {facts['device']}", purpose, "", needed=True)


def proton_row() -> Row:
    what, purpose = "proton", "Triton's own: time and FLOPs by scope"
    if importlib.util.find_spec("triton") is None:
        return Row(what, MISSING, "", purpose, "comes with triton, in PyTorch's GPU builds")
    facts = probe(__file__, "proton")
    if "problem" in facts:
        return Row(what, BROKEN, facts["problem"], purpose, "needs a triton with its profiler")
    return Row(what, OK, f"triton {facts['version']}", purpose, "")


def visible_devices_rows() -> List[Row]:
    """On AMD, proton refuses to start under two variables that job scripts like to set."""
    names = [n for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in os.environ]
    if not names or not Path("/dev/kfd").exists():
        return []
    remedy = "for proton: unset it, and choose GPUs with ROCR_VISIBLE_DEVICES"
    return [Row(name, MISSING, "is set", "proton does not start", remedy) for name in names]


def deepspeed_row() -> Row:
    what, purpose = "deepspeed", "FLOPs by module"
    if importlib.util.find_spec("deepspeed") is None:
        return Row(what, MISSING, "", purpose, OPTIONAL)
    facts = probe(__file__, "deepspeed")
    if "problem" in facts:
        return Row(what, BROKEN, facts["problem"], purpose, OPTIONAL)
    right = facts["flops"] == facts["expected"]
    version = facts["version"] + ("" if right else f": {facts['flops']}, not {facts['expected']}")
    return Row(what, OK if right else BROKEN, version, purpose, OPTIONAL)


def counter_permission_rows(parameters: Path = NVIDIA_PARAMETERS) -> List[Row]:
    """NVIDIA's driver can keep hardware counters for root: ncu then starts and measures nothing."""
    if not parameters.exists():
        return []
    restricted = "RmProfilingAdminOnly: 1" in parameters.read_text(encoding="utf-8")
    allowed = not restricted or os.geteuid() == 0
    return [
        Row(
            "GPU counters",
            OK if allowed else MISSING,
            "" if allowed else "for root alone",
            "what ncu measures",
            "the administrator: NVreg_RestrictProfilingToAdminUsers=0",
        )
    ]


def gpu_profiler_rows() -> List[Row]:
    return [
        tool_row(name, purpose, remedy, also_in=ROCM_BIN)
        for name, (purpose, remedy) in GPU_PROFILERS.items()
    ]


def main() -> int:
    arguments = parser("Checks the profilers that the workshop uses.").parse_args()
    if arguments.probe:
        return answer_probe(PROBES, arguments.probe)
    tools = gpu_profiler_rows()
    rows = [torch_profiler_row(), *tools, *counter_permission_rows()]
    rows += [proton_row(), *visible_devices_rows(), deepspeed_row()]
    here = [row.what for row in tools if row.found == OK]
    none = "No GPU profiler on this machine: torch.profiler works, and the runners of the rest skip"
    all_well = f"torch.profiler works; GPU profilers: {', '.join(here)}"
    status, verdict = conclude(rows, all_well, "" if here else none)
    return report(rows, status, verdict, arguments.json)


if __name__ == "__main__":
    start(main)
