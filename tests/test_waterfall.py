"""The waterfall: every rung really changes the code, and only proven times are shown."""

import dataclasses
import itertools
import json

import pytest
import torch
from test_compare import FEW_STEPS, SHRINK_PRESET, V2, copy_repository, use_versions_of
from test_results import make_result
from test_versions import Recorder
from torch import nn

from analysis_tools import compare_versions
from workshop import cli, records, results, versions
from workshop.arguments import read
from workshop.collection import Collection
from workshop.compare import rows, waterfall
from workshop.compare.runner import Planned
from workshop.compare.waterfall import Rung
from workshop.gate import parity
from workshop.results import RunResult
from workshop.run import interpreter
from workshop.run.precision import PRECISIONS
from workshop.show import charts, comparisons, ladders
from workshop.versions import VERSIONS

SIZES = {
    "vocab_size": 300,
    "hidden_dim": 64,
    "intermediate_dim": 96,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
}
TO_V4 = ["V1, plain", "fused QKV", "fused gate-up", "F.rms_norm", "SDPA", "native GQA",
         "fused AdamW", "V4's code, eager", "torch.compile", "graph",
         "fp32 weight grads"]  # fmt: skip
TO_V3 = ["V1, plain", "fused QKV", "fused gate-up", "V3's code, no kernel", "AdamW kernel",
         "graph", "RMSNorm kernel", "SwiGLU kernel", "RoPE + attention", "embedding kernel",
         "linear + loss kernel", "fp32 weight grads"]  # fmt: skip


# Where Triton's kernels are compiled for a GPU, the CPU can't run them.
interpreted = pytest.mark.skipif(not interpreter.asked_for(), reason="kernels are compiled here")


def rungs(to: str, precision: str = "fp32", *, on_gpu: bool = True) -> list[Rung]:
    return waterfall.rungs(to, precision, on_gpu=on_gpu, compiles=True)


# --- the rungs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "titles"), [("v4", TO_V4), ("v3", TO_V3)])
def test_one_change_a_rung(to, titles) -> None:
    assert [rung.title for rung in rungs(to)] == titles
    half = [rung.title for rung in rungs(to, "bf16")]
    assert half == [titles[0], "bf16", "RoPE tables in bf16", *titles[1:]]
    assert [rung.title for rung in rungs(to, "tf32")] == [titles[0], "tf32", *titles[1:]]
    assert [rung.title for rung in rungs(to, "fp8")] == [*half, "linear layers in fp8"]


@pytest.mark.parametrize("to", waterfall.TARGETS)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_last_rung_is_the_version_as_it_is(to, on_gpu) -> None:
    for precision in ("fp32", "fp8"):
        last = [rung for rung in rungs(to, precision, on_gpu=on_gpu) if not rung.needs][-1]
        assert (last.version, last.precision, last.options(on_gpu)) == (to, precision, {})


def build(rung: Rung) -> nn.Module:
    module = versions.load(rung.version)
    options = {}
    if hasattr(module, "Fusions"):
        options["fusions"] = module.Fusions(**dict.fromkeys(rung.off, False))
    model: nn.Module = module.TinyLlama(module.TinyLlamaConfig(**SIZES), **options)
    return model


def code_path(rung: Rung) -> tuple[str, ...]:
    """Every operation of a training step with its shapes, except V1's and V2's marker ranges."""
    model, tokens = build(rung), torch.arange(2 * 5).view(2, 5)
    optimizer = versions.load(rung.version).configure_optimizer(model, 1e-3)
    with Recorder() as recorder:
        with PRECISIONS[rung.precision].autocast("cpu"):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    return tuple(o for o in recorder.operations if not o.startswith("profiler."))


def same_as_before(found: list[Rung]) -> list[str]:
    """Titles of the rungs that run the very operations of the one above them. Not looked at: how
    a step is executed, which is the harness's, and V4's weight gradients, a GPU's alone."""
    hidden = {
        ("v4", "torch.compile"),
        ("v4", "fp32 weight grads"),
        ("v3", "graph"),
        ("v4", "graph"),
    }
    paths = [(rung, code_path(rung)) for rung in found if (rung.version, rung.title) not in hidden]
    return [rung.title for (_, a), (rung, b) in itertools.pairwise(paths) if a == b]


@pytest.mark.parametrize(
    ("to", "precision"),
    [pytest.param("v3", "fp32", marks=interpreted), ("v4", "fp32"), ("v4", "bf16")],
)
def test_every_rung_runs_other_code_than_the_one_before(to, precision) -> None:
    assert same_as_before(rungs(to, precision)) == []


def plain_v3() -> Rung:
    return next(rung for rung in rungs("v3") if rung.title == "V3's code, no kernel")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_version_without_its_kernels_is_v1s_model(precision) -> None:
    module = versions.load("v3")
    report = parity.check(
        lambda _: build(plain_v3()),
        module.TinyLlamaConfig(**SIZES),
        precision=precision,
        configure_optimizer=module.configure_optimizer,
    )
    assert report.passed, report.failures
    assert not any("tiny_llama" in operation for operation in code_path(plain_v3()))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("switch", waterfall.switches("v3")[1:])
def test_each_kernel_of_v3_can_be_switched_off_alone(switch) -> None:
    module = versions.load("v3")
    report = parity.check(
        lambda config: module.TinyLlama(config, module.Fusions(**{switch: False})),
        module.TinyLlamaConfig(**SIZES),
        precision="bf16",  # where a reference may give another precision to the kernels around it
        batch_size=1,
        seq_len=9,
        configure_optimizer=module.configure_optimizer,
    )
    assert report.passed, report.failures


@interpreted
def test_switches_of_v3_are_flags_and_are_recorded(tmp_path, capsys) -> None:
    names = [field.name for field in dataclasses.fields(versions.load("v3").Fusions)]
    words = [f"--no-{name.replace('_', '-')}" for name in names]
    sizes = {**SIZES, "batch_size": 2, "seq_len": 9}
    words += [w for name, n in sizes.items() for w in (f"--{name.replace('_', '-')}", str(n))]
    words += ["--device", "cpu", "--data", "synthetic", "--output-dir", str(tmp_path)]
    assert cli.main(versions.load("v3"), words) == 0
    printed = capsys.readouterr().out
    assert f"switched off       {', '.join(names)}" in printed
    assert "interpreted, not comparable" in printed and "tokens/s" not in printed
    (run,) = records.load_folder(tmp_path, RunResult)
    assert [run.options[name] for name in names] == [False] * len(names)
    assert run.gate.status == "pass" and rows.variant(run) == "unfused"


# --- from result files ------------------------------------------------------------------------


def run_of(rung: Rung, milliseconds: float, on_gpu: bool = False, **changes: object) -> RunResult:
    """A run of a rung as its process would record it."""
    version, name = VERSIONS[rung.version], "Some GPU" if on_gpu else "Some CPU"
    options = {
        "compile": version.compile,
        "cuda_graph": version.cuda_graph and on_gpu,
        **dict.fromkeys(waterfall.switches(rung.version), True),
        **rung.options(on_gpu),
    }
    times = [milliseconds * factor for factor in (0.99, 1.0, 1.0, 1.01, 1.0)]
    device = {"type": "cuda" if on_gpu else "cpu", "name": name}
    given = {"step_ms": times, "options": options, "precision": rung.precision, "device": device}
    given["kind"] = waterfall.KIND
    return make_result(rung.version, **{**given, **changes})


def whole(to: str, precision: str = "bf16", **of_one: dict[str, object]) -> list[RunResult]:
    """All runs of a waterfall on a GPU, each rung 10% faster than the one before; `of_one` changes
    the run of a rung."""
    return [
        run_of(rung, 100 * 0.9**i, on_gpu=True, **of_one.get(rung.title, {}))
        for i, rung in enumerate(rungs(to, precision))
    ]


def test_each_rung_is_compared_with_the_one_before_and_with_v1() -> None:
    (one,) = waterfall.build(whole("v4"))
    assert (one.to, one.precision, one.config, one.device) == ("v4", "bf16", "tiny", "Some GPU")
    first, second, *_, last = one.steps
    assert (first.before, first.gain, first.step_ms) == (None, None, 100.0)
    assert second.before == "V1, plain" and second.gain.value == pytest.approx(1 / 0.9)
    assert second.saved_ms == pytest.approx(10.0)
    assert last.row is not None and last.row.speedup.value == pytest.approx(
        0.9 ** -(len(one.steps) - 1)
    )
    assert sum(step.saved_ms or 0.0 for step in one.steps) == pytest.approx(100 - last.step_ms)
    assert not one.failed


def test_one_process_and_no_difference_look_different() -> None:
    """The second rung has the time of the first, the others are 10% faster each."""
    runs = whole("v4", bf16={"step_ms": [99.0, 100.0, 100.0, 101.0, 100.0]})
    once, twice = (waterfall.build(runs * n) for n in (1, 2))
    looks = []
    for found in (once, twice):
        times, _ = charts.draw_waterfalls(found).axes
        _, same, gain, *_ = (bar for group in times.containers for bar in group)
        looks += [(bar.get_facecolor(), bar.get_hatch()) for bar in (same, gain)]
        assert times.get_title("left").endswith("so no intervals") == (found is once)
    assert looks[0] == looks[1] and len(set(looks)) == 3 and looks[0][1]


def test_a_rung_with_a_red_gate_has_no_time_and_the_next_skips_it() -> None:
    red = results.Parity(status="fail", failures=["the mask is off by one"])
    (one,) = waterfall.build(whole("v4", SDPA={"gate": red}))
    by_title = {step.rung.title: step for step in one.steps}
    sdpa, gqa = by_title["SDPA"], by_title["native GQA"]
    assert (sdpa.step_ms, sdpa.gain, sdpa.timed) == (None, None, False)
    assert sdpa.note == f"gate failed: {red.failures[0]}"
    assert gqa.before == "F.rms_norm" and gqa.gain.value == pytest.approx(1 / 0.81)
    assert one.failed
    assert sdpa.row is not None and comparisons.without_time(sdpa.row) == "FAIL"


def test_a_newer_waterfall_leaves_the_ladders_figures_alone(tmp_path) -> None:
    """Its V1 and its last rung are whole versions, too."""
    ladder = [run_of(rungs(key, "bf16")[-1], 50.0, on_gpu=True) for key in ("v3", "v4")]
    ladder.append(run_of(rungs("v4", "bf16")[1], 80.0, on_gpu=True))
    runs = [dataclasses.replace(run, session="20250101", kind="run") for run in ladder]
    runs += [dataclasses.replace(run, session="20270101") for run in whole("v4")]
    for run in runs:
        records.add(dataclasses.replace(run, config_name="small"), tmp_path)
    collection = Collection([tmp_path])
    collection.refresh()
    (half,) = ladders.ladders(collection.runs)
    assert {row.session for row in half.rows} == {"20250101"}
    assert [row.label for row in half.rows] == ["v1", "v3", "v4"]


def plans(*words: str) -> tuple[Planned, waterfall.Requested]:
    options = read(compare_versions.Options, ["--device", "cpu", *words])
    return waterfall.plan(options, options.waterfall)


def test_processes_alternate_and_no_rung_runs_twice(monkeypatch) -> None:
    monkeypatch.setattr(waterfall.trainer, "missing_for_compile", lambda _: None)
    planned, _ = plans("--waterfall", "v4", "v3", "--repeats", "2", "--precision", "fp32", "bf16")
    first = [plan.label for plan in planned.plans if plan.repeat == 0]
    second = [plan.label for plan in planned.plans if plan.repeat == 1]
    assert len(set(first)) == len(first)
    assert second == [label for label in first[::-1] if not label.startswith("v3")]
    assert all(plan.interpreted == (plan.version == "v3") for plan in planned.plans)
    why = "graph: skipped: a graph needs a GPU"
    assert planned.skipped == [f"v4, {why}", f"v3, {why}"]
    # Without a GPU, V3's kernels take minutes: only if they are asked for.
    assert {to for to, _ in plans("--waterfall")[1]} == {"v4"}


def test_a_machine_without_a_compiler_ends_with_v4_uncompiled(monkeypatch) -> None:
    monkeypatch.setattr(waterfall.trainer, "missing_for_compile", lambda _: "a compiler (g++)")
    planned, _ = plans("--waterfall")
    assert planned.skipped[0] == "v4, torch.compile: skipped: torch.compile can't run here"
    *_, last = (plan for plan in planned.plans if plan.repeat == 0)
    assert (last.version, last.flags()[-2:]) == ("v4", ["--compile", "none"])


NO_MASK = (
    "return F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
    "return F.scaled_dot_product_attention(q, k, v)\n",
)


@pytest.mark.slow
def test_a_real_waterfall_with_a_red_rung(tmp_path, monkeypatch, capsys) -> None:
    """V2 forgets the mask if it repeats k and v before SDPA. The files alone give the same."""
    changes = {"workshop/run/presets.py": SHRINK_PRESET, V2: NO_MASK}
    use_versions_of(copy_repository(tmp_path / "code", changes), monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(waterfall.trainer, "missing_for_compile", lambda _: "a compiler (g++)")
    folder = tmp_path / "out"
    words = ["--device", "cpu", "--waterfall", "--config", "tiny", *FEW_STEPS]
    assert compare_versions.main([*words, "--output-dir", str(folder)]) == 1
    capsys.readouterr()
    (one,) = json.loads((folder / "waterfall.json").read_text())["waterfalls"]
    steps = {step["change"]: step for step in one["steps"]}
    assert list(steps) == TO_V4
    assert steps["SDPA"]["parity"] == "fail" and steps["SDPA"]["step_ms"] is None
    timed = [title for title, step in steps.items() if step["step_ms"]]
    assert timed == [t for t in TO_V4 if t not in ("SDPA", "torch.compile", "graph")]
    assert steps["native GQA"]["before"] == "F.rms_norm"
    assert len({steps[title]["variant"] for title in TO_V4[1:7]}) == 6
    assert {run.kind for run in records.load_folder(folder, RunResult)} == {waterfall.KIND}
    words = ["--waterfall", "--from-results", str(folder), "--format", "json"]
    assert compare_versions.main(words) == 1
    assert json.loads(capsys.readouterr().out)["waterfalls"] == [one]
