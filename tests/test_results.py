"""Result files: what is written comes back, and what is broken is named, never met later."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from workshop import records, results
from workshop.errors import WorkshopError
from workshop.records import Comparison
from workshop.results import Audit, Gradients, Parity, RunResult
from workshop.versions import VERSIONS

SESSION = "20260102-030405-abcdef"
SIZES = {
    "vocab_size": 1000,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "max_seq_len": 2048,
}


def make_result(
    version: str = "v1", gate: str | Parity = "pass", audit: str = "pass", **changes: Any
) -> RunResult:
    """A run as the command line writes it; `changes` replace its fields."""
    run = RunResult(
        version=version,
        session=SESSION,
        created="2026-01-02T03:04:05+00:00",
        status="complete",
        error=None,
        config_name="tiny",
        config={**SIZES, "rope_theta": 10000.0, "norm_eps": 1e-5},
        batch_size=8,
        seq_len=128,
        precision="fp32",
        options={
            "compile": VERSIONS[version].compile,
            "cuda_graph": False,
            "learning_rate": 3e-4,
            "seed": 42,
        },
        command=["python", f"tiny_llama_{version}.py"],
        git_commit="0123456789ab",
        device={"type": "cpu", "name": "Some CPU", "peaks_source": None, "threads": 2},
        software={"python": "3.11.7", "torch": "2.13.0", "cuda": None},
        data={"name": "some text", "bytes": 1000},
        warmup_steps=1,
        step_ms=[99.0, 100.0, 101.0, 100.0, 100.0],
        forward_ms=[30.0, 30.0],
        backward_ms=[60.0, 60.0],
        optimizer_ms=[10.0, 10.0],
        setup_s={"warm_up": 1.5},
        memory_mb={
            "peak": 200.0,
            "weights": 17.0,
            "gradients": 17.0,
            "optimizer_state": 34.0,
            "rest": 132.0,
            "source": "profiled allocations",
        },
        losses=[6.9, 6.0, 5.0, 4.0, 3.5, 3.0],
        gradients=Gradients(38, 38, 4190464, 4190464),
        gate=gate
        if isinstance(gate, Parity)
        else Parity(
            status=gate,
            failures=["gradient of norm.weight is missing"] if gate == "fail" else [],
            batch_size=8,
            seq_len=128,
            reference="V1 in float64",
            measures={"loss": {"error": 1e-7, "allowed": 1e-6, "baseline": None}},
        ),
        audit=Audit(
            status=audit,
            failures=["timed run: loss 4.0 in step 9, V1's 3.3"] if audit == "fail" else [],
            steps=6,
            seconds=1.5,
            why="" if audit != "not run" else results.NOT_AUDITED,
        ),
        plausibility=[],
        peak_tflops=0.5,
        peak_source="measured: a large matrix product",
    )
    return dataclasses.replace(run, **changes)


def write(folder: Path, content: object) -> Path:
    """A file whose second line has any content, as JSON unless it is text or bytes."""
    path = folder / "run.jsonl"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    line = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(json.dumps(HEAD).encode() + b"\n" + line + b"\n")
    return path


def changed(*path: str | int, to: object) -> dict[str, Any]:
    """A valid run's content with one value replaced, the root where no path is given."""
    content = dataclasses.asdict(make_result())
    *above, last = path
    place: Any = content
    for key in above:
        place = place[key]
    place[last] = to
    return content


def load(path: Path) -> RunResult:
    """The only run of a file."""
    (run,) = records.load_runs(path, RunResult)
    return run


def load_folder(folder: Path) -> list[RunResult]:
    return records.load_folder(folder, RunResult)


def files(folder: Path) -> list[str]:
    """All files below a folder, hidden ones too."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "run",
    [
        make_result(),
        make_result("v4", status="failed", error="crashed", step_ms=[], losses=[], gradients=None),
        make_result(status="interrupted", memory_mb={}, forward_ms=[], peak_tflops=None),
    ],
    ids=lambda run: run.status,
)
def test_what_is_saved_is_loaded(run, tmp_path) -> None:
    other = make_result("v4", device={"name": "another"}, parent_command=["python", "x.py"])
    path = records.add(run, tmp_path)
    assert path == records.add(other, tmp_path) == records.path_in(tmp_path, SESSION)
    assert records.load(path).runs == [run, other]
    head, first, second = map(json.loads, path.read_text().splitlines())
    assert head == HEAD
    assert "device" not in first and second["device"] == {"name": "another"}
    assert files(tmp_path) == [str(path.relative_to(tmp_path))]  # no temporary file


def test_a_run_that_is_judged_later_is_written_once_more(tmp_path) -> None:
    run, path = make_result(audit="not run"), tmp_path / "a.jsonl"
    comparison = Comparison.of(run)
    for one in (run, make_result("v2")):
        comparison.add(one, path)
    run.audit = Audit("pass")
    comparison.add(run, path)
    assert records.load(path) == comparison and len(comparison.runs) == 2


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["comparison.png", "folder/file"])
def test_the_new_takes_the_place_of_the_old_whole_or_not_at_all(name, error, tmp_path) -> None:
    first, *below = Path(name).parts

    def put(place: Path, text: str) -> None:
        path = place.joinpath(*below)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    put(tmp_path / first, "old")
    failing = pytest.raises(error) if error else contextlib.nullcontext()
    with failing, results.atomic_path(tmp_path / first) as path:
        assert path.parent == tmp_path and path.suffix.endswith(Path(first).suffix)
        put(path, "new")
        if error:
            raise error
    assert files(tmp_path) == [name]
    assert (tmp_path / name).read_text() == ("old" if error else "new")


def test_a_file_from_before_a_field_is_read(tmp_path) -> None:
    content = {k: v for k, v in json.loads(VALID).items() if k not in ("kind", "audit")}
    run = load(write(tmp_path, content))
    assert (run.kind, run.audit) == ("run", Audit())


def test_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = records.add(make_result(), tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", no_room)
    with pytest.raises(WorkshopError, match=r"jsonl can't be written: No space left on device"):
        records.add(make_result("v2"), tmp_path)
    assert path.read_bytes() == before
    with pytest.raises(WorkshopError, match=r"x\.json can't be written: No space left on device"):
        results.write_json(tmp_path / "x.json", {})
    assert files(tmp_path) == [str(path.relative_to(tmp_path))]


def test_what_json_cannot_hold_is_not_written(tmp_path) -> None:
    assert results.finite([1.0, math.nan, math.inf]) == [1.0, None, None]
    path = records.add(make_result(losses=results.finite([math.nan] * 6)), tmp_path)
    assert load(path).losses == [None] * 6
    with pytest.raises(ValueError):
        records.add(make_result(losses=[math.nan] * 6), tmp_path)
    assert len(records.load(path).runs) == 1
    with pytest.raises(ValueError):
        results.write_json(tmp_path / "x.json", {"loss": math.nan})
    assert not (tmp_path / "x.json").exists()


HEAD: dict[str, Any] = {
    "schema_version": records.SCHEMA_VERSION,
    "session": SESSION,
    **{name: getattr(make_result(), name) for name in ("device", "software", "git_commit")},
    "command": [],
}
VALID = json.dumps(dataclasses.asdict(make_result()))
BROKEN = {
    "truncated": (VALID[: len(VALID) // 2], "no valid JSON"),
    "NaN": (VALID.replace("99.0", "NaN"), "no valid JSON"),
    "missing": ({k: v for k, v in json.loads(VALID).items() if k != "version"}, "field `version`"),
    "unknown": (changed("speed", to=9), "field speed is unknown"),
    "text for a time": (changed("step_ms", 1, to="99"), r"field step_ms\[1\]: expected `float`"),
    "unknown version": (changed("version", to="v9"), "version is 'v9', not one of v1, v2"),
    "red audit without reason": (changed("audit", "status", to="fail"), "audit: failures is empty"),
    "complete without steps": (changed("step_ms", to=[]), "step_ms is empty in a complete run"),
    "no size": (changed("config", to={}), r"config\.vocab_size is not a size: None"),
    "no peak": (changed("memory_mb", to={"source": "allocator"}), r"memory_mb\.peak is missing"),
    "text for memory": (
        changed("memory_mb", "rest", to="x"),
        r"memory_mb\.rest should be a number",
    ),
    "too few losses": (changed("losses", to=[1.0]), "losses is shorter than step_ms"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_with_its_line_and_field(content, message, tmp_path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(WorkshopError, match=message) as caught:
        records.load(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_another_schema_is_named(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(HEAD | {'schema_version': 1})}\n{VALID}\n")
    with pytest.raises(WorkshopError, match="schema_version is 1, this workshop reads 2"):
        records.load(tmp_path / "a.jsonl")


def test_a_folder_gives_its_runs_and_nothing_else(tmp_path) -> None:
    newer, older = make_result(session="20260103"), make_result("v2", session="20260101")
    path = records.add(newer, tmp_path)
    records.add(older, tmp_path)
    results.write_json(
        tmp_path / "comparison.json", {"schema_version": 1, "created": "", "rows": []}
    )
    results.write_text(tmp_path / "runs" / ".half.jsonl", "{")
    results.prepare_folder(tmp_path / "runs" / "20260101")
    results.write_text(tmp_path / "runs" / "20260101" / "v4_tiny.log", "crashed")
    assert load_folder(tmp_path) == [older, newer]  # oldest session first
    assert load_folder(tmp_path / "runs") == [older, newer]
    assert load_folder(path) == [newer]
    # As under results/reference/: a folder a device, each with its own runs/.
    device_folder = tmp_path / "reference" / "some_gpu"
    third = make_result("v4", session="20260102")
    records.add(third, device_folder)
    assert load_folder(tmp_path) == [older, third, newer]
