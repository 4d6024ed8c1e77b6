"""Draw the pictures of docs/story as SVG.

python -m docs.scripts.pictures
"""

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from docs.scripts.story import STORY, outcomes, stored_figures

INK, BLUE, RED = "#808080", "#4c78c8", "#d2603a"
"""Colours that stand out from a light and from a dark page."""


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """Return a drawing of a size in pixels."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="13" fill="{INK}">', *parts, "</svg>", ""])


def text(x: float, y: float, label: str, anchor: str = "start") -> str:
    """Return a label at a point of its baseline."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(label)}</text>'


def heatmap(x: float, y: float, weights_TS: np.ndarray, title: str, cell: int = 30) -> list[str]:
    """Return the squares of a matrix with entries from 0 to 1, and its title above."""
    T, S = weights_TS.shape
    squares = [
        f'<rect x="{x + s * cell:.0f}" y="{y + t * cell:.0f}" width="{cell - 2}" height="{cell - 2}" '
        f'fill="{BLUE}" fill-opacity="{0.06 + 0.94 * weights_TS[t, s]:.2f}"/>'
        for t in range(T)
        for s in range(S)
    ]
    return [text(x, y - 10, title), *squares]


def mixing() -> str:
    """Return who reads whom: rows are positions that read, columns positions that are read."""
    T, x = 6, np.random.default_rng(2).normal(size=(2, 6, 6))
    past = np.tril(np.ones((T, T)))
    means = past / past.sum(axis=1, keepdims=True)
    maps = [("row-wise MLP", np.eye(T)), ("static A, every text", means)]
    for i, name in enumerate(("attention, one text", "attention, another")):
        weights = np.exp(1.5 * x[i]) * past
        maps.append((name, weights / weights.sum(axis=1, keepdims=True)))
    return svg(860, 230, [part for i, (name, w) in enumerate(maps) for part in heatmap(10 + 215 * i, 40, w, name)])


def scale() -> str:
    """Return the entropy of attention to 32 positions by the width of a head, with and without the division by √d."""
    rng, widths = np.random.default_rng(0), [2**i for i in range(1, 10)]
    left, top, width, height = 60, 20, 560, 220
    parts = []
    for name, divide, colour in (("divided by √d", True, BLUE), ("undivided", False, RED)):
        points = []
        for i, d in enumerate(widths):
            scores = rng.normal(size=(200, d)) @ rng.normal(size=(d, 32)) / (d**0.5 if divide else 1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(axis=1).mean()
            points.append((left + width * i / (len(widths) - 1), top + height * (1 - entropy / math.log(32))))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(text(points[-1][0] + 8, points[-1][1] + 4, name))
    for label, y in (("ln 32", top), ("0", top + height)):
        parts.append(f'<path d="M{left} {y}h{width}" stroke="{INK}" stroke-opacity="0.4"/>')
        parts.append(text(left - 8, y + 4, label, "end"))
    parts += [text(left + width * i / 8, top + height + 20, str(d), "middle") for i, d in enumerate(widths)]
    parts.append(text(left + width / 2, top + height + 42, "width d of the head", "middle"))
    return svg(740, 300, [*parts, text(left, top - 6, "entropy, nats")])


def ladder() -> str:
    """Return the perplexity of each rung of the ladder as points on a logarithmic scale."""
    rungs = outcomes("ladder")
    low, high, left, width = 20.0, 220.0, 160, 480
    parts = []
    for i, (name, figures) in enumerate(rungs.items()):
        y, value = 12 + 28 * i, figures["perplexity"]
        parts.append(text(left - 10, y + 14, name, "end"))
        if value is None:
            parts.append(text(left, y + 14, figures["ended_early"]))
            continue
        x = left + width * max(0.0, math.log(value / low)) / math.log(high / low)  # without a mask, it is near 1
        parts.append(f'<path d="M{left} {y + 10}H{x:.1f}" stroke="{INK}" stroke-opacity="0.3"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y + 10}" r="6" fill="{BLUE}"/>')
        parts.append(text(x + 12, y + 14, f"{value:.3g}"))
    note = f"held-out perplexity, from {low:.0f}, logarithmic"
    return svg(740, 48 + 28 * len(rungs), [*parts, text(left, 36 + 28 * len(rungs), note)])


def chart(left: float, title: str, unit: str, lines: dict[str, dict[int, float]]) -> list[str]:
    """Return lines over a length, both on logarithmic scales, with their names and their last values."""
    top, width, height = 40, 230, 180
    lengths = list(next(iter(lines.values())))
    values = [value for line in lines.values() for value in line.values()]
    spread, low = math.log(max(values) / min(values)), min(values)
    x = lambda n: left + width * math.log(n / lengths[0]) / math.log(lengths[-1] / lengths[0])  # noqa: E731
    y = lambda value: top + height * (1 - math.log(value / low) / spread)  # noqa: E731
    parts = [text(left, top - 18, title), f'<path d="M{left} {top + height + 6}h{width}" stroke="{INK}"/>']
    parts += [text(x(n), top + height + 24, f"{n:,}", "middle") for n in lengths]
    for (name, line), colour in zip(lines.items(), (BLUE, RED), strict=True):
        points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in line.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        last = line[lengths[-1]]
        parts.append(text(left + width + 8, y(last) + 4, f"{name}: {last:,.0f} {unit}"))
    return parts


def context() -> str:
    """Return the time of a text with and without a cache, and the memory of attention, over the length."""
    charts = []
    for case in ("cache", "scores"):
        points = stored_figures(case)["points"]
        charts.append({int("".join(filter(str.isdigit, name))): point for name, point in points.items()})
    texts, attention = charts
    times = {
        side: {n: point["ms"][side]["median"] for n, point in texts.items()} for side in ("with a cache", "without")
    }
    sides = ("blockwise", "stored scores")
    memory = {side: {n: point["derived"][f"{side}, MiB"] for n, point in attention.items()} for side in sides}
    parts = chart(20, "time of new tokens (both axes logarithmic)", "ms", times) + chart(
        460, "memory of attention to T positions", "MiB", memory
    )
    return svg(880, 250, parts)


def cache() -> str:
    """Return the slots of a KV cache after the prefill and after each of three decode steps."""
    left, size, n_slots, prompt = 130, 34, 10, 5
    parts = []
    for step in range(4):
        y, n = 14 + 48 * step, prompt + step
        label = "prefill" if step == 0 else f"decode step {step}"
        parts.append(text(left - 12, y + 21, label, "end"))
        for slot in range(n_slots):
            is_new = slot < prompt if step == 0 else slot == n - 1
            colour, opacity = (RED if is_new else BLUE, 0.9 if is_new else 0.5) if slot < n else (INK, 0.12)
            parts.append(
                f'<rect x="{left + slot * size}" y="{y}" width="{size - 3}" height="{size - 3}" rx="3" '
                f'fill="{colour}" fill-opacity="{opacity}"/>'
            )
    note = "red: keys and values computed now; blue: read from the cache; grey: empty slots"
    return svg(620, 230, [*parts, text(left, 222, note)])


def types() -> str:
    """Return the shapes from a text to its loss and to a sample, with an arrow for each function."""
    columns = [  # name, shape, width and height of the array, function from the one before
        ("text", "", 0, 0, ""), ("tokens", "(T,)", 8, 84, "tokenizer"), ("X", "(T, D)", 44, 84, "embedding"),
        ("rows", "(T, D)", 44, 84, "blocks"), ("logits", "(T, V)", 72, 84, "W_out"),
        ("losses", "(T,)", 8, 84, "cross-entropy"), ("loss", "()", 8, 8, "mean"),
    ]  # fmt: skip
    middle, x, parts = 80, 40.0, []

    def box(x: float, y: float, name: str, shape: str, width: float, height: float) -> None:
        colour = f'fill="{BLUE}" fill-opacity="0.6"'
        parts.append(f'<rect x="{x:.0f}" y="{y - height / 2:.0f}" width="{width}" height="{height}" rx="2" {colour}/>')
        parts.append(text(x + width / 2, middle - 52, name, "middle"))
        parts.append(text(x + width / 2, y + height / 2 + 18, shape, "middle"))

    def arrow(x: float, y: float, length: float, label: str) -> None:
        parts.append(f'<path d="M{x:.0f} {y}h{length:.0f}m-6 -4l6 4l-6 4" fill="none" stroke="{INK}"/>')
        parts.append(text(x + length / 2, y - 8, label, "middle"))

    for name, shape, width, height, function in columns:
        if function:
            arrow(x - 100, middle, 92, function)
        box(x, middle, name, shape, width, height)
        last = x + width
        if name == "logits":  # the last row alone predicts what is not there yet
            parts.append(f'<rect x="{x:.0f}" y="{middle + 32}" width="{width}" height="10" fill="{RED}"/>')
            down = f"M{x + width / 2:.0f} {middle + 66}v34h60m-6 -4l6 4l-6 4"
            parts.append(f'<path d="{down}" fill="none" stroke="{INK}"/>')
            parts.append(text(x + width / 2 + 70, middle + 104, "last row, softmax: the next token"))
        x = last + 108
    return svg(900, 210, parts)


def order() -> str:
    """Return what a head reads in each kind of sequence: 16 rows of its attention map, over the 64 tokens before."""
    cell, parts = 6, []
    for i, (name, figures) in enumerate(stored_figures("modalities")["modalities"].items()):
        left, top, reading = 20 + 430 * (i % 2), 34 + 146 * (i // 2), figures["reading"]
        rows = reading["map"]
        distance = f"{reading['distance']} before the next token"
        parts.append(text(left, top - 10, f"{name}: reads {distance}, weight {reading['weight']:.2f}"))
        parts.append(
            f'<rect x="{left}" y="{top}" width="{cell * len(rows[0])}" height="{cell * len(rows)}" '
            f'fill="{INK}" fill-opacity="0.1"/>'
        )
        cells = [(x, y, int(tenths)) for y, row in enumerate(rows) for x, tenths in enumerate(row) if tenths != "0"]
        for low in range(0, 10, 2):  # a path for every two tenths of a weight
            lines = [
                f"M{left + cell * x} {top + cell * y + 3}h{cell}" for x, y, tenths in cells if low <= tenths <= low + 1
            ]
            stroke = f'stroke="{BLUE}" stroke-width="{cell}" stroke-opacity="{low / 10 + 0.2:.1f}"'
            parts.append(f'<path d="{"".join(lines)}" {stroke}/>')
    return svg(860, 34 + 146 * math.ceil((i + 1) / 2), parts)


PICTURES: dict[str, Callable[[], str]] = {
    "types.svg": types,
    "mixing.svg": mixing,
    "scale.svg": scale,
    "ladder.svg": ladder,
    "cache.svg": cache,
    "context.svg": context,
    "order.svg": order,
}
"""Functions that draw, by the file that they draw in docs/story."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (STORY / name).write_text(draw(), encoding="utf-8")
