"""The operation counts against published totals; test_flop_counts.py has PyTorch's counter."""

import pytest

from workshop import versions
from workshop.run import flops
from workshop.run.presets import PRESETS


def sizes(preset: str) -> flops.Sizes:
    return flops.Sizes(**PRESETS[preset].model())


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
