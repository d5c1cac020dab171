"""Runs a program's profilers one after the other, and sums up what came out: a table, index.html
that links every output, and summary.json. `run_all_profilers.sh` of a version calls it.

Each script runs in a separate process and prints to a log; after one that fails, or that the
machine has no tool for, the others still run.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop import results, tables
from workshop.arguments import count, parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.profilers import programs, summary
from workshop.profilers.runner_files import COMMAND_FILE, locked
from workshop.profilers.summary import Outcome
from workshop.run import processes

SECONDS_TO_STOP = 20
QUESTIONS = {
    "pytorch_profiler": "which operators and kernels run, when, with how much memory?",
    "deepspeed_flops": "how many operations is a step, and what share of the chip is that?",
    "rocprofv3": "which kernels take the time on an AMD GPU, and what do they move and compute?",
    "rocprof_sys": "what does the host do while an AMD GPU works or waits?",
    "rocprof_compute": "how well does each kernel use the parts of an AMD GPU?",
    "ncu": "what does each kernel move and compute on an NVIDIA GPU, against its limits?",
    "nsys": "when does what run on an NVIDIA GPU, and where does it wait?",
    "proton": "which kernels take the time, in seconds and with Triton alone?",
}
"""By tool: what its script answers, in the order of the ladder of tools."""

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TAIL = 1 << 14
"""Bytes at the end of a log in which the reason of a failure is looked for."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.profilers.run_all",
        description=__doc__.split("\n\n")[0],
        usage="%(prog)s --folder DIR --output-dir DIR [options] SCRIPT... [-- flags of the model]",
        epilog="Exit status: 0 done (what the machine has no tool for is skipped), 1 a script "
        "failed, 2 wrong usage, 77 the program can't run on this machine, 130 interrupted (the "
        "table has what was completed).",
    )
    add = parser.add_argument
    add("scripts", nargs="+", metavar="SCRIPT", help="run_*.py or run_*.sh of the folder")
    add("--folder", type=Path, required=True, metavar="DIR", help="of the program")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="a folder a tool below it")
    add("--steps", type=count, metavar="N", help="steps (default: each script's own)")
    add("--dry-run", action="store_true", help="print every script's commands and run nothing")
    add("--class", dest="for_class", action="store_true", help="each script's form for a class")
    return parser


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    arguments = parse(build_parser(), words[:split])
    arguments.model_flags = words[split + 1 :]
    arguments.output_dir = arguments.output_dir.absolute()
    return errors.exit_status(
        lambda: _profile(arguments), interrupted="interrupted: nothing was summed up"
    )


def _profile(arguments: argparse.Namespace) -> int:
    program = programs.of_folder(arguments.folder)
    if program is None:
        where = f"--folder {arguments.folder}"
        raise WorkshopError(f"{where}: it is no folder of a version, or of a lab's program")
    outcomes = [_planned(arguments.folder, script) for script in arguments.scripts]
    if arguments.dry_run:
        return _dry_run(outcomes, arguments)
    errors.require("rich", "jinja2")
    _check_model_flags(outcomes, arguments)
    folder = results.prepare_folder(arguments.output_dir)
    with locked(folder):
        summary.remove(folder)
        interrupted = _run_each(outcomes, arguments)
        content = summary.sum_up(program, outcomes, arguments.model_flags, folder)
        written = summary.write(content, folder)
    title = f"profilers of {program.key} ({program.title}); outputs in {folder}"
    table = summary.outcome_table(title, outcomes, folder)
    tables.print_tables([table.columns([0, 2, 3], left=(0, 1))])
    headline = [content["headline"]] if content["headline"] else []
    tables.print_notes([*headline, *(f"Written: {path}" for path in written)])
    if interrupted:
        print("interrupted: the table has what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    failed = any(outcome.status == "failed" for outcome in outcomes)
    return errors.ANSWER_IS_NO if failed else errors.DONE


def _planned(folder: Path, script: str) -> Outcome:
    tool = Path(script).stem.removeprefix("run_")
    if tool not in QUESTIONS or not (folder / script).is_file():
        known = ", ".join(QUESTIONS)
        raise WorkshopError(f"{folder / script}: no such script of a profiler; there are {known}")
    return Outcome(tool, script, QUESTIONS[tool], output=tool, log=f"{tool}.log")


# --- running -------------------------------------------------------------------------------------


def _command(outcome: Outcome, arguments: argparse.Namespace, *options: str) -> list[str]:
    program = sys.executable if outcome.script.endswith(".py") else "bash"
    command = [program, str(arguments.folder / outcome.script)]
    command += ["--output-dir", str(arguments.output_dir / outcome.output)]
    command += ["--steps", str(arguments.steps)] if arguments.steps else []
    if arguments.for_class and outcome.script.endswith(".sh"):
        command.append("--class")
    return [*command, *options, "--", *arguments.model_flags]


def _environment() -> dict[str, str]:
    # The table in a log is as wide as a page.
    return {"COLUMNS": "132"} | os.environ | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


def _try(outcome: Outcome, arguments: argparse.Namespace) -> tuple[int, str, str]:
    """A dry run's exit status, what it printed, and why it did not succeed."""
    done = subprocess.run(
        _command(outcome, arguments, "--dry-run"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
        check=False,
    )
    status = done.returncode
    return status, done.stdout, "" if status == errors.DONE else _reason(done.stderr, status)


def _dry_run(outcomes: list[Outcome], arguments: argparse.Namespace) -> int:
    worst = errors.DONE
    for outcome in outcomes:
        status, printed, reason = _try(outcome, arguments)
        print(f"# --- {outcome.script}: {outcome.question}\n{printed}", end="")
        if status == errors.NOT_ON_THIS_MACHINE:
            print(f"skipped: {reason}")
        elif status:
            print(f"error: {reason}", file=sys.stderr)
            worst = worst or status
    return worst


def _check_model_flags(outcomes: list[Outcome], arguments: argparse.Namespace) -> None:
    """Checks the flags of the model by a dry run of one script in Python: else every script would
    fail over the same flag.

    Raises:
        WorkshopError: something is wrong with them; the text is the model's own message.
        NotOnThisMachine: the version can't run here.
    """
    outcome = next((outcome for outcome in outcomes if outcome.script.endswith(".py")), None)
    if outcome is None:
        return
    status, _, reason = _try(outcome, arguments)
    if status == errors.NOT_ON_THIS_MACHINE:
        raise NotOnThisMachine(reason)
    if status == errors.WRONG_USAGE:
        raise WorkshopError(reason)
    if status != errors.DONE:
        raise WorkshopError(f"{outcome.script} can't be started ({reason}): run `make setup`")


def _run_each(outcomes: list[Outcome], arguments: argparse.Namespace) -> bool:
    """Runs the scripts, and fills their outcomes; whether Ctrl-C ended them."""
    for number, outcome in enumerate(outcomes, 1):
        print(f"{number}/{len(outcomes)} {outcome.script} ...", file=sys.stderr, flush=True)
        try:
            _run(outcome, arguments)
        except KeyboardInterrupt:
            outcome.status = "interrupted"
            return True
        if outcome.status != "skipped":  # the table sums those up
            line = f"{outcome.script}: {outcome.result} ({outcome.seconds:.0f} s)"
            print(line, file=sys.stderr, flush=True)
    return False


def _run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Runs a script, and fills its outcome. The script is the head of its own process group: Ctrl-C
    reaches us alone, and we end all of the group, however deep a profiler has put the program."""
    commands = arguments.output_dir / outcome.output / COMMAND_FILE
    log = arguments.output_dir / outcome.log
    before, started = _modified(commands), time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            _command(outcome, arguments),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    try:
        with processes.ended_with_us(process):
            try:
                process.wait()
            except KeyboardInterrupt:
                _stop(process)
                raise
    finally:
        outcome.seconds = time.monotonic() - started
        status = outcome.exit_status = process.returncode
        # A script writes its commands before it does anything else in its folder.
        outcome.filled = _modified(commands) not in (None, before)
    known = {errors.DONE: "ok", errors.NOT_ON_THIS_MACHINE: "skipped"}
    outcome.status = known.get(status, "failed")
    if status != errors.DONE:
        outcome.reason = _reason(log.read_bytes()[-_TAIL:].decode(errors="replace"), status)


def _modified(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.is_file() else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a script and all that it has started: as Ctrl-C would, then for good."""
    for signal_, seconds in ((signal.SIGINT, SECONDS_TO_STOP), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, signal_)
            process.wait(seconds)
        except ProcessLookupError:
            break
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            continue
    process.wait()


def _reason(printed: str, status: int) -> str:
    """Why a script ended with a status, by the last of the messages that it printed."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in re.split(r"[\r\n]+", _CONTROL.sub("", printed))]
    lines = list(filter(None, lines)) or [f"exit status {status}, no message"]
    messages = [line for line in lines if line.startswith(("skipped: ", "error: "))]
    last = (messages or lines)[-1]
    # argparse puts the program's name before it.
    return last.removeprefix("skipped: ").removeprefix("error: ").replace(": error: ", ": ", 1)


if __name__ == "__main__":
    sys.exit(main())
