"""AdamW over all parameters in two kernels, which leaves the next step's 16-bit weights behind.

The products of a step at bf16 or fp16 read a rounded copy of each weight. Rounding them in the next
forward pass reads every weight once more; here the optimizer, which has just computed it, writes
the copy too (`triton_linear.rounded` keeps it).

Shapes in the comments:
    S parameters   n numbers of one
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from triton_launch import INTERPRETED, launch_options, wait_for_previous

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_linear import keep_rounded, renew_rounded, rounded_copy

CHUNK = 2**16 if INTERPRETED else 1024
"""Numbers of one parameter that a program takes. Many small programs, swept on an H200: while some
wait for their loads, the others keep the memory busy."""
_CAPTURES = 4  # of a step, without one in eager mode between them
_POINTERS = tl.constexpr(6)  # of a parameter: itself, gradient, both moments, step, rounded copy
_FACTORS = tl.constexpr(4)
_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""Values of PyTorch's groups that the kernels compute."""


# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def _at(addresses, index, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """A pointer out of a table of addresses, which are multiples of ALIGNMENT."""
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def _adamw_step_kernel(
    addresses, factors_ptr, lr, scale_ptr, found_inf_ptr, log2_beta1, log2_beta2, decay,
    LR_ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """One parameter: counts its step, unless it is to be skipped, and computes what is the same for
    all of its numbers: keep = 1 - lr decay, rate = lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step),
    and what undoes the loss scale; keep < 0 marks a step to skip."""
    wait_for_previous()
    owner = tl.program_id(0)
    step_ptr = _at(addresses, owner * _POINTERS + 4, tl.float32, 4)
    skip = False
    if GUARDED:
        skip = tl.load(found_inf_ptr) != 0
    step = tl.load(step_ptr) + tl.where(skip, 0.0, 1.0)
    tl.store(step_ptr, step)
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    inverse = 1.0
    if SCALED:
        inverse = 1.0 / tl.load(scale_ptr)
    # In fp64: 1 - beta2^1 would keep four digits of fp32's seven.
    corrected1 = (1.0 - tl.exp2(step.to(tl.float64) * log2_beta1)).to(tl.float32)
    corrected2 = (1.0 - tl.exp2(step.to(tl.float64) * log2_beta2)).to(tl.float32)
    row = factors_ptr + owner * _FACTORS
    tl.store(row, tl.where(skip, -1.0, 1.0 - lr * decay))
    tl.store(row + 1, lr / corrected1)
    tl.store(row + 2, tl.rsqrt(corrected2))
    tl.store(row + 3, inverse)


@triton.jit
def _adamw_kernel(
    addresses, sizes, owners, starts, factors_ptr, beta1, rest1, beta2, rest2, eps,
    LOW: tl.constexpr, ALIGNMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of one parameter: `owners` and `starts` say which."""
    wait_for_previous()
    owner = tl.load(owners + tl.program_id(0))
    factors = factors_ptr + owner * _FACTORS
    keep = tl.load(factors)
    if keep >= 0:
        n = tl.multiple_of(tl.load(starts + tl.program_id(0)), CHUNK) + tl.arange(0, CHUNK)
        # Only where all sizes are such multiples may neighbours share a mask, and an access.
        inside = n < tl.multiple_of(tl.load(sizes + owner), ALIGNMENT)
        row = addresses + owner * _POINTERS
        p_ptr = _at(row, 0, tl.float32, ALIGNMENT) + n
        m_ptr = _at(row, 2, tl.float32, ALIGNMENT) + n
        v_ptr = _at(row, 3, tl.float32, ALIGNMENT) + n
        p = tl.load(p_ptr, mask=inside)
        g = tl.load(_at(row, 1, tl.float32, ALIGNMENT) + n, mask=inside) * tl.load(factors + 3)
        m = beta1 * tl.load(m_ptr, mask=inside) + rest1 * g
        v = beta2 * tl.load(v_ptr, mask=inside) + rest2 * g * g
        update = m / (tl.sqrt(v) * tl.load(factors + 2) + eps)
        p = keep * p - tl.load(factors + 1) * update
        tl.store(p_ptr, p, mask=inside)
        tl.store(m_ptr, m, mask=inside)
        tl.store(v_ptr, v, mask=inside)
        if tl.load(row + 5) != 0:
            tl.store(_at(row, 5, LOW, ALIGNMENT) + n, p.to(LOW), mask=inside)


# --- optimizer ----------------------------------------------------------------------------------


class AdamW(torch.optim.Optimizer):
    """AdamW of fp32 parameters (Loshchilov and Hutter, 2019, algorithm 2), as `torch.optim.AdamW`,
    whose state it reads and writes.

        m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
        p = (1 - lr decay) p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    A step reads p, g, m and v and writes p, m and v: 28 bytes a number, and 2 more for those that
    have a rounded copy. The counts of steps and, where it is a tensor, the learning rate lie on the
    device, so that a captured step finds them; a `torch.amp.GradScaler` leaves the unscaling, and
    the skipping of a step that overflowed, to the kernels.

    Raises:
        TypeError: a parameter or its gradient is not a dense fp32 tensor.
        ValueError: a setting that PyTorch's refuses; one that PyTorch's has and these kernels do
            not, such as `maximize`, in a group; a parameter that is not contiguous; a group on
            several devices.
    """

    _step_supports_amp_scaling = True  # GradScaler asks for it

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._tables: dict[int, _Tables] = defaultdict(_Tables)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_settings(defaults)
        super().__init__(params, defaults | {"fused": True, "capturable": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy gets tables of its own; a captured step still reads those of its optimizer.
        self.__dict__.setdefault("_tables", defaultdict(_Tables))
        for group in self.param_groups:
            group["fused"] = group["capturable"] = True
            for p in group["params"]:
                if self.state.get(p):  # PyTorch's plain optimizer counts its steps on the host
                    count = torch.as_tensor(self.state[p]["step"], dtype=torch.float32)
                    self.state[p]["step"] = count.to(p.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_settings(self.defaults | param_group)
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            keep_rounded(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_groups = [
            [p for p in group["params"] if p.grad is not None and p.numel()]
            for group in self.param_groups
        ]
        for group, parameters in zip(self.param_groups, of_groups, strict=True):
            _check_options(group)
            _check(parameters)
        for index, parameters in enumerate(of_groups):
            if parameters:
                self._update(self.param_groups[index], parameters, self._tables[index])
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor], tables: "_Tables") -> None:
        device = parameters[0].device
        copies = _of_one_dtype([rounded_copy(p) for p in parameters])
        rows = [[*self._tensors(p), copy] for p, copy in zip(parameters, copies, strict=True)]
        table = [[0 if x is None else x.data_ptr() for x in row] for row in rows]
        addresses = tables.addresses(table, device)
        factors = torch.empty(len(parameters), _FACTORS.value, device=device)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        _adamw_step_kernel[(len(parameters),)](
            addresses, factors, lr, factors if scale is None else scale,
            factors if found_inf is None else found_inf,
            _log2(beta1), _log2(beta2), group["weight_decay"],
            LR_ON_DEVICE=isinstance(lr, Tensor), SCALED=scale is not None,
            GUARDED=found_inf is not None,
        )  # fmt: skip
        sizes, owners, starts = tables.programs(parameters)
        is_half = any(copy is not None and copy.dtype == torch.float16 for copy in copies)
        _adamw_kernel[(len(owners),)](
            addresses, sizes, owners, starts, factors,
            beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
            LOW=tl.float16 if is_half else tl.bfloat16, ALIGNMENT=_alignment(table, parameters),
            CHUNK=CHUNK, **launch_options(4),
        )  # fmt: skip
        for p, copy in zip(parameters, copies, strict=True):
            torch.autograd.graph.increment_version(p)
            if copy is not None:
                renew_rounded(p)

    def _tensors(self, p: Tensor) -> list[Tensor]:
        """The kernels' tensors of a parameter, in their order, without the copy."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        moments = state["exp_avg"], state["exp_avg_sq"]
        return [p, p.grad.contiguous(), *moments, state["step"]]


class _Tables:
    """Tables on the device in which the kernels look up a group's parameters.

    A captured step copies its addresses from the host at each replay: that memory stays as it is
    for as long as the optimizer lives. And it is there before the capture, which may not allocate
    it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._captured: list[Tensor] = []
        self._spare: list[Tensor] = []
        self._programs: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, ...]] = {}

    def programs(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        """The parameters' sizes (S,); each program's parameter, and the first number it takes."""
        sizes = tuple(p.numel() for p in parameters)
        key = parameters[0].device, sizes
        if key not in self._programs:
            chunks = [(i, start) for i, n in enumerate(sizes) for start in range(0, n, CHUNK)]
            owners, starts = zip(*chunks, strict=True)
            tables = (torch.tensor(column, dtype=torch.int64) for column in (sizes, owners, starts))
            self._programs[key] = tuple(table.to(parameters[0].device) for table in tables)
        return self._programs[key]

    def addresses(self, table: list[list[int]], device: torch.device) -> Tensor:
        """The table, (S, 6), on the device."""
        if device.type != "cuda":
            return torch.tensor(table)
        if torch.cuda.is_current_stream_capturing():
            return self._capture(table, device)
        self._spare = [spare for spare in self._spare if len(spare) >= len(table)]
        while len(self._spare) < _CAPTURES:
            size = len(table), len(table[0])
            self._spare.append(torch.empty(size, dtype=torch.int64).pin_memory())
        key = tuple(address for row in table for address in row)
        if key not in self._known:  # gradients are allocated anew, mostly where they were
            self._known = {key: torch.tensor(table, device=device)}
        return self._known[key]

    def _capture(self, table: list[list[int]], device: torch.device) -> Tensor:
        if not self._spare:
            raise RuntimeError(
                f"AdamW: train a step in eager mode before one is captured, and after {_CAPTURES}"
            )
        host = self._spare.pop()[: len(table)]
        host.copy_(torch.tensor(table))
        self._captured.append(host)
        return host.to(device, non_blocking=True)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf


def _of_one_dtype(copies: list[Tensor | None]) -> list[Tensor | None]:
    """Those in the first one's dtype: the kernel writes one, and others are rounded anew."""
    dtype = next((copy.dtype for copy in copies if copy is not None), None)
    return [copy if copy is not None and copy.dtype == dtype else None for copy in copies]


def _alignment(table: list[list[int]], parameters: list[Tensor]) -> int:
    """16 where the address and the size of every tensor are multiples of 16, which lets the kernel
    move 16 bytes at once; else 1. Steps, which are single numbers, don't count."""
    addresses = (address for row in table for i, address in enumerate(row) if i != 4)
    sizes = (p.numel() for p in parameters)
    return 16 if all(n % 16 == 0 for n in (*addresses, *sizes)) else 1


def _check_settings(group: dict[str, Any]) -> None:
    """Raises ValueError for numbers that `torch.optim.AdamW` refuses, and for its options."""
    numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    torch.optim.AdamW([torch.empty(0)], **numbers)
    _check_options(group)


def _check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for PyTorch's options that would be another algorithm."""
    for name, value in _OPTIONS.items():
        if group.get(name, value) != value:
            raise ValueError(f"AdamW: {name}={group[name]}: the kernels have {name}={value} alone")


def _check(parameters: list[Tensor]) -> None:
    """Refuses parameters that the kernels can't update, before any step is counted."""
    for p in parameters:
        assert p.grad is not None
        for name, tensor in (("parameter", p), ("gradient", p.grad)):
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                raise TypeError(
                    f"AdamW: a {name} is {tensor.dtype}, {tensor.layout}: the kernels are for "
                    "dense fp32"
                )
            if tensor.device != parameters[0].device:
                raise ValueError(
                    f"AdamW: parameters on {parameters[0].device} and {tensor.device}: one group "
                    "lies on one device"
                )
        if not p.is_contiguous():
            raise ValueError(f"AdamW: a parameter of shape {tuple(p.shape)} is not contiguous")
