"""How pages of every kind of section are laid out: on screens, on paper, and for readers who need contrast and room."""

import base64
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.inspect.film import Frame
from jaxformer.inspect.pages.attention import AttentionLayer, AttentionSection, Prediction
from jaxformer.inspect.pages.charts import STEP, Axis, Heatmap, Line, Lines
from jaxformer.inspect.pages.film import ContinuationsSection, FilmSection
from jaxformer.inspect.pages.live import LiveSection
from jaxformer.inspect.pages.page import Table, Texts, write_page
from jaxformer.inspect.pages.weights import pack_names, pack_params
from tests.arrays import build, plain_decoder
from tests.browser import barriers, browsing, complaints, resize, wait_for
from tests.helpers import ROOT
from tests.inspect.pages.test_page import PICTURES, contrast, show

pytestmark = pytest.mark.slow

L, H, T = 24, 9, 6
DEEP = plain_decoder(
    vocab_size=300, context_length=24, d_model=18, n_blocks=L, n_heads=H, d_ff=(8,), norm="rmsnorm", final_norm=True,
)  # fmt: skip
PAGE_PIXELS = {1200: 9000, 390: 11_000}
"""Maximum height of the page by the width of the screen."""
SCREENS = [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]
TEXTS = """
    const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
    const over = (a, b) => [...[0, 1, 2].map((i) => a[3] * a[i] + (1 - a[3]) * b[i]), 1];
    const behind = (element) => {
      const own = parse(getComputedStyle(element).backgroundColor);
      return own[3] === 1 || !element.parentElement ? own : over(own, behind(element.parentElement));
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!own || !element.checkVisibility() || element.closest("script, :disabled, .area, .tip")) continue;
      const style = getComputedStyle(element);
      let opacity = 1;
      for (let each = element; each; each = each.parentElement) opacity *= Number(getComputedStyle(each).opacity);
      const [r, g, b, a] = parse(element instanceof SVGElement ? style.fill : style.color);
      const ground = behind(element);
      found.push([element.textContent.trim().slice(0, 40), over([r, g, b, a * opacity], ground), ground]);
    }
    return found;
"""
TARGETS = """
    const small = [];
    for (const element of document.querySelectorAll("button, input, textarea, nav a")) {
      if (!element.checkVisibility()) continue;
      const { width, height } = (element.closest("label") ?? element).getBoundingClientRect();
      if (width < 24 || height < 24) small.push(`${element.ariaLabel ?? element.textContent} ${width} x ${height}`);
    }
    return small;
"""
SHOWN = """
    const of = (css, what) => [...document.querySelectorAll(css)].filter((each) => each.checkVisibility()).map(what);
    const text = (element) => element.textContent;
    return [of('[role="tab"][aria-selected="true"]', text), of("h2", text), of("nav a", text),
            of(".lines path.line", (path) => path.getAttribute("d").length > 9)];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a section of every kind, of a deep model."""
    _, params = build(DEEP)
    tokenizer = Tokenizer.train(["The state of the Union is strong."], 300)
    weights, text = pack_params(params), "The state of\nthe Union 日 is"
    live = LiveSection("Your own text", DEEP, pack_names(params), 16, weights, tokenizer, text)
    tokens = [tokenizer.decode_part([token]) or "a" for token in range(100, 100 + T)]
    weights_HTT = np.tril(np.ones((H, T, T))) / np.arange(1, T + 1)[:, None]
    layers = [AttentionLayer(f"layer {i}", "text", "text", np.stack([weights_HTT] * 3), [0.125] * H) for i in range(L)]
    guess = Prediction("Next token", [("a", 0.6), ("b", 0.3)], ("c", 0.05))
    values = np.linspace(-1, 1, L * (H + 1) * T).reshape(-1, T)
    losses = {0: 2.0, 1: float("nan"), 7: 1.25}
    frames = [Frame(step, loss, {}, {}, [f" two{step}\n\n\nlines"]) for step, loss in losses.items()]
    path = tmp_path_factory.mktemp("layout") / "page.html"
    write_page(path, "layout", ["a fact"], [
        FilmSection("Film", frames, ["a\nprompt"]), live,
        AttentionSection("Attention maps", {"text": tokens}, layers, {"text": [guess] * T}, about="Point at a token."),
        Heatmap("Attribution", values, [f"part {i}" for i in range(len(values))], tokens, "diverging", cell=(46, 22)),
        Lines("Loss", [Line([0, 9], [2.0, 1.0], name) for name in "ab"], STEP, Axis("nats"), marks=[(4, "here")]),
        Table("Numbers", ["name", "n"], [[f"row {i}", i] for i in range(40)]), Texts("Samples", ["a\nb"]), PICTURES,
        ContinuationsSection("Continuations"),
    ])  # fmt: skip
    return path


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    with browsing(page) as driver:
        yield driver


def open_page(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    """Open the page, with its model loaded."""
    show(browser, page, width, scheme)
    browser.execute_script("document.querySelector('.live').scrollIntoView()")
    wait_for(browser, "return document.querySelector('.live .bars')")


def open_once(browser: Any, page: Path) -> None:
    """Open the page, unless it is open with its model."""
    if not browser.execute_script("return document.querySelector('.live .bars')"):
        open_page(browser, page, 1200)


@pytest.mark.parametrize("width", [1200, 390])
def test_page_of_a_deep_model_keeps_the_map_of_a_head_in_view(page: Path, browser: Any, width: int):
    open_page(browser, page, width)
    heights = browser.execute_script(
        """
        const top = (element) => Math.round(element.getBoundingClientRect().top);
        const tiles = [...document.querySelectorAll(".heads .tile")];
        const shown = [...document.querySelectorAll(".layers button")].map((button) => button.getBoundingClientRect());
        return [document.documentElement.scrollHeight, new Set(tiles.map(top)).size, tiles.length,
                shown[arguments[0]].top >= shown[0].bottom, document.querySelector(".heads .head").textContent,
                document.querySelector(".heads .stack").getBoundingClientRect().right,
                Math.max(...tiles.map((tile) => tile.getBoundingClientRect().right))];
    """,
        H,
    )
    assert heights[1:5] == [L, L * H, True, "0"]  # one row a layer
    assert heights[5] - heights[6] >= 8  # the scroll bar covers no head
    assert heights[0] < PAGE_PIXELS[width]
    browser.find_elements("css selector", ".heads .tile button")[-1].click()
    title, frame, screen = browser.execute_script("""
        const box = document.querySelector(".columns > .map").getBoundingClientRect();
        return [document.querySelector(".columns > .map h3").textContent, [box.top, box.bottom], innerHeight];
    """)
    assert title == f"Attention of head {H - 1} of layer {L - 1}"
    assert frame[0] >= -1 and frame[1] <= screen + 1
    rows = browser.execute_script("return document.querySelectorAll('.live tbody tr').length")
    assert rows == L + 1  # of the logit lens
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert complaints(browser) == []


def test_printed_page_has_its_colours_and_nothing_that_scrolls_or_sticks(page: Path, browser: Any):
    open_page(browser, page, 1200)
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    streams = re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL)
    drawn = b"".join(zlib.decompressobj().decompress(s) for s in streams if s[:1] == b"x")
    fills = re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b", drawn)
    bars = (0x2A, 0x62, 0xC9)  # which browsers leave out to save ink
    assert bars in {tuple(round(255 * float(x)) for x in fill) for fill in fills}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    left = browser.execute_script("""
        const all = (css, test) => [...document.querySelectorAll(css)].filter(test).map((element) => element.className);
        const hides = ({ scrollHeight, clientHeight }) => scrollHeight > clientHeight + 1;
        return [all("main *", (element) => getComputedStyle(element).position === "sticky"),
                all("main div", (element) => getComputedStyle(element).overflowY !== "visible" && hides(element)),
                all("#section-5 tr", (row) => row.offsetHeight).length,
                all(".controls, .frames, .unfold", (part) => part.offsetHeight),
                all(".wide", (box) => (box.classList.add("more-right"), getComputedStyle(box).maskImage !== "none"))];
    """)
    assert left == [[], [], 41, [], []]
    misplaced = browser.execute_script("""
        const box = (element) => Object.values(element.getBoundingClientRect().toJSON()).map(Math.round).join();
        const areas = [...document.querySelectorAll(".area")].filter((area) => area.checkVisibility());
        return [areas.length, areas.filter((area) => box(area) !== box(area.querySelector("canvas"))).length];
    """)
    assert misplaced[0] >= 3 and misplaced[1] == 0
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.fixture(scope="module")
def unfolded(page: Path, browser: Any) -> Any:
    """The browser with the page and its panels open."""
    open_page(browser, page, 1200)
    browser.find_element("css selector", ".live .why").click()
    wait_for(browser, "return document.querySelector('.attribution .parts')")
    browser.find_element("css selector", ".patching > .plain").click()
    wait_for(browser, "return document.querySelector('.both .pairs li')")
    return browser


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_texts_have_contrast_and_targets_have_room(unfolded: Any, width: int, scheme: str):
    """WCAG 2.2, level AA: 1.4.3 and 2.5.8."""
    browser = unfolded
    resize(browser, width, scheme)
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    faint = {text: f"{contrast(np.array(a), np.array(b)):.2f}" for text, a, b in browser.execute_script(TEXTS)}
    assert {text: ratio for text, ratio in faint.items() if float(ratio) < 4.5} == {}
    assert browser.execute_script(TARGETS) == []
    assert barriers(browser) == []


SITE = """<!doctype html><html lang="en"><head><title>Site</title>{styles}</head>
<body data-md-color-scheme="{scheme}" data-md-color-primary="indigo">
<nav class="md-tabs"><ul><li class="md-tabs__item"><a class="md-tabs__link" href="#">Story</a></li></ul></nav>
<article class="md-typeset"><p>See <a href="#">the story</a>.</p><div class="highlight"><pre><span></span><code>{room}
<span class="c1"># a
</span><span class="nb">len</span> <span class="ow">in</span> <span class="mi">1</span></code></pre></div>
<div class="md-typeset__scrollwrap"><div class="md-typeset__table">
<table><tr><td><code>{room}</code></td></tr></table></div></div>
<div class="front"><a class="md-button" href="#">Type</a></div></article>
<div class="md-search" role="dialog"><input aria-label="Search"></div><script>{script}</script>
<footer class="md-footer"><div class="md-footer-meta md-typeset"><div class="md-copyright">Made</div></div></footer>
</body></html>"""


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_site_has_contrast_and_its_links_are_underlined(browser: Any, tmp_path: Path, scheme: str):
    folder = Path(pytest.importorskip("material").__file__).parent / "templates/assets/stylesheets"
    files = [*folder.glob("main.*.css"), *folder.glob("palette.*.css"), ROOT / "docs/extra.css"]
    styles = "".join(f"<style>{file.read_text()}</style>" for file in files)
    room, script = "\u00a0" * 200, (ROOT / "docs/extra.js").read_text()  # more than a screen is wide
    (tmp_path / "site.html").write_text(SITE.format(styles=styles, scheme=scheme, room=room, script=script))
    show(browser, tmp_path / "site.html", 1400)
    ratios = {text: contrast(np.array(a), np.array(b)) for text, a, b in browser.execute_script(TEXTS)}
    assert set(ratios) == {"Story", "See the story.", "the story", "# a", "len", "in", "1", "Type", "Made"}
    assert min(ratios.values()) >= 4.5
    link = browser.find_element("css selector", "article a")
    assert "underline" in link.value_of_css_property("text-decoration")
    resize(browser, 390, "light")
    browser.execute_script("document.querySelector('pre > code').removeAttribute('tabindex')")  # as the theme does
    wait_for(browser, "return document.querySelectorAll('[tabindex]').length === 2")
    assert barriers(browser) == []


def test_tabs_show_one_part_of_the_page_which_the_address_can_name(browser: Any, tmp_path: Path):
    from selenium.webdriver import Keys

    chart, table = Lines("Loss", [Line([0, 9], [2.0, 1.0], "a")], STEP, Axis("nats")), Table("Numbers", ["n"], [[1]])
    tabs = {"Your text": [], "Measured": [PICTURES, table], "Training": [chart]}
    write_page(tmp_path / "tabs.html", "tabs", [], tabs, {"Film": "film.html"})
    show(browser, tmp_path / "tabs.html", 390)
    state = lambda: browser.execute_script(SHOWN)  # noqa: E731
    measured = [["Measured"], ["Pictures", "Numbers"], ["Film", "Pictures", "Numbers"], []]
    training = [["Training"], ["Loss"], ["Film"], [True]]
    assert state() == measured
    browser.find_element("css selector", "[role=tab]").send_keys(Keys.ARROW_RIGHT)
    wait_for(browser, "return document.querySelector('.lines path.line')")
    assert state() == training
    browser.find_element("css selector", "[role=tab]").click()
    assert state() == measured
    browser.execute_script("location.hash = 'section-2'")
    wait_for(browser, "return document.querySelector('#section-2').checkVisibility()")
    assert state() == training
    show(browser, tmp_path / "tabs.html", 390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    write_page(tmp_path / "one.html", "one", [], {"Your text": [], "Measured": [table]})
    assert "tablist" not in (tmp_path / "one.html").read_text().split("</script>")[0].split("<body>")[1]
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    show(browser, tmp_path / "tabs.html", 390)
    assert state() == [[], ["Pictures", "Numbers", "Loss"], ["Film", "Pictures", "Numbers"], []]
    assert not browser.find_element("css selector", "[role=tablist]").is_displayed()
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert complaints(browser) == []


def test_each_heat_map_has_a_scale(page: Path, browser: Any):
    open_page(browser, page, 1200)
    scales = browser.execute_script("""
        const within = ["#section-3", "#section-2 > .attention > .map", ".columns > .map", ".cache"];
        return within.map((css) => [...document.querySelectorAll(`${css} .scale`)].map((scale) => {
          const [low, canvas, high] = scale.children;
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1);
          return [[low.textContent, high.textContent], [...data.slice(0, 4)], [...data.slice(-4)]];
        }));
    """)
    weights = [["0\u00a0%", "100\u00a0%"], [0, 0, 0, 0], [42, 98, 201, 255]]
    assert scales[:3] == [[[["-1", "1"], [42, 98, 201, 255], [192, 74, 0, 255]]], [weights], [weights]]
    assert len(scales[3]) == 2 and all(low == f"-{high}" and float(high) > 0 for (low, high), *_ in scales[3])


def test_numbers_near_nothing_have_no_sign(browser: Any):
    script = "return [format(-0), format(-1e-9), percent(NaN), signed(-0.0004), signed(-0.0006), signed(0)]"
    assert browser.execute_script(script) == ["0", "-1·10⁻⁹", "-", "+0.000", "\u22120.001", "+0.000"]


def test_continuations_of_a_film_are_one_line_each_and_a_lost_loss_is_a_dash(page: Path, browser: Any):
    open_once(browser, page)
    slider, told = (browser.find_element("css selector", f".film .frames {tag}") for tag in ("input", "output"))
    texts = lambda: [pre.text for pre in browser.find_elements("css selector", ".continued pre")]  # noqa: E731
    assert (told.text, texts()) == ("step 7, held-out loss 1.250", ["a⏎prompt two7⏎⏎⏎lines"])
    slider.send_keys("\ue012")  # arrow left
    assert (told.text, texts()) == ("step 1, held-out loss -", ["a⏎prompt two1⏎⏎⏎lines"])


def test_temperature_of_zero_is_greedy(page: Path, browser: Any):
    open_once(browser, page)
    tokens = browser.execute_script("""
        const live = document.querySelector(".live");
        const [greedy, draws, again] = live.querySelectorAll(".controls button");
        const [temperature] = live.querySelectorAll(".controls input");
        const labels = () => [...live.querySelectorAll(".tokens")[0].children].map((token) => token.textContent);
        Math.random = () => 1 - 1e-9; // draws the last token
        const write = (value) => { temperature.value = value; temperature.dispatchEvent(new Event("change")); };
        const added = (button) => { again.click(); button.click(); return labels().at(-1); };
        const shown = ["", "-1", "9", "1"].map((value) => { write(value); return temperature.value; });
        const warm = added(draws);
        write("0");
        return [shown, added(draws) === added(greedy), warm !== added(greedy), temperature.value];
    """)
    assert tokens == [["0.8", "0", "5", "1"], True, True, "0"]
