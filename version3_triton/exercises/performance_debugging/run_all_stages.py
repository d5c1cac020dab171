#!/usr/bin/env python3
"""Runs the stages, each in a process of its own, and prints what was measured.

The tables are made from the result files alone. What the metrics mean is for you to find out.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from debug_results import StageResult, add_flags, load_all, shown  # noqa: E402

from workshop import errors, results  # noqa: E402
from workshop.arguments import parse  # noqa: E402
from workshop.errors import NotOnThisMachine, WorkshopError  # noqa: E402
from workshop.run import processes  # noqa: E402

if TYPE_CHECKING:
    from rich.table import Table

TRAINED = (
    *("loss_first", "loss_last", "tensors_with_grad", "logits_error"),
    *("peak_mb", "optimizer_state_mb"),
)
COUNTED = ("programs", "timed_share")
TIMED = ("samples_per_s", "step_ms", "forward_ms", "backward_ms", "optimizer_ms")
_SECONDS_TO_STOP = 10


def stage_files() -> dict[str, Path]:
    """The stages' scripts, by key and in order."""
    return {path.name.partition("_")[0]: path for path in sorted(HERE.glob("stage[1-9]_*.py"))}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_all_stages.sh",
        description="Runs the stages and prints what was measured.",
        epilog="Exit status: 0 done, 1 a stage failed, 2 wrong usage, 77 Triton is missing, "
        "130 interrupted (finished stages are saved).",
    )
    add = parser.add_argument
    add(
        "stages",
        nargs="*",
        metavar="STAGE",
        help="1 to 6 (default: all); the table also has those that were run before",
    )
    add("--show", action="store_true", help="run nothing: print the tables again")
    add_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _main(arguments),
        interrupted="interrupted: finished stages are kept; --show prints them",
    )


def _main(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    failed = [] if arguments.show else run(_chosen(arguments.stages), arguments)
    found = load_all(arguments.output_dir)
    if not found and not failed:
        raise WorkshopError(f"{arguments.output_dir}: no stage has been run: leave --show out")
    show(list(found.values()))
    return errors.ANSWER_IS_NO if failed else errors.DONE


def _chosen(stages: Sequence[str]) -> list[Path]:
    known = stage_files()
    keys = [f"stage{name.removeprefix('stage')}" for name in stages] or list(known)
    for key, name in zip(keys, stages, strict=False):
        if key not in known:
            raise WorkshopError(f"stage {name!r}: choose from 1 to {len(known)}")
    return [known[key] for key in dict.fromkeys(keys)]


# --- running -------------------------------------------------------------------------------------


def run(stages: list[Path], arguments: argparse.Namespace) -> list[Path]:
    """Runs the stages; those that failed.

    Raises:
        NotOnThisMachine: none can be run here.
    """
    from rich.console import Console
    from rich.text import Text

    results.prepare_folder(arguments.output_dir)
    console = Console(stderr=True, highlight=False)
    failed = []
    with console.status("") as status:  # nothing where stderr is no terminal
        for number, stage in enumerate(stages, start=1):
            begin, place = time.perf_counter(), f"{number} of {len(stages)}, {stage.stem}"

            def report(line: str, place: str = place) -> None:
                status.update(Text(f"{place}: {line}"))

            report("starting ...")
            problem = _run_one(stage, arguments, report)
            text = (
                f"failed: {problem}" if problem else f"done in {time.perf_counter() - begin:.0f} s"
            )
            console.print(f"{stage.stem}: {text}", markup=False, soft_wrap=True)
            failed += [stage] if problem else []
    return failed


def _run_one(
    stage: Path, arguments: argparse.Namespace, report: Callable[[str], None]
) -> str | None:
    """Runs a stage, and reports each line that it prints; what went wrong, in a line, or None."""
    # An old result beside a failure would pass for a new one.
    (arguments.output_dir / f"{stage.stem}.json").unlink(missing_ok=True)
    command = [sys.executable, "-u", str(stage), "--device", arguments.device]
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        # A session of its own: Ctrl-C at the terminal reaches us alone, and we pass it on once.
        process = subprocess.Popen(
            [*command, "--output-dir", str(arguments.output_dir)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        with processes.ended_with_us(process):
            try:
                for line in process.stdout:
                    report(line.strip().removeprefix(f"{stage.stem}: "))
                status = process.wait()
            except BaseException:
                processes.stop(process, _SECONDS_TO_STOP)
                raise
        stderr.seek(0)
        last = ([line.strip() for line in stderr if line.strip()] or ["no message"])[-1]
    message = last.removeprefix("error: ")
    if status == errors.NOT_ON_THIS_MACHINE:
        raise NotOnThisMachine(message)
    return f"exit {status}: {message}" if status else None


# --- showing -------------------------------------------------------------------------------------


def show(found: list[StageResult]) -> None:
    """Prints what was trained, and how it ran: two tables for each device and size."""
    from rich.console import Console

    console = Console(highlight=False)
    groups: dict[str, list[StageResult]] = {}
    for result in found:
        groups.setdefault(result.setting, []).append(result)
    for setting, its in groups.items():
        interpreted = all(result.run.interpreted for result in its)
        console.print(f"\n{setting}\n", markup=False, soft_wrap=True)
        console.print(_table(its, TRAINED))
        console.print()
        console.print(_table(its, COUNTED if interpreted else COUNTED + TIMED))


def _table(found: Iterable[StageResult], metrics: Sequence[str]) -> "Table":
    """A row a stage; instead of times that may not be compared, one column that says so."""
    from rich.table import Table

    untimed = "programs" in metrics and "step_ms" not in metrics
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", *metrics, *(("times",) if untimed else ())):
        long = len(name) > 10
        header = name.replace("_", "_\n", 1) if long else name
        table.add_column(header, justify="left" if name == "stage" else "right", no_wrap=True)
    for result in found:
        cells = [_cell(result, name) for name in metrics]
        table.add_row(result.key, *cells, *(("interpreted",) if untimed else ()))
    return table


def _cell(result: StageResult, name: str) -> str:
    text = shown(name, result.metrics()[name])
    if name == "tensors_with_grad" and result.run.gradients:
        return f"{text}/{result.run.gradients.tensors_total}"
    return text


if __name__ == "__main__":
    sys.exit(main())
