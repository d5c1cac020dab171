"""The waterfall: every rung really changes the code, and only proven times are told."""

import copy
import csv
import dataclasses
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_compare import HOSTILE, SHRINK_PRESET, Terminal, copy_repository, running
from test_results import files, make_result
from test_versions import Recorder
from torch import nn
from workshop.compare.comparison_tables import FORMATS

from analysis_tools import compare_versions
from workshop import cli, results, versions
from workshop.classroom import instructor
from workshop.compare import comparison, sessions, waterfall, waterfall_figure, waterfall_tables
from workshop.compare.collection import Collection
from workshop.compare.waterfall import NEEDS_GPU, Rung
from workshop.dashboard.data import Snapshot
from workshop.gate import parity
from workshop.results import RunResult
from workshop.roofline import inputs as roofline_inputs
from workshop.roofline.inputs import STEP
from workshop.run import interpreter
from workshop.run.precision import PRECISIONS
from workshop.versions import VERSIONS

TOOL = Path("analysis_tools") / "compare_versions.py"
Finished = subprocess.CompletedProcess[str]
SIZES = {
    "vocab_size": 300,
    "hidden_dim": 64,
    "intermediate_dim": 96,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
}
TO_V4 = ["V1, plain", "fused QKV", "fused gate-up", "F.rms_norm", "SDPA", "native GQA",
         "fused AdamW", "V4's code, eager", "torch.compile", "graph"]  # fmt: skip
TO_V3 = ["V1, plain", "fused QKV", "fused gate-up", "V3's code, no kernel", "AdamW kernel",
         "graph", "RMSNorm kernel", "SwiGLU kernel", "RoPE + attention", "embedding kernel",
         "linear + loss kernel", "fp32 weight grads"]  # fmt: skip


# Where Triton's kernels are compiled for a GPU, the CPU can't run them.
interpreted = pytest.mark.skipif(not interpreter.asked_for(), reason="kernels are compiled here")


def rungs(to: str, precision: str = "fp32", *, on_gpu: bool = True) -> list[Rung]:
    return waterfall.rungs(to, precision, on_gpu=on_gpu, compiles=True)


# --- the rungs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "titles"), [("v4", TO_V4), ("v3", TO_V3)])
def test_one_change_a_rung(to: str, titles: list[str]) -> None:
    assert [rung.title for rung in rungs(to)] == titles
    half = [rung.title for rung in rungs(to, "bf16")]
    assert half == [titles[0], "bf16", "RoPE tables in bf16", *titles[1:]]
    assert [rung.title for rung in rungs(to, "tf32")] == [titles[0], "tf32", *titles[1:]]


@pytest.mark.parametrize("to", waterfall.TARGETS)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_last_rung_is_the_version_as_it_is(to: str, on_gpu: bool) -> None:
    last = [rung for rung in rungs(to, on_gpu=on_gpu) if not rung.needs][-1]
    assert (last.version, last.options(on_gpu)) == (to, {})


@pytest.mark.parametrize("key", waterfall.SWITCHES)
def test_every_switch_of_a_version_has_its_rung(key: str) -> None:
    names = [field.name for field in dataclasses.fields(versions.load(key).Fusions)]
    assert sorted(names) == sorted(name for name, _ in waterfall.SWITCHES[key])


def build(rung: Rung) -> nn.Module:
    module = versions.load(rung.version)
    options = {}
    if hasattr(module, "Fusions"):
        options["fusions"] = module.Fusions(**dict.fromkeys(rung.off, False))
    model: nn.Module = module.TinyLlama(module.TinyLlamaConfig(**SIZES), **options)
    return model


def code_path(rung: Rung) -> tuple[str, ...]:
    """Every operation of a training step with its shapes, but for V1's and V2's marker ranges."""
    model, tokens = build(rung), torch.arange(2 * 5).view(2, 5)
    optimizer = versions.load(rung.version).configure_optimizer(model, 1e-3)
    with Recorder() as recorder:
        with PRECISIONS[rung.precision].autocast("cpu"):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    return tuple(o for o in recorder.operations if not o.startswith("profiler."))


def same_as_before(found: list[Rung]) -> list[str]:
    """Titles of the rungs that run the very operations of the one above them. How a step is
    executed is the harness's, and not looked at here."""
    paths = [
        (rung, code_path(rung)) for rung in found if rung.title not in ("torch.compile", "graph")
    ]
    return [rung.title for (_, a), (rung, b) in itertools.pairwise(paths) if a == b]


@pytest.mark.parametrize("to", [pytest.param("v3", marks=interpreted), "v4"])
def test_every_rung_runs_other_code_than_the_one_before(to: str) -> None:
    assert same_as_before(rungs(to, "fp32")) == []


def test_at_half_precision_every_rung_to_v4_runs_other_code() -> None:
    assert same_as_before(rungs("v4", "bf16")) == []


def test_a_switch_that_switches_nothing_is_found(
    copy_of: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy_of("v2")
    monkeypatch.setattr(broken.RMSNorm, "forward", versions.load("v1").RMSNorm.forward)  # type: ignore[attr-defined]
    load = versions.load
    monkeypatch.setattr(versions, "load", lambda key: broken if key == "v2" else load(key))
    assert same_as_before(rungs("v4")) == ["F.rms_norm"]


def test_a_version_without_its_kernels_is_v1s_model() -> None:
    (plain,) = [rung for rung in rungs("v3") if rung.title == "V3's code, no kernel"]
    module = versions.load("v3")
    config = module.TinyLlamaConfig(**SIZES)
    for precision in ("fp32", "bf16"):
        report = parity.check(
            lambda _: build(plain),
            config,
            precision=precision,
            configure_optimizer=module.configure_optimizer,
        )
        assert report.passed, report.failures
    assert not any("tiny_llama" in operation for operation in code_path(plain))


@interpreted
@pytest.mark.parametrize("switch", [name for name, _ in waterfall.KERNELS])
def test_each_kernel_of_v3_can_be_switched_off_alone(switch: str) -> None:
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
def test_switches_of_v3_are_told_on_its_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [field.name for field in dataclasses.fields(versions.load("v3").Fusions)]
    words = [f"--no-{name.replace('_', '-')}" for name in names]
    sizes = {**SIZES, "batch_size": 2, "seq_len": 9}
    words += [w for name, n in sizes.items() for w in (f"--{name.replace('_', '-')}", str(n))]
    words += ["--device", "cpu", "--data", "synthetic", "--output-dir", str(tmp_path)]
    assert cli.main(versions.load("v3"), words) == 0
    assert f"switched off       {', '.join(names)}" in capsys.readouterr().out
    (run,) = results.load_folder(tmp_path)
    assert [run.options[name] for name in names] == [False] * len(names)
    assert run.parity.status == "pass" and comparison.variant(run) == "unfused"


def test_a_version_without_its_kernels_is_one_graph_to_the_compiler() -> None:
    (plain,) = [rung for rung in rungs("v3") if rung.title == "V3's code, no kernel"]
    model, tokens = build(plain), torch.arange(2 * 5).view(2, 5)
    expected = model(tokens, tokens)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(tokens, tokens).item() == pytest.approx(expected.item())
    copied = copy.deepcopy(model)
    assert copied(tokens, tokens).item() == pytest.approx(expected.item())


# --- from result files ------------------------------------------------------------------------


def run_of(rung: Rung, milliseconds: float, on_gpu: bool = False, **changes: object) -> RunResult:
    """A run of a rung as its process would record it."""
    version, name = VERSIONS[rung.version], "Some GPU" if on_gpu else "Some CPU"
    options = {
        "compile": version.compile,
        "cuda_graph": version.cuda_graph and on_gpu,
        **{switch: True for switch, _ in waterfall.SWITCHES.get(rung.version, ())},
        **rung.options(on_gpu),
    }
    times = [milliseconds * factor for factor in (0.99, 1.0, 1.0, 1.01, 1.0)]
    device = {"type": "cuda" if on_gpu else "cpu", "name": name}
    given = {"step_ms": times, "options": options, "precision": rung.precision, "device": device}
    return make_result(rung.version, **{**given, **changes})  # type: ignore[arg-type]


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
    assert [step.rung.title for step in one.steps][:3] == [
        "V1, plain",
        "bf16",
        "RoPE tables in bf16",
    ]
    first, second, *_, last = one.steps
    assert (first.before, first.gain, first.step_ms) == (None, None, 100.0)
    assert second.before == "V1, plain" and second.gain == pytest.approx(1 / 0.9)
    assert second.saved_ms == pytest.approx(10.0)
    assert last.row is not None and last.row.speedup == pytest.approx(0.9 ** -(len(one.steps) - 1))
    assert sum(step.saved_ms or 0.0 for step in one.steps) == pytest.approx(100 - last.step_ms)  # type: ignore[operator]
    assert not one.failed


def test_two_processes_of_each_rung_give_an_interval_and_one_gives_none() -> None:
    other = [dataclasses.replace(run, step_ms=[1.001 * run.step_ms[1]]) for run in whole("v4")]
    (one,), (two,) = waterfall.build(whole("v4")), waterfall.build(whole("v4") + other)
    assert [step.gain_ci for step in one.steps] == [None] * len(one.steps)
    assert waterfall_tables.cells(one.steps[2])[3:5] == ["1.11x (1 process)", "1.23x (1 process)"]
    records = waterfall_tables.as_json([one])["waterfalls"][0]["steps"]
    assert {str(record["gain_ci"]) for record in records} == {"None"}
    note = "(1 process): no interval and no verdict"
    assert note in waterfall_tables.as_markdown([one])
    assert note not in waterfall_tables.as_markdown([two])
    for step in two.steps[1:]:
        assert step.gain_ci is not None and 1.1 < step.gain_ci[0] < 1 / 0.9 < step.gain_ci[1]


def test_both_waterfalls_of_a_session_share_their_first_rungs() -> None:
    runs = whole("v4") + [run for run in whole("v3") if run.version == "v3"]
    v4, v3 = waterfall.build(runs)
    assert (v4.to, v3.to) == ("v4", "v3")
    assert [step.step_ms for step in v3.steps[:5]] == [step.step_ms for step in v4.steps[:5]]
    assert all(step.timed for step in (*v4.steps, *v3.steps))


def test_a_rung_with_a_red_gate_has_no_time_and_the_next_skips_it() -> None:
    red = results.Parity(status="fail", failures=["the mask is off by one"])
    (one,) = waterfall.build(whole("v4", SDPA={"parity": red}))
    by_title = {step.rung.title: step for step in one.steps}
    sdpa, gqa = by_title["SDPA"], by_title["native GQA"]
    assert (sdpa.step_ms, sdpa.gain, sdpa.timed) == (None, None, False)
    assert sdpa.note == f"gate red: {red.failures[0]}"
    assert gqa.before == "F.rms_norm" and gqa.gain == pytest.approx(1 / 0.81)
    assert one.failed
    text = waterfall_tables.as_markdown([one])
    assert "| SDPA | v2 | - | - | - | RED | - |" in text
    assert "- native GQA: over F.rms_norm, since SDPA has no time" in text
    assert waterfall_tables.in_place_of_time(sdpa) == "GATE RED"


def test_no_time_of_an_interpreted_rung_is_anywhere() -> None:
    runs = [run_of(rung, 50.0) for rung in rungs("v3", on_gpu=False) if not rung.needs]
    (one,) = waterfall.build(runs)
    untimed = [step for step in one.steps if step.rung.version == "v3" and step.row]
    assert len(untimed) == 8
    for step in untimed:
        assert (step.step_ms, step.gain, step.saved_ms) == (None, None, None)
        assert step.row is not None and step.row.parity == "pass" and step.row.speedup is None
        assert waterfall_tables.in_place_of_time(step) == "interpreted, not comparable"
    records = waterfall_tables.as_json([one])["waterfalls"][0]["steps"]
    assert [r["step_ms"] for r in records if r["version"] == "v3"] == [None] * 9
    assert [s.note for s in one.steps if s.rung.title == "graph"] == [NEEDS_GPU]
    assert not one.failed


def crashed(rung: Rung, **changes: object) -> RunResult:
    """What is recorded for a process that left nothing: of its options what differs."""
    nothing = {"step_ms": [], "losses": [], "memory_mb": {}, "parity": results.Parity()}
    given = {"status": "failed", "error": "crashed", "options": dict(rung.options(on_gpu=False))}
    return run_of(rung, 1.0, **{**nothing, **given, **changes})


def test_a_compiled_version_that_crashed_is_a_failure_of_its_rung(tmp_path: Path) -> None:
    found = [rung for rung in rungs("v4", on_gpu=False) if not rung.needs]
    runs = [run_of(rung, 100 * 0.9**i) for i, rung in enumerate(found[:-1])]
    runs.append(crashed(found[-1]))
    (one,) = waterfall.build(runs)
    assert one.failed and [step.note for step in one.steps[-2:]] == ["crashed", NEEDS_GPU]
    for run in runs:
        results.save(run, tmp_path)
    assert compare_versions.main(["--waterfall", "--from-results", str(tmp_path)]) == 1


def test_a_v1_that_failed_is_no_baseline() -> None:
    runs = whole("v4", "fp32")
    second = dataclasses.replace(runs[0], status="failed", error="crashed", step_ms=[])
    (one,) = waterfall.build([*runs, second])
    first, then, *_ = one.steps
    assert first.step_ms is None and then.before is None and then.step_ms
    assert [waterfall_tables.cells(step)[4] for step in (first, then)] == ["-", "-"]
    assert [step.row.speedup for step in one.steps if step.row] == [None] * len(one.steps)
    assert waterfall_tables.cells(waterfall.build(runs)[0].steps[0])[4] == "baseline"


@pytest.mark.parametrize("v4", ["default", "none"])  # the latter where there is no C++ compiler
def test_an_ordinary_comparison_is_no_waterfall(v4: str) -> None:
    options = {"compile": v4, "cuda_graph": False}
    ladder = [make_result(), make_result("v2"), make_result("v4", options=options)]
    ablation = [make_result("v2", options={"fuse_qkv": True, "fuse_optimizer": False})]
    assert waterfall.build(ladder) == []
    assert waterfall.build(ablation) == []  # without V1


def test_a_newer_waterfall_leaves_the_ladders_figures_alone(tmp_path: Path) -> None:
    """Its V1 and its last rung are whole versions, too."""
    ladder = [run_of(rungs(key, "bf16")[-1], 50.0, on_gpu=True) for key in ("v3", "v4")]
    ladder.append(run_of(rungs("v4", "bf16")[1], 80.0, on_gpu=True))
    runs = [dataclasses.replace(run, session="20250101") for run in ladder]
    runs += [dataclasses.replace(run, session="20270101") for run in whole("v4")]
    for run in runs:
        results.save(dataclasses.replace(run, config_name="small"), tmp_path)
    collection = Collection([tmp_path])
    collection.refresh()
    snapshot = Snapshot(collection)
    (half,) = [group for group in snapshot.groups if group.precision == "bf16"]
    assert {row.session for row in snapshot.rows(half)} == {"20250101"}
    assert [row.label for row in snapshot.rows(half)] == ["v1", "v3", "v4"]
    points = roofline_inputs.load([tmp_path], precision="bf16").points
    assert {point.seconds for point in points if point.category == STEP} == {0.05, 0.08}
    figures = instructor.parts(collection)["figures of session 4"]
    assert figures.count("| 50.00 |") == 2 and "| 1.60x (1 process)" in figures


def test_the_newest_session_counts() -> None:
    older = [dataclasses.replace(run, session="20250101") for run in whole("v4")]
    newer = [dataclasses.replace(run, session="20270101") for run in whole("v4")]
    (one,) = waterfall.build(newer + older)
    assert one.session == "20270101"


def test_the_beginning_of_one_that_was_cut_off_is_shown() -> None:
    (one,) = waterfall.build(whole("v4", "fp32")[:2])
    assert [step.timed for step in one.steps] == [True, True, *[False] * 8]


def test_its_own_session_and_software_head_it(tmp_path: Path) -> None:
    for run in whole("v4", "fp32"):
        own = dataclasses.replace(run, session="20260202", software={"torch": "2.6"})
        results.save(own, tmp_path / "in")
    for session in ("20260101", "20260303"):
        results.save(make_result(session=session, software={"torch": "9"}), tmp_path / "in")
    words = ["--from-results", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out")]
    assert compare_versions.main(["--waterfall", *words]) == 0
    text = (tmp_path / "out" / "waterfall.md").read_text()
    assert text.startswith("# Waterfall 20260202\n\ntorch 2.6\n\n### ")


@pytest.mark.parametrize("form", FORMATS)
def test_a_device_may_have_any_name(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"device": {"type": "cuda", "name": HOSTILE}}
    red = results.Parity(status="fail", failures=[HOSTILE])
    for run in whole("v4", "fp32", SDPA={"parity": red}):
        results.save(dataclasses.replace(run, **hostile), tmp_path / "in")
    words = ["--from-results", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out")]
    assert compare_versions.main(["--waterfall", *words, "--format", form]) == 1
    assert b"\x1b" not in capsys.readouterr().out.encode()
    assert len(files(tmp_path / "out")) == 4


def test_the_legend_covers_no_bar_whatever_the_figures_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def read(figure: Figure, path: Path, **_: object) -> None:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        lowest = min(axis.get_tightbbox().y0 for axis in figure.axes)
        drawn.append(legend.get_window_extent().y1 <= lowest)
        path.touch()

    drawn: list[bool] = []
    monkeypatch.setattr(Figure, "savefig", read)
    slower = [run_of(rung, 100 * 1.1**i, True) for i, rung in enumerate(rungs("v4"))]
    waterfall_figure.plot(waterfall.build(slower), tmp_path / "x.png")
    assert drawn == [True]


def test_every_form_tells_every_rung(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in whole("v4", "fp32") + whole("v3", "fp32")[3:]:
        results.save(run, tmp_path / "in")
    arguments = ["--waterfall", "--from-results", str(tmp_path / "in")]
    assert compare_versions.main([*arguments, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["waterfalls"]
    assert [step["change"] for step in told[0]["steps"]] == TO_V4
    assert [step["change"] for step in told[1]["steps"]] == TO_V3
    assert compare_versions.main([*arguments, "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["change"] for line in lines] == TO_V4 + TO_V3
    assert compare_versions.main([*arguments, "--format", "table"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    for title in (*TO_V4, *TO_V3):
        assert f"  {title} " in shown
    assert compare_versions.main([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == [f"waterfall.{kind}" for kind in ("csv", "json", "md", "png")]
    only = ["--waterfall", "v3", "--from-results", str(tmp_path / "in"), "--format", "json"]
    capsys.readouterr()
    assert compare_versions.main(only) == 0
    assert [one["to"] for one in json.loads(capsys.readouterr().out)["waterfalls"]] == ["v3"]


WRONG = {
    "another end": (["--waterfall", "v2"], "--waterfall v2: choose from v4, v3"),
    "versions too": (["--waterfall", "--versions", "v3"], "--versions: name a waterfall's end"),
    "no repeats": (["--waterfall", "--repeats", "0"], "--repeats 0: it must be at least 1"),
    "preset": (["--waterfall", "--config", "giant"], "unknown preset 'giant'"),
    "an end that no file tells of": (
        ["--waterfall", "v4", "v9", "--from-results", "LADDER"],
        "--waterfall v9: choose from v4, v3",
    ),
    "no waterfall": (["--waterfall", "--from-results", "LADDER"], "no waterfall: V1 at fp32"),
    "both": (["--waterfall", "--sweep", "seq-len", "1"], "not allowed with argument"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.save(make_result(), tmp_path / "LADDER")
    given = [str(tmp_path / word) if word == "LADDER" else word for word in words]
    output = tmp_path / "out"
    try:
        status: object = compare_versions.main(
            [*given, "--device", "cpu", "--output-dir", str(output)]
        )
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err
    assert captured.err.count("error: ") == 1
    assert not output.exists()


# --- plans ------------------------------------------------------------------------------------


def plans(*words: str) -> waterfall.Climb:
    arguments = compare_versions.build_parser().parse_args(["--device", "cpu", *words])
    return waterfall.plan(arguments)


def test_processes_alternate_and_no_rung_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waterfall.trainer, "missing_for_compile", lambda _: None)
    climb = plans("--waterfall", "v4", "v3", "--repeats", "2", "--precision", "fp32", "bf16")
    first = [plan.label for plan in climb.plans if plan.repeat == 0]
    second = [plan.label for plan in climb.plans if plan.repeat == 1]
    assert len(set(first)) == len(first)
    assert second == [label for label in first[::-1] if not label.startswith("v3")]
    assert all(plan.interpreted == (plan.version == "v3") for plan in climb.plans)
    why = "graph: left out: a graph needs a GPU"
    assert climb.left_out == [f"v4, {why}", f"v3, {why}"]
    # Without a GPU, V3's kernels take minutes: only if they are asked for.
    assert {to for to, _ in plans("--waterfall").asked} == {"v4"}


def test_a_machine_without_a_compiler_ends_with_v4_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waterfall.trainer, "missing_for_compile", lambda _: "a compiler (g++)")
    climb = plans("--waterfall")
    assert climb.left_out[0] == "v4, torch.compile: left out: torch.compile can't run here"
    *_, last = (plan for plan in climb.plans if plan.repeat == 0)
    assert (last.version, last.flags()[-2:]) == ("v4", ["--compile", "none"])


def test_flags_say_what_differs_from_the_version() -> None:
    found = {rung.title: rung for rung in rungs("v4") + rungs("v3")}
    plan = sessions.Plan("v2", "tiny", "fp32", 0, options=found["native GQA"].options(True))
    assert plan.flags() == ["--config", "tiny", "--precision", "fp32", "--no-fuse-optimizer"]
    plan = sessions.Plan("v4", "tiny", "fp32", 0, options=found["V4's code, eager"].options(True))
    assert plan.flags()[4:] == ["--compile", "none", "--no-cuda-graph"]


# --- the command ------------------------------------------------------------------------------

NO_MASK = (
    "return F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
    "return F.scaled_dot_product_attention(q, k, v)\n",
)


@pytest.fixture(scope="module")
def broken_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository whose V2 forgets the mask if it repeats k and v before SDPA."""
    changes = {
        "workshop/run/presets.py": SHRINK_PRESET,
        "version2_pytorch_fused/tiny_llama_v2.py": NO_MASK,
    }
    return copy_repository(tmp_path_factory.mktemp("broken") / "code", changes)


@pytest.mark.slow
def test_a_real_waterfall_with_a_red_rung(
    broken_copy: Path, tmp_path: Path, type_command: Callable[..., Finished]
) -> None:
    folder = tmp_path / "out"
    finished = type_command(
        *("python", TOOL, "--device", "cpu", "--waterfall", "--config", "tiny", "--repeats", "1"),
        *("--num-steps", "3", "--warmup-steps", "1", "--output-dir", folder),
        folder=broken_copy,
        OMP_NUM_THREADS="1",
        CXX="no-such-compiler",  # which would take half of the time
    )
    assert finished.returncode == 1, finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    assert "v4, graph: left out: a graph needs a GPU\n" in finished.stderr
    assert "v4, torch.compile: left out: torch.compile can't run here\n" in finished.stderr
    (one,) = json.loads((folder / "waterfall.json").read_text())["waterfalls"]
    steps = {step["change"]: step for step in one["steps"]}
    assert list(steps) == TO_V4
    assert steps["SDPA"]["parity"] == "fail" and steps["SDPA"]["step_ms"] is None
    timed = [title for title, step in steps.items() if step["step_ms"]]
    assert timed == [title for title in TO_V4[:8] if title != "SDPA"]
    assert steps["native GQA"]["before"] == "F.rms_norm"
    variants = [steps[title]["variant"] for title in TO_V4[:8]]
    assert len(set(variants[1:7])) == 6
    assert files(folder)[-4:] == [f"waterfall.{kind}" for kind in ("csv", "json", "md", "png")]
    # The files alone give the same.
    again = type_command(
        *("python", TOOL, "--waterfall", "--from-results", folder, "--format", "json"),
        folder=broken_copy,
    )
    assert again.returncode == 1
    (rebuilt,) = json.loads(again.stdout)["waterfalls"]
    assert [step["step_ms"] for step in rebuilt["steps"]] == [s["step_ms"] for s in one["steps"]]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_ctrl_c_keeps_the_rungs_that_were_run(
    broken_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    terminal = Terminal(
        *("python", TOOL, "--device", "cpu", "--waterfall", "--config", "tiny", "--repeats", "1"),
        *("--num-steps", "3", "--warmup-steps", "1", "--output-dir", folder),
        folder=broken_copy,
    )
    terminal.interrupted_after("v2 tiny fp32, fused QKV, run 1 of 1: ", 0.2)
    assert running(folder) == []
    (one,) = json.loads((folder / "waterfall.json").read_text())["waterfalls"]
    assert [bool(step["step_ms"]) for step in one["steps"][:2]] == [True, True]
    assert one["steps"][-3]["note"] == waterfall.NOT_RUN
    assert compare_versions.main(["--waterfall", "--from-results", str(folder)]) == 0
    assert "fused QKV" in capsys.readouterr().out
