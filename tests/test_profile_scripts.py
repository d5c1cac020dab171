"""The shell scripts that run the profilers, and what runs them all.

The tools are stand-ins, on a PATH with the system's own commands alone: none is needed, and what a
script would run on another machine can be read off. Command lines are held against tables of the
options that the real tools have.
"""

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_S

from workshop import versions
from workshop.profilers import amd_counters, ncu, profile_run, run_all, summary
from workshop.profilers.table import Kernel

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ROOT / "workshop" / "profilers" / "runners"
FOLDERS = [ROOT / version.folder for version in versions.VERSIONS.values()]
TOOLS = ("rocprofv3", "rocprof_sys", "rocprof_compute", "ncu", "nsys", "proton")

Run = subprocess.CompletedProcess[str]

# Says that it has PyTorch, which sees the GPU, notes how it is called, and leaves a kernel table
# where it is asked to.
PYTHON = """
case $1$2 in
  -c*is_available*) exit ${SEES_GPU:-0} ;;
  -c*) exit ${HAS_MODULE:-0} ;;
esac
printf '%s\\n' "$@" >>"$RECORD.my_python"
case "$*" in *workshop.profilers\\ show*) echo table >"$4/kernels.json" ;; esac
"""
RECORDER = 'printf "%s\\n" "$@" >>"$RECORD.$(basename "$0")"\n'
AMD_GPU = {"rocm_agent_enumerator": "echo gfx000; echo gfx942"}
NVIDIA_GPU = {"nvidia-smi": "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'"}
NSYS_TOOL = (
    RECORDER
    + """
for word in "$@"; do case $word in --output=*) out=${word#*=} ;; esac; done
case $1 in profile) echo timeline >"$out.nsys-rep" ;; *) echo rows >"$out"_sums.csv ;; esac
"""
)
SYSTEM = """
awk basename bash cat date dirname env find flock grep head ls mkdir mv realpath rm sed sh sleep
sort tail tee
""".split()
"""All that the scripts call beside Python and the profilers."""


class Machine:
    """A checkout, under a path with spaces, of one version, and the programs of its machine."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my checkout"
        self.folder = self.root / "version1_pytorch_baseline"
        self.bin = folder / "bin"
        self.record = folder / "record"
        self.out = folder / "the outputs"
        self.bin.mkdir()
        for name in SYSTEM:
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.folder.mkdir(parents=True)
        (self.folder / "tiny_llama_v1.py").touch()
        shutil.copytree(RUNNERS, self.root / RUNNERS.relative_to(ROOT))
        for runner in FOLDERS[0].glob("run_*"):
            (self.folder / runner.name).symlink_to(runner.readlink())
        self.install(my_python=PYTHON)

    def install(self, **programs: str) -> None:
        for name, body in programs.items():
            program = self.bin / name.replace("_", "-" if name.startswith("rocprof_") else "_")
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "PYTHON": str(self.bin / "my_python"),
            "RECORD": str(self.record),
            "HOME": str(self.root),
            "TERM": "dumb",
        } | extra

    def command(self, tool: str, *words: str | Path) -> list[str]:
        return [str(self.folder / f"run_{tool}.sh"), *map(str, words)]

    def run(self, tool: str, *words: str | Path, **extra: str) -> Run:
        """Runs a script as from a shell in another folder, with its outputs in `out`."""
        if "--output-dir" not in words:
            words = ("--output-dir", self.out, *words)
        return subprocess.run(
            self.command(tool, *words),
            capture_output=True,
            text=True,
            env=self.environment(**extra),
            cwd=self.bin,
            stdin=subprocess.DEVNULL,
            timeout=HANGS_S,
        )

    def recorded(self, program: str) -> list[str]:
        """The words that a stand-in was called with, all calls in a row."""
        path = Path(f"{self.record}.{program}")
        return path.read_text().splitlines() if path.exists() else []

    def dry_run(self, tool: str, *words: str, **extra: str) -> list[list[str]]:
        """The profiler's commands of a dry run, each as a shell splits it."""
        done = self.run(tool, "--dry-run", *words, **extra)
        assert done.returncode == 0, done.stderr
        assert not self.out.exists()
        return profiler_commands(done.stdout.splitlines())

    def edit(self, script: str, old: str, new: str) -> None:
        path = self.folder / script
        text = path.read_text()  # of the copy that the link leads to
        assert old in text
        path.write_text(text.replace(old, new))


def profiler_commands(lines: list[str]) -> list[list[str]]:
    """Of the lines that a script prints, those that begin with no command of the system's."""
    split = (shlex.split(line, comments=True) for line in lines)
    return [words for words in split if words and words[0] not in ("mkdir", "cd")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- The files ------------------------------------------------------------------------------------


def test_every_version_links_to_every_runner() -> None:
    runners = {path.name for path in RUNNERS.glob("run_*")}
    listed = re.findall(r"^  (run_\S+)", (RUNNERS / "run_all_profilers.sh").read_text(), re.M)
    assert {"run_all_profilers.sh", *listed} == runners
    assert {Path(script).stem.removeprefix("run_") for script in listed} == set(run_all.QUESTIONS)
    for folder in FOLDERS:
        links = {path.name: path for path in folder.glob("run_*")}
        assert links.keys() == runners
        for name, link in links.items():
            assert not link.readlink().is_absolute() and link.resolve() == RUNNERS / name
            assert os.access(link, os.X_OK)
    for path in RUNNERS.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


def test_the_folder_of_the_link_chooses_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """However it is called."""
    folder, other = FOLDERS[1], FOLDERS[2]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words: str, cwd: Path) -> Run:
        command = [*words, "--dry-run"]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    for words, cwd in (
        (["./run_ncu.sh"], folder),
        (["bash", "run_ncu.sh"], folder),
        (["bash", f"{folder.name}/run_ncu.sh"], ROOT),
        ([f"../{folder.name}/run_ncu.sh"], other),
    ):
        done = run(*words, cwd=cwd)
        assert f"{folder}/tiny_llama_v2.py" in done.stdout, done.stderr
    done = run(sys.executable, "run_pytorch_profiler.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    for path in (folder / "run_x.py", other / ".." / folder.name / "run_x.py"):
        arguments = profile_run.runner_arguments("x", steps=1, argv=[str(path)])
        assert arguments.version.key == "v2"
    done = run(str(RUNNERS / "run_ncu.sh"), cwd=ROOT)
    with pytest.raises(SystemExit, match=r"^2$"):
        profile_run.runner_arguments("x", steps=1, argv=[str(RUNNERS / "run_x.py")])
    for error in (done.stderr, capsys.readouterr().err):
        assert "call it in a version's folder, such as version1_pytorch_baseline/run_" in error
        assert len(error.splitlines()) == 1
    assert done.returncode == 2


# --- Usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [*TOOLS, "all_profilers"])
def test_help_begins_with_the_question(tool: str, machine: Machine) -> None:
    done = machine.run(tool, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    question = (RUNNERS / f"run_{tool}.sh").read_text().splitlines()[1].removeprefix("# ")
    assert done.stdout.startswith(question) and "shellcheck" not in done.stdout
    assert ("--mode MODE" in done.stdout) == tool.startswith("rocprof")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--no-such-option", "--no-such-option"),
        ("--config tiny", "--config"),
        ("--steps", "--steps"),
        ("--steps 0", "--steps 0"),
        ("--steps=two", "--steps two"),
        ("--mode counters", "--mode"),
        # The model would take these, and the profile would be of something else.
        ("-- --out=x", "use --output-dir of run_ncu.sh"),
        ("-- --config tiny --profile-steps=9", "use --steps of run_ncu.sh"),
        ("-- --num-s 9", "use --steps of run_ncu.sh"),
        ("", "has no PyTorch"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: str, message: str, machine: Machine) -> None:
    done = machine.run("ncu", *words.split(), HAS_MODULE="" if words else "1")
    assert done.returncode == 2 and not machine.out.exists()
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_python_is_found_and_relative_paths_are_kept(machine: Machine) -> None:
    machine.install(python="exit 1", python3=PYTHON)
    words = ("--text-file", "my text", "--text-file=/a", "--text-file=b", "--num-layers", "2")
    (command,) = machine.dry_run("proton", "--", *words, PYTHON="")
    assert command[0] == "python3"
    here = machine.bin  # where the script was called
    expected = ["--text-file", f"{here}/my text", "--text-file=/a", f"--text-file={here}/b"]
    assert command[-6:] == [*expected, "--num-layers", "2"]


# --- The command lines ----------------------------------------------------------------------------

# How many values an option takes: 0, 1 or "+"; with the versions that have it, from and up to.
Options = dict[str, tuple[int | str, str, str]]


def options(text: str, since: str = "0", until: str = "99") -> Options:
    """From words such as `--stats`, `--name=1` and `--pmc=+`."""
    split = (word.partition("=") for word in text.split())
    return {name: ("+" if n == "+" else int(n or 0), since, until) for name, _, n in split}


TRACING = (
    "--kernel-trace --hip-trace --hip-runtime-trace --memory-copy-trace --marker-trace "
    "--runtime-trace --sys-trace"
)
ROCPROFV3 = options(
    f"{TRACING} --stats --truncate-kernels --summary --output-format=+ --output-directory=1 "
    "--output-file=1 --pmc=+ --kernel-include-regex=1"
)
# Its help in three versions of ROCm: no word of what each does not have.
ROCPROFV3_HELP = {
    "6.2": "--kernel-trace --hip-runtime-trace --output-format --stats",
    "6.3": "--kernel-trace --runtime-trace --pmc --output-format {csv,json,pftrace} --stats",
    "7.0": "--kernel-trace --runtime-trace --pmc --output-format {csv,json,pftrace,otf2,rocpd}",
}
ROCPROF_SYS = options("--trace --profile --device --host --output=1") | options(
    "--preset=1", since="1.6"
)
ROCPROF_COMPUTE = {
    "profile": options("--name=1 --no-roof --roof-only --kernel=+ --block=+ --dispatch=+")
    | options("--path=1 --subpath=1", until="3.6.9")
    | options("--sort=1 --mem-level=+", until="3.5.9")
    | options("--roofline-data-type=+", since="3.1.1", until="3.5.9")
    | options("--set=1", since="3.3")
    | options("--output-directory=1", since="3.5")
    | options("--bench-only", since="3.7")
    | options("--overwrite", since="3.8"),
    "analyze": options("--path=+ --list-stats --kernel=+ --dispatch=+ --block=+")
    | options("--output=1", until="3.2.9")
    | options("--output-format=1 --output-name=1", since="3.3")
    | options("--roofline-data-type=+", since="3.5"),
}
NCU = options(
    "--profile-from-start=1 --target-processes=1 --clock-control=1 --cache-control=1 --metrics=1 "
    "--export=1 --force-overwrite --import=1 --csv --page=1 --print-units=1 --set=1 --section=1 "
    "--nvtx --nvtx-include=1 --graph-profiling=1"
)
NSYS = {
    "profile": options(
        "--trace=1 --sample=1 --cpuctxsw=1 --capture-range=1 --capture-range-end=1 "
        "--cuda-graph-trace=1 --output=1 --force-overwrite=1 --stats=1 --kill=1"
    ),
    "stats": options("--report=1 --format=1 --output=1 --force-export=1 --force-overwrite=1"),
}
PROTON = options("--name=1 --context=1 --data=1 --hook=1 --backend=1")
# What a tool would do without, and our tables would not, by the command.
NEEDED = {
    "rocprofv3 --stats": "--kernel-trace --hip-runtime-trace --memory-copy-trace --marker-trace",
    "rocprof-sys-sample": "ROCPROFSYS_TIME_OUTPUT=OFF",
    "rocprof-sys-run": "ROCPROFSYS_TIME_OUTPUT=OFF",
    "ncu": "--profile-from-start=off --no-cuda-graph TORCHINDUCTOR_COMPILE_THREADS=1",
    "nsys profile": "--capture-range=cudaProfilerApi --capture-range-end=stop "
    "--cuda-graph-trace=node",
    "nsys stats": "--report=cuda_gpu_kern_sum --report=cuda_gpu_mem_time_sum "
    "--report=cuda_gpu_trace --report=cuda_api_sum --report=nvtx_pushpop_sum "
    "--report=nvtx_kern_sum --format=csv",
}
NEWEST = {"rocprof-sys-sample": "1.8", "rocprof-sys-run": "1.8", "rocprof-compute": "3.9"}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def problems(command: list[str], version: str | None = None) -> list[str]:
    """What the real tool would not accept, or not do anything with, and what we need of it."""
    words = command[1:] if command[0] == "env" else list(command)
    settings = []
    while "=" in words[0]:
        settings.append(words.pop(0))
    program = Path(words.pop(0)).name
    if program in ("rocprofv3", "rocprof-sys-sample", "rocprof-sys-run"):
        known = ROCPROFV3 if program == "rocprofv3" else ROCPROF_SYS
    elif program in ("rocprof-compute", "nsys"):
        tables = ROCPROF_COMPUTE if program == "rocprof-compute" else NSYS
        subcommand = words.pop(0)
        if subcommand not in tables:
            return [f"{program} has no {subcommand}"]
        known = tables[subcommand]
        program += f" {subcommand}"
    elif program == "ncu":
        known = NCU
    elif words[:2] == ["-m", "triton.profiler.proton"]:
        known, words, program = PROTON, words[2:], "proton"
    else:
        return [f"{program} is no profiler"]
    found, given, application = _parse(words, known, version or NEWEST.get(program.split()[0], "1"))
    if "--import" not in given:
        values = [f"{name}={value}" for name, values in given.items() for value in values]
        present = {*settings, *given, *values, *(application or ())}
        needed = NEEDED.get(f"{program} --stats" if "--stats" in given else program, "").split()
        found += [f"{word} is missing" for word in needed if word not in present]
    return [*found, *_rules(program, given, application)]


def _parse(
    words: list[str], known: Options, version: str
) -> tuple[list[str], dict[str, list[str]], list[str] | None]:
    """(problems, values by option, the words from the application on or None)."""
    found: list[str] = []
    given: dict[str, list[str]] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        name, equals, value = words.pop(0).partition("=")
        if name not in known:
            found.append(f"unknown option {name}")
            known = known | options(name)
        arity, since, until = known[name]
        if not number(since) <= number(version) <= number(until):
            found.append(f"{name} is not an option of version {version}")
        values = given.setdefault(name, [])
        if equals:
            values.append(value)
            continue
        while words and not words[0].startswith("-") and (arity == "+" or len(values) < arity):
            values.append(words.pop(0))
        if arity and not values:
            found.append(f"{name} has no value")
    return found, given, words or None


def _rules(
    program: str, given: dict[str, list[str]], application: list[str] | None
) -> Iterator[str]:
    if "analyze" in program or "stats" in program or "--import" in given:
        return
    dashes = program.startswith("rocprof")  # NVIDIA's tools refuse them
    if not application or (application[0] == "--") != dashes:
        yield "there must be an application" + (" after --" if dashes else ", and no -- before it")
        return
    if program == "proton" and Path(application[0]).name != "proton_app.py":
        yield "Triton up to 3.6 runs no script that ends with sys.exit"
    script = application[1 + dashes]
    if Path(script).name != "tiny_llama_v1.py" or "--profile-steps" not in application:
        yield "the application is not the version's"
    formats = given.get("--output-format", [])
    if program == "rocprofv3":
        if not formats:
            yield "no output format: its default depends on the version"
        for name in set(formats) - {"csv", "json", "pftrace", "otf2", "rocpd"}:
            yield f"{name} is no output format"
        if "--stats" in given and not (set(TRACING.split()) & given.keys()):
            yield "--stats needs a tracing option"
        if "--stats" in given and not {"csv", "json"} & set(formats):
            yield "--stats does nothing without csv or json"
        if "rocpd" in formats and not {"--pmc", "--runtime-trace"} & given.keys():
            yield "launches of a step are missing from the database"
    if program == "rocprof-sys-sample" and "workload-trace" in given.get("--preset", []):
        yield "this preset takes no samples"
    if program == "rocprof-compute profile" and "--name" not in given:
        yield "a workload needs a name"


def test_every_command_is_one_that_the_tools_have(machine: Machine) -> None:
    counts = {}
    for tool in TOOLS:
        commands = machine.dry_run(tool, "--", "--config", "tiny")
        counts[tool] = len(commands)
        for command in commands:
            command = command[: command.index(">")] if ">" in command else command
            assert problems(command) == [], command
    assert counts == {
        "rocprofv3": 7,
        "rocprof_sys": 2,
        "rocprof_compute": 4,
        "ncu": 2,
        "nsys": 2,
        "proton": 1,
    }


@pytest.mark.parametrize(
    ("script", "old", "new", "told"),
    [
        ("run_rocprofv3.sh", "--runtime-trace", "--basenames", "unknown option --basenames"),
        ("run_rocprofv3.sh", '--output-format "$2"', '--output-format "$2,csv"', "rocpd,csv is no"),
        ("run_rocprofv3.sh", '--output-format "$2"', "", "no output format"),
        ("run_rocprofv3.sh", '-- "${TRAIN[@]}"', '"${TRAIN[@]}"', "after --"),
        (
            "run_rocprofv3.sh",
            '--runtime-trace "',
            '--runtime-trace --stats "',
            "--stats does nothing",
        ),
        (
            "run_rocprofv3.sh",
            '--runtime-trace "',
            '--kernel-trace "',
            "launches of a step are missing",
        ),
        (
            "run_rocprof_sys.sh",
            "--trace --profile --device",
            "--preset=workload-trace",
            "no samples",
        ),
        ("run_rocprof_sys.sh", "--trace --profile", "--system-wide", "unknown option"),
        ("run_rocprof_sys.sh", "rocprof-sys-run", "rocprof-sys", "no profiler"),
        ("run_rocprof_compute.sh", "--name counters", "--name counters --path x", "of version 3.9"),
        (
            "run_rocprof_compute.sh",
            "rocprof-compute analyze",
            "rocprof-compute visualize",
            "has no",
        ),
        ("run_ncu.sh", '--force-overwrite "${TRAIN', '--force-overwrite -- "${TRAIN', "no --"),
        ("run_nsys.sh", "--capture-range=", "--capture=", "unknown option --capture"),
        ("run_proton.sh", '"${TRAIN[@]:1}"', '"${TRAIN[@]}"', "not the version's"),
    ],
)
def test_planted_fault_in_a_command_is_found(
    script: str, old: str, new: str, told: str, machine: Machine
) -> None:
    machine.edit(script, old, new)
    tool = script.removeprefix("run_").removesuffix(".sh")
    assert told in "; ".join(p for command in machine.dry_run(tool) for p in problems(command))


@pytest.mark.parametrize("command", NEEDED)
def test_a_word_that_our_tables_need_is_missed(command: str, machine: Machine) -> None:
    tool = "rocprof_sys" if command.startswith("rocprof-sys") else command.split()[0]
    script = machine.folder / f"run_{tool}.sh"
    if command == "rocprofv3 --stats":
        machine.install(rocprofv3=f"echo '{ROCPROFV3_HELP['6.3']}'")
    whole = script.read_text()
    for word in NEEDED[command].split():
        script.write_text(whole)
        machine.edit(script.name, word if word in whole else word.replace("=", " "), "")
        found = [problem for given in machine.dry_run(tool) for problem in problems(given)]
        assert f"{word} is missing" in found


@pytest.mark.parametrize(
    ("rocm", "commands", "formats"),
    [("6.2", 1, {"csv"}), ("6.3", 8, {"csv", "pftrace"}), ("7.0", 7, {"rocpd"})],
)
def test_rocprofv3_gets_options_that_the_installed_version_has(
    rocm: str, commands: int, formats: set[str], machine: Machine
) -> None:
    output = machine.out / ("run.db" if rocm == "7.0" else "run.pftrace")
    usage = f'case $1 in --help) echo "{ROCPROFV3_HELP[rocm]}" ;; *) echo >"$TRACE" ;; esac'
    machine.install(rocprofv3=usage, **AMD_GPU)
    found = machine.dry_run("rocprofv3")
    assert len(found) == commands
    assert {command[command.index("--output-format") + 1] for command in found} == formats
    for command in found:
        assert problems(command) == []
        assert not {"--truncate-kernels", "-T"} & set(command)  # which tell kernels apart
    done = machine.run("rocprofv3", "--mode", "timeline", TRACE=str(output))
    if rocm == "6.2":
        assert done.returncode == 77 and "ROCm 6.3" in done.stderr
        return
    assert done.returncode == 0 and f"{output}: " in done.stdout, done.stderr
    assert (machine.out / "kernels.json").exists() == (rocm == "7.0")  # a database has a table


@pytest.mark.parametrize(
    ("tool", "versions_of_it"),
    [
        ("rocprof_compute", "3.0.0 3.1.0 3.1.1 3.2.3 3.3.0 3.4.0 3.5.0 3.6.0 3.7.0 3.9.0"),
        ("rocprof_sys", "1.0.0 1.2.1 1.5.0 1.6.0 1.8.0"),
    ],
)
def test_options_are_those_of_the_installed_version(
    tool: str, versions_of_it: str, machine: Machine
) -> None:
    for version in versions_of_it.split():
        banner = f"echo 'pandas 2.2 is too old' >&2; echo ----; echo 'tool version: {version} (r)'"
        machine.install(rocprof_compute=banner, rocprof_sys_sample=f"echo 'v{version} (12)' >&2")
        commands = machine.dry_run(tool)
        for command in commands:
            assert problems([word for word in command if word != ">"], version) == [], version
        if tool == "rocprof_sys":
            rocpd = ["ROCPROFSYS_USE_ROCPD=ON" in command for command in commands]
            assert rocpd == 2 * [number(version) >= (1, 2)]
        elif number(version) < (3, 1, 1):  # no data types for a roofline
            assert len(commands) == 2 and not any("--roof-only" in c for c in commands)
        else:  # those of a bf16 training, where this version draws the roofline
            draws = commands[2 if number(version) < (3, 6) else 3]
            assert draws[draws.index("--roofline-data-type") + 1] == "BF16"


ARCHITECTURES = ["gfx90a", "gfx942", "gfx950"]
# What of the four counters of the L2 cache that a pass holds the derived ones take.
OF_L2 = {"gfx90a": {"FETCH_SIZE": 2}, "gfx942": {"FETCH_SIZE": 3}, "gfx950": {}}
NOT_BEFORE = {"SQ_INSTS_VALU_MFMA_MOPS_F8": "gfx942", "SQ_INSTS_VALU_MFMA_MOPS_F6F4": "gfx950"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_counters_give_bytes_and_all_operations_in_passes_that_fit(
    architecture: str, machine: Machine
) -> None:
    machine.install(rocm_agent_enumerator=f"echo gfx000; echo {architecture}; echo {architecture}")
    older = ARCHITECTURES[: ARCHITECTURES.index(architecture)]
    counters = amd_counters.Counters()
    for command in machine.dry_run("rocprofv3", "--mode", "counters"):
        assert problems(command) == []
        group = command[command.index("--pmc") + 1 : command.index("--output-format")]
        of_l2 = {"WRITE_SIZE": 2} | OF_L2[architecture]
        assert sum(name.startswith("SQ_") for name in group) <= 8
        assert sum(of_l2.get(name, name.startswith("TCC_")) for name in group) <= 4
        for name in group:
            assert NOT_BEFORE.get(name, "gfx90a") in (*older, architecture)
            counters.add("kernel", name, 1)
    kernel = Kernel("kernel", "GEMM", calls=1, total_ns=1.0)
    counters.fill([kernel])
    assert kernel.bytes and kernel.flops
    assert counters.warnings() == []  # of operations that are left out


def test_ncu_counts_all_operations_under_the_names_of_the_chip(machine: Machine) -> None:
    wanted = ("bf16_dst_fp32", "fp16_dst_fp16", "fp16_dst_fp32")
    listed = (*wanted, "bf16_dst_fp32_sparsity_off", "fp64", "fp8", "int8")
    lines = "".join(f"echo 'sm__ops_path_tensor_src_{name}  Counter  # of ops';" for name in listed)
    machine.install(ncu=f"echo 'Device NVIDIA A100'; {lines}")
    command, _ = machine.dry_run("ncu")
    metrics = command[command.index("--metrics") + 1].split(",")
    tensor = [m for m in metrics if "tensor" in m]
    assert tensor == [f"sm__ops_path_tensor_src_{name}.sum" for name in wanted]
    # As ncu would print them, each metric 1, so that the parser says what it finds.
    raw = machine.root / "raw.csv"
    with raw.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["ID", "Kernel Name", *metrics])
        writer.writerow([""] * (2 + len(metrics)))
        writer.writerow(["0", "kernel", *("1" for _ in metrics)])
    (kernel,) = ncu.read(raw).kernels
    assert kernel.bytes == 2
    single, double, half = 1 + 1 + 2, 1 + 1 + 2, 2 + 2 + 4
    assert kernel.flops == single + double + half + len(tensor)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("dram__bytes_op_read dram__bytes_op_write", "dram__bytes_op"),
        ("dram__bytes_read dram__bytes_write dram__bytes_op_read", "dram__bytes"),
    ],
)
def test_ncu_gets_the_chip_s_names_for_bytes(listed: str, expected: str, machine: Machine) -> None:
    machine.install(ncu="".join(f"echo '{name}  Counter  byte';" for name in listed.split()))
    command, _ = machine.dry_run("ncu")
    metrics = command[command.index("--metrics") + 1].split(",")
    moved = [metric for metric in metrics if metric.startswith("dram__bytes")]
    assert moved == [f"{expected}_read.sum", f"{expected}_write.sum"]
    assert not [metric for metric in metrics if "tensor" in metric]


# --- Running --------------------------------------------------------------------------------------


def test_commands_run_as_printed_and_leave_the_table(machine: Machine) -> None:
    machine.install(nsys=NSYS_TOOL, **NVIDIA_GPU)
    expected = machine.dry_run("nsys", "--steps", "2", "--", "--text-file", "/a b/it's $HOME")
    done = machine.run("nsys", "--steps", "2", "--", "--text-file", "/a b/it's $HOME")
    assert done.returncode == 0, done.stderr
    assert machine.recorded("nsys") == [word for command in expected for word in command[1:]]
    told, *commands, status = (machine.out / "command.txt").read_text().splitlines()
    assert "run_nsys.sh of v1" in told
    assert profiler_commands(commands) == expected
    assert status == "# exit status 0"
    assert machine.recorded("my_python")[:4] == [
        *("-m", "workshop.profilers", "show"),
        str(machine.out),
    ]
    names = {path.name for path in machine.out.iterdir()}
    assert names == {
        *("command.txt", "output.txt", "nsys.nsys-rep", "nsys_sums.csv", "kernels.json")
    }
    assert f"{machine.out}/nsys.nsys-rep: open it in nsys-ui" in done.stdout


def test_own_outputs_are_replaced_and_others_refused(machine: Machine) -> None:
    machine.install(nsys=NSYS_TOOL, **NVIDIA_GPU)
    machine.out.mkdir()
    (machine.out / "thesis.txt").write_text("years")
    for command in ("", "sbatch my_job.sh\n"):
        if command:
            (machine.out / "command.txt").write_text(command)
        done = machine.run("nsys")
        assert done.returncode == 2
        assert "not written by this script" in done.stderr
        assert (machine.out / "thesis.txt").read_text() == "years"
    (machine.out / "command.txt").write_text("# run_nsys.sh of an earlier run\n")
    assert machine.run("nsys").returncode == 0
    assert not (machine.out / "thesis.txt").exists()
    assert machine.run("nsys", "--output-dir", machine.out / "nsys.nsys-rep").returncode == 2


@pytest.mark.parametrize("tool", TOOLS)
def test_what_the_machine_lacks_is_skipped_and_earlier_outputs_stay(
    tool: str, machine: Machine
) -> None:
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has an AMD GPU")
    machine.out.mkdir()
    (machine.out / "command.txt").write_text("# run_nsys.sh of an earlier run\n")
    without_gpu = machine.run(tool)
    machine.install(**(AMD_GPU if tool.startswith("rocprof") else NVIDIA_GPU))
    no_triton = 'case "$2" in *triton*) exit 1 ;; *is_available*) exit ${SEES_GPU:-0} ;; esac'
    machine.install(my_python=no_triton)
    without_tool = machine.run(tool)
    without_build = machine.run(tool, SEES_GPU="1")
    for done, why in (
        (without_gpu, "GPU here"),
        (without_tool, ""),
        (without_build, "PyTorch sees no GPU here"),
    ):
        assert done.returncode == 77
        assert re.fullmatch(r"skipped: .+\n", done.stderr)
        assert why in done.stderr
    assert re.search(r"is not installed|has no module triton", without_tool.stderr)
    assert [path.name for path in machine.out.iterdir()] == ["command.txt"]


NO_RIGHT = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"


@pytest.mark.parametrize(
    ("tool", "words", "programs", "status", "message"),
    [
        ("nsys", "", {"nsys": "echo 'error: it needs Triton' >&2; exit 77"}, 77, "it needs"),
        ("nsys", "", {"nsys": "echo oh; exit 3"}, 1, "with exit status 3; .*output.txt"),
        ("ncu", "", {"ncu": f'case "$*" in *--export*) echo "{NO_RIGHT}" ;; esac'}, 77, "NVreg_R"),
        ("rocprof_sys", "", {"rocprof_sys_sample": "", "rocprof_sys_run": ""}, 1, "wrote no trace"),
        ("rocprofv3", "--mode counters",
         {"rocprofv3": "", "rocm_agent_enumerator": "echo gfx1100"}, 77, "gfx1100"),
        ("rocprof_compute", "--mode roofline", {"rocprof_compute": "echo v 3.0.0"}, 77, "6.4.2"),
        ("proton", "HIP_VISIBLE_DEVICES", AMD_GPU, 77, "ROCR_VISIBLE_DEVICES"),
        ("proton", "ROCR_VISIBLE_DEVICES", AMD_GPU, 0, ""),
        ("proton", "CUDA_VISIBLE_DEVICES", NVIDIA_GPU, 0, ""),
    ],
)  # fmt: skip
def test_how_a_tool_ends(
    tool: str, words: str, programs: dict[str, str], status: int, message: str, machine: Machine
) -> None:
    gpu = AMD_GPU if tool.startswith("rocprof") else {} if tool == "proton" else NVIDIA_GPU
    machine.install(**gpu | programs)
    environment = {words: "1"} if words.isupper() else {}
    done = machine.run(tool, *([] if environment else words.split()), **environment)
    assert done.returncode == status, done.stderr
    assert re.search(message, done.stderr) and len(done.stderr.splitlines()) == (status > 0)
    if status == 1:
        assert (machine.out / "command.txt").read_text().endswith("# exit status 1\n")
        assert not (machine.out / "kernels.json").exists()


def test_one_group_of_counters_may_fail(machine: Machine) -> None:
    body = RECORDER + 'case "$*" in *WRITE_SIZE*) exit 1 ;; *-trace*) echo >"$TRACE" ;; esac'
    machine.install(rocprofv3=body, **AMD_GPU)
    done = machine.run("rocprofv3", TRACE=str(machine.out / "run.db"))
    assert done.returncode == 1
    assert "failed: counters, written" in done.stderr
    assert "run.db: for ui.perfetto.dev" in done.stdout
    assert "SQ_WAVES" in machine.recorded("rocprofv3")  # the last group ran
    assert (machine.out / "kernels.json").exists()


def test_rocprof_compute_analyzes_what_it_has_profiled(machine: Machine) -> None:
    body = RECORDER + (
        'case $1 in profile) mkdir -p "workloads/$3/MI300X" ;; analyze) echo "report of $3";; esac'
    )
    machine.install(rocprof_compute=body, **AMD_GPU)
    done = machine.run("rocprof_compute")
    assert done.returncode == 0, done.stderr
    for mode in ("counters", "roofline"):
        assert (machine.out / f"{mode}.txt").read_text() == f"report of workloads/{mode}/MI300X\n"
    # Without the packages of the analysis the profile is worth something all the same.
    machine.install(rocprof_compute=body.replace("analyze) ", "analyze) exit 1;"))
    done = machine.run("rocprof_compute")
    assert done.returncode == 1
    assert "counters.txt, roofline.txt" in done.stderr
    assert {"kernels.json", "workloads"} < {path.name for path in machine.out.iterdir()}
    assert not list(machine.out.glob("*.txt.part"))


@pytest.mark.parametrize(
    ("tool", "body"),
    [
        ("nsys", f"{RECORDER}exec sleep 9999"),
        ("ncu", f'case "$*" in *--import*) {RECORDER} echo half; exec sleep 9999 ;; esac'),
    ],
)
def test_interrupted_script_says_so_and_leaves_nothing_half_written(
    tool: str, body: str, machine: Machine
) -> None:
    machine.install(**{tool: body}, **NVIDIA_GPU)
    process = subprocess.Popen(
        machine.command(tool, "--output-dir", machine.out),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=machine.environment(),
        start_new_session=True,
    )
    wait_for(lambda: bool(machine.recorded(tool)))
    assert lock_of(machine.out).exists()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    assert told == f"interrupted: {machine.out} is not complete\n"
    assert (machine.out / "command.txt").read_text().endswith("# exit status 130\n")
    assert {path.name for path in machine.out.iterdir()} <= {"command.txt", "output.txt"}
    assert not lock_of(machine.out).exists()


def lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@pytest.mark.parametrize("tool", ["nsys", "all_profilers"])
def test_two_runs_do_not_fill_one_folder(tool: str, machine: Machine) -> None:
    machine.install(nsys=NSYS_TOOL, **NVIDIA_GPU)
    folder = machine.out / "v1" if tool == "all_profilers" else machine.out
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text("# run_nsys.sh of another run\n")
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = machine.run(tool)
        assert done.returncode == 2
        assert f"another run is filling {folder}: wait" in done.stderr
        assert (folder / "command.txt").read_text() == "# run_nsys.sh of another run\n"
    # The file of a run that was killed locks nothing.
    assert lock_of(folder).exists() and machine.run(tool).returncode == 0
    assert tool == "all_profilers" or not lock_of(folder).exists()  # run_all deletes that one


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- Running all ----------------------------------------------------------------------------------

HOSTILE = "void <script>alert(1)</script>\\u001b[31m"
STAND_INS = {
    "run_pytorch_profiler.py": f"""
import json, sys
from pathlib import Path
if "--dry-run" in sys.argv:
    sys.exit()
folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir(parents=True)
(folder / "command.txt").write_text("# run_pytorch_profiler.py")
(folder / "trace #1.pt.trace.json").write_text("[]")
kernel = dict(name="{HOSTILE}", category="GEMM", calls=2, total_ns=3e6, share=0.5)
(folder / "kernels.json").write_text(json.dumps(dict(kernels=[kernel])))
print(*sys.argv[1:])
""",
    "run_rocprofv3.sh": "echo noise; echo 'skipped: no AMD GPU here' >&2; exit 77",
    "run_ncu.sh": "echo 'error: <b>out of memory</b>' >&2; echo; echo later noise; exit 1",
    "run_nsys.sh": 'mkdir -p "$2"; echo run >"$2/command.txt"; echo x >"$2/nsys.nsys-rep"',
}


def install_stand_ins(machine: Machine, scripts: dict[str, str]) -> list[str]:
    for name, body in scripts.items():
        (machine.folder / name).write_text(body)
    return ["--folder", str(machine.folder), "--output-dir", str(machine.out), *scripts]


def test_all_run_past_a_failure_and_the_summary_tells(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = install_stand_ins(machine, STAND_INS)
    (machine.out / "ncu").mkdir(parents=True)
    for name in ("command.txt", "of last week.csv"):
        (machine.out / "ncu" / name).write_text("# run_ncu.sh")
    lock = machine.root / "lock"
    lock.touch()
    words += ["--steps", "2", "--lock", str(lock), "--", "--config", "tiny"]
    assert run_all.main(words) == 1
    assert not lock.exists()
    out, err = capsys.readouterr()
    assert err.splitlines()[1:] == [
        "run_ncu.sh: FAILED: <b>out of memory</b> (0 s)",
        "run_nsys.sh: ok (0 s)",
    ]
    assert re.search(r"nsys .* ok ", out)
    assert "FAILED: <b>out of memory</b> (ncu.log)" in out
    assert "skipped, no AMD GPU here: rocprofv3\n" in out
    written = json.loads((machine.out / "summary.json").read_text())
    statuses = [(tool["tool"], tool["status"], tool["exit_status"]) for tool in written["tools"]]
    assert statuses == [
        ("pytorch_profiler", "ok", 0),
        ("rocprofv3", "skipped", 77),
        ("ncu", "failed", 1),
        ("nsys", "ok", 0),
    ]
    assert "--steps 2 -- --config tiny" in (machine.out / "pytorch_profiler.log").read_text()
    assert "of last week" not in (machine.out / "index.html").read_text()
    shutil.rmtree(machine.out / "ncu")
    check_page(machine.out)


def check_page(folder: Path) -> None:
    """The page links every output, loads nothing from elsewhere, and shows names as text."""
    page = (folder / "index.html").read_text()
    assert not re.search(r"<script|<b>|<link|src=|\x1b", page)
    assert "&lt;script&gt;alert(1)" in page
    targets = set(re.findall(r'href="([^"]*)"', page))
    elsewhere = {target for target in targets if target.startswith("https:")}
    assert elsewhere <= {"https://ui.perfetto.dev", "https://pytorch.org/memory_viz"}
    anchors = {target for target in targets if target.startswith("#")}
    assert {anchor[1:] for anchor in anchors} <= set(re.findall(r' id="([^"]*)"', page))
    files = {urllib.parse.unquote(target) for target in targets - elsewhere - anchors}
    assert {str(p.relative_to(folder)) for p in folder.glob("*/**/*") if p.is_file()} <= files
    assert all((folder / name).is_file() for name in files)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            "import argparse; argparse.ArgumentParser('tiny_llama_v1.py').parse_args()",
            2,
            "error: tiny_llama_v1.py: unrecognized arguments: --output-dir",
        ),
        ("import sys; sys.exit(print('error: no Triton', file=sys.stderr) or 77)", 77, "no Triton"),
        ("import no_such_module", 2, "run_pytorch_profiler.py can't be started (ModuleNotFound"),
    ],
)
def test_flags_that_the_model_does_not_take_are_one_error(
    body: str, status: int, message: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = {"run_ncu.sh": "exit 0", "run_pytorch_profiler.py": body}
    assert run_all.main(install_stand_ins(machine, scripts)) == status
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1
    assert not machine.out.exists()  # nothing was run


def test_interrupt_ends_the_profiler_and_shows_what_was_completed(machine: Machine) -> None:
    grandchild = machine.root / "grandchild"
    # Neither the script nor the program below it heeds Ctrl-C's signal when asked politely.
    stubborn = f"trap '' INT; sleep 9999 & echo $! >'{grandchild}'; wait"
    words = install_stand_ins(machine, {"run_nsys.sh": "exit 0", "run_ncu.sh": stubborn})
    code = "from workshop.profilers import run_all as r; r.SECONDS_TO_STOP = 1; exit(r.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "run_proton.sh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    wait_for(lambda: grandchild.exists() and bool(grandchild.read_text().strip()))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    assert "interrupted" in err and re.search(r"nsys .* ok", out)
    tools = json.loads((machine.out / "summary.json").read_text())["tools"]
    assert [tool["status"] for tool in tools] == ["ok", "interrupted", "not run"]
    assert not is_running(int(grandchild.read_text()))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- The summary ----------------------------------------------------------------------------------


def finished(tool: str, status: str = "ok", **more: Any) -> summary.Outcome:
    script, question = f"run_{tool}.sh", run_all.QUESTIONS[tool]
    return summary.Outcome(tool, script, question, tool, f"{tool}.log", status, **more)


def test_pages_say_what_was_profiled_and_what_bounds_it(tmp_path: Path) -> None:
    version = versions.VERSIONS["v1"]
    folder = tmp_path / "v1"
    reference = ROOT / "results" / "reference" / "cpu_amd_epyc" / "profiles" / "v1"
    shutil.copytree(reference / "pytorch_profiler", folder / "pytorch_profiler")
    (folder / "deepspeed_flops").mkdir()
    flops = {"tflops": 0.5, "mfu": 0.25, "peak_tflops": 2.0, "peak_source": "<measured>"}
    (folder / "deepspeed_flops" / "flops.json").write_text(json.dumps(flops))
    outcomes = [
        finished("pytorch_profiler", exit_status=0, filled=True),
        finished("deepspeed_flops", exit_status=0, filled=True),
        finished("ncu", "failed", reason="<b>lost</b>", exit_status=1),
    ]
    (folder / "pytorch_profiler" / "command.txt").write_text("# run_x\n# exit status 3\n")
    content = summary.sum_up(version, outcomes, ["--config", "<small>"], folder)
    written = summary.write(content, folder)
    assert written == [folder / "summary.json", folder / "index.html", tmp_path / "index.html"]
    page, overview = (path.read_text() for path in written[1:])
    for text in (page, overview):
        assert "AMD EPYC, PyTorch" in text and "8 sequences of 128 tokens" in text
        assert "GEMM-bound: matrix products take" in text
    assert "0.5 TFLOP/s: 25.0% (MFU) of 2 TFLOP/s (&lt;measured&gt;)" in page
    assert "its run did not succeed (exit status 3)" in page
    assert "&lt;small&gt;" in page and "&lt;b&gt;lost" in page
    assert '<a href="v1/index.html">v1: plain PyTorch</a>' in overview
    assert re.findall(r">(\d+ \w+)</span>", overview) == ["2 ok", "1 FAILED"]
    # A second version joins the first; a page of somebody else's is left alone.
    (tmp_path / "v4").mkdir()
    summary.write(content | {"version": "v4"}, tmp_path / "v4")
    assert (tmp_path / "index.html").read_text().count('index.html">') == 2
    (tmp_path / "index.html").write_text("my home page")
    assert summary.write(content, folder) == written[:2]
    assert (tmp_path / "index.html").read_text() == "my home page"
