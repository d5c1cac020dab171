"""ncu's and nsys's outputs: their numbers come out as written, and what is broken is named or left
out."""

import csv
import gzip
import io
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from workshop.errors import WorkshopError
from workshop.profilers import ncu, nsys
from workshop.profilers.show import hot_list
from workshop.profilers.table import HostCall, Kernel, KernelTable

FIXTURES = Path(__file__).parent / "fixtures" / "profilers"
NCU_RAW = FIXTURES / "ncu" / "ncu_raw_h200.csv"
NCU_DETAILS = FIXTURES / "ncu" / "ncu_details_h200.csv"


def kernel(table: KernelTable, part: str) -> Kernel:
    """The one kernel with this in its name."""
    (found,) = (kernel for kernel in table.kernels if part in kernel.name)
    return found


def rows_text(rows: Iterable[Iterable[object]], *, quote: int = csv.QUOTE_MINIMAL) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=quote, lineterminator="\n").writerows(rows)
    return text.getvalue()


Write = Callable[[str, str], Path]


# --- ncu -----------------------------------------------------------------------------------------

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"


def sass(op: str) -> str:
    return f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum"


def raw_page(units: dict[str, str], *launches: dict[str, str]) -> str:
    """A raw page with these metrics' units and the launches' values; "Kernel Name" may be one."""
    header = ["ID", "Process ID", "Process Name", "Kernel Name", *units]
    rows = [header, ["", "", "", "", *units.values()]]
    for number, launch in enumerate(launches):
        name = launch.get("Kernel Name", "some_kernel")
        rows.append([str(number), "7", "python3", name, *(launch.get(m, "") for m in units)])
    return rows_text(rows, quote=csv.QUOTE_ALL)


def test_ncu_raw_page_of_an_h200() -> None:
    """One step of x W -> silu -> sum and its backward: (2048 x 1024) by (1024 x 4096)."""
    table = ncu.read(NCU_RAW)
    assert (table.tool, table.device, table.warnings) == ("ncu", "NVIDIA H200", [])
    assert table.timeline is None
    assert (table.launches, table.total_ns) == (15, 186_080)
    products = [kernel for kernel in table.kernels if kernel.category == "GEMM"]
    assert [kernel.flops for kernel in products] == [2 * 2048 * 1024 * 4096] * 3
    assert [kernel.total_ns for kernel in products] == [26_816, 25_376, 24_352]
    assert products[0].bytes == 12_616_704 + 674_048
    silu = kernel(table, "silu_kernel")  # fadd + 2 ffma + 4 hfma of its 2048 x 4096 elements
    assert silu.flops == (1 + 2 * 10 + 4) * 2048 * 4096
    casts = kernel(table, "vectorized_elementwise_kernel<8, at::bfloat16_copy_kernel_cuda")
    assert (casts.calls, casts.total_ns, casts.min_ns, casts.max_ns) == (2, 12_800, 5_120, 7_680)
    assert casts.bytes == 16_782_336 + 28_160 + 8_393_728 + 0


def test_ncu_details_page_agrees_with_the_raw_page() -> None:
    """The details are rounded to three or four digits, in various units: us, Mbyte, Kbyte."""
    raw, details = ncu.read(NCU_RAW), ncu.read(NCU_DETAILS)
    assert {kernel.name for kernel in details.kernels} == {kernel.name for kernel in raw.kernels}
    for exact in raw.kernels:
        (rounded,) = (kernel for kernel in details.kernels if kernel.name == exact.name)
        assert (rounded.calls, rounded.category) == (exact.calls, exact.category)
        assert rounded.flops == exact.flops
        for field in ("total_ns", "min_ns", "max_ns", "bytes"):
            assert getattr(rounded, field) == pytest.approx(getattr(exact, field), rel=2e-3)


@pytest.mark.parametrize(
    ("counters", "flops"),
    [
        ({sass("fadd"): 1, sass("fmul"): 10, sass("ffma"): 100, BF16: 0}, 1 + 10 + 200),
        ({sass("hadd"): 1, sass("hmul"): 10, sass("hfma"): 100, BF16: 0}, 2 + 20 + 400),
        ({BF16: 64, sass("ffma"): 1}, 66),
        # Parts of a counter are in it already; without it they are all there is.
        ({BF16: 64, BF16.replace(".", "_sparsity_on."): 4, sass("fadd"): 1}, 65),
        ({BF16.replace(".", "_sparsity_on."): 4, BF16.replace(".", "_sparsity_off."): 60}, 64),
        ({"sm__ops_path_tensor_src_fp8.sum": 8, "sm__ops_path_tensor_src_fp8_dst_fp32.sum": 6}, 8),
        ({"sm__ops_path_tensor_src_tf32_dst_fp32.sum": 8, BF16: 1}, 9),
        # Integers; instructions, whose operations are unknown; an average.
        ({"sm__ops_path_tensor_src_int8.sum": 8, BF16: 0}, 0),
        ({"sm__inst_executed_pipe_tensor.sum": 8}, None),
        ({BF16.replace(".sum", ".avg"): 8}, None),
        # In a product the other units' would be a hundredth.
        ({sass("ffma"): 3}, None),
        ({BF16: "n/a"}, None),
    ],
)
def test_ncu_operations(write: Write, counters: dict[str, object], flops: float | None) -> None:
    units = {TIME: "ns"} | dict.fromkeys(counters, "inst")
    launch = {TIME: "5"} | {metric: str(value) for metric, value in counters.items()}
    (only,) = ncu.read(write("raw.csv", raw_page(units, launch))).kernels
    assert only.flops == flops


def test_ncu_occupancy_is_weighted_by_time(write: Write) -> None:
    warps = "sm__warps_active.avg.pct_of_peak_sustained_active"
    page = raw_page({TIME: "ns", warps: "%"}, {TIME: "30", warps: "10"}, {TIME: "10", warps: "50"})
    table = ncu.read(write("raw.csv", page))
    assert table.kernels[0].occupancy_ns == pytest.approx(30 * 0.1 + 10 * 0.5)
    shown = hot_list(table, 5)
    assert (shown.header[-1], shown.lines[0].cells[-1]) == ("active warps", "20%")


def test_ncu_on_blackwell(write: Write) -> None:
    """It has other names for the memory's traffic."""
    read, written = READ.replace("bytes", "bytes_op"), WRITTEN.replace("bytes", "bytes_op")
    units = {TIME: "ns", read: "byte", written: "Kbyte"}
    page = raw_page(units, {TIME: "5", read: "24", written: "1"})
    assert ncu.read(write("raw.csv", page)).kernels[0].bytes == 1024


def test_ncu_leaves_out_bad_rows_and_names_the_first(write: Write) -> None:
    units = {TIME: "ns", READ: "byte", WRITTEN: "byte"}
    page = raw_page(
        units,
        {TIME: "10", READ: "n/a", WRITTEN: "4"},
        {TIME: "n/a"},
        {TIME: "-3"},
        {TIME: "10", READ: "-1", WRITTEN: "4"},
        {TIME: "10", "Kernel Name": ""},
        {TIME: "20", READ: "1", WRITTEN: "4"},
    )
    before = 'a program\'s line\n"loss", 3.14\n==PROF== Connected to process 7\n\n'
    after = "==PROF== Disconnected from process 7\nbye\n" + page.splitlines()[2][:30]
    path = write("raw.csv", before + page + after)
    assert ncu.recognises(path)
    table = ncu.read(path)
    (only,) = table.kernels
    assert (only.calls, only.total_ns, only.bytes) == (2, 30, 5)  # not what is n/a in part
    assert table.warnings == [
        f"left out {path}, row 8: has no gpu__time_duration.sum (and 5 more rows)"
    ]


def test_ncu_sections_call_the_time_otherwise(write: Write) -> None:
    """`--set full` instead of --metrics; the rows of rules are longer than those of metrics."""
    header = ["ID", "Process ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit"]
    header += ["Metric Value", "Rule Name", "Rule Description"]
    start = ["0", "7", "some_gemm_kernel"]
    rows = [
        header,
        [*start, "GPU Speed Of Light Throughput", "DRAM Throughput", "%", "0.74", ""],
        [*start, "GPU Speed Of Light Throughput", "Duration", "us", "1,406.24", ""],
        [*start, "Occupancy", "Achieved Occupancy", "%", "25", ""],
        [*start, "SpeedOfLight", "", "", "", "Bottleneck", "This kernel could do better"],
        ["0", "8", *start[2:], "GPU Speed Of Light Throughput", "Duration", "ms", "1", ""],
    ]
    (only,) = ncu.read(write("details.csv", rows_text(rows, quote=csv.QUOTE_ALL))).kernels
    assert (only.calls, only.total_ns) == (2, pytest.approx(2_406_240))  # of two processes
    assert only.occupancy_ns == pytest.approx(0.25 * 1_406_240)


# --- nsys ----------------------------------------------------------------------------------------

KERN_SUM = ["Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Med (ns)", "Min (ns)"]
KERN_SUM += ["Max (ns)", "StdDev (ns)", "Name"]
TRACE = ["Start (ns)", "Duration (ns)", "CorrId", "GrdX", "GrdY", "GrdZ", "BlkX", "BlkY", "BlkZ"]
TRACE += ["Reg/Trd", "StcSMem (MB)", "DymSMem (MB)", "Bytes (MB)", "Throughput (MB/s)", "SrcMemKd"]
TRACE += ["DstMemKd", "Device", "Ctx", "GreenCtx", "Strm", "Name"]

Row = dict[str, object]


def report(columns: list[str], *rows: Row) -> str:
    """A report with these rows' fields, and dots for the others."""
    return rows_text([columns, *([row.get(column, ".") for column in columns] for row in rows)])


def kern_row(name: str, calls: int, total: float, least: float, most: float) -> Row:
    times = {"Total Time (ns)": total, "Min (ns)": least, "Max (ns)": most}
    return {"Name": name, "Instances": calls, **times}


def trace_row(name: str, start: int, duration: int) -> Row:
    times = {"Start (ns)": start, "Duration (ns)": duration}
    return {"Name": name, "Device": "NVIDIA H200 (0)", **times}


KERNELS = report(
    KERN_SUM,
    kern_row("my_gemm(float *, int)", 4, 4_000, 900, 1_100),
    kern_row("my_softmax", 1, 500, 500, 500),
)
COPIES = report(
    [*KERN_SUM[:2], "Count", *KERN_SUM[3:-1], "Operation"],
    {**kern_row("", 0, 300, 100, 200), "Count": 2, "Operation": "[CUDA memcpy Host-to-Device]"},
)
KERNEL_TRACE = report(
    TRACE,
    *(trace_row("my_gemm(float *, int)", 10_000 * i, t) for i, t in enumerate((900, 1_100))),
    trace_row("my_gemm(float *, int)", 10_500, 1_000),  # half of it beside the one before
    trace_row("my_gemm(float *, int)", 30_000, 1_000),
    trace_row("my_softmax", 31_000, 500),
    trace_row("[CUDA memcpy Host-to-Device]", 31_100, 100),
    trace_row("[CUDA memcpy Host-to-Device]", 32_000, 200),
)


def phase_rows(**times: int) -> str:
    columns = ["NVTX Range", "Style", "PID", "TID", "NVTX Inst", "Kern Inst", "Total Time (ns)"]
    return report(
        [*columns, "Kernel Name"],
        *({"NVTX Range": f":{name}", "Total Time (ns)": time} for name, time in times.items()),
    )


@pytest.mark.parametrize("end", [".csv", ".csv.gz"])
def test_nsys_reports_of_one_profile(end: str, write: Write, tmp_path: Path) -> None:
    def write_report(name: str, text: str) -> Path:
        path = write(f"rep_{name}{end}", text)
        if end.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
        return path

    kernels = write_report("cuda_gpu_kern_sum", KERNELS)
    write_report("cuda_gpu_mem_time_sum", COPIES)
    api = report(
        [*KERN_SUM[:2], "Num Calls", *KERN_SUM[3:]],
        {"Total Time (ns)": "7,500", "Num Calls": 5, "Name": "cudaLaunchKernel"},
        {"Total Time (ns)": 900, "Num Calls": 2, "Name": "cudaMemcpyAsync"},
    )
    write_report("cuda_api_sum", api)
    ranges = report(
        [*KERN_SUM[:-1], "Style", "Range"],
        {"Instances": 3, "Range": ":step"},
        {"Instances": 24, "Range": ":layers.0.mlp"},
    )
    write_report("nvtx_sum", ranges)
    phases = phase_rows(step=4500, forward=1500, backward=2500, optimizer=9)
    write_report("nvtx_kern_sum", phases)
    write_report("osrt_sum", api.replace("cudaLaunchKernel", "poll"))
    for path in (tmp_path, kernels):
        table = nsys.read(path)
        assert (table.tool, table.warnings, table.timeline) == ("nsys", [], None)
        gemm, softmax, copies = table.kernels
        assert gemm == Kernel("my_gemm(float *, int)", "GEMM", 4, 4_000, 900, 1_100)
        assert softmax == Kernel("my_softmax", "elementwise", 1, 500, 500, 500)
        assert copies == Kernel("[CUDA memcpy Host-to-Device]", "copy", 2, 300, 100, 200)
        assert table.host_calls == {
            "cudaLaunchKernel": HostCall(5, 7_500),
            "cudaMemcpyAsync": HostCall(2, 900),
        }
        assert table.steps == 3
        assert table.phases_ns == {"forward": 1500, "backward": 2500, "optimizer": 9}


def test_nsys_trace_has_the_timeline(write: Write, tmp_path: Path) -> None:
    sums = nsys.read(write("sums_cuda_gpu_kern_sum.csv", KERNELS))
    trace = nsys.read(write("rep_cuda_gpu_trace.csv", KERNEL_TRACE))
    assert trace.kernels[:2] == sums.kernels
    assert (trace.kernels[2].category, trace.kernels[2].total_ns) == ("copy", 300)
    assert trace.device == "NVIDIA H200"
    assert trace.timeline is not None and trace.timeline.span_ns == 32_200
    assert trace.timeline.busy_ns == 900 + 1_500 + 1_000 + 500 + 200
    # The sums are of the same calls: they must not be added to those of the trace.
    write("rep_cuda_gpu_kern_sum.csv", KERNELS)
    assert nsys.read(tmp_path / "rep_cuda_gpu_kern_sum.csv").kernels == trace.kernels


def test_nsys_other_units(write: Write) -> None:
    row = {
        "Name": "k",
        "Instances": 4,
        "Total Time (us)": "4.000",
        "Min (us)": 0.9,
        "Max (us)": 1.1,
    }
    columns = [name.replace("(ns)", "(us)") for name in KERN_SUM]
    (only,) = nsys.read(write("mine.csv", report(columns, row))).kernels
    assert (only.calls, only.total_ns, only.min_ns, only.max_ns) == (4, 4_000, 900, 1_100)


def test_nsys_warns_of_a_backward_pass_in_no_range(write: Write) -> None:
    """As of a program that leaves autograd its own thread; a short one is reported as it is."""
    path = write("rep_cuda_gpu_kern_sum.csv", KERNELS)
    write("rep_nvtx_kern_sum.csv", phase_rows(step=1600, forward=1500, backward=2, optimizer=98))
    table = nsys.read(path)
    assert table.phases_ns == {"forward": 1500, "backward": 2, "optimizer": 98}
    assert table.warnings == []
    for others in ({}, {"backward": 0}):
        write("rep_nvtx_kern_sum.csv", phase_rows(forward=1500, optimizer=98, **others))
        table = nsys.read(path)
        assert table.phases_ns == {"forward": 1500, "optimizer": 98}
        assert "no kernel is in a range named backward" in table.warnings[0]


def test_nsys_leaves_out_what_is_broken(write: Write, tmp_path: Path) -> None:
    path = write("rep_cuda_gpu_kern_sum.csv", KERNELS + "40.0,400,n/a,1,1,1,1,1,cut\n1,2\n")
    write("rep_cuda_gpu_trace.csv", report(TRACE, trace_row("no_time", 1, -5)))
    write("rep_cuda_api_sum.csv", "\n")
    write("rep_nvtx_sum.csv", KERNELS)
    table = nsys.read(path)
    assert [kernel.calls for kernel in table.kernels] == [4, 1]
    assert [warning.partition("rep_")[2] for warning in table.warnings] == [
        "cuda_gpu_trace.csv, row 2: '-5' is no duration",
        "cuda_gpu_kern_sum.csv, row 4: 'n/a' is no number (and 1 more rows)",
        "cuda_api_sum.csv: no header in it; is the file empty or cut off?",
        "nvtx_sum.csv: has the columns of cuda_gpu_kern_sum, not of nvtx_sum",
    ]
    write("other_cuda_gpu_kern_sum.csv", KERNELS)
    with pytest.raises(WorkshopError, match="reports of 2 profiles"):
        nsys.read(tmp_path)
