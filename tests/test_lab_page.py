"""The laboratory's page in a browser: training, switches, arithmetic, a second model, exercises."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browsing, complaints, wait_for
from tests.helpers import ROOT
from tests.lab import built_page

pytestmark = pytest.mark.slow

FAULTS = (
    "no mask", "mask after softmax", "unscaled scores", "N(0, 1) weights", "no residual", "no norm",
    "softmax over queries", "no positions", "large learning rate",
)  # fmt: skip


class LabPage:
    """The page as a reader uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.opened = 0

    def text(self, selector: str) -> str:
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        return self.browser.execute_script(script, selector)

    def click(self, selector: str) -> None:
        self.browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    def open(self, experiment: str) -> None:
        """Open an experiment as a link does, and wait for its models."""
        self.opened += 1  # an address that has not been open yet
        script = "document.querySelector('#lanes').replaceChildren(); location.hash = arguments[0]"
        self.browser.execute_script(script, f"{experiment}&{self.opened}")
        wait_for(self.browser, "return !!document.querySelector('.maps canvas')")

    def flip(self, fault: str, model: str = "A") -> None:
        self.click(f'[data-fault="{fault}"][data-model="{model}"]')

    @property
    def step(self) -> int:
        return int(re.findall(r"\d+", self.text("#progress"))[0])

    def train(self, steps: int) -> None:
        """Train at least so many steps."""
        self.click("#train")
        step = "Number(document.querySelector('#progress').textContent.match(/\\d+/)[0])"
        has_stopped = "document.querySelector('#train').textContent === 'Train'"
        wait_for(self.browser, f"return {step} >= {self.step + steps} || {has_stopped}")
        if self.text("#train") == "Pause":
            self.click("#train")
        self.settle()

    def settle(self) -> None:
        """Wait until the page has done what was clicked."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabPage]:
    with browsing(built_page()) as browser:
        lab = LabPage(browser)
        wait_for(browser, "return !!document.querySelector('.maps canvas')")
        yield lab
        assert complaints(browser) == []


def test_predictions_stand_before_training_and_losses_after(page: LabPage) -> None:
    page.open("blocks=1")
    predicted = page.texts("#chart text.theory")
    assert [label.split()[0] for label in predicted] == ["uniform", "unigram", "bigram"]
    assert page.browser.execute_script("return document.querySelector('.line.heldOut').getAttribute('points')") == ""
    page.click("#step")
    wait_for(page.browser, "return document.querySelector('#progress').textContent.startsWith('step 1,')")
    page.train(5)
    points = page.browser.execute_script("return document.querySelector('.line.heldOut').getAttribute('points')")
    assert page.step >= 6 and len(points.split()) >= 2
    assert page.texts("#chart text.theory") == predicted
    page.click("#reset")
    wait_for(page.browser, "return document.querySelector('#progress').textContent === 'step 0'")


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_arithmetic_on_the_page_arrives_at_the_weight_of_the_model(page: LabPage, fault: str | None) -> None:
    page.open(f"blocks=1&A={fault or ''}")
    map_ = page.browser.find_element("css selector", "canvas.large")
    for keys in ("", "\ue014\ue014\ue015"):  # from below the diagonal to above it: right, right, down
        map_.send_keys(*keys)
        last = page.texts(".arithmetic li")[-1]
        computed, model = re.fullmatch(r"Weight: (.+)\. The model has (.+)\.", last).groups()
        assert float(computed) == pytest.approx(float(model), rel=0.02, abs=1e-4), last


def test_a_switch_acts_during_training(page: LabPage) -> None:
    page.open("blocks=1")
    page.train(3)
    assert "Rows read the future" not in page.text("#verdicts")
    page.flip("no mask")
    wait_for(page.browser, "return document.querySelector('#verdicts').textContent.includes('Rows read the future')")
    assert "no mask" in page.texts("#chart text.lane-0")


def test_equal_models_stay_equal_and_one_switch_tells_them_apart(page: LabPage) -> None:
    page.open("blocks=1&A=no positions&B=no positions")
    page.train(2)
    curves = "return [0, 1].map((i) => document.querySelector(`.line.heldOut.lane-${i}`).getAttribute('points'))"
    a, b = page.browser.execute_script(curves)
    assert a == b != ""
    page.flip("no positions", "B")
    page.train(2)
    a, b = page.browser.execute_script(curves)
    assert a != b


def test_a_loss_that_is_not_finite_is_marked_and_explained(page: LabPage) -> None:
    page.open("blocks=4&A=no norm,large learning rate")
    page.train(100)
    [mark] = page.texts("#chart text.mark")
    step = int(re.fullmatch(r"not finite at step (\d+)", mark)[1])
    assert f"Step {step}: not finite" in page.text("#verdicts")
    assert page.step == step
    page.flip("unscaled scores")
    page.settle()
    computed, model = re.fullmatch(r"Weight: (.+)\. The model has (.+)\.", page.texts(".arithmetic li")[-1]).groups()
    assert float(computed) == pytest.approx(float(model), rel=0.02, abs=1e-4)  # still of the last finite step
    assert ("Solved" in page.text("#exercises li:nth-child(5) .status")) == (step < 20)


def test_a_matrix_shows_its_largest_gradients(page: LabPage) -> None:
    page.open("blocks=1")
    page.train(1)
    page.click(".norms tbody button")
    entries = page.texts(".largest li")
    sizes = [abs(float(re.search(r"gradient (\S+),", entry)[1])) for entry in entries]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0 and len(sizes) == 5


def test_what_a_click_does_not_show_is_told(page: LabPage) -> None:
    page.open("blocks=1")
    page.train(1)
    page.flip("N(0, 1) weights")
    page.settle()
    assert page.text("#note") == "“N(0, 1) weights” acts when parameters are drawn: press Reset."
    page.click("#second")
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 2")
    assert "Both models begin at step 0" in page.text("#note")
    page.train(1)
    step = page.step
    page.click("#second")  # without the second model, the first goes on
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 1")
    assert page.step == step > 0
    page.open("blocks=4&A=no norm,large learning rate")
    page.train(100)
    page.click("#train")
    assert page.text("#note") == "Parameters that are not finite cannot be trained: press Reset."
    assert page.text("#train") == "Train"


def test_pausing_and_training_again_leaves_one_loop(page: LabPage) -> None:
    page.open("blocks=1")
    script = """
        const [done, find] = [arguments[0], (id) => document.querySelector(id)];
        let updates = 0;
        new MutationObserver((_, observer) => {
          if (++updates && find("#progress").textContent !== "step 0") return;
          observer.disconnect();
          done(updates);
        }).observe(find("#progress"), { childList: true });
        for (let i = 0; i < 21; i++) find("#train").click();
        find("#reset").click();
    """
    assert page.browser.execute_async_script(script) == 2  # one training, and the reset


def test_a_switch_is_compared_with_an_intact_model_where_it_shows(page: LabPage) -> None:
    page.open("blocks=1")
    page.click('[aria-label="compare an intact model with no norm"]')
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 2")
    page.settle()
    assert page.text("#note") == "4 blocks, heads per block: 4; A: intact; B: no norm. Press Train."
    page.train(6)
    assert "B: not finite at step" in page.texts("#chart text.mark")[0]
    assert re.search(r"A: 0 switches on, .*; B: 1 switch on", page.text("#exercises li:nth-child(2) .status"))


def test_memory_does_not_grow_with_new_models() -> None:
    with browsing(built_page()) as browser:
        count = "window.memories = []; const M = WebAssembly.Memory;"
        count += "WebAssembly.Memory = class extends M { constructor(...a) { super(...a); memories.push(this); } }"
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": count})
        browser.refresh()
        lab = LabPage(browser)
        wait_for(browser, "return performance.getEntriesByName('ready').length")

        def used(restarts: int) -> tuple[int, int]:
            """Return bytes of WebAssembly and of JavaScript after so many new models."""
            for _ in range(restarts):
                lab.open("blocks=4")
            browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            heap = browser.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]
            return sum(browser.execute_script("return memories.map((memory) => memory.buffer.byteLength)")), heap

        wasm, heap = used(3)
        later_wasm, later_heap = used(10)
        assert later_wasm == wasm
        assert later_heap - heap < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exercise", "experiment", "steps"),
    [
        ("Cheat", "blocks=2&A=no+mask", 200),
        ("One-hot", "blocks=1&A=unscaled+scores,N(0,+1)+weights,no+residual", 50),
        ("One difference", "blocks=2&A=&B=no+residual", 110),
    ],
)
def test_exercises_have_solutions(page: LabPage, exercise: str, experiment: str, steps: int) -> None:
    page.open(experiment)
    item = next(i for i, title in enumerate(page.texts("#exercises li b"), 1) if title == exercise)
    status = f"#exercises li:nth-child({item}) .status"
    assert page.text(status).startswith("Now: ")
    while page.step < steps and page.text(status).startswith("Now: "):
        page.train(10)
    assert page.text(status).startswith("Solved: ")


def test_exercise_by_hand_accepts_the_right_weight_only(page: LabPage) -> None:
    page.open("blocks=1")
    page.click("#by-hand button")
    asked = page.text("#by-hand + p")
    *products, K = map(float, re.search(r"are (\S+) and (\S+), and K = (\d+)", asked).groups())
    a, b = (product / K**0.5 for product in products)
    weight = 1 / (1 + math.exp(b - a))
    answer = page.browser.find_element("css selector", "#by-hand input")
    for typed, status in (((weight + 0.3) % 1, "Not yet"), (weight, "Solved")):
        answer.clear()
        answer.send_keys(f"{typed:.3f}")
        page.click("#by-hand button:last-child")
        assert page.text("#exercises li:nth-child(8) .status").startswith(status)
    assert page.text("#solved").split()[0] != "0"


def test_hidden_switch_is_not_shown_and_can_be_named(page: LabPage) -> None:
    page.open("blocks=1")
    page.click("#hide")
    wait_for(page.browser, "return !document.querySelector('#guess button:last-child').disabled")
    assert page.browser.execute_script("return document.querySelectorAll('#switches input:checked').length") == 0
    assert "hidden" in page.text(".steps")
    status = "#exercises li:nth-child(7) .status"
    tried = []
    for fault in FAULTS:
        script = "document.querySelector('#guess select').value = arguments[0]"
        page.browser.execute_script(script, fault)
        page.click("#guess button:last-child")
        tried.append(page.text(status))
        if tried[-1].startswith("Solved"):
            break
    assert tried[-1].startswith(f"Solved: {fault}")
    assert all(text.startswith("Not ") for text in tried[:-1])
    checked = "return [...document.querySelectorAll('#switches input:checked')].map((box) => box.dataset.fault)"
    assert page.browser.execute_script(checked) == [fault]


def test_own_text_replaces_the_text_or_says_its_limit(page: LabPage) -> None:
    page.open("blocks=1")
    area = page.browser.find_element("css selector", "#text")
    script = "arguments[0].value = arguments[1]"
    page.browser.execute_script(script, area, "too short")
    page.click("#use")
    wait_for(page.browser, "return !document.querySelector('#note').hidden")
    assert page.text("#note") == "The text has 9 characters, and 500 are the least; add some."
    page.train(1)
    page.browser.execute_script(script, area, "".join(map(chr, range(500, 1000))))
    page.click("#use")
    page.settle()
    assert page.text("#note") == "The text has 500 different characters; give one with at most 256."
    assert page.step > 0
    page.browser.execute_script(script, area, "abc😀" * 200)
    page.click("#use")
    about = "document.querySelector('#text-about').textContent"
    wait_for(page.browser, f"return {about}.includes('800 characters, 4 different')")
    assert page.text("#note") == "At step 0 again, with your text."


def test_links_to_chapters_are_those_of_the_site(page: LabPage, tmp_path: Path) -> None:
    page.open("blocks=1")
    assert "Chapter 2. Weights that read" in page.text("#switches li")
    assert page.texts("a") == []  # alone, the page has no chapters
    in_site = tmp_path / "lab.html"
    in_site.write_text(built_page().read_text(encoding="utf-8").replace("<html", "<html data-site", 1), "utf-8")
    with browsing(in_site) as browser:
        wait_for(browser, "return !!document.querySelector('.maps canvas')")
        links = browser.execute_script("return [...document.links].map((link) => link.getAttribute('href'))")
    assert len(links) == 1 + len(FAULTS) + 8  # about the page, and a chapter per switch and exercise
    assert all((ROOT / "docs" / link).with_suffix(".md").exists() for link in links)


def test_page_on_a_phone_does_not_scroll_sideways() -> None:
    with browsing(built_page(), 390, "dark") as browser:
        wait_for(browser, "return !!document.querySelector('.maps canvas')")
        browser.execute_script("document.querySelector('#second').click()")
        wait_for(browser, "return document.querySelectorAll('.model').length === 2")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        assert complaints(browser) == []
