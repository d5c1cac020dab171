"""The check of a machine, and the table of all machines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workshop.classroom import check_machine
from workshop.classroom.check_machine import Machine
from workshop.versions import ROOT


def row(what: str, found: str = "yes", **more: Any) -> dict[str, Any]:
    """As a validation script prints it."""
    texts = {"version": "", "purpose": "", "remedy": "", "needed": False}
    return {"what": what, "found": found, **texts, **more}


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
    """Examines a machine whose scripts and gates say what a test says."""
    monkeypatch.setattr(check_machine, "SCRIPTS", tmp_path)

    def examine(gates: dict[str, tuple[str, str]], **found: list[dict[str, Any]]) -> Machine:
        monkeypatch.setattr(check_machine, "gate", lambda key: gates.get(key, ("pass", "")))
        for name in (check_machine.ENVIRONMENT, check_machine.ROCM, check_machine.PROFILERS):
            rows = (IN_ORDER | found).get(name)
            status = 0 if rows is not None else 77
            text = json.dumps({"rows": rows or [row("ROCm", "no")]})
            (tmp_path / f"{name}.py").write_text(f"print({text!r})\nraise SystemExit({status})\n")
        return check_machine.examine("machine")

    return examine


def test_a_machine_is_ready_or_says_what_to_fix(room) -> None:
    machine = room({})
    assert not machine.attention and {*machine.versions.values()} == {"pass"}
    assert (machine.device, machine.torch) == ("1 x Test GPU", "2.9.0, CUDA 13.0")
    assert machine.profilers == ["torch.profiler"]
    # Nothing is missing of ROCm, or of AMD's profilers, on an NVIDIA machine.
    assert machine.absent == ["ncu (missing): Nsight Compute"]
    broken = row("torch.compile", "BROKEN", version="InvalidCxxCompiler", remedy="install g++")
    rich = row("rich", "no", needed=True)
    gates = {"v2": ("FAIL", "logits"), "v3": ("skipped", "no Triton")}
    machine = room(gates, test_environment=[*IN_ORDER["test_environment"], broken, rich])
    assert machine.attention == [
        *("torch.compile (InvalidCxxCompiler): install g++", "rich (missing)", "v2: logits")
    ]
    assert "v3: no Triton" in machine.absent and machine.gates.endswith("FAIL v2; skipped v3")


@pytest.mark.parametrize(
    ("outcome", "kernels", "why"),
    [
        ((0, "", ""), 3, ""),
        ((0, "", ""), 2, "2 kernels in its output"),
        ((1, "", "error: run_ncu.sh: ncu failed with exit status 9"), 0, "ncu failed with exit"),
        ((77, "", "skipped: no right to read counters"), 0, "no right to read counters"),
        ((None, "", "no answer within 400 s"), 0, "no answer within 400 s"),
    ],
)
def test_a_profiler_has_to_record_a_step(room, outcome, kernels, why, monkeypatch) -> None:
    def run(command: list[str]) -> tuple[int | None, str, str]:
        if command[0] != "bash":
            return original(command)
        out = Path(command[command.index("--output-dir") + 1])
        out.mkdir()
        (out / "kernels.json").write_text(json.dumps({"kernels": kernels * [{}]}))
        return outcome

    original = check_machine._run
    monkeypatch.setattr(check_machine, "_run", run)
    machine = room({}, test_profiling_tools=[row("ncu", purpose="NVIDIA: counters")])
    assert machine.profilers == ([] if why else ["ncu"])
    assert [why in sentence for sentence in machine.attention] == ([True] if why else [])


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ((0, "", "a warning"), ("pass", "")),
        ((77, "", "error: no Triton"), ("skipped", "no Triton")),
        ((1, "v3: FAIL, 1 reason\n  logits: 1\n", "a warning"), ("FAIL", "logits: 1")),
        ((None, "", "no answer within 400 s"), ("FAIL", "no answer within 400 s")),
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
    (path,) = machines.iterdir()
    found = json.loads(path.read_text())
    assert (path.name, found["name"], {*found["versions"].values()}) == (
        "07.json",
        "07",
        {"untried"},
    )


def put(folder: Path, name: str, **more: Any) -> None:
    content = dict.fromkeys(("checked", "python"), "2026") | {"device": "1 x Test GPU"}
    content |= {"name": name, "commit": "abc", "torch": "2.13.0, CUDA 13.0"}
    content |= {"versions": dict.fromkeys(check_machine.VERSIONS, "pass")}
    content |= {"profilers": ["nsys"], "attention": [], "absent": []}
    (folder / f"{name}.json").write_text(json.dumps(content | more))


def collect(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    status = check_machine.main(["--collect", *map(str, words)])
    return status, capsys.readouterr().out


def test_all_machines_ready(tmp_path, capsys) -> None:
    for number in (10, 2, 1):
        put(tmp_path, f"machine{number}")
    status, text = collect(capsys, tmp_path, "--expect", "3")
    assert status == 0 and "3 of 3 machines ready" in text and "not the same" not in text
    places = [text.index(f" machine{number} ") for number in (1, 2, 10)]
    assert places == sorted(places)


def test_the_table_says_what_is_missing_where(tmp_path, capsys) -> None:
    absent = "ncu (missing): Nsight Compute"
    put(tmp_path, "a", absent=[absent])
    put(tmp_path, "b", absent=[absent], commit="old")
    put(tmp_path, "c", attention=["torch (missing): setup"], torch="missing")
    (tmp_path / "d.json").write_text("{")
    status, text = collect(capsys, tmp_path, "--expect", "5")
    assert status == 1
    for words in (
        *("2 of 3 machines ready", "d.json: can't be read", "2 of 5 machines left no file"),
        *("c: fix torch (missing): setup", "without ncu (missing): Nsight Compute [a, b]"),
        "not the same everywhere, the checkout: abc on a, c; old on b",
        "not the same everywhere, PyTorch: 2.13.0, CUDA 13.0 on a, b; missing on c",
    ):
        assert words in text
