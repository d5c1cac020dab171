"""Results that are found, read once, and followed while they change."""

import dataclasses
import shutil
import time
from pathlib import Path

import pytest
import stored_runs

from workshop import records
from workshop.collection import Collection
from workshop.errors import WorkshopError
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
H200 = REFERENCE / "nvidia_h200"
A_RUN = stored_runs.lines(stored_runs.reference())
A_TABLE = REFERENCE / "cpu_amd_epyc" / "profiles" / "v4" / "pytorch_profiler"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A result file, and a profile with its record."""
    shutil.copytree(A_TABLE, tmp_path / "profiles" / "v4" / "pytorch_profiler")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.jsonl").write_text(A_RUN)
    return tmp_path


def test_reference_results_are_all_found() -> None:
    found = Collection([REFERENCE])
    assert found.refresh() and not found.broken
    assert [stored.run for stored in found.runs] == sorted(
        records.load_folder(H200, RunResult), key=lambda run: run.session
    )
    assert {(p.version, p.tool, p.run is not None) for p in found.profiles} == {
        (version, tool, True)
        for version in ("v1", "v2", "v3", "v4")
        for tool in ("torch.profiler", "ncu", "proton")
    } | {("", "torch.profiler", False)}
    assert {p.lab.variant for p in found.profiles if p.lab} == {"fp32", "fp16"}
    folders = [path.parents[1] for path in found.kernels]
    assert folders == [H200 / "kernels", H200 / "kernels_drawn"]
    assert {run.lab for its in found.kernels.values() for run in its} == {"kernels"}
    assert not found.refresh()


def test_what_is_new_changed_or_gone_is_noticed(folder: Path) -> None:
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


def test_results_on_another_disk_are_found(folder: Path, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("disk")
    (folder / "runs").rename(elsewhere / "runs")
    (folder / "runs").symlink_to(elsewhere / "runs")
    (elsewhere / "runs" / "back").symlink_to(folder)
    found = Collection([folder])
    found.refresh()
    assert (len(found.runs), len(found.profiles)) == (1, 1)


def test_folders_in_each_other_count_once(folder: Path) -> None:
    (folder / "link").symlink_to(folder)
    found = Collection([folder / "runs", folder, folder / "link"])
    found.refresh()
    assert len(found.runs) == 1


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("runs/cut.jsonl", A_RUN[:1500]),
        ("runs/s/empty.jsonl", ""),
        ("runs/s/other.jsonl", "[1]"),
        ("cut.jsonl", A_RUN[:1500]),
        ("typo.jsonl", A_RUN.replace('"step_ms"', '"stepms"', 1)),
        ("no.jsonl", "not JSON"),
        ("profiles/v1/ncu/kernels.json", "{"),
        ("profiles/v4/pytorch_profiler/run.jsonl", "{"),
        ("other/kernels.json", '{"schema_version": 1, "kernel_table": "ncu", "kernels": [3]}'),
    ],
)
def test_a_broken_file_is_named_and_harms_no_other(folder: Path, place: str, text: str) -> None:
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).write_text(text)
    found = Collection([folder])
    found.refresh()
    assert [broken.path for broken in found.broken] == [folder / place]
    assert place in found.broken[0].reason and "\n" not in found.broken[0].reason
    assert (len(found.runs), len(found.profiles)) == (1, 1)
    (folder / place).unlink()
    assert found.refresh() and not found.broken


def test_other_files_are_passed_over(folder: Path) -> None:
    for place in ("a.json", "runs/s/a.json", "profiles/v1/a.json", "runs/.a.jsonl", "s/a.jsonl"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text("x")
    found = Collection([folder])
    found.refresh()
    assert not found.broken and (len(found.runs), len(found.profiles)) == (1, 1)
    assert len(records.load_folder(folder, RunResult)) == 1


def test_a_file_of_others_is_passed_over(folder: Path) -> None:
    (folder / "settings.json").write_text('{"color": "red"}')
    found = Collection([folder])
    found.refresh()
    assert (len(found.runs), len(found.profiles), found.broken) == (1, 1, [])


def test_a_table_without_record_has_its_version_from_its_folder(folder: Path) -> None:
    profile = folder / "profiles" / "v4" / "pytorch_profiler"
    (profile / "run.jsonl").unlink()
    shutil.copytree(profile, folder / "mine")
    found = Collection([folder])
    found.refresh()
    assert [(p.version, p.run) for p in found.profiles] == [("", None), ("v4", None)]


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkshopError, match="no such folder"):
        Collection([tmp_path / "nothing"])


def test_a_thousand_files_take_less_than_their_share_of_the_start(
    tmp_path: Path,
) -> None:
    stored_runs.write_many(tmp_path, 1000)
    found = Collection([tmp_path])
    start = time.thread_time()
    found.refresh()
    assert len(found.runs) == 1000 and not found.broken
    assert time.thread_time() - start < 2.5
    start = time.thread_time()
    assert not found.refresh()
    assert time.thread_time() - start < 0.2
