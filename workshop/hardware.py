"""Which device runs, what its data sheet promises, and what a large product and copy reach."""

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from workshop.errors import WorkshopError


@dataclass(frozen=True)
class Peaks:
    """Upper limits of one chip: dense TFLOP/s by precision, GB/s of its memory."""

    chip: str
    tflops: dict[str, float]
    bandwidth_gbs: float
    source: str


def _peaks(
    chip: str, fp32: float, tf32: float | None, bf16: float, fp16: float, gbs: float, source: str
) -> Peaks:
    tflops = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    return Peaks(chip, {name: peak for name, peak in tflops.items() if peak}, gbs, source)


_NVIDIA = "NVIDIA {} data sheet, dense (sparse figures halved)"
_AMD = "AMD Instinct {} data sheet"

# The first pattern found in the device's name wins, so the longer names stand first. fp32 is
# the rate without tf32; on AMD that of the matrix units, which fp32 products use.
_CHIPS: tuple[tuple[str, Peaks], ...] = (
    (r"B200", _peaks("B200", 75.0, 1125.0, 2250.0, 2250.0, 8000.0, _NVIDIA.format("HGX B200"))),
    (
        r"H200 NVL",
        _peaks("H200 NVL", 60.0, 417.5, 835.5, 835.5, 4800.0, _NVIDIA.format("H200")),
    ),
    (r"H200", _peaks("H200 SXM", 66.9, 494.7, 989.4, 989.4, 4800.0, _NVIDIA.format("H200"))),
    (
        r"H100 NVL",
        _peaks("H100 NVL", 60.0, 417.5, 835.5, 835.5, 3938.0, _NVIDIA.format("H100")),
    ),
    (
        r"H100 PCIe",
        _peaks("H100 PCIe", 51.2, 378.0, 756.0, 756.0, 2039.0, _NVIDIA.format("H100")),
    ),
    (r"H100", _peaks("H100 SXM", 66.9, 494.7, 989.4, 989.4, 3352.0, _NVIDIA.format("H100"))),
    (
        r"A100.*80GB",
        _peaks("A100 80GB", 19.5, 156.0, 312.0, 312.0, 2039.0, _NVIDIA.format("A100")),
    ),
    (r"A100", _peaks("A100 40GB", 19.5, 156.0, 312.0, 312.0, 1555.0, _NVIDIA.format("A100"))),
    (r"\bL4\b", _peaks("L4", 30.3, 60.0, 121.0, 121.0, 300.0, _NVIDIA.format("L4"))),
    (r"MI355X", _peaks("MI355X", 157.3, None, 2516.6, 2516.6, 8000.0, _AMD.format("MI355X"))),
    (r"MI325X", _peaks("MI325X", 163.4, 653.7, 1307.4, 1307.4, 6000.0, _AMD.format("MI325X"))),
    (r"MI300X", _peaks("MI300X", 163.4, 653.7, 1307.4, 1307.4, 5300.0, _AMD.format("MI300X"))),
    (r"MI300A", _peaks("MI300A", 122.6, 490.3, 980.6, 980.6, 5300.0, _AMD.format("MI300A"))),
    (
        r"MI250X",
        _peaks(
            "MI250X, one of its two dies",
            *(47.9, None, 191.5, 191.5, 1638.4),
            source=_AMD.format("MI250X") + ", halved: PyTorch sees each die as a device",
        ),
    ),
    (r"MI210", _peaks("MI210", 45.3, None, 181.0, 181.0, 1638.4, _AMD.format("MI210"))),
    (r"MI100", _peaks("MI100", 46.1, None, 92.3, 184.6, 1228.8, _AMD.format("MI100"))),
)


def find_peaks(device_name: str) -> Peaks | None:
    """The data-sheet limits of a chip, or None for one that is not listed: no guess is made."""
    for pattern, peaks in _CHIPS:
        if re.search(pattern, device_name):
            return peaks
    return None


def get_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU; `cpu`, `cuda` and `cuda:N` as PyTorch spells them
    (ROCm's devices are `cuda` too).

    Raises:
        WorkshopError: no such device here.
    """
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
    return _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int | None:
    """All of the device's memory; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def describe(device: torch.device) -> dict[str, str | int | float | None]:
    """What a result file says of its device."""
    peaks = find_peaks(device_name(device)) if device.type == "cuda" else None
    record: dict[str, str | int | float | None] = {
        "type": device.type,
        "name": device_name(device),
        "peaks_source": peaks.source if peaks else None,
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
