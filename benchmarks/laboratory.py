"""Speed and size of the laboratory, and what each of its faults does, measured in Chromium without a GPU.

    python -m benchmarks.laboratory [--steps N]

The page must be built (`npm ci && npm run build` in docs/lab). The outcomes are stored in
benchmarks/results/laboratory.json, and written as two tables into docs/laboratory.md.
"""

from __future__ import annotations

import argparse
import shutil
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
]  # fmt: skip
"""Blocks and faults."""
TRAIN = """
const [blocks, faults, steps, done] = arguments;
(async () => {
  const config = { ...lab.DEFAULT_CONFIG, blocks, faults };
  const one = await lab.createLab(config, lab.DEFAULT_TEXT);
  let time = performance.now();
  const first = await one.train(1);
  const compiled = performance.now() - time;
  time = performance.now();
  const parts = [];
  let seconds = 0;
  for (let step = 100; step <= steps; step += 100) {
    parts.push(await one.train(step - one.step));
    if (step === 200) seconds = (performance.now() - time) / 1000;
  }
  const last = parts[parts.length - 1];
  const mean = (heads) => heads.reduce((sum, x) => sum + x) / heads.length;
  return {
    blocks,
    faults,
    parameters: first.matrices.reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b), 0),
    requests: performance.getEntriesByType("resource").length,
    compile_ms: compiled,
    seconds,
    held_out: parts.map((part) => part.heldOut),
    not_finite_at: last.finite ? null : last.step,
    score_variance_before: first.scoreVariance.map(mean),
    entropy_before: first.entropy.map(mean),
    entropy_after: last.entropy.map(mean),
  };
})().then(done, (e) => done(`${e}`));
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
            browser.set_script_timeout(600)
            browser.command_executor.client_config.timeout = 600
            browser.get(PAGE.as_uri())
            outcome = browser.execute_async_script(TRAIN, blocks, faults, steps)
        finally:
            browser.quit()
        if isinstance(outcome, str):
            raise RuntimeError(f"{blocks} blocks, {faults}: {outcome}")
        print(*effect(outcome), flush=True)
        outcomes.append(outcome)
    return outcomes


def effect(outcome: dict[str, Any]) -> list[str]:
    """Return a row of the table of faults."""
    entropies = [" ".join(f"{entropy:.2f}" for entropy in outcome["entropy_before"])]
    if (step := outcome["not_finite_at"]) is None:
        losses = [f"{outcome['held_out'][i]:.3f}" for i in (0, -1)]
        entropies.append(" ".join(f"{entropy:.2f}" for entropy in outcome["entropy_after"]))
    else:
        losses = [f"not finite from step {step}", "-"]
        entropies.append("-")
    variance = f"{outcome['score_variance_before'][0]:,.2f}"
    return [", ".join(outcome["faults"]) or "none", str(outcome["blocks"]), *losses, *entropies, variance]


def table(names: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([row(names), row(["---"] * len(names)), *map(row, rows)])


def speed(figures: dict[str, Any]) -> str:
    """Return the size of the page, and the table of speed."""
    intact = [outcome for outcome in figures["cases"] if not outcome["faults"]]
    names = ["blocks", "parameters", "ms to compile and take the first step", "seconds for the next 199"]
    rows = [
        [f"{case['blocks']}", f"{case['parameters']:,}", f"{case['compile_ms']:,.0f}", f"{case['seconds']:.1f}"]
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
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 100, at least 200")
    steps = parser.parse_args().steps
    figures = {"steps": steps, "bytes": PAGE.stat().st_size, "cases": measure(steps)}
    record.write("laboratory", figures, {})
    page = record.ROOT / "docs/laboratory.md"
    insert(page, SPEED[0], speed(figures), SPEED[1])
    insert(page, EFFECTS[0], effects(figures), EFFECTS[1])


if __name__ == "__main__":
    main()
