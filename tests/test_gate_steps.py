"""Steps that are done again: which of a run's, and what decides where rounding hides the rest."""

import dataclasses
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from workshop.gate import steps
from workshop.gate.steps import Sgd, State, Step, StepResult, Watch
from workshop.judge.pipe import Message
from workshop.results import Run

SGD = Sgd(0.9, lambda number: 0.1)
SHAPES = {f"{kind} weight": torch.Size([8]) for kind in ("weight", "momentum")}


def state(value: float, loss_scale: float = 1.0) -> Message:
    tensors = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
    return Message("shown", {"loss_scale": loss_scale}, tensors)


def showing(message: Message) -> Callable[..., Message]:
    return lambda show: message


def a_run(**changes: Any) -> Run:
    return cast(Run, SimpleNamespace(**{"status": "complete", "step_ms": []} | changes))


def watched(total: int, scales: dict[int, float], first: int = 0) -> list[int]:
    """The steps that were kept of a run, whose scale is 1 after those that are not in `scales`."""
    watch, run, done = Watch(SGD, SHAPES, random.SystemRandom(), total, first), a_run(), first
    shown = state(0.0)
    while not watch.see(showing(shown), run):
        run.step_ms += [1.0] * (watch.until - done)
        watch.take({"losses": torch.ones(watch.until - done)})
        done = watch.until
        shown = state(float(done), scales.get(done - 1, 1.0))
    assert done == total and not watch.failures
    for step in watch.steps:
        assert step.before.weights["weight"][0] == (step.number if step.number > first else 0)
    return [step.number for step in watch.steps]


@pytest.mark.parametrize(
    ("changes", "shown", "said"),
    [
        ({"step_ms": [1.0] * 2}, state(0.0), "it has done 2 steps where 0 were asked for"),
        ({}, state(0.0), "it has shown the losses of 1 steps where 0 were asked for"),
        ({}, Message("shown"), "are not the network's"),
        ({"status": "interrupted"}, None, ""),
    ],
    ids=("other steps", "other losses", "no state", "interrupted"),
)
def test_a_run_that_shows_no_steps_is_not_looked_at(changes, shown, said) -> None:
    watch = Watch(SGD, SHAPES, random.SystemRandom(), 5)
    if "losses" in said:
        watch.take({"losses": torch.ones(1)})
    assert watch.see(showing(shown), a_run(**changes))
    verdict = watch.verdict(lambda *_: (0.0, {}, {}), "fp32", 8)
    assert verdict.status == "fail" and said in "; ".join(verdict.failures)


def test_the_first_the_last_two_and_a_drawn_step_are_kept() -> None:
    found = [watched(40, {}, first=3) for _ in range(20)]
    assert all(kept[0] == 3 and kept[-2:] == [38, 39] for kept in found)
    assert len({kept[1] for kept in found}) > 5
    assert watched(1, {}) == [0]


def test_a_step_that_lowers_the_scale_of_the_loss_is_left_out() -> None:
    assert watched(40, {0: 0.5, 1: 0.25})[0] == 2
    assert watched(40, {39: 0.5})[-1] == 38
    nothing = watched(3, {0: 0.5, 1: 0.25, 2: 0.125})
    assert nothing == []
    verdict = steps.audit([], lambda *_: (0.0, {}, {}), "fp16", 8)
    assert verdict.failures == ["no step moved the weights"]


GRADIENT = torch.linspace(1, 2, 64)


def audited(spoil: Callable[[Tensor], Tensor], plain_loses: float) -> list[str]:
    """The failures of a run in bf16 whose gradient of one of two weights is spoilt, where a plain
    step in bf16 is that far from the one in fp32."""
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))
    away = plain_loses * noise * GRADIENT.norm() / noise.norm()

    def plain(before: State, number: int, precision: str) -> tuple[float, dict[str, Tensor], dict]:
        lost = away if precision == "bf16" else torch.zeros(64)
        return 1.0, {"a": GRADIENT + lost, "b": 50 * GRADIENT}, {}

    def sketched(name: str, gradient: Tensor) -> Tensor:
        return steps.sketch(gradient, name)

    before = State({}, {}, {}, 1.0)
    found = {"a": sketched("a", spoil(GRADIENT)), "b": sketched("b", 50 * GRADIENT)}
    run = [Step(number, before, StepResult(1.0, found, {}), {}) for number in range(4)]
    return steps.audit(run, plain, "bf16", 16).failures


@pytest.mark.parametrize(
    ("spoil", "plain_loses", "said"),
    [
        (lambda g: g, 0.8, ""),
        (torch.zeros_like, 0.05, "gradient of a: 1.0e+00"),
        (torch.zeros_like, 0.8, "part of a's gradient along the true one"),
        (torch.neg, 0.8, "gradient of a: 2.0e+00 from the plain step's, 1.2e+00 allowed"),
        (lambda g: g * math.nan, 0.8, "gradient of a: inf"),
    ],
    ids=("true", "missing", "missing, and rounding is large", "uphill", "NaN"),
)
def test_one_weight_s_gradient_is_found_however_little_it_counts(spoil, plain_loses, said) -> None:
    failures = audited(spoil, plain_loses)
    assert any(said in failure for failure in failures) if said else not failures


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_update_is_pytorchs(nesterov) -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    right = Sgd(0.9, lambda number: 0.1, weight_decay=0.01, nesterov=nesterov)
    rules = [right, dataclasses.replace(right, rate=lambda number: 0.1001),
             dataclasses.replace(right, nesterov=not nesterov)]  # fmt: skip
    watches = [Watch(rule, steps.shapes_of(model), random.Random(1), 3) for rule in rules]
    run = a_run()
    for _ in range(4):
        tensors, values = steps.shown(model, optimizer, scaler)
        for watch in watches:
            watch.see(showing(Message("shown", values, tensors)), run)
        optimizer.zero_grad()
        loss = model(torch.randn(50, 30)).square().mean()
        loss.backward()
        optimizer.step()
        run.step_ms.append(1.0)
        for watch in watches:
            watch.take({"losses": loss.detach()})
    passed = [[m.passed for s in watch.steps for m in s.updates.values()] for watch in watches]
    assert all(passed[0]) and not any(passed[1]) and not all(passed[2])
