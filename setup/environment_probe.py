"""Facts about the Python that runs this file, for environment_setup.sh.

Usage: PYTHON environment_probe.py COMMAND [ARGUMENT...], where COMMAND is a function of COMMANDS.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import sysconfig
import urllib.request
from pathlib import Path

PROBE_SECONDS = 5
WAITED = 3  # the exit status of `lock` after another process has given its lock back
# PyTorch's ROCm builds have named their Triton differently over time. Whichever is there belongs
# to this PyTorch, and must be kept with it.
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


def installed_version(name: str) -> str:
    """The version of an installed distribution, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def locate(module: str) -> str:
    """Where an import would find a module, without importing it (torch can take many seconds)."""
    spec = importlib.util.find_spec(module)
    return (spec and spec.origin) or ""


def parent_environment() -> str:
    """The package folders of the virtual environment that this Python belongs to, if it does.

    A venv made from a venv's Python descends from the base interpreter: what the first venv holds
    is lost to it, `--system-site-packages` or not. The caller links these folders instead.
    """
    if sys.prefix == sys.base_prefix:
        return ""
    folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    return os.pathsep.join(folders)


def sees_base_packages() -> bool:
    """Whether this Python sees the base interpreter's packages: a venv does if it was made so."""
    if sys.prefix == sys.base_prefix:
        return True
    configuration = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8")
    return bool(re.search(r"include-system-site-packages\s*=\s*true", configuration))


def module_version(module: str, *names: str) -> str:
    """The version of the module that an import would find, which came as one of these
    distributions, or an empty string."""
    if not locate(module):
        return ""
    return next((version for name in names if (version := installed_version(name))), "there")


def torch_facts() -> dict[str, str]:
    """Version, kind (cpu, cuda, rocm) and pip pins of the torch that this Python imports."""
    location = locate("torch")
    if not location:
        return {}
    try:
        import torch
    except Exception as error:  # A broken installation can raise anything; the caller reports it.
        reason = str(error).splitlines() or [""]
        return {"torch_file": location, "torch_error": f"{type(error).__name__}: {reason[0]}"}
    runtimes = {"rocm": torch.version.hip, "cuda": torch.version.cuda}
    kind = next((kind for kind, version in runtimes.items() if version), "cpu")
    pins = [f"torch=={installed_version('torch') or torch.__version__}"]
    pins += [f"{name}=={version}" for name in TRITON_NAMES if (version := installed_version(name))]
    return {
        "torch_file": location,
        "torch_version": str(torch.__version__),
        "torch_number": ".".join(re.findall(r"\d+", str(torch.__version__))[:2]),
        "torch_kind": kind,
        "torch_runtime": runtimes.get(kind) or "",
        "torch_pins": " ".join(pins),
    }


def describe() -> None:
    """Prints lines of the form key=value."""
    facts = {
        "python_version": platform.python_version(),
        "parent_environment": parent_environment(),
        "sees_base_packages": "yes" if sees_base_packages() else "no",
        "triton_version": module_version("triton", *TRITON_NAMES),
        "torchvision_version": module_version("torchvision", "torchvision"),
        **torch_facts(),
    }
    for key, value in facts.items():
        print(f"{key}={value}")


def device() -> None:
    """What torch computes on. Apart from `describe` because it starts the GPU's driver."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(f"{count} x {torch.cuda.get_device_name(0)}" if count else "none (the CPU)")


def missing(path: str) -> None:
    """The lines of a requirements file whose package is not installed in any version."""
    for name, line in requirements(path).items():
        if not installed_version(name):
            print(line)


def requirements(path: str) -> dict[str, str]:
    """The lines of a requirements file that are for this Python, by their package."""
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    wanted = (line for line in lines if line and not line.startswith("#") and applies(line))
    return {line.split("==")[0]: line for line in wanted}


def applies(requirement: str) -> bool:
    """Whether the marker of a requirement, if any, admits this Python's version."""
    marker = re.search(r'python_version (<|>=) "(\d+)\.(\d+)"', requirement)
    if not marker:
        return True
    is_below = sys.version_info[:2] < (int(marker[2]), int(marker[3]))
    return is_below == (marker[1] == "<")


def packages(*paths: str) -> None:
    """What shows that the packages of this environment, and those of the requirements files, are
    there: lines of a requirement, a tab and a path. Not pip, nor those with their own check."""
    wanted = {name: line for path in paths for name, line in requirements(path).items()}
    seen = {"torch", "torchvision", "pip"}
    for package in sorted(importlib.metadata.distributions(), key=is_ours, reverse=True):
        found = re.search(r"(?m)^Name: *(\S+)", package.read_text("METADATA") or "")
        name = re.sub(r"[-_.]+", "-", found[1]).lower() if found else ""
        if not name or name in seen or not (is_ours(package) or name in wanted):
            continue
        seen.add(name)
        for path in installed_by(package):
            print(wanted.get(name, f"{name}=={package.version}"), path, sep="\t")


def is_ours(package: importlib.metadata.Distribution) -> bool:
    """Whether a package is in this environment, and not one that it sees elsewhere."""
    return Path(str(package.locate_file(""))).is_relative_to(sys.prefix)


def installed_by(package: importlib.metadata.Distribution) -> list[str]:
    """Of each module that a package has installed a file, of each other folder the folder, whose
    files may have other names in another version."""
    found: dict[str, str] = {}
    for file in package.files or ():
        top = file.parts[0]
        if top.endswith((".dist-info", "..")) or file.suffix == ".pyc":
            continue
        if found.setdefault(top, top) == top and file.suffix == ".py":
            found[top] = str(file)
    return [str(package.locate_file(path)) for path in found.values()]


def lock(descriptor: str) -> int:
    """Locks an open file, for all processes that share its descriptor; WAITED if it had to wait."""
    try:
        fcntl.flock(int(descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("    another set-up is at work in this environment: waiting for it", flush=True)
        fcntl.flock(int(descriptor), fcntl.LOCK_EX)
        return WAITED
    except OSError:  # a file system without locks
        pass
    return 0


def reachable(url: str) -> int:
    """0 if a wheel index answers within a few seconds. urllib honours the proxy variables."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
            return 0
    except (OSError, ValueError):
        return 1


COMMANDS = {
    "describe": describe,
    "device": device,
    "locate": lambda module: print(locate(module)),
    "missing": missing,
    "packages": packages,
    "lock": lock,
    "reachable": reachable,
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))  # type: ignore[operator]
