"""What `python -m workshop.profilers` makes of a path, and the kernel table kept in a file."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workshop.errors import WorkshopError
from workshop.profilers import kernel_file
from workshop.profilers.load import load
from workshop.profilers.table import HostCall, Kernel, KernelTable, Sums, Timeline, timeline

FIXTURES = Path(__file__).parent / "fixtures" / "profilers"
HOSTILE = "\x1b[31m[bold]evil[/bold]\n<script>alert(1)</script>"
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


def test_intervals_that_overlap_count_once() -> None:
    spans = [(0.0, 10.0), (5.0, 7.0), (8.0, 12.0), (20.0, 21.0), (20.0, 21.0)]
    assert timeline(spans) == Timeline(span_ns=21.0, busy_ns=13.0)
    assert timeline(reversed(spans)) == timeline(spans)
    assert timeline([]) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), min_size=1))
def test_busy_time_is_the_number_of_covered_instants(spans: list[tuple[int, int]]) -> None:
    covered = {instant for start, length in spans for instant in range(start, start + length)}
    found = timeline([(float(start), float(start + length)) for start, length in spans])
    assert found is not None and found.busy_ns == len(covered) and found.idle_ns >= 0


def test_sums_add_single_calls_and_the_tools_own_sums() -> None:
    sums = Sums()
    sums.add("a", 3.0, start_ns=0.0)
    sums.add("a", 1.0, start_ns=2.0)
    sums.add("a", 20.0, calls=4, min_ns=0.5, max_ns=9.0, bytes=8.0)
    sums.add("b", 30.0, calls=2)
    b, a = sums.kernels()
    assert (a.calls, a.total_ns, a.min_ns, a.max_ns, a.bytes) == (6, 24.0, 0.5, 9.0, 8.0)
    assert (b.calls, b.mean_ns, b.min_ns) == (2, 15.0, None)
    assert sums.timeline() == Timeline(3.0, 3.0)


# --- kept in a file ------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    csv_path, json_path = kernel_file.write(TABLE, tmp_path)
    read = load(json_path)
    assert read.path == json_path
    read.path = TABLE.path
    assert read == TABLE
    assert load(tmp_path).kernels == TABLE.kernels
    assert len(csv_path.read_text().splitlines()) == 1 + 2 + HOSTILE.count("\n")
    shares = [kernel["share"] for kernel in json.loads(json_path.read_text())["kernels"]]
    assert sum(shares) == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_broken_table_is_refused_or_sane(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    _, path = kernel_file.write(TABLE, folder)
    content = json.loads(path.read_text())
    value = data.draw(st.sampled_from([None, -1, 1e300, "x", [], {}, True, 0, float("inf")]))
    field = data.draw(st.sampled_from([*content, *content["kernels"][0]]))
    target = content if field in content else content["kernels"][0]
    target[field] = value
    text = json.dumps(content)
    path.write_text(text[: data.draw(st.sampled_from([len(text), len(text) - 9]))])
    try:
        table = load(path)
    except WorkshopError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(kernel.calls >= 1 and kernel.total_ns >= 0 for kernel in table.kernels)


# --- what a path is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("ncu/ncu_raw_h200.csv", "ncu"),
        ("ncu/ncu_details_h200.csv", "ncu"),
        ("proton/h200_proton.hatchet", "proton"),
        ("kineto/h200_small_2layer_trace.json.gz", "torch.profiler"),
    ],
)
def test_our_own_profiles_are_known(name: str, tool: str) -> None:
    table = load(FIXTURES / name)
    assert table.tool == tool and table.total_ns > 0 and not table.warnings


UNKNOWN = {
    "nothing.csv": (b"", "no header"),
    "letters.csv": (b"a,b\n1,2\n", "its columns (a, b) are of no profiler"),
    "other.json": (b'{"answer": 42}', "JSON of no profiler"),
    "binary.csv": (bytes(range(256)), "of no profiler"),
    "cut.json.gz": (b"\x1f\x8b\x08\x00", ""),
    "step.nsys-rep": (b"\x00", "its own tool reads it first: nsys stats"),
    "step.ncu-rep": (b"\x00", "its own tool reads it first: ncu --import"),
    "step.pftrace": (b"\x00", "open it in https://ui.perfetto.dev"),
    "run.db": (b"SQLite format 3\x00" + b"\x01" * 200, "run.db"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_gets_one_line(name: str, tmp_path: Path) -> None:
    content, message = UNKNOWN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkshopError) as caught:
        load(tmp_path / name)
    text = str(caught.value)
    assert name in text and message in text and "\n" not in text


def test_places_without_a_profile(tmp_path: Path) -> None:
    with pytest.raises(WorkshopError, match="no such file or folder"):
        load(tmp_path / "missing")
    with pytest.raises(WorkshopError, match="no profiler's output in it"):
        load(tmp_path)


# --- as a user types it --------------------------------------------------------------------------

PROFILERS = ("python", "-m", "workshop.profilers")


def test_show_diff_and_advise(type_command, tmp_path: Path) -> None:
    trace = FIXTURES / "kineto" / "h200_small_2layer_trace.json.gz"
    answer = type_command(*PROFILERS, "show", trace, "--limit", "3", "--output-dir", tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "GPU busy" in answer.stdout and "more" in answer.stdout
    answer = type_command(*PROFILERS, "diff", trace, tmp_path / "kernels.json")
    assert answer.returncode == 0, answer.stderr
    answer = type_command(*PROFILERS, "advise", trace, tmp_path, "--output-dir", tmp_path)
    assert answer.returncode == 0, answer.stderr
    advice = json.loads((tmp_path / "advice.json").read_text())["advice"]
    assert set(advice) == {str(trace), str(tmp_path)} and all(advice.values())


def test_names_are_shown_as_text(type_command, tmp_path: Path) -> None:
    kernel_file.write(TABLE, tmp_path)
    for words in (("show", tmp_path), ("diff", tmp_path, tmp_path), ("advise", tmp_path)):
        answer = type_command(*PROFILERS, *words, COLUMNS="160")
        assert answer.returncode == 0, answer.stderr
        assert "\x1b" not in answer.stdout
        if words[0] == "show":
            assert "[bold]evil[/bold]" in answer.stdout


@pytest.mark.parametrize(
    "words", [(), ("show",), ("show", "missing"), ("show", ".", "--limit", "0"), ("paint", "x")]
)
def test_wrong_usage(words: tuple[str, ...], type_command) -> None:
    answer = type_command(*PROFILERS, *words)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr and answer.stderr
