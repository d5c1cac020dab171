"""The inference benchmark's peers: proven as our own runs are, and never taken for them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from test_lab_inference import judged
from torch import nn

from labs.inference_benchmark import (
    measure,
    modes,
    networks,
    own_runs,
    peer_timm,
    proof,
    request,
    single,
    studies,
)
from labs.inference_benchmark.micro_benchmarking_pytorch import main
from labs.inference_benchmark.modes import Setting, Variant
from workshop.errors import WorkshopError

CPU = torch.device("cpu")
needs_timm = pytest.mark.skipif(not importlib.util.find_spec("timm"), reason="timm is missing")


def bench(variant: Variant) -> measure.Bench:
    arguments = request.build_parser().parse_args(["--network", "resnet18", "--batch-size", "2"])
    network = networks.get_network("resnet18")
    record = single.new_run(arguments, network, variant, CPU)
    return measure.make_bench(Setting(network, CPU, 2, seed=1), variant, record, False)


def timed(one: measure.Bench, iterations: int) -> measure.Measured:
    return judged(one, proof.InferenceCheck, peer_timm.measure_timm, 1, iterations)


@pytest.mark.slow
@needs_timm
@pytest.mark.parametrize(
    "variant", (Variant(peer="timm"), Variant("bf16", channels_last=True, peer="timm"))
)
def test_timm_s_row_is_proven_and_timed(variant: Variant) -> None:
    one = bench(variant)
    measured = timed(one, 3)
    assert one.run.gate.status == "pass", one.run.gate.failures
    assert one.run.variant.startswith(f"timm, {variant.precision}")
    assert len(measured.step_ms) == 3 and len(measured.losses) == 4
    assert own_runs.is_of_peer(one.run) and not own_runs.is_plain(one.run)


@needs_timm
def test_a_peer_that_computes_something_else_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    build = peer_timm.build

    def spoilt(name: str, ours: nn.Module) -> nn.Module:
        model = build(name, ours)
        next(model.parameters()).data *= 1.01
        return model

    monkeypatch.setattr(peer_timm, "build", spoilt)
    one = bench(Variant(peer="timm"))
    timed(one, 2)
    assert one.run.gate.status == "fail"


@needs_timm
@pytest.mark.parametrize(
    ("name", "message"),
    [("alexnet", "no network alexnet"), ("efficientnet_b0", "another name or in another shape")],
)
def test_a_network_that_timm_has_otherwise_is_one_line(name: str, message: str) -> None:
    with pytest.raises(WorkshopError, match=message):
        peer_timm.build(name, nn.Linear(1, 1))


@pytest.mark.parametrize("peer", ("", *request.PEERS))
def test_only_our_own_compiled_networks_have_frozen_weights(peer: str) -> None:
    variant = Variant(compile={}, peer=peer)
    modes.inference_step(nn.Linear(1, 1), variant, torch.ones(1, 1), CPU)
    assert torch._inductor.config.freezing is (not peer)


@pytest.mark.parametrize(
    ("device", "mode"), [("cpu", "compile"), ("cuda", "compile reduce-overhead")]
)
def test_all_peers_run_at_the_precision_that_is_given(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def label(flags: studies.Flags) -> str:
        return single.variant_of(parse([*network, *flags])).label

    monkeypatch.setattr(studies, "_has", lambda *_: True)
    parse, network = request.build_parser().parse_args, ["--network", "resnet18"]
    arguments = parse([*network, "--compare", "peers", "--precision", "bf16"])
    rungs = [label(rung) for rung in studies.ladder(torch.device(device))]
    assert [label(flags) for flags in studies.compared(arguments, torch.device(device))] == [
        "bf16",
        f"torch, bf16, channels-last, {mode}",
        "timm, bf16, channels-last",
        f"timm, bf16, channels-last, {mode}",
        [rung for rung in rungs if ", compile" in rung][-1].replace("fp16", "bf16"),
    ]


def test_without_timm_its_row_is_not_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    flags = ["--network", "resnet18", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert main([*flags, "--peer", "timm"]) == 77
    assert capsys.readouterr().err.startswith("error: timm is missing: run `make setup`")
