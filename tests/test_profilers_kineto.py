"""The parser of torch.profiler's traces, against traces made by hand, one made live on the CPU, and
broken ones."""

import gzip
import itertools
import json
import os
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import profile_checks
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from workshop.errors import WorkshopError
from workshop.profilers import kineto, reading
from workshop.profilers import trace as traces
from workshop.profilers.advisor import advise
from workshop.profilers.reading import Problems
from workshop.profilers.show import hot_list
from workshop.profilers.table import KernelTable

H200 = Path(__file__).parent / "fixtures/profilers/kineto/h200_small_2layer_trace.json.gz"
MAIN, AUTOGRAD = 770, 806
"""Threads of the host."""
SECOND, DAY = 1e6, 24 * 3600e6


# Traces made by hand. Times in µs, as in the file.


def event(category: str, name: str, ts: Any, dur: Any, tid: Any = MAIN, **args: Any) -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "pid": MAIN, "tid": tid,
        "ts": ts, "dur": dur, "args": args,
    }  # fmt: skip


def kernel(name: str, ts: float, dur: float, correlation: Any, *, device: int = 0, **args) -> dict:
    return event("kernel", name, ts, dur, tid=7, device=device, correlation=correlation, **args)


def launch(ts: float, correlation: Any, tid: int = MAIN, name: str = "cudaLaunchKernel") -> dict:
    return event("cuda_runtime", name, ts, 3.0, tid, correlation=correlation)


def mark(name: str, ts: float, dur: float) -> dict:
    return event("user_annotation", name, ts, dur)


def write(folder: Path, events: list, **keys: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **keys, "traceEvents": events}))
    return path


def read(folder: Path, *events: Any, **keys: Any) -> KernelTable:
    return kineto.read(write(folder, list(events), **keys))


# A training step whose kernels run long after their launch: those of the forward pass while the
# host is in the backward pass, and so on.
LAGGING_STEP = [
    mark("step", 0, 100),
    mark("forward", 0, 20),
    mark("backward", 25, 40),
    mark("optimizer", 70, 20),
    launch(5, 1),
    launch(30, 2, AUTOGRAD),
    launch(50, 3, AUTOGRAD),
    launch(75, 4),
    launch(95, 5),
    kernel("fwd", 28, 30, 1),
    kernel("bwd", 58, 20, 2),
    kernel("bwd", 78, 17, 3),
    kernel("adam", 95, 4, 4),
    kernel("later", 99, 1, 5),
]


def test_occupancy_is_kinetos_estimate_where_it_makes_one(tmp_path: Path) -> None:
    """It takes 48 KB for all the shared memory that a kernel may have."""
    key = "est. achieved occupancy %"
    ran = [
        kernel(name, 10 * i, 2, i, **{key: percent, "shared memory": size})
        for i, (name, percent, size) in enumerate([("a", 50, 0), ("a", 0, 49152), ("b", 0, 49153)])
    ]
    table = read(tmp_path, *ran)
    assert {k.name: k.occupancy_ns for k in table.kernels} == {"a": 1000.0, "b": None}
    assert hot_list(table, 5).header[-1] == "est. occupancy"
    recorded = kineto.read(H200.with_name("h200_v1_small_step.json.gz"))
    (advice,) = (a for a in advise(recorded) if a.finding == "occupancy")
    assert "Occupancy is estimated at 48%, over 77% of the kernels' time" in advice.sentence


ORPHANS = [*LAGGING_STEP, kernel("early", 1, 7, 99), kernel("none", 2, 9, 0)]
GRAPHS = [
    mark("forward", 0, 20),
    mark("optimizer", 30, 20),
    launch(10, 1, name="cudaGraphLaunch"),
    launch(40, 2, name="cudaGraphLaunch"),
    *(kernel("replayed", 100 + 10 * i, 5, correlation=1 + i // 3) for i in range(4)),
]
PYTORCHS_OWN_MARKS = [
    mark("ProfilerStep#4", 0, 100),
    mark("ProfilerStep#5", 100, 1),  # nothing in it: the profiler was stopped here
    event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 30, 10, AUTOGRAD),
    event("cpu_op", "MulBackward0", 31, 8, AUTOGRAD),
    mark("Optimizer.step#AdamW.step", 60, 20),
    mark("Optimizer.zero_grad#AdamW.zero_grad", 85, 5),
    *(launch(ts, i) for i, ts in enumerate((10, 35, 70, 87), start=1)),
    *(kernel("k", 200 + 10 * i, i, i) for i in range(1, 5)),
]
REPEATED_FORWARD = [  # in the backward pass, to save memory
    mark("forward", 0, 10),
    mark("backward", 20, 50),
    mark("forward", 30, 10),
    *(launch(ts, i) for i, ts in enumerate((5, 25, 35, 45, 70, 71), start=1)),
    *(kernel("k", 100 + i, 1, i) for i in range(1, 7)),
]


@pytest.mark.parametrize(
    ("events", "phases_us", "steps", "calls", "warning"),
    [
        (LAGGING_STEP, {"forward": 30, "backward": 37, "optimizer": 4}, 1, (5, 5), None),
        (ORPHANS, {"forward": 30, "backward": 37, "optimizer": 4}, 1, (7, 5),
         "2 of 7 kernels and copies have no launch"),
        (GRAPHS, {"forward": 15, "optimizer": 5}, None, (4, 2), None),
        (PYTORCHS_OWN_MARKS, {"backward": 2, "optimizer": 3}, 1, (4, 4), None),
        (REPEATED_FORWARD, {"forward": 1, "backward": 4}, None, (6, 6), None),
    ],
)  # fmt: skip
def test_phases_are_those_of_the_launch_on_any_thread(
    tmp_path: Path, events: list, phases_us: dict, steps: int | None, calls: tuple, warning: str
) -> None:
    table = read(tmp_path, *random.Random(0).sample(events, len(events)))
    assert table.phases_ns == {phase: 1000 * us for phase, us in phases_us.items()}
    ((_, host),) = table.host_calls.items()
    assert (table.steps, (table.launches, host.calls)) == (steps, calls)
    assert host.total_ns == 3000 * host.calls
    assert [warning in line for line in table.warnings] == [True] * (warning is not None)


def test_what_was_launched_before_the_first_step_is_left_out(tmp_path: Path) -> None:
    """Before the trace began, or in it; and whether it ran before the step or far into it."""
    step = [
        mark("ProfilerStep#2", 0, 100),
        launch(5, 101),
        launch(50, 103, AUTOGRAD),
        kernel("own", 60, 10, 101),
        kernel("own", 80, 10, 103),
        kernel("without its launch", 90, 1, 102),
        kernel("without a correlation", 91, 1, 0),
    ]
    late = [
        kernel("warm", -900, 50, 97),
        kernel("warm", -800, 50, 0, device=1),
        event("gpu_memcpy", "copy", 10, 5, bytes=64, correlation=98),
        kernel("warm", 20, 30, 99),
        launch(-5, 100),
        kernel("warm", 50, 10, 100),
    ]
    table = read(tmp_path, *late, *step)
    assert {row.name: row.calls for row in table.kernels} == {
        "own": 2, "without its launch": 1, "without a correlation": 1,
    }  # fmt: skip
    assert table.steps == 1 and table.host_calls["cudaLaunchKernel"].calls == 2
    assert table.timeline is not None and table.timeline.span_ns == 32e3
    assert "left out 5 kernels and copies" in table.warnings[0]
    without_steps = read(tmp_path, *late, *step[1:])
    assert (without_steps.launches, without_steps.host_calls["cudaLaunchKernel"].calls) == (9, 3)
    with pytest.raises(WorkshopError, match="no kernels and no operators"):
        read(tmp_path, *late[:2], step[0])


MI300X, RADEON = "AMD Instinct MI300X", "AMD Radeon Graphics"


@pytest.mark.parametrize(
    ("listed", "device", "name"),
    [
        (["H100", "A100"], 1, "A100"),
        (["H100", "A100"], 2, None),
        # Those of AMD are numbered after the host's sockets.
        ([MI300X], 2, MI300X),
        ([MI300X] * 4, 2, MI300X),
        ([MI300X, MI300X, RADEON], 2, None),
    ],
)
def test_a_device_has_its_own_name_or_none(
    tmp_path: Path, listed: list[str], device: int, name: str | None
) -> None:
    properties = [{"id": index, "name": name} for index, name in enumerate(listed)]
    path = write(tmp_path, [kernel("k", 0, 10, 1, device=device)], deviceProperties=properties)
    assert kineto.read(path).device == name


def test_an_amd_trace(tmp_path: Path) -> None:
    """The same categories, HIP's names; numbers as text, as some versions write them, in a bare
    list; and times since 1970, whose nanoseconds are more than a float holds."""
    gemm = "Cijk_Alik_Bljk_BBS_BH_MT128x128x64_MI32x32x8x1"
    ts = 1694039968955744
    events = [
        event("cuda_runtime", "hipLaunchKernel", str(ts), "4.5", correlation="11"),
        event("hip_runtime", "hipExtModuleLaunchKernel", ts + 10, 5, correlation="12"),
        kernel(gemm, ts + 20, 7, "11", device=2),
        kernel(gemm, ts + 30, 9, 12.0, device=2),
        mark("forward", ts + 9, 2),
        event("gpu_memcpy", "Memcpy HtoD (Host -> Device)", ts + 50, 2, device=2, bytes=4096),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", ts + 52, 2, device=2, bytes=4096),
        event("gpu_memset", "Memset (Device)", ts + 54, 1, device=2),
        event("gpu_memcpy", "CopyHostToHost", ts + 55, 1, device=2),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", ts + 56, 2, device=2, bytes=4096),
    ]
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text("\n " + json.dumps(events, indent=1))
    assert kineto.recognises_json(path.read_text())
    table = kineto.read(path)
    first = table.kernels[0]
    assert (first.name, first.category, first.calls, first.total_ns) == (gemm, "GEMM", 2, 16e3)
    assert (first.min_ns, first.max_ns, first.bytes) == (7e3, 9e3, None)
    copies = {kernel.name: (kernel.category, kernel.bytes) for kernel in table.kernels[1:]}
    assert copies == {
        "Memcpy HtoD (Host -> Device)": ("copy", 4096),
        "Memcpy DtoD (Device -> Device)": ("copy", 8192),
        "Memset (Device)": ("copy", None),
        "CopyHostToHost": ("copy", None),
        "Memcpy PtoP (Device -> Device)": ("communication", 4096),
    }
    assert table.phases_ns == {"forward": 9e3}
    assert list(table.host_calls) == ["hipLaunchKernel", "hipExtModuleLaunchKernel"]
    assert table.timeline is not None and table.timeline.span_ns == 38e3


def test_the_h200s_phases_are_known_without_the_workshops_marks(tmp_path: Path) -> None:
    """But for the gradient of the loss, which backward() fills in before autograd takes over."""
    marked = kineto.read(H200).phases_ns
    text = gzip.decompress(H200.read_bytes()).decode()
    for phase in kineto.PHASES:
        text = text.replace(f'"name": "{phase}"', '"name": "something else"')
    (tmp_path / "trace.json").write_text(text)
    found = kineto.read(tmp_path / "trace.json").phases_ns
    assert set(found) == {"backward", "optimizer"}
    for phase, time in found.items():
        assert 0.99 * marked[phase] < time <= marked[phase]


# Traces without a GPU.


def profiled_training(steps: int) -> profile:
    """The profile of a tiny model on the CPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(128, 64)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=steps),
        with_stack=True,
    ) as profiler:
        for _ in range(steps + 2):
            with record_function("forward"):
                loss = model(inputs).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    return profiler


def test_a_live_trace_of_the_cpu(tmp_path: Path) -> None:
    """Own times are those that PyTorch itself adds up from the events in memory."""
    profiler, path = profiled_training(steps=3), tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    table = kineto.read(path)
    operators = [
        event["name"]
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("cat") == "cpu_op"
    ]
    assert {row.name: row.calls for row in table.kernels} == Counter(operators)
    own_us = {row.key: row.self_cpu_time_total for row in profiler.key_averages()}
    for row in table.kernels:
        assert row.total_ns == pytest.approx(own_us[row.name] * 1e3, rel=0.01, abs=20)
        assert 0 <= row.min_ns <= row.mean_ns <= row.max_ns <= row.total_ns
    assert (table.what, table.tool, table.steps) == ("operator", "torch.profiler", 3)
    assert table.device is None and table.timeline is None
    # The ranges cover a whole step but for the profiler's own work: every operator is in one.
    assert sum(table.phases_ns.values()) == pytest.approx(table.total_ns)
    assert set(table.phases_ns) == set(kineto.PHASES) and min(table.phases_ns.values()) > 0
    assert table.category_ns()["GEMM"] > 0


# Files and folders.


def test_a_folders_newest_trace(tmp_path: Path) -> None:
    for number, name in enumerate(("b.pt.trace.json", "a.pt.trace.json")):
        (tmp_path / name).write_text(json.dumps({"traceEvents": [kernel(name, 1, 1, 1)]}))
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "run.jsonl").write_text('{"schema_version": 1}')
    table = kineto.read(tmp_path)
    assert table.path == tmp_path / "a.pt.trace.json"
    assert table.kernels[0].name == "a.pt.trace.json"
    assert table.warnings == [f"{tmp_path} has 2 traces; this is the newest, a.pt.trace.json"]


# Broken events and files.


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ("text", "a str is no event"),
        (kernel("k", 1, -1, 1), "its duration (dur): -1 is no duration"),
        (kernel("k", 1, float("nan"), 1), "its duration (dur): nan is no finite number"),
        (kernel("k", 1, 8 * DAY, 1), "its duration (dur): 691,200 s, more than a week"),
        (kernel("k", None, 1, 1), "its start (ts): None is no number"),
        (kernel("k", -1e300, 1, 1), "its start (ts): -1e+300 is years from the others"),
        (kernel(17, 1, 1, 1), "it has no name"),
        ({"ph": "X", "cat": "kernel", "name": "k", "ts": 1}, "its duration (dur): None"),
        ({"ph": "X", "cat": "user_annotation", "name": "forward", "ts": 1, "dur": []}, "its"),
    ],
)
def test_an_event_that_makes_no_sense_is_left_out(tmp_path: Path, broken, what: str) -> None:
    """Wherever it is in the file."""
    for place in range(3):
        events = [kernel("good", 0, 1, 1), kernel("good", 5, 1, 2)]
        events.insert(place, broken)
        table = read(tmp_path, *events)
        assert [(row.name, row.calls) for row in table.kernels] == [("good", 2)]
        assert f"row {place + 1}: {what}" in table.warnings[0] and len(table.warnings) == 1


@pytest.mark.parametrize(
    ("host", "seconds", "is_left_out"),
    [
        ([], 3600, False),
        ([launch(0, 1)], 9, False),
        ([launch(0, 1)], 11, True),
        ([launch(0, 1), launch(3600 * SECOND, 0, name="cudaDeviceSynchronize")], 3600, False),
        ([launch(0, 1), event("Trace", "PyTorch Profiler (0)", 0, 3601 * SECOND)], 3600, False),
    ],
)
def test_a_kernel_that_outlasts_all_that_the_host_did_is_left_out(
    tmp_path: Path, host: list, seconds: int, is_left_out: bool
) -> None:
    long = kernel("long", 20, seconds * SECOND, 1)
    path = write(tmp_path, [kernel("good", 10, 1, 1), long, *host])
    table = kineto.read(path)
    names = ["good"] if is_left_out else ["good", "long"]
    assert sorted(row.name for row in table.kernels) == names
    assert len(table.warnings) == is_left_out
    assert not is_left_out or f"row 2: its duration (dur): {seconds:,} s" in table.warnings[0]


def test_a_truncated_gzip_gives_its_beginning(tmp_path: Path) -> None:
    """Cut to three quarters: all that can be unpacked, as if it were a whole file."""
    packed = H200.read_bytes()
    packed = packed[: len(packed) * 3 // 4]
    (tmp_path / "cut.json").write_bytes(zlib.decompressobj(wbits=31).decompress(packed))
    (tmp_path / "cut.json.gz").write_bytes(packed)
    expected, table = (kineto.read(tmp_path / name) for name in ("cut.json", "cut.json.gz"))
    assert table.kernels == expected.kernels and table.phases_ns == expected.phases_ns
    assert 100 < table.launches < kineto.read(H200).launches
    assert table.warnings[-1].startswith(f"left out {tmp_path / 'cut.json.gz'}, row ")
    assert table.warnings[-1].endswith(": the text ends here")


# Reading a file block by block.


def entries(path: Path) -> tuple[list[tuple[int, Any]], Problems]:
    problems = Problems(path)
    return list(traces._entries(path, problems)), problems


@pytest.fixture(params=[1, 17, 1 << 20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is read at a time."""
    monkeypatch.setattr(traces, "_BLOCK", request.param)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("block")
def test_a_text_cut_anywhere_gives_the_entries_before_the_cut(tmp_path: Path) -> None:
    events = [{"ph": [1, "]"]}, "two é", {"x": float("inf")}, {}, [None]]
    text = json.dumps({"after": 0, "traceEvents": events, "z": {}}, ensure_ascii=False)
    ends = [text.index(end) + len(end) for end in ('"]"]}', 'é"', "y}", "{}", "[null]")]
    path = tmp_path / "cut.json"
    for cut in range(text.index("[") + 1, len(text) + 1):
        path.write_text(text[:cut])
        found, problems = entries(path)
        assert [entry for _, entry in found] == events[: sum(end <= cut for end in ends)]
        assert problems.count == (cut < text.index("], ") + 1), text[:cut]


BROKEN_EVENTS = {
    "infinity": '{"ph": "X", "dur": 0, "args": {"bandwidth (GB/s)": inf, "grid": [1, 1]}}',
    "nan": '{"ph": "X", "args": {"occupancy %": -nan}}',
    "no value": '{"ph": "X", "args": {"In split size": , "x": 1}}',
    "control character": '{"ph": "X", "name": "config.py(0): \x01\x0b", "dur": 3}',
    "quotes": '{"ph": "X", "name": "make("inner", ["a"], {"b"})\n(1): <module>", "dur": 3}',
    "one quote": '{"ph": "X", "name": "a"b", "args": {"x": 1}}',
    "backslash": r'{"ph": "X", "name": "pkg\sub\__init__.py(12): _lazy", "dur": 3}',
    "no end": '{"ph": "X", "args": {"a": {"b": 1}, "dur": 3',
    "other objects in it": '{"ph": "X", "args": {"list": [{"a": inf}, {"b": [{"a": 1}]}]}}',
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("broken", BROKEN_EVENTS.values(), ids=BROKEN_EVENTS)
def test_what_follows_a_broken_event_is_read(tmp_path: Path, broken: str) -> None:
    """Wherever it is, in one line or in many."""
    events = [json.dumps(kernel(f"k{i}", i, 1, i)) for i in range(3)]
    path = tmp_path / "broken.json"
    for comma, place in itertools.product((", ", ",\n"), range(4)):
        listed = comma.join([*events[:place], broken, *events[place:]])
        path.write_text(f'{{"traceEvents": [{listed}], "other": [{{"a": 1}}]}}')
        found, problems = entries(path)
        assert [json.dumps(entry) for _, entry in found] == events
        assert [row for row, _ in found] == [row for row in range(1, 5) if row != place + 1]
        assert problems.warnings()[0].startswith(f"left out {path}, row {place + 1}: ")
        assert problems.count == 1


# A million events.

EVENTS = 1_000_000
GEMM = "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT"
SHAPES = {"Input Dims": [[1024, 512], [512, 512], []], "Input type": ["float", "float", ""]}
A_CALL = [
    event("cpu_op", "aten::linear", "TS", 18, **{"Ev Idx": "ID"}, **SHAPES),
    event("cpu_op", "aten::addmm", "TS", 9, **{"Ev Idx": "ID"}, **SHAPES),
    launch("TS", "ID"),
    kernel(GEMM, "TS", 2.4, "ID", grid=[1024, 1, 1], block=[128, 1, 1], **{"blocks per SM": 7.7}),
]


@pytest.mark.slow
def test_a_million_events_in_a_gigabyte(tmp_path: Path) -> None:
    call = ",\n".join(json.dumps(event) for event in A_CALL)
    call = call.replace('"TS"', "%.3f").replace('"ID"', "%d")
    calls = EVENTS // len(A_CALL)
    with (tmp_path / "trace.json").open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        for number in range(1, calls + 1):
            ts = 4309434489349.691 + 20 * number
            file.write(call % (ts, number, ts + 1, number, ts + 2, number, ts + 12, number))
            file.write(",\n")
        file.write(json.dumps(mark("forward", 4309434489000, 1e9)) + "]}")
    reading = profile_checks.read_trace(tmp_path / "trace.json")
    assert reading.launches == calls
    assert reading.phases_ns["forward"] == pytest.approx(calls * 2400)
    assert reading.peak_bytes < 1e9
