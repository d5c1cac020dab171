"""Labs: their result files, their rows, and where these are shown."""

import json
from pathlib import Path
from typing import Any

import pytest
from stored_runs import lab_run, lab_session, reference, write, write_lab

from workshop import labs, records, tables
from workshop.collection import Collection
from workshop.errors import WorkshopError
from workshop.labs import LabRow, LabRun
from workshop.results import Audit, Parity, RunResult
from workshop.show import lab_table

RED = Parity(status="fail", failures=["logits differ"])


def rows_of(*runs: LabRun) -> dict[str, LabRow]:
    return {row.first.variant: row for row in labs.build_rows(runs)}


def test_a_row_pools_its_processes() -> None:
    runs = [lab_run(step_ms=ms) for ms in ([1.0, 2.0, 3.0], [10.0], [7.0])]
    runs[1].memory_mb["peak"], runs[2].peak_tflops = 4000.0, 132.0
    (row,) = labs.build_rows(runs)
    assert (row.step_ms, row.units_per_s) == (3.0, pytest.approx(32 / 3e-3))
    assert [row.percentile_ms(share) for share in (0.5, 0.9, 0.99)] == [3.0, 10.0, 10.0]
    assert row.units_per_s_per_gb == pytest.approx(32 / 3e-3 / 4)
    assert row.tflops == pytest.approx(88.0)
    assert (row.peak_share, row.ceiling_share) == (pytest.approx(2 / 3), pytest.approx(5 / 3))
    for run in runs:
        run.metrics["processes"] = 2
    assert (row.peak_share, row.ceiling_share) == (pytest.approx(1 / 3), pytest.approx(5 / 6))
    assert row.units_per_s_per_gb == pytest.approx(32 / 3e-3 / 4 / 2)


def test_a_speedup_is_per_unit_and_within_a_session() -> None:
    rows = rows_of(
        *(lab_run("fp32", ms) for ms in (10.0, 10.1)),
        *(lab_run("batch 64", ms, units_per_step=64) for ms in (10.0, 10.1)),
        lab_run("once", 5.0),
        lab_run("no baseline", 5.0, baseline="bf16"),
        lab_run("another day", 5.0, session="2"),
        lab_run("another device", 5.0, device={"name": "CPU"}),
    )
    double = rows["batch 64"].speedup
    assert double is not None and double.value == pytest.approx(2.0)
    assert double.interval is not None and double.interval[0] < 2.0 < double.interval[1]
    assert [name for name, row in rows.items() if row.speedup] == ["batch 64", "once"]
    texts = {name: lab_table.speedup_text(row) for name, row in rows.items()}
    assert texts["fp32"] == "baseline" and texts["once"] == "2.01x (1 process)"
    assert texts["batch 64"].startswith("2.00x [1.9") and texts["another day"] == "-"


@pytest.mark.parametrize(("changes", "verdict", "note"), [
    ({"gate": RED, "status": "gate failed"}, "FAIL", "gate failed: logits differ"),
    ({"gate": RED}, "FAIL", "gate failed: logits differ"),
    ({"audit": Audit(status="fail", failures=["weights differ"])}, "FAIL",
     "audit failed: weights differ"),
    ({"status": "failed", "error": "out of memory"}, "FAIL", "out of memory"),
    ({"status": "skipped", "error": "no fp16", "step_ms": [], "gate": Parity()}, "skipped",
     "no fp16"),
    ({"gate": Parity()}, "not audited", "gate not run: no times"),
    ({"status": "interrupted", "step_ms": []}, "pass", "gate pass: no timed step"),
])  # fmt: skip
def test_without_a_pass_no_times(changes: dict[str, Any], verdict: str, note: str) -> None:
    """Nor where one process of several is without."""
    for others in ([], [lab_run("fp16", 5.0)] if changes.get("step_ms") != [] else []):
        rows = rows_of(lab_run(), lab_run("fp16", **changes), *others)
        row, line = rows["fp16"], lab_table.lab_table(list(rows.values())).lines[1]
        assert (row.units_per_s, row.step_ms, row.speedup) == (None, None, None)
        assert row.verdict == verdict and row.note == note
        assert list(line.cells[1:7]) == [verdict, "-", "-", "-", "-", "-"]
        assert (line.cells[7] == "-") == row.failed == (verdict == "FAIL")
        # Without its time, a baseline gives no speed-up.
        rows = rows_of(lab_run(**changes), *others, lab_run("faster", 5.0))
        assert rows["faster"].speedup is None and lab_table.speedup_text(rows["fp32"]) == "-"
        notes = lab_table.lab_table(list(rows.values())).notes
        assert "faster: no speed-up, since fp32 has no time in this session" in notes


def test_the_newest_session_of_each_subject_is_shown() -> None:
    other = {"subject": "resnet18", "session": "20260101"}
    found = labs.newest([
        *lab_session(), *lab_session(session="20261124"), lab_run(**other),
        lab_run(session="20261125", status="profiled", step_ms=[]),
    ])  # fmt: skip
    assert [(rows[0].first.subject[:8], rows[0].first.session, len(rows)) for rows in found] == [
        ("resnet18", "20260101", 1),
        ("resnet50", "20261124", 3),
    ]


def test_the_subjects_of_one_session_are_one_table() -> None:
    subjects = [f"{name}, batch 32, inference" for name in ("vgg16", "alexnet")]
    changes = [{"subject": subject, "session": "2"} for subject in subjects]
    (rows,) = labs.newest(run for its in changes for run in lab_session(**its))
    table = lab_table.lab_table(rows)
    assert table.title == "inference_benchmark: 2 subjects, batch 32, inference, NVIDIA H200"
    assert [line.cells[0] for line in table.lines[1:4]] == [
        "alexnet: fp16, channels-last", "alexnet: fp16, wrong", "vgg16: fp32",
    ]  # fmt: skip
    assert table.lines[4].cells[6].startswith("2.00x [1.9")
    assert table.notes[0].startswith("alexnet: fp16, wrong: gate failed")


def test_a_rate_that_no_chip_has_is_named_once() -> None:
    run = lab_run("odd", 1.0, flops_per_step=1e15, peak_tflops=60.0)
    run.plausibility = labs.implausible(run)
    table = lab_table.lab_table(labs.build_rows([run]))
    sentence = "1,000,000 TFLOP/s, more than the data sheet's 60"
    assert f"IMPLAUSIBLE: odd: {sentence}" in table.notes


def test_the_table_has_each_number_once_and_all_forms() -> None:
    rows = labs.build_rows(
        [*lab_session(), lab_run("odd", 10.05, created="3", plausibility=["too fast"])]
    )
    table = lab_table.lab_table(rows)
    assert table.title == "inference_benchmark: resnet50, 32 x 3 x 224 x 224, NVIDIA H200"
    cells = dict(zip(table.header, table.lines[1].cells, strict=True))
    assert cells.pop("speed-up [95%]").startswith("2.00x [1.9")
    assert cells == {
        "variant": "fp16, channels-last", "verdict": "pass", "images/s": "6,368.2",
        "p50 ms": "5.025", "p90": "5.555", "p99": "5.555", "peak MB": "2,000",
        "images/s per GB": "3,184.1", "of peak": "87.6%", "of ceiling": "99.5%",
    }  # fmt: skip
    assert table.notes[:2] == [
        "fp16, wrong: gate failed: logits: 0.3 of allowed 0.01",
        "IMPLAUSIBLE: odd: too fast",
    ]
    assert table.notes[-1] == "peak: 60 TFLOP/s (data sheet)"
    report = lab_table.of_labs([rows])
    assert report.items[1]["speedup_ci"][0] < 2 < report.items[1]["speedup_ci"][1]
    assert json.dumps(report.as_json())
    assert "| fp16, wrong | FAIL | - |" in tables.markdown([table])


def test_a_collection_keeps_labs_apart(tmp_path: Path) -> None:
    """As do the tools that read the runs of versions, in any folder."""
    paths = write_lab(tmp_path, lab_run(session="2"), lab_run(session="1"))
    record = tmp_path / "profiles" / "resnet" / "tool" / "run.jsonl"
    records.save(lab_run(status="profiled", step_ms=[]), record)
    own = write(tmp_path, reference())
    found = Collection([tmp_path])
    found.refresh()
    assert [stored.path for stored in found.lab_runs] == paths[::-1]
    assert [stored.path for stored in found.runs] == [own] and not found.broken
    assert len(records.load_folder(tmp_path, RunResult)) == 1
    with pytest.raises(WorkshopError, match="no result files"):
        records.load_folder(paths[0], RunResult)


def test_a_rate_in_bytes_is_compared_with_the_copy() -> None:
    product, copy = lab_run(), lab_run("copy", bytes_per_step=4e10, ceiling_gbs=5000.0)
    first, second = (labs.LabRow((run,)) for run in (product, copy))
    assert (first.gbs, first.ceiling_share) == (None, pytest.approx(0.5))
    assert (second.gbs, second.ceiling_share) == (pytest.approx(4000.0), pytest.approx(0.8))
