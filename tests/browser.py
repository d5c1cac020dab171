"""A real browser for tests of pages: Chromium, driven by selenium."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--force-color-profile=srgb --hide-scrollbars"
).split()
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@contextmanager
def open_browser(profile: Path, *, size: tuple[int, int] = (1280, 1000)) -> Iterator[Any]:
    """A browser that can reach this machine alone, with a profile of its own in a new folder; skips
    the test, with the reason, where one or its driver is missing."""
    pytest.importorskip("selenium", reason="no selenium: pip install -r requirements-test.txt")
    from selenium import webdriver

    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "Chromium" if browser is None else "chromedriver"
        pytest.skip(f"no {missing}: on Debian apt-get install chromium chromium-driver")
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


def wear(browser: Any, theme: str) -> None:
    """Sets the system's theme, "light" or "dark"."""
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def resize(browser: Any, width: int, height: int) -> None:
    """To an exact size of the page, below what the smallest window allows as well."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def as_opened(browser: Any) -> None:
    """Back to the window's own size, at which it draws faster, and the system's colours."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
