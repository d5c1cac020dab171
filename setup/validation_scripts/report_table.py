"""What the three validation scripts share: rows, the table, the JSON form and the exit status.

Standard library only, and readable by Python 3.6, still the `python3` of some clusters: the scripts
run before anything is installed and must be able to say that the Python is too old.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

REPOSITORY = Path(__file__).resolve().parents[2]

OK, MISSING, BROKEN, UNTRIED = "yes", "no", "BROKEN", "untried"
EXIT_OK, EXIT_BROKEN, EXIT_NOT_HERE, EXIT_INTERRUPTED = 0, 1, 77, 130

Facts = Dict[str, Any]
Probes = Mapping[str, Callable[[], Facts]]

HEADINGS = ("what", "found", "version", "what it is for", "how to get it")
SHARES = (18, 7, 20, 21, 26)  # of 92 columns of text; four gaps of two make 100
GAP = "  "


class Row(NamedTuple):
    """One thing that was looked for. `remedy` is shown when it was not found in order."""

    what: str
    found: str
    version: str
    purpose: str
    remedy: str
    needed: bool = False


class Outcome(NamedTuple):
    """How a command ended: its output, or in `problem` one line on why there is none."""

    output: str = ""
    problem: str = ""


def run(command: Sequence[str], timeout: float = 30) -> Outcome:
    """Runs a command with a time limit and no shell. Standard error counts as output."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Outcome(problem=f"no answer within {timeout:g} s")
    except OSError as error:
        return Outcome(problem=f"cannot be started: {error.strerror}")
    if done.returncode != 0:
        said = last_line(done.stdout)
        return Outcome(done.stdout, f"ended with status {done.returncode}" + (said and f": {said}"))
    return Outcome(done.stdout)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def tool_row(
    name: str,
    purpose: str,
    remedy: str,
    arguments: Sequence[str] = ("--version",),
    also_in: str = "",
) -> Row:
    """A program, asked for its version. `also_in` is a folder to look in after PATH."""
    path = shutil.which(name) or shutil.which(name, path=also_in)
    if not path:
        return Row(name, MISSING, "", purpose, remedy)
    outcome = run([path, *arguments])
    if outcome.problem:
        return Row(name, BROKEN, outcome.problem, purpose, f"run {path} {' '.join(arguments)}")
    return Row(name, OK, version_in(outcome.output), purpose, remedy)


def version_in(output: str) -> str:
    """The version in a --version output, which banners, licences and warnings may surround."""
    after_word = re.search(r"version:?\s+v?(\d+\.[\w.+-]*)", output, re.IGNORECASE)
    if after_word:
        return after_word.group(1)
    first = next((line for line in output.splitlines() if re.search(r"\d\.\d", line)), "")
    numbers = re.findall(r"\d+(?:\.\d+)+", first)
    return numbers[-1] if numbers else ""


def probe(script: str, name: str, timeout: float = 180) -> Facts:
    """Runs one of a script's probes in a Python of its own; `problem` says why it gave no facts.

    Importing a broken PyTorch can end the process: then the table must still be printed.
    """
    outcome = run([sys.executable, script, "--probe", name], timeout)
    try:
        facts = json.loads(last_line(outcome.output))
    except ValueError:
        facts = None
    if isinstance(facts, dict):
        return facts
    return {"problem": outcome.problem or "gave no answer"}


def answer_probe(probes: Probes, name: str) -> int:
    try:
        facts = probes[name]()
    except Exception as error:  # Whatever a broken installation raises is the finding.
        facts = {"problem": f"{type(error).__name__}: {last_line(str(error))}"}
    print(json.dumps(facts))
    return EXIT_OK


def table(rows: List[Row], width: int) -> str:
    """The rows in columns that wrap, the last one only where there is something to do."""
    spare = width - len(GAP) * (len(SHARES) - 1)
    widths = [share * spare // sum(SHARES) for share in SHARES]
    lines = [_line(HEADINGS, widths), _line(["-" * width for width in widths], widths)]
    for row in rows:
        what = row.what + (" *" if row.needed else "")
        remedy = "" if row.found == OK else row.remedy
        lines.append(_line((what, row.found, row.version, row.purpose, remedy), widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: List[int]) -> str:
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths)
    ]
    height = max(len(lines) for lines in wrapped)
    padded = [lines + [""] * (height - len(lines)) for lines in wrapped]
    return "\n".join(
        GAP.join(part.ljust(width) for part, width in zip(parts, widths)).rstrip()
        for parts in zip(*padded)
    )


def failures(rows: List[Row]) -> List[Row]:
    """Rows that must not stay as they are: needed ones that are absent, and all broken ones."""
    return [row for row in rows if row.found == BROKEN or (row.needed and row.found == MISSING)]


def conclude(rows: List[Row], all_well: str, not_here: str = "") -> Tuple[int, str]:
    """Exit status and the last line. `not_here` says why there was nothing to check, if so."""
    failed = failures(rows)
    if failed:
        names = "; ".join(f"{row.what} ({row.version or 'missing'})" for row in failed)
        return EXIT_BROKEN, f"Needs attention: {names}"
    if not_here:
        return EXIT_NOT_HERE, not_here
    return EXIT_OK, all_well


def parser(description: str) -> argparse.ArgumentParser:
    """The command line that all three scripts have."""
    result = argparse.ArgumentParser(
        description=description,
        epilog="exit status: 0 all that is needed is there, 1 something needs attention (the last "
        "line says what), 2 wrong usage, 77 not on this machine",
    )
    result.add_argument("--json", action="store_true", help="print JSON instead of the table")
    result.add_argument("--probe", help=argparse.SUPPRESS)  # one check, in its own process
    return result


def start(main: Callable[[], int]) -> None:
    """Runs a script and ends the process: Ctrl-C is one line, and output that is not read to its
    end, as that of `| head -1`, is no error."""
    try:
        try:
            status = main()
        except SystemExit as ended:  # of the command line
            status = int(ended.code or EXIT_OK)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python writes what is left of the output when it ends, and would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_BROKEN
    sys.exit(status)


def report(rows: List[Row], status: int, verdict: str, as_json: bool) -> int:
    """Prints the table or its JSON form, and returns the exit status."""
    if as_json:
        form = {
            "schema_version": 1,
            "python": sys.executable,
            "exit_status": status,
            "verdict": verdict,
            "rows": [dict(row._asdict()) for row in rows],
        }
        print(json.dumps(form, indent=2))
        return status
    columns = shutil.get_terminal_size((100, 24)).columns
    print(f"Python: {sys.executable}")
    print(table(rows, max(80, min(columns, 120))))
    print("* needed")
    print(wrong_python_note(), end="")
    print(verdict)
    return status


def wrong_python_note() -> str:
    """A hint for whoever prepared .venv and then ran the script with another Python."""
    prepared = REPOSITORY / ".venv" / "bin" / "python"
    if not prepared.exists() or Path(sys.prefix) == prepared.parents[1]:
        return ""
    return (
        f"Note: the workshop's own Python is {os.path.relpath(str(prepared))}; this is another.\n"
    )
