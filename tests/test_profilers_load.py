"""The tables that `python -m workshop.profilers` makes of a path, and those kept in files."""

import dataclasses
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import test_profilers_amd as amd
import test_profilers_kineto as torch_traces
import test_profilers_nvidia as nvidia
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_results import make_result

from workshop import errors, records, tables
from workshop.errors import WorkshopError
from workshop.profilers import kernel_file, show
from workshop.profilers.__main__ import main
from workshop.profilers.advisor import advise
from workshop.profilers.load import load, recorded_run
from workshop.profilers.table import HostCall, Kernel, KernelTable, Timeline, timeline

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "profilers"
HOSTILE = "\x1b[31m[bold]evil[/bold]\n<script>alert(1)</script>"
PRINTABLE = "[31m[bold]evil[/bold] <script>alert(1)</script>"
TABLE = KernelTable(
    path=Path("trace.json"),
    tool="torch.profiler",
    kernels=[
        Kernel("nvjet_tst_128x64", "GEMM", 6, 3000.0, 400.0, 600.0, bytes=1e6, flops=2e9),
        Kernel(HOSTILE, "other", 1, 10.0),
    ],
    device="A GPU",
    timeline=Timeline(5000.0, 3010.0),
    steps=3,
    phases_ns={"forward": 1000.0, "backward": 2010.0},
    host_calls={"cudaLaunchKernel": HostCall(7, 700.0)},
    warnings=["left out a row"],
)


# --- the table -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), min_size=1))
def test_busy_time_is_the_number_of_covered_instants(spans: list[tuple[int, int]]) -> None:
    covered = {instant for start, length in spans for instant in range(start, start + length)}
    found = timeline([(float(start), float(start + length)) for start, length in spans])
    assert found is not None and found.busy_ns == len(covered) and found.idle_ns >= 0


# --- kept in a file ------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    csv_path, json_path = kernel_file.write(TABLE, tmp_path)
    read = load(json_path)
    assert read.path == json_path
    assert read.kernels[1].name == PRINTABLE
    assert load(tmp_path).kernels == read.kernels
    read.path, read.kernels[1].name = TABLE.path, HOSTILE
    assert read == TABLE
    assert len(csv_path.read_text().splitlines()) == 1 + 2 + HOSTILE.count("\n")
    shares = [kernel["share"] for kernel in json.loads(json_path.read_text())["kernels"]]
    assert sum(shares) == pytest.approx(1.0)


# --- what real tools wrote -----------------------------------------------------------------------

H200 = "NVIDIA H200"
# A file or folder: (tool, device, steps, names, launches), times in µs, time by category, calls of
# the runtime's functions.
RECORDED: dict[str, tuple[tuple[Any, ...], dict[str, float], dict[str, float], dict[str, int]]] = {
    "kineto/h200_v4_medium_trace.json.gz": (
        ("torch.profiler", H200, 3, 52, 1728),
        {"total": 66485.901, "busy": 66485.835, "span": 68086.148, "forward": 20385.307,
         "backward": 41464.322, "optimizer": 4621.167},
        {"GEMM": 36604.143, "elementwise": 12889.263, "attention": 7061.866, "norm": 5139.980,
         "optimizer": 4621.167, "copy": 169.482},
        {"cudaStreamIsCapturing": 12, "cudaMemcpyAsync": 3, "cudaGraphLaunch": 9,
         "cudaDeviceSynchronize": 1},
    ),
    "proton/h200_proton.hatchet": (
        ("proton", "CUDA, architecture 90, 132 SMs", None, 14, 60),
        {"total": 676.058},
        {"GEMM": 295.996, "elementwise": 188.672, "copy": 170.623, "other": 20.767},
        {},
    ),
    "rocprofv3_invented": (
        ("rocprofv3", "MI300X (MADE UP FOR AN EXERCISE)", 2, 14, 84),
        {"total": 5604.423, "busy": 5604.423, "span": 6538.537, "forward": 1801.360,
         "backward": 3538.468, "optimizer": 264.595},
        {"GEMM": 3169.991, "elementwise": 965.791, "attention": 816.388, "optimizer": 264.595,
         "copy": 201.020, "norm": 186.638},
        {"hipLaunchKernel": 84},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_tool_wrote_gives(name: str) -> None:
    table = load(FIXTURES / name)
    facts, times_us, categories_us, host_calls = RECORDED[name]
    found = (table.tool, table.device, table.steps, len(table.kernels), table.launches)
    assert found == facts
    times = {"total": table.total_ns}
    if table.timeline is not None:
        times |= {"busy": table.timeline.busy_ns, "span": table.timeline.span_ns}
    for found_ns, wanted_us in (
        (times | table.phases_ns, times_us),
        (table.category_ns(), categories_us),
    ):
        assert {key: ns / 1e3 for key, ns in found_ns.items()} == pytest.approx(wanted_us, abs=1e-3)
        assert list(found_ns) == list(wanted_us)
    assert {name: call.calls for name, call in table.host_calls.items()} == host_calls


# --- several devices and processes ---------------------------------------------------------------

TURNS = [(number % 2, 1000 * number) for number in range(200)]
"""(GPU, start) of kernels of 1000 ns: two GPUs take turns, and each is idle half of the time."""


def dispatches(*gpus: int, **more: object) -> str:
    """rocprofv3's trace of the turns of these GPUs."""
    rows = [
        dict(amd.dispatch("k", start, 1000)) | {"Agent_Id": f"Agent {4 + gpu}"} | more
        for gpu, start in TURNS
        if gpu in gpus
    ]
    return amd.table_text(amd.KERNEL_TRACE, rows)


def write_turns(folder: Path, tool: str) -> None:
    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    match tool:
        case "rocprofv3":
            write("run_kernel_trace.csv", dispatches(0, 1))
        case "rocprofv3, a process on each node":
            for node in (0, 1):
                write(f"node{node}/7_kernel_trace.csv", dispatches(node))
        case "nsys":
            rows = [
                nvidia.trace_row("k", start, 1000) | {"Device": f"NVIDIA L40S ({gpu})"}
                for gpu, start in TURNS
            ]
            write("p_cuda_gpu_trace.csv", nvidia.report(nvidia.TRACE, *rows))
        case "torch.profiler":
            events = [
                torch_traces.kernel("k", start / 1000, 1, number + 1, device=gpu)
                for number, (gpu, start) in enumerate(TURNS)
            ]
            write("trace.json", json.dumps({"traceEvents": events}))
        case "rocprof-compute":
            rows = [
                dict(amd.wide_row(number, start, 1000, 1, "k")) | {"GPU_ID": gpu}
                for number, (gpu, start) in enumerate(TURNS)
            ]
            amd.write_workload(folder / "w", pmc_perf=(amd.WIDE, rows))


@pytest.mark.parametrize(
    ("tool", "what", "busiest"),
    [
        ("torch.profiler", "2 devices", "device 0"),
        ("rocprofv3", "2 devices", "Agent 4"),
        ("rocprofv3, a process on each node", "2 processes", "Agent 4 in node0/7"),
        ("nsys", "2 devices", "NVIDIA L40S (0)"),
        # It runs the kernels one at a time: nothing shows when a GPU idles.
        ("rocprof-compute", "2 devices", None),
    ],
)
def test_two_gpus_that_take_turns_are_idle_half_of_the_time(
    tool: str, what: str, busiest: str | None, tmp_path: Path
) -> None:
    write_turns(tmp_path, tool)
    table = load(tmp_path)
    assert (table.launches, table.total_ns) == (200, 200_000)
    found = [advice.sentence for advice in advise(table) if advice.finding == "idle"]
    added_up = f"the kernels of {what} are added up"
    if busiest is None:
        assert table.timeline is None and not found
        assert added_up in table.warnings
        return
    assert table.timeline == Timeline(span_ns=199_000, busy_ns=100_000, calls=100)
    (warning,) = table.warnings
    assert warning.endswith(f"{added_up}; busy and idle time are those of {busiest}, the busiest")
    assert "idles 50% of the time" in found[0] and "runs 100 kernels" in found[0]


@pytest.mark.parametrize(
    ("direction", "source", "destination", "busy_ns"),
    [
        ("HOST_TO_DEVICE", 0, 4, 130),
        ("DEVICE_TO_HOST", 4, 0, 130),
        ("DEVICE_TO_DEVICE", 4, 5, 130),
        ("HOST_TO_HOST", 0, 0, 100),
    ],
)
def test_a_copy_keeps_one_gpu_busy(
    direction: str, source: int, destination: int, busy_ns: float, tmp_path: Path
) -> None:
    kernels = [amd.dispatch("k", 0, 100), dict(amd.dispatch("k", 0, 9)) | {"Agent_Id": "Agent 5"}]
    ends = {"Source_Agent_Id": f"Agent {source}", "Destination_Agent_Id": f"Agent {destination}"}
    copies = [dict(amd.copy(f"MEMORY_COPY_{direction}", 200, 30)) | ends]
    amd.write_run(
        tmp_path, kernel_trace=(amd.KERNEL_TRACE, kernels),
        memory_copy_trace=(amd.COPY_TRACE, copies),
    )  # fmt: skip
    table = load(tmp_path)
    assert table.timeline is not None and table.timeline.busy_ns == busy_ns
    assert "the kernels of 2 devices" in table.warnings[0]


# --- what a path is ------------------------------------------------------------------------------


NSYS = "Time (%),Total Time (ns),Instances,Name\n100,5000,2,my_gemm\n"
TRACED = amd.table_text(amd.KERNEL_TRACE, amd.THREE)
MAY_BE: dict[str, tuple[Path | str, tuple[str, ...]]] = {
    "kineto": (FIXTURES / "kineto/h200_v3_small_step.json.gz", ("r0.json.gz", "a.trace.json.gz")),
    "ncu": (FIXTURES / "ncu/ncu_raw_h200.csv", ("raw.csv", "ncu.log", "raw.csv.gz")),
    "proton": (FIXTURES / "proton/h200_proton.hatchet", ("proton.hatchet", "tree.json")),
    "nsys": (NSYS, ("rep_cuda_gpu_kern_sum.csv.gz", "mine.csv")),
    "rocprofv3": (TRACED, ("run_kernel_trace.csv.gz", "mine.csv", "mine.csv.gz")),
    "copies": (amd.table_text(amd.COPY_TRACE, [amd.copy("X", 0, 7)]), ("1_memory_copy_trace.csv",)),
    "host calls": (amd.table_text(amd.API_TRACE, amd.STEP_CALLS), ("hip_api_trace.csv",)),
    "sums": (amd.table_text(amd.STATS, [amd.SUMS]), ("1_kernel_stats.csv",)),
}


@pytest.mark.parametrize(("content", "names"), MAY_BE.values(), ids=MAY_BE)
def test_a_folder_finds_what_a_file_may_be(
    content: Path | str, names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        file = tmp_path / name / "deeper" / name
        file.parent.mkdir(parents=True)
        if isinstance(content, Path):
            file.write_bytes(content.read_bytes())
        else:
            packed = name.endswith(".gz")
            file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
        (tmp_path / name / "results.json").write_text('{"schema_version": 1}')
        (tmp_path / name / "notes.txt").write_bytes(bytes(range(256)))
        (tmp_path / name / "notes.csv").write_text("a,b\n1,2\n")
        alone = load(file)
        assert alone.kernels or alone.host_calls
        assert dataclasses.replace(load(tmp_path / name), path=file) == alone


def test_a_folder_with_two_profiles_of_ncu_names_the_one_that_is_left_out() -> None:
    table = load(FIXTURES / "ncu")
    left_out = f"{FIXTURES / 'ncu/ncu_raw_h200.csv'} holds another profile, which is left out"
    assert (table.device, table.warnings) == (None, [left_out])


# --- what a runner leaves ------------------------------------------------------------------------

COMMANDS = "# run_tool.sh of v1, 2026-11-20T12:00:00Z\ntool ...\n"


def runners_folder(folder: Path, status: str = "# exit status 0\n") -> Path:
    kernel_file.write(TABLE, folder)
    (folder / "command.txt").write_text(COMMANDS + status)
    return folder


def test_a_folder_above_several_runners_is_not_read_by_guess(tmp_path: Path) -> None:
    csv_file = runners_folder(tmp_path / "v1" / "ncu") / "ncu.csv"
    csv_file.write_bytes((FIXTURES / "ncu" / "ncu_raw_h200.csv").read_bytes())
    assert load(tmp_path / "v1").path == csv_file  # of a single one
    for number in range(11):
        runners_folder(tmp_path / "v1" / f"tool{number:02}")
    (tmp_path / "v1" / "other").mkdir()
    (tmp_path / "v1" / "other" / "command.txt").write_text("another program's\n")
    with pytest.raises(
        WorkshopError, match="v1: 12 profiles are in it, name one of them"
    ) as raised:
        load(tmp_path / "v1")
    line = str(raised.value)
    assert "v1/ncu, " in line and "v1/tool08, and 2 more" in line and "other" not in line


def test_the_record_of_a_run_is_that_of_its_runner(tmp_path: Path) -> None:
    """Not of a neighbour that lies a folder higher."""
    run = make_result()
    trace = tmp_path / "ncu" / "trace" / "deep" / "ncu.csv"
    trace.parent.mkdir(parents=True)
    trace.write_text("")
    records.save(run, tmp_path / "run.jsonl")
    for path in (trace, trace.parent, tmp_path / "ncu"):
        assert recorded_run(path) is None
    runners_folder(tmp_path / "ncu")
    assert recorded_run(trace) is None
    records.save(dataclasses.replace(run, seq_len=77), tmp_path / "ncu" / "run.jsonl")
    for path in (trace, trace.parent, tmp_path / "ncu"):
        found = recorded_run(path)
        assert found is not None and found.seq_len == 77
    (tmp_path / "ncu" / "command.txt").unlink()  # as in results/reference
    assert recorded_run(trace) is None
    assert recorded_run(tmp_path / "ncu" / "kernels.json") is not None


@pytest.mark.parametrize(
    ("status", "warning"),
    [
        ("# exit status 0\n", None),
        ("# exit status 130\n", "its run did not succeed (exit status 130)"),
        ("", "its run did not succeed (interrupted, or still at work)"),
    ],
)
def test_show_warns_of_a_run_that_did_not_succeed(
    status: str, warning: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runners_folder(tmp_path / "ncu", status)
    show.show(folder, output_dir=tmp_path / "elsewhere")
    printed = " ".join(capsys.readouterr().out.split())
    assert ("parts may be missing" in printed) == (warning is not None)
    assert warning is None or warning in printed
    show.show(folder, output_dir=folder)  # as the runner does, before it can know
    assert "parts may be missing" not in capsys.readouterr().out


@pytest.mark.parametrize("words", ["show A", "advise B A", "diff A B", "diff B A"])
def test_every_command_carries_every_warning(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_WIDTH_OF_A_FILE", 1000)
    table = dataclasses.replace(TABLE, warnings=[f"{HOSTILE} is cut off"])
    doubtful, clean = tmp_path / "ncu", tmp_path / "clean"
    kernel_file.write(table, doubtful)
    (doubtful / "command.txt").write_text(COMMANDS + "# exit status 1\n")
    kernel_file.write(dataclasses.replace(table, warnings=[]), clean)
    places = {"A": str(doubtful), "B": str(clean)}
    arguments = [places.get(word, word) for word in words.split()]
    assert main(arguments) == errors.DONE
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert words != "show A" or printed.count("[bold]evil[/bold]") == 2  # a kernel's name as well
    for warning in (f"{PRINTABLE} is cut off", "its run did not succeed (exit status 1)"):
        assert printed.count(warning) == 1


def test_show_warns_of_an_interpreted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    folder = runners_folder(tmp_path / "pytorch_profiler")
    run = make_result(version="v3")
    records.save(dataclasses.replace(run, options={"interpreted": True}), folder / "run.jsonl")
    for _ in range(2):  # the second time from what the first has written
        show.show(folder, output_dir=folder)
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count("interpreted, not comparable") == 1
    assert any("interpreter" in warning for warning in load(folder).warnings)
    (folder / "run.jsonl").write_text("{}")
    show.show(folder)
    assert "run.jsonl: schema_version is None" in " ".join(capsys.readouterr().out.split())


# --- the hot list --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        FIXTURES / "kineto" / "h200_small_2layer_trace.json.gz",
        FIXTURES / "ncu" / "ncu_raw_h200.csv",
        FIXTURES / "proton" / "h200_proton.hatchet",
        ROOT / "results/reference/cpu_amd_epyc/profiles/v1/pytorch_profiler/kernels.json",
    ],
)
@pytest.mark.parametrize("width", [80, 132])
def test_kernels_can_be_told_apart_at_any_width(
    path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, console = load(path), Console(width=width, file=io.StringIO())
    monkeypatch.setattr(tables, "terminal", lambda: console)
    hot = show.hot_list(table, 200)
    names = {line.cells[0] for line in hot.lines}
    assert len(names) == len(table.kernels)
    tables.print_tables([dataclasses.replace(hot, title="", notes=())])
    printed = console.file.getvalue().splitlines()
    for line in hot.lines:
        assert any(all(cell in row for cell in line.cells) for row in printed)
    assert max(map(len, printed)) <= width


def test_the_hot_list_has_every_figure_of_the_tool() -> None:
    hot = show.hot_list(TABLE, 1)
    figures = {
        "calls a step": "2",
        "ms a step": "0.001",
        "mean µs": "0.5",
        "min": "0.4",
        "max": "0.6",
    }
    figures |= {"share": "99.7%", "GB/s": "333", "TFLOP/s": "666.7"}
    assert hot.header == ["kernel", "category", *figures]
    kernel, rest = (list(line.cells) for line in hot.lines)
    assert kernel == ["nvjet_tst_128x64", "GEMM", *figures.values()]
    assert rest == ["1 more", "", "0.3", "0.000", "", "", "", "0.3%", "", ""]
    assert "GPU busy 0.001 of 0.002 ms a step (60.2%), idle 0.001 ms" in hot.notes


# --- as a user types it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["", "show", "show missing", "show . --limit 0", "paint x", "draw FILE"]
)
def test_wrong_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words.split())
    except SystemExit as end:
        status = end.code
    assert status == 2 and capsys.readouterr().err


def test_pytorch_is_not_needed(type_command, tmp_path: Path) -> None:
    for package in ("torch", "triton"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('none here')\n")
    trace = FIXTURES / "kineto" / "h200_v3_small_step.json.gz"
    folder = ROOT / "results/reference/cpu_amd_epyc/profiles/v1/pytorch_profiler"
    code = f"""
from workshop.profilers.__main__ import main
for words in (["show", {str(trace)!r}], ["advise", {str(trace)!r}, {str(folder)!r}],
              ["diff", {str(trace)!r}, {str(trace)!r}],
              ["draw", {str(trace)!r}, "--output", {str(tmp_path / "a.png")!r}]):
    assert main(words) == 0
import torch
"""
    answer = type_command("python", "-c", code, PYTHONPATH=str(tmp_path))
    assert answer.stderr.endswith("ImportError: none here\n"), answer.stderr
