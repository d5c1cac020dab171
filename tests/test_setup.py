"""The set-up script, the validation scripts, the Makefile and .ci/run.

No test needs a network: Pythons, PyTorch builds and tools are stand-ins that the tests make.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
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


# What the user, or the `make test` that runs the tests, has set for the programs under test.
OF_THIS_SESSION = re.compile(r"(PIP_|PYTHON|ROCM_|MAKE|MFLAGS$|(ARGS|BUILD|VENV)$)")


def offline(environment: dict[str, str] | None = None) -> dict[str, str]:
    """What a command runs in: no network, and nothing of this session's settings."""
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


def set_up_with(functions: str, *arguments: str | Path) -> Run:
    """The script with some of its functions replaced: what a test cannot fake by PATH."""
    command = f'source "$1" && shift; {functions}; main "$@"'
    return run(["bash", "-c", command, "bash", SCRIPT, *arguments])


def make_torch(folder: Path, version: str, *, hip: str = "", cuda: str = "") -> Path:
    """A package that claims to be a PyTorch build."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace as N\n"
        f"__version__ = {version!r}\n"
        f"version = N(hip={hip or None!r}, cuda={cuda or None!r})\n"
        "cuda = N(is_available=lambda: True, device_count=lambda: 2,"
        " get_device_name=lambda i: 'Test GPU')\n"
    )
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
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python(tmp_path_factory.mktemp("bare") / "venv")


# --- Command line ---------------------------------------------------------------------------------


# Each leaves nothing changed: arguments beside --venv, what makes the folder, status, the line.
REFUSED: dict[str, tuple[list[str], str, int, str]] = {
    "unknown option": (["--no-such-option"], "", 2, "--no-such-option"),
    "unknown build": (["--build", "tpu"], "", 2, "tpu"),
    "no value": (["--venv"], "", 2, "--venv needs a value"),
    "no such Python": (["--python", "/no/such/python"], "", 2, "/no/such/python"),
    "an old Python": (["--python", "{0}/old"], "", 1, "not Python 3.10 or newer"),
    "a folder of the user's": ([], 'mkdir "{0}/venv"; touch "{0}/venv/a"', 2, "not made by this"),
    "a broken link": ([], 'ln -s "{0}/gone" "{0}/venv"', 2, "which is not there: make that folder"),
    "a link to another checkout's": (
        ["--dry-run"],
        'mkdir -p "{0}/other/setup" "{0}/other/.venv"; touch "{0}/other/.venv/workshop-made-this" '
        '"{0}/other/setup/environment_setup.sh"; ln -s "{0}/other/.venv" "{0}/venv"',
        2,
        "the environment of another checkout ({0}/other)",
    ),
}


PYTHON_3_9 = (
    f"exec {shlex.quote(sys.executable)} -c "
    '"import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])" "$2"'
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case: str, tmp_path: Path) -> None:
    arguments, prepare, status, message = REFUSED[case]
    make_program(tmp_path, "old", PYTHON_3_9)
    subprocess.run(["bash", "-c", prepare.format(tmp_path)], check=True)
    before = sorted(tmp_path.rglob("*"))
    result = set_up("--venv", tmp_path / "venv", *(word.format(tmp_path) for word in arguments))
    assert (result.returncode, len(result.stderr.splitlines())) == (status, 1), result.stderr
    assert message.format(tmp_path) in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


PYENV = 'echo "pyenv: ${0##*/}: command not found" >&2; exit 127'  # as its shims say it


@pytest.mark.parametrize("named", [True, False])
def test_a_shim_of_a_python_that_is_not_active_is_passed_over(
    named: bool, bare_python: Path, tmp_path: Path
) -> None:
    """pyenv has a shim for each Python, active or not: what else is on PATH by its name is looked
    at, and none is called too old that does not run."""
    for name in ("python3", "python3.12"):
        make_program(tmp_path / "shims", name, PYENV)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in "bash basename cat cksum cut dirname grep head ls sed sort tr uname".split():
        (tools / tool).symlink_to(str(shutil.which(tool)))
    arguments = ["--venv", tmp_path / "v", "--build", "cpu", "--dry-run"]
    arguments += ["--python", "python3.12"] if named else []

    refused = set_up(*arguments, environment={"PATH": f"{tmp_path}/shims:{tools}"})
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "python3.12 does not run (pyenv: python3.12: command not found)" in refused.stderr
    assert "is not Python 3.10" not in refused.stderr

    make_program(tmp_path / "other", "python3.12", f'exec "{bare_python}" "$@"')
    found = set_up(*arguments, environment={"PATH": f"{tmp_path}/shims:{tmp_path}/other:{tools}"})
    assert f"-m venv {tmp_path}/v" in found.stdout, found.stderr


# --- Which PyTorch --------------------------------------------------------------------------------


def plan(python: Path, tmp_path: Path, *arguments: str, torch: Path | None = None) -> str:
    """What a dry run says it would do; it must do nothing."""
    environment = {"PYTHONPATH": str(torch)} if torch else {}
    venv = tmp_path / "planned"
    result = set_up(
        *("--venv", venv, "--python", python, "--dry-run", *arguments), environment=environment
    )
    assert result.returncode == 0, result.stderr
    assert not venv.exists()
    return result.stdout + result.stderr


@pytest.mark.parametrize("build", [{"hip": "7.2"}, {"cuda": "13.0"}])
@pytest.mark.parametrize("options", [[], ["--system-site-packages"]])
def test_existing_gpu_build_is_kept(
    build: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    site = make_torch(tmp_path / "site", "2.9.0+gpu", **build)
    make_distribution(site, "pytorch-triton-rocm", "3.5.0")
    make_distribution(site, "torchvision", "0.20.0", "torchvision.py")
    text = plan(make_python(tmp_path / "python", *options), tmp_path, torch=site)
    # Our environment sees what the Python that it is built on sees, no more and no less.
    assert ("-m venv --system-site-packages" in text) == bool(options)
    assert "site.addsitedir" in text
    assert "torch==2.9.0+gpu" in text
    assert "pytorch-triton-rocm==3.5.0" in text
    assert "torch==2.13.0" not in text and "torchvision==" not in text


@pytest.mark.parametrize(
    ("version", "hip", "arguments", "reason", "used"),
    [
        ("2.5.1+rocm6.2", "6.2", [], "needs 2.6 or newer", False),
        ("2.13.0+cpu", "", [], "", False),
        ("2.9.0+rocm7.2", "7.2", ["--build", "cpu"], "--build cpu was given", False),
        ("2.10.1", "7.2", [], "left as it is", True),  # newer than 2.6
    ],
)
def test_a_build_is_used_if_it_fits(
    *, version: str, hip: str, arguments: list[str], reason: str, used: bool,
    bare_python: Path, tmp_path: Path,
) -> None:  # fmt: skip
    site = make_torch(tmp_path / "site", version, hip=hip)
    text = plan(bare_python, tmp_path, *arguments, torch=site)
    assert reason in text
    assert ("torch==2.13.0" not in text) == used


@pytest.mark.parametrize(
    ("functions", "nvidia_smi", "expected"),
    [
        ("has_kfd() { true; }", "exit 9", "rocm"),
        ("has_kfd() { false; }", "echo 'GPU 0: Test GPU (UUID: 1)'", "cuda"),
        ("has_kfd() { false; }", "echo 'Failed to initialize NVML' && exit 9", "cpu"),
    ],
)
def test_hardware_decides(
    functions: str, nvidia_smi: str, expected: str, bare_python: Path, tmp_path: Path
) -> None:
    make_program(tmp_path / "bin", "nvidia-smi", nvidia_smi)
    prepare = f'{functions}; export PATH="{tmp_path / "bin"}:$PATH" ROCM_PATH="{tmp_path}"'
    result = set_up_with(prepare, "--venv", tmp_path / "venv", "--python", bare_python, "--dry-run")
    assert f"PyTorch 2.13.0, {expected} build" in result.stdout


@pytest.mark.parametrize(("build", "folder"), [("cpu", "cpu"), ("rocm", "rocm7.2")])
def test_pytorch_index_first_then_the_default(
    build: str, folder: str, bare_python: Path, tmp_path: Path
) -> None:
    arguments = ["--venv", tmp_path / "v", "--python", bare_python, "--build", build, "--dry-run"]
    index = f"https://download.pytorch.org/whl/{folder}"

    reached = set_up_with("index_reachable() { true; }", *arguments)
    _, after = reached.stdout.split(f"--index-url {index} torch==2.13.0\n")
    assert f"--index-url {index} --no-deps --force-reinstall torchvision==0.28.0\n" in after
    assert not reached.stderr

    fallen_back = set_up(*arguments)
    assert f"{index} cannot be reached" in fallen_back.stdout
    assert "--index-url" not in fallen_back.stdout
    assert re.search(r" torch==2\.13\.0\n(.*\n)*.* torchvision==0\.28\.0\n", fallen_back.stdout)
    assert ("will NOT use the AMD" in fallen_back.stderr) == (build == "rocm")


def test_a_gpu_that_the_environment_ignores_is_reported(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    ask = f'STAMP="{stamp}"; detect_hardware() {{ echo rocm; }}; warn_if_gpu_is_idle'
    for asked, kind, warned in [("auto", "cpu", True), ("cpu", "cpu", False), ("auto", "rocm", 0)]:
        stamp.write_text(f"asked={asked}\ntorch_kind={kind}\n")
        result = run(["bash", "-c", f'source "$1"; {ask}', "bash", SCRIPT])
        assert ("--build rocm" in result.stderr) == bool(warned), (asked, kind)


# --- Triton, torchvision, timm --------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
def test_a_cpu_build_gets_a_triton_and_a_gpu_build_keeps_its_own(
    bare_python: Path, tmp_path: Path
) -> None:
    for build, wanted in (("cpu", True), ("rocm", False), ("cuda", False)):
        text = plan(bare_python, tmp_path, "--build", build)
        assert ("-r " + str(SETUP / "requirements-triton.txt") in text) == wanted, build
    site = make_torch(tmp_path / "site", "2.9.0+gpu", cuda="13.0")  # its site left Triton out
    assert "requirements-triton" not in plan(bare_python, tmp_path, torch=site)


def install(package: str, facts: str, functions: str) -> Run:
    """That step alone, after the PyTorch of `facts` is in."""
    state = 'ORIGIN=installed STATE=fresh BUILD=cpu VENV=/venv CONSTRAINTS=/constraints PROBE_PY=""'
    stand_ins = 'uname() { echo Linux; }; pip() { echo "pip $*"; }; probe() { echo facts; }'
    command = f'source "$1"; {state} FACTS="{facts}"; {stand_ins}; {functions}; '
    return run(["bash", "-c", f'{command} install_{package}; echo "$FACTS"', "bash", SCRIPT])


@pytest.mark.parametrize(
    ("facts", "functions", "installed"),
    [
        ("torch_kind=cpu", ":", True),
        ("torch_kind=cpu\ntriton_version=3.7.1", ":", False),
        ("torch_kind=cuda", ":", False),  # from pip's default index, when PyTorch's was not reached
        ("torch_kind=cpu", "uname() { echo Darwin; }", False),
    ],
)
def test_triton_is_added_only_where_pytorch_brings_none(
    facts: str, functions: str, installed: bool
) -> None:
    result = install("triton", facts, functions)
    assert result.returncode == 0, result.stderr
    # Under PyTorch's own constraints; what is there now is then asked anew.
    pip = f"pip install -c /constraints -r {SETUP}/requirements-triton.txt"
    assert (pip in result.stdout) == installed
    assert result.stdout.endswith("facts\n" if installed else f"{facts}\n")


VISION = "--no-deps --force-reinstall torchvision=="
LABS = f"--no-deps -r {SETUP}/requirements-labs.txt"
EXISTING = "ORIGIN=existing INDEX=https://not.this"


@pytest.mark.parametrize(
    ("package", "facts", "functions", "pip"),
    [
        ("torchvision", "", "INDEX=https://a.b/cpu", f"--index-url https://a.b/cpu {VISION}0.28.0"),
        ("torchvision", "", "INDEX=default", f"{VISION}0.28.0"),
        # The PyTorch is from an earlier set-up, of this script's version or of one with another.
        ("torchvision", "", "probe() { false; }; PY=", f"{VISION}0.28.0"),
        ("torchvision", "torchvision_version=0.27.0+cpu", "INDEX=default", f"{VISION}0.28.0"),
        ("torchvision", "torchvision_version=0.28.0+cpu", "INDEX=default", ""),
        ("torchvision", "torch_version=2.9.1+rocm7.2", EXISTING, f"{VISION}0.24.1"),
        ("torchvision", "torch_version=2.10.0a0+b4e4ee8", EXISTING, f"{VISION}0.25.0"),
        ("torchvision", "torch_version=2.9.1\ntorchvision_version=0.20.0", EXISTING, ""),
        ("timm", "", "EXTRAS=' test notebook'", LABS),
        ("timm", "", "EXTRAS=' notebook'", ""),
        ("timm", "", f"EXTRAS=' test' {EXISTING}", LABS),
        ("timm", "", f"EXTRAS=' test' {EXISTING}; probe() {{ :; }}", ""),  # the site has one
    ],
)
def test_the_labs_packages_fit_pytorch_and_leave_a_sites_own(
    package: str, facts: str, functions: str, pip: str
) -> None:
    result = install(package, facts, functions)
    assert result.returncode == 0, result.stderr
    called = [line for line in result.stdout.splitlines() if line.startswith("pip ")]
    assert called == ([f"pip install {pip}"] if pip else [])


@pytest.mark.parametrize(
    ("package", "consequence", "again"),
    [
        ("triton", "Triton cannot be installed (see above), so V3", "-r setup/requirements-triton"),
        ("torchvision", "so the inference lab will be skipped", "--no-deps torchvision==0.28.0"),
        ("timm", "so the tests that need it will be skipped", ""),
    ],
)
def test_one_that_cannot_be_had_is_a_warning(package: str, consequence: str, again: str) -> None:
    result = install(package, "torch_kind=cpu", "pip() { false; }; INDEX=default EXTRAS=' test'")
    assert result.returncode == 0
    assert result.stderr.startswith("WARNING: ") and consequence in result.stderr
    assert not again or f"/venv/bin/python -m pip install {again}" in result.stderr


# --- A real environment, on a site's own PyTorch --------------------------------------------------


class Site:
    """A Python inside a venv (as on many GPU machines) with a GPU PyTorch, and our venv on it.

    The set-up under test is a copy whose requirements no machine happens to have.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        make_wheel(folder / "wheels", "torchvision", "0.24.0")
        self.environment = {"PIP_FIND_LINKS": str(folder / "wheels"), **environment}
        self.root = folder / "repository"
        shutil.copytree(SETUP, self.root / "setup")
        (self.root / "workshop").mkdir()
        (self.root / "workshop" / "__init__.py").touch()
        (self.root / "setup" / "requirements.txt").write_text(
            'absent-one==1.0; python_version >= "3.2"\nof-old==1.0; python_version < "3.2"\n'
        )
        (self.root / "setup" / "requirements-test.txt").write_text("absent-two==2.0\n")
        self.python = make_python(folder / "parent")
        self.packages = packages_of(self.python)
        self.venv = self.root / ".venv"
        self.stamp = self.venv / "workshop-setup.stamp"
        make_torch(self.packages, "2.9.0+rocm7.2", hip="7.2")

    def fail(self) -> None:
        """A package is missing, and there is no index to get it from."""
        missing = {"PIP_FIND_LINKS": "file:///no/such/wheels"}
        self.failed = self.set_up("--python", self.python, environment=missing)
        self.stamp_after_failure = self.stamp.exists()
        self.log_of_failure = (self.venv / "setup.log").read_text()

    def finish(self, *arguments: str) -> None:
        make_distribution(self.packages, "absent-one", "0.9", "absent_one.py")
        words = ("--python", self.python, *arguments)
        self.done = self.set_up(*words, environment={"CXX": "/no/such/compiler"})

    def set_up(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Run:
        script = self.root / "setup" / "environment_setup.sh"
        return run(["bash", script, *arguments], {**self.environment, **(environment or {})})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("site"))
    site.fail()
    site.finish()
    return site


def test_a_set_up_that_failed_starts_over_and_a_finished_one_is_left_alone(site: Site) -> None:
    assert site.failed.returncode == 1
    assert "the end" in site.failed.stderr and "is not complete" in site.failed.stderr
    assert f"pip failed; the last lines of {site.venv}/setup.log" in site.failed.stderr
    assert "No matching distribution found for absent-one==1.0" in site.failed.stderr
    assert "is ignored" in site.log_of_failure
    assert "is ignored" not in site.failed.stderr + site.failed.stdout
    assert not site.stamp_after_failure
    assert site.done.returncode == 0, site.done.stderr
    for words in ("Creating", "(rocm build)", "2 x Test GPU", "none: V3 is skipped", "make compare",
                  "no C++ compiler: torch.compile is off", "are all there already"):  # fmt: skip
        assert words in site.done.stdout
    before = {path: path.stat().st_mtime_ns for path in site.venv.iterdir()}
    again = site.set_up()
    assert again.returncode == 0
    assert "is ready" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in site.venv.iterdir()} == before


def test_the_environment_sees_the_parents_torch_and_the_workshop(
    site: Site, tmp_path: Path
) -> None:
    code = "import torch, workshop; print(torch.__file__); print(workshop.__path__[0])"
    seen = run(["env", "-C", tmp_path, site.venv / "bin" / "python", "-c", code])
    assert seen.stdout.splitlines() == [
        str(site.packages / "torch" / "__init__.py"),
        str(site.root / "workshop"),
    ], seen.stderr
    command = site.root / "labs" / "text_generation" / "lm_gen.py"
    command.parent.mkdir(parents=True)
    command.write_text("import sys; print(sys.argv[1:])")
    typed = run(["env", "-C", tmp_path, site.venv / "bin" / "lm_gen", "a model", "5"])
    assert typed.stdout == "['a model', '5']\n", typed.stderr
    constraints = (site.venv / "workshop-constraints.txt").read_text().split()
    assert constraints == ["torch==2.9.0+rocm7.2"]


def test_changed_requirements_are_installed(site: Site) -> None:
    """The stamp knows the requirements files: --with-tests is more than what was installed."""
    more = site.set_up("--with-tests", "--dry-run")
    assert " absent-two==2.0" in more.stdout
    assert "absent-one" not in more.stdout  # there in another version: the site's choice
    assert "Creating" not in more.stdout  # added to the environment, which is kept


def test_an_extra_is_added_once_and_then_belongs_to_the_environment(site: Site) -> None:
    stamp, script = site.stamp.read_text(), site.root / "setup" / "environment_setup.sh"
    pretend = 'source "$1" && shift; pip() { echo "pip $*"; }; main "$@"'
    try:
        added = run(["bash", "-c", pretend, "bash", script, "--with-notebook"])
        assert (added.returncode, " jupyterlab==" in added.stdout) == (0, True), added.stderr
        assert "-c " + str(site.venv / "workshop-constraints.txt") in added.stdout
        assert "is ready" in site.set_up("--with-notebook").stdout
        both = site.set_up("--with-tests", "--dry-run").stdout
        assert " absent-two==2.0" in both and " jupyterlab==" in both
    finally:
        site.stamp.write_text(stamp)


def test_a_package_that_has_gone_is_noticed(site: Site) -> None:
    module = site.packages / "absent_one.py"
    module.unlink()
    try:
        again = site.set_up("--dry-run").stdout
        assert "Installing again what is gone: absent-one==1.0;" in again
        assert "Creating" not in again
    finally:
        module.touch()
    assert "is ready" in site.set_up().stdout


def test_a_torchvision_that_has_gone_comes_back(site: Site) -> None:
    module = packages_of(site.venv / "bin" / "python") / "torchvision" / "__init__.py"
    module.unlink()
    again = site.set_up()
    assert (again.returncode, module.exists()) == (0, True), again.stderr
    # Not as the other packages, which come from pip's default index.
    assert "Installing torchvision 0.24.0" in again.stdout and "is gone" not in again.stdout
    assert "is ready" in site.set_up().stdout


@pytest.mark.slow
def test_a_package_that_has_gone_comes_back(tmp_path: Path) -> None:
    """Its files, all of it, or what it needs; below a folder whose name ASCII does not have."""
    wheels = {"PIP_FIND_LINKS": str(tmp_path / "wheels").replace(" ", "%20")}
    site = Site(tmp_path / "caf\u00e9 1", LC_ALL="C", **wheels)
    make_wheel(tmp_path / "wheels", "absent-two", "2.0", requires="absent-three")
    make_wheel(tmp_path / "wheels", "absent-three", "3.0")
    site.finish("--with-tests")
    assert (site.done.returncode, "Ready" in site.done.stdout) == (0, True), site.done.stderr
    packages = packages_of(site.venv / "bin" / "python")
    for gone in ("absent_two", "absent_*"):
        assert "is ready" in site.set_up("--with-tests").stdout
        for folder in packages.glob(gone):
            shutil.rmtree(folder)
        without = site.set_up(environment={"PIP_FIND_LINKS": ""})
        assert without.returncode == 1 and "stays as it was" in without.stderr
        again = site.set_up()
        assert (again.returncode, "Creating" in again.stdout) == (0, False), again.stderr
        code = "import absent_two, absent_three, torch, workshop"
        assert not run([site.venv / "bin" / "python", "-c", code], {"LC_ALL": "C"}).stderr, gone


def test_of_two_at_once_the_second_waits(site: Site, tmp_path: Path) -> None:
    stamp, script = site.stamp.read_text(), site.root / "setup" / "environment_setup.sh"
    begun, go = tmp_path / "begun", tmp_path / "go"
    pip = f'pip() {{ touch "{begun}"; until [[ -e "{go}" ]]; do sleep 0.1; done; }}'
    pretend = f'source "$1" && shift; {pip}; main "$@"'
    command = ["bash", "-c", pretend, "bash", script, "--with-notebook"]
    first = subprocess.Popen(command, env=offline())
    try:
        while not begun.exists():
            assert first.poll() is None
            time.sleep(0.1)
        command = ["bash", script, "--with-notebook"]
        with subprocess.Popen(command, env=offline(), stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            lines = iter(second.stdout.readline, "")
            assert any("another set-up is at work" in line for line in lines)
            go.touch()
            assert "is ready" in second.stdout.read()
        assert (first.wait(), second.returncode) == (0, 0)
    finally:
        go.touch()
        first.wait()
        site.stamp.write_text(stamp)


@pytest.mark.parametrize("of", ["triton", "labs"])
def test_an_environment_from_before_a_new_version_is_looked_at_again(of: str, site: Site) -> None:
    stamp, path = site.stamp.read_text(), site.root / "setup" / f"requirements-{of}.txt"
    path.write_text(path.read_text() + "# newer\n")
    again = site.set_up()
    assert (again.returncode, "is ready" in again.stdout) == (0, False), again.stderr
    assert site.stamp.read_text() != stamp
    assert "is ready" in site.set_up().stdout


@pytest.mark.parametrize("lost", ["torch", "python"])
def test_lost_module_is_named_and_nothing_is_installed_instead(lost: str, site: Site) -> None:
    path = {"torch": site.packages / "torch", "python": site.venv / "bin" / "python"}[lost]
    hidden = path.with_name("away")
    path.rename(hidden)
    try:
        result = site.set_up()
    finally:
        hidden.rename(path)
    assert result.returncode == 1
    assert "load its module again" in result.stderr
    assert site.stamp.exists()


def test_an_activated_environment_is_rebuilt_from_the_python_below_it(site: Site) -> None:
    ours = site.venv / "bin" / "python"
    result = site.set_up("--python", ours, "--build", "cpu", "--dry-run")
    assert f"would run: {site.python} -m venv" in result.stdout


def test_another_torch_in_front_is_noticed(site: Site, tmp_path: Path) -> None:
    older = make_torch(tmp_path / "older", "1.13.0")
    functions = f'FACTS=torch_version=2.9.0; ORIGIN=existing; VENV="{site.venv}"; verify'
    command = ["bash", "-c", f'source "$1"; {functions}', "bash", SCRIPT]
    result = run(command, {"PYTHONPATH": str(older)})
    assert result.returncode == 1
    assert "1.13.0" in result.stderr
    assert "PYTHONPATH" in result.stderr


# --- Validation scripts ---------------------------------------------------------------------------


def validate(
    name: str, *arguments: str, environment: dict[str, str] | None = None, python: str = ""
) -> Run:
    """One of the scripts, in this Python, with the repository importable as after set-up."""
    command = [python or sys.executable, SCRIPTS / f"{name}.py", *arguments]
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
def test_scripts_before_set_up(name: str, status: int, last_words: str) -> None:
    script = SCRIPTS / f"{name}.py"
    result = run([sys.executable, "-S", script])
    assert result.returncode == status
    assert last_words in result.stdout.splitlines()[-1]
    assert "setup/environment_setup.sh" in result.stdout
    assert run([sys.executable, "-S", script, "--no-such-option"]).returncode == 2


def test_environment_is_in_order_here() -> None:
    result = validate("test_environment", "--json", environment={"TRITON_INTERPRET": "1"})
    rows = rows_of(result)
    broken = [row for row in rows.values() if row["found"] == "BROKEN"]
    assert result.returncode == 0, broken
    assert rows["matrix product"]["found"] == rows["workshop"]["found"] == "yes"
    assert rows["torch.compile"]["found"] == "untried"
    if find_spec("triton"):
        assert str(rows["triton"]["version"]).endswith(", interprets V3's kernels")
    assert rows["torchvision"]["found"] == ("yes" if find_spec("torchvision") else "no")


@pytest.mark.parametrize("fault", ["raise OSError('libamdhip64.so: no such file')", "os.abort()"])
def test_broken_torch_is_a_finding_and_not_a_crash(fault: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"import os\n{fault}\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for name, row in [("test_environment", "torch"), ("test_profiling_tools", "torch.profiler")]:
        result = validate(name, "--json", environment=environment)
        assert result.returncode == 1
        assert rows_of(result)[row]["found"] == "BROKEN"
        assert row in json.loads(result.stdout)["verdict"]


def test_wrong_arithmetic_is_a_finding_and_a_missing_triton_is_none(tmp_path: Path) -> None:
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
def test_rocm_script_skips_without_rocm_and_fails_on_half_of_it(tmp_path: Path) -> None:
    absent = validate("test_rocm_installation", "--json")
    assert absent.returncode == 77
    assert json.loads(absent.stdout)["exit_status"] == 77

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


ROCMINFO = """\
Agent 1
  Name:                    A Test CPU
  Device Type:             CPU
Agent 2
  Name:                    gfx90a
  Marketing Name:          A Test GPU
  Device Type:             GPU
  ISA Info:
      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
Agent 3
  Name:                    gfx90a
  Device Type:             GPU
"""


def test_rocm_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rocm_module = load_script("test_rocm_installation", monkeypatch)
    assert rocm_module.gpu_names(ROCMINFO) == ["gfx90a", "gfx90a"]
    assert rocm_module.versions_row("7.2.26015", "7.2.0-43").found == "yes"
    assert rocm_module.versions_row("6.4.1", "7.2.0-43").found == "no"

    device = tmp_path / "kfd"
    device.touch()
    assert rocm_module.device_file_row(device, "", "").found == "yes"
    monkeypatch.setattr(rocm_module.os, "access", lambda path, mode: False)
    row = rocm_module.device_file_row(device, "", "")
    assert (row.found, row.needed) == ("BROKEN", True)
    assert "render" in row.remedy


def test_profiling_script_distinguishes_none_some_and_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_requirements_are_exact_agree_and_leave_torch_out() -> None:
    lines: dict[str, set[tuple[str, ...]]] = {}
    for path in SETUP.glob("requirements*.txt"):
        pins: dict[str, list[str]] = {}
        for line in path.read_text().splitlines():
            if line and line[0] != "#":
                name, _, version = line.partition("==")
                assert version, f"{path.name}: {line} is not pinned"
                pins.setdefault(name, []).append(line)
        for name, its in pins.items():
            lines.setdefault(name, set()).add(tuple(its))
    assert "torch" not in lines  # environment_setup.sh decides on it
    assert [name for name, different in lines.items() if len(different) > 1] == []


def make(*arguments: str, environment: dict[str, str] | None = None) -> Run:
    return run(["make", "-C", ROOT, "--no-print-directory", *arguments], environment)


def test_make_alone_lists_the_targets() -> None:
    result = make()
    assert result.returncode == 0
    for target in ("setup", "compare", "notebook", "test", "lint", "help", "clean"):
        assert f"make {target} " in result.stdout


@pytest.mark.parametrize(
    ("target", "extra", "last"),
    [
        ("compare", "", "analysis_tools/compare_versions.py --preset tiny"),
        ("dashboard", "", "analysis_tools/performance_dashboard.py --preset tiny"),
        ("slides", "", "slides/build.py --preset tiny"),
        ("notebook", "--with-notebook", "--preset tiny results/tour/workshop_tour.ipynb"),
        ("test", "--with-tests", "--preset tiny"),
        ("lint", "--with-tests", "-m mypy"),
    ],
)
def test_make_prepares_the_environment_first(target: str, extra: str, last: str) -> None:
    first, *rest = make("-n", target, "ARGS=--preset tiny", "VENV=/x").stdout.splitlines()
    assert "environment_setup.sh" in first
    assert re.findall(r"--with-\w+", "\n".join([first, *rest])) == ([extra] if extra else [])
    assert rest[-1].endswith(last)


@pytest.mark.parametrize("other", ["", "labs/a_lab/where.ipynb"])
def test_the_notebook_is_a_copy_that_this_machine_alone_can_open(
    other: str, tmp_path: Path
) -> None:
    tour = tmp_path / (other or "exercises/notebooks/workshop_tour.ipynb")
    tour.parent.mkdir(parents=True)
    tour.write_text("the tour")
    # The set-up does nothing, and Jupyter is a program that says how it was called.
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup" / "environment_setup.sh").touch()
    make_program(tmp_path / ".venv" / "bin", "python", 'echo "$@"')
    shutil.copy(ROOT / "Makefile", tmp_path)
    command: list[str | Path] = ["make", "-C", tmp_path, "--no-print-directory", "notebook"]
    command += [f"NOTEBOOK={other}"] if other else []

    called = run(command).stdout.split()
    assert called[:4] == ["-m", "jupyterlab", "--ip", "127.0.0.1"]
    assert ("--allow-root" in called) == (os.geteuid() == 0)
    mine = tmp_path / called[-1]
    assert mine.read_text() == "the tour"
    assert mine.is_relative_to(tmp_path / "results")
    mine.write_text("mine")
    assert run(command).returncode == 0
    assert (mine.read_text(), tour.read_text()) == ("mine", "the tour")


@pytest.mark.parametrize(("lint", "tests", "expected"), [(0, 0, 0), (2, 0, 2), (0, 2, 2)])
def test_ci_runs_both_and_fails_if_one_does(
    lint: int, tests: int, expected: int, tmp_path: Path
) -> None:
    body = f'for last; do :; done; echo "$last"; test "$last" = lint && exit {lint}; exit {tests}'
    make_program(tmp_path, "make", body)
    # A browser that is missing and can't be had changes nothing, and prints nothing.
    make_program(tmp_path, "apt-get", 'echo "E: no network"; echo "E: no network" >&2; exit 100')
    make_program(tmp_path, "id", "echo 0")
    for name in ("bash", "dirname", "timeout"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    result = run(["bash", ROOT / ".ci" / "run"], {"PATH": str(tmp_path)})
    assert result.returncode == expected
    first, *others = result.stdout.split()
    assert (first, sorted(others), result.stderr) == ("test-environment", ["lint", "test"], "")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
