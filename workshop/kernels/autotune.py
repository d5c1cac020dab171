"""Times other tiles for V3's kernels on this GPU, and prints the table entries of the best.

V3 takes its tiles from small tables, so that a first run has no tuning to wait for. They were swept
on one kind of GPU: this repeats it on yours. A candidate whose results differ from the present
tile's is dropped; so is one that does not fit the chip. Paste the printed
entries into the tables (each file has its own), then run the tests and workshop.kernels.benchmark.
"""

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch
from torch import Tensor

from workshop import errors, versions
from workshop.arguments import option, run
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.run import hardware, presets
from workshop.run.precision import get_precision

TOLERANCE = 0.02
"""Relative RMS between two tiles: sums in another order, rounded to 16 bits."""
WORTH_IT = 0.02
"""A candidate this little faster is noise."""


@dataclass
class Job:
    """One table: its candidate entries, and a call that reads it."""

    module: ModuleType
    table_name: str
    candidates: list[Any]
    call: Callable[[], Any]
    entry: Callable[[Any], Any] = tuple
    """The table's entry with a candidate in it."""

    @property
    def name(self) -> str:
        return f"{self.module.__name__}.{self.table_name}"

    @property
    def table(self) -> dict[str, Any]:
        table: dict[str, Any] = getattr(self.module, self.table_name)
        return table


@dataclass
class Outcome:
    """Times in ms; without a candidate worth the change there is no `best`."""

    job: Job
    present_ms: float
    best: Any
    best_ms: float
    dropped: int


@dataclass
class Options:
    """The command line."""

    config: str = option(", ".join(presets.PRESETS), "medium")
    precision: str = option("fp32, tf32, bf16, fp16 or auto", "auto")
    op: str = option("only the tables with this in their name", "")


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    return run(
        Options,
        _autotune,
        argv,
        interrupted="interrupted: the tables are as they were",
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 2 wrong usage, 77 no GPU or no Triton.",
    )


def _autotune(options: Options) -> int:
    preset = presets.get_preset(options.config)
    if not torch.cuda.is_available():
        raise NotOnThisMachine("tiles are timed on a GPU, and there is none here")
    versions.load("v3")  # or this machine has no Triton
    import triton

    device = hardware.get_device("auto")
    precision = get_precision(options.precision, device)
    precision.set_matmul_mode()
    chosen = [job for job in jobs(preset, precision.dtype, device) if options.op in job.name]
    if not chosen:
        raise WorkshopError(f"--op {options.op}: no table has this in its name")
    print(f"{options.config}, {precision.name}, {hardware.device_name(device)}")
    for job in chosen:
        print(describe(tune(job, triton.testing.do_bench_cudagraph)))
    return errors.DONE


# --- tuning --------------------------------------------------------------------------------------


def architecture() -> str:
    """The key of this device's entries."""
    return str(sys.modules["triton_launch"].architecture())


def tune(job: Job, clock: Callable[[Callable[[], Any]], float]) -> Outcome:
    """Tries the candidates of a table, which is left as it was."""
    expected = _tensors(job.call())
    present_ms = clock(job.call)
    timed: list[tuple[float, Any]] = []
    before = dict(job.table)
    try:
        for candidate in job.candidates:
            job.table[architecture()] = job.entry(candidate)
            # Too large for the chip: each part of Triton has its own error.
            with contextlib.suppress(Exception):
                if _agree(_tensors(job.call()), expected):
                    timed.append((clock(job.call), candidate))
    finally:
        job.table.clear()
        job.table.update(before)
    best_ms, best = min(timed, key=lambda pair: pair[0], default=(present_ms, None))
    if best_ms > (1 - WORTH_IT) * present_ms:
        best = None
    return Outcome(job, present_ms, best, best_ms, len(job.candidates) - len(timed))


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [x for x in values if isinstance(x, Tensor) and x.numel()]


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        float((a.double() - b.double()).norm()) <= TOLERANCE * float(b.double().norm())
        for a, b in zip(found, expected, strict=True)
    )


def describe(outcome: Outcome) -> str:
    """One line, and the entry to paste where there is a better one."""
    job = outcome.job
    left = f", {outcome.dropped} dropped" if outcome.dropped else ""
    tried = f"{len(job.candidates)} tried{left}"
    line = f"{job.name:42} now {outcome.present_ms:8.4f} ms; {tried}: "
    if outcome.best is None:
        return line + "nothing better"
    gain = outcome.present_ms / outcome.best_ms - 1
    entry = f'    "{architecture()}": {job.entry(outcome.best)!r},'
    return f"{line}{outcome.best_ms:.4f} ms, {gain:.0%} faster\n{entry}"


# --- the tables ----------------------------------------------------------------------------------


def _row_blocks(*sizes: int) -> list[Any]:
    """One row, a block of it, and warps that have two numbers a lane at least."""
    return [(1, b, w) for b in sizes for w in (2, 4, 8) if b >= 64 * w]


def _with(present: dict[int, Any], limit: int, candidate: Any) -> tuple[tuple[int, Any], ...]:
    """The entries of a table, each up to a limit, with a candidate among them."""
    return tuple(sorted((present | {limit: candidate}).items()))


def jobs(preset: presets.Preset, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Every table, with the call that a training step of the preset makes of it."""
    versions.load("v3")
    norm, swiglu, rope, attention, loss = (
        importlib.import_module(f"triton_{name}")
        for name in ("rms_norm", "swiglu", "rope", "attention", "cross_entropy")
    )
    B, T, C, V = preset.batch_size, preset.seq_len, preset.hidden_dim, preset.vocab_size
    H, K, F = preset.num_heads, preset.model()["num_kv_heads"], preset.model()["intermediate_dim"]
    D, rows = C // H, B * T

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def heads(count: int) -> Tensor:
        return normal(B, T, count, D).transpose(1, 2)

    # RMSNorm
    branch, dy = normal(rows, C), normal(rows, C)
    stream, weight = (normal(*shape, dtype=torch.float32) for shape in ((rows, C), (C,)))
    forward: Callable[[], Any] = lambda: norm.add_rms_norm_forward(  # noqa: E731
        branch, stream, weight, 1e-5, dtype
    )
    _, total, rstd = forward()
    backward: Callable[[], Any] = lambda: norm.rms_norm_backward(  # noqa: E731
        dy, stream, total, weight, rstd, dtype != stream.dtype
    )
    shapes = list(itertools.product((1024, 2048, 4096, 8192), (8, 16, 32)))
    for name, call, rest in (
        ("FORWARD_BLOCKS", forward, itertools.product((None, 4, 8))),
        ("BACKWARD_BLOCKS", backward, itertools.product((1, 2, 4, 8), (False, True))),
    ):
        blocks = [norm.Block(*shape, *more) for shape, more in itertools.product(shapes, rest)]
        of_width = functools.partial(_with, dict(norm.tuned(getattr(norm, name))), C)
        yield Job(norm, name, blocks, call, of_width)
    sums = list(itertools.product((128, 256, 512, 1024), (8, 16, 32), (4, 8)))
    yield Job(norm, "SUM_BLOCKS", sums, backward)

    # SwiGLU
    gate_up, dswiglu = normal(rows, 2 * F), normal(rows, F)
    halves = gate_up.chunk(2, dim=1)

    def swiglu_backward() -> list[Tensor]:
        found = [*torch.empty_like(gate_up).chunk(2, dim=1), torch.empty_like(dswiglu)]
        swiglu.launch_backward(dswiglu, *halves, *found)
        return found

    for name, call in (
        ("FORWARD_BLOCKS", lambda: swiglu.swiglu_forward(*halves)),
        ("BACKWARD_BLOCKS", swiglu_backward),
    ):
        yield Job(swiglu, name, _row_blocks(512, 1024, 2048, 4096), call)

    # RoPE
    both, (cos, sin) = heads(H + K), normal(2, T, D, dtype=torch.float32)
    blocks = list(itertools.product((8, 16, 32, 64), (1, 2, 4), (4, 8, 16)))
    turn = lambda: rope.apply_rope_forward(both[:, :H], both[:, H:], cos, sin, False)  # noqa: E731
    yield Job(rope, "BLOCKS", blocks, turn)

    yield from _attention_jobs(attention, heads(H), heads(H), heads(K), heads(K))

    # Linear and cross-entropy
    hidden, head = normal(rows, C, dtype=torch.float32), 0.02 * normal(V, C, dtype=torch.float32)
    targets = torch.randint(V, (rows,), device=device)
    call = lambda: loss.linear_cross_entropy_forward(hidden, head, targets, dtype, True)  # noqa: E731
    blocks = [(1, 32 * w * steps, w) for w in (4, 8, 16, 32) for steps in (1, 2, 4)]
    yield Job(loss, "BLOCKS", blocks, call)
    of_sum, dloss = call()[1:], torch.tensor(1.5, device=device)
    scale = lambda: loss.linear_cross_entropy_backward(dloss, *of_sum, hidden.dtype, head.dtype)  # noqa: E731
    blocks = list(itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)))
    yield Job(loss, "SCALE_BLOCKS", blocks, scale)


def _attention_jobs(attention: Any, q: Tensor, dout: Tensor, k: Tensor, v: Tensor) -> Iterator[Job]:
    attention.on_hopper = lambda: False  # those kernels do not have these tiles
    (T, D), size = q.shape[2:], q.element_size()
    out, lse = attention.flash_attention_forward(q, k, v, True, D**-0.5)
    sizes = (16, 32, 64, 128)
    tiles = [
        attention.Tile(m, n, warps, stages)
        for m, n, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3))
        if 16 * 64 <= m * n <= 128 * 128 and (m * n >= 64 * 64 or warps == 4)
    ]

    def forward() -> Any:
        return attention.flash_attention_forward(q, k, v, True, D**-0.5)[0]

    def backward() -> Any:
        return attention.flash_attention_backward(dout, q, k, v, out, lse, True, D**-0.5)

    def entry_of(name: str) -> Callable[[Any], Any]:
        present = attention.tuned(getattr(attention, name))
        of_size = present.get(size, {})  # the interpreter has tiles for every size
        by_length = {tile.up_to: tile for tile in of_size.get(D, [])}

        def entry(tile: Any) -> Any:
            tiles = [tile for _, tile in _with(by_length, T, replace(tile, up_to=T))]
            return present | {size: of_size | {D: tiles}}

        return entry

    calls = {"FORWARD_TILES": forward, "DQ_TILES": backward, "DK_DV_TILES": backward}
    for name, call in calls.items():
        yield Job(attention, name, tiles, call, entry_of(name))


if __name__ == "__main__":
    sys.exit(main())
