"""The browser of workshop/show/doc_images.py, for tests of pages."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from workshop.errors import NotOnThisMachine
from workshop.show import doc_images as chromium
from workshop.show.doc_images import resize as resize
from workshop.show.doc_images import wear as wear


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """As `opened`; skips the test, with the reason, where something is missing."""
    with ExitStack() as stack:
        try:
            running = stack.enter_context(chromium.opened(profile))
        except NotOnThisMachine as error:
            pytest.skip(str(error))
        yield running


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
