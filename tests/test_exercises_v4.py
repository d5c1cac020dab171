"""V4's exercises: an untouched starter fails, the solution passes, wrong answers get a reason."""

import dataclasses
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from exercise_cases import (
    FOLDERS,
    changed,
    check_each_answer,
    checked,
    loaded,
    only_fault,
    red,
    shown,
    solution,
    unanswered,
    with_answers,
)
from test_compare import needs_triton

from analysis_tools import regression_tester
from workshop import records, results
from workshop.exercises import frame
from workshop.exercises.frame import Work
from workshop.profilers import kernel_file
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import RunResult

# --- ultra_fusion --------------------------------------------------------------------------------

CALLS = {
    "eager": {"aten::mm": 63, "aten::matmul": 21, "aten::mul": 136, "aten::view": 2467},
    "pytorch_profiler": {
        "aten::mm": 62,
        "aten::addmm": 1,
        "graph_0_cpp_fused__unsafe_view_mul_silu_3": 4,
        "graph_0_cpp_fused__unsafe_view_mul_silu_silu_backward_view_2": 4,
        "graph_0_cpp_fused_add_embedding_mean_mul_pow_rsqrt_0": 35,
        "aten::as_strided": 740,
    },
}
"""Calls in a step, as counted on a CPU with PyTorch 2.13, under fewer names."""
STEPS = 2


@pytest.fixture
def measured(tmp_path) -> Path:
    """A participant's results with the two profiles that the sheet asks for."""
    profile(tmp_path, "eager", compile="none", cuda_graph=False)
    profile(tmp_path, "pytorch_profiler", compile="default", cuda_graph=False)
    return tmp_path


def profile(
    measured: Path, folder: str, calls: dict[str, int] | None = None, **options: Any
) -> None:
    """Writes what run_pytorch_profiler.py leaves."""
    place = measured / "profiles" / "v4" / folder
    kernels = [
        Kernel(name, "other", STEPS * count, 1e6)
        for name, count in (calls or CALLS[folder]).items()
    ]
    table = KernelTable(Path("trace"), "torch.profiler", kernels, what="operator", steps=STEPS)
    kernel_file.write(table, place)
    record = stored_runs.REFERENCE / "cpu_amd_epyc/profiles/v4/pytorch_profiler/run.jsonl"
    run = records.load_run(record)
    records.save(dataclasses.replace(run, options=run.options | options), place / "run.jsonl")
    (place / "command.txt").write_text("# run_pytorch_profiler.py\n# exit status 0\n")


def test_empty_and_wrong_answers_of_fusion_are_red_and_the_solution_passes(measured) -> None:
    assert not any(item.ok for item in unanswered("ultra_fusion", results=measured))
    items = checked("ultra_fusion", **solution("ultra_fusion"), results=measured)
    assert not red(items)
    assert "predicted 70%, measured 68.5%: a good prediction" in shown(items)
    check_each_answer("ultra_fusion", measured, results=measured)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"compiled_calls": 1692}, "yours, 1,692: that is of all 2 steps"),
        ({"swiglu_kernel": "aten::silu"}, "no kernel is called 'aten::silu'; look among"),
        (
            {"swiglu_kernel": "graph_0_cpp_fused__unsafe_view_mul_silu_silu_backward_view_2"},
            "is another one: the forward kernel's name has mul and silu, and no",
        ),
    ],
)
def test_a_wrong_finding_about_fusion_says_why(answers, why, measured, tmp_path) -> None:
    assert why in only_fault("ultra_fusion", tmp_path, answers, results=measured)


@pytest.mark.parametrize(
    ("folder", "how", "why"),
    [
        ("eager", {"compile": "default"}, "eager is of a compiled or captured run"),
        ("pytorch_profiler", {"compile": "none"}, "pytorch_profiler is of an eager run"),
        (
            "pytorch_profiler",
            {"calls": {"aten::mm": 50, "CompiledFunction": 1}},
            "profile it again with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1",
        ),
    ],
)
def test_profiles_of_something_else_are_refused(folder, how, why, measured) -> None:
    profile(measured, folder, **how)
    items = checked("ultra_fusion", **solution("ultra_fusion"), results=measured)
    assert len(items) == 1
    assert why in red(items)
    shutil.rmtree(measured / "profiles" / "v4" / "eager")
    items = checked("ultra_fusion", **solution("ultra_fusion"), results=measured)
    assert red(items).startswith("results/profiles/v4/eager is missing")


# --- register_optimization -----------------------------------------------------------------------

REGISTERS = "register_optimization"
SOLVED = """
    "gfx90a": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2),
    "gfx942": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2),
    "gfx950": Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3),
    "sm_90": Tile(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3),"""
WRONG = """
    "gfx90a": Tile(block_m=64, block_n=16, block_k=32, num_warps=4, num_stages=2),
    "gfx942": Tile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
    "gfx950": Tile(block_m=512, block_n=256, block_k=32, num_warps=4, num_stages=2),
    "sm_90": Tile(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=2),"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[None]:
    """A cache that all tests of this file share, and one worker: its start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(loaded(REGISTERS).compile_tiles, "WORKERS", 1)
        yield


@needs_triton
@pytest.mark.slow
def test_the_starting_tile_is_wrong_on_every_chip(compiler) -> None:
    folder = FOLDERS[REGISTERS]
    items = checked(REGISTERS, mine=folder / frame.STARTER, answers=folder / frame.QUESTIONS)
    assert [item.ok for item in items if item.what.startswith("y is right")] == [True]
    for target in ("gfx90a", "gfx942", "gfx950", "sm_90"):
        (chip,) = (item for item in items if item.what.startswith(target))
        assert not chip.ok
        assert "waves a SIMD, 4 are wanted: limited by" in chip.why
    for sentence in ("spills", "needs 131,072 bytes of LDS", "not answered yet: findings.limit"):
        assert sentence in red(items)


@needs_triton
@pytest.mark.slow
def test_the_solutions_tiles_pass_beside_the_starting_one(compiler) -> None:
    items = checked(REGISTERS, **solution(REGISTERS))
    assert not red(items)
    (chip,) = (item for item in items if item.what.startswith("gfx942"))
    assert "spills nothing, fits, leaves room" in chip.what
    assert re.search(r"tile +256 x 128 x 64 +128 x 128 x 32", chip.why)
    assert re.search(r"spilled bytes a lane +\d+ +0 +0", chip.why)
    assert re.search(r"waves a SIMD +0 of 8 +4 of 8 +>= 4", chip.why)


@needs_triton
@pytest.mark.slow
def test_wrong_tiles_say_why(compiler, tmp_path) -> None:
    mine = changed(REGISTERS, tmp_path, {SOLVED: WRONG})
    answers = with_answers(REGISTERS, tmp_path, limit_gfx942="registers", accumulators_sm_90=128)
    items = checked(REGISTERS, mine=mine, answers=answers)
    chips = {item.what.split()[0]: item for item in items}
    assert "21 FLOP a byte, 80 are wanted: small tiles load" in chips["gfx90a"].why
    assert "needs 147,456 bytes of LDS memory, a program may have 65,536" in chips["gfx942"].why
    assert "its accumulators alone need 1024 registers a lane" in chips["gfx950"].why
    assert re.search(r"spills \d+ bytes a lane: smaller tiles or more warps", chips["sm_90"].why)
    assert "not registers: the table above says shared memory" in red(items)
    assert "predicted 128, measured 512" in shown(items)


@needs_triton
@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        (
            "gates * tl.sigmoid(gates) * ups",
            "gates * tl.sigmoid(ups) * ups",
            r"elements are wrong \(\d+\.\d%\)\nfirst at \[0, 0\]:\n  yours .*\n  expected",
        ),
        ("tl.range(0, K, BLOCK_K", "tl.range(0, K - BLOCK_K + 1, BLOCK_K", "are wrong"),
    ],
)
def test_a_changed_kernel_that_is_wrong_is_red_at_its_place(right, wrong, why, tmp_path) -> None:
    mine = changed(REGISTERS, tmp_path, {right: wrong})
    items = list(loaded(REGISTERS)._numbers(Work(FOLDERS[REGISTERS], mine=mine)))
    assert re.search(why, red(items))


@needs_triton
def test_a_tile_that_no_kernel_can_have_ends_the_check(tmp_path) -> None:
    last = SOLVED.splitlines()[-1]
    changes = {last: re.sub(r"num_warps=\d+", "num_warps=32", last)}
    (item,) = checked(REGISTERS, mine=changed(REGISTERS, tmp_path, changes))
    assert "num_warps is 32: it must be a power of two from 1 to 16" in red([item])


# --- production_deployment -----------------------------------------------------------------------

DEPLOYMENT = "production_deployment"


@pytest.fixture
def deployed(tmp_path) -> Path:
    """A participant's results with the table that deploy.py writes."""
    times = {"model": (10, 18, 36, 68), "exported": (8, 16, 31, 60)}
    rows = [
        {"form": form, "batch_size": batch, "p50_ms": p50, "p95_ms": 1.2 * p50, "max_ms": 2 * p50}
        | {"tokens_per_s": 128e3 * batch / p50}
        for form, medians in times.items()
        for batch, p50 in zip((1, 2, 4, 8), medians, strict=True)
    ]
    folder = tmp_path / "exercises" / DEPLOYMENT
    folder.mkdir(parents=True)
    results.write_json(folder / "latency.json", {"rows": rows})
    return tmp_path


def test_the_starter_of_deployment_fails(tmp_path) -> None:
    folder = FOLDERS[DEPLOYMENT]
    starter, questions = folder / frame.STARTER, folder / frame.QUESTIONS
    items = checked(DEPLOYMENT, mine=starter, answers=questions, results=tmp_path)
    assert items and not any(item.ok for item in items)
    for name in ("save_weights", "export_model", "measure", "release_verdict"):
        assert re.search(rf"not written yet: starter.py, line \d+, in {name}", red(items))
    assert "latency.json is missing: run deploy.py" in red(items)


def test_the_solution_of_deployment_passes(deployed) -> None:
    items = checked(DEPLOYMENT, **solution(DEPLOYMENT), results=deployed)
    assert not red(items)
    assert "the exported program's logits at B, T = (3, 33)" in shown(items)


WRONG_DEPLOYMENTS: dict[str, tuple[str, dict[str, str], str]] = {
    "the model itself is pickled": (
        "_weights",
        {'{"config": dataclasses.asdict(model.config), "weights": model.state_dict()}': "model"},
        "torch.load(weights_only=True) refuses it",
    ),
    "nothing is loaded": (
        "_weights", {'    model.load_state_dict(content["weights"])\n': ""}, "elements are wrong",
    ),
    "untied": (
        "_weights", {'(content["weights"])': '(content["weights"], assign=True)'},
        "lm_head.weight and embed_tokens.weight are two parameters now",
    ),
    "exported for one shape": (
        "_export", {', dynamic_shapes={"tokens": {0: batch, 1: length}}': ""},
        "it does not take this shape: is each size dynamic?",
    ),
    "the first call is timed": (
        "_latency", {"    model(tokens)\n    wait()\n    times = []": "    times = []"},
        "the first call is among the timed ones",
    ),
    "the clock does not wait": (
        "_latency", {"        model(tokens)\n        wait()\n": "        model(tokens)\n"},
        "wait() comes first",
    ),
    "a percentile that hides": (
        "_latency", {'method="inclusive")[-1]': 'method="inclusive")[9]'}, "p95 hides them",
    ),
    "nothing judged is a pass": (
        "_verdict",
        {
            '{0: "pass", 77: "unknown"}.get(exit_status, "fail")': (
                '"fail" if exit_status == 1 else "pass"'
            )
        },
        "exit status 77: 'pass', expected 'unknown'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_DEPLOYMENTS)
def test_a_wrong_deployment_says_why(name, tmp_path) -> None:
    part, changes, why = WRONG_DEPLOYMENTS[name]
    work = Work(FOLDERS[DEPLOYMENT], mine=changed(DEPLOYMENT, tmp_path, changes))
    items = list(work.each(getattr(loaded(DEPLOYMENT), part)))
    assert why in red(items)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"largest_batch": 4}, "you wrote 4; look at each p95 of 'exported'"),
        ({"best_batch": 1}, "you wrote 1, with 16,000 tokens/s; another one has 17,067"),
        ({"status_other_device": 0}, "another device: its exit status: you wrote 0"),
    ],
)
def test_a_wrong_finding_about_deployment_says_why(answers, why, deployed, tmp_path) -> None:
    check = loaded(DEPLOYMENT)
    mine = with_answers(DEPLOYMENT, tmp_path, **answers)
    work = Work(FOLDERS[DEPLOYMENT], answers=mine, results=deployed)
    statuses = [functools.partial(check._status, *one) for one in check.RELEASES]
    items = list(work.each(check._service, check._throughput, *statuses))
    assert sum(not item.ok for item in items) == 1
    assert why in red(items)


def test_a_planted_change_gets_the_verdict_that_the_sheet_asks_for(tmp_path, capsys) -> None:
    plant = frame.import_file(FOLDERS[DEPLOYMENT] / "plant_change.py")
    medium = tmp_path / "h200"
    ladder = stored_runs.REFERENCE / "nvidia_h200" / "runs"
    for run in records.load_folder(ladder, RunResult):
        if (run.version, run.config_name, run.precision) == ("v4", "medium", "bf16"):
            records.add(run, medium)
    baseline = ("--baseline", str(tmp_path / "baseline.json"))
    save = ["baseline", "save", *baseline, "--from-results", str(medium)]
    assert regression_tester.main(save) == 0
    for flags, status in ((("--percent", "5"), 1), (("--device", "another GPU"), 77)):
        target = str(tmp_path / f"planted_{status}")
        assert plant.main([str(medium), target, *flags]) == 0
        assert "Written: 3 results of V4" in capsys.readouterr().out
        assert regression_tester.main(["check", *baseline, "--from-results", target]) == status


def test_deploying_with_an_unwritten_part_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    deploy = frame.import_file(FOLDERS[DEPLOYMENT] / "deploy.py")
    starter = (FOLDERS[DEPLOYMENT] / frame.STARTER).read_text(encoding="utf-8")
    (tmp_path / frame.MINE).write_text(starter, encoding="utf-8")
    monkeypatch.setattr(deploy, "HERE", tmp_path)
    assert deploy.main(["--output-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: not written yet: mine.py, line ")
    assert not (tmp_path / "latency.json").exists()
