"""Fills my_workshop_results.txt from your own result files.

    python -m labs.inference_benchmark.results_sheet --name "Ada Lovelace"

A section for each exercise, with the newest run of its kind. What was not measured stays blank,
with the command that measures it. What you wrote below "Notes:" stays.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.inference_benchmark import own_runs
from labs.inference_benchmark.own_runs import Profile, images_per_s
from labs.inference_benchmark.request import LAB
from workshop import errors, results
from workshop.arguments import parse
from workshop.errors import WorkshopError, printable
from workshop.exercises.frame import Work
from workshop.labs import LabRow, LabRun, build_rows
from workshop.profilers import advisor
from workshop.profilers.names import display_name
from workshop.versions import ROOT

FILE = "my_workshop_results.txt"
WIDTH = 80
RULE, LINE, NOTES = "=" * WIDTH, "-" * WIDTH, "Notes:"
BLANK = "__________"
RED = "PROOF RED, no throughput"
PROGRAM = f"python labs/{LAB}/micro_benchmarking_pytorch.py"
GROUP = f"torchrun --nproc-per-node 2 labs/{LAB}/micro_benchmarking_pytorch.py"
T = TypeVar("T")
Fields = Sequence[tuple[str, Callable[[T], str]]]
"""Labels, and what stands behind each."""


@dataclass(frozen=True)
class Section:
    title: str
    command: str
    """Measures what it shows."""
    lines: list[str]
    measured: bool


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
    work = Work(ROOT, results=folder)
    runs = own_runs.own_runs(work)
    found = sections(runs, next(own_runs.profiles(work.results, runs), None))
    results.prepare_file(arguments.output, "--output")
    results.write_text(arguments.output, sheet(found, runs, old, arguments.name))
    blank = [section.title for section in found if not section.measured]
    print(f"Written: {arguments.output}, {len(found) - len(blank)} of {len(found)} measured")
    for section in found:
        if not section.measured:
            print(f"Not yet: {section.title}\n    {section.command}")
    return errors.DONE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise WorkshopError(f"{path}: can't be read ({error}); name another --output") from None


def sheet(found: Iterable[Section], runs: Sequence[LabRun], old: str, name: str | None) -> str:
    """The file's text; notes, and the name if none is given, are the old one's."""
    before = re.search(r"(?m)^Name: +(.*)$", old)
    name = name or (before[1] if before else BLANK)
    lines = [RULE, "Inference benchmark: my results", RULE, *_head(name, runs), RULE]
    for section in found:
        lines += ["", section.title, LINE, *section.lines]
        lines += [] if section.measured else [f"Measure it: {section.command}"]
        lines += [NOTES, *_notes(old, section.title)]
    return "\n".join(lines) + "\n"


def _head(name: str, runs: Sequence[LabRun]) -> list[str]:
    values = [BLANK] * 4
    if runs:
        run, software = runs[0], runs[0].software
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


def sections(runs: Sequence[LabRun], profile: Profile | None) -> list[Section]:
    """The seven exercises' numbers.

    Args:
        runs: newest first.
    """
    inference = [run for run in runs if run.options["mode"] == "inference"]
    alone = [run for run in inference if own_runs.processes(run) == 1]
    plain = next((r for r in alone if own_runs.is_plain(r) and not r.baseline), None)
    counted = next((run for run in alone if "--flops-prof-step" in run.command), None)
    precision = next(iter(own_runs.comparisons(inference, "precision")), None)
    compiled = _newest_of_each(own_runs.comparisons(inference, "compile"))
    groups = [own_runs.of_group(runs, mode) for mode in ("inference", "training")]
    network = "--network resnet50 --batch-size 32 --iterations 20"
    return [
        _section("Exercise 1: a single device", network, BASELINE, _row(plain)),
        Section(
            "Exercise 2: precision", f"{PROGRAM} {network} --compare precision",
            _precision(precision or []), precision is not None,
        ),
        _section(
            "Exercise 3: operations that take the most time", f"{network} --kineto", SLOWEST,
            profile,
        ),
        _section(
            "Exercise 4: operations of the network", f"{network} --flops-prof-step 10", WORK,
            _row(counted),
        ),
        Section(
            "Exercise 5: several devices",
            f"{GROUP} --network resnet50 --batch-size 128 --iterations 20, and again with "
            "--mode training",
            _groups([run for run in groups if run]), all(groups),
        ),
        Section(
            "Exercise 6: compilation", f"{PROGRAM} {network} --compare compile",
            _compiled(compiled), bool(compiled),
        ),
        _section("Exercise 7: kernels", f"{network} --kineto", KERNELS, profile),
    ]  # fmt: skip


def _section(title: str, flags: str, fields: Fields[T], subject: T | None) -> Section:
    lines = [_line(label, BLANK if subject is None else get(subject)) for label, get in fields]
    return Section(title, f"{PROGRAM} {flags}", lines, subject is not None)


def _line(label: str, value: str) -> str:
    return f"{label + ':':<23} {printable(value)}"


def _row(run: LabRun | None) -> LabRow | None:
    return None if run is None else build_rows([run])[0]


def _number(value: float | None, form: str, unit: str) -> str:
    return RED if value is None else f"{value:{form}} {unit}".rstrip()


def _share(value: float | None) -> str:
    return "not known for this device" if value is None else f"{value:.1%}"


BASELINE: Fields[LabRow] = (
    ("What", lambda row: row.first.subject),
    ("Throughput", lambda row: _number(row.units_per_s, ",.1f", "images/s")),
    ("Time of an iteration", lambda row: _number(row.step_ms, ",.3f", "ms (median)")),
    ("p90", lambda row: _number(row.percentile_ms(0.9), ",.3f", "ms")),
    ("p99", lambda row: _number(row.percentile_ms(0.99), ",.3f", "ms")),
    ("Peak memory", lambda row: _number(row.peak_memory_mb, ",.0f", "MB")),
    ("Proof", lambda row: row.first.proof.status),
)
WORK: Fields[LabRow] = (
    ("What", lambda row: f"{row.first.subject}, {row.first.variant}"),
    ("Of the batch", lambda row: f"{(row.first.flops_per_step or 0) / 1e9:,.1f} GFLOP"),
    ("Of an image", lambda row: (
        f"{(row.first.flops_per_step or 0) / row.first.units_per_step / 1e9:.2f} GFLOP")),
    ("Achieved", lambda row: _number(row.tflops, ".3g", "TFLOP/s")),
    ("Share of the data sheet", lambda row: _share(row.peak_share)),
    ("Share of a product's", lambda row: _share(row.ceiling_share)),
    ("Arithmetic intensity", lambda row: f"{row.first.metrics['flop_per_byte']:.1f} FLOP a byte"),
)  # fmt: skip
SLOWEST: Fields[Profile] = (
    ("What", lambda one: f"{one.run.subject}, {one.run.variant}"),
    *((str(rank), lambda one, rank=rank: _kernel(one, rank)) for rank in range(1, 6)),
)
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


def _kernel(one: Profile, rank: int) -> str:
    if rank > len(one.table.kernels):
        return "-"
    kernel = one.table.kernels[rank - 1]
    ms = kernel.total_ns / (one.table.steps or 1) / 1e6
    return f"{display_name(kernel.name, 40)}: {ms:,.3f} ms ({one.table.share(kernel):.1%})"


def _precision(rows: Sequence[LabRow]) -> list[str]:
    """A line for each; the first is what the others are compared with."""
    if not rows:
        return [_line(name, BLANK) for name in ("fp32", "tf32", "bf16", "fp16")]
    lines = [_line("What", rows[0].first.subject)]
    first = rows[0].peak_memory_mb
    for row in rows:
        words = [_number(row.units_per_s, ",.1f", "images/s")]
        words += [f"{row.speedup.value:.2f}x"] if row.speedup else []
        if row is not rows[0] and first and row.peak_memory_mb:
            words.append(f"{row.peak_memory_mb / first - 1:+.0%} memory")
        if (agreement := row.first.metrics.get("top1_agreement")) is not None:
            words.append(f"top-1 agreement {float(agreement):.1%}")
        lines.append(_line(row.first.variant, ", ".join(words)))
    return lines


def _groups(runs: Sequence[LabRun]) -> list[str]:
    labels = ("Global", "A device's part", "One device alone", "Efficiency")
    if not runs:
        return [_line(label, BLANK) for label in labels]
    lines = []
    for run in runs:
        lines.append(_line("What", f"{run.subject}, {run.variant}"))
        if run.proof.status != "pass":
            lines.append(_line("Global", RED))
            continue
        rate = images_per_s(run)
        alone, efficiency = (run.metrics[n] for n in ("one_process_per_s", "scaling_efficiency"))
        rates = (rate, rate / own_runs.processes(run), float(alone or 0))
        values = [*(f"{value:,.1f} images/s" for value in rates), f"{float(efficiency or 0):.1%}"]
        lines += [_line(label, value) for label, value in zip(labels, values, strict=True)]
    return lines


def _newest_of_each(found: Iterable[list[LabRow]]) -> list[list[LabRow]]:
    """Of each subject and precision the first, newest session."""
    newest: dict[tuple[object, ...], list[LabRow]] = {}
    for rows in found:
        newest.setdefault((rows[0].first.subject, rows[0].first.options["precision"]), rows)
    return list(newest.values())


def _compiled(found: Sequence[Sequence[LabRow]]) -> list[str]:
    if not found:
        modes = ("not compiled", "default", "reduce-overhead", "max-autotune")
        return [_line(mode, BLANK) for mode in modes]
    lines = []
    for rows in found:
        lines.append(_line("What", rows[0].first.subject))
        for row in rows:
            lines.append(_line(row.first.variant, _compiled_row(row, rows[0])))
    return lines


def _compiled_row(row: LabRow, plain: LabRow) -> str:
    words = [_number(row.units_per_s, ",.1f", "images/s")]
    words += [f"{row.speedup.value:.2f}x"] if row.speedup else []
    if row is not plain and row.step_ms and plain.step_ms:
        seconds = own_runs.compile_seconds(row)
        batches = own_runs.break_even(seconds, plain.step_ms, row.step_ms)
        paid = f"paid back after {batches:,.0f} batches" if batches else "never paid back"
        words += [f"compiled in {seconds:.1f} s", paid]
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
