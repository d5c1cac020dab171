"""Parts that V3's kernels share: where they run, how tuned tiles are looked up, what is refused.

Without a GPU the kernels run in Triton's interpreter: every program of the grid in turn, on the
CPU, in numpy. That is slow, but it is the same kernel, so that it can be read, broken and tested
on a laptop.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton.language" in sys.modules:  # it has read the variable, and compiles from now on
        raise RuntimeError(
            "Triton was imported before V3's kernels on a machine without a GPU: set "
            "TRITON_INTERPRET=1 in the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.5 no kernel is launched early. 3.4 has descriptors, but can't
    # compile attention's backward pass with them.
    gdc_launch_dependents = gdc_wait = cuda_capability_geq = TensorDescriptor = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether the kernels run in Triton's interpreter, whose times mean nothing."""

GLUON = not INTERPRETED and tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 6)
"""Whether Gluon is there, Triton's lower level, in which the kernels for Hopper are written."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Entry = TypeVar("Entry")
Launch = Callable[..., Any]


# --- operators ----------------------------------------------------------------------------------


def operator(name: str, *, fake: Launch, mutates_args: Sequence[str] = ()) -> Callable[..., Launch]:
    """Registers a function that launches kernels as PyTorch's operator `name`.

    torch.compile, the flop counter and selective checkpointing need the operator. In plain eager
    code the function is called directly, which saves the host's way through PyTorch's dispatcher.

    Args:
        fake: makes the results' empty tensors, from arguments without data.
        mutates_args: names of the arguments that it writes to.

    Returns:
        A decorator. What it makes has the operator as `registered`, the function as `__wrapped__`.
    """

    def register(launch: Launch) -> Launch:
        registered = torch.library.custom_op(name, launch, mutates_args=mutates_args)
        registered.register_fake(fake)

        @functools.wraps(launch)
        def call(*arguments: Any) -> Any:
            return (registered if _looked_at(arguments) else launch)(*arguments)

        call.registered = registered  # type: ignore[attr-defined]
        return call

    return register


def _looked_at(arguments: tuple[Any, ...]) -> bool:
    """Whether something traces or counts operators, or a tensor is of a subclass (FakeTensor)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    for x in arguments:  # any() would take the host twice as long
        if type(x) is not Tensor and type(x) is not Parameter and isinstance(x, Tensor):
            return True
    return False


def first_order(backward: Launch) -> Launch:
    """Makes a backward pass refuse create_graph=True, as nothing records the kernels' derivatives.

    `once_differentiable` would refuse it later, and not at all where the incoming gradient is a
    constant.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{type(ctx).__name__}: no second derivatives (create_graph=True): use the "
                "operator's NAME_reference"
            )
        return backward(ctx, *gradients)

    return checked


# --- where the kernels run ----------------------------------------------------------------------


def architecture() -> str:
    """The current device's: `sm_90`, `gfx942`, ..., or `interpreter`."""
    if INTERPRETED:
        return "interpreter"
    return _architecture(triton.runtime.driver.active.get_current_device())


@functools.cache
def _architecture(device: int) -> str:
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def on_hopper() -> bool:
    return GLUON and architecture() == "sm_90"


@functools.cache
def _from_hopper_on(name: str) -> bool:
    return name.startswith("sm_") and int(name[3:]) >= 90


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs can run side by side, at least: compute units on AMD."""
    if INTERPRETED or device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory() -> int:
    """Bytes of shared memory (AMD: LDS) that one program can have on the current device."""
    return _shared_memory(triton.runtime.driver.active.get_current_device())


@functools.cache
def _shared_memory(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def tuned(table: Mapping[str, Entry]) -> Entry:
    """The table's entry for this architecture, else for its vendor (`sm`, `gfx`)."""
    name = architecture()
    return table[name] if name in table else table["sm" if name.startswith("sm") else "gfx"]


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: 16-bit numbers as they are; fp32 as the caller has set PyTorch's own
    products (`torch.set_float32_matmul_precision`).

    Real fp32 takes three tf32 products on NVIDIA's matrix units, whose error is fp32's, and AMD's
    own fp32 matrix units.
    """
    if INTERPRETED:
        return "interpreted"
    if dtype != torch.float32:
        return "ieee"
    name = architecture()
    rounded = torch.get_float32_matmul_precision() != "highest"
    if name.startswith("sm_"):
        return "tf32" if rounded else "tf32x3"
    return "tf32" if rounded and name == "gfx942" else "ieee"


def describe_tiles(num_stages: int, *tensors: tuple[Tensor, int]) -> tuple[bool, list[Any]]:
    """A kernel's arguments for tiles of rows of (B, heads, T, D) tensors.

    Descriptors for the copy engine (TMA) where there is one, from Hopper on, and it can read all
    of them: 16-byte aligned, no stride of zero. The tensors themselves, as pointers, elsewhere,
    and for a loop of one stage, for which Triton 3.6 lays out too little shared memory.

    Args:
        num_stages: of the kernel's loop.
        tensors: each with the rows of its tile.

    Returns:
        Whether they are descriptors, and one or the other.
    """
    if num_stages < 2 or TensorDescriptor is None or not _from_hopper_on(architecture()):
        return False, [tensor for tensor, _ in tensors]
    descriptors = [_describe(tensor, rows) for tensor, rows in tensors]
    if any(descriptor is None for descriptor in descriptors):
        return False, [tensor for tensor, _ in tensors]
    return True, descriptors


def _describe(x: Tensor, rows: int) -> Any:
    """The descriptor; None of a tensor that the engine can't read."""
    strides, multiple = x.stride(), 16 // x.element_size()
    b, h, t, _ = strides
    if x.data_ptr() % 16 or b % multiple or h % multiple or t % multiple or not (b and h and t):
        return None
    return new_descriptor(TensorDescriptor, x, [1, 1, rows, x.shape[-1]])


def new_descriptor(kind: Any, x: Tensor, block: list[int], **fields: Any) -> Any:
    """An object of one of Triton's classes of descriptors, whose own checks take the host almost as
    long as a launch: it is made without them."""
    descriptor = object.__new__(kind)
    descriptor.base, descriptor.shape, descriptor.strides = x, list(x.shape), list(x.stride())
    descriptor.block_shape = block
    for name, value in fields.items():
        setattr(descriptor, name, value)
    return descriptor


def must_repeat() -> bool:
    """Whether each run has to give the same bits (`torch.use_deterministic_algorithms`): then the
    kernels whose sums are gathered in no fixed order are not launched, but others."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    # torch.compile can't trace the second question.
    return torch.compiler.is_compiling() or (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )


# --- early launches -----------------------------------------------------------------------------
# On NVIDIA GPUs from Hopper on a kernel is launched while the one before it on the stream still
# runs, and waits for its end: its launch hides behind that one ("programmatic dependent launch").
# Where kernels take a few microseconds, launches are a part of the step.

EARLY = tl.constexpr(cuda_capability_geq is not None and not INTERPRETED)


@triton.jit
def wait_for_previous() -> None:
    """The first line of every kernel: waits until the kernel before has ended and its results can
    be read, and lets the next one be launched."""
    if EARLY:  # noqa: SIM102, since Triton evaluates both sides of an `and`
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()


def launch_options(num_warps: int) -> dict[str, Any]:
    """Options of a launch, besides the kernel's arguments."""
    if EARLY.value and _from_hopper_on(architecture()):
        return {"num_warps": num_warps, "launch_pdl": True}
    return {"num_warps": num_warps}


# --- sizes and layouts --------------------------------------------------------------------------


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (triton.cdiv is for kernels too, and takes the host longer.)"""
    return -(-a // b)


def grid_order(
    T: int, block: int, heads: int, tokens_at_once: int, least: int = 8
) -> tuple[int, int, int]:
    """Attention's grid: heads side by side, then blocks, then the next heads, which is the order in
    which programs start.

    Blocks on the diagonal differ in work. With many heads side by side the long blocks all start
    before the short ones, which then fill the gaps at the end; but what these heads read again
    and again has to stay in the cache. So: about the number that it holds, but `least` at least.
    """
    limit = min(heads, max(least, tokens_at_once // T))
    side_by_side = next(n for n in range(limit, 0, -1) if heads % n == 0)
    return side_by_side, cdiv(T, block), heads // side_by_side


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def new_heads(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, heads, T, D) that lies in memory as (B, T, heads, D): a product that makes or
    takes the heads of a token as one row writes or reads them without a copy."""
    B, heads, T, D = like.shape
    return like.new_empty(B, T, heads, D, dtype=dtype).transpose(1, 2)


def as_rows(x: Tensor) -> Tensor:
    """x as (R, C) with contiguous rows: a view where its strides allow one."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def state_of(x: Tensor) -> tuple[object, ...]:
    """Differs when the tensor's numbers do: PyTorch counts the operations that write to it."""
    return x._version, x.data_ptr(), x.device


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product of x: x's own unless autocast is on."""
    if x.dtype in DTYPES and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


# --- what is refused ----------------------------------------------------------------------------


def check(op: str, **tensors: Tensor) -> None:
    """Refuses, before any launch, what the kernels can't read.

    Raises:
        TypeError: not a tensor, or not fp32, bf16 or fp16.
        ValueError: tensors on several devices, on one that the kernels do not run on, empty, or
            without dimensions.
        NotImplementedError: inside forward-mode differentiation, where tangents would be lost.
    """
    # Not by the tensors' tangents: one of an outer jvp is invisible in an inner one.
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{op}: no forward-mode differentiation (jvp, jacfwd): use backward, or {op}_reference"
        )
    devices = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} is {tensor.dtype}: use fp32, bf16 or fp16")
        if tensor.numel() == 0 or tensor.dim() == 0:
            what = "a scalar" if tensor.dim() == 0 else f"{tuple(tensor.shape)}, empty"
            raise ValueError(f"{op}: {name} is {what}")
        devices.add(tensor.device)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{op}: the tensors are on several devices: {places}")
    device = devices.pop()
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"{op}: the kernels are compiled for the GPU, the tensors are on {device}: move them, "
            "or set TRITON_INTERPRET=1 before Python starts"
        )


def check_shape(op: str, name: str, tensor: Tensor, *expected: int | str) -> None:
    """Raises ValueError unless the tensor has the expected shape, where a word allows any size."""
    found = tuple(tensor.shape)
    if len(found) != len(expected) or any(
        size != found[i] for i, size in enumerate(expected) if not isinstance(size, str)
    ):
        words = str(expected).replace("'", "")
        raise ValueError(f"{op}: {name} is {found}, expected {words}")


def check_dtypes(op: str, **tensors: Tensor) -> None:
    """Raises TypeError unless all tensors have one dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise TypeError(f"{op}: {found}: cast them to one dtype")


def check_indices(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Raises TypeError unless the tensor is one of int64 on the device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} are a {type(tensor).__name__}")
    if tensor.dtype != torch.int64 or tensor.device != device:
        raise TypeError(
            f"{op}: {name} are {tensor.dtype} on {tensor.device}, expected int64 on {device}"
        )
