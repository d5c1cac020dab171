"""V3's exercises: an untouched starter fails, the solution passes, wrong answers get a reason."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import pytest
from exercise_cases import (
    FOLDERS,
    ROOT,
    SOLUTIONS,
    changed,
    check_each_answer,
    checked,
    loaded,
    red,
    solution,
    unanswered,
    with_answers,
)

pytest.importorskip("triton")

from workshop import records
from workshop.errors import NotOnThisMachine
from workshop.exercises import frame
from workshop.exercises.frame import Item, Work
from workshop.kernels import inspect, offline
from workshop.labs import LabRun

CODING = ("triton_basics", "custom_kernels")


def green(items: list[Item]) -> list[str]:
    return [item.what for item in items if item.ok]


@pytest.mark.parametrize("name", CODING)
def test_an_untouched_starter_fails_and_the_solution_passes(name) -> None:
    items = checked(name, mine=FOLDERS[name] / frame.STARTER)
    assert len(green(items)) == 1 and green(items)[0].startswith("mine.py can be imported")
    assert "not written yet: starter.py, line" in red(items)
    assert not red(checked(name, **solution(name)))


COMPILE = """
import sys
from pathlib import Path
import torch
from workshop.kernels import offline
from workshop.exercises.frame import import_file
basics, custom = (import_file(Path(path)) for path in sys.argv[2:])
with offline.compiling(offline.CHIPS[sys.argv[1]], "") as launches:
    row, wide = torch.empty(1000), torch.empty(33, 50, dtype=torch.bfloat16)
    basics.add(row, row, torch.empty(1000))
    basics.softmax(torch.empty(5, 63), torch.empty(5, 63))
    basics.transpose(wide, wide.t().contiguous())
    x, weight = wide.requires_grad_(), torch.empty(50, requires_grad=True)
    custom.rms_norm(x, weight, 1e-5).backward(torch.empty_like(wide))
print([launch.error or launch.kernel for launch in launches if launch.error or launch.compiled])
"""


@pytest.mark.parametrize("chip", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_the_solutions_compile_for_a_gpu(chip, type_command) -> None:
    solutions = [SOLUTIONS / name / frame.MINE for name in CODING]
    answer = type_command("python", "-c", COMPILE, chip, *solutions, TRITON_INTERPRET="0")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "['add', 'softmax', 'transpose', 'forward', 'backward']"


# --- triton_basics -------------------------------------------------------------------------------

SEEN = {
    "no mask on the store": (
        "tl.store(out_ptr + n, x + y, mask=inside)",
        "tl.store(out_ptr + n, x + y)",
        r"add: N = 1: 63 elements of memory beside the output were written, the first 1 behind its "
        "last element",
    ),
    "the first block alone": (
        "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside",
        "tl.arange(0, BLOCK)\n    inside",
        r"add: N = 1,000: 936 of 1,000 elements .* are NaN\nfirst at \[64\]:\n  yours +nan",
    ),
    "a tail of zeros": (
        '-float("inf")', "0.0",
        r"softmax: 5 x 63, all about -200: .*\nfirst at \[0, 0\]:\n  yours +0 +0 .*\n  expected  ",
    ),
    "the largest not subtracted": ("tl.exp(x - tl.max(x, 0))", "tl.exp(x)", "all about .* NaN"),
    "strides ignored": (
        "x_ptr + r * stride_xr + c * stride_xc",
        "x_ptr + r * C + c",
        r"every second column of arange as 20 x 80: .*\nfirst at \[0, 1\]:\n"
        r"  yours +40 .*\n  expected +80 ",
    ),
    "columns without a mask": ("(r < R) & (c < C)", "r < R", "transpose: arange as 33 x 50: 462"),
    "no mask on a load": (
        "y_ptr + n, mask=inside", "y_ptr + n",
        r"add: N = 1: 63 elements of memory beside an input were loaded, the first 1 behind ",
    ),
    "plain PyTorch": (
        "    _softmax_kernel[(R,)](", "    out.copy_(x.softmax(-1))\n    return\n    str(",
        "softmax: 3 x 64: no kernel of yours ran",
    ),
    "a wrong name": ("x + y, mask", "x + z, mask", r"mine.py, line \d+, in _add_kernel: NameError"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, whose numbers overflow
@pytest.mark.parametrize("mistake", SEEN)
def test_a_mistake_in_a_first_kernel_is_shown(mistake, tmp_path) -> None:
    old, new, message = SEEN[mistake]
    wrong = red(checked("triton_basics", mine=changed("triton_basics", tmp_path, {old: new})))
    assert re.search(message, wrong), wrong
    assert wrong.count("first at") <= 1, "one red case a kernel is enough"


@pytest.mark.parametrize("masked", [True, False])
def test_kernels_that_are_right_on_a_gpu_are_run_in_the_interpreter_too(
    masked, tmp_path, monkeypatch
) -> None:
    """The interpreter alone sees the loads; here the first run's are not looked at."""
    check = loaded("triton_basics")
    monkeypatch.setattr(check, "INTERPRETED", False)
    monkeypatch.setattr(check, "watched_loads", lambda *inputs: contextlib.nullcontext([]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    load = "y_ptr + n, mask=inside"
    mine = changed("triton_basics", tmp_path, {load: load if masked else "y_ptr + n"})
    items = list(check.check(Work(FOLDERS["triton_basics"], mine=mine)))
    assert items[-1].ok == masked and ("an input were loaded" in items[-1].why) != masked


# --- custom_kernels ------------------------------------------------------------------------------

WRONG = {
    "the mean left out": (
        "(g - normed * (tl.sum(g * normed, 0) / C))", "g",
        r"dx, 7 x 64.*\nfirst at \[0, 0\]:[^~]*leaving out the mean",
    ),
    "a mean over the padded width": (
        "tl.sum(g * normed, 0) / C", "tl.sum(g * normed, 0) / BLOCK_C",
        r"dx, 5 x 72[^~]*a mean over BLOCK_C gives just this",
    ),
    "half of the rows": (
        "dw += dy * normed", "dw += tl.where(r < R // 2, dy * normed, 0.0)",
        r"dw, 7 x 64[^~]*a sum over the first half of the rows gives just this",
    ),
    "eps outside of the root": (
        "1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)", "1.0 / tl.sqrt(tl.sum(x * x, 0) / C) + eps",
        r"y, rms_norm[^~]*eps outside of the root gives just this",
    ),
    "a race on dw": (
        "partial_dw_ptr + p * C + c", "partial_dw_ptr + c",
        r"partial_dw, 63 x 100, 4 programs: rows \[1, 2, 3\] were not written",
    ),
    "every program takes all rows": (
        "range(p, R, tl.num_programs(0))", "range(0, R)",
        r"dw, 63 x 100, 4 programs: 100 of 100 elements are wrong",
    ),
    "dy taken as contiguous": (
        "dy.reshape(rows.shape).contiguous()", "dy.reshape(rows.shape)",
        "dx, rms_norm, and y.sum\\(\\): dy of strides 0: ",
    ),
    "a method in plain PyTorch": (
        "launch_backward(dy_rows, rows, weight, rstd, dx, partial_dw)\n",
        """n = rows * rstd[:, None]
        g = dy_rows * weight
        dx = (rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))).to(rows.dtype)
        partial_dw = (dy_rows * n).float()
""", r"rms_norm of x \(2, 31, 72\): no kernel of yours ran",
    ),
    "a launcher in plain PyTorch": (
        "    _backward_kernel[(len(partial_dw),)](\n",
        """    n = x * rstd[:, None]
    g = dy * weight
    dx.copy_(rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True)))
    partial_dw.zero_()[0] = (dy * n).sum(0)
    return
    _backward_kernel[(len(partial_dw),)](
""", "dx, 7 x 64, 1 program: no kernel of yours ran",
    ),
    "the weight gets nothing": (
        "partial_dw.sum(0).to(weight.dtype), None", "None, None",
        r"dw, rms_norm of x \(2, 31, 72\): yours is nothing \(None\)",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_backward_pass_is_shown(mistake, tmp_path) -> None:
    old, new, message = WRONG[mistake]
    wrong = red(checked("custom_kernels", mine=changed("custom_kernels", tmp_path, {old: new})))
    assert re.search(message, wrong), wrong


# --- performance_tuning --------------------------------------------------------------------------


def compiled(target: str, kernel: str, used_by: str, **more: object) -> offline.Kernel:
    """As workshop.kernels.inspect found it with Triton 3.7."""
    spills = {"bytes": more.pop("spilled", 0)}
    return offline.Kernel(target, kernel, [used_by], spills=spills, **more)


@pytest.fixture
def inspected(tmp_path) -> Path:
    """A results folder with an inspection in it."""
    norm = ("sm_90", "rms_norm_backward")
    plain = {"ADD": False, "BRANCH": False}
    kernels = [
        compiled(*norm, "bf16 medium", constants={"ADD": True}, waves_by={"registers": 2.0}),
        compiled(*norm, "bf16 medium", constants=plain, waves_by={"registers": 3.0}),
        compiled(*norm, "bf16 large", constants=plain, waves_by={"registers": 2.0}),
        compiled("sm_90", "attention_backward_dk_dv", "bf16 medium", spilled=52),
        compiled("gfx942", "attention_backward_dk_dv", "bf16 medium", waves_by={"registers": 2.0}),
    ]
    (tmp_path / "kernels").mkdir()
    text = json.dumps(inspect.as_json(kernels))
    (tmp_path / "kernels/inspect.json").write_text(text, encoding="utf-8")
    return tmp_path


def tuned(results: Path, **changes: object) -> list[Item]:
    """The check's items for the solution's answers, with some changed."""
    answers = with_answers("performance_tuning", results, **changes)
    return checked("performance_tuning", answers=answers, results=results)


def test_empty_and_wrong_answers_are_red_and_the_solution_passes(inspected) -> None:
    items = unanswered("performance_tuning", results=inspected)
    assert [item.what for item in items if item.ok] == [items[0].what]
    items = tuned(inspected)
    assert not red(items)
    assert "measured: results/reference/nvidia_h200/kernels/runs/" in items[0].what
    check_each_answer("performance_tuning", inspected, results=inspected)


def test_ones_own_benchmark_goes_before_the_reference(inspected) -> None:
    def written(sizes: str = "", **ceilings: float | None) -> None:
        """The participant's file: the reference's rows without some."""
        recorded, *_ = records.files_in(ROOT / "results/reference/nvidia_h200/kernels")
        comparison = records.load(recorded)
        kept = [run for run in comparison.runs if isinstance(run, LabRun) and sizes in run.subject]
        comparison.runs = [dataclasses.replace(run, **ceilings) for run in kept]
        comparison.write(records.path_in(inspected / "kernels", comparison.session))

    written(ceiling_gbs=None)  # a laptop's has no times
    assert not red(tuned(inspected))
    written(ceiling_gbs=2000.0)
    wrong = red(tuned(inspected))
    assert "forward, small: of the copy rate: yours, 79%, is 2.11 times too low" in wrong
    written("8192 x 1024", ceiling_gbs=2000.0)
    assert "has no times of rms_norm at 65536 x 2048: run" in red(tuned(inspected))


# --- gluon_attention -----------------------------------------------------------------------------


def test_the_kernels_that_the_check_compiles_give_the_solutions_answers() -> None:
    pytest.importorskip("triton", minversion="3.6")
    unanswered("gluon_attention")
    items = checked("gluon_attention", **solution("gluon_attention"))
    assert not red(items) and all(item.counted for item in items)


PRODUCT, EXPONENTIAL = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24", "MUFU.EX2 R17, R25 ;"
LOOPS = {
    "beside both products": (["H", "H", "M", "0"], (1, 1)),
    "beside the later one": (["H", "H", "1", "M", "M", "0"], (2, 2)),
    "behind the last wait": (["H", "H", "1", "M", "0", "M"], (1, 2)),
    "between two products": (["H", "0", "M", "H"], (0, 1)),
}


@pytest.mark.parametrize("where", LOOPS)
def test_exponentials_beside_a_product_are_counted_in_the_loop(where) -> None:
    loop, found = LOOPS[where]
    words = {"H": f"{PRODUCT} ;\n{PRODUCT}, gsb0 ;", "M": EXPONENTIAL}
    body = [words.get(one) or f"WARPGROUP.DEPBAR.LE gsb0, 0x{one} ;" for one in loop]
    code = [".L_x_0:", EXPONENTIAL, ".L_x_1:", *body, "@P0 BRA `(.L_x_1) ;", EXPONENTIAL]
    check = loaded("gluon_attention")
    assert check.hidden("\n".join([*code, "BRA `(.L_x_0) ;"])) == found


@pytest.mark.parametrize(
    ("compiling", "says"),
    [
        (lambda _: [inspect.Answer([], set(), "3.2")], "Triton 3.6 or newer"),
        (mock.Mock(side_effect=NotOnThisMachine("ptxas is missing")), "ptxas is missing"),
    ],
)
def test_what_can_not_be_compiled_is_left_out(compiling, says, monkeypatch) -> None:
    check = loaded("gluon_attention")
    monkeypatch.setattr(check, "compiled", check.compiled.__wrapped__)
    monkeypatch.setattr(inspect, "inspect_all", compiling)
    items = checked("gluon_attention", **solution("gluon_attention"))
    notes = [item.why for item in items if not item.counted]
    assert not red(items) and len(notes) == 2 and all(says in why for why in notes)


def test_the_tables_and_a_functions_lines_are_shown(capsys) -> None:
    count = loaded("gluon_attention", "count")
    assert count.main([]) == count.main(["--function", "_row_max"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"forward, Gluon +143 +40 ", printed)
    assert re.search(r"from 2,048 tokens on, 128 +1\.20 +1\.21\n", printed)
    assert re.search(r"algorithm \|    most = .*\n +placement \|    return gl.conv", printed)
