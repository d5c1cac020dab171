"""The shell scripts that run the profilers, and run_all, which runs the scripts.

The tools are stand-ins, on a PATH with the system's own commands alone: no profiler is needed, and
what a script would run on another machine can be read off. Command lines are compared with tables
of the options that the real tools have.
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

from workshop.profilers import amd_counters, kernel_file, ncu, programs, run_all, summary
from workshop.profilers.table import Kernel, KernelTable

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ROOT / "workshop" / "profilers" / "runners"
FOLDERS = [program.path.parent for program in programs.PROGRAMS.values()]
APPLICATIONS = {
    "tiny_llama_v1.py": "--profile-steps",
    "micro_benchmarking_pytorch.py": "--profile-steps",
    "train.py": "--profile-one-step",
}
"""Each with its flag for a profile."""
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


def profiler_commands(lines: list[str]) -> list[list[str]]:
    """The lines that a script prints, without those that begin with a command of the system's."""
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


# --- Usage ----------------------------------------------------------------------------------------


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

TRACING = (
    "--kernel-trace --hip-trace --hip-runtime-trace --memory-copy-trace --marker-trace "
    "--runtime-trace --sys-trace"
)
# Its help in three versions of ROCm: no word of what each does not have.
ROCPROFV3_HELP = {
    "6.2": "--kernel-trace --hip-runtime-trace --output-format --stats",
    "6.3": "--kernel-trace --runtime-trace --pmc --output-format {csv,json,pftrace} --stats",
    "7.0": "--kernel-trace --runtime-trace --pmc --output-format {csv,json,pftrace,otf2,rocpd}",
}
ROCPROF_SYS = "--trace --profile --device --host --output=1 --preset=1@1.6-99"
# The options of each tool: how many values one takes (none, 1 or +), and the versions that have it.
KNOWN = {
    "rocprofv3": f"{TRACING} --stats --truncate-kernels --summary --output-format=+ "
    "--output-directory=1 --output-file=1 --pmc=+ --kernel-include-regex=1",
    "rocprof-sys-sample": ROCPROF_SYS,
    "rocprof-sys-run": ROCPROF_SYS,
    "rocprof-compute profile": "--name=1 --no-roof --roof-only --kernel=+ --block=+ --dispatch=+ "
    "--path=1@0-3.6.9 --subpath=1@0-3.6.9 --sort=1@0-3.5.9 --mem-level=+@0-3.5.9 "
    "--roofline-data-type=+@3.1.1-3.5.9 --set=1@3.3-99 --output-directory=1@3.5-99 "
    "--bench-only@3.7-99 --overwrite@3.8-99",
    "rocprof-compute analyze": "--path=+ --list-stats --kernel=+ --dispatch=+ --block=+ "
    "--output=1@0-3.2.9 --output-format=1@3.3-99 --output-name=1@3.3-99 "
    "--roofline-data-type=+@3.5-99",
    "ncu": "--profile-from-start=1 --target-processes=1 --clock-control=1 --cache-control=1 "
    "--metrics=1 --export=1 --force-overwrite --import=1 --csv --page=1 --print-units=1 --set=1 "
    "--section=1 --nvtx --nvtx-include=1 --graph-profiling=1",
    "nsys profile": "--trace=1 --sample=1 --cpuctxsw=1 --capture-range=1 --capture-range-end=1 "
    "--cuda-graph-trace=1 --output=1 --force-overwrite=1 --stats=1 --kill=1",
    "nsys stats": "--report=1 --format=1 --output=1 --force-export=1 --force-overwrite=1",
    "proton": "--name=1 --context=1 --data=1 --hook=1 --backend=1",
}
# Flags that a tool could do without, and our tables could not, by the command.
NEEDED = {
    "rocprofv3 --stats": "--kernel-trace --hip-runtime-trace --memory-copy-trace --marker-trace",
    "rocprof-sys-sample": "ROCPROFSYS_TIME_OUTPUT=OFF",
    "rocprof-sys-run": "ROCPROFSYS_TIME_OUTPUT=OFF",
    "ncu": "--profile-from-start=off TORCHINDUCTOR_COMPILE_THREADS=1",
    "nsys profile": "--capture-range=cudaProfilerApi --capture-range-end=stop "
    "--cuda-graph-trace=node",
    "nsys stats": "--report=cuda_gpu_kern_sum --report=cuda_gpu_mem_time_sum "
    "--report=cuda_gpu_trace --report=cuda_api_sum --report=nvtx_pushpop_sum "
    "--report=nvtx_kern_sum --format=csv",
}
NEWEST = {"rocprof-sys-sample": "1.10", "rocprof-sys-run": "1.10", "rocprof-compute": "3.10"}

Options = dict[str, list[str]]
"""The values of each option that a command has."""


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def problems(command: list[str], version: str = "") -> list[str]:
    """Flags that the real tool would not accept or would ignore, and those that we need of it."""
    words = command[1:] if command[0] == "env" else list(command)
    if ">" in words:
        words = words[: words.index(">")]
    settings = []
    while "=" in words[0]:
        settings.append(words.pop(0))
    name = program = Path(words.pop(0)).name
    if words[:2] == ["-m", "triton.profiler.proton"]:
        program, words = "proton", words[2:]
    elif program in ("rocprof-compute", "nsys"):
        program += f" {words.pop(0)}"
    if program not in KNOWN:
        return [f"{program} is no profiler"]
    found, given, application = _parse(words, KNOWN[program], version or NEWEST.get(name, "1"))
    if "--import" not in given:
        values = [f"{name}={value}" for name, values in given.items() for value in values]
        present = {*settings, *given, *values, *application}
        needed = NEEDED.get(f"{program} --stats" if "--stats" in given else program, "").split()
        found += [f"{word} is missing" for word in needed if word not in present]
    return [*found, *_rules(program, given, application)]


def _parse(words: list[str], known: str, version: str) -> tuple[list[str], Options, list[str]]:
    """(problems, options, the words from the application on)."""
    table = {
        option: (arity, versions_)
        for word in known.split()
        for head, _, versions_ in [word.partition("@")]
        for option, _, arity in [head.partition("=")]
    }
    found: list[str] = []
    given: Options = {}
    while words and words[0].startswith("-") and words[0] != "--":
        name, equals, value = words.pop(0).partition("=")
        if name not in table:
            found.append(f"unknown option {name}")
        arity, versions_ = table.get(name, ("", ""))
        since, until = map(number, (versions_ or "0-99").split("-"))
        if not since <= number(version) <= until:
            found.append(f"{name} is not an option of version {version}")
        values = given.setdefault(name, [])
        if equals:
            values.append(value)
            continue
        while words and not words[0].startswith("-") and (arity == "+" or len(values) < len(arity)):
            values.append(words.pop(0))
        if arity and not values:
            found.append(f"{name} has no value")
    return found, given, words


def _rules(program: str, given: Options, application: list[str]) -> Iterator[str]:
    if "analyze" in program or "stats" in program or "--import" in given:
        return
    dashes = program.startswith("rocprof")  # NVIDIA's tools refuse them
    if not application or (application[0] == "--") != dashes:
        yield "there must be an application" + (" after --" if dashes else ", and no -- before it")
        return
    formats = set(given.get("--output-format", []))
    stats, rocpd = "--stats" in given, "rocpd" in formats
    v3 = program == "rocprofv3"
    script = Path(application[1 + dashes]).name
    rules = {
        "Triton up to 3.6 runs no script that ends with sys.exit": program == "proton"
        and Path(application[0]).name != "proton_app.py",
        "the application is not the folder's": APPLICATIONS.get(script) not in application,
        "a graph's kernels are not measured": program == "ncu"
        and "--profile-steps" in application
        and "--no-cuda-graph" not in application,
        "no output format: its default depends on the version": v3 and not formats,
        f"{formats} is no output format": v3
        and formats - {"csv", "json", "pftrace", "otf2", "rocpd"},
        "--stats needs a tracing option": stats and not set(TRACING.split()) & given.keys(),
        "--stats does nothing without csv or json": stats and not {"csv", "json"} & formats,
        "launches of a step are missing from the database": rocpd
        and not {"--pmc", "--runtime-trace"} & given.keys(),
        "this preset takes no samples": "workload-trace" in given.get("--preset", []),
        "a workload needs a name": program == "rocprof-compute profile" and "--name" not in given,
    }
    yield from (problem for problem, is_so in rules.items() if is_so)


def test_every_command_is_one_that_the_tools_have(machine: Machine) -> None:
    commands = {tool: machine.dry_run(tool, "--", "--config", "tiny") for tool in TOOLS}
    assert [problem for found in commands.values() for c in found for problem in problems(c)] == []
    assert [len(commands[tool]) for tool in TOOLS] == [7, 2, 4, 2, 2, 1]


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
        assert not {"--truncate-kernels", "-T"} & set(command)  # which merge kernels
    done = machine.run("rocprofv3", "--mode", "timeline", TRACE=str(output))
    if rocm == "6.2":
        assert done.returncode == 77 and "ROCm 6.3" in done.stderr
        return
    assert done.returncode == 0 and f"{output}: " in done.stdout, done.stderr
    assert (machine.out / "kernels.json").exists() == (rocm == "7.0")  # a database has a table


@pytest.mark.parametrize(
    ("tool", "versions_of_it"),
    [
        ("rocprof_compute", "3.0.0 3.1.0 3.1.1 3.2.3 3.3.0 3.4.0 3.5.0 3.6.0 3.7.0 3.9.0 3.10.0"),
        ("rocprof_sys", "1.0.0 1.2.1 1.5.0 1.6.0 1.8.0 1.10.0"),
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
            assert problems(command, version) == [], version
        if tool == "rocprof_sys":
            rocpd = ["ROCPROFSYS_USE_ROCPD=ON" in command for command in commands]
            assert rocpd == 2 * [number(version) >= (1, 2)]
        elif number(version) < (3, 1, 1):  # no data types for a roofline
            assert len(commands) == 2 and not any("--roof-only" in c for c in commands)
        else:  # those of a bf16 training, where this version draws the roofline
            draws = commands[2 if number(version) < (3, 6) else 3]
            assert draws[draws.index("--roofline-data-type") + 1] == "BF16"


# As rocprof-compute's entry script up to 3.5: it asks the first Python on the PATH for packages,
# before it looks at its arguments.
WITH_PACKAGES = (
    RECORDER
    + """
case $(command -v python3) in
  *$REFUSED*)
    echo "[ERROR] The 'astunparse==1.6.2' package was not found in the current environment."
    exit 1 ;;
esac
[ "${PYTHONPATH-none}" = none ] || exit 3
echo "rocprofiler-compute version: 3.4.0 (r)"
folder=workloads/roofline/MI300X
case $1 in profile) mkdir -p $folder && echo rows >$folder/a.csv ;; esac
"""
)


def test_rocprof_compute_does_not_see_the_environment(machine: Machine) -> None:
    machine.install(rocprof_compute=WITH_PACKAGES, python3="exit 0", **AMD_GPU)
    venv = machine.root / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python3").symlink_to(machine.bin / "python3")
    active = {"PATH": f"{venv}:{machine.bin}", "PYTHONPATH": "/modules/torch"}
    done = machine.run("rocprof_compute", "--class", REFUSED=".venv/bin", **active)
    assert done.returncode == 0, done.stderr
    assert (machine.out / "roofline.txt").exists() and (machine.out / "kernels.json").exists()
    called = machine.recorded("rocprof-compute")
    program = called[called.index("--") + 1 :]
    assert program[:3] == ["env", "PYTHONPATH=/modules/torch", str(machine.bin / "my_python")]
    refused = machine.run("rocprof_compute", "--class", REFUSED="python3")
    assert refused.returncode == 77 and "astunparse==1.6.2" in refused.stderr
    assert "docs/amd.md" in refused.stderr


ANALYZE_REFUSES = """
case $1 in
  --version) echo "rocprofiler-compute version: 3.8.0 (r)" ;;
  profile) mkdir -p workloads/roofline/MI300X && echo rows >workloads/roofline/MI300X/a.csv ;;
  analyze) echo "[ERROR] The 'dash==3.4.0' package was not found in the environment."; exit 1 ;;
esac
"""


def test_without_the_packages_of_analyze_there_is_a_table(machine: Machine) -> None:
    machine.install(rocprof_compute=ANALYZE_REFUSES, **AMD_GPU)
    done = machine.run("rocprof_compute", "--class")
    assert done.returncode == 0, done.stderr
    assert "left out roofline.txt" in done.stdout and (machine.out / "kernels.json").exists()


@pytest.mark.parametrize(
    ("tool", "commands"),
    [
        ("rocprofv3", 1),
        ("rocprof_sys", 1),
        ("rocprof_compute", 2),
        ("nsys", 2),
        ("ncu", 2),
        ("proton", 1),
    ],
)
def test_the_form_for_a_class_is_one_step(tool: str, commands: int, machine: Machine) -> None:
    found = machine.dry_run(tool, "--class")
    assert len(found) == commands
    assert found[0][found[0].index("--profile-steps") + 1] == "1"
    assert ("--num-layers" in found[0]) == (tool == "ncu")


ARCHITECTURES = ["gfx90a", "gfx942", "gfx950"]
# Counters of the L2 cache, of the four that a pass holds, that the derived ones take.
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
    # As ncu would print them, each metric 1: the parser's sums show what it finds.
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


# --- Running --------------------------------------------------------------------------------------


def test_commands_run_as_printed_and_leave_the_table(machine: Machine) -> None:
    machine.install(nsys=NSYS_TOOL, **NVIDIA_GPU)
    expected = machine.dry_run("nsys", "--steps", "2", "--", "--text-file", "/a b/it's $HOME")
    done = machine.run("nsys", "--steps", "2", "--", "--text-file", "/a b/it's $HOME")
    assert done.returncode == 0, done.stderr
    assert machine.recorded("nsys") == [word for command in expected for word in command[1:]]
    mark, *commands, status = (machine.out / "command.txt").read_text().splitlines()
    assert "run_nsys.sh of v1" in mark
    assert profiler_commands(commands) == expected
    assert status == "# exit status 0"
    shown = ["-m", "workshop.profilers", "show", str(machine.out)]
    assert machine.recorded("my_python")[:4] == shown
    names = "command.txt output.txt nsys.nsys-rep nsys_sums.csv kernels.json"
    assert {path.name for path in machine.out.iterdir()} == set(names.split())
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
def test_a_missing_tool_or_gpu_is_skipped_and_earlier_outputs_stay(
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
        (without_tool, "is not installed|has no module triton"),
        (without_build, "PyTorch sees no GPU here"),
    ):
        assert done.returncode == 77
        assert re.fullmatch(rf"skipped: .*({why}).*\n", done.stderr)
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


def test_rocprof_compute_analyzes_what_it_has_profiled(machine: Machine) -> None:
    body = RECORDER + (
        'case $1 in profile) mkdir -p "workloads/$3/MI300X" ;; analyze) echo "report of $3";; esac'
    )
    machine.install(rocprof_compute=body, **AMD_GPU)
    done = machine.run("rocprof_compute")
    assert done.returncode == 0, done.stderr
    for mode in ("counters", "roofline"):
        assert (machine.out / f"{mode}.txt").read_text() == f"report of workloads/{mode}/MI300X\n"
    # Where the analysis fails the profile is worth something all the same.
    machine.install(rocprof_compute=body.replace("analyze) ", "analyze) echo no data; exit 1;"))
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
def test_interrupted_script_reports_it_and_leaves_nothing_half_written(
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
    _, error = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    assert error == f"interrupted: {machine.out} is not complete\n"
    assert (machine.out / "command.txt").read_text().endswith("# exit status 130\n")
    assert {path.name for path in machine.out.iterdir()} <= {"command.txt", "output.txt"}
    assert not lock_of(machine.out).exists()


def lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def test_two_runs_do_not_fill_one_folder(machine: Machine) -> None:
    machine.install(nsys=NSYS_TOOL, **NVIDIA_GPU)
    folder = machine.out
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text("# run_nsys.sh of another run\n")
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = machine.run("nsys")
        assert done.returncode == 2
        assert f"another run is filling {folder}: wait" in done.stderr
        assert (folder / "command.txt").read_text() == "# run_nsys.sh of another run\n"
    # The file of a run that was killed locks nothing.
    assert lock_of(folder).exists() and machine.run("nsys").returncode == 0
    assert not lock_of(folder).exists()


def wait_for(condition: Callable[[], bool], limit_s: float = HANGS_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- Running all ----------------------------------------------------------------------------------

STAND_INS = {
    "run_pytorch_profiler.py": """
import shutil, sys
from pathlib import Path
if "--dry-run" in sys.argv:
    sys.exit()
folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir(parents=True)
(folder / "command.txt").write_text("# run_pytorch_profiler.py")
(folder / "trace #1.pt.trace.json").write_text("[]")
shutil.copy("hostile/kernels.json", folder)
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


def test_all_run_past_a_failure_and_the_summary_shows_it(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(machine.root)
    hostile = Kernel("void <script>alert(1)</script>\x1b[31m", "GEMM", 2, 3e6)
    kernel_file.write(KernelTable(Path("trace"), "ncu", [hostile]), machine.root / "hostile")
    words = install_stand_ins(machine, STAND_INS)
    (machine.out / "ncu").mkdir(parents=True)
    for name in ("command.txt", "of last week.csv"):
        (machine.out / "ncu" / name).write_text("# run_ncu.sh")
    words += ["--steps", "2", "--", "--config", "tiny"]
    with lock_of(machine.out).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_all.main(words) == 2
        assert f"another run is filling {machine.out}: wait" in capsys.readouterr().err
    assert run_all.main(words) == 1 and not lock_of(machine.out).exists()
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if not line.endswith(" ...")][1:] == [
        "run_ncu.sh: FAILED: <b>out of memory</b> (0 s)",
        "run_nsys.sh: ok (0 s)",
    ]
    assert re.search(r"nsys .* ok ", out)
    assert "FAILED: <b>out of memory</b>" in out
    assert "skipped, no AMD GPU here: rocprofv3\n" in out
    written = json.loads((machine.out / "summary.json").read_text())
    statuses = [f"{t['tool']} {t['status']} {t['exit_status']}" for t in written["tools"]]
    assert statuses == [
        "pytorch_profiler ok 0",
        "rocprofv3 skipped 77",
        "ncu failed 1",
        "nsys ok 0",
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
        ("import argparse; argparse.ArgumentParser('tiny_llama_v1.py').parse_args()", 2,
         "error: tiny_llama_v1.py: unrecognized arguments: --output-dir"),
        ("import sys; sys.exit(print('error: no Triton', file=sys.stderr) or 77)", 77, "no Triton"),
        ("import no_such_module", 2, "run_pytorch_profiler.py can't be started (ModuleNotFound"),
    ],
)  # fmt: skip
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
    except (FileNotFoundError, ProcessLookupError):  # it may end while the file is open
        return False


# --- The summary ----------------------------------------------------------------------------------


def finished(tool: str, status: str = "ok", **more: Any) -> summary.Outcome:
    script, question = f"run_{tool}.sh", run_all.QUESTIONS[tool]
    return summary.Outcome(tool, script, question, tool, f"{tool}.log", status, **more)


def test_pages_say_what_was_profiled_and_what_bounds_it(tmp_path: Path) -> None:
    program = programs.PROGRAMS["v1"]
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
    content = summary.sum_up(program, outcomes, ["--config", "<small>"], folder)
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
    assert "<td>2 ok, 1 FAILED</td>" in overview
    # A second version joins the first; a page that is not ours stays.
    (tmp_path / "v4").mkdir()
    summary.write(content | {"version": "v4"}, tmp_path / "v4")
    assert (tmp_path / "index.html").read_text().count('index.html">') == 2
    (tmp_path / "index.html").write_text("my home page")
    assert summary.write(content, folder) == written[:2]
    assert (tmp_path / "index.html").read_text() == "my home page"
