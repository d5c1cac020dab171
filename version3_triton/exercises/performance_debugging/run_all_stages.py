#!/usr/bin/env python3
"""Runs the stages, each in a process of its own, and prints what was measured.

The tables are made from the result files alone. What the metrics mean is for you to find out.
"""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from debug_results import Flags, StageResult, load_all

from workshop import arguments, errors, results
from workshop.arguments import argument, option
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.run import processes

if TYPE_CHECKING:
    from rich.table import Table

HERE = Path(__file__).resolve().parent
TRAINED = (
    *("loss_first", "loss_last", "tensors_with_grad", "logits_error"),
    *("peak_mb", "optimizer_state_mb"),
)
COUNTED = ("programs", "timed_share")
TIMED = ("samples_per_s", "step_ms", "forward_ms", "backward_ms", "optimizer_ms")
_SECONDS_TO_STOP = 10


def stage_files() -> dict[str, Path]:
    """The stages' scripts, by number and in order."""
    return {path.name[len("stage")]: path for path in sorted(HERE.glob("stage[1-9]_*.py"))}


@dataclass(kw_only=True)
class Options(Flags):
    stages: list[str] = argument(
        "1 to 6 (default: all); the table also has those that were run before",
        nargs="*",
        metavar="STAGE",
    )
    show: bool = option("run nothing: print the tables again")


def main(argv: list[str] | None = None) -> int:
    return arguments.run(
        Options,
        _main,
        argv,
        interrupted="interrupted: finished stages are kept; --show prints them",
        prog="run_all_stages.sh",
        description="Runs the stages and prints what was measured.",
        epilog="Exit status: 0 done, 1 a stage failed, 2 wrong usage, 77 Triton is missing, "
        "130 interrupted (finished stages are saved).",
    )


def _main(options: Options) -> int:
    errors.require("rich")
    folder, known = options.output_dir, stage_files()
    unknown = [name for name in options.stages if name not in known]
    if unknown:
        raise WorkshopError(f"stage {unknown[0]!r}: choose from 1 to {len(known)}")
    failed = False
    if not options.show:
        results.prepare_folder(folder)
        chosen = [known[number] for number in dict.fromkeys(options.stages or known)]
        for count, stage in enumerate(chosen, 1):
            failed |= not run(stage, f"{count} of {len(chosen)}", options.device, folder)
    found = load_all(folder)
    if not found and not failed:
        raise WorkshopError(f"{folder}: no stage has been run: leave --show out")
    show(list(found.values()))
    return errors.ANSWER_IS_NO if failed else errors.DONE


def run(stage: Path, count: str, device: str, folder: Path) -> bool:
    """Runs a stage, and says on stderr how far it is and how it ended; whether it has a result.

    Args:
        count: the stage's place, as in "3 of 6".

    Raises:
        NotOnThisMachine: it can't be run here.
    """
    # An old result beside a failure would pass for a new one.
    (folder / f"{stage.stem}.json").unlink(missing_ok=True)
    from rich.console import Console
    from rich.text import Text

    name = f"{stage.stem} ({count})"
    console, begin = Console(stderr=True, highlight=False, markup=False), time.perf_counter()
    # A session of its own: Ctrl-C at the terminal reaches us alone, and we pass it on once.
    process = subprocess.Popen(
        [sys.executable, str(stage), "--device", device, "--output-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    last = "no message"
    with processes.ended_with_us(process), console.status(name) as status:
        try:
            for line in filter(None, map(str.strip, process.stdout)):
                last, said = line, f"{name}: {line}"
                if console.is_terminal:
                    status.update(Text(said))
                else:
                    console.print(said, soft_wrap=True)
            process.wait()
        except BaseException:
            processes.stop(process, _SECONDS_TO_STOP)
            raise
    message = last.removeprefix("error: ")
    if process.returncode == errors.NOT_ON_THIS_MACHINE:
        raise NotOnThisMachine(message)
    ended = f"done in {time.perf_counter() - begin:.0f} s"
    if process.returncode:
        ended = f"failed: exit {process.returncode}: {message}"
    console.print(f"{name}: {ended}", soft_wrap=True)
    return process.returncode == errors.DONE


def show(found: list[StageResult]) -> None:
    """Prints what was trained, and how it ran: two tables for each device and size."""
    from rich.console import Console

    console = Console(highlight=False)
    groups: dict[str, list[StageResult]] = defaultdict(list)
    for result in found:
        groups[result.setting].append(result)
    for setting, its in groups.items():
        interpreted = all(result.run.interpreted for result in its)
        console.print(f"\n{setting}\n", markup=False, soft_wrap=True)
        console.print(_table(its, TRAINED))
        console.print()
        console.print(_table(its, COUNTED if interpreted else COUNTED + TIMED))
        if interpreted:
            console.print("(no times: the kernels are interpreted)")


def _table(found: Iterable[StageResult], metrics: Sequence[str]) -> "Table":
    """A row a stage."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    for name in metrics:
        header = name.replace("_", "_\n", 1) if len(name) > 10 else name
        table.add_column(header, justify="right", no_wrap=True)
    for result in found:
        cells = {name: result.text(name) for name in metrics}
        if "tensors_with_grad" in cells and result.run.gradients:
            cells["tensors_with_grad"] += f"/{result.run.gradients.tensors_total}"
        table.add_row(result.key, *cells.values())
    return table


if __name__ == "__main__":
    sys.exit(main())
