#!/usr/bin/env python3
"""Checks the ROCm stack: driver, permissions, GPUs, tools, and that PyTorch was built for it.

A script, not a pytest test: python3 setup/validation_scripts/test_rocm_installation.py
Ends with status 77 on a machine that has nothing of ROCm.
"""

import argparse
import grp
import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import List

from report_table import (
    BROKEN,
    MISSING,
    OK,
    Facts,
    Report,
    Row,
    find_program,
    probe,
    run,
    start,
    tool_row,
)

KFD = Path("/dev/kfd")
DRI = Path("/dev/dri")
ROCM = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
GROUPS = ("render", "video")
SETUP = "setup/environment_setup.sh --build rocm"


def probe_torch() -> Facts:
    """PyTorch's HIP version, and the GPUs that it sees."""
    import torch

    return {
        "version": str(torch.__version__),
        "hip": torch.version.hip or "",
        "devices": torch.cuda.device_count() if torch.version.hip else 0,
    }


PROBES = {"torch": probe_torch}


def rocm_version(root: Path) -> str:
    """The version that a ROCm installation states in its .info folder, or an empty string."""
    for name in ("version", "version-rocm"):
        try:
            return (root / ".info" / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return ""


def rocm_row(root: Path) -> Row:
    purpose = "compilers, libraries and profilers"
    remedy = "module load rocm; or set ROCM_PATH to where it is"
    version = rocm_version(root)
    found = OK if root.is_dir() else MISSING
    text = f"{version or 'version not stated'}, {root}" if found == OK else f"no {root}"
    return Row("ROCm", found, text, purpose, remedy, needed=True)


def device_file_row(path: Path, purpose: str, remedy: str) -> Row:
    """A device file must be there, and this user must be allowed to read and write it."""
    if not path.exists():
        return Row(str(path), MISSING, "", purpose, remedy, needed=True)
    if not os.access(str(path), os.R_OK | os.W_OK):
        remedy = "ask for the groups render and video, then log in again"
        return Row(str(path), BROKEN, "no permission", purpose, remedy, needed=True)
    return Row(str(path), OK, "readable, writable", purpose, remedy, needed=True)


def driver_rows() -> List[Row]:
    remedy = "load the amdgpu driver; in a container --device=/dev/kfd --device=/dev/dri"
    render = sorted(DRI.glob("renderD*"))
    return [
        device_file_row(KFD, "the compute driver", remedy),
        device_file_row(render[0] if render else DRI / "renderD*", "one file a GPU", remedy),
    ]


def groups_row() -> Row:
    """Membership is one way to the device files, not the only one: so it is not 'needed'."""
    mine, without = set(os.getgroups()), []
    for name in GROUPS:
        try:
            if grp.getgrnam(name).gr_gid not in mine:
                without.append(name)
        except KeyError:  # this system has no such group
            continue
    version = f"not in {', '.join(without)}" if without else "in all that exist"
    return Row(
        "groups",
        MISSING if without else OK,
        version,
        "permission for the device files",
        "only if a device file above says no permission: ask to be added",
    )


def gpu_names(rocminfo_output: str) -> List[str]:
    """The gfx name of each GPU in rocminfo's listing, where CPUs are agents too, and ISAs named."""
    return re.findall(r"^\s*Name:\s+(gfx\w+)", rocminfo_output, re.MULTILINE)


def gpu_row(root: Path) -> Row:
    purpose = "lists the GPUs; an MI250X counts as two"
    path = find_program("rocminfo", str(root / "bin"))
    if not path:
        return Row("rocminfo", MISSING, "", purpose, f"module load rocm; {root}/bin", needed=True)
    outcome = run([path])
    names = gpu_names(outcome.output)
    if outcome.problem or not names:
        problem = outcome.problem or "lists no GPU"
        remedy = "permission, driver, ROCR_VISIBLE_DEVICES; is this a login node?"
        return Row("rocminfo", BROKEN, problem, purpose, remedy, needed=True)
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Row("rocminfo", OK, kinds, purpose, "", needed=True)


def tool_rows(root: Path) -> List[Row]:
    folder = str(root / "bin")
    remedy = f"part of ROCm: module load rocm, or add {folder} to PATH"
    return [
        tool_row("amd-smi", "load, clocks, memory, power", remedy, ("version",), folder),
        tool_row("rocm-smi", "the same, older", remedy, also_in=folder),
        tool_row("hipcc", "compiles HIP; not needed to train", remedy, also_in=folder),
    ]


def torch_rows(facts: Facts, root: Path) -> List[Row]:
    row = Row("torch for ROCm", MISSING, "", "trains on the AMD GPU", SETUP, needed=True)
    if not facts:
        return [row]
    if "problem" in facts:
        return [row._replace(found=BROKEN, version=facts["problem"])]
    if not facts["hip"]:
        return [row._replace(found=BROKEN, version=f"{facts['version']} is another build")]
    seen = facts["devices"]
    version = f"{facts['version']}, {seen} GPUs seen"
    remedy = "rocminfo above must list them; check HIP_VISIBLE_DEVICES"
    found = OK if seen else BROKEN
    return [
        row._replace(found=found, version=version, remedy=remedy),
        versions_row(facts["hip"], rocm_version(root)),
    ]


def versions_row(hip: str, rocm: str) -> Row:
    """A wheel brings its own ROCm libraries, so a difference only matters to the profilers."""
    same = hip.split(".")[:2] == rocm.split(".")[:2]
    return Row(
        "torch's ROCm",
        OK if same else MISSING,
        f"{hip or 'unknown'} in torch, {rocm or 'unknown'} here",
        "one ROCm for torch and the profilers",
        "if rocprofv3 hangs or crashes: a torch built for this ROCm (module or container)",
    )


def make(_: argparse.Namespace) -> Report:
    facts = probe(__file__, "torch") if importlib.util.find_spec("torch") else {}
    rows = [rocm_row(ROCM), *driver_rows(), groups_row(), gpu_row(ROCM), *tool_rows(ROCM)]
    rows += torch_rows(facts, ROCM)
    if any((ROCM.is_dir(), KFD.exists(), shutil.which("rocminfo"), facts.get("hip"))):
        return Report(rows, "ROCm is in order. Next: test_profiling_tools.py")
    # Where nothing of ROCm is there, nothing is broken: no row counts as needed.
    rows = [row._replace(found=MISSING, needed=False) for row in rows]
    return Report(rows, "", "No ROCm on this machine: nothing to check")


if __name__ == "__main__":
    start("Checks the ROCm stack of an AMD machine.", PROBES, make)
