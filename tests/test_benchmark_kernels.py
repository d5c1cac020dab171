"""The kernels' benchmark: wrong kernels get no times, work is counted right, figures are shown."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_compare import NO_TRITON, copy_repository
from torch import Tensor

triton = pytest.importorskip("triton")
if not torch.cuda.is_available():  # before anything else imports Triton's language
    os.environ.setdefault("TRITON_INTERPRET", "1")

from workshop import results  # noqa: E402
from workshop.kernels import benchmark as tool  # noqa: E402
from workshop.kernels import cases, measure  # noqa: E402
from workshop.kernels.cases import BACKWARD, BOTH, FORWARD, GBS, OURS, TFLOPS  # noqa: E402
from workshop.kernels.measure import Row, Setting  # noqa: E402
from workshop.run import timing  # noqa: E402
from workshop.run.precision import PRECISIONS  # noqa: E402

COMMAND = ("python", "-m", "workshop.kernels.benchmark")
CPU = torch.device("cpu")
INTERPRETER = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def make_setting(precision: str = "fp32") -> Setting:
    return Setting(CPU, PRECISIONS[precision], seed=1, rounds=3)


def small_case(op: str) -> cases.Case:
    (case,) = cases.make_cases([op], timed=False, quick=True)
    return case


@pytest.fixture
def v3(monkeypatch) -> ModuleType:
    """V3's kernels, each replaced by its plain version: quick, and right until a test breaks it."""
    library = cases.kernels()
    for op in cases.OPS:
        monkeypatch.setattr(library, op, getattr(library, f"{op}_reference"))
    monkeypatch.setattr(library, "INTERPRETED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return library


class Timer:
    """In place of the GPU's: notes which contenders it is to time."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, case: object, right: list[tuple[Row, Any]], *_: object) -> None:
        self.asked = [row.contender for row, _ in right]
        for row, _ in right:
            row.samples = {phase: [1.0] for phase in row.amounts}


# --- as a user types it ----------------------------------------------------------------------


# On a GPU machine Triton is the one of PyTorch's release, whose interpreter may not run there.
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: compiles the kernels")


@NO_GPU
@pytest.mark.slow
def test_without_a_gpu_all_kernels_are_checked_and_none_is_timed(type_command, tmp_path) -> None:
    output = tmp_path / "out"
    finished = type_command(*COMMAND, "--quick", "--output-dir", output, **INTERPRETER)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert not finished.stderr
    assert tool.NOTHING_TIMED in finished.stdout
    assert sorted(path.name for path in output.iterdir()) == ["kernels.json"]
    content = json.loads((output / "kernels.json").read_text())
    assert content["interpreted"] and content["precision"] == "fp32"
    ours = [row for row in content["rows"] if row["contender"] == OURS]
    assert [row["op"] for row in ours] == list(cases.OPS)
    for row in ours:
        assert row["status"] == "pass" and row["errors"]
        assert all(0 <= error < 1e-5 for error in row["errors"].values()), row
    assert not any(row["samples"] for row in content["rows"])
    skipped = {row["contender"] for row in content["rows"] if row["status"] == "skipped"}
    assert {"Liger", "torch.compile"} <= skipped
    assert all(row["note"] for row in content["rows"] if row["status"] == "skipped")


@NO_GPU
@pytest.mark.slow
def test_every_wrong_kernel_in_the_file_is_found(type_command, tmp_path) -> None:
    root = copy_repository(tmp_path / "copy", {})
    facade = root / "version3_triton" / "triton_kernels.py"
    fault = "\n\nimport torch\ndef swiglu(gate, up):\n    return torch.relu(gate) * up\n"
    facade.write_text(facade.read_text() + fault)
    command = (*COMMAND, "--quick", "--op", "swiglu", "swiglu_fused", "--output-dir")
    finished = type_command(*command, tmp_path / "out", folder=root, **INTERPRETER)
    assert finished.returncode == 1, finished.stderr
    assert f"{OURS} FAIL: y is off by " in finished.stdout
    rows = json.loads((tmp_path / "out" / "kernels.json").read_text())["rows"]
    ours = {row["op"]: row["status"] for row in rows if row["contender"] == OURS}
    assert ours == {"swiglu": "FAIL", "swiglu_fused": "pass"}


def test_without_triton_nothing_runs(type_command, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TRITON)
    finished = type_command(*COMMAND, "--output-dir", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert (finished.returncode, finished.stdout) == (77, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: version v3 needs Triton, which is not installed")
    assert not (tmp_path / "out").exists()


WRONG = {
    "--op softmax": "argument --op: invalid choice: 'softmax'",
    "--rounds 0": "--rounds 0: it must lie between 1 and 10000",
    "--drawn 0": "--drawn 0: it must lie between 1 and 1000",
    "--seed -1": "--seed -1: it must lie between 0 and 2^63",
    "--precision tf32": "argument --precision: invalid choice: 'tf32'",
    "--precision fp16": "precision fp16: the CPU does not have it; choose from fp32, bf16",
    "--device tpu": "unknown device 'tpu'",
    "--device cuda:97": "device cuda:97",
    "--output-dir FILE": "FILE can't be written (File exists): choose another --output-dir",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line(words: str, v3, tmp_path, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    typed = [str(file) if word == "FILE" else word for word in words.split()]
    if "--output-dir" not in typed:
        typed += ["--output-dir", str(tmp_path / "out")]
    try:
        status = tool.main(typed)
    except SystemExit as end:  # argparse's own
        status = int(str(end.code))
    *_, line = capsys.readouterr().err.replace(str(file), "FILE").splitlines()
    assert status == 2 and "error: " in line and WRONG[words] in line
    assert list(tmp_path.iterdir()) == [file]


def test_compiled_kernels_can_not_run_on_the_cpu(v3, monkeypatch, capsys) -> None:
    monkeypatch.setattr(v3, "INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert tool.main(["--device", "cpu"]) == 2
    assert "--device cpu: the kernels of version v3 are compiled" in capsys.readouterr().err


def test_what_was_completed_before_ctrl_c_is_saved(v3, tmp_path, monkeypatch, capsys) -> None:
    answers = [[Row("rms_norm", "size", OURS, GBS, {})], KeyboardInterrupt, KeyboardInterrupt]
    monkeypatch.setattr(tool, "measure_case", Mock(side_effect=answers))
    words = ["--op", "swiglu", "rms_norm", "--quick", "--output-dir", str(tmp_path)]
    assert tool.main(words) == 130
    assert "interrupted: the table holds what was completed" in capsys.readouterr().err
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {"rms_norm"}
    (tmp_path / "kernels.json").unlink()
    assert tool.main(words) == 130  # nothing at all was completed
    assert "nothing saved" in capsys.readouterr().err
    assert not (tmp_path / "kernels.json").exists()


# --- planted faults --------------------------------------------------------------------------


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, with a gradient that is off by the factor."""
    return x.detach() + factor * (x - x.detach())


def late_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=2)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


# Operation, what to put in the kernel's place (given the plain version), what the note must name.
FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "ReLU for SiLU": ("swiglu", lambda _: lambda gate, up: gate.relu() * up, "y is off"),
    "halves swapped": ("swiglu_fused",
        lambda plain: lambda both: plain(both.roll(both.shape[-1] // 2, -1)), "y is off"),
    "gradient 5% off": ("swiglu",
        lambda plain: lambda gate, up: plain(gate, scaled_gradient(up, 1.05)),
        "gradient of up is off"),
    "severed": ("swiglu", lambda plain: lambda gate, up: plain(gate.detach(), up),
        "gradient of gate is missing"),
    "no backward": ("swiglu", lambda plain: lambda gate, up: plain(gate, up).detach(),
        "gradient of gate is missing"),
    "NaN": ("swiglu",
        lambda plain: lambda gate, up: plain(gate, up).index_fill(0, torch.tensor([2]), torch.nan),
        "y is off by nan"),
    "another shape": ("swiglu", lambda plain: lambda *both: plain(*both)[:-1], "another shape"),
    "no weight": ("rms_norm",
        lambda plain: lambda x, weight, eps: plain(x, torch.ones_like(weight), eps), "y is off"),
    "no weight gradient": ("rms_norm",
        lambda plain: lambda x, weight, eps: plain(x, weight.detach(), eps),
        "gradient of weight is missing"),
    "stale stream": ("add_rms_norm",
        lambda plain: lambda branch, stream, *rest: (plain(branch, stream, *rest)[0], stream),
        "new stream is off"),
    "one result": ("add_rms_norm",
        lambda plain: lambda *arguments: plain(*arguments)[0], "another shape"),
    "turned back": ("apply_rope",
        lambda plain: lambda q, k, cos, sin: plain(q, k, cos, -sin), "q is off"),
    "turned the other way": ("qkv_attention",
        lambda plain: lambda x, weight, cos, sin, *heads: plain(x, weight, cos, -sin, *heads),
        "out is off"),
    "mask off by one": ("flash_attention", lambda _: late_mask, "out is off"),
    "no scale": ("flash_attention",
        lambda plain: lambda q, k, v: plain(q, k, v, scale=1.0), "out is off"),
    "sum, not mean": ("linear_cross_entropy",
        lambda plain: lambda hidden, weight, targets: plain(hidden, weight, targets) * len(targets),
        "loss is off"),
    "upstream gradient ignored": ("linear_cross_entropy",
        lambda plain: lambda hidden, *rest: plain(scaled_gradient(hidden, 1.3), *rest),
        "gradient of hidden is off"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_turns_its_row_red_and_is_not_timed(fault: str, v3, monkeypatch) -> None:
    op, plant, note = FAULTS[fault]
    case = small_case(op)
    for precision in ("fp32", "bf16"):
        timer = Timer()
        monkeypatch.setattr(v3, op, getattr(v3, f"{op}_reference"))
        before = measure.measure_case(case, make_setting(precision), timer)
        assert before[0].status == "pass" and timer.asked[:2] == [OURS, cases.PLAIN]
        monkeypatch.setattr(v3, op, plant(getattr(v3, f"{op}_reference")))
        ours, *others = measure.measure_case(case, make_setting(precision), timer)
        assert (ours.contender, ours.status, ours.failed) == (OURS, "FAIL", True)
        assert note in ours.note
        assert not ours.samples and OURS not in timer.asked
        assert {row.contender for row in others if row.samples} == set(timer.asked)
        assert "FAIL" not in {row.status for row in others}


def test_only_a_kernel_of_ours_that_is_wrong_or_crashes_has_failed(v3) -> None:
    def raising(error: Exception) -> Callable[..., Tensor]:
        def call(*_: Tensor) -> Tensor:
            raise error

        return call

    crash = raising(RuntimeError("CUDA error\nand a long story"))
    ours = dataclasses.replace(small_case("swiglu"), kernel=crash)
    row = measure.measure_case(ours, make_setting(), Timer())[0]
    assert (row.status, row.failed, row.note) == ("FAIL", True, "RuntimeError: CUDA error")

    rivals = {
        "a": lambda gate, up: gate.relu() * up,
        "b": raising(cases.Absent("not installed")),
        "c": crash,
        "d": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")),
    }
    timer = Timer()
    case = dataclasses.replace(small_case("swiglu"), rivals=rivals)
    rows = measure.measure_case(case, make_setting(), timer)
    found = {row.contender: (row.status, row.note) for row in rows}
    assert not any(row.failed for row in rows) and timer.asked == [OURS, cases.PLAIN]
    assert found["a"][0] == "FAIL"
    assert [found[name] for name in ("b", "c", "d", "torch.compile")] == [
        ("skipped", note)
        for note in ("not installed", "RuntimeError: CUDA error", "out of memory", "needs a GPU")
    ]


def test_a_rival_may_overwrite_its_arguments_without_harm_to_others(v3) -> None:
    """As Liger's in-place kernels do."""

    def overwriting(gate: Tensor, up: Tensor) -> Tensor:
        result = torch.nn.functional.silu(gate) * up
        gate.data.zero_()
        return result.detach().requires_grad_() + 0 * (gate + up).sum()

    rivals = {"a": overwriting, "b": lambda gate, up: gate * up.detach(), "c": v3.swiglu}
    case = dataclasses.replace(small_case("swiglu"), rivals=rivals)
    rows = {row.contender: row for row in measure.measure_case(case, make_setting(), None)}
    assert rows["a"].errors["y"] < 1e-6 and rows["a"].status == "FAIL"  # for its gradients
    assert rows["c"].status == "pass" and not rows["c"].note

    def stamp(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = v3.swiglu(gate, up.clone())
        up.data.zero_()
        return result

    case = dataclasses.replace(case, rivals={"a": stamp})
    rows = {row.contender: row for row in measure.measure_case(case, make_setting(), None)}
    assert (rows["a"].status, rows["a"].note[:10]) == ("pass", "overwrites")


@pytest.mark.parametrize("op", cases.OPS)
def test_the_truth_does_not_depend_on_the_parts_it_is_computed_in(op: str, v3) -> None:
    case, setting = small_case(op), make_setting()
    data = measure.draw_data(case, setting)
    whole = measure.in_parts(dataclasses.replace(case, parts=1), data, torch.float64)
    parts = measure.in_parts(case, data, torch.float64)
    names = {f"gradient of {name}" for name in case.arguments if name not in case.constants}
    assert set(whole) == set(parts) == names | set(case.results)
    for name, true in whole.items():
        assert true.dtype == parts[name].dtype == torch.float64
        torch.testing.assert_close(parts[name], true, rtol=1e-12, atol=1e-12)


def test_arguments_are_random_and_laid_out_as_the_model_has_them(v3) -> None:
    data = measure.draw_data(small_case("flash_attention"), make_setting())
    assert all(x.transpose(1, 2).is_contiguous() and x.std() > 0.5 for x in data.tensors)
    copy = data.fresh()
    assert [x.stride() for x in copy.tensors] == [x.stride() for x in data.tensors]
    assert [x.requires_grad for x in copy.tensors] == [True, True, True, False]
    weight = measure.draw_data(small_case("rms_norm"), make_setting()).arguments[1]
    assert weight.min() < 0.8 and weight.max() > 1.2


# --- work ------------------------------------------------------------------------------------


HEADS = (16, 512, 16, 8, 64)
WORK = [
    ("rms_norm", (8192, 1024), 2, GBS, {FORWARD: 33554432, BACKWARD: 50331648}),
    ("rms_norm", (8192, 1024), 4, GBS, {FORWARD: 67108864, BACKWARD: 100663296}),
    ("add_rms_norm", (8192, 1024), 2, GBS, {FORWARD: 67108864, BACKWARD: 67108864}),
    ("swiglu", (8192, 4096), 2, GBS, {FORWARD: 201326592, BACKWARD: 335544320}),
    ("swiglu_fused", (8192, 4096), 2, GBS, {FORWARD: 201326592, BACKWARD: 335544320}),
    # 12,582,912 numbers of q and k, read and written, and 2 tables of 512 x 64 fp32
    ("apply_rope", HEADS, 2, GBS, dict.fromkeys((FORWARD, BACKWARD), 50331648 + 262144)),
    # 2 x 16 x 16 x 512^2 x 64
    ("flash_attention", HEADS, 2, TFLOPS, {FORWARD: 8589934592, BACKWARD: 21474836480}),
    # 2 x 16 x 512 x 1024 x 2048 and attention's
    ("qkv_attention", HEADS, 2, TFLOPS,
     {FORWARD: 34359738368 + 8589934592, BACKWARD: 68719476736 + 21474836480}),
    # 6 x 8192 x 1024 x 32000
    ("linear_cross_entropy", (8192, 1024, 32000), 2, TFLOPS, {BOTH: 1610612736000}),
]  # fmt: skip


def test_work_is_counted_as_the_field_counts_it() -> None:
    for op, size, itemsize, unit, expected in WORK:
        case = cases.OPS[op].make(*size)
        assert (op, case.unit, case.amounts(itemsize)) == (op, unit, expected)
    assert {op for op, *_ in WORK} == set(cases.OPS)


def test_drawn_sizes_are_the_same_for_a_seed_and_others_for_another(v3) -> None:
    ops = list(cases.OPS)
    found = [cases.draw_cases(ops, 40, seed) for seed in (1, 1, 2)]
    same, again, other = ([(case.op, case.size) for case in its] for its in found)
    assert same == again != other and len(set(same)) == 40
    assert {op for op, _ in same} == set(ops)
    tuned = {case.size for case in cases.make_cases(ops, timed=True, quick=False)}
    assert not tuned & {size for _, size in same}
    assert max(case.amounts(2)[FORWARD] for case in found[0] if case.unit == GBS) < 4e9


# --- the clock, as far as a CPU has one ------------------------------------------------------


def test_contenders_take_turns_and_the_first_turn_is_not_counted() -> None:
    order: list[str] = []

    def timed(name: str, every: int = 1) -> measure.Timed:
        row = Row("op", "size", name, GBS, {FORWARD: 1.0})
        run, refresh = (lambda: order.append(name)), (lambda: order.append(f"({name})"))
        clock = timing.StepClock(CPU)
        return measure.Timed(row, run, 4, refresh, lambda index: None, clock, every)

    a, b, slow = timed("a"), timed("b"), timed("slow", every=2)
    measure.run_rounds([a, b, slow], rounds=4)
    runs = [name for name in order if not name.startswith("(")]
    assert runs == "a b slow b a a b slow b a a b slow".split()
    assert order[:4] == ["(a)", "a", "(b)", "b"]
    assert [len(one.samples()) for one in (a, b, slow)] == [4, 4, 2]


@pytest.fixture
def pretended_gpu(monkeypatch) -> Mock:
    """torch.cuda's functions that the clock calls, on a machine that has no such device."""
    gpu = Mock()
    gpu.set_sync_debug_mode("default")
    gpu.graph = lambda graph, **_: contextlib.nullcontext()
    gpu.get_device_properties.return_value = Mock(L2_cache_size=10_000, total_memory=10**9)
    names = ("CUDAGraph", "graph", "graph_pool_handle")
    for name in (*names, "set_sync_debug_mode", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    return gpu


def mode(gpu) -> str:
    """Of the synchronizations: an error, or as usual."""
    return str(gpu.set_sync_debug_mode.call_args.args[0])


@pytest.mark.parametrize("op", cases.OPS)
def test_all_phases_of_all_right_contenders_are_timed(op: str, v3, pretended_gpu) -> None:
    case, setting = small_case(op), make_setting()
    rows = measure.measure_case(case, setting, measure.time_contenders)
    right = [row for row in rows if row.status == "pass"]
    assert len(right) >= 2 and not any(row.note for row in right)
    for row in right:
        assert set(row.samples) == set(case.phases)
        assert all(len(samples) == setting.rounds for samples in row.samples.values())
        assert len(row.host_us) == setting.rounds and min(row.host_us) > 0
    replays = len(right) * len(case.phases) * (setting.rounds + 1)
    assert pretended_gpu.CUDAGraph().replay.call_count == replays
    assert mode(pretended_gpu) == "default"


def test_a_run_with_a_gpu_shows_and_writes_what_it_timed(
    v3, pretended_gpu, monkeypatch, tmp_path, capsys
) -> None:
    make_cases = cases.make_cases
    stream: Any = object()
    setting = dataclasses.replace(make_setting(), stream=stream)
    monkeypatch.setattr(v3, "INTERPRETED", False)
    monkeypatch.setattr(tool, "make_setting", lambda *_: setting)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext(given))
    monkeypatch.setattr(tool, "measure_ceilings", lambda *_: {GBS: 4000.0, TFLOPS: 800.0})
    monkeypatch.setattr(
        tool, "make_cases", lambda ops, **_: make_cases(ops, timed=False, quick=True)
    )
    monkeypatch.setattr(v3, "rms_norm", lambda x, weight, eps: x * weight)
    assert tool.main(["--output-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{OURS} FAIL: y is off" in printed and tool.NOTHING_TIMED not in printed
    content = json.loads((tmp_path / "kernels.json").read_text())
    for row in content["rows"]:
        wanted = set(row["amounts"]) if row["status"] == "pass" else set()
        assert set(row["samples"]) == wanted


def test_a_contender_that_waits_for_the_device_is_timed_launch_by_launch(v3, pretended_gpu) -> None:
    def failing(message: str) -> Callable[..., Tensor]:
        def call(gate: Tensor, up: Tensor) -> Tensor:
            if mode(pretended_gpu) == "error":
                raise RuntimeError(message)
            result: Tensor = v3.swiglu_reference(gate, up)
            return result

        return call

    waiting, broken = map(failing, ("a synchronizing CUDA operation", "CUDA error: of its own"))
    case = dataclasses.replace(small_case("swiglu"), rivals={"a": waiting, "b": broken})
    rows = measure.measure_case(case, make_setting(), measure.time_contenders)
    notes = {row.contender: row.note for row in rows}
    assert notes["a"] == "forward timed launch by launch: it waits for the device"
    assert notes["b"] == "forward not timed: RuntimeError: CUDA error: of its own"
    assert all(row.host_us for row in rows if row.status == "pass")
    samples = {row.contender: set(row.samples) for row in rows}
    assert samples["a"] == samples[OURS] == {FORWARD, BACKWARD}
    assert samples["b"] == {BACKWARD}
    assert mode(pretended_gpu) == "default"


def test_calls_go_round_over_more_arguments_than_the_cache_holds(v3, pretended_gpu) -> None:
    data = measure.draw_data(small_case("swiglu"), make_setting())
    assert data.bytes == 3 * 13 * 72 * 4
    row = Row("swiglu", "13 x 72", OURS, GBS, {FORWARD: 1.0})
    assert measure._copies(data, row, CPU) == 4  # of 11,232 bytes each, against 4 x 10,000
    row.peak_mb = 150.0
    assert measure._copies(data, row, CPU) == 1  # a fifth of the memory is 200 MB
    seen: list[int] = []
    measure._several(seen.append, 6, 4)
    assert seen == [0, 1, 2, 3, 0, 1]


# --- tables and files ------------------------------------------------------------------------

RUN = tool.Run(
    session="20260102-030405-abcdef",
    created="2026-01-02T03:04:05+00:00",
    command=["python", "-m", "workshop.kernels.benchmark"],
    git_commit="0123456789ab",
    device={"type": "cuda", "name": "NVIDIA H200"},
    software={"torch": "2.11.0", "liger_kernel": "0.8.5"},
    precision="bf16",
    seed=42,
    interpreted=False,
    ceilings={GBS: 4242.0, TFLOPS: 809.0},
    limits={GBS: 4800.0, TFLOPS: 989.4},
)


def canned_row(
    op: str, size: tuple[int, ...], contender: str, rates: tuple[float, ...], **changes: Any
) -> Row:
    """A row whose samples lie around some rates, in the unit of the operation."""
    case = cases.OPS[op].make(*size)
    amounts = case.amounts(2)
    samples = {}
    for (phase, amount), rate in zip(amounts.items(), rates, strict=False):
        middle = amount / rate / cases.UNITS[case.unit] * 1e3
        samples[phase] = [middle * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02)]
    row = Row(op, case.size, contender, case.unit, amounts, samples=samples, **changes)
    if row.status == "pass":
        row.errors = {"y": 1.7e-3, "gradient of x": 2.1e-3}
        row.allowed = {"y": 1.1e-2, "gradient of x": 1.2e-2}
    return row


@pytest.fixture
def canned() -> list[Row]:
    """Rates of the published anchors, where there are some."""
    norm, long = (16384, 4096), (1, 16384, 16, 8, 64)
    head = ("linear_cross_entropy", (8192, 1024, 32000))
    waits = "forward + backward timed launch by launch: it waits for the device"
    return [
        canned_row(
            *("rms_norm", (8192, 1024), OURS, (2900.0, 1500.0)), host_us=[400.0, 380.0, 379.0]
        ),
        canned_row("rms_norm", (8192, 1024), "Liger", (495.0, 312.0)),
        canned_row("rms_norm", norm, "F.rms_norm", (5191.0, 1804.0)),
        canned_row("rms_norm", norm, "Liger", (), status="skipped", note="not installed"),
        canned_row("flash_attention", long, OURS, (), status="FAIL", note="out is off by 3e-1"),
        canned_row("flash_attention", long, "SDPA cuDNN", (434.0, 428.0)),
        canned_row(*head, OURS, (450.0,), peak_mb=550.0),
        canned_row(*head, "Liger", (210.0,), peak_mb=410.0, note=waits),
    ]


def test_a_rate_is_the_work_over_the_median(canned) -> None:
    row = canned[0]
    row.samples = {FORWARD: [0.02, 0.01, 0.5]}
    assert row.median_ms(FORWARD) == 0.02
    assert row.rate(FORWARD) == pytest.approx(33554432 / 0.02e-3 / 1e9)
    assert RUN.share(row, FORWARD) == pytest.approx(33554432 / 0.02e-3 / 1e9 / 4242)
    assert (row.rate(BACKWARD), RUN.share(row, BACKWARD)) == (None, None)
    row = Row("op", "size", OURS, GBS, {}, allowed={"a": 1e-6, "b": 1e-2, "c": 1e-2})
    assert row.worst is None
    row.errors = {"a": 5e-7, "b": 4e-3, "c": 0.0}
    assert row.worst == "a"
    row.errors["c"] = float("nan")
    assert row.worst == "c"


def test_the_table_has_rates_shares_errors_and_status(canned, capsys) -> None:
    assert tool.header(canned[:4], RUN) == [
        *("size", "contender", "forward, GB/s", "backward, GB/s", "of ceiling"),
        *("device / host, µs", "error (allowed)", "status"),
    ]
    assert tool.cells(canned[0], RUN) == [
        *("8192 x 1024", OURS, "2,900 ±1.0%", "1,500 ±1.0%", "68% / 35%", "45 / 380"),
        *("2.1e-03 (1.2e-02)", "pass"),
    ]
    assert tool.cells(canned[1], RUN)[5] == "229 / -"  # of a result without the host's times
    assert tool.cells(canned[3], RUN)[2:] == ["-", "-", "-", "-", "-", "skipped"]
    assert tool.cells(canned[4], RUN)[2:] == ["-", "-", "-", "-", "-", "FAIL"]
    assert tool.header(canned[6:], RUN)[2:5] == ["TFLOP/s", "peak MB", "of ceiling"]
    assert tool.cells(canned[6], RUN)[2:6] == ["450 ±1.0%", "550", "56%", "3,579 / -"]
    checked = dataclasses.replace(RUN, interpreted=True, ceilings={})
    assert tool.header(canned, checked) == ["size", "contender", "error (allowed)", "status"]
    assert tool.cells(canned[0], checked)[2:] == ["2.1e-03 (1.2e-02)", "pass"]

    slower = canned_row("rms_norm", (5, 1024), OURS, (100.0, 100.0))
    fast = canned_row("rms_norm", (5, 1024), "Liger", (200.0, 200.0))
    tool.show([*canned, slower, fast], RUN)
    printed = capsys.readouterr().out
    for line in (
        "rms_norm, bf16, NVIDIA H200",
        "Liger at 16384 x 4096 skipped: not installed",
        f"{OURS} FAIL: out is off by 3e-1",
        "Liger: forward + backward timed launch by launch: it waits for the device",
        "IMPLAUSIBLE: F.rms_norm at 16384 x 4096, forward: 5,191 GB/s, more than the chip's 4,800",
        "ceilings of this run: copy 4,242 GB/s, bf16 product 809 TFLOP/s",
        f"{OURS} is the fastest at 2 of 3 sizes, not at",
        "rms_norm at 5 x 1024: 0.0005 ms, Liger 0.0003 ms (0.50x)",
    ):
        assert line in printed
    assert all(len(line) <= 130 for line in printed.splitlines() if "│" in line)


def test_the_file_is_read_as_it_was_written(canned, tmp_path) -> None:
    canned[0].errors["y"] = float("nan")
    path = tmp_path / "kernels.json"
    results.write_json(path, tool.as_json(canned, RUN))
    assert json.loads(path.read_text())["rows"][0]["errors"]["y"] is None  # JSON has no NaN
    rows, run = tool.load(path)
    assert run == RUN and rows[1:] == canned[1:] and rows[0].samples == canned[0].samples
    assert rows[0].worst == "y", "an error that is no number is the worst"


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_kernel_is_right_and_timed_at_a_plausible_rate(type_command, tmp_path) -> None:
    finished = type_command(*COMMAND, "--quick", "--output-dir", tmp_path)
    print(finished.stdout, finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "IMPLAUSIBLE" not in finished.stdout
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    for row in rows:
        if row["status"] == "pass":
            assert set(row["samples"]) == set(row["amounts"]), row["note"]
            in_place = "overwrites" in row["note"]
            assert (row["peak_mb"] > 0 or in_place) and row["host_us"]
    statuses = {(row["op"], row["contender"]): row["status"] for row in rows}
    assert {statuses[op, name] for op in cases.OPS for name in (OURS, "plain")} == {"pass"}
    notes = [row["note"] for row in rows if row["contender"] in (OURS, "plain", "torch.compile")]
    assert not any(notes), notes  # all captured, none overwrites


@pytest.mark.gpu
def test_a_failed_capture_is_noticed_before_it_is_tried(v3) -> None:
    device = torch.device("cuda", 0)

    def waiting(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = v3.swiglu_reference(gate, up)
        assert result.sum().item() == result.sum().item()
        return result

    case = dataclasses.replace(small_case("swiglu"), rivals={"a": waiting})
    stream = torch.cuda.Stream(device)
    setting = Setting(device, PRECISIONS["fp32"], seed=0, rounds=3, stream=stream)
    with torch.cuda.stream(stream):
        rows = measure.measure_case(case, setting, measure.time_contenders)
        torch.randn(3, device=device)
    notes = {row.contender: row.note for row in rows}
    assert notes["a"] == "forward timed launch by launch: it waits for the device"
    assert not notes[cases.PLAIN]
