"""The device that runs, and the rates of a large product and copy on it."""

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from workshop.errors import WorkshopError
from workshop.run import chips

if TYPE_CHECKING:
    from workshop.run.precision import Precision


def get_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU; `cpu`, `cuda` and `cuda:N` as PyTorch spells them
    (ROCm's devices are `cuda` too). Raises WorkshopError: no such device here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise WorkshopError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise WorkshopError(
            f"device {name}: PyTorch {torch.__version__} sees no GPU here; use --device cpu, or "
            "run setup/validation_scripts/test_environment.py to find out why"
        )
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise WorkshopError(f"device {name}: this machine has {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int | None:
    """All of the device's memory; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CGROUP_VERSIONS = {
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "": ("", "memory.max", "memory.current", ""),
}
"""By the controller's name in /proc/self/cgroup: the tree, the files of limit and usage, and the
prefix in memory.stat of sums over a group and all below it. Versions 1 and 2 of Linux's control
groups."""


def cache_bytes(device: torch.device) -> int:
    """The last-level cache; where the system does not say, more than most have."""
    unknown = int(chips.LAST_LEVEL_CACHE_BYTES)
    if device.type == "cuda":  # ROCm leaves out the cache between L2 and memory
        return (
            unknown if torch.version.hip else torch.cuda.get_device_properties(device).L2_cache_size
        )
    listed = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    size = listed.read_text().strip() if listed.is_file() else ""
    return int(size[:-1]) * 1024 if re.fullmatch(r"\d+K", size) else unknown


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory of the device that a new process could have, on the CPU within the limits of its
    container or batch job; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(_PROC / "meminfo"), re.MULTILINE)
    of_machine = int(match.group(1)) * 1024 if match else memory_bytes(device)
    found = [] if of_machine is None else [of_machine]
    for folder, limit_file, usage_file, prefix in _cgroups():
        limit, used = (_read(folder / name).strip() for name in (limit_file, usage_file))
        if limit.isdigit() and used.isdigit():  # else "max", or not there
            # Its use includes cached files, which give way where memory is short.
            pattern = rf"^{prefix}(?:in)?active_file (\d+)$"
            cached = re.findall(pattern, _read(folder / "memory.stat"), re.MULTILINE)
            found.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(found, default=None)


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """The control groups around this process, each in those above it; with the names of their files
    as in _CGROUP_VERSIONS."""
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        for controller in _CGROUP_VERSIONS.keys() & controllers.split(","):
            tree, *files = _CGROUP_VERSIONS[controller]
            own = PurePosixPath(place.lstrip("/"))
            # A container may read its host's path there, but see only the tree from its own on.
            for folder in (own, *own.parents):
                yield _CGROUPS / tree / folder, files[0], files[1], files[2]


def _read(path: Path) -> str:
    """A file's text; nothing where there is none that can be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def peaks(device: torch.device) -> chips.Peaks | None:
    """The data sheet of a GPU, if it is listed."""
    return chips.find_peaks(device_name(device)) if device.type == "cuda" else None


def describe(device: torch.device) -> dict[str, str | int | float | None]:
    """A device as a result file records it."""
    sheet = peaks(device)
    record: dict[str, str | int | float | None] = {
        "type": device.type,
        "name": device_name(device),
        "peaks_source": sheet.source if sheet else None,
    }
    if device.type == "cpu":
        return record | {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    architecture = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
    return record | {
        "architecture": architecture,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
    }


def peak(device: torch.device, precision: "Precision") -> tuple[float, str]:
    """TFLOP/s that a share is given of: the data sheet's, else what a large product reaches; and
    where the figure is from."""
    sheet = peaks(device)
    if sheet and precision.name in sheet.tflops:
        return sheet.tflops[precision.name], sheet.source
    precision.set_matmul_mode()
    measured = measure_matmul_tflops(device, precision.autocast_dtype)
    which = " in bf16" if precision.float8_recipe else ""
    return measured, f"measured: a large matrix product{which}"


def measure_matmul_tflops(device: torch.device, autocast_dtype: torch.dtype | None) -> float:
    """The best of several large square products, in TFLOP/s: what the library reaches here."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=autocast_dtype or torch.float32)
    b = torch.randn(size, size, device=device, dtype=a.dtype)
    seconds = _best_seconds(lambda: a @ b, device)
    return 2 * size**3 / seconds / 1e12


def measure_copy_gbs(device: torch.device) -> float:
    """The best of several copies of 256 MB (GPU: 2 GB), in GB/s, read and write both counted."""
    count = (64 if device.type == "cpu" else 512) * 10**6
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * count / _best_seconds(lambda: target.copy_(source), device) / 1e9


def _best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The shortest of a few runs: a ceiling is what the machine can do undisturbed."""
    durations = []
    for _ in range(repeats + 1):  # the first is the warm-up
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return min(durations[1:])
