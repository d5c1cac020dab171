"""The seconds before a first fast step: what compilers take is counted apart."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from workshop.run import startup


@pytest.fixture(autouse=True)
def unwatched(monkeypatch) -> None:
    monkeypatch.setattr(startup, "_seconds", 0.0)
    monkeypatch.setattr(startup, "_watched", set())
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # a second at each look
    monkeypatch.setattr(startup, "time", clock)


def test_what_torch_compile_takes_is_counted_for_forward_and_backward() -> None:
    from torch._dynamo.callback import callback_handler

    torch._dynamo.reset()  # other tests may have compiled
    startup.watch_compilers(torch_compile=True)
    try:
        layer = torch.nn.Linear(3, 3)
        torch.compile(layer, backend="aot_eager")(torch.ones(2, 3)).sum().backward()
        counted = startup.compile_seconds()
        assert counted >= (1 if torch.__version__ < "2.7" else 2)
        layer(torch.ones(2, 3))  # nothing to compile
        assert startup.compile_seconds() == counted
        with startup.not_counted():
            torch.compile(torch.nn.Linear(3, 4), backend="aot_eager")(torch.ones(2, 3))
        assert startup.compile_seconds() == counted
        torch.compile(torch.nn.Linear(3, 5), backend="aot_eager")(torch.ones(2, 3))
        assert startup.compile_seconds() > counted
    finally:
        callback_handler.start_callbacks.remove(startup._start)
        callback_handler.end_callbacks.remove(startup._end)
        torch._dynamo.reset()


def test_what_triton_takes_is_counted_unless_torch_compile_asked_for_it(monkeypatch) -> None:
    compilation = SimpleNamespace(listener=None)
    triton = SimpleNamespace(knobs=SimpleNamespace(compilation=compilation))
    monkeypatch.setitem(sys.modules, "triton", triton)
    startup.watch_compilers(torch_compile=False)
    kernel = {"times": SimpleNamespace(total=250_000), "src": None, "cache_hit": False}
    compilation.listener(**kernel)
    assert startup.compile_seconds() == 0.25
    startup._start()
    compilation.listener(**kernel)
    startup._end()
    assert startup.compile_seconds() == 1.25  # counted twice, it would be 1.5
    with startup.not_counted(kernels=False), startup.not_counted():
        compilation.listener(**kernel)
    assert startup.compile_seconds() == 1.25
    with startup.not_counted():  # whose kernels training calls too
        compilation.listener(**kernel)
    assert startup.compile_seconds() == 1.5
