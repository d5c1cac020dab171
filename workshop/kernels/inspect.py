"""Compiles V3's kernels for a GPU that need not be here, and inspects them.

A training step of V3 runs on tensors without memory, and every `kernel[grid](...)` is compiled for
the chosen chip instead of launched. So what is shown is what would run there: with V3's own tiles,
at the sizes of the presets.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch
from torch import Tensor

from workshop import errors, results, tables, versions
from workshop.arguments import parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.run import presets
from workshop.run.precision import PRECISIONS, Precision
from workshop.run.presets import Preset

SCHEMA_VERSION = 1
KIB = 1024

# --- the chips -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """Resources of one compute unit (AMD: CU, NVIDIA: SM) for the programs that it runs at a time.

    Both vendors' units have four SIMDs (NVIDIA: sub-partitions), each with 512 vector registers a
    lane, given out in eights. A wave is what a SIMD executes together (NVIDIA: warp).
    """

    name: str
    products: str
    waves_per_simd: int
    shared_kib: int
    """LDS of a CU, shared memory of an SM."""
    shared_granule: int
    """Shared memory is given out in multiples of so many bytes."""
    programs: float = math.inf
    """The most that a unit holds; on AMD waves_per_simd alone limits them."""

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def warp_size(self) -> int:
        return 64 if self.is_amd else 32

    @property
    def shared_name(self) -> str:
        return "LDS" if self.is_amd else "shared"

    @property
    def shared_per_program_kib(self) -> int:
        """All of the unit's, but for the KiB that NVIDIA's system takes for itself a program."""
        return self.shared_kib if self.is_amd else self.shared_kib - 1


SIMDS = 4
VECTOR_REGISTERS = 512
REGISTER_GRANULE = 8
TENSOR_MEMORY_COLUMNS = 512

SOURCES = {
    # LDS per CU; VGPR file 512 KiB / (4 SIMDs x 64 lanes x 4 bytes) = 512 registers.
    # LLVM: AMDGPUBaseInfo.cpp for getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU and
    # getOccupancyWithNumSGPRs; test/CodeGen/AMDGPU/lds-size-hsa-gfx950.ll for that chip's granule.
    True: 'ROCm documentation, "AMD GPU specifications"; LLVM, AMDGPUBaseInfo.cpp',
    # 64 K registers / (4 sub-partitions x 32 lanes) = 512. The rules by which registers (256 a
    # warp) and shared memory (128 bytes, 1 KiB reserved) are given out: cuda_occupancy.h, CUDA 12.
    False: 'CUDA C++ Programming Guide, "Compute Capabilities"; cuda_occupancy.h',
}


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("gfx90a", "MI210, MI250, MI250X", 8, 64, 512),
        Chip("gfx942", "MI300A, MI300X, MI325X", 8, 64, 512),
        Chip("gfx950", "MI350X, MI355X", 8, 160, 2048),
        Chip("sm_80", "A100", 16, 164, 128, 32),
        Chip("sm_86", "A40, RTX 30", 12, 100, 128, 16),
        Chip("sm_89", "L4, L40, RTX 40", 12, 100, 128, 24),
        Chip("sm_90", "H100, H200, GH200", 16, 228, 128, 32),
        Chip("sm_100", "B200, GB200", 16, 228, 128, 32),
        Chip("sm_103", "B300, GB300", 16, 228, 128, 32),
        Chip("sm_120", "RTX 50, RTX PRO", 12, 100, 128, 24),
    )
}
DEFAULT_TARGETS = ("gfx90a", "gfx942", "gfx950", "sm_90")


def get_chip(name: str) -> Chip:
    """Raises WorkshopError for one that is not in CHIPS."""
    if name not in CHIPS:
        raise WorkshopError(f"unknown target {name!r}: choose from {', '.join(CHIPS)}")
    return CHIPS[name]


# --- what is run ---------------------------------------------------------------------------------


def specimens(size: Preset, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Functions that are run forward and, where they return something, backward: V3's own training
    step, of which two layers launch all that more would, and the operators that it does without.
    Products are computed in `dtype`."""
    model, ops = versions.load("v3"), importlib.import_module("triton_kernels")
    config = model.TinyLlamaConfig(**size.model() | {"num_layers": 2})
    B, T, H, D = size.batch_size, size.seq_len, config.num_heads, config.head_dim

    def training_step() -> tuple[()]:
        network = model.TinyLlama(config)
        network(tokens, targets).backward()
        model.configure_optimizer(network, 1e-3).step()
        return ()

    def product(*shape: int) -> Tensor:
        return torch.empty(B, T, *shape, dtype=dtype, requires_grad=True)

    tokens, targets = torch.empty(2, B, T, dtype=torch.int64)
    cos, sin = torch.empty(2, T, D)
    # Columns of a product, seen as heads.
    q, k = (product(heads, D).transpose(1, 2) for heads in (H, config.num_kv_heads))
    gate, up = (product(config.intermediate_dim) for _ in range(2))
    return {
        "training step": training_step,
        "apply_rope": lambda: ops.apply_rope(q, k, cos, sin),
        "swiglu": lambda: ops.swiglu(gate, up),
    }


# --- compiling instead of launching --------------------------------------------------------------


def offline_driver(chip: Chip) -> Any:
    """A Triton driver whose current device is a chip of which only the name is known."""
    from triton.backends.compiler import GPUTarget

    backend = "hip" if chip.is_amd else "cuda"
    arch = chip.name if chip.is_amd else int(chip.name.removeprefix("sm_"))
    target = GPUTarget(backend, arch, chip.warp_size)
    properties = {"max_shared_mem": chip.shared_per_program_kib * KIB}
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )


@dataclass
class Launch:
    """One launch that was compiled instead, or the compiler's error."""

    kernel: str
    constants: dict[str, Any] = field(default_factory=dict)
    """The kernel's compile-time arguments."""
    compiled: Any = None
    error: str = ""

    @property
    def key(self) -> str:
        """The same for two launches of the same code; empty if nothing was compiled."""
        if self.compiled is not None:
            return str(self.compiled.hash)
        return self.error and f"{self.kernel}: {self.error}"


@contextlib.contextmanager
def compiling(chip: Chip, wanted: str) -> Iterator[list[Launch]]:
    """Within it tensors have no memory, and a launch of any kernel compiles it for the chip and
    joins the list; one without `wanted` in its name joins it uncompiled."""
    import triton
    from torch._subclasses import FakeTensor, FakeTensorMode
    from triton.runtime.jit import KernelInterface

    launches: list[Launch] = []

    def get_item(function: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name = function.__name__.strip("_").removesuffix("_kernel")
            values = dict(zip(function.arg_names, args, strict=False)) | kwargs
            constants = [p.name for p in function.params if p.is_constexpr and p.name in values]
            record = Launch(name, {constant: values[constant] for constant in constants})
            launches.append(record)
            if wanted not in name:
                return
            try:
                record.compiled = function.warmup(*args, grid=grid, **kwargs)
            except Exception as error:  # any error of the compiler is a result
                record.error = f"does not compile: {_one_line(error)}"

        return launch

    triton.runtime.driver.set_active(offline_driver(chip))
    with (
        mock.patch.object(KernelInterface, "__getitem__", get_item),
        mock.patch.object(FakeTensor, "data_ptr", _address, create=True),
        FakeTensorMode(),
    ):
        yield launches


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _address(tensor: Tensor) -> int:
    """Address of a tensor without memory, modulo 16: PyTorch aligns whole allocations."""
    return int(tensor.storage_offset()) * tensor.element_size()


def prepare_operators() -> None:
    """Makes V3's operators run on tensors without memory."""
    versions.load("v3")
    for module in [module for name, module in sys.modules.items() if name.startswith("triton_")]:
        if hasattr(module, "check"):  # refuses tensors on the CPU, where these claim to be
            module.check = lambda *_, **__: None  # type: ignore[attr-defined]
        for value in list(vars(module).values()):
            if hasattr(value, "registered"):
                # On tensors without memory PyTorch needs only the shapes of an operator's results.
                # Its body gives them too, and launches the kernels on the way.
                value.registered.register_fake(value.__wrapped__)


# --- what the compiler answered ------------------------------------------------------------------


@dataclass
class Kernel:
    """One compiled kernel: its configuration and what it takes of the chip."""

    target: str
    kernel: str
    used_by: list[str]
    """Precision and preset of every training step that launches exactly this."""
    constants: dict[str, int] = field(default_factory=dict)
    """Tile sizes and switches that the kernel was compiled for."""
    num_warps: int = 0
    num_stages: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    """A lane: VGPR, AGPR and (a wave) SGPR on AMD, "registers" on NVIDIA."""
    spills: dict[str, int] = field(default_factory=dict)
    """Registers that did not fit (AMD), and bytes a lane: of memory set aside for them on AMD, of
    stores in the code on NVIDIA."""
    shared_bytes: int = 0
    matrix_instructions: dict[str, int] = field(default_factory=dict)
    """How often each is in the code."""
    waves_by: dict[str, float] = field(default_factory=dict)
    """Waves a SIMD that each resource would allow alone; "slots" is what the hardware can hold."""
    faults: list[str] = field(default_factory=list)
    assembly: list[str] = field(default_factory=list)

    @property
    def waves(self) -> float:
        return min(self.waves_by.values(), default=0.0)

    @property
    def limited_by(self) -> list[str]:
        """The resources that run out first; none where the hardware's slots are all filled."""
        if self.waves == self.waves_by.get("slots"):
            return []
        return [name for name, waves in self.waves_by.items() if waves == self.waves]


def read_kernel(chip: Chip, launch: Launch, used_by: str) -> Kernel:
    """The resources of a compiled launch, or why there is none."""
    kernel = Kernel(chip.name, launch.kernel, [used_by])
    kernel.constants = {n: v for n, v in launch.constants.items() if isinstance(v, int)}
    # A loop's own number of stages goes before the launch's.
    stages = [kernel.constants.pop(name) for name in list(kernel.constants) if "STAGES" in name]
    if launch.error:
        kernel.faults.append(launch.error)
        return kernel
    metadata, texts = launch.compiled.metadata, launch.compiled.asm
    kernel.num_warps = metadata.num_warps
    kernel.num_stages = max(stages, default=metadata.num_stages)
    kernel.shared_bytes = metadata.shared
    if chip.is_amd:
        kernel.registers, kernel.spills = read_amdgcn(texts["amdgcn"])
        instructions = AMD_MATRIX.findall(texts["amdgcn"])
    else:
        kernel.registers, kernel.spills = read_ptxas(assemble(texts["ptx"]))
        instructions = NVIDIA_MATRIX.findall(texts["ptx"])
    kernel.matrix_instructions = dict(Counter(instructions).most_common())
    columns = getattr(metadata, "tmem_size", None) or 0
    kernel.waves_by = occupancy(
        chip, kernel.num_warps, kernel.registers, kernel.shared_bytes, columns
    )
    kernel.faults += list(find_faults(chip, kernel))
    return kernel


AMD_MATRIX = re.compile(r"\bv_s?mfmac?_\w+")
NVIDIA_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


def read_amdgcn(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and spills from the metadata that LLVM appends to the assembly."""
    found = dict(re.findall(r"^ +(?:- )?\.(\w+): +(\d+)$", text, re.MULTILINE))
    total, accumulators = int(found["vgpr_count"]), int(found["agpr_count"])
    registers = {
        # vgpr_count is the sum of both, AGPRs starting at a multiple of four.
        "VGPR": total - accumulators,
        "AGPR": accumulators,
        "SGPR": int(found["sgpr_count"]),
    }
    spills = {
        "VGPR": int(found["vgpr_spill_count"]),
        "SGPR": int(found["sgpr_spill_count"]),
        "bytes": int(found["private_segment_fixed_size"]),
    }
    return registers, spills


def assemble(ptx: str) -> str:
    """NVIDIA's assembler on a kernel; it is what Triton runs, too."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    command = [nvidia_tool("ptxas", target[1]), "-v", f"--gpu-name={target[1]}"]
    return _run_on_file([*command, "--output-file", os.devnull], ptx.encode()).stderr


def disassemble(cubin: bytes) -> str:
    """The machine code of a kernel for NVIDIA, readable; empty where there is no disassembler."""
    try:
        return _run_on_file([nvidia_tool("nvdisasm"), "--print-code"], cubin).stdout
    except NotOnThisMachine:
        return ""


def _run_on_file(command: list[str], content: bytes) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True)


def nvidia_tool(name: str, target: str = "") -> str:
    """The path of the one that comes with Triton, else of the CUDA toolkit's.

    Raises:
        NotOnThisMachine: there is neither.
    """
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    folder = Path(triton.origin).parent / "backends/nvidia/bin"
    names = [f"{name}-blackwell", name] if re.match(r"sm_\d{3}", target) else [name]
    own = [str(folder / each) for each in names if (folder / each).is_file()]
    if not own and (path := shutil.which(name)):
        own = [path]
    if not own:
        raise NotOnThisMachine(f"{name} is missing: install the CUDA toolkit, or drop sm_ targets")
    return own[0]


def read_ptxas(log: str) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and spills from `ptxas -v`."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers is not None and spills is not None, log
    return {"registers": int(registers[1])}, {"bytes": int(spills[1])}


def occupancy(
    chip: Chip, warps: int, registers: dict[str, int], shared_bytes: int, tensor_columns: int = 0
) -> dict[str, float]:
    """Waves a SIMD that each resource alone would allow, "slots" being the hardware's limit.

    Whole programs of `warps` waves are placed, spread over a unit's four SIMDs.
    """

    def whole_programs(waves_per_simd: int) -> float:
        return waves_per_simd * SIMDS // warps * warps / SIMDS

    vectors = registers.get("VGPR", 0) + registers.get("AGPR", 0) + registers.get("registers", 0)
    fit = VECTOR_REGISTERS // _round_up(max(vectors, 1), REGISTER_GRANULE)
    waves_by = {"registers": whole_programs(min(fit, chip.waves_per_simd))}
    if chip.is_amd:  # 800 SGPRs for the waves of a SIMD
        waves_by["SGPR"] = whole_programs(8 if registers["SGPR"] <= 100 else 7)
    if shared_bytes:
        reserved = KIB * (chip.shared_kib - chip.shared_per_program_kib)
        each = _round_up(shared_bytes + reserved, chip.shared_granule)
        waves_by[chip.shared_name] = chip.shared_kib * KIB // each * warps / SIMDS
    if tensor_columns:
        waves_by["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_columns * warps / SIMDS
    slots = whole_programs(chip.waves_per_simd)
    waves_by["slots"] = min(slots, chip.programs * warps / SIMDS)
    return waves_by


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def find_faults(chip: Chip, kernel: Kernel) -> Iterator[str]:
    """Sentences on what makes a kernel slow or impossible."""
    # SGPRs alone spill into lanes of a VGPR, which costs an instruction and no memory.
    if kernel.spills["bytes"] or kernel.spills.get("VGPR"):
        spilt = ", ".join(f"{count} {what}" for what, count in kernel.spills.items() if count)
        yield f"spills {spilt} a lane: smaller tiles or more warps may help"
    limit = chip.shared_per_program_kib * KIB
    if kernel.shared_bytes > limit:
        yield (
            f"needs {kernel.shared_bytes:,} bytes of {chip.shared_name} memory, a program may have "
            f"{limit:,}: smaller tiles or fewer stages would help"
        )
    elif kernel.waves == 0:
        yield f"does not fit into a compute unit: too much of {', '.join(kernel.limited_by)}"


# --- a target, in a process of its own -----------------------------------------------------------


class Answer(NamedTuple):
    """The compiled kernels, the names of all that V3 launches, wanted or not, and the compiler."""

    kernels: list[Kernel]
    names: set[str]
    triton: str


def inspect_target(target: str, arguments: argparse.Namespace) -> Answer:
    """Compiles V3's kernels for one target. Triton reads its environment when it is imported and
    keeps what it compiled for the current device: call it once in a process."""
    os.environ["TRITON_INTERPRET"] = "0"
    # It logs what goes wrong within an operator; so do we, in a line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    chip = get_chip(target)
    prepare_operators()
    found: dict[str, Kernel] = {}
    names: set[str] = set()
    for precision, config in itertools.product(arguments.precision, arguments.config):
        used_by = f"{precision} {config}"
        for launch in run_specimens(chip, PRECISIONS[precision], config, arguments.kernel):
            names.add(launch.kernel)
            if launch.key and launch.key not in found:
                kernel = found[launch.key] = read_kernel(chip, launch, used_by)
                if arguments.asm is not None and launch.compiled is not None:
                    kernel.assembly = write_assembly(chip, launch, kernel, arguments.asm)
            elif launch.key and used_by not in found[launch.key].used_by:
                found[launch.key].used_by.append(used_by)
    return Answer(list(found.values()), names, str(importlib.import_module("triton").__version__))


def run_specimens(chip: Chip, arithmetic: Precision, config: str, wanted: str) -> list[Launch]:
    """All launches at one size. A specimen that fails is there under its own name, besides what it
    had launched before."""
    arithmetic.set_matmul_mode()
    dtype = arithmetic.dtype
    with compiling(chip, wanted) as launches:
        for name, call in specimens(presets.get_preset(config), dtype).items():
            try:
                with arithmetic.autocast("cpu"):  # where tensors without memory claim to be
                    outputs = call()
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                if outputs:
                    gradients = [torch.empty_like(output) for output in outputs]
                    torch.autograd.backward(outputs, gradients)
            except Exception as error:
                launches.append(Launch(name, error=f"fails: {_one_line(error)}"))
    return launches


def write_assembly(chip: Chip, launch: Launch, kernel: Kernel, folder: Path) -> list[str]:
    """The names of the files written: AMD's assembly, or NVIDIA's virtual and real one."""
    texts = launch.compiled.asm
    if chip.is_amd:
        forms = {"amdgcn": texts["amdgcn"]}
    else:
        forms = {"ptx": texts["ptx"], "sass": disassemble(texts["cubin"])}
    stem = "-".join([chip.name, kernel.kernel, *kernel.used_by[0].split(), launch.key[:6]])
    for suffix, text in forms.items():
        if text:
            results.write_text(folder / f"{stem}.{suffix}", text)
    return [f"{stem}.{suffix}" for suffix, text in forms.items() if text]


class CompilerCrashed(WorkshopError):
    """The compiler ended its process, so there are no numbers."""

    exit_code = errors.ANSWER_IS_NO


def inspect_all(arguments: argparse.Namespace) -> list[Answer]:
    """Every target in a process of its own, as many at a time as there are cores.

    Raises:
        CompilerCrashed: and all other targets' kernels are not shown either.
    """
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        found = threads.map(lambda target: _in_process(target, arguments), arguments.target)
        return list(tables.tracked(found, "compiling", len(arguments.target)))
    finally:
        threads.shutdown(cancel_futures=True)


def _in_process(target: str, arguments: argparse.Namespace) -> Answer:
    workers = ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        # At Ctrl-C the process ends at once, even while it compiles.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        with workers as process:
            return process.submit(inspect_target, target, arguments).result()
    except BrokenProcessPool:
        raise CompilerCrashed(
            f"target {target}: Triton's compiler crashed; --kernel NAME finds out on which kernel"
        ) from None


# --- showing -------------------------------------------------------------------------------------

TILE_WIDTH = 18

Cell = Callable[[Kernel], str]


def columns(chip: Chip) -> dict[str, Cell]:
    """How each cell is written, by its heading."""
    shown: dict[str, Cell] = {
        "warps": lambda kernel: str(kernel.num_warps),
        "stages": lambda kernel: str(kernel.num_stages),
        "VGPR\n+AGPR": lambda kernel: "{VGPR}+{AGPR}".format(**kernel.registers),
        "SGPR": lambda kernel: str(kernel.registers["SGPR"]),
        "regis-\nters": lambda kernel: str(kernel.registers["registers"]),
        "spills": lambda kernel: (
            "\n".join(f"{n} {what.replace('bytes', 'B')}" for what, n in kernel.spills.items() if n)
            or "-"
        ),
        f"{chip.shared_name}\nKiB": lambda kernel: (
            f"{kernel.shared_bytes / KIB:.1f}" if kernel.shared_bytes else "-"
        ),
        "matrix\ninstructions": matrix_kinds,
        "waves\na SIMD": lambda kernel: f"{kernel.waves:g} of {chip.waves_per_simd}",
        "limited by": lambda kernel: ", ".join(kernel.limited_by) or "-",
        "launched at": where,
    }
    absent = {"regis-\nters"} if chip.is_amd else {"VGPR\n+AGPR", "SGPR"}
    return {heading: cell for heading, cell in shown.items() if heading not in absent}


def tile(kernel: Kernel, same: list[Kernel]) -> str:
    """BLOCK_M=128, BLOCK_N=64, CAUSAL=True as "M128 N64 causal"; a switch is shown where kernels of
    the same name differ in it."""
    sizes = {n: v for n, v in kernel.constants.items() if not isinstance(v, bool)}
    words = [f"{name.removeprefix('BLOCK_')}{value}" for name, value in sizes.items()]
    words += [
        name.lower()
        for name, value in kernel.constants.items()
        if value is True and not all(other.constants.get(name) for other in same)
    ]
    text = " ".join(words) or "-"
    return textwrap.fill(text, TILE_WIDTH, initial_indent="  ", subsequent_indent="    ")


def matrix_kinds(kernel: Kernel) -> str:
    """Their number by unit and shape (rows x columns x depth): "64 mfma 32x32x8"."""
    kinds: Counter[str] = Counter()
    for name, count in kernel.matrix_instructions.items():
        shape = re.search(r"\d+x\d+x\d+", name)
        rows = re.search(r"m(\d+)n(\d+)k(\d+)", name)
        unit = re.search(r"s?mfmac?|wgmma|tcgen05|mma", name)
        size = shape[0] if shape else "x".join(rows.groups()) if rows else ""
        kinds[f"{unit[0] if unit else name} {size}".strip()] += count
    return "\n".join(f"{count} {kind}" for kind, count in kinds.items()) or "-"


def where(kernel: Kernel) -> str:
    """The training steps that launch it: "bf16 small medium"."""
    steps: dict[str, list[str]] = {}
    for step in kernel.used_by:
        arithmetic, config = step.split()
        steps.setdefault(arithmetic, []).append(config)
    return "; ".join(" ".join([arithmetic, *configs]) for arithmetic, configs in steps.items())


def without_twins(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels that differ in nothing that is shown become one; sizes can lead to other code with
    the same numbers."""
    seen: dict[str, Kernel] = {}
    for kernel in kernels:
        shown = repr(dataclasses.replace(kernel, used_by=[], assembly=[]))
        if shown in seen:
            seen[shown].used_by += [s for s in kernel.used_by if s not in seen[shown].used_by]
        else:
            seen[shown] = dataclasses.replace(kernel, used_by=list(kernel.used_by))
    return list(seen.values())


def show(chip: Chip, kernels: list[Kernel]) -> None:
    from rich import box
    from rich.table import Table

    console, shown = tables.terminal(), columns(chip)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("kernel\n  tile", no_wrap=True)
    for heading in shown:
        words = heading in ("limited by", "launched at")
        table.add_column(
            heading,
            justify="left" if words else "right",
            no_wrap=not words,
            min_width=12 if heading == "launched at" else None,
        )
    merged = without_twins(kernels)
    for name in dict.fromkeys(kernel.kernel for kernel in merged):
        table.add_row(name, style="bold")
        same = [kernel for kernel in merged if kernel.kernel == name]
        for kernel in same:
            cells = [cell(kernel) if kernel.num_warps else "" for cell in shown.values()]
            first = tile(kernel, same) if kernel.num_warps else "  no code"
            table.add_row(first, *cells, style="red" if kernel.faults else "")
    unit, memory = ("a CU", "LDS") if chip.is_amd else ("an SM", "shared memory")
    heading = (
        f"{chip.name} ({chip.products}): {unit} has {chip.shared_kib} KiB of {memory}, "
        f"each of its {SIMDS} SIMDs {VECTOR_REGISTERS} registers a lane"
    )
    console.print(heading, style="bold")
    console.print(table)
    for line in notes(chip, merged):
        console.print(line)
    console.print()


def notes(chip: Chip, kernels: list[Kernel]) -> Iterator[str]:
    """Faults, and how to read the numbers."""
    for kernel in kernels:
        for fault in kernel.faults:
            yield f"FAULT: {kernel.kernel}, {where(kernel)}: {fault}"
    yield (
        f"A wave is {chip.warp_size} lanes; a SIMD holds at most {chip.waves_per_simd}, and fewer "
        "of those that need more."
    )
    if chip.is_amd:
        yield "SGPRs spill into lanes of a VGPR, not into memory: shown, but no fault."
    else:
        yield "In machine code wgmma is HGMMA, mma is HMMA, tcgen05 is UTCHMMA (--asm shows it)."
    yield f"The chip's limits: {SOURCES[chip.is_amd]}."


# --- the command ---------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=" ".join((__doc__ or "").split("\n\n")[0].split()),
        epilog="Exit status: 0 every kernel compiles, fits and spills nothing into memory, 1 one "
        "does not, 2 wrong usage, 77 Triton is missing, 130 interrupted.",
    )
    add = parser.add_argument
    for flag, known, default, metavar in (
        ("--target", CHIPS, list(DEFAULT_TARGETS), "CHIP"),
        ("--config", presets.PRESETS, list(presets.PRESETS), "PRESET"),
        ("--precision", PRECISIONS, ["bf16", "fp32"], "P"),
    ):
        words = "all" if default == list(known) else " ".join(default)
        text = f"of {', '.join(known)} (default: {words})"
        add(flag, nargs="+", default=default, metavar=metavar, help=text)
    add("--kernel", default="", metavar="NAME", help="only kernels with NAME in their name")
    add("--asm", type=Path, metavar="DIR", help="write each kernel's assembly to a file in DIR")
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE, for programs")
    return parser


def check_names(arguments: argparse.Namespace) -> None:
    """Drops what is named twice. Raises WorkshopError for a target, preset or precision that does
    not exist."""
    for name in ("target", "config", "precision"):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))
    for config in arguments.config:
        presets.get_preset(config)
    for name in arguments.precision:
        if name not in PRECISIONS:
            raise WorkshopError(f"unknown precision {name!r}: choose from {', '.join(PRECISIONS)}")
    for target in arguments.target:
        get_chip(target)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _inspect(arguments),
        interrupted="interrupted: nothing is shown or written before all is compiled",
    )


def _inspect(arguments: argparse.Namespace) -> int:
    check_names(arguments)
    errors.require("triton", "rich")
    if arguments.asm is not None:
        results.prepare_folder(arguments.asm, "--asm")
    if arguments.json is not None:
        results.prepare_file(arguments.json, "--json")
    answers = inspect_all(arguments)
    names = sorted({name for answer in answers for name in answer.names})
    kernels = [kernel for answer in answers for kernel in answer.kernels]
    if not kernels:
        raise WorkshopError(
            f"--kernel {arguments.kernel}: no kernel is called that; V3 has {', '.join(names)}"
        )
    if arguments.json is not None:
        results.write_json(arguments.json, as_json(kernels))
    for target, answer in zip(arguments.target, answers, strict=True):
        show(get_chip(target), answer.kernels)
    faulty = sum(bool(kernel.faults) for kernel in kernels)
    verdict = (
        f"{faulty} of {len(kernels)} kernels have faults"
        if faulty
        else f"{len(kernels)} kernels compile, fit and spill nothing into memory"
    )
    print(f"{verdict} (Triton {answers[0].triton})")
    return errors.ANSWER_IS_NO if faulty else errors.DONE


def as_json(kernels: list[Kernel]) -> dict[str, Any]:
    derived = [{"waves": kernel.waves, "limited_by": kernel.limited_by} for kernel in kernels]
    return {
        "schema_version": SCHEMA_VERSION,
        "created": results.now(),
        "software": results.describe_software(),
        "kernels": [
            dataclasses.asdict(kernel) | more for kernel, more in zip(kernels, derived, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
