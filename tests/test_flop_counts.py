"""FLOP counters side by side: every difference is explained to the operation, or marked as not
explained."""

import importlib.util
import json
import re
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
from workshop.gate import canonical
from workshop.profilers import flop_counts, profile_run
from workshop.profilers.flop_counts import DeepSpeedCount, Remark, TorchCount, Work
from workshop.run import flops, interpreter
from workshop.run.precision import get_precision

NAME = "run_deepspeed_flops.py"
B, T = 3, 17
WHOLE_SQUARE = "all of attention's (T, T) square, of which a causal model needs half"
needs_interpreter = pytest.mark.skipif("v3" not in ON_CPU, reason="Triton's interpreter is off")


def make_step(key: str, config, precision: str = "fp32") -> flop_counts.CountedStep:
    module = versions.load(key)
    torch.manual_seed(0)
    model = module.TinyLlama(config)
    tokens = torch.randint(config.vocab_size, (2, B, T))
    device = torch.device("cpu")
    return flop_counts.CountedStep(model, get_precision(precision, device), tokens)


def explain(step: flop_counts.CountedStep, config) -> tuple[TorchCount, Work, list[Remark]]:
    """FlopCounterMode's count of a step and the remarks on it, which account for all of it."""
    counted = flop_counts.count_with_torch(step)
    work = Work.of(config, B, T)
    gradients = canonical.count_gradients(step.model)
    remarks = list(flop_counts.explain_torch(work, counted, gradients))
    accounted_for(work, counted.step_flops, remarks)
    return counted, work, remarks


def accounted_for(work: Work, counted: tuple[float, float], remarks: list[Remark]) -> None:
    assert work.step.forward + sum(remark.forward for remark in remarks) == counted[0]
    assert work.step.backward + sum(remark.backward for remark in remarks) == counted[1]


def the_one(remarks: list[Remark], words: str) -> Remark:
    (found,) = (remark for remark in remarks if words in remark.text)
    return found


# --- FlopCounterMode ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ON_CPU)
def test_every_difference_is_explained_to_the_operation(key: str, odd_config) -> None:
    counted, work, remarks = explain(make_step(key, odd_config, "bf16"), odd_config)
    assert all(remark.explained for remark in remarks)
    half = flops.attention_flops(odd_config, B, T)
    if key == "v3":
        assert the_one(remarks, "computes them again").backward == half * 3 / 2
        moved = the_one(remarks, "moved from one column to the other")
        assert "tiny_llama.linear_cross_entropy" in moved.text
        assert moved.forward == -moved.backward == 2 * 2 * B * T * 192 * 311
        assert "tiny_llama.rms_norm" in the_one(remarks, "They multiply no matrices").text
        return
    whole = the_one(remarks, WHOLE_SQUARE)
    assert (whole.forward, whole.backward) == (half, 2 * half)
    assert bool(counted.note) == (key != "v1")
    if counted.note:
        missed = f"{work.weights:,.0f} forward, {2 * work.weights:,.0f} backward"
        assert f"_for_cpu, which has no FLOP formula: the step as it runs would count {missed}" in (
            counted.note
        )


@pytest.mark.parametrize(("products", "word"), [(5, "five"), (7, "seven")])
def test_flash_attention_of_a_gpu_computes_its_scores_again(odd_config, products, word) -> None:
    work = Work.of(odd_config, B, T)
    square = int(2 * work.attention)
    counted = TorchCount(
        {"aten.mm": int(work.weights), "aten._scaled_dot_product_flash_attention": square},
        {
            "aten.mm": int(2 * work.weights),
            "aten._scaled_dot_product_flash_attention_backward": square * products // 2,
        },
        without_formula={"aten.mul": 7},
    )
    remarks = list(flop_counts.explain_torch(work, counted, results.Gradients(2, 2, 9, 9)))
    accounted_for(work, counted.step_flops, remarks)
    assert [remark.backward / work.attention for remark in remarks] == [2, products - 4]
    assert f"{word} products where the gradients need four" in remarks[1].text
    assert all(remark.explained for remark in remarks)


@pytest.mark.parametrize(
    ("part", "method", "severed", "columns", "attention"),
    [
        # No gradient of what q, k and v are made from; nor of their weights, of one layer's
        # attention (of two), and of what o_proj takes.
        ("input_layernorm", "forward", 1, 192 + 2 * 64, 0),
        ("self_attn", "attend", 4, 2 * (192 + 2 * 64) + 192, 1),
    ],
)
def test_a_cut_backward_pass_is_called_one(
    part: str, method: str, severed: int, columns: int, attention: int, odd_config
) -> None:
    step = make_step("v1", odd_config)
    owner = getattr(step.model.layers[1], part)
    whole = getattr(owner, method)
    setattr(owner, method, lambda *inputs: whole(*inputs).detach())
    _, work, remarks = explain(step, odd_config)
    assert all(remark.explained for remark in remarks)
    cut = the_one(remarks, "the backward pass is cut: ")
    total = canonical.count_gradients(step.model).tensors_total
    assert f"{total - severed} of {total} parameter tensors get a gradient" in cut.text
    assert cut.backward == -2 * B * T * 192 * columns - attention * work.attention
    assert f"{-cut.backward / work.step.backward:.1%} of its products" in cut.text


# --- DeepSpeed ------------------------------------------------------------------------------------


def explain_deepspeed(
    work: Work, flops: float, macs: float, *operators: str, in_fp8: int = 0
) -> list[Remark]:
    seen = TorchCount(dict.fromkeys(operators, 1) | {"aten._scaled_mm": in_fp8}, {}, {})
    counted = DeepSpeedCount(int(flops), int(macs))
    remarks = list(flop_counts.explain_deepspeed(work, counted, seen))
    accounted_for(work, (counted.flops, 0), remarks)
    return remarks


def test_what_deepspeed_counts_and_misses(odd_config) -> None:
    work = Work.of(odd_config, B, T)
    products = work.weights + 2 * work.attention
    remarks = explain_deepspeed(work, products + 77, products / 2)
    assert the_one(remarks, WHOLE_SQUARE).forward == work.attention
    assert the_one(remarks, "F.silu").forward == 77
    assert the_one(remarks, "no backward pass").backward == -work.step.backward

    attention = "tiny_llama.qkv_attention"
    remarks = explain_deepspeed(work, work.weights, work.weights / 2, "aten.mm", attention)
    assert the_one(remarks, f"missed: {attention}").forward == -work.attention
    assert all(remark.explained for remark in remarks)

    in_fp8, rest = work.weights // 2, products - work.weights // 2
    remarks = explain_deepspeed(work, rest, rest / 2, in_fp8=in_fp8)
    assert the_one(remarks, "in fp8").forward == -in_fp8
    assert all(remark.explained for remark in remarks)

    for counted in (work.weights, products - 2):  # attention gone for no reason; one MAC less
        remarks = explain_deepspeed(work, counted, counted / 2, "aten.mm")
        rest = the_one(remarks, "not explained")
        assert not rest.explained and rest.forward == counted - work.step.forward


def test_deepspeed_is_asked_before_it_forgets(
    odd_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class FlopsProfiler:
        """Its counts are gone once it has ended."""

        def __init__(self, model: torch.nn.Module) -> None:
            model.register_forward_hook(lambda *_: calls.append("forward"))
            self.get_total_flops = lambda: 0 if "end" in calls else 100
            self.get_total_macs = lambda: 40
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
    assert flop_counts.count_with_deepspeed(step, report) == (DeepSpeedCount(100, 40), "")
    assert calls == ["start", "forward", "end"]
    assert report.read_text() == "the report\n"
    assert sys.stdout is stdout


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow) if key == "v3" else key for key in ON_CPU]
)
def test_the_true_deepspeed_is_explained_to_the_operation(
    key: str, odd_config, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    step, report = make_step(key, odd_config, "bf16"), tmp_path / "profile.txt"
    matmul = torch.Tensor.__matmul__
    counted, error = flop_counts.count_with_deepspeed(step, report)
    assert counted is not None and not error
    operators = flop_counts.count_with_torch(step)
    work = Work.of(odd_config, B, T)
    remarks = list(flop_counts.explain_deepspeed(work, counted, operators))
    accounted_for(work, (counted.flops, 0), remarks)
    assert all(remark.explained for remark in remarks)
    words = "missed: tiny_llama.qkv_attention" if key == "v3" else WHOLE_SQUARE
    assert abs(the_one(remarks, words).forward) == work.attention
    assert "self_attn" in report.read_text()
    assert torch.Tensor.__matmul__ is matmul  # what it patched is as before


# --- the report -----------------------------------------------------------------------------------


def run_script(
    type_command: TypeCommand, key: str, folder: Path, *words: str
) -> tuple[str, SimpleNamespace]:
    """What the script prints, in one line, and flops.json."""
    answer = type_command("python", NAME, "--output-dir", folder, *words, **script(key), **ONE_CORE)
    assert answer.returncode == 0, answer.stderr
    assert "Traceback" not in answer.stderr
    report = (folder / "flops.md").read_text()
    assert report in answer.stdout
    assert max(map(len, report.splitlines())) <= 80, "it fits a terminal"
    record = json.loads((folder / "flops.json").read_text())
    found = Collection([folder])
    found.refresh()
    assert (found.runs, found.broken) == ([], [])
    assert record["differences"] and all(found["explained"] for found in record["differences"])
    return " ".join(answer.stdout.split()), SimpleNamespace(**record)


def test_the_script_counts_times_and_writes(type_command: TypeCommand, tmp_path: Path) -> None:
    printed, record = run_script(type_command, "v2", tmp_path, "--steps", "3", "--", *SMALL)
    step = flops.step_flops(results.model_sizes(record.config), 2, 16)
    assert record.counts["analytic"] == {"forward": step.forward, "backward": step.backward}
    assert len(record.step_ms) == 3 and record.peak_source == "measured: a large matrix product"
    median_s = sorted(record.step_ms)[1] / 1e3
    assert record.mfu == pytest.approx(step.total / median_s / 1e12 / record.peak_tflops)
    assert f"MFU: {record.mfu:.1%}. {step.total:,.0f} FLOP in " in printed
    assert re.search(r"FlopCounterMode's count would make it \d+\.\d%", printed)
    row = rf"\| analytic +\| +{step.forward:,.0f} \| +{step.backward:,.0f} \|"
    assert re.search(row, printed)
    if importlib.util.find_spec("deepspeed"):
        assert "not counted" in printed and (tmp_path / "deepspeed_profile.txt").is_file()
    else:
        assert re.search(r"\| DeepSpeed +\| +not installed \|", printed)
        assert "pip install -r setup/requirements-profiling.txt" in printed
    mark, command, end = (tmp_path / "command.txt").read_text().splitlines()
    assert (mark, end) == (f"# {NAME}", "# exit status 0")
    folder = shlex.quote(str(tmp_path))
    assert command.startswith(f"python {NAME} --output-dir {folder} --steps 3 -- --device")


@pytest.mark.slow
@needs_interpreter
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


@pytest.mark.parametrize(
    ("error", "status"),
    [("not installed", errors.DONE), ("failed (X: y)", errors.ANSWER_IS_NO)],
)
def test_a_failure_of_deepspeed_is_the_status(
    error: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = profile_run.make_request(versions.VERSIONS["v1"], SMALL, 1)
    monkeypatch.setattr(flop_counts, "count_with_deepspeed", lambda *_: (None, error))
    report = flop_counts.count(request, torch.zeros(2, 2, 16, dtype=torch.long), tmp_path / "x")
    assert flop_counts.write(report, tmp_path, "python x") == status
    counts = json.loads((tmp_path / "flops.json").read_text())["counts"]["DeepSpeed"]
    assert counts == {"forward": None, "backward": None, "forward_macs": None, "error": error}
    assert f"- {error}" in capsys.readouterr().out
