"""The inference benchmark: its networks, what makes them fast, the gate, the command line."""

import copy
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_runs import the_run
from torch import Tensor, nn

from labs import shared
from labs.group import Group
from labs.inference_benchmark import (
    counts,
    gate,
    measure,
    modes,
    networks,
    request,
    single,
    studies,
)
from labs.inference_benchmark.micro_benchmarking_pytorch import main
from labs.inference_benchmark.modes import Setting, Variant
from workshop.errors import WorkshopError
from workshop.judge.pipe import Message
from workshop.judge.turn import Shown, Turn
from workshop.labs import LabRun
from workshop.run import markers, memory
from workshop.versions import ROOT

PROGRAM = ROOT / "labs" / "inference_benchmark" / "micro_benchmarking_pytorch.py"
CPU = torch.device("cpu")


class Small(nn.Module):
    """A network of two convolutions: what the benchmark does to a network, in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(256, 1000)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(images))
        return out


SMALL = networks.Network("small", Small, edge=64)


def arguments(*words: str) -> Any:
    return request.build_parser().parse_args(["--network", "resnet18", "--device", "cpu", *words])


def bench(variant: Variant, training: bool = False, batch: int = 6) -> measure.Bench:
    setting = Setting(SMALL, CPU, batch, seed=1)
    record = single.new_run(arguments("--batch-size", str(batch)), SMALL, variant, CPU)
    return measure.make_bench(setting, variant, record, training)


def infer(one: measure.Bench, iterations: int, warmup: int = 1) -> LabRun:
    """Times and judges the work as a process alone does."""
    kind = gate.TrainingCheck if one.training else gate.InferenceCheck
    timed = range(warmup, warmup + iterations)
    one.turn = Turn(False, kind(one.setting, one.variant, timed, lambda: one.model, 1))
    measure.measure(one, iterations, warmup)
    return one.run


VARIANTS = {
    variant.label: variant
    for variant in (
        Variant(),
        Variant("bf16"),
        Variant("bf16", autocast=True),
        Variant(channels_last=True),
        Variant(fold=True),
        Variant("bf16", channels_last=True, fold=True, fuse=True),
    )
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_true_variant_passes_the_gate_and_is_timed(variant: Variant) -> None:
    one = bench(variant)
    run = infer(one, 3)
    assert run.gate.status == "pass", run.gate.failures
    assert len(run.step_ms) == 3 and min(run.step_ms) > 0
    assert run.metrics["top1_agreement"] == 1.0 or variant.precision == "bf16"
    assert len(set(run.losses[1:])) == 3  # each iteration has new images
    weights = sum(p.numel() for p in one.model.parameters()) * variant.dtype.itemsize
    assert run.memory_mb["weights"] == pytest.approx(weights / 1e6, rel=0.02)


Step = Callable[[], Tensor]
Fault = Callable[[Any], object]


def stepping(wrong: Callable[[Step, measure.Inference], Step]) -> Fault:
    """A fault that takes the place of the network's step."""
    return lambda work: setattr(work, "_step", wrong(work._step, work))


def kept_output(is_fresh: Callable[[int], bool]) -> Fault:
    """Only these calls compute; the others give the last output again."""

    def wrong(step: Step, _: object) -> Step:
        calls, last = itertools.count(), [step().clone()]

        def some() -> Tensor:
            if is_fresh(next(calls)):
                last[0] = step().clone()
            return last[0]

        return some

    return stepping(wrong)


def cached_by(key: Callable[[Tensor], object]) -> Fault:
    """Outputs of earlier iterations, the warm-up's among them, are given again."""

    def wrong(step: Step, work: measure.Inference) -> Step:
        known: dict[object, Tensor] = {}

        def cached() -> Tensor:
            name = key(work.inputs.batch)
            if name not in known:
                known[name] = step().clone()
            return known[name]

        return cached

    return stepping(wrong)


def no_work_before_it_is_asked(inference: measure.Inference) -> None:
    step, stale = inference._step, inference._step().clone()
    inference._step = lambda: stale

    def late(places: dict[str, list[int]]) -> Shown:
        inference._step = step
        for index in range(1, 5):
            inference(index)
        return measure.Inference.show(inference, places)

    inference.show = late


HEAD_BIAS = networks.build(SMALL, 1, CPU).head.bias.detach()
FAULTS: dict[str, Fault] = {
    "stale images": lambda work: setattr(work.inputs, "batch", work.inputs.batch.clone()),
    "stale output": kept_output(lambda call: False),
    "no work every second time": kept_output(lambda call: call % 2 == 0),
    "no work before it is asked": no_work_before_it_is_asked,
    "half a batch": stepping(lambda step, _: lambda: torch.cat([step()[:3]] * 2)),
    "last image left out": stepping(
        lambda step, _: lambda: torch.cat([step()[:-1], torch.zeros(1, 1000)])
    ),
    "in bf16": stepping(lambda step, _: lambda: step().bfloat16()),
    "no head bias": stepping(lambda step, _: lambda: step() - HEAD_BIAS),
    "logits of images before go": lambda work: setattr(work.inputs, "take", lambda drawn: None),
    "no logits": lambda work: setattr(work, "show", lambda places: ({}, {})),
    "cached by the first pixels": cached_by(lambda images: tuple(images[:, 0, 0, 0].tolist())),
    "cached by the pointer": cached_by(Tensor.data_ptr),
}


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_does_other_work_is_red(fault, precision, monkeypatch) -> None:
    if fault in ("in bf16", "no head bias") and precision == "bf16":
        pytest.skip("it is the precision's own rounding, or below it")
    true_init = measure.Inference.__init__

    def spoilt(self: measure.Inference, *parts: Any, **more: Any) -> None:
        true_init(self, *parts, **more)
        FAULTS[fault](self)

    monkeypatch.setattr(measure.Inference, "__init__", spoilt)
    one = bench(Variant(precision))
    infer(one, 4)
    assert one.run.gate.status == "fail"


def test_times_of_more_iterations_than_were_asked_for_are_red() -> None:
    one = bench(Variant())
    check = gate.InferenceCheck(one.setting, one.variant, range(1, 4), lambda: one.model, 1)
    one.run.step_ms = [1.0] * 6
    check.judge(lambda **_: Message("shown"), one.run)
    assert one.run.gate.failures == ["it has done 6 iterations of 3"]


@pytest.mark.parametrize(
    ("name", "fused"), [("resnet18", 17), ("googlenet", 57), ("densenet121", 59)]
)
def test_fused_operators_compute_the_same(name: str, fused: int) -> None:
    network = dataclasses.replace(networks.get_network(name), edge=64)
    model = networks.build(network, 1, CPU).double()
    images = network.images(3, 5).double()
    with torch.no_grad():
        for convolution in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
            if convolution.bias is not None:
                convolution.bias.normal_()
        truth = networks.logits(model(images))
        rewritten = modes.fuse_relus(modes.fold_norms(copy.deepcopy(model)))
        logits = networks.logits(rewritten(images))
    operators = sum(isinstance(m, modes.ConvolutionRelu) for m in rewritten.modules())
    assert operators == fused
    torch.testing.assert_close(logits, truth, rtol=1e-11, atol=1e-11)


def test_attention_that_copies_nothing_computes_the_same() -> None:
    torch.manual_seed(0)
    make = shared.import_torchvision().models.VisionTransformer
    model = make(32, 8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=64)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh biases are zeros
            parameter.normal_(std=0.2)
    model, images = model.double().eval(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    variant = Variant("fp32", fold=True, fuse=True, compile={})
    rewritten = modes.prepare(model, variant).double()
    assert sum(isinstance(m, modes.SelfAttention) for m in rewritten.modules()) == 2
    with torch.no_grad():
        truth, logits = model(images), rewritten(images)
    torch.testing.assert_close(logits, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["densenet121", "resnet18"])
def test_recomputing_changes_no_gradient(name: str) -> None:
    network = dataclasses.replace(networks.get_network(name), edge=64)
    model = networks.build(network, 1, CPU).train()
    networks.without_chance(model)
    images, targets = network.images(2, 5), network.targets(2, 5)
    gradients, kept = [], []
    for one in (copy.deepcopy(model), gate.recomputing(copy.deepcopy(model))):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor.numel()) or tensor,
            lambda tensor: tensor,
        ):
            loss = network.loss(one(images), targets)
        loss.backward()
        gradients.append([p.grad for p in one.parameters()])
        kept.append(sum(saved))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert kept[1] < kept[0] / 2


def test_training_passes_the_gate_and_learns() -> None:
    for variant in (Variant(), Variant("bf16", autocast=True), Variant(channels_last=True)):
        run = infer(bench(variant, training=True), 4, 2)
        assert run.gate.status == "pass", run.gate.failures
        assert len(run.losses) == 6 and (run.losses[-1] or 9.0) < (run.losses[0] or 0.0)


true_step = modes.Training.step


def group(**wrong: float) -> Fault:
    return lambda training: training.optimizer.param_groups[0].update(wrong)


def updates(which: Callable[[int], bool]) -> Fault:
    """Only these steps update the weights."""

    def spoil(training: modes.Training) -> None:
        step, steps = training.optimizer.step, itertools.count()
        some = lambda *_: step() if which(next(steps)) else None  # noqa: E731
        training.optimizer.step = some

    return spoil


def reading(batch: Callable[..., tuple[Tensor, Tensor]]) -> Fault:
    """Each step trains something else than the images and targets that it is given."""

    def spoil(training: modes.Training) -> None:
        first: list[Tensor] = []

        def step(images: Tensor, targets: Tensor, *ranges: Any) -> Tensor:
            first[:] = first or [images.clone(), targets]
            return true_step(training, *batch(images, targets, *first), *ranges)

        training.step = step

    return spoil


def nothing_after_step_3(training: modes.Training) -> None:
    steps = itertools.count(1)

    def step(*parts: Any) -> Tensor:
        now = next(steps)
        return true_step(training, *parts) if now <= 3 else torch.tensor(6.9 * 0.99**now)

    training.step = step


def severed_gradient(training: Any) -> None:
    training.run = lambda images: training.model.head(training.model.body(images).detach())


TRAINING_FAULTS: dict[str, Fault] = {
    "severed gradient": severed_gradient,
    "nothing after step 3": nothing_after_step_3,
    "no momentum": group(momentum=0.0),
    "rate 1% high": group(lr=0.0101),
    "stale gradients": lambda t: setattr(t.optimizer, "zero_grad", lambda **_: None),
    "statistics at rest": lambda t: setattr(t.model.body[1], "momentum", 0.0),
    "in evaluation mode": lambda t: t.model.eval(),
    "every second update": updates(lambda step: step % 2 == 0),
    "no update after the warm-up": updates(lambda step: step < 2),
    "no last update": updates(lambda step: step < 5),
    "half the batch": reading(lambda x, y, *_: (x[: len(x) // 2], y[: len(y) // 2])),
    "first images again": reading(lambda x, y, first, _: (first, y)),
}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", TRAINING_FAULTS)
def test_training_that_does_other_work_is_red(fault, precision, monkeypatch) -> None:
    one = bench(Variant(precision, autocast=precision == "bf16"), training=True)
    true_init = modes.Training.__init__

    def spoilt(self: modes.Training, *parts: Any) -> None:
        true_init(self, *parts)
        TRAINING_FAULTS[fault](self)

    monkeypatch.setattr(modes.Training, "__init__", spoilt)
    assert infer(one, 4, 2).gate.status == "fail"


def test_an_interrupted_step_is_no_proof_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing of the backward pass but a few gradients."""
    one, steps = bench(Variant(), training=True), itertools.count()

    def step(self: modes.Training, *parts: Any) -> Tensor:
        if next(steps) == 5:
            self.optimizer.zero_grad(set_to_none=True)
            raise KeyboardInterrupt
        return true_step(self, *parts)

    monkeypatch.setattr(modes.Training, "step", step)
    monkeypatch.setattr(measure, "memory_of", lambda *_, **__: {})  # on a GPU it runs no step
    run = infer(one, 8, 2)
    assert run.status == "interrupted" and len(run.step_ms) == 3
    assert one.run.gate.status == "pass", one.run.gate.failures


def test_an_error_as_of_other_images_is_red_whatever_the_precision_loses() -> None:
    true = torch.randn(6, 1000, dtype=torch.float64)
    for much, status in ((0.5, "pass"), (0.9, "fail")):
        lossy = true + much * torch.randn_like(true)
        known = gate.Reference(true, lossy)
        found, _ = gate.of_inference(Variant("bf16"), known, [(range(6), lossy)])
        assert found.status == status
    overflows = gate.Reference(true, true * float("nan"))
    for timed, status in ((true, "pass"), (overflows.plain, "fail")):
        found, _ = gate.of_inference(Variant("fp16"), overflows, [(range(6), timed)])
        assert found.status == status and found.measures["logits"]["allowed"] == gate.MOST_ERROR


# --- networks and counts -------------------------------------------------------------------------


def test_all_names_are_known() -> None:
    models = shared.import_torchvision().models
    known = {*models.list_models(module=models), *models.list_models(module=models.segmentation)}
    for name in networks.NAMES:
        assert name in networks.ELSEWHERE or networks.ALIASES.get(name, name) in known
    with pytest.raises(WorkshopError, match=r"nearest are.*resnet50"):
        networks.get_network("resnet5")


@pytest.mark.parametrize("name", ("resnet18", "vit_b_32", "lraspp_mobilenet_v3_large"))
def test_logits_differ_between_images_and_are_of_ordinary_size(name: str) -> None:
    network = networks.get_network(name)
    model = networks.build(network, 3, CPU)
    with torch.no_grad():
        output = networks.logits(model(network.images(2, 5)))
    assert output.shape[:2] == (2, network.classes)
    assert 1e-3 < output.std() < 100
    assert (output[0] - output[1]).std() > 0.01 * output.std()


def test_what_runs_outside_of_modules_moves_bytes_too() -> None:
    """A residual addition reads two images and writes one, in place or not; a view moves nothing; a
    product with a weight reads that once for the whole batch."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 1)
            self.weight = torch.nn.Parameter(torch.ones(5, 4))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            images = images + self.conv(images)
            images += self.conv(images)
            return torch.nn.functional.linear(images.flatten()[:4].view(1, 4), self.weight)

    counted = counts.count(torch.nn.Sequential(Block()), torch.ones(1, 3, 2, 2))
    assert [(layer.name, layer.kind, layer.moved, layer.weights) for layer in counted.layers] == [
        ("0.conv", "Conv2d", 24, 12),
        ("0", "aten.add", 36, 0),
        ("0.conv", "Conv2d", 24, 12),
        ("0", "aten.add_", 36, 0),
        ("0", "aten.mm", 4 + 5, 20),
    ]
    assert [layer.flops for layer in counted.layers] == [72, 0, 72, 0, 40]
    assert counted.flops == 184


@pytest.mark.parametrize(
    ("name", "products", "weights"),
    [("resnet50", 4.09, 25_557_032), ("vit_b_16", 17.56, 86_567_656)],
)
def test_a_network_has_the_published_operations(name: str, products: float, weights: int) -> None:
    """Billions of products an image, and weights (torchvision's documentation)."""
    network = networks.get_network(name)
    counted = counts.count(network.build(), network.images(1, 0))
    assert counted.flops / 2e9 == pytest.approx(products, abs=0.005)
    assert counted.parameters == weights


# --- the command line ----------------------------------------------------------------------------


def test_compile_context() -> None:
    text = "{'options': {'static-memory': 'True', 'matmul-padding': 'True'}}"
    options = {"triton.cudagraphs": True, "shape_padding": True}
    assert request.parse_context(text) == {"options": options}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--compile --compileContext {'mode':'fast'}", "mode=fast, should be.*max-autotune"),
        ("--ladder --mode training", "are for --mode inference"),
        ("--flops-prof-step 20", "smaller than --iterations 20"),
        ("--mode training --fold-norms", "for --mode inference"),
        ("--peer timm --fold-norms --export aoti", "leave out --fold-norms, --export"),
    ],
)
def test_wrong_input_is_one_line(words, message, tmp_path, capsys) -> None:
    flags = ["--network", "resnet18", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert main([*flags, *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error)
    assert not list(tmp_path.rglob("*.json*"))


def test_the_guides_lines_and_the_result_file(tmp_path: Path) -> None:
    """As a user types it, from the program's own folder."""
    done = subprocess.run(
        [sys.executable, PROGRAM.name, "--network", "resnet18", "--batch-size", "2",
         "--iterations", "3", "--warmup-iterations", "1", "--device", "cpu",
         "--output-dir", str(tmp_path)],
        cwd=PROGRAM.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line in (r"Epoch 2: Loss = \d\.\d{4}, Time", r"Throughput: [\d.]+ samples",
                 r"Warmup iteration 0: Time", r"nothing is trained", r"Milliseconds per batch: \d",
                 r"Latency: p50 .* p90 .* p99", r"Operations of a batch: 7\.3 GFLOP",
                 r"Gate: pass"):  # fmt: skip
        assert re.search(line, done.stdout), line
    run = the_run(tmp_path)
    assert run.status == "complete" and len(run.step_ms) == 3
    assert run.command[0] == PROGRAM.name and str(tmp_path) not in json.dumps(run.command)
    assert run.flops_per_step == pytest.approx(2 * 3.63e9, rel=0.01)


@pytest.mark.parametrize("flags", ((), ("--mode", "training")), ids=str)
def test_ranges_are_around_the_timed_iterations_and_no_profiler_starts(
    flags, tmp_path, monkeypatch
) -> None:
    """Inside rocprofv3 a second profiler hangs."""
    events: list[str] = []
    true_mark = measure.Inputs.read

    def read(self: measure.Inputs, index: int) -> None:
        events.append("iteration")
        true_mark(self, index)

    for name in ("_prepare_profiler", "_enable_profiler"):
        monkeypatch.delattr(torch.autograd.profiler, name)
    monkeypatch.setattr(memory, "cpu_step_peak", lambda *_: 1)  # by a profiler; a GPU's is not
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    monkeypatch.setattr(markers, "for_vendor_tools", lambda device: markers._pushed)
    monkeypatch.setattr(networks, "get_network", lambda name: SMALL)
    monkeypatch.setattr(measure.Inputs, "read", read)
    counts = ["--batch-size", "4", "--iterations", "2", "--warmup-iterations", "3"]
    words = [*counts, *flags, "--output-dir", str(tmp_path), "--autograd_profiler"]
    assert single.run(arguments(*words)) == 0
    assert events == [*3 * ["iteration"], *2 * ["step", "iteration", "end"]]


def test_a_red_run_prints_no_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    one = bench(Variant())
    infer(one, 2)
    single.summary(print, one, Group())
    assert "Throughput" in capsys.readouterr().out
    one.run.gate = dataclasses.replace(one.run.gate, status="fail", failures=["other logits"])
    single.summary(print, one, Group())
    output = capsys.readouterr().out
    assert "FAIL, no throughput: other logits" in output
    assert not re.search(r"Throughput:|Latency|Achieved|per second", output)


@pytest.mark.parametrize(
    ("mode", "ceiling", "line"),
    [
        ("inference", {"ceiling_gbs": 40.0}, "10 GB/s, 25.0% of a large copy's 40 GB/s"),
        ("inference", {}, ""),
        ("training", {"ceiling_gbs": 40.0}, ""),
    ],
)
def test_the_summary_has_the_bandwidths_share(mode, ceiling, line) -> None:
    run = single.new_run(arguments("--batch-size", "6", "--mode", mode), SMALL, Variant(), CPU)
    run.step_ms, run.flops_per_step = [10.0], 1e9
    run.metrics = {"flop_per_byte": 10.0, **ceiling}
    lines = [found for found in single._work(run) if found.startswith("Memory traffic")]
    assert lines == [f"Memory traffic, layer by layer: {line}"] * bool(line)


@pytest.mark.parametrize("limit", (0, 1, 7, 1000, 4097, 2**20))
def test_the_largest_batch_is_found_by_bisection(limit: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    found = studies.largest(fits)
    limit = min(limit, studies.MOST_IMAGES)
    assert found <= limit and limit - found <= max(0, limit // 32)
    assert len(tried) <= 24


@pytest.mark.parametrize(
    "words", ["--ladder", "--compare precision", "--compare compile", "--compare peers --fp16 1"]
)
def test_the_variants_of_a_study_can_be_asked_for_and_differ(words, monkeypatch) -> None:
    monkeypatch.setattr(studies, "_has", lambda *_: True)
    given, gpu = arguments(*words.split()), torch.device("cuda")
    plans = studies.ladder(gpu) if given.ladder else studies.compared(given, gpu)
    labels = [request.variant_of(arguments(*plan)).label for plan in plans]
    assert len(labels) > 1 and len({*labels}) == len(labels)
