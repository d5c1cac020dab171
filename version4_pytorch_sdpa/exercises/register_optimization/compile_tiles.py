"""Compiles the kernel of a file for chips that need not be here, in separate processes: the
check's own has Triton's interpreter."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from workshop.errors import NotOnThisMachine, printable
from workshop.exercises.frame import import_file
from workshop.kernels.offline import CHIPS, Kernel, compiling, read_kernel

TOKENS, HIDDEN, INTERMEDIATE = 16 * 512, 1024, 4096
"""M, K and N: the sizes of `medium`."""
WORKERS = 2


@dataclass(frozen=True)
class Compiled:
    """The compiled kernel of a tile, or a sentence that says why it is missing."""

    kernel: Kernel | None = None
    fault: str = ""
    missing: str = ""
    """Software that is missing here to compile for this chip."""


Job = tuple[Path, str]
"""A file with `swiglu_product`, and a chip."""


@contextmanager
def compiling_all(jobs: Mapping[Job, Any]) -> Iterator[Callable[[Job], Compiled]]:
    """Compiles each job's tile in bf16, two at a time, in the order given, while the block runs. It
    gets a function that waits for what the compiler made of a job."""
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))

    def answer(job: Job) -> Compiled:
        try:
            return started[job].result()
        except BrokenProcessPool:
            return Compiled(fault="Triton's compiler crashed: on this tile, or on another chip's")

    try:
        started = {
            job: pool.submit(compile_tile, *job, astuple(tile)) for job, tile in jobs.items()
        }
        yield answer
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # their end takes seconds


def compile_tile(path: Path, target: str, tile: tuple[int, ...]) -> Compiled:
    """Inside a worker: compiles what `swiglu_product` launches with the tile."""
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
    import torch

    chip = CHIPS[target]
    try:
        module = import_file(path)  # anew: a kernel keeps what it was compiled to, for any chip
        with compiling(chip, "") as launches:
            x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
            gate, up = torch.empty(2, INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
            module.swiglu_product(x, gate, up, module.Tile(*tile))
        if len(launches) != 1:
            return Compiled(fault=f"swiglu_product launches {len(launches)} kernels, not one")
        kernel = read_kernel(chip, launches[0], "bf16 medium")
    except NotOnThisMachine as missing:
        return Compiled(missing=str(missing))
    except Exception as error:  # of the participant's file, which the check shows with its line
        return Compiled(fault=printable(f"{type(error).__name__}: {error}")[:300])
    if not kernel.num_warps:
        return Compiled(fault=kernel.faults[0])
    return Compiled(kernel)
