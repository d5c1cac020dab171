"""The comparison: which runs may be compared, and what it says of those that may not."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import HANGS_S
from test_results import files, make_result
from tricks import copy_checkout

from analysis_tools import compare_versions
from workshop import records, results, tables, versions
from workshop.compare import rows, sweep, waterfall
from workshop.compare.rows import Row
from workshop.judge import judge
from workshop.results import RunResult
from workshop.run import presets
from workshop.run.timing import Ratio
from workshop.show import charts, comparisons
from workshop.versions import VERSIONS

ROOT = Path(__file__).resolve().parents[1]
TOOL = Path("analysis_tools") / "compare_versions.py"
Finished = subprocess.CompletedProcess[str]
TypeCommand = Callable[..., Finished]

FASTER = [50.0, 49.0, 50.0, 51.0, 50.0]
CONTRACT = """version config precision device step_ms judge_ms tokens_per_s samples_per_s forward_ms
backward_ms optimizer_ms speedup speedup_ci peak_memory_mb loss_first loss_last params_total
params_with_grad parity plausibility note""".split()
TIMES = """step_ms step_spread tokens_per_s samples_per_s forward_ms backward_ms optimizer_ms
speedup speedup_ci tflops peak_tflops peak_share memory_reduction""".split()
GPU = {"type": "cuda", "name": "Some CPU"}  # of the name of make_result's, so that they compare


def by_label(runs: list[RunResult]) -> dict[str, Row]:
    return {row.label: row for row in rows.build_rows(runs)}


# --- rows -------------------------------------------------------------------------------------


def test_a_speed_up_is_the_ratio_of_the_medians_with_its_interval() -> None:
    memory = {"peak": 150.0, "source": "allocator"}
    found = by_label(
        [
            make_result("v2", step_ms=FASTER, memory_mb=memory),
            make_result("v2", gate="not run", step_ms=[50.1], memory_mb=memory),
            make_result("v1"),
            make_result("v1", gate="not run"),  # a repeat, which the first run's gate covers
        ]
    )
    assert list(found) == ["v1", "v2"]
    v1, v2 = found.values()
    assert (v1.runs, v1.parity, v1.speedup.value, v1.speedup_text()) == (2, "pass", 1.0, "baseline")
    assert v2.speedup.value == 2.0 and v2.speedup.interval is not None
    low, high = v2.speedup.interval
    assert 1.97 < low < 2.0 <= high < 2.03
    assert v2.speedup_text() == f"2.00x [{low:.2f}, {high:.2f}]"
    assert (v2.step_ms, v2.samples_per_s, v2.tokens_per_s) == (50.0, 160.0, 160.0 * 128)
    assert (v2.forward_ms, v2.backward_ms, v2.optimizer_ms) == (30.0, 60.0, 10.0)
    assert (v2.loss_first, v2.loss_last) == (6.9, 3.0)
    assert (v2.params_total, v2.params_with_grad) == (4190464, 4190464)
    assert (v2.peak_memory_mb, v2.memory_reduction) == (150.0, 0.25)
    assert v2.tflops and v2.peak_share == v2.tflops / 0.5
    assert not v2.failed and not v2.note


@pytest.mark.parametrize(
    ("v1", "v2", "verdict"),
    [
        ((100.0, 101.0), (200.0, 202.0), "0.50x ["),
        ((90.0, 110.0), (95.0, 99.0), "no significant difference [0."),
    ],
)
def test_a_verdict_needs_an_interval_without_1(v1, v2, verdict) -> None:
    runs = [make_result(key, step_ms=[ms]) for key, side in (("v1", v1), ("v2", v2)) for ms in side]
    assert by_label(runs)["v2"].speedup_text().startswith(verdict)


def test_one_process_gives_a_ratio_and_no_verdict_in_any_form() -> None:
    """The scatter between a version's processes is unknown then."""
    once = {"setup_s": {"compile": 20.0, "capture": 0.5}}
    slow, fast = make_result(), make_result("v2", step_ms=FASTER, **once)
    for runs in ([slow, fast], [slow, slow, fast], [slow, fast, fast]):
        row = by_label(runs)["v2"]
        assert (row.speedup, row.speedup_text()) == (Ratio(2.0, None), "2.00x (1 process)")
        assert (row.break_even, row.break_even_steps) == ("unknown", None)
    report = comparisons.of_rows(rows.build_rows([slow, fast]))
    assert "2.00x (1 process)" in tables.markdown(report.tables)
    assert report.as_json()["rows"][1]["speedup_ci"] is None
    _, line = csv.DictReader(io.StringIO(report.as_csv()))
    assert (line["speedup"], line["speedup_ci"]) == ("2.0", "")


def test_a_session_has_one_peak_for_each_precision() -> None:
    """A process measures an unlisted chip's in whatever minute it has: the highest counts, also of
    another size, which is shown in another table."""
    runs = [
        make_result("v1", peak_tflops=0.5),
        make_result("v2", peak_tflops=0.4),
        make_result("v2", precision="bf16", peak_tflops=0.8),
        make_result("v4", session="later", peak_tflops=0.45),
        make_result("v1", seq_len=64, peak_tflops=0.6),
        make_result("v1", device={"name": "Another"}, peak_tflops=9.0),
    ]
    found = [r for r in rows.build_rows(runs) if (r.device, r.seq_len) == ("Some CPU", 128)]
    peaks = {(r.version, r.precision): r.peak_tflops for r in found}
    assert peaks == {("v1", "fp32"): 0.6, ("v2", "fp32"): 0.6, ("v2", "bf16"): 0.8,
                     ("v4", "fp32"): 0.45}  # fmt: skip
    assert all(r.tflops and r.peak_share == r.tflops / (r.peak_tflops or 0) for r in found)


@pytest.mark.parametrize(
    ("baseline", "other", "note"),
    [
        ({"session": "20250101"}, {}, "no V1 in the same session"),
        ({"gate": "not run"}, {}, "V1 failed in this session"),
        ({"status": "failed", "error": "crashed", "step_ms": []}, {}, "V1 failed in this session"),
        ({"precision": "bf16"}, {}, "no V1 in the same session"),
        ({"batch_size": 4}, {}, "no V1 in the same session"),
        ({"device": {"name": "Another"}}, {}, "no V1 in the same session"),
        ({"options": {"compile": "default"}}, {}, "no V1 in the same session"),
        ({}, {"gate": "not run"}, "gate not run"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}" for k in value) or "as-v2",
)
def test_no_speed_up_without_a_proven_baseline_of_the_same_kind(baseline, other, note) -> None:
    runs = [make_result("v1", **baseline), make_result("v2", step_ms=FASTER, **other)]
    row = by_label(runs)["v2"]
    assert (row.speedup, row.memory_reduction) == (None, None)
    assert note in row.note and "no speed-up" in row.note
    assert row.speedup_text() == "-"
    assert row.step_ms == 50.0 and not row.failed  # its own times remain


def test_sessions_are_not_mixed_and_the_newest_counts() -> None:
    def session(name: str, v1_ms: float, *others: str) -> list[RunResult]:
        runs = [make_result(key, session=name, step_ms=FASTER) for key in others]
        return [*runs, make_result("v1", session=name, step_ms=[v1_ms] * 5)]

    found = by_label(session("20260301", 150.0, "v2") + session("20260201", 100.0, "v2", "v4"))
    assert {label: row.session for label, row in found.items()} == {
        "v1": "20260301",
        "v2": "20260301",
        "v4": "20260201",  # not run in the newest one
    }
    assert (found["v2"].speedup.value, found["v4"].speedup.value) == (3.0, 2.0)
    # A later session without V1 proves nothing about V2, so the older one is kept.
    found = by_label([*session("20260301", 150.0, "v2"), make_result("v2", session="20260401")])
    assert (found["v2"].session, found["v2"].speedup.value) == ("20260301", 3.0)
    # Nor does a later process alone, which gives no interval, unless it failed.
    several, alone = session("20260301", 150.0, "v2", "v2"), session("20260401", 100.0, "v2")
    for status, newest in {"complete": "03", "interrupted": "03", "gate failed": "04"}.items():
        alone[0].status = status
        assert by_label(several + alone)["v2"].session == f"2026{newest}01", status
    # An older process alone that failed gives way to a newer one.
    failed = session("20260201", 150.0, "v2")
    failed[0].status = "failed"
    assert by_label(failed + session("20260301", 100.0, "v2"))["v2"].session == "20260301"


def test_what_failed_or_was_refused_has_no_numbers_and_costs_its_own_row_only() -> None:
    red = make_result("v2", gate="fail", step_ms=FASTER)
    red.gate.failures.append("loss is off")
    crash = make_result("v2", "not run", status="failed", error="out of memory on X", step_ms=[])
    reason = "gate failed: gradient of norm.weight is missing (and 1 more)"
    for bad, note in ((red, reason), (crash, "out of memory on X")):
        # One of two runs is bad: the other's times would speak for a version that fails.
        runs = [make_result(), make_result("v2", step_ms=FASTER), bad]
        found = by_label([*runs, make_result("v4", step_ms=FASTER)])
        row = found["v2"]
        numbers = (row.step_ms, row.tokens_per_s, row.speedup, row.peak_memory_mb, row.tflops)
        assert numbers == (None,) * 5 and row.failed and row.note == note
        assert found["v4"].speedup.value == 2.0 and not found["v4"].failed
    # Nor is such a V1 a baseline.
    crash = dataclasses.replace(crash, version="v1")
    v2 = by_label([make_result(), crash, make_result("v2", step_ms=FASTER)])["v2"]
    assert (v2.speedup, v2.note) == (None, "V1 failed in this session: no speed-up")


def test_what_differs_from_a_versions_defaults_gets_its_own_row() -> None:
    def v2(**options: object) -> RunResult:
        return make_result("v2", step_ms=FASTER, options={"fuse_qkv": True, **options})

    cpu_v4 = {"compile": "default", "cuda_graph": False}
    gpu = {"type": "cuda", "name": "Some GPU"}
    found = by_label(
        [
            *(make_result(), v2(fuse_norm=True), v2(fuse_norm=False, compile="none")),
            *(v2(compile="default"), make_result("v4", options=cpu_v4)),
            make_result("v4", options={"compile": "none"}),
            make_result("v4", options={"compile": "default", "cuda_graph": True}, device=gpu),
            make_result("v4", options=cpu_v4, device=gpu),
            make_result("v1", options={"cuda_graph": True}, device=gpu),
        ]
    )
    assert list(found) == [
        *("v1", "v2", "v2 compile=default", "v2 no-fuse-norm", "v4", "v4 compile=none"),
        *("v1 cuda-graph", "v4 no-cuda-graph"),  # of the GPU, whose plain v4 shares a label
    ]
    assert found["v2 no-fuse-norm"].speedup.value == 2.0
    assert found["v1 cuda-graph"].speedup_text() == "-"  # it is not the baseline


def test_an_interrupted_run_counts_and_says_so() -> None:
    cut = make_result("v2", status="interrupted", step_ms=FASTER, memory_mb={}, forward_ms=[])
    row = by_label([make_result(), make_result("v2", step_ms=FASTER), cut])["v2"]
    assert row.note == "1 of 2 runs interrupted"
    assert row.speedup.value == 2.0 and row.peak_memory_mb == 200.0


@pytest.mark.parametrize(
    "changes", [{}, {"options": {}}, {"device": GPU}], ids=["CPU", "CPU, not said", "GPU"]
)
def test_no_number_of_an_interpreted_run_is_beside_those_that_were_not(changes) -> None:
    """Its times look like good ones."""
    options = {"compile": "none", "cuda_graph": False, "interpreted": True}
    v3 = make_result("v3", **({"options": options, "step_ms": FASTER} | changes))
    found = by_label([make_result(), make_result("v2", step_ms=FASTER), v3])
    row, report = found["v3"], comparisons.of_rows(list(found.values()))
    assert not row.step_parts and not row.memory_mb
    assert row.speedup_text() == "interpreted, not comparable"
    assert row.status == "interpreted" and not row.failed
    assert (row.parity, row.tensors_with_grad) == ("pass", 38)
    assert found["v2"].speedup.value == 2.0
    names = (*TIMES, "loss_first", "loss_last", "peak_memory_mb")
    assert {report.items[2][name] for name in names} == {None}
    *_, time, memory = charts.draw_rows(list(found.values())).axes
    for axis in (time, memory):
        (words,) = (text.get_text() for text in axis.texts if text.xy[1:] == (2,))
        assert words == "interpreted, not comparable"


def test_the_picture_shows_the_table_s_numbers() -> None:
    """The parts of V2's step, timed apart, take 100 ms, the step 50 ms; V4's were not timed. Other
    programs disturbed V4's run."""
    unknown = {"forward_ms": [], "memory_mb": {"peak": 1234.0, "source": "allocator"}}
    twice = [make_result(), make_result("v2", step_ms=FASTER)] * 2
    found = rows.build_rows([*twice, make_result("v4", waited_share=0.9, **unknown)])
    speed, proof = comparisons.group_tables(found)
    drawn = charts.draw_rows(found)
    *_, rates, time, memory = drawn.axes
    assert [one.get_text() for one in rates.get_yticklabels()] == ["v1", "v2", "v4, disturbed"]
    assert charts.DISTURBED in drawn.get_supxlabel()
    assert rates.get_title("left") == comparisons.title(found)
    (whiskers,) = rates.collections
    v1, v2, _ = found
    low, high = (end * v1.tokens_per_s for end in v2.speedup.interval)
    assert whiskers.get_segments()[0].tolist() == [
        [pytest.approx(low), 1],
        [pytest.approx(high), 1],
    ]
    for axis, table, column in ((time, speed, 3), (memory, proof, 4)):
        shown = [text.get_text() for text in axis.texts if text.get_fontweight() == "bold"]
        assert shown == [line.cells[column].split(" ")[0] for line in table.lines]
    inside = {text.get_text() for text in time.texts} - {"-", ""}
    assert inside >= {cell for line in speed.lines[:2] for cell in line.cells[4:6]}
    lengths = {b.get_label(): [bar.get_width() for bar in b] for b in time.containers}
    assert lengths == {
        "forward": [30.0, 15.0, 0.0],
        "backward": [60.0, 30.0, 0.0],
        "optimizer": [10.0, 5.0, 0.0],
        "not divided": [0.0, 0.0, 100.0],
    }


@pytest.mark.parametrize(
    ("compile_s", "milliseconds", "break_even", "steps"),
    [
        (20.0, 50.0, "after 400 steps", 400),  # V1's 100 ms less 50: 20 s are 400 such steps
        (0.0, 50.0, "at once", 0),
        (1.0, 100.0, "unknown", None),
        (2.0, 150.0, "never", None),
    ],
)
def test_the_startup_is_made_up_for_by_what_each_step_saves(
    compile_s, milliseconds, break_even, steps
) -> None:
    runs = []
    for index, factor in enumerate((0.9, 1.1, 1.0, 1.05, 0.95)):  # a later process finds caches
        startup = {"compile": compile_s / (1 + index), "capture": 0.0, "warm_up": 3.0}
        runs.append(make_result("v4", step_ms=[milliseconds * factor], setup_s=startup))
        runs.append(make_result(step_ms=[100 * factor], setup_s=dict.fromkeys(startup, 0.0)))
    found = by_label(runs)
    assert (found["v1"].startup_s, found["v1"].break_even) == (0.0, None)
    row = found["v4"]
    assert (row.break_even, row.break_even_steps) == (break_even, steps)
    assert (row.startup_s, row.startup_least_s) == (compile_s, compile_s / 5)


# --- what is shown and written ----------------------------------------------------------------


def test_runs_of_a_waterfall_or_a_sweep_do_not_fill_the_ladder(tmp_path, capsys) -> None:
    for length, kind in ((64, "sweep point"), (256, "waterfall rung")):
        run = make_result(seq_len=length, config_name="custom", kind=kind)
        records.add(run, tmp_path / "both")
        records.add(run, tmp_path / "others")
    records.add(make_result(), tmp_path / "both")
    assert compare_versions.main(["--from-results", str(tmp_path / "both")]) == 0
    captured = capsys.readouterr()
    assert "tiny: 8 x 128" in captured.out and "custom" not in captured.out
    assert captured.err == "2 runs are not shown: --waterfall or --sweep shows them\n"
    assert compare_versions.main(["--from-results", str(tmp_path / "others")]) == 0
    captured = capsys.readouterr()
    assert "custom: 8 x 64" in captured.out and captured.err == ""  # there is nothing else


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--config small", "small-bf16-v1 small-bf16-v2 small-bf16-v3"),
        ("--precision fp32", "tiny-fp32-v1"),
        ("--versions v2", "tiny-fp32-v1 small-bf16-v1 small-bf16-v2"),
        ("--versions hf --config small", "small-bf16-v1"),
    ],
)
def test_rows_of_results_can_be_chosen(words, shown, tmp_path, capsys) -> None:
    for version, config, precision in (
        ("v1", "tiny", "fp32"), ("v1", "small", "bf16"), ("v2", "small", "bf16"),
        ("v3", "small", "bf16"),
    ):  # fmt: skip
        run = make_result(version=version, config_name=config, precision=precision)
        records.add(run, tmp_path)
    words = f"--from-results {tmp_path} --format json {words}"
    assert compare_versions.main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {f"{row['config']}-{row['precision']}-{row['version']}" for row in rows}
    assert found == set(shown.split())


def test_a_version_that_cannot_run_here_is_skipped_and_not_failed(
    tmp_path, monkeypatch, capsys
) -> None:
    why = "version v3 needs Triton, which is not installed"
    monkeypatch.setattr(versions, "missing", lambda version: why if version.triton else None)
    words = ["--versions", "v3", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert compare_versions.main(words) == 77  # nothing else was requested
    captured = capsys.readouterr()
    assert captured.err == f"v3: skipped: {why}\n" and f"v3: {why}" in captured.out
    (run,) = records.load_folder(tmp_path, RunResult)
    (row,) = rows.build_rows([run])
    assert (row.status, row.note, row.speedup_text()) == ("skipped", why, "skipped")
    assert (run.kind, row.config, row.step_ms, row.failed) == ("run", "tiny", None, False)
    records.add(make_result(), tmp_path)
    assert compare_versions.main(["--from-results", str(tmp_path)]) == 0


# --- the command ------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SHRINK_PRESET = ("Preset(256, 4, 8, seq_len=128, batch_size=8)", "Preset(64, 1, 4, 16, 2, 300)")


NEVER_DISTURBED = ("MOST_WAITED = 0.5", "MOST_WAITED = 9.0")
ANY_TIMES = ("SHARE, FIXED_MS = 0.05, 10.0", "SHARE, FIXED_MS = 0.05, 1e4")


def copy_repository(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """The repository's code in another place, with one text replaced in some of its files. However
    busy this machine is, no run there is disturbed or has wrong times."""
    copy_checkout(folder)
    unlimited = {"workshop/results.py": NEVER_DISTURBED, "workshop/judge/judge.py": ANY_TIMES}
    for name, change in (unlimited | changes).items():
        replace(folder / name, *change)
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def tool(*words: str | Path) -> list[str | Path]:
    return ["python", TOOL, "--device", "cpu", *words]


# Python imports this at its start.
NO_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_present(name, path=None, target=None):
    return None if name.split(".")[0] == "triton" else find_spec(name, path, target)

PathFinder.find_spec = find_present
"""
NEEDS_WIDGET = "import sys\nsys.exit(print('error: it needs a widget', file=sys.stderr) or 77)\n"
FEW_STEPS = ("--num-steps", "2", "--warmup-steps", "1", "--repeats", "1")
V2 = "version2_pytorch_fused/tiny_llama_v2.py"
RED_V2 = {"workshop/run/presets.py": SHRINK_PRESET, V2: ("F.silu", "F.relu")}
CRASH = "raise RuntimeError('no such kernel')\n"


def use_versions_of(code: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Versions and peers are those of another copy, and some have other texts there. The preset is
    small, and no run is disturbed."""
    monkeypatch.setitem(presets.PRESETS, "tiny", presets.Preset(64, 1, 4, 16, 2, 300))
    monkeypatch.setattr(results, "MOST_WAITED", 9.0)
    monkeypatch.setattr(judge, "FIXED_MS", 1e4)
    for key, version in versions.ALL.items():
        own = dataclasses.replace(version, folder=str(code / version.folder), packages=())
        monkeypatch.setitem(versions.ALL, key, own)
        if text := texts.get(key):
            own.path.parent.mkdir(exist_ok=True)
            own.path.write_text(text)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[int, str, str, Path]:
    """A comparison of processes: status, stdout, stderr and folder. V2 has a planted fault, V3 is
    interpreted, V4 crashes, and `hf` can't run here."""
    folder = tmp_path_factory.mktemp("mixed")
    code, out = copy_repository(folder / "code", RED_V2), folder / "out"
    others = {"v3": VERSIONS["v2"].path.read_text(), "v4": CRASH, "hf": NEEDS_WIDGET}
    words = ["--config", "tiny", "--num-steps", "2", "--warmup-steps", "1", "--repeats", "2"]
    words += ["--versions", *VERSIONS, "hf", "--device", "cpu", "--output-dir", str(out)]
    words += ["--jobs", "3"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        use_versions_of(code, patch, **others)
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("OMP_NUM_THREADS", "1")
        status = compare_versions.main(words)
    return status, stdout.getvalue(), stderr.getvalue(), out


@needs_triton
def test_a_comparison_trains_shows_and_writes(mixed) -> None:
    status, stdout, stderr, folder = mixed
    assert status == 1 and "Traceback" not in stdout + stderr  # V2's gate is red
    assert re.search(r"│ v1 .* baseline │", stdout)
    assert re.search(r"│ v1 +│ +pass │ +11/11 │", stdout)
    assert re.search(r"^v1 tiny fp32, run 2 of 2: [\d.]+ ms", stderr, re.MULTILINE)
    for stage in ("gate: ", "warming up ", "audit: "):
        assert re.search(
            rf"^runs? [\w ]+ of 9.*: v1 tiny fp32: {stage}.* \.\.\.$", stderr, re.MULTILINE
        )
    # Those that prepare at the same time are timed when all are ready.
    assert -1 < stderr.find("v3 tiny fp32: gate: ") < stderr.find("v1 tiny fp32: audit: ")
    assert (folder / "comparison.png").is_file()
    found = {row["version"]: row for row in json.loads(read(folder, "json"))["rows"]}
    v1 = found["v1"]
    assert (v1["runs"], v1["parity"], v1["audit"], v1["speedup"]) == (2, "pass", "pass", 1.0)
    assert found["hf"]["status"] == "skipped"
    assert "hf tiny fp32, run 1 of 2: skipped: it needs a widget\n" in stderr


def read(folder: Path, suffix: str) -> str:
    return (folder / f"comparison.{suffix}").read_text()


@needs_triton
def test_a_red_gate_and_a_crash_cost_their_own_rows(mixed) -> None:
    _, stdout, stderr, folder = mixed
    found = {row["version"]: row for row in json.loads(read(folder, "json"))["rows"]}
    v2, v4 = found["v2"], found["v4"]
    assert (v2["step_ms"], v2["speedup"], v2["parity"]) == (None, None, "fail")
    assert v2["note"].startswith("gate failed: ")
    assert (v4["step_ms"], v4["parity"]) == (None, "not run")
    assert v4["note"] == "RuntimeError: no such kernel"
    for label, reason in (("v2", v2["note"]), ("v4", v4["note"])):
        assert f"{label}: {reason}" in stdout
    for label in ("v2", "v4", "hf"):  # it failed once and was not run again
        assert len(re.findall(rf"^{label} tiny fp32, run", stderr, re.MULTILINE)) == 1
    runs = records.load_folder(folder, RunResult)
    assert all("name" in run.data for run in runs)
    statuses = {run.version: run.status for run in runs}
    assert (statuses["v2"], statuses["v4"]) == ("gate failed", "failed")
    (log,) = folder.rglob("*.log")
    assert "no such kernel" in log.read_text()


@needs_triton
def test_an_interpreted_version_passes_the_gate_and_times_nothing(mixed) -> None:
    _, stdout, stderr, folder = mixed
    assert "\nv3: in Triton's interpreter on this machine, " in f"\n{stderr}"
    (line,) = (line for line in stderr.splitlines() if line.startswith("v3 tiny fp32, run"))
    start = "v3 tiny fp32, run 1 of 1: interpreted, not comparable; gate: pass: gradients 11/11"
    assert line.startswith(start)
    runs = records.load_folder(folder, RunResult)
    (v3,) = (run for run in runs if run.version == "v3")
    assert (v3.step_ms, v3.losses, v3.gate.status) == ([], [], "pass")
    found = {row["version"]: row for row in json.loads(read(folder, "json"))["rows"]}
    assert (found["v3"]["status"], found["v3"]["parity"]) == ("interpreted", "pass")
    assert [found["v3"][name] for name in TIMES] == [None] * len(TIMES)
    assert re.search(r"│ v3 .* │ +interpreted", stdout)


@needs_triton
def test_results_alone_give_the_same_rows_again(mixed, monkeypatch, capsys) -> None:
    _, stdout, _, folder = mixed
    monkeypatch.setattr(results, "MOST_WAITED", 9.0)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    shown = {}
    for form in tables.FORMATS:
        assert compare_versions.main(["--from-results", str(folder), "--format", form]) == 1
        shown[form] = capsys.readouterr().out
    assert json.loads(shown["json"])["rows"] == json.loads(read(folder, "json"))["rows"]
    assert shown["csv"].splitlines() == read(folder, "csv").splitlines()
    assert set(shown["csv"].splitlines()[0].split(",")) >= set(CONTRACT) - {"plausibility"}
    assert all(set(row) >= set(CONTRACT) for row in json.loads(shown["json"])["rows"])
    assert read(folder, "md").endswith(shown["markdown"])
    assert stdout.startswith(shown["table"])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# --- Ctrl-C -----------------------------------------------------------------------------------


def running(folder: Path) -> list[int]:
    """The processes whose command lines name a folder."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True)
    # ps writes letters that are not ASCII as the locale has it: the test's own folders have none.
    tail = "/".join(folder.parts[-3:])
    return [int(line.split()[0]) for line in listing.stdout.splitlines() if tail in line]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_ctrl_c_or_sigterm_keeps_what_was_completed(how, tmp_path) -> None:
    code = copy_repository(tmp_path / "code", {"workshop/run/presets.py": SHRINK_PRESET})
    folder = tmp_path / "out"
    words = tool("--versions", "v1", "v2", "--config", "tiny", "--num-steps", "2")
    words += ["--repeats", "999", "--jobs", "2", "--warmup-steps", "1", "--output-dir", folder]
    settings = {"FORCE_COLOR": "1", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    tool_process = subprocess.Popen(
        [sys.executable, *map(str, words[1:])],
        cwd=code,
        env=os.environ | settings | {"PYTHONPATH": str(code)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert tool_process.stdout is not None
    shown = b""
    try:
        while b"v2 tiny fp32, run 1 of 999" not in shown:
            shown += (block := os.read(tool_process.stdout.fileno(), 65536))
            assert block, shown.decode()
        while len(pids := running(code)) < 2:  # the next two start
            assert tool_process.poll() is None
        time.sleep(0.5)
        if how == "Ctrl-C":  # a terminal's goes to the command's group
            os.killpg(tool_process.pid, signal.SIGINT)
        else:  # a batch system's to all processes of the job
            for pid in (tool_process.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        shown += tool_process.communicate(timeout=HANGS_S)[0]
    finally:
        tool_process.kill()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert tool_process.returncode == 130, text
    assert "interrupted: the table holds what was completed" in text
    assert "Traceback" not in text and running(code) == []
    assert {run.status for run in records.load_folder(folder, RunResult)} == {"complete"}
    found = json.loads((folder / "comparison.json").read_text())["rows"]
    assert all(row["step_ms"] for row in found) and len(found) == 2
    assert not [name for name in files(folder) if Path(name).name.startswith(".")]


@pytest.mark.parametrize("runs", [[], [make_result(status="interrupted")]], ids=["none", "one"])
@pytest.mark.parametrize(
    "words", [[], ["--waterfall"], ["--sweep", "seq-len", "128", "256"]], ids=str
)
def test_ctrl_c_shows_what_was_completed(words, runs, tmp_path, monkeypatch, capsys) -> None:
    name = words[0].strip("-") if words else "comparison"
    kind = {"waterfall": waterfall.KIND, "sweep": sweep.KIND}.get(name, "run")
    runs = [dataclasses.replace(run, kind=kind) for run in runs]
    monkeypatch.setattr(compare_versions, "run_plans", lambda *_, **__: (runs, True))
    output = ["--device", "cpu", "--precision", "fp32", "--output-dir", str(tmp_path)]
    assert compare_versions.main([*words, *output]) == 130
    shown = capsys.readouterr()
    if runs:
        assert "interrupted: the table holds what was completed" in shown.err
        assert "100.00" in shown.out and (tmp_path / f"{name}.json").is_file()
    else:
        assert "interrupted before a run was complete: nothing saved" in shown.err
        assert shown.out == "" and files(tmp_path) == []
