"""The set-up script, the validation scripts, the Makefile and .ci/run.

No test needs a network: Pythons, PyTorch builds and tools are stand-ins that the tests make.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from conftest import HANGS_S

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "setup"
SCRIPT = SETUP / "environment_setup.sh"
SCRIPTS = SETUP / "validation_scripts"
# Nothing listens on port 9: each index is unreachable, at once, whatever the network.
NO_NETWORK = {"https_proxy": "http://127.0.0.1:9", "no_proxy": "", "PIP_NO_INDEX": "1"}

Run = subprocess.CompletedProcess[str]


# Set by the user, or by the `make test` that runs the tests, for the programs under test.
OF_THIS_SESSION = re.compile(r"(PIP_|PYTHON|ROCM_|MAKE|MFLAGS$|(ARGS|BUILD|VENV)$)")


def offline(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a command: no network, and nothing of this session's settings."""
    kept = {name: value for name, value in os.environ.items() if not OF_THIS_SESSION.match(name)}
    return {**kept, **NO_NETWORK, **(environment or {})}


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> Run:
    """Runs a command offline, with stderr in .stderr."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=offline(environment),
        timeout=HANGS_S,
    )


def set_up(*arguments: str | Path, environment: dict[str, str] | None = None) -> Run:
    return run(["bash", SCRIPT, *arguments], environment)


def make_torch(folder: Path, version: str, *, hip: str = "") -> Path:
    """A package that claims to be a PyTorch build."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    text = f"__version__ = {version!r}\ncuda = None\nhip = {hip or None!r}\n"
    (folder / "torch" / "version.py").write_text(text)
    make_distribution(folder, "torch", version)
    return folder


def make_distribution(folder: Path, name: str, version: str, module: str = "") -> None:
    """A package as pip has installed it; with a module, a file and the record of it, too."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (info / "RECORD").write_text(f"{module},,\n")
        (folder / module).touch()


def make_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """An archive that pip can install: a module of the package's name."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        archive.writestr(f"{module}/version.py", f"__version__ = {version!r}")  # PyTorch's has it
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{module}/__init__.py,,\n{info}/METADATA,,\n")


def make_program(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


def make_python(folder: Path, *options: str) -> Path:
    """A Python that has no packages: whatever torch the machine has is out of its sight."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, folder], check=True)
    return folder / "bin" / "python"


def packages_of(python: Path) -> Path:
    return next((python.parents[1] / "lib").glob("python3*")) / "site-packages"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    return make_python(tmp_path_factory.mktemp("bare") / "venv")


# --- Command line, and what is refused ------------------------------------------------------------


STAMP = "workshop-setup.json"
HERE = "Python {}.{} in {}".format(*sys.version_info[:2], sys.prefix)


def stamp(root: object, **changes: object) -> str:
    """The stamp of a finished environment, which another checkout or this one has made."""
    torch = {"file": "/site/torch/__init__.py", "version": "2.9.0", "build": "rocm"}
    facts = {"root": str(root), "complete": True, "base": sys.executable, "python": HERE}
    facts |= {"asked": "auto", "build": "rocm", "existing": True, "index": [], "torch": torch}
    return json.dumps(facts | {"extras": [], "follows": []} | changes)


# Each leaves nothing changed: arguments, files in the folder, the line's words.
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "no such Python": ("--python /no/such/python", {}, "(no program /no/such/python)"),
    "an old Python": ("--python {0}/old", {}, "{0}/old: Python 3.9 is too old"),
    "a folder of the user's": ("", {"venv/a": ""}, "was not made by this script"),
    "another checkout's": ("", {f"venv/{STAMP}": stamp("/")}, "another checkout, /: choose"),
    "a checkout that is gone": (
        *("", {f"venv/{STAMP}": stamp("/no/such/checkout")}),
        "was moved or deleted, /no/such/checkout: choose another place with --venv",
    ),
    "another build": (
        *("--build cpu", {f"venv/{STAMP}": stamp(ROOT)}),
        "has PyTorch's rocm build, not the cpu build: choose another place with --venv",
    ),
    "another Python": (
        *(f"--python {sys.executable}", {f"venv/{STAMP}": stamp(ROOT, python="Python 3.9")}),
        f"was built on Python 3.9, not on {HERE}: choose another place with --venv",
    ),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case, tmp_path) -> None:
    arguments, files, message = REFUSED[case]
    tool = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    make_program(tmp_path, "old", f"exec {shlex.quote(sys.executable)} -c '{tool}' \"$2\"")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    words = arguments.format(tmp_path).split()
    result = set_up("--venv", tmp_path / "venv", *words)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
    assert message.format(tmp_path) in result.stderr
    assert contents(tmp_path) == before


def test_a_shim_of_a_python_that_is_not_active_is_passed_over(bare_python, tmp_path) -> None:
    """pyenv has a shim for each Python, active or not: what else is on PATH by its name is looked
    at, and none is called too old that does not run."""
    says = 'echo "pyenv: ${0##*/}: command not found" >&2; exit 127'
    for name in ("python3", "python3.12"):
        make_program(tmp_path / "shims", name, says)
    for tool in ("bash", "dirname"):
        (tmp_path / "shims" / tool).symlink_to(str(shutil.which(tool)))
    arguments = ["--venv", tmp_path / "v", "--build", "cuda", "--dry-run"]
    refused = set_up(*arguments, environment={"PATH": f"{tmp_path}/shims"})
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "python3.12: pyenv: python3.12: command not found" in refused.stderr

    make_program(tmp_path / "other", "python3.12", f'exec "{bare_python}" "$@"')
    found = set_up(*arguments, environment={"PATH": f"{tmp_path}/shims:{tmp_path}/other"})
    assert f" in {bare_python.parents[1]}; PyTorch 2.13.0, cuda build" in found.stdout, found.stderr
    assert not (tmp_path / "v").exists()


# --- Which PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SETUP))
    return importlib.import_module("environment_setup")


@pytest.mark.parametrize(
    ("version", "build", "asked", "chosen", "reason"),
    [
        ("2.9.0+gpu", "rocm", "auto", (True, "rocm"), ""),
        ("2.10.1", "cuda", "cuda", (True, "cuda"), ""),
        ("2.5.1+rocm6.2", "rocm", "auto", (False, "here"), "--build auto asks for 2.6 or newer"),
        ("2.9.0", "rocm", "cpu", (False, "cpu"), "--build cpu asks for"),
        ("2.13.0+cpu", "cpu", "auto", (False, "here"), ""),
        ("0.0", "cpu", "rocm", (False, "rocm"), ""),  # none is there
    ],
)
def test_a_build_that_is_there_is_used_if_it_fits(
    *, version, build, asked, chosen, reason,
    program, monkeypatch, capsys
) -> None:  # fmt: skip
    monkeypatch.setattr(program, "detect_hardware", lambda: "here")
    torch = {"file": "/torch/__init__.py", "version": version, "build": build}
    assert program.choose_build(torch, asked) == chosen
    said = capsys.readouterr().out
    assert reason in said and bool(said) == bool(reason)


@pytest.mark.parametrize(
    ("kfd", "rocminfo", "nvidia_smi", "expected"),
    [
        (True, True, "exit 9", "rocm"),
        (True, False, "exit 9", "cpu"),
        (False, True, "echo 'GPU 0: Test GPU (UUID: 1)'", "cuda"),
        (False, False, "echo 'No devices were found'", "cpu"),
        (False, False, "echo 'GPU 0: lost' && exit 9", "cpu"),
    ],
)
def test_hardware_decides(
    *, kfd, rocminfo, nvidia_smi, expected,
    program, monkeypatch, tmp_path
) -> None:  # fmt: skip
    make_program(tmp_path, "nvidia-smi", nvidia_smi)
    if rocminfo:
        make_program(tmp_path, "rocminfo", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(program, "KFD", tmp_path if kfd else tmp_path / "none")
    assert program.detect_hardware() == expected


# --- Real environments ----------------------------------------------------------------------------


class Checkout:
    """A copy of the set-up whose requirements no machine happens to have, in a folder with wheels
    for them and the environment."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.wheels, self.venv = root, folder / "wheels", folder / "venv"
        self.python, self.stamp = self.venv / "bin" / "python", self.venv / STAMP
        shutil.copytree(SETUP, root / "setup")
        (root / "workshop").mkdir()
        (root / "workshop" / "__init__.py").touch()
        for name, text in {
            "": 'absent-one==1.0; python_version >= "3.2"\nof-old==1.0; python_version < "3.2"\n',
            "-test": "absent-two==2.0\ntorchao==1.0\n",
            "-labs": "a-lab==1.0\n",
            "-notebook": "a-notebook==1.0\n",
        }.items():
            (root / "setup" / f"requirements{name}.txt").write_text(text)

    def set_up(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Run:
        script = self.root / "setup" / "environment_setup.sh"
        wheels = {"PIP_FIND_LINKS": self.wheels.as_uri()}
        command = ["bash", script, "--venv", self.venv, *arguments]
        return run(command, {**wheels, **(environment or {})})

    def is_ready(self, *arguments: str | Path) -> bool:
        """Whether the set-up finds nothing to do."""
        result = self.set_up(*arguments)
        return "is ready" in result.stdout and result.stdout.count("\n") == 1

    def runs(self, code: str) -> Run:
        """Python code in the environment, in a locale that has ASCII alone."""
        return run(["env", "-C", "/", self.python, "-c", code], {"LC_ALL": "C"})


@dataclass
class Story:
    """One folder for the environments of two checkouts, and what each set-up in turn has said."""

    first: Checkout
    second: Checkout
    below: Path
    """The second one's Python: a venv's (as on many GPU machines), with a site's own PyTorch."""
    runs: dict[str, Run]

    @property
    def packages(self) -> Path:
        return packages_of(self.below)


@pytest.fixture(scope="module")
def story(bare_python, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("caf\u00e9 1")
    for requirement in (
        *("torch==2.13.0+cpu", "torch==2.14.0+cpu", "torchvision==0.28.0", "torchvision==0.29.0"),
        *("torchvision==0.21.0", "triton==3.7.1", "absent-one==1.0", "absent-three==3.0"),
        *("a-lab==1.0", "a-notebook==1.0", "torchao==1.0"),
    ):
        make_wheel(folder / "wheels", *requirement.split("=="))
    make_wheel(folder / "wheels", "absent-two", "2.0", requires="absent-three")
    first, second = (Checkout(folder / name, folder) for name in ("first", "second"))
    below = make_python(folder / "below")
    packages = make_torch(packages_of(below), "2.6.0+rocm7.2", hip="7.2")
    make_distribution(packages, "pytorch-triton-rocm", "3.5.0")
    make_distribution(packages, "absent-one", "0.9", "absent_one.py")

    runs = {"made": first.set_up("--python", bare_python, "--build", "cpu", "--with-tests")}
    program = first.root / "setup" / "environment_setup.py"
    program.write_text(program.read_text().replace("2.13.0", "2.14.0"))
    runs["newer"] = first.set_up()
    names = ("torch", "torchvision", "triton", "absent_two", "a_lab", "torchao")
    code = f"import {', '.join(names)}, workshop; from importlib.metadata import version"
    runs["imports"] = first.runs(f"{code}; print(*map(version, {names}))")
    before = contents(first.venv)
    runs["refused"] = second.set_up("--python", below)
    runs["planned"] = second.set_up("--python", below, "--recreate", "--dry-run")
    assert contents(first.venv) == before
    no_wheels = {"PIP_FIND_LINKS": ""}
    recreate = ("--python", below, "--recreate", "--with-tests")
    runs["failed"] = second.set_up(*recreate, environment=no_wheels)
    runs["refused in return"] = first.set_up()
    no_wheels["PIP_USER"] = "1"  # as some sites set it
    runs["finished"] = second.set_up("--python", below, environment=no_wheels)
    return Story(first, second, below, runs)


def test_a_new_environment_has_pytorch_and_what_belongs_to_it(story) -> None:
    """And gets what belongs to the next PyTorch, if its checkout asks for that."""
    made, imports, newer = (story.runs[name] for name in ("made", "imports", "newer"))
    assert made.returncode == 0, made.stderr
    assert "Creating" in made.stdout and "PyTorch 2.13.0+cpu (cpu build)" in made.stdout
    assert newer.returncode == 0, newer.stderr
    assert "Adding to" in newer.stdout and "PyTorch 2.14.0+cpu (cpu build)" in newer.stdout
    assert imports.stdout == "2.14.0+cpu 0.29.0 3.7.1 2.0 1.0 1.0\n", imports.stderr


def test_another_checkouts_environment_is_deleted_only_if_asked_to(story) -> None:
    for name, owner in (("refused", story.first), ("refused in return", story.second)):
        refused = story.runs[name]
        assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr
        assert f"{owner.venv} belongs to another checkout, {owner.root}: " in refused.stderr
        assert "--venv" in refused.stderr and "--recreate" in refused.stderr
    for name in ("planned", "failed"):
        assert f"Deleting and creating {story.first.venv}" in story.runs[name].stdout


def test_a_set_up_that_failed_starts_over_and_a_finished_one_is_left_alone(story) -> None:
    second, failed, finished = story.second, story.runs["failed"], story.runs["finished"]
    assert failed.returncode == 1
    assert f"pip failed; the last lines of {second.venv}/setup.log" in failed.stderr
    assert "No matching distribution found for absent-two==2.0" in failed.stderr
    assert failed.stderr.endswith("run this again\n")
    assert finished.returncode == 0, finished.stderr
    assert "the inference lab will be skipped" in finished.stderr  # nothing else needs a network
    assert "Deleting what an unfinished set-up has left, and creating" in finished.stdout
    assert "PyTorch 2.6.0+rocm7.2 (rocm build)" in finished.stdout
    before = {path: path.stat().st_mtime_ns for path in second.venv.iterdir()}
    assert second.is_ready()
    assert {path: path.stat().st_mtime_ns for path in second.venv.iterdir()} == before


def test_the_environment_sees_the_sites_packages_and_the_workshop(story) -> None:
    second = story.second
    seen = second.runs("import torch, absent_one, workshop; print(torch.__file__)")
    assert seen.stdout == f"{story.packages}/torch/__init__.py\n", seen.stderr
    assert second.runs("import of_old").returncode == 1
    pins = (second.venv / "workshop-constraints.txt").read_text().split()
    assert pins == ["torch==2.6.0+rocm7.2", "pytorch-triton-rocm==3.5.0"]
    code = "from importlib.metadata import version; print(version('absent-one'))"
    assert second.runs(code).stdout == "0.9\n"  # not the version that we would install
    command = second.root / "labs" / "text_generation" / "lm_gen.py"
    command.parent.mkdir(parents=True)
    command.write_text("import sys; print(sys.argv[1:])")
    typed = run(["env", "-C", "/", second.venv / "bin" / "lm_gen", "a model", "5"])
    assert typed.stdout == "['a model', '5']\n", typed.stderr


def test_an_extra_is_added_once_and_then_belongs_to_the_environment(story) -> None:
    for extra, module in (("--with-tests", "absent_two, a_lab"), ("--with-notebook", "a_notebook")):
        added = story.second.set_up(extra)
        assert (added.returncode, "Adding to" in added.stdout) == (0, True), added.stderr
        assert story.second.runs(f"import {module}").returncode == 0
        assert story.second.is_ready(extra)
    assert story.second.runs("import torchao").returncode == 1  # it needs a newer PyTorch
    assert story.second.is_ready()


def test_of_two_at_once_the_second_waits(story) -> None:
    """And looks again then: it has nothing left to do."""
    second, stamp = story.second, story.second.stamp.read_text()
    other = json.loads(stamp) | {"follows": []}
    second.stamp.write_text(json.dumps(other))
    command = ["bash", second.root / "setup" / "environment_setup.sh", "--venv", second.venv]
    with (second.venv / "setup.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command, env=offline(), stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        lines = iter(waiting.stdout.readline, "")
        assert any("another set-up is at work" in line for line in lines)
        second.stamp.write_text(stamp)  # as it leaves it
    rest = waiting.communicate()[0]
    assert "is ready" in rest and rest.count("\n") == 1
    assert waiting.returncode == 0


@pytest.mark.parametrize("lost", ["torch", "PYTHONPATH"])
def test_lost_module_is_named_and_nothing_is_installed_instead(lost, story, tmp_path) -> None:
    before = story.second.stamp.read_text()
    other = {"PYTHONPATH": str(make_torch(tmp_path, "1.13.0"))} if lost == "PYTHONPATH" else {}
    path = story.packages / "torch"
    hidden = path.with_name("away")
    if not other:
        path.rename(hidden)
    try:
        result = story.second.set_up(environment=other)
    finally:
        if not other:
            hidden.rename(path)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
    found = f"finds PyTorch in {tmp_path}/torch" if other else "no longer finds PyTorch"
    assert found in result.stderr and "load its module, unset PYTHONPATH" in result.stderr
    assert story.second.stamp.read_text() == before


def test_an_activated_environment_is_made_anew_from_the_python_below_it(story) -> None:
    words = ("--python", story.second.python)
    assert story.second.is_ready(*words)
    planned = story.second.set_up(*words, "--recreate", "--dry-run")
    assert f" in {story.below.parents[1]}; PyTorch 2.6.0" in planned.stdout, planned.stderr


# --- Validation scripts ---------------------------------------------------------------------------


def validate(name: str, *arguments: str, environment: dict[str, str] | None = None) -> Run:
    """One of the scripts, in this Python, with the repository importable as after set-up."""
    command = [sys.executable, SCRIPTS / f"{name}.py", *arguments]
    return run(command, {"PYTHONPATH": str(ROOT), **(environment or {})})


def rows_of(result: Run) -> dict[str, dict[str, object]]:
    return {row["what"]: row for row in json.loads(result.stdout)["rows"]}


def no_rocm() -> bool:
    return not (Path("/dev/kfd").exists() or Path("/opt/rocm").exists() or shutil.which("rocminfo"))


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


# -S hides site-packages: that is the state before set-up, when these scripts must work already.
@pytest.mark.parametrize(
    ("name", "status", "last_words"),
    [
        ("test_environment", 1, "torch (missing)"),
        ("test_profiling_tools", 1, "torch.profiler (missing)"),
        pytest.param(
            *("test_rocm_installation", 77, "No ROCm on this machine"),
            marks=pytest.mark.skipif(not no_rocm(), reason="this machine has ROCm"),
        ),
    ],
)
def test_scripts_before_set_up(name, status, last_words) -> None:
    script = SCRIPTS / f"{name}.py"
    result = run([sys.executable, "-S", script])
    assert result.returncode == status
    assert last_words in result.stdout.splitlines()[-1]
    assert "setup/environment_setup.sh" in result.stdout
    assert run([sys.executable, "-S", script, "--no-such-option"]).returncode == 2


def test_environment_is_in_order_here_and_a_broken_torch_is_a_finding(tmp_path) -> None:
    result = validate("test_environment", "--json", environment={"TRITON_INTERPRET": "1"})
    rows = rows_of(result)
    assert result.returncode == 0, [row for row in rows.values() if row["found"] == "BROKEN"]
    assert rows["matrix product"]["found"] == rows["workshop"]["found"] == "yes"
    assert rows["torch.compile"]["found"] == "untried"
    if find_spec("triton"):
        assert str(rows["triton"]["version"]).endswith(", interprets V3's kernels")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os\nos.abort()\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for name, row in [("test_environment", "torch"), ("test_profiling_tools", "torch.profiler")]:
        result = validate(name, "--json", environment=environment)
        assert result.returncode == 1 and rows_of(result)[row]["found"] == "BROKEN"
        assert row in json.loads(result.stdout)["verdict"]


def test_wrong_arithmetic_is_a_finding_and_a_missing_triton_is_none(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *where: (\n"
        "    None if name.split('.')[0] == 'triton' else find_spec(name, *where))\n"
        "if sys.argv[1:] == ['--probe', 'probe_torch']:\n"
        "    import torch\n"
        "    right = torch.Tensor.__matmul__\n"
        "    torch.Tensor.__matmul__ = lambda a, b: right(a, b) + a.is_floating_point()\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = validate("test_environment", "--json", environment=environment)
    assert result.returncode == 1
    rows = rows_of(result)
    assert rows["matrix product"]["found"] == "BROKEN"
    assert rows["triton"]["found"] == "no"
    assert "requirements-triton.txt" in str(rows["triton"]["remedy"])
    verdict = "Needs attention: matrix product (differs from the exact one)"
    assert json.loads(result.stdout)["verdict"] == verdict


@pytest.mark.skipif(not no_rocm(), reason="this machine has ROCm")
def test_bf16_that_hangs_with_one_library_gets_the_other(monkeypatch) -> None:
    module = load_script("test_rocm_installation", monkeypatch)

    def products(hangs: set[str]) -> tuple[str, str, str]:
        def probe(function, timeout, environment):
            if environment.get("TORCH_BLAS_PREFER_HIPBLASLT", "1") in hangs:
                return {"problem": f"no answer within {timeout} s"}
            return {"longest_ms": 0.25}

        monkeypatch.setattr(module, "probe", probe)
        row = module.bf16_row()
        return row.found, row.version, row.remedy

    assert products(set())[:2] == ("yes", "0.25 ms at most")
    found, version, remedy = products({"1"})
    assert (found, version) == ("BROKEN", "no answer within 90 s")
    assert remedy == "export TORCH_BLAS_PREFER_HIPBLASLT=0 (with it: 0.25 ms at most)"
    assert "another build" in products({"0", "1"})[2]


def test_rocm_script_fails_on_half_of_it(tmp_path) -> None:
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("7.2.0-43\n")
    make_program(tmp_path / "bin", "rocminfo", "echo 'Unable to open /dev/kfd' && exit 1")
    half = validate("test_rocm_installation", "--json", environment={"ROCM_PATH": str(tmp_path)})
    assert half.returncode == 1
    rows = rows_of(half)
    assert "7.2.0-43" in str(rows["ROCm"]["version"])
    assert rows["/dev/kfd"]["found"] == "no"
    assert "Unable to open" in str(rows["rocminfo"]["version"])
    assert "/dev/kfd" in json.loads(half.stdout)["verdict"]


def test_profiling_script_distinguishes_none_some_and_broken(tmp_path, monkeypatch, capsys) -> None:
    module = load_script("test_profiling_tools", monkeypatch)
    show = load_script("report_table", monkeypatch).show
    assert module.probe_torch_profiler()["version"].startswith("torch ")
    monkeypatch.setattr(module, "probed_row", lambda row, *_: row.judged(True))  # saves a process
    monkeypatch.setattr(module, "ROCM_BIN", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert show(module.make(None), False) == 77

    notice = "Test Profiler\nCopyright (c) 2018-2025\nVersion 2025.3.1.0 (build 1.2)"
    make_program(tmp_path, "ncu", f"echo '{notice}'")
    assert show(module.make(None), False) == 0
    assert "2025.3.1.0" in capsys.readouterr().out

    make_program(tmp_path, "rocprofv3", "echo 'no module named yaml'; exit 1")
    assert show(module.make(None), False) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "rocprofv3" in last and "no module named yaml" in last


# --- Requirements, Makefile, .ci/run --------------------------------------------------------------


def make(*arguments: str, environment: dict[str, str] | None = None) -> Run:
    return run(["make", "-C", ROOT, "--no-print-directory", *arguments], environment)


@pytest.mark.parametrize(
    ("target", "extra", "last"),
    [
        ("compare", "", "analysis_tools/compare_versions.py --preset tiny"),
        ("notebook", "--with-notebook", "--preset tiny results/tour/workshop_tour.ipynb"),
        ("test", "--with-tests", "--preset tiny"),
        ("lint", "--with-tests", "-m mypy"),
    ],
)
def test_make_prepares_the_environment_first(target, extra, last) -> None:
    first, *rest = make("-n", target, "ARGS=--preset tiny", "VENV=/x").stdout.splitlines()
    assert 'environment_setup.sh --venv "/x"' in first
    assert re.findall(r"--with-\w+", "\n".join([first, *rest])) == ([extra] if extra else [])
    assert rest[-1].endswith(last)


def test_the_notebook_is_a_copy_that_this_machine_alone_can_open(tmp_path) -> None:
    tour = tmp_path / "labs/a_lab/where.ipynb"
    tour.parent.mkdir(parents=True)
    tour.write_text("the tour")
    # The set-up does nothing, and Jupyter is a program that says how it was called.
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup" / "environment_setup.sh").touch()
    make_program(tmp_path / ".venv" / "bin", "python", 'echo "$@"')
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "-C", tmp_path, "--no-print-directory", "notebook"]
    command.append("NOTEBOOK=labs/a_lab/where.ipynb")
    called = run(command).stdout.split()
    assert called[:4] == ["-m", "jupyterlab", "--ip", "127.0.0.1"]
    mine = tmp_path / called[-1]
    assert mine.read_text() == "the tour" and mine.is_relative_to(tmp_path / "results")
    mine.write_text("mine")
    assert run(command).returncode == 0
    assert (mine.read_text(), tour.read_text()) == ("mine", "the tour")
