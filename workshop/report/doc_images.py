"""The pictures in docs/images: what they show, whether they still show it, and how they are made.

A picture carries a fingerprint of what decides its content, in a text field of the PNG. A stale one
is so found without a browser, and one that is not is left as it is.
"""

import dataclasses
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import results
from workshop.collection import Collection
from workshop.errors import WorkshopError
from workshop.report import browser, content, pages
from workshop.versions import ROOT

FOLDER = ROOT / "docs" / "images"
REFERENCE = ROOT / "results" / "reference"
TRACES_PAGE = ROOT / "docs" / "reading_a_trace.md"
"""Its commands draw the pictures of traces."""
_FIELD = "Fingerprint"
_DRAWN_TRACE = re.compile(r"^python -m workshop\.profilers draw (tests/.*)$", re.MULTILINE)
_DASHBOARD_SIZE, _REPORT_SIZE = (1280, 1450), (1440, 1225)
"""In pixels: what a screen shows of the page."""
_SHOWN_BLOCKS = 3
"""The first blocks of the dashboard's view: the table and two figures."""
_WAIT_S = 60


@dataclass(frozen=True)
class Image:
    """A picture; `make` writes it to a path."""

    path: Path
    fingerprint: str
    make: Callable[[Path], object]

    @property
    def stale(self) -> bool:
        return _stamp_of(self.path) != self.fingerprint


def find(collection: Collection) -> list[Image]:
    """All pictures of the reference results, with the fingerprints that they should have."""
    traces = _DRAWN_TRACE.findall(TRACES_PAGE.read_text(encoding="utf-8").replace("\\\n", " "))
    return [
        Image(FOLDER / "dashboard.png", _of_dashboard(collection), _take_dashboard),
        Image(
            FOLDER / "report.png",
            _of_report(collection),
            lambda path: _take_report(collection, path),
        ),
        *(_trace(shlex.split(words)) for words in traces),
    ]


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
        with Pillow.open(path) as picture:
            picture.load()
            picture.convert("RGB").quantize().save(path, pnginfo=stamp, optimize=True)


def _stamp_of(path: Path) -> str:
    from PIL import Image as Pillow

    if not path.is_file():
        return ""
    with Pillow.open(path) as picture:
        return str(picture.info.get(_FIELD, ""))


def _fingerprint(*parts: bytes | str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:16]


# --- traces --------------------------------------------------------------------------------------


def _trace(words: list[str]) -> Image:
    """The picture of a command, which names the trace first."""
    trace, at = ROOT / words[0], words.index("--output") + 1
    code = (ROOT / "workshop" / "profilers" / name for name in ("timeline.py", "picture.py"))
    inputs = [path.read_bytes() for path in (trace, *code)]

    def draw(path: Path) -> None:
        own = [*words[:at], str(path), *words[at + 1 :]]
        command = [sys.executable, "-m", "workshop.profilers", "draw", *own]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise WorkshopError(f"{shlex.join(command)}: {done.stderr.strip()}")

    return Image(ROOT / words[at], _fingerprint(*inputs, shlex.join(words)), draw)


# --- pages ---------------------------------------------------------------------------------------


def _of_dashboard(collection: Collection) -> str:
    """The choices and the blocks that a first visitor sees, and how the page looks."""
    from plotly.utils import PlotlyJSONEncoder

    from workshop.dashboard import blocks, layout, server
    from workshop.dashboard.data import Choice, Snapshot

    snapshot = Snapshot(collection)
    choice = snapshot.settle(Choice())
    shown = blocks.view(blocks.OVERVIEW, snapshot, choice)[:_SHOWN_BLOCKS]
    # The sentences below a table name its folder, as seen from the current one.
    shown = [dataclasses.replace(block, after=()) for block in shown]
    seen = [*layout.controls(snapshot, choice, blocks.OVERVIEW), *layout.content(shown)]
    style = (server.ASSETS / "style.css").read_bytes()
    # The choice of a profile has its folder, which is another one in each checkout.
    text = json.dumps(seen, cls=PlotlyJSONEncoder).replace(str(ROOT), "")
    return _fingerprint(text, *blocks.VIEWS, style, str(_DASHBOARD_SIZE))


def _take_dashboard(path: Path) -> None:
    from workshop.dashboard import blocks

    command = [sys.executable, "analysis_tools/performance_dashboard.py", "--no-browser",
               "--port", "0", "--results", str(REFERENCE.relative_to(ROOT))]  # fmt: skip
    with tempfile.TemporaryDirectory() as profile, browser.opened(Path(profile)) as window:
        browser.wear(window, "light")
        browser.resize(window, *_DASHBOARD_SIZE)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            try:
                window.get(running.stdout.readline().split()[0])
                choice = f"//label[.='{blocks.OVERVIEW}']"
                _until(window, lambda: window.find_elements("xpath", choice))
                window.find_element("xpath", choice).click()
                _until(window, lambda: window.execute_script(_ALL_DRAWN))
                window.save_screenshot(str(path))
            finally:
                running.terminate()


_ALL_DRAWN = """const figures = [...document.querySelectorAll("main figure")];
return figures.length > 1 && figures.every(figure => figure.querySelector(".main-svg"))"""


def _until(window: Any, condition: Callable[[], object]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(window, _WAIT_S).until(lambda _: condition())


def _of_report(collection: Collection) -> str:
    """The summary, the first device and the contents, and how the page looks."""
    report = content.build(collection, title="Training results")
    text = pages.markdown_page(report, REFERENCE)
    headings = re.findall(r"^#+ .*", text, re.MULTILINE)
    files = (pages.TEMPLATES / name for name in ("report.html.j2", "report.css"))
    look = [path.read_bytes() for path in files]
    return _fingerprint(text.split("\n### ")[0], *headings, *look, str(_REPORT_SIZE))


def _take_report(collection: Collection, path: Path) -> None:
    report = content.build(collection, title="Training results")
    for section in (one for device in report.devices for one in device.sections):
        section.pictures = []  # below what is seen, and slow to draw
    for device in report.devices:
        device.profile_pictures = []
    with tempfile.TemporaryDirectory() as folder, browser.opened(Path(folder, "b")) as window:
        page = Path(folder, "report.html")
        page.write_text(pages.html_page(report, Path(folder)), encoding="utf-8")
        browser.wear(window, "light")
        browser.resize(window, *_REPORT_SIZE)
        window.get(page.as_uri())
        window.save_screenshot(str(path))
