"""Peers: other people's code is V1's model too, and is measured like a version."""

import dataclasses
import importlib
import importlib.metadata
import subprocess
import sys

import pytest
import torch

from workshop import errors, versions
from workshop.gate import parity

pytest.importorskip("transformers")


def test_hugging_faces_llama_passes_the_gate(odd_config) -> None:
    module = versions.load("hf")
    report = parity.check(
        module.TinyLlama,
        dataclasses.replace(odd_config, rope_theta=500.0, norm_eps=1e-3),
        precision="fp32",
        device="cpu",
        configure_optimizer=module.configure_optimizer,
    )
    assert report.passed, report.failures


@pytest.mark.skipif(torch.__version__ < "2.7", reason="transformers' wrapper breaks 2.6's graph")
def test_it_is_one_graph_to_the_compiler(odd_config) -> None:
    model = versions.load("hf").TinyLlama(odd_config)
    tokens = torch.randint(odd_config.vocab_size, (2, 9))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(tokens, tokens).item() == pytest.approx(model(tokens, tokens).item())


@pytest.mark.parametrize("in_16_bit", [True, False])
def test_flash_attention_gets_16_bit_numbers_alone(monkeypatch, in_16_bit) -> None:
    monkeypatch.syspath_prepend(versions.get_version("hf-flash").path.parent)
    llama = importlib.import_module("hugging_face_llama")
    monkeypatch.setitem(llama.CHOICES, "attn_implementation", "sdpa")  # and again afterwards
    flash, called = importlib.import_module("hugging_face_flash"), []
    for name in ("flash_attention_forward", "sdpa_attention_forward"):
        monkeypatch.setattr(flash, name, lambda *_, name=name, **more: called.append((name, more)))
    with torch.autocast("cpu", torch.bfloat16, enabled=in_16_bit):
        flash.attend(None, torch.zeros(1), None, position_ids=torch.zeros(1), scaling=0.5)
    kernel = "flash" if in_16_bit else "sdpa"
    assert called == [(f"{kernel}_attention_forward", {"scaling": 0.5})]


@pytest.mark.parametrize(
    ("key", "package"), [("hf-liger", "liger-kernel"), ("hf-flash", "flash-attn-4")]
)
def test_a_peer_that_is_not_installed_is_named(key, package) -> None:
    if package in {found.name for found in importlib.metadata.distributions()}:
        pytest.skip(f"{package} is installed")
    command = [sys.executable, str(versions.get_version(key).path)]
    finished = subprocess.run(command, cwd=versions.ROOT, capture_output=True, text=True)
    assert finished.returncode == errors.NOT_ON_THIS_MACHINE
    assert finished.stderr == (
        f"error: {key} needs {package}, which is not installed: `pip install {package}`\n"
    )
