#!/usr/bin/env python3
"""Checks the profilers: torch.profiler by profiling something, the others by their version.

A script, not a pytest test: python3 setup/validation_scripts/test_profiling_tools.py
Ends with status 77 where torch.profiler works and no GPU profiler is installed.
"""

import argparse
import os
from pathlib import Path
from typing import List

from report_table import MISSING, OK, Facts, Report, Row, probed_row, start, tool_row

SETUP = "setup/environment_setup.sh"
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


def probe_torch_profiler() -> Facts:
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
    if not any(row.key == "aten::mm" for row in rows):
        return {"problem": "did not record aten::mm"}
    if on_gpu and not any(row.self_device_time_total > 0 for row in rows):
        return {"problem": "recorded no GPU kernel"}
    return {"version": f"torch {torch.__version__}, {device}"}


def probe_proton() -> Facts:
    import triton
    import triton.profiler as proton

    if not callable(proton.start):
        return {"problem": "this triton has no profiler"}
    return {"version": f"triton {triton.__version__}"}


def probe_deepspeed() -> Facts:
    """Counts the FLOPs of a layer whose count is known."""
    import deepspeed
    import torch
    from deepspeed.profiling.flops_profiler import get_model_profile

    layer = torch.nn.Linear(16, 32, bias=False)
    flops, _, _ = get_model_profile(
        layer, args=[torch.ones(4, 16)], print_profile=False, as_string=False
    )
    version, expected = str(deepspeed.__version__), 2 * 4 * 16 * 32
    if int(flops) != expected:
        return {"problem": f"{version}: {int(flops)} FLOPs, not {expected}"}
    return {"version": version}


def variable_rows() -> List[Row]:
    """On AMD, proton refuses to start under two variables that job scripts like to set."""
    names = [n for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in os.environ]
    remedy = "for proton: unset it, and choose GPUs with ROCR_VISIBLE_DEVICES"
    on_amd = Path("/dev/kfd").exists()
    rows = [Row(name, "proton does not start", remedy, version="is set") for name in names]
    return rows if on_amd else []


def counter_rows() -> List[Row]:
    """NVIDIA's driver can keep hardware counters for root: ncu then starts and measures nothing."""
    if not NVIDIA_PARAMETERS.exists():
        return []
    restricted = "RmProfilingAdminOnly: 1" in NVIDIA_PARAMETERS.read_text(encoding="utf-8")
    allowed = not restricted or os.geteuid() == 0
    remedy = "the administrator: NVreg_RestrictProfilingToAdminUsers=0"
    row = Row("GPU counters", "what ncu measures", remedy)
    return [row.judged(allowed, "" if allowed else "for root alone", otherwise=MISSING)]


def make(_: argparse.Namespace) -> Report:
    remedy = "is another profiler attached? else " + SETUP
    profiler = Row("torch.profiler", "time by operator and kernel", remedy, needed=True)
    remedy = "comes with triton, in PyTorch's GPU builds"
    proton = Row("proton", "Triton's own: time and FLOPs by scope", remedy)
    deepspeed = Row("deepspeed", "FLOPs by module", "requirements-profiling.txt in setup/ says how")
    tools = [tool_row(Row(name, *texts), ROCM_BIN) for name, texts in GPU_PROFILERS.items()]
    rows = [
        probed_row(profiler, "torch", probe_torch_profiler),
        *tools,
        *counter_rows(),
        probed_row(proton, "triton", probe_proton),
        *variable_rows(),
        probed_row(deepspeed, "deepspeed", probe_deepspeed),
    ]
    here = [row.what for row in tools if row.found == OK]
    none = "No GPU profiler on this machine: torch.profiler works, and the runners of the rest skip"
    all_well = f"torch.profiler works; GPU profilers: {', '.join(here)}"
    return Report(rows, all_well, "" if here else none)


if __name__ == "__main__":
    start("Checks the profilers that the workshop uses.", make)
