"""Linear layers in fp8. On a CPU the products are emulated; those marked gpu use a GPU's own."""

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from emulated_float8 import on_cpu
from test_parity import hurries
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workshop import versions
from workshop.errors import WorkshopError
from workshop.gate import canonical, parity
from workshop.profilers.flop_counts import CountedStep, count_with_torch
from workshop.run import data, float8, float8_cost, presets, trainer
from workshop.run.float8 import ROWWISE, TENSORWISE
from workshop.run.precision import FLOAT8, LADDER, get_precision, supported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
recipes = pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE])
precisions = pytest.mark.parametrize("precision", FLOAT8)


@pytest.fixture
def emulated(monkeypatch) -> Iterator[None]:
    with on_cpu(monkeypatch):
        yield


# --- one layer -----------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
    return float8.float8_linear(x, weight, recipe, float8.formats(x.device, recipe))


def worst_errors(recipe: str, device: torch.device = CPU) -> list[float]:
    """The largest error of y, of dx and of dw, against fp64, on an odd shape and for numbers that
    grow from call to call."""
    generator = torch.Generator().manual_seed(0)
    worst = [0.0, 0.0, 0.0]
    for size in (1.0, 1e3, 1e-4):
        x, weight, dy = (
            size * torch.randn(shape, generator=generator).to(device)
            for shape in ((3, 13, 88), (40, 88), (3, 13, 40))
        )
        x, dy = x.bfloat16().requires_grad_(), dy.bfloat16()
        weight.requires_grad_()
        y = linear(x, weight, recipe)
        y.backward(dy)
        assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (*2 * [torch.bfloat16], torch.float32)
        rows, drows, w = x.double().flatten(0, 1), dy.double().flatten(0, 1), weight.double()
        true = (rows @ w.t(), drows @ w, drows.t() @ rows)
        found = (y.flatten(0, 1), x.grad.flatten(0, 1), weight.grad)
        errors = [parity.relative_rms(a.detach(), b) for a, b in zip(found, true, strict=True)]
        worst = list(map(max, worst, errors))
    return worst


LIMITS = {TENSORWISE: [0.042, 0.068, 0.068], ROWWISE: [0.042, 0.042, 0.042]}
"""Rounding to e4m3 is 2.6% off, to e5m2 5.2% (RMS): of two factors 3.7%, and 5.9%."""


def stale_scale(patch: pytest.MonkeyPatch) -> None:
    true, kept = float8.quantise, {}

    def quantise(x: Tensor, dtype: torch.dtype, recipe: str) -> float8.Scaled:
        scale = kept.setdefault((x.shape, x.dtype, dtype), true(x, dtype, recipe).scale)
        largest = torch.finfo(dtype).max
        return float8.Scaled((x.float() / scale).clamp(-largest, largest).to(dtype), scale)

    patch.setattr(float8, "quantise", quantise)


def weight_in_the_activations_scale(patch: pytest.MonkeyPatch) -> None:
    true, last = float8.quantise, [torch.ones(())]

    def quantise(x: Tensor, dtype: torch.dtype, recipe: str) -> float8.Scaled:
        q = true(x, dtype, recipe)
        last.append(q.scale)
        used = last[-2].max() if x.dtype == torch.float32 else q.scale
        return float8.Scaled((x.float() / used).to(dtype), q.scale)

    patch.setattr(float8, "quantise", quantise)


def gradient_of_the_input_missing(patch: pytest.MonkeyPatch) -> None:
    true = float8.Float8Product.backward

    def backward(ctx: object, *dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, *others = true(ctx, *dy)
        return torch.zeros_like(dx), *others

    patch.setattr(float8.Float8Product, "backward", staticmethod(backward))


def one_scale_forgotten(patch: pytest.MonkeyPatch) -> None:
    true = float8.product

    def product(a: float8.Scaled, b: float8.Scaled, *more: object, **named: object) -> Tensor:
        return true(a, dataclasses.replace(b, scale=torch.ones_like(b.scale)), *more, **named)

    patch.setattr(float8, "product", product)


@recipes
def test_a_layer_is_as_far_off_as_its_roundings(recipe, emulated, monkeypatch) -> None:
    def passes() -> list[bool]:
        found = worst_errors(recipe)
        return [a <= b for a, b in zip(found, LIMITS[recipe], strict=True)]

    assert passes() == [True] * 3
    for plant, seen in (
        (stale_scale, [False] * 3),
        (weight_in_the_activations_scale, [False, False, True]),
        (gradient_of_the_input_missing, [True, False, True]),
        (one_scale_forgotten, [False] * 3),
    ):
        with monkeypatch.context() as patch:
            plant(patch)
            assert passes() == seen, plant.__name__


def test_a_large_token_costs_the_others_nothing_rowwise(emulated) -> None:
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x[5] *= 1e6
    errors = {}
    for recipe in LIMITS:
        y = linear(x.bfloat16(), weight, recipe)
        errors[recipe] = parity.relative_rms(y[:5], x[:5].double() @ weight.double().t())
    assert errors[ROWWISE] < 0.05 < 0.5 < errors[TENSORWISE]


@recipes
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(recipe, emulated) -> None:
    x, weight = torch.zeros(16, 32), torch.randn(16, 32)
    assert not linear(x, weight, recipe).any()
    x[3, 3] = torch.inf
    assert not linear(x, weight, recipe)[3].isfinite().any()


def v3_kernels() -> ModuleType:
    versions.load("v3")  # the interpreter, where there is no GPU
    return versions.load_file(versions.get_version("v3").path.with_name("triton_float8.py"))


def kernels_against_pytorch(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Results of V3's kernels and of plain PyTorch for the same matrices, in turn: odd sizes and
    strides, zeros, and numbers that are not finite."""
    both_ways = v3_kernels().round_both_ways
    wide = torch.randn(130, 300, device=device).bfloat16() * 37
    spoilt = torch.randn(20, 33, device=device)
    spoilt[3, 5], spoilt[7, 8] = torch.nan, torch.inf
    zeros, aligned = torch.zeros(3, 40, device=device), torch.randn(256, 64, device=device)
    matrices = (wide[:, :257], wide.t(), wide[:1], aligned, zeros, spoilt)
    for recipe, x in itertools.product((TENSORWISE, ROWWISE), matrices):
        for dtype in set(float8.formats(device, recipe)):
            found, true = (
                each(x, dtype, recipe == ROWWISE) for each in (both_ways, float8.round_both_ways)
            )
            for a, b in zip(found, true, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                if x is not spoilt:
                    yield a.float(), b.float()
            for i in (0, 2):  # PyTorch's scale of what holds a NaN is NaN, ours is infinite
                yield tuple(
                    (each[i].float() * each[i + 1]).nan_to_num(-1) for each in (found, true)
                )


needs_v3 = pytest.mark.skipif("v3" not in versions.available(), reason="Triton is not installed")


@needs_v3
def test_v3_s_kernels_round_as_pytorch_does(emulated) -> None:
    for found, true in kernels_against_pytorch(CPU):
        assert torch.equal(found, true)


BETWEEN = {"swiglu": 2, "rms_norm": 1, "add_rms_norm": 2}
"""Operators between two products; and how many passes over its results and gradients each spares
the products."""


@needs_v3
@recipes
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
def test_v3_s_operators_find_the_amax_on_the_way(
    device, name, recipe, emulated, monkeypatch
) -> None:
    """The numbers of V3's other operators, with fewer passes over what is between two products."""
    if device == GPU:
        needs(recipe)
    kernels, tk = v3_kernels(), versions.load("v3").tk
    blocks = versions.load_file(Path(kernels.__file__).with_name("tiny_llama_v3_float8.py"))
    kernel, passes = kernels._float8_amax_kernel, []

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            passes.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_float8_amax_kernel", Counted())
    block = blocks.Float8Block()
    block.recipe, block.types = recipe, float8.formats(device, recipe)
    normal = partial(torch.randn, device=device)
    tokens = (2, 8) if device == CPU else (8, 1024)  # a program of the norm takes several turns
    x, dy = (normal(*tokens, 32).bfloat16() for _ in range(2))
    width = 48 if name == "swiglu" else 96
    given = x, normal(96, 32), normal(32, width), normal(*tokens, 96), normal(96)
    options = {"recipe": recipe, "types": block.types, "both_ways": kernels.round_both_ways}
    product = partial(float8.float8_linear, **options)
    plainly = {
        "swiglu": lambda y, stream, weight: tk.swiglu(*y.chunk(2, dim=-1)),
        "rms_norm": lambda y, stream, weight: tk.rms_norm(y, weight, 1e-5),
        "add_rms_norm": lambda y, stream, weight: tk.add_rms_norm(y, stream, weight, 1e-5)[0],
    }[name]

    def without_amax(x: Tensor, into: Tensor, *rest: Tensor) -> tuple[Tensor, None]:
        return plainly(product(x, into), *rest), None

    def with_amax(x: Tensor, into: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if name == "swiglu":
            return kernels.swiglu(*block.multiply(x, into))
        if name == "rms_norm":
            return kernels.rms_norm(product(x, into), weight, 1e-5, torch.bfloat16)
        return kernels.add_rms_norm(*block.multiply(x, into), stream, weight, 1e-5)[:2]

    found = []
    for between in (without_amax, with_amax):
        x, into, out, stream, weight = (leaf.clone().requires_grad_() for leaf in given)
        with torch.autocast(device.type, torch.bfloat16):
            y, amax = between(x, into, stream, weight)
            y = product(y, out, x_amax=amax)
        y.backward(dy)
        leaves = (x, into, out, stream, weight)
        found.append((y, *(leaf.grad for leaf in leaves if leaf.grad is not None)))
    assert all(map(torch.equal, *found))
    assert len(passes) == 6 + (6 - BETWEEN[name] if recipe == TENSORWISE else 6)


@needs_v3
def test_an_amax_is_that_of_all_that_was_written(emulated, monkeypatch) -> None:
    """By several programs, each with several turns; of either half of SwiGLU's gradient."""
    from kernel_cases import normal, small_tiles

    kernels = v3_kernels()
    for name in ("triton_rms_norm", "triton_swiglu"):
        small_tiles(sys.modules[name], monkeypatch)
    dy, weight, stream = normal(300, 96).bfloat16(), normal(96), normal(300, 96)
    for row, gate, up in ((0, 1, 8), (299, 8, 1)):
        dy[row] *= 16
        gate_up = torch.cat((gate * normal(300, 96), up * normal(300, 96)), 1).bfloat16()
        y, total, rstd, y_amax = kernels._add_rms_norm(dy, stream, weight, 1e-5)
        _, dbranch, _, dbranch_amax = kernels._add_rms_norm_backward(dy, None, total, weight, rstd)
        found = [(y, y_amax), (dbranch, dbranch_amax)]
        found += [kernels._swiglu(gate_up), kernels._swiglu_backward(dy, gate_up)]
        for written, amax in found:
            assert amax == written.float().abs().max()
    gate_up[3, 5] = torch.nan
    assert kernels._swiglu(gate_up)[1].isinf()


class Casts(TorchDispatchMode):
    """Adds up the bytes that all but products and views read and write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        names = {"_to_copy", "mul", "linalg_vector_norm", "clone"}
        if func._overloadpacket.__name__ in names:
            moved = [x for x in (*args, out) if isinstance(x, Tensor) and x.numel() > 1000]
            self.total += sum(x.nbytes for x in moved)
        return out


@recipes
def test_what_rounding_moves_is_counted(recipe, emulated) -> None:
    N, I, O = 64, 48, 80
    x, weight, dy = torch.randn(N, I), torch.randn(O, I), torch.randn(N, O)
    moved = []
    for product in (F.linear, partial(linear, recipe=recipe)):
        leaf, parameter = x.bfloat16().requires_grad_(), weight.clone().requires_grad_()
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            product(leaf, parameter).backward(dy.bfloat16())
        moved.append(casts.total)
    assert moved[1] - moved[0] == float8_cost.added_bytes(float8_cost.EAGER[recipe], N, I, O)


# --- the versions --------------------------------------------------------------------------------


def gate(
    key: str,
    config: object,
    precision: str,
    seed: int = 0,
    edit: Callable[[nn.Module], None] = lambda _: None,
    configure_optimizer: parity.ConfigureOptimizer | None = None,
    shape: tuple[int, int] = (3, 65),
) -> parity.ParityReport:
    """The gate at fp8, without the one in fp32 that goes before it, of a model that `edit` may
    break."""
    module = versions.load(key)
    model = module.TinyLlama(config)
    edit(model)
    setting = parity.Setting(config, get_precision(precision, CPU, LADDER), CPU, seed, *shape)
    optimizer = configure_optimizer or module.configure_optimizer
    return parity.check_model(model, setting, optimizer)


@pytest.mark.parametrize("precision", ["fp8", pytest.param("fp8-rowwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", ["v2", "v4"])
def test_the_gate_passes_with_room(key, precision, odd_config, emulated) -> None:
    for seed in range(2):
        report = gate(key, odd_config, precision, seed)
        assert report.passed, (seed, report.failures)
        assert parity.badness(report.worst[1]) < 0.75, (seed, report.worst)


ONE_LAYER = {"num_layers": 1, "hidden_dim": 64, "num_heads": 2, "num_kv_heads": 1}
"""Sizes that V3's attention has kernels for."""


@pytest.mark.slow
@needs_v3
def test_the_gate_passes_v3(odd_config, emulated) -> None:
    small = dataclasses.replace(odd_config, **ONE_LAYER)
    report = gate("v3", small, "fp8", shape=(1, 9))  # its kernels are interpreted
    assert report.passed, report.failures


def replace(model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    layer = model.layers[1].mlp.down_proj
    layer.forward = partial(forward, layer)


def left_in_bf16(model: nn.Module) -> None:
    replace(model, lambda layer, x: F.linear(x, layer.weight))


def cut(model: nn.Module) -> None:
    model.forward = torch.no_grad()(model.forward)


def severed(model: nn.Module) -> None:
    replace(model, lambda layer, x: linear(x.detach(), layer.weight, TENSORWISE))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        most = dy.abs().max() / 4
        return dy.clamp(-most, most)


def scale_of_a_smaller_gradient(model: nn.Module) -> None:
    """As the step before had it: what is larger now is cut off."""
    replace(model, lambda layer, x: Clipped.apply(linear(x, layer.weight, TENSORWISE)))


@pytest.mark.parametrize(
    ("edit", "optimizer", "pattern"),
    [
        (left_in_bf16, None, r"^9\d\.\d% of the operations of the layers' products run in fp8"),
        (cut, None, r"embed_tokens\.weight is missing"),
        (severed, None, r"layers\.1\.mlp\.gate_proj\.weight is missing"),
        (scale_of_a_smaller_gradient, None, r"gradient of layers\.1\.mlp\.down_proj"),
        (lambda _: None, hurries, r"movement of layers\.1\.mlp\.down_proj\.weight"),
    ],
)
def test_the_gate_finds_what_is_wrong_in_fp8(
    edit, optimizer, pattern, odd_config, emulated
) -> None:
    config = dataclasses.replace(odd_config, intermediate_dim=160)  # nothing is padded
    report = gate("v1", config, "fp8", edit=edit, configure_optimizer=optimizer)
    assert any(re.search(pattern, failure) for failure in report.failures), report.failures


@pytest.mark.parametrize(
    ("key", "precision"), [pytest.param("v3", "fp8-rowwise", marks=needs_v3), ("v4", "fp8")]
)
def test_a_version_compiles_into_one_graph_that_waits_for_nothing(
    key, precision, odd_config, emulated
) -> None:
    """Reading a scale on the host would break it, as it would a CUDA graph."""
    config = dataclasses.replace(odd_config, **ONE_LAYER)
    model = versions.load(key).TinyLlama(config)
    LADDER[precision].prepare(model)
    tokens = torch.randint(311, (2, 9))
    losses = []
    for _ in ("eager", "compiled"):
        with LADDER[precision].autocast("cpu"):
            losses.append(model(tokens, tokens))
        model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    losses[1].backward()
    assert abs(losses[0] - losses[1]) < 0.01
    assert len(canonical.canonical_gradients(model)) == 11
    assert all(gradient.any() for gradient in canonical.canonical_gradients(model).values())


def test_flop_counters_count_a_step_as_in_bf16(odd_config, emulated) -> None:
    config = dataclasses.replace(odd_config, intermediate_dim=160)
    counts = []
    for name in ("bf16", "fp8", "fp8-rowwise"):
        model = versions.load("v2").TinyLlama(config)
        LADDER[name].prepare(model)
        counted = count_with_torch(CountedStep(model, LADDER[name], torch.zeros(2, 2, 16).long()))
        counts.append(tuple(sum(phase.values()) for phase in counted))
        assert ("aten._scaled_mm" in counted[0]) == (name != "bf16")
    assert counts[0] == counts[1] == counts[2]


STEPS, LAST = 300, 50


def losses(key: str, precision: str, config: object, device: torch.device) -> Tensor:
    """Losses of the last steps of a run on text, (LAST,)."""
    module = versions.load(key)
    model = module.TinyLlama(module.TinyLlamaConfig(**vars(config))).to(device)
    canonical.load_canonical(model, canonical.canonical_state(config, 0))
    batches = data.text_batches(
        data.read_corpus(), steps=STEPS, batch_size=4, seq_len=64, vocab_size=256, seed=0
    )
    optimizer = module.configure_optimizer(model, 1e-3)
    return trainer.train_losses(model, optimizer, batches, LADDER[precision])[-LAST:]


def apart(found: Tensor, true: Tensor) -> float:
    return (found - true).square().mean().sqrt().item()


TEXT_SIZES = {
    "vocab_size": 256,
    "hidden_dim": 64,
    "intermediate_dim": 160,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_seq_len": 64,
}
TEXT_MULTIPLE = 2.0
"""Limit of a version's distance from V1's losses in bf16, as a multiple of V1's own in fp8: it is
0.7 to 1.6 over 3 seeds and both recipes."""


def lose_no_more_than_v1(
    precision: str, device: torch.device, keys: tuple[str, ...]
) -> tuple[Tensor, float]:
    """Checks the versions; V1's losses in bf16, and how far from them fp8's may be."""
    config = versions.load("v1").TinyLlamaConfig(**TEXT_SIZES)
    true, own = (losses("v1", name, config, device) for name in ("bf16", precision))
    allowed = TEXT_MULTIPLE * apart(own, true)
    for key in keys:
        assert apart(losses(key, precision, config, device), true) < allowed, key
    return true, allowed


@pytest.mark.slow
def test_300_steps_of_text_lose_no_more_than_v1_does(emulated, monkeypatch) -> None:
    """V4 at fp8; on a GPU V2 and fp8-rowwise too."""
    config = versions.load("v1").TinyLlamaConfig(**TEXT_SIZES)
    true, allowed = lose_no_more_than_v1("fp8", CPU, ("v4",))
    stale_scale(monkeypatch)
    assert apart(losses("v1", "fp8", config, CPU), true) > 2 * allowed


# --- where it runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hip", "name", "capability", "expected"),
    [
        (None, "", (8, 0), []),
        (None, "", (8, 9), ["fp8"]),
        (None, "", (9, 0), ["fp8", "fp8-rowwise"]),
        (None, "", (10, 0), ["fp8", "fp8-rowwise"]),
        (None, "", (12, 0), ["fp8"]),
        ("6.4", "gfx90a:sramecc+", (9, 0), []),
        ("6.4", "gfx942:sramecc+", (9, 4), ["fp8", "fp8-rowwise"]),
        ("6.4", "gfx950", (9, 5), ["fp8", "fp8-rowwise"]),
        ("6.4", "gfx1100", (11, 0), []),
    ],
)
def test_a_chip_has_it_or_says_which_do(hip, name, capability, expected, monkeypatch) -> None:
    gpu = torch.device("cuda", 0)
    properties = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the chip")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert [name for name in supported(gpu, LADDER) if name in FLOAT8] == expected
    assert not FLOAT8.keys() & set(supported(gpu))
    for missing in FLOAT8.keys() - set(expected):
        with pytest.raises(WorkshopError, match=r"the chip does not have it, .*Hopper.*MI300"):
            get_precision(missing, gpu, LADDER)
    values, wide = torch.float8_e4m3fn, torch.float8_e5m2
    if name.startswith("gfx942"):
        values, wide = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    assert float8.formats(gpu, TENSORWISE) == (values, wide)
    assert float8.formats(gpu, ROWWISE) == (values, values)


@precisions
def test_torchao_s_recipes_pass_the_gate(precision, emulated, monkeypatch) -> None:
    """The peer: all of its products are counted, also those behind torchao's own tensors."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.bfloat16)  # it asks no CPU
    sizes = {"num_layers": 1, "hidden_dim": 128, "intermediate_dim": 256}
    config = versions.load("torchao").TinyLlamaConfig(**presets.get_preset("tiny").model() | sizes)
    report = gate("torchao", config, precision, shape=(2, 32))
    assert report.passed, report.failures


# --- on a GPU ------------------------------------------------------------------------------------


def needs(recipe: str) -> None:
    if recipe not in float8.recipes(GPU):
        pytest.skip(f"{torch.cuda.get_device_name(GPU)} has no {recipe} products in fp8")


@pytest.mark.gpu
@recipes
def test_a_gpus_products_are_the_emulated_ones(recipe) -> None:
    needs(recipe)
    values, gradients = float8.formats(GPU, recipe)
    a, b = torch.randn(208, 4096, device=GPU), torch.randn(96, 4096, device=GPU)
    for dtype, fast in ((values, True), (gradients, False)):
        factors = float8.quantise(a, dtype, recipe), float8.quantise(b, values, recipe)
        found = float8.product(*factors, torch.bfloat16, fast=fast)
        left, right = (factor.values.double() * factor.scale.double() for factor in factors)
        error = parity.relative_rms(found, left @ right.t())
        print(f"{recipe}, {dtype}: {error:.1e} off")
        assert error < 2 * 2.0**-8  # bf16 rounds by 2^-9 (RMS); Hopper's sums have few bits


@pytest.mark.gpu
@needs_v3
def test_v3_s_kernels_round_on_a_gpu() -> None:
    """But for numbers in the middle of two: a division there is not exact to the last bit."""
    needs(ROWWISE)
    for found, true in kernels_against_pytorch(GPU):
        assert (~torch.isclose(found, true, rtol=1e-5, atol=0)).float().mean() < 1e-3


@pytest.mark.gpu
@recipes
def test_a_layer_is_as_far_off_on_a_gpu(recipe) -> None:
    needs(recipe)
    found = worst_errors(recipe, GPU)
    assert all(a <= b for a, b in zip(found, LIMITS[recipe], strict=True)), found


@pytest.mark.gpu
@precisions
@pytest.mark.parametrize("key", ["v1", "v2", "v3", "v4"])
def test_the_gate_passes_on_a_gpu(key, precision) -> None:
    """V3 captured, V4 compiled and captured: a wait for the device would break the capture."""
    needs(FLOAT8[precision].float8_recipe)
    module = versions.load(key)

    def build(config: object) -> nn.Module:
        model = module.TinyLlama(config)
        if key == "v4":
            module.compile_model(model)
        return model

    config = module.TinyLlamaConfig(**presets.get_preset("tiny").model())
    for seed in range(3):
        report = parity.check(
            *(build, config),
            precision=precision,
            device=GPU,
            seed=seed,
            configure_optimizer=module.configure_optimizer,
            cuda_graph=key in ("v3", "v4"),
        )
        print(f"{key} {precision}: {report.summary()}")
        assert report.passed, report.failures


@pytest.mark.gpu
@precisions
def test_300_steps_of_text_on_a_gpu(precision) -> None:
    needs(FLOAT8[precision].float8_recipe)
    lose_no_more_than_v1(precision, GPU, ("v2", "v3", "v4"))
