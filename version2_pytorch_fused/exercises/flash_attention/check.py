"""Flash attention against the plain reference: odd lengths, blocks that do not fit, random upstream
gradients, scores that overflow, and the largest tensor that is ever made."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from version2_pytorch_fused.exercises.flash_attention.starter import attention_reference
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work, note

FP32 = 1e-4
"""Room for sums in another order, a hundred times the rounding; a mistake is larger still."""
LARGE_SCORES = 1e-3
"""Room at scores of some hundreds: fp32 keeps fewer digits behind the point, which exp() needs."""

B, H, D = 2, 4, 16
LENGTHS = (  # what, T, block
    ("one block", 16, 16),
    ("T = 64 in blocks of 16", 64, 16),
    ("T = 63 in blocks of 16: the last has 15 keys", 63, 16),
    ("T = 37 in one block of 50", 37, 50),
    ("T = 5 in blocks of one key", 5, 1),
)
MEMORY_T, MEMORY_BLOCK = 192, 32
ARGUMENTS = {"forward": ("q", "k", "v"), "backward": ("grad_out", "q", "k", "v", "out", "lse")}
RETURNED = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
"""By pass. The backward one gets the reference's out and lse: a wrong forward pass spoils nothing
there."""

Case = dict[str, Tensor]
"""Inputs in fp32, and what the reference makes of them in fp64, rounded to fp32."""


def check(work: Work) -> Iterator[Item]:
    torch.manual_seed(0)
    passes = (partial(_pass, which=which) for which in ARGUMENTS)
    yield from work.each(*passes, _together, _grouped_heads)


# --- the parts -----------------------------------------------------------------------------------


def _pass(work: Work, *, which: str) -> Iterator[Item]:
    for name, T, block in LENGTHS:
        yield _compare(work, which, _case(T), block, what=f"{which}: {name}")
    what = f"{which}: scores that overflow exp()"
    yield _compare(work, which, _large_scores(), 16, what=what, limit=LARGE_SCORES)
    case = _case(MEMORY_T, heads=1, batch=1)
    yield _never_square(which, lambda: _call(work, which, case, MEMORY_BLOCK))


def _together(work: Work) -> Iterator[Item]:
    """As a model calls it."""
    case = _case(63)
    qkv = [case[name].clone().requires_grad_() for name in "qkv"]
    out = work.module.flash_attention(*qkv, 16)
    out.backward(case["grad_out"])
    found = {"out": out} | {f"d{name}": x.grad for name, x in zip("qkv", qkv, strict=True)}
    yield _first_wrong(found, case, what="through autograd, both passes")


def _grouped_heads(work: Work) -> Iterator[Item]:
    """Optional: what does not work yet is a note, which does not count."""
    case = _case(63, kv_heads=2)
    what, done = "optional: 4 query heads share 2 key/value heads", "done: k and v are not repeated"
    try:
        items = [_compare(work, which, case, 16, what=which) for which in ARGUMENTS]
    except Exception as error:  # any error of the participant's code
        yield note(what, f"not yet: {type(error).__name__}: {error!s:.200}")
        return
    failed = next((item for item in items if not item.ok), None)
    yield note(what, f"not yet: {failed.why}") if failed else Item(True, what, done)


# --- inputs and what is expected of them ---------------------------------------------------------


def _case(T: int, *, heads: int = H, kv_heads: int | None = None, batch: int = B) -> Case:
    counts = (heads, kv_heads or heads, kv_heads or heads)
    return _expect(*(_normal(batch, T, count) for count in counts))


def _large_scores() -> Case:
    """Some of several hundred, exp() of which is infinite in fp32; they grow with the key, so that
    each block brings a new highest one."""
    q, k, v = _normal(B, 63, H), _normal(B, 63, H), _normal(B, 63, H)
    growing = torch.linspace(1, 40, 63)[:, None]
    return _expect(q, k * growing, v)


def _normal(batch: int, T: int, heads: int) -> Tensor:
    """(batch, heads, T, D) with a model's strides, in whose memory T comes before the heads."""
    return torch.randn(batch, T, heads, D).transpose(1, 2)


def _expect(q: Tensor, k: Tensor, v: Tensor) -> Case:
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in wide[1:])
    out, lse = attention_reference(wide[0], *repeated)
    grad_out = torch.randn_like(q)
    gradients = torch.autograd.grad(out, wide, grad_out.double())
    names = (name for returned in RETURNED.values() for name in returned)
    expected = zip(names, (out, lse, *gradients), strict=True)
    inputs = {"q": q, "k": k, "v": v, "grad_out": grad_out}
    return inputs | {name: x.detach().float() for name, x in expected}


# --- comparing -----------------------------------------------------------------------------------


def _call(work: Work, which: str, case: Case, block: int) -> object:
    run = getattr(work.module, f"flash_{which}")
    return run(*(case[name] for name in ARGUMENTS[which]), block)


def _compare(
    work: Work, which: str, case: Case, block: int, *, what: str, limit: float = FP32
) -> Item:
    before = {name: case[name].clone() for name in ARGUMENTS[which]}
    names, returned = RETURNED[which], _call(work, which, case, block)
    for name, x in before.items():
        if not torch.equal(x, case[name]):
            why = "others still need it: write into a tensor of your own"
            return Item(False, f"{what}: {name}, an input, was changed", why)
    if not isinstance(returned, tuple) or len(returned) != len(names):
        note = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        return Item(False, what, f"it returns {note}, expected {', '.join(names)}")
    return _first_wrong(dict(zip(names, returned, strict=True)), case, what, limit)


def _first_wrong(found: Mapping[str, object], case: Case, what: str, limit: float = FP32) -> Item:
    """The Item of the first tensor that is wrong, or one green Item for all of them."""
    items = (
        first_difference(x, case[name], what=f"{what}: {name}", limit=limit)
        for name, x in found.items()
    )
    wrong = next((item for item in items if not item.ok), None)
    return wrong or Item(True, f"{what}: {', '.join(found)}")


# --- memory --------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes; views count with all of their storage."""

    elements = 0
    maker = ""
    shape: tuple[int, ...] = ()
    library_attention = ""

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
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.elements:
                    self.elements, self.maker, self.shape = elements, name, tuple(tensor.shape)
        return result


def _never_square(which: str, work: Callable[[], object]) -> Item:
    """One head of MEMORY_T tokens: half of T x T is more than any part of a block needs."""
    T, N = MEMORY_T, MEMORY_BLOCK
    with _Largest() as seen:
        work()
    what = f"{which}: never T x T, with T = {T} in blocks of {N}"
    if seen.library_attention:
        return Item(False, what, f"it calls {seen.library_attention}: write the loop yourself")
    shape = " x ".join(map(str, seen.shape)) or "a single number"
    why = f"the largest tensor is {seen.maker}'s, {shape}"
    if seen.elements >= T * T // 2:
        why += f"; the scores of a block are {T} x {N}, all of them {T} x {T}"
        return Item(False, what, why)
    return Item(True, what, f"{why}: 1/{T * T // max(seen.elements, 1)} of T x T")
