"""Speed and size of the laboratory, and what each of its faults does, measured in Chromium without a GPU.

    python -m benchmarks.laboratory [--steps N]

The page must be built (`npm ci && npm run build` in docs/lab). The outcomes are stored in
benchmarks/results/laboratory.json, and written as two tables into docs/laboratory.md.
"""

from __future__ import annotations

import argparse
import shutil
from math import prod
from statistics import mean
from typing import Any

from benchmarks import record
from benchmarks.report import row
from benchmarks.sources import insert
from jaxformer.errors import UserError

PAGE = record.ROOT / "docs/lab/build/lab.html"
SPEED = "<!-- speed of benchmarks/laboratory.py -->\n", "<!-- end of speed -->"
EFFECTS = "<!-- faults of benchmarks/laboratory.py -->\n", "<!-- end of faults -->"
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


def measure(steps: int) -> list[dict[str, Any]]:
    """Return the outcome of each case."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not PAGE.exists() or chromium is None or driver is None:
        raise UserError(f"{PAGE} or chromium or chromedriver is missing; run `make docs`, and install the other two.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    outcomes = []
    for blocks, faults in CASES:
        browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            browser.set_script_timeout(100)
            browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            browser.get(PAGE.as_uri())
            browser.execute_async_script(CREATE, blocks, faults)
            outcomes.append({"blocks": blocks, "faults": faults, **outcome(browser, steps)})
        finally:
            browser.quit()
        print(*effect(outcomes[-1]), flush=True)
    return outcomes


def outcome(browser: Any, steps: int) -> dict[str, Any]:
    """Train `window.one`, and return what was measured; times are processor time of the page's thread."""

    def train(n: int) -> tuple[dict[str, Any], float]:
        began = processor_seconds(browser)
        return browser.execute_async_script("one.train(arguments[0]).then(arguments[1])", n), (
            processor_seconds(browser) - began
        )

    (first, compiling), (hundredth, early), (_, late) = train(1), train(99), train(100)
    last = train(steps - 200)[0]
    return {
        "parameters": sum(prod(matrix["shape"]) for matrix in first["matrices"]),
        "requests": browser.execute_script("return performance.getEntriesByType('resource').length"),
        "seconds_first_step": compiling,
        "seconds_next_199": early + late,
        "held_out": [hundredth["heldOut"], last["heldOut"]],
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
        losses = [f"{case['held_out'][i]:.3f}" for i in (0, -1)]
        entropies.append(" ".join(f"{entropy:.2f}" for entropy in case["entropy_after"]))
    else:
        losses = [f"not finite from step {step}", "-"]
        entropies.append("-")
    variance = f"{case['score_variance_before'][0]:,.2f}"
    return [", ".join(case["faults"]) or "none", str(case["blocks"]), *losses, *entropies, variance]


def table(names: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([row(names), row(["---"] * len(names)), *map(row, rows)])


def speed(figures: dict[str, Any]) -> str:
    """Return the size of the page, and the table of speed."""
    intact = [outcome for outcome in figures["cases"] if not outcome["faults"]]
    names = ["blocks", "parameters", "seconds to compile and take the first step", "for the next 199"]
    rows = [
        [f"{case['blocks']}", f"{case['parameters']:,}", *(f"{case[f'seconds_{part}']:.1f}" for part in PARTS)]
        for case in intact
    ]
    requests = sum(case["requests"] for case in figures["cases"])
    return f"The page has {figures['bytes']:,} bytes, and made {requests} requests.\n\n{table(names, rows)}\n"


def effects(figures: dict[str, Any]) -> str:
    """Return the table of faults."""
    last = f"at step {figures['steps']}"
    losses, entropies = ["held-out loss at step 100", last], ["entropy per block before training", last]
    names = ["switch", "blocks", *losses, *entropies, "variance of scores before training"]
    return table(names, [effect(case) for case in figures["cases"]]) + "\n"


def main() -> None:
    """Measure, store and write."""
    parser = argparse.ArgumentParser(description="The laboratory's speed and faults.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="at least 201")
    steps = parser.parse_args().steps
    figures = {"steps": steps, "bytes": PAGE.stat().st_size, "cases": measure(steps)}
    record.write("laboratory", figures, {})
    page = record.ROOT / "docs/laboratory.md"
    insert(page, SPEED[0], speed(figures), SPEED[1])
    insert(page, EFFECTS[0], effects(figures), EFFECTS[1])


if __name__ == "__main__":
    main()
