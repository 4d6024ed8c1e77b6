"""Pages in a real browser without a window: Chromium, where there is one."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT


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
    browser.set_script_timeout(60)
    try:
        emulate = browser.execute_cdp_cmd
        resize(browser, width, scheme)
        emulate("Network.enable", {})
        emulate("Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0,
                                                     "uploadThroughput": 0})  # fmt: skip
        browser.get(page.as_uri())
        share_functions(browser)
        yield browser
    finally:
        browser.quit()


def share_functions(browser: Any) -> None:
    """Make the functions of a page's script that tests call global."""
    browser.execute_script("Object.assign(window, window.pages ?? {})")


def wait_for(browser: Any, script: str) -> None:
    """Wait until a script returns something true. The page asks itself: asking from here costs as much as it does."""
    browser.execute_async_script(f"""
        const [done, test] = [arguments[0], () => {{ {script} }}];
        const check = () => (test() ? done() : setTimeout(check, 20));
        check();
    """)


def resize(browser: Any, width: int, scheme: str) -> None:
    """Show the page on a screen of a width, in a colour scheme."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    schemes = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", schemes)


def barriers(browser: Any) -> list[str]:
    """Return what axe finds on the page that keeps readers out, serious or critical: rule and elements; skip the test
    without axe, but in CI, which has it."""
    axe = ROOT / "docs/lab/node_modules/axe-core/axe.min.js"
    if not axe.exists():
        assert "CI" not in os.environ, "`npm ci` did not run in docs/lab"
        pytest.skip("`npm ci` did not run in docs/lab")
    if browser.execute_script("return !window.axe"):
        browser.execute_script(axe.read_text(encoding="utf-8"))
    return browser.execute_async_script("""
        const heavy = ({ impact }) => impact === "serious" || impact === "critical";
        const told = ({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(", ")}`;
        axe.run({ reporter: "no-passes" }).then(({ violations }) => arguments[0](violations.filter(heavy).map(told)));
    """)


def complaints(browser: Any) -> list[str]:
    """Return the errors and warnings of the console."""
    return [entry["message"] for entry in browser.get_log("browser")]


def embedded(page: str, title: str) -> list[Any]:
    """Return the data of the elements below a heading that scripts draw, from the HTML of a page."""
    section = page.split(f"<h2>{html.escape(title)}</h2>")[1].split("</section>")[0]
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', section)]


def told(browser: Any, title: str, *keys: str) -> list[str]:
    """Return what the chart below a heading tells after each key, pressed from its beginning."""
    heading = next(h for h in browser.find_elements("tag name", "h2") if h.text == title)
    chart = heading.find_element("xpath", "..").find_element("css selector", ".chart")
    plot, tip = chart.find_element("css selector", "[role=application]"), chart.find_element("css selector", ".tip")
    texts = []
    for key in keys:
        plot.send_keys(key)
        texts.append(tip.text)
    return texts
