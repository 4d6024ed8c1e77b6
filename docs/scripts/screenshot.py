"""Photograph the section of a page in which its model runs, as docs/page.png.

python -m jaxformer inspect runs/quick --prompt "The people of the United States and the Government of the"
python -m docs.scripts.screenshot runs/quick/inspect.html [LAYER HEAD]
"""

import base64
import io
import sys
from pathlib import Path

from PIL import Image
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import browsing

PICTURE = Path(__file__).resolve().parents[1] / "page.png"
WIDTH, COLOURS = 1200, 128
"""Pixels of the window, and colours of the picture."""


def photograph(page: Path, layer: int = 0, head: int = 0) -> bytes:
    """Return a PNG of the live section of a page, from its heading to the attention map of a head."""
    with browsing(page, WIDTH) as browser:
        browser.execute_script("document.documentElement.style.overflow = 'hidden'")  # without scroll bar
        button = f'.live [aria-label="attention of head {head} of layer {layer}"]'
        WebDriverWait(browser, 60).until(lambda browser: browser.find_elements("css selector", button))
        browser.execute_script("document.querySelector(arguments[0]).click()", button)
        edges = """
            const section = document.querySelector(".live").closest("section").getBoundingClientRect();
            const end = document.querySelector(".live .cache").getBoundingClientRect().top;
            return [section.left, section.top + scrollY, section.width, end - section.top];
        """
        x, y, width, height = browser.execute_script(edges)
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    with io.BytesIO() as file:
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").quantize(COLOURS)
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


if __name__ == "__main__":
    PICTURE.write_bytes(photograph(Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:4])))
