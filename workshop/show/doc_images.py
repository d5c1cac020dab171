"""The pictures in docs/images: whether they still show what they should, and how they are made.

A picture carries a fingerprint of what decides its content, in a text field of the PNG. A stale one
is so found without a browser, and one that is not is left as it is. Chromium without a window,
driven by selenium, takes the picture of the page; tests look at pages with it.
"""

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import errors, results
from workshop.collection import Collection
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.show.page import Choice
from workshop.versions import ROOT

FOLDER = ROOT / "docs" / "images"
REFERENCE = ROOT / "results" / "reference"
TRACES_PAGE = ROOT / "docs" / "reading_a_trace.md"
"""Its commands draw the pictures of traces."""
_FIELD = "Fingerprint"
_DRAWN_TRACE = re.compile(r"^python -m workshop\.profilers draw (tests/.*)$", re.MULTILINE)
_PAGE_SIZE = 1280, 1350
"""In pixels: what a screen shows of the page."""
_WAIT_S = 60
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--force-color-profile=srgb --hide-scrollbars"
).split()
_NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


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
        with Pillow.open(self.path) as picture:
            return picture.info.get(_FIELD) != self.fingerprint


def find(collection: Collection) -> list[Image]:
    """All pictures of the reference results, with the fingerprints that they should have."""
    traces = _DRAWN_TRACE.findall(TRACES_PAGE.read_text(encoding="utf-8").replace("\\\n", " "))
    page = Image(FOLDER / "dashboard.png", _fingerprint_of_page(collection), _take_page)
    return [page, *(_trace(shlex.split(words)) for words in traces)]


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
    return _fingerprint(seen, *(path.read_bytes() for path in code), str(_PAGE_SIZE))


def _take_page(path: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    command = [sys.executable, "analysis_tools/performance_dashboard.py", "--no-browser",
               "--port", "0", "--results", str(REFERENCE.relative_to(ROOT))]  # fmt: skip
    with tempfile.TemporaryDirectory() as profile, opened(Path(profile)) as window:
        wear(window, "light")
        resize(window, *_PAGE_SIZE)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            try:
                window.get(running.stdout.readline().split()[0])
                drawn = "return document.querySelector('#first svg') !== null"
                WebDriverWait(window, _WAIT_S).until(lambda _: window.execute_script(drawn))
                window.save_screenshot(str(path))
            finally:
                running.terminate()


@contextmanager
def opened(profile: Path, *, size: tuple[int, int] = (1280, 1000)) -> Iterator[Any]:
    """A browser that can reach this machine alone, with its profile in a new folder.

    Raises:
        NotOnThisMachine: the browser, its driver or selenium is missing.
    """
    errors.require("selenium")
    from selenium import webdriver

    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "Chromium" if browser is None else "chromedriver"
        raise NotOnThisMachine(f"no {missing}: on Debian apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    window = f"--window-size={size[0]},{size[1]}"
    for flag in (*_FLAGS, _NO_NETWORK, window, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield running
    finally:
        running.quit()


def wear(browser: Any, theme: str) -> None:
    """Sets the system's theme, "light" or "dark"."""
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def resize(browser: Any, width: int, height: int) -> None:
    """To an exact size of the page, below what the smallest window allows as well."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
