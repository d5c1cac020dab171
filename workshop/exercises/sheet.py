"""The sheets: which exercises there are, what their heads say, their hints."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.versions import ROOT

README, CHECK = "README.md", "check.py"
PLACES = ("version*_*/exercises", "labs/*/exercises")
SESSION_MINUTES = {1: 45, 2: 60, 3: 60, 4: 45}
TAKE_HOME, LAB = 5, 6
"""The numbers of what comes after the sessions, and of a lab, which has its own hours."""
SESSIONS = (*SESSION_MINUTES, TAKE_HOME, LAB)
_NAMES = {TAKE_HOME: "take home", LAB: "lab"}
ORDER = (
    "baseline_analysis memory_analysis bottleneck_identification "
    "fusion_analysis flash_attention rocm_tools_intro "
    "triton_basics custom_kernels performance_debugging "
    "ultra_fusion register_optimization production_deployment "
    "performance_tuning"
).split()
"""Within a session each builds on the one before. Those of a lab follow by name."""
_TITLE = re.compile(r"# (\S.*)")
_HEAD = re.compile(
    r"\*\*(\d+) minutes\*\* · (?:session ([1-4])|(take home|lab)) · "
    r"(no GPU needed|better with a GPU) · (coding and measuring|coding|measuring)"
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
    session: int
    """1 to 4, TAKE_HOME or LAB."""
    needs: str
    kind: str
    hints: tuple[Hint, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def when(self) -> str:
        return session_name(self.session)


def session_name(number: int) -> str:
    return _NAMES.get(number, f"session {number}")


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
    lines = [line for line in text.splitlines() if line.strip()][:2]
    title = _TITLE.fullmatch(lines[0].rstrip()) if lines else None
    head = _HEAD.fullmatch(lines[1].strip()) if len(lines) == 2 else None
    if not title or not head:
        raise WorkshopError(f"{path}: it should begin with `# Title` and `{_FORM}`")
    return Sheet(
        folder=folder,
        title=title[1],
        minutes=int(head[1]),
        session=int(head[2]) if head[2] else {"lab": LAB}.get(head[3], TAKE_HOME),
        needs=head[4],
        kind=head[5],
        hints=tuple(Hint(m["title"].strip(), m["text"].strip()) for m in _HINT.finditer(text)),
    )


def folders(root: Path = ROOT) -> list[Path]:
    """The folders of all exercises, by path; each has a check."""
    found = (path for place in PLACES for path in root.glob(f"{place}/*/{README}"))
    return sorted(path.parent for path in found if (path.parent / CHECK).is_file())


def read_all(root: Path = ROOT) -> tuple[list[Sheet], list[str]]:
    """All exercises in the order in which they are done, and what is wrong with the sheets that
    can't be read, in sentences."""
    sheets, problems = [], []
    for folder in folders(root):
        try:
            sheets.append(read(folder))
        except WorkshopError as error:
            problems.append(str(error))
    for first, second in itertools.pairwise(sorted(sheets, key=lambda one: one.name)):
        if first.name == second.name:
            problems.append(f"{first.folder} and {second.folder}: two exercises of one name")
    return sorted(sheets, key=_place), problems


def _place(sheet: Sheet) -> tuple[int, int, str]:
    place = ORDER.index(sheet.name) if sheet.name in ORDER else len(ORDER)
    return sheet.session, place, sheet.name
