"""HTML pages: their data, and how a browser shows them."""

import base64
import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

from jaxformer.contract import Contract, Task
from jaxformer.inspect.pages.attention import AttentionLayer, AttentionSection, Prediction, as_bars
from jaxformer.inspect.pages.charts import STEP, Axis, Grid, Heatmap, Line, Lines
from jaxformer.inspect.pages.page import Table, Texts, render_page, write_page
from jaxformer.inspect.pages.pictures import Picture, PictureSection, patch_attention, patch_grid, png_uri
from tests.browser import browsing, complaints, embedded, resize, share_functions, told
from tests.helpers import ROOT

EVIL = "<script>alert(1)</script>"
WEIGHTS_HTS = np.array([[[1, 0, 0], [0.25, 0.75, 0], [0, 0.5, 0.5]], [[1, 0, 0], [1, 0, 0], [0.2, 0.2, 0.6]]])
ATTENTION = AttentionSection(
    "Heads", {"text": ["The", f" {EVIL}", "⏎"]},
    [AttentionLayer("layer 0", "text", "text", WEIGHTS_HTS, [0.125, -0.5])],
    {"text": [None, Prediction(f"next token after “{EVIL}”", [(EVIL, 0.6), ("b", 0.3)], ("⏎", 0.05)), None]},
)  # fmt: skip
LINE = Line([0, 10, 20], [2.5, None, 1.25], EVIL, "head 0")
CURVE = Lines("Curve", [LINE, Line([0, 10], [1.0, 0.00064532], "held-out", points=True)], STEP, Axis("loss"))
CELLS = [[0.5, -1.0], [float("nan"), 0.25]]
HEATMAP = Heatmap("Map", CELLS, [EVIL, "b"], ["first", "second"], "diverging", texts=[["", "-1"], ["", "0"]])
GRID = Grid("Grid", [Lines(f"panel {i}", [LINE], STEP, Axis("loss", log=True), 160, about=EVIL) for i in range(3)])
TABLE = Table("Numbers", [EVIL, "n", "x"], [["b", 1000, 0.5], ["a", 20, float("nan")], [EVIL, 3, 0.015]])
IMAGE_HWC = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
PICTURES = PictureSection(
    "Pictures", [Picture(IMAGE_HWC, EVIL, [("boot", 0.75), ("bag", 0.125)], ("shirt", 0.0625))],
    {"layer 0": np.array([[[0.1, 0.4, 0.1, 0.1, 0.1, 0.2], [0.0, 0, 0, 0, 0, 0]]])}, (2, 3),
)  # fmt: skip
SECTIONS = [ATTENTION, CURVE, HEATMAP, GRID, TABLE, Texts("Samples", [EVIL, "two\nlines"]), PICTURES]


class Reader(HTMLParser):
    """Collector of tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_makes_no_request_and_escapes_all_texts():
    text = render_page(EVIL, [EVIL], SECTIONS)
    tags = Reader(text).tags
    scripts = [attributes for tag, attributes in tags if tag == "script"]
    assert scripts == [{"type": "application/json"}] * 7 + [{}]  # data, and the page's own
    assert not [a for tag, a in tags if {"src", "href"} & set(a) and not (a.get("href") or "").startswith("#")]
    policy = next(a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    assert "'unsafe-inline'" not in policy.split(";")[1] and policy.count("'sha256-") == 1
    assert len(text) < 60_000
    assert [tag for tag, _ in Reader(render_page("t", [], [TABLE])).tags].count("script") == 1


def test_data_hold_texts_weights_and_lines():
    page = render_page("t", [], SECTIONS)
    [heads] = embedded(page, "Heads")
    assert heads["texts"] == {"text": ["The", f" {EVIL}", "⏎"]}
    [layer] = heads["layers"]
    assert (layer["name"], layer["rows"], layer["columns"], layer["heads"]) == ("layer 0", "text", "text", 2)
    stored = np.frombuffer(base64.b64decode(layer["frames"][0]), np.uint8).reshape(2, 6)  # the lower triangles
    assert np.abs(np.sqrt(WEIGHTS_HTS[:, np.tri(3, dtype=bool)]) - stored / 255).max() <= 0.5 / 255
    bars = [[EVIL, 0.6, False], ["b", 0.3, False], ["⏎", 0.05, True]]
    assert heads["predictions"]["text"] == [None, [f"next token after “{EVIL}”", bars], None]
    [curve] = embedded(page, "Curve")
    assert curve["positions"] == [[0, 10, 20], [0, 10]] and curve["lines"][0]["y"] == [2.5, None, 1.25]
    [cells] = embedded(page, "Map")
    assert cells["values"] == [[0.5, -1.0], [None, 0.25]] and cells["largest"] == 1  # JSON has no NaN
    assert len(embedded(page, "Grid")) == 3 and not embedded(page, "Numbers")


def test_bar_of_another_token_with_the_same_label_is_not_marked():
    part, probabilities = "\ufffd", [("\ufffd", 0.5), ("a", 0.25), ("\ufffd", 0.125)]
    assert [marked for *_, marked in as_bars(probabilities, (part, 0.125))] == [False, False, True]
    assert as_bars(probabilities, (part, 0.01))[-1] == [part, 0.01, True] and len(as_bars(probabilities, None)) == 3


def test_png_has_the_pixels_of_the_image():
    image = pytest.importorskip("PIL.Image")
    for channels in (1, 2, 3, 4):
        pixels = np.random.default_rng(channels).integers(0, 256, (5, 7, channels), np.uint8)
        content = base64.b64decode(png_uri(pixels).removeprefix("data:image/png;base64,"))
        decoded = np.asarray(image.open(io.BytesIO(content))).reshape(5, 7, -1)
        expected = pixels.mean(axis=-1, keepdims=True).astype(np.uint8) if channels == 2 else pixels
        np.testing.assert_array_equal(decoded, expected)


def test_model_without_patches_has_pictures_without_attention():
    class Pixels(nn.Module):
        contract = Contract(Task.IMAGE_CLASSIFICATION)

        def __call__(self, image_HWC):
            return image_HWC.sum((0, 1))

    assert patch_attention(Pixels(), {}, (IMAGE_HWC[None],)) == {} and patch_grid(Pixels()) == (1, 1)
    section = PictureSection("Pictures", PICTURES.pictures, {}, (1, 1))
    assert embedded(render_page("t", [], [section]), "Pictures")[0]["layers"] == []


def test_lines_over_the_same_positions_share_them_and_numbers_are_short():
    lines = [Line([0, 1], [1 / 3, 2 / 3], "a", str(i)) for i in range(2)]
    [data] = embedded(render_page("t", [], [Lines("L", lines, STEP, Axis("y"))]), "L")
    assert data["positions"] == [[0, 1]] and [line["x"] for line in data["lines"]] == [0, 0]
    assert data["lines"][0]["y"] == [0.33333, 0.66667]


def test_table_cells_hold_exact_values_and_show_the_digits_of_their_column():
    body = TABLE.body()
    assert '<td class=number data-value="0.5">0.500</td>' in body and 'data-value="0.015">0.015<' in body
    assert 'data-value="1000">1,000<' in body and 'data-value="nan">-<' in body
    assert ">0.000<" in Table("t", ["x"], [[0.5], [-0.0]]).body()  # without a sign
    tiny = Table("t", ["x"], [[1e-7], [0.5], [2.5e-3], [1.5e-6]]).body()  # spans magnitudes
    assert ">2e-05<" in Table("t", ["x"], [[0.5], [0.25], [2e-5], [0.0]]).body()  # not 0
    assert ">1e-07<" in tiny and ">0.0025<" in tiny
    assert "<td>short</td>" in (texts := Table("t", ["x"], [["short"], ["a text of several words"]]).body())
    assert "<td class=text>a text of several words</td>" in texts  # has room for some of them in a line
    assert ">123,456.0<" not in Table("t", ["x"], [[123456.0]]).body()


def test_control_characters_and_empty_lines_of_texts_have_symbols():
    assert Texts("Samples", ["a\x1b[1mb\0\n\tc\n\n<d\n\n\n\ne"]).body() == "<pre>a␛[1mb␀\n\tc\n\n&lt;d⏎⏎⏎⏎\ne</pre>"


def test_long_table_says_how_many_rows_it_has():
    rows = [[f"row {i}", i] for i in range(82)]
    assert "Show all 82 rows</button>" in Table("t", ["a", "n"], rows).body()
    assert "<button class" not in Table("t", ["a", "n"], rows[:20]).body()


COLOUR_BLIND = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What is seen of linear RGB (Machado et al. 2009, severity 1)."""
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
"""Of linear RGB, as in sRGB."""


@pytest.mark.parametrize("seen", [np.eye(3), *map(np.array, COLOUR_BLIND.values())], ids=["all", *COLOUR_BLIND])
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_differ_for_colour_blind_readers(seen: np.ndarray, scheme: int):
    """Distances in CIELAB, of which 2.3 is just noticeable."""
    styles = (ROOT / "docs/lab/src/inspect/charts.css").read_text().split("@media (prefers-color-scheme: dark)")[scheme]

    def lab(name: str) -> np.ndarray:
        [code] = re.findall(rf"--{name}: #(\w{{6}});", styles)
        linear = linear_rgb(np.array(list(bytes.fromhex(code)), float))
        xyz = XYZ @ np.clip(seen @ linear, 0, 1) / XYZ.sum(axis=1)
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    lines = [lab(f"line-{i}") for i in range(8)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(lines, 2)) > 20
    assert np.linalg.norm(lab("minus") - lab("plus")) > 60


def test_page_is_written_atomically(tmp_path: Path):
    write_page(tmp_path / "p.html", "one", [], [])
    write_page(tmp_path / "p.html", "two", [], [])
    assert "<h1>two</h1>" in (tmp_path / "p.html").read_text() and [f.name for f in tmp_path.iterdir()] == ["p.html"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    page = tmp_path_factory.mktemp("page") / "empty.html"
    write_page(page, "", [], [])
    with browsing(page) as driver:
        yield driver


def show(browser: Any, page: Path, width: int = 1200, scheme: str = "light") -> None:
    """Open a page on a screen."""
    resize(browser, width, scheme)
    browser.get(page.as_uri())
    share_functions(browser)


@pytest.mark.slow
def test_browser_shows_escaped_texts_attention_and_charts(tmp_path: Path, browser: Any):
    from selenium.webdriver import ActionChains, Keys

    long = Table("Long", ["a"], [[f"row {i}"] for i in range(82)])
    plain = AttentionSection("Next tokens", ATTENTION.texts, [], ATTENTION.predictions)
    write_page(tmp_path / "p.html", EVIL, [EVIL], [*SECTIONS, long, plain])
    show(browser, tmp_path / "p.html")
    find = lambda css: browser.find_elements("css selector", css)  # noqa: E731
    assert browser.find_element("tag name", "h1").text == EVIL
    tokens = find(".tokens button")[:3]
    # Without attention, too, the text begins at a position with a prediction.
    assert [note.text[:11] for note in find(".attention .note")] == ["Position 1:"] * 2
    assert [len(each.find_elements("css selector", "li")) for each in find(".predicted")] == [3, 3]
    tokens[0].send_keys(Keys.CONTROL, Keys.ARROW_RIGHT)  # which is not the page's
    assert browser.switch_to.active_element == tokens[0]
    tokens[0].send_keys(Keys.ARROW_RIGHT, Keys.END)
    assert browser.switch_to.active_element == tokens[2]
    assert [token.get_property("tabIndex") for token in tokens] == [-1, -1, 0]  # one stop of the Tab key
    assert [token.get_property("textContent") for token in tokens] == ["The", f" {EVIL}", "⏎"]
    assert [pre.text for pre in find("pre")] == [EVIL, "two\nlines"]
    assert [text.text for text in find(".legend button")] == [EVIL, "held-out"]

    keys = Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.HOME
    end, low, held = f"{EVIL}, head 0\nstep 20: 1.25", "held-out\nstep 10: 6.45·10⁻⁴", "held-out\nstep 0: 1"
    assert told(browser, "Curve", *keys) == [f"{EVIL}, head 0\nstep 0: 2.5", end, low, held]
    keys = Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN
    assert told(browser, "Map", *keys) == [f"{EVIL}, first: 0.5", f"{EVIL}, second: -1", "b, second: 0.25"]
    path = lambda: len(find(".lines")[0].find_elements("css selector", "path.line"))  # noqa: E731
    assert path() == 2
    find(".legend button")[0].click()
    assert path() == 1 and find(".legend button")[0].get_attribute("aria-pressed") == "false"
    ActionChains(browser).move_to_element(find(".heatmap .area svg")[0]).perform()
    told_cell = find(".heatmap .tip")[0].text
    assert told_cell in (f"{EVIL}, first: 0.5", f"{EVIL}, second: -1", "b, first: -", "b, second: 0.25")

    note, predicted = find(".note")[0], find(".predicted")[0]
    shades = lambda: [token.value_of_css_property("background-color") for token in tokens]  # noqa: E731
    ActionChains(browser).move_to_element(tokens[1]).perform()
    attends = f"Position 1: “ {EVIL}”. Head 0 of layer 0 attends to “ {EVIL}” 75 %, “The” 25 %."
    assert note.text == f"{attends} Its mean ablation changes the loss by +0.125 nats."
    titles = [button.get_property("title") for button in find(".attention .layers button")]
    assert titles[1] == "head 1 of layer 0. Its mean ablation changes the loss by \u22120.500 nats."
    assert ["not explanation" in about.text for about in find(".attention > .about")] == [True]
    assert predicted.text.splitlines()[0] == f"next token after “{EVIL}”"
    assert [value.text for value in predicted.find_elements("css selector", ".value")] == ["60 %", "30 %", "5.0 %"]
    assert predicted.find_element("css selector", ".marked").text.split() == ["⏎", "5.0", "%", "in", "the", "text"]
    # Darkness is the root of the weight.
    alpha = lambda shade: float(shade.split(",")[3].strip(" )"))  # noqa: E731
    assert [alpha(shade) for shade in shades()] == pytest.approx([0.5 * 0.25**0.5, 0.5 * 0.75**0.5, 0], abs=0.01)
    find(".layers button")[1].click()  # the other head, from the same token
    assert "Head 1 of layer 0 attends to “The” 100 %." in note.text
    find(".map .area svg")[0].send_keys(Keys.END, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert find(".map .tip")[0].text == "“⏎” (2) to “⏎” (2): 60 %" and note.text.startswith("Position 2")
    dimmed = """
        const { data } = document.querySelector(".picture canvas").getContext("2d").getImageData(0, 0, 3, 2);
        return [...data].filter((_, i) => i % 4 === 3);
    """
    share = 1 - np.sqrt([0.25, 1, 0.25, 0.25, 0.25, 0.5])  # the brighter, the more attention
    assert browser.execute_script(dimmed) == pytest.approx(list(255 * 0.8 * share), abs=1)
    assert find(".picture img")[0].get_property("naturalWidth") == 6
    assert [bar.text.split() for bar in find(".pictures .marked")] == [["shirt", "6.3", "%", "true", "class"]]
    find(".pictures .layers button")[0].click()  # released
    assert find(".picture canvas")[0].get_property("width") == 1  # and empty
    tokens[2].click()  # pin it
    ActionChains(browser).move_to_element(tokens[0]).perform()
    assert "“⏎”" in note.text and "60 %" in note.text

    def column() -> list[str]:
        return [row.find_elements("tag name", "td")[1].text for row in find("#section-4 tbody tr")]

    header = find("th button")[1]
    header.click()
    assert column() == ["1,000", "20", "3"]
    header.click()
    assert column() == ["3", "20", "1,000"]
    shown = lambda: sum(row.is_displayed() for row in find("#section-7 tbody tr"))  # noqa: E731
    assert shown() < 20
    find(".unfold")[0].click()
    assert shown() == 82
    ticks = "return [[0.17, 8.5, 3], [0, 40, 4], [-Infinity, Infinity, 3]].map((x) => linearTicks(...x))"
    assert browser.execute_script(ticks) == [[2, 4, 6, 8], [0, 10, 20, 30, 40], []]  # never one alone
    steps = """
        const { at, ticks } = makeScale({ log: true, offset: 1 }, [0, 1, 63], 0, 60, 4);
        return [[0, 1, 63].map((step) => Math.round(at(step))), ticks.map(([, label]) => label)];
    """
    assert browser.execute_script(steps) == [[0, 10, 60], ["0", "1", "10"]]
    assert complaints(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1200, "light")])
def test_page_fits_the_screen_and_colour_scheme(tmp_path: Path, browser: Any, width: int, scheme: str):
    wide = Table("Wide", [f"column {i}" for i in range(30)], [["value"] * 30])
    write_page(tmp_path / "p.html", "t", ["a fact"], [*SECTIONS, wide])
    show(browser, tmp_path / "p.html", width, scheme)
    browser.find_element("css selector", ".tokens button").click()  # its first row attends to itself alone
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    result = browser.execute_script("""
        const style = (css) => getComputedStyle(document.querySelector(css));
        return [style("body").color, style("body").backgroundColor, style("section").backgroundColor,
                style(".lines .labels text").fill, style(".tokens button").backgroundColor];
    """)
    text, behind, card, label, shade = (np.array(re.findall(r"[\d.]+", colour), float) for colour in result)
    assert (text[:3].mean() > behind[:3].mean()) == (scheme == "dark")
    assert min(contrast(text, behind), contrast(text, card), contrast(label, card)) >= 7  # WCAG 2, level AAA
    assert shade[3] == 0.5  # a token of weight 1
    shaded = shade[3] * shade[:3] + (1 - shade[3]) * card[:3]
    assert contrast(text, shaded) >= 4.5  # level AA
    side, inside, classes = browser.execute_script("""
        const [cell] = document.querySelectorAll(".map .frame"), box = document.querySelector(".layers");
        const size = [cell.getAttribute("width"), cell.getAttribute("height")];
        const edges = [...box.children].map((child) => child.getBoundingClientRect().right);
        const wide = document.querySelector("#section-7 .wide");
        return [size, Math.max(...edges) <= box.parentNode.getBoundingClientRect().right + 1, wide.className];
    """)
    assert side[0] == side[1] and inside  # square cells, no thumbnail cut off
    assert classes == "wide more-right"  # shows that it scrolls
    assert complaints(browser) == []


@pytest.mark.slow
def test_thumbnail_shows_one_hot_attention(tmp_path: Path, browser: Any):
    """With more tokens than pixels, each pixel shows its largest weight."""
    previous_TS = np.eye(256, k=-1)
    previous_TS[0, 0] = 1
    layer = AttentionLayer("layer 0", "text", "text", np.stack([previous_TS, np.full((256, 256), 1 / 256)]))
    write_page(tmp_path / "p.html", "t", [], [AttentionSection("Heads", {"text": ["a"] * 256}, [layer])])
    show(browser, tmp_path / "p.html")
    first, second = browser.execute_script("""
        return [...document.querySelectorAll(".layers canvas")].map((canvas) => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return Array.from({ length: height }, (_, y) =>
                Array.from({ length: width }, (_, x) => data[4 * (y * width + x) + 3]));
        });
    """)
    first, second = np.array(first), np.array(second)
    assert first.shape == (112, 112) and (np.diag(first) == 255).all()
    assert (first[~(np.eye(112, dtype=bool) | np.eye(112, k=-1, dtype=bool))] == 0).all()
    assert (second == round(255 * 256**-0.5)).all()
    note = browser.find_element("css selector", ".note")
    browser.find_elements("css selector", ".layers button")[1].click()
    assert "“a” 0.4 %" in note.text
    assert complaints(browser) == []


def linear_rgb(colour: np.ndarray) -> np.ndarray:
    """Return linear values, at most 1, of sRGB ones, at most 255."""
    c = colour / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Return the contrast ratio of two sRGB colours by WCAG 2."""
    light = np.sort(linear_rgb(np.array([a[:3], b[:3]])) @ [0.2126, 0.7152, 0.0722])
    return float((light[1] + 0.05) / (light[0] + 0.05))


@pytest.mark.slow
def test_a_box_smooths_lines_of_single_batches(tmp_path: Path, browser: Any):
    lines = [Line([0, 1, 2], [0.0, None, 19.0], "batch", noisy=True), Line([0, 2], [1.0, 2.0], "held-out")]
    write_page(tmp_path / "p.html", "p", [], [Lines("Loss", lines, Axis("step"), Axis("nats"))])
    show(browser, tmp_path / "p.html")
    values = lambda: [text.split(": ")[1] for text in told(browser, "Loss", "\ue011", "\ue010", "\ue015")]  # noqa: E731
    assert values() == ["0", "19", "2"]  # Home, End, arrow down
    browser.find_element("css selector", ".legend input").click()
    assert values() == ["0", "10", "2"]  # (0.9 · 0 + 19) / (0.9 + 1)
    assert len(browser.find_elements("css selector", ".line.raw")) == 1


@pytest.mark.slow
def test_charts_side_by_side_with_the_same_names_share_a_legend(tmp_path: Path, browser: Any):
    chart = lambda title, names: Lines(title, [Line([0, 1], [0.0, 1.0], n) for n in names], STEP, Axis("nats"))  # noqa: E731
    write_page(
        tmp_path / "p.html", "p", [], [Grid("Heads", [chart("one", "ab"), chart("two", "ab"), chart("three", "abc")])]
    )
    show(browser, tmp_path / "p.html")
    lines = "return [...document.querySelectorAll('figure')].map((one) => one.querySelectorAll('path.line').length)"
    assert browser.execute_script(lines) == [2, 2, 3]
    legends = browser.find_elements("css selector", ".legend")
    assert [legend.text.split() for legend in legends] == [["a", "b", "c"], ["a", "b"]]
    legends[1].find_element("css selector", "button").click()
    assert browser.execute_script(lines) == [1, 1, 3]


@pytest.mark.slow
def test_many_lines_of_one_name_have_a_median_and_a_band_of_their_middle_half(tmp_path: Path, browser: Any):
    heights = [1.0, 2.0, 4.0, 8.0, 16.0]
    chart = lambda lines: Lines("kind", lines, STEP, Axis("ratio", log=True))  # noqa: E731
    many = [Line([0, 1], [height, height], "kind", f"member {i}") for i, height in enumerate(heights)]
    write_page(tmp_path / "p.html", "p", [], [Grid("Kinds", [chart(many), chart(many[:4])])])
    show(browser, tmp_path / "p.html")
    ends = """
        const ends = (css) => [...figure.querySelectorAll(css)].map((path) => path.getAttribute("d").match(/[\\d.]+/g));
        const [figure] = document.querySelectorAll("figure");
        return [ends("path.band"), ends("path.median"), ends("path.line")];
    """
    [band], [median], members = browser.execute_script(ends)
    assert median[1::2] == members[2][1::2] and band[1::2] == [*members[1][1::2], *members[3][1::2]]
    assert len(members) == 5 and len(browser.find_elements("css selector", "path.band, path.median")) == 2
    # Where no film says which step is looked at, nothing marks one.
    assert not any(line.is_displayed() for line in browser.find_elements("css selector", "line.cursor"))
