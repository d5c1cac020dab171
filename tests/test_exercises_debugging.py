"""performance_debugging: every fault shows in the metrics, and the check accepts one diagnosis
alone. The stages run in this process, at a size that the interpreter needs seconds for."""

import dataclasses
import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import debug_causes
import debug_harness
import debug_results
import repairs
import run_all_stages
from debug_causes import NONE, Sight
from debug_results import StageResult
from exercise_cases import FOLDERS, SOLUTIONS, checked

from workshop.exercises import frame
from workshop.exercises.frame import Item
from workshop.gate import canonical

NAME = "performance_debugging"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TINY_MODEL = {
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
}
SIZE = debug_harness.GPU_SIZE
if not ON_GPU:
    SIZE = debug_harness.INTERPRETED_SIZE
    SIZE = dataclasses.replace(SIZE, model=SIZE.model | TINY_MODEL, batch_size=1, seq_len=6)
CAUSES = {
    "stage1": "default_initialisation",
    "stage2": "strides_ignored",
    "stage3": "clock_does_not_wait",
    "stage4": "program_per_element",
    "stage5": "severed_gradient",
    "stage6": NONE,
}


def measure(stage: str, build: object, timed_steps: object) -> StageResult:
    return debug_harness.measure(
        stage, build, SIZE, DEVICE, timed_steps=timed_steps or debug_harness.clocked_steps
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder of results with those of the six stages."""
    results = tmp_path_factory.mktemp("results")
    folder = results / debug_results.FOLDER.name
    folder.mkdir()
    for path in run_all_stages.stage_files().values():
        module = importlib.import_module(path.stem)
        build = getattr(module, "TinyLlama", debug_harness.v3.TinyLlama)
        result = measure(path.stem, build, getattr(module, "timed_steps", None))
        debug_results.save(result, folder)
    return results


@pytest.fixture(scope="module")
def found(measured) -> dict[str, StageResult]:
    return debug_results.load_all(measured / debug_results.FOLDER.name)


@pytest.fixture
def diagnose(measured, found, tmp_path) -> Callable[..., list[Item]]:
    """Checks the solution, with the values of these results and with some answers changed."""

    def run(results: Path = measured, **changes: str) -> list[Item]:
        text = (SOLUTIONS / NAME / "my_diagnosis.toml").read_text(encoding="utf-8")
        for key, result in found.items():
            metric = re.search(rf'\[{key}\][^\[]*?metric = "(\w+)"', text)
            if metric:
                value = result.text(metric[1])
                text = replace(text, f"{key}.value", value.replace(",", ""))
        for key, value in changes.items():
            text = replace(text, key.replace("__", "."), value)
        path = tmp_path / "my_diagnosis.toml"
        path.write_text(text, encoding="utf-8")
        return checked(NAME, answers=path, results=results)

    return run


def replace(text: str, key: str, value: str) -> str:
    """The TOML with another value for a key of one of its tables."""
    table, _, name = key.partition(".")
    head, start, rest = text.partition(f"[{table}]\n")
    changed, count = re.subn(rf"(?m)^{name} = [^#\n]*", f"{name} = {value} ", rest, count=1)
    assert start and count == 1, key
    return head + start + changed


def red(items: list[Item]) -> list[str]:
    return [f"{item.what}: {item.why}" for item in items if not item.ok]


def test_each_stage_has_its_fault_and_no_other(found) -> None:
    assert list(found) == list(CAUSES)
    for key, result in found.items():
        sight = Sight(result, found["stage6"])
        faults = [name for name, cause in debug_causes.CAUSES.items() if cause.holds(sight)]
        assert faults == [CAUSES[key]]


@pytest.mark.gpu
@pytest.mark.alone
def test_the_times_of_a_gpu_show_what_the_interpreter_can_not(found) -> None:
    metrics = {key: result.metrics() for key, result in found.items()}
    healthy = metrics["stage6"]
    assert healthy["backward_ms"] > healthy["forward_ms"]
    assert metrics["stage3"]["samples_per_s"] > 5 * healthy["samples_per_s"]
    assert metrics["stage4"]["forward_ms"] > 2 * healthy["forward_ms"]
    assert metrics["stage5"]["samples_per_s"] > 2 * healthy["samples_per_s"]
    assert metrics["stage5"]["backward_ms"] < 0.5 * metrics["stage5"]["forward_ms"]
    assert metrics["stage5"]["peak_mb"] < 0.65 * healthy["peak_mb"]


@pytest.mark.parametrize("number", ["2", "5"])
def test_a_repaired_stage_has_v3s_gradients(number) -> None:
    config = debug_harness.v3.TinyLlamaConfig(**SIZE.model)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(1000, (2, 3, 5), generator=generator).to(DEVICE)
    gradients = []
    for build in (repairs.REPAIRED[number][0], debug_harness.v3.TinyLlama):
        model = build(config).to(DEVICE)
        canonical.load_canonical(model, canonical.canonical_state(config, 0))
        model(tokens, targets).backward()
        gradients.append(canonical.canonical_gradients(model))
    for name, gradient in gradients[1].items():
        # Sums in another order, which a GPU's are each time: 1e-6 of the whole, not of each number.
        assert (gradients[0][name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_the_template_fails(measured) -> None:
    template = FOLDERS[NAME] / frame.DIAGNOSIS
    items = checked(NAME, answers=template, results=measured)
    assert [item.what for item in items if item.ok] == ["your results of the six stages"]
    wrong = [item.what for item in items if not item.ok]
    assert all(what.startswith("not answered yet: ") for what in wrong)
    tables = {what.split(": ")[1].split(".")[0] for what in wrong}
    assert tables == {"predict", "false_claim", *CAUSES}


def test_the_solution_passes(diagnose) -> None:
    items = diagnose()
    assert red(items) == []
    assert len(items) > 25


WRONG = [
    # A cause that is not the stage's, for each answer that a cause has.
    ("stage1.cause", "learning_rate_too_high", "is taken before any update"),
    ("stage1.cause", "none", "are not those of stage 6: loss_first"),
    ("stage2.cause", "slow_memory_layout", "a slow layout gives the right numbers late"),
    ("stage3.cause", "compilation_timed", "would make steps longer"),
    ("stage4.cause", "too_many_launches", "kernels of Triton's, stage 6's"),
    ("stage5.cause", "activations_not_stored", "no activation is part of it"),
    ("stage6.cause", "strides_ignored", "these are V1's up to"),
    ("stage3.metric", "loss_first", "is not evidence"),
    ("stage5.metric", "peak_mb", "which metric is the cause itself"),
    ("stage1.value", 6.9, "you noted 6.9, your result has"),
    ("stage1.fix", "lower_the_learning_rate", "the first loss comes before any update"),
    ("stage2.fix", "larger_blocks", "the same ones are read"),
    ("false_claim.impossible_rows", ["medium V3", "medium V4"], "that can't be true: 1"),
    (
        "false_claim.impossible_rows",
        ["small V3", "medium V1", "medium V3", "medium V4"],
        "medium V1 can't be true: its numbers can be true: 59 TFLOP/s of 163.4",
    ),
    ("false_claim.step_tflops", 61.4, "that is the forward pass alone"),
    ("false_claim.backward_over_forward", 85.5, "the forward pass over the backward pass"),
    ("false_claim.adamw_gbs", 7592, "three are written back"),
]


@pytest.mark.parametrize(("key", "wrong", "answer"), WRONG)
def test_a_wrong_answer_gets_a_reason(diagnose, key, wrong, answer) -> None:
    (found,) = red(diagnose(**{key.replace(".", "__"): json.dumps(wrong)}))
    assert answer in found
    assert key.startswith("false_claim") or key[:6] in found


def test_stage6_is_cleared_by_enough_metrics_alone(diagnose) -> None:
    wrong = red(diagnose(stage6__cleared_by='["loss_first", "peak_mb", "logits_error"]'))
    assert [line.split(": ")[1] for line in wrong] == [
        f"nothing in your list excludes the fault of {key}"
        for key in ("stage3", "stage4", "stage5")
    ]
    names = ["loss_first", "loss_last", "tensors_with_grad", "timed_share", "programs"]
    assert "yours are 5" in red(diagnose(stage6__cleared_by=json.dumps(names)))[0]
    assert "should be a list of loss_first" in red(diagnose(stage6__cleared_by='["speed"]'))[0]


def test_a_stage_that_was_changed_or_ran_elsewhere_is_refused(diagnose, measured, tmp_path) -> None:
    shutil.copytree(measured, tmp_path / "results")
    folder = tmp_path / "results" / debug_results.FOLDER.name
    content = json.loads((folder / "stage6_repaired.json").read_text())
    (folder / "stage1_scaled_residuals.json").write_text(
        json.dumps(content | {"stage": "stage1_scaled_residuals"})
    )
    content["run"]["batch_size"] = 5
    (folder / "stage2_own_swiglu.json").write_text(
        json.dumps(content | {"stage": "stage2_own_swiglu"})
    )
    wrong = red(diagnose(results=tmp_path / "results"))
    assert any("has stage1_scaled_residuals.py been changed?" in line for line in wrong)
    assert any(line.startswith("stage2 ran elsewhere, or with other sizes") for line in wrong)
    (folder / "stage3_launch_thread.json").write_text("{")
    assert any("no valid JSON" in line for line in red(diagnose(results=tmp_path / "results")))


def test_a_stage_is_judged_while_others_have_not_run(diagnose, measured, tmp_path) -> None:
    shutil.copytree(measured, tmp_path / "results")
    for path in (tmp_path / "results" / debug_results.FOLDER.name).glob("stage[1345]_*.json"):
        path.unlink()
    wrong = red(diagnose(results=tmp_path / "results"))
    assert not any(line.startswith("stage2") for line in wrong)
    assert any("no result yet of stage3" in line for line in wrong)


def test_a_stage_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, capfd) -> None:
    bad = tmp_path / "stage1_bad.py"
    bad.write_text("import sys; sys.exit('error: no luck')")
    monkeypatch.setattr(run_all_stages, "stage_files", lambda: {"1": bad, "2": bad})
    (tmp_path / "stage1_bad.json").write_text("an old result")
    assert run_all_stages.main(["--output-dir", str(tmp_path)]) == 1
    assert capfd.readouterr().err.count("failed: exit 1: no luck") == 2
    assert not (tmp_path / "stage1_bad.json").exists()
