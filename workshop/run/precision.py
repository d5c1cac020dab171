"""The meaning of `--precision`: the arithmetic of a training step. Weights and AdamW stay fp32."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from workshop.errors import WorkshopError
from workshop.run import float8


@dataclass(frozen=True)
class Precision:
    """One arithmetic for the matrix products of a step."""

    name: str
    autocast_dtype: torch.dtype | None
    unit_roundoff: float
    """Largest relative error of rounding one number to it: 2^-(bits of its significand)."""
    loss_scaling: bool = False
    """fp16 gradients underflow below 6e-8, so the loss is scaled up before the backward pass."""
    float8_recipe: str = ""
    """The recipe of the blocks' linear layers (workshop/run/float8.py), if these are in fp8."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of a tensor that is drawn at this precision."""
        return self.autocast_dtype or torch.float32

    def prepare(self, model: nn.Module) -> None:
        """Makes a model's layers what this precision needs, in place."""
        if self.float8_recipe:
            float8.convert(model, self.float8_recipe)

    def autocast(self, device_type: str) -> AbstractContextManager[None]:
        return torch.autocast(
            device_type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None
        )

    def set_matmul_mode(self) -> None:
        """fp32 products run as real fp32 unless this is tf32: a process-wide switch of PyTorch."""
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")


@contextmanager
def kept_matmul_mode() -> Iterator[None]:
    """Lets the block call `set_matmul_mode`; the process then gets back the mode it had."""
    mode = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(mode)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", None, 2.0**-24),
        Precision("tf32", None, 2.0**-11),
        Precision("bf16", torch.bfloat16, 2.0**-8),
        Precision("fp16", torch.float16, 2.0**-11, loss_scaling=True),
    )
}
"""The precisions of any program: a switch and a type for autocast, and nothing else."""

# Between the layers all is bf16's, so its roundings are too: what fp8's cost, V1 shows.
FLOAT8 = {
    name: Precision(name, torch.bfloat16, 2.0**-8, float8_recipe=recipe)
    for name, recipe in (("fp8", float8.TENSORWISE), ("fp8-rowwise", float8.ROWWISE))
}
LADDER = PRECISIONS | FLOAT8
"""The precisions of a version or peer, whose linear layers `Precision.prepare` changes for fp8."""


def set_arithmetic(name: str) -> None:
    """For the whole process: fp32 is real fp32 unless it is tf32, in convolutions too, for which
    PyTorch takes tf32 by default; and convolutions try their algorithms once for each shape, unless
    the process is to be deterministic."""
    PRECISIONS[name].set_matmul_mode()
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()


@contextmanager
def untuned(precision: str) -> Iterator[None]:
    """In the block convolutions take the first algorithm that does, and forget it afterwards:
    beside other processes a search would find the wrong one. cuDNN's plans are kept for each
    setting of TF32 apart, so that the other setting than the precision's gets these."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = precision != "tf32"
    try:
        yield
    finally:
        set_arithmetic(precision)


def of_losses(name: str) -> str:
    """Note on losses at a precision, to know before they are compared step by step."""
    precision = LADDER.get(name)
    if precision is None or not precision.loss_scaling:
        return ""
    return (
        f"{name} scales the loss, by 65,536 at first, and leaves out a step whose gradients "
        "overflow at that. A version in which other steps overflow than in V1 trains the same "
        "model a step earlier or later."
    )


def get_precision(
    name: str, device: torch.device, among: Mapping[str, Precision] = PRECISIONS
) -> Precision:
    """The named precision; `auto` is bf16 on a GPU that has it, else fp32.

    Args:
        among: PRECISIONS, or LADDER for a program that calls `Precision.prepare`.

    Raises:
        WorkshopError: unknown name, or the device has no such arithmetic.
    """
    of_device = supported(device, among)
    if name == "auto":
        name = "bf16" if "bf16" in of_device and device.type == "cuda" else "fp32"
    if name not in among:
        raise WorkshopError(f"unknown precision {name!r}: choose from auto, {', '.join(among)}")
    if name not in of_device:
        here = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise WorkshopError(
            f"precision {name}: {here} does not have it{_NEEDS.get(name, '')}; "
            f"choose from {', '.join(of_device)}"
        )
    return among[name]


_NEEDS = {
    "fp8": ", which NVIDIA's Ada, Hopper and newer and AMD's MI300 and newer do",
    "fp8-rowwise": ", which NVIDIA's Hopper and B200 and AMD's MI300 and newer do",
}


def supported(device: torch.device, among: Mapping[str, Precision] = PRECISIONS) -> list[str]:
    """Names of the precisions that the device has units for."""
    if device.type == "cpu":
        return ["fp32", "bf16"]
    names = ["fp32", "fp16"]
    if torch.version.hip:
        # xf32, AMD's tf32, exists on the MI300 series alone; bf16 on all Instinct cards.
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        tf32 = architecture.startswith("gfx942")
    else:
        tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
    if tf32:
        names.append("tf32")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        names.append("bf16")
    recipes = float8.recipes(device)
    names += [name for name, of in FLOAT8.items() if of.float8_recipe in recipes]
    return [name for name in among if name in names]
