"""Labs: their result files, their rows, and where these are shown."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_runs import lab_run, lab_session, reference, write, write_lab

from analysis_tools import report_generator
from workshop import labs, records, versions
from workshop.collection import Collection
from workshop.compare import lab_table, tables
from workshop.compare.figures import SAVED
from workshop.dashboard import blocks, layout
from workshop.dashboard.data import Choice, Snapshot
from workshop.errors import WorkshopError
from workshop.labs import LabRow, LabRun
from workshop.report import content, pages
from workshop.results import Audit, Parity, RunResult
from workshop.run import lab_record

RED = Parity(status="fail", failures=["logits differ"])
LABS = blocks.LABS


def rows_of(*runs: LabRun) -> dict[str, LabRow]:
    return {row.first.variant: row for row in labs.build_rows(runs)}


# --- rows ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("count", "share", "expected"), [
    (100, 0.5, 50), (100, 0.9, 90), (100, 0.99, 99), (100, 1.0, 100), (3, 0.5, 2), (1, 0.99, 1),
    (2, 0.5, 1), (10, 0.99, 10), (10, 0.0, 1),
])  # fmt: skip
def test_percentiles(count: int, share: float, expected: int) -> None:
    assert labs.percentile([float(i) for i in range(1, count + 1)], share) == expected


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
        assert lab_table.verdict(row) == verdict and row.note() == note
        assert list(line.cells[1:7]) == [verdict, "-", "-", "-", "-", "-"]
        assert (line.cells[7] == "-") == row.failed == (verdict == "FAIL")
        assert blocks.figures.lab_rates(list(rows.values())).layout.yaxis.ticktext == ("fp32",)
        # A baseline without a time is none.
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


def test_sessions_of_other_precisions_stay_and_batches_are_in_order() -> None:
    runs = [
        lab_run(subject=f"resnet18, batch {batch}", session=session, options={"precision": name})
        for session, name, batch in (
            ("1", "fp32", 16), ("2", "fp32", 2), ("3", "bf16", 2), ("4", "fp32", 1),
            ("5", "fp32", 1),
        )
    ]  # fmt: skip
    both = {"subject": "resnet18, batch 2", "session": "6"}
    runs += [lab_run(name, **both, options={"precision": name}) for name in ("fp32", "bf16")]
    found = [(rows[0].first.session, lab_table.title(rows)) for rows in labs.newest(runs)]
    head = "inference_benchmark: resnet18, batch"
    assert found == [
        ("5", f"{head} 1, fp32, NVIDIA H200"),
        ("3", f"{head} 2, bf16, NVIDIA H200"),
        ("6", f"{head} 2, NVIDIA H200"),
        ("2", f"{head} 2, fp32, NVIDIA H200"),
        ("1", f"{head} 16, fp32, NVIDIA H200"),
    ]


def test_more_than_the_ceiling_is_explained() -> None:
    rows = labs.build_rows([lab_run(ceiling_tflops=20.0), lab_run("half", ceiling_tflops=60.0)])
    (note,) = [line for line in lab_table.lab_table(rows).notes if "of ceiling" in line]
    assert note.startswith("fp32: of ceiling above 100%")


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
    assert len(report.as_csv().splitlines()) == 5 and json.dumps(report.as_json())
    assert "| fp16, wrong | FAIL | - |" in tables.markdown([table])


# --- files ---------------------------------------------------------------------------------------


def test_a_file_holds_the_whole_run(tmp_path: Path) -> None:
    (path,) = set(write_lab(tmp_path, *lab_session()))
    assert records.load(path).runs == lab_session()


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"step_ms": ["1"]}, r"field step_ms\[0\]: expected `float`"),
    ({"step_ms": [1.0, 0.0]}, r"field step_ms\[1\]: expected `float` >= 1e-09"),
    ({"step_ms": []}, "step_ms is empty in a complete run"),
    ({"units_per_step": 0}, "field units_per_step: expected `int` >= 1"),
    ({"status": "fine"}, "field status: invalid enum value 'fine'"),
    ({"gate": {"status": "maybe"}}, "field gate.status: invalid enum value 'maybe'"),
    ({"gate": {"status": "fail"}}, "field gate: failures is empty, though the check failed"),
    ({"memory_mb": {"peak": "much"}}, "memory_mb.peak should be a number"),
    ({"memory_mb": {"peak": 0.0}}, "memory_mb.peak is 0.0"),
    ({"peak_tflops": -1.0}, "field peak_tflops: expected `float` >= 1e-09"),
    ({"ceiling_tflops": 0}, "field ceiling_tflops: expected `float` >= 1e-09"),
    ({"more": 1}, "field more is unknown"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_a_broken_file_is_named_with_its_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    good, path = write_lab(tmp_path, lab_run(), lab_run(session="2"))
    head, line = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps(json.loads(line) | changes)}\n")
    with pytest.raises(WorkshopError, match=message) as caught:
        records.load(path)
    assert str(caught.value).startswith(f"{path}: line 2: ") and "\n" not in str(caught.value)
    found = collect(tmp_path)
    assert [stored.path for stored in found.lab_runs] == [good]
    assert [broken.path for broken in found.broken] == [path]


# --- where they are shown ------------------------------------------------------------------------


def collect(*folders: Path) -> Collection:
    collection = Collection(folders)
    collection.refresh()
    return collection


def test_a_collection_keeps_labs_apart(tmp_path: Path) -> None:
    """As do the tools that read the runs of versions, in any folder."""
    paths = write_lab(tmp_path, lab_run(session="2"), lab_run(session="1"))
    record = tmp_path / "profiles" / "resnet" / "tool" / "run.jsonl"
    records.save(lab_run(status="profiled", step_ms=[]), record)
    own = write(tmp_path, reference())
    found = collect(tmp_path)
    assert [stored.path for stored in found.lab_runs] == paths[::-1]
    assert [stored.path for stored in found.runs] == [own] and not found.broken
    assert len(records.load_folder(tmp_path, RunResult)) == 1
    with pytest.raises(WorkshopError, match="no result files"):
        records.load_folder(paths[0], RunResult)


def dashboard(folder: Path) -> Snapshot:
    return Snapshot(collect(folder))


def test_a_rate_in_bytes_is_compared_with_the_copy() -> None:
    product, copy = lab_run(), lab_run("copy", bytes_per_step=4e10, ceiling_gbs=5000.0)
    first, second = (labs.LabRow((run,)) for run in (product, copy))
    assert (first.gbs, first.ceiling_share) == (None, pytest.approx(0.5))
    assert (second.gbs, second.ceiling_share) == (pytest.approx(4000.0), pytest.approx(0.8))


def test_the_dashboard_of_labs_alone(tmp_path: Path) -> None:
    write_lab(tmp_path, *lab_session(), lab_run(subject="vgg16", session="1"))
    snapshot = dashboard(tmp_path)
    choice = snapshot.settle(Choice())
    assert choice.lab in snapshot.labs
    assert "resnet50" in choice.lab and len(snapshot.labs) == 2
    summary, rates = blocks.view(LABS, snapshot, choice)
    assert summary.before == [("fp16, wrong: gate failed: logits: 0.3 of allowed 0.01", blocks.BAD)]
    assert summary.table is not None and rates.figure is not None
    red = summary.table.rows[2][1]
    assert isinstance(red, blocks.Cell) and (red.text, red.look) == ("FAIL", blocks.BAD)
    bars = rates.figure.data[0]
    assert list(bars.marker.color) == [versions.ALL["v1"].colour, SAVED]
    assert dict(zip(rates.figure.layout.yaxis.ticktext, bars.x, strict=True)) == {
        "fp32": pytest.approx(32 / 10.05e-3), "fp16, channels-last": pytest.approx(32 / 5.025e-3)
    }  # fmt: skip
    assert any(line.startswith("From 1 result file in") for line in summary.after)
    (contents,) = blocks.view(blocks.CONTENTS, snapshot, choice)
    assert contents.title == "Labs: 2" and contents.table is not None
    assert [
        row[1:] for row in contents.table.rows if "resnet50" in getattr(row[0], "text", "")
    ] == [["fp16, channels-last: 2.00x", "3", "2"]]
    page = str(layout.page(snapshot, 1))
    assert "Labs: 2" in page and "6 runs and 0 profiles" in page
    shown = [key for key in layout.CONTROLS if not layout.hidden(snapshot, choice, key, LABS)]
    assert shown == ["lab"]
    other = snapshot.settle(Choice(lab=list(snapshot.labs)[1]))
    assert "vgg16" in other.lab
    assert [block.key for block in blocks.view(LABS, snapshot, other)] == ["lab", "lab-rates"]
    for name in blocks.VIEWS:
        assert blocks.view(name, snapshot, choice)


def test_the_dashboard_without_labs(tmp_path: Path) -> None:
    for _ in ("an empty folder", "a version's run"):
        snapshot = dashboard(tmp_path)
        (note,) = blocks.view(LABS, snapshot, snapshot.settle(Choice()))
        assert "labs/inference_benchmark/micro_benchmarking_pytorch.py" in note.before[0][0]
        assert layout.hidden(snapshot, Choice(), "lab", LABS)
        write(tmp_path, reference())


def test_the_report_of_labs_alone(tmp_path: Path) -> None:
    paths = write_lab(tmp_path, *lab_session(), lab_run(subject="resnet18", session="1",
                      plausibility=["odd"]))  # fmt: skip
    write_lab(tmp_path, lab_run(session="0"))
    report = content.build(collect(tmp_path), title="Labs")
    assert [alarm.kind for alarm in report.alarms] == ["IMPLAUSIBLE", "FAIL"]
    html, markdown = pages.html_page(report, tmp_path), pages.markdown_page(report, tmp_path)
    for text in (html, markdown.replace("\\", "")):
        assert "Labs: 3 pass, 1 FAIL of 4 rows; 1 with implausible numbers." in text
        assert "7 lab runs" in text and "No timed runs" not in text and "torch 2.13.0" in text
        assert text.index("FAIL") < text.index("6,368.2")
        assert all(str(path.relative_to(tmp_path)) in text for path in paths)
        assert "20261123-100000-aaaaaa: percentiles" in text and "session 0" not in text
    red = next(line for line in markdown.splitlines() if line.startswith("| fp16, wrong"))
    assert red.split(" | ")[1:6] == ["FAIL", "-", "-", "-", "-"]
    assert '<section class="part" id="lab-2">' in html and '<a id="lab-2">' in markdown
    assert report_generator.main(["--results", str(tmp_path), "--output-dir", str(tmp_path)]) == 0


def test_a_command_has_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--out=/a", "--file", "/b", "--fp16", "1", "--out", "/c", "--wait", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["/d/program.py", *words])
    shape: dict[str, Any] = {
        "lab": "",
        "subject": "",
        "variant": "",
        "unit": "images",
        "units_per_step": 1,
    }
    hidden = ("--out", "--file", "--wait")
    begun = lab_record.begin(torch.device("cpu"), "fp32", "", hidden, **shape)
    assert begun.command == ["program.py", "--fp16", "1", "--seed", "3"]
    assert begun.session and begun.software["torch"]
