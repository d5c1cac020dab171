"""The installed package: its commands work in an empty folder, without a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

H200 = ROOT / "results" / "reference" / "nvidia_h200"
PROFILE = H200 / "profiles" / "v1" / "pytorch_profiler"
RUNS = H200 / "runs"
PLACES = """
import importlib.metadata as metadata, importlib.util as util, os
(own,) = metadata.distributions(name="tiny-llama-workshop", path=[os.environ["PYTHONPATH"]])
print(*{util.find_spec(script.module).origin for script in own.entry_points}, sep="\\n")
"""
"""Where the commands' modules are: the test's environment has the checkout's as well."""
COMMANDS = (
    (["lm_gen", "--help"], 0, "continues prompts"),
    (["workshop-profilers", "advise", PROFILE], 0, "kernel"),
    (["workshop-plausibility", ROOT / "tests/fixtures/published_tables.json"], 1, "medium v3"),
    (["workshop-report", "--results", RUNS], 0, "written: results/report/report.html"),
    (["workshop-report", "--results", RUNS, "--output-dir", "report", "--sheet"], 0, ".html"),
    (["workshop-roofline", RUNS, "--config", "medium", "--precision", "bf16"], 0, "v3"),
    (["workshop-dashboard", "--help"], 0, "--no-browser"),
    (["python", "-m", "workshop.parity", "--version", "v1"], 2, "in a checkout of the workshop"),
    (["python", "-m", "analysis_tools.compare_versions"], 2, "in a checkout of the workshop"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where the wheel is installed, without what it depends on. It is built from a copy: a build
    writes beside its sources."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for package in ("workshop", "analysis_tools", "labs/text_generation"):
        ignored = shutil.ignore_patterns("__pycache__", "texts")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    shutil.copy(ROOT / "labs" / "shared.py", source / "labs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["install", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([*pip, *target, str(source)], check=True)
    return folder / "site"


def test_the_wheel_holds_each_module_and_template(site) -> None:
    """Those that no command below reads, too. The runners' shell scripts need a checkout."""
    here = [path.relative_to(ROOT) for path in (ROOT / "workshop").rglob("*.*") if path.is_file()]
    wanted = [name for name in here if name.suffix not in (".pyc", ".sh")]
    assert not [str(name) for name in wanted if not (site / name).is_file()]


@pytest.mark.slow
def test_the_commands_work_in_an_empty_folder(site, tmp_path) -> None:
    python = Path(sys.executable).parent
    path = os.pathsep.join(map(str, (site / "bin", python, os.environ["PATH"])))
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(site)}
    found = subprocess.check_output(["python", "-c", PLACES], cwd=tmp_path, env=environment)
    assert all(line.startswith(str(site)) for line in found.decode().splitlines())
    for words, status, said in COMMANDS:
        command = list(map(str, words))
        answer = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        printed = answer.stdout + answer.stderr
        assert answer.returncode == status, f"{command}\n{printed}"
        assert said in printed.lower(), f"{command}\n{printed}"
