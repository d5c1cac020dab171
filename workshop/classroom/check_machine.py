"""Checks that this machine is ready for the workshop; a table of all machines in the room.

    python -m workshop.classroom.check_machine
        checks this machine, writes results/machines/NAME.json
    python -m workshop.classroom.check_machine --collect DIR
        a table of all machines whose files are in DIR

One file per machine and no common one: thirty machines may write at once to a disk that they share.
The checks run in separate processes, and nothing but Python's own is imported here, so that a
machine whose PyTorch is missing or broken gets its row like any other.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import count, parse
from workshop.errors import WorkshopError, printable
from workshop.run import processes, waiting
from workshop.versions import ROOT, VERSIONS

SCRIPTS = ROOT / "setup" / "validation_scripts"
ENVIRONMENT, ROCM, PROFILERS = "test_environment", "test_rocm_installation", "test_profiling_tools"
_GATE = ("--config", "tiny", "--batch-size", "1", "--seq-len", "33")
"""A few tokens: V3's kernels may have to be interpreted."""
_LEAST_KERNELS = 3
_SECONDS = 400
"""Limit of a check: a kernel's first compilation, on a busy node."""
PASS, FAIL, SKIPPED, UNTRIED = "pass", "FAIL", "skipped", "untried"
_BUILDS = {"AMD": "ROCm", "NVIDIA": "CUDA"}
"""PyTorch's build for the GPUs of a maker, whose name begins a profiler's purpose."""
RUNNERS = {
    "rocprofv3": "rocprofv3",
    "rocprof-sys-run": "rocprof_sys",
    "rocprof-compute": "rocprof_compute",
    "ncu": "ncu",
    "nsys": "nsys",
}
"""The scripts of the profilers, by the program that each needs."""
_SMALL = ("--config", "tiny", "--batch-size", "1", "--seq-len", "33", "--num-layers", "1")
"""The program that each profiler is tried on."""
HEADER = ("machine", "", "device", "PyTorch", "gate", "profilers", "checked (UTC)")
Rows = list[dict[str, Any]]
"""Rows of a validation script: what, found, version, purpose, remedy and needed of each thing."""


@dataclass(frozen=True)
class Machine:
    """Findings on one machine. `attention` and `absent` are sentences: what must be fixed
    before the workshop, and what is missing there and may be."""

    name: str
    checked: str
    """When, in UTC."""
    commit: str
    """The checkout's; "-dirty" behind it says that files were changed."""
    python: str
    torch: str
    device: str
    versions: dict[str, str]
    """PASS, FAIL, SKIPPED or UNTRIED, of each version's gate on this machine's device."""
    profilers: list[str]
    attention: list[str]
    absent: list[str]

    @property
    def gates(self) -> str:
        """As in "pass v1 v2 v4; skipped v3"."""
        by_status = _by_value(self.versions.items())
        return "; ".join(f"{status} {' '.join(keys)}" for status, keys in by_status.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.classroom.check_machine",
        description="Checks that this machine is ready for the workshop: the three validation "
        "scripts, torch.compile, the gate of every version on a small model, and each profiler on "
        "one step. Takes a minute or two, with AMD's profilers five. Or shows the table of all "
        "machines, in Markdown.",
        epilog="Exit status: 0 ready (with --collect: all machines are), 1 something needs "
        "attention, 2 wrong usage.",
    )
    add = parser.add_argument
    add("--machine", metavar="NAME", help="its name in the table (default: its host name)")
    add(
        "--output-dir",
        type=Path,
        metavar="DIR",
        default=ROOT / "results" / "machines",
        help="NAME.json goes there (default: results/machines); with a folder that all machines "
        "see there is nothing to collect",
    )
    add("--collect", type=Path, metavar="DIR", help="check nothing, show the machines in DIR")
    add("--expect", type=count, metavar="N", help="with --collect: how many there should be")
    arguments = parse(parser, argv)
    work = partial(_collect if arguments.collect else _check, arguments)
    return errors.exit_status(work, interrupted="interrupted: nothing is written")


# --- one machine ---------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    node = re.sub(r"[^\w.-]", "-", platform.node(), flags=re.ASCII).strip(".-")[:64]
    name = arguments.machine or node or "machine"
    if not re.fullmatch(r"\w[\w.-]{,63}", name, re.ASCII):
        raise WorkshopError(f"--machine {printable(name)!r}: up to 64 letters, digits, . - and _")
    target = arguments.output_dir / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)  # before the checks, which take a minute
    machine = examine(name)
    new = target.with_suffix(".new")  # a file is there whole or not at all
    new.write_text(json.dumps(asdict(machine), indent=1) + "\n", encoding="utf-8")
    new.replace(target)
    lines = [
        f"{name}: {'NEEDS ATTENTION' if machine.attention else 'ready'}",
        f"  device     {machine.device}",
        f"  PyTorch    {machine.torch}, Python {machine.python}",
        f"  gate       {machine.gates}",
        f"  profilers  {', '.join(machine.profilers) or 'none'}",
        *(f"  fix:       {sentence}" for sentence in machine.attention),
        *(f"  without:   {sentence}" for sentence in machine.absent),
    ]
    print(*map(printable, lines), f"Written: {target}", sep="\n")
    return errors.ANSWER_IS_NO if machine.attention else errors.DONE


def examine(name: str) -> Machine:
    """Runs all checks on this machine, each in a separate process, and says on stderr which."""
    attention: list[str] = []
    rows = {script: _script_rows(script, attention) for script in (ENVIRONMENT, ROCM, PROFILERS)}
    found = {row["what"]: row for row in rows[ENVIRONMENT]}
    torch = found.get("torch", {"found": "no", "version": ""})
    absent = []
    for row in (row for its in rows.values() for row in its):
        # As in "ncu (missing): Nsight Compute".
        sentence = f"{row['what']} ({row['version'] or 'missing'}): {row['remedy']}"
        if row["found"] == "BROKEN" or (row["found"] == "no" and row["needed"]):
            attention.append(sentence.removesuffix(": "))
        elif row["found"] == "no":
            build = _BUILDS.get(row["purpose"].partition(":")[0], "")
            # A profiler of another maker's GPU can't be here.
            absent += [sentence.removesuffix(": ")] if build in torch["version"] else []
    versions = dict.fromkeys(VERSIONS, UNTRIED)
    for key in VERSIONS if torch["found"] == "yes" else ():
        print(f"checking {key} on a small model ...", file=sys.stderr, flush=True)
        versions[key], why = gate(key)
        if versions[key] != PASS:
            (absent if versions[key] == SKIPPED else attention).append(f"{key}: {why}")
    profilers = [row["what"] for row in rows[PROFILERS] if row["found"] == "yes"]
    for program in [name for name in profilers if name in RUNNERS]:
        print(f"checking {program} on one step ...", file=sys.stderr, flush=True)
        if why := profile_fails(RUNNERS[program]):
            attention.append(f"{program}: {why}")
            profilers.remove(program)
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    status, commit, _ = _run(describe)
    return Machine(
        name=name,
        checked=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit.strip() if status == errors.DONE else "unknown",
        python=platform.python_version(),
        torch=torch["version"] or "missing",
        device=found.get("device", {}).get("version") or "unknown",
        versions=versions,
        profilers=profilers,
        attention=list(dict.fromkeys(attention)),
        absent=list(dict.fromkeys(absent)),
    )


def _script_rows(script: str, attention: list[str]) -> Rows:
    """A validation script's rows; none where it is not for this machine, or gave no answer, which
    is noted."""
    print(f"checking {script[5:].replace('_', ' ')} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--json"]
    status, output, problem = _run([*command, *(["--compile"] if script == ENVIRONMENT else [])])
    if script == ROCM and status == errors.NOT_ON_THIS_MACHINE:
        return []
    try:
        return list(json.loads(output)["rows"])
    except ValueError:
        attention.append(f"{script}.py gave no answer: {problem or f'status {status}'}")
        return []


def _run(command: list[str]) -> tuple[int | None, str, str]:
    """A command's exit status, its output, and in a line why there is none or the last that it
    wrote on stderr."""
    environment = os.environ | waiting.short_spin()
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return None, "", f"can't be started: {error.strerror}"
    try:
        with processes.ended_with_us(process):
            output, complaints = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {_SECONDS} s"
    finally:  # with those that it has started: a compiler at work would slow the next check
        processes.kill_group(process)
    if process.returncode < 0:
        return process.returncode, output, f"ended by signal {-process.returncode}"
    return process.returncode, output, printable((complaints.strip().splitlines() or [""])[-1])


def gate(key: str) -> tuple[str, str]:
    """Whether a version trains correctly on this device; and why not, where it does not."""
    command = [sys.executable, "-m", "workshop.parity", "--version", key, *_GATE]
    status, output, problem = _run(command)
    if status == errors.DONE:
        return PASS, ""
    *_, last = output.strip().splitlines() or [problem.removeprefix("error: ")]
    skipped = status == errors.NOT_ON_THIS_MACHINE
    return SKIPPED if skipped else FAIL, last.strip() or f"ended with status {status}"


def profile_fails(tool: str) -> str:
    """Has a profiler record one step, and its output read back; why that fails, or empty."""
    with tempfile.TemporaryDirectory() as folder:
        script = VERSIONS["v1"].path.parent / f"run_{tool}.sh"
        command = ["bash", str(script), "--class", "--output-dir", f"{folder}/out"]
        status, _, problem = _run([*command, "--", *_SMALL])
        if status != errors.DONE:
            return problem.removeprefix("error: ").removeprefix("skipped: ") or f"status {status}"
        kernels = json.loads(Path(folder, "out", "kernels.json").read_text("utf-8"))["kernels"]
        return "" if len(kernels) >= _LEAST_KERNELS else f"{len(kernels)} kernels in its output"


# --- all machines --------------------------------------------------------------------------------


def _collect(arguments: argparse.Namespace) -> int:
    folder, machines, problems = arguments.collect, [], []
    for path in sorted(folder.glob("*.json"), key=_as_counted):
        try:
            machines.append(Machine(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            problems.append(f"{path.name}: can't be read ({error}): check that machine again")
    if not machines:
        raise WorkshopError(
            f"--collect {folder}: no machine's file in it: run on each machine "
            f"`python -m workshop.classroom.check_machine --output-dir {folder}`"
        )
    unseen = max(0, (arguments.expect or 0) - len(machines))
    if unseen:
        problems.append(f"{unseen} of {arguments.expect} machines left no file")
    rows = [
        (
            *(machine.name, "ATTENTION" if machine.attention else "ready", machine.device),
            *(machine.torch, machine.gates, ", ".join(machine.profilers) or "none"),
            machine.checked[:16].replace("T", " "),
        )
        for machine in machines
    ]
    for row in (HEADER, ("---",) * len(HEADER), *rows):
        print(f"| {' | '.join(map(printable, row))} |")
    print("", *(f"- {note}" for note in notes(machines, problems)), sep="\n")
    well = not problems and not any(machine.attention for machine in machines)
    return errors.DONE if well else errors.ANSWER_IS_NO


def _as_counted(path: Path) -> list[tuple[str, int]]:
    """Sorts node2 before node10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", path.stem)]


def notes(machines: list[Machine], problems: list[str]) -> list[str]:
    """Notes: what must be fixed where; where machines differ that should be alike; what is missing,
    with how to get it and where."""
    ready = sum(not machine.attention for machine in machines)
    lines = [f"{ready} of {len(machines)} machines ready", *problems]
    lines += [f"{machine.name}: fix {what}" for machine in machines for what in machine.attention]
    for what, groups in (
        ("the checkout", _by_value((machine.name, machine.commit) for machine in machines)),
        ("PyTorch", _by_value((machine.name, machine.torch) for machine in machines)),
    ):
        if len(groups) > 1:
            where = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
            lines.append(f"not the same everywhere, {what}: {where}")
    absent = _by_value((machine.name, what) for machine in machines for what in machine.absent)
    lines += [f"without {what} [{', '.join(names)}]" for what, names in absent.items()]
    return [printable(line) for line in lines]


def _by_value(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by value, the most frequent value first."""
    groups: dict[str, list[str]] = {}
    for name, value in pairs:
        groups.setdefault(value, []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


if __name__ == "__main__":
    sys.exit(main())
