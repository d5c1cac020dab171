"""Facts about the Python that runs this file, for environment_setup.sh.

Usage: PYTHON environment_probe.py describe | device | locate | missing FILE | reachable URL

`describe` and `device` print lines of the form key=value. Standard library only: it runs before
anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path

PROBE_SECONDS = 5
# PyTorch's ROCm builds have named their Triton differently over time. Whichever is there belongs
# to this PyTorch, and must be kept with it.
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


def installed_version(name: str) -> str:
    """The version of an installed distribution, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def locate_torch() -> str:
    """Where `import torch` would find it, without importing it (which can take many seconds)."""
    spec = importlib.util.find_spec("torch")
    return (spec.origin or "") if spec else ""


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


def triton_version() -> str:
    """The version of the Triton that `import triton` would find, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return ""
    return next((version for name in TRITON_NAMES if (version := installed_version(name))), "there")


def torch_facts() -> dict[str, str]:
    """Version, kind (cpu, cuda, rocm) and pip pins of the torch that this Python imports."""
    location = locate_torch()
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
    facts = {
        "python_version": platform.python_version(),
        "python_executable": sys.executable,
        "parent_environment": parent_environment(),
        "sees_base_packages": "yes" if sees_base_packages() else "no",
        "triton_version": triton_version(),
        **torch_facts(),
    }
    for key, value in facts.items():
        print(f"{key}={value}")


def device() -> None:
    """What torch computes on. Apart from `describe` because it starts the GPU's driver."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if count else ""
    print(f"device={count} x {name}" if count else "device=none (the CPU)")


def missing(path: str) -> None:
    """The lines of a requirements file whose package is not installed in any version."""
    with Path(path).open(encoding="utf-8") as file:
        for line in (line.strip() for line in file):
            if not line or line.startswith("#") or not applies(line):
                continue
            if not installed_version(line.split("==")[0]):
                print(line)


def applies(requirement: str) -> bool:
    """Whether this Python is one that a requirement is for: its marker, if any, says from or below
    which version."""
    marker = re.search(r'python_version (<|>=) "(\d+)\.(\d+)"', requirement)
    if not marker:
        return True
    is_below = sys.version_info[:2] < (int(marker[2]), int(marker[3]))
    return is_below == (marker[1] == "<")


def reachable(url: str) -> int:
    """0 if a wheel index answers within a few seconds. urllib honours the proxy variables."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
            return 0
    except (urllib.error.URLError, OSError, ValueError):
        return 1


def main(arguments: list[str]) -> int:
    command, *rest = arguments or ["describe"]
    if command == "reachable":
        return reachable(rest[0])
    if command == "missing":
        missing(rest[0])
    elif command == "locate":
        print(locate_torch())
    elif command == "device":
        device()
    else:
        describe()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
