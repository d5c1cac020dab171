"""Prepares the workshop's Python environment: a venv with the right PyTorch for this machine.

environment_setup.sh runs this file on the Python that the environment is built on. It uses the
standard library alone, because nothing is installed yet.
"""

import argparse
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).absolute().parents[1]
PYTHON = "Python {}.{} in {}".format(*sys.version_info[:2], sys.prefix)
TORCH_VERSION = "2.13.0"
TORCH_MINIMUM = "2.6"  # set_stance, which counts fp8 products, and fully_shard are new there
TORCH_INDEX = "https://download.pytorch.org/whl"
TORCH_FOLDERS = {"cpu": "cpu", "rocm": "rocm7.2"}  # pip's default index has the CUDA build
# PyTorch's ROCm builds have named their Triton differently over time. Whichever is there belongs
# to this PyTorch, and must be kept with it.
TORCH_NAMES = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")
KFD = Path("/dev/kfd")
WAY_OUT = "choose another place with --venv (make VENV=...), or have it deleted and made anew with \
--recreate (make setup ARGS=--recreate)"
DESCRIPTION = f"""Prepares a Python environment for the workshop. It can be run again at any time:
when nothing is left to do it says so and returns in about a second. Build auto is the GPU build
that the Python already has, {TORCH_MINIMUM} or newer, which is never replaced, or else torch
{TORCH_VERSION} for the GPU that is found, or for the CPU."""
LM_GEN = '#!/bin/sh\nexec "$(dirname "$0")/python" -m labs.text_generation.lm_gen "$@"\n'

Facts = dict[str, Any]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("environment_setup.sh", argparse.SUPPRESS, DESCRIPTION)
    builds = ("auto", "cpu", "cuda", "rocm")
    python = "what to build on (default: the first Python on PATH that is 3.10 or newer)"
    parser.add_argument("--venv", default=ROOT / ".venv", help="where it goes (default: .venv)")
    parser.add_argument("--python", help=python)
    parser.add_argument("--build", choices=builds, default="auto", help="PyTorch's build")
    for switch, text in (
        ("--with-tests", "also install what 'make test' and 'make lint' need"),
        ("--with-notebook", "also install JupyterLab, for 'make notebook'"),
        ("--recreate", "delete the environment that is there, and make it anew"),
        ("--dry-run", "print what would be done, change nothing"),
    ):
        parser.add_argument(switch, action="store_true", help=text)
    return parser.parse_args(words)


def say(text: str, mark: str = "   ") -> None:
    print(mark, text, flush=True)


def warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def stop(line: str) -> NoReturn:
    sys.exit(f"environment_setup.sh: {line}")


def name_of(requirement: str) -> str:
    return requirement.split("==")[0]


# --- Facts about a Python, found in a process of that Python --------------------------------------


def torch_facts() -> Facts:
    """File, version and build of the PyTorch, without an import, which could take long or crash."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return {"file": "", "version": "0.0", "build": "cpu"}
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    build = "rocm" if values.get("hip") else "cuda" if values.get("cuda") else "cpu"
    return {"file": spec.origin, "version": values["__version__"], "build": build}


def packages() -> Facts:
    """The packages' versions, by name."""
    found: Facts = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        found.setdefault(name, package.version)
    return found


def facts() -> Facts:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    folders = site.getsitepackages() + user
    return {"python": PYTHON, "folders": folders, "torch": torch_facts(), "packages": packages()}


def output(*command: str | Path) -> str:
    """Text that a command prints; none if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def ask(python: str | Path, question: str) -> Facts:
    return dict(json.loads(output(python, __file__, question) or "{}"))


# --- Which PyTorch --------------------------------------------------------------------------------


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def detect_hardware() -> str:
    rocm = shutil.which("rocminfo") or Path(os.environ.get("ROCM_PATH", "/opt/rocm")).is_dir()
    if rocm and KFD.exists():
        return "rocm"
    return "cuda" if output("nvidia-smi", "-L").startswith("GPU") else "cpu"


def warn_of_an_idle_gpu(asked: str, build: str) -> None:
    """An environment made on a login node, or from another index, may have no build for the GPU."""
    wanted = detect_hardware() if asked == "auto" else asked
    if wanted not in ("cpu", build):
        warn(
            f"this PyTorch is a {build} build, which does not use the GPU that {wanted} is for: "
            "load your site's PyTorch module, or see 'No network' in setup/environment_setup.md; "
            f"then make setup BUILD={wanted} ARGS=--recreate"
        )


def choose_build(torch: Facts, asked: str) -> tuple[bool, str]:
    """Whether the PyTorch that is there is used, and the build; prints why not."""
    build: str = torch["build"]
    if build != "cpu":
        if asked in ("auto", build) and numbers(torch["version"]) >= numbers(TORCH_MINIMUM):
            return True, build
        asks = f"--build {asked} asks for {TORCH_MINIMUM} or newer"
        say(f"not used: PyTorch {torch['version']}, {build} build, in {torch['file']}: {asks}")
    return False, detect_hardware() if asked == "auto" else asked


def choose_index(build: str) -> list[str]:
    """Options of pip for PyTorch's own index, if it can be reached. Its versions end in +cpu or
    +rocm, and pip takes them before the same ones of its default index."""
    if build not in TORCH_FOLDERS:
        return []
    import urllib.request  # it takes longer than all else of a set-up that is ready

    index = f"{TORCH_INDEX}/{TORCH_FOLDERS[build]}"
    try:
        urllib.request.urlopen(f"{index}/torch/", timeout=5).close()
    except (OSError, ValueError):
        if build == "rocm":
            stop(
                f"{index} cannot be reached, and pip's default index has no ROCm build: see 'No "
                "network' in setup/environment_setup.md, or load your site's PyTorch first"
            )
        say(
            f"{index} cannot be reached: pip takes PyTorch from its default index, which has the "
            "CUDA build (several GB) unless yours has another one"
        )
        return []
    return ["--extra-index-url", index]


# --- The environment ------------------------------------------------------------------------------


class SetUp:
    """One run of the set-up, for the environment in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        switches = {"-test": options.with_tests, "-notebook": options.with_notebook}
        self.extras = {extra for extra, wanted in switches.items() if wanted}
        self.venv = Path(options.venv).absolute()
        self.python = self.venv / "bin" / "python"
        self.log = self.venv / "setup.log"  # and the lock
        self.constraints = self.venv / "workshop-constraints.txt"
        self.stamp_file = self.venv / "workshop-setup.json"
        self.stamp: Facts = {}  # it stays empty where this script has made nothing
        if self.stamp_file.is_file():
            self.stamp = json.loads(self.stamp_file.read_text(encoding="utf-8"))
        # In an activated environment of ours python3 is its own: what that was built on counts.
        self.inside = bool(self.stamp) and self.venv.samefile(sys.prefix)
        self.base = self.stamp["base"] if self.inside else sys.executable

    def run(self) -> None:
        state = self.state()
        if state != "ready":
            folders = self.choose() if state != "Adding to" else []
            say(f"{state} {self.venv}", "==>")
            if self.options.dry_run:
                say("(a dry run: nothing is changed)")
                return
            self.lock()
            if state != "Adding to":
                self.create(folders)
            self.install()
        torch = self.stamp["torch"]
        version = f"PyTorch {torch['version']} ({torch['build']} build)"
        say(f"{self.venv} is ready: {self.stamp['python']}, {version}")
        warn_of_an_idle_gpu(self.stamp["asked"], torch["build"])

    # --- What is there ----------------------------------------------------------------------------

    def state(self) -> str:
        """The next thing to do. Without --recreate nothing is deleted that somebody may miss."""
        stamp, venv = self.stamp, self.venv
        if not stamp:
            if venv.is_symlink() and not venv.exists():
                stop(
                    f"{venv} is a link to {venv.readlink()}, which is not there: make or delete it"
                )
            if venv.exists() and (not venv.is_dir() or {*venv.iterdir()} - {self.log}):
                stop(
                    f"{venv} was not made by this script, and will not be deleted: move it away, "
                    "or choose another place with --venv (make VENV=...)"
                )
            return "Creating"
        if self.options.recreate:
            return "Deleting and creating"
        problem = self.problem()
        if problem:
            stop(f"{venv} {problem}: {WAY_OUT}")
        if not stamp["complete"]:
            return "Deleting what an unfinished set-up has left, and creating"
        self.extras |= {*stamp["extras"]}
        return "Adding to" if stamp["follows"] != self.follows() else "ready"

    def problem(self) -> str:
        """Why the environment is not the one that is asked for, if it is not."""
        stamp, options = self.stamp, self.options
        try:
            if not Path(stamp["root"]).samefile(ROOT):
                return f"belongs to another checkout, {stamp['root']}"
        except OSError:
            return f"belongs to a checkout that was moved or deleted, {stamp['root']}"
        if not stamp["complete"]:
            return ""
        if options.build not in ("auto", stamp["build"]):
            return f"has PyTorch's {stamp['build']} build, not the {options.build} build"
        if options.python and not self.inside and stamp["python"] != PYTHON:
            return f"was built on {stamp['python']}, not on {PYTHON}"
        file = ask(self.python, "torch_facts").get("file")
        if file != stamp["torch"]["file"]:
            found = f"finds PyTorch in {file}" if file else "no longer finds PyTorch"
            return f"{found}, not in {stamp['torch']['file']} (load its module, unset PYTHONPATH)"
        return ""

    def follows(self) -> list[str]:
        """The versions that the environment is made from: it is added to when these change."""
        return [TORCH_VERSION, *self.lines("", "-triton", "-labs", *sorted(self.extras))]

    def lines(self, *names: str) -> list[str]:
        files = [ROOT / "setup" / f"requirements{name}.txt" for name in names]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line and line[0] != "#"]

    # --- What is done -----------------------------------------------------------------------------

    def choose(self) -> list[str]:
        """Decides on the Python and the PyTorch, for the stamp; the folders of that Python."""
        found, asked = ask(self.base, "facts"), self.options.build
        existing, build = choose_build(found["torch"], asked)
        index = [] if existing else choose_index(build)
        version = found["torch"]["version"] if existing else TORCH_VERSION
        origin = f"which is in {found['torch']['file']}" if existing else "to be installed"
        say(f"{found['python']}; PyTorch {version}, {build} build, {origin}")
        self.stamp = {"root": str(ROOT), "complete": False, "base": self.base, "asked": asked}
        self.stamp |= {"python": found["python"], "existing": existing, "build": build}
        self.stamp |= {"index": index, "torch": found["torch"]}
        return list(found["folders"])

    def lock(self) -> None:
        """Locks the folder for this process and the pip that it starts: two would write the same
        files. After another set-up this one begins anew, as what it has seen is no longer so."""
        self.venv.mkdir(parents=True, exist_ok=True)
        self.output = self.log.open("a")
        try:
            fcntl.flock(self.output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work in this environment: waiting for it")
            fcntl.flock(self.output, fcntl.LOCK_EX)
            os.execv(sys.executable, [sys.executable, *sys.argv])
        except OSError:  # a file system without locks
            pass
        self.output.truncate(0)

    def write_stamp(self, **facts: object) -> None:
        self.stamp |= facts
        new = self.stamp_file.with_suffix(".new")
        new.write_text(json.dumps(self.stamp, indent=1), encoding="utf-8")
        new.replace(self.stamp_file)

    def create(self, folders: list[str]) -> None:
        self.write_stamp(complete=False)
        for path in {*self.venv.iterdir()} - {self.stamp_file, self.log}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        subprocess.run([self.base, "-m", "venv", str(self.venv)], check=True)
        # A path file, as 'pip install -e' needs a build tool, and so a network. It also adds the
        # PyTorch that is there: of a Python that is itself a venv's, --system-site-packages would
        # add what is below that venv. It is ASCII, as other locales can't read more.
        calls = [("sys.path.append", str(ROOT))]
        calls += [("site.addsitedir", folder) for folder in folders if self.stamp["existing"]]
        paths = "".join(
            f"import os, site, sys; {call}(os.fsdecode({os.fsencode(path)!r}))\n"
            for call, path in calls
        )
        next(self.venv.glob("lib/python*/site-packages")).joinpath("workshop.pth").write_text(paths)
        command = self.venv / "bin" / "lm_gen"  # pyproject.toml's script, for the same reason
        command.write_text(LM_GEN)
        command.chmod(0o755)

    def pip(self, what: str, *words: str) -> bool:
        say(f"Installing {what}", "==>")
        command = [str(self.python), "-m", "pip", "install", "-c", str(self.constraints), *words]
        if subprocess.run(command, stdout=self.output, stderr=self.output).returncode == 0:
            return True
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        warn("\n    ".join([f"pip failed; the last lines of {self.log}:", *lines]))
        return False

    def install(self) -> None:
        existing, index, torch = (self.stamp[key] for key in ("existing", "index", "torch"))
        there = ask(self.python, "facts")["packages"]
        pins = {"torch": torch["version"] if existing else TORCH_VERSION}
        wanted, labs = self.lines("", *sorted(self.extras)), self.lines("-labs")
        if existing:
            pins |= {name: there[name] for name in TORCH_NAMES if name in there}
            # Its site's numpy goes with its torch, and a compute node may have no network: only
            # what is missing is added.
            wanted = [line for line in wanted if name_of(line) not in there]
            labs = [line for line in labs if name_of(line) not in there]
            if numbers(torch["version"]) < [2, 7]:  # its import fails, and so transformers' does
                wanted = [line for line in wanted if name_of(line) != "torchao"]
        elif self.stamp["build"] == "cpu" and sys.platform == "linux":
            wanted += self.lines("-triton")  # GPU builds bring theirs; other systems have no wheels
        self.constraints.write_text("".join(f"{name}=={pins[name]}\n" for name in pins))

        _, minor, patch = numbers(pins["torch"])[:3]
        vision = f"torchvision==0.{minor + 15}.{patch}"
        steps = []
        if wanted:
            steps.append(("packages (up to a minute; 150 MB)", wanted))
        if not existing:
            size = "a minute; 200 MB" if self.stamp["build"] == "cpu" else "several GB"
            steps.append((f"PyTorch ({size})", [*index, f"torch=={TORCH_VERSION}", vision]))
        if labs and "-test" in self.extras:
            steps.append(("two labs' peers", ["--no-deps", *labs]))  # they ask for PyTorch
        for what, words in steps:
            if not self.pip(what, *words):
                stop(f"{self.venv} misses {what}: run this again")
        if existing and "torchvision" not in there and not self.pip(vision, "--no-deps", vision):
            warn("the inference lab will be skipped, as there is no torchvision; all else works")
        self.finish(pins["torch"])

    def finish(self, expected: str) -> None:
        # From inside the finished environment, as PYTHONPATH can put another torch in front.
        torch = ask(self.python, "torch_facts")
        if subprocess.run([self.python, "-c", "import torch"], cwd=self.venv).returncode:
            stop(f"the PyTorch in {torch['file']} does not import (see above)")
        if torch["version"].split("+")[0] != expected.split("+")[0]:
            stop(
                f"expected PyTorch {expected}, but {self.venv} finds {torch['version']} in "
                f"{torch['file']}: is an older one on PYTHONPATH?"
            )
        extras, follows = sorted(self.extras), self.follows()
        self.write_stamp(complete=True, torch=torch, extras=extras, follows=follows)
        say("Next: make compare")


def main(words: list[str]) -> None:
    # Some sites set PIP_USER, which a venv refuses.
    os.environ |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        SetUp(parse(words)).run()
    except (OSError, subprocess.CalledProcessError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        print("interrupted: run this again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    if sys.argv[1:] in (["facts"], ["torch_facts"]):
        print(json.dumps(facts() if sys.argv[1] == "facts" else torch_facts()))
    else:
        main(sys.argv[1:])
