"""The table of chips: which name finds which data sheet, and that its figures make sense."""

import pytest

from workshop.run import chips

NAMES = {
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA GH200 480GB": "GH200 HBM3",
    "NVIDIA GH200 144G HBM3e": "GH200 HBM3e",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA L40S": "L40S",
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "AMD Instinct MI300X": "MI300X",
    "MI300X_A1 (gfx942)": "MI300X",
    "AMD Instinct MI250X": "MI250X, one of its two dies",
    "AMD Instinct MI250": "MI250, one of its two dies",
    # The driver's name for one of the two, and rocprof-compute's for the series.
    "AMD Instinct MI250X / MI250": "MI200 series, one die",
    "MI200 (gfx90a)": "MI200 series, one die",
    "AMD Radeon RX 7900 XTX": "RX 7900 XTX",
    "AMD Radeon RX 7900 XT": "RX 7900 XT",
}
NOT_LISTED = (
    "NVIDIA H20",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA L40",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "AMD Radeon RX 9070",
    "AMD EPYC 9654 96-Core Processor",
    "",
)


@pytest.mark.parametrize(("name", "chip"), NAMES.items())
def test_a_name_finds_its_chip(name, chip) -> None:
    peaks = chips.find_peaks(name)
    assert peaks is not None and peaks.chip == chip


@pytest.mark.parametrize("name", NOT_LISTED)
def test_no_guess_is_made(name) -> None:
    assert chips.find_peaks(name) is None


@pytest.mark.parametrize("chip", chips.names())
def test_a_data_sheet_makes_sense(chip) -> None:
    peaks = chips.find_peaks(chip)
    assert peaks is not None and peaks.chip == chip, "its own name must find it"
    rates = list(peaks.tflops.values())  # fp32 first
    assert rates == sorted(rates), "less precision is never slower"
    *rates, fp8, by_row = rates if "fp8" in peaks.tflops else [*rates, None, None]
    assert fp8 == by_row and (fp8 is None or 1.99 < fp8 / peaks.tflops["bf16"] < 2.03)
    assert rates[-1] / rates[0] <= 33
    assert 5 < peaks.tflops["fp32"] < 500 and 100 < peaks.bandwidth_gbs <= 8000
    # From 50 FLOP a byte on, every one of these chips is bound by arithmetic in some precision.
    assert 25 < rates[-1] * 1e3 / peaks.bandwidth_gbs < 500
    assert peaks.source and "{" not in peaks.source
    if chip.startswith(("MI", "RX")):  # xf32 came with MI300 and went with MI350
        assert ("tf32" in peaks.tflops) == chip.startswith(("MI300", "MI325"))
