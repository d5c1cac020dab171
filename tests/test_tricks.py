"""The tricks of tests/tricks.py, each as a version of a real comparison: none earns a speed-up."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_compare import SHRINK_PRESET, TypeCommand, copy_repository, tool
from tricks import TRICKS, Trick, add_versions

FORGED = "feedc0de"
"""Text that the tricks write where they forge a record."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """V1, V2 and some tricks, compared."""

    status: int
    rows: dict[str, dict[str, Any]]
    folder: Path
    """With the copy's `code` and the comparison's files in `out`."""
    said: str


Compare = Callable[[bool, int], Comparison]
SIZES = (SHRINK_PRESET[0], "Preset(64, 2, 4, 16, 2, 300)")
FEW = "--config tiny --precision fp32 --num-steps 4 --warmup-steps 2 --device cpu".split()


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory, type_command: TypeCommand) -> Compare:
    """One comparison for all tricks that are as quick and take as many repeats."""

    @functools.cache
    def run(quick: bool, repeats: int) -> Comparison:
        folder = tmp_path_factory.mktemp("tricks")
        chosen = [t for t in TRICKS if (t.quick, t.repeats, t.gpu) == (quick, repeats, False)]
        code = copy_repository(folder / "code", {"workshop/run/presets.py": SIZES})
        add_versions(code, chosen)
        keys = ["v1", "v2", *(trick.name for trick in chosen)]
        words = [*tool("--versions", *keys), *FEW, "--repeats", str(repeats)]
        done = type_command(*words, "--output-dir", folder / "out", folder=code, PYTHONPATH="")
        written = json.loads((folder / "out" / "comparison.json").read_text())
        rows = {row["version"]: row for row in written["rows"]}
        return Comparison(done.returncode, rows, folder, done.stdout + done.stderr)

    return run


def _cases() -> list[Any]:
    return [
        pytest.param(trick, id=trick.name, marks=[] if trick.quick else [pytest.mark.slow])
        for trick in TRICKS
        if not trick.gpu
    ]


@pytest.mark.parametrize("trick", _cases())
def test_a_trick_earns_no_speed_up(trick: Trick, compare: Compare) -> None:
    found = compare(trick.quick, trick.repeats)
    row, honest = found.rows[trick.name], found.rows["v2"]
    assert honest["speedup"] is not None and honest["verdict"] == "pass", found.said
    if trick.outcome == "red":
        assert row["speedup"] is None and row["verdict"] != "pass", row
        assert found.status == 1
        return
    assert not (found.folder / "code" / "tricks" / trick.file).with_suffix(".acted").exists()
    results = (found.folder / "out").rglob("*.json*")
    assert not any(FORGED in path.read_text() for path in results)
