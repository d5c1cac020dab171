"""The lab scale_out's measurements: communication in a trace, the collectives, tables."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_runs import lab_run
from test_lab_scale_out import (  # noqa: F401
    RUN,
    TESTS,
    Processes,
    no_memory,
    one_line,
    processes,
    the_run,
)

from labs.scale_out import audit, collectives, documents, loop, measure, request, strategies
from workshop import errors, labs, records, tables
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.profilers import kineto
from workshop.results import Parity

# --- communication in a trace --------------------------------------------------------------------

STEP = ("user_annotation", "step", 0, 100, 1)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def trace(folder: Path, *events: tuple[str, str, float, float, int]) -> Path:
    """Times in µs; the last number is the thread's or the stream's, and a kernel's launch's."""
    written = [
        {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
         "args": {"device": 0, "correlation": tid} if tid > 5 else {}}
        for kind, name, ts, dur, tid in events
    ]  # fmt: skip
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": written}))
    return path


@pytest.mark.parametrize(
    ("events", "communication", "hidden"),
    [
        ([("kernel", "gemm", 0, 100, 7)], 0, 0),
        ([("kernel", "gemm", 0, 50, 7), ("kernel", NCCL, 50, 50, 8)], 50, 0),
        ([("kernel", "gemm", 0, 50, 7), ("kernel", NCCL, 40, 30, 8)], 30, 10),
        # Two at once count once; a copy hides too.
        ([("kernel", NCCL, 10, 20, 8), ("kernel", "ncclDevKernel_Generic", 20, 20, 9),
          ("gpu_memcpy", "Memcpy DtoD", 35, 20, 7)], 30, 5),
        # Without a GPU: gloo's threads, and the host's operators except those that wait for them.
        ([("user_annotation", "gloo:all_reduce", 20, 40, 5), ("cpu_op", "aten::mm", 10, 30, 1),
          ("cpu_op", "c10d::allreduce_", 40, 20, 1)], 40, 20),
    ],
)  # fmt: skip
def test_communication_and_what_of_it_is_hidden(events, communication, hidden, tmp_path) -> None:
    launches = [("cuda_runtime", "cudaLaunchKernel", 1, 1, tid) for tid in (7, 8, 9)]
    on_gpu = launches if events[0][0] == "kernel" else []
    (step,) = kineto.read_communication(trace(tmp_path, STEP, *on_gpu, *events))
    assert step.step_ns == 1e5
    assert (step.ns, step.hidden_ns) == pytest.approx((communication * 1e3, hidden * 1e3))


def test_several_processes_say_how_they_communicate(processes, tmp_path) -> None:  # noqa: F811
    words = [*RUN, "--num-steps", "2", "--output-dir", str(tmp_path)]
    words += ["--trace", str(tmp_path / "trace.json.gz")]
    ended = processes.run(2, *words)
    assert ended.statuses == [0, 0], ended.err
    run = the_run(tmp_path)
    assert 0 < run.metrics["communication_share"] < 1 and 0 <= run.metrics["hidden_share"] <= 1
    assert len(run.losses) == 2 + 2 and len(run.step_ms) == 2  # without those that were profiled
    assert run.subject == "tiny, 16 tokens a sequence, training"
    assert run.variant.startswith("v2, ddp, 2 processes, 2 sequences each, fp32")
    assert (tmp_path / "trace.json.gz").stat().st_size


# --- the collectives -----------------------------------------------------------------------------


def test_the_bus_factor_is_that_of_nccl_tests() -> None:
    factors = [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 2, 0.5),
               ("reduce-scatter", 8, 0.875)]  # fmt: skip
    for name, n, factor in factors:
        assert collectives.bus_factor(name, n) == factor
    sizes = (1024, 3 * 2**19, 2**30, 2**34)
    assert [*map(collectives.size_text, sizes)] == ["1 KiB", "1.5 MiB", "1 GiB", "16 GiB"]


@pytest.mark.parametrize("wrong", ["", *collectives.OPERATIONS])
def test_a_collective_with_a_wrong_result_has_no_bandwidth(wrong, processes, tmp_path) -> None:  # noqa: F811
    words = ["--device", "cpu", "--iterations", "2", "--output-dir", tmp_path]
    ended = processes.run(2, *words, wrong_collective=wrong)
    assert ended.statuses == [bool(wrong)] * 2, ended.err
    runs = records.load_folder(tmp_path, LabRun)
    assert {run.metrics["collective"]: run.gate.status for run in runs} == {
        name: "fail" if name == wrong else "pass" for name in collectives.OPERATIONS
    }
    _, *columns = collectives.table(labs.build_rows(runs)).header
    assert len(columns) == len(collectives.OPERATIONS) - bool(wrong)


# --- tables --------------------------------------------------------------------------------------


def trained(strategy: str, size: int, share: int, ms: float, **changes: Any) -> LabRun:
    metrics: dict[str, Any] = {"processes": size, "sequences": share}
    if size > 1:
        metrics |= {"communication_share": 0.25, "hidden_share": 0.75}
    options = {"config": "medium", "version": "v2", "strategy": strategy, "precision": "bf16"}
    fields: dict[str, Any] = {
        "lab": request.LAB, "subject": "medium, 512 tokens a sequence, training",
        "unit": "tokens", "units_per_step": size * share * 512, "metrics": metrics,
        "options": options, "baseline": f"{strategy}, 1, 16", "parent_command": ["measure.py"],
        "memory_mb": {"peak": 2000.0 / size, "source": "allocator"}, "setup_s": {"compile": 12.5},
    }  # fmt: skip
    return lab_run(f"{strategy}, {size}, {share}", ms, **(fields | changes))


def sent(name: str, size: int, rate_gbs: float) -> LabRun:
    units = round(size * collectives.bus_factor(name, 2))
    metrics = {"processes": 2, "collective": name, "message_bytes": size}
    return lab_run(
        f"{name}, {collectives.size_text(size)}", units / rate_gbs / 1e6, lab=request.LAB,
        subject="collectives, 2 processes", unit=collectives.UNIT, units_per_step=units,
        metrics=metrics, parent_command=["collectives.py"], baseline="", memory_mb={}, options={},
    )  # fmt: skip


def session() -> list[LabRun]:
    red = Parity(status="fail", failures=["gradient of norm.weight: rank 1 has another"])
    runs = [run for scatter in (1.0, 1.01) for run in (
        trained("ddp", 1, 16, 34.0 * scatter), trained("ddp", 2, 16, 40.0 * scatter),
        trained("ddp", 2, 8, 25.0 * scatter),
    )]  # fmt: skip
    runs += [trained("fsdp", 1, 16, 30.0),
             trained("fsdp", 2, 16, 10.0, gate=red, status="gate failed")]  # fmt: skip
    runs += itertools.starmap(sent, itertools.product(
        collectives.OPERATIONS, (2**16, 2**30), (300.0,)))  # fmt: skip
    for second, run in enumerate(runs):
        run.created = f"2026-11-23T10:00:{second:02}+00:00"
    return runs


def lines(text: str, begin: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines()
            if line.startswith(f"| {begin} |")]  # fmt: skip


def test_the_readme_s_table_has_the_newest_row_beside_its_own_one_process() -> None:
    ((_, own),) = documents.parts([]).items()
    assert own["scaling"] == f"Not measured yet: `{documents.COMMAND}`."
    again = [trained("ddp", size, 16, ms, session="2030", created=f"2030-0{size}")
             for size, ms in ((1, 50.0), (2, 100.0))]  # fmt: skip
    ((_, own),) = documents.parts([*session(), *again]).items()
    strong, weak, red = lines(own["scaling"], "medium")
    assert strong[3] == "strong" and strong[7].startswith("68.0% ")
    assert weak[3:8] == ["weak", "16", "50.00", "100.00", "50.0% (one run)"]
    assert red[1] == "v2, fsdp" and red[6:12] == ["-"] * 5 + ["FAIL"]


def test_a_session_s_tables_say_what_is_gained_and_what_it_costs() -> None:
    (rows,) = labs.newest(session())
    text = tables.markdown(documents.tables_of(rows))
    one, weak, strong = lines(text, "v2, ddp")
    assert one[1:] == ["1", "", "16", "34.17", "-", "2.0", "-", "-", "12.5", "pass"]
    assert weak[1:5] == ["2", "weak", "16", "40.20"]
    assert weak[6:] == ["1.0", "25%", "75%", "12.5", "pass"]
    assert weak[5].startswith("85.0% [")
    assert strong[2] == "strong" and strong[5].startswith("68.0% ")
    _, red = lines(text, "v2, fsdp")
    assert red[4:] == ["-", "-", "-", "-", "-", "-", "FAIL"]


# --- the study -----------------------------------------------------------------------------------


def test_what_is_measured() -> None:
    def cases(words: str, *sizes: int) -> list[measure.Case]:
        arguments = measure.build_parser().parse_args(words.split())
        return measure.cases(arguments, torch.device("cpu"), sizes)

    found = cases("--config tiny --trainings v2:ddp hf:accelerate-ddp", 1, 2, 4)
    assert [case[2:] for case in found] == [(1, 8), (2, 8), (2, 4), (4, 8), (4, 2)] * 2
    # These share what one process does; FSDP2's one process is captured, too.
    for strategy, captured in (("ddp", [2, 2]), ("fsdp", [1, 2, 2])):
        found = cases(f"--config tiny --trainings v4:{strategy} v4:{strategy}:graph", 1, 2)
        assert [case.size for case in found if case.training.graph] == captured
    with pytest.raises(WorkshopError, match="4 processes can't share 6 sequences"):
        cases("--trainings v2:ddp --batch-size 6", 1, 2, 4)
    for kind in ("cuda", "cpu"):
        assert all(map(measure.training, measure.TRAININGS[kind]))


def test_a_training_that_this_machine_lacks_is_skipped_with_a_note(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(strategies, "packages", lambda name: ["no_such"] if "zero" in name else [])
    study = measure.Study(torch.device("cpu"), "2030", tmp_path, tmp_path, ["--seq-len", "32"])
    todo = [measure.Case("tiny", measure.training(word), 2, 4) for word in ("v2:ddp", "v2:zero1")]
    ((case, job),) = measure.possible(study, todo).items()
    assert (case, job.asked.batch_size, job.asked.seq_len) == (todo[0], 8, 32)
    assert loop.variant_of(job) == "v2, ddp, 2 processes, 4 sequences each, fp32"
    assert "note: v2:zero1 is skipped: no_such is missing" in capsys.readouterr().out


def test_a_flag_of_the_study_s_own_is_refused_after_the_dashes(tmp_path, capsys) -> None:
    asked = ["--device", "cpu", "--output-dir", str(tmp_path), "--", "--batch-size=2"]
    assert measure.main(asked) == errors.WRONG_USAGE
    assert "--batch-size after --: measure.py sets it" in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_the_study_measures_groups_beside_each_other(tmp_path, monkeypatch) -> None:
    script = str(TESTS / "scale_out_processes.py")  # which starts quicker than torchrun
    monkeypatch.setattr(measure, "launcher", lambda size: [sys.executable, script, str(size)])
    words = "--trainings v2:ddp --batch-size 2 --scaling weak --repeats 1 --jobs 2".split()
    words += ["--processes", "2", "--device", "cpu", "--output-dir", str(tmp_path)]
    train = "--seq-len 16 --num-steps 3 --warmup-steps 1 --compile none".split()
    assert measure.main([*words, "--", *train]) == 0
    runs = records.load_folder(tmp_path, LabRun)
    own = [run for run in runs if run.unit == "tokens"]
    assert sorted(run.metrics["processes"] for run in own) == [1, 2]
    assert {run.baseline for run in own} == {"v2, ddp, 1 process, 2 sequences each, fp32"}
    assert {run.gate.status for run in runs} == {"pass"} and all(run.step_ms for run in runs)
    assert {run.audit.status for run in own} == {"pass"}
    text = (tmp_path / "scaling.md").read_text()
    assert len(lines(text, "v2, ddp")) == 2 and len(lines(text, "16 MiB")) == 1
    more = ["--session", own[0].session, "--no-collectives"]
    monkeypatch.setattr(audit, "train_reference", no_memory)
    assert measure.main([*words, *more, "--", *train]) == 0
    _, two = lines((tmp_path / "scaling.md").read_text(), "v2, ddp")
    assert two[-1] == "not audited"
    assert "(one run)" not in two[5] and len(list(tmp_path.glob("runs/*"))) == 1
