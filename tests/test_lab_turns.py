"""All networks in turns: a stand-in for the program, which has the protocol of its processes and
takes milliseconds; and the program itself."""

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_profile_scripts import is_running, wait_for
from torch import Tensor

from labs.inference_benchmark import networks, single, studies
from labs.inference_benchmark.micro_benchmarking_pytorch import main
from workshop import records, results
from workshop.judge import studies as turns
from workshop.judge.pipe import Message
from workshop.judge.turn import Check, Shown
from workshop.labs import LabRun
from workshop.versions import ROOT

PROGRAM = ROOT / "labs" / "inference_benchmark" / "micro_benchmarking_pytorch.py"
NAMES = ("resnet18", "alexnet", "vgg11", "vgg13")
KINDS = ("plain", "fast")
FLAGS = ["--network", "all", "--batch-size", "2", "--device", "cpu"]

STAND_IN = """
import json, os, sys, time
from pathlib import Path
here, words = Path(__file__).parent, sys.argv[1:]
value = dict(zip(words, words[1:]))
name = value["--network"] + (" fast" if "--compile" in words else " plain")
def log(what):
    with (here / "log").open("a") as file:
        file.write(f"{what} {os.getpid()} {name}\\n")
log("start")
fault = (here / "faults").read_text().split(" " + name + ":")
fault = fault[1].split()[0] if len(fault) > 1 else ""
if fault == "memory":
    sys.exit("[rank0]: torch.AcceleratorError: CUDA error: no more memory\\nCompile with DSA.\\n"
             "errors.ChildFailedError: \\n=====\\n")
if fault == "crash":
    os.abort()
time.sleep(1e6 if fault == "never" else 0.2)
def say(kind, **values):
    message = {"kind": kind, "values": values, "tensors": {}}
    os.write(0, json.dumps(message).encode() + b"\\n")
log("ready")
for kind in ("ready", "begin"):
    say(kind)
    if not sys.stdin.readline():
        sys.exit(130)
    if kind == "ready":
        log("begin")
        time.sleep(1e6 if fault == "endless" else 0.05)
say("done", step_ms=[2.0 if name.endswith("plain") else 1.0] * 3)
if fault != "silent":
    say("finished")
    asked = [json.loads(sys.stdin.readline())["kind"]]
    say("shown", right=fault != "wrong")
    asked.append(json.loads(sys.stdin.readline())["kind"])
    assert asked == ["show", "enough"], asked
say("measured", gate={"status": "pass"}, subject="another", step_ms=[9.0])
log("end")
"""


class TakesItsWord(Check):
    """A check that asks the stand-in whether it was right."""

    def draw(self) -> Shown:
        return {}, {}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        pass

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        assert run.step_ms  # by the times that it has told
        right = ask().values["right"]
        run.gate = results.Parity("pass") if right else results.Parity("fail", ["other logits"])


@dataclass
class StandIn:
    folder: Path

    def faults(self, text: str) -> None:
        """As in " resnet18 plain:memory"."""
        (self.folder / "faults").write_text(f" {text}")

    def log(self) -> list[list[str]]:
        """Lines of event, process id, network and variant; the log begins anew."""
        path = self.folder / "log"
        lines = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
        path.unlink()
        return lines

    def run(self, *words: str) -> int:
        return main([*FLAGS, "--output-dir", str(self.folder / "out"), *words])

    def table(self) -> str:
        return (self.folder / "out" / "all_networks.md").read_text()

    def statuses(self) -> dict[str, list[str]]:
        """The statuses of the newest session by network: plain's, then fast's."""
        session = max((self.folder / "out" / "runs").iterdir())
        found: dict[str, list[str]] = {}
        runs = records.load_runs(session, LabRun)
        for run in sorted(runs, key=lambda run: run.options["compile"] is not None):
            found.setdefault(str(run.options["network"]), []).append(run.status)
        return found


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    (tmp_path / "program.py").write_text(STAND_IN)
    monkeypatch.setattr(studies, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(networks, "NAMES", NAMES)
    monkeypatch.setattr(single, "check_of", lambda *_: TakesItsWord())
    monkeypatch.setattr(studies, "_half", lambda device: "bf16")
    monkeypatch.setattr(turns, "FIXED_MS", 1e6)  # these times are invented
    made = StandIn(tmp_path)
    made.faults("")
    return made


def test_processes_prepare_beside_each_other_and_are_timed_alone(stand_in: StandIn) -> None:
    assert stand_in.run("--jobs", "4") == 0
    events = [(what, name) for what, _, name in stand_in.log()]
    all_plans = [f"{name} {variant}" for name in NAMES for variant in KINDS]
    for group in (all_plans[:4], all_plans[4:]):
        preparing, events = events[: 2 * len(group)], events[2 * len(group) :]
        expected = [(what, name) for what in ("start", "ready") for name in sorted(group)]
        assert sorted(preparing, key=lambda event: (event[0] == "ready", event[1])) == expected
        timed, events = events[: 2 * len(group)], events[2 * len(group) :]
        assert timed == [(what, name) for name in group for what in ("begin", "end")]
    rows = [line for line in stand_in.table().splitlines() if " 2.00x " in line]
    assert [row.split("|")[1].strip() for row in rows] == list(NAMES)


def test_one_that_fails_or_never_gets_ready_is_a_row_and_resume_runs_it_again(
    stand_in, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(turns, "READY_WITHIN_S", 3)
    stand_in.faults("alexnet plain:memory vgg11 fast:never vgg13 plain:crash "
                    "alexnet fast:silent resnet18 fast:wrong")  # fmt: skip
    assert stand_in.run("--jobs", "8") == 1
    output = capsys.readouterr().out
    for why in (
        "torch.AcceleratorError: CUDA error: no more memory",
        "not ready to be timed",
        "crashed with SIGABRT",
        "the process told what it measured before it was judged",
    ):
        assert f"failed; {why}" in output
    assert "gate failed; other logits" in output  # though it tells that its gate has passed
    assert stand_in.statuses() == {
        "resnet18": ["complete", "gate failed"],
        "alexnet": ["failed", "failed"],
        "vgg11": ["complete", "failed"],
        "vgg13": ["failed", "complete"],
    }
    assert all(name in stand_in.table() for name in NAMES)
    never = next(int(pid) for _, pid, name in stand_in.log() if name == "vgg11 fast")
    assert not is_running(never)

    stand_in.faults("")
    assert stand_in.run("--jobs", "2", "--resume") == 0
    started = [name for what, _, name in stand_in.log() if what == "start"]
    assert sorted(started) == sorted(f"{name} {kind}" for name in NAMES for kind in KINDS)
    assert stand_in.statuses() == {name: ["complete"] * 2 for name in NAMES}
    assert stand_in.table().count("2.00x") == len(NAMES)
    # Another batch is another session, and has nothing yet.
    assert stand_in.run("--jobs", "8", "--resume", "--batch-size", "4") == 0
    assert len(stand_in.log()) == 8 * 4
    assert len(list((stand_in.folder / "out" / "runs").iterdir())) == 2


def test_an_interrupt_ends_all_and_keeps_what_is_complete(stand_in, capsys) -> None:
    stand_in.faults("vgg13 plain:endless")
    log = stand_in.folder / "log"

    def interrupt() -> None:
        wait_for(lambda: log.exists() and re.search(r"begin \d+ vgg13", log.read_text()))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert stand_in.run("--jobs", "4") == 130
    thread.join()
    assert "hold what was completed" in capsys.readouterr().err
    assert [name in stand_in.table() for name in NAMES] == [True, True, True, False]
    of_run = stand_in.statuses()
    assert of_run == {name: ["complete"] * 2 for name in NAMES[:3]}
    events = stand_in.log()
    assert len({pid for _, pid, _ in events}) == 8
    assert not any(is_running(int(pid)) for _, pid, _ in events)
