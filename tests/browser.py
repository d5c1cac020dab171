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
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def skip_without_browser() -> tuple[str, str]:
    """Where Chromium and its driver are; skips the test, with the reason, where one is missing."""
    pytest.importorskip("selenium", reason="no selenium: pip install -r requirements-test.txt")
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "Chromium" if browser is None else "chromedriver"
        pytest.skip(f"no {missing}: on Debian apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def open_browser(profile: Path, *, size: tuple[int, int] = (1280, 1000)) -> Iterator[Any]:
    """A browser that can reach this machine alone, with a profile of its own in a new folder."""
    from selenium import webdriver

    browser, driver = skip_without_browser()
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
    """Addresses that pages newly requested; inline data has none."""
    messages = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    found = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    return {url for url in found if not url.startswith(("data:", "blob:"))}


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
