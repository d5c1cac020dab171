"""The documents: their CPU commands run as printed, and their figures are the result files'."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from workshop import versions

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [".", *(versions.get_version(key).folder for key in versions.available())]


def commands(folder: str) -> list[str]:
    """The blocks of a README that a comment marks as running on a CPU."""
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- runs on a CPU -->\n *```bash\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"^ +", "", block, flags=re.MULTILINE) for block in blocks]


@pytest.fixture
def clean_results() -> Iterator[None]:
    """Removes the runs that the commands add to results/, where a user wants them."""
    runs = ROOT / "results" / "runs"
    before = set(runs.glob("*"))
    yield
    for session in set(runs.glob("*")) - before:
        shutil.rmtree(session)


@pytest.mark.timeout(600)
def test_the_readmes_commands_run_on_a_cpu(clean_results: None, tmp_path: Path) -> None:
    done: set[str] = set()
    for folder in FOLDERS:
        for command in commands(folder):
            last_line = command.splitlines()[-1]
            if last_line not in done:  # a version's README repeats the main one's
                run(command, ROOT / folder, tmp_path)
            done.add(last_line)
    assert (tmp_path / "comparison.png").is_file()
    assert len(done) >= 7


def run(command: str, folder: Path, output: Path) -> None:
    # diff exits 1 where files differ, which is the point of it; make's options keep it short.
    script = f'set -e\ndiff() {{ command diff "$@" || [ $? = 1 ]; }}\n{command}'
    short = f"--num-steps 2 --warmup-steps 1 --repeats 1 --output-dir {output}"
    answer = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"ARGS": short, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}"


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("version*/README.md"), *ROOT.glob("setup/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_documents_say_what_the_result_files_say(type_command) -> None:
    answer = type_command("python", "analysis_tools/update_docs.py", "--check")
    assert answer.returncode == 0, answer.stdout + answer.stderr
