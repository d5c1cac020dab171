"""Times single PyTorch operators and holds each against what the machine can do.

A row is one operator at one size: compared with the same operator in fp64, then timed, and held
against what a large copy or product reached in this run, and the data sheet. A wrong row gets no
time.

Before each call, outside of the clock, a buffer of twice the last-level cache is read, so that the
inputs come from memory. The result may still be in the cache when the clock stops: a row is called
IMPLAUSIBLE only for bytes that must have crossed. tensor_ops.py counts bytes and operations.

    python torch_tensor_ops_bench.py --op add --input1-dim 64-1024-1024
    python torch_tensor_ops_bench.py --run-predefined --dtype bf16
"""

import argparse
import copy
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout needs no installation
if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import tensor_ops
import torch
from tensor_ops import COPY, DEFAULT_DIM, KINDS, MATRIX, MODEL_OPS, OPS, PREDEFINED, Amounts, Case

from labs import shared
from workshop import errors, labs, records, results, tables
from workshop.arguments import count, parse
from workshop.errors import WorkshopError
from workshop.judge import lab_record
from workshop.labs import LabRow, LabRun
from workshop.results import FAIL, PASS, SKIPPED, Parity
from workshop.roofline import ceilings, model
from workshop.roofline.model import COMPUTE, DATA_SHEET, MEMORY, Point, Roofline
from workshop.run import hardware, timing, trainer
from workshop.run.precision import Precision, get_precision, kept_matmul_mode
from workshop.run.timing import StepClock
from workshop.tables import Line, Table

FOLDER = Path(__file__).resolve().parent
DEFAULT_FOLDER = results.DEFAULT_FOLDER / "inference_benchmark" / "ops"

CACHED = f"{PASS}, cached"
"""Correct and timed, but so small that its result may stay in the cache."""
IMPLAUSIBLE = "IMPLAUSIBLE"

# --- a row ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The settings of all rows."""

    device: torch.device
    precision: Precision
    cache: int
    """Bytes of the last-level cache."""
    iterations: int
    warm_ups: int
    append_dtype: bool
    traces: Path | None
    """The folder for traces of torch.profiler; None: nothing is profiled."""


def measure_ceilings(setting: Setting) -> LabRun:
    """A record, with a large copy and product on this device at this precision."""
    about = setting.device, setting.precision, FOLDER.name
    return lab_record.of_calls(*about, cache_bytes=setting.cache)


def new_run(case: Case, setting: Setting, blank: LabRun) -> LabRun:
    """The record of an operator at one size, whose step is a call."""
    suffix = "(sparse)" * case.sparse + f"({setting.precision.name})" * setting.append_dtype
    categories = {MATRIX: "GEMM", COPY: "copy"}
    category = "other" if case.sparse else categories.get(case.op.kind, "elementwise")
    amounts = tensor_ops.count_amounts(case, setting.precision.dtype)
    return dataclasses.replace(
        copy.deepcopy(blank),
        variant=f"{case.method}{suffix} {case.shapes}",
        bytes_per_step=None if case.is_product else amounts.moved,
        flops_per_step=amounts.operations if case.is_product else None,
        metrics={**dataclasses.asdict(amounts), "category": category},
    )


def measure_row(case: Case, setting: Setting, blank: LabRun) -> LabRun:
    """Checks, then times. What this device has no memory or no kernel for says so.

    Args:
        blank: the record that it begins as.
    """
    run = new_run(case, setting, blank)
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    needed = needed_bytes(case, amounts_of(run).written, setting)
    free = hardware.free_memory_bytes(setting.device)
    try:
        if free is not None and needed > free:
            raise MemoryError
        _fill(run, case, setting)
    except (RuntimeError, MemoryError) as error:
        run.status = "skipped"
        if isinstance(error, MemoryError) or trainer.memory_asked_for(error) is not None:
            there = "" if free is None else f", {free / 1e9:,.1f} GB are free"
            run.error = f"needs about {needed / 1e9:,.1f} GB{there}; choose smaller dimensions"
        elif "not implemented for" in str(error):
            run.error = str(error).splitlines()[0]
        else:
            raise
    return run


def needed_bytes(case: Case, written: int, setting: Setting) -> int:
    """Bytes of inputs, result, what is restored, the fp64 check, and the buffer for the cache.
    (About: how much a check takes depends on PyTorch.)"""
    drawn = sum(math.prod(dim) for dim in case.dims)
    restored = math.prod(case.dims[0]) if case.inplace else 0
    tensors = (drawn + restored) * setting.precision.dtype.itemsize + written
    checked = drawn if case.in_whole else min(drawn, 3 * tensor_ops.PART)
    checked = 3 * math.prod(case.dims[1]) if case.sparse else checked
    return tensors + 2 * 8 * checked + 2 * setting.cache


def _fill(run: LabRun, case: Case, setting: Setting) -> None:
    precision = setting.precision
    inputs = tensor_ops.draw(case, setting.device, precision.dtype)
    original = inputs[0].clone() if case.inplace else inputs[0]
    call = partial(tensor_ops.find_function(case), *inputs)
    allowed = tensor_ops.allowed_roundings(case, precision.dtype, precision.unit_roundoff)
    given = [original, *inputs[1:]]
    error = tensor_ops.error_roundings(case, given, call(), precision.unit_roundoff)
    (finite,) = results.finite([error])
    run.gate = Parity("pass", reference="the same operator in float64")
    run.gate.measures["result"] = {"error": finite, "allowed": allowed}
    if not error <= allowed:
        run.status, run.gate.status = "gate failed", "fail"
        far = f"off by {error:,.3g} roundings of {precision.name}, allowed {allowed:,.3g}"
        run.gate.failures.append(far)
        return
    buffer = torch.ones(max(1, 2 * setting.cache // 4), device=setting.device)

    def prepare() -> None:
        if case.inplace:
            inputs[0].copy_(original)
        buffer.sum()

    run.step_ms = time_calls(call, prepare, setting)
    run.metrics["cached"] = amounts_of(run).moved <= setting.cache
    run.plausibility = model.flags(roofline(run))
    if setting.traces:
        run.metrics["trace"] = write_trace(call, setting, run.variant, setting.traces)


def time_calls(
    call: Callable[[], object], prepare: Callable[[], None], setting: Setting
) -> list[float]:
    """ms of each call after the warm-ups. `prepare` runs before each, outside of the clock; it
    also keeps a GPU busy until the call has been launched."""
    clock = StepClock(setting.device)
    for _ in range(setting.warm_ups + setting.iterations):
        prepare()
        clock.mark()
        result = call()
        clock.mark()
        del result  # not within the clock
    return clock.durations_ms()[::2][setting.warm_ups :]


def write_trace(call: Callable[[], object], setting: Setting, name: str, folder: Path) -> str:
    """A trace of calls that are not timed, from a warm cache; its path."""
    from torch.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    with profile() as profiler:
        for _ in range(setting.iterations):
            call()
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
    words = re.sub(r"\W+", "-", f"trace {name} {setting.precision.name}")
    path = folder / f"{words}.json"
    with results.atomic_path(path) as temporary:
        profiler.export_chrome_trace(str(temporary))
    return str(path)


# --- limits --------------------------------------------------------------------------------------


def amounts_of(run: LabRun) -> Amounts:
    return Amounts(*(int(run.metrics[field.name] or 0) for field in dataclasses.fields(Amounts)))


def limits(run: LabRun) -> Roofline:
    """A roofline without points."""
    name, on_gpu = str(run.device["name"]), run.device["type"] == "cuda"
    listed = ceilings.from_data_sheet(name) if on_gpu else []
    title = f"PyTorch operators, {run.options['precision']}"
    return Roofline(title, name, [], listed + ceilings.of_run(run).ceilings())


def roofline(run: LabRun) -> Roofline:
    """A timed run's point under the ceilings."""
    return dataclasses.replace(limits(run), points=[point(run)])


def point(run: LabRun) -> Point:
    """A place with all bytes; where memory can't move those in the time, with those that it must
    have moved."""
    amounts = amounts_of(run)
    about = run.variant, str(run.metrics["category"]), str(run.options["precision"])
    timed = *about, timing.median(run.step_ms) / 1e3, amounts.operations
    place = model.point(*timed, amounts.moved, calls=1)
    if model.exceeded(limits(run), place):
        crossed = amounts.must_cross(int(run.options["cache_bytes"] or 0))
        place = model.point(*timed, crossed, calls=1)
    return place


# --- showing -------------------------------------------------------------------------------------

HEADER = ("operator", "ms", "rate", "of ceiling", "of sheet", "roof", "error (allowed)", "verdict")
STYLES = {FAIL: "red", IMPLAUSIBLE: "red", SKIPPED: "dim"}


def verdict(run: LabRun) -> str:
    if run.refused or run.error:
        return FAIL if run.refused else SKIPPED
    return IMPLAUSIBLE if run.plausibility else CACHED if run.metrics["cached"] else PASS


def cells(run: LabRun) -> list[str]:
    worst = run.gate.closest()
    last = [f"{worst[1]:,.2g} ({worst[2]:,.0f})" if worst else "-", verdict(run)]
    if not run.step_ms:
        return [run.variant, *"-----", *last]
    half, ms = timing.spread(run.step_ms) / 2, timing.median(run.step_ms)
    kind = MEMORY if run.bytes_per_step else COMPUTE
    rate = (run.bytes_per_step or run.flops_per_step or 0) / ms * 1e3
    place, lines = point(run), limits(run)
    sheet, roof = lines.limit(place, kind, (DATA_SHEET,)), lines.roof(place)
    return [
        run.variant,
        f"{ms:,.4g} ±{half:.{1 if half < 0.1 else 0}%}",
        model.rate_text(rate, kind),
        tables.number(LabRow((run,)).ceiling_share, ".1%"),
        tables.number(rate / sheet.rate if sheet else None, ".1%"),
        roof.kind if roof else "",
        *last,
    ]


def table(runs: Sequence[LabRun]) -> Table:
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.refused or run.error:
            found.setdefault(LabRow((run,)).note, []).append(run.variant)
    notes = [f"{'; '.join(labels)}: {note}" for note, labels in found.items()]
    if any(verdict(run) == CACHED for run in runs):
        notes.append(f"{CACHED}: it fits in the cache, where its result may stay")
    notes += [sentence for run in runs for sentence in run.plausibility]
    measured = ", ".join(map(model.ceiling_text, ceilings.of_run(runs[0]).ceilings()))
    notes.append(f"ceilings of this run (a large copy, a large product): {measured}")
    cache = int(runs[0].options["cache_bytes"] or 0)
    notes.append(f"before each call the cache of {cache / 1e6:,.0f} MB is emptied")
    lines = [Line(cells(run), STYLES.get(verdict(run))) for run in runs]
    title = f"{limits(runs[0]).title}, {runs[0].device['name']}"
    return Table(title, HEADER, lines, notes, wraps=(0,))


def show(runs: list[LabRun], folder: Path) -> None:
    """Prints the table, and writes it with the result file."""
    for run in runs:
        run.subject = f"{len(runs)} operators"
    written = folder / "ops.md"
    earlier, text = written.exists(), tables.markdown([table(runs)], heading="#") + "\n"
    (path,) = {records.add(run, folder) for run in runs}
    results.write_text(written, text)
    tables.print_tables([table(runs)])
    print(f"Written: {path}, {written}")
    if earlier:
        print("The table replaces that of an earlier run; --output-dir DIR keeps both")
    traces = [run.metrics["trace"] for run in runs if "trace" in run.metrics]
    if traces:
        more = f"  ({len(traces) - 1} more beside it)" if len(traces) > 1 else ""
        print(f"Trace: python -m workshop.profilers show {traces[0]}{more}")


# --- the command line ----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    more = f"operators: {', '.join(OPS)}\n\n"
    parser = shared.new_parser(__doc__, "a row is wrong or none could be measured", more)
    add = parser.add_argument
    switch, number = partial(add, action="store_true"), partial(add, type=count, metavar="N")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default %(default)s")
    add("--input1-dim", "--input-dim", default=DEFAULT_DIM, metavar="DIM",
        help="sizes with - between them (default %(default)s)")  # fmt: skip
    add("--input2-dim", metavar="DIM",
        help="of the second input (default: as the first); sparse: how many rows")  # fmt: skip
    add("--op", default="add", metavar="NAME", help="NAME_ is in place (default %(default)s)")
    add("--op-type", choices=KINDS,
        help="the operator's own; only add has a second one, sparse")  # fmt: skip
    switch("--inplace", help="the in-place form of those that have one")
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--run-predefined", action="store_true",
                      help=f"these {len(PREDEFINED)}: {', '.join(PREDEFINED)}")  # fmt: skip
    many.add_argument("--run-model-ops", action="store_true",
                      help=f"{len(MODEL_OPS)} operators and sizes of BERT and DLRM")  # fmt: skip
    number("--num-iters", default=20, help="timed calls (default 20)")
    number("--num-warmup-iters", default=5, help="default 5")
    switch("--enable-profiling",
           help="then run the calls again under torch.profiler, and write a trace")  # fmt: skip
    switch("--append-dtype", help="to the operator's name, as in add(fp32)")
    add("--output-dir", type=Path, default=DEFAULT_FOLDER, metavar="DIR",
        help="for the result file, ops.md and traces (default: results/"
        "inference_benchmark/ops of this checkout)")  # fmt: skip
    return parser


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Raises WorkshopError for what does not fit together."""
    dims, inplace = (arguments.input1_dim, arguments.input2_dim), arguments.inplace
    if arguments.run_model_ops:
        if inplace:
            raise WorkshopError("--inplace: --run-model-ops has both forms; leave it out")
        return [tensor_ops.make_case(*model_op) for model_op in MODEL_OPS]
    if arguments.run_predefined:
        forms = {name: inplace and tensor_ops.has_inplace(name) for name in PREDEFINED}
        return [tensor_ops.make_case(name, None, *dims, inplace=form)
                for name, form in forms.items()]  # fmt: skip
    return [tensor_ops.make_case(arguments.op, arguments.op_type, *dims, inplace=inplace)]


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _benchmark(arguments),
        interrupted="interrupted before a row was complete: nothing saved",
    )


def _benchmark(arguments: argparse.Namespace) -> int:
    errors.require("rich", "matplotlib")
    cases = make_cases(arguments)
    device = hardware.get_device(arguments.device)
    folder = results.prepare_folder(arguments.output_dir)
    setting = Setting(
        device,
        get_precision(arguments.dtype, device),
        hardware.cache_bytes(device),
        arguments.num_iters,
        arguments.num_warmup_iters,
        arguments.append_dtype,
        folder if arguments.enable_profiling else None,
    )
    runs: list[LabRun] = []
    interrupted = False
    with kept_matmul_mode():
        setting.precision.set_matmul_mode()
        blank = measure_ceilings(setting)
        try:
            for case in tables.tracked(cases, "operators"):
                runs.append(measure_row(case, setting, blank))
        except KeyboardInterrupt:
            if not runs:
                raise
            interrupted = True
    show(runs, folder)
    status = shared.status_of(labs.build_rows(runs), interrupted)
    return status or (errors.ANSWER_IS_NO if all(run.error for run in runs) else errors.DONE)


if __name__ == "__main__":
    sys.exit(main())
