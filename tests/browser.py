"""Chromium without a window, driven by selenium, for tests of pages."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from workshop.show.doc_images import BROWSER_FLAGS, BROWSERS


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A browser that can reach this machine alone, with its profile in a new folder; skips the test
    where it, its driver or selenium is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium or chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*BROWSER_FLAGS, "--window-size=1280,1000", f"--user-data-dir={profile}"):
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


def complaints(browser: Any) -> list[str]:
    """New errors and warnings of the console."""
    return [entry["message"] for entry in browser.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")]  # fmt: skip


def requested(browser: Any) -> set[str]:
    """Addresses that pages newly requested, without the browser's own; inline data has none."""
    messages = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    sent = (m["params"] for m in messages if m["method"] == "Network.requestWillBeSent")
    found = {message["request"]["url"] for message in sent}
    return {url for url in found if not url.startswith(("data:", "blob:", "chrome"))}


def as_opened(browser: Any) -> None:
    """Back to the window's own size, at which it draws faster, and the system's colours."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
