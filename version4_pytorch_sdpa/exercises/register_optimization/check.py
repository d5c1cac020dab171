"""Whether the participant's tiles spill nothing, fit, and leave room for other waves: compiled for
four chips, beside the tile to start from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from version4_pytorch_sdpa.exercises.register_optimization import compile_tiles
from version4_pytorch_sdpa.exercises.register_optimization.compile_tiles import Compiled
from workshop import versions
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.exercises import frame
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, NotCompared, Predicted, Question, ask
from workshop.kernels.offline import CHIPS, KIB, Chip, Kernel

WAVES = 4
"""Waves that a SIMD should hold at least: while one waits for memory, the others compute."""
INTENSITY = {"gfx90a": 80, "gfx942": 80, "gfx950": 80, "sm_90": 60}
"""FLOP that a tile should do for each byte that it loads. Any tile fits if it is small enough; this
keeps it large."""
BYTES = 2
"""Size of a number in bf16."""
REGISTERS = {True: 512, False: 255}
"""Registers that a lane can have, on AMD (VGPR and AGPR) and on NVIDIA."""
INTERPRETED, ON_GPU = 1e-5, 1e-2
"""Room for another order of a sum in fp32, and on a GPU for a result in bf16."""
SMALL = (64, 32, 32, 4, 2)
"""A tile for which every GPU has room."""
LIMITS = ("registers", "shared memory", "both", "slots")


def check(work: Work) -> Iterator[Item]:
    missing = versions.missing(versions.get_version("v3"))
    if missing:
        raise NotOnThisMachine(missing.replace("version v3", "this exercise"))
    tiles, starter = _tiles(work), work.folder / frame.STARTER
    start = frame.import_file(starter).START
    jobs: dict[compile_tiles.Job, Any] = {
        (work.mine_path, target): tile
        for target, tile in tiles.items()
        if not _hopeless(CHIPS[target], tile)
    }
    # After the participant's: as long as those are START, Triton has all of these in its cache.
    jobs |= {(starter, target): start for target in tiles}
    with compile_tiles.compiling_all(jobs) as answer:

        def mine(target: str) -> Compiled:
            fault = _hopeless(CHIPS[target], tiles[target])
            return Compiled(fault=fault) if fault else answer((work.mine_path, target))

        cases = [
            Case(CHIPS[t], start, tile, partial(answer, (starter, t)), partial(mine, t))
            for t, tile in tiles.items()
        ]
        chips = (partial(_chip, case) for case in cases)
        yield from ask(work, lambda _: None, (_numbers, *chips, *_questions(cases)))


def _tiles(work: Work) -> dict[str, Any]:
    """The participant's, by chip.

    Raises:
        WorkshopError: one is missing, or none that a kernel can have.
    """
    tiles = {}
    for target in INTENSITY:
        tile = work.module.TILES.get(target)
        if tile is None:
            raise WorkshopError(f"TILES has none for {target}")
        limits = dict.fromkeys(("block_m", "block_n", "block_k"), (16, 512))
        for name, (least, most) in (limits | {"num_warps": (1, 16)}).items():
            value = getattr(tile, name)
            if value not in (2**power for power in range(10)) or not least <= value <= most:
                raise WorkshopError(
                    f"TILES[{target!r}].{name} is {value!r}: it must be a power of two from "
                    f"{least} to {most}"
                )
        if tile.num_stages not in range(1, 9):
            raise WorkshopError(f"TILES[{target!r}].num_stages must lie between 1 and 8")
        tiles[target] = tile
    return tiles


def _numbers(work: Work) -> Iterator[Item]:
    """Whether the kernel still computes the same, with masks that have something to do."""
    mine, tiles = work.module, _tiles(work)
    on_gpu = torch.cuda.is_available()
    shown = list(dict.fromkeys(tiles.values()))
    if on_gpu:  # it may have no room for another chip's tile
        shown = [tiles.get(_chip_here()) or mine.Tile(*SMALL)]
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tile in shown:
        # A whole tile and a bit in each direction.
        M, N, K = tile.block_m + 5, tile.block_n + 3, 2 * tile.block_k + 6
        x, gate, up = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((M, K), (N, K), (N, K))
        )
        expected = silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
        yield first_difference(
            mine.swiglu_product(x, gate, up, tile).float(),
            expected,
            what=f"y is right at M = {M}, N = {N}, K = {K}, tile {_words(tile)}",
            limit=ON_GPU if on_gpu else INTERPRETED,
        )


def _chip_here() -> str:
    """The name that workshop.kernels.offline has for this machine's GPU."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _words(tile: Any) -> str:
    return (
        f"{tile.block_m} x {tile.block_n} x {tile.block_k}, {tile.num_warps} warps, "
        f"{tile.num_stages} stages"
    )


# --- what the compiler made of them --------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A chip: the tile to start from, and the participant's, which are being compiled."""

    chip: Chip
    start_tile: Any
    tile: Any
    start: Callable[[], Compiled]
    """Waits for the compiler."""
    mine: Callable[[], Compiled]


def _hopeless(chip: Chip, tile: Any) -> str:
    """Why a tile is not worth compiling, which takes a minute where everything spills; or ""."""
    needed, there = _accumulators(chip, tile), REGISTERS[chip.is_amd]
    if needed < (there if chip.is_amd else 4 * there):
        return ""
    return f"not compiled: its accumulators alone need {needed} registers a lane, one has {there}"


def _accumulators(chip: Chip, tile: Any) -> int:
    """Registers a lane for two (block_m, block_n) in fp32."""
    return int(2 * tile.block_m * tile.block_n // (tile.num_warps * chip.warp_size))


def _intensity(tile: Any) -> float:
    """FLOP a byte: two products a turn of the loop, and one block of x and two of weights."""
    flops = 2 * 2 * tile.block_m * tile.block_n
    return float(flops / (BYTES * (tile.block_m + 2 * tile.block_n)))


def _chip(case: Case, work: Work) -> Iterator[Item]:
    chip, mine = case.chip, case.mine()
    name = f"{chip.name} ({chip.products})"
    if mine.missing:
        yield Item(True, f"{name}: not compiled", mine.missing)
    elif mine.kernel is None:
        yield Item(False, f"{name}, tile {_words(case.tile)}", mine.fault)
    else:
        failures = list(_failures(chip, mine.kernel, case.tile))
        verdict = "" if failures else ": spills nothing, fits, leaves room"
        columns = [
            _column(chip, case.start().kernel, case.start_tile),
            _column(chip, mine.kernel, case.tile),
            {
                "spilled bytes a lane": "0",
                f"KiB of {chip.shared_name}": f"<= {chip.shared_per_program_kib}",
                "waves a SIMD": f">= {WAVES}",
                "FLOP a byte": f">= {INTENSITY[chip.name]}",
            },
        ]
        table = [f"  {'':<22}{'start':>22}{'yours':>22}{'wanted':>8}"]
        for row in columns[1]:
            start, yours, wanted = (column.get(row, "") for column in columns)
            table.append(f"  {row:<22}{start or '-':>22}{yours:>22}{wanted:>8}")
        yield Item(not failures, f"{name}{verdict}", "\n".join([*failures, *table]))


def _failures(chip: Chip, kernel: Kernel, tile: Any) -> Iterator[str]:
    yield from kernel.faults
    if not kernel.matrix_instructions:
        yield "no matrix instructions: is a block too small, or tl.dot gone?"
    if kernel.waves < WAVES:
        limits = " and ".join(kernel.limited_by)
        yield f"{kernel.waves:g} waves a SIMD, {WAVES} are wanted: limited by {limits}"
    wanted = INTENSITY[chip.name]
    if _intensity(tile) < wanted:
        yield (
            f"{_intensity(tile):.0f} FLOP a byte, {wanted} are wanted: small tiles load the same "
            "numbers again and again"
        )


def _column(chip: Chip, kernel: Kernel | None, tile: Any) -> dict[str, str]:
    """A tile's numbers by row; none without a kernel."""
    if kernel is None:
        return {}
    return {
        "tile": f"{tile.block_m} x {tile.block_n} x {tile.block_k}",
        "warps, stages": f"{tile.num_warps}, {tile.num_stages}",
        "registers a lane": "+".join(
            f"{count} {name}" if chip.is_amd else f"{count}"
            for name, count in kernel.registers.items()
            if name != "SGPR"
        ),
        "spilled bytes a lane": str(kernel.spills["bytes"]),
        f"KiB of {chip.shared_name}": f"{kernel.shared_bytes / KIB:g}",
        "waves a SIMD": f"{kernel.waves:g} of {chip.waves_per_simd}",
        "limited by": ", ".join(kernel.limited_by) or "slots",
        "FLOP a byte": f"{_intensity(tile):.0f}",
    }


# --- what was written down -----------------------------------------------------------------------


def _questions(cases: list[Case]) -> Iterator[Question[None]]:
    for case in cases:
        name, tile, lanes = case.chip.name, case.start_tile, case.chip.warp_size
        if name in ("gfx942", "sm_90"):
            yield Predicted(
                f"predict.accumulators_{name}",
                f"START's accumulators on {name}, registers a lane", "",
                partial(lambda case, _: _accumulators(case.chip, case.start_tile), case),
                f"2 accumulators of {tile.block_m} x {tile.block_n} numbers lie in the registers "
                f"of {tile.num_warps} waves of {lanes} lanes: a lane has its share of all.",
                within=0,
            )  # fmt: skip
        if name == "sm_90":
            yield Predicted(
                "predict.shared_kib_sm_90", "START's shared memory on sm_90", "KiB",
                partial(_shared_kib, case),
                "A stage holds a block of x and two of weights, block_k wide, 2 bytes a number; "
                "all num_stages of them are there at a time.", within=0.01,
            )  # fmt: skip
        limit = partial(_limit, case)
        yield Chosen(
            f"findings.limit_{name}", f"what limits the waves of your tile on {name}", LIMITS,
            limit, partial(lambda limit, _: f"the table above says {limit(None)}", limit),
        )  # fmt: skip


def _shared_kib(case: Case, _: None) -> float:
    kernel = case.start().kernel
    if kernel is None:
        raise NotCompared("not compiled")
    return kernel.shared_bytes / KIB


def _limit(case: Case, _: None) -> str:
    tile = case.mine()
    if tile.missing:
        raise NotCompared("not compiled")
    if tile.kernel is None:
        raise WorkshopError("nothing limits the waves of a tile that does not compile")
    names = {"shared memory" if n in ("LDS", "shared") else n for n in tile.kernel.limited_by}
    return "both" if len(names) > 1 else next(iter(names), "slots")
