"""The sheets: which exercises there are, what their heads say, their hints, their index, and the
participant's own copies of what a sheet gives to fill."""

import itertools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.exercises.frame import CHECK, COPIES
from workshop.tables import markdown_rows as table
from workshop.versions import ROOT

README = "README.md"
PLACES = ("version*_*/exercises", "labs/*/exercises")
PARTS = ("session 1", "session 2", "profilers", "session 3", "session 4", "take home", "lab")
"""A course's parts, in their order."""
_HEADINGS = {
    "profilers": "The profilers of your GPU",
    "take home": "To take home",
    "lab": "The labs",
}
ORDER = (
    "baseline_analysis memory_analysis bottleneck_identification "
    "fusion_analysis flash_attention rocm_tools_intro "
    "triton_basics custom_kernels performance_debugging "
    "ultra_fusion register_optimization production_deployment "
    "performance_tuning same_bits"
).split()
"""Within a part each builds on the one before. Those of a lab follow by name."""
_HEAD = re.compile(
    rf"# (\S.*)\s+\*\*(\d+) minutes\*\* · ({'|'.join(PARTS)}) · "
    r"(no GPU needed|better with a GPU) · (coding and measuring|coding|measuring)\s"
)
_FORM = "**45 minutes** · session 2 · no GPU needed · coding"
_HINT = re.compile(
    r"<details>\s*<summary>(?P<title>[^<]+)</summary>(?P<text>.*?)</details>", re.DOTALL
)


@dataclass(frozen=True)
class Hint:
    """A folded hint of a sheet, Markdown."""

    title: str
    text: str


@dataclass(frozen=True)
class Sheet:
    """An exercise, as its README.md describes it."""

    folder: Path
    title: str
    minutes: int
    when: str
    """One of PARTS."""
    needs: str
    kind: str
    hints: tuple[Hint, ...]

    @property
    def name(self) -> str:
        return self.folder.name


def read(folder: Path) -> Sheet:
    """The sheet of an exercise.

    Raises:
        WorkshopError: its head is not as the tools need it.
    """
    path = folder / README
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkshopError(f"{path}: can't be read: {error}") from None
    head = _HEAD.match(text)
    if not head:
        raise WorkshopError(f"{path}: it should begin with `# Title` and `{_FORM}`")
    title, minutes, when, needs, kind = head.groups()
    section = text.partition("\n## Hints\n")[2].partition("\n## ")[0]
    hints = tuple(Hint(m["title"].strip(), m["text"].strip()) for m in _HINT.finditer(section))
    return Sheet(folder, title.rstrip(), int(minutes), when, needs, kind, hints)


def folders(root: Path = ROOT) -> list[Path]:
    """The folders of all exercises, by path; each has a check."""
    found = (path for place in PLACES for path in root.glob(f"{place}/*/{README}"))
    return sorted(path.parent for path in found if (path.parent / CHECK).is_file())


def read_all(root: Path = ROOT) -> list[Sheet]:
    """All exercises in the order in which they are done.

    Raises:
        WorkshopError: a sheet's head is not as the tools need it.
    """
    places = {name: place for place, name in enumerate(ORDER)}
    order = lambda one: (PARTS.index(one.when), places.get(one.name, len(ORDER)), one.name)  # noqa: E731
    return sorted(map(read, folders(root)), key=order)


# --- the index, which `make docs` writes into the documents --------------------------------------


def index(sheets: Sequence[Sheet], folder: Path) -> str:
    """Markdown: a table a part, with its minutes added up.

    Args:
        sheets: in their order.
        folder: of the document, from which links start.
    """
    parts = []
    for when, its in itertools.groupby(sheets, key=lambda one: one.when):
        found = list(its)
        heading = _HEADINGS.get(when, when.capitalize())
        rows = [(_link(s, folder), s.title, str(s.minutes), s.needs, s.kind) for s in found]
        lines = table(("exercise", "what", "minutes", "needs", "kind"), rows, (0, 1, 3, 4))
        parts.append(
            f"### {heading}: {sum(one.minutes for one in found)} minutes of exercises\n\n{lines}"
        )
    return "\n\n".join(parts)


def index_of_version(sheets: Sequence[Sheet], folder: Path) -> str:
    """Markdown: one table of a version's exercises, for the document in its folder."""
    if not sheets:
        return "It has no exercises."
    rows = [(_link(one, folder), one.title, one.when, str(one.minutes)) for one in sheets]
    return table(("exercise", "what", "when", "minutes"), rows, range(3))


def _link(sheet: Sheet, folder: Path) -> str:
    return f"[{sheet.name}]({Path(os.path.relpath(sheet.folder, folder)).as_posix()}/)"


# --- the participant's own copies ----------------------------------------------------------------


def make_copies(folder: Path) -> list[Path]:
    """Makes the copies that are missing in an exercise's folder; their paths."""
    made = []
    for given, mine in COPIES.items():
        if (folder / given).is_file() and not (folder / mine).exists():
            try:
                shutil.copyfile(folder / given, folder / mine)
            except OSError as error:
                raise WorkshopError(
                    f"{folder / mine} can't be written ({error.strerror}): work in a copy of the "
                    "repository that is yours"
                ) from None
            made.append(folder / mine)
    return made


def set_aside(folder: Path) -> list[Path]:
    """Renames the copies, unless nothing was written into them; the new paths. One that was set
    aside earlier is replaced."""
    kept = []
    for given, mine in COPIES.items():
        path = folder / mine
        if not path.is_file() or not (folder / given).is_file():
            continue
        if path.read_bytes() == (folder / given).read_bytes():
            path.unlink()
        else:
            kept.append(path.replace(path.with_name(f"{mine}.old")))
    return kept
