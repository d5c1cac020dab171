"""Times single PyTorch operators and holds each against what the machine can do.

A row is one operator at one size. First its result is compared with the same operator in fp64; a
wrong row is a FAIL and gets no time. Then it is timed, and its rate is shown with two limits: what
a large copy or product reached on this device in this run, and the data sheet.

Bytes are counted from the shapes, each tensor once: what is read and what is written (tensor_ops.py
has the details). A small tensor lives in the cache, where it seems faster than memory can be. So
before each call, outside of the clock, a buffer of twice the last-level cache is read: the inputs
then come from memory. The result may still be in the cache when the clock stops. So a row is called
IMPLAUSIBLE only for bytes that must have crossed: all that is read, and of all bytes what the cache
can't hold.

    python torch_tensor_ops_bench.py --op add --input1-dim 64-1024-1024
    python torch_tensor_ops_bench.py --run-predefined --dtype bf16
"""

import argparse
import copy
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import tensor_ops  # noqa: E402
import torch  # noqa: E402
from tensor_ops import COPY, DEFAULT_DIM, KINDS, MATRIX, MODEL_OPS, OPS, PREDEFINED, Amounts, Case  # noqa: E402

from workshop import errors, records, results  # noqa: E402
from workshop.arguments import count, parse  # noqa: E402
from workshop.compare import tables  # noqa: E402
from workshop.compare.tables import Line, Table  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.gate import plausibility  # noqa: E402
from workshop.labs import LabRun  # noqa: E402
from workshop.records import Comparison  # noqa: E402
from workshop.results import FAIL, PASS, SKIPPED, Parity, Status  # noqa: E402
from workshop.roofline import ceilings, model  # noqa: E402
from workshop.roofline.model import COMPUTE, DATA_SHEET, MEASURED, MEMORY, Point, Roofline  # noqa: E402
from workshop.run import hardware, lab_record, timing  # noqa: E402
from workshop.run.precision import Precision, get_precision, kept_matmul_mode  # noqa: E402
from workshop.run.timing import StepClock  # noqa: E402

FOLDER = Path(__file__).resolve().parent
DEFAULT_FOLDER = results.DEFAULT_FOLDER / "inference_benchmark" / "ops"

NO_MEMORY = "no memory"
CACHED = f"{PASS}, cached"
"""Correct and timed, but so small that its result may stay in the cache."""
IMPLAUSIBLE = "IMPLAUSIBLE"
STATUS: dict[str, Status] = {FAIL: "gate failed", NO_MEMORY: "skipped", SKIPPED: "skipped"}
"""The status of a record, where it is not complete."""

# --- a row ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What holds for all rows."""

    device: torch.device
    precision: Precision
    cache: int
    """Bytes of the last-level cache."""
    iterations: int
    warm_ups: int
    append_dtype: bool
    traces: Path | None
    """The folder for traces of torch.profiler; None: nothing is profiled."""

    @property
    def dtype(self) -> torch.dtype:
        return self.precision.autocast_dtype or torch.float32


@dataclass
class Row:
    """An operator at one size, and what was measured of it."""

    op: str
    shapes: str
    dtype: str
    inplace: bool
    kind: str
    """MEMORY or COMPUTE: whether its rate is in bytes or operations."""
    category: str
    """The roofline's."""
    amounts: Amounts
    allowed: float
    """Roundings."""
    error: float | None = None
    """Roundings."""
    status: str = PASS
    note: str = ""
    samples_ms: list[float] = field(default_factory=list)
    trace: str | None = None

    @property
    def label(self) -> str:
        return f"{self.op} {self.shapes}"

    @property
    def seconds(self) -> float | None:
        """The median of a call."""
        return timing.median(self.samples_ms) / 1e3 if self.samples_ms else None

    @property
    def rate(self) -> float | None:
        """Bytes or operations a second."""
        amount = self.amounts.moved if self.kind == MEMORY else self.amounts.operations
        return amount / self.seconds if self.seconds else None

    def point(self, moved: int) -> Point:
        """On the roofline, with so many bytes."""
        seconds = self.seconds or math.inf
        amounts = self.amounts.operations, moved
        return model.point(self.label, self.category, self.dtype, seconds, *amounts, calls=1)


def new_row(case: Case, setting: Setting) -> Row:
    suffix = "(sparse)" * case.sparse + f"({setting.precision.name})" * setting.append_dtype
    categories = {MATRIX: "GEMM", COPY: "copy"}
    return Row(
        op=case.method + suffix,
        shapes=case.shapes,
        dtype=setting.precision.name,
        inplace=case.inplace,
        kind=COMPUTE if case.is_product else MEMORY,
        category="other" if case.sparse else categories.get(case.op.kind, "elementwise"),
        amounts=tensor_ops.count_amounts(case, setting.dtype),
        allowed=tensor_ops.allowed_roundings(case, setting.dtype, setting.precision.unit_roundoff),
    )


def measure_row(case: Case, setting: Setting) -> Row:
    """Checks, then times. What this device has no memory or no kernel for gets a note."""
    row = new_row(case, setting)
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    needed = needed_bytes(case, row.amounts, setting)
    free = hardware.free_memory_bytes(setting.device)
    if free is not None and needed > free:
        row.status, row.note = NO_MEMORY, _no_memory(needed, free)
        return row
    try:
        _fill(row, case, setting)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            row.status, row.note = NO_MEMORY, _no_memory(needed, free)
        elif "not implemented for" in str(error):
            row.status, row.note = SKIPPED, str(error).splitlines()[0]
        else:
            raise
    return row


def needed_bytes(case: Case, amounts: Amounts, setting: Setting) -> int:
    """Of inputs, result, what is restored, the fp64 check, and the buffer for the cache. (About:
    how much a check takes depends on PyTorch.)"""
    drawn = sum(math.prod(dim) for dim in case.dims)
    restored = math.prod(case.dims[0]) if case.inplace else 0
    tensors = (drawn + restored) * setting.dtype.itemsize + amounts.written
    return tensors + 2 * 8 * tensor_ops.checked_elements(case) + 2 * setting.cache


def _no_memory(needed: int, free: int | None) -> str:
    available = "" if free is None else f", {free / 1e9:,.1f} GB are free"
    return f"needs about {needed / 1e9:,.1f} GB{available}; choose smaller dimensions"


def _fill(row: Row, case: Case, setting: Setting) -> None:
    inputs = tensor_ops.draw(case, setting.device, setting.dtype)
    original = inputs[0].clone() if case.inplace else inputs[0]
    call = partial(tensor_ops.find_function(case), *inputs)
    roundoff = setting.precision.unit_roundoff
    row.error = tensor_ops.error_roundings(case, [original, *inputs[1:]], call(), roundoff)
    if not row.error <= row.allowed:
        row.status = FAIL
        row.note = f"off by {row.error:,.3g} roundings of {row.dtype}, allowed {row.allowed:,.3g}"
        return
    buffer = torch.ones(max(1, 2 * setting.cache // 4), device=setting.device)

    def prepare() -> None:
        if case.inplace:
            inputs[0].copy_(original)
        buffer.sum()

    row.samples_ms = time_calls(call, prepare, setting)
    if row.amounts.moved <= setting.cache:
        row.status = CACHED
    if setting.traces:
        row.trace = write_trace(call, setting, row, setting.traces)


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


def write_trace(call: Callable[[], object], setting: Setting, row: Row, folder: Path) -> str:
    """A trace of calls that are not timed, from a warm cache; its path."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    activities = [ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(setting.iterations):
            call()
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
    words = re.sub(r"\W+", "-", f"trace {row.op} {row.shapes} {row.dtype}")
    path = folder / f"{words}.json"
    with results.atomic_path(path) as temporary:
        profiler.export_chrome_trace(str(temporary))
    return str(path)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache; where the system does not say, more than most have."""
    unknown = int(plausibility.LAST_LEVEL_CACHE_BYTES)
    if device.type == "cuda":  # ROCm leaves out the cache between L2 and memory
        return (
            unknown if torch.version.hip else torch.cuda.get_device_properties(device).L2_cache_size
        )
    listed = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    size = listed.read_text().strip() if listed.is_file() else ""
    return int(size[:-1]) * 1024 if re.fullmatch(r"\d+K", size) else unknown


# --- showing -------------------------------------------------------------------------------------

HEADER = ("op", "shapes", "ms", "rate", "of ceiling", "of sheet", "roof", "error (allowed)",
          "verdict")  # fmt: skip
STYLES = {FAIL: "red", IMPLAUSIBLE: "red", NO_MEMORY: "yellow", SKIPPED: "dim"}


@dataclass(frozen=True)
class Report:
    """All rows under the ceilings of this run."""

    rows: list[Row]
    measured: LabRun
    """The record that each row begins as."""
    cache: int

    @property
    def title(self) -> str:
        return f"PyTorch operators, {self.rows[0].dtype}"

    @cached_property
    def limits(self) -> Roofline:
        """Without points."""
        name = str(self.measured.device["name"])
        on_gpu = self.measured.device["type"] == "cuda"
        listed = ceilings.from_data_sheet(name) if on_gpu else []
        return Roofline(self.title, name, [], listed + ceilings.of_run(self.measured).ceilings())

    @cached_property
    def roofline(self) -> Roofline:
        """Of the rows that have a time."""
        points = [self.point(row) for row in self.rows if row.samples_ms]
        return dataclasses.replace(self.limits, points=points)

    def point(self, row: Row) -> Point:
        """With all bytes; where memory can't move those in the time, with those that it must have
        moved."""
        point = row.point(row.amounts.moved)
        cached = model.exceeded(self.limits, point)
        return row.point(row.amounts.must_cross(self.cache)) if cached else point

    def share(self, row: Row, origin: str) -> float | None:
        """Of the copy's or product's rate (MEASURED), or of the DATA_SHEET's."""
        limit = self.limits.limit(self.point(row), row.kind, (origin,))
        return row.rate / limit.rate if row.rate and limit else None

    def status(self, row: Row) -> str:
        too_fast = row.samples_ms and model.exceeded(self.limits, self.point(row))
        return IMPLAUSIBLE if too_fast else row.status

    def cells(self, row: Row) -> list[str]:
        error = "-" if row.error is None else f"{row.error:,.2g} ({row.allowed:,.0f})"
        if row.seconds is None or row.rate is None:
            return [row.op, row.shapes, "-", "-", "-", "-", "-", error, self.status(row)]
        half = timing.spread(row.samples_ms) / 2
        shares = [self.share(row, origin) for origin in (MEASURED, DATA_SHEET)]
        return [
            row.op,
            row.shapes,
            f"{row.seconds * 1e3:,.4g} ±{half:.{1 if half < 0.1 else 0}%}",
            model.rate_text(row.rate, row.kind),
            *("-" if share is None else f"{share:.1%}" for share in shares),
            roof.kind if (roof := self.limits.roof(self.point(row))) else "",
            error,
            self.status(row),
        ]

    def notes(self) -> list[str]:
        """Each once, with its rows; then the ceilings."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.note:
                found.setdefault(row.note, []).append(row.label)
        lines = [f"{'; '.join(labels)}: {note}" for note, labels in found.items()]
        if any(row.status == CACHED for row in self.rows):
            lines.append(f"{CACHED}: it fits in the cache, where its result may stay")
        measured = ", ".join(map(model.ceiling_text, ceilings.of_run(self.measured).ceilings()))
        return [
            *lines,
            *model.flags(self.roofline),
            f"ceilings of this run (a large copy, a large product): {measured}",
            f"before each call the cache of {self.cache / 1e6:,.0f} MB is emptied",
        ]

    def table(self) -> Table:
        lines = [Line(self.cells(row), STYLES.get(self.status(row))) for row in self.rows]
        title = f"{self.title}, {self.measured.device['name']}"
        return Table(title, HEADER, lines, self.notes(), left=(0, 1), wraps=(1,))

    def as_markdown(self) -> str:
        return tables.markdown([self.table()], heading="#") + "\n"

    def record(self, row: Row) -> LabRun:
        """The row as a run of a lab, whose step is a call."""
        shown, moves = self.status(row), row.kind == MEMORY
        run = dataclasses.replace(
            copy.deepcopy(self.measured),
            status=STATUS.get(shown, "complete"),
            error=row.note if shown in (NO_MEMORY, SKIPPED) else None,
            step_ms=row.samples_ms,
            subject=f"{len(self.rows)} operators",
            variant=row.label,
            bytes_per_step=row.amounts.moved if moves else None,
            flops_per_step=None if moves else row.amounts.operations,
            metrics=dataclasses.asdict(row.amounts)
            | {"category": row.category, "cached": row.status == CACHED, "trace": row.trace},
        )
        if row.error is not None:
            (error,) = results.finite([row.error])
            failures = [row.note] if row.status == FAIL else []
            run.gate = Parity(
                "fail" if failures else "pass",
                failures,
                reference="the same operator in float64",
                measures={"result": {"error": error, "allowed": row.allowed}},
            )
        if shown == IMPLAUSIBLE:
            own = dataclasses.replace(self.limits, points=[self.point(row)])
            run.plausibility = model.flags(own)
        return run

    def show(self) -> None:
        if importlib.util.find_spec("rich") is None:
            print(self.as_markdown())
        else:
            tables.print_tables([self.table()])

    def write(self, folder: Path) -> list[Path]:
        """The result file, a table, and a picture where there is matplotlib and a time."""
        comparison = Comparison.of(self.record(self.rows[0]))
        comparison.runs += map(self.record, self.rows)
        path = records.path_in(folder, comparison.session)
        comparison.write(path)
        contents: dict[Path, results.Content] = {folder / "ops.md": self.as_markdown()}
        picture = folder / "roofline.png"
        if importlib.util.find_spec("matplotlib") and self.roofline.points:
            from workshop.roofline import figures

            labels = len(self.roofline.points)
            contents[picture] = lambda path: figures.draw(self.roofline, path, labels=labels)
        results.write_together(contents, gone=[picture])
        return [path, *contents]


# --- the command line ----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"operators: {', '.join(OPS)}\n\n"
        "Exit status: 0 done, 1 a row is wrong or nothing fits into memory, 2 wrong usage,\n"
        "130 interrupted (what was completed is saved and shown).",
    )
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default %(default)s")
    add("--input1-dim", "--input-dim", default=DEFAULT_DIM, metavar="DIM",
        help="sizes with - between them (default %(default)s)")  # fmt: skip
    add("--input2-dim", metavar="DIM",
        help="of the second input (default: as the first); sparse: how many rows")  # fmt: skip
    add("--op", default="add", metavar="NAME", help="NAME_ is in place (default %(default)s)")
    add("--op-type", choices=KINDS,
        help="the operator's own; only add has a second one, sparse")  # fmt: skip
    add("--inplace", action="store_true", help="the in-place form of those that have one")
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--run-predefined", action="store_true",
                      help=f"these {len(PREDEFINED)}: {', '.join(PREDEFINED)}")  # fmt: skip
    many.add_argument("--run-model-ops", action="store_true",
                      help=f"{len(MODEL_OPS)} operators and sizes of BERT and DLRM")  # fmt: skip
    add("--num-iters", type=count, default=20, metavar="N", help="timed calls (default 20)")
    add("--num-warmup-iters", type=count, default=5, metavar="N", help="default 5")
    add("--enable-profiling", action="store_true",
        help="then run the calls again under torch.profiler, and write a trace")  # fmt: skip
    add("--append-dtype", action="store_true", help="to the operator's name, as in add(fp32)")
    add("--output-dir", type=Path, default=DEFAULT_FOLDER, metavar="DIR",
        help="for the result file, ops.md, roofline.png and traces (default: results/"
        "inference_benchmark/ops of this checkout)")  # fmt: skip
    return parser


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Raises WorkshopError for what does not fit together."""
    dim1, dim2 = arguments.input1_dim, arguments.input2_dim
    if arguments.run_model_ops:
        if arguments.inplace:
            raise WorkshopError("--inplace: --run-model-ops has both forms; leave it out")
        return [tensor_ops.make_case(*model_op) for model_op in MODEL_OPS]
    if arguments.run_predefined:
        has_form = [arguments.inplace and tensor_ops.has_inplace(name) for name in PREDEFINED]
        return [
            tensor_ops.make_case(name, None, dim1, dim2, inplace=inplace)
            for name, inplace in zip(PREDEFINED, has_form, strict=True)
        ]
    return [
        tensor_ops.make_case(arguments.op, arguments.op_type, dim1, dim2, inplace=arguments.inplace)
    ]


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _benchmark(arguments),
        interrupted="interrupted before a row was complete: nothing saved",
    )


def _benchmark(arguments: argparse.Namespace) -> int:
    cases = make_cases(arguments)
    device = hardware.get_device(arguments.device)
    precision = get_precision(arguments.dtype, device)
    folder = results.prepare_folder(arguments.output_dir)
    setting = Setting(
        device,
        precision,
        cache_bytes(device),
        arguments.num_iters,
        arguments.num_warmup_iters,
        arguments.append_dtype,
        folder if arguments.enable_profiling else None,
    )
    rows: list[Row] = []
    interrupted = False
    with kept_matmul_mode():
        precision.set_matmul_mode()
        measured = measure_ceilings(setting)
        try:
            for row in measure_rows(cases, setting):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
            if not rows:
                raise
    report = Report(rows, measured, setting.cache)
    earlier = (folder / "ops.md").exists()
    written = report.write(folder)
    report.show()
    print(f"Written: {', '.join(map(str, written))}")
    if earlier:
        print("Table and picture replace those of an earlier run; --output-dir DIR keeps both")
    traces = [row.trace for row in rows if row.trace]
    if traces:
        more = f"  ({len(traces) - 1} more beside it)" if len(traces) > 1 else ""
        print(f"Trace: python -m workshop.profilers show {traces[0]}{more}")
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    return exit_code(rows)


def exit_code(rows: list[Row]) -> int:
    wrong = any(row.status == FAIL for row in rows)
    no_room = all(row.status == NO_MEMORY for row in rows)
    return errors.ANSWER_IS_NO if wrong or no_room else errors.DONE


def measure_ceilings(setting: Setting) -> LabRun:
    """A record, with a large copy and product on this device at this precision."""
    return lab_record.begin(
        *(setting.device, setting.precision.name, "", ("--output-dir",)),
        lab=FOLDER.name,
        subject="",
        variant="",
        unit="calls",
        units_per_step=1,
        options={"precision": setting.precision.name, "cache_bytes": setting.cache},
        ceiling_gbs=hardware.measure_copy_gbs(setting.device),
        ceiling_tflops=hardware.measure_matmul_tflops(
            setting.device, setting.precision.autocast_dtype
        ),
    )


def measure_rows(cases: list[Case], setting: Setting) -> Iterator[Row]:
    """One after the other, with progress on a terminal."""
    if importlib.util.find_spec("rich") is None:
        yield from (measure_row(case, setting) for case in cases)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        for case in progress.track(cases, task_id=task):
            progress.update(task, description=f"{case.method} {case.shapes}")
            yield measure_row(case, setting)


if __name__ == "__main__":
    sys.exit(main())
