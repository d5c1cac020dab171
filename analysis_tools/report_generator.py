"""Writes a report of all results below some folders: one self-contained HTML page.

Your results come first, the workshop's reference results after them: each size's ladder with its
verdicts, what bounds a step and its kernels, with links to the result files. It needs no GPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import option, run
from workshop.errors import WorkshopError

if TYPE_CHECKING:
    from workshop.tables import Table

PAGE, SHEET = "report.html", "my_results.html"


@dataclass
class Options:
    results: list[Path] | None = option(
        "with results; may be repeated (default: results/)", action="append", metavar="DIR"
    )
    output_dir: Path | None = option(f"for {PAGE} (default: results/report/)", metavar="DIR")
    sheet: bool = option(
        f"write {SHEET} instead: your machine, exercises, times and labs filled in, "
        "with room for your name and what you saw"
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options, _report, argv, interrupted="interrupted: what is written is whole",
        description=__doc__,
        epilog="Exit status: 0 done (broken result files are named in the report), 2 wrong usage "
        "or nothing to report, 77 a package is missing, 130 interrupted.",
    )  # fmt: skip


def _report(options: Options) -> int:
    errors.require("jinja2", "matplotlib", "rich")
    # These import torch, which --help does not need.
    import torch
    from rich.console import Console

    from workshop import results, tables
    from workshop.collection import Collection
    from workshop.show import drawing, page

    torch.set_num_threads(1)  # its medians are small: threads would only wait for each other
    collection = Collection(options.results or [results.DEFAULT_FOLDER])
    folder = options.output_dir or results.DEFAULT_FOLDER / "report"
    target = folder / (SHEET if options.sheet else PAGE)
    if options.sheet and target.exists():
        raise WorkshopError(
            f"{target} exists, and your notes may be in it: move it, or choose another --output-dir"
        )
    with Console(stderr=True).status("reading results"):
        collection.refresh()
        parts = page.read(collection)
    html = None
    if parts:
        results.prepare_folder(folder)  # before the charts, which take time
    if options.sheet:
        html = page.sheet(parts, folder, _exercises(collection.folders[0]))
    elif parts:
        made = page.make(parts, title="Training results")
        charts = [*made.charts.values()]
        for _ in tables.tracked(drawing.draw_all(charts), "charts", len(charts)):
            pass
        html = page.html_page(made, folder)
    if html is None:
        what = "runs of yours" if options.sheet else "result in it"
        named = ", ".join(map(str, collection.folders))
        raise WorkshopError(f"results {named}: no {what}; `make compare` makes some")
    results.write_text(target, html)
    print(f"Written: {target}")
    return errors.DONE


def _exercises(results: Path) -> "Table":
    """A line for each exercise: how far the participant is."""
    from workshop.exercises import sheet
    from workshop.exercises.progress import Progress
    from workshop.tables import Line, Table

    states, lines = Progress(results), []
    for one in sheet.read_all():
        state = states[one.name]
        so_far = f"{state.green} of {state.items}" if state.checks else ""
        passed = f"passed {state.passed[:10]}" if state.passed else so_far
        lines.append(Line([one.name, one.title, one.when, passed]))
    return Table("The exercises", ["exercise", "what", "when", "so far"], lines, left=range(4))


if __name__ == "__main__":
    sys.exit(main())
