"""The roofline lab's parser, pictures and scripts: what is counted is what ncu wrote, what was not
collected is said, and the figures in words are those in the picture."""

import csv
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import checked, red, with_answers
from test_lab_profilers import LabMachine
from test_profilers_amd import (
    ADD,
    COUNTERS,
    GEMM,
    KERNEL_TRACE,
    WIDE,
    count,
    dispatch,
    wide_row,
    write_run,
    write_workload,
)
from test_profilers_nvidia import BF16, NCU_DETAILS, NCU_RAW, READ, TIME, WRITTEN, raw_page, sass

from labs.cifar10_roofline.roofline import parse_ncu_csv, plot_roofline
from workshop.profilers import ncu
from workshop.roofline import hierarchy
from workshop.roofline.model import Roofline
from workshop.show import roofline_chart
from workshop.versions import ROOT

FOLDER = ROOT / "labs/cifar10_roofline"
PRODUCTS = 3 * 2 * 2048 * 1024 * 4096
"""Operations of the three products in NCU_RAW."""
SEEDS = (
    *("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    *("dram__throughput.avg.pct_of_peak_sustained_elapsed", TIME),
    *map(sass, ("fadd", "fmul", "ffma")),
    *(READ, WRITTEN),
)
"""The eight metrics of the public guide."""
L2, L1 = ncu.CACHES["L2"], ncu.CACHES["L1"]
UNITS = {TIME: "ns", READ: "byte", WRITTEN: "byte", L2: "byte", L1: "byte", BF16: ""} | {
    sass(op): "inst" for op in ("fadd", "fmul", "ffma", "hfma", "dadd")
}
PRODUCT = {"Kernel Name": "my_gemm", TIME: "1000", READ: "600", WRITTEN: "400", L2: "4000",
           L1: "8,000", sass("fadd"): "0", sass("fmul"): "0", sass("ffma"): "0",
           BF16: "64,000"}  # fmt: skip
SUM = {"Kernel Name": "my_sum", TIME: "3000", READ: "2000", WRITTEN: "1000", L2: "3000",
       L1: "3000", sass("fadd"): "100", sass("fmul"): "10", sass("ffma"): "20", sass("hfma"): "5",
       sass("dadd"): "7", BF16: "0"}  # fmt: skip


def without(path: Path, keep: set[str]) -> str:
    """A recorded raw page with no other metrics than these, as a run that collected less has it."""
    rows = list(csv.reader(path.open(newline="")))
    kept = [i for i, name in enumerate(rows[0]) if "__" not in name or name in keep]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([row[i] for i in kept] for row in rows)
    return text.getvalue()


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """A report with bytes at all levels, of two launches of one kernel and one of another."""
    path = tmp_path / "report.csv"
    path.write_text(raw_page(UNITS, PRODUCT, PRODUCT, SUM))
    return path


# --- the parser ----------------------------------------------------------------------------------


def parsed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = parse_ncu_csv.main([str(word) for word in words])
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("page", [NCU_RAW, NCU_DETAILS], ids=["raw", "details"])
def test_an_h200_s_report(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "summary.txt"
    status, printed, _ = parsed(capsys, page, "--label", "mine", "--out", out)
    assert status == 0 and printed == f"{out.read_text()}Written: {out}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"summary.txt"}
    fields = dict(
        line.strip().split(": ", 1) for line in out.read_text().splitlines() if ": " in line
    )
    assert fields["label"] == "mine"
    assert fields["kernels"] == "15 launches of 12 kernels"
    assert float(fields["BF16 tensor"]) == pytest.approx(PRODUCTS, rel=1e-5)
    flops, moved = float(fields["FLOPs"]), float(fields["bytes, DRAM"])
    milliseconds = float(fields["time"].split()[0])
    kinds = sum(float(fields[kind]) for kind in ("FP32", "FP16/BF16", "BF16 tensor"))
    assert flops == pytest.approx(kinds, rel=1e-4)
    assert float(fields["AI, DRAM"].split()[0]) == pytest.approx(flops / moved, rel=1e-4)
    assert float(fields["GFLOP/s"]) == pytest.approx(flops / milliseconds / 1e6, rel=1e-4)
    assert milliseconds == pytest.approx(0.18608, rel=2e-3)
    assert "L2 and L1 were not collected" in printed
    assert printed.count("nvjet") == 3 and "tensor cores' work is not in" not in printed


def test_the_guide_s_eight_metrics_miss_the_products(tmp_path, capsys) -> None:
    page = tmp_path / "report.csv"
    page.write_text(without(NCU_RAW, set(SEEDS)))
    status, printed, _ = parsed(capsys, page, "--flops", PRODUCTS)
    assert status == 0
    assert "the tensor cores' work is not in these metrics" in printed
    assert "FLOPs: 3.78891e+08" in printed and "label: report" in printed
    assert "SM throughput: 4" in printed and "DRAM throughput: 2" in printed
    assert "counted -99.26%" in printed and "differ by more than 2%" in printed


# --- the pictures --------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Roofline]:
    """The rooflines that are drawn."""
    found: list[Roofline] = []
    draw = roofline_chart.draw

    def noted(roofline: Roofline, target: Path, **more: Any) -> None:
        found.append(roofline)
        draw(roofline, target, **more)

    monkeypatch.setattr(roofline_chart, "draw", noted)
    return found


def plotted(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = plot_roofline.main([str(word) for word in words])
    return (status, *capsys.readouterr())


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


GUIDE = "--ai 15.624057 --gflops 1466.556 --peak-compute 30.0 --peak-bw 300.0".split()


def test_the_guide_s_figures(tmp_path, drawn, capsys) -> None:
    out = tmp_path / "a folder" / "resnet18_bs128_L4.png"
    status, printed, _ = plotted(capsys, *GUIDE, "--label", "resnet18_bs128_L4", "--out", out)
    assert status == 0 and size(out) == (roofline_chart.WIDTH, roofline_chart.HEIGHT)
    frame = roofline_chart.view(drawn[0])
    (mark,) = roofline_chart.marks(drawn[0], frame)
    assert (mark.x, mark.y, mark.point.label) == (
        pytest.approx(15.624057), pytest.approx(1466.556e9), "resnet18_bs128_L4"
    )  # fmt: skip
    memory, compute = roofline_chart.lines(drawn[0], frame)
    assert memory.end == compute.start == (100, 30e12)  # the ridge
    assert "30 TFLOP/s / 300 GB/s = 100 FLOP/byte; 15.6 lies left of it, where memory" in printed
    assert "the roof there: 4.69 TFLOP/s; 1.47 TFLOP/s is 31% of it" in printed
    assert "93.9 of 300 GB/s" in printed and f"Written: {out}" in printed


def test_every_kernel_at_every_level(caches, tmp_path, drawn, capsys) -> None:
    peaks = ("--peak-compute", 0.5, "--peak-bw", 2, "--peak-l2", 9, "--peak-l1", 20)
    out = tmp_path / "a.png"
    status, printed, error = plotted(
        capsys, "--report", caches, "--label", "all", *peaks, "--out", out
    )
    assert (status, error, size(out)) == (0, "", (roofline_chart.WIDTH, roofline_chart.HEIGHT))
    points = {(point.label, point.level): point for point in drawn[0].points}
    intensities = {key: point.intensity for key, point in points.items()}
    total = 128_000 + 150 + 20 + 7
    assert intensities == {
        ("all", "memory"): pytest.approx(total / 5000),
        ("my_sum", "memory"): pytest.approx(177 / 3000),
        ("my_gemm", "memory"): pytest.approx(64),
        ("all, L2", "L2"): pytest.approx(total / 11_000),
        ("my_sum, L2", "L2"): pytest.approx(177 / 3000),
        ("my_gemm, L2", "L2"): pytest.approx(16),
        ("all, L1", "L1"): pytest.approx(total / 19_000),
        ("my_sum, L1", "L1"): pytest.approx(177 / 3000),
        ("my_gemm, L1", "L1"): pytest.approx(8),
    }
    gemm, gemm_l2 = points["my_gemm", "memory"], points["my_gemm, L2", "L2"]
    assert (gemm.precision, points["my_sum", "memory"].precision) == ("bf16", "fp32")
    assert gemm.flops_per_s == gemm_l2.flops_per_s == pytest.approx(64e9)
    roof, roof_l2 = drawn[0].roof(gemm), drawn[0].roof(gemm_l2)
    assert roof and roof_l2 and (roof.name, roof_l2.name) == ("memory", "L2")
    marks = roofline_chart.marks(drawn[0], roofline_chart.view(drawn[0]))
    markers = {mark.point.level: mark.marker[0] for mark in marks}
    assert markers == {"memory": "o", "L2": "s", "L1": "D"}
    areas = {mark.point.label: mark.area for mark in marks}
    assert areas["my_sum"] > areas["my_gemm"] > areas["my_gemm, L2"] == areas["my_sum, L1"]
    assert "my_gemm: memory roof: 1 of 2 GB/s, 50%" in printed
    assert "my_gemm, L2: L2 roof: 4 of 9 GB/s, 44%" in printed
    assert "IMPLAUSIBLE" not in printed


def test_amd_s_profiles(tmp_path, drawn, capsys) -> None:
    workload = write_workload(
        tmp_path / "w" / "MI210",
        pmc_perf=(WIDE, [wide_row(0, 0, 100, 10), wide_row(1, 500, 300, 30)]),
    )
    counted = [count(GEMM, "WRITE_SIZE", 2.0, 1), count(GEMM, "FETCH_SIZE", 6.0, 1),
               count(GEMM, "SQ_INSTS_VALU_MFMA_MOPS_BF16", 64.0, 1)]  # fmt: skip
    run = write_run(
        tmp_path / "run",
        kernel_trace=(KERNEL_TRACE, [dispatch(GEMM, 0, 100)]),
        counter_collection=(COUNTERS, counted),
    )
    for path, flops, moved in (
        (workload, 2 * 64 * 40, 2 * (64 + 512 + 448)),
        (run, 512 * 64, 8 * 1024),
    ):
        status, printed, error = plotted(capsys, "--report", path, "--out", tmp_path / "a.png")
        assert (status, error) == (0, "")
        whole, kernel = drawn[-1].points
        assert (whole.category, kernel.label) == (hierarchy.WHOLE, kernel.label)
        assert whole.intensity == kernel.intensity == pytest.approx(flops / moved), printed
        assert whole.flops_per_s == pytest.approx(kernel.flops_per_s)
        assert whole.bytes_per_s == pytest.approx(kernel.bytes_per_s)
    assert ADD.split("<")[0].split()[-1] in drawn[0].points[1].label


@pytest.mark.parametrize(
    ("words", "message"),
    [("", "give --ai and --gflops, or --report alone"), ("--report {missing}", "no such file")],
)
def test_what_cannot_be_drawn(words, message, tmp_path, capsys) -> None:
    out, missing = tmp_path / "a.png", tmp_path / "missing.csv"
    status, _, error = plotted(capsys, *words.format(missing=missing).split(), "--out", out)
    assert status == 2 and message in error and len(error.splitlines()) == 1
    assert not out.exists()


# --- the scripts ---------------------------------------------------------------------------------


def test_ncu_s_command_is_the_guide_s_corrected(tmp_path: Path) -> None:
    collect, export = LabMachine(tmp_path, FOLDER / "train.py").dry_run("ncu")
    metrics = collect[collect.index("--metrics") + 1].split(",")
    assert len(metrics) == len(set(metrics)) and {*SEEDS, L2, L1, BF16} < set(metrics)
    option = dict(itertools.pairwise(collect))
    assert (option["--profile-from-start"], option["--clock-control"]) == ("off", "none")
    assert not [word for word in collect if word.startswith("--nvtx")]
    assert option["--export"] == export[export.index("--import") + 1]
    assert export[export.index("--csv") :][:3] == ["--csv", "--page", "raw"]


# --- exercises -----------------------------------------------------------------------------------


def test_a_kernel_is_named_as_the_table_the_picture_or_the_source_has_it(tmp_path: Path) -> None:
    for answer in ("engines_prec...piled::nchwToNhwcKernel", "nchwToNhwcKernel"):
        answers = with_answers("roofline_2_first", tmp_path, longest=answer, first=answer)
        assert not red(checked("roofline_2_first", answers=answers))
