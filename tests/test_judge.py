"""The judge's side of the pipe: what it makes of answers that are wrong, late or none at all."""

import contextlib
import dataclasses
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from stored_runs import lab_run
from test_results import make_result

from workshop import records
from workshop.judge import judge, studies
from workshop.judge.pipe import Closed, Pipe
from workshop.judge.plans import Asked, VersionPlan, record
from workshop.judge.process import Process
from workshop.labs import LabRun
from workshop.results import RunResult


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, int]]:
    """A pipe's reading end, and the descriptor that the other side writes to."""
    read, write = os.pipe()
    nobody = os.open(os.devnull, os.O_WRONLY)
    with contextlib.closing(Pipe(read, nobody)) as pipe:
        yield pipe, write


def test_what_is_sent_is_what_is_received(ends) -> None:
    receiver, write = ends
    tensors = {"a": torch.randn(3, 4).double(), "b": torch.tensor(7), "none": torch.empty(0, 2)}
    with contextlib.closing(Pipe(os.open(os.devnull, os.O_RDONLY), write)) as sender:
        sender.send("answer", tensors, seed=2**61, share=float("nan"), words=["é"])
        found = receiver.receive()
    assert (found.kind, found.values["seed"], found.values["words"]) == ("answer", 2**61, ["é"])
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(Closed, match="ended without an answer"):
        receiver.receive()


HEAD = b'{"kind": "x", "values": {}, "tensors": {"a": %s}}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]\n",
        b'{"kind": "x"}\n',
        b"\x80\x04cos\nsystem\n(S'true'\ntR.\n",  # a pickle
        HEAD % b'["float64", [2]]' + b"12345678",  # cut off
        HEAD % b'["float64", [9999999999]]',
        HEAD % b'["object", [1]]' + b"12345678",
    ],
    ids=lambda content: repr(content[:60]),
)
def test_what_is_no_message_is_no_answer(content, ends) -> None:
    pipe, write = ends
    os.write(write, content)
    os.close(write)
    with pytest.raises(Closed):
        pipe.receive()


TALK = """
import json, os, sys
print("gate: é", flush=True)
question = json.loads(sys.stdin.readline())
os.write(0, {answer!r})
{rest}
"""
READY = b'{"kind": "ready", "values": {}, "tensors": {}}\n'


@pytest.mark.parametrize(
    ("answer", "rest", "reason"),
    [
        (READY, "", "ready"),
        (b"", "sys.exit(print('error: it needs a widget', file=sys.stderr) or 77)", "a widget"),
        (b"", "os.abort()", "crashed with SIGABRT"),
        (READY.replace(b"ready", b"pass"), "", "answered 'pass', not ready"),
        (b"pass\n", "", "wrote no message"),
        (b"pass\n", "sys.exit('what we did not understand')", "wrote no message"),
        (b"", "sys.exit('error: \\x1b[2Jcleared')", "[2Jcleared"),
    ],
)
def test_a_process_answers_or_says_why_not(answer, rest, reason, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    heard: list[str] = []
    command = [sys.executable, "-c", TALK.format(answer=answer, rest=rest)]
    process = Process(command, os.environ, heard.append)
    try:
        process.ask("train")
        found = process.answer("ready").kind
    except Closed as closed:
        _, found = process.failure(closed)
    process.stop()
    assert reason in found and found.isprintable()
    assert heard == ["gate: é"]


STEPS = [100.0, 101.0, 99.0, 100.0]  # 400 ms
PHASES: dict[str, list[float]] = {
    "forward_ms": [30.0],
    "backward_ms": [60.0],
    "optimizer_ms": [10.0],
}


@pytest.mark.parametrize(
    ("told", "judge_ms", "waited_ms", "wrong"),
    [
        ({}, 402.0, 0.0, ""),
        ({}, 430.0, 0.0, ""),
        ({}, 900.0, 500.0, ""),  # another program had the processor
        ({"step_ms": [1.0] * 4}, 900.0, 500.0, ""),
        ({"step_ms": STEPS[:3]}, 900.0, 500.0, "3 step times, of 4 steps"),
        ({}, 500.0, 0.0, "its 4 step times add up to 400.0 ms, the judge's clock says 500.0 ms"),
        ({"step_ms": [20.0] * 4}, 402.0, 0.0, "add up to 80.0 ms"),
        ({"step_ms": [200.0] * 4}, 402.0, 0.0, "add up to 800.0 ms"),
        (
            {"step_ms": [10.0, 10.0, 10.0, 370.0]},
            402.0,
            0.0,
            "of its median are 40.0 ms, the judge",
        ),
        ({"step_ms": [*STEPS[:3], float("nan")]}, 402.0, 0.0, "4 step times, of 4 steps"),
        ({"backward_ms": [-25.0]}, 402.0, 0.0, "take 15.00 ms together"),
        ({"forward_ms": [900.0]}, 402.0, 0.0, "take 970.00 ms together"),
    ],
)
def test_a_candidates_times_add_up_to_the_judges(told, judge_ms, waited_ms, wrong) -> None:
    run = dataclasses.replace(make_result(), **{"step_ms": STEPS, **PHASES, **told})
    found = judge.settle_times(run, judge_ms, 4, waited_ms)
    assert wrong in found[0] if wrong else found == []
    if waited_ms and not wrong:  # then the judge's own time counts
        assert run.step_ms == [judge_ms / 4] * 4


def arguments(folder: Path) -> Asked:
    return Asked(num_steps=4, warmup_steps=1, device="cpu", seed=1, output_dir=folder)


def test_a_rate_that_no_machine_reaches_is_red(tmp_path) -> None:
    result = record(VersionPlan("v2", "tiny", "fp32"), arguments(tmp_path), "s")
    result.step_ms, result.peak_tflops = [1e-3] * 4, 0.1
    candidate = types.SimpleNamespace(result=result)
    (sentence,) = judge.VersionProcess._impossible(candidate)
    assert "times what a large matrix product reaches here" in sentence
    result.step_ms = [1e3] * 4
    assert judge.VersionProcess._impossible(candidate) == []


def test_nonsense_is_told_and_not_recorded(tmp_path) -> None:
    result = record(VersionPlan("v2", "tiny", "fp32"), arguments(tmp_path), "s")
    references = types.SimpleNamespace(
        facts={"sizes": {}, "peak_tflops": 1.0, "peak_source": "measured"}
    )
    course = types.SimpleNamespace(losses=torch.ones(5), gradients={})
    candidate = types.SimpleNamespace(result=result, references=references, course=course)
    memory = {"peak": 5.0, "rest": 1.0, "source": "allocator"}
    told = {"step_ms": [1.0] * 4, **PHASES, "setup_s": {}, "memory_mb": memory}
    for wrong in ({"rest": -1.0}, {"peak": 10**400}, {"source": None, "peak": "x"}):
        with pytest.raises(Closed):
            nonsense = {**told, "memory_mb": memory | wrong}
            judge.VersionProcess._take(candidate, nonsense)
        assert candidate.result is result and not result.step_ms
    judge.VersionProcess._take(candidate, told)
    assert candidate.result.memory_mb == memory


def test_who_is_not_timed_is_stopped(tmp_path) -> None:
    """Else it can slow those that are timed before it."""
    plan, process = VersionPlan("v2", "tiny", "fp32", repeat=1), mock.Mock()
    result = record(plan, arguments(tmp_path), "s")
    result.status = "gate failed"
    candidate = object.__new__(judge.VersionProcess)
    candidate._process, candidate.plan, candidate.result = process, plan, result
    candidate.references = mock.Mock()
    candidate.references.setting.config = plan.model_config()[0]
    candidate.prepare()
    candidate.measure()
    assert [name for name, _, _ in process.mock_calls] == ["ask", "pause", "resume", "end"]


def test_a_paused_process_does_nothing() -> None:
    process = Process([sys.executable, "-c", "import time; time.sleep(120)"], os.environ)
    pid = process._process.pid
    process.pause()
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    process.resume()
    assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
    process.pause()
    process._pipe.close()  # as after an end that was interrupted
    process.stop()
    assert process._process.returncode == -signal.SIGTERM  # it was let go on, and not killed


def test_the_record_is_what_was_asked_for(tmp_path) -> None:
    """Every setting comes from the plan: nothing that a candidate tells can change it."""
    plan = VersionPlan("v2", "tiny", "fp32", options={"fuse_qkv": False}, sizes={"seq_len": 64})
    result = record(plan, arguments(tmp_path), "s")
    assert isinstance(result, RunResult)
    assert (result.version, result.config_name, result.seq_len) == ("v2", "custom", 64)
    assert result.options["learning_rate"] == 3e-4 and result.options["seed"] == 1
    assert result.options["fuse_qkv"] is False and result.options["fuse_norm"] is True
    assert result.command[:2] == ["python", "tiny_llama_v2.py"]


LAB_STEPS = [[10.0, 10.0], [12.0, 8.0]]  # 40 ms


@pytest.mark.parametrize(
    ("spans", "judge_ms", "step_ms"),
    [
        (LAB_STEPS, 41.0, [10.0, 10.0, 12.0, 8.0]),
        (LAB_STEPS, 60.0, [10.0, 10.0, 12.0, 8.0]),
        (LAB_STEPS, 80.0, [20.0, 20.0, 24.0, 16.0]),
        (LAB_STEPS, 10.0, [2.5, 2.5, 3.0, 2.0]),
        ([[1.0, 1.0, 1.0, 397.0]], 400.0, [100.0] * 4),  # a median says nothing of these
        ([[1.0, 1.0, 1.0, 1.0]], 400.0, [100.0] * 4),
    ],
)
def test_a_labs_times_add_up_to_the_judges(spans, judge_ms, step_ms) -> None:
    run = lab_run()
    studies.each_step(run, spans)
    studies._settle(run, spans, judge_ms)
    assert (run.step_ms, run.judge_ms) == (step_ms, judge_ms / 4)


TELLS = """
import json, os, sys
def say(kind, **values):
    message = {{"kind": kind, "values": values, "tensors": {{}}}}
    os.write(0, json.dumps(message).encode() + b"\\n")
for kind in ("ready", "begin"):
    say(kind)
    sys.stdin.readline()
{rest}
"""


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ('say("done", step_ms=[1e-9]); say("measured", gate={"status": "pass"})', ""),
        ('say("done", step_ms=[1e-9]); say("measured", step_ms=[5.0], subject="x", unit="y")', ""),
        ('say("done", step_ms=[]); say("measured")', "step_ms is empty"),
        ('say("done", step_ms=[float("nan")])', "the process told no times"),
        ('say("done", step_ms=[-1.0, 9.0])', "the process told no times"),
        ('say("done", step_ms=[1.0]); say("measured", metrics=3)', "the process told nonsense"),
        ('say("measured", status="complete")', "answered 'measured', not done"),
        ("sys.exit('error: it needs a widget')", "it needs a widget"),
    ],
)
def test_a_labs_record_is_what_was_asked_for(rest, error, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(studies, "FIXED_MS", 1e6)  # on a busy machine all takes long
    asked = lab_run(step_ms=[])
    command = [sys.executable, "-c", TELLS.format(rest=rest)]
    (run,) = studies.in_turns([studies.Plan(command, [asked], tmp_path)], 1)
    assert (run.status, error in (run.error or "")) == ("failed" if error else "complete", True)
    assert (run.subject, run.unit) == (asked.subject, asked.unit)
    assert error or run.step_ms == [1e-9]
    assert records.load_folder(tmp_path, LabRun) == [run]
