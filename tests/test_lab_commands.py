"""The commands that guides to this benchmark give, as they are typed, on a network and a batch that
a CPU takes in a second; and the studies of several runs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_lab_inference import SMALL as small_network

from labs.inference_benchmark import measure, networks, studies
from labs.inference_benchmark.micro_benchmarking_pytorch import main
from labs.inference_benchmark.modes import Setting, Variant
from workshop.versions import ROOT

PROGRAM = ROOT / "labs" / "inference_benchmark" / "micro_benchmarking_pytorch.py"
SMALL = ["--network", "resnet18", "--batch-size", "2", "--warmup-iterations", "1"]
"""Behind a command, whose own values they replace."""
COMMANDS = [
    "--network resnet50 --batch-size 32 --iterations 10 --fp16 0 --autograd-profiler",
    "--network densenet121 --batch-size 2048 --iterations 3 --autograd_profiler --kineto",
    "--network resnet50 --batch-size 32 --iterations 12 --fp16 0 --flops-prof-step 10",
]
COMPILED = [
    "--network densenet121 --batch-size 2048 --compile --iterations 3",
    "--network densenet121 --batch-size 2048 --compile --iterations 3"
    """ --compileContext "{'mode': 'max-autotune', 'fullgraph': 'True'}" """,
]
EXPECTED = {
    "--autograd-profiler": ("by total CPU time", "Memory Profiling"),
    "--kineto": (r"Trace: python -m workshop.profilers show .*trace5\.json",),
    "--flops-prof-step": ("Profile Summary at step 10", "fwd FLOPS per GPU"),
    "--compile ": ("Compilation time: ", "Break-even: "),
}


def run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    flags = [*shlex.split(command), *SMALL, "--device", "cpu", "--output-dir", str(tmp_path), *more]
    status = main(flags)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    for flag, lines in EXPECTED.items():
        for line in lines if flag in command else ():
            assert re.search(line, printed.out), line
    assert "Gate: pass" in printed.out and "Throughput: " in printed.out
    return printed.out


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_guides_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(command, tmp_path, capsys)
    for trace in tmp_path.rglob("trace5.json"):
        shown = subprocess.run(
            [sys.executable, "-m", "workshop.profilers", "show", str(trace)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "convolution" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPILED)
def test_a_guides_command_with_the_compiler(command, tmp_path, capsys, monkeypatch) -> None:
    """The first compiles ResNet-18; the others, which show that options are passed on, less."""
    if command != COMPILED[0]:
        monkeypatch.setattr(networks, "get_network", lambda name: small_network)
    run(command, tmp_path, capsys)


@pytest.mark.slow
def test_a_study_alternates_processes_and_writes_its_table(tmp_path: Path) -> None:
    variants = ["fp32", "fp32, channels-last"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *SMALL, "--iterations", "2", "--compare", "memory-format",
         "--repeats", "2", "--device", "cpu", "--output-dir", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    order = re.findall(r"inference, compare memory-format, (.*): .* gate pass$", done.stdout, re.M)
    assert order == [*variants, *variants[::-1]]
    (table,) = tmp_path.glob("compare_memory_format_resnet18*.json")
    rows = json.loads(table.read_text())["rows"]
    assert [row["variant"] for row in rows] == variants
    assert rows[1]["speedup_ci"] and rows[0]["speedup"] is None
    assert all(variant in table.with_suffix(".md").read_text() for variant in variants)


@pytest.mark.parametrize(("names", "variants"), [("resnet18", 2), ("resnet18,squeezenet1_1", 4)])
def test_a_variant_that_fails_is_a_row_without_a_time(
    names, variants, tmp_path, capsys, monkeypatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; print('error: no more disk', file=sys.stderr); sys.exit(1)")
    monkeypatch.setattr("labs.inference_benchmark.studies.PROGRAM", broken)
    flags = [*SMALL, "--compare", "memory-format", "--device", "cpu", "--network", names]
    assert main([*flags, "--output-dir", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().out
    assert output.count("failed; no more disk") == variants  # not tried again
    assert output.count("FAIL") == variants
    (table,) = (tmp_path / "out").glob("compare_memory_format_*.md")
    assert all(name in table.read_text() for name in names.split(","))


@pytest.mark.slow
def test_what_a_batch_needs_counts_activations_in_every_precision() -> None:
    """Converting the weights takes more memory than a few images, and hides what those take."""
    device = torch.device("cpu")
    network = networks.get_network("resnet18")
    model = networks.build(network, 42, device)
    need = {}
    for precision in ("fp32", "bf16"):

        def make(batch: int, precision: str = precision) -> measure.Work:
            setting = Setting(network, device, batch, 42)
            return studies.make_work(model, Variant(precision), setting, False)

        _, need[precision] = studies.cpu_need(make, model, network.edge)
    assert need["fp32"] > 5e6 and 0.4 < need["bf16"] / need["fp32"] < 0.9
