"""Rows, table, JSON form and exit status of the three validation scripts.

Standard library only, and readable by Python 3.6, still the `python3` of some clusters: the scripts
run before anything is installed and must be able to report that the Python is too old.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

REPOSITORY = Path(__file__).resolve().parents[2]

OK, MISSING, BROKEN, UNTRIED = "yes", "no", "BROKEN", "untried"
EXIT_OK, EXIT_BROKEN, EXIT_NOT_HERE, EXIT_INTERRUPTED = 0, 1, 77, 130

Facts = Dict[str, Any]


class Row(NamedTuple):
    """One thing that is looked for. `remedy` is shown when it is not found in order."""

    what: str
    purpose: str
    remedy: str = ""
    needed: bool = False
    found: str = MISSING
    version: str = ""

    def judged(self, good: object, version: str = "", otherwise: str = BROKEN) -> "Row":
        return self._replace(found=OK if good else otherwise, version=version)


def run(
    command: Sequence[str], timeout: float = 30, environment: Mapping[str, str] = {}
) -> Tuple[str, str]:
    """A command's output, standard error included, and in one line why it failed; "" if it did
    not. `environment` replaces variables."""
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout:g} s"
    except OSError as error:
        return "", f"cannot be started: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    last = last_line(done.stdout)
    return done.stdout, f"ended with status {done.returncode}" + (last and f": {last}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def path_without_environment() -> Dict[str, str]:
    """PATH and PYTHONPATH for a tool that is a Python program with its own packages, such as
    rocprof-compute, which refuses those of an environment that is active."""
    own = str(Path(sys.prefix) / "bin")
    folders = [f for f in os.environ.get("PATH", "").split(os.pathsep) if f != own]
    return {"PATH": os.pathsep.join(folders), "PYTHONPATH": "", "VIRTUAL_ENV": ""}


def find_program(name: str, also_in: str = "") -> str:
    """The path of a program on PATH, or else in a folder; "" if there is none."""
    return shutil.which(name) or shutil.which(name, path=also_in) or ""


def tool_row(row: Row, also_in: str = "", argument: str = "--version") -> Row:
    """The row of a program with its version. `also_in` is a folder to look in after PATH."""
    path = find_program(row.what, also_in)
    if not path:
        return row
    output, problem = run([path, argument], environment=path_without_environment())
    if problem:
        return row.judged(False, problem)._replace(remedy=f"run {path} {argument}")
    # Banners, licences and warnings may surround the version.
    after_word = re.search(r"version:?\s+v?(\d+\.[\w.+-]*)", output, re.IGNORECASE)
    first = next((line for line in output.splitlines() if re.search(r"\d\.\d", line)), "")
    numbers = [after_word.group(1)] if after_word else re.findall(r"\d+(?:\.\d+)+", first)
    return row.judged(True, numbers[-1] if numbers else "")


# --- Probes: each runs in a separate process, which a broken PyTorch may end ----------------------


def probe(
    function: Callable[..., Facts],
    *arguments: str,
    timeout: float = 300,
    environment: Mapping[str, str] = {},
) -> Facts:
    """Runs a probe of the script in a new Python; `problem` says why it gave no facts."""
    script = function.__code__.co_filename
    command = [sys.executable, script, "--probe", function.__name__]
    output, problem = run([*command, *arguments], timeout, environment)
    try:
        return dict(json.loads(last_line(output)))
    except (ValueError, TypeError):
        return {"problem": problem or "gave no answer"}


def probed_row(row: Row, module: str, function: Callable[..., Facts], *arguments: str) -> Row:
    """The row filled in with what a probe returns under `version`, or as its `problem`; MISSING
    where the module that the probe imports is not installed."""
    if importlib.util.find_spec(module) is None:
        return row
    facts = probe(function, *arguments)
    problem = facts.get("problem", "")
    return row.judged(not problem, problem or facts["version"])


def answer_probe(name: str, *arguments: str) -> None:
    try:
        facts = getattr(sys.modules["__main__"], name)(*arguments)
    except Exception as error:  # Any error of a broken installation is the finding.
        facts = {"problem": f"{type(error).__name__}: {last_line(str(error))}"}
    print(json.dumps(facts))


# --- The command line and the report --------------------------------------------------------------


class Report(NamedTuple):
    rows: List[Row]
    all_well: str
    not_here: str = ""
    """Why there was nothing to check, if so."""


def start(
    description: str,
    make: Callable[[argparse.Namespace], Report],
    flags: Mapping[str, str] = {},
) -> None:
    """Runs a script and ends the process with its exit status.

    Args:
        make: checks everything.
        flags: the script's own switches, with their help.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head -1` is no error
    parser = argparse.ArgumentParser(
        description=description,
        epilog="exit status: 0 all that is needed is there, 1 something needs attention (the last "
        "line says what), 2 wrong usage, 77 not on this machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--probe", nargs="+", help=argparse.SUPPRESS)
    for flag, text in flags.items():
        parser.add_argument(flag, action="store_true", help=text)
    try:
        arguments = parser.parse_args()
        if not arguments.probe:
            sys.exit(show(make(arguments), arguments.json))
        answer_probe(*arguments.probe)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def show(report: Report, as_json: bool) -> int:
    """Prints the table or its JSON form, and returns the exit status."""
    failed = [r for r in report.rows if r.found == BROKEN or (r.needed and r.found == MISSING)]
    status, verdict = EXIT_OK, report.all_well
    if failed:
        names = "; ".join(f"{row.what} ({row.version or 'missing'})" for row in failed)
        status, verdict = EXIT_BROKEN, f"Needs attention: {names}"
    elif report.not_here:
        status, verdict = EXIT_NOT_HERE, report.not_here
    if as_json:
        form = {"exit_status": status, "verdict": verdict}
        print(json.dumps({**form, "rows": [dict(row._asdict()) for row in report.rows]}, indent=2))
        return status
    print(f"Python: {sys.executable}")
    for row in report.rows:
        what = row.what + (" *" if row.needed else "")
        version = f"{row.version} ({row.purpose})" if row.version else row.purpose
        print(f"{row.found:<8} {what:<20} {version}")
        if row.found != OK and row.remedy:
            print(f"{'':<8} {'':<20} -> {row.remedy}")
    print("* needed")
    prepared = REPOSITORY / ".venv" / "bin" / "python"
    if prepared.exists() and Path(sys.prefix) != prepared.parents[1]:
        print(f"Note: the workshop's own Python is {os.path.relpath(str(prepared))}")
    print(verdict)
    return status
