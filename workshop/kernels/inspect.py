"""Compiles V3's kernels for a GPU that need not be here, and inspects them.

A training step of V3 runs on tensors without memory, and every `kernel[grid](...)` is compiled for
the chosen chip instead of launched. So what is shown is what would run there: with V3's own tiles,
at the sizes of the presets.
"""

import dataclasses
import importlib
import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch
from torch import Tensor

from workshop import errors, results, tables, versions
from workshop.arguments import option, run, some_of
from workshop.errors import WorkshopError
from workshop.kernels import offline
from workshop.kernels.offline import CHIPS, KIB, Chip, Kernel, Launch
from workshop.run import presets
from workshop.run.precision import PRECISIONS, Precision
from workshop.tables import number

SCHEMA_VERSION = 1


@dataclasses.dataclass
class Options:
    target: list[str] = some_of(CHIPS, "CHIP", ("gfx90a", "gfx942", "gfx950", "sm_90"))
    config: list[str] = some_of(presets.PRESETS, "PRESET")
    precision: list[str] = some_of(PRECISIONS, "P", ("bf16", "fp32"))
    kernel: str = option("only kernels with NAME in their name", "", metavar="NAME")
    asm: Path | None = option("write each kernel's assembly to a file in DIR", metavar="DIR")
    json: Path | None = option("write all numbers to FILE, for programs", metavar="FILE")


# --- a target, in a separate process -------------------------------------------------------------


class Answer(NamedTuple):
    """The compiled kernels, the names of all that V3 launches, wanted or not, and the compiler."""

    kernels: list[Kernel]
    names: set[str]
    triton: str


def inspect_target(target: str, options: Options) -> Answer:
    """Compiles V3's kernels for one target. Triton reads its environment when it is imported and
    keeps what it compiled for the current device: call it once in a process."""
    os.environ["TRITON_INTERPRET"] = "0"
    # It logs what goes wrong within an operator; so do we, in a line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    chip = CHIPS[target]
    offline.prepare_operators()
    found: dict[str, Kernel] = {}
    names: set[str] = set()
    for precision, config in itertools.product(options.precision, options.config):
        used_by = f"{precision} {config}"
        for launch in run_specimens(chip, PRECISIONS[precision], config, options.kernel):
            names.add(launch.kernel)
            if launch.key and launch.key not in found:
                kernel = found[launch.key] = offline.read_kernel(chip, launch, used_by)
                if options.asm is not None and launch.compiled is not None:
                    kernel.assembly = write_assembly(chip, launch, kernel, options.asm)
            elif launch.key and used_by not in found[launch.key].used_by:
                found[launch.key].used_by.append(used_by)
    return Answer(list(found.values()), names, str(importlib.import_module("triton").__version__))


def run_specimens(chip: Chip, arithmetic: Precision, config: str, wanted: str) -> list[Launch]:
    """All launches at one size, forward and backward. A specimen that fails is there under its own
    name, besides what it had launched before."""
    arithmetic.set_matmul_mode()
    with offline.compiling(chip, wanted) as launches:
        for name, call in specimens(config, arithmetic.dtype).items():
            try:
                with arithmetic.autocast("cpu"):  # where tensors without memory claim to be
                    outputs = call()
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                if outputs:
                    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
            except Exception as error:
                launches.append(Launch(name, error=f"fails: {offline.one_line(error)}"))
    return launches


def specimens(config_name: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Functions that launch V3's kernels: its own training step, two layers of which launch all
    that more would, and the operators that it does without. Products are computed in `dtype`."""
    size = presets.get_preset(config_name)
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


def write_assembly(chip: Chip, launch: Launch, kernel: Kernel, folder: Path) -> list[str]:
    """The names of the files written: AMD's assembly, or NVIDIA's virtual and real one."""
    texts = launch.compiled.asm
    if chip.is_amd:
        forms = {"amdgcn": texts["amdgcn"]}
    else:
        forms = {"ptx": texts["ptx"], "sass": offline.disassemble(texts["cubin"])}
    stem = "-".join([chip.name, kernel.kernel, *kernel.used_by[0].split(), launch.key[:6]])
    files = {f"{stem}.{suffix}": text for suffix, text in forms.items() if text}
    for name, text in files.items():
        results.write_text(folder / name, text)
    return list(files)


class CompilerCrashed(WorkshopError):
    """The compiler ended its process, so there are no numbers."""

    exit_code = errors.ANSWER_IS_NO


def inspect_all(options: Options) -> list[Answer]:
    """Every target in a separate process, up to one for each core at a time.

    Raises:
        CompilerCrashed: and all other targets' kernels are not shown either.
    """
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        found = threads.map(lambda target: _in_process(target, options), options.target)
        return list(tables.tracked(found, "compiling", len(options.target)))
    finally:
        threads.shutdown(cancel_futures=True)


def _in_process(target: str, options: Options) -> Answer:
    context = multiprocessing.get_context("spawn")
    # At Ctrl-C the process ends at once, even while it compiles.
    at_interrupt = signal.SIGINT, signal.SIG_DFL
    try:
        with ProcessPoolExecutor(1, context, signal.signal, at_interrupt) as process:
            return process.submit(inspect_target, target, options).result()
    except BrokenProcessPool:
        raise CompilerCrashed(
            f"target {target}: Triton's compiler crashed; --kernel NAME finds out on which kernel"
        ) from None


# --- showing -------------------------------------------------------------------------------------

TILE_WIDTH = 18


def show(chip: Chip, kernels: list[Kernel]) -> None:
    """Prints a table of a target's kernels, with notes."""
    from rich import box
    from rich.table import Table

    console, merged = tables.terminal(), without_twins(kernels)
    headings = list(cells(chip, Kernel(chip.name, "", [])))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("kernel\n  tile", no_wrap=True)
    for heading in headings:
        words = heading in ("limited by", "launched at")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    table.columns[-1].min_width = 12
    for name in dict.fromkeys(kernel.kernel for kernel in merged):
        table.add_row(name, style="bold")
        same = [kernel for kernel in merged if kernel.kernel == name]
        for kernel in same:
            first, texts = tile(kernel, same), list(cells(chip, kernel).values())
            if not kernel.num_warps:
                first, texts = "  no code", []
            table.add_row(first, *texts, style="red" if kernel.faults else "")
    unit, memory = ("a CU", "LDS") if chip.is_amd else ("an SM", "shared memory")
    heading = (
        f"{chip.name} ({chip.products}): {unit} has {chip.shared_kib} KiB of {memory}, each of its "
        f"{offline.SIMDS} SIMDs {offline.VECTOR_REGISTERS} registers a lane"
    )
    console.print(heading, style="bold")
    console.print(table)
    for line in notes(chip, merged):
        console.print(line)
    console.print()


def without_twins(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels that differ in nothing that is shown become one; sizes can lead to other code with
    the same numbers."""
    seen: dict[str, Kernel] = {}
    for kernel in kernels:
        shown = repr(dataclasses.replace(kernel, used_by=[], assembly=[]))
        twin = seen.setdefault(shown, dataclasses.replace(kernel, used_by=[]))
        twin.used_by += [step for step in kernel.used_by if step not in twin.used_by]
    return list(seen.values())


def cells(chip: Chip, kernel: Kernel) -> dict[str, str]:
    """A kernel's cells, by their headings."""
    spills = (f"{n} {what.replace('bytes', 'B')}" for what, n in kernel.spills.items() if n)
    names = {"VGPR\n+AGPR": ("VGPR", "AGPR"), "SGPR": ("SGPR",)}
    if not chip.is_amd:
        names = {"regis-\nters": ("registers",)}
    return {
        "warps": str(kernel.num_warps),
        "stages": str(kernel.num_stages),
        **{n: "+".join(str(kernel.registers.get(r)) for r in own) for n, own in names.items()},
        "spills": "\n".join(spills) or "-",
        f"{chip.shared_name}\nKiB": number(kernel.shared_bytes / KIB or None, ".1f"),
        "matrix\ninstructions": matrix_kinds(kernel),
        "waves\na SIMD": f"{kernel.waves:g} of {chip.waves_per_simd}",
        "limited by": ", ".join(kernel.limited_by) or "-",
        "launched at": where(kernel),
    }


def tile(kernel: Kernel, same: list[Kernel]) -> str:
    """BLOCK_M=128, BLOCK_N=64, CAUSAL=True as "M128 N64 causal"; a switch is shown where kernels of
    the same name differ in it."""
    words = []
    for name, value in kernel.constants.items():
        if not isinstance(value, bool):
            words.append(f"{name.removeprefix('BLOCK_')}{value}")
    for name, value in kernel.constants.items():
        if value is True and not all(other.constants.get(name) for other in same):
            words.append(name.lower())
    text = " ".join(words) or "-"
    return textwrap.fill(text, TILE_WIDTH, initial_indent="  ", subsequent_indent="    ")


def matrix_kinds(kernel: Kernel) -> str:
    """Their number by unit and shape (rows x columns x depth): "64 mfma 32x32x8"."""
    kinds: Counter[str] = Counter()
    for name, count in kernel.matrix_instructions.items():
        shape = re.search(r"m?(\d+)[xn](\d+)[xk](\d+)", name)
        unit = re.search(r"s?mfmac?|wgmma|tcgen05|mma", name)
        size = "x".join(shape.groups()) if shape else ""
        kinds[f"{unit[0] if unit else name} {size}".strip()] += count
    return "\n".join(f"{count} {kind}" for kind, count in kinds.items()) or "-"


def where(kernel: Kernel) -> str:
    """The training steps that launch it: "bf16 small medium"."""
    steps: dict[str, list[str]] = {}
    for step in kernel.used_by:
        arithmetic, config = step.split()
        steps.setdefault(arithmetic, []).append(config)
    return "; ".join(" ".join([arithmetic, *configs]) for arithmetic, configs in steps.items())


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
    yield f"The chip's limits: {chip.source}."


# --- the command ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _inspect,
        argv,
        interrupted="interrupted: nothing is shown or written before all is compiled",
        description=" ".join((__doc__ or "").split("\n\n")[0].split()),
        epilog="Exit status: 0 every kernel compiles, fits and spills nothing into memory, 1 one "
        "does not, 2 wrong usage, 77 Triton is missing, 130 interrupted.",
    )


def _inspect(options: Options) -> int:
    errors.require("triton", "rich")
    if options.asm is not None:
        results.prepare_folder(options.asm, "--asm")
    if options.json is not None:
        results.prepare_file(options.json, "--json")
    answers = inspect_all(options)
    names = sorted({name for answer in answers for name in answer.names})
    kernels = [kernel for answer in answers for kernel in answer.kernels]
    if not kernels:
        raise WorkshopError(
            f"--kernel {options.kernel}: no kernel is called that; V3 has {', '.join(names)}"
        )
    if options.json is not None:
        results.write_json(options.json, as_json(kernels))
    for target, answer in zip(options.target, answers, strict=True):
        show(CHIPS[target], answer.kernels)
    faulty = sum(bool(kernel.faults) for kernel in kernels)
    verdict = (
        f"{faulty} of {len(kernels)} kernels have faults"
        if faulty
        else f"{len(kernels)} kernels compile, fit and spill nothing into memory"
    )
    print(f"{verdict} (Triton {answers[0].triton})")
    return errors.ANSWER_IS_NO if faulty else errors.DONE


def as_json(kernels: list[Kernel]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "created": results.now(),
        "software": results.describe_software(),
        "kernels": [
            dataclasses.asdict(k) | {"waves": k.waves, "limited_by": k.limited_by} for k in kernels
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
