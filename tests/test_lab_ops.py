"""The lab's operator bench: wrong operators get no time, bytes are counted right."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tensor_ops
import torch
import torch_tensor_ops_bench as bench
from stored_runs import call_run
from tensor_ops import make_case
from torch import Tensor

from labs.inference_benchmark import documents
from workshop import records
from workshop.errors import ANSWER_IS_NO, DONE
from workshop.labs import LabRow, LabRun, build_rows
from workshop.profilers import load as profiles
from workshop.roofline import model
from workshop.run import hardware
from workshop.run.precision import PRECISIONS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "labs/inference_benchmark/TorchTensorOpsBench"
CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--num-iters", "2", "--num-warmup-iters", "1"]
DIM = "6-32-33"
SIZES = {"mm": ("65-40", "40-33"), "addmm": ("65-40", "40-33"), "matmul": ("3-65-40", "40-33")}
SIZES |= dict.fromkeys(("bmm", "baddbmm"), ("3-65-40", "3-40-33"))
GBS, FP32_TFLOPS = 10.0, 0.1


def measurement(**device: str) -> LabRun:
    rates = {"ceiling_gbs": GBS, "ceiling_tflops": FP32_TFLOPS}
    options = {"precision": "fp32", "cache_bytes": 1000}
    about = {"type": "cpu", "name": "a CPU", **device}
    return call_run(lab=documents.BENCH, **rates, options=options, device=about)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring of ceilings, and a small cache to empty."""
    monkeypatch.setattr(bench, "measure_ceilings", lambda _: measurement())
    monkeypatch.setattr(hardware, "cache_bytes", lambda _: 1000)


def setting(precision: str = "fp32", cache: int = 1000) -> bench.Setting:
    return bench.Setting(CPU, PRECISIONS[precision], cache, 2, 1, False, None)


def run(folder: Path, *words: str) -> tuple[int, list[LabRow]]:
    """The exit status, and the rows of the newest session."""
    status = bench.main([*SMALL, "--output-dir", str(folder), *words])
    runs = records.load_folder(folder, LabRun)
    return status, build_rows(run for run in runs if run.session == runs[-1].session)


# --- the sets and the flags ----------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--inplace"], ["--dtype", "bf16", "--append-dtype"]])
def test_predefined_operators_are_right_and_timed(tmp_path: Path, flags: list[str]) -> None:
    status, rows = run(tmp_path, "--run-predefined", "--input-dim", DIM, *flags)
    assert status == DONE
    suffix = "(bf16)" if "bf16" in flags else ""
    in_place = [
        name + "_" * ("--inplace" in flags and i < 9)
        for i, name in enumerate(tensor_ops.PREDEFINED)
    ]
    assert [row.label.split()[0] for row in rows] == [name + suffix for name in in_place]
    for row in rows:
        first = row.first
        assert row.gate == "pass" and len(first.step_ms) == 2, row
        assert first.bytes_per_step == first.metrics["read"] + first.metrics["written"]
        assert row.ceiling_share == pytest.approx(row.gbs / GBS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("op", [*tensor_ops.OPS, "sparse"])
def test_every_operator_is_right(op: str, precision: str) -> None:
    if op == "sparse":  # with rows that are hit twice
        case = make_case("add_", "sparse", "50-33", "40")
    else:
        case = make_case(op, None, *SIZES.get(op, (DIM, None)))
    run = bench.measure_row(case, setting(precision), measurement())
    assert run.gate.status == "pass" and len(run.step_ms) == 2, run


# --- faults --------------------------------------------------------------------------------------


def rounded(a: Tensor, b: Tensor) -> Tensor:
    """As tf32 does, and worse."""
    return (a.bfloat16() @ b.bfloat16()).float()


def skips_a_row(table: Tensor, added: Tensor) -> Tensor:
    table.add_(added)[int(added._indices()[0, 0])] -= 1
    return table


def moves_another(table: Tensor, added: Tensor) -> Tensor:
    untouched = sorted(set(range(50)) - set(added._indices()[0].tolist()))[0]
    table.add_(added)[untouched, 0] += 1e-3
    return table


FAULTS = {
    "mul": lambda a, b: a + b,
    "div": lambda a, b: (a / b).bfloat16().float(),
    "eq": lambda a, b: torch.zeros_like(a, dtype=torch.bool),
    "exp": lambda a: a.exp() * (1 + 2.0**-20),
    "relu": lambda a: torch.nn.functional.leaky_relu(a, 1e-4),
    "sum": lambda a: a.view(-1)[1:].sum(),
    "prod": lambda a: a.view(-1)[: a.numel() // 2].prod(),
    "mean": lambda a: torch.tensor(torch.nan),
    "std": lambda a: a.std(unbiased=False),
    "argmin": lambda a: a.argmin() + 1,
    "mm": rounded,
}


@pytest.mark.parametrize("op", FAULTS)
def test_a_wrong_operator_is_red(op: str, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(tensor_ops, "find_function", lambda _: FAULTS[op])
    monkeypatch.setattr(tensor_ops, "result_like", like(op))
    dims = SIZES.get(op, (DIM, DIM))
    status, (row,) = run(tmp_path, "--op", op, "--input1-dim", dims[0], "--input2-dim", dims[1])
    assert status == ANSWER_IS_NO
    assert (row.gate, row.first.status, row.first.step_ms) == ("fail", "gate failed", [])
    assert "roundings of fp32, allowed" in capsys.readouterr().out


def like(op: str) -> Any:
    """The true result's shape and type."""
    true = getattr(Tensor, op)

    def result_like(case: tensor_ops.Case, dtype: torch.dtype) -> Tensor:
        return true(*(torch.empty(dim, dtype=dtype, device="meta") for dim in case.dims))

    return result_like


@pytest.mark.parametrize("fault", [skips_a_row, moves_another])
def test_a_wrong_sparse_addition_is_red(fault, monkeypatch) -> None:
    monkeypatch.setattr(tensor_ops, "find_function", lambda _: fault)
    run = bench.measure_row(make_case("add", "sparse", "50-33", "20"), setting(), measurement())
    assert run.gate.status == "fail" and not run.step_ms


def test_one_wrong_element_of_many_parts_is_red(monkeypatch) -> None:
    monkeypatch.setattr(tensor_ops, "PART", 100)
    case = make_case("exp", None, "60-20", None)
    inputs = tensor_ops.draw(case, CPU, torch.float32)
    result = inputs[0].exp()
    assert tensor_ops.error_roundings(case, inputs, result, 2.0**-24) < 8
    result[30, 7] = torch.nan
    assert tensor_ops.error_roundings(case, inputs, result, 2.0**-24) == float("inf")


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "op_type", "dim1", "dim2", "read", "written", "operations"),
    [
        ("add", None, "4-5", None, 160, 80, 20),
        ("add", None, "4-1", "5", 36, 80, 20),
        ("eq_", None, "4-5", None, 160, 80, 20),
        ("sum", None, "4-5", None, 80, 4, 20),
        ("var", None, "4-5", None, 80, 4, 60),
        ("mm", None, "2-3", "3-5", 84, 40, 60),
        ("addmm", None, "2-3", "3-5", 104, 40, 70),
        ("add_", "sparse", "100-5", "3", 24 + 120, 60, 15),
    ],
)
def test_bytes_and_operations(op, op_type, dim1, dim2, read, written, operations) -> None:
    counted = tensor_ops.count_amounts(make_case(op, op_type, dim1, dim2), torch.float32)
    assert counted == tensor_ops.Amounts(read, written, operations)


# --- physics -------------------------------------------------------------------------------------


def timed(op: str, dims: tuple[str, str | None], ms: float, **device: str) -> LabRun:
    """The record of an operator with that time."""
    run = bench.new_run(make_case(op, None, *dims), setting(), measurement(**device))
    run.step_ms, run.gate.status = [ms], "pass"
    return run


@pytest.mark.parametrize(
    ("op", "dims", "cache", "fastest_ms"),
    [
        ("add", ("4800-1000-1000", None), 0, 12.0),
        ("relu", ("1000-1000", None), 10**9, 4 / 4.8e3),  # the result may stay in the cache
        ("relu", ("1000-1000", None), 10**6, 7 / 4.8e3),  # a part of it
        ("mm", ("8192-8192", None), 0, 2 * 8192**3 / 66.9e9),
    ],
)
def test_faster_than_the_chip_is_implausible(op, dims, cache, fastest_ms) -> None:
    for factor, flagged in ((1.01, False), (0.99, True)):
        run = timed(op, dims, fastest_ms * factor, type="cuda", name="NVIDIA H200")
        run.options["cache_bytes"] = cache
        assert any("IMPLAUSIBLE" in flag for flag in model.flags(bench.roofline(run))) == flagged


def test_the_cache_is_emptied_and_inputs_are_restored_outside_of_the_clock(monkeypatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(bench.StepClock, "mark", lambda _: events.append("mark"))
    monkeypatch.setattr(bench.StepClock, "durations_ms", lambda _: [1.0, 9.0, 2.0, 9.0, 3.0])
    samples = bench.time_calls(
        lambda: events.append("call"), lambda: events.append("prepare"), setting()
    )
    assert events == 3 * ["prepare", "mark", "call", "mark"]
    assert samples == [2.0, 3.0]  # the first is the warm-up


def test_an_in_place_operator_begins_with_the_same_numbers_each_time(monkeypatch) -> None:
    case = make_case("exp_", None, DIM, None)
    begins_with: list[Tensor] = []

    def note(call: Any, prepare: Any, _: bench.Setting) -> list[float]:
        for _ in range(2):
            prepare()
            begins_with.append(call.args[0].clone())
            call()
        return [1.0]

    monkeypatch.setattr(bench, "time_calls", note)
    bench.measure_row(case, setting(), measurement())
    (drawn,) = tensor_ops.draw(case, CPU, torch.float32)
    assert all(torch.equal(begun, drawn) for begun in begins_with) and len(begins_with) == 2


# --- files and errors ----------------------------------------------------------------------------


def test_files_hold_every_row(tmp_path: Path, capsys) -> None:
    _, (row,) = run(tmp_path, "--op", "add_", "--input-dim", DIM, "--enable-profiling")
    text = (tmp_path / "ops.md").read_text()
    assert re.search(r"^\| add\\_ 6-32-33, 6-32-33 \| \d", text, re.MULTILINE)
    shown = capsys.readouterr().out
    assert "copy" in shown and "10 GB/s" in shown
    (command,) = re.findall(r"Trace: python -m workshop.profilers show (\S+)", shown)
    assert command == row.first.metrics["trace"]
    kernels = profiles.load(Path(command)).kernels
    assert {kernel.name: kernel.calls for kernel in kernels}["aten::add_"] == 2
    assert len(list(tmp_path.iterdir())) == 3


def test_what_memory_does_not_hold_is_said(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _: 10**9)
    status, (row,) = run(tmp_path, "--input-dim", "1024-1024-1024")
    assert (status, row.first.status, row.first.step_ms) == (ANSWER_IS_NO, "skipped", [])
    assert re.search(r"needs about 1\d\.\d GB, 1\.0 GB are free", capsys.readouterr().out)


def test_the_readmes_commands_are_understood() -> None:
    commands = re.findall(r"^python \S+ (.*)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        assert bench.make_cases(bench.build_parser().parse_args(shlex.split(command)))
