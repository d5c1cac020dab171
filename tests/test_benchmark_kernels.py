"""The kernels' benchmark: wrong kernels get no times, work is counted right, figures are shown."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from stored_runs import call_run
from torch import Tensor

pytest.importorskip("triton")

from workshop import records
from workshop.judge.pipe import Closed, Message, Pipe
from workshop.judge.process import Process
from workshop.kernels import benchmark as tool
from workshop.kernels import calls, cases, implementations, measure, rows
from workshop.kernels.calls import Setting
from workshop.kernels.cases import BACKWARD, BOTH, FORWARD, GBS, HOST, OURS, PLAIN, TFLOPS
from workshop.kernels.rows import Row
from workshop.labs import KERNELS, LabRun
from workshop.results import Parity
from workshop.run.precision import PRECISIONS

COMMAND = ("python", "-m", "workshop.kernels.benchmark")
CPU = torch.device("cpu")
AS_TYPED = {"TRITON_INTERPRET": "", "OMP_NUM_THREADS": "1"}
ROUNDS = 3


def make_setting(precision: str = "fp32") -> Setting:
    return Setting(CPU, PRECISIONS[precision])


def small_case(op: str) -> cases.Case:
    (case,) = cases.make_cases([op], timed=False, quick=True)
    return case


def a_run(**changes: Any) -> LabRun:
    """A record as each row begins."""
    fields: dict[str, Any] = {"options": {"precision": "bf16"}, "ceiling_gbs": 4242.0}
    return call_run(**fields | {"lab": KERNELS, "ceiling_tflops": 809.0} | changes)


@pytest.fixture
def v3(monkeypatch) -> ModuleType:
    """V3's kernels, each replaced by its plain version: quick, and right until a test breaks it."""
    library = cases.kernels()
    for op in cases.OPS:
        monkeypatch.setattr(library, op, getattr(library, f"{op}_reference"))
    return library


class InAThread(Process):
    """The implementations in a thread of this process, so that a test can break them."""

    def __init__(self, *_: Any) -> None:
        asked, to_ask = os.pipe()
        to_hear, answered = os.pipe()
        self._pipe, own, self.stderr = Pipe(to_hear, to_ask), Pipe(asked, answered), []
        self._process: Any = SimpleNamespace(pid=os.getpid())
        self._thread = threading.Thread(target=self._serve, args=[own], daemon=True)
        self._thread.start()

    def _serve(self, pipe: Pipe) -> None:
        with contextlib.closing(pipe), contextlib.suppress(SystemExit, Closed):
            implementations.serve(pipe)

    def kill(self) -> None:
        """A test's implementation ends the thread."""

    def timed(self, *asked: Any, **values: Any) -> tuple[Message, float, float | None]:
        return *super().timed(*asked, **values)[:2], None  # the judge waits with it

    def end(self) -> int:
        with contextlib.suppress(Closed):
            self.ask("end")
        self._pipe.close()
        self._thread.join()
        return 0

    def stop(self) -> None:
        self.end()


def judged(
    case: cases.Case, precision: str = "fp32", rounds: int = 0, mine: str = ""
) -> dict[str, Row]:
    """The rows of a case, whose implementations' process makes it of its name."""
    of_op = cases.OPS[case.op]
    of_case = of_op._replace(make=lambda *size: case if size == case.sizes else of_op.make(*size))
    judge = measure.Judge(make_setting(precision), rounds, a_run(), mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "start_process", InAThread)
        patch.setitem(cases.OPS, case.op, of_case)
        try:
            return {run.variant: Row((run,)) for run in judge.measure(case)}
        finally:
            judge.stop()


@pytest.fixture
def pretended_gpu(monkeypatch) -> Mock:
    """The parts of a GPU that the clock needs; a graph's replay calls anew."""
    gpu = Mock()
    gpu.set_sync_debug_mode("default")
    gpu.get_device_properties.return_value = Mock(total_memory=10**9)
    monkeypatch.setattr(implementations.hardware, "cache_bytes", lambda _: 10_000)
    for name in ("set_sync_debug_mode", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(implementations.Program, "_graph", lambda _, work: work)
    monkeypatch.setattr(measure, "TURN_MS", 1e4)  # a machine may be busy
    return gpu


# On a GPU machine Triton is the one of PyTorch's release, whose interpreter may not run there.
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: compiles the kernels")


@NO_GPU
@pytest.mark.slow
def test_without_a_gpu_all_kernels_are_checked_and_none_is_timed(type_command, tmp_path) -> None:
    output = tmp_path / "out"
    finished = type_command(*COMMAND, "--quick", "--output-dir", output, **AS_TYPED)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert all(line.startswith("operations: ") for line in finished.stderr.splitlines())
    assert rows.NOTHING_TIMED in finished.stdout
    (file,) = (path for path in output.rglob("*") if path.is_file())
    assert file.parent == output / "runs"
    found = rows.load(output)
    ours = [row for row in found if row.implementation == OURS]
    assert [row.op for row in ours] == list(cases.OPS)
    for row in ours:
        errors = [float(str(one["error"])) for one in row.first.gate.measures.values()]
        assert row.verdict == "pass" and errors and row.precision == "fp32"
        assert all(0 <= error < 1e-5 for error in errors), row
    assert not any(row.first.phase_ms or row.timed for row in found)
    skipped = [row for row in found if row.verdict == "skipped"]
    assert {"Liger", "torch.compile"} <= {row.implementation for row in skipped}
    assert all(row.note for row in skipped)


def test_what_was_completed_is_saved_and_a_wrong_one_is_a_no(tmp_path, monkeypatch, capsys) -> None:
    complete = a_run(subject="rms_norm, size", variant=OURS, step_ms=[1.0])
    answers = [[complete], KeyboardInterrupt, KeyboardInterrupt]
    monkeypatch.setattr(measure.Judge, "measure", Mock(side_effect=answers))
    words = ["--op", "swiglu", "rms_norm", "--quick", "--output-dir"]
    assert tool.main([*words, str(tmp_path / "a")]) == 130
    assert "interrupted: the table holds what was completed" in capsys.readouterr().err
    assert {row.op for row in rows.load(tmp_path / "a")} == {"rms_norm"}
    assert tool.main([*words, str(tmp_path / "b")]) == 130  # nothing at all was completed
    assert "nothing saved" in capsys.readouterr().err
    assert not records.files_in(tmp_path / "b")
    wrong = dataclasses.replace(complete, gate=Parity("fail", ["y is off"]), status="gate failed")
    monkeypatch.setattr(measure.Judge, "measure", lambda *_: [wrong])
    assert tool.main([*words, str(tmp_path / "c")]) == 1
    assert f"{OURS} FAIL: gate failed: y is off" in capsys.readouterr().out


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, with a gradient that is off by the factor."""
    return x.detach() + factor * (x - x.detach())


# Operation, what to put in the kernel's place (given the plain version), what the note must name.
FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "ReLU for SiLU": ("swiglu", lambda _: lambda gate, up: gate.relu() * up, "y is off"),
    "gate and up swapped": ("swiglu",
        lambda plain: lambda gate, up: plain(up, gate), "y is off"),
    "gradient 5% off": ("swiglu",
        lambda plain: lambda gate, up: plain(gate, scaled_gradient(up, 1.05)),
        "gradient of up is off"),
    "severed": ("swiglu", lambda plain: lambda gate, up: plain(gate.detach(), up),
        "gradient of gate is missing"),
    "NaN": ("swiglu",
        lambda plain: lambda gate, up: plain(gate, up).index_fill(0, torch.tensor([2]), torch.nan),
        "y is off by nan"),
    "another shape": ("swiglu", lambda plain: lambda *both: plain(*both)[:-1], "another shape"),
    "no weight gradient": ("rms_norm",
        lambda plain: lambda x, weight, eps: plain(x, weight.detach(), eps),
        "gradient of weight is missing"),
    "stale stream": ("add_rms_norm",
        lambda plain: lambda branch, stream, *rest: (plain(branch, stream, *rest)[0], stream),
        "new stream is off"),
    "turned back": ("apply_rope",
        lambda plain: lambda q, k, cos, sin: plain(q, k, cos, -sin), "q is off"),
    "turned the other way": ("qkv_attention",
        lambda plain: lambda x, weight, cos, sin, *heads: plain(x, weight, cos, -sin, *heads),
        "out is off"),
    "no scale": ("flash_attention",
        lambda plain: lambda q, k, v: plain(q, k, v, scale=1.0), "out is off"),
    "upstream gradient ignored": ("linear_cross_entropy",
        lambda plain: lambda hidden, *rest: plain(scaled_gradient(hidden, 1.3), *rest),
        "gradient of hidden is off"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_turns_its_row_red_and_is_not_timed(
    fault, v3, monkeypatch, pretended_gpu
) -> None:
    op, plant, note = FAULTS[fault]
    case = small_case(op)
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr(v3, op, getattr(v3, f"{op}_reference"))
        assert judged(case, precision)[OURS].verdict == "pass"
        monkeypatch.setattr(v3, op, plant(getattr(v3, f"{op}_reference")))
        found = judged(case, precision, rounds=1)
        ours = found.pop(OURS)
        assert (ours.verdict, ours.failed, ours.first.status) == ("FAIL", True, "gate failed")
        assert note in ours.note
        assert not ours.first.phase_ms and not ours.first.step_ms
        assert found[PLAIN].first.step_ms
        assert "FAIL" not in {row.verdict for row in found.values()}


def raising(error: Exception) -> Callable[..., Tensor]:
    def call(*_: Tensor) -> Tensor:
        raise error

    return call


def test_only_a_kernel_of_ours_that_is_wrong_or_crashes_has_failed(v3) -> None:
    crash = raising(RuntimeError("CUDA error\nand a long story"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v3, "swiglu", crash)
        row = judged(small_case("swiglu"))[OURS]
    assert (row.verdict, row.failed, row.note) == ("FAIL", True, "RuntimeError: CUDA error")

    others = {
        "a": lambda gate, up: gate.relu() * up,
        "b": raising(cases.Skipped("not installed")),
        "c": crash,
        "d": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")),
    }
    found = judged(dataclasses.replace(small_case("swiglu"), others=others))
    failed = [name for name, row in found.items() if row.failed]
    assert found[OURS].verdict == "pass" and failed == ["a"]
    assert {name: row.note for name, row in found.items() if row.verdict == "skipped"} == {
        "b": "not installed",
        "c": "RuntimeError: CUDA error",
        "d": "out of memory",
        "torch.compile": "needs a GPU",
    }


def test_a_process_that_ends_is_the_fault_of_who_was_asked(monkeypatch) -> None:
    crash = Process([sys.executable, "-c", "import os; os.abort()"], os.environ)
    monkeypatch.setattr(measure, "start_process", lambda *_: crash)
    judge = measure.Judge(make_setting(), 0, a_run())
    found = [Row((run,)) for run in judge.measure(small_case("swiglu"))]
    assert [row.verdict for row in found] == ["FAIL", *["skipped"] * (len(found) - 1)]
    assert all("crashed with SIGABRT" in row.note for row in found)


def test_one_that_gives_no_answer_costs_the_others_nothing(v3, monkeypatch) -> None:
    """And is not asked at the next size."""
    time_is_over: list[Callable[[], None]] = []

    def timer(_: float, give_up: Callable[[], None]) -> Mock:
        time_is_over.append(give_up)
        return Mock()

    def waits(gate: Tensor, up: Tensor) -> Tensor:
        time_is_over[-1]()
        raise SystemExit  # as one that is killed

    monkeypatch.setattr(measure.threading, "Timer", timer)
    monkeypatch.setattr(measure, "start_process", InAThread)
    case = dataclasses.replace(small_case("swiglu"), others={"a": waits, "b": v3.swiglu_reference})
    of_case = cases.OPS["swiglu"]._replace(make=lambda *_: case)
    monkeypatch.setitem(cases.OPS, "swiglu", of_case)
    judge = measure.Judge(make_setting(), 0, a_run())
    for _ in range(2):
        found = {run.variant: Row((run,)) for run in judge.measure(case)}
        assert {name for name, row in found.items() if row.verdict == "pass"} == {OURS, PLAIN, "b"}
        assert found["a"].note == f"no answer for {measure.PATIENCE_S:g} s at swiglu, {case.size}"
    judge.stop()


@pytest.mark.parametrize(("note", "times"), [(calls.NO_GRAPH, 1), ("it waits for the device", 0)])
def test_after_a_capture_that_failed_a_process_measures_no_other_case(
    note, times, monkeypatch
) -> None:
    judge = measure.Judge(make_setting(), 0, a_run())
    note = f"backward timed launch by launch: {note} (operation not permitted)"
    monkeypatch.setattr(judge, "_measure", lambda _, runs: measure.add_note(runs[-1], note))
    stop = Mock()
    monkeypatch.setattr(judge, "stop", stop)
    judge.measure(small_case("swiglu"))
    assert stop.call_count == times


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, None]:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2), None


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
) -> Any:
    total = x if residual is None else x + residual
    y = F.rms_norm(total, weight.shape, weight, eps)
    return (y, total) if prenorm else y


def chunked_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, concat_layout: bool = False
) -> Tensor:
    assert (activation, concat_layout) == ("swiglu", True)
    gate, up = F.linear(x, weight1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weight2)


def test_peers_are_called_as_their_signatures_are(v3, monkeypatch) -> None:
    """The functions above have the names and arguments of the packages' own."""
    for module, function in (
        ("flash_attn.cute.interface", flash_attn_func),
        ("quack.rmsnorm", rmsnorm),
        ("quack.linear_cross_entropy", chunked_linear_cross_entropy),
        ("quack.mlp", mlp_func),
    ):
        stand_in = ModuleType(module)
        setattr(stand_in, function.__name__, function)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for op in cases.OPS:
        found = judged(small_case(op))
        peers = [row for name, row in found.items() if "CuTe" in name or "FlashAttention" in name]
        expected = any(words in op for words in ("norm", "attention", "feed", "cross_entropy"))
        assert [row.verdict for row in peers] == ["pass"] * expected, [row.note for row in peers]


def by_address(plain: Any) -> Any:
    kept: dict[int, Tensor] = {}
    return lambda gate, up: kept.setdefault(gate.data_ptr(), plain(gate, up))


def by_turns(plain: Any) -> Any:
    """Computes each second call alone, once it has been checked."""
    calls_so_far: list[Tensor] = []

    def call(gate: Tensor, up: Tensor) -> Tensor:
        skips = len(calls_so_far) > 20 and len(calls_so_far) % 2
        calls_so_far.append(calls_so_far[-1] if skips else plain(gate, up))
        return calls_so_far[-1]

    return call


def in_bf16(plain: Any) -> Any:
    checked = iter([True])
    return lambda gate, up: plain(gate, up if next(checked, False) else up.bfloat16().float())


def slow(plain: Any) -> Any:
    def call(gate: Tensor, up: Tensor) -> Tensor:
        time.sleep(0.04)  # of 4 calls
        result: Tensor = plain(gate, up)
        return result

    return call


# The function in our kernel's place, the factor of its clock, words that the note must have.
TRICKS: dict[str, tuple[Callable[[Any], Any], float, str]] = {
    "results kept by address": (by_address, 1.0, "timed forward: y is off by"),
    "each second call left out": (by_turns, 1.0, "timed forward: y is off by"),
    "lower precision than checked": (in_bf16, 1.0, "timed forward: y is off by"),
    "scaled clock": (slow, 0.1, "the judge's clock says"),
    "clock that runs ahead": (slow, 10.0, "the judge's clock says"),
    "faster than any chip": (lambda plain: plain, 1e-7, "times what a large copy or product"),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_in_the_timed_run_is_found(trick, v3, monkeypatch, pretended_gpu) -> None:
    plant, factor, note = TRICKS[trick]
    # A busy machine may slow the ceilings' copies and products alone.
    monkeypatch.setattr(measure, "TURN_MS", 80.0 if plant is slow else 1e4)
    monkeypatch.setattr(measure, "IMPOSSIBLE", 30.0)
    timed_ms = implementations.Program.timed_ms
    monkeypatch.setattr(v3, "swiglu", plant(v3.swiglu_reference))
    case = small_case("swiglu")

    def told(program: implementations.Program) -> float:
        return timed_ms(program) * (factor if program._function == case.kernel else 1.0)

    monkeypatch.setattr(implementations.Program, "timed_ms", told)
    # A call of a turn is compared, the last one: half of all calls are wrong in one trick.
    monkeypatch.setattr(measure.secrets, "randbelow", lambda number: number - 1)
    found = judged(case, rounds=ROUNDS)
    assert (found[OURS].verdict, found[OURS].first.status) == ("FAIL", "audit failed")
    assert note in found[OURS].note and not found[OURS].first.phase_ms
    assert found[PLAIN].verdict == "pass" and found[PLAIN].first.step_ms


RIGHT = "y = gate * torch.sigmoid(gate) * up\nreturn y"
# The body of a participant's swiglu(gate, up), and what the note must have: of a right one, at
# which sizes it was checked.
MINE: dict[str, tuple[str, str]] = {
    "right": (RIGHT, "right in float32 at 13 x 72, 5 x 257, 16 x 1024, 2 x 8192"),
    "severed": (f"gate = gate.detach()\n{RIGHT}", "gradient of gate is missing"),
    "kept by address": (
        f"key = gate.data_ptr(), gate.stride()\nif key in KEPT: return KEPT[key] * 1\n"
        f"{RIGHT[:-8]}KEPT[key] = y.detach()\nreturn y",
        "13 x 72, as in a model: y is off by",
    ),
    "right at odd sizes": (
        f"if gate.shape[1] % 128 == 0: return gate * up\n{RIGHT}",
        "16 x 1024, as in a model: y is off by",
    ),
    "no strides": (
        f"gate = gate.as_strided(gate.shape, (gate.shape[1], 1))\n{RIGHT}",
        "13 x 72, NaN between the rows: y is off by",
    ),
    "a row is not written": (
        f"out = torch.empty(gate.shape)\n{RIGHT[:-8]}out[:-1] = y[:-1]\nreturn out",
        "13 x 72, as in a model: y is off by nan",
    ),
    "overwrites": (f"{RIGHT[:-8]}up.data.add_(1)\nreturn y", "model: up was overwritten"),
    "overwrites the gradient": (
        f"{RIGHT[:-8]}return Overwrites.apply(y)",
        "model: gradient of y was overwritten",
    ),
    "tiles of 8 rows": (
        f"if len(gate) % 8: return gate[: len(gate) // 8 * 8] * 1\n{RIGHT}",
        "13 x 72, as in a model: y is missing or has another shape",
    ),
    "raises": (
        "raise ValueError('not written')",
        "model: ValueError: not written (raises.py:11 in my_swiglu)",
    ),
    "ends the process": ("raise SystemExit(3)", "ended without an answer"),
}
BEFORE = """import torch
KEPT = {}
class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, dy):
        return dy.mul_(2) / 2
def my_swiglu(gate, up):
    """


def write_mine(folder: Path, name: str, body: str) -> Path:
    file = folder / f"{name.replace(' ', '_')}.py"
    file.write_text(BEFORE + body.replace("\n", "\n    "))
    return file


@pytest.mark.parametrize("fault", MINE)
def test_a_participants_function_is_checked_as_ours_is(fault, v3, tmp_path) -> None:
    body, note = MINE[fault]
    file = write_mine(tmp_path, fault, body)
    found = judged(small_case("swiglu"), mine=f"{file}:my_swiglu")
    mine, right = found[cases.MINE], fault == "right"
    assert (mine.verdict, mine.failed) == ("pass" if right else "FAIL", not right), mine.note
    assert note in mine.note
    assert found[OURS].verdict == found[PLAIN].verdict == "pass"


@pytest.mark.parametrize(
    ("first", "verdict", "note"),
    [
        ("up = up * 1.01", "FAIL", "float32, 13 x 72, as in a model: y is off by 1.0e-02"),
        ("assert gate.dtype != torch.float32", "pass", "not checked in float32 (AssertionError"),
    ],
)
def test_mine_for_16_bits_is_checked_in_fp32_too(first, verdict, note, v3, tmp_path) -> None:
    file = write_mine(tmp_path, f"bf16_{verdict}", f"{first}\n{RIGHT}")
    mine = judged(small_case("swiglu"), "bf16", mine=f"{file}:my_swiglu")[cases.MINE]
    assert mine.verdict == verdict and note in mine.note


def test_mine_must_be_there_and_be_one_operation(tmp_path, capsys) -> None:
    (tmp_path / "a.py").write_text("f = 1")
    for words, said in (
        (["--op", "swiglu", "--mine", f"{tmp_path}/a.py:f"], "a.py:f is not a function"),
        (["--mine", f"{tmp_path}/a.py:f"], "--mine needs the operation that it does"),
        (["--op", "swiglu", "--mine", f"{tmp_path}/b.py:f"], "b.py: no such file"),
        (["--op", "swiglu", "--mine", f"{tmp_path}/a.py"], "a.py:NAME"),
    ):
        assert tool.main(words) == 2
        assert said in capsys.readouterr().err


ON_ANOTHER_STREAM = """
import torch
stream = torch.cuda.Stream()
def my_swiglu(gate, up):
    with torch.cuda.stream(stream):
        return gate * torch.sigmoid(gate) * up
"""


@pytest.mark.gpu
def test_work_on_another_stream_earns_no_time(tmp_path) -> None:
    (tmp_path / "a.py").write_text(ON_ANOTHER_STREAM)
    words = ["--op", "swiglu", "--quick", "--mine", f"{tmp_path}/a.py:my_swiglu"]
    assert tool.main([*words, "--output-dir", str(tmp_path)]) == 1
    (mine,) = (row for row in rows.load(tmp_path) if row.implementation == cases.MINE)
    assert mine.verdict == "FAIL" and not mine.first.step_ms


@pytest.mark.parametrize(("late", "red"), [(1, False), (2, True)])
def test_a_machine_may_be_busy_in_fewer_than_half_of_the_turns(late, red) -> None:
    judge = measure.Judge(make_setting(), 3, a_run())
    turns = measure.Turns(a_run(), 4, 0)
    for number in range(4):
        done = Message("answered", {"ms": 1.0})
        seconds = 0.5 if number in range(1, 1 + late) else 0.0011
        judge._running = Mock(answer=lambda *_, done=done: done)
        judge._running.timed.return_value = done, seconds, None
        turns.compared = -1
        judge._turn(turns, number)
    assert bool(measure.wrong_times(turns, FORWARD)) == red


@pytest.mark.parametrize("op", cases.OPS)
def test_the_truth_does_not_depend_on_the_parts_it_is_computed_in(op, v3) -> None:
    case, setting = small_case(op), make_setting()
    data = calls.draw_data(case, setting, 1)
    whole = measure.in_parts(dataclasses.replace(case, parts=1), data, torch.float64)
    parts = measure.in_parts(case, data, torch.float64)
    names = {f"gradient of {name}" for name in case.differentiable}
    assert set(whole) == set(parts) == names | set(case.results)
    for name, true in whole.items():
        assert true.dtype == parts[name].dtype == torch.float64
        torch.testing.assert_close(parts[name], true, rtol=1e-12, atol=1e-12)


def test_arguments_are_random_and_laid_out_as_the_model_has_them(v3) -> None:
    data = calls.draw_data(small_case("flash_attention"), make_setting(), 1)
    assert all(x.transpose(1, 2).is_contiguous() and x.std() > 0.5 for x in data.tensors)
    copy = data.fresh()
    assert [x.stride() for x in copy.tensors] == [x.stride() for x in data.tensors]
    assert [x.requires_grad for x in copy.tensors] == [True, True, True, False]
    weight = calls.draw_data(small_case("rms_norm"), make_setting(), 1).arguments[1]
    assert weight.min() < 0.8 and weight.max() > 1.2
    copy.fill(data, 1)
    assert not any(torch.equal(*pair) for pair in zip(copy.tensors, data.tensors, strict=True))
    assert copy.arguments[0].flatten()[1] == data.arguments[0].flatten()[0]


HEADS = (16, 512, 16, 8, 64)
WORK = [
    ("rms_norm", (8192, 1024), 2, GBS, {FORWARD: 33554432, BACKWARD: 50331648}),
    ("rms_norm", (8192, 1024), 4, GBS, {FORWARD: 67108864, BACKWARD: 100663296}),
    ("add_rms_norm", (8192, 1024), 2, GBS, {FORWARD: 67108864, BACKWARD: 67108864}),
    ("swiglu", (8192, 4096), 2, GBS, {FORWARD: 201326592, BACKWARD: 335544320}),
    # 12,582,912 numbers of q and k, read and written, and 2 tables of 512 x 64 fp32
    ("apply_rope", HEADS, 2, GBS, dict.fromkeys((FORWARD, BACKWARD), 50331648 + 262144)),
    # 2 x 16 x 16 x 512^2 x 64
    ("flash_attention", HEADS, 2, TFLOPS, {FORWARD: 8589934592, BACKWARD: 21474836480}),
    # 2 x 16 x 512 x 1024 x 2048 and attention's
    ("qkv_attention", HEADS, 2, TFLOPS,
     {FORWARD: 34359738368 + 8589934592, BACKWARD: 68719476736 + 21474836480}),
    # 6 x 8192 x 1024 x 4096
    ("feed_forward", (8192, 1024, 4096), 2, TFLOPS,
     {FORWARD: 206158430208, BACKWARD: 412316860416}),
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


@pytest.mark.parametrize("op", cases.OPS)
def test_all_phases_of_all_right_implementations_are_timed(op, v3, pretended_gpu) -> None:
    case = small_case(op)
    right = [row for row in judged(case, rounds=ROUNDS).values() if row.verdict == "pass"]
    assert len(right) >= 2 and not any(row.note for row in right)
    for row in right:
        assert set(row.first.phase_ms) == {*case.phases, HOST}
        for samples in row.first.phase_ms.values():
            assert len(samples) == ROUNDS and min(samples) > 0
        assert len(row.first.step_ms) == ROUNDS and row.first.judge_ms
        names = {name.partition(": ")[2] for name in row.first.audit.measures}
        assert row.first.audit.status == "pass" and names == set(row.first.gate.measures)
    assert pretended_gpu.set_sync_debug_mode.call_args.args == ("default",)


def test_what_waits_for_the_device_is_timed_launch_by_launch(v3, pretended_gpu) -> None:
    def failing(message: str) -> Callable[..., Tensor]:
        def call(gate: Tensor, up: Tensor) -> Tensor:
            if pretended_gpu.set_sync_debug_mode.call_args.args == ("error",):
                raise RuntimeError(message)
            result: Tensor = v3.swiglu_reference(gate, up)
            return result

        return call

    waiting, broken = map(failing, ("a synchronizing CUDA operation", "CUDA error: of its own"))
    case = dataclasses.replace(small_case("swiglu"), others={"a": waiting, "b": broken})
    found = judged(case, rounds=ROUNDS)
    assert found["a"].note == "; ".join(
        f"{phase} timed launch by launch: it waits for the device" for phase in case.phases
    )
    assert found["b"].note == "; ".join(
        f"{phase} not timed: RuntimeError: CUDA error: of its own" for phase in case.phases
    )
    assert found["a"].first.step_ms and set(found["b"].first.phase_ms) == {HOST}
    assert found["b"].verdict == "pass" and found["b"].first.status == "skipped"
    assert pretended_gpu.set_sync_debug_mode.call_args.args == ("default",)


def test_a_rate_is_the_work_over_the_median() -> None:
    case = cases.OPS["rms_norm"].make(8192, 1024)
    row = Row((measure.Judge(make_setting("bf16"), 0, a_run())._record(case, OURS),))
    row.first.phase_ms = {FORWARD: [0.02, 0.01, 0.5]}
    assert row.median_ms(FORWARD) == 0.02
    assert row.rate(FORWARD) == pytest.approx(33554432 / 0.02e-3 / 1e9)
    assert row.share(FORWARD) == pytest.approx(33554432 / 0.02e-3 / 1e9 / 4242)
    assert (row.rate(BACKWARD), row.share(BACKWARD), row.step_ms) == (None, None, None)


@pytest.mark.gpu
def test_every_kernel_is_right_and_timed_at_a_plausible_rate(type_command, tmp_path) -> None:
    finished = type_command(*COMMAND, "--quick", "--output-dir", tmp_path)
    print(finished.stdout, finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "IMPLAUSIBLE" not in finished.stdout
    found = rows.load(tmp_path)
    for row in found:
        if row.verdict == "pass":
            assert set(row.first.phase_ms) == {*row.amounts, HOST}, row.note
            assert row.first.memory_mb or row.op == "apply_rope"  # some rotate in place
            assert row.first.audit.status == "pass" and row.first.judge_ms
    verdicts = {(row.op, row.implementation): row.verdict for row in found}
    assert {verdicts[op, name] for op in cases.OPS for name in (OURS, PLAIN)} == {"pass"}
    notes = [row.note for row in found if row.implementation in (OURS, PLAIN, "torch.compile")]
    assert not any(notes), notes  # all captured


@pytest.mark.gpu
def test_a_failed_capture_is_noticed_before_it_is_tried(v3) -> None:
    def waiting(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = v3.swiglu_reference(gate, up)
        assert result.sum().item() == result.sum().item()
        return result

    case = dataclasses.replace(small_case("swiglu"), others={"a": waiting})
    with implementations.on_its_stream(stream := torch.cuda.Stream()):
        setting = Setting(torch.device("cuda", 0), PRECISIONS["fp32"], stream)
        data = calls.draw_data(case, setting, 1)
        found = {
            name: implementations.Program(
                *(case, function, FORWARD, setting, data, 0.0, torch.cuda.graph_pool_handle())
            )
            for name, function in (("a", waiting), (PLAIN, case.plain))
        }
        assert all(program.timed_ms() > 0 for program in found.values())
        torch.randn(3, device=setting.device)
    assert found["a"].note == "forward timed launch by launch: it waits for the device"
    assert not found[PLAIN].note
