"""The documents: their CPU commands run as printed, except for fewer steps and tokens, and their
figures are the result files'."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HANGS_S
from test_cli import SHAPE, SIZES, WIDE_HEADS

from workshop import versions

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT, *(versions.get_version(key).path.parent for key in versions.available())]
REPLACED = ("profiles", "roofline", "regression", "inference_benchmark")
"""Folders of results/ that the documents' commands write into."""
STEPS = "--num-steps 2 --warmup-steps 1"
SMALL = f"{SIZES} {SHAPE}"
"""Size of a training run here: the documents' numbers let a reader see a loss fall. With
test_cli.py's sizes V4 finds in the compiler's cache what was compiled there, or the other way
round."""
COMPARED = "--versions v1"
"""Versions that compare_versions.py compares here. It keeps to its presets: a version takes ten
seconds there, V3, which is interpreted, two minutes. test_compare.py has real comparisons of
smaller models."""
DOCUMENTS = [
    *(folder / "README.md" for folder in FOLDERS),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("exercises/*.md")),
    *sorted(ROOT.glob("version2*/exercises/rocm_tools_intro/README.md")),
    *sorted(ROOT.glob("labs/*/README.md")),
    ROOT / "labs" / "scale_out" / "slurm" / "README.md",
]


def commands(document: Path) -> list[str]:
    """The blocks of a document that a comment marks as running on a CPU."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- runs on a CPU -->\n *```bash\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"^ +", "", block, flags=re.MULTILINE) for block in blocks]


@pytest.fixture
def clean_results() -> Iterator[None]:
    """Removes what the commands add to results/, where a user wants it; puts aside what they
    would replace there."""
    results = ROOT / "results"
    aside = {results / name: results / f"{name}.before-tests" for name in REPLACED}
    before = set((results / "runs").glob("*"))
    for folder, kept in aside.items():
        if folder.exists():
            folder.rename(kept)
    try:
        yield
    finally:
        for session in set((results / "runs").glob("*")) - before:
            session.unlink()
        for folder, kept in aside.items():
            shutil.rmtree(folder, ignore_errors=True)
            if kept.exists():
                kept.rename(folder)


def every_command() -> list[pytest.ParameterSet]:
    """The documents' commands, each with the folder to type it in; a version's README repeats
    some of the main one's."""
    found: dict[str, tuple[str, Path]] = {}
    for document in DOCUMENTS:
        folder = document.parent if document.parent in FOLDERS else ROOT
        for command in commands(document):
            found.setdefault(command.splitlines()[-1], (command, folder))
    return [
        pytest.param(*values, id=line, marks=() if line == "make compare" else pytest.mark.slow)
        for line, values in found.items()
    ]


@pytest.mark.parametrize(("command", "folder"), every_command())
def test_the_documents_commands_run_on_a_cpu(command, folder, clean_results, tmp_path) -> None:
    run(command, folder, tmp_path)
    assert command != "make compare\n" or (tmp_path / "comparison.png").is_file()


def shortened(line: str, small: str) -> str:
    if "run_pytorch_profiler.py" in line:  # what follows -- goes to the version
        return f"{line} {small}" if " -- " in line else f"{line} -- {small}"
    line = re.sub(r"--num-steps \d+|(?<=tiny_llama_v1\.py)$", f" {small} {STEPS}", line)
    return re.sub(r"--batch-size \d+", "--batch-size 1", line)


def run(command: str, folder: Path, output: Path) -> None:
    # diff exits 1 where files differ, which is the point of it.
    small = f"{SMALL} {' '.join(WIDE_HEADS)}" if "version3" in folder.name else SMALL
    short = "\n".join(shortened(line, small) for line in command.splitlines())
    script = f'set -e\ndiff() {{ command diff "$@" || [ $? = 1 ]; }}\n{short}'
    inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    compared = f"{STEPS} --repeats 1 {COMPARED} --output-dir {output}"
    answer = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=inherited | {"ARGS": compared, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}"


def pages() -> list[Path]:
    """All Markdown files that are written by hand, or partly."""
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*.md")]
    apart = re.compile(r"results/(?!reference/)|(.*/)?\.")  # a participant's own, and hidden ones
    return [ROOT / path for path in found if not apart.match(path.as_posix())]


def anchors(text: str) -> set[str]:
    """GitHub's names of a page's headings, the second of the same words with -1, and its own."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[str] = re.findall(r'<a id="([^"]+)">', text)
    for heading in re.findall(r"^#+ +(.+)$", outside, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading))
        found.append(words.strip().lower().replace(" ", "-"))
    again = {f"{name}-{i}" for name in set(found) for i in range(1, found.count(name))}
    return again | set(found)


def test_links_between_documents_lead_somewhere() -> None:
    followed = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        defined = re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)
        for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *defined]:
            if ":" in link:
                continue
            target, _, anchor = link.partition("#")
            there = path.parent / target if target else path
            assert there.exists(), f"{path.relative_to(ROOT)} links to {target}"
            if anchor:
                followed += 1
                page = there.read_text(encoding="utf-8")
                assert anchor in anchors(page), f"{path.relative_to(ROOT)} links to {link}"
    assert followed > 5


def test_each_row_of_a_table_is_a_line() -> None:
    """A page that is wrapped anew joins them, and then shows bars in place of a table."""
    assert not [path for path in pages() if "| | --" in path.read_text(encoding="utf-8")]


def test_the_documents_say_what_the_result_files_say(type_command) -> None:
    """In whatever order Python has sets: that differs from run to run."""
    answer = type_command("python", "analysis_tools/update_docs.py", "--check")
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_ladder_compares_with_the_fastest_peer_of_each_size() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("ladder: begin")[1].split("\n\n")[1].splitlines()
    timed, compared = {}, {}
    for name, _, *cells in (line.strip("| ").split(" | ") for line in table[2:]):
        link = re.match(r"\[(.*?)\]", name)
        (timed if link else compared)[link[1] if link else name] = cells
    for size in range(table[0].count(" tokens a step")):
        steps = {key: float(cells[size].split()[0].replace("-", "inf"))
                 for key, cells in timed.items()}  # fmt: skip
        peer = min((key for key in steps if key.startswith("hf")), key=lambda key: steps[key])
        for version, cells in compared.items():
            low, high, name = re.findall(r"\[(.*), (.*)\], (.*)", cells[size])[0]
            ratio = steps[peer] / steps[version]
            assert name == peer and float(low) - 0.02 < ratio < float(high) + 0.02
