"""Flash attention against the plain reference: odd lengths, blocks that do not fit, random upstream
gradients, scores that overflow, and the largest tensor that is ever made."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from version2_pytorch_fused.exercises.flash_attention.starter import attention_reference
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work

FP32 = 1e-4
"""Room for sums in another order, a hundred times the rounding; a mistake is larger still."""
LARGE_SCORES = 1e-3
"""Of scores of some hundreds fp32 keeps fewer digits behind the point, and exp() needs those."""

B, H, D = 2, 4, 16
LENGTHS = (  # what, T, block
    ("one block", 16, 16),
    ("T = 64 in blocks of 16", 64, 16),
    ("T = 63 in blocks of 16: the last has 15 keys", 63, 16),
    ("T = 37 in one block of 50", 37, 50),
    ("T = 5 in blocks of one key", 5, 1),
)
MEMORY_T, MEMORY_BLOCK = 192, 32


def check(work: Work) -> Iterator[Item]:
    torch.manual_seed(0)
    work.module()
    yield from work.each(_forward, _backward, _together, _grouped_heads)


# --- the parts -----------------------------------------------------------------------------------


def _forward(work: Work) -> Iterator[Item]:
    mine = work.module()
    for name, T, block in LENGTHS:
        yield _compare_forward(mine, _case(T), block, what=f"forward: {name}", limit=FP32)
    case = _large_scores()
    yield _compare_forward(
        mine, case, 16, what="forward: scores that overflow exp()", limit=LARGE_SCORES
    )
    case = _case(MEMORY_T, heads=1, batch=1)
    yield _never_square("forward", lambda: mine.flash_forward(*case.qkv, MEMORY_BLOCK))


def _backward(work: Work) -> Iterator[Item]:
    """With the reference's out and lse, so that a wrong forward pass spoils nothing here."""
    mine = work.module()
    for name, T, block in LENGTHS:
        yield _compare_backward(mine, _case(T), block, what=f"backward: {name}", limit=FP32)
    case = _large_scores()
    yield _compare_backward(
        mine, case, 16, what="backward: scores that overflow exp()", limit=LARGE_SCORES
    )
    case = _case(MEMORY_T, heads=1, batch=1)
    arguments = case.for_backward()
    yield _never_square("backward", lambda: mine.flash_backward(*arguments, MEMORY_BLOCK))


def _together(work: Work) -> Iterator[Item]:
    """As a model calls it."""
    mine, case = work.module(), _case(63)
    qkv = [x.clone().requires_grad_() for x in case.qkv]
    out = mine.flash_attention(*qkv, 16)
    out.backward(case.grad_out)
    found = {"out": out, "dq": qkv[0].grad, "dk": qkv[1].grad, "dv": qkv[2].grad}
    expected = {name: case.expected[name] for name in found}
    yield _first_wrong(found, expected, what="through autograd, both passes", limit=FP32)


def _grouped_heads(work: Work) -> Iterator[Item]:
    """Optional: what does not work yet is note, in green."""
    mine, case = work.module(), _case(63, kv_heads=2)
    what, done = "optional: 4 query heads share 2 key/value heads", "done: k and v are not repeated"
    try:
        items = (
            _compare_forward(mine, case, 16, what="out", limit=FP32),
            _compare_backward(mine, case, 16, what="gradients", limit=FP32),
        )
    except Exception as error:  # any error of the participant's code
        yield Item(True, what, f"not yet: {type(error).__name__}: {error!s:.200}")
        return
    failed = next((item for item in items if not item.ok), None)
    yield Item(True, what, f"not yet: {failed.why}" if failed else done)


# --- inputs and what is expected of them ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    """Inputs in fp32, and what the reference makes of them in fp64, rounded to fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    expected: Mapping[str, Tensor]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def for_backward(self) -> tuple[Tensor, ...]:
        """The arguments of `flash_backward`, but for the block."""
        return self.grad_out, *self.qkv, self.expected["out"], self.expected["lse"]


def _case(T: int, *, heads: int = H, kv_heads: int | None = None, batch: int = B) -> _Case:
    counts = (heads, kv_heads or heads, kv_heads or heads)
    return _expect(*(_normal(batch, T, count) for count in counts))


def _large_scores() -> _Case:
    """Some of several hundred, exp() of which is infinite in fp32; they grow with the key, so that
    each block brings a new highest one."""
    q, k, v = _normal(B, 63, H), _normal(B, 63, H), _normal(B, 63, H)
    growing = torch.linspace(1, 40, 63)[:, None]
    return _expect(q, k * growing, v)


def _normal(batch: int, T: int, heads: int) -> Tensor:
    """(batch, heads, T, D) with a model's strides, in whose memory T comes before the heads."""
    return torch.randn(batch, T, heads, D).transpose(1, 2)


def _expect(q: Tensor, k: Tensor, v: Tensor) -> _Case:
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in wide[1:])
    out, lse = attention_reference(wide[0], *repeated)
    grad_out = torch.randn_like(q)
    gradients = torch.autograd.grad(out, wide, grad_out.double())
    values = (out, lse, *gradients)
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), values, strict=True))
    return _Case(q, k, v, grad_out, {name: x.detach().float() for name, x in expected.items()})


# --- comparing -----------------------------------------------------------------------------------


def _compare_forward(mine: ModuleType, case: _Case, block: int, *, what: str, limit: float) -> Item:
    inputs = _Inputs(q=case.q, k=case.k, v=case.v)
    returned = mine.flash_forward(*case.qkv, block)
    return inputs.changed(what) or _compare(returned, ("out", "lse"), case, what, limit)


def _compare_backward(
    mine: ModuleType, case: _Case, block: int, *, what: str, limit: float
) -> Item:
    arguments = case.for_backward()
    names = ("grad_out", "q", "k", "v", "out", "lse")
    inputs = _Inputs(**dict(zip(names, arguments, strict=True)))
    returned = mine.flash_backward(*arguments, block)
    return inputs.changed(what) or _compare(returned, ("dq", "dk", "dv"), case, what, limit)


def _compare(
    returned: object, names: tuple[str, ...], case: _Case, what: str, limit: float
) -> Item:
    if not isinstance(returned, tuple) or len(returned) != len(names):
        note = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        return Item(False, what, f"it returns {note}, expected {', '.join(names)}")
    found = dict(zip(names, returned, strict=True))
    return _first_wrong(found, {name: case.expected[name] for name in names}, what, limit)


def _first_wrong(
    found: Mapping[str, object], expected: Mapping[str, Tensor], what: str, limit: float
) -> Item:
    """The Item of the first tensor that is wrong, or one green Item for all of them."""
    for name, right in expected.items():
        item = first_difference(found[name], right, what=f"{what}: {name}", limit=limit)
        if not item.ok:
            return item
    return Item(True, f"{what}: {', '.join(expected)}")


class _Inputs:
    """Copies of tensors, to see whether the participant's code has changed them."""

    def __init__(self, **tensors: Tensor) -> None:
        self._pairs = {name: (x, x.clone()) for name, x in tensors.items()}

    def changed(self, what: str) -> Item | None:
        """A red Item that names the first changed one; None if there is none."""
        for name, (now, before) in self._pairs.items():
            if not torch.equal(now, before):
                why = "others still need it: write into a tensor of your own"
                return Item(False, f"{what}: {name}, an input, was changed", why)
        return None


# --- memory --------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes; views count with all of their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.maker = ""
        self.shape: tuple[int, ...] = ()
        self.library_attention = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if "scaled_dot_product" in name:
            self.library_attention = name
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(name, tensor)
        return result

    def _note(self, name: str, tensor: Tensor) -> None:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if elements > self.elements:
            self.elements, self.maker, self.shape = elements, name, tuple(tensor.shape)


def _never_square(which: str, work: Callable[[], object]) -> Item:
    """One head of MEMORY_T tokens: half of T x T is more than any part of a block needs."""
    T, N = MEMORY_T, MEMORY_BLOCK
    with _Largest() as seen:
        work()
    what = f"{which}: never T x T, with T = {T} in blocks of {N}"
    if seen.library_attention:
        return Item(False, what, f"it calls {seen.library_attention}: write the loop yourself")
    largest = f"the largest tensor is {seen.maker}'s, {_times(seen.shape)}"
    if seen.elements >= T * T // 2:
        why = f"{largest}; the scores of a block are {T} x {N}, all of them {T} x {T}"
        return Item(False, what, why)
    return Item(True, what, f"{largest}: 1/{T * T // max(seen.elements, 1)} of T x T")


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
