#!/usr/bin/env python3
"""Checks that this machine and this Python can run the workshop.

A script, not a pytest test: python3 setup/validation_scripts/test_environment.py [--compile]
"""

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

from report_table import (
    BROKEN,
    MISSING,
    OK,
    UNTRIED,
    Facts,
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
PYTHON_MINIMUM = (3, 10)
TORCH_MINIMUM = (2, 6)
PACKAGES = {
    "rich": ("progress and tables", True),
    "matplotlib": ("plots", True),
    "numpy": ("arrays for plots, statistics and V3's interpreter", True),
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


def probe_packages() -> Facts:
    """The version of each package, or what its import raised."""
    facts: Facts = {}
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            facts[name] = {"version": str(importlib.import_module(name).__dict__["__version__"])}
        except KeyError:  # rich does not carry its version in the module
            facts[name] = {"version": _distribution_version(name)}
        except Exception as error:
            facts[name] = {"problem": f"{type(error).__name__}: {error}"}
    return facts


def _distribution_version(name: str) -> str:
    from importlib import metadata

    return metadata.version(name)


def probe_triton() -> Facts:
    """Its version, and whether V3's kernels are compiled here or run in its interpreter."""
    import torch
    import triton

    asked_for = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    interprets = asked_for or not torch.cuda.is_available()
    return {"version": str(triton.__version__), "interprets": interprets}


def probe_compile() -> Facts:
    """Compiles a tiny function and compares it with what it was compiled from."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-3, 3, 1000, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    same = torch.allclose(torch.compile(function)(x), function(x), atol=1e-6)
    return {"same": bool(same), "device": device}


def probe_workshop() -> Facts:
    """The package, from outside the repository: a path set by set-up must lead to it."""
    versions = importlib.import_module("workshop.versions").VERSIONS
    return {"versions": len(versions)}


PROBES = {
    "torch": probe_torch,
    "packages": probe_packages,
    "triton": probe_triton,
    "compile": probe_compile,
    "workshop": probe_workshop,
}


# --- Rows -----------------------------------------------------------------------------------------


def python_rows() -> List[Row]:
    version = platform.python_version()
    enough = sys.version_info[:2] >= PYTHON_MINIMUM
    rows = [
        Row(
            "Python",
            OK if enough else BROKEN,
            version if enough else f"{version} is older than 3.10",
            "runs everything",
            "install Python 3.10 or newer, or load its module",
            needed=True,
        )
    ]
    in_venv = sys.prefix != sys.base_prefix
    able = in_venv or all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    rows.append(
        Row(
            "venv",
            OK if able else MISSING,
            "this Python is in one" if in_venv else "",
            "keeps the workshop's packages apart",
            "Debian, Ubuntu: the package python3-venv",
            needed=True,
        )
    )
    return rows


def compiler_rows() -> List[Row]:
    """The programs that torch.compile and Triton call: they take no other one that may be there."""
    mac = sys.platform == "darwin"
    cxx = os.environ.get("CXX") or ("clang++" if mac else "g++")
    cc = os.environ.get("CC") or next((c for c in ("gcc", "clang") if shutil.which(c)), "gcc")
    system = "xcode-select --install" if mac else "your system's package of that name, or a module"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return [
        tool_row("make", "short commands", system),
        _compiler_row("C++ compiler", cxx, "torch.compile on the CPU", f"{system}; or set CXX"),
        _compiler_row("C compiler", cc, "Triton's launchers, on a GPU", f"{system}; or set CC"),
        Row(
            "Python headers",
            OK if header.exists() else MISSING,
            "",
            "torch.compile and Triton build small extensions",
            "Debian, Ubuntu: python3-dev; Red Hat: python3-devel",
        ),
    ]


def _compiler_row(what: str, program: str, purpose: str, remedy: str) -> Row:
    row = tool_row(program, purpose, remedy)
    return row._replace(what=what, version=f"{program} {row.version}".strip())


def torch_rows() -> List[Row]:
    purpose = "the framework"
    if importlib.util.find_spec("torch") is None:
        return [Row("torch", MISSING, "", purpose, SETUP, needed=True)]
    facts = probe(__file__, "torch")
    if "problem" in facts:
        return [Row("torch", BROKEN, facts["problem"], purpose, SETUP, needed=True)]
    version = f"{facts['version']}, {facts['build']}"
    enough = tuple(int(part) for part in facts["version"].split(".")[:2]) >= TORCH_MINIMUM
    if not enough:
        version += ": older than 2.6"
    return [
        Row("torch", OK if enough else BROKEN, version, purpose, SETUP, needed=True),
        device_row(facts),
        Row(
            "matrix product",
            OK if facts["matmul_right"] else BROKEN,
            "equals the exact one" if facts["matmul_right"] else "differs from the exact one",
            "the device computes rightly",
            "update the driver; try another device or build",
            needed=True,
        ),
    ]


def gpu_in_machine() -> str:
    """Whose GPU this machine has, going by the driver's device files."""
    if Path("/dev/kfd").exists():
        return "AMD"
    if Path("/dev/nvidiactl").exists():
        return "NVIDIA"
    return ""


def device_row(facts: Facts) -> Row:
    """A GPU that is there and not seen is a fault; no GPU at all is not."""
    purpose = "what the model trains on"
    devices = facts["devices"]
    if devices:
        return Row("device", OK, f"{len(devices)} x {devices[0]}", purpose, "")
    gpu = gpu_in_machine()
    if not gpu:
        where = "the CPU" if facts["build"] == "CPU" else "the CPU (no GPU on this node)"
        return Row("device", OK, where, purpose, "")
    build = {"AMD": "rocm", "NVIDIA": "cuda"}[gpu]
    if facts["build"].lower().startswith(build):
        remedy = "driver older than the build, no permission, or *_VISIBLE_DEVICES set to nothing"
    else:
        remedy = f"{SETUP} --build {build}"
    return Row("device", BROKEN, f"the {gpu} GPU is not seen", purpose, remedy, needed=True)


def package_rows() -> List[Row]:
    facts = probe(__file__, "packages")
    rows = []
    for name, (purpose, needed) in PACKAGES.items():
        fact = {"problem": facts["problem"]} if "problem" in facts else facts.get(name)
        if fact is None:
            rows.append(Row(name, MISSING, "", purpose, SETUP, needed))
        elif "problem" in fact:
            rows.append(Row(name, BROKEN, fact["problem"], purpose, SETUP, needed))
        else:
            rows.append(Row(name, OK, fact["version"], purpose, SETUP, needed))
    return rows


def triton_row() -> Row:
    """Not needed: without it V3 is skipped, and nothing else."""
    what, purpose = "triton", "V3's kernels; torch.compile on a GPU"
    if importlib.util.find_spec("triton") is None:
        remedy = "requirements-triton.txt in setup/ says which one belongs where"
        if not sys.platform.startswith("linux"):
            remedy = "exists for Linux alone"
        return Row(what, MISSING, "", purpose, remedy)
    facts = probe(__file__, "triton")
    if "problem" in facts:
        return Row(what, BROKEN, facts["problem"], purpose, "install it again")
    mode = "interprets V3's kernels" if facts["interprets"] else "compiles V3's kernels"
    return Row(what, OK, f"{facts['version']}, {mode}", purpose, "")


def compile_row(wanted: bool) -> Row:
    purpose = "V4, and --compile everywhere"
    if not wanted:
        return Row("torch.compile", UNTRIED, "", purpose, "add --compile (takes up to a minute)")
    facts = probe(__file__, "compile", timeout=300)
    if facts.get("same"):
        return Row("torch.compile", OK, f"on {facts['device']}", purpose, "")
    problem = facts.get("problem", "computes something else")
    return Row("torch.compile", BROKEN, problem, purpose, "see the compilers and headers above")


def workshop_row() -> Row:
    facts = probe(__file__, "workshop")
    purpose = "the plumbing that the versions share"
    if "problem" not in facts:
        return Row("workshop", OK, f"{facts['versions']} versions", purpose, SETUP, needed=True)
    found = MISSING if "No module named 'workshop'" in facts["problem"] else BROKEN
    return Row("workshop", found, facts["problem"], purpose, SETUP, needed=True)


def cache_rows() -> List[Row]:
    user = Path.home()
    temporary = Path(tempfile.gettempdir())
    folders = {
        "compiler cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(temporary),
        "Triton cache": os.environ.get("TRITON_CACHE_DIR") or str(user / ".triton"),
    }
    return [cache_row(what, Path(folder)) for what, folder in folders.items()]


def cache_row(what: str, folder: Path) -> Row:
    """Room and permission where compiled kernels are kept. A quota is not seen from here."""
    variable = "TORCHINDUCTOR_CACHE_DIR" if what.startswith("compiler") else "TRITON_CACHE_DIR"
    remedy = f"set {variable} to a folder with room"
    while not folder.exists():
        folder = folder.parent
    if not os.access(str(folder), os.W_OK):
        return Row(what, BROKEN, f"{folder} is not writable", "compiled kernels", remedy)
    free = shutil.disk_usage(str(folder)).free
    found = OK if free >= CACHE_BYTES else BROKEN
    room = f"{free / 1024**3:.1f} GiB free in {folder}"
    return Row(what, found, room, "compiled kernels", remedy)


def main() -> int:
    arguments_parser = parser("Checks that this machine and this Python can run the workshop.")
    arguments_parser.add_argument(
        "--compile",
        action="store_true",
        help="also compile a tiny function with torch.compile (up to a minute; default: not tried)",
    )
    arguments = arguments_parser.parse_args()
    if arguments.probe:
        return answer_probe(PROBES, arguments.probe)
    rows = [
        *python_rows(),
        *compiler_rows(),
        *torch_rows(),
        *package_rows(),
        triton_row(),
        compile_row(arguments.compile),
        workshop_row(),
        *cache_rows(),
    ]
    status, verdict = conclude(rows, "All that is needed is there. Next: make compare")
    return report(rows, status, verdict, arguments.json)


if __name__ == "__main__":
    start(main)
