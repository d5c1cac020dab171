"""The promises of each chip's data sheet."""

import re
from dataclasses import dataclass

LAST_LEVEL_CACHE_BYTES = 256e6
"""The largest of today's GPUs (MI300's). State that fits can be updated faster than memory is."""


@dataclass(frozen=True)
class Peaks:
    """Upper limits of one chip: dense TFLOP/s by precision, GB/s of its memory."""

    chip: str
    tflops: dict[str, float]
    bandwidth_gbs: float
    source: str


def _peaks(
    chip: str,
    fp32: float,
    tf32: float | None,
    bf16: float | None,
    fp16: float,
    gbs: float,
    source: str,
    fp8: float | None = None,
) -> Peaks:
    """TFLOP/s and GB/s; None for arithmetic that the chip has no units for. `source` may name the
    chip as {}."""
    tflops = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16, "fp8": fp8}
    tflops["fp8-rowwise"] = fp8
    known = {name: peak for name, peak in tflops.items() if peak}
    return Peaks(chip, known, gbs, source.format(chip))


_NVIDIA = "NVIDIA {} data sheet, dense (sparse figures halved)"
_NVIDIA_DENSE = "NVIDIA {} data sheet"
_GEFORCE = (
    "NVIDIA {} architecture white paper, dense, sums in fp32, at the rated boost clock, which "
    "cards may exceed"
)
_AMD = "AMD Instinct {} data sheet"
_RADEON = "AMD Radeon {} specifications, at the rated boost clock, which cards may exceed"
_HALVED = ", halved: PyTorch sees each die as a device"
_A100, _H100, _H200, _GH200 = (_NVIDIA.format(n) for n in ("A100", "H100", "H200", "GH200"))
_B200, _GB200 = _NVIDIA.format("HGX B200"), _NVIDIA.format("GB200 NVL72")
_AMPERE, _ADA, _BLACKWELL = (_GEFORCE.format(n) for n in ("GA102", "Ada", "RTX Blackwell"))
_MI200 = _AMD.format("MI250X") + _HALVED + "; the smaller models share the name"

# The first pattern found in the device's name wins, so the longer names come first. fp32 is
# the rate without tf32; on AMD's Instinct that of the matrix units, which fp32 products use.
# fmt: off
_CHIPS: tuple[tuple[str, Peaks], ...] = (
    (r"GB200", _peaks("GB200", 80.0, 1250.0, 2500.0, 2500.0, 8000.0, _GB200, fp8=5000.0)),
    (r"B200", _peaks("B200", 75.0, 1125.0, 2250.0, 2250.0, 8000.0, _B200, fp8=4500.0)),
    (
        r"GH200 (144G|HBM3e)",
        _peaks("GH200 HBM3e", 66.9, 494.7, 989.4, 989.4, 4900.0, _GH200, fp8=1979.0),
    ),
    (r"GH200", _peaks("GH200 HBM3", 66.9, 494.7, 989.4, 989.4, 4000.0, _GH200, fp8=1979.0)),
    (r"H200 NVL", _peaks("H200 NVL", 60.0, 417.5, 835.5, 835.5, 4800.0, _H200, fp8=1670.5)),
    (r"H200", _peaks("H200 SXM", 66.9, 494.7, 989.4, 989.4, 4800.0, _H200, fp8=1979.0)),
    (r"H100 NVL", _peaks("H100 NVL", 60.0, 417.5, 835.5, 835.5, 3938.0, _H100, fp8=1670.5)),
    (r"H100 PCIe", _peaks("H100 PCIe", 51.2, 378.0, 756.0, 756.0, 2039.0, _H100, fp8=1513.0)),
    (r"H100", _peaks("H100 SXM", 66.9, 494.7, 989.4, 989.4, 3352.0, _H100, fp8=1979.0)),
    (r"A100.*80GB PCIe", _peaks("A100 80GB PCIe", 19.5, 156.0, 312.0, 312.0, 1935.0, _A100)),
    (r"A100.*80GB", _peaks("A100 80GB", 19.5, 156.0, 312.0, 312.0, 2039.0, _A100)),
    (r"A100", _peaks("A100 40GB", 19.5, 156.0, 312.0, 312.0, 1555.0, _A100)),
    (r"V100[- ]SXM2", _peaks("V100 SXM2", 15.7, None, None, 125.0, 900.0, _NVIDIA_DENSE)),
    (r"V100[- ]PCI[Ee]", _peaks("V100 PCIe", 14.0, None, None, 112.0, 900.0, _NVIDIA_DENSE)),
    (r"\bL40S\b", _peaks("L40S", 91.6, 183.0, 362.0, 362.0, 864.0, _NVIDIA, fp8=733.0)),
    (r"\bL4\b", _peaks("L4", 30.3, 60.0, 121.0, 121.0, 300.0, _NVIDIA, fp8=242.5)),
    (r"\bA10$", _peaks("A10", 31.2, 62.5, 125.0, 125.0, 600.0, _NVIDIA)),
    (r"\bT4\b", _peaks("T4", 8.1, None, None, 65.0, 320.0, "NVIDIA T4 product brief")),
    (r"RTX 6000 Ada", _peaks("RTX 6000 Ada", 91.1, 182.1, 364.2, 364.2, 960.0, _NVIDIA, fp8=728.5)),
    (r"RTX A6000", _peaks("RTX A6000", 38.7, 77.4, 154.8, 154.8, 768.0, _NVIDIA)),
    # To the name's end: a "Laptop GPU", "SUPER" or "Ti" is another chip.
    (r"RTX 5090$", _peaks("RTX 5090", 104.8, 104.8, 209.5, 209.5, 1792.0, _BLACKWELL, fp8=419.0)),
    (r"RTX 5080$", _peaks("RTX 5080", 56.3, 56.3, 112.6, 112.6, 960.0, _BLACKWELL)),
    (r"RTX 4090$", _peaks("RTX 4090", 82.6, 82.6, 165.2, 165.2, 1008.0, _ADA, fp8=330.3)),
    (r"RTX 4080$", _peaks("RTX 4080", 48.7, 48.7, 97.5, 97.5, 716.8, _ADA)),
    (r"RTX 3090$", _peaks("RTX 3090", 35.6, 35.6, 71.0, 71.0, 936.0, _AMPERE)),
    (r"MI355X", _peaks("MI355X", 157.3, None, 2516.6, 2516.6, 8000.0, _AMD, fp8=5033.2)),
    (r"MI350X", _peaks("MI350X", 144.2, None, 2306.9, 2306.9, 8000.0, _AMD, fp8=4613.7)),
    (r"MI325X", _peaks("MI325X", 163.4, 653.7, 1307.4, 1307.4, 6000.0, _AMD, fp8=2614.9)),
    (r"MI300X", _peaks("MI300X", 163.4, 653.7, 1307.4, 1307.4, 5300.0, _AMD, fp8=2614.9)),
    (r"MI300A", _peaks("MI300A", 122.6, 490.3, 980.6, 980.6, 5300.0, _AMD, fp8=1961.2)),
    # The driver's name of an MI250, and rocprof-compute the whole series.
    (
        r"MI250X / MI250|\bMI200\b",
        _peaks("MI200 series, one die", 47.9, None, 191.5, 191.5, 1638.4, _MI200),
    ),
    (
        r"MI250X",
        _peaks("MI250X, one of its two dies", 47.9, None, 191.5, 191.5, 1638.4,
               _AMD.format("MI250X") + _HALVED),
    ),
    (
        r"MI250",
        _peaks("MI250, one of its two dies", 45.3, None, 181.0, 181.0, 1638.4,
               _AMD.format("MI250") + _HALVED),
    ),
    (r"MI210", _peaks("MI210", 45.3, None, 181.0, 181.0, 1638.4, _AMD)),
    (r"MI100", _peaks("MI100", 46.1, None, 92.3, 184.6, 1228.8, _AMD)),
    (r"RX 9070 XT$", _peaks("RX 9070 XT", 48.7, None, 194.6, 194.6, 640.0, _RADEON)),
    (r"RX 7900 XTX$", _peaks("RX 7900 XTX", 61.4, None, 122.8, 122.8, 960.0, _RADEON)),
    (r"RX 7900 XT$", _peaks("RX 7900 XT", 51.6, None, 103.2, 103.2, 800.0, _RADEON)),
)
# fmt: on


def find_peaks(device_name: str) -> Peaks | None:
    """The data-sheet limits of a chip, or None for one that is not listed and for a slice of one
    (MIG): no guess is made."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peaks for pattern, peaks in _CHIPS if re.search(pattern, device_name)), None)


def names() -> list[str]:
    """The listed chips, by the names that their tables use."""
    return [peaks.chip for _, peaks in _CHIPS]
