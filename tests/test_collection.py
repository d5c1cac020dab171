"""Results that are found, read once, and followed while they change."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import stored_runs

from workshop import records
from workshop.collection import Collection
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
A_RUN = stored_runs.lines(stored_runs.reference())
A_TABLE = REFERENCE / "cpu_amd_epyc" / "profiles" / "v4" / "pytorch_profiler"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A result file, and a profile with its record."""
    shutil.copytree(A_TABLE, tmp_path / "profiles" / "v4" / "pytorch_profiler")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.jsonl").write_text(A_RUN)
    return tmp_path


def test_what_is_new_changed_or_gone_is_noticed(folder) -> None:
    found = Collection([folder])
    assert found.refresh() and (len(found.runs), len(found.profiles)) == (1, 1)
    held, table = found.runs, found.profiles[0].table
    new = folder / "runs" / "new.jsonl"
    new.write_text(A_RUN)
    assert found.refresh() and len(found.runs) == 2
    assert len(held) == 1 and found.profiles[0].table is table
    (run,) = records.load_runs(new, RunResult)
    records.save(dataclasses.replace(run, precision="fp16"), new)
    assert found.refresh() and [s.run.precision for s in found.runs] == ["bf16", "bf16", "fp16"]
    shutil.rmtree(folder / "runs")
    assert found.refresh() and not found.runs and len(found.profiles) == 1


def test_a_table_without_record_has_its_version_from_its_folder(folder) -> None:
    profile = folder / "profiles" / "v4" / "pytorch_profiler"
    (profile / "run.jsonl").unlink()
    shutil.copytree(profile, folder / "mine")
    found = Collection([folder])
    found.refresh()
    assert [(p.version, p.run) for p in found.profiles] == [("", None), ("v4", None)]
