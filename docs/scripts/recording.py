"""Record the page of a run while a text is typed in it, as docs/page.webp, or the laboratory while two models are
trained in it, as docs/laboratory.webp.

python -m jaxformer inspect runs/modern
python -m docs.scripts.recording runs/modern/inspect.html
python -m docs.scripts.recording docs/lab/build/lab.html
"""

import base64
import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser import browsing, wait_for

PICTURES = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, COLOURS = 880, 740, 256
"""Pixels of the picture, and colours of all its frames."""
TEXT, CONTINUATION = "The President of the United", " and the Secretary of the"
HEADS = ((2, 2), (0, 1))
"""Layers and heads of the README's run whose attention is shown after the text; the last one is then ablated."""
LETTER_MS, LOOK_MS, END_MS = 110, 1200, 3500
"""Durations of a frame: after a letter, after a click, and at the end."""
STYLE = """
html { overflow: hidden }
body { padding: 0 }
section { border: 0; margin: 0; padding: .5rem .75rem }
header, nav, section:not(:has(.live)), section > :is(h2, p) { display: none }
.live :is(.controls, .status, .block, .cache) { display: none }
.live :is(.columns > div:has(table), h3 + p.name, .bars:not(.compared) + p) { display: none }
.live { grid-template: repeat(4, max-content) 1fr / 25.5rem minmax(0, 1fr) }
.live > *, .live .columns > div { grid-column: 1 / -1 }
.live > .columns { display: contents }
.heads > p, .patching { display: none }
.live .columns > div { grid-column: 1 }
.live .columns > .heads { grid-area: 4 / 2 / span 2 }
.live textarea { height: 2.6rem; min-height: 0; resize: none }
.live .bars li { grid-template-columns: 6rem minmax(0, 1fr) 6.5rem max-content !important }
.live .bars + p { white-space: nowrap }
.live .note { min-height: 1.5em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.live .bars li:nth-child(n + 8) { display: none }
.live .columns > .map { width: 22rem }
.heads .stack { max-height: none; grid-template-columns: max-content repeat(var(--heads), minmax(0, 4.2rem)) }
.pointer { background: #d2603a; clip-path: polygon(0 0, 0 82%, 26% 62%, 44% 100%, 62% 92%, 44% 56%, 74% 56%);
  height: 24px; left: -99px; pointer-events: none; position: fixed; width: 20px; z-index: 9 }
"""
"""Rules by which the text, the next tokens and the heads stand side by side, and the rest of the page is left out."""
LABORATORY = "#blocks=1&heads=2&A=&B=no+mask"
"""The first experiment on which the laboratory opens: B reads the characters that it has to predict, A is intact."""
LABORATORY_HEIGHT, LAST_STEP, TRAINING_MS = 890, 200, 360
LABORATORY_STYLE = """
html { overflow: hidden }
body { padding: 0 }
section { border: 0; margin: 0; padding: .5rem .75rem }
main { display: grid; grid-template: auto auto 1fr / 27rem minmax(0, 1fr) }
#bar { grid-column: 1 / -1 }
#loss { grid-row: 2 / span 2 }
header, main > :not(#bar, #loss, :has(#diagram), :has(#lanes)), section h2, .fold, #share { display: none }
#progress span, #switches-about, #diagram ~ *, .predicted, .maps ~ *, .verdict > p:nth-child(2) { display: none }
.model > div:nth-child(n + 3), .model div > h3, .model p { display: none }
.experiment, .broken-block { gap: .25rem; grid-template-columns: minmax(0, 1fr); margin: 0 }
#lanes.several { gap: .75rem; grid-template-columns: repeat(2, minmax(0, 1fr)) }
.several > .model > h3 { margin: 0 }
.maps { gap: .4rem; grid-template-columns: repeat(var(--heads), minmax(0, 6rem)) }
"""
"""Rules by which the controls, the losses, the diagram and the attention maps stand side by side."""
NEXT_DRAWING = """
const [train, done] = [document.querySelector("#train"), arguments[0]];
new MutationObserver((_, observer) => {
  observer.disconnect();
  train.click();
  done(Number(document.querySelector("#progress").textContent.match(/\\d+/)));
}).observe(document.querySelector("#progress"), { childList: true });
train.click();
"""
"""Script that trains up to the next drawing, and returns its step."""


class Recorder:
    """Frames of a page, with their durations in milliseconds."""

    def __init__(self, browser: Any, style: str = STYLE, height: int = HEIGHT) -> None:
        self.browser, self.height = browser, height
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []
        script = """
            document.head.append(Object.assign(document.createElement("style"), { textContent: arguments[0] }));
            const pointer = Object.assign(document.createElement("div"), { className: "pointer" });
            document.body.append(pointer);
            document.addEventListener("pointermove", ({ clientX, clientY }) => {
              [pointer.style.left, pointer.style.top] = [`${clientX}px`, `${clientY}px`];
            });
        """
        browser.execute_script(script, style)

    def shoot(self, duration: int) -> None:
        """Add a frame of what the page shows."""
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        shot = base64.b64decode(self.browser.get_screenshot_as_base64())
        self.frames.append(Image.open(io.BytesIO(shot)).convert("RGB").crop((0, 0, WIDTH, self.height)))
        self.durations.append(duration)

    def wait(self) -> None:
        """Wait until the model of the page has read the text."""
        wait_for(self.browser, "return document.querySelector('.live').ariaBusy !== 'true'")

    def type(self, text: str) -> None:
        """Type a text, with a frame per letter."""
        for letter in text:
            self.browser.switch_to.active_element.send_keys(letter)
            self.wait()
            self.shoot(LETTER_MS)
        self.durations[-1] = LOOK_MS

    def click(self, selector: str) -> None:
        """Click an element, with a frame before and after it."""
        element = self.browser.find_element("css selector", selector)
        ActionChains(self.browser, duration=0).move_to_element(element).perform()
        self.shoot(LOOK_MS // 2)
        element.click()
        self.wait()
        self.shoot(LOOK_MS)


def record(page: Path) -> tuple[list[Image.Image], list[int]]:
    """Return frames of a page, and their durations."""
    with browsing(page, WIDTH) as browser:
        wait_for(browser, "return document.querySelector('.live .tile')")
        recorder = Recorder(browser)
        area = browser.find_element("css selector", ".live textarea")
        area.send_keys(Keys.CONTROL, "a")
        area.send_keys(Keys.DELETE)
        recorder.type(TEXT)
        recorder.click(".live .bars button")  # appends the most likely token
        ActionChains(browser, duration=0).move_to_element(area).perform()
        area.send_keys(Keys.CONTROL, Keys.END)
        recorder.type(CONTINUATION)
        for layer, head in HEADS:
            recorder.click(f'.live [aria-label="attention of head {head} of layer {layer}"]')
        recorder.click(f'.live [aria-label="head {head} of layer {layer}"]')
        recorder.durations[-1] = END_MS
        return recorder.frames, recorder.durations


def record_laboratory(page: Path) -> tuple[list[Image.Image], list[int]]:
    """Return frames of the laboratory while it trains two models, and their durations."""
    with browsing(page, WIDTH) as browser:
        browser.get(page.as_uri() + LABORATORY)
        browser.refresh()
        wait_for(browser, "return !document.querySelector('#bar fieldset').disabled")
        recorder = Recorder(browser, LABORATORY_STYLE, LABORATORY_HEIGHT)
        recorder.shoot(LOOK_MS)
        train = browser.find_element("css selector", "#train")
        ActionChains(browser, duration=0).move_to_element(train).perform()
        recorder.shoot(LOOK_MS // 2)
        while browser.execute_async_script(NEXT_DRAWING) < LAST_STEP:
            recorder.shoot(TRAINING_MS)
        recorder.shoot(TRAINING_MS)
        recorder.durations[-1] = END_MS
        return recorder.frames, recorder.durations


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    is_laboratory = page.name == "lab.html"
    picture = PICTURES / ("laboratory.webp" if is_laboratory else "page.webp")
    frames, durations = record_laboratory(page) if is_laboratory else record(page)
    palette = frames[-1].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)  # the last frame has all colours
    first, *others = (f.quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB") for f in frames)
    first.save(picture, append_images=others, duration=durations, loop=0, lossless=True, method=4)
    print(f"{picture}: {len(durations)} frames, {sum(durations) / 1000:.1f} s, {picture.stat().st_size / 1000:.0f} kB")
