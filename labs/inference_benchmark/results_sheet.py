"""Fills my_workshop_results.txt from your own result files.

    python -m labs.inference_benchmark.results_sheet --name "Ada Lovelace"

A section for each exercise, of the runs that its check takes. What was not measured has the command
that measures it. What you wrote below "Notes:" stays.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.own_runs import Profile, images_per_s
from labs.inference_benchmark.request import LAB
from workshop import errors, results
from workshop.arguments import parse
from workshop.compare import lab_table
from workshop.compare.tables import number
from workshop.errors import WorkshopError, printable
from workshop.exercises.frame import Missing, Work, import_file
from workshop.labs import LabRow, LabRun, build_rows
from workshop.profilers import advisor
from workshop.profilers.names import display_name
from workshop.profilers.table import KernelTable
from workshop.versions import ROOT

FILE = "my_workshop_results.txt"
WIDTH = 80
RULE, LINE, NOTES = "=" * WIDTH, "-" * WIDTH, "Notes:"
BLANK = "__________"
EXERCISES = Path(__file__).with_name("exercises")
T = TypeVar("T")
Fields = Sequence[tuple[str, Callable[[T], str]]]
"""Labels, and what stands behind each."""


@dataclass(frozen=True)
class Section:
    title: str
    lines: list[str]
    missing: Missing | None = None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m labs.{LAB}.results_sheet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--name", help="yours (default: the one that the file has)")
    add(
        "--results-dir",
        type=Path,
        default=results.DEFAULT_FOLDER,
        metavar="FOLDER",
        help="where your results lie (default: results/ of this checkout)",
    )
    add(
        "--output",
        type=Path,
        default=Path(FILE),
        metavar="FILE",
        help=f"(default: {FILE}, in the present folder)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: _write(arguments), interrupted="interrupted")


def _write(arguments: argparse.Namespace) -> int:
    folder = arguments.results_dir
    if folder != results.DEFAULT_FOLDER and not folder.is_dir():
        raise WorkshopError(f"--results-dir {folder}: no such folder")
    old = _read(arguments.output)
    found = sections(folder)
    newest = next(iter(Work(ROOT, results=folder).lab_runs(LAB)), None)
    results.prepare_file(arguments.output, "--output")
    results.write_text(arguments.output, sheet(found, newest, old, arguments.name))
    blank = [section for section in found if section.missing]
    print(f"Written: {arguments.output}, {len(found) - len(blank)} of {len(found)} measured")
    for section in blank:
        print(f"{section.title}\n    {section.missing}")
    return errors.DONE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise WorkshopError(f"{path}: can't be read ({error}); name another --output") from None


def sheet(found: Iterable[Section], newest: LabRun | None, old: str, name: str | None) -> str:
    """The file's text; notes, and the name if none is given, are the old one's."""
    before = re.search(r"(?m)^Name: +(.*)$", old)
    name = name or (before[1] if before else BLANK)
    lines = [RULE, "Inference benchmark: my results", RULE, *_head(name, newest), RULE]
    for section in found:
        lines += ["", section.title, LINE, *section.lines]
        lines += [NOTES, *_notes(old, section.title)]
    return "\n".join(lines) + "\n"


def _head(name: str, run: LabRun | None) -> list[str]:
    values = [BLANK] * 4
    if run:
        software = run.software
        libraries = {"cuda": "CUDA", "hip": "ROCm"}
        gpu = next((f"{word} {software[key]}" for key, word in libraries.items()
                    if software.get(key)), "none")  # fmt: skip
        values = [run.created[:10], str(run.device["name"]), gpu, str(software.get("torch"))]
    labels = ("Name", "Date", "Device", "CUDA or ROCm", "PyTorch")
    return [_line(label, value) for label, value in zip(labels, (name, *values), strict=True)]


def _notes(old: str, title: str) -> list[str]:
    """What stands below the notes of a section, at least two empty lines."""
    _, found, after = old.partition(f"\n{title}\n{LINE}\n")
    text = after.partition(f"\n{NOTES}\n")[2] if found else ""
    lines = text.split("\n")
    next_rule = lines.index(LINE) - 1 if LINE in lines else len(lines)
    written = "\n".join(lines[:next_rule]).strip("\n")
    return [*([written] if written else ["", ""])]


# --- sections ------------------------------------------------------------------------------------


def sections(results: Path) -> list[Section]:
    """The seven exercises' numbers, of the runs that their checks take."""
    return [
        _section(results, name, f"Exercise {name[0]}: {title}", lines)
        for name, (title, lines) in SECTIONS.items()
    ]


def _section(results: Path, name: str, title: str, lines: Callable[[Any], list[str]]) -> Section:
    folder = EXERCISES / f"inference_{name}"
    check = import_file(folder / "check.py")
    try:
        return Section(title, lines(check.measured(Work(folder, results=results))))
    except Missing as missing:
        return Section(title, [f"Not measured yet: {missing.what}", missing.command], missing)


def _lines(fields: Fields[T], subject: T) -> list[str]:
    return [_line(label, get(subject)) for label, get in fields]


def _line(label: str, value: str) -> str:
    return f"{label + ':':<23} {printable(value)}"


def _share(value: float | None) -> str:
    if value is None:
        return "not known for this device"
    return f"{value:.1%}{' (above 100%: the product was timed while others ran)' * (value > 1)}"


BASELINE: Fields[LabRow] = (
    ("What", lambda row: row.first.subject),
    ("Throughput", lambda row: f"{number(row.units_per_s, ',.1f')} images/s"),
    ("Time of an iteration", lambda row: f"{number(row.step_ms, ',.3f')} ms (median)"),
    ("p90", lambda row: f"{number(row.percentile_ms(0.9), ',.3f')} ms"),
    ("p99", lambda row: f"{number(row.percentile_ms(0.99), ',.3f')} ms"),
    ("Peak memory", lambda row: f"{number(row.peak_memory_mb, ',.0f')} MB"),
)
WORK: Fields[LabRow] = (
    ("What", lambda row: f"{row.first.subject}, {row.first.variant}"),
    ("Of the batch", lambda row: f"{(row.first.flops_per_step or 0) / 1e9:,.1f} GFLOP"),
    ("Of an image", lambda row: (
        f"{(row.first.flops_per_step or 0) / row.first.units_per_step / 1e9:.2f} GFLOP")),
    ("Achieved", lambda row: f"{number(row.tflops, '.3g')} TFLOP/s"),
    ("Share of the data sheet", lambda row: _share(row.peak_share)),
    ("Share of a product's", lambda row: _share(row.ceiling_share)),
    ("Arithmetic intensity", lambda row: f"{row.first.metrics['flop_per_byte']:.1f} FLOP a byte"),
)  # fmt: skip
KERNELS: Fields[Profile] = (
    ("What", lambda one: f"{one.run.subject}, {one.run.variant}"),
    ("Five longest", lambda one: f"{one.five_share():.1%} of the {one.table.what}s' time"),
    ("Launches", lambda one: f"{one.launches():,.0f} {one.table.what}s an iteration"),
    ("Copies", lambda one: f"{one.share('copy'):.1%} of the time"),
    ("Gaps", lambda one: (
        "no GPU" if (idle := one.idle_share()) is None else f"{idle:.1%} of the time")),
    ("What bounds it", lambda one: _bound(one)),
)  # fmt: skip


def _bound(one: Profile) -> str:
    found = advisor.headline(advisor.advise(one.table, one.run))
    return found.sentence if found else "not clear"


def _slowest(run: LabRun, table: KernelTable) -> list[str]:
    lines = [_line("What", f"{run.subject}, {run.variant}")]
    for rank, kernel in enumerate(table.kernels[:5], start=1):
        ms = kernel.total_ns / (table.steps or 1) / 1e6
        words = f"{display_name(kernel.name, 40)}: {ms:,.3f} ms ({table.share(kernel):.1%})"
        lines.append(_line(str(rank), words))
    return lines


def _precisions(rows: Iterable[LabRow]) -> list[str]:
    """A line for each; the first is what the others are compared with."""
    first, *others = sorted(rows, key=lambda row: not row.is_baseline)
    lines = [_line("What", first.first.subject), _line(first.first.variant, _rate(first))]
    for row in others:
        words = [_rate(row)]
        if first.peak_memory_mb and row.peak_memory_mb:
            words.append(f"{row.peak_memory_mb / first.peak_memory_mb - 1:+.0%} memory")
        words.append(f"top-1 agreement {float(row.first.metrics['top1_agreement'] or 0):.1%}")
        lines.append(_line(row.first.variant, ", ".join(words)))
    return lines


def _rate(row: LabRow) -> str:
    """Images a second, and the speed-up as the comparison's table has it."""
    return f"{number(row.units_per_s, ',.1f')} images/s, {lab_table.speedup_text(row)}"


def _group(run: LabRun) -> list[str]:
    rate = images_per_s(run)
    alone, efficiency = (run.metrics[n] for n in ("one_process_per_s", "scaling_efficiency"))
    return [
        _line("What", f"{run.subject}, {run.variant}"),
        _line("Global", f"{rate:,.1f} images/s"),
        _line("A device's part", f"{rate / run.processes:,.1f} images/s"),
        _line("One device alone", f"{float(alone or 0):,.1f} images/s"),
        _line("Efficiency", f"{float(efficiency or 0):.1%}"),
    ]


def _compiled(rows: Sequence[LabRow]) -> list[str]:
    plain, *others = rows
    lines = [_line("What", f"{plain.first.subject}, {plain.first.variant}")]
    lines.append(_line("not compiled", _rate(plain)))
    for row in others:
        words = [_rate(row), f"compiled in {own_runs.compile_seconds(row):.1f} s"]
        if row.speedup and row.speedup.significant:
            words.append(_paid_back(row, plain))
        lines.append(_line(row.first.variant.partition(", ")[2], ", ".join(words)))
    return lines


def _paid_back(row: LabRow, plain: LabRow) -> str:
    seconds = own_runs.compile_seconds(row)
    batches = own_runs.break_even(seconds, plain.step_ms or 0.0, row.step_ms or 0.0)
    return f"paid back after {batches:,.0f} batches" if batches else "never paid back"


def _row(run: LabRun) -> LabRow:
    return build_rows([run])[0]


SECTIONS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "1_baseline": ("a single device", lambda m: _lines(BASELINE, _row(m.later))),
    "2_precision": ("precision", lambda m: _precisions(m.rows.values())),
    "3_profiler": ("operations that take the most time", lambda m: _slowest(m.run, m.table)),
    "4_flops": ("operations of the network", lambda m: _lines(WORK, _row(m.large))),
    "5_gpus": ("several devices", lambda m: [*_group(m.even), *_group(m.training)]),
    "6_compile": ("compilation", lambda m: [*_compiled(m.full.rows), *_compiled(m.half.rows)]),
    "7_kernels": ("kernels", lambda m: [*_lines(KERNELS, m.plain), *_lines(KERNELS, m.half)]),
}
"""An exercise's name behind "inference_", its title, and the lines of what its check measured."""


if __name__ == "__main__":
    sys.exit(main())
