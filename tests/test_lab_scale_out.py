"""The lab scale_out on the CPU: several processes train one model, and a training goes on."""

import fcntl
import functools
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scale_out_processes import FAULTS, LATE_FAULTS, TRUE, ZERO, ZERO_FAULTS

from labs import group
from labs.group import Group, device_name, of_all
from labs.scale_out import audit, gate, loop, request, strategies, train
from workshop import cli, errors, records, versions
from workshop.errors import WorkshopError
from workshop.gate import audit as gate_audit
from workshop.gate import gate_size
from workshop.judge import turn
from workshop.labs import LabRun
from workshop.results import RunResult

TESTS = Path(__file__).resolve().parent
SHARDED = "ddp" if strategies.missing("fsdp", torch.device("cpu")) else "fsdp"


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@dataclass
class Ended:
    """The outputs and exit statuses of a group's processes, by rank."""

    statuses: list[int]
    out: list[str]
    err: list[str]


class Processes:
    """Groups of processes, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, TESTS / "scale_out_processes.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        assert self._read() == "ready\n"

    def _read(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline()

    def start(self, size: int, *words: object, **more: object) -> Path:
        """A group, or with `torchrun`, its flags, one that torchrun starts; its folder."""
        self.groups += 1
        folder = self.folder / f"group{self.groups}"
        folder.mkdir()
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size)}
        task = {"size": size, "words": list(map(str, words)), "folder": str(folder)}
        task |= {"environment": meeting | more.pop("environment", {}), **more}
        assert self.server.stdin is not None
        print(json.dumps(task), file=self.server.stdin, flush=True)
        return folder

    def wait_for(self, word: str, path: Path) -> None:
        while not path.exists() or word not in path.read_text():
            has_ended, _, _ = select.select([self.server.stdout], [], [], 0.05)
            assert not has_ended, [file.read_text() for file in path.parent.iterdir()]

    def end(self, folder: Path) -> Ended:
        statuses = json.loads(self._read())
        texts = ([(folder / f"{name}{rank}").read_text() for rank in range(len(statuses))]
                 for name in ("out", "err"))  # fmt: skip
        return Ended(statuses, *texts)

    def run(self, size: int, *words: object, **more: object) -> Ended:
        return self.end(self.start(size, *words, **more))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("processes"))
    yield started
    started.server.stdin.close()
    started.server.wait()


# --- the gate ------------------------------------------------------------------------------------


def failures(processes: Processes, size: int, names: list[str]) -> dict[str, list[str]]:
    target = processes.folder / f"failures{processes.groups}.json"
    ended = processes.run(size, target, cases=names)
    assert ended.statuses == [0] * size, "\n".join(ended.err)
    found: dict[str, list[str]] = json.loads(target.read_text())
    return found


GROUPS = (FAULTS, LATE_FAULTS, TRUE)
QUICK = [name for group in GROUPS for name in [*group][::3]]
"""A third of the cases: the others are slow."""
Found = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def found(processes: Processes) -> Found:
    """The failures of a case; all that are as quick are run together."""

    @functools.cache
    def run(quick: bool) -> dict[str, list[str]]:
        names = [name for group in GROUPS for name in group if (name in QUICK) == quick]
        return failures(processes, 2, names)

    return lambda name: run(name in QUICK)[name]


def cases(*names: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", cases(*TRUE))
def test_two_processes_train_the_model_of_one(name: str, found: Found) -> None:
    assert not found(name)


@pytest.mark.parametrize("name", cases(*FAULTS, *LATE_FAULTS))
def test_a_fault_between_processes_is_red(name: str, found: Found) -> None:
    assert found(name)


@pytest.mark.slow
def test_four_processes(processes: Processes) -> None:
    wrong, true = [*FAULTS][1:10:3], [name for name in TRUE if re.search("^v2.*parts$", name)]
    found = failures(processes, 4, [*wrong, *true])
    assert not any(found[name] for name in true)
    assert all(found[name] for name in wrong)


def test_zero(processes: Processes, tmp_path: Path) -> None:
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("no DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed")
    found = failures(processes, 2, [*ZERO, *ZERO_FAULTS])
    assert not any(found[name] for name in ZERO), found
    assert all(found[name] for name in ZERO_FAULTS), found
    without_launcher = [sys.executable, train.__file__, *RUN, *of_steps(3), "--strategy", "zero3"]
    assert not subprocess.run([*without_launcher, "--output-dir", tmp_path]).returncode


def test_v1_trains_a_batch_that_does_not_fit_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--device cpu --config tiny --num-layers 1 --batch-size 4 --seq-len 16".split()
    setting = audit.setting_of(request.read(words))
    batches = torch.randint(setting.config.vocab_size, (3, 2, 4, 16))
    whole = audit.train_reference(setting, batches, 3e-4)
    monkeypatch.setattr(gate_size, "of_setting", lambda setting: (3, setting.seq_len))
    parts = audit.train_reference(setting, batches, 3e-4)
    assert parts.course.distance != whole.course.distance  # by roundings
    found = gate_audit.judge(parts.course, whole, setting).closest()
    assert found and found[1] < 0.2 * found[2]


# --- the training --------------------------------------------------------------------------------

STEPS = 8
RUN = "--config tiny --batch-size 4 --seq-len 16 --device cpu --no-gate --warmup-steps 2".split()
RUN += ["--text-file", str(versions.get_version("v1").path)]  # quick to read
GATED = [*(word for word in RUN if word != "--no-gate"), "--num-layers", "1"]


def of_steps(steps: int) -> list[str]:
    return ["--num-steps", str(steps - 2)]


def the_run(folder: Path) -> LabRun:
    """The newest of a folder's result files."""
    runs = records.load_folder(folder, LabRun)
    return max(runs, key=lambda run: run.created)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, which is the version's own program."""
    folder = tmp_path_factory.mktemp("alone")
    words = [*RUN, *of_steps(STEPS), "--output-dir", str(folder)]
    assert cli.main(versions.load("v2"), words) == 0
    (run,) = records.load_folder(folder, RunResult)
    return [loss for loss in run.losses if loss is not None]


def test_one_process_trains_as_the_version_does(curve, tmp_path, capsys) -> None:
    saved = ["--save-every", "3", "--checkpoints", str(tmp_path / "saved")]
    assert train.main([*RUN, *of_steps(STEPS), *saved, "--output-dir", str(tmp_path)]) == 0
    names = sorted(path.name for path in tmp_path.glob("saved/step_*"))
    assert names == ["step_00000006", "step_00000008"]
    run, said = the_run(tmp_path), capsys.readouterr().out
    assert run.losses == curve and len(curve) == STEPS
    assert (run.units_per_step, run.metrics["processes"], len(run.step_ms)) == (64, 1, STEPS - 2)
    shown = re.findall(r"^step (\d+): loss of rank 0 ([\d.]+)", said, re.M)
    assert shown == [(str(step), f"{curve[step - 1]:.4f}") for step in range(3, STEPS + 1)]


def test_a_study_s_groups_pass_their_gates_one_after_the_other(tmp_path, monkeypatch) -> None:
    """Each finds the memory free that an earlier one's gate has filled, and keeps what its own
    timed steps need."""
    seen: list[tuple[str, bool]] = []

    def noted(module: object, name: str, does: Callable[..., object]) -> None:
        def call(*given: object) -> object:
            result = does(*given)
            seen.append((name, is_locked(tmp_path)))
            return result

        monkeypatch.setattr(module, name, call)

    noted(gate, "passes", gate.passes)
    noted(loop.Training, "get_ready", loop.Training.get_ready)
    noted(loop, "of_all", of_all)
    noted(turn.Turn, "wait", turn.Turn.wait)
    monkeypatch.setattr(request, "Turn", lambda judged: turn.Turn(judged=False))
    trace = str(tmp_path / "trace.json.gz")
    words = [*GATED, *of_steps(STEPS)]
    assert train.main([*words, "--output-dir", str(tmp_path), "--candidate", "--trace", trace]) == 0
    after = seen[[name for name, _ in seen].index("passes") :]
    locked = {"passes": True, "get_ready": True, "of_all": True, "wait": False}
    assert after[:4] == [*locked.items()]


def audited(folder: Path, *words: str) -> tuple[int, LabRun]:
    """The status and the record of a training of three steps in this process."""
    status = train.main([*GATED, *of_steps(3), "--output-dir", str(folder), *words])
    return status, the_run(folder)


def test_the_timed_run_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, first = audited(tmp_path / "first")
    assert (status, first.audit.status) == (0, "pass") and "loss" in first.audit.measures
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "load", lambda self: self.inputs.copy_(self._batches[0]))
        status, red = audited(tmp_path / "red")
    assert (status, red.status) == (1, "audit failed")
    assert red.audit.failures[0].startswith("timed run: loss ")


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_run_that_is_not_audited_says_why(tmp_path, monkeypatch, capsys) -> None:
    saved = ["--checkpoints", str(tmp_path / "saved"), "--save-every", "2"]
    on = [*saved, *of_steps(4), "--resume", "--learning-rate"]
    assert audited(tmp_path / "first", *saved)[1].audit.status == "pass"
    for name, value, words, why in (
        ("MOST_STEPS", 2, [], "3 steps, and true trainings of more than 2 are far apart"),
        ("train_reference", no_memory, [], "no memory for V1 in one process"),
        ("MOST_STEPS", 4, [*on, "1e-3"], "resumed with other settings"),
        ("MOST_STEPS", 3, ["--no-gate"], "--no-gate"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(audit, name, value)
            status, run = audited(tmp_path / why[:5], *words)
        assert (status, run.audit.status, run.error) == (0, "not run", f"not audited: {why}")
        assert "not audited: figures unverified" in capsys.readouterr().out


def test_a_resumed_training_is_audited_from_its_first_step(tmp_path: Path) -> None:
    saved = ["--checkpoints", str(tmp_path / "saved"), "--save-every", "3"]
    audited(tmp_path / "first", *saved)
    _, resumed = audited(tmp_path / "resumed", *saved, *of_steps(5), "--resume")
    assert resumed.metrics["first_step"] == 4 and resumed.audit.status == "pass"


def is_locked(folder: Path) -> bool:
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(other)


def test_a_training_goes_on_with_other_processes_and_strategies(processes, curve, tmp_path) -> None:
    files = ["--output-dir", tmp_path, "--checkpoints", tmp_path / "saved", "--save-every", 2]
    for size, strategy, steps, more in (
        (2, SHARDED, 3, []), (1, "ddp", 5, ["--resume"]), (2, "ddp", 6, ["--resume"]),
        (1, "ddp", STEPS, ["--resume", "--accumulate", 2]),
    ):  # fmt: skip
        words = [*RUN, *of_steps(steps), "--strategy", strategy, *files, *more]
        ended = processes.run(size, *words)
        assert ended.statuses == [0] * size, ended.err
    run = the_run(tmp_path)
    assert run.losses == pytest.approx(curve, rel=2e-6)
    assert run.metrics["first_step"] == 7
    saved = sorted(path.name for path in tmp_path.glob("saved/step_*"))
    assert saved == ["step_00000006", "step_00000008"]


def killed(folder: Path) -> list[object]:
    """The words of a training that is killed in its fifth step, and again in its third save."""
    return [*RUN, *of_steps(STEPS), "--output-dir", folder, "--checkpoints", folder / "saved",
            "--save-every", 2, "--strategy", SHARDED]  # fmt: skip


def test_torchrun_starts_a_killed_training_again(processes, curve, tmp_path) -> None:
    flags = ["--master-port", free_port(), "--max-restarts", "3"]
    ended = processes.run(2, *killed(tmp_path), torchrun=flags, log=str(tmp_path / "log"))
    assert ended.statuses == [0], ended.err
    # Each time the newest complete checkpoint was gone on from.
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    of_attempts = [[step for number, step in steps if number == attempt] for attempt in range(3)]
    assert of_attempts == [[1, 2, 3, 4, 5], [5], [5, 6, 7, 8]]
    assert the_run(tmp_path).losses == pytest.approx(curve, rel=2e-6)
    assert not list(tmp_path.glob("saved/*.partial"))


def test_a_training_whose_process_was_killed_goes_on_when_it_is_requeued(
    processes, curve, tmp_path
) -> None:
    log = str(tmp_path / "log")
    ended = processes.run(2, *killed(tmp_path), log=log, environment=job_of_attempt(0))
    assert ended.statuses == [1, -signal.SIGKILL], ended.err
    # Checkpoints of PyTorch 2.6 warn before.
    assert ended.err[0].splitlines()[-1].startswith("error: rank 0: another process")
    words = killed(tmp_path)
    ended = processes.run(2, *words, environment=job_of_attempt(1))
    assert ended.statuses == [0, 0] and "resumed after step 4 " in ended.out[0], ended.err
    run = the_run(tmp_path)
    assert run.losses == pytest.approx(curve, rel=2e-6)
    # Ended once more, after the last checkpoint and before the result.
    (result,) = tmp_path.glob("runs/*.jsonl")
    result.unlink()
    ended = processes.run(2, *words, environment=job_of_attempt(2))
    assert ended.statuses == [0, 0], ended.err
    assert "step_00000008 has all steps: nothing is left to train" in ended.out[0]
    again = the_run(tmp_path)
    assert again.losses == run.losses and again.status == "interrupted" and not again.step_ms


def job_of_attempt(number: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(number)}


def one_line(text: str) -> str:
    """The only line of a stream."""
    assert len(text.splitlines()) == 1, text
    return text


# --- typed wrong, started wrong ------------------------------------------------------------------

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("words", "started", "status", "message"),
    [
        ([], {"RANK": "0"}, 2, "LOCAL_RANK is not set, but RANK is: start all processes with tor"),
        (["--batch-size", "6", "--accumulate", "2"], {**ONE, "MASTER_PORT": "1"}, 2,
         "--batch-size 6: not a multiple of 4 (processes: 2, --accumulate: 2); use 4"),
        (["--reduce-dtype", "bf16"], {}, 2, "at fp32 the gate would fail; use --precision bf16"),
        (["--strategy", "zero3"], {}, errors.NOT_ON_THIS_MACHINE, "deepspeed is missing"),
    ],
)  # fmt: skip
def test_a_wrong_start_is_one_line(
    words, started, status, message, tmp_path, monkeypatch, capsys
) -> None:
    if status == errors.NOT_ON_THIS_MACHINE and importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is here")
    monkeypatch.setattr(group, "PATIENCE_S", 0.0)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--device", "cpu", *words, "--output-dir", str(tmp_path)]) == status
    assert message in one_line(capsys.readouterr().err) and not list(tmp_path.iterdir())


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    four = Group(rank=3, local_rank=3, size=8, local_size=4)
    with pytest.raises(WorkshopError, match="4 processes on a machine with 2 GPUs"):
        device_name(four, "auto")
    assert device_name(four, "cpu") == "cpu"
    two = Group(rank=3, local_rank=1, size=8, local_size=2)
    assert device_name(two, "auto") == "cuda:1"


def test_a_port_in_use_is_one_line(processes: Processes, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        there = {"MASTER_PORT": port, "WORLD_SIZE": "2"}
        ended = processes.run(1, *RUN, "--output-dir", tmp_path, environment=there)
    assert ended.statuses == [2]
    assert f"MASTER_PORT {port}: the port is in use" in one_line(ended.err[0])


def test_checkpoints_that_do_not_fit(processes: Processes, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    words = [*RUN, *of_steps(3), "--output-dir", tmp_path / "out", "--checkpoints", saved]
    assert processes.run(1, *words, "--save-every", 3).statuses == [0]

    def refused(*more: object) -> str:
        ended = processes.run(1, *words, *more)
        assert ended.statuses == [2], ended.err
        return one_line(ended.err[0])

    on = ["--resume", *of_steps(4)]
    assert "another model: v2 there, v1 here" in refused(*on, "--version", "v1")
    said = refused(*of_steps(4), "--save-every", 3)
    assert "has step_00000003 of another training: go on from it with --resume" in said
    ended = processes.run(1, *words, *on, "--seed", 1)
    assert ended.statuses == [0]
    assert one_line(ended.err[0]).startswith("note: seed is 1, in the checkpoint 42")
    shard = saved / "step_00000003" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "step_00000003 can't be read: " in refused(*on)


def test_torchrun_shows_one_line(processes: Processes) -> None:
    wrong = ["--device", "cpu", "--batch-size", "3"]
    ended = processes.run(2, *wrong, torchrun=["--master-port", free_port()])
    (said,) = ended.err
    assert ended.statuses == [1] and ended.out == [""]
    assert said.count("error: ") == 1
    assert (
        "error: --batch-size 3: not a multiple of 2 (processes: 2, --accumulate: 1); use 2" in said
    )
    assert re.search(r"exitcode\s*: 2 ", said)


def test_ctrl_c_ends_all(processes: Processes, tmp_path: Path) -> None:
    words = [*RUN, "--num-steps", 100_000, "--output-dir", tmp_path / "ended"]
    folder = processes.start(2, *words, torchrun=["--master-port", free_port()])
    processes.wait_for("\nstep ", folder / "out0")
    os.kill(int((folder / "pid").read_text()), signal.SIGINT)
    (said,) = processes.end(folder).err
    assert said.count("interrupted: --resume continues") == 1
    workers = map(int, (folder / "workers").read_text().split())
    assert not any(Path(f"/proc/{number}").exists() for number in workers)
    assert not (tmp_path / "ended").exists() or not list((tmp_path / "ended").rglob("*.jsonl"))
