"""Writes a report of all results below some folders: one self-contained HTML page, and the same as
Markdown.

It shows what was run and where, each size's ladder with its proof, what bounds a step and its
kernels, with links to the result files. It needs no GPU.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workshop import errors  # noqa: E402

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import option, run  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402

if TYPE_CHECKING:
    from workshop import results
    from workshop.collection import Collection
    from workshop.report.content import Shown

PAGE, MARKDOWN = "report.html", "report.md"
SHEET = ("my_results.html", "my_results.md")
TITLE = "Training results"
MOST_SHOWN = 50


@dataclass
class Options:
    """The command line."""

    results: list[Path] | None = option(
        "with results; may be repeated (default: results/)", action="append", metavar="DIR"
    )
    output_dir: Path | None = option(
        f"for {PAGE} and {MARKDOWN} (default: results/report/)", metavar="DIR"
    )
    title: str = option("of the report", TITLE, metavar="TEXT")
    top: int = option("kernels a profile", 10)
    sheet: bool = option(
        f"write {' and '.join(SHEET)} instead: your machine, exercises, times and labs filled "
        "in, with room for your name and what you saw"
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _report,
        argv,
        interrupted="interrupted: what is written is whole",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done (broken result files are named in the report), 2 wrong usage\n"
        "or nothing to report, 77 a package is missing, 130 interrupted.",
    )


def _report(options: Options) -> int:
    errors.require("jinja2", "matplotlib", "rich")
    if not 1 <= options.top <= MOST_SHOWN:
        raise WorkshopError(f"--top {options.top}: it must lie between 1 and {MOST_SHOWN}")
    # These import torch, which --help does not need.
    import torch
    from rich.console import Console
    from rich.text import Text

    from workshop import results
    from workshop.collection import Collection

    torch.set_num_threads(1)  # its medians are small: threads would only wait for each other
    collection = Collection(options.results or [results.DEFAULT_FOLDER])
    folder = options.output_dir or results.DEFAULT_FOLDER / "report"
    form = _sheet if options.sheet else _report_pages
    with Console(stderr=True).status("reading results") as status:
        texts = form(collection, folder, options, lambda what: status.update(Text(what)))
    results.write_together(texts)
    print(f"Written: {', '.join(map(str, texts))}")
    return errors.DONE


def _report_pages(
    collection: "Collection", folder: Path, options: Options, progress: "Shown"
) -> dict[Path, "results.Content"]:
    """The text of each file."""
    from workshop import results
    from workshop.profilers.names import printable
    from workshop.report import content, pages

    collection.refresh()
    title = printable(options.title)
    report = content.build(collection, title=title, progress=progress, top=options.top)
    if not (report.devices or report.broken):
        raise WorkshopError(f"{_folders(collection)}: no result in it; `make compare` makes some")
    results.prepare_folder(folder)  # before the pictures, which take time
    return {
        folder / PAGE: pages.html_page(report, folder, progress),
        folder / MARKDOWN: pages.markdown_page(report, folder),
    }


def _sheet(
    collection: "Collection", folder: Path, options: Options, progress: "Shown"
) -> dict[Path, "results.Content"]:
    from workshop import results
    from workshop.report import content, pages

    targets = [folder / name for name in SHEET]
    for target in targets:
        if target.exists():
            raise WorkshopError(
                f"{target} exists, and your notes may be in it: move it, or choose another "
                "--output-dir"
            )
    collection.refresh()
    sheet = content.participants_sheet(collection)
    if not sheet.devices:
        raise WorkshopError(f"{_folders(collection)}: no runs of yours; `make compare` makes some")
    results.prepare_folder(folder)
    return dict(zip(targets, pages.participants_pages(sheet, folder), strict=True))


def _folders(collection: "Collection") -> str:
    return f"results {', '.join(map(str, collection.folders))}"


if __name__ == "__main__":
    sys.exit(main())
