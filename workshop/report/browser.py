"""Chromium without a window, driven by selenium: it takes pictures of pages and shows them to
tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workshop import errors
from workshop.errors import NotOnThisMachine

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--force-color-profile=srgb --hide-scrollbars"
).split()
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


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
    for flag in (*_FLAGS, NO_NETWORK, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={size[0]},{size[1]}")
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
