"""Speed and size of the laboratory, and what each of its faults does, measured in Chromium without a GPU.

    python -m studies.laboratory [--steps N]

The page must be built (`npm ci && npm run build` in docs/lab). The outcomes are stored in
studies/results/laboratory.json, and written as two tables into docs/laboratory.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from statistics import mean, median
from typing import Any

from benchmarks import record
from benchmarks.report import row
from jaxformer.errors import UserError
from studies.sources import insert

PAGE = record.ROOT / "docs/lab/build/lab.html"
SPEED = "<!-- speed of studies/laboratory.py -->\n", "<!-- end of speed -->"
EFFECTS = "<!-- faults of studies/laboratory.py -->\n", "<!-- end of faults -->"
FAULTS = [
    "no mask", "mask after softmax", "unscaled scores", "N(0, 1) weights", "no residual", "no norm",
    "softmax over queries", "no positions", "large learning rate",
]  # fmt: skip
CASES: list[tuple[int, list[str]]] = [
    (1, []), (2, []), (4, []), *((2, [fault]) for fault in FAULTS), (4, ["no norm"]), (4, ["no residual"]),
    (1, ["unscaled scores", "N(0, 1) weights", "no residual"]),  # the rung attention_unscaled
]  # fmt: skip
"""Blocks and faults."""
PARTS = "first_step", "next_199"
CREATE = """
const config = { ...lab.DEFAULT_CONFIG, blocks: arguments[0], faults: arguments[1] };
lab.createLab(config, lab.DEFAULT_TEXT).then((one) => (window.one = one)).finally(arguments[2]);
"""
THEORY = "return lab.theory(lab.DEFAULT_CONFIG, lab.DEFAULT_TEXT)"
OPENED = """
const times = ["first-contentful-paint", "ready"].map((name) => performance.getEntriesByName(name)[0]?.startTime);
return times.every(Boolean) && times.map((milliseconds) => milliseconds / 1000);
"""
STEP = "return Number(document.querySelector('#progress').textContent.match(/\\d+/)[0])"
TRAIN = "document.querySelector('#train').click()"


@contextmanager
def browsing() -> Iterator[tuple[Any, dict[str, float]]]:
    """Open the page; yield the browser, and the seconds until the page was painted and until it could train."""
    from selenium import webdriver
    from selenium.webdriver.support.wait import WebDriverWait

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not PAGE.exists() or chromium is None or driver is None:
        raise UserError(f"{PAGE} or chromium or chromedriver is missing; run `make docs`, and install the other two.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        browser.set_script_timeout(100)
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.get(PAGE.as_uri())
        paint, ready = WebDriverWait(browser, 60).until(lambda browser: browser.execute_script(OPENED))
        yield browser, {"seconds_to_first_paint": paint, "seconds_to_ready": ready}
    finally:
        browser.quit()


def measure(steps: int) -> dict[str, Any]:
    """Return the outcome of each case, the losses of models that only count, and the speed of the button Train."""
    outcomes = []
    for blocks, faults in CASES:
        with browsing() as (browser, opened):
            browser.execute_async_script(CREATE, blocks, faults)
            outcomes.append({"blocks": blocks, "faults": faults, **opened, **outcome(browser, steps)})
        print(*effect(outcomes[-1]), flush=True)
    with browsing() as (browser, _):
        theory, began = browser.execute_script(THEORY), processor_seconds(browser)
        browser.execute_script(TRAIN)
        while (step := browser.execute_script(STEP)) < 200:
            time.sleep(0.2)
        return {"cases": outcomes, "theory": theory, "seconds_page": (processor_seconds(browser) - began) * 200 / step}


def outcome(browser: Any, steps: int) -> dict[str, Any]:
    """Train `window.one`, and return what was measured. Held-out losses are those of every tenth step from step 100 on;
    times are processor time of the page's thread."""

    def train(n: int) -> tuple[dict[str, Any], float]:
        began = processor_seconds(browser)
        return browser.execute_async_script("one.train(arguments[0]).then(arguments[1])", n), (
            processor_seconds(browser) - began
        )

    (first, compiling), (hundredth, early), (second, late) = train(1), train(99), train(100)
    later = [train(10)[0] for _ in range(200, steps, 10)]
    last = later[-1]
    return {
        "parameters": sum(prod(matrix["shape"]) for matrix in first["matrices"]),
        "requests": browser.execute_script("return performance.getEntriesByType('resource').length"),
        "seconds_first_step": compiling,
        "seconds_next_199": early + late,
        "loss_before": first["loss"],
        "held_out": {progress["step"]: progress["heldOut"] for progress in (hundredth, second, *later)},
        "not_finite_at": None if last["finite"] else last["step"],
        "score_variance_before": list(map(mean, first["scoreVariance"])),
        "entropy_before": list(map(mean, first["entropy"])),
        "entropy_after": list(map(mean, last["entropy"])) if last["finite"] else None,
    }


def processor_seconds(browser: Any) -> float:
    """Return the processor time of the page's thread."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def effect(case: dict[str, Any]) -> list[str]:
    """Return a row of the table of faults."""
    entropies = [" ".join(f"{entropy:.2f}" for entropy in case["entropy_before"])]
    if (step := case["not_finite_at"]) is None:
        *_, last = case["held_out"].values()
        losses = [f"{case['held_out'][100]:.3f}", f"{last:.3f}"]
        entropies.append(" ".join(f"{entropy:.2f}" for entropy in case["entropy_after"]))
    else:
        losses = [f"not finite from step {step}", "-"]
        entropies.append("-")
    variance = f"{case['score_variance_before'][0]:,.2f}"
    names = [", ".join(case["faults"]) or "none", str(case["blocks"])]
    return [*names, f"{case['loss_before']:.2f}", *losses, *entropies, variance]


def table(names: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([row(names), row(["---"] * len(names)), *map(row, rows)])


def speed(figures: dict[str, Any], hardware: dict[str, Any]) -> str:
    """Return the size of the page, how soon it opens, and the table of speed."""
    intact = [outcome for outcome in figures["cases"] if not outcome["faults"]]
    names = ["blocks", "parameters", "seconds to compile and take the first step", "for the next 199"]
    rows = [
        [f"{case['blocks']}", f"{case['parameters']:,}", *(f"{case[f'seconds_{part}']:.1f}" for part in PARTS)]
        for case in intact
    ]
    requests = sum(case["requests"] for case in figures["cases"])
    paint, ready = (
        median(case[f"seconds_to_{event}"] for case in figures["cases"]) for event in ("first_paint", "ready")
    )
    return (
        f"The page has {figures['bytes']:,} bytes, and made {requests} requests. It is painted after {paint:.2f} "
        f"seconds, and can train after {ready:.2f} (medians of {len(figures['cases'])}; {hardware['cpu']}, "
        f"{hardware['cores']} cores, load {hardware.get('load', 0):.0f}).\n\n{table(names, rows)}\n\n"
        "Measuring and drawing come on top: with two blocks, the button *Train* takes "
        f"{figures['seconds_page']:.1f} seconds for 200 steps.\n"
    )


def effects(figures: dict[str, Any]) -> str:
    """Return the losses of models that only count, and the table of faults."""
    uniform, unigram, bigram = (figures["theory"][name] for name in ("uniform", "unigram", "bigram"))
    intact = next(case for case in figures["cases"] if case["blocks"] == 2)
    passed = next((step for step, loss in intact["held_out"].items() if loss < bigram), None)
    last = f"at step {figures['steps']}"
    losses, entropies = ["held-out loss at step 100", last], ["entropy per block before training", last]
    names = ["switch", "blocks", "loss before training", *losses, *entropies, "variance of scores before training"]
    return (
        f"A guess costs {uniform:.2f} nats per character, the frequencies {unigram:.2f}, and the character before "
        f"{bigram:.2f}; the intact model with two blocks is below that from step {passed} on.\n\n"
        f"{table(names, [effect(case) for case in figures['cases']])}\n"
    )


def main() -> None:
    """Measure, store and write."""
    parser = argparse.ArgumentParser(description="The laboratory's speed and faults.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 10, at least 210")
    steps = parser.parse_args().steps
    figures = {"steps": steps, "bytes": PAGE.stat().st_size, **measure(steps)}
    stored = record.write("laboratory", figures, {}, record.STUDY_RESULTS)
    page = record.ROOT / "docs/laboratory.md"
    insert(page, SPEED[0], speed(figures, json.loads(stored.read_text(encoding="utf-8"))["hardware"]), SPEED[1])
    insert(page, EFFECTS[0], effects(figures), EFFECTS[1])


if __name__ == "__main__":
    main()
