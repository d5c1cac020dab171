"""The check of a machine, and the table of all machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from workshop.classroom import check_machine
from workshop.classroom.check_machine import Machine

ROOT = Path(__file__).resolve().parents[1]
TypeCommand = Callable[..., "CompletedProcess[str]"]


def row(what: str, found: str = "yes", **more: Any) -> dict[str, Any]:
    """As a validation script prints it."""
    return {"what": what, "found": found, "version": "", "purpose": "", "remedy": ""} | {
        "needed": False,
        **more,
    }


IN_ORDER = {
    check_machine.ENVIRONMENT: [
        row("torch", version="2.9.0, CUDA 13.0", needed=True),
        row("device", version="1 x Test GPU"),
    ],
    check_machine.PROFILERS: [
        row("torch.profiler", needed=True),
        row("rocprofv3", "no", purpose="AMD: kernels", remedy="module load rocm"),
        row("ncu", "no", purpose="NVIDIA: counters", remedy="Nsight Compute"),
    ],
}


@pytest.fixture
def room(tmp_path, monkeypatch) -> Callable[..., Machine]:
    """Examines a machine whose scripts print what a test says, and whose gates are green."""
    monkeypatch.setattr(check_machine, "SCRIPTS", tmp_path)
    monkeypatch.setattr(check_machine, "gate", lambda key: (check_machine.PASS, ""))

    def examine(**found: list[dict[str, Any]]) -> Machine:
        for name in (check_machine.ENVIRONMENT, check_machine.ROCM, check_machine.PROFILERS):
            rows = (IN_ORDER | found).get(name)
            status = 0 if rows is not None else 77
            text = json.dumps({"rows": rows or [row("ROCm", "no")]})
            (tmp_path / f"{name}.py").write_text(f"print({text!r})\nraise SystemExit({status})\n")
        return check_machine.examine("machine")

    return examine


def test_a_machine_in_order_is_ready_and_lists_what_is_missing(room) -> None:
    machine = room()
    assert not machine.attention
    assert (machine.device, machine.torch) == ("1 x Test GPU", "2.9.0, CUDA 13.0")
    assert machine.profilers == ["torch.profiler"]
    assert set(machine.versions.values()) == {check_machine.PASS}
    # Nothing is missing of ROCm, or of AMD's profilers, on an NVIDIA machine.
    assert machine.absent == ["ncu (missing): Nsight Compute"]


def test_what_is_broken_or_needed_must_be_fixed_and_what_is_skipped_need_not(
    room, monkeypatch
) -> None:
    gates = {
        "v2": (check_machine.FAIL, "its gate is red: logits"),
        "v3": (check_machine.SKIPPED, "no Triton"),
    }
    monkeypatch.setattr(check_machine, "gate", lambda key: gates.get(key, (check_machine.PASS, "")))
    broken = row("torch.compile", "BROKEN", version="InvalidCxxCompiler", remedy="install g++")
    rich = row("rich", "no", needed=True)
    machine = room(test_environment=[*IN_ORDER[check_machine.ENVIRONMENT], broken, rich])
    assert machine.attention == [
        "torch.compile (InvalidCxxCompiler): install g++",
        "rich (missing)",
        "v2: its gate is red: logits",
    ]
    assert "v3: no Triton" in machine.absent
    assert machine.versions == {"v1": "pass", "v2": "FAIL", "v3": "skipped", "v4": "pass"}


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ((0, "", "a warning"), (check_machine.PASS, "")),
        ((77, "", "error: no Triton"), (check_machine.SKIPPED, "no Triton")),
        ((1, "v3: FAIL, 1 reasons\n  logits: 1\n", "a warning"), (check_machine.FAIL, "logits: 1")),
        ((None, "", "no answer within 400 s"), (check_machine.FAIL, "no answer within 400 s")),
    ],
)
def test_how_a_gate_ended_is_its_verdict(outcome, expected, monkeypatch) -> None:
    monkeypatch.setattr(check_machine, "_run", lambda command: outcome)
    assert check_machine.gate("v3") == expected


def test_a_machine_with_a_broken_torch_gets_its_row(type_command, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libamdhip64.so: not found')\n")
    machines = tmp_path / "machines"
    words = ("-m", "workshop.classroom.check_machine", "--machine", "07", "--output-dir", machines)
    answer = type_command("python", *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert answer.returncode == 1, answer.stderr
    assert "07: NEEDS ATTENTION" in answer.stdout
    assert "libamdhip64.so: not found" in answer.stdout
    [machine], problems = check_machine.read_all(machines)
    assert (machine.name, problems) == ("07", [])
    assert set(machine.versions.values()) == {check_machine.UNTRIED}
    assert [path.name for path in machines.iterdir()] == ["07.json"]


def put(folder: Path, name: str, **more: Any) -> None:
    content = {
        "name": name,
        "checked": "2026-01-01T08:00:00+00:00",
        "commit": "abc",
        "python": "3.12.3",
        "torch": "2.13.0, CUDA 13.0",
        "device": "1 x Test GPU",
        "versions": dict.fromkeys(check_machine.VERSIONS, "pass"),
        "profilers": ["torch.profiler", "nsys"],
        "attention": [],
        "absent": [],
    }
    (folder / f"{name}.json").write_text(json.dumps(content | more))


def collect(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    status = check_machine.main(["--collect", *map(str, words)])
    return status, capsys.readouterr().out


def test_all_machines_ready(tmp_path, capsys) -> None:
    for number in (10, 2, 1):
        put(tmp_path, f"machine{number}")
    status, text = collect(capsys, tmp_path, "--expect", "3")
    assert status == 0
    assert "3 of 3 machines ready" in text
    places = [text.index(f" machine{number} ") for number in (1, 2, 10)]
    assert places == sorted(places)
    assert "not the same" not in text


def test_the_table_says_what_is_missing_where(tmp_path, capsys) -> None:
    absent = "ncu (missing): Nsight Compute"
    put(tmp_path, "a", absent=[absent])
    put(tmp_path, "b", absent=[absent], commit="old")
    put(tmp_path, "c", attention=["torch (missing): setup"], torch="missing")
    (tmp_path / "d.json").write_text("{")
    status, text = collect(capsys, tmp_path, "--expect", "5")
    assert status == 1
    assert "2 of 3 machines ready" in text
    assert "d.json: can't be read" in text
    assert "2 of 5 machines left no file" in text
    assert "c: fix torch (missing): setup" in text
    assert "without ncu (missing): Nsight Compute [a, b]" in text
    assert "not the same everywhere, the checkout: abc on a, c; old on b" in text
    assert "not the same everywhere, PyTorch: 2.13.0, CUDA 13.0 on a, b; missing on c" in text


def test_a_machines_name_is_a_files_name(tmp_path, capsys, monkeypatch) -> None:
    for name in ("../x", "a b", ".hidden", "x" * 65, "a/b"):
        assert check_machine.main(["--machine", name, "--output-dir", str(tmp_path / "new")]) == 2
        assert capsys.readouterr().err.startswith("error: --machine ")
        assert not (tmp_path / "new").exists()
    for node, name in (("node-07.site", "node-07.site"), ("my laptop/1", "my-laptop-1"), ("", "")):
        monkeypatch.setattr(check_machine.platform, "node", lambda node=node: node)
        assert check_machine.machine_name(None) == (name or "machine")
