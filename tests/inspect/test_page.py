"""HTML pages: their data, and how a browser shows them."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxformer.inspect.page import (
    AttentionLayer,
    AttentionSection,
    Figure,
    Table,
    Texts,
    plain,
    render_page,
    write_page,
)
from tests.browser import browsing, complaints, traces

EVIL = "<script>alert(1)</script>"
WEIGHTS_HTS = np.array([[[1, 0, 0], [0.25, 0.75, 0], [0, 0.5, 0.5]], [[1, 0, 0], [1, 0, 0], [0.2, 0.2, 0.6]]])
ATTENTION = AttentionSection(
    "Heads", {"text": ["The", f" {EVIL}", "⏎"]}, [AttentionLayer("blocks.0.attention", "text", "text", WEIGHTS_HTS)],
    {"text": ["", f"Probability 5 %; alternatives: “{EVIL}” 3 %.", "end"]},
)  # fmt: skip
LINE = {"type": "scatter", "x": [0, 1, 2], "y": [2.5, float("nan"), 1.25], "name": plain(EVIL), "line": {"colour": 1}}
CURVE = Figure("Curve", [LINE, {"type": "scatter", "x": [0], "y": [1.0], "name": "held-out"}])
CELLS = {
    "type": "heatmap", "z": [[0, 1], [1, 0]], "colorscale": "sequential", "customdata": [[plain(EVIL)] * 2] * 2,
    "hovertemplate": "%{customdata}<extra></extra>",
}  # fmt: skip
HEATMAP = Figure("Map", [CELLS], width=900)
TABLE = Table("Numbers", [EVIL, "n", "x"], [["b", 1000, 0.5], ["a", 20, float("nan")], [EVIL, 3, 1e-7]])
SECTIONS = [ATTENTION, CURVE, HEATMAP, TABLE, Texts("Samples", [EVIL, "two\nlines"])]


class Reader(HTMLParser):
    """Collector of tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(text: str) -> dict:
    """Return the data of the page's script."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_page_makes_no_request_and_escapes_all_texts():
    text = render_page(EVIL, [EVIL], SECTIONS)
    tags = Reader(text).tags
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "data"}, {}, {}
    ]  # fmt: skip
    assert not [a for tag, a in tags if {"src", "href"} & set(a) and not (a.get("href") or "").startswith("#")]
    policy = next(a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    assert "'unsafe-inline'" not in policy.split(";")[1]


def test_data_hold_texts_weights_and_traces():
    data = data_of(render_page("t", [], SECTIONS))
    assert data["section-0"]["texts"] == {"text": ["The", f" {EVIL}", "⏎"]}
    layer = data["section-0"]["layers"][0]
    assert (layer["name"], layer["rows"], layer["columns"], layer["heads"]) == ("blocks.0.attention", "text", "text", 2)
    stored = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(2, 3, 3)
    assert np.abs(np.sqrt(WEIGHTS_HTS) - stored / 255).max() <= 0.5 / 255
    assert data["section-1"]["traces"][0]["y"] == [2.5, None, 1.25]  # JSON has no NaN
    assert "section-3" not in data  # a table is HTML


def test_table_cells_hold_exact_values():
    body = TABLE.body("k")
    assert '<td class=number data-value="0.5">0.5</td>' in body and 'data-value="1e-07">1e-07<' in body
    assert 'data-value="1000">1,000<' in body and 'data-value="nan">-<' in body


def test_page_is_written_atomically(tmp_path: Path):
    write_page(tmp_path / "p.html", "one", [], [])
    write_page(tmp_path / "p.html", "two", [], [])
    assert "<h1>two</h1>" in (tmp_path / "p.html").read_text() and [f.name for f in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.slow
def test_browser_shows_escaped_texts_and_attention(tmp_path: Path):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    write_page(tmp_path / "p.html", EVIL, [EVIL], SECTIONS)
    with browsing(tmp_path / "p.html") as browser:
        find = lambda css: browser.find_elements("css selector", css)  # noqa: E731
        assert browser.find_element("tag name", "h1").text == EVIL
        tokens = find(".tokens button")
        assert [token.get_property("textContent") for token in tokens] == ["The", f" {EVIL}", "⏎"]
        assert [pre.text for pre in find("pre")] == [EVIL, "two\nlines"]
        trace, _ = traces(browser, "Curve")
        assert trace["y"] == [2.5, None, 1.25]
        assert [text.text for text in find(".legendtext")] == [EVIL, "held-out"]
        assert f"1  {EVIL}" in [text.text for text in find(".map .xtick text")]
        cell = find(".heatmaplayer")[1]  # that of the second figure
        ActionChains(browser).move_to_element(cell).perform()
        WebDriverWait(browser, 10).until(lambda _: EVIL in "".join(text.text for text in find(".hoverlayer text")))

        note = browser.find_element("css selector", ".note")
        shades = lambda: [token.value_of_css_property("background-color") for token in tokens]  # noqa: E731
        ActionChains(browser).move_to_element(tokens[1]).perform()
        assert f"alternatives: “{EVIL}” 3 %." in note.text
        assert f"head 0 of blocks.0.attention attends to “ {EVIL}” 75 %, “The” 25 %." in note.text
        # Darkness is the root of the weight.
        alpha = lambda shade: float(shade.split(",")[3].strip(" )"))  # noqa: E731
        assert [alpha(shade) for shade in shades()] == pytest.approx([0.5 * 0.25**0.5, 0.5 * 0.75**0.5, 0], abs=0.01)
        find(".layer button")[1].click()  # the other head, from the same token
        assert "head 1 of blocks.0.attention attends to “The” 100 %." in note.text
        tokens[2].click()  # pin it
        ActionChains(browser).move_to_element(tokens[0]).perform()
        assert "“⏎”" in note.text and "60 %" in note.text

        def column() -> list[str]:
            return [row.find_elements("tag name", "td")[1].text for row in find("tbody tr")]

        header = find("th button")[1]
        header.click()
        assert column() == ["1,000", "20", "3"]
        header.click()
        assert column() == ["3", "20", "1,000"]
        assert complaints(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1200, "dark")])
def test_page_fits_the_screen_and_colour_scheme(tmp_path: Path, width: int, scheme: str):
    write_page(tmp_path / "p.html", "t", ["a fact"], SECTIONS)
    with browsing(tmp_path / "p.html", width, scheme) as browser:
        browser.find_element("css selector", ".tokens button").click()  # its first row attends to itself alone
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        result = browser.execute_script("""
            const style = (css) => getComputedStyle(document.querySelector(css));
            return [style("body").color, style("body").backgroundColor, style("section").backgroundColor,
                    style(".xtitle, .xtick text").fill, style(".tokens button").backgroundColor];
        """)
        text, behind, card, label, shade = (np.array(re.findall(r"[\d.]+", colour), float) for colour in result)
        assert (text[:3].mean() > behind[:3].mean()) == (scheme == "dark")
        assert min(contrast(text, behind), contrast(text, card), contrast(label, card)) >= 7  # WCAG 2, level AAA
        assert shade[3] == 0.5  # a token of weight 1
        shaded = shade[3] * shade[:3] + (1 - shade[3]) * card[:3]
        assert contrast(text, shaded) >= 4.5  # level AA
        assert complaints(browser) == []


@pytest.mark.slow
def test_thumbnail_shows_one_hot_attention(tmp_path: Path):
    """With more tokens than pixels, each pixel shows its largest weight."""
    previous_TS = np.eye(128, k=-1)
    previous_TS[0, 0] = 1
    layer = AttentionLayer("blocks.0.attention", "text", "text", np.stack([previous_TS, np.full((128, 128), 1 / 128)]))
    write_page(tmp_path / "p.html", "t", [], [AttentionSection("Heads", {"text": ["a"] * 128}, [layer])])
    with browsing(tmp_path / "p.html") as browser:
        first, second = browser.execute_script("""
            return [...document.querySelectorAll(".layer canvas")].map((canvas) => {
                const { width, height } = canvas;
                const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
                return Array.from({ length: height }, (_, y) =>
                    Array.from({ length: width }, (_, x) => data[4 * (y * width + x) + 3]));
            });
        """)
        first, second = np.array(first), np.array(second)
        assert first.shape == (56, 56) and (np.diag(first) == 255).all()
        assert (first[~(np.eye(56, dtype=bool) | np.eye(56, k=-1, dtype=bool))] == 0).all()
        assert (second == round(255 * 128**-0.5)).all()
        note = browser.find_element("css selector", ".note")
        browser.find_elements("css selector", ".layer button")[1].click()
        assert "“a” 0.8 %" in note.text
        assert complaints(browser) == []


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Return the contrast ratio of two sRGB colours by WCAG 2."""
    c = np.array([a[:3], b[:3]]) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    light = np.sort(linear @ [0.2126, 0.7152, 0.0722])
    return float((light[1] + 0.05) / (light[0] + 0.05))
