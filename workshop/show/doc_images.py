"""The pictures in docs/images: whether they still show what they should, and how they are made.

A picture carries a fingerprint of what decides its content, in a text field of the PNG. A stale one
is so found without a browser, and one that is not is left as it is. Chromium without a window takes
the picture of the page, and prints the cheat sheet, whose fingerprint is in the PDF's title.
"""

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.collection import Collection
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.show import cheat_sheet
from workshop.show.page import Choice
from workshop.versions import ROOT

FOLDER = ROOT / "docs" / "images"
REFERENCE = ROOT / "results" / "reference"
TRACES_PAGE = ROOT / "docs" / "reading_a_trace.md"
"""Its commands draw the pictures of traces."""
_FIELD = "Fingerprint"
_DRAWN_TRACE = re.compile(
    r"^trace=(\S+)$|^python -m workshop\.profilers draw \$trace (.*)$", re.MULTILINE
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = [
    *"--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split(),
    *"--disable-background-networking --disable-component-update --disable-dev-shm-usage".split(),
    *("--force-color-profile=srgb", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
"""No window and no network."""
_PAGE_SIZE = "1280,1350"
"""In pixels: what a screen shows of the page."""


@dataclass(frozen=True)
class Image:
    """A picture; `make` writes it to a path."""

    path: Path
    fingerprint: str
    make: Callable[[Path], object]

    @property
    def stale(self) -> bool:
        from PIL import Image as Pillow

        if not self.path.is_file():
            return True
        if self.path.suffix == ".pdf":
            return self.fingerprint.encode() not in self.path.read_bytes()
        with Pillow.open(self.path) as picture:
            return picture.info.get(_FIELD) != self.fingerprint


def find(collection: Collection) -> list[Image]:
    """All pictures of the reference results, with the fingerprints that they should have."""
    page = Image(FOLDER / "dashboard.png", _fingerprint_of_page(collection), _take_page)
    found, trace = [page, _cheat_sheet()], ""
    for assigned, words in _DRAWN_TRACE.findall(TRACES_PAGE.read_text(encoding="utf-8")):
        trace = assigned or trace
        found += [_trace([trace, *shlex.split(words)])] if words else []
    return found


def make(image: Image) -> None:
    """Makes a picture anew.

    Raises:
        NotOnThisMachine: what it takes is missing; the old one stays.
    """
    from PIL import Image as Pillow
    from PIL.PngImagePlugin import PngInfo

    stamp = PngInfo()
    stamp.add_text(_FIELD, image.fingerprint)
    with results.atomic_path(image.path) as path:
        image.make(path)
        if image.path.suffix == ".pdf":
            return
        with Pillow.open(path) as picture:
            picture.load()
            picture.convert("RGB").quantize().save(path, pnginfo=stamp, optimize=True)


def _fingerprint(*parts: bytes | str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:16]


def _trace(words: list[str]) -> Image:
    """The picture of a command, which names the trace first."""
    trace, at = ROOT / words[0], words.index("--output") + 1
    code = (ROOT / "workshop" / "profilers" / name for name in ("timeline.py", "picture.py"))
    read = [path.read_bytes() for path in (trace, *code)]

    def draw(path: Path) -> None:
        own = [*words[:at], str(path), *words[at + 1 :]]
        command = [sys.executable, "-m", "workshop.profilers", "draw", *own]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise WorkshopError(f"{shlex.join(command)}: {done.stderr.strip()}")

    return Image(ROOT / words[at], _fingerprint(*read, shlex.join(words)), draw)


# --- the page ------------------------------------------------------------------------------------


def _fingerprint_of_page(collection: Collection) -> str:
    """A hash of what a first visitor sees, and of the code that draws it."""
    from workshop.show import server

    seen = server.Results(collection).html(Choice()).partition('<section class="device"')[0]
    code = (Path(__file__).with_name(name) for name in ("charts.py", "drawing.py"))
    return _fingerprint(seen, *(path.read_bytes() for path in code), _PAGE_SIZE)


def _browser() -> list[str]:
    """Raises NotOnThisMachine: there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise NotOnThisMachine("no Chromium: on Debian apt-get install chromium")
    return [browser, *BROWSER_FLAGS]


def _cheat_sheet() -> Image:
    fingerprint = _fingerprint(cheat_sheet.SOURCE.read_bytes(), cheat_sheet.STYLE)
    title = f"Cheat sheet {fingerprint}"
    path = cheat_sheet.SOURCE.with_suffix(".pdf")
    return Image(path, fingerprint, lambda pdf: cheat_sheet.write(pdf, title, _browser()))


def _take_page(path: Path) -> None:
    browser = _browser()
    command = [sys.executable, "analysis_tools/performance_dashboard.py", "--no-browser",
               "--port", "0", "--results", str(REFERENCE.relative_to(ROOT))]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            address = running.stdout.readline().split()[0]
            with tempfile.TemporaryDirectory() as profile:
                own = (f"--user-data-dir={profile}", f"--window-size={_PAGE_SIZE}")
                how = ("--virtual-time-budget=20000", f"--screenshot={path}", address)
                subprocess.run([*browser, *own, *how], check=True)
        finally:
            running.terminate()
