"""V3's kernels compiled for GPUs that this machine need not have: they compile, fit, do not spill.

Each command runs in a separate process with an empty Triton cache; elsewhere in the tests
Triton interprets.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_compare import needs_triton

from workshop.kernels import offline

ROOT = Path(__file__).resolve().parents[1]
TOOL = ("-m", "workshop.kernels.inspect")
AMD = ("gfx90a", "gfx942", "gfx950")
LDS_KIB = {"gfx90a": 64, "gfx942": 64, "gfx950": 160}
WITH_PRODUCTS = ("attention_forward", "attention_backward_dq", "attention_backward_dk_dv")
LAUNCHED = {
    name
    for path in (ROOT / "version3_triton").glob("triton_*.py")
    for name in re.findall(r"^def _(\w+)_kernel\(", path.read_text(), re.MULTILINE)
    if not name.startswith(("float8_", "hopper_"))  # of fp8, not inspected, and of one NVIDIA chip
}

Kernels = list[dict[str, Any]]

# In place of two operators: one row that its warps' registers can't hold, and a table's gap.
PLANTED = """

import triton
import triton.language as tl


@triton.jit
def _planted_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(x + i)
    tl.store(y + i, tl.exp(row - tl.max(row)))


def swiglu(gate, up):
    _planted_kernel[(1,)](gate, up, BLOCK=2**17, num_warps=4)
    return gate * up


def apply_rope(q, k, cos, sin):
    raise KeyError("no tile")
"""

# A sitecustomize.py: Triton without what 3.5 brought.
OLD_TRITON = """import triton.language.extra.cuda as cuda
del cuda.gdc_wait, cuda.gdc_launch_dependents
"""


class Inspection(NamedTuple):
    """A command that has ended, the kernels in its result file, and its folder of assembly."""

    finished: subprocess.CompletedProcess[str]
    kernels: Kernels
    asm: Path


@pytest.fixture(scope="module")
def inspect(type_command, tmp_path_factory) -> Callable[..., Inspection]:
    """Runs the command with these words, once, in this checkout or a copy."""

    @functools.cache
    def run(words: str, root: Path = ROOT) -> Inspection:
        results = tmp_path_factory.mktemp("inspect")
        path = results / "kernels.json"
        finished = type_command(
            *("python", *TOOL, *words.split(), "--json", path, "--asm", results / "asm"),
            folder=root,
            # A user's own settings and cache: they are for the GPU that is compiled.
            PYTHONPATH=str(root),
            TRITON_INTERPRET="1",
            TRITON_CACHE_DIR=str(results / "cache"),
            COLUMNS="120",
        )
        content = json.loads(path.read_text()) if path.exists() else {"kernels": []}
        return Inspection(finished, content["kernels"], results / "asm")

    return run


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", AMD)
def test_every_kernel_compiles_fits_and_spills_nothing_into_memory(inspect, target) -> None:
    finished, kernels, asm = inspect(f"--target {' '.join(AMD)} --config small very_large")
    told = [x for x in finished.stderr.splitlines() if not x.startswith("compiling: ")]
    assert (finished.returncode, told) == (0, []), finished.stdout
    compiled = [kernel for kernel in kernels if kernel["target"] == target]
    assert {kernel["kernel"] for kernel in compiled} == LAUNCHED
    for kernel in compiled:
        assert kernel["faults"] == []
        assert kernel["spills"]["VGPR"] == kernel["spills"]["bytes"] == 0
        assert kernel["registers"]["VGPR"] + kernel["registers"]["AGPR"] <= 512
        instructions = kernel["matrix_instructions"]
        assert bool(instructions) == (kernel["kernel"] in WITH_PRODUCTS), kernel["kernel"]
        precisions = {step.split()[0] for step in kernel["used_by"]}
        for name in instructions:
            assert re.fullmatch(r"v_mfma_f32_\d+x\d+x\d+_?(b?f\d+)(_1k)?", name)
            assert ("bf16" in name) == (precisions == {"bf16"})
        # LLVM writes how many waves the registers allow; of a program that puts two waves on each
        # SIMD, only whole pairs run.
        (name,) = kernel["assembly"]
        text = (asm / name).read_text()
        assert f"amdgcn-amd-amdhsa--{target}" in text
        occupancy = re.search(r"; Occupancy: (\d+)", text)
        assert occupancy is not None
        together = max(1, kernel["num_warps"] // 4)
        by = kernel["waves_by"]
        ours = min(by["registers"], by["SGPR"], by["slots"])
        assert ours == int(occupancy[1]) // together * together, name
    assert 0 < max(kernel["shared_bytes"] for kernel in compiled) <= LDS_KIB[target] * 1024
    steps = {step for kernel in compiled for step in kernel["used_by"]}
    assert steps == {f"{p} {c}" for p in ("bf16", "fp32") for c in ("small", "very_large")}


@needs_triton
@pytest.mark.slow
def test_nvidia(inspect) -> None:
    words = "--target sm_90 --kernel attention_forward --config small --precision bf16"
    finished, (kernel,), asm = inspect(words)
    assert finished.returncode == 0, finished.stdout
    assert (kernel["target"], kernel["kernel"]) == ("sm_90", "attention_forward")
    assert 32 < kernel["registers"]["registers"] <= 255 and kernel["spills"] == {"bytes": 0}
    assert all(name.startswith("wgmma.mma_async") for name in kernel["matrix_instructions"])
    assert "wgmma 64x" in finished.stdout
    ptx, sass = (asm / name for name in kernel["assembly"])
    assert (ptx.suffix, sass.suffix) == (".ptx", ".sass")
    expected = sum(kernel["matrix_instructions"].values())
    assert len(re.findall(r"\bHGMMA\.", sass.read_text())) == expected


@needs_triton
@pytest.mark.slow
def test_kernels_for_hopper(inspect) -> None:
    pytest.importorskip("triton", minversion="3.6")
    words = "--target sm_90 --kernel hopper --config very_large --precision bf16"
    finished, kernels, _ = inspect(words)
    assert finished.returncode == 0, finished.stdout
    products = {k["kernel"]: k["matrix_instructions"] for k in kernels}
    assert {name for name, found in products.items() if any("wgmma" in i for i in found)} == {
        "hopper_attention_forward",
        "hopper_attention_backward",
        "hopper_matmul_swiglu_forward",
        "hopper_matmul_swiglu_backward",
    }


@needs_triton
@pytest.mark.slow
def test_staged_loads_fit_the_shared_memory_of_each_gpu(inspect) -> None:
    words = "--target sm_80 sm_89 sm_90 --kernel rms_norm_backward --config very_large"
    finished, kernels, _ = inspect(f"{words} --precision bf16")
    assert finished.returncode == 0, finished.stdout
    stages = {k["target"]: k["num_stages"] for k in kernels if k["constants"]["ADD"]}
    assert stages == {"sm_80": 1, "sm_89": 1, "sm_90": 3}


@pytest.mark.slow
@needs_triton
def test_kernel_that_spills(inspect, tmp_path) -> None:
    for folder in ("workshop", "version3_triton"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    with (tmp_path / "version3_triton" / "triton_kernels.py").open("a") as operators:
        operators.write(PLANTED)
    words = "--target gfx942 --kernel planted --config tiny --precision bf16"
    finished, (failing, spilling), _ = inspect(words, tmp_path)
    assert finished.returncode == 1, finished.stdout
    assert (spilling["kernel"], failing["kernel"]) == ("planted", "apply_rope")
    assert spilling["spills"]["VGPR"] > 0 and spilling["spills"]["bytes"] > 0
    assert failing["faults"] == ["fails: KeyError: 'no tile'"]
    sentence = " ".join(finished.stdout.split())
    assert f"FAULT: planted, bf16 tiny: {spilling['faults'][0]}" in sentence
    assert "2 of 2 kernels have faults (Triton " in sentence


@needs_triton
@pytest.mark.slow
def test_kernels_compile_where_triton_has_no_early_launches(type_command, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_TRITON)
    words = (*TOOL, "--target", "sm_90", "--kernel", "rope", "--config", "small")
    finished = type_command(
        *("python", *words),
        PYTHONPATH=str(tmp_path),
        TRITON_INTERPRET="0",  # from the start: Triton is imported before the tool turns it off
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared_bytes", "waves", "limited_by"),
    [
        # 512 registers a lane: 128 + 0 go four times.
        ("gfx942", 4, {"VGPR": 128, "AGPR": 0, "SGPR": 40}, 0, 4, ["registers"]),
        # 97 are given out as 104, which go four times, not five.
        ("gfx942", 4, {"VGPR": 68, "AGPR": 29, "SGPR": 40}, 0, 4, ["registers"]),
        # Two waves of a program on each SIMD: of the three that fit, one program's are used.
        ("gfx942", 8, {"VGPR": 100, "AGPR": 29, "SGPR": 40}, 0, 2, ["registers"]),
        ("gfx942", 4, {"VGPR": 64, "AGPR": 0, "SGPR": 40}, 0, 8, []),
        ("gfx942", 4, {"VGPR": 32, "AGPR": 0, "SGPR": 102}, 0, 7, ["SGPR"]),
        # 64 KiB hold three programs of 20 KiB, 160 KiB hold eight.
        ("gfx942", 4, {"VGPR": 64, "AGPR": 0, "SGPR": 40}, 20 * 1024, 3, ["LDS"]),
        ("gfx950", 4, {"VGPR": 64, "AGPR": 0, "SGPR": 40}, 20 * 1024, 8, []),
        ("gfx942", 1, {"VGPR": 64, "AGPR": 0, "SGPR": 40}, 20 * 1024, 0.75, ["LDS"]),
        ("gfx942", 4, {"VGPR": 64, "AGPR": 0, "SGPR": 40}, 65 * 1024, 0, ["LDS"]),
        # 168 registers of 128 threads: three blocks, 12 warps of 64.
        ("sm_90", 4, {"registers": 168}, 0, 3, ["registers"]),
        # With the KiB that is reserved, 228 KiB hold two blocks of 113 KiB and no third.
        ("sm_90", 4, {"registers": 32}, 113 * 1024, 2, ["shared"]),
        ("sm_90", 4, {"registers": 32}, 0, 16, []),
        # No more than 32 blocks, of whatever size.
        ("sm_90", 1, {"registers": 32}, 0, 8, []),
        ("sm_89", 4, {"registers": 32}, 0, 12, []),
    ],
)
def test_occupancy(target, warps, registers, shared_bytes, waves, limited_by) -> None:
    waves_by = offline.occupancy(offline.CHIPS[target], warps, registers, shared_bytes)
    kernel = offline.Kernel(target, "name", [], waves_by=waves_by)
    assert (kernel.waves, kernel.limited_by) == (waves, limited_by)


def test_too_much_lds_is_a_fault() -> None:
    kernel = offline.Kernel("gfx942", "name", [], spills={"bytes": 0}, shared_bytes=65537)
    kernel.waves_by = {"LDS": 1.0}
    (fault,) = offline.find_faults(offline.CHIPS["gfx942"], kernel)
    assert fault.startswith("needs 65,537 bytes of LDS memory, a program may have 65,536")
    assert list(offline.find_faults(offline.CHIPS["gfx950"], kernel)) == []
