"""The inference benchmark's peers: gated as our own runs are, and never taken for them."""

import importlib.util
import sys

import pytest
import torch
from test_lab_inference import infer
from torch import nn

from labs.inference_benchmark import measure, modes, networks, own_runs, request, single
from labs.inference_benchmark.micro_benchmarking_pytorch import main
from labs.inference_benchmark.modes import Setting, Variant

CPU = torch.device("cpu")
needs_timm = pytest.mark.skipif(not importlib.util.find_spec("timm"), reason="timm is missing")


def bench(variant: Variant) -> measure.Bench:
    arguments = request.build_parser().parse_args(["--network", "resnet18", "--batch-size", "2"])
    network = networks.get_network("resnet18")
    record = single.new_run(arguments, network, variant, CPU)
    return measure.make_bench(Setting(network, CPU, 2, seed=1), variant, record, False)


@pytest.mark.slow
@needs_timm
@pytest.mark.parametrize(
    "variant", (Variant(peer="timm"), Variant("bf16", channels_last=True, peer="timm"))
)
def test_timm_s_row_passes_the_gate_and_is_timed(variant: Variant) -> None:
    """It has one batch, and keeps the last step's logits."""
    run = infer(bench(variant), 3)
    assert run.gate.status == "pass", run.gate.failures
    assert run.variant.startswith(f"timm, {variant.precision}")
    assert len(run.step_ms) == 3
    assert [loss is None for loss in run.losses] == [True, True, True, False]
    assert own_runs.is_of_peer(run) and not own_runs.is_plain(run)


@needs_timm
def test_a_peer_that_computes_something_else_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    build = networks.timm_network

    def spoilt(name: str, ours: nn.Module) -> nn.Module:
        model = build(name, ours)
        next(model.parameters()).data *= 1.01
        return model

    monkeypatch.setattr(networks, "timm_network", spoilt)
    assert infer(bench(Variant(peer="timm")), 2).gate.status == "fail"


@pytest.mark.parametrize("peer", ("", *request.PEERS))
def test_only_our_own_compiled_networks_have_frozen_weights(peer: str) -> None:
    variant = Variant(compile={}, peer=peer)
    modes.inference_step(nn.Linear(1, 1), variant, torch.ones(1, 1), CPU)
    assert torch._inductor.config.freezing is (not peer)


def test_without_timm_its_row_is_not_on_this_machine(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    flags = ["--network", "resnet18", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert main([*flags, "--peer", "timm"]) == 77
    assert capsys.readouterr().err.startswith("error: timm is missing: run `make setup`")
