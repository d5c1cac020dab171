"""Times V3's kernels and other implementations, forward and backward; correct ones only.

Rivals are each kernel's plain version, PyTorch's own operation, torch.compile of the
plain version, and Liger-Kernel where it is installed. First all results and gradients are compared
with the plain version in fp64; one that is wrong gets a red row and no times. Rates are shown with
what a large copy or product reaches on the same device in the same run. A column has the device's
time for a forward and backward pass, and the host's to launch it from Python: a caller without a
graph waits for the longer one.

Without a GPU the kernels run in Triton's interpreter, on small sizes, and nothing is timed.

    python -m workshop.kernels.benchmark --op rms_norm swiglu --quick
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch

from workshop import errors, results, versions
from workshop.arguments import parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.kernels.cases import (
    BOTH,
    GBS,
    OPS,
    OURS,
    TFLOPS,
    draw_cases,
    kernels,
    make_cases,
)
from workshop.kernels.measure import (
    Row,
    Setting,
    measure_case,
    time_contenders,
)
from workshop.results import FAIL, PASS, SKIPPED
from workshop.run import chips, hardware, interpreter, timing
from workshop.run.precision import get_precision

SCHEMA_VERSION = 1
DEFAULT_FOLDER = results.DEFAULT_FOLDER / "kernels"
NOTHING_TIMED = "interpreted: correctness only, nothing is timed"


@dataclass(frozen=True)
class Run:
    """What holds for all rows of a result file. Ceilings (what a large copy and product reached)
    and limits (the data sheet's) by unit; none where nothing is timed or known."""

    session: str
    created: str
    command: list[str]
    git_commit: str | None
    device: dict[str, str | int | float | None]
    software: dict[str, str | None]
    precision: str
    seed: int
    interpreted: bool
    ceilings: dict[str, float]
    limits: dict[str, float]

    def share(self, row: Row, phase: str) -> float | None:
        """Of the ceiling."""
        rate, ceiling = row.rate(phase), self.ceilings.get(row.unit)
        return rate / ceiling if rate and ceiling else None

    def implausible(self, row: Row) -> list[str]:
        """A sentence for each rate that the chip can't reach, of any contender."""
        limit = self.limits.get(row.unit, float("inf"))
        rates = {phase: row.rate(phase) or 0.0 for phase in row.amounts}
        return [
            f"IMPLAUSIBLE: {row.contender} at {row.size}, {phase}: {rate:,.0f} {row.unit}, "
            f"more than the chip's {limit:,.0f}"
            for phase, rate in rates.items()
            if rate > limit
        ]


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n    python")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 a kernel of ours is wrong or does not run, 2 wrong usage,\n"
        "77 Triton or rich is missing, 130 interrupted (what was completed is saved and shown).",
    )
    add = parser.add_argument
    add(
        "--op",
        nargs="+",
        choices=list(OPS),
        default=list(OPS),
        metavar="NAME",
        help=f"of {', '.join(OPS)} (default: all)",
    )
    add("--quick", action="store_true", help="the first size of each operation, fewer rounds")
    add(
        "--drawn",
        type=int,
        metavar="N",
        help="N sizes drawn by --seed, of the operations in turn, in the place of ours",
    )
    add(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of the tensors; auto is bf16 on a GPU that has it, else fp32 (default auto)",
    )
    add("--rounds", type=int, metavar="N", help="timed turns of each (default 20; quick: 5)")
    add("--seed", type=int, default=42, help="of the random tensors and sizes (default 42)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add(
        "--output-dir",
        type=Path,
        default=DEFAULT_FOLDER,
        help="for kernels.json, with all samples (default: results/kernels of this checkout)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _benchmark(arguments),
        interrupted="interrupted before a size was complete: nothing saved",
    )


def _benchmark(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    interpreted = bool(kernels().INTERPRETED)
    setting = make_setting(arguments, interpreted)
    results.prepare_folder(arguments.output_dir)
    rows: list[Row] = []
    interrupted = False
    with _on_its_stream(setting):
        run = describe_run(arguments, setting, interpreted)
        try:
            for measured in measure(arguments, setting, interpreted):
                rows += measured
        except KeyboardInterrupt:
            interrupted = True
            if not rows:
                raise
    path = arguments.output_dir / "kernels.json"
    results.write_json(path, as_json(rows, run))
    show(rows, run)
    print(f"Written: {path}")
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    return errors.ANSWER_IS_NO if any(row.failed for row in rows) else errors.DONE


def make_setting(arguments: argparse.Namespace, interpreted: bool) -> Setting:
    """Raises WorkshopError for a device, precision, seed or count that can't be."""
    rounds = (5 if arguments.quick else 20) if arguments.rounds is None else arguments.rounds
    if not 1 <= rounds <= 10000:
        raise WorkshopError(f"--rounds {rounds}: it must lie between 1 and 10000")
    if not 0 <= arguments.seed < 2**63:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^63")
    if arguments.drawn is not None and not 1 <= arguments.drawn <= 1000:
        raise WorkshopError(f"--drawn {arguments.drawn}: it must lie between 1 and 1000")
    if arguments.drawn and interpreted:
        raise NotOnThisMachine("--drawn: these sizes take a GPU, and the kernels are interpreted")
    name = "cpu" if interpreted and arguments.device == "auto" else arguments.device
    device = hardware.get_device(name)
    interpreter.check_device(versions.VERSIONS["v3"], device)
    if interpreted and device.type != "cpu":
        raise WorkshopError(
            f"--device {arguments.device}: {interpreter.VARIABLE} is set, so that the kernels run "
            "on the CPU; unset it, or use --device cpu"
        )
    precision = get_precision(arguments.precision, device)
    precision.set_matmul_mode()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return Setting(device, precision, arguments.seed, rounds, stream)


@contextlib.contextmanager
def _on_its_stream(setting: Setting) -> Iterator[None]:
    """Everything runs on the stream on which graphs are captured: autograd's nodes stay with the
    stream of their forward pass, and a capture may not wait for another."""
    import torch._functorch.config

    # torch.compile's backward would free what it was given; we call it again and again.
    with torch.cuda.stream(setting.stream), torch._functorch.config.patch(donated_buffer=False):
        yield


def describe_run(arguments: argparse.Namespace, setting: Setting, interpreted: bool) -> Run:
    ceilings = {} if interpreted else measure_ceilings(setting)
    rates: dict[str, float | None] = {}
    if peaks := chips.find_peaks(hardware.device_name(setting.device)):
        rates = {GBS: peaks.bandwidth_gbs, TFLOPS: peaks.tflops.get(setting.precision.name)}
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    liger = importlib.metadata.version("liger-kernel") if has_liger else None
    return Run(
        session=results.new_session(),
        created=results.now(),
        # Without the folders in which this machine keeps things.
        command=["python", "-m", "workshop.kernels.benchmark"]
        + [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]],
        git_commit=results.git_commit(),
        device=hardware.describe(setting.device),
        software=results.describe_software() | {"liger_kernel": liger},
        precision=setting.precision.name,
        seed=arguments.seed,
        interpreted=interpreted,
        ceilings=ceilings,
        limits={unit: rate for unit, rate in rates.items() if rate},
    )


def measure_ceilings(setting: Setting) -> dict[str, float]:
    return {
        GBS: hardware.measure_copy_gbs(setting.device),
        TFLOPS: hardware.measure_matmul_tflops(setting.device, setting.precision.autocast_dtype),
    }


def measure(
    arguments: argparse.Namespace, setting: Setting, interpreted: bool
) -> Iterator[list[Row]]:
    """The rows of one case after the other, with progress on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    if arguments.drawn:
        cases = draw_cases(arguments.op, arguments.drawn, arguments.seed)
    else:
        cases = make_cases(arguments.op, timed=not interpreted, quick=arguments.quick)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        for case in progress.track(cases, task_id=task):
            progress.update(task, description=f"{case.op} {case.size}")
            yield measure_case(case, setting, None if interpreted else time_contenders)


# --- showing -------------------------------------------------------------------------------------


def by_op(rows: list[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.op == op] for op in dict.fromkeys(r.op for r in rows)]


@dataclass(frozen=True)
class Best:
    """Our operator at its largest size beside the fastest right contender there: forward and
    backward pass together."""

    op: str
    size: str
    ours_ms: float
    contender: str
    its_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast ours is."""
        return self.its_ms / self.ours_ms


def against_fastest(rows: list[Row]) -> list[Best]:
    """Of each operator that has a time, ours and another's."""
    found = []
    for group in by_op([row for row in rows if row.samples]):
        size = max(group, key=lambda row: sum(row.amounts.values())).size
        found += at_each_size([row for row in group if row.size == size])
    return found


def at_each_size(rows: list[Row]) -> list[Best]:
    """Ours and the fastest other one at each size of each operator."""
    found = []
    for op, size in dict.fromkeys((row.op, row.size) for row in rows if row.samples):
        times = {
            row.contender: sum(row.median_ms(phase) or math.nan for phase in row.amounts)
            for row in rows
            if row.samples and (row.op, row.size) == (op, size)
        }
        ours = times.pop(OURS, None)
        if ours is not None and times:
            best = min(times, key=lambda contender: times[contender])
            found.append(Best(op, size, ours, best, times[best]))
    return found


def header(rows: list[Row], run: Run) -> list[str]:
    """The column names of one operation's table; `cells` gives a row."""
    names = ["size", "contender"]
    if not run.interpreted:
        if BOTH in rows[0].amounts:
            names += [rows[0].unit, "peak MB"]
        else:
            names += [f"{phase}, {rows[0].unit}" for phase in rows[0].amounts]
        names += ["of ceiling", "device / host, µs"]
    return [*names, "error (allowed)", "status"]


def cells(row: Row, run: Run) -> list[str]:
    texts = [row.size, row.contender]
    if not run.interpreted:
        texts += [_rate(row, phase) for phase in row.amounts]
        if BOTH in row.amounts:
            texts.append(_number(row.peak_mb, ",.0f"))
        shares = [_number(run.share(row, phase), ".0%") for phase in row.amounts]
        texts.append(" / ".join(shares) if set(shares) != {"-"} else "-")
        times = [
            _number(microseconds, ",.0f") for microseconds in (row.device_us, row.median_host_us)
        ]
        texts.append(" / ".join(times) if set(times) != {"-"} else "-")
    worst = row.worst
    texts.append(f"{row.errors[worst]:.1e} ({row.allowed[worst]:.1e})" if worst else "-")
    return [*texts, row.status]


def _rate(row: Row, phase: str) -> str:
    """The rate at the median, and half of the interquartile range."""
    rate = row.rate(phase)
    if rate is None:
        return "-"
    form = ",.0f" if rate >= 100 else ",.3g"
    return f"{rate:{form}} ±{timing.spread(row.samples[phase]) / 2:.1%}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def notes(rows: list[Row], run: Run) -> list[str]:
    """The notes on one operation's rows, each sentence once, with its sizes."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.note:
            found.setdefault((row.contender, row.status, row.note), []).append(row.size)
    everywhere = {row.size for row in rows}
    lines = []
    for (contender, status, note), sizes in found.items():
        where = "" if set(sizes) == everywhere else f" at {'; '.join(sizes)}"
        verdict = "" if status == PASS else f" {status}"
        lines.append(f"{contender}{where}{verdict}: {note}")
    return lines + [sentence for row in rows for sentence in run.implausible(row)]


def title(rows: list[Row], run: Run) -> str:
    together = f" {BOTH}" if BOTH in rows[0].amounts else ""
    return f"{rows[0].op}{together}, {run.precision}, {run.device['name']}"


def summary(run: Run) -> str:
    if run.interpreted:
        return NOTHING_TIMED
    return (
        f"ceilings of this run: copy {run.ceilings[GBS]:,.0f} GB/s, "
        f"{run.precision} product {run.ceilings[TFLOPS]:,.0f} TFLOP/s"
    )


def behind(rows: list[Row]) -> list[str]:
    """At how many sizes ours is the fastest, forward and backward together, and the others."""
    found = at_each_size(rows)
    slower = sorted((one for one in found if one.gain < 1), key=lambda one: one.gain)
    lines = [
        f"  {one.op} at {one.size}: {one.ours_ms:.4f} ms, {one.contender} {one.its_ms:.4f} ms "
        f"({one.gain:.2f}x)"
        for one in slower
    ]
    head = f"{OURS} is the fastest at {len(found) - len(slower)} of {len(found)} sizes"
    return [head + (", not at" if slower else ""), *lines] if found else []


STYLES = {FAIL: "red", SKIPPED: "dim"}


def show(rows: list[Row], run: Run) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=130, highlight=False, markup=False)
    for group in by_op(rows):
        table = Table(title=title(group, run), title_justify="left", title_style="bold")
        for index, name in enumerate(header(group, run)):
            table.add_column(name, justify="left" if index < 2 else "right")
        for row, following in zip(group, [*group[1:], None], strict=True):
            table.add_row(
                *cells(row, run),
                style=STYLES.get(row.status),
                end_section=following is not None and following.size != row.size,
            )
        console.print(table)
        for line in notes(group, run):
            console.print(f"  {line}", soft_wrap=True)
    console.print(summary(run))
    for line in behind(rows):
        console.print(line, soft_wrap=True)


# --- the file ------------------------------------------------------------------------------------


def as_json(rows: list[Row], run: Run) -> dict[str, Any]:
    records = [
        dataclasses.asdict(row)
        # JSON has no NaN and no infinity.
        | {"errors": {k: v if math.isfinite(v) else None for k, v in row.errors.items()}}
        for row in rows
    ]
    return {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(run) | {"rows": records}


def load(path: Path) -> tuple[list[Row], Run]:
    """What `as_json` wrote, with every field's type checked.

    Raises:
        WorkshopError: the file can't be read or is not one of these.
    """
    content = results.read_json(path)
    records = content.pop("rows", None)
    if content.pop("schema_version", None) != SCHEMA_VERSION or not isinstance(records, list):
        raise WorkshopError(f"{path}: no result of the kernels' benchmark")
    rows = []
    for index, record in enumerate(records):
        infinite: list[str] = []
        if isinstance(record, dict) and isinstance(record.get("errors"), dict):
            # JSON has null for an error that was no number or infinite.
            infinite = [name for name, error in record["errors"].items() if error is None]
            record["errors"] = {k: v for k, v in record["errors"].items() if v is not None}
        row = results.convert(Row, record, f"{path}: rows[{index}]")
        row.errors |= dict.fromkeys(infinite, math.nan)
        rows.append(row)
    return rows, results.convert(Run, content, str(path))


if __name__ == "__main__":
    sys.exit(main())
