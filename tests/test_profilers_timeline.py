"""The picture of a trace: what is drawn of it, exactly; and that it is drawn, whatever it holds."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch.profiler import ProfilerActivity, profile, record_function

from workshop import errors
from workshop.errors import WorkshopError
from workshop.profilers import picture, table, timeline
from workshop.profilers.timeline import CALLS, KERNELS, OPERATORS, RANGES, Slice, Window

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests/fixtures/profilers/kineto/h200_small_2layer_trace.json.gz"
PAGE = ROOT / "docs/reading_a_trace.md"
SECOND_STEP = Window(13.65, 26.946, "the fixture's second step")

HOST, AUTOGRAD, STREAM = (10, 10), (10, 11), (0, 7)


def event(cat: str, name: str, track: tuple, start: float, length: float, **args: Any) -> dict:
    """Times in µs."""
    times = {"ts": 1e12 + start, "dur": length}
    return {"ph": "X", "cat": cat, "name": name, "pid": track[0], "tid": track[1], **times,
            "args": args}  # fmt: skip


def step(start: float, first: int) -> list[dict]:
    """A step of 1 ms: the main thread launches a product, the autograd thread a kernel and a copy.
    The GPU is so far behind that the copy ends 0.5 ms after the step."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    return [
        event("user_annotation", "step", HOST, start, 1000),
        event("user_annotation", "forward", HOST, start + 10, 300),
        event("user_annotation", "backward", HOST, start + 320, 500),
        event("cpu_op", "aten::linear", HOST, start + 20, 100),
        event("cpu_op", "aten::mm", HOST, start + 30, 80),
        event("cuda_runtime", "cudaLaunchKernel", HOST, start + 50, 10, correlation=first),
        event("cpu_op", node, AUTOGRAD, start + 330, 400),
        event("cuda_driver", "cuLaunchKernelEx", AUTOGRAD, start + 400, 9, correlation=first + 1),
        event("cuda_runtime", "cudaMemcpyAsync", AUTOGRAD, start + 500, 9, correlation=first + 2),
        event("cuda_runtime", "cudaDeviceSynchronize", HOST, start + 900, 50),
        event("kernel", "nvjet_sm90_tst", STREAM, start + 700, 200, correlation=first),
        event("kernel", "elementwise_kernel", STREAM, start + 900, 50, correlation=first + 1),
        event("gpu_memcpy", "Memcpy DtoH", STREAM, start + 1450, 50, correlation=first + 2),
        event("gpu_user_annotation", "step", STREAM, start + 700, 250),
        event("gpu_user_annotation", "forward", STREAM, start + 700, 200),
    ]


def two_steps() -> list[dict]:
    """Within the span that the profiler itself has from 0.1 ms before the first one on."""
    events = [event("Trace", "PyTorch Profiler (0)", ("Spans", "PyTorch Profiler"), -100, 2600)]
    events += step(0, 1) + step(1000, 4)
    for name in ("thread 11 (pt_autograd_0)", "thread 11 (python)"):
        title = {"ph": "M", "name": "thread_name", "pid": 10, "tid": 11, "args": {"name": name}}
        events.append(title)
    return events


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list], Path]:
    def of(events: list) -> Path:
        path = tmp_path / "trace.json"
        devices = [{"id": 0, "name": "a GPU"}]
        path.write_text(json.dumps({"deviceProperties": devices, "traceEvents": events}))
        return path

    return of


def whole(path: Path) -> list[timeline.Lane]:
    trace = timeline.read(path)
    return timeline.arrange(trace, timeline.choose_window(trace, None, None, None))


def at(*spans: tuple[float, float]) -> list[Slice]:
    return [Slice(start, end, f"from {start}", "GEMM") for start, end in spans]


# --- what is read and chosen ---------------------------------------------------------------------


def test_a_step_becomes_lanes(write: Callable[[list], Path]) -> None:
    trace = timeline.read(write(two_steps()))
    window = timeline.choose_window(trace, None, None, None)
    # In Perfetto's times, and to the end of the last kernel that was launched.
    assert window == (pytest.approx(0.1), pytest.approx(1.6), "step 1 of 2")
    lanes = timeline.arrange(trace, window)
    assert [(lane.title, lane.on_gpu) for lane in lanes] == [
        ("main thread: thread 10", False),
        ("autograd thread: thread 11 (pt_autograd_0)", False),
        ("GPU 0 (a GPU), stream 7", True),
    ]
    main, autograd, stream = (
        {kind: [(s.name, s.category) for s in slices] for kind, slices in lane.slices.items()}
        for lane in lanes
    )
    assert main[OPERATORS] == [("aten::linear", "GEMM"), ("aten::mm", "GEMM")] * 2
    assert main[CALLS] == [
        ("cudaLaunchKernel", timeline.CALL),
        ("cudaDeviceSynchronize", timeline.SYNCHRONISATION),
        ("cudaLaunchKernel", timeline.CALL),  # of the next step, which has begun
    ]
    assert autograd[CALLS][:2] == [
        ("cuLaunchKernelEx", timeline.CALL),
        ("cudaMemcpyAsync", timeline.CALL),
    ]
    assert stream[KERNELS] == [
        ("nvjet_sm90_tst", "GEMM"),
        ("elementwise_kernel", "elementwise"),
        ("Memcpy DtoH", "copy"),
    ]
    assert stream[RANGES] == [("forward", timeline.RANGE), ("step", timeline.RANGE)]
    assert lanes[2].slices[KERNELS][0][:2] == pytest.approx((0.8, 1.0))


def test_a_step_or_a_stretch_can_be_chosen(write: Callable[[list], Path]) -> None:
    trace = timeline.read(write(two_steps()))

    def chosen(*which: Any) -> tuple:
        return tuple(timeline.choose_window(trace, *which))

    assert chosen(2, None, None) == (pytest.approx(1.1), pytest.approx(2.6), "step 2 of 2")
    assert chosen(None, 0.5, 1.0) == (0.5, 1.0, "0.50 to 1.00 ms")
    assert chosen(None, 2.0, None)[:2] == (2.0, pytest.approx(2.6))
    assert chosen(None, None, 99.0)[:2] == (0.0, pytest.approx(2.6))
    for which, complaint in (
        ((3, None, None), "no step 3: it has 2 step ranges"),
        ((0, None, None), "no step 0"),
        ((1, 0.5, None), "not both"),
        ((None, 5.0, 4.0), "no stretch from 5 to 4 ms: it lasts from 0 to 2.600 ms"),
        ((None, 2.7, None), "no stretch"),
        ((None, float("nan"), None), "no stretch"),
    ):
        with pytest.raises(WorkshopError, match=complaint):
            timeline.choose_window(trace, *which)
    with pytest.raises(WorkshopError, match=r"nothing happens from 0\.010 to 0\.020 ms"):
        timeline.arrange(trace, Window(0.01, 0.02, ""))


def test_the_pages_figures_are_those_of_the_trace() -> None:
    main, autograd, stream = timeline.arrange(timeline.read(FIXTURE), SECOND_STEP)
    phases = timeline.nest(main.slices[RANGES])[0]
    assert [phase.name for phase in phases] == ["forward", "backward", "optimizer"]
    forward, backward, optimizer = (f"{phase.end - phase.start:.1f} ms" for phase in phases)
    kernels = stream.slices[KERNELS]
    launches = {call.correlation: call for lane in (main, autograd) for call in lane.slices[CALLS]}
    started = [(kernel.start, launches[kernel.correlation].start) for kernel in kernels]
    count = [sum(p.start <= launch <= p.end for _, launch in started) for p in phases]
    delay_us = sorted((start - launch) * 1e3 for start, launch in started)[len(started) // 2]
    share = timeline.busy_shares(kernels, SECOND_STEP, 1)[0]
    on_gpu = next(s for s in stream.slices[RANGES] if s.name == "backward")
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for figure in (
        f"{forward} for forward, {backward} for backward and {optimizer} for the optimizer",
        f"{len(kernels)} kernels: {count[0]} in the forward pass, {count[1]} in the backward pass "
        f"and {count[2]} in the optimizer",
        f"({count[1]} against {count[0]}",
        f"busy {share:.1%} of the time",
        f"half of the kernels began within {delay_us:.0f} µs of their launch",
        f"`backward` lasts {(on_gpu.end - on_gpu.start) * 1e3:.1f} µs",
    ):
        assert figure in page, figure


# --- rows ----------------------------------------------------------------------------------------


def test_slices_nest_by_what_they_run_within() -> None:
    slices = at((0, 10), (1, 9), (2, 3), (3, 4), (9, 10), (10, 20), (15, 25), (21, 22), (30, 31))
    slices += at((30, 30.5))
    assert [[s[:2] for s in row] for row in timeline.nest(reversed(slices))] == [
        [(0, 10), (10, 20), (30, 31)],
        [(1, 9), (9, 10), (15, 25), (30, 30.5)],
        [(2, 3), (3, 4), (21, 22)],
    ]
    # An end that is rounded up does not make the next slice its child.
    assert len(timeline.nest(at((0, 1.000001), (1, 2)))) == 1
    assert timeline.nest([]) == []


tenths = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60)), max_size=60)
intervals = tenths.map(lambda pairs: at(*sorted((s / 10, (s + n) / 10) for s, n in pairs)))


@settings(database=None)
@given(intervals, st.integers(1, 30))
def test_busy_shares_and_gaps_are_those_of_the_union(slices: list[Slice], bins: int) -> None:
    window = Window(0.0, 110.0, "")
    union = table.timeline([s[:2] for s in slices])
    busy = union.busy_ns if union else 0.0
    shares = timeline.busy_shares(slices, window, bins)
    assert len(shares) == bins and all(0 <= share <= 1 for share in shares)
    assert sum(shares) * 110 / bins == pytest.approx(busy, abs=1e-6)
    idle = sum(end - start for start, end in timeline.gaps(slices, window))
    assert idle == pytest.approx(110 - busy, abs=1e-6)


def test_arrows_lead_from_launches_to_their_first_kernels(write: Callable[[list], Path]) -> None:
    events = [
        event("cuda_runtime", "cudaGraphLaunch", HOST, 0, 30, correlation=7),
        event("cuda_runtime", "cudaMalloc", HOST, 50, 1),
        *(event("kernel", f"gemm_{i}", STREAM, 40 + i, 1, correlation=7) for i in range(9)),
        event("kernel", "its launch is not in the trace", STREAM, 60, 1, correlation=8),
        event("kernel", "has none", STREAM, 61, 1),
    ]
    arrows = timeline.flows(whole(write(events)), 5)
    assert [(i, call.name, j, kernel.name) for i, call, j, kernel in arrows] == [
        (0, "cudaGraphLaunch", 1, "gemm_0")
    ]
    arrows = timeline.flows(timeline.arrange(timeline.read(FIXTURE), SECOND_STEP), 7)
    assert len(arrows) == 7
    assert {(thread, stream) for thread, _, stream, _ in arrows} == {(0, 2), (1, 2)}
    assert all(call.correlation == kernel.correlation for _, call, _, kernel in arrows)


# --- the picture ---------------------------------------------------------------------------------


def test_a_picture_of_the_page_fits_a_screen(tmp_path: Path) -> None:
    """`make docs` makes them all by the page's commands: test_doc_images.py, test_readme.py."""
    picture.draw(FIXTURE, tmp_path / "a.png", start_ms=SECOND_STEP.start)
    height, width = imread(tmp_path / "a.png").shape[:2]
    assert width == picture.WIDTH and height <= picture.HEIGHT
    assert imread(ROOT / "docs/images/trace_step.png").shape[:2] == (height, width)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]  # and nothing else is left


@pytest.mark.parametrize(
    ("name", "width", "cut", "shown"),
    [
        ("aten::linear", 90, True, "aten::linear"),
        ("aten::linear", 50, True, "linear"),
        ("aten::linear", 30, True, ""),  # never cut within a word
        ("layers.0.self_attn", 90, True, "0.self_attn"),
        ("autograd::engine::evaluate_function: MulBackward0", 60, True, "Mul…"),
        ("at::native::reduce_kernel<MeanOps>", 90, True, "reduce…"),
        ("at::native::reduce_kernel<MeanOps>", 90, False, ""),
    ],
)
def test_a_name_is_shown_as_far_as_it_fits(name: str, width: float, cut: bool, shown: str) -> None:
    assert picture.fit(name, width, 10, cut=cut) == shown
    (drawn,) = (t.get_window_extent().width for t in [Figure(dpi=100).text(0, 0, shown, size=10)])
    assert drawn <= width


def test_a_trace_without_a_gpu_has_the_hosts_lane_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with record_function("step"):
                with record_function("forward"):
                    loss = model(torch.randn(4, 8)).sum()
                with record_function("backward"):
                    loss.backward()
    (tmp_path / "trace").mkdir()
    profiler.export_chrome_trace(str(tmp_path / "trace" / "host_1.pt.trace.json.gz"))

    trace = timeline.read(tmp_path)  # the folder, as a runner leaves it
    (lane,) = timeline.arrange(trace, timeline.choose_window(trace, 2, None, None))
    assert lane.title.startswith("main thread") and not lane.on_gpu
    rows = timeline.nest(lane.slices[RANGES])
    assert [[s.name for s in row] for row in rows] == [["step"], ["forward", "backward"]]
    assert Counter(s.name for s in lane.slices[OPERATORS])["aten::linear"] == 2
    picture.draw(tmp_path, tmp_path / "step.png", step=2)
    assert imread(tmp_path / "step.png").shape[1] == picture.WIDTH
    assert capsys.readouterr().err == ""


def test_what_can_not_be_drawn_is_one_line(
    write: Callable[[list], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = write(two_steps()), tmp_path / "bad"
    (bad / "folder").mkdir(parents=True)
    (bad / "empty.json").write_text("")
    (bad / "other.json").write_text('{"traceEvents": [{"ph": "i"}, 3]}')
    (bad / "step.nsys-rep").write_bytes(bytes(range(256)))
    for trace, target, complaint in (
        (tmp_path / "none.json", "a.png", "no such file"),
        (bad / "folder", "a.png", "no trace of torch.profiler"),
        (bad / "empty.json", "a.png", "no trace of torch.profiler, the only one"),
        (bad / "step.nsys-rep", "a.png", "no trace of torch.profiler, the only one"),
        (bad / "other.json", "a.png", "row 2: a int is no event"),
        (good, "a.pdf", "ends in .png"),
        (good, "missing/a.png", "can't be written: No such file"),
    ):
        with pytest.raises(WorkshopError, match=complaint) as raised:
            picture.draw(trace, tmp_path / target)
        assert "\n" not in str(raised.value)
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.NotOnThisMachine, match="matplotlib is missing"):
        picture.draw(good, tmp_path / "a.png")
    assert not list(tmp_path.glob("*a.*"))  # nothing half-written
