"""The seconds before a first fast step: what compilers take is told apart."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from workshop.run import first_use


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_seconds", 0.0)
    monkeypatch.setattr(first_use, "_watched", set())
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # a second at each look
    monkeypatch.setattr(first_use, "time", clock)


def test_what_torch_compile_takes_is_counted_for_forward_and_backward() -> None:
    from torch._dynamo.callback import callback_handler

    first_use.watch_compilers(torch_compile=True)
    try:
        layer = torch.nn.Linear(3, 3)
        torch.compile(layer, backend="aot_eager")(torch.ones(2, 3)).sum().backward()
        counted = first_use.compile_seconds()
        assert counted >= 2
        layer(torch.ones(2, 3))  # nothing to compile
        assert first_use.compile_seconds() == counted
        with first_use.graphs_of_no_use():
            torch.compile(torch.nn.Linear(3, 4), backend="aot_eager")(torch.ones(2, 3))
        assert first_use.compile_seconds() == counted
        torch.compile(torch.nn.Linear(3, 5), backend="aot_eager")(torch.ones(2, 3))
        assert first_use.compile_seconds() > counted
    finally:
        callback_handler.start_callbacks.remove(first_use._start)
        callback_handler.end_callbacks.remove(first_use._end)
        torch._dynamo.reset()


def test_what_triton_takes_is_counted_unless_torch_compile_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilation = SimpleNamespace(listener=None)
    triton = SimpleNamespace(knobs=SimpleNamespace(compilation=compilation))
    monkeypatch.setitem(sys.modules, "triton", triton)
    first_use.watch_compilers(torch_compile=False)
    kernel = {"times": SimpleNamespace(total=250_000), "src": None, "cache_hit": False}
    compilation.listener(**kernel)
    assert first_use.compile_seconds() == 0.25
    first_use._start()
    compilation.listener(**kernel)
    first_use._end()
    assert first_use.compile_seconds() == 1.25  # counted twice, it would be 1.5
    with first_use.graphs_of_no_use(kernels=False), first_use.graphs_of_no_use():
        compilation.listener(**kernel)
    assert first_use.compile_seconds() == 1.25
    with first_use.graphs_of_no_use():  # whose kernels training calls too
        compilation.listener(**kernel)
    assert first_use.compile_seconds() == 1.5


def test_an_older_triton_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    first_use.watch_compilers(torch_compile=False)
    assert first_use.compile_seconds() == 0.0
