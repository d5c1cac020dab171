"""Compiles Triton kernels for a chip that need not be here, and reads what they take of it.

Tensors have no memory, and every `kernel[grid](...)` is compiled for the chip instead of launched.
"""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from workshop import versions
from workshop.errors import NotOnThisMachine

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
    """Bytes: shared memory is given out in multiples of it."""
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
        """All of the unit's, except the KiB a program that NVIDIA's system takes for itself."""
        return self.shared_kib if self.is_amd else self.shared_kib - 1

    @property
    def source(self) -> str:
        """The source of the limits.

        AMD: 512 KiB of vector registers / (4 SIMDs x 64 lanes x 4 bytes) = 512; LLVM's
        getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU and getOccupancyWithNumSGPRs, and
        test/CodeGen/AMDGPU/lds-size-hsa-gfx950.ll for that chip's granule. NVIDIA: 64 K registers /
        (4 sub-partitions x 32 lanes) = 512; registers (256 a warp) and shared memory (128 bytes,
        1 KiB reserved) are given out as in CUDA 12.
        """
        if self.is_amd:
            return 'ROCm documentation, "AMD GPU specifications"; LLVM, AMDGPUBaseInfo.cpp'
        return 'CUDA C++ Programming Guide, "Compute Capabilities"; cuda_occupancy.h'


SIMDS = 4
VECTOR_REGISTERS = 512
REGISTER_GRANULE = 8
TENSOR_MEMORY_COLUMNS = 512

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


# --- compiling instead of launching --------------------------------------------------------------


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
                record.error = f"does not compile: {one_line(error)}"

        return launch

    def address(tensor: Tensor) -> int:  # modulo 16: PyTorch aligns whole allocations
        return int(tensor.storage_offset()) * tensor.element_size()

    triton.runtime.driver.set_active(_driver(chip))
    with (
        mock.patch.object(KernelInterface, "__getitem__", get_item),
        mock.patch.object(FakeTensor, "data_ptr", address, create=True),
        FakeTensorMode(),
    ):
        yield launches


def _driver(chip: Chip) -> Any:
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


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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
    """The resources of a compiled launch, or why it does not compile."""
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
        instructions = re.findall(r"\bv_s?mfmac?_\w+", texts["amdgcn"])
    else:
        kernel.registers, kernel.spills = read_ptx(texts["ptx"])
        matrix = r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"
        instructions = re.findall(matrix, texts["ptx"])
    kernel.matrix_instructions = dict(Counter(instructions).most_common())
    columns = getattr(metadata, "tmem_size", None) or 0
    kernel.waves_by = occupancy(
        chip, kernel.num_warps, kernel.registers, kernel.shared_bytes, columns
    )
    kernel.faults += list(find_faults(chip, kernel))
    return kernel


def read_amdgcn(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and spills from the metadata that LLVM appends to the assembly."""
    found = {n: int(v) for n, v in re.findall(r"^ +(?:- )?\.(\w+): +(\d+)$", text, re.MULTILINE)}
    # vgpr_count is the sum of both, AGPRs starting at a multiple of four.
    vectors = found["vgpr_count"] - found["agpr_count"]
    registers = {"VGPR": vectors, "AGPR": found["agpr_count"], "SGPR": found["sgpr_count"]}
    spills = {"VGPR": found["vgpr_spill_count"], "SGPR": found["sgpr_spill_count"]}
    return registers, spills | {"bytes": found["private_segment_fixed_size"]}


def read_ptx(ptx: str) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and spills from what NVIDIA's assembler says, which is what Triton runs, too."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    command = [_nvidia_tool("ptxas", target[1]), "-v", f"--gpu-name={target[1]}"]
    log = _run_on_file([*command, "--output-file", os.devnull], ptx.encode()).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers is not None and spills is not None, log
    return {"registers": int(registers[1])}, {"bytes": int(spills[1])}


def disassemble(cubin: bytes) -> str:
    """The machine code of a kernel for NVIDIA, readable; empty where there is no disassembler."""
    try:
        return _run_on_file([_nvidia_tool("nvdisasm"), "--print-code"], cubin).stdout
    except NotOnThisMachine:
        return ""


def _run_on_file(command: list[str], content: bytes) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True)


def _nvidia_tool(name: str, target: str = "") -> str:
    """The path of the one that comes with Triton, else of the CUDA toolkit's.

    Raises:
        NotOnThisMachine: there is neither.
    """
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    folder = Path(triton.origin).parent / "backends/nvidia/bin"
    names = [f"{name}-blackwell", name] if re.match(r"sm_\d{3}", target) else [name]
    own = [str(folder / each) for each in names if (folder / each).is_file()]
    if path := own[0] if own else shutil.which(name):
        return path
    raise NotOnThisMachine(f"{name} is missing: install the CUDA toolkit, or drop sm_ targets")


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
