"""The roofline: its rule, what it makes of real files, and the tool as it is typed."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from hypothesis import given
from hypothesis import strategies as st

from analysis_tools import roofline_analysis
from workshop import records, versions
from workshop.compare.rows import ordinary, size_of
from workshop.profilers import kernel_file
from workshop.profilers.load import load as load_table
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import RunResult
from workshop.roofline import ceilings
from workshop.roofline import inputs as roofline_inputs
from workshop.roofline import model as roofline
from workshop.roofline.model import COMPUTE, DATA_SHEET, MEASURED, MEMORY, Ceiling, Point, Roofline
from workshop.run import flops
from workshop.show import roofline_chart

ROOT = Path(__file__).parents[1]
NCU = ROOT / "tests/fixtures/profilers/ncu/ncu_raw_h200.csv"
H200 = ROOT / "results/reference/nvidia_h200"
MEDIUM = H200 / "runs" / "20261129-191803-29d68a.jsonl"
HOSTILE = "\x1b[31m[bold]<b>evil</b>[/bold]<script>alert(1)</script>$x^2$"


@pytest.fixture
def analyse(tmp_path, capsys) -> Callable[..., Any]:
    """Runs the tool on arguments; its exit status, what it printed, in one line, and its JSON."""

    def run(*words: object) -> tuple[int, str, dict[str, Any]]:
        folder = tmp_path / "out"
        kept = ["--results", tmp_path / "results", "--output-dir", folder]
        status = roofline_analysis.main([str(word) for word in (*words, *kept)])
        printed = " ".join("".join(capsys.readouterr()).split())  # wrapped at the terminal's width
        file = folder / "roofline.json"
        return status, printed, json.loads(file.read_text()) if file.is_file() else {}

    return run


def with_ceilings(line: Roofline) -> Roofline:
    ceilings.attach(line)
    return line


def measured(day: str, copy_gbs: float, **tflops: float) -> ceilings.Measurement:
    return ceilings.Measurement({"name": "NVIDIA X9"}, {"torch": "2"}, day, copy_gbs, tflops)


RATES = st.floats(1e6, 1e16)


@given(flops_per_s=RATES, bytes_per_s=RATES, peak=RATES, bandwidth=RATES)
def test_the_share_is_that_of_the_lower_roof_at_its_intensity(
    flops_per_s, bytes_per_s, peak, bandwidth
) -> None:
    point = Point("k", "GEMM", "bf16", flops_per_s, bytes_per_s)
    line = Roofline("", None, [point], [
        Ceiling(MEMORY, "memory", bandwidth, DATA_SHEET, ""),
        Ceiling(MEMORY, "L2", bandwidth * 10, DATA_SHEET, ""),
        Ceiling(COMPUTE, "bf16", peak, DATA_SHEET, ""),
        Ceiling(COMPUTE, "fp32", peak / 10, DATA_SHEET, ""),
    ])  # fmt: skip
    roof = line.roof(point)
    assert roof is not None and point.intensity is not None
    attainable = min(peak, point.intensity * bandwidth)
    assert roofline.share(point, roof) == pytest.approx(flops_per_s / attainable)
    if point.intensity < 0.99 * peak / bandwidth:
        assert roof.kind == MEMORY
    if point.intensity > 1.01 * peak / bandwidth:
        assert roof.kind == COMPUTE


@pytest.mark.parametrize(
    ("flops_per_s", "bytes_per_s", "message"),
    [
        (1e12, 4.1e12, "memory roof: 4,100 of 4,800 GB/s, 85%; 1 of 1,000 TFLOP/s (bf16), 0%"),
        (700e12, 1e12, "compute roof: 700 of 1,000 TFLOP/s (bf16), 70% (88% of the measured 800); "
         "1,000 of 4,800 GB/s, 21%"),
        (None, 4.1e12, "memory roof: 4,100 of 4,800 GB/s, 85%"),
        (700e12, None, "compute roof: 700 of 1,000 TFLOP/s (bf16), 70% (88% of the measured 800)"),
        (0.0, 0.0, "memory roof: 0 of 4,800 GB/s, 0%"),
    ],
)  # fmt: skip
def test_the_words(flops_per_s, bytes_per_s, message) -> None:
    point = Point("k", "GEMM", "bf16", flops_per_s, bytes_per_s, seconds=1e-3, calls=10)
    line = Roofline("", None, [point], [
        Ceiling(MEMORY, "memory", 4.8e12, DATA_SHEET, ""),
        Ceiling(COMPUTE, "bf16", 1e15, DATA_SHEET, ""),
        Ceiling(COMPUTE, "bf16", 800e12, MEASURED, ""),
    ])  # fmt: skip
    assert roofline.in_words(line, point) == f"{message}; a call takes 100 µs"
    assert roofline.flags(line) == []


@pytest.mark.parametrize(
    ("flops_per_s", "bytes_per_s", "at_least", "drawn"),
    [
        (1e12, 1e12, False, (None, 1.0, 0)),
        (1e12, 1e12, True, (0.2, 1.0, 0)),  # a line from the memory's roof to its least bytes
        (2e13, 1e12, True, (4.0, 20.0, 0)),
        (1e12, None, False, (0.2, math.inf, 1)),  # without an end
        (None, 1e12, False, None),
        (None, 1e12, True, None),
        (0.0, 1e12, False, (None, 0.0, -1)),  # counted: no operations
    ],
)
def test_a_point_is_drawn_where_its_intensity_was_measured_and_else_a_line(
    flops_per_s, bytes_per_s, at_least, drawn
) -> None:
    point = Point("k", "GEMM", "bf16", flops_per_s, bytes_per_s, at_least=at_least)
    line = Roofline("", None, [point], [
        Ceiling(MEMORY, "memory", 5e12, DATA_SHEET, ""),
        Ceiling(COMPUTE, "bf16", 1e15, DATA_SHEET, ""),
    ])  # fmt: skip
    frame = roofline_chart.view(line)
    left, right = frame.x
    found = [(m.start, m.x, m.edge) for m in roofline_chart.marks(line, frame)]
    if drawn is None:
        assert not found
        return
    (start, x, edge), (at, end, side) = drawn, found[0]
    assert side == edge and at == (start and pytest.approx(start))
    assert end == pytest.approx({0: x, 1: right / 2, -1: left * 1.12}[edge])
    assert left <= (at or end) <= end <= right


def test_a_picture_of_steps_names_them_and_has_no_point(tmp_path) -> None:
    line = with_ceilings(roofline_inputs.load([MEDIUM]))
    assert line.heading == "NVIDIA H200: medium: 16 x 512 tokens, bf16"
    drawn = roofline_chart.picture(line, 12)
    (axes,) = drawn.axes
    assert not axes.collections  # a point is one
    dotted = [one for one in axes.lines if one.get_linestyle() == ":"]
    steps = [point for point in line.points if point.category == "step"]
    assert sorted(one.get_ydata()[0] for one in dotted) == sorted(p.flops_per_s for p in steps)
    words = [text.get_text() for text in drawn.texts]
    assert {line.heading, *(point.label for point in steps)} <= set(words)
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    heights = sorted(text.get_position()[1] for text in numbers)
    assert all(b - a >= 17.9 for a, b in itertools.pairwise(heights))


def test_given_ceilings_come_first_and_the_files_are_written(analyse, tmp_path) -> None:
    status, printed, content = analyse(NCU, "--peak-compute", 1000, "--peak-bw", 3000)
    assert status == 0
    product, *_, copy = sorted(content["points"], key=lambda point: -point["gflops"])
    assert (product["roof"], copy["roof"]) == ("compute", "memory")
    assert product["of_roof"] == pytest.approx(product["gflops"] / 1e6)
    assert copy["of_roof"] == pytest.approx(copy["gbs"] / 3000)
    assert "of 1,000 TFLOP/s (bf16)" in printed and "of 3,000 GB/s" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"roofline.json", "roofline.png"}


def test_a_step_is_at_the_rate_of_its_operations_over_its_median() -> None:
    run = next(run for run in records.load_runs(MEDIUM, RunResult) if run.version == "v1")
    line = with_ceilings(roofline_inputs.load([MEDIUM], [run]))
    step, forward, backward, adamw = line.points
    sizes = flops.Sizes(1000, 1024, 4096, 12, 16, 8)
    work, parameters = flops.step_flops(sizes, 16, 512), flops.parameter_count(sizes)
    median_s = sorted(run.step_ms)[len(run.step_ms) // 2] / 1e3
    assert step.flops_per_s == pytest.approx(work.total / median_s, rel=0.01)
    assert step.intensity == pytest.approx(work.total / (40 * parameters))
    assert backward.intensity == pytest.approx(work.backward / (8 * parameters))
    assert forward.intensity == pytest.approx(work.forward / (4 * parameters))
    assert adamw.flops_per_s is None and adamw.bytes_per_s == pytest.approx(
        28 * parameters / adamw.seconds if adamw.seconds else 0
    )
    assert all(point.at_least for point in line.points)
    assert any("lower bound" in note and "Activations" in note for note in line.notes)
    rate = 40 * parameters / median_s / 1e9
    assert f"at least {rate:.0f} of 4,800 GB/s" in roofline.in_words(line, step)


def test_the_reference_ladder(analyse) -> None:
    status, printed, content = analyse(H200, "--config", "medium", "--precision", "bf16")
    assert status == 0 and content["device"] == "NVIDIA H200"
    steps = [point for point in content["points"] if point["category"] == "step"]
    labels = [point["label"] for point in steps]
    assert set(labels) >= {*versions.VERSIONS, "hf"}
    assert labels == [key for key in versions.ALL if key in labels]
    assert len({round(point["flop_per_byte"]) for point in steps}) == 1
    rates = {point["label"]: point["gflops"] for point in steps}
    assert rates["v1"] < rates["v2"] < min(rates["v3"], rates["v4"])
    assert re.search(r"measured 7\d\d", printed) and "IMPLAUSIBLE" not in printed
    everything = analyse(H200)[2]
    assert {point["category"] for point in everything["points"]} == {"step"}
    stored = ordinary(records.load_folder(H200, RunResult))
    assert len(everything["points"]) == len({(r.version, size_of(r), r.precision) for r in stored})


def test_a_figure_above_the_chip_is_flagged_and_drawn(analyse, tmp_path) -> None:
    record = stored_runs.reference("v1", "medium")
    for name in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms"):
        record[name] = [value / 20 for value in record[name]]
    path = tmp_path / "fast.jsonl"
    path.write_text(stored_runs.lines(record))
    status, printed, content = analyse(path)
    assert status == 0 and "IMPLAUSIBLE: v1 forward: " in printed
    assert "more than the chip's bf16 989 TFLOP/s" in printed
    flagged = {point["label"]: point["implausible"] for point in content["points"]}
    assert flagged == {
        "v1": True, "v1 forward": True, "v1 backward": True, "v1 AdamW": True
    }  # fmt: skip
    assert len(content["implausible"]) == 4
    assert all("above what the chip can do" in sentence for sentence in content["sentences"])


def test_kernels_that_ncu_counted(analyse) -> None:
    status, printed, content = analyse(NCU)
    assert status == 0
    first = content["points"][0]
    table = load_table(NCU)
    kernel = table.kernels[0]
    assert kernel.flops and kernel.bytes
    assert first["gflops"] == pytest.approx(kernel.flops / kernel.total_ns)
    assert first["flop_per_byte"] == pytest.approx(kernel.flops / kernel.bytes)
    assert first["share"] == pytest.approx(table.share(kernel))
    roofs = {point["label"]: (point["roof"], point["precision"]) for point in content["points"]}
    assert roofs["nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT"] == ("compute", "bf16")
    assert roofs["vectorized_elementwise_kernel<CUDAFunctor_add>"] == ("memory", "fp32")
    assert "; a call takes 26.8 µs" in printed
    assert "--precision says otherwise" in printed
    assert "--precision" not in analyse(NCU, "--precision", "bf16")[1]


def test_an_unknown_chip_has_achieved_figures_until_it_is_measured(analyse, tmp_path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(NCU.read_text().replace("NVIDIA H200", "NVIDIA X9"))
    status, printed, content = analyse(path)
    assert status == 0 and content["ceilings"] == []
    assert "641 TFLOP/s; no ceiling is known for it" in printed
    assert "--measure, on that machine, measures them" in printed
    ceilings.save(measured("2026-11-21T00:00:00", 4e3, bf16=700.0, fp32=50.0), tmp_path / "results")
    status, printed, content = analyse(path)
    assert {ceiling["origin"] for ceiling in content["ceilings"]} == {MEASURED}
    assert "compute roof: 641 of 700 TFLOP/s (bf16), 92%; " in printed
    assert "no data sheet of NVIDIA X9 is listed" in printed and "IMPLAUSIBLE" not in printed


def test_rocprof_computes_caches_are_ceilings(tmp_path) -> None:
    (tmp_path / "pmc_perf.csv").write_text(
        "Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp,FETCH_SIZE,WRITE_SIZE,"
        "SQ_INSTS_VALU_FMA_F32\n0,0,add,5000,6000,500,500,100\n"
    )
    (tmp_path / "roofline.csv").write_text(
        "device,HBMBw,HBMBwLow,hbmBwHigh,L2Bw,L2BwLow,L2BwHigh,FP32Flops,FP32FlopsLow,"
        "FP32FlopsHigh,MFMABF16Flops,MFMABF16FlopsLow,MFMABF16FlopsHigh,MFMAI8Ops,MFMAI8OpsLow,"
        "MFMAI8OpsHigh\n0,1389,1388,1390,5018,5015,5021,20941,20881,21002,170483,1,2,166402,1,2\n"
    )
    line = roofline_inputs.load([tmp_path])
    found = {(c.name, round(c.rate / 1e9)) for c in line.ceilings if c.origin == MEASURED}
    assert found == {("memory", 1389), ("L2", 5018), ("fp32 vector", 20941), ("bf16", 170483)}
    view = roofline_chart.view(line)
    thin = [one.text for one in roofline_chart.lines(line, view) if not one.is_main]
    assert thin == ["L2 5,018 GB/s"]
    assert len(roofline_inputs.load([NCU, tmp_path / "roofline.csv"]).ceilings) == 4


def test_v3s_benchmark(analyse) -> None:
    status, _, content = analyse(H200 / "kernels")
    assert status == 0
    points = {point["label"]: point for point in content["points"]}
    swiglu = points["swiglu 16384 x 11008, backward"]
    assert (swiglu["roof"], swiglu["gflops"], swiglu["category"]) == ("memory", None, "elementwise")
    assert swiglu["of_roof"] == pytest.approx(0.908, abs=0.01)
    attention = points["flash_attention 1 x 16384, H16 K8 D64, forward"]
    assert (attention["roof"], attention["gbs"]) == ("compute", None)
    assert all("Liger" not in label for label in points)


def test_names_from_files_are_text(analyse, tmp_path) -> None:
    kernels = [Kernel(HOSTILE, "GEMM", 1, 1e6, bytes=1e9, flops=1e12)]
    table = KernelTable(NCU, "ncu", kernels, device=HOSTILE)
    kernel_file.write(table, tmp_path / "profile")
    status, printed, _ = analyse(tmp_path / "profile")
    assert status == 0 and "\x1b" not in printed and "[bold]" in printed


def test_the_newest_measurement_counts(tmp_path) -> None:
    for day, rate in (("2026-11-02", 2.0), ("2026-11-03", 3.0), ("2026-11-01", 1.0)):
        path = ceilings.save(measured(f"{day}T00:00:00", 100 * rate, bf16=rate), tmp_path)
        path.rename(path.with_name(f"{rate}.json" if rate < 3 else "0.json"))
    assert {c.rate for c in ceilings.find("NVIDIA X9", None, tmp_path, [])} == {3e11, 3e12}
    limits = {c.name: c.rate for c in ceilings.from_data_sheet("NVIDIA H200")}
    with_fp8 = {c.name: c.rate for c in ceilings.from_data_sheet("NVIDIA H200", {"fp8"})}
    assert with_fp8 == limits | {"fp8": 1979e12} != limits
    of_benchmark = ceilings.find("NVIDIA H200", None, None, [])
    found = {ceiling.name: ceiling.rate for ceiling in of_benchmark}
    assert {"memory", "bf16"} <= found.keys()
    assert all(0.4 * limits[name] < rate < limits[name] for name, rate in found.items())
