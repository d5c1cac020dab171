"""The audit: a timed run that did not train V1's model is found, whatever the gate had seen."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated_float8 import on_cpu
from test_parity import embedding_gradient_loses_repeats_beyond_the_eighth, round_to_bf16
from torch import nn

from workshop import versions
from workshop.gate import audit, canonical
from workshop.gate.audit import Course, Reference
from workshop.gate.outcome import Setting
from workshop.judge.references import References
from workshop.run import data, trainer
from workshop.run.precision import FLOAT8, LADDER, get_precision

V1 = versions.load("v1")
CPU = torch.device("cpu")
CONFIG = V1.TinyLlamaConfig(
    vocab_size=300,
    hidden_dim=64,
    intermediate_dim=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
)
LONG = dataclasses.replace(
    CONFIG, hidden_dim=128, intermediate_dim=512, num_layers=12, num_heads=2, num_kv_heads=1,
    max_seq_len=512,
)  # fmt: skip
STEPS, GATED = 26, 8
"""The steps of a run as compare_versions.py times it on a CPU, and those that the gate trains."""
RATE = 3e-4
PROBE_SEED = 2**61
PRECISIONS = ("fp32", "bf16", *FLOAT8)
Fault = Callable[[nn.Module, torch.optim.Optimizer], None]


def setting(precision: str, seed: int = 0, *, long: bool = False) -> Setting:
    of = get_precision(precision, CPU, LADDER)
    if long:
        return Setting(LONG, of, CPU, seed, batch_size=1, seq_len=512)
    return Setting(CONFIG, of, CPU, seed, batch_size=4, seq_len=64)


def batches(of: Setting) -> torch.Tensor:
    shape = {"batch_size": of.batch_size, "seq_len": of.seq_len, "vocab_size": 300}
    return data.text_batches(data.read_corpus(), steps=STEPS, seed=of.seed, **shape)


def course(key: str, of: Setting, fault: Fault | None = None) -> Course:
    """The course of a version's run, with a fault in its model or optimizer."""
    module = versions.load(key)
    model = module.TinyLlama(module.TinyLlamaConfig(**vars(of.config)))
    canonical.load_canonical(model, canonical.canonical_state(of.config, of.seed))
    optimizer = module.configure_optimizer(model, RATE)
    if fault is not None:
        fault(model, optimizer)
    runner = trainer.Runner(model, optimizer, batches(of), of.precision, cuda_graph=False)
    for _ in range(STEPS):
        runner.advance()
    losses = runner.losses()
    return audit.record(model, of, losses, audit.fingerprint(model, PROBE_SEED), seed=1)


@pytest.fixture(scope="module", autouse=True)
def fp8_on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch):
        yield


@functools.cache
def v1_runs(precision: str, seed: int, long: bool) -> tuple[Course, Course, Course]:
    """V1's in higher precision, at its own, and at its own with fused attention."""
    of = setting(precision, seed, long=long)
    truth, fused = (
        audit.train_v1(
            *(of, batches(of), RATE),
            in_higher_precision=exact,
            fused_attention=not exact,
            probe_seed=PROBE_SEED,
            seed=1,
        )
        for exact in (True, False)
    )
    own = course("v1", of)
    return truth, own, own if of.in_fp32 else fused


def reference(
    precision: str, seed: int = 0, *, exact: bool = True, long: bool = False
) -> Reference:
    """A first repeat's; or V1's own run, as of a later one, with the errors of the first."""
    truth, own, fused = v1_runs(precision, seed, long)
    return Reference(truth if exact else own, audit.errors_of(own, truth, fused), "V1", exact)


@pytest.mark.parametrize("exact", [True, False], ids=["first repeat", "later repeat"])
@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS[1:])]
)
@pytest.mark.parametrize("key", ["v1", "v2", "v4"])
def test_true_versions_pass_with_room(key, precision, exact) -> None:
    for seed in range(3):
        of = setting(precision, seed)
        found = audit.judge(course(key, of), reference(precision, seed, exact=exact), of)
        closest = found.closest()
        assert found.status == "pass", found.failures
        assert closest is not None and closest[1] < 0.8 * closest[2], closest


def skips(lost: Callable[[int], bool]) -> Fault:
    """Leaves out the optimizer's steps that are `lost`, by their number from 1 on."""

    def plant(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain, numbers = optimizer.step, itertools.count(1)

        def step(*_: object) -> None:
            if not lost(next(numbers)):
                plain()

        optimizer.step = step

    return plant


def before_steps(fault: Fault, first: int = GATED + 1, last: int = STEPS) -> Fault:
    """Plants a fault before each of the optimizer's steps, from number `first` to `last`."""

    def plant(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        numbers = itertools.count(1)

        def spoil(*_: object) -> None:
            if first <= next(numbers) <= last:
                fault(model, optimizer)

        optimizer.register_step_pre_hook(spoil)

    return plant


def at_rate(rate: float) -> Fault:
    def plant(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    return plant


def without_gradient(are_left_out: Callable[[str], bool]) -> Fault:
    """Takes the gradients of the parameters of some names away."""

    def plant(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in model.named_parameters():
            if are_left_out(name):
                parameter.grad = None

    return plant


def lose_repeats(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    embedding_gradient_loses_repeats_beyond_the_eighth(model)


def scaled_gradient(name: str, rows: int, factor: float = 0.5) -> Fault:
    """The gradient of a tensor's first rows is `factor` of what it should be: AdamW hides that from
    the weights."""

    def plant(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = model.get_parameter(name)
        factors = torch.ones(len(weight), 1)
        factors[:rows] = factor
        weight.register_hook(lambda gradient: gradient * factors)

    return plant


def rounded_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    round_to_bf16(list(model.parameters()))


class Tf32(torch.autograd.Function):
    """x weight', from what tf32 keeps of the numbers: 10 bits."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return cut(x) @ cut(weight).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = map(cut, ctx.saved_tensors)
        return cut(dy) @ weight, cut(dy).flatten(0, -2).t() @ x.flatten(0, -2)


def cut(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def products_in_tf32(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = lambda x, of=layer: Tf32.apply(x, of.weight)


FAULTS: dict[str, Fault] = {
    "frozen from step 9": skips(lambda step: step > GATED),
    "ten times the rate from step 9": before_steps(at_rate(10 * RATE)),
    "a rate 5% too high from step 9": before_steps(at_rate(1.05 * RATE)),
    "one tensor skipped from step 9": before_steps(
        without_gradient("layers.1.self_attn.o_proj.weight".__eq__)
    ),
    "backward pass cut from step 9": before_steps(
        without_gradient(lambda name: "embed" not in name)
    ),
    "every thirteenth step lost": skips(lambda step: step % 13 == 0),
    "the rate forgotten": at_rate(1e-3),  # AdamW's own
    "embedding repeats lost": lose_repeats,
    "a gradient halved": scaled_gradient("layers.0.mlp.down_proj.weight", CONFIG.hidden_dim),
    "the queries' gradient halved": scaled_gradient(
        "layers.1.self_attn.qkv_proj.weight", CONFIG.hidden_dim
    ),
    "gradients rounded to bf16 from step 9": before_steps(rounded_gradients),
    "products in tf32 from step 9": before_steps(products_in_tf32, GATED),
}

IN_FP32_ALONE = ("gradients rounded to bf16 from step 9", "products in tf32 from step 9")


HIDDEN_IN_FP8 = (
    "a rate 5% too high from step 9",
    "every thirteenth step lost",
    "embedding repeats lost",
    "a gradient halved",
    "the queries' gradient halved",
)


@pytest.mark.parametrize(
    ("precision", "fault"),
    [
        pytest.param(precision, fault, marks=[] if precision == "fp32" else pytest.mark.slow)
        for precision in PRECISIONS
        for fault in FAULTS
        if (precision not in FLOAT8 or fault not in HIDDEN_IN_FP8)
        and (precision == "fp32" or fault not in IN_FP32_ALONE)
    ],
)
def test_a_planted_fault_is_red(fault, precision) -> None:
    of = setting(precision)
    found = audit.judge(course("v2", of, FAULTS[fault]), reference(precision), of)
    assert found.status == "fail" and found.failures, found.measures


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_below_fp32_v1_also_trains_with_fused_attention(precision) -> None:
    of, source = setting(precision), data.Source("text")
    references = References(
        of, source, warmup=2, learning_rate=RATE, environment=os.environ, v1_is_timed=False
    )
    try:
        made = references.round(repeat=0, again=0, steps=2)
    finally:
        references.stop()
    assert made.own is not None and (made.fused is None) == of.in_fp32
    if made.fused is not None:
        name = "layers.1.self_attn.q_proj.weight"
        assert not torch.equal(made.fused.gradients[name], made.own.gradients[name])


@pytest.mark.slow
def test_what_rounded_outputs_cost_the_scores_gradients_is_allowed() -> None:
    """And what they don't is found: a gradient of half the size, late in the run."""
    of, judge = setting("bf16", long=True), audit.judge
    first, later = (reference("bf16", exact=exact, long=True) for exact in (True, False))
    v1, v2 = (judge(course(key, of), first, of) for key in ("v1", "v2"))
    assert v1.status == v2.status == "pass", v2.failures
    name, error, _ = v2.closest() or ("", 0.0, 0.0)
    assert audit.of_scores(name) and error > 0.2, "nothing cancels here: the test shows nothing"
    for factor in (0.0, 0.5):
        name = "layers.5.self_attn.qkv_proj.weight"
        # A gradient's fault in the last seven steps alone: its hook is then in place.
        fault = before_steps(scaled_gradient(name, LONG.hidden_dim, factor), STEPS - 7, STEPS - 7)
        found = course("v2", of, fault)
        for against in (first, later):
            failures = judge(found, against, of).failures
            part = "part along V1's of the gradient of layers.5.self_attn.q_proj.weight"
            assert any(part in failure for failure in failures), (factor, against.exact, failures)


def test_a_run_of_v1_that_lost_a_step_is_red_itself() -> None:
    """Else it would allow all others twice as much."""
    of = setting("bf16")
    truth, _, fused = v1_runs("bf16", 0, False)
    frozen = course("v1", of, skips(lambda step: True))
    against = Reference(truth, audit.errors_of(frozen, truth, fused), "V1", exact=True)
    assert audit.judge(frozen, against, of).status == "fail"
    rate = course("v2", of, FAULTS["the rate forgotten"])
    assert audit.judge(rate, against, of).status == "fail"


@pytest.mark.parametrize(
    "fault",
    [skips(lambda step: step == STEPS), FAULTS["products in tf32 from step 9"]],
    ids=["before the last step", "trained with products in tf32"],
)
def test_weights_that_were_not_ready_are_red(fault) -> None:
    """The fingerprint was of other weights. In a later repeat, which allows more than the first."""
    of, against = setting("fp32"), reference("fp32", exact=False)
    true, early = course("v2", of), course("v2", of, fault)
    late = dataclasses.replace(true, fingerprint=early.fingerprint)
    (sentence,) = audit.judge(late, against, of).failures
    assert sentence.startswith("timed run: fingerprint: relative error ")


def test_a_scale_that_overflows_is_halved_before_the_first_step() -> None:
    """Without a GPU a factor of the loss plays fp16's overflow."""
    model = nn.Linear(4, 1, bias=False)
    model.forward = lambda tokens, targets: (model.weight * 2.0**-10).sum()
    model.weight.register_hook(lambda gradient: gradient.where(gradient < 9, torch.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bf16 = get_precision("bf16", CPU)
    step = trainer.Runner(model, optimizer, torch.zeros(1, 2, 1), bf16, cuda_graph=False)
    step.scaler = torch.amp.GradScaler("cpu")
    before = model.weight.detach().clone()
    step.settle_scale()
    assert step.scaler.get_scale() == 2.0**12 and torch.equal(model.weight, before)


def test_a_fingerprint_does_not_depend_on_the_order_of_the_weights() -> None:
    """Peers have V1's weights in another order."""
    module = versions.load("v1")
    model = module.TinyLlama(module.TinyLlamaConfig(**vars(CONFIG)))
    before = audit.fingerprint(model, PROBE_SEED)
    for part in model.layers.modules():
        part._modules = dict(reversed(part._modules.items()))
    after = audit.fingerprint(model, PROBE_SEED)
    names = [name for name, _ in model.named_parameters()]
    assert names != [name for name, _ in module.TinyLlama(model.config).named_parameters()]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], numbers) for name, numbers in after.items())
