#!/usr/bin/env python3
"""Checks that this machine and this Python can run the workshop.

A script, not a pytest test: python3 setup/validation_scripts/test_environment.py [--compile]
"""

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List

from report_table import (
    BROKEN,
    MISSING,
    OK,
    UNTRIED,
    Facts,
    Report,
    Row,
    probe,
    probed_row,
    start,
    tool_row,
)

SETUP = "setup/environment_setup.sh"
PYTHON_MINIMUM = (3, 10)
TORCH_MINIMUM = (2, 6)
PACKAGES = {
    "rich": "progress and tables",
    "matplotlib": "plots",
    "numpy": "arrays for plots, statistics and V3's interpreter",
}
CACHE_BYTES = 2 * 1024**3  # A compiled `large` model with autotuning writes several hundred MB.


# --- Probes: each runs in a process of its own ----------------------------------------------------


def probe_torch() -> Facts:
    """Version, build and device, and whether the device multiplies as the CPU does."""
    import torch

    facts: Facts = {"version": str(torch.__version__), "build": "CPU"}
    if torch.version.hip:
        facts["build"] = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        facts["build"] = f"CUDA {torch.version.cuda}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
    # Small whole numbers: exact in every precision, so equal means equal.
    left, right = (torch.randint(-4, 5, (64, 64)).float() for _ in range(2))
    device = "cuda" if count else "cpu"
    product = (left.to(device) @ right.to(device)).cpu()
    expected = left.long() @ right.long()
    facts["matmul_right"] = bool((product.long() == expected).all())
    return facts


def probe_package(name: str) -> Facts:
    from importlib import metadata

    importlib.import_module(name)
    return {"version": metadata.version(name)}


def probe_triton() -> Facts:
    """Its version, and whether V3's kernels are compiled here or run in its interpreter."""
    import torch
    import triton

    by_user = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    verb = "interprets" if by_user or not torch.cuda.is_available() else "compiles"
    return {"version": f"{triton.__version__}, {verb} V3's kernels"}


def probe_compile() -> Facts:
    """Compiles a tiny function and compares it with what it was compiled from."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-3, 3, 1000, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    if not torch.allclose(torch.compile(function)(x), function(x), atol=1e-6):
        return {"problem": "computes something else"}
    return {"version": f"on {device}"}


def probe_workshop() -> Facts:
    """The package, from outside the repository: a path set by set-up must lead to it."""
    return {"version": f"{len(importlib.import_module('workshop.versions').VERSIONS)} versions"}


PROBES: Dict[str, Callable[[], Facts]] = {
    "torch": probe_torch,
    "triton": probe_triton,
    "compile": probe_compile,
    "workshop": probe_workshop,
    **{name: partial(probe_package, name) for name in PACKAGES},
}


# --- Rows -----------------------------------------------------------------------------------------


def python_rows() -> List[Row]:
    version = platform.python_version()
    enough = sys.version_info[:2] >= PYTHON_MINIMUM
    in_venv = sys.prefix != sys.base_prefix
    able = in_venv or all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    return [
        Row(
            "Python",
            OK if enough else BROKEN,
            version if enough else f"{version} is older than 3.10",
            "runs everything",
            "install Python 3.10 or newer, or load its module",
            needed=True,
        ),
        Row(
            "venv",
            OK if able else MISSING,
            "this Python is in one" if in_venv else "",
            "keeps the workshop's packages apart",
            "Debian, Ubuntu: the package python3-venv",
            needed=True,
        ),
    ]


def compiler_rows() -> List[Row]:
    """The programs that torch.compile and Triton call: they take no other one that may be there."""
    mac = sys.platform == "darwin"
    cxx = os.environ.get("CXX") or ("clang++" if mac else "g++")
    cc = os.environ.get("CC") or next((c for c in ("gcc", "clang") if shutil.which(c)), "gcc")
    system = "xcode-select --install" if mac else "your system's package of that name, or a module"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    rows = [tool_row("make", "short commands", system)]
    for what, program, purpose, variable in (
        ("C++ compiler", cxx, "torch.compile on the CPU", "CXX"),
        ("C compiler", cc, "Triton's launchers, on a GPU", "CC"),
    ):
        row = tool_row(program, purpose, f"{system}; or set {variable}")
        rows.append(row._replace(what=what, version=f"{program} {row.version}".strip()))
    return [
        *rows,
        Row(
            "Python headers",
            OK if header.exists() else MISSING,
            "",
            "torch.compile and Triton build small extensions",
            "Debian, Ubuntu: python3-dev; Red Hat: python3-devel",
        ),
    ]


def torch_rows() -> List[Row]:
    row = Row("torch", MISSING, "", "the framework", SETUP, needed=True)
    if importlib.util.find_spec("torch") is None:
        return [row]
    facts = probe(__file__, "torch")
    if "problem" in facts:
        return [row._replace(found=BROKEN, version=facts["problem"])]
    version = f"{facts['version']}, {facts['build']}"
    enough = tuple(int(part) for part in facts["version"].split(".")[:2]) >= TORCH_MINIMUM
    if not enough:
        version += ": older than 2.6"
    return [
        row._replace(found=OK if enough else BROKEN, version=version),
        device_row(facts),
        Row(
            "matrix product",
            OK if facts["matmul_right"] else BROKEN,
            "equals the exact one" if facts["matmul_right"] else "differs from the exact one",
            "the device computes correctly",
            "update the driver; try another device or build",
            needed=True,
        ),
    ]


def device_row(facts: Facts) -> Row:
    """A GPU that is there (by the driver's device files) and not seen is a fault; no GPU is not."""
    row = Row("device", OK, "", "what the model trains on", "")
    devices = facts["devices"]
    if devices:
        return row._replace(version=f"{len(devices)} x {devices[0]}")
    drivers = {"/dev/kfd": ("AMD", "rocm"), "/dev/nvidiactl": ("NVIDIA", "cuda")}
    found = next((drivers[path] for path in drivers if Path(path).exists()), None)
    if not found:
        where = "the CPU" if facts["build"] == "CPU" else "the CPU (no GPU on this node)"
        return row._replace(version=where)
    gpu, build = found
    remedy = f"{SETUP} --build {build}"
    if facts["build"].lower().startswith(build):
        remedy = "driver older than the build, no permission, or *_VISIBLE_DEVICES set to nothing"
    return row._replace(
        found=BROKEN, version=f"the {gpu} GPU is not seen", remedy=remedy, needed=True
    )


def probed_rows(compile_too: bool) -> List[Row]:
    rows = [
        probed_row(__file__, name, Row(name, OK, "", purpose, SETUP, needed=True), name)
        for name, purpose in PACKAGES.items()
    ]
    remedy = "exists for Linux alone"
    if sys.platform.startswith("linux"):
        remedy = "requirements-triton.txt in setup/ says which one belongs where"
    # Not needed: without it V3 is skipped, and nothing else.
    triton = Row("triton", OK, "", "V3's kernels; torch.compile on a GPU", remedy)
    rows.append(probed_row(__file__, "triton", triton, "triton"))
    remedy = "see the compilers and headers above"
    compiler = Row("torch.compile", UNTRIED, "", "V4, and --compile everywhere", remedy)
    if compile_too:
        rows.append(probed_row(__file__, "compile", compiler, "torch"))
    else:
        rows.append(compiler._replace(remedy="add --compile (takes up to a minute)"))
    workshop = Row("workshop", OK, "", "the plumbing that the versions share", SETUP, needed=True)
    return [*rows, probed_row(__file__, "workshop", workshop, "workshop")]


def cache_row(what: str, variable: str, default: Path) -> Row:
    """Room and permission where compiled kernels are kept. A quota is not seen from here."""
    folder = Path(os.environ.get(variable) or default)
    while not folder.exists():
        folder = folder.parent
    row = Row(what, OK, "", "compiled kernels", f"set {variable} to a folder with room")
    if not os.access(str(folder), os.W_OK):
        return row._replace(found=BROKEN, version=f"{folder} is not writable")
    free = shutil.disk_usage(str(folder)).free
    found = OK if free >= CACHE_BYTES else BROKEN
    return row._replace(found=found, version=f"{free / 1024**3:.1f} GiB free in {folder}")


def make(arguments: argparse.Namespace) -> Report:
    rows = [
        *python_rows(),
        *compiler_rows(),
        *torch_rows(),
        *probed_rows(arguments.compile),
        cache_row("compiler cache", "TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir())),
        cache_row("Triton cache", "TRITON_CACHE_DIR", Path.home() / ".triton"),
    ]
    return Report(rows, "All that is needed is there. Next: make compare")


if __name__ == "__main__":
    start(
        "Checks that this machine and this Python can run the workshop.",
        PROBES,
        make,
        {"--compile": "also compile a tiny function with torch.compile (up to a minute)"},
    )
