"""Writes a report of all results below some folders: one self-contained HTML page, and the same as
Markdown.

It shows what was run and where, each size's ladder with its proof, what bounds a step and its
kernels, with links to the result files. It needs no GPU.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workshop import errors  # noqa: E402

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import parse  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workshop.compare.collection import Collection
    from workshop.report.content import Progress

NEEDS = ("jinja2", "matplotlib", "rich")
PAGE, MARKDOWN, TEMPLATE = "report.html", "report.md", "my_results.md"
TITLE = "Training results"
MOST_SHOWN = 50


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done (broken result files are named in the report), 2 wrong usage\n"
        "or nothing to report, 77 a package is missing, 130 interrupted.",
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder with results, once for each (default: results/ of this checkout)",
    )
    add(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help=f"{PAGE} and {MARKDOWN} go there (default: results/report/ of this checkout)",
    )
    add("--title", default=TITLE, metavar="TEXT", help="of the report (default: %(default)s)")
    add("--top", type=int, default=10, metavar="N", help="kernels a profile (default %(default)s)")
    add(
        "--template",
        action="store_true",
        help=f"write {TEMPLATE} instead: your machine and times filled in, with room for your name "
        "and what you saw",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _report(arguments), interrupted="interrupted: what is written is whole"
    )


def _report(arguments: argparse.Namespace) -> int:
    _check(arguments)
    # These import torch, which --help does not need.
    import torch

    from workshop import results
    from workshop.compare.collection import Collection

    torch.set_num_threads(1)  # its medians are small: threads would only wait for each other
    collection = Collection(arguments.results or [results.DEFAULT_FOLDER])
    folder = arguments.output_dir or results.DEFAULT_FOLDER / "report"
    if arguments.template:
        written = _write_template(collection, folder)
    else:
        written = _write_report(collection, folder, arguments.title, arguments.top)
    print(f"Written: {', '.join(map(str, written))}")
    return errors.DONE


def _check(arguments: argparse.Namespace) -> None:
    errors.require(*NEEDS)
    if not 1 <= arguments.top <= MOST_SHOWN:
        raise WorkshopError(f"--top {arguments.top}: it must lie between 1 and {MOST_SHOWN}")


@contextlib.contextmanager
def _progress() -> "Iterator[Progress]":
    """Shows what is being worked on, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    stderr = Console(stderr=True)
    what = TextColumn("{task.description}", markup=False)  # names from files
    columns = (SpinnerColumn(), TimeElapsedColumn(), what)
    shown = Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=True)
    with shown:
        task = shown.add_task("reading results", total=None)
        yield lambda text: shown.update(task, description=text)


def _write_report(collection: "Collection", folder: Path, title: str, top: int) -> list[Path]:
    """Both forms, or none."""
    from workshop import results
    from workshop.profilers.names import printable
    from workshop.report import content, pages

    with _progress() as progress:
        collection.refresh()
        report = content.build(collection, title=printable(title), progress=progress, top=top)
        if not (report.devices or report.broken):
            raise WorkshopError(
                f"{_folders(collection)}: no result in it; `make compare` makes some"
            )
        results.prepare_folder(folder)
        texts = {
            folder / PAGE: pages.html_page(report, folder, progress),
            folder / MARKDOWN: pages.markdown_page(report, folder),
        }
    results.write_together(texts)
    return list(texts)


def _write_template(collection: "Collection", folder: Path) -> list[Path]:
    from workshop import results
    from workshop.report import content, pages

    target = folder / TEMPLATE
    if target.exists():
        raise WorkshopError(
            f"{target} exists, and your notes may be in it: move it, or choose another --output-dir"
        )
    with _progress():
        collection.refresh()
        devices = content.own_ladders(collection)
    if not devices:
        raise WorkshopError(f"{_folders(collection)}: no runs of yours; `make compare` makes some")
    results.prepare_folder(folder)
    results.write_text(target, pages.participants_page(devices, folder))
    return [target]


def _folders(collection: "Collection") -> str:
    return f"results {', '.join(map(str, collection.folders))}"


if __name__ == "__main__":
    sys.exit(main())
