"""Makes a roofline of what there is: result files, kernel tables, V3's benchmark, plain numbers.

What a tool counted is taken as it is. Of a timed step the model's sizes give what it must compute
and must at least move.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workshop import records, results
from workshop.compare.rows import Row, build_rows, preferred
from workshop.errors import WorkshopError
from workshop.kernels.cases import OURS, TFLOPS
from workshop.kernels.rows import Row as KernelRow
from workshop.labs import KERNELS, LabRun
from workshop.profilers import load as profiles
from workshop.profilers import metrics, rocprof_compute
from workshop.profilers.categories import categorize
from workshop.profilers.metrics import duration
from workshop.profilers.names import display_name, printable
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import Run, RunResult, model_sizes
from workshop.roofline import ceilings, model
from workshop.roofline.model import MAIN_MEMORY, MEASURED, Ceiling, Point, Roofline
from workshop.run import chips, flops

STEP, FORWARD, BACKWARD, ADAMW = "step", "forward", "backward", "AdamW"
"""Categories of a training step's parts."""
PLAIN_NUMBERS = "numbers"
"""Category of points that were typed."""
MOST_WITH_PARTS = 4
"""The largest number of runs whose parts are separate points; of more, only the whole steps."""
FORWARD_BYTES, BACKWARD_BYTES = 4, 8
"""A parameter, at the least: the forward pass reads every weight, the backward pass reads it again
and writes its gradient, in fp32, as this workshop keeps them."""
ASSUMED = "bf16"
"""Precision of products where none is recorded."""
LEAST_SEEN = 0.05
"""Share of a profile's time: with fewer kernels counted, it is one without counters."""

RUN_BYTES = (
    "whole steps: operations are those of the products, from the sizes; bytes are a lower bound: "
    "weights, gradients and AdamW's state, "
    f"{FORWARD_BYTES} + {BACKWARD_BYTES} + {flops.ADAMW_BYTES_PER_PARAMETER} bytes a parameter. "
    "Activations are not in it, so the true intensity is lower: the picture has a line in place of "
    "a point, from the memory's roof to that intensity"
)
NEEDS_COUNTERS = (
    "bytes and operations of each kernel need counters: profile with run_ncu.sh on NVIDIA, "
    "run_rocprof_compute.sh or run_rocprofv3.sh on AMD"
)
_ROCPROF_RATES = {
    "FP32": "fp32 vector",
    "MFMAF32": "fp32",
    "MFMAXF32": "tf32",
    "MFMABF16": "bf16",
    "MFMAF16": "fp16",
}
"""Our names for what rocprof-compute calls its ceilings; those of other data types are left out."""


def load(
    paths: Sequence[Path],
    runs: Sequence[RunResult] = (),
    *,
    precision: str | None = None,
    config: str | None = None,
) -> Roofline:
    """The roofline of files and folders, each recognised by its content.

    Args:
        runs: those to show of the files, which are not read then.
        precision: of runs, only those of it; of kernels, that of the products where none is
            recorded.
        config: of runs, only those of this preset.

    Raises:
        WorkshopError: nothing in them can be read, or nothing in them has a place on a roofline.
    """
    roofline = Roofline(", ".join(printable(str(path)) for path in paths), None, [])
    roofline.notes.append(model.RULE)
    found, tables, kernels = list(runs), [], []
    for path in () if runs else paths:
        in_folder = path.is_dir() and not (path / RUN_FILE).is_file() and records.files_in(path)
        if in_folder or path.suffix == records.SUFFIX:
            its = records.load_folder(path, Run)
            found += [run for run in its if isinstance(run, RunResult)]
            kernels += [run for run in its if isinstance(run, LabRun) and run.lab == KERNELS]
        elif path.parent.name == ceilings.FOLDER:
            roofline.ceilings += ceilings.load(path).ceilings()
        elif path.name == "roofline.csv":
            roofline.ceilings += _rocprof_ceilings(path, rocprof_compute.read_roofline(path))
        else:
            tables.append((profiles.load(path), profiles.recorded_run(path)))
            if path.is_dir():
                roofline.ceilings += _rocprof_ceilings(path, rocprof_compute.ceilings(path))
    _add_runs(roofline, found, precision, config)
    for table, run in tables:
        _add_table(roofline, table, run, precision)
    if kernels and not found:
        _add_benchmark(roofline, [KernelRow((run,)) for run in kernels], paths[0])
    if not roofline.points:
        reason = "; ".join(roofline.notes[1:]) or "no timed run, no kernel with counters"
        raise WorkshopError(f"{roofline.title}: nothing for a roofline: {reason}")
    roofline.notes = list(dict.fromkeys(roofline.notes))
    return roofline


def from_numbers(intensity: float, gflops: float, label: str, precision: str) -> Roofline:
    """The roofline of a typed point: FLOP a byte, 10^9 FLOP a second.

    Raises:
        WorkshopError: one is not positive.
    """
    _check("--ai", intensity)
    _check("--gflops", gflops)
    label = printable(label)
    point = Point(label, PLAIN_NUMBERS, precision, gflops * 1e9, gflops * 1e9 / intensity)
    return Roofline(label, None, [point], notes=[model.RULE])


def given_ceilings(
    compute_tflops: float | None,
    bandwidth_gbs: float | None,
    precision: str,
    caches_gbs: Mapping[str, float | None] | None = None,
) -> list[Ceiling]:
    """Ceilings that were typed, in TFLOP/s and GB/s; those of caches by level.

    Raises:
        WorkshopError: one is not positive.
    """
    typed = (
        ("--peak-bw", bandwidth_gbs, 1e9, model.MEMORY, MAIN_MEMORY),
        ("--peak-compute", compute_tflops, 1e12, model.COMPUTE, precision),
        *(
            (f"--peak-{level.lower()}", gbs, 1e9, model.MEMORY, level)
            for level, gbs in (caches_gbs or {}).items()
        ),
    )
    return [
        Ceiling(kind, name, _check(flag, value) * unit, model.GIVEN, flag)
        for flag, value, unit, kind, name in typed
        if value is not None
    ]


def _check(flag: str, value: float) -> float:
    if not results.LEAST <= value <= results.MOST:
        raise WorkshopError(f"{flag} {value}: it must lie between {results.LEAST:g} and 1e15")
    return value


def _rocprof_ceilings(path: Path, found: list[rocprof_compute.Ceilings]) -> list[Ceiling]:
    """Those of the first GPU."""
    if not found:
        return []
    source = f"rocprof-compute's micro-benchmarks, GPU {found[0].device}: {printable(path.name)}"
    levels = found[0].bandwidths_gbs.items()
    rates = found[0].rates_gflops.items()
    limits = [(model.MEMORY, MAIN_MEMORY if name == "HBM" else name, c) for name, c in levels]
    limits += [(model.COMPUTE, _ROCPROF_RATES[n], c) for n, c in rates if n in _ROCPROF_RATES]
    return [Ceiling(kind, name, c * 1e9, MEASURED, source) for kind, name, c in limits]


# --- whole steps ---------------------------------------------------------------------------------


def _add_runs(
    roofline: Roofline, found: list[RunResult], precision: str | None, config: str | None
) -> None:
    runs = _of_one_device(found, roofline)
    wanted = [
        run
        for run in runs
        if precision in (None, run.precision) and config in (None, run.config_name)
    ]
    if runs and not wanted:
        have = ", ".join(sorted({f"{run.config_name} {run.precision}" for run in runs}))
        raise WorkshopError(
            f"no run is {config or 'of any size'} {precision or ''}: there is {have}"
        )
    rows = [row for row in build_rows(preferred(wanted)) if row.step_ms]
    if not rows:
        return
    several = len({(row.config, row.precision) for row in rows}) > 1
    sizes = dict.fromkeys(row.config for row in rows)
    precisions = dict.fromkeys(row.precision for row in rows)
    tokens = ";" if len(sizes) > 1 else f": {rows[0].batch_size} x {rows[0].seq_len} tokens,"
    roofline.title = printable(f"{', '.join(sizes)}{tokens} {', '.join(precisions)}")
    parts = len(rows) <= MOST_WITH_PARTS
    if not parts:
        roofline.notes.append(
            f"only whole steps of {len(rows)} versions and sizes are shown; with fewer (--config, "
            "--precision) the parts of a step are points too"
        )
    points: list[Point] = []
    for row in rows:
        label = f"{row.label} {row.config} {row.precision}" if several else row.label
        run = next(run for run in wanted if _is_of(run, row))
        _set_device(roofline, run.device)
        points += _run_points(label, row, run, parts=parts)
        roofline.warnings += row.plausibility
    roofline.points += sorted(points, key=lambda point: point.category != STEP)
    roofline.notes.append(RUN_BYTES)


def _of_one_device(runs: list[RunResult], roofline: Roofline) -> list[RunResult]:
    """Those of the device that the newest session ran on."""
    if not runs:
        return []
    newest = max(runs, key=lambda run: run.session).device.get("name")
    others = {str(run.device.get("name")) for run in runs} - {str(newest)}
    if others:
        roofline.notes.append(
            f"a roofline is of one device: {newest}, which ran last. Left out: "
            + ", ".join(sorted(map(printable, others)))
        )
    return [run for run in runs if run.device.get("name") == newest]


def _is_of(run: RunResult, row: Row) -> bool:
    names = ("session", "version", "precision", "batch_size", "seq_len")
    same = (getattr(run, name) == getattr(row, name) for name in names)
    return run.config_name == row.config and all(same)


def _run_points(label: str, row: Row, run: RunResult, *, parts: bool) -> Iterator[Point]:
    """The step, and its parts if wanted. AdamW does no products: it has bytes only."""
    sizes = model_sizes(run.config)
    work = flops.step_flops(sizes, row.batch_size, row.seq_len)
    parameters = flops.parameter_count(sizes)
    adamw_bytes = flops.ADAMW_BYTES_PER_PARAMETER
    step_bytes = FORWARD_BYTES + BACKWARD_BYTES + adamw_bytes
    rows = (
        (STEP, "", row.step_ms, work.total, step_bytes),
        (FORWARD, " forward", row.forward_ms, work.forward, FORWARD_BYTES),
        (BACKWARD, " backward", row.backward_ms, work.backward, BACKWARD_BYTES),
        (ADAMW, " AdamW", row.optimizer_ms, None, adamw_bytes),
    )
    for category, part, milliseconds, operations, bytes_each in rows if parts else rows[:1]:
        if milliseconds and row.step_ms:
            moved = float(parameters * bytes_each) if _fills_memory(parameters) else None
            yield model.point(
                printable(label + part),
                category,
                row.precision,
                milliseconds / 1e3,
                operations,
                moved,
                share=milliseconds / row.step_ms,
                at_least=moved is not None,
            )


def _fills_memory(parameters: int) -> bool:
    """Whether weights, gradients and moments are too large for any cache, which could keep them
    from one part of a step to the next."""
    return parameters * flops.ADAMW_STATE_BYTES_PER_PARAMETER > chips.LAST_LEVEL_CACHE_BYTES


# --- kernels -------------------------------------------------------------------------------------


def _add_table(
    roofline: Roofline, table: KernelTable, run: RunResult | None, precision: str | None
) -> None:
    _set_device(roofline, run.device if run else {"name": table.device}, table.path)
    if run:
        size = f"{run.config_name}: {run.batch_size} x {run.seq_len} tokens"
        roofline.title = printable(f"{run.version}, {size}, {run.precision}")
    roofline.notes += [printable(warning) for warning in table.warnings]
    counted = [
        kernel
        for kernel in table.kernels
        if kernel.total_ns > 0 and (kernel.bytes is not None or kernel.flops is not None)
    ]
    # A trace has the bytes of copies and memsets, without any counter.
    if sum(table.share(kernel) for kernel in counted) >= LEAST_SEEN:
        _add_kernels(roofline, table, counted, precision or (run.precision if run else None))
    else:
        roofline.notes.append(NEEDS_COUNTERS)
    if line := table.timeline:
        roofline.notes.append(
            f"the GPU was idle for {line.idle_ns / line.span_ns:.0%} of the profile's "
            f"{duration(line.span_ns)}; a profiler slows the host"
        )


def _set_device(roofline: Roofline, device: Mapping[str, object], path: Path | None = None) -> None:
    """Raises WorkshopError for another device than that of the inputs before."""
    name = printable(str(device.get("name") or "")) or None
    if name and roofline.device not in (None, name):
        raise WorkshopError(
            f"{path}: is of {name}, other inputs of {roofline.device}: a roofline is of one device"
        )
    roofline.device = roofline.device or name
    roofline.threads = roofline.threads or device.get("threads")


def _add_kernels(
    roofline: Roofline, table: KernelTable, counted: list[Kernel], precision: str | None
) -> None:
    """Without a precision, the products' is not recorded."""
    if precision is None:
        roofline.notes.append(
            f"the run's precision is not recorded: products are compared with {ASSUMED}; "
            "--precision says otherwise"
        )
    roofline.points += [
        model.point(
            display_name(kernel.name, len(kernel.name)),
            kernel.category,
            (precision or ASSUMED) if metrics.is_product(kernel) else "fp32",
            kernel.total_ns / 1e9,
            kernel.flops,
            kernel.bytes,
            share=table.share(kernel),
            calls=kernel.calls,
        )
        for kernel in counted
    ]
    without = len(table.kernels) - len(counted)
    if without:
        missed = 1 - sum(table.share(kernel) for kernel in counted)
        roofline.notes.append(
            f"{without} of {len(table.kernels)} kernels, {missed:.0%} of the time, have no "
            "counters or no time, and are left out"
        )


# --- V3's benchmark ------------------------------------------------------------------------------


def _add_benchmark(roofline: Roofline, rows: list[KernelRow], path: Path) -> None:
    """V3's own kernels: their bytes or their operations, whichever the benchmark counts."""
    _set_device(roofline, rows[0].first.device, path)
    ours = [row for row in rows if row.implementation == OURS]
    roofline.title = f"V3's kernels, {', '.join(dict.fromkeys(row.precision for row in ours))}"
    points = [point for row in ours for point in _benchmark_points(row)]
    roofline.points += sorted(points, key=lambda point: -(point.seconds or 0.0))
    roofline.notes.append(
        "the benchmark counts the bytes of element-wise kernels and the operations of products: "
        "the picture has lines for products, whose bytes are not known, and no element-wise kernels"
    )


def _benchmark_points(row: KernelRow) -> Iterator[Point]:
    of_products = row.unit == TFLOPS
    category = categorize(row.op)
    if of_products and category != "attention":
        category = "GEMM"
    for phase, amount in row.amounts.items():
        if milliseconds := row.median_ms(phase):
            yield model.point(
                printable(f"{row.op} {row.size}, {phase}"),
                category,
                row.precision if of_products else "fp32",
                milliseconds / 1e3,
                amount if of_products else None,
                None if of_products else amount,
                calls=1,
            )
