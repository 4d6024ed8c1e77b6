"""The laboratory's page in a browser: training, switches, arithmetic, a second model, exercises."""

import html
import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest

from tests.browser import barriers, browsing, complaints, resize, wait_for
from tests.helpers import ROOT
from tests.lab import LAB, built_page

pytestmark = pytest.mark.slow

FAULTS = (
    "no mask", "mask after softmax", "unscaled scores", "N(0, 1) weights", "no residual", "no norm",
    "softmax over queries", "no positions", "large learning rate",
)  # fmt: skip


OWN = {"width": 64, "hidden": 256, "batchSize": 16}
"""Sizes of the page, of which what its experiments show is measured."""
SMALL = {"width": 16, "hidden": 32, "batchSize": 4}
"""Sizes with which a step takes a tenth of the time."""
SOON = {"width": 32, "hidden": 64, "batchSize": 16, "contextLength": 16}
"""Sizes with which a model without a mask soon finds the next character."""
FITS = """
    const width = (part, tag) => part.querySelector(tag).getBBox().width;
    const fits = (part) => width(part, "text") < width(part, "rect") - 8;
    return [...document.querySelectorAll("#diagram g.part")].every(fits);
"""
READY = "return performance.getEntriesByName('ready').length > 0"


class LabPage:
    """The page as a reader uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def text(self, selector: str) -> str:
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        return self.browser.execute_script(script, selector)

    def click(self, selector: str) -> None:
        self.browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    def open(self, experiment: str, sizes: dict[str, int] = SMALL) -> None:
        """Open an experiment as a link does, and wait for its models, of other sizes than the page's own."""
        script = """
            Object.assign(lab.DEFAULT_CONFIG, { contextLength: 32 }, arguments[1]);
            document.querySelector('#lanes').replaceChildren();
            location.hash = arguments[0];
        """
        self.browser.execute_script(script, f"{experiment}&", sizes)  # the page's own address does not end so
        wait_for(self.browser, "return !!document.querySelector('.maps canvas')")

    def load(self, experiment: str) -> None:
        """Load the page anew, with an experiment in its address."""
        self.browser.get("about:blank")
        self.browser.get(f"{LAB.as_uri()}/build/lab.html#{experiment}")
        wait_for(self.browser, READY)

    @contextmanager
    def other_tab(self, page: Path) -> Iterator[None]:
        """Show another page meanwhile."""
        own = self.browser.current_window_handle
        self.browser.switch_to.new_window("tab")
        self.browser.get(page.as_uri())
        yield
        self.browser.close()
        self.browser.switch_to.window(own)

    @property
    def address(self) -> str:
        """The part of the address after #, decoded."""
        return unquote_plus(self.browser.execute_script("return location.hash.slice(1)"))

    def flip(self, fault: str, model: str = "A") -> None:
        self.click(f'[data-fault="{fault}"][data-model="{model}"]')

    def use(self, text: str) -> None:
        """Train on a text from now on."""
        self.browser.execute_script("document.querySelector('#text').value = arguments[0]", text)
        self.click("#use")
        self.settle()

    def held_out(self) -> list[float]:
        """The losses on held-out text that the legend tells, of each model."""
        return [float(text.split()[-1]) for text in self.texts("#chart .legend span") if "held out" in text]

    @property
    def step(self) -> int:
        return int(re.findall(r"\d+", self.text("#progress"))[0])

    def train(self, steps: int) -> None:
        """Train so many steps, and what the last drawing adds."""
        script = """
            const [train, progress] = ["#train", "#progress"].map((css) => document.querySelector(css));
            const step = () => Number(progress.textContent.match(/\\d+/)[0]);
            const last = step() + arguments[0];
            new MutationObserver((_, observer) => {
              if (train.textContent === "Pause" && step() < last) return;
              observer.disconnect();
              if (train.textContent === "Pause") train.click();
            }).observe(progress, { childList: true });
            train.click();
        """
        self.browser.execute_script(script, steps)
        wait_for(self.browser, "return document.querySelector('#train').textContent === 'Train'")

    def take(self, steps: int) -> None:
        """Take so many single steps, from step 0."""
        script = "for (let i = 0; i < arguments[0]; i++) document.querySelector('#step').click()"
        self.browser.execute_script(script, steps)
        wait_for(self.browser, f"return document.querySelector('#progress').textContent.startsWith('step {steps},')")

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
    page.take(1)
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
        assert computed == "0" or float(computed) >= 2**-126, last  # as the model computes, in 32 bits
        assert page.text("#diagram text.way") == f"position {page.text('.steps p').split()[1]}"


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
    assert "held out not finite" in page.text("#chart .legend")
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
    page.open("blocks=1&A=N(0, 1) weights,no norm,large learning rate")
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
    page.click('[aria-label="compare an intact model with no residual"]')
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 2")
    page.settle()
    assert page.text("#note") == "4 blocks, heads per block: 4; A: intact; B: no residual. Press Train."
    page.train(1)
    assert re.search(r"A: 0 switches on, .*; B: 1 switch on", page.text("#exercises li:nth-child(2) .status"))


def test_page_opens_on_three_experiments_of_which_each_trains_at_a_click(page: LabPage) -> None:
    page.load("")
    assert page.text("#note") == page.address == ""
    guided = page.texts("#guided button")
    assert len(guided) == 3 and all(text.count(".") == 1 and "Watch" in text for text in guided)
    page.browser.execute_script("Object.assign(lab.DEFAULT_CONFIG, arguments[0])", SMALL)
    page.click("#guided button")
    wait_for(page.browser, "return Number(document.querySelector('#progress').textContent.match(/\\d+/)) > 0")
    page.click("#train")
    page.settle()
    assert page.address == "blocks=1&heads=2&A=&B=no mask"
    assert page.texts("#guided [aria-pressed=true]") == [guided[0]]
    assert page.text("#note").endswith(f"B: no mask. {guided[0].partition('mask')[2]}")
    assert page.texts("#diagram .broken") == ["mask"] and "B: no mask" in page.texts("#diagram text.lane-1")
    page.open("blocks=1&heads=4&text=anagrams&A=&B=no+positions")
    words = {"spot", "stop", "post", "tops", "opts", "pots"}
    script = """
        const [text, sizes, done] = [document.querySelector("#text").value, ...arguments];
        const config = { ...lab.DEFAULT_CONFIG, ...sizes };
        const create = (faults, blocks, text) => lab.createLab({ ...config, blocks, faults }, text);
        const train = async (faults) => {
          const one = await create(faults, 1, text);
          return [(await one.train(100)).heldOut, one.generate(text.slice(0, 8), 40, 0.5)];
        };
        const explode = async () => {
          const one = await create(["no norm"], 4, lab.DEFAULT_TEXT);
          return [(await one.train(4)).finite, (await one.train(1)).finite];
        };
        Promise.all([train([]), train(["no positions"]), explode()]).then(done);
    """  # as the page trains them, which measures and draws every few steps
    (intact, first), (broken, second), finite = page.browser.execute_async_script(script, OWN)
    assert broken > intact + 0.1
    right = [sum(word in words for word in text.split()[1:-1]) for text in (first, second)]
    assert right[0] >= 3 and right[0] > right[1]
    assert len(set(first.split()[1:-1]) - words) < len(set(second.split()[1:-1]) - words)
    assert finite == [True, False]


def test_number_beside_the_intact_model_is_the_difference_of_their_losses(page: LabPage) -> None:
    page.open("blocks=1&heads=2&A=no positions&B=")
    page.take(3)
    a, b = page.held_out()
    broken, intact = page.texts(".beside")
    number, sign = re.match(r"(\S+) nats (better|worse) than the intact model at step", broken).groups()
    assert (float(number) if sign == "worse" else -float(number)) == pytest.approx(a - b, abs=0.02)
    assert intact == f"{b:.2f} nats held out at step {page.step}: the intact model."
    page.click("#reset")
    page.settle()
    page.train(4)  # beyond the steps above
    broken = page.text(".beside")
    assert "than the intact model at step 4:" in broken
    page.click("#second")  # the intact model's losses are remembered
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 1")
    assert page.texts(".beside") == [broken]
    page.click("#reset")
    page.settle()
    page.take(1)
    assert "than the intact model at step 1:" in page.text(".beside")


def test_samples_name_the_step_after_which_they_were_generated(page: LabPage) -> None:
    page.open("blocks=1")
    rows = "return [...document.querySelectorAll('.samples tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    assert page.browser.execute_script(rows) == [[f"step {step}", ""] for step in (1, 25, 50, 100)]
    page.train(26)
    (first, early), (second, late), (_, later), _ = page.browser.execute_script(rows)
    assert (first, second) == ("step 1", "step 25") and len(early) == len(late) == 40 and early != late
    assert later == "" or page.step >= 50
    page.click("#reset")
    page.settle()
    assert page.browser.execute_script(rows) == [[f"step {step}", ""] for step in (1, 25, 50, 100)]
    page.take(3)
    assert "knows" not in page.text("#verdicts") and f"at step {page.step}" in page.text(".beside")
    assert page.browser.execute_script(rows)[:2] == [["step 1", early], ["step 25", ""]]


def test_address_follows_the_switches_and_loading_it_keeps_the_experiment(page: LabPage) -> None:
    page.open("")
    page.flip("N(0, 1) weights")
    page.flip("no mask")
    page.settle()
    assert page.address == "blocks=2&heads=4&A=N(0, 1) weights,no mask"
    page.click("#second")
    wait_for(page.browser, "return document.querySelectorAll('.model').length === 2")
    page.flip("no mask", "B")
    script = "const s = document.querySelector('#heads'); s.value = '2'; s.dispatchEvent(new Event('change'))"
    page.browser.execute_script(script)
    wait_for(page.browser, "return location.hash.includes('heads=2')")
    about = "2 blocks, heads per block: 2; A: N(0, 1) weights, no mask; B: N(0, 1) weights. Press Train."
    page.browser.refresh()
    wait_for(page.browser, READY)
    assert page.text("#note") == about
    assert page.address == "blocks=2&heads=2&A=N(0, 1) weights,no mask&B=N(0, 1) weights"
    checked = "return [...document.querySelectorAll('#switches :checked')].map((b) => Object.values(b.dataset).join())"
    assert page.browser.execute_script(checked) == ["no mask,A", "N(0, 1) weights,A", "N(0, 1) weights,B"]
    page.open("block=1&blocks=3&text=mine&A=no+mask,no+sense")
    assert page.text("#note") == (
        "2 blocks, heads per block: 4; A: no mask. Press Train. "
        "Unknown, and left out: block=1; A=no sense; text=mine; blocks=3."
    )
    page.click("#hide")
    wait_for(page.browser, "return !document.querySelector('#guess button:last-child').disabled")
    assert page.address == "" and page.browser.execute_script("return document.querySelector('#share').disabled")
    assert page.texts("#diagram .broken") == []


def test_experiments_that_pages_link_to_are_those_of_the_page(page: LabPage) -> None:
    for folder, up in (("docs", ""), ("docs/story", "../")):
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.md"))
        links = {html.unescape(link) for link in re.findall(r'<a href="(.*?)"', text)}
        assert {link.partition("#")[0] for link in links} <= {f"{up}lab.html", f"{up}live.html"}
        addresses = [link.partition("#")[2] for link in links]
        script = "return arguments[0].flatMap((address) => lab.fromAddress(address).unknown)"
        assert len(addresses) > 5 and page.browser.execute_script(script, addresses) == []


def test_experiment_is_shared_as_link_picture_and_file(page: LabPage, tmp_path: Path) -> None:
    page.open("blocks=1&heads=1&A=no+mask")
    page.train(2)
    catch = """
        window.saved = [];
        navigator.clipboard.writeText = async (text) => (window.copied = text);
        URL.createObjectURL = (blob) => (saved.push(blob), "data:,");
        HTMLAnchorElement.prototype.click = () => {};
    """
    page.browser.execute_script(catch)
    for button in ("copy", "picture", "save"):
        page.click(f"#{button}")
    wait_for(page.browser, "return saved.length === 2")
    assert page.browser.execute_script("return copied === location.href")
    read = """
        const done = arguments[0], [file, image] = [...saved].sort((a, b) => a.type < b.type ? -1 : 1);
        createImageBitmap(image).then(async ({ width, height }) =>
          done([await file.text(), image.type, width, height]));
    """
    text, kind, width, height = page.browser.execute_async_script(read)
    chart = page.browser.execute_script("return document.querySelector('#chart svg').clientHeight")
    assert kind == "image/png" and width > 1000 and height > 2 * chart
    stored = json.loads(text)
    [model] = stored["models"]
    assert model["config"]["faults"] == ["no mask"] and [p["step"] for p in model["history"][:2]] == [1, 2]

    def load(name: str, content: Any) -> tuple[str, bool]:
        """Open a file; return what the page tells, and whether it is a problem."""
        (tmp_path / name).write_text(json.dumps(content))
        page.browser.find_element("css selector", "#load").send_keys(str(tmp_path / name))
        wait_for(page.browser, f"return document.querySelector('#note').textContent.includes('{name}')")
        return page.text("#note"), page.browser.execute_script("return !!document.querySelector('#note.problem')")

    default = "2 blocks, heads per block: 4; A: intact. Press Train."
    assert load("default.json", {**stored, "laboratory": ""}) == (f"From default.json: {default}", False)
    stored["text"] = "abcd " * 200
    own = default.replace("; A", "; own text; A")
    assert load("bare.json", {**stored, "laboratory": ""}) == (f"From bare.json: {own}", False)
    told, is_problem = load("odd.json", {**stored, "laboratory": stored["laboratory"] + ",no sense"})
    assert told.endswith(" own text; A: no mask. Press Train. Unknown, and left out: A=no sense.") and is_problem
    about = "1 block, heads per block: 1; own text; A: no mask. Press Train."
    assert load("mine.json", stored) == (f"From mine.json: {about}", False)
    page.click("#train")
    remedy = "choose a file that Save experiment wrote."
    assert load("other.json", [1]) == (f"other.json is not an experiment of the laboratory; {remedy}", True)
    assert page.text("#train") == "Pause"
    assert "1,000 characters" in page.text("#text-about")  # of the experiment before
    page.browser.refresh()  # the tab remembers the text
    wait_for(page.browser, READY)
    assert page.text("#note") == about


def test_chart_is_as_wide_as_its_column_when_only_the_column_changes(page: LabPage) -> None:
    page.open("blocks=1")
    page.browser.execute_script("document.querySelector('.experiment').style.width = '600px'")
    sides = "const [plot, chart] = ['#chart svg', '#chart'].map((s) => document.querySelector(s).clientWidth);"
    wait_for(page.browser, f"{sides} return plot === chart && chart < 600")
    page.browser.execute_script("document.querySelector('.experiment').style.width = ''")


def test_memory_does_not_grow_with_new_models(page: LabPage) -> None:
    do = page.browser.execute_cdp_cmd
    count = "window.memories = []; const M = WebAssembly.Memory;"
    count += "WebAssembly.Memory = class extends M { constructor(...a) { super(...a); memories.push(this); } }"
    added = do("Page.addScriptToEvaluateOnNewDocument", {"source": count})
    page.load("blocks=1")

    def used(restarts: int) -> tuple[int, int]:
        """Return bytes of WebAssembly and of JavaScript after so many new models."""
        for _ in range(restarts):
            page.open("blocks=1")
        do("HeapProfiler.collectGarbage", {})
        heap = do("Runtime.getHeapUsage", {})["usedSize"]
        return sum(page.browser.execute_script("return memories.map((memory) => memory.buffer.byteLength)")), heap

    wasm, heap = used(2)
    later_wasm, later_heap = used(6)
    do("Page.removeScriptToEvaluateOnNewDocument", added)
    assert later_wasm == wasm
    assert later_heap - heap < 600_000


@pytest.mark.parametrize(
    ("exercises", "experiment", "steps"),
    [
        ({"Cheat", "One difference"}, "blocks=1&heads=1&A=no+mask&B=", 100),
        ({"One-hot"}, "blocks=1&heads=1&A=unscaled+scores,N(0,+1)+weights,no+residual", 50),
    ],
)
def test_exercises_have_solutions(page: LabPage, exercises: set[str], experiment: str, steps: int) -> None:
    page.open(experiment, SOON)
    page.use("".join(random.Random(0).choices("abcdefgh", k=3000)))  # of which nothing but the letter itself tells more

    def solved() -> set[str]:
        titles, status = page.texts("#exercises li b"), page.texts("#exercises .status")
        return {title for title, now in zip(titles, status, strict=True) if now.startswith("Solved: ")}

    assert not exercises & solved()
    page.train(steps)
    assert exercises <= solved()


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
    page.use("too short")
    wait_for(page.browser, "return !document.querySelector('#note').hidden")
    assert page.text("#note") == "The text has 9 characters, and 500 are the least; add some."
    page.train(1)
    page.use("".join(map(chr, range(500, 1000))))
    page.settle()
    assert page.text("#note") == "The text has 500 different characters; give one with at most 256."
    assert page.step > 0
    page.use("abc😀" * 200)
    about = "document.querySelector('#text-about').textContent"
    wait_for(page.browser, f"return {about}.includes('800 characters, 4 different')")
    assert page.text("#note") == "At step 0 again, with your text."


def test_links_to_chapters_are_those_of_the_site(page: LabPage, tmp_path: Path) -> None:
    page.open("blocks=1")
    assert "Chapter 2. Weights that read" in page.text("#switches li")
    assert page.texts("a") == []  # alone, the page has no chapters
    in_site = tmp_path / "lab.html"
    in_site.write_text(built_page().read_text(encoding="utf-8").replace("<html", "<html data-site", 1), "utf-8")
    with page.other_tab(in_site):
        wait_for(page.browser, READY)
        links = page.browser.execute_script("return [...document.links].map((link) => link.getAttribute('href'))")
    assert len(links) == 1 + len(FAULTS) + 8  # about the page, and a chapter per switch and exercise
    assert all((ROOT / "docs" / link).with_suffix(".md").exists() for link in links)


def test_the_first_page_of_the_site_opens_the_laboratory_and_at_a_click_a_model(page: LabPage, tmp_path: Path) -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("<!-- front -->") == 1
    front = (ROOT / "docs/scripts/front.html").read_text(encoding="utf-8")
    (tmp_path / "index.html").write_text(f"<!doctype html>{front}", "utf-8")
    (tmp_path / "live.html").write_text("<!doctype html><p>A model", "utf-8")
    links = "return [...document.links].map((link) => link.getAttribute('href'))"
    frames = "return [...document.querySelectorAll('iframe')].map((frame) => frame.src.split('/').at(-1))"
    with page.other_tab(tmp_path / "index.html"):
        assert page.browser.execute_script(links) == ["lab.html", "live.html"]  # which need no script
        assert page.browser.execute_script(frames) == []
        page.click("#open-live")
        assert page.browser.execute_script(frames) == ["live.html"]
        assert page.browser.execute_script("return document.activeElement.title") == "A transformer to type into"
        page.browser.switch_to.frame(0)
        wait_for(page.browser, "return document.body?.textContent === 'A model'")


def test_page_on_a_phone_does_not_scroll_sideways_and_keeps_no_reader_out(page: LabPage) -> None:
    Keys = pytest.importorskip("selenium.webdriver").Keys
    browser = page.browser
    resize(browser, 390, "dark")
    page.load("blocks=1&A=&B=no+residual")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    shown = "return [...document.querySelectorAll('.verdict, .model')].filter((e) => e.checkVisibility())"
    lanes = f"{shown}.map((e) => e.className.split(' ').at(-1))"
    assert browser.execute_script(lanes) == ["lane-1", "lane-1"]  # the broken one
    browser.find_element("css selector", "[role=tab][aria-selected=true]").send_keys(Keys.ARROW_LEFT)
    assert browser.execute_script(lanes) == ["lane-0", "lane-0"]
    assert browser.execute_script("return document.activeElement.textContent") == "A"
    assert browser.execute_script("return document.querySelectorAll('.fold[open]').length") == 0
    height = "return Math.max(...[...document.querySelector('#bar .controls').children].map((e) => e.offsetHeight))"
    bar = browser.execute_script("return document.querySelector('#bar .controls').offsetHeight")
    assert bar == browser.execute_script(height)  # one row
    page.flip("unscaled scores")
    page.take(1)
    assert browser.execute_script(FITS)
    page.click(".norms tbody button")
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    for width, scheme in ((390, "dark"), (390, "light"), (1400, "dark"), (1400, "light")):
        resize(browser, width, scheme)
        page.settle()
        assert barriers(browser) == [], (width, scheme)
