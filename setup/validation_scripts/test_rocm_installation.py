#!/usr/bin/env python3
"""Checks the ROCm stack: driver, permissions, GPUs, tools, and that PyTorch was built for it.

A script, not a pytest test: python3 setup/validation_scripts/test_rocm_installation.py
Ends with status 77 on a machine that has nothing of ROCm.
"""

import argparse
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import List, Tuple

from report_table import MISSING, Facts, Report, Row, find_program, probe, run, start, tool_row
from test_environment import probe_torch

KFD = Path("/dev/kfd")
DRI = Path("/dev/dri")
ROCM = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
SETUP = "setup/environment_setup.sh --build rocm"
BF16_SECONDS, SLOW_MS = 90, 100
"""The limit of the products, PyTorch's start included; and a product that searched for a kernel."""


def rocm_version(root: Path) -> str:
    """The version that a ROCm installation states in its .info folder, or an empty string."""
    for name in ("version", "version-rocm"):
        try:
            return (root / ".info" / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return ""


def rocm_row(root: Path) -> Row:
    remedy = "module load rocm; or set ROCM_PATH to where it is"
    row = Row("ROCm", "compilers, libraries and profilers", remedy, needed=True)
    if not root.is_dir():
        return row._replace(version=f"no {root}")
    return row.judged(True, f"{rocm_version(root) or 'version not stated'}, {root}")


def device_file_row(path: Path, purpose: str, remedy: str) -> Row:
    """A device file must be there, and this user must be allowed to read and write it."""
    row = Row(str(path), purpose, remedy, needed=True)
    if not path.exists():
        return row
    if not os.access(str(path), os.R_OK | os.W_OK):
        row = row._replace(remedy="ask for the groups render and video, then log in again")
        return row.judged(False, "no permission")
    return row.judged(True, "readable, writable")


def gpu_row(root: Path) -> Row:
    folder = root / "bin"
    remedy = f"module load rocm; {folder}"
    row = Row("rocminfo", "lists the GPUs; an MI250X counts as two", remedy, needed=True)
    path = find_program("rocminfo", str(folder))
    if not path:
        return row
    output, problem = run([path])
    # CPUs are agents too, and ISAs are named.
    names = re.findall(r"^\s*Name:\s+(gfx\w+)", output, re.MULTILINE)
    if problem or not names:
        remedy = "permission, driver, ROCR_VISIBLE_DEVICES; is this a login node?"
        return row._replace(remedy=remedy).judged(False, problem or "lists no GPU")
    kinds = (f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return row.judged(True, ", ".join(kinds))


def torch_rows(facts: Facts, root: Path) -> List[Row]:
    row = Row("torch for ROCm", "trains on the AMD GPU", SETUP, needed=True)
    if not facts:
        return [row]
    if "problem" in facts:
        return [row.judged(False, facts["problem"])]
    runtime, _, hip = facts["build"].partition(" ")
    if runtime != "ROCm":
        return [row.judged(False, f"{facts['version']} is another build")]
    seen, rocm = len(facts["devices"]), rocm_version(root)
    row = row._replace(remedy="rocminfo above must list them; check HIP_VISIBLE_DEVICES")
    # A wheel brings its own ROCm libraries, so a difference only matters to the profilers.
    remedy = "if rocprofv3 hangs or crashes: a torch built for this ROCm (module or container)"
    versions = Row("torch's ROCm", "one ROCm for torch and the profilers", remedy)
    same = hip.split(".")[:2] == rocm.split(".")[:2]
    text = f"{hip or 'unknown'} in torch, {rocm or 'unknown'} here"
    return [
        row.judged(seen, f"{facts['version']}, {seen} GPUs seen"),
        versions.judged(same, text, otherwise=MISSING),
    ]


def probe_bf16() -> Facts:
    """The longest of a transformer's products in bf16, forward and backward, in milliseconds; the
    first of each shape, in which a library chooses its kernel, is left out."""
    import time

    import torch

    longest = 0.0
    x, weight = (torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16) for n in (4096, 3072))
    for left, right in ((x, weight.t()), (x @ weight.t(), weight), (x.t(), x)):
        for attempt in range(3):
            start = time.perf_counter()
            torch.mm(left, right)
            torch.cuda.synchronize()
            if attempt:
                longest = max(longest, 1e3 * (time.perf_counter() - start))
    return {"longest_ms": longest}


def bf16_row() -> Row:
    """hipBLASLt of ROCm 7.1 and 7.2 can hang, or search for a kernel in every product; rocBLAS,
    tried second, does not."""
    remedy = "no kernel of this GPU's was found: another build of PyTorch"
    row = Row("bf16 products", "what all trainings do", remedy, needed=True)

    def tried(**environment: str) -> Tuple[bool, str]:
        facts = probe(probe_bf16, timeout=BF16_SECONDS, environment=environment)
        longest = facts.get("longest_ms", 0.0)
        return "problem" not in facts and longest < SLOW_MS, facts.get(
            "problem", f"{longest:.3g} ms at most"
        )

    well, found = tried()
    if not well:
        without, other = tried(TORCH_BLAS_PREFER_HIPBLASLT="0")
        if without:
            row = row._replace(remedy=f"export TORCH_BLAS_PREFER_HIPBLASLT=0 (with it: {other})")
    return row.judged(well, found)


def temporary_row() -> Row:
    """MIOpen keeps its locks in the temporary folder, in a folder that all users share."""
    folder = Path(tempfile.gettempdir())
    row = Row("temporary folder", "MIOpen's locks and databases",
              "export TMPDIR=/tmp/$USER, and make that folder")  # fmt: skip
    places = [place for place in (folder, folder / "miopen-lockfiles") if place.exists()]
    closed = [place for place in places if not os.access(str(place), os.W_OK)]
    return row.judged(not closed, f"{closed[0]} is another user's" if closed else str(folder))


def make(_: argparse.Namespace) -> Report:
    facts = probe(probe_torch) if importlib.util.find_spec("torch") else {}
    folder = str(ROCM / "bin")
    driver = "load the amdgpu driver; in a container --device=/dev/kfd --device=/dev/dri"
    tool = f"part of ROCm: module load rocm, or add {folder} to PATH"
    render = next(iter(sorted(DRI.glob("renderD*"))), DRI / "renderD*")
    rows = [
        rocm_row(ROCM),
        device_file_row(KFD, "the compute driver", driver),
        device_file_row(render, "one file a GPU", driver),
        gpu_row(ROCM),
        tool_row(Row("amd-smi", "load, clocks, memory, power", tool), folder, "version"),
        tool_row(Row("rocm-smi", "the same, older", tool), folder),
        tool_row(Row("hipcc", "compiles HIP; not needed to train", tool), folder),
        *torch_rows(facts, ROCM),
        *([bf16_row()] if facts.get("devices") else []),
        temporary_row(),
    ]
    of_rocm = facts.get("build", "").startswith("ROCm")
    if of_rocm or ROCM.is_dir() or KFD.exists() or shutil.which("rocminfo"):
        return Report(rows, "ROCm is in order. Next: test_profiling_tools.py")
    # Where nothing of ROCm is there, nothing is broken: no row counts as needed.
    rows = [row._replace(found=MISSING, needed=False) for row in rows]
    return Report(rows, "", "No ROCm on this machine: nothing to check")


if __name__ == "__main__":
    start("Checks the ROCm stack of an AMD machine.", make)
