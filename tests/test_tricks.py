"""The tricks of tests/tricks.py, each as a version of a real comparison: none earns a speed-up."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tricks import ROOT, TRICKS, Trick, add_versions, copy_checkout

FORGED = "feedc0de"
"""Text that the tricks write where they forge a record."""
LESS = 5.0
"""Less than a deception gains here, and more than a busy machine makes of two honest rows."""
ADDED = {
    "workshop/run/presets.py": 'PRESETS["tiny"] = Preset(64, 2, 4, 16, 2, 300)',
    # However busy this machine is, honest rows pass; what a trick gains here is far beyond.
    "workshop/run/waiting.py": "def seconds_without_processor(process='self'): return None",
    "workshop/judge/judge.py": "FIXED_MS, UNEVEN, PHASES_WITHIN = 100.0, 4.0, (0.0, 50.0)",
}
"""Last lines of modules of the copy."""
REASONS = {
    "red": "(gate|audit) failed: ",
    "no answer": "the process (ended without an answer|wrote no message|told nonsense)",
}
"""The beginnings of a failed row's note, by what must come of a trick: it has not just crashed."""
FEW = "--config tiny --precision fp32 --num-steps 100 --warmup-steps 2".split()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """V1, V2 and some tricks, compared."""

    status: int
    rows: dict[str, dict[str, Any]]
    folder: Path
    """With the copy's `code` and the comparison's files in `out`."""
    said: str


Compare = Callable[[bool, int, bool], Comparison]


@pytest.fixture(scope="module")
def compare(tmp_path_factory, type_command) -> Compare:
    """One comparison for all tricks that are alike in: quick, repeats, gpu."""

    @functools.cache
    def run(*kind: Any) -> Comparison:
        folder, (_, repeats, gpu) = tmp_path_factory.mktemp("tricks"), kind
        chosen = [trick for trick in TRICKS if (trick.quick, trick.repeats, trick.gpu) == kind]
        copy_checkout(folder / "code")
        for name, line in ADDED.items():
            with (folder / "code" / name).open("a", encoding="utf-8") as module:
                module.write(f"\n\n{line}\n")
        add_versions(folder / "code", chosen)
        keys = ["v1", "v2", *(trick.name for trick in chosen)]
        words = ["analysis_tools/compare_versions.py", *FEW, "--repeats", str(repeats)]
        words += ["--device", "cuda" if gpu else "cpu"]
        words += ["--output-dir", str(folder / "out"), "--versions", *keys]
        code = folder / "code"
        done = type_command(
            "python", *words, folder=code, PYTHONPATH=str(code), OMP_NUM_THREADS="1"
        )
        written = json.loads((folder / "out" / "comparison.json").read_text())
        rows = {row["version"]: row for row in written["rows"]}
        return Comparison(done.returncode, rows, folder, done.stdout + done.stderr)

    return run


def _marks(trick: Trick) -> list[pytest.MarkDecorator]:
    if trick.gpu:
        return [pytest.mark.gpu]
    return [] if trick.quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    "trick", [pytest.param(trick, id=trick.name, marks=_marks(trick)) for trick in TRICKS]
)
def test_a_trick_earns_nothing(trick, compare) -> None:
    found = compare(trick.quick, trick.repeats, trick.gpu)
    row, honest = found.rows[trick.name], found.rows["v2"]
    assert honest["status"] == "timed" and honest["audit"] == "pass", found.said
    if trick.outcome in REASONS:
        assert row["status"] == "failed" and row["speedup"] is None, row
        assert re.match(REASONS[trick.outcome], row["note"]), row
        assert found.status == 1
    elif trick.outcome == "flagged":
        assert row["plausibility"]
    else:
        assert row["status"] == "failed" or row["speedup"] < LESS * honest["speedup"], row
    assert not (found.folder / "code" / "tricks" / trick.file).with_suffix(".acted").exists()
    written = [path.read_text() for path in (found.folder / "out").rglob("*.json*")]
    assert written and not any(FORGED in text for text in written)


def test_the_document_has_a_line_for_each_kind_of_trick() -> None:
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    table = page.partition("## The tricks")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (?!trick|---)(.*?) \|", table, re.MULTILINE)
    kinds = {trick.kind for trick in TRICKS}
    assert len(lines) == len(kinds)
    assert all(any(line.startswith(kind) for line in lines) for kind in kinds)
