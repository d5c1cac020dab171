"""Writes the documentation's tables and pictures: what was measured from the result files in
results/reference/, and the exercises from their sheets.

PERFORMANCE_RESULTS.md is written whole; of the other documents the parts between markers are. No
figure there is typed by hand. The picture of the page takes Chromium; without it it is left, and
named. `--check` changes nothing and exits 1 if something is stale; it needs no browser.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from labs.cifar10_roofline import documents as training
from labs.data_pipeline import documents as pipeline
from labs.inference_benchmark import documents as inference
from labs.scale_out import documents as scaling
from labs.text_generation import documents as generation
from workshop import errors, results
from workshop.arguments import parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.exercises import sheet
from workshop.show import doc_images, documents
from workshop.show.documents import Recorded
from workshop.versions import BASELINE, ROOT, VERSIONS

REFERENCE = ROOT / "results" / "reference"
FP8 = ROOT / "experiments" / "fp8.md"
Fill = Callable[[str], str]
"""Makes the text between two markers of the one that is there."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    arguments = parse(parser, argv)
    return errors.exit_status(
        lambda: _update(check=arguments.check), interrupted="interrupted: what is written is whole"
    )


def _update(*, check: bool) -> int:
    recorded = Recorded(REFERENCE)
    stale = {path: text for path, text in render(recorded).items() if _read(path) != text}
    images = [image for image in doc_images.find(recorded.collection) if image.stale]
    if check:
        for path in (*stale, *(image.path for image in images)):
            print(f"{path.relative_to(ROOT)} is not what its result files say: run make docs")
        return errors.ANSWER_IS_NO if stale or images else errors.DONE
    for path, text in stale.items():
        results.write_text(path, text)
        print(f"Written: {path.relative_to(ROOT)}")
    for image in images:
        name = image.path.relative_to(ROOT)
        try:
            doc_images.make(image)
            print(f"Written: {name}")
        except NotOnThisMachine as error:
            print(f"{name} is left as it was: {error}")
    return errors.DONE


def render(recorded: Recorded) -> dict[Path, str]:
    """The documents as the result files would have them."""
    texts = {ROOT / "PERFORMANCE_RESULTS.md": documents.performance(recorded)}
    for path, part, fill in parts(recorded):
        head, old, tail = _split(texts.get(path) or _read(path), part, path)
        texts[path] = f"{head}\n{fill(old)}\n{tail}"
    return texts


def parts(recorded: Recorded) -> Iterator[tuple[Path, str, Fill]]:
    """Each document, the name of two markers in it, and what makes the text between them."""
    of_results = (
        (ROOT / "README.md", "ladder", documents.ladder),
        (ROOT / "docs" / "trust.md", "determinism", documents.same_seed),
        (FP8, "predictions", documents.fp8_predictions),
        (FP8, "float8", documents.fp8_times),
    )
    for path, part, make in of_results:
        yield path, part, _given(make(recorded))
    sheets = sheet.read_all()
    for key, version in VERSIONS.items():
        readme = version.path.with_name("README.md")
        its = [one for one in sheets if readme.parent in one.folder.parents]
        yield readme, "profiles", _given(documents.profiles(recorded, key))
        yield readme, "exercises", _given(sheet.index_of_version(its, readme.parent))
        if key != BASELINE:
            yield readme, "ideas", functools.partial(documents.ideas, recorded, key)
    runs = recorded.lab_runs
    texts = {
        ROOT / "exercises" / "README.md": {"exercises": sheet.index(sheets, ROOT / "exercises")},
        ROOT / "exercises" / "instructor_guide.md": {"steps": documents.steps(recorded.collection)},
    }
    for path, its in (
        *texts.items(),
        *(pair for lab in (inference, training, pipeline, generation, scaling)
          for pair in lab.parts(runs).items()),
    ):  # fmt: skip
        for part, text in its.items():
            yield path, part, _given(text)
    yield inference.CHECKLIST, "techniques", functools.partial(inference.techniques, runs)


def _given(text: str) -> Fill:
    return lambda _: text


def _split(text: str, part: str, document: Path) -> tuple[str, str, str]:
    """The text before, between and after a part's markers.

    Raises:
        WorkshopError: a pair of markers is not there once.
    """
    begin, end = f"<!-- {part}: begin, written by make docs -->", f"<!-- {part}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        name = document.relative_to(ROOT)
        raise WorkshopError(f"{name}: expected one line {begin!r} and one {end!r}")
    head, rest = text.split(begin)
    filling, tail = rest.split(end)
    return head + begin, filling, end + tail


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
