"""rocprofv3's and rocprof-compute's outputs: their figures come out as written, and what is broken
is named or left out."""

import csv
import dataclasses
import gzip
import io
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from workshop.errors import WorkshopError
from workshop.profilers import amd_counters, rocprof_compute, rocprofv3
from workshop.profilers.amd_counters import Counters
from workshop.profilers.load import load
from workshop.profilers.table import HostCall, Kernel, KernelTable, Timeline

T0 = 1_550_151_853_000_001
"""A clock's reading: of a machine that has been up for 18 days."""
GEMM = "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64"
ADD = "void add_kernel<float, 4>(float*, float const*, int)"
LAUNCH = "hipLaunchKernel"
NORM = "void ours::norm_kernel<bf16>(bf16*, bf16 const*, int)"

Row = Mapping[str, object]
Write = Callable[[str, str], Path]


def table_text(columns: str, rows: Iterable[Row], first: str = "") -> str:
    """A CSV file as rocprofv3 writes it: texts in quotation marks, numbers without; "1" where a
    row has no value for a column."""
    names = [*first.split(), *columns.split()]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row.get(name, 1) for name in names] for row in rows)
    return text.getvalue()


def by_name(table: KernelTable) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in table.kernels}


def figures(table: KernelTable) -> dict[str, tuple[object, ...]]:
    """(calls, total, shortest, longest) by kernel."""
    return {k.name: (k.calls, k.total_ns, k.min_ns, k.max_ns) for k in table.kernels}


# --- rocprofv3, CSV ------------------------------------------------------------------------------

SIZES = "Workgroup_Size_X Workgroup_Size_Y Workgroup_Size_Z Grid_Size_X Grid_Size_Y Grid_Size_Z"
KERNEL_TRACE = (
    "Kind Agent_Id Queue_Id Stream_Id Thread_Id Dispatch_Id Kernel_Id Kernel_Name Correlation_Id "
    "Start_Timestamp End_Timestamp LDS_Block_Size Scratch_Size VGPR_Count Accum_VGPR_Count "
    f"SGPR_Count {SIZES}"
)
KERNEL_TRACE_6_3 = (
    "Kind Agent_Id Queue_Id Thread_Id Dispatch_Id Kernel_Id Kernel_Name Correlation_Id "
    f"Start_Timestamp End_Timestamp Private_Segment_Size Group_Segment_Size {SIZES}"
)
COPY_TRACE = (
    "Kind Direction Stream_Id Source_Agent_Id Destination_Agent_Id Correlation_Id "
    "Start_Timestamp End_Timestamp"
)
API_TRACE = "Domain Function Process_Id Thread_Id Correlation_Id Start_Timestamp End_Timestamp"
STATS = "Name Calls TotalDurationNs AverageNs Percentage MinNs MaxNs StdDev"
COUNTERS = (
    "Correlation_Id Dispatch_Id Agent_Id Queue_Id Process_Id Thread_Id Grid_Size Kernel_Id "
    "Kernel_Name Workgroup_Size LDS_Block_Size Scratch_Size VGPR_Count Accum_VGPR_Count "
    "SGPR_Count Counter_Name Counter_Value Start_Timestamp End_Timestamp"
)
COUNTERS_6_2 = COUNTERS.removesuffix(" Start_Timestamp End_Timestamp")
AGENTS = "Node_Id Logical_Node_Id Agent_Type Cu_Count Name Vendor_Name Product_Name Model_Name"


def span(start: int, ns: int) -> dict[str, object]:
    return {"Start_Timestamp": T0 + start, "End_Timestamp": T0 + start + ns}


def dispatch(name: str, start: int, ns: int, correlation: int = 1) -> Row:
    row = {"Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4", "Kernel_Name": name}
    return row | {"Correlation_Id": correlation} | span(start, ns)


def copy(direction: str, start: int, ns: int, correlation: int = 1) -> Row:
    row = {"Kind": "MEMORY_COPY", "Direction": direction, "Correlation_Id": correlation}
    return row | {"Source_Agent_Id": "Agent 0", "Destination_Agent_Id": "Agent 4"} | span(start, ns)


def call(name: str, start: int, ns: int, correlation: int, domain: str = "HIP_RUNTIME_API") -> Row:
    row = {"Domain": domain, "Function": name, "Correlation_Id": correlation}
    return row | span(start, ns)


def marker(name: str, start: int, ns: int) -> Row:
    return call(name, start, ns, correlation=0, domain="MARKER_CORE_RANGE_API")


def count(kernel: str, counter: str, value: float, number: int, start: int = 0, ns: int = 9) -> Row:
    row = {"Kernel_Name": kernel, "Counter_Name": counter, "Counter_Value": value}
    return row | {"Dispatch_Id": number} | span(start, ns)


SUMS = {"Name": ADD, "Calls": 4, "TotalDurationNs": 1000, "MinNs": 100, "MaxNs": 400}
THREE = [dispatch(ADD, 0, 100), dispatch(GEMM, 50, 400), dispatch(ADD, 1000, 300)]


@pytest.mark.parametrize(
    ("columns", "first"), [(KERNEL_TRACE, ""), (KERNEL_TRACE_6_3, ""), (KERNEL_TRACE, "Guid")]
)
def test_every_version_of_a_kernel_trace_gives_the_same(
    write: Write, columns: str, first: str
) -> None:
    path = write("run_kernel_trace.csv", table_text(columns, THREE, first))
    table = rocprofv3.read(path)
    assert figures(table) == {ADD: (2, 400, 100, 300), GEMM: (1, 400, 400, 400)}
    assert by_name(table)[GEMM].category == "GEMM"
    # 0 to 450 by two kernels that overlap, then 1000 to 1300.
    assert table.timeline == Timeline(span_ns=1300, busy_ns=750, calls=3)
    assert (table.tool, table.what, table.warnings) == ("rocprofv3", "kernel", [])
    assert table.steps is None and not table.phases_ns and table.device is None


def test_tables_of_sums(write: Write) -> None:
    def stats(name: str, *rows: Row) -> KernelTable:
        return rocprofv3.read(write(f"run_{name}.csv", table_text(STATS, rows)))

    table = stats("kernel_stats", SUMS)
    assert figures(table) == {ADD: (4, 1000, 100, 400)} and table.timeline is None
    with pytest.raises(WorkshopError, match="sums of other events"):
        stats("hip_api_stats", SUMS)
    with pytest.raises(WorkshopError, match="row 2: a mean of 250 ns is not between 300 and 400"):
        stats("kernel_stats", SUMS | {"MinNs": 300})


def test_a_counter_table_has_times_bytes_and_operations(write: Write) -> None:
    rows = [
        count(GEMM, counter, value, number, start, ns)
        for number, start, ns in ((7, 0, 100), (8, 500, 300))
        for counter, value in (
            ("FETCH_SIZE", 3.0),
            ("WRITE_SIZE", 1.0),
            ("SQ_INSTS_VALU_MFMA_MOPS_BF16", number),
        )
    ]
    table = rocprofv3.read(write("counter_collection.csv", table_text(COUNTERS, rows, "Pid")))
    assert figures(table) == {GEMM: (2, 400, 100, 300)}
    assert table.kernels[0].bytes == 2 * 4 * 1024
    assert table.kernels[0].flops == 512 * (7 + 8)
    assert table.timeline is None
    under_counters, lower_bound = table.warnings
    assert "a run under counters" in under_counters
    assert "lower bound: 15 of their 16 counters were not collected" in lower_bound


# --- rocprofv3, folders --------------------------------------------------------------------------

# A step of 1000 ns on the host. The GPU lags: all its kernels run after the step has ended, and
# autograd's launches come from another thread, in the time of the range `backward`.
STEP_MARKERS = [
    *(marker("step", 1000, 1000), marker("forward", 1000, 300), marker("backward", 1300, 500)),
    # The backward pass repeats a forward, to save memory.
    *(marker("forward", 1300, 200), marker("optimizer", 1850, 100)),
    *(marker("layers.0.mlp", 1010, 90), marker("step", 1005, 0)),  # a range, and a mark
]
STEP_CALLS = [
    *(call(LAUNCH, 10, 5, 1), call(LAUNCH, 1050, 5, 2), call(LAUNCH, 1410, 5, 3)),
    *(call(LAUNCH, 1700, 5, 4) | {"Thread_Id": 9}, call("hipMemcpyAsync", 1100, 40, 5)),
    *(call("hipGraphLaunch", 1860, 5, 6), call(LAUNCH, 1820, 5, 7)),
    call(LAUNCH, 2000, 5, 8),  # as the step ends: no longer in it
]
STEP_KERNELS = [
    dispatch("add_kernel", 100, 50, 1),  # warm-up
    *(dispatch(GEMM, 5000, 100, 2), dispatch(GEMM, 5200, 200, 3), dispatch(GEMM, 5500, 300, 4)),
    *(dispatch("add_kernel", 6000, 10, 6), dispatch("add_kernel", 6010, 20, 6)),
    dispatch("add_kernel", 6030, 7, 7),  # in the step, in no phase
]
STEP_COPIES = [copy("MEMORY_COPY_HOST_TO_DEVICE", 5150, 25, 5)]


def write_run(folder: Path, prefix: str = "run_77_", **tables: tuple[str, list[Row]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (columns, rows) in tables.items():
        (folder / f"{prefix}{name}.csv").write_text(table_text(columns, rows))
    return folder


def write_step(folder: Path, **others: tuple[str, list[Row]]) -> Path:
    """A traced step, as run_rocprofv3.sh leaves it; `others` replace tables or add some."""
    gpu = {"Agent_Type": "GPU", "Name": "gfx942", "Product_Name": "AMD Instinct MI300X"}
    cpu = {"Agent_Type": "CPU", "Product_Name": "AMD EPYC"}
    tables = {
        "kernel_trace": (KERNEL_TRACE, STEP_KERNELS),
        "memory_copy_trace": (COPY_TRACE, STEP_COPIES),
        "hip_api_trace": (API_TRACE, STEP_CALLS),
        "marker_api_trace": (API_TRACE, STEP_MARKERS),
        "agent_info": (AGENTS, [cpu, gpu, gpu]),
    }
    return write_run(folder, **tables | others)


def test_a_folder_is_the_table_of_its_steps(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "hotspots")
    # Sums of kernels, and a helper process's own files, add nothing.
    write_run(folder, kernel_stats=(STATS, [SUMS]))
    write_run(folder, "run_78_", hip_api_trace=(API_TRACE, [call("hipInit", 0, 3, 1)]))
    (folder / "run_77_results.pftrace").write_bytes(b"\x0a\x00")
    (tmp_path / "kernels.csv").write_text("name,category,calls\n")

    table = rocprofv3.read(tmp_path)
    assert figures(table) == {
        GEMM: (3, 600, 100, 300),
        "add_kernel": (3, 37, 7, 20),
        "MEMORY_COPY_HOST_TO_DEVICE": (1, 25, 25, 25),
    }
    assert table.steps == 1
    assert table.phases_ns == {"forward": 125, "backward": 500, "optimizer": 30}
    assert table.timeline == Timeline(1037, 100 + 25 + 200 + 300 + 37, calls=7)
    assert table.host_calls == {
        LAUNCH: HostCall(4, 20),
        "hipMemcpyAsync": HostCall(1, 40),
        "hipGraphLaunch": HostCall(1, 5),
    }
    assert table.device == "AMD Instinct MI300X"
    (left_out,) = table.warnings
    assert left_out.endswith("outside of the marked steps: 1 kernels and copies, 0.0 ms")


def test_without_host_calls_no_kernel_is_in_a_step_or_a_phase(tmp_path: Path) -> None:
    table = rocprofv3.read(write_step(tmp_path, hip_api_trace=(API_TRACE, [])))
    assert (table.steps, table.phases_ns, table.launches) == (None, {}, 8)
    assert "it is unknown what the marked steps launched" in table.warnings[0]


def test_a_phase_that_launches_nothing_takes_no_time(tmp_path: Path) -> None:
    """As that of a severed gradient."""
    calls = [row for row in STEP_CALLS if row["Correlation_Id"] not in (3, 4)]
    table = rocprofv3.read(write_step(tmp_path, hip_api_trace=(API_TRACE, calls)))
    assert table.phases_ns == {"forward": 125, "backward": 0, "optimizer": 30}


def test_counters_of_other_runs_are_taken_by_the_call(tmp_path: Path) -> None:
    """The times are of three products; the counters of runs with two, and with one."""
    write_step(tmp_path / "hotspots")
    groups = {
        "read": [count(GEMM, "FETCH_SIZE", value, i) for i, value in enumerate((10.0, 30.0))],
        "written": [count(GEMM, "WRITE_SIZE", 5.0, 4), count("add_kernel", "WRITE_SIZE", 1.0, 5)],
        "matrix": [
            count(GEMM, "SQ_INSTS_VALU_MFMA_MOPS_BF16", 1000, 2),
            count("add_kernel", "SQ_INSTS_VALU_MFMA_MOPS_BF16", 0, 3),
        ],
        "vector": [count("add_kernel", "SQ_INSTS_VALU_FMA_F32", 10, i) for i in (1, 2)],
        "waves": [count(GEMM, "SQ_WAVES", 16, 1)],
    }
    for group, rows in groups.items():
        folder = tmp_path / "counters" / group
        columns = COUNTERS_6_2 if group == "read" else COUNTERS
        write_run(folder, "run_5_", counter_collection=(columns, rows))
    table = rocprofv3.read(tmp_path)
    kernels = by_name(table)
    assert kernels[GEMM].bytes == 3 * (20 + 5) * 1024
    assert kernels[GEMM].flops == 3 * 512 * 1000
    assert kernels["add_kernel"].flops == 3 * 2 * 64 * 10
    assert kernels["add_kernel"].bytes is None  # what it reads is not known
    assert kernels["MEMORY_COPY_HOST_TO_DEVICE"].flops is None
    assert figures(table)[GEMM] == (3, 600, 100, 300)
    assert "14 of their 16 counters were not collected" in table.warnings[1]


def test_which_of_several_runs_gives_the_times(tmp_path: Path) -> None:
    """One without counters before one with them, then one with every dispatch."""
    write_run(
        tmp_path / "a_pass_1",
        kernel_trace=(KERNEL_TRACE, [dispatch(GEMM, 0, 999)]),
        counter_collection=(COUNTERS, [count(GEMM, "WRITE_SIZE", 1.0, 1)]),
    )
    assert rocprofv3.read(tmp_path).total_ns == 999
    write_run(tmp_path / "b", kernel_stats=(STATS, [SUMS]))
    assert rocprofv3.read(tmp_path).total_ns == 1000
    write_run(tmp_path / "c", kernel_trace=(KERNEL_TRACE, [dispatch(GEMM, 0, 60)]))
    table = rocprofv3.read(tmp_path)
    assert table.total_ns == 60
    assert table.warnings == [f"{tmp_path / 'b'} holds another run, which is left out"]


def test_what_can_be_read_is_read(tmp_path: Path) -> None:
    """A trace without a valid row gives way to the sums; a file that is no database, to the CSV."""
    bad = dispatch(ADD, 0, -5)
    write_run(
        tmp_path, kernel_trace=(KERNEL_TRACE, [bad]), kernel_stats=(STATS, [SUMS]),
        hip_api_trace=("Domain Function", []),
    )  # fmt: skip
    (tmp_path / "run_77_results.db").write_bytes(b"SQLite format 3\0" + bytes(100))
    table = rocprofv3.read(tmp_path)
    assert figures(table) == {ADD: (4, 1000, 100, 400)}
    database, calls, trace = table.warnings
    assert "run_77_results.db: can't be read as a database" in database
    assert "run_77_hip_api_trace.csv: no column Start_Timestamp" in calls
    assert "run_77_kernel_trace.csv, row 2: from '15501" in trace


# --- counters ------------------------------------------------------------------------------------

NO_PRODUCTS = {"SQ_INSTS_VALU_MFMA_MOPS_BF16": 0}
RDREQ, WRREQ = "TCC_EA0_RDREQ", "TCC_EA0_WRREQ"
MI350_READS = {f"{RDREQ}{length}_sum": n for length, n in
               (("", 6), ("_32B", 1), ("_64B", 2), ("_128B", 3))}  # fmt: skip
WRITTEN = {f"{WRREQ}_sum": 10, f"{WRREQ}_64B_sum": 4}
"""4 x 64 and 6 x 32 bytes: 448."""


@pytest.mark.parametrize(
    ("counters", "moved"),
    [
        ({"FETCH_SIZE": 3, "WRITE_SIZE": 1.5}, 4608),
        ({"FetchSize": 3, "WriteSize": 1.5}, 4608),
        # MI300: 10 requests, 2 short and 3 long ones among them.
        ({f"{RDREQ}_sum": 10, f"{RDREQ}_32B_sum": 2, "TCC_BUBBLE_sum": 3} | WRITTEN, 768 + 448),
        ({RDREQ: 10, f"{RDREQ}_32B": 2, "TCC_BUBBLE": 3, "WRITE_SIZE": 1}, 768 + 1024),
        ({f"{RDREQ}_sum": 10, f"{RDREQ}_32B_sum": 2} | WRITTEN, None),  # how many are long?
        # MI200 has no long ones, and other names.
        (
            {f"TCC_EA_{name}": value for name, value in
             {"RDREQ_sum": 10, "RDREQ_32B_sum": 2, "WRREQ_sum": 10, "WRREQ_64B_sum": 4}.items()},
            64 + 512 + 448,
        ),
        # MI350 counts each length, and FETCH_SIZE wrongly. What was not collected of the total and
        # the three lengths is the others' difference, unless that is negative.
        *(
            ({name: n for name, n in MI350_READS.items() if name != left_out}
             | {"FETCH_SIZE": 0.25, "TCC_BUBBLE_sum": 0} | WRITTEN, 32 + 128 + 384 + 448)
            for left_out in MI350_READS
        ),
        ({f"{RDREQ}_sum": 3, f"{RDREQ}_32B_sum": 1, f"{RDREQ}_128B_sum": 3, "FETCH_SIZE": 1}
         | WRITTEN, 1024 + 448),
        ({f"{RDREQ}[0]": 6, f"{RDREQ}[1]": 4, f"{RDREQ}_32B[0]": 2, "TCC_BUBBLE[1]": 3} | WRITTEN,
         768 + 448),
        ({"FETCH_SIZE": 3}, None),
        ({"WRITE_SIZE": 3}, None),
        ({"FETCH_SIZE": 3, f"{WRREQ}_sum": 3, f"{WRREQ}_64B_sum": 9}, 3072 + 9 * 64 - 6 * 32),
        ({f"{RDREQ}_sum": 1, f"{RDREQ}_32B_sum": 9, "TCC_BUBBLE_sum": 0, "WRITE_SIZE": 0}, None),
    ],
)  # fmt: skip
def test_bytes_from_counters(counters: Mapping[str, float], moved: float | None) -> None:
    assert all(amd_counters.is_used(counter) for counter in counters)
    assert filled(counters).bytes == moved


@pytest.mark.parametrize(
    ("counters", "flops"),
    [
        ({"SQ_INSTS_VALU_ADD_F16": 1, "SQ_INSTS_VALU_MUL_F32": 10} | NO_PRODUCTS, 64 * 11),
        ({"SQ_INSTS_VALU_TRANS_F64": 1, "SQ_INSTS_VALU_FMA_F16": 10} | NO_PRODUCTS, 64 * 21),
        ({"SQ_INSTS_VALU_MFMA_MOPS_F64": 1, "SQ_INSTS_VALU_MFMA_MOPS_F8": 2}, 512 * 3),
        ({"SQ_INSTS_VALU_MFMA_MOPS_F6F4": 2, "SQ_INSTS_VALU_ADD_F32": 0}, 1024),
        (NO_PRODUCTS, 0),
        # In a product they would be a hundredth.
        ({"SQ_INSTS_VALU_ADD_F32": 9, "SQ_INSTS_VALU_FMA_F32": 9}, None),
        # All instructions, integers, waves: no operations.
        ({"SQ_INSTS_VALU": 7, "SQ_INSTS_VALU_MFMA_MOPS_I8": 7, "SQ_WAVES": 7}, None),
    ],
)
def test_operations_from_counters(counters: Mapping[str, float], flops: float | None) -> None:
    assert filled(counters).flops == flops


@pytest.mark.parametrize(
    ("counters", "too_low"),
    [({"FETCH_SIZE": 3, "WRITE_SIZE": 1}, True), (MI350_READS | WRITTEN, False),
     (NO_PRODUCTS, False)],
)  # fmt: skip
def test_bytes_on_mi350_need_every_length_of_a_read(
    counters: Mapping[str, float], too_low: bool
) -> None:
    collected = Counters()
    for counter, value in counters.items():
        collected.add("k", counter, value)
    collected.fill([Kernel("k", "other", 1, 1.0)])
    for device, expected in (("AMD Instinct MI355X", too_low), ("AMD Instinct MI300X", False)):
        warnings = collected.warnings(device)
        assert any("bytes are a lower bound" in line for line in warnings) == expected


def filled(counters: Mapping[str, float]) -> Kernel:
    collected, kernel = Counters(), Kernel("k", "other", 1, 1.0)
    for counter, value in counters.items():
        collected.add("k", counter, value)
    collected.fill([kernel])
    return kernel


# --- rocprofv3, databases ------------------------------------------------------------------------

UUID = "_0000ddb5_8903_7903"


def build_database(path: Path, *statements: str, newer: bool = False) -> Path:
    """A small rocpd database: rocpd's views, over tables whose names end with a number.

    Args:
        newer: with the names that schema 4 has for the view of the counters and its columns.
    """
    message = '{"message": "%s"}'
    regions = [
        *((1, "MARKER_CORE_RANGE_API", "roctxThreadRangeA", 1000, 1000, 1, message % "step"),),
        *((2, "MARKER_CORE_RANGE_API", "roctxThreadRangeA", 1000, 500, 2, message % "forward"),),
        *((3, "HIP_RUNTIME_API_EXT", LAUNCH, 1010, 3, 3, "{}"),),
        *((4, "HIP_RUNTIME_API_EXT", LAUNCH, 1700, 4, 4, "{}"),),
        *((5, "HIP_COMPILER_API_EXT", "hipInit", 10, 9, 5, "{}"),),
        *((6, "HSA_CORE_API", "hsa_init", 10, 9, 6, "{}"),),
    ]
    kernels = [
        (number, "KERNEL_DISPATCH", *kernel)
        for number, kernel in enumerate(
            ((GEMM, 5000, 100, 3, 11), (ADD, 5100, 50, 4, 12), (ADD, 10, 5, 5, 13)), start=1
        )
    ]
    copies = [(1, "MEMORY_COPY_HOST_TO_DEVICE", 5200, 25, 3, 4096)]
    counts = [
        (dispatch, name, counter, value)
        for dispatch, name in ((11, GEMM), (12, ADD), (13, ADD))
        for counter, value in (("FETCH_SIZE", 1.0), ("FETCH_SIZE", 2.0), ("WRITE_SIZE", 0.5))
    ]
    tables = {
        "rocpd_info_agent": ("type, product_name", [("CPU", "EPYC"), ("GPU", "AMD Instinct")]),
        "regions": ("id, category, name, start, end, stack_id, extdata", regions),
        "kernels": ("id, category, name, start, end, stack_id, dispatch_id", kernels),
        "memory_copies": ("id, name, start, end, stack_id, size", copies),
        "processes": ("pid", [(77,)]),
    }
    if newer:
        tables["kernel_pmc_events"] = ("dispatch_id, name, pmc_name, pmc_value", counts)
    else:
        tables["counters_collection"] = ("dispatch_id, kernel_name, counter_name, value", counts)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for view, (columns, rows) in tables.items():
            pid = "" if view == "processes" else ", 77 AS pid"
            connection.execute(f"CREATE TABLE {view}{UUID} ({columns.replace('end', '[end]')})")
            connection.execute(f"CREATE VIEW {view} AS SELECT *{pid} FROM {view}{UUID}")
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {view}{UUID} VALUES ({marks})", rows)
        for view in ("regions", "kernels", "memory_copies"):  # from durations to the clock's time
            connection.execute(
                f"UPDATE {view}{UUID} SET start = start + {T0}, [end] = start + [end] + {T0}"
            )
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


NO_COUNTERS = (f"DELETE FROM counters_collection{UUID}",)


def check_recorded_step(table: KernelTable) -> None:
    assert figures(table) == {
        GEMM: (1, 100, 100, 100),
        ADD: (1, 50, 50, 50),
        "MEMORY_COPY_HOST_TO_DEVICE": (1, 25, 25, 25),
    }
    assert by_name(table)["MEMORY_COPY_HOST_TO_DEVICE"].bytes == 4096
    assert table.timeline == Timeline(225, 175, calls=3)


# A kernel launched while HSA is traced has the correlation of the call to HSA.
UNDER_HSA = (
    f"INSERT INTO regions{UUID} SELECT id + 100, 'HSA_CORE_API', 'hsa_signal_store_screlease', "
    f"start + 1, [end], stack_id * 10, '{{}}' FROM regions{UUID} WHERE category LIKE 'HIP%'",
    f"UPDATE kernels{UUID} SET stack_id = stack_id * 10",
    f"UPDATE memory_copies{UUID} SET stack_id = stack_id * 10",
)


@pytest.mark.parametrize("more", [(), UNDER_HSA])
def test_database(tmp_path: Path, more: tuple[str, ...]) -> None:
    path = build_database(tmp_path / "odd #name? 100%.db", *NO_COUNTERS, *more)
    before = path.read_bytes()
    table = rocprofv3.read(path)
    check_recorded_step(table)
    assert (table.steps, table.phases_ns) == (1, {"forward": 125})
    assert table.host_calls == {LAUNCH: HostCall(2, 7)}
    assert table.device == "AMD Instinct"
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# rocprof-sys has its own names for the categories, and markers' messages as the regions' names.
OF_ROCPROF_SYS = (
    *NO_COUNTERS,
    f"UPDATE regions{UUID} SET category = 'rocm_hip_api' WHERE category LIKE 'HIP%'",
    f"UPDATE regions{UUID} SET category = 'rocm_hsa_api' WHERE category LIKE 'HSA%'",
    f"UPDATE regions{UUID} SET category = 'rocm_marker_api', extdata = '{{}}', "
    "name = CASE id WHEN 1 THEN 'step' ELSE 'forward' END WHERE category LIKE 'MARKER%'",
    f"UPDATE kernels{UUID} SET category = 'rocm_kernel_dispatch'",
    f"INSERT INTO regions{UUID} VALUES (50, 'timer_sampling', 'main', {T0}, {T0 + 1}, 0, '{{}}')",
)


@pytest.mark.parametrize(("name", "more"), [("rocpd-77.db", ()), ("rocpd.db", UNDER_HSA)])
def test_a_database_of_rocprof_sys(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    plain = rocprofv3.read(build_database(tmp_path / "plain.db", *NO_COUNTERS))
    folder = tmp_path / "sample"
    folder.mkdir()
    build_database(folder / name, *more, *OF_ROCPROF_SYS)
    table = load(folder)
    assert table.host_calls and table.steps and table.tool == "rocprof-sys"
    assert dataclasses.replace(table, tool="rocprofv3", path=plain.path) == plain
    build_database(
        folder / name, *OF_ROCPROF_SYS,
        *(f"DELETE FROM {view}{UUID}" for view in ("kernels", "memory_copies")),
    )  # fmt: skip
    assert (load(folder).tool, load(folder).launches) == ("rocprof-sys", 0)


@pytest.mark.parametrize("newer", [False, True])
def test_database_with_counters(tmp_path: Path, newer: bool) -> None:
    table = rocprofv3.read(build_database(tmp_path / "run_results.db", newer=newer))
    assert {kernel.name: kernel.bytes for kernel in table.kernels} == {
        GEMM: 3.5 * 1024,
        ADD: 3.5 * 1024,
        "MEMORY_COPY_HOST_TO_DEVICE": 4096,
    }
    assert table.timeline is None


def test_processes_in_one_database_are_kept_apart(tmp_path: Path) -> None:
    """A process that is not traced has calls of the same numbers, in the other's step."""
    path = build_database(
        tmp_path / "merged.db",
        *NO_COUNTERS,
        f"INSERT INTO processes{UUID} VALUES (78)",
        "DROP VIEW kernels",
        f"CREATE VIEW kernels AS SELECT *, 74 + stack_id AS pid FROM kernels{UUID}",
    )
    table = rocprofv3.read(path)  # of three kernels, one in each of two processes and in a third
    assert figures(table)[GEMM] == (1, 100, 100, 100) and table.phases_ns == {"forward": 125}
    assert "1 kernels and copies" in table.warnings[0]


def test_bad_rows_are_counted_and_the_first_is_named(write: Write) -> None:
    rows = [
        dispatch(ADD, 0, 100),
        dispatch(ADD, 0, 5) | {"End_Timestamp": "soon"},
        dispatch(ADD, 0, 5) | {"Start_Timestamp": "nan"},
        dispatch("", 0, 5),
        dispatch(ADD, 0, 5) | {"End_Timestamp": 10**30},
        dispatch(ADD, 200, 50),
    ]
    table = rocprofv3.read(write("kernel_trace.csv", table_text(KERNEL_TRACE, rows) + '"KERNEL'))
    assert figures(table) == {ADD: (2, 150, 50, 100)}
    (warning,) = table.warnings
    assert "kernel_trace.csv, row 3: 'soon' is no number (and 4 more rows)" in warning


# --- rocprof-compute -----------------------------------------------------------------------------

DISPATCH = (
    "Dispatch_ID Kernel_Name GPU_ID Grid_Size Workgroup_Size LDS_Per_Workgroup "
    "Scratch_Per_Workitem Arch_VGPR Accum_VGPR SGPR wave_size obj"
)
WIDE = (
    f"{DISPATCH} TCC_EA_RDREQ[0] TCC_EA_RDREQ[1] TCC_EA_RDREQ_32B_sum TCC_EA_WRREQ_sum "
    "TCC_EA_WRREQ_64B_sum SQ_INSTS_VALU_FMA_F32 SQ_INSTS_VALU_MFMA_MOPS_F16 SQ_WAVES "
    "wave_size_1 obj_1 Start_Timestamp End_Timestamp"
)
LONG = (
    "GPU_ID Dispatch_ID Grid_Size Workgroup_Size LDS_Per_Workgroup Scratch_Per_Workitem Arch_VGPR "
    "Accum_VGPR SGPR Kernel_Name Start_Timestamp End_Timestamp Kernel_ID Counter_Name Counter_Value"
)
SYSINFO = "workload_name command gpu_model gpu_arch cu_per_gpu"


def wide_row(number: int, start: int, ns: int, fma: object, name: str = ADD) -> Row:
    counters = {"TCC_EA_RDREQ[0]": 6, "TCC_EA_RDREQ[1]": 4, "TCC_EA_RDREQ_32B_sum": 2.0}
    counters |= {"TCC_EA_WRREQ_sum": 10.0, "TCC_EA_WRREQ_64B_sum": 4.0}
    row = {"Dispatch_ID": number, "Kernel_Name": f"{name} [clone .kd]", "GPU_ID": 2, "obj": "0x7f"}
    counters |= {"SQ_INSTS_VALU_FMA_F32": fma, "SQ_INSTS_VALU_MFMA_MOPS_F16": fma and 0}
    return row | counters | span(start, ns)


def write_workload(folder: Path, packed: bool = False, **tables: tuple[str, list[Row]]) -> Path:
    folder.mkdir(parents=True)
    sysinfo = {"gpu_model": "MI210", "gpu_arch": "gfx90a", "command": "python x.py, y"}
    (folder / "sysinfo.csv").write_text(table_text(SYSINFO, [sysinfo]))
    for name, (columns, rows) in tables.items():
        text = table_text(columns, rows).encode()
        if packed:
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text))
        else:
            (folder / f"{name}.csv").write_bytes(text)
    return folder


def test_a_workload_with_a_column_for_each_counter(tmp_path: Path) -> None:
    rows = [wide_row(0, 0, 100, 10), wide_row(1, 500, 300, 30), wide_row(2, 900, 50, "", NORM)]
    folder = write_workload(tmp_path / "workloads" / "v1" / "MI210", pmc_perf=(WIDE, rows))
    for path in (folder, folder / "pmc_perf.csv", tmp_path):
        table = rocprof_compute.read(path)
        assert figures(table) == {ADD: (2, 400, 100, 300), NORM: (1, 50, 50, 50)}
        assert by_name(table)[ADD].bytes == 2 * (64 + 512 + 448)
        assert by_name(table)[ADD].flops == 2 * 64 * (10 + 30)
        assert by_name(table)[NORM].flops is None  # an empty cell: another replay's counter
        assert (table.device, table.timeline, table.path) == ("MI210 (gfx90a)", None, path)
        assert rocprof_compute.recognises(path)
    (lower_bound,) = table.warnings
    assert "14 of their 16 counters" in lower_bound


def long_rows(counter: str, values: Iterable[float], ns: int) -> list[Row]:
    row = {"Kernel_Name": ADD, "Counter_Name": counter}
    return [
        row | {"Dispatch_ID": number, "Counter_Value": value} | span(number * 1000, ns)
        for number, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "files", [["pmc_perf"], ["pmc_perf_0", "pmc_perf_1"], ["results_0", "results_1"]]
)
def test_a_workload_with_a_row_for_each_counter(
    tmp_path: Path, files: list[str], packed: bool
) -> None:
    """Whether `analyze` has merged the replays or not; a dispatch counts once."""
    replays = [long_rows("FETCH_SIZE", (1.0, 3.0), 100), long_rows("WRITE_SIZE", (1.0, 1.0), 120)]
    tables = dict.fromkeys(files, (LONG, replays[0]))
    if len(files) == 1:
        tables = {files[0]: (LONG, replays[0] + replays[1])}
    else:
        tables[files[1]] = (LONG, replays[1])
    folder = write_workload(tmp_path / "w", packed, **tables)
    (folder / "results_of_mine.csv").write_text("name,value\n")
    table = load(tmp_path)
    assert (table.tool, table.device) == ("rocprof-compute", "MI210 (gfx90a)")
    assert figures(table) == {ADD: (2, 200, 100, 100)}
    assert table.kernels[0].bytes == 2 * (2 + 1) * 1024
    assert table.warnings == []
    for file in folder.iterdir():
        assert load(file).kernels == table.kernels


OWN_COUNTERS = (
    "dispatch_id gpu_id kernel_id lds_per_workgroup counter_id counter_name counter_value"
)


@pytest.mark.parametrize("beside", [False, True])
def test_a_workload_of_databases(tmp_path: Path, beside: bool) -> None:
    """One for each process of each replay; the counters in them, or beside, where an instance of a
    hardware block has one row."""
    folder = write_workload(tmp_path / "w")
    for replay, counter, values in (
        ("pmc_perf_0", "FETCH_SIZE", (1.0, 2.0)),
        ("pmc_perf_1", "WRITE_SIZE", (0.5,)),
    ):
        for process in (77, 78):
            path = folder / "out" / replay / "host" / f"{process}.db"
            path.parent.mkdir(parents=True, exist_ok=True)
            others = f"DELETE FROM counters_collection{UUID} WHERE counter_name <> '{counter}'"
            build_database(path, *(NO_COUNTERS if beside else (others,)))
            rows = [
                {"dispatch_id": dispatch, "counter_name": counter, "counter_value": value}
                for dispatch in (11, 12, 13)
                for value in values
            ]
            text = table_text(OWN_COUNTERS, [*rows, rows[0] | {"dispatch_id": 99}])
            if beside:
                file = folder / "out" / replay / f"{process}_native_counter_collection.csv.gz"
                file.write_bytes(gzip.compress(text.encode()))
    table = load(tmp_path)
    assert (table.tool, table.device, table.timeline) == (
        "rocprof-compute", "MI210 (gfx90a)", None,
    )  # fmt: skip
    assert figures(table) == {GEMM: (2, 200, 100, 100), ADD: (4, 110, 5, 50)}
    assert {k.name: k.bytes for k in table.kernels} == {GEMM: 2 * 3584, ADD: 4 * 3584}
    assert table.warnings[0] == "the kernels of 2 processes are added up"
    lost = ["no kernel was dispatch" in warning for warning in table.warnings[1:]]
    assert lost == [True] * (4 if beside else 0)


def roofline_text(columns: str, *rows: Iterable[float]) -> str:
    return "\n".join([columns.replace(" ", ","), *(",".join(map(str, row)) for row in rows)]) + "\n"


# As the tool spells them.
MI200_CEILINGS = (
    "device HBMBw HBMBwLow hbmBwHigh L2Bw L2BwLow L2BwHigh FP32Flops FP32FlopsLow FP32FlopsHigh "
    "MFMABF16Flops MFMABF16FlopsLow MFMABF16FlopsHigh MFMAI8Ops MFMAFI8OpsLow MFMAI8OpsHigh"
)


def test_measured_ceilings(tmp_path: Path, write: Write) -> None:
    values = [1400.5, 1390, 1410, 5000, 4990, 5010, 21000, 20900, 21100]
    values += [170000, 169000, 171000, 166000, 165000, 167000]
    write("v1/MI210/roofline.csv", roofline_text(MI200_CEILINGS, [0, *values], [1, *values]))
    first, second = rocprof_compute.ceilings(tmp_path)
    assert first.bandwidths_gbs == {"HBM": 1400.5, "L2": 5000}
    assert first.rates_gflops == {"FP32": 21000, "MFMABF16": 170000, "MFMAI8": 166000}
    assert second == dataclasses.replace(first, device=1)
    # Ceilings alone are a workload, though one without kernels.
    assert rocprof_compute.recognises(tmp_path)
    with pytest.raises(WorkshopError, match="--bench-only leaves"):
        rocprof_compute.read(tmp_path)


# --- one of each ---------------------------------------------------------------------------------


def write_one_of_each(folder: Path, workload: Path) -> None:
    """A valid file of every kind that rocprofv3 writes, and a workload."""
    rows = [count(GEMM, counter, 2, 1) for counter in ("FETCH_SIZE", "WRITE_SIZE")]
    write_step(folder, counter_collection=(COUNTERS, rows), kernel_stats=(STATS, [SUMS, SUMS]))
    (folder / "run_77_agent_info.csv").unlink()
    build_database(folder / "results.db")
    rows = [wide_row(0, 0, 100, 10), wide_row(1, 500, 300, 30)]
    write_workload(workload, pmc_perf=(WIDE, rows))
