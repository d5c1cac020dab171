"""Files of every profiler that are empty, cut off or full of junk: one line says what is wrong, or
the valid part is read."""

import gzip
import json
import math
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import test_profilers_amd as amd
import test_profilers_kineto as torch_traces
import test_profilers_nvidia as nvidia
import test_profilers_proton as proton_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profile_checks import check_refused_or_sane

from workshop.errors import WorkshopError
from workshop.profilers import kineto, load, ncu, nsys, proton, rocprof_compute, rocprofv3

READERS: dict[str, ModuleType] = {
    "rocprofv3": rocprofv3,
    "rocprof_compute": rocprof_compute,
    "ncu": ncu,
    "nsys": nsys,
    "proton": proton,
    "kineto": kineto,
}
TRACE = json.dumps({"traceEvents": torch_traces.LAGGING_STEP}).encode()
LEAF = proton_runs.leaf
TREE = proton_runs.hatchet(proton_runs.node("forward", LEAF("a", 2, 5)), LEAF("b", 1, 7, flops=2))
CONTENTS: dict[str, Callable[[], str | bytes]] = {
    "ncu/raw.csv": lambda: "".join(nvidia.NCU_RAW.read_text().splitlines(keepends=True)[:5]),
    "ncu/details.csv": lambda: "".join(
        nvidia.NCU_DETAILS.read_text().splitlines(keepends=True)[:19]
    ),
    "nsys/rep_cuda_gpu_kern_sum.csv": lambda: nvidia.KERNELS,
    "nsys/rep_cuda_gpu_trace.csv": lambda: nvidia.KERNEL_TRACE,
    "proton/p.hatchet": lambda: TREE,
    "kineto/trace.json": lambda: TRACE,
    "kineto/trace.json.gz": lambda: gzip.compress(TRACE, 1),
}
AMD = (
    *(f"rocprofv3/run_77_{name}.csv" for name in ("kernel_trace", "memory_copy_trace")),
    *(f"rocprofv3/run_77_{name}_api_trace.csv" for name in ("hip", "marker")),
    *(f"rocprofv3/run_77_{name}.csv" for name in ("counter_collection", "kernel_stats")),
    "rocprofv3/results.db",
    "rocprof_compute/w/pmc_perf.csv",
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each tool, with one valid file of each kind."""
    folder = tmp_path_factory.mktemp("valid")
    amd.write_one_of_each(folder / "rocprofv3", folder / "rocprof_compute" / "w")
    for name, content in CONTENTS.items():
        path, made = folder / name, content()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
    return folder


WORDS = b"nan inf 1e999 -1 0 1e308 null true n/a [] {} 1,,0".split()
JUNK = st.sampled_from([*WORDS, b"9" * 400, b'"', b"\0", b""]) | st.binary(max_size=12)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """With fields replaced, from one separator to the next; other bytes; cut off; or all junk."""
    damage = draw(st.sets(st.sampled_from(["fields", "bytes", "cut"]), min_size=1))
    for _ in range(draw(st.integers(1, 3)) if "fields" in damage else 0):
        ends = [i for i, byte in enumerate(content) if byte in b",:\n"]
        if len(ends) > 1:
            first = draw(st.integers(0, len(ends) - 2))
            content = content[: ends[first] + 1] + draw(JUNK) + content[ends[first + 1] :]
    if "bytes" in damage:
        start = draw(st.integers(0, len(content)))
        content = content[:start] + draw(st.binary(max_size=64)) + content[start + 16 :]
    if "cut" in damage:
        content = content[: draw(st.integers(0, len(content)))]
    return content


@pytest.mark.parametrize("name", [*CONTENTS, *AMD])
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_bytes_give_a_sane_table_or_one_line(
    name: str, data: st.DataObject, valid: Path
) -> None:
    """By itself, and among its profile's other files."""
    path, tool = valid / name, name.partition("/")[0]
    whole = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(whole)))
        check_refused_or_sane(READERS[tool].read, path)
        check_refused_or_sane(load.load, valid / tool)
    finally:
        path.write_bytes(whole)


# --- one line ------------------------------------------------------------------------------------

TIME, READ, raw_page = nvidia.TIME, nvidia.READ, nvidia.raw_page
KERNEL_TRACE, kern_row = amd.KERNEL_TRACE, nvidia.kern_row
NSYS = "rep_cuda_gpu_kern_sum.csv"
NO_EVENTS = "its traceEvents are missing or empty"


def traced(*rows: amd.Row) -> str:
    return amd.table_text(KERNEL_TRACE, rows)


def database(statement: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
        return path.read_bytes()


UNTIMED = amd.table_text(amd.COUNTERS_6_2, [amd.count(amd.ADD, "SQ_WAVES", 16, 1)])
REFUSED: list[tuple[ModuleType, str, str | bytes, str]] = [
    (ncu, "raw.csv", "", "no header"),
    (ncu, "raw.csv", raw_page({READ: "byte"}, {READ: "5"}), "row 3: has no gpu__time_duration.sum"),
    (ncu, "raw.csv", raw_page({TIME: "cycle"}, {TIME: "5"}), "row 3: 'cycle' is no unit of time"),
    (nsys, NSYS, "", "no header"),
    (nsys, NSYS, nvidia.report(nvidia.KERN_SUM, kern_row("k", 2, 100, 60, 70)),
     "row 2: a mean of 50 ns is not between 60 and 70"),
    (nsys, NSYS, nvidia.KERNELS.replace("Total Time (ns)", "Total Time (h)"),
     "'h' is no unit of time"),
    (proton, "p.hatchet", TREE[:-40], "no JSON, or cut off"),
    (proton, "p.hatchet", proton_runs.hatchet(LEAF("a", 1, math.nan)), "no kernels in it"),
    (rocprofv3, "run_kernel_trace.csv", "", "empty or cut off"),
    (rocprofv3, "run_kernel_trace.csv", "a,b,c\n1,2,3\n",
     "none of the tables that rocprofv3 writes; its columns are a, b, c"),
    (rocprofv3, "run_kernel_trace.csv", traced(amd.dispatch(amd.ADD, 0, -1)), "row 2: from "),
    *((kineto, "trace.json", text, NO_EVENTS)
      for text in ("", "{}", "[]", "{" * 99_999)),
    (kineto, "trace.json.gz", b"\x1f\x8bnot gzip after all", "its gzip compression is corrupt"),
    (load, "letters.csv", "a,b\n1,2\n", "its columns (a, b) are of no profiler"),
    (load, "other.json", '{"answer": 42}', "JSON of no profiler"),
    (load, "binary.csv", bytes(range(256)), "a binary file of no profiler"),
    (load, "step.nsys-rep", b"\0", "its own tool reads it first: nsys stats"),
    (load, "my step's.ncu-rep", b"\0", """/my step'"'"'s.ncu-rep' --csv"""),
    (load, "step.pftrace", b"\0", "open it in https://ui.perfetto.dev"),
    (load, "step.sqlite", database("CREATE TABLE StringIds (id, value)"),
     "nsys's database, its own tool reads it first: nsys stats --report cuda_gpu_kern_sum"),
    (load, "1_counter_collection.csv", UNTIMED, "no times in it, as ROCm 6.2 writes"),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "name", "content", "message"), REFUSED)
def test_what_can_not_be_read_gets_one_line(
    reader: ModuleType, name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read = reader.load if reader is load else reader.read
    with pytest.raises(WorkshopError) as caught:
        read(path)
    assert name in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["step.nsys-rep", "step.pftrace"])
def test_a_folder_says_what_to_do_with_the_files_in_it(name: str, tmp_path: Path) -> None:
    _, _, content, message = next(case for case in REFUSED if case[1] == name)
    assert isinstance(content, str | bytes)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WorkshopError) as caught:
        load.load(tmp_path)
    assert f"{tmp_path / name}: " in str(caught.value) and message in str(caught.value)
