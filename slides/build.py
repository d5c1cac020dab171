"""Builds the workshop's four slide decks as .pptx files, their figures from result files.

Charts can be edited in PowerPoint. The notes of a slide say how long it takes, what to say, and
which files its figures are from. A slide whose results are missing says so, with the command that
makes them.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, results
from workshop.arguments import option, run
from workshop.versions import ROOT

if TYPE_CHECKING:
    from slides.measured import Measured
    from slides.pages import Body, Slide

REFERENCE, OUTPUT = ROOT / "results" / "reference", results.DEFAULT_FOLDER / "slides"
DECKS = "workshop_overview profiling_methodology optimization_techniques results_analysis".split()
"""One for each session."""


@dataclass
class Options:
    results: list[Path] = option("folders with results, as yours (default: results/reference)",
                                 [REFERENCE], metavar="DIR")  # fmt: skip
    output_dir: Path = option("for the decks (default: results/slides/)",
                              OUTPUT, metavar="DIR")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(
        Options, _build, argv, interrupted="interrupted: what is written is whole",
        description=__doc__,
        epilog="Exit status: 0 done, 2 wrong usage, 77 a package is missing, 130 interrupted.",
    )  # fmt: skip


def _build(options: Options) -> int:
    errors.require("pptx")
    from slides.measured import Measured
    from slides.pages import Writer

    measured = Measured(options.results)
    folder = results.prepare_folder(options.output_dir)
    for deck in DECKS:
        writer = Writer()
        for slide in read(Path(__file__).with_name(f"{deck}.md"), measured):
            writer.add(slide)
        results.write_together({folder / f"{deck}.pptx": writer.save})
        print(f"Written: {folder / deck}.pptx")
    return errors.DONE


def read(path: Path, measured: "Measured") -> "list[Slide]":
    """The slides of a deck's file.

    A slide begins with `## Title (3 min)`. Then, a line each: `!` directives of figures.py, ` | `
    between their arguments; `- ` texts of a list; `| ` cards, ` | ` between heading and texts; and
    `> ` the caption. All else is what the presenter says, in paragraphs; `Ask:` and `Show it:`
    begin one. Braces in title and caption are values of the directives, in Python's format.

    Raises:
        WorkshopError: what a slide shows is no longer there.
    """
    texts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    minutes = [int(text.splitlines()[0].rpartition("(")[2].removesuffix(" min)")) for text in texts]
    slides, start = [], 0
    for text, its in zip(texts, minutes, strict=True):
        time = f"Time: {its} minutes, from {start} to {start + its} of {sum(minutes)}"
        slides.append(_slide(text, time, measured))
        start += its
    return slides


def _slide(text: str, time: str, measured: "Measured") -> "Slide":
    from slides import figures
    from slides.measured import NotMeasured
    from slides.pages import Cards, Points, Slide

    measured.begin()
    first, *lines = text.splitlines()
    marks = ("!", "- ", "| ", "> ")
    directives, points, cards, captions = (
        [line[len(mark) :] for line in lines if line.startswith(mark)] for mark in marks
    )
    said = "\n".join(line for line in lines if not line.startswith(marks)).strip()
    title, caption = first.rpartition(" (")[0], " ".join(captions)
    bodies: list[Body] = [Points(points)] if points else []
    bodies += [Cards([card.split(" | ") for card in cards])] if cards else []
    words: dict[str, object] = {}
    for directive in directives:
        name, _, rest = directive.partition(" ")
        try:
            body, its = getattr(figures, name)(measured, *(rest.split(" | ") if rest else ()))
            words |= its
        except NotMeasured as reason:  # a title without a number may stay
            body = Points([f"To measure it: {reason.command}"])
            title = f"Not measured: {reason.what}" if "{" in title else title
            caption = "" if "{" in caption else caption
        bodies.append(body)
    paragraphs = re.split(r"\n\n|\n(?=Ask:|Show it:)", said)
    notes = [time, *(" ".join(part.split()) for part in paragraphs), *_files(measured)]
    source = "; ".join(dict.fromkeys(measured.sources))
    title, caption = title.format(**words), caption.format(**words)
    return Slide(title, bodies, caption, "\n\n".join(notes), source)


def _files(measured: "Measured") -> list[str]:
    """The files of a slide's figures, by folder."""
    by_folder: dict[str, dict[str, None]] = {}
    for path in measured.files:
        start = ROOT if path.is_relative_to(ROOT) else Path.cwd()
        by_folder.setdefault(os.path.relpath(path.parent, start), {})[path.name] = None
    lines = [f"{folder}: {', '.join(names)}" for folder, names in sorted(by_folder.items())]
    return ["\n".join(["From these files:", *lines])] if lines else []


if __name__ == "__main__":
    sys.exit(main())
