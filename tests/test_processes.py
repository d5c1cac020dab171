"""Programs that end, however that is, and what becomes of the processes that they have started."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from test_profile_scripts import is_running, wait_for

from workshop import errors
from workshop.versions import ROOT

# A process that a batch system's signals do not end, and that writes its id.
CHILD = """
import os, signal, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
with open({path!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({path!r} + ".new", {path!r})
time.sleep(1e6)
"""
# Programs, each given a folder with a CHILD to start in its own way.
PROGRAMS = {
    "comparison": """
from workshop.judge.process import Process
Process([sys.executable, str(here / "child.py")], {}).answer("ready")
""",
    "all profilers": """
from workshop.profilers import run_all
folder = here / "version1_pytorch_baseline"
folder.mkdir()
(folder / "run_nsys.sh").write_text(f"{sys.executable} {here}/child.py; true")
run_all.main(["--folder", str(folder), "--output-dir", str(here / "out"), "run_nsys.sh"])
""",
    "an exercise's check": """
from workshop.exercises import frame, runner
folder = here / "version1_pytorch_baseline" / "exercises" / "endless"
folder.mkdir(parents=True)
(here / "child.py").rename(folder / frame.CHECK)
runner.run(folder, limit_s=1e6)
""",
}
BEGINNING = """
import sys
from pathlib import Path
here = Path(sys.argv[1])
"""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_that_is_killed_leaves_no_process(program, tmp_path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "child.py").write_text(CHILD.format(path=str(pid_file)))
    process = subprocess.Popen(
        [sys.executable, "-c", BEGINNING + program, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: pid_file.exists() or process.poll() is not None)
        child = int(pid_file.read_text())
        assert is_running(child)
        process.kill()
        process.wait()
        wait_for(lambda: not is_running(child), limit_s=60)
    finally:
        process.kill()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_sigterm_is_a_ctrl_c_and_what_follows_it_is_ignored(capsys) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    saved = []

    def worker_died(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    def work() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:  # a batch system may signal more than once, while we save
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                os.kill(os.getpid(), number)
            saved.append("all")
            raise
        return errors.DONE

    of_children = signal.signal(signal.SIGCHLD, worker_died)
    try:
        assert errors.exit_status(work, interrupted="interrupted: saved") == 130
        assert signal.getsignal(signal.SIGCHLD) is worker_died
    finally:
        signal.signal(signal.SIGCHLD, of_children)
    assert saved == ["all"]
    assert capsys.readouterr().err == "interrupted: saved\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_full_disk_is_one_line(capsys) -> None:
    def work() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")

    assert errors.exit_status(work, interrupted="") == 2
    assert capsys.readouterr().err == "error: /tmp/x: No space left on device\n"


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_another_error_stays_what_it_is(error) -> None:
    def work() -> int:
        raise error("no such thing")

    with pytest.raises(error, match="no such thing"):
        errors.exit_status(work, interrupted="")
