"""Takes the README's picture of the dashboard, over the checked-in reference results.

    .venv/bin/python tests/take_dashboard_picture.py

It needs what the browser tests need: selenium, Chromium and its driver.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import browser as chromium

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "dashboard.png"
WIDTH, HEIGHT = 1280, 1110
"""In pixels: the choices, the table and the first two figures."""


def main() -> None:
    command = [sys.executable, "analysis_tools/performance_dashboard.py", "--no-browser",
               "--port", "0", "--results", "results/reference"]  # fmt: skip
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running,
        tempfile.TemporaryDirectory() as profile,
        chromium.open_browser(Path(profile)) as window,
    ):
        assert running.stdout is not None
        chromium.wear(window, "light")
        chromium.resize(window, WIDTH, HEIGHT)
        window.get(running.stdout.readline().split()[0])
        time.sleep(3)
        window.find_element("xpath", "//label[.='Speed and memory']").click()
        time.sleep(3)  # every figure is drawn by then
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        window.save_screenshot(str(TARGET))
        running.terminate()
    print(f"Written: {os.path.relpath(TARGET)}, {TARGET.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
