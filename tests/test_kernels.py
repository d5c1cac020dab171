"""V3's kernels against plain fp64 versions; in Triton's interpreter where there is no GPU."""

import ast
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_launch import cdiv

import triton_cross_entropy
import triton_float8
import triton_kernels as ops
from kernel_cases import (
    CASES,
    DEVICE,
    MODULES,
    Case,
    as_tuple,
    call,
    normal,
    poisoned_memory,
    small_tiles,
    worst_excess,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from workshop import versions


@pytest.fixture(autouse=True)
def several_programs(monkeypatch) -> None:
    for module in MODULES.values():
        small_tiles(module, monkeypatch)


class Record(TorchDispatchMode):
    """Every operator that is called within it, its arguments and its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, as_tuple(result)))
        return result

    def ours(self) -> list[tuple]:
        return [call for call in self.calls if call[0].namespace == "tiny_llama"]


def test_memory_is_poisoned() -> None:
    with poisoned_memory():
        assert torch.empty(3, device=DEVICE).isnan().all()


@pytest.mark.parametrize("label", CASES)
def test_forward_and_gradients_are_as_close_to_fp64_as_the_plain_version(label) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes if DEVICE == "cuda" else dtypes[:1]:
        worst = worst_excess(CASES[label], dtype)
        assert worst <= 1.0, f"{dtype}: {worst:.2f} of what is allowed"


HALVED = {
    *("rms_norm-3x63x72", "add_rms_norm-3x63x72", "swiglu-3x63x152", "linear-3x63x72x40"),
    *("qkv_attention-B2 H6 K2 T63 D32 C72", "flash_attention-B2 H4 K2 T63 D32 causal"),
    *("feed_forward-3x63x72x40", "linear_cross_entropy-63x40x311"),
}


@pytest.mark.parametrize("label", sorted(HALVED))
def test_half_precisions_in_the_interpreter_too(label) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        worst = worst_excess(CASES[label], dtype, seed=1)
        assert worst <= 1.0, f"{dtype}: {worst:.2f} of what is allowed"


# --- offsets of 2^31 and more -----------------------------------------------------------------

Tensors = dict[str, Tensor]
ROOM = 2**31 + 2**19


@pytest.fixture(scope="module")
def memory(tmp_path_factory) -> Tensor:
    """Room for 2 x ROOM fp16 numbers, all zero. On the CPU a file of holes, which takes up what is
    written alone."""
    if DEVICE == "cuda":
        return torch.zeros(2 * ROOM, dtype=torch.float16, device=DEVICE)
    path = tmp_path_factory.mktemp("far") / "memory"
    numbers = torch.from_file(str(path), shared=True, size=2 * ROOM, dtype=torch.float16)
    path.unlink()
    return numbers


def far(tensors: Tensors, dim: int, memory: Tensor) -> Tensors:
    """The tensors, the last index along `dim` 2^31 numbers or more behind the first; rows stay in
    one piece. A place of fp16 numbers computed in 32 bits is before them, where zeros are."""
    spread = dict(tensors)
    for i, (name, x) in enumerate(tensors.items()):
        if x.dim() > dim + 1:
            strides, numbers = list(x.contiguous().stride()), memory.view(x.dtype)
            strides[dim] = 64 * cdiv(2**31, 64 * (x.shape[dim] - 1))
            start = numbers.numel() - ROOM + i * 2**16
            spread[name] = numbers.as_strided(x.shape, strides, start).copy_(x)
    return spread


def fp16_call(case: Case) -> tuple[Callable[[Tensors], list[Tensor]], Tensors, Tensors]:
    """A function that gives outputs and gradients; the arguments and tables that it takes, and the
    incoming gradients."""
    function = getattr(ops, case.op)
    arguments = {f"argument {i}": x.detach().half() for i, x in enumerate(case.make())}
    tables = {n: x.half() for n, x in case.fixed.items() if n in ("cos", "sin")}
    outputs = as_tuple(function(*arguments.values(), **case.fixed))
    gradients = {f"gradient {i}": torch.randn_like(x) for i, x in enumerate(outputs)}

    def run(given: Tensors) -> list[Tensor]:
        now = dataclasses.replace(case, fixed=case.fixed | {name: given[name] for name in tables})
        its = tuple(given[name] for name in arguments)
        return call(function, now, its, [given[name] for name in gradients])

    return run, arguments | tables, gradients


def rounded(given: Tensors) -> list[Tensor]:
    results = (
        triton_float8.round_both_ways(given["x"], torch.float8_e5m2, how) for how in (False, True)
    )
    return [x.float() for its in results for x in its]


def updated(given: Tensors) -> list[Tensor]:
    weight = torch.nn.Parameter(torch.ones(given["gradient"].shape, device=DEVICE))
    weight.grad = given["gradient"]
    ops.AdamW([weight]).step()
    return [weight.detach()]


def has_three_indices(case: Case) -> bool:
    """In every dimension: the stride to the third fits into 32 bits where its place does not."""
    return min(n for x in case.make() for n in x.shape) > 2


CALLS: dict[str, Callable[[], Any]] = {
    "round_both_ways": lambda: (rounded, {"x": normal(130, 5).half()}, {}),
    "AdamW": lambda: (updated, {}, {"gradient": normal(3, 5)}),
}
for case in filter(has_three_indices, CASES.values()):
    CALLS.setdefault(case.op, partial(fp16_call, case))


@pytest.mark.parametrize("name", sorted(CALLS | {case.op: None for case in CASES.values()}))
def test_tensors_may_span_more_numbers_than_32_bits_count(name, memory) -> None:
    """All that the operator is given, and all incoming gradients, along one dimension after the
    other: the results are right, or the operator refuses."""
    torch.manual_seed(0)
    run, *given = CALLS[name]()
    expected = run(given[0] | given[1])
    for tensors, others in (given, given[::-1]):
        for dim in range(max((x.dim() for x in tensors.values()), default=0) - 1):
            try:
                found = run(others | far(tensors, dim, memory))
            except ValueError as refused:
                assert "tokens lie more than 2147483647 numbers apart" in str(refused)
                continue
            for ours, near in zip(found, expected, strict=True):
                assert torch.allclose(ours, near, rtol=2e-3, atol=2e-3), (dim, [*tensors])


def test_every_kernel_waits_for_the_one_before() -> None:
    """One launched early that did not would read what is still being written, sometimes."""
    kernels = [
        function
        for path in Path(ops.__file__).parent.glob("triton_*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
    ]
    assert kernels
    for kernel in kernels:
        body = [ast.unparse(line) for line in kernel.body[1 if ast.get_docstring(kernel) else 0 :]]
        parts = [place for place, line in enumerate(body) if "warp_specialize" in line]
        if parts:  # Gluon's: what is before them reads nothing
            assert "gdc_wait()" in body[: parts[0]], kernel.name
        else:
            assert body[0] == "wait_for_previous()", kernel.name


def test_a_target_outside_the_vocabulary_makes_the_loss_nan() -> None:
    targets = torch.tensor([1, 7, 0], device=DEVICE)
    assert ops.linear_cross_entropy(normal(3, 8), normal(7, 8), targets).isnan()


def test_cross_entropy_holds_the_logits_of_a_chunk(monkeypatch) -> None:
    N, V = 64, 1001
    monkeypatch.setattr(triton_cross_entropy, "CHUNK_LOGITS", 30 * V)
    monkeypatch.setattr(triton_cross_entropy, "CHUNK_ROWS", 10)
    targets = torch.zeros(N, dtype=torch.long, device=DEVICE)
    body = ops.linear_cross_entropy.__globals__["linear_cross_entropy_forward"].__wrapped__
    with Record() as seen:
        body(normal(N, 8), normal(V, 8), targets, torch.float32, True)
    found = [x for _, _, results in seen.calls for x in results if isinstance(x, Tensor)]
    # Three chunks of 22, 22 and 20 tokens, the vocabulary padded to a multiple of 8.
    assert max(x.numel() for x in found if x.is_floating_point()) == 22 * 1008


def test_extreme_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[3e4], [-3e4]], device=DEVICE)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], device=DEVICE)
    targets = torch.tensor([0, 2], device=DEVICE)
    loss = ops.linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(
        loss, ops.linear_cross_entropy_reference(hidden, weight, targets), rtol=1e-6, atol=0
    )
    # All far below the padding's, which are zeros.
    hidden = torch.tensor([[200.0]], device=DEVICE, requires_grad=True)
    ops.linear_cross_entropy(hidden, weight - 3, targets[:1]).backward()
    assert hidden.grad.isfinite().all()
    q = 200 * normal(1, 1, 65, 32)
    out = ops.flash_attention(q, q, q)
    torch.testing.assert_close(out, ops.flash_attention_reference(q, q, q), rtol=1e-4, atol=1e-2)


def test_heads_of_a_product_in_fp8_are_attended_alike() -> None:
    H, K, T, D = 4, 2, 37, 32
    x, weight = torch.randn(2, T, 40), torch.randn((H + 2 * K) * D, 40).requires_grad_()
    tables, dout = (torch.randn(T, D), torch.randn(T, D)), torch.randn(2, T, H * D)
    expected = ops.qkv_attention(x, weight, *tables, H, K)
    found = triton_float8.heads_attention(x @ weight.t(), *tables, H, K)
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(y, weight, dout)[0] for y in (found, expected))
    torch.testing.assert_close(ours, theirs)


# --- what they compose with -------------------------------------------------------------------

SMALL = {
    "rms_norm-1x1x64",
    "add_rms_norm-1x1x64",
    "swiglu-1x1x2",
    "apply_rope-B1 H2 K1 T1 D64",
    "qkv_attention-B1 H2 K1 T2 D64 C40",
    "feed_forward-1x1x8x5",
    "embedding-63x40 of 11",
    "flash_attention-B1 H2 K1 T2 D32 causal",
    "linear_cross_entropy-1x8x5",
}


@pytest.mark.parametrize("label", sorted(SMALL))
def test_operators_are_registered_as_pytorch_wants_them(label) -> None:
    """Schema, fake (shape-only) version and ahead-of-time tracing, on the operator's own arguments
    as the public function passes them. Gradients are the public function's."""
    case = CASES[label]
    with Record() as seen:
        outputs = getattr(ops, case.op)(*(x.requires_grad_() for x in case.make()), **case.fixed)
        sum(output.sum() for output in as_tuple(outputs)).backward()
    assert len(seen.ours()) == (1 if case.op == "embedding" else 2)
    for func, args, _ in seen.ours():
        copies = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        torch.library.opcheck(func, copies)


@pytest.mark.parametrize("label", sorted(SMALL | {"linear-1x1x8x5"}))
def test_forward_mode_and_second_derivatives_are_refused(label) -> None:
    """They would be lost, without a word; also where the incoming gradient is a constant."""
    case = CASES[label]
    x, *rest = case.make()

    def first_output(x: Tensor) -> Tensor:
        return as_tuple(getattr(ops, case.op)(x, *rest, **case.fixed))[0]

    def inside_another(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: first_output(x) * z, (x.sum(),), (x.sum(),))[1]

    for function in (first_output, inside_another):
        with pytest.raises(NotImplementedError, match=f"^{case.op}: no forward-mode"):
            torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=case.op):
        first_output(torch.autograd.forward_ad.make_dual(x, x))
    arguments = [y.requires_grad_() for y in (x, *rest)]
    outputs = as_tuple(getattr(ops, case.op)(*arguments, **case.fixed))
    with pytest.raises(NotImplementedError, match="Backward: no second derivatives"):
        torch.autograd.grad([y.sum() for y in outputs], arguments[0], create_graph=True)


@pytest.fixture
def model():
    module = versions.load("v3")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_dim": 64, "intermediate_dim": 96, "num_layers": 1}
    config = module.TinyLlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_seq_len=64)
    return module.TinyLlama(config).to(DEVICE)


def loss_and_gradients(model, step=None) -> list[Tensor]:
    tokens = torch.arange(2 * 17, device=DEVICE).view(2, 17) % 97
    model.zero_grad(set_to_none=True)
    loss = (model if step is None else step)(tokens, tokens.roll(-1, dims=1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_compiled_without_a_graph_break_or_checkpointed_it_computes_the_same(model) -> None:
    eager = loss_and_gradients(model)
    for step in (
        torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager"),
        partial(checkpoint, model, use_reentrant=False),
    ):
        for ours, plain in zip(loss_and_gradients(model, step), eager, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_autocast_reaches_every_operator(model) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        called = loss_and_gradients(model)
        with Record() as seen:
            dispatched = loss_and_gradients(model)
    for ours, plain in zip(called, dispatched, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    dtypes = {func.name().split("::")[1]: outs[0].dtype for func, _, outs in seen.ours()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        "rms_norm", "add_rms_norm", "qkv_attention", "qkv_attention_backward", "linear_swiglu",
        "linear_swiglu_backward", "linear_cross_entropy_backward",
    }  # fmt: skip
    # The residual stream and the loss stay in fp32, and so do the weights' gradients.
    assert dtypes["rms_norm_backward"] == dtypes["linear_cross_entropy"] == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def q(*shape: int, **options) -> Tensor:
    return torch.zeros(shape, device=DEVICE, **options)


MISTAKES = [
    (TypeError, "gate torch.float32, up torch.bfloat16",
     lambda: ops.swiglu(q(2, 4), q(2, 4, dtype=torch.bfloat16))),
    (ValueError, r"linear: weight is \(4, 5\), expected \(O, 4\)",
     lambda: ops.linear(q(2, 4), q(4, 5))),
    (ValueError, "wider than", lambda: ops.rms_norm(q(1, 65537), q(65537), 1e-5)),
    (ValueError, r"head size 48 is not one of \(32, 64, 128\)",
     lambda: ops.flash_attention(*3 * [q(1, 2, 3, 48)])),
    (ValueError, "3 query heads do not share 2 key/value heads",
     lambda: ops.flash_attention(q(1, 3, 3, 32), *2 * [q(1, 2, 3, 32)])),
    (ValueError, "last dimension of q, k and v must be contiguous",
     lambda: ops.flash_attention(*3 * [q(1, 1, 32, 32).transpose(2, 3)])),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "mistake"), MISTAKES)
def test_mistakes_are_refused_in_one_line_before_any_launch(error, message, mistake) -> None:
    with pytest.raises(error, match=message) as raised:
        mistake()
    assert "\n" not in str(raised.value)
