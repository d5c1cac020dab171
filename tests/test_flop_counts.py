"""FLOP counters side by side: each against the model's sizes, to the operation."""

import importlib.util
import json
import shlex
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_cli import ONE_CORE, SMALL, WIDE_HEADS, TypeCommand, script
from test_versions import ON_CPU

from workshop import errors, results, versions
from workshop.collection import Collection
from workshop.profilers import flop_counts, profile_run
from workshop.run import flops, interpreter
from workshop.run.precision import get_precision

NAME = "run_deepspeed_flops.py"
B, T = 3, 17


def make_step(key: str, config, precision: str = "fp32") -> flop_counts.CountedStep:
    module = versions.load(key)
    torch.manual_seed(0)
    model = module.TinyLlama(config)
    tokens = torch.randint(config.vocab_size, (2, B, T))
    device = torch.device("cpu")
    return flop_counts.CountedStep(model, get_precision(precision, device), tokens)


@pytest.mark.parametrize("key", ON_CPU)
def test_pytorchs_count_is_the_analytic_one_but_for_what_the_report_says(
    key: str, odd_config
) -> None:
    """Twice attention's causal half; in V3 the half, its scores again, and the head's gradients in
    the forward pass."""
    counted = flop_counts.count_with_torch(make_step(key, odd_config, "bf16"))
    weights = flops.matmul_flops(odd_config, B * T)
    half = flops.attention_flops(odd_config, B, T)
    head = 2 * B * T * odd_config.hidden_dim * odd_config.vocab_size
    expected = (weights + 2 * half, 2 * weights + 4 * half)
    if key == "v3":
        expected = (weights + half + 2 * head, 2 * weights + 3.5 * half - 2 * head)
        assert counted[0]["tiny_llama.linear_cross_entropy"] == 3 * head
    assert tuple(sum(phase.values()) for phase in counted) == expected


# --- DeepSpeed ------------------------------------------------------------------------------------


def test_deepspeed_is_asked_before_it_forgets(
    odd_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class FlopsProfiler:
        """Its counts are gone once it has ended."""

        def __init__(self, model: torch.nn.Module) -> None:
            model.register_forward_hook(lambda *_: calls.append("forward"))
            self.get_total_flops = lambda: 0 if "end" in calls else 100
            self.start_profile = lambda: calls.append("start")
            self.end_profile = lambda: calls.append("end")

        def print_model_profile(self, output_file: str) -> None:
            with Path(output_file).open("w") as sys.stdout:
                print("the report")

    for name in ("deepspeed", "deepspeed.profiling", "deepspeed.profiling.flops_profiler"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.FlopsProfiler = FlopsProfiler  # type: ignore[attr-defined]
    step, report, stdout = make_step("v1", odd_config), tmp_path / "profile.txt", sys.stdout
    assert flop_counts.count_with_deepspeed(step, report) == (100, "")
    assert calls == ["start", "forward", "end"]
    assert report.read_text() == "the report\n"
    assert sys.stdout is stdout


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow) if key == "v3" else key for key in ON_CPU]
)
def test_the_true_deepspeed_counts_the_forward_pass(key: str, odd_config, tmp_path: Path) -> None:
    """All of attention's square, or none of it in a Triton kernel; and some element-wise work."""
    pytest.importorskip("deepspeed")
    step, report = make_step(key, odd_config, "bf16"), tmp_path / "profile.txt"
    matmul = torch.Tensor.__matmul__
    counted, error = flop_counts.count_with_deepspeed(step, report)
    assert counted is not None and not error
    weights = flops.matmul_flops(odd_config, B * T)
    square = 0 if key == "v3" else 2 * flops.attention_flops(odd_config, B, T)
    assert 0 <= counted - weights - square < 0.02 * weights
    assert "self_attn" in report.read_text()
    assert torch.Tensor.__matmul__ is matmul  # what it patched is as before


# --- the report -----------------------------------------------------------------------------------


def run_script(
    type_command: TypeCommand, key: str, folder: Path, *words: str
) -> tuple[str, SimpleNamespace]:
    """The script's output, in one line, and flops.json."""
    answer = type_command("python", NAME, "--output-dir", folder, *words, **script(key), **ONE_CORE)
    assert answer.returncode == 0, answer.stderr
    assert "Traceback" not in answer.stderr
    report = (folder / "flops.md").read_text()
    assert report in answer.stdout
    found = Collection([folder])
    found.refresh()
    assert (found.runs, found.broken) == ([], [])
    record = json.loads((folder / "flops.json").read_text())
    return " ".join(answer.stdout.split()), SimpleNamespace(**record)


def test_the_script_counts_times_and_writes(type_command: TypeCommand, tmp_path: Path) -> None:
    printed, record = run_script(type_command, "v2", tmp_path, "--steps", "3", "--", *SMALL)
    step = flops.step_flops(results.model_sizes(record.config), 2, 16)
    assert record.counts["analytic"] == {"forward": step.forward, "backward": step.backward}
    assert len(record.step_ms) == 3 and record.peak_source == "measured: a large matrix product"
    median_s = sorted(record.step_ms)[1] / 1e3
    assert record.mfu == pytest.approx(step.total / median_s / 1e12 / record.peak_tflops)
    assert f"MFU: {record.mfu:.1%}. {step.total:,.0f} FLOP in " in printed
    assert f"| analytic | {step.forward:,.0f} | {step.backward:,.0f} | 1.0000 |" in printed
    assert " gradients reached " in printed
    if importlib.util.find_spec("deepspeed"):
        assert "not counted" in printed and (tmp_path / "deepspeed_profile.txt").is_file()
    else:
        assert "| DeepSpeed | not installed |" in printed
        assert "pip install -r setup/requirements-profiling.txt" in printed
    mark, command, end = (tmp_path / "command.txt").read_text().splitlines()
    assert (mark, end) == (f"# {NAME}", "# exit status 0")
    folder = shlex.quote(str(tmp_path))
    assert command.startswith(f"python {NAME} --output-dir {folder} --steps 3 -- --device")


@pytest.mark.slow
@pytest.mark.skipif("v3" not in ON_CPU, reason="Triton's interpreter is off")
def test_an_interpreted_step_is_counted_on_one_sequence_and_not_timed(
    type_command: TypeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():  # V3 turns it on, if nothing imports Triton first
        monkeypatch.delenv(interpreter.VARIABLE)
    words = ("--", *SMALL, *WIDE_HEADS, "--batch-size", "5")
    printed, record = run_script(type_command, "v3", tmp_path, *words)
    assert "MFU: interpreted, not comparable." in printed
    assert "Counted on 1 sequence, in Triton's interpreter, and multiplied by 5" in printed
    assert (record.step_ms, record.mfu, record.counted_batch_size) == ([], None, 1)
    by_operator = record.counts["FlopCounterMode"]["forward_by_operator"]
    assert by_operator["tiny_llama.linear_cross_entropy"] == 3 * 2 * 5 * 16 * 64 * 300


@pytest.mark.parametrize("error", ["not installed", "failed (MissingCUDAException: y)"])
def test_without_deepspeed_the_table_is_whole_and_a_cut_backward_pass_is_named(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = profile_run.make_request(versions.VERSIONS["v1"], SMALL, 1)
    monkeypatch.setattr(flop_counts, "count_with_deepspeed", lambda *_: (None, error))
    monkeypatch.setattr(request.module.TinyLlama, "__call__", cut_off, raising=False)
    batch = torch.zeros(2, 2, 16, dtype=torch.long)
    record = flop_counts.count(request, batch, tmp_path / "x")
    assert flop_counts.write(record, tmp_path, "python x") == errors.DONE
    counts = json.loads((tmp_path / "flops.json").read_text())["counts"]["DeepSpeed"]
    assert counts == {"forward": None, "backward": None, "error": error}
    printed = " ".join(capsys.readouterr().out.split())
    assert f"- DeepSpeed {error}".replace("DeepSpeed not", "DeepSpeed is not") in printed
    assert "SEVERED: gradients reached 1 of " in printed


def cut_off(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that reaches the last norm alone."""
    return model.forward(tokens, targets).detach() + model.norm.weight.sum()
