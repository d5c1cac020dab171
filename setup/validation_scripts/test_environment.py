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
from pathlib import Path
from typing import List

from report_table import MISSING, UNTRIED, Facts, Report, Row, probe, probed_row, start, tool_row

SETUP = "setup/environment_setup.sh"
PYTHON_MINIMUM = (3, 10)
TORCH_MINIMUM = (2, 6)
PACKAGES = {
    "rich": "progress and tables",
    "msgspec": "reading of result files",
    "matplotlib": "plots",
    "numpy": "arrays for plots, statistics and V3's interpreter",
}
CACHE_BYTES = 2 * 1024**3  # A compiled `large` model with autotuning writes several hundred MB.


# --- Probes: each runs in a separate process ------------------------------------------------------


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
    importlib.import_module(name)
    return probe_version(name)


def probe_version(name: str) -> Facts:
    """Not imported: beside a CPU build, torchvision's wheel for CUDA imports only the way the lab
    does it."""
    from importlib import metadata

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


# --- Rows -----------------------------------------------------------------------------------------


def python_rows() -> List[Row]:
    version = platform.python_version()
    enough = sys.version_info[:2] >= PYTHON_MINIMUM
    in_venv = sys.prefix != sys.base_prefix
    able = in_venv or all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    python = Row("Python", "runs everything", "install Python 3.10 or newer, or load its module",
                 needed=True)  # fmt: skip
    venv = Row("venv", "keeps the workshop's packages apart",
               "Debian, Ubuntu: the package python3-venv", needed=True)  # fmt: skip
    return [
        python.judged(enough, version if enough else f"{version} is older than 3.10"),
        venv.judged(able, "this Python is in one" if in_venv else "", otherwise=MISSING),
    ]


def compiler_rows() -> List[Row]:
    """The programs that torch.compile and Triton call: they take no other one that may be there."""
    mac = sys.platform == "darwin"
    cxx = os.environ.get("CXX") or ("clang++" if mac else "g++")
    cc = os.environ.get("CC") or next((c for c in ("gcc", "clang") if shutil.which(c)), "gcc")
    system = "xcode-select --install" if mac else "your system's package of that name, or a module"
    rows = [tool_row(Row("make", "short commands", system))]
    for what, program, purpose, variable in (
        ("C++ compiler", cxx, "torch.compile on the CPU", "CXX"),
        ("C compiler", cc, "Triton's launchers, on a GPU", "CC"),
    ):
        row = tool_row(Row(program, purpose, f"{system}; or set {variable}"))
        rows.append(row._replace(what=what, version=f"{program} {row.version}".strip()))
    headers = Row("Python headers", "torch.compile and Triton build small extensions",
                  "Debian, Ubuntu: python3-dev; Red Hat: python3-devel")  # fmt: skip
    there = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return [*rows, headers.judged(there, otherwise=MISSING)]


def torch_rows() -> List[Row]:
    row = Row("torch", "the framework", SETUP, needed=True)
    if importlib.util.find_spec("torch") is None:
        return [row]
    facts = probe(probe_torch)
    if "problem" in facts:
        return [row.judged(False, facts["problem"])]
    version = f"{facts['version']}, {facts['build']}"
    enough = tuple(int(part) for part in facts["version"].split(".")[:2]) >= TORCH_MINIMUM
    right, remedy = facts["matmul_right"], "update the driver; try another device or build"
    product = Row("matrix product", "the device computes correctly", remedy, needed=True)
    return [
        row.judged(enough, version if enough else f"{version}: older than 2.6"),
        device_row(facts),
        product.judged(right, f"{'equals' if right else 'differs from'} the exact one"),
    ]


def device_row(facts: Facts) -> Row:
    """A GPU that is there (by the driver's device files) and not seen is a fault; no GPU is not."""
    row = Row("device", "what the model trains on")
    devices = facts["devices"]
    if devices:
        return row.judged(True, f"{len(devices)} x {devices[0]}")
    drivers = {"/dev/kfd": ("AMD", "rocm"), "/dev/nvidiactl": ("NVIDIA", "cuda")}
    found = next((drivers[path] for path in drivers if Path(path).exists()), None)
    if not found:
        where = "the CPU" if facts["build"] == "CPU" else "the CPU (no GPU on this node)"
        return row.judged(True, where)
    gpu, build = found
    remedy = f"{SETUP} --build {build} --recreate"
    if facts["build"].lower().startswith(build):
        remedy = "driver older than the build, no permission, or *_VISIBLE_DEVICES set to nothing"
    row = row._replace(remedy=remedy, needed=True)
    return row.judged(False, f"the {gpu} GPU is not seen")


def probed_rows(compile_too: bool) -> List[Row]:
    triton = "exists for Linux alone"
    if sys.platform.startswith("linux"):
        triton = "requirements-triton.txt in setup/ says which one belongs where"
    rows = [
        probed_row(Row(name, purpose, SETUP, needed=True), name, probe_package, name)
        for name, purpose in PACKAGES.items()
    ]
    # Not needed: without Triton V3 is skipped, without the others a lab or the notebook.
    row = Row("triton", "V3's kernels; torch.compile on a GPU", triton)
    rows.append(probed_row(row, row.what, probe_triton))
    for row in (
        Row("torchvision", "the inference lab", SETUP),
        Row("transformers", "the text generation lab", "pip install transformers"),
        Row("jupyterlab", "make notebook", "make notebook installs it"),
    ):
        rows.append(probed_row(row, row.what, probe_version, row.what))
    compiler = Row("torch.compile", "V4, and --compile everywhere")
    if compile_too:
        compiler = compiler._replace(remedy="see the compilers and headers above")
        rows.append(probed_row(compiler, "torch", probe_compile))
    else:
        remedy = "add --compile (takes up to a minute)"
        rows.append(compiler._replace(remedy=remedy, found=UNTRIED))
    workshop = Row("workshop", "the plumbing that the versions share", SETUP, needed=True)
    return [*rows, probed_row(workshop, "workshop", probe_workshop)]


def cache_row(what: str, variable: str, default: Path) -> Row:
    """Room and permission where compiled kernels are kept. A quota is not seen from here."""
    folder = Path(os.environ.get(variable) or default)
    while not folder.exists():
        folder = folder.parent
    row = Row(what, "compiled kernels", f"set {variable} to a folder with room")
    if not os.access(str(folder), os.W_OK):
        return row.judged(False, f"{folder} is not writable")
    free = shutil.disk_usage(str(folder)).free
    return row.judged(free >= CACHE_BYTES, f"{free / 1024**3:.1f} GiB free in {folder}")


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
        make,
        {"--compile": "also compile a tiny function with torch.compile (up to a minute)"},
    )
