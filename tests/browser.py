"""Pages in a real browser without a window: Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def browsing(page: Path, width: int = 1200, scheme: str = "light") -> Iterator[Any]:
    """Selenium's driver with the page open; skips the test where there is no Chromium, but in CI, which has one."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        assert "CI" not in os.environ, "chromium and chromedriver are not installed"
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        emulate = browser.execute_cdp_cmd
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        emulate("Emulation.setDeviceMetricsOverride", size)
        emulate("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        emulate("Network.enable", {})
        emulate("Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0,
                                                     "uploadThroughput": 0})  # fmt: skip
        browser.get(page.as_uri())
        yield browser
    finally:
        browser.quit()


def complaints(browser: Any) -> list[str]:
    """Return the errors and warnings of the console."""
    return [entry["message"] for entry in browser.get_log("browser")]


def traces(browser: Any, title: str) -> list[dict[str, Any]]:
    """Return the traces of the figure below a heading, as drawn."""
    script = """
        const heading = [...document.querySelectorAll("h2")].find((h) => h.textContent === arguments[0]);
        const plain = (values) => values && Array.from(values, (v) => (ArrayBuffer.isView(v) ? Array.from(v) : v));
        return heading.parentNode.querySelector(".figure").data.map((t) => ({ ...t, x: plain(t.x), y: plain(t.y) }));
    """
    found: list[dict[str, Any]] = browser.execute_script(script, title)
    return found
