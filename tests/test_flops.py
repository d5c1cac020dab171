"""The operation counts: against PyTorch's own counter, and against published totals."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workshop import versions
from workshop.run import flops
from workshop.run.presets import PRESETS


def sizes(preset: str) -> flops.Sizes:
    return flops.Sizes(**PRESETS[preset].model())


def test_pytorchs_counter_agrees_on_v1(odd_config) -> None:
    """V1 computes the whole (T, T) square. The counter sees matrix products alone, as we do."""
    model = versions.load("v1").TinyLlama(odd_config)
    tokens = torch.zeros(3, 17, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens)
    expected = flops.step_flops(odd_config, 3, 17, causal=False)
    assert counter.get_total_flops() == expected.forward
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == expected.backward


@pytest.mark.parametrize("key", versions.available())
def test_parameters_are_counted_as_the_models_have_them(key, odd_config) -> None:
    model = versions.load(key).TinyLlama(odd_config)
    assert flops.parameter_count(odd_config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("preset", "millions", "tflop"), [("small", 31.98, 0.1996), ("medium", 189.79, 9.637)]
)
def test_totals_of_the_presets(preset, millions, tflop) -> None:
    shape = PRESETS[preset]
    assert flops.parameter_count(sizes(preset)) / 1e6 == pytest.approx(millions, abs=0.01)
    step = flops.step_flops(sizes(preset), shape.batch_size, shape.seq_len)
    assert step.total / 1e12 == pytest.approx(tflop, rel=1e-3)


def test_a_causal_model_is_credited_with_half_of_the_square() -> None:
    whole = flops.attention_flops(sizes("medium"), 16, 512, causal=False)
    assert flops.attention_flops(sizes("medium"), 16, 512) == whole / 2
