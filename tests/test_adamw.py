"""V3's optimizer against PyTorch's in fp64, and the rounded weights that it keeps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton_adamw
import triton_linear
from kernel_cases import DEVICE, poisoned_memory, small_tiles, with_fault
from triton_kernels import INTERPRETED, AdamW

from workshop import versions

SHAPES = ((5,), (17, 9), (64,), (130, 3))
STEPS = 6


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch) -> None:
    if INTERPRETED:
        small_tiles(triton_adamw, monkeypatch)


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def give_gradients(*models: list[Tensor], step: int, scale: float = 1.0) -> None:
    """The same gradients to each model, from large to tiny; the first model's are scaled."""
    generator = torch.Generator().manual_seed(step)
    for same in zip(*models, strict=True):
        gradient = torch.randn(same[0].shape, generator=generator).to(DEVICE) * 10.0**-step
        for index, p in enumerate(same):
            p.grad = (gradient * (scale if index == 0 else 1.0)).to(p.dtype)


def worst(found: list[Tensor], true: list[Tensor]) -> float:
    return max(
        ((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, true, strict=True)
    )


def excess(kind: type, scaled: bool) -> tuple[float, torch.optim.Optimizer]:
    """How far some steps are from fp64's, in units of what is allowed: twice PyTorch's own
    distance and a rounding. `scaled`: as a captured step and a GradScaler have it."""
    ours, plain, exact = parameters(), parameters(), parameters(torch.float64)
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    with poisoned_memory():
        mine = kind(ours, **options)
        others = [torch.optim.AdamW(weights, **options) for weights in (plain, exact)]
        if scaled:
            mine.param_groups[0]["lr"] = torch.tensor(1e-2, device=DEVICE)
            mine.grad_scale = torch.tensor(8.0, device=DEVICE)
            mine.found_inf = torch.tensor(0.0, device=DEVICE)
        for step in range(STEPS):
            give_gradients(ours, plain, exact, step=step, scale=8.0 if scaled else 1.0)
            for optimizer in (mine, *others):
                optimizer.step()
    return worst(ours, exact) / (2 * worst(plain, exact) + 2.0**-24), mine


def assert_same(found: list[Tensor], expected: list[Tensor], rtol: float = 2e-6) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-8)


def train(*optimizers: torch.optim.Optimizer, step: int = 0) -> None:
    """A step of each, with the same gradients."""
    give_gradients(*(parameters_of(optimizer) for optimizer in optimizers), step=step)
    for optimizer in optimizers:
        optimizer.step()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("scaled", [False, True])
def test_it_is_adamw(scaled) -> None:
    found, mine = excess(AdamW, scaled)
    assert found <= 1.0
    for state in mine.state.values():
        assert state["exp_avg"].isfinite().all() and state["step"].item() == STEPS


FAULTS = {
    "first moment not corrected": ("tl.store(row + 1, lr / corrected1)", "tl.store(row + 1, lr)"),
    "second moment not corrected": ("tl.rsqrt(corrected2)", "tl.rsqrt(corrected2 * 0 + 1)"),
    "decay forgotten": ("p = keep * p - ", "p = p - "),
    "gradient not squared": ("rest2 * g * g", "rest2 * g"),
    "loss scale kept": ("inverse = 1.0 / tl.load(scale_ptr)", "inverse = 1.0"),
    "last numbers left out": ("inside = n < tl.multiple_of(", "inside = n + 1 < tl.multiple_of("),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, tmp_path) -> None:
    faulty = with_fault("triton_adamw", *FAULTS[fault], tmp_path).AdamW
    assert not excess(faulty, scaled=True)[0] <= 1.0


def test_an_overflow_skips_the_step() -> None:
    ours = parameters()
    optimizer = AdamW(ours)
    train(optimizer)
    before = [p.detach().clone() for p in ours]
    optimizer.found_inf = torch.tensor(1.0, device=DEVICE)
    for p in ours:
        p.grad.fill_(torch.inf)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))
    assert [optimizer.state[p]["step"].item() for p in ours] == [1] * len(SHAPES)


@pytest.mark.parametrize("first", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("then", [AdamW, torch.optim.AdamW])
def test_a_saved_state_goes_on_where_it_was(first, then) -> None:
    """Also PyTorch's in ours, and ours in PyTorch's."""
    runs = []
    for cut in (False, True):
        ours = parameters()
        optimizer = first(ours)
        for step in range(STEPS):
            if cut and step == 3:
                state = optimizer.state_dict()
                optimizer = then(ours)
                optimizer.load_state_dict(copy.deepcopy(state))
            train(optimizer, step=step)
        runs.append(ours)
    assert_same(*runs, rtol=0 if first is then else 1e-6)


def test_groups_have_their_own_settings_and_each_parameter_counts_its_own_steps() -> None:
    def groups() -> list[dict[str, Any]]:
        its = parameters()
        return [
            {"params": its[:2], "lr": 1e-2, "betas": (0.0, 0.0)},
            {"params": its[2:], "weight_decay": 0.0},
            {"params": [torch.zeros(0, device=DEVICE, requires_grad=True)]},
        ]

    ours, plain = AdamW(groups()), torch.optim.AdamW(groups())
    for step in range(STEPS):
        give_gradients(parameters_of(ours), parameters_of(plain), step=step)
        for optimizer in (ours, plain):
            if step < STEPS - 1:
                parameters_of(optimizer)[2].grad = None
            optimizer.step()
    assert_same(parameters_of(ours), parameters_of(plain))


def test_parameters_in_one_buffer_leave_their_neighbours_alone() -> None:
    """Sizes and addresses that are no multiple of 16."""
    buffer, plain = torch.zeros(64, device=DEVICE), torch.zeros(2, 13, device=DEVICE)
    ours = [buffer[3:16].requires_grad_(), buffer[17:30].requires_grad_()]
    usual = [row.clone().requires_grad_() for row in plain]
    for p in (*ours, *usual):
        p.grad = torch.ones_like(p)
    AdamW(ours).step()
    torch.optim.AdamW(usual).step()
    assert_same(ours, usual)
    assert not buffer[:3].any() and buffer[16] == 0 and not buffer[30:].any()


@pytest.mark.parametrize("how", ["transposed", "expanded"])
def test_a_gradients_strides_are_heeded(how) -> None:
    ours, plain = (torch.zeros(3, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    numbers = torch.arange(9.0, device=DEVICE).view(3, 3)
    for p in (ours, plain):
        p.grad = numbers.t() if how == "transposed" else numbers[:1].expand(3, 3)
    AdamW([ours]).step()
    torch.optim.AdamW([plain]).step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-8)


HALF = torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtypes", [(HALF[0], HALF[0]), (HALF[1], HALF[1]), HALF], ids=str)
def test_the_copies_are_the_weights_rounded(dtypes) -> None:
    ours = parameters()
    optimizer = AdamW(ours)
    copies = [triton_linear.rounded(p, dtype) for p, dtype in zip(ours[1::2], dtypes, strict=True)]
    train(optimizer)
    for p, copy_ in zip(ours[1::2], copies, strict=True):
        low = triton_linear.rounded(p, copy_.dtype)
        assert low is copy_ or dtypes == HALF, "the step wrote no copy"
        unit = torch.finfo(low.dtype).eps if INTERPRETED else 0.0  # the interpreter cuts
        torch.testing.assert_close(low, p.detach().to(low.dtype), rtol=unit, atol=0)
    assert triton_linear.rounded_copy(ours[0]) is None


def test_a_weight_that_changed_otherwise_is_rounded_anew() -> None:
    weight = parameters()[1]
    triton_linear.keep_rounded(weight)
    old = triton_linear.rounded(weight, torch.bfloat16)
    for changed in (weight.mul_, lambda factor: setattr(weight, "data", weight.data * factor)):
        with torch.no_grad():
            changed(2)
        new = triton_linear.rounded(weight, torch.bfloat16)
        assert new is not old
        torch.testing.assert_close(new, weight.detach().to(torch.bfloat16), rtol=0, atol=0)
        old = new
    optimizer = AdamW([weight])  # nor does a step take an old copy for a new one
    with torch.no_grad():
        weight.mul_(2)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    new = triton_linear.rounded(weight, torch.bfloat16)
    torch.testing.assert_close(new, weight.detach().to(torch.bfloat16), rtol=0, atol=0)
    assert triton_linear.rounded(weight, torch.float16).dtype == torch.float16
    assert triton_linear.rounded(weight, torch.float32) is weight


def test_a_backward_pass_after_the_step_is_refused() -> None:
    """As for any tensor that changed after it was saved: its numbers would be of another step."""
    weight = parameters()[1]
    optimizer = AdamW([weight])
    x = torch.ones(2, weight.shape[1], device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        first, second = (triton_linear.linear(x, weight).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


# PyTorch's fused form changes weights without counting their versions.
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_the_model_trains_on_fresh_copies(options, monkeypatch) -> None:
    """Loaded weights, then trained ones: the products see each at once."""
    if INTERPRETED:
        monkeypatch.setattr(triton_adamw, "CHUNK", 2**13)
    module = versions.load("v3")
    sizes = {"vocab_size": 97, "hidden_dim": 64, "intermediate_dim": 96, "num_layers": 1}
    config = module.TinyLlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_seq_len=64)
    torch.manual_seed(0)
    models = [module.TinyLlama(config).to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = (
        module.configure_optimizer(models[0], 1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, **options),
    )
    tokens = torch.arange(9, device=DEVICE)[None] % 97
    for _ in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.autocast(DEVICE, torch.bfloat16):
                losses.append(model(tokens, tokens.roll(-1, dims=1)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)


def test_an_option_that_the_kernels_do_not_have_is_refused() -> None:
    """Also when it is set later, as a loaded state does."""
    ours = parameters()
    give_gradients(ours, step=0)
    optimizer = AdamW(ours)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: torch.zeros(3, dtype=torch.bfloat16, device=DEVICE), TypeError),
        (lambda: torch.zeros(4, 4, device=DEVICE)[:, :2], ValueError),
    ],
    ids=["bf16", "a view"],
)
def test_what_it_can_not_update_is_refused(make, error) -> None:
    parameter = make().requires_grad_()
    parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamW([parameter])
    with pytest.raises(error, match=r"bfloat16|\(4, 2\)"):
        optimizer.step()
    assert not optimizer.state
