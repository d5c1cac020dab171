"""The comparison: which runs may be set against each other, and what is said when they may not."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_S
from test_results import files, make_result
from workshop.compare.comparison import Row

from analysis_tools import compare_versions
from workshop import results, versions
from workshop.compare import comparison, comparison_figure, comparison_tables, sessions
from workshop.dashboard import data, figures
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
TOOL = Path("analysis_tools") / "compare_versions.py"
Finished = subprocess.CompletedProcess[str]
TypeCommand = Callable[..., Finished]

FASTER = [50.0, 49.0, 50.0, 51.0, 50.0]
CONTRACT = """version config precision device step_ms tokens_per_s samples_per_s forward_ms
backward_ms optimizer_ms speedup speedup_ci peak_memory_mb loss_first loss_last params_total
params_with_grad parity plausibility note""".split()


def by_label(runs: list[RunResult]) -> dict[str, Row]:
    return {row.label: row for row in comparison.build_rows(runs)}


# --- rows -------------------------------------------------------------------------------------


def test_a_gate_on_fewer_tokens_is_marked() -> None:
    gates = ((2, 16), (8, 128), (None, None))
    runs = [
        make_result(key, parity=results.Parity("pass", batch_size=gate[0], seq_len=gate[1]))
        for key, gate in zip(("v1", "v2", "v4"), gates, strict=True)
    ]
    rows = comparison.build_rows(runs)
    assert [row.proof(red="RED") for row in rows] == ["pass *", "pass", "pass"]
    told = comparison_tables.as_markdown(rows)
    assert told.count("pass *") == 1
    assert "- *: the gate ran on fewer tokens than the run: 2 x 16" in told


def test_a_speed_up_is_the_ratio_of_the_medians_with_its_interval() -> None:
    memory = {"peak": 150.0, "source": "allocator"}
    rows = by_label(
        [
            make_result("v2", step_ms=FASTER, memory_mb=memory),
            make_result("v2", gate="not run", step_ms=[50.1], memory_mb=memory),
            make_result("v1"),
            make_result("v1", gate="not run"),  # a repeat, which the first run's gate covers
        ]
    )
    assert list(rows) == ["v1", "v2"]
    v1, v2 = rows.values()
    assert (v1.runs, v1.parity, v1.speedup, v1.verdict()) == (2, "pass", 1.0, "baseline")
    assert v2.speedup == 2.0 and v2.speedup_ci is not None
    low, high = v2.speedup_ci
    assert 1.97 < low < 2.0 <= high < 2.03
    assert v2.verdict() == f"2.00x [{low:.2f}, {high:.2f}]"
    assert (v2.step_ms, v2.samples_per_s, v2.tokens_per_s) == (50.0, 160.0, 160.0 * 128)
    assert (v2.forward_ms, v2.backward_ms, v2.optimizer_ms) == (30.0, 60.0, 10.0)
    assert (v2.loss_first, v2.loss_last) == (6.9, 3.0)
    assert (v2.params_total, v2.params_with_grad) == (4190464, 4190464)
    assert (v2.peak_memory_mb, v2.memory_reduction) == (150.0, 0.25)
    assert v2.tflops and v2.peak_share == v2.tflops / 0.5
    for share, told in ((1.159, True), (0.9, False)):
        notes = comparison_tables.notes([dataclasses.replace(v2, peak_share=share)])
        assert ("more than 100% of peak" in "\n".join(notes)) == told
    assert not v2.failed and not v2.note


def test_a_step_twice_as_slow_is_said_to_be() -> None:
    steps = [("v1", 100.0), ("v1", 101.0), ("v2", 200.0), ("v2", 202.0)]
    row = by_label([make_result(version, step_ms=[ms]) for version, ms in steps])["v2"]
    assert row.speedup == 0.5
    assert row.verdict().startswith("0.50x [")


def test_an_interval_that_holds_1_is_no_difference() -> None:
    steps = [("v1", 90.0), ("v1", 110.0), ("v2", 95.0), ("v2", 99.0)]
    row = by_label([make_result(version, step_ms=[ms]) for version, ms in steps])["v2"]
    assert row.speedup_ci and row.speedup_ci[0] < 1 < row.speedup_ci[1]
    assert row.verdict().startswith("no significant difference [0.")


def test_one_process_gives_a_ratio_and_no_verdict_in_any_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever of the two it is: how far processes scatter is known of neither then."""
    once = {"setup_s": {"compile": 20.0, "capture": 0.5}}
    slow, fast = make_result(), make_result("v2", step_ms=FASTER, **once)  # type: ignore[arg-type]
    for runs in ([slow, fast], [slow, slow, fast], [slow, fast, fast]):
        row = by_label(runs)["v2"]
        assert (row.speedup, row.speedup_ci, row.verdict()) == (2.0, None, "2.00x (1 process)")
        assert (row.pays_back, row.pays_back_steps) == ("not known", None)
    rows = comparison.build_rows([slow, fast])
    note = "(1 process): no interval and no verdict"
    for form in ("table", "markdown"):
        comparison_tables.show(rows, form)
        shown = capsys.readouterr().out
        assert "2.00x (1 process)" in shown and note in shown and "significant" not in shown
    _, record = json.loads(json.dumps(comparison_tables.as_json(rows)))["rows"]
    assert (record["speedup"], record["speedup_ci"]) == (2.0, None)
    _, line = csv.DictReader(io.StringIO(comparison_tables.as_csv(rows)))
    assert (line["speedup"], line["speedup_ci"]) == ("2.0", "")
    assert rows[1].short_verdict() == "2.00x\n1 process"  # on a bar
    drawn = figures.speedups(rows)
    assert "<b>2.00x<br>1 process</b>" in drawn.data[1].text
    assert list(drawn.data[0].error_y.array) == [None, None]
    assert data.headline(rows) == ""
    # V1 alone is compared with nothing.
    assert note not in comparison_tables.as_markdown(comparison.build_rows([slow]))


def test_a_session_has_one_peak_for_each_precision() -> None:
    """A process measures an unlisted chip's in whatever minute it has: the highest counts."""
    peaks = {("v1", "fp32", "s"): 0.5, ("v2", "fp32", "s"): 0.4, ("v2", "bf16", "s"): 0.8}
    peaks |= {("v4", "fp32", "later"): 0.45}
    runs = [
        make_result(version, precision=precision, session=session, peak_tflops=peak)
        for (version, precision, session), peak in peaks.items()
    ]
    # Another size of the same session, which is shown in another table.
    runs.append(make_result("v1", session="s", seq_len=64, peak_tflops=0.6))
    runs.append(make_result("v1", session="s", device={"name": "Another"}, peak_tflops=9.0))
    rows = comparison.build_rows(runs)
    found = {(r.version, r.precision, r.session): r.peak_tflops for r in rows if r.seq_len == 128}
    found.pop(("v1", "fp32", "s"))  # of the other device
    assert found == {
        ("v2", "fp32", "s"): 0.6,
        ("v2", "bf16", "s"): 0.8,
        ("v4", "fp32", "later"): 0.45,
    }
    v1, v2 = (r for r in rows if (r.device, r.seq_len, r.precision) == ("Some CPU", 128, "fp32")
              and r.session == "s")  # fmt: skip
    assert v1.peak_share and v1.peak_share == v2.peak_share
    assert v1.tflops and v1.peak_share == pytest.approx(v1.tflops / 0.6)


@pytest.mark.parametrize(
    ("baseline", "other", "note"),
    [
        ({"session": "20250101"}, {}, "no V1 in the same session"),
        ({"gate": "not run"}, {}, "V1 failed in this session"),
        ({"status": "failed", "error": "crashed", "step_ms": []}, {}, "V1 failed in this session"),
        ({"gate": "fail", "status": "gate failed", "step_ms": []}, {}, "V1 failed in this sessi"),
        ({"precision": "bf16"}, {}, "no V1 in the same session"),
        ({"batch_size": 4}, {}, "no V1 in the same session"),
        ({"device": {"name": "Another"}}, {}, "no V1 in the same session"),
        ({"options": {"compile": "default"}}, {}, "no V1 in the same session"),
        ({}, {"gate": "not run"}, "gate not run"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}" for k in value) or "as-v2",
)
def test_no_speed_up_without_a_proven_baseline_of_the_same_kind(
    baseline: dict[str, object], other: dict[str, object], note: str
) -> None:
    runs = [make_result("v1", **baseline), make_result("v2", step_ms=FASTER, **other)]  # type: ignore[arg-type]
    row = by_label(runs)["v2"]
    assert (row.speedup, row.speedup_ci, row.memory_reduction) == (None, None, None)
    assert note in row.note and "no speed-up" in row.note
    assert row.verdict() == "-"
    assert row.step_ms == 50.0 and not row.failed  # its own figures stand


def test_sessions_are_not_mixed_and_the_newest_counts() -> None:
    def session(name: str, v1_ms: float, *others: str) -> list[RunResult]:
        runs = [make_result(key, session=name, step_ms=FASTER) for key in others]
        return [*runs, make_result("v1", session=name, step_ms=[v1_ms] * 5)]

    rows = by_label(session("20260301", 150.0, "v2") + session("20260201", 100.0, "v2", "v4"))
    assert {label: row.session for label, row in rows.items()} == {
        "v1": "20260301",
        "v2": "20260301",
        "v4": "20260201",  # not run in the newest one
    }
    assert (rows["v2"].speedup, rows["v4"].speedup) == (3.0, 2.0)
    # A later session without V1 proves nothing about V2, so the older one is kept.
    rows = by_label([*session("20260301", 150.0, "v2"), make_result("v2", session="20260401")])
    assert (rows["v2"].session, rows["v2"].speedup) == ("20260301", 3.0)


def test_a_red_gate_shows_no_figures_whatever_the_file_holds() -> None:
    red = make_result("v2", gate="fail", step_ms=FASTER)
    red.parity.failures.append("loss is off")
    row = by_label([make_result(), make_result("v2", step_ms=FASTER), red])["v2"]
    figures = (row.step_ms, row.tokens_per_s, row.speedup, row.peak_memory_mb, row.tflops)
    assert figures == (None,) * 5
    assert row.parity == "fail" and row.failed
    reason = "gradient of norm.weight is missing"
    assert row.note == f"gate red: {reason} (and 1 more)"


def test_a_failed_run_costs_its_own_row_only() -> None:
    crash = make_result("v2", "not run", status="failed", error="out of memory on X", step_ms=[])
    rows = by_label([make_result("v4", step_ms=FASTER), crash, make_result()])
    assert rows["v2"].failed and rows["v2"].note == "out of memory on X"
    assert rows["v2"].step_ms is None
    assert rows["v4"].speedup == 2.0 and not rows["v4"].failed
    # The second of two runs crashed: the first's figures would speak for a version that fails.
    rows = by_label([make_result(), make_result("v2", step_ms=FASTER), crash])
    assert rows["v2"].step_ms is None and rows["v2"].note == "out of memory on X"
    # Nor is such a V1 one to compare with.
    crash = dataclasses.replace(crash, version="v1")
    v2 = by_label([make_result(), crash, make_result("v2", step_ms=FASTER)])["v2"]
    assert (v2.speedup, v2.note) == (None, "V1 failed in this session: no speed-up")


def test_what_differs_from_a_versions_defaults_gets_its_own_row() -> None:
    def v2(**options: object) -> RunResult:
        return make_result("v2", step_ms=FASTER, options={"fuse_qkv": True, **options})

    cpu_v4 = {"compile": "default", "cuda_graph": False}
    gpu = {"type": "cuda", "name": "Some GPU"}
    rows = by_label(
        [
            make_result(),
            v2(fuse_norm=True),
            v2(fuse_norm=False, compile="none"),
            v2(compile="default"),
            make_result("v4", options=cpu_v4),
            make_result("v4", options={"compile": "none"}),
            make_result("v4", options={"compile": "default", "cuda_graph": True}, device=gpu),
            make_result("v4", options=cpu_v4, device=gpu),
            make_result("v1", options={"cuda_graph": True}, device=gpu),
        ]
    )
    assert list(rows) == [
        *("v1", "v2", "v2 compile=default", "v2 no-fuse-norm", "v4", "v4 compile=none"),
        *("v1 cuda-graph", "v4 no-cuda-graph"),  # of the GPU, whose plain v4 shares a label
    ]
    assert rows["v2 no-fuse-norm"].speedup == 2.0
    assert rows["v1 cuda-graph"].verdict() == "-"  # it is not the baseline


def test_an_interrupted_run_counts_and_says_so() -> None:
    cut = make_result("v2", status="interrupted", step_ms=FASTER, memory_mb={}, forward_ms=[])
    rows = by_label([make_result(), make_result("v2", step_ms=FASTER), cut])
    assert rows["v2"].note == "1 of 2 runs interrupted"
    assert rows["v2"].speedup == 2.0 and rows["v2"].peak_memory_mb == 200.0
    alone = by_label([make_result(), cut])["v2"]
    assert (alone.speedup, alone.peak_memory_mb, alone.forward_ms) == (2.0, None, None)
    nothing = by_label([make_result("v2", status="interrupted", step_ms=[])])["v2"]
    assert nothing.note == "no timed step"


TIMES = """step_ms step_spread tokens_per_s samples_per_s forward_ms backward_ms optimizer_ms
speedup speedup_ci tflops peak_tflops peak_share memory_reduction""".split()
GPU = {"type": "cuda", "name": "Some CPU"}  # of the name of make_result's, so that they compare


def interpreted(**changes: object) -> RunResult:
    """A run of V3 without a GPU, with times that someone could take for good ones."""
    options = {"compile": "none", "cuda_graph": False, "interpreted": True}
    memory = {"peak": 150.0, "rest": 150.0, "source": "profiled allocations"}
    given = {"options": options, "memory_mb": memory, "step_ms": FASTER, **changes}
    return make_result("v3", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"options": {}}, {"device": GPU}, {"gate": "not run"}, {"status": "interrupted"}],
    ids=["CPU", "CPU, which the file does not say", "GPU", "no gate", "interrupted"],
)
def test_no_time_of_an_interpreted_run_is_anywhere(changes: dict[str, object]) -> None:
    rows = by_label([make_result(), make_result("v2", step_ms=FASTER), interpreted(**changes)])
    row = rows["v3"]
    assert [getattr(row, name) for name in TIMES] == [None] * len(TIMES)
    assert row.verdict() == "interpreted, not comparable"
    assert row.note.startswith("interpreted, not comparable: ")
    assert row.status == "interpreted" and not row.failed
    # All the rest is there.
    assert (row.parity, row.loss_first, row.loss_last) == (changes.get("gate", "pass"), 6.9, 3.0)
    assert (row.params_with_grad, row.tensors_with_grad) == (4190464, 38)
    assert row.peak_memory_mb == 150.0
    assert rows["v2"].speedup == 2.0


def test_compiled_kernels_are_timed_like_any_others() -> None:
    options = {"compile": "none", "cuda_graph": True, "interpreted": False}
    row = by_label([make_result(), interpreted(options=options, device=GPU)])["v3"]
    assert (row.status, row.speedup, row.note) == ("timed", 2.0, "")


def test_every_form_says_that_a_run_was_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.figure import Figure

    words = "interpreted, not comparable"
    rows = comparison.build_rows([make_result(), interpreted()])
    for form in ("table", "markdown"):
        comparison_tables.show(rows, form)
        *_, line = (line for line in capsys.readouterr().out.splitlines() if words in line)
        assert line.lstrip("- ").startswith(f"v3: {words}: ")  # the last: below the tables
    table = comparison_tables.as_markdown(rows)
    assert f"| v3 | {'- | ' * 6}{words} |" in table
    assert "| v3 | pass | 38/38 | 6.900 → 3.000 | 150 | - | - | - |" in table
    _, line = csv.DictReader(io.StringIO(comparison_tables.as_csv(rows)))
    assert [line[name] for name in TIMES] == [""] * len(TIMES) and words in line["note"]

    drawn: list[list[str]] = []

    def read(figure: Figure, path: Path, **_: object) -> None:
        path.touch()
        drawn.extend([text.get_text() for text in axis.texts] for axis in figure.axes)

    monkeypatch.setattr(Figure, "savefig", read)
    comparison_figure.plot(rows, tmp_path / "x.png")
    throughput, time_of_a_step, memory = drawn
    place = words.replace(", ", ",\n")
    assert throughput == ["baseline", "", place]
    assert time_of_a_step == ["100", place]
    assert memory == ["200", "150"]


def test_what_a_machine_cannot_run_is_skipped_and_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lack = {"status": "skipped", "error": "version v3 needs Triton", "gate": "not run"}
    skipped = make_result("v3", step_ms=[], losses=[], memory_mb={}, gradients=None, **lack)  # type: ignore[arg-type]
    row = by_label([make_result(), skipped])["v3"]
    assert (row.status, row.note, row.verdict()) == (
        "skipped",
        "version v3 needs Triton",
        "skipped",
    )
    assert row.step_ms is None and not row.failed
    results.save(skipped, tmp_path)
    assert compare_versions.main(["--from-results", str(tmp_path)]) == 77  # there is nothing else
    results.save(make_result(), tmp_path)
    assert compare_versions.main(["--from-results", str(tmp_path)]) == 0
    assert "v3: version v3 needs Triton" in capsys.readouterr().out


# --- what the first use costs -----------------------------------------------------------------


def setup(compile_s: float, capture_s: float = 0.0) -> dict[str, dict[str, float]]:
    told = {"gate": 9.0, "compile": compile_s, "capture": capture_s, "warm_up": 3.0}
    return {"setup_s": told}


def test_the_first_use_is_paid_back_by_what_each_step_saves() -> None:
    runs = [
        make_result(**setup(0.0)),
        make_result("v2", step_ms=[150.0, 151.0, 149.0], **setup(0.0, 2.0)),
        make_result("v4", step_ms=FASTER, **setup(20.0, 0.5)),
        make_result("v4", step_ms=FASTER, gate="not run", **setup(4.0, 0.5)),
    ]
    rows = by_label([*runs, make_result(gate="not run"), dataclasses.replace(runs[1])])
    v4 = rows["v4"]
    assert (v4.first_use_s, v4.first_use_least_s) == (20.5, 4.5)
    assert v4.setup_s["compile"] == 20.0
    # V1's 100 ms less V4's 50: 20.5 s are 410 such steps.
    assert (v4.pays_back_steps, v4.pays_back) == (410, "after 410 steps")
    v2 = rows["v2"]
    assert (v2.first_use_s, v2.pays_back_steps, v2.pays_back) == (2.0, None, "never")
    assert (rows["v1"].first_use_s, rows["v1"].pays_back) == (0.0, None)
    text = comparison_tables.as_markdown(list(rows.values()))
    assert (
        "- v4: first use 20.5 s (compile 20.0, capture 0.5), 4.5 s where the caches were filled; "
        "paid back against V1 after 410 steps" in text
    )
    assert "- v2: first use 2.0 s (compile 0.0, capture 2.0); never paid back" in text
    assert "v1: first use" not in text


def test_nothing_is_made_up_of_files_that_do_not_tell_the_first_use() -> None:
    row = by_label([make_result(), make_result("v4", step_ms=FASTER)])["v4"]
    assert (row.first_use_s, row.pays_back, row.pays_back_steps) == (None, None, None)
    even = [90.0, 110.0, 95.0, 105.0, 99.0]
    runs = [make_result(step_ms=[ms], **setup(0.0)) for ms in even]
    runs += [make_result("v2", step_ms=[ms], **setup(1.0)) for ms in even]
    assert by_label(runs)["v2"].pays_back == "not known"


@pytest.mark.parametrize(
    ("milliseconds", "pays_back", "steps"),
    [(50.0, "at once", 0), (100.0, "not known", None), (150.0, "never", None)],
)
def test_a_version_that_compiles_nothing_pays_back_only_if_it_is_faster(
    milliseconds: float, pays_back: str, steps: int | None
) -> None:
    runs = []
    for factor in (0.9, 1.1, 1.0, 1.05, 0.95):
        times = [milliseconds * factor]
        runs += [make_result(**setup(0.0)), make_result("v2", step_ms=times, **setup(0.0))]
    v2 = by_label(runs)["v2"]
    assert (v2.pays_back, v2.pays_back_steps) == (pays_back, steps)


def test_implausible_figures_are_flagged_with_the_row() -> None:
    fast = make_result("v2", plausibility=["the backward pass takes 0.1 of the forward's"])
    rows = comparison.build_rows([make_result(), fast, fast])
    assert rows[1].plausibility == ["the backward pass takes 0.1 of the forward's"]
    table = comparison_tables.as_markdown(rows)
    assert table.count("IMPLAUSIBLE: the backward pass takes 0.1 of the forward's") == 1


def test_runs_of_a_waterfall_or_a_sweep_do_not_fill_the_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in (64, 256):
        name = {"config_name": "custom", "session": "20250101"}
        results.save(make_result(seq_len=length, **name), tmp_path / "both")  # type: ignore[arg-type]
        results.save(make_result(seq_len=length, **name), tmp_path / "sweep")  # type: ignore[arg-type]
    results.save(make_result(), tmp_path / "both")
    assert compare_versions.main(["--from-results", str(tmp_path / "both")]) == 0
    captured = capsys.readouterr()
    assert "tiny: 8 x 128" in captured.out and "custom" not in captured.out
    assert captured.err == "2 runs left out: --waterfall or --sweep shows what they are of\n"
    assert compare_versions.main(["--from-results", str(tmp_path / "sweep")]) == 0
    captured = capsys.readouterr()
    assert "custom: 8 x 64" in captured.out and captured.err == ""  # there is nothing else


HOSTILE = "\ud800 $\\frac$ \x1b[31m | <b>"
"""A name that can't be encoded, is no formula, steers a terminal, and is markup."""


@pytest.mark.parametrize("form", comparison_tables.FORMATS)
def test_a_device_may_have_any_name(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("v1", "v2"):
        device = {"type": "cpu", "name": HOSTILE}
        options = {"compile": HOSTILE}
        results.save(make_result(version, device=device), tmp_path / "in")
        results.save(make_result(version, device=device, options=options), tmp_path / "in")
    words = ["--from-results", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out")]
    assert compare_versions.main([*words, "--format", form]) == 0
    shown = capsys.readouterr().out.encode()  # as a terminal does
    assert b"\x1b" not in shown
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert text.count(r"\$\\frac\$ \[31m \| \<b\>") > 2


def test_comparison_md_is_headed_by_the_sessions_it_tells_of(tmp_path: Path) -> None:
    def session(name: str, torch: str, *keys: str) -> list[RunResult]:
        return [make_result(key, session=name, software={"torch": torch}) for key in keys]

    runs = [*session("1", "2.5", "v1"), *session("2", "2.6", "v1", "v2"), *session("3", "9", "v4")]
    rows = comparison.build_rows(runs)[:2]
    compare_versions.write_outputs(rows, runs, tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert text.startswith("# Comparison 2\n\ntorch 2.6\n\n### ")
    assert json.loads((tmp_path / "comparison.json").read_text())["session"] == "2"


def test_comparison_json_keeps_the_contract(tmp_path: Path) -> None:
    red = make_result("v4", gate="fail", step_ms=[])
    rows = comparison.build_rows([make_result(), make_result("v2"), red])
    names = compare_versions.write_outputs(rows, [red], tmp_path)
    assert [Path(name).name for name in names] == files(tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["schema_version"] == comparison.SCHEMA_VERSION
    assert [row["version"] for row in content["rows"]] == ["v1", "v2", "v4"]
    for row in content["rows"]:
        assert set(row) >= set(CONTRACT)
    assert [row["parity"] for row in content["rows"]] == ["pass", "pass", "fail"]


def test_rows_of_different_sizes_stand_in_different_tables() -> None:
    small = {"config_name": "small", "batch_size": 16}
    runs = [make_result(**kind) for kind in ({}, small, {"precision": "bf16"})]  # type: ignore[arg-type]
    text = comparison_tables.as_markdown(comparison.build_rows(runs))
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### tiny: 8 x 128 tokens, bf16, Some CPU",
        "### tiny: 8 x 128 tokens, fp32, Some CPU",
        "### small: 16 x 128 tokens, fp32, Some CPU",
    ]


# --- the command ------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SHRINK_PRESET = ("Preset(256, 4, 8, seq_len=128, batch_size=8)", "Preset(64, 1, 4, 16, 2, 300)")


NEVER_WAITS = ("    now = seconds_without_processor()\n", "    return 0.0\n")


def copy_repository(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """The repository's code in another place, with one text replaced in some of its files. However
    busy this machine is, no run there is disturbed."""
    changes = {"workshop/run/waiting.py": NEVER_WAITS} | changes
    names = ["workshop", "analysis_tools", *(v.folder for v in versions.VERSIONS.values())]
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name, (old, new) in changes.items():
        path = folder / name
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new))
    return folder


def tool(*words: str | Path) -> list[str | Path]:
    return ["python", TOOL, "--device", "cpu", *words]


def copy_with_v3(folder: Path, text: str) -> Path:
    """A small repository whose V3 is this text: nothing that Triton's interpreter makes slow."""
    copy_repository(folder, {"workshop/run/presets.py": SHRINK_PRESET})
    place = folder / versions.VERSIONS["v3"].folder / "tiny_llama_v3.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    return folder


# Python imports this at its start.
NO_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_present(name, path=None, target=None):
    return None if name.split(".")[0] == "triton" else find_spec(name, path, target)

PathFinder.find_spec = find_present
"""
LACKS = "import sys\nsys.exit(print('error: it needs a widget', file=sys.stderr) or 77)\n"

FEW_STEPS = ("--num-steps", "2", "--warmup-steps", "1", "--repeats", "1")


@pytest.fixture(scope="module")
def started(
    type_command: TypeCommand, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Finished]]]:
    """The slow commands, two at a time: they run while the tests before them do."""
    names = ("good", "broken", "deceived", "plain", "lacks", "bare")
    good, broken, deceived, plain, lacks, bare = map(tmp_path_factory.mktemp, names)
    copy_with_v3(plain / "code", versions.VERSIONS["v2"].path.read_text())
    copy_with_v3(lacks / "code", LACKS)
    (bare / "sitecustomize.py").write_text(NO_TRITON)
    copy_repository(
        broken / "code",
        {
            "workshop/run/presets.py": SHRINK_PRESET,
            "version2_pytorch_fused/tiny_llama_v2.py": ("F.silu", "F.relu"),
            "version4_pytorch_sdpa/tiny_llama_v4.py": (
                "import torch\n",
                "import torch\nraise RuntimeError('no such kernel')\n",
            ),
        },
    )
    copy_repository(
        deceived / "code",
        {
            "workshop/run/presets.py": SHRINK_PRESET,
            "version2_pytorch_fused/tiny_llama_v2.py": (
                "import torch.nn.functional as F\n",
                "import torch.nn.functional as F\n\nF.silu = F.relu  # V1's in this process, too\n",
            ),
        },
    )
    with ThreadPoolExecutor(2) as pool:
        yield {
            "good": pool.submit(
                type_command,
                *tool("--config", "tiny", "--versions", "v1", "v2", *FEW_STEPS),
                *("--output-dir", good / "out"),
                folder=plain / "code",
                OMP_NUM_THREADS="1",
            ),
            "broken": pool.submit(
                type_command,
                *tool("--config", "tiny", "--versions", "v1", "v2", "v4", *FEW_STEPS),
                *("--repeats", "2", "--output-dir", broken / "out"),
                folder=broken / "code",
                OMP_NUM_THREADS="1",
            ),
            "deceived": pool.submit(
                type_command,
                *tool("--config", "tiny", "--versions", "v2", "v1", "--num-steps", "3"),
                *("--warmup-steps", "1", "--repeats", "2", "--output-dir", deceived / "out"),
                folder=deceived / "code",
                OMP_NUM_THREADS="1",
            ),
            "interpreted": pool.submit(
                type_command,
                *tool("--versions", "v1", "v3", "--num-steps", "5", "--warmup-steps", "2"),
                *("--repeats", "2", "--output-dir", plain / "out"),
                folder=plain / "code",
                OMP_NUM_THREADS="1",
            ),
            "lacks": pool.submit(
                type_command,
                *tool("--versions", "v1", "v3", *FEW_STEPS, "--output-dir", lacks / "out"),
                folder=lacks / "code",
                OMP_NUM_THREADS="1",
            ),
            "no Triton": pool.submit(
                type_command,
                *tool("--versions", "v3", "--output-dir", bare / "out"),
                folder=plain / "code",
                PYTHONPATH=str(bare),
            ),
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def good(
    started: dict[str, Future[Finished]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Finished, Path]:
    finished = started["good"].result()
    return finished, Path(finished.args[-1])


def test_a_comparison_trains_shows_and_writes(good: tuple[Finished, Path]) -> None:
    from matplotlib.image import imread

    finished, folder = good
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"│ v1 .* baseline │", finished.stdout)
    assert re.search(r"│ v2 .*x \(1 process\) │", finished.stdout)
    assert re.findall(r"│ (v\d) +│ +pass │ +11/11 │", finished.stdout) == ["v1", "v2"]
    for key in ("v1", "v2"):  # told as it goes, for those who wait
        assert re.search(rf"^{key} tiny fp32, run 1 of 1: [\d.]+ ms", finished.stderr, re.MULTILINE)
        for stage in ("gate: ", "warming up ", "audit: "):
            line = rf"^{key} tiny fp32: {stage}.* \.\.\.$"
            assert re.search(line, finished.stderr, re.MULTILINE)
    written = [name for name in files(folder) if not name.startswith("runs")]
    assert written == ["comparison.json", "comparison.md", "comparison.png"]
    height, width = imread(folder / "comparison.png").shape[:2]
    assert width >= 1500 and height >= 500
    runs = results.load_folder(folder)
    assert [run.version for run in runs] == ["v1", "v2"]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-3)  # the same text, the same math
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    assert [(row["parity"], row["audit"]) for row in rows] == [("pass", "pass")] * 2
    assert rows[1]["speedup"] == pytest.approx(rows[0]["step_ms"] / rows[1]["step_ms"])


@pytest.mark.parametrize("form", ["json", "csv", "markdown", "table"])
def test_results_alone_give_the_same_rows_again(
    form: str, good: tuple[Finished, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    finished, folder = good
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert compare_versions.main(["--from-results", str(folder), "--format", form]) == 0
    shown = capsys.readouterr().out
    content = json.loads((folder / "comparison.json").read_text())
    if form == "json":
        assert json.loads(shown)["rows"] == content["rows"]
    elif form == "csv":
        lines = list(csv.DictReader(io.StringIO(shown)))
        assert [line["version"] for line in lines] == ["v1", "v2"]
        assert [float(line["step_ms"]) for line in lines] == [
            row["step_ms"] for row in content["rows"]
        ]
        assert set(lines[0]) >= set(CONTRACT) - {"plausibility"}
    elif form == "markdown":
        assert (folder / "comparison.md").read_text().endswith(shown)
    else:
        assert finished.stdout.startswith(shown)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("spelling", ["--output-dir={}", "--output={}"])
def test_results_alone_are_written_where_that_is_asked_for(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.save(make_result(), tmp_path / "in")
    flag = spelling.format(tmp_path / "out")
    words = ["--from-results", str(tmp_path / "in"), "--format", "json", flag]
    assert compare_versions.main(words) == 0
    assert files(tmp_path / "out") == ["comparison.json", "comparison.md", "comparison.png"]
    captured = capsys.readouterr()
    assert json.loads(captured.out)  # nothing but JSON for the program that reads it
    assert captured.err.startswith("Written: ")


def test_a_red_gate_and_a_crash_cost_their_own_rows(started: dict[str, Future[Finished]]) -> None:
    finished = started["broken"].result()
    folder = Path(finished.args[-1])
    assert finished.returncode == 1, finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    v1, v2, v4 = json.loads((folder / "comparison.json").read_text())["rows"]
    assert v1["step_ms"] and v1["runs"] == 2 and v1["parity"] == "pass"
    assert (v2["step_ms"], v2["speedup"], v2["parity"]) == (None, None, "fail")
    assert v2["note"].startswith("gate red: ")
    assert (v4["step_ms"], v4["parity"], v4["note"]) == (
        None,
        "not run",
        "RuntimeError: no such kernel",
    )
    for label, reason in (("v2", v2["note"]), ("v4", v4["note"])):
        assert f"{label}: {reason}" in re.sub(r"\s+", " ", finished.stdout)
        # It failed once and was not run again.
        assert len(re.findall(rf"^{label} tiny fp32, run", finished.stderr, re.MULTILINE)) == 1
    statuses = {run.version: run.status for run in results.load_folder(folder)}
    assert statuses == {"v1": "complete", "v2": "gate failed", "v4": "failed"}
    logs = list(folder.rglob("*.log"))
    assert len(logs) == 1 and "no such kernel" in logs[0].read_text()
    assert compare_versions.main(["--from-results", str(folder)]) == 1


def test_a_version_that_deceives_the_gate_is_found_by_the_audit(
    started: dict[str, Future[Finished]],
) -> None:
    """What it changes in its process, it changes in the gate's V1 as well."""
    finished = started["deceived"].result()
    folder = Path(finished.args[-1])
    assert finished.returncode == 1, finished.stderr
    v1, v2 = json.loads((folder / "comparison.json").read_text())["rows"]
    assert (v1["parity"], v1["audit"], v1["runs"]) == ("pass", "pass", 2)
    assert (v2["parity"], v2["audit"]) == ("pass", "fail")
    assert (v2["step_ms"], v2["speedup"]) == (None, None)
    assert v2["note"].startswith("audit red: timed run: loss ")
    assert len(re.findall(r"^v2 tiny fp32, run", finished.stderr, re.MULTILINE)) == 1
    assert re.search(r"│ v2 +│ +FAIL │", finished.stdout)
    runs = {run.version: run for run in results.load_folder(folder)}
    assert runs["v2"].status == "audit failed" and runs["v2"].audit.seconds


@needs_triton
def test_an_interpreted_version_runs_once_and_briefly(
    started: dict[str, Future[Finished]],
) -> None:
    finished = started["interpreted"].result()
    folder = Path(finished.args[-1])
    assert finished.returncode == 0, finished.stderr
    told = finished.stderr.splitlines()
    assert told[0].startswith("v3: in Triton's interpreter on this machine, ")
    lines = [line for line in told[1:] if line.startswith("v3 tiny fp32, run")]
    assert len(lines) == 1
    start = "v3 tiny fp32, run 1 of 1: interpreted, not comparable; gate: pass: gradients 11/11"
    assert lines[0].startswith(start)
    runs = results.load_folder(folder)
    steps = [(run.version, run.warmup_steps, run.options["num_steps"]) for run in runs]
    assert sorted(steps) == [("v1", 2, 5), ("v1", 2, 5), ("v3", 1, 1)]
    v1, v3 = json.loads((folder / "comparison.json").read_text())["rows"]
    assert v1["step_ms"] and (v3["status"], v3["parity"]) == ("interpreted", "pass")
    assert [v3[name] for name in TIMES] == [None] * len(TIMES)
    losses = next(run.losses for run in runs if run.version == "v3")
    assert losses == pytest.approx(runs[0].losses[:3], rel=1e-4)  # the same text, the same math
    assert (folder / "comparison.png").is_file()
    assert re.search(r"│ v3 .* │ interpreted, not comparable │", finished.stdout)


@needs_triton
def test_what_a_version_lacks_costs_its_own_row(started: dict[str, Future[Finished]]) -> None:
    finished = started["lacks"].result()
    assert finished.returncode == 0, finished.stderr
    assert "v3 tiny fp32, run 1 of 1: skipped: it needs a widget\n" in finished.stderr
    v1, v3 = json.loads((Path(finished.args[-1]) / "comparison.json").read_text())["rows"]
    assert v1["step_ms"] and (v3["status"], v3["note"]) == ("skipped", "it needs a widget")


def test_without_triton_v3_is_skipped_and_told_how_to_get_it(
    started: dict[str, Future[Finished]],
) -> None:
    finished = started["no Triton"].result()
    assert finished.returncode == 77, finished.stderr  # nothing else was asked for
    line, *_ = finished.stderr.splitlines()
    assert line.startswith("v3: skipped: version v3 needs Triton, which is not installed: ")
    (row,) = json.loads((Path(finished.args[-1]) / "comparison.json").read_text())["rows"]
    assert row["status"] == "skipped" and line == f"v3: skipped: {row['note']}"
    assert row["note"] in re.sub(r"\s+", " ", finished.stdout)


def test_what_a_process_says_is_read_whatever_the_terminal_can_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "print('Result: /é.json')"]
    monkeypatch.setattr(sessions._Child, "_command", lambda self: command)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = ["--device", "cpu", "--output-dir", str(tmp_path)]
    arguments = compare_versions.build_parser().parse_args(words)
    child = sessions._Child(sessions.Plan("v1", "tiny", "fp32", 0), arguments, "1", tmp_path)
    assert list(child.lines()) == ["Result: /é.json"]


WRONG = {
    "unknown version": (["--versions", "v9"], "unknown version 'v9': choose from v1, v2"),
    "unknown preset": (["--config", "tiny", "giant"], "unknown preset 'giant': choose from tiny"),
    "unknown precision": (["--precision", "int4"], "unknown precision 'int4'"),
    "precision": (["--precision", "fp32", "fp16"], "precision fp16: the CPU does not have it"),
    "no repeats": (["--repeats", "0"], "--repeats 0: it must be at least 1"),
    "no steps": (["--num-steps", "-3"], "--num-steps -3: it must be at least 1"),
    "seed": (["--seed", "-1"], "--seed -1: it must lie between"),
    "device": (["--device", "tpu"], "unknown device 'tpu'"),
    "file as folder": (["--output-dir", "FILE"], "FILE can't be written"),
    "no results": (["--from-results", "absent"], "results absent: no such folder"),
    "empty results": (["--from-results", "EMPTY"], "no result files"),
    "truncated result": (["--from-results", "CUT"], "cut.json: no valid JSON at line 1"),
    "another format": (["--format", "xml"], "invalid choice: 'xml'"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "CUT").mkdir()
    (tmp_path / "CUT" / "cut.json").write_text('{"schema_version": 1, "vers')
    before = files(tmp_path)
    places = {name: str(tmp_path / name) for name in ("FILE", "EMPTY", "CUT")}
    given = [places.get(word, word) for word in words]
    defaults = ["--device", "cpu", "--output-dir", str(tmp_path / "out")]
    try:
        status: object = compare_versions.main(defaults + given)
    except SystemExit as stop:  # argparse's own
        status = stop.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in re.sub(re.escape(str(tmp_path)) + "/", "", captured.err)
    assert captured.err.count("error: ") == 1
    if captured.err.startswith("error: "):
        assert captured.err.count("\n") == 1
    assert files(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_a_version_that_is_not_in_this_checkout_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = dataclasses.replace(versions.VERSIONS["v2"], folder="version2_elsewhere")
    monkeypatch.setitem(versions.ALL, "v2", gone)
    output = tmp_path / "out"
    status = compare_versions.main(["--versions", "v1", "v2", "--output-dir", str(output)])
    assert status == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: version v2 .* is not in this checkout: .*\n", error)
    assert not output.exists()


def test_help_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compare_versions.main(["--help"])
    assert stop.value.code == 0
    assert "default" in capsys.readouterr().out


# --- Ctrl-C -----------------------------------------------------------------------------------

# A terminal of our own: what is typed into it, Ctrl-C too, goes to the command as at a keyboard.
# Whoever is started in the background ignores Ctrl-C, and hands that down: not to our command.
TERMINAL = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""
LONG = ("--config", "tiny", "--num-steps", "100000", "--repeats", "1")


class Terminal:
    """A command in a terminal: wait for what it shows, type, and read how it ended."""

    def __init__(self, *words: str | Path, folder: Path) -> None:
        command = [sys.executable if word == "python" else str(word) for word in words]
        environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL, *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.shown = ""

    def wait_for(self, text: str) -> None:
        assert self._process.stdout is not None
        while text not in self.shown:
            block = os.read(self._process.stdout.fileno(), 65536)
            assert block, f"it ended without {text!r}:\n{self.shown}"
            self._add(block)

    def type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def end_job(self, name: Path) -> None:
        """As a batch system: SIGTERM to every process of the job, whose commands name something."""
        pids = {int(line.split()[0]) for line in running(name)} - {self._process.pid}
        assert len(pids) >= 2
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    def end(self) -> int:
        rest, _ = self._process.communicate(timeout=HANGS_S)
        self._add(rest)
        return self._process.returncode

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def interrupted_after(self, text: str, seconds: float) -> None:
        """Ctrl-C some time after a text is shown; it ends as an interrupted tool should."""
        try:
            self.wait_for(text)
            time.sleep(seconds)
            self.type("\x03")
            status = self.end()
        finally:
            self.kill()
        assert status == 130, self.shown
        assert "interrupted: the table holds what was completed" in self.shown
        assert "Traceback" not in self.shown

    def _add(self, block: bytes) -> None:
        text = block.decode(errors="replace")
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def running(text: str | Path) -> list[str]:
    """Command lines of processes that name something."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True)
    # ps writes letters that are not ASCII as the locale has it: the test's own folders have none.
    tail = "/".join(Path(text).parts[-3:])
    return [line for line in listing.stdout.splitlines() if tail in line]


@pytest.fixture(scope="module")
def small_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "code"
    return copy_repository(folder, {"workshop/run/presets.py": SHRINK_PRESET})


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_ctrl_c_or_sigterm_keeps_what_was_completed(
    how: str, small_copy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    words = ("--versions", "v1", *LONG, "--warmup-steps", "1", "--output-dir", folder)
    terminal = Terminal(*tool(*words), folder=small_copy)
    try:
        terminal.wait_for("v1 tiny fp32: step ")  # progress, as a terminal shows it
        assert len(running(folder)) >= 2
        time.sleep(0.5)
        if how == "Ctrl-C":
            terminal.type("\x03")
        else:
            terminal.end_job(folder)
        status = terminal.end()
    finally:
        terminal.kill()
    assert status == 130, terminal.shown
    assert "interrupted: the table holds what was completed" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert running(folder) == []
    (run,) = results.load_folder(folder)
    assert run.status == "interrupted" and 1 <= len(run.step_ms) < 100_000
    (row,) = json.loads((folder / "comparison.json").read_text())["rows"]
    assert row["note"] == "1 of 1 runs interrupted" and row["step_ms"]
    assert not [name for name in files(folder) if Path(name).name.startswith(".")]


def test_ctrl_c_while_a_process_starts_leaves_none_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(command: list[str], **words: Any) -> subprocess.Popen[str]:
        if command[0] != sys.executable:
            return popen(command, **words)
        process = popen([sys.executable, "-c", "import time; time.sleep(9999)"], **words)
        started.append(process)
        signal.raise_signal(signal.SIGINT)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(sessions.subprocess, "Popen", start)
    words = ["--device", "cpu", "--output-dir", str(tmp_path)]
    arguments = compare_versions.build_parser().parse_args(words)
    plans = [sessions.Plan("v1", "tiny", "fp32", repeat=0)]
    try:
        assert sessions.run_plans(plans, arguments, "1") == ([], True)
        assert [process.poll() is not None for process in started] == [True]
    finally:
        for process in started:
            process.kill()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_ctrl_c_before_anything_is_complete_says_so(small_copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("--versions", "v1", *LONG, "--warmup-steps", "100000", "--output-dir", folder)
    terminal = Terminal(*tool(*words), folder=small_copy)
    try:
        terminal.wait_for("v1 tiny fp32: warming up")
        terminal.type("\x03")
        status = terminal.end()
    finally:
        terminal.kill()
    assert status == 130, terminal.shown
    assert "interrupted before a run was complete: nothing saved" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert running(folder) == []
    assert files(folder) == []
