"""Draw the pictures of docs/story as SVG.

python -m docs.scripts.pictures
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import jax
import numpy as np

from docs.scripts.story import STORY, outcomes, relative_sharpness, stored_figures
from jaxformer import inspect
from jaxformer.config.files import load_module
from jaxformer.data import Batch

INK, BLUE, RED = "#808080", "#4c78c8", "#d2603a"
"""Colours that stand out from a light and from a dark page."""
LABELS = "<style>text { fill: #595959 } @media (prefers-color-scheme: dark) { text { fill: #b8b8b8 } }</style>"
"""Colours of labels: no single one has a contrast of 4.5:1 with a light and with a dark page."""


def svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """Return a drawing of a size in pixels, with a title for those who do not see it. To be readable on a phone, it is
    at most 440 pixels wide."""
    assert width <= 440
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
    head += 'role="img" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f"<title>{escape(title)}</title>", LABELS, *parts, "</svg>", ""])


def moving(*rules: str) -> str:
    """Return styles that move parts of a drawing, for readers who have not asked for less motion."""
    return f"<style>@media (prefers-reduced-motion: no-preference) {{ {' '.join(rules)} }}</style>"


def arrow(x: float, y: float, dx: float, dy: float, colour: str = INK) -> str:
    """Return an arrow from a point."""
    length, back = math.hypot(dx, dy), 7
    ux, uy = dx / length, dy / length
    head = [(x + dx - back * ux + side * 4 * uy, y + dy - back * uy - side * 4 * ux) for side in (1, -1)]
    path = f"M{x:.1f} {y:.1f}l{dx:.1f} {dy:.1f}" + "".join(
        f"M{x + dx:.1f} {y + dy:.1f}L{a:.1f} {b:.1f}" for a, b in head
    )
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def box(x: float, y: float, width: float, height: float, label: str, colour: str = BLUE, opacity: float = 0.25) -> str:
    """Return a rectangle with a label in its middle."""
    shape = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
    return f'{shape}fill="{colour}" fill-opacity="{opacity}"/>' + text(
        x + width / 2, y + height / 2 + 5, label, "middle"
    )


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


@dataclass(frozen=True)
class Line:
    """A line of a plot, with its name at its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dashes: str = ""
    dy: float = 4
    """Pixels from the end of the line down to its name."""


def plot(
    lines: Sequence[Line], x_ticks: Mapping[Any, str], y_ticks: Mapping[Any, str], title: str, x_title: str = "", *,
    top: float = 30, height: float = 160, log: str = "",
) -> list[str]:  # fmt: skip
    """Return lines between the first and the last tick of each axis; the axes named in `log` are logarithmic. With the
    names at their ends, they are as wide as a phone."""
    left, width, scales = 46, 220, []
    for axis, ticks in (("x", x_ticks), ("y", y_ticks)):
        as_drawn = np.log if axis in log else np.asarray
        first, *_, last = as_drawn(list(ticks))
        scales.append(lambda v, f=as_drawn, a=first, b=last: (f(np.asarray(v, float)) - a) / (b - a))
    x, y = lambda v: left + width * scales[0](v), lambda v: top + height * (1 - scales[1](v))
    parts = [text(left, top - 16, title), text(left + width / 2, top + height + 40, x_title, "middle")]
    parts += [f'<path d="M{left} {y(v):.0f}h{width}" stroke="{INK}" stroke-opacity="0.3"/>' for v in y_ticks]
    parts += [text(left - 8, y(v) + 4, label, "end") for v, label in y_ticks.items()]
    parts += [text(x(v), top + height + 20, label, "middle") for v, label in x_ticks.items()]
    for line in lines:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x(line.x), y(line.y), strict=True))
        style = f'fill="none" stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        parts.append(text(x(line.x[-1]) + 8, y(line.y[-1]) + line.dy, line.name))
    return parts


def mixing() -> str:
    """Return who reads whom: rows are positions that read, columns positions that are read."""
    T, x = 6, np.random.default_rng(2).normal(size=(2, 6, 6))
    past = np.tril(np.ones((T, T)))
    means = past / past.sum(axis=1, keepdims=True)
    maps = [("row-wise MLP", np.eye(T)), ("static A, every text", means)]
    for i, name in enumerate(("attention, one text", "attention, another")):
        weights = np.exp(1.5 * x[i]) * past
        maps.append((name, weights / weights.sum(axis=1, keepdims=True)))
    parts = [
        part for i, (name, w) in enumerate(maps) for part in heatmap(10 + 215 * (i % 2), 30 + 220 * (i // 2), w, name)
    ]
    return svg(410, 440, parts, "Who reads whom, in a row-wise MLP, a static matrix, and attention to two texts.")


def scale() -> str:
    """Return the entropy of attention to 32 positions by the width of a head, with and without the division by √d."""
    rng, widths, lines = np.random.default_rng(0), [2**i for i in range(1, 10)], []
    for name, divide, colour in (("divided by √d", True, BLUE), ("undivided", False, RED)):
        entropies = []
        for d in widths:
            scores = rng.normal(size=(200, d)) @ rng.normal(size=(d, 32)) / (d**0.5 if divide else 1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            entropies.append(-(weights * np.log(np.maximum(weights, 1e-30))).sum(axis=1).mean())
        lines.append(Line(name, widths, entropies, colour))
    ticks, ends = {d: str(d) for d in widths[::2]}, {0: "0", math.log(32): "ln 32"}
    parts = plot(lines, ticks, ends, "entropy, nats", "width d of the head", log="x")
    return svg(370, 240, parts, "Entropy of attention by width of the head, scores divided by its root and undivided.")


def saturation() -> str:
    """Return the gradients of the scores and of W_Q of an untrained head, by the entropy of its attention: W_Q's if the
    scores are divided by a temperature τ, and if W_Q and W_K are divided by √τ, which divides its gradient by 1/√τ."""
    config = replace(load_module("ladder").attention_scaled.model, d_ff=(512,))
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(16, 33))
    model, batch = config.build(), Batch((tokens[:, :-1],), tokens[:, 1:])
    params = jax.jit(model.init)(jax.random.key(0), tokens[0, :-1])["params"]
    rows = inspect.saturation(model, params, batch, [10, 3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003])
    entropies, first = [row.entropy for row in rows], rows[2]
    lines = [
        Line("of W_Q, s² · scores", entropies, [row.W_Q / first.W_Q for row in rows], RED),
        Line("of W_Q, s · W", entropies, [row.W_Q / first.W_Q * row.temperature**0.5 for row in rows], RED, "6 3"),
        Line("of the scores", entropies, [row.scores / first.scores for row in rows], BLUE),
    ]
    ticks = {4: "", 1: "1", 0.1: "0.1", 0.01: "0.01", 0.001: "0.001", 0.0001: ""}
    norms, title = {10.0**i: f"{10.0**i:g}" for i in range(-3, 3)}, "norm of the gradient, 1 at entropy 1.6"
    parts = plot(lines, ticks, norms, title, "entropy of attention, nats", log="xy")
    return svg(410, 240, parts, "Gradients of the scores and of W_Q as attention becomes one-hot.")


def ladder() -> str:
    """Return the perplexity of each rung of the ladder as points on a logarithmic scale."""
    rungs = outcomes("ladder")
    low, high, left, width = 20.0, 220.0, 140, 240
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
    parts.append(text(left, 36 + 28 * len(rungs), note))
    return svg(430, 48 + 28 * len(rungs), parts, "Perplexity of each rung of the ladder.")


def chart(top: float, title: str, unit: str, lines: dict[str, dict[int, float]]) -> list[str]:
    """Return lines over a length, both on logarithmic scales, with their names and their last values."""
    lengths = list(next(iter(lines.values())))
    values = [value for line in lines.values() for value in line.values()]
    drawn = [
        Line(f"{name}: {line[lengths[-1]]:,.0f} {unit}", lengths, list(line.values()), colour)
        for (name, line), colour in zip(lines.items(), (BLUE, RED), strict=True)
    ]
    ticks, ends = {n: f"{n:,}" for n in lengths}, {value: f"{value:,.0f}" for value in (min(values), max(values))}
    return plot(drawn, ticks, ends, title, top=top, log="xy")


def context() -> str:
    """Return the time of a text with and without a cache, and the memory of attention, over the length."""
    charts = []
    for case in ("cache", "scores"):
        points = stored_figures(case, "benchmarks")["points"]
        charts.append({int("".join(filter(str.isdigit, name))): point for name, point in points.items()})
    texts, attention = charts
    times = {
        side: {n: point["ms"][side]["median"] for n, point in texts.items()} for side in ("with a cache", "without")
    }
    sides = ("blockwise", "stored scores")
    memory = {side: {n: point["derived"][f"{side}, MiB"] for n, point in attention.items()} for side in sides}
    parts = chart(30, "time of new tokens, by their number", "ms", times)
    parts += chart(260, "memory of attention, by T", "MiB", memory)
    return svg(440, 450, parts, "Time of new tokens with and without a cache, and memory of attention, by length.")


def cache() -> str:
    """Return the slots of a KV cache after the prefill and after each of three decode steps."""
    left, size, n_slots, prompt = 104, 32, 10, 5
    parts = []
    for step in range(4):
        y, n = 14 + 48 * step, prompt + step
        label = "prefill" if step == 0 else f"decode step {step}"
        parts.append(text(left - 12, y + 21, label, "end"))
        new = f' class="step{step}"'
        for slot in range(n_slots):
            is_new = slot < prompt if step == 0 else slot == n - 1
            colour, opacity = (RED if is_new else BLUE, 0.9 if is_new else 0.5) if slot < n else (INK, 0.12)
            parts.append(
                f'<rect x="{left + slot * size}" y="{y}" width="{size - 3}" height="{size - 3}" rx="3" '
                f'fill="{colour}" fill-opacity="{opacity}"{new if is_new else ""}/>'
            )
    seconds = ", ".join(f".step{i} {{ animation: write 8s {2 * i}s infinite }}" for i in range(4)).replace(", ", " ")
    parts.append(moving("@keyframes write { 0%, 10% { fill-opacity: 0.1 } 20%, 100% { fill-opacity: 0.9 } }", seconds))
    parts += [
        text(left, 218, "red: keys and values computed now"),
        text(left, 236, "blue: read from the cache; grey: empty slots"),
    ]
    return svg(430, 244, parts, "Slots of a cache: a prompt fills the first, and each decode step writes one.")


def cuts() -> str:
    """Return two distributions over five tokens, each cut by three filters: what is kept, and what it becomes."""
    parts: list[str] = []
    filters = (("top-k, k = 2", "a count"), ("top-p, p = 0.8", "a sum"), ("min-p, p = 0.1", "a height"))
    for i, p in enumerate(([0.50, 0.25, 0.15, 0.07, 0.03], [0.90, 0.04, 0.03, 0.02, 0.01])):
        left, before = 10 + 215 * i, np.cumsum(p) - p
        parts.append(text(left, 16, ("the model is in doubt", "the model is sure")[i]))
        kept = [np.arange(5) < 2, before < 0.8, np.array(p) >= 0.1 * p[0]]
        for j, ((name, rule), is_kept) in enumerate(zip(filters, kept, strict=True)):
            y = 150 + 145 * j
            parts += [text(left, y - 104, f"{name}: {rule}"), f'<path d="M{left} {y}h190" stroke="{INK}"/>']
            for n, (probability, stays) in enumerate(zip(p, is_kept, strict=True)):
                height, colour, opacity = 80 * probability, BLUE if stays else INK, 0.9 if stays else 0.35
                at = f'x="{left + 38 * n}" y="{y - height:.1f}" width="34" height="{height:.1f}"'
                parts.append(f'<rect {at} fill="{colour}" fill-opacity="{opacity}"/>')
                if stays:
                    becomes = probability / np.sum(p, where=is_kept)
                    parts.append(text(left + 38 * n + 17, y - height - 5, f"{becomes:.2f}", "middle"))
        edge = [left + 38 * np.sum(is_kept) - 2 for is_kept in kept[:2]]
        parts += [f'<path d="M{edge[j]} {60 + 145 * j}v96" stroke="{RED}" stroke-width="2"/>' for j in (0, 1)]
        parts.append(f'<path d="M{left} {440 - 8 * p[0]:.1f}h190" stroke="{RED}" stroke-width="2"/>')
    parts.append(text(10, 468, "five tokens; blue: kept, red: the cut"))
    parts.append(text(10, 486, "heights: probabilities before, numbers: after the cut"))
    return svg(430, 494, parts, "Two distributions over five tokens, each cut by top-k, top-p and min-p.")


def types() -> str:
    """Return the shapes from a text to its loss and to a sample, with an arrow for each function."""
    lines = [[  # name, shape, width and height of the array, function from the one before
        ("text", "", 0, 0, ""), ("tokens", "(T,)", 8, 84, "tokenizer"), ("X", "(T, D)", 44, 84, "embedding"),
        ("rows", "(T, D)", 44, 84, "blocks")], [("", "", 0, 0, ""), ("logits", "(T, V)", 72, 84, "W_out"),
        ("losses", "(T,)", 8, 84, "cross-entropy"), ("loss", "()", 8, 8, "mean"),
    ]]  # fmt: skip
    parts = []
    for y, columns in zip((70, 216), lines, strict=True):
        x = 14
        for name, shape, width, height, function in columns:
            if function:
                parts.append(f'<path d="M{x - 94} {y}h88m-6 -4l6 4l-6 4" fill="none" stroke="{INK}"/>')
                parts.append(text(x - 52, y - 8, function, "middle"))
            size = f'width="{width}" height="{height}" rx="2" fill="{BLUE}" fill-opacity="0.6"'
            parts.append(f'<rect x="{x}" y="{y - height // 2}" {size}/>')
            parts.append(text(x + width / 2, y - 52, name, "middle"))
            parts.append(text(x + width / 2, y + height / 2 + 18, shape, "middle"))
            if name == "logits":  # the last row alone predicts what is not there yet
                parts.append(f'<rect x="{x}" y="{y + 32}" width="{width}" height="10" fill="{RED}"/>')
                down = f"M{x + width // 2} {y + 66}v34h30m-6 -4l6 4l-6 4"
                parts.append(f'<path d="{down}" fill="none" stroke="{INK}"/>')
                parts.append(text(x + width / 2 + 40, y + 104, "last row, softmax: the next token"))
            x += width + 100
    return svg(430, 336, parts, "Shapes from a text to its loss, and to a sample.")


def translation() -> str:
    """Return two ways to write a word of a translation: from one vector, and from a weighted mean of all states."""
    source, target = ("the", "black", "bird", "sings"), ("l'", "oiseau", "noir", "chante")
    parts = [text(10, 20, "one vector for a sentence")]
    for i, word in enumerate(source):
        x = 10 + 104 * i
        parts += [box(x, 32, 92, 30, word)] + [arrow(x + 93, 47, 10, 0)] * (i < 3)
        parts += [box(x, 142, 92, 30, target[i], RED)] + [arrow(x + 93, 157, 10, 0, RED)] * (i < 3)
    parts += [
        f'<path d="M368 62v20H290" fill="none" stroke="{INK}" stroke-width="2"/>',
        box(140, 78, 150, 34, "c, all there is"),
    ]
    parts += [f'<path d="M140 96H56v34" fill="none" stroke="{INK}" stroke-width="2"/>', arrow(56, 120, 0, 20)]
    parts += [text(10, 216, "look again at every word: here, to write noir")]
    for i, (word, weight) in enumerate(zip(source, (0.05, 0.8, 0.1, 0.05), strict=True)):
        x = 10 + 104 * i
        parts += [box(x, 228, 92, 30, f"{word}, h{i + 1}"), text(x + (12 if i < 2 else 60), 284, f"{weight:g}")]
        parts += [
            f'<path d="M{x + 46} 258L215 322" stroke="{BLUE}" stroke-width="{1 + 8 * weight:g}" stroke-opacity="0.7"/>'
        ]
    parts += [box(140, 322, 150, 34, "c, their mean"), arrow(215, 356, 0, 26), box(169, 384, 92, 30, "noir", RED)]
    parts += [text(306, 336, "weights: softmax"), text(306, 354, "of scores of s, h")]
    parts += [box(10, 384, 124, 30, "s, after oiseau", RED), arrow(136, 399, 31, 0, RED)]
    parts += [
        f'<path d="M72 384V339H130" fill="none" stroke="{RED}" stroke-width="2" stroke-dasharray="4 4"/>',
        text(10, 330, "s asks"),
    ]
    return svg(430, 424, parts, "One vector for a whole sentence, and a mean of all states anew for each word.")


def whole() -> str:
    """Return the encoder and the decoder of 2017, with what each part reads."""
    parts: list[str] = []
    columns = ((10, ("source tokens", "embedding, position", "attention", "MLP"), "encoder", (2, 3)),
               (246, ("target tokens", "embedding, position", "causal attention", "cross-attention", "MLP", "logits"),
                "decoder", (2, 4)))  # fmt: skip
    for x, names, title, (first, last) in columns:
        top, height = 398 - 62 * last, 62 * (last - first) + 66
        parts += [f'<rect x="{x - 6}" y="{top}" width="182" height="{height}" rx="8" fill="none" stroke="{INK}"/>']
        parts += [text(x + 8, top + 15, "N times"), text(x + 73, 474, title, "middle")]
        for i, name in enumerate(names):
            y = 420 - 62 * i
            parts.append(box(x, y, 146, 34, name, RED if first <= i <= last else BLUE))
            if i + 1 < len(names):
                parts.append(arrow(x + 73, y, 0, -26))
            if first <= i <= last:  # around each part, a residual connection
                around = f"M{x + 73} {y + 42}H{x + 160}V{y - 8}H{x + 80}"
                parts.append(f'<path d="{around}" fill="none" stroke="{INK}" stroke-dasharray="3 3"/>')
    parts.append(f'<path d="M83 234V200H206V251" fill="none" stroke="{RED}" stroke-width="2"/>')
    parts += [arrow(206, 251, 38, 0, RED), text(110, 190, "keys and values", "middle")]
    parts.append(text(10, 500, "dashed: x + f(x); a norm after each"))
    return svg(430, 508, parts, "The Transformer of 2017: an encoder, and a decoder that reads it by cross-attention.")


def alignment() -> str:
    """Return the stored alignment of a held-out translation: rows are target tokens, columns source tokens."""
    figures = stored_figures("alignment")
    weights_TS, cell, left, top = np.array(figures["weights"]), 25, 64, 70
    parts = heatmap(left, top, weights_TS, "", cell)
    for s, token in enumerate(figures["source"]):
        x = left + s * cell + cell / 2 + 4
        turned = f' transform="rotate(-60 {x:.0f} {top - 8})"'
        parts.append(text(x, top - 8, token.strip()).replace("<text", f"<text{turned}"))
    for t, token in enumerate(figures["target"]):
        parts.append(text(left - 10, top + t * cell + 17, token.strip() or "(end)", "end"))
    width, height = left + cell * weights_TS.shape[1] + 40, top + cell * weights_TS.shape[0] + 10
    return svg(width, height, parts, "Alignment of a translation: which source tokens each target token was read from.")


def asking() -> str:
    """Return six words as rows of two numbers with the query of one of them, and the weights of all of them."""
    words = ("the", "cat", "sat", "on", "the", "mat")
    X = np.array([[0, 0], [2, 0], [0, 1], [0, 1], [0, 0], [1, 0]])
    powers = np.tril(np.exp(X[:, 1:] * X[:, 0]))  # the second number of a row asks for the first of another
    x, y, unit, cell, left, top = 70, 172, 110, 36, 64, 284
    parts = [
        f'<path d="M{x} 46V{y}H{x + 300}" fill="none" stroke="{INK}" stroke-opacity="0.4"/>',
        text(10, 32, "says what happens"), text(x + 300, y + 30, "names a thing", "end"),
        arrow(x, y, 2 * unit, 0, BLUE), arrow(x, y, unit, 0, BLUE), arrow(x, y, 0, -unit, BLUE),
        text(x + 2 * unit + 8, y - 6, "cat (2, 0)"), text(x + unit, y - 10, "mat (1, 0)", "middle"),
        text(x + 10, y - unit + 6, "sat, on (0, 1)"), text(x - 8, y + 5, "the", "end"),
        f'<path d="M{x + 14} {y - unit + 20}Q{x + 30} {y - 44} {x + 50} {y - 30}" fill="none" stroke="{RED}" '
        'stroke-width="2" stroke-dasharray="4 4"/>', text(x + 36, y - 58, "times W_Q"),
        arrow(x, y + 12, unit, 0, RED), text(x + 4, y + 30, "query of sat"),
    ]  # fmt: skip
    parts += heatmap(left, top, powers / powers.sum(axis=1, keepdims=True), "", cell)
    parts.append(text(left, top - 32, "weights: a row reads, a column is read"))
    for i, word in enumerate(words):
        parts += [text(left - 8, top + cell * i + 22, word, "end")]
        parts += [text(left + cell * i + 17, top - 8, word, "middle")]
    return svg(
        430, 508, parts, "The query of sat points where cat does; below, weights of the six words, after the mask."
    )


def rotation() -> str:
    """Return a query and a key rotated by their positions, which keep their angle."""
    parts, radius, theta = [], 62, 0.45
    for i, (m, n) in enumerate(((2, 0), (5, 3), (9, 7), (2, 0))):
        x, y = 110 + 210 * (i % 2), 78 + 190 * (i // 2)
        ends = [(radius * math.cos(a), -radius * math.sin(a)) for a in (0.4 + m * theta, 0.1 + n * theta)]
        hands = [arrow(x, y, *end, colour) for end, colour in zip(ends, (RED, BLUE), strict=True)]
        parts.append(f'<circle cx="{x}" cy="{y}" r="{radius + 8}" fill="none" stroke="{INK}" stroke-opacity="0.4"/>')
        parts += hands if i < 3 else ['<g class="both">', *hands, "</g>"]
        parts.append(text(x, y + 98, f"query at {m}, key at {n}" if i < 3 else "both, two apart", "middle"))
    parts.append(moving("@keyframes turn { to { transform: rotate(-360deg) } }",
                        f".both {{ transform-origin: {x}px {y}px; animation: turn 14s linear infinite }}"))  # fmt: skip
    parts += [
        text(20, 400, "red: the query, blue: the key;"),
        text(20, 418, "the angle between them depends on their distance alone"),
    ]
    return svg(
        430, 430, parts, "A query and a key, rotated by their positions: both turn, the angle between them stays."
    )


def heads() -> str:
    """Return four heads: projections, attention, concatenation and W_O."""
    parts = [box(10, 4, 410, 34, "X (T, D)")]
    for h in range(4):
        x = 10 + 104 * h
        parts += [text(x, 64, f"head {h}"), arrow(x + 49, 40, 0, 34), box(x, 78, 98, 34, "Q, K, V", RED, 0.2)]
        parts += [arrow(x + 49, 114, 0, 24), box(x, 142, 98, 34, "attention", RED, 0.3), arrow(x + 49, 178, 0, 24)]
        parts += [box(x, 206, 98, 34, "(T, K)", BLUE, 0.35), arrow(x + 49, 242, 0, 24)]
    parts += [box(10, 270, 410, 34, "W_O (H K, D)", RED, 0.2), arrow(215, 306, 0, 24)]
    return svg(430, 372, [*parts, box(10, 334, 410, 34, "Y (T, D)")], "Four heads side by side, and W_O.")


def bars(x: float, y: float, values: Sequence[float], scale: float, title: str, width: int = 26) -> list[str]:
    """Return the features of a row as bars around a line, each of a width in pixels with its gap."""
    parts = [text(x, y - 66, title), f'<path d="M{x} {y}h{width * len(values)}" stroke="{INK}" stroke-opacity="0.5"/>']
    for i, value in enumerate(values):
        top, height = y - max(value, 0) * scale, abs(value) * scale
        at = f'x="{x + width * i}" y="{top:.1f}" width="{0.75 * width:g}" height="{height:.1f}"'
        parts.append(f'<rect {at} fill="{BLUE}"/>')
    return parts


def mlp() -> str:
    """Return a row, its F features before and after the ReLU, and their sum."""
    rng, D, F = np.random.default_rng(1), 6, 16
    x = rng.normal(size=D)
    hidden = x @ rng.normal(size=(D, F)) / D**0.5
    y = np.maximum(hidden, 0) @ rng.normal(size=(F, D)) * (2 / F) ** 0.5
    parts = bars(10, 80, list(x), 22, "x, a row of D", 12) + bars(156, 80, list(hidden), 22, "F features", 12)
    parts += bars(10, 220, list(np.maximum(hidden, 0)), 22, "those below 0 are off", 12)
    parts += bars(276, 220, list(y), 22, "D again", 12)
    for x0, y0, function in ((94, 80, "W_1"), (366, 80, "max(0, ·)"), (216, 220, "W_2")):
        parts += [arrow(x0, y0, 48, 0), text(x0 + 24, y0 - 10, function, "middle")]
    return svg(430, 290, parts, "A row in an MLP: features, of which some are switched off, and their weighted sum.")


def norm() -> str:
    """Return a row and the same row 2.4 times as large, before and after the two norms."""
    x = np.array([1.6, 0.2, 1.1, -0.5, 0.9, 0.4])
    rms, layer = x / np.sqrt((x**2).mean()), (x - x.mean()) / x.std()
    parts = bars(10, 80, list(x), 14, "x") + bars(220, 80, list(x * 2.4), 14, "2.4 x") + [arrow(200, 96, 0, 56)]
    parts += bars(10, 240, list(rms), 24, "RMSNorm of both: mean square 1")
    parts += bars(220, 240, list(layer), 24, "LayerNorm of both: mean 0, too")
    return svg(430, 290, parts, "What norms do to a row.")


def gradients() -> str:
    """Return the norm of the gradient by depth of 64 layers, with and without residual connections."""
    rng, n, D = np.random.default_rng(0), 64, 64
    Ws, x0, lines = rng.normal(size=(n, D, D)) / 8, rng.normal(size=D), []
    for name, residual, colour in (("x + f(x)", 1.0, BLUE), ("f(x)", 0.0, RED)):
        x, slopes = x0, []
        for W in Ws:
            y = np.tanh(W @ x)
            slopes.append((1 - y**2)[:, None] * W)
            x = residual * x + y
        g, norms = np.ones(D), []
        for slope in reversed(slopes):
            g = residual * g + slope.T @ g
            norms.append(np.linalg.norm(g) / D**0.5)
        lines.append(Line(name, range(1, n + 1), norms, colour))
    title = "norm of the gradient, 1 at the output"
    ticks, values = {1: "last layer", n: "first layer"}, {0.01: "0.01", 1: "1", 100: "100"}
    return svg(370, 220, plot(lines, ticks, values, title, log="y"), "The gradient on its way back through 64 layers.")


def overfitting() -> str:
    """Return the losses on training and held-out text during a training on one book, and on fifty."""
    rows, lines = outcomes("overfitting"), []
    for name, row, field, colour, dashes in (
        ("one book, held out", "base", "held_out", RED, ""), ("fifty books, both", "books", "held_out", BLUE, ""),
        ("", "books", "train", BLUE, "4 4"), ("one book, training", "base", "train", RED, "4 4"),
    ):  # fmt: skip
        points = [point for point in rows[row]["curve"] if point["step"] >= 200]
        lines.append(Line(name, [p["step"] for p in points], [p[field] for p in points], colour, dashes))
    steps, nats = {step: f"{step:,}" for step in range(0, 3001, 1000)}, {x: str(x) for x in range(1, 7)}
    parts = plot(lines, steps, nats, "loss, nats per token", "step", height=200)
    return svg(400, 280, parts, "Loss on training and on held-out text, for one book and for fifty.")


def learning() -> str:
    """Return the losses of rungs on held-out text during their training."""
    styles = {
        "mlp_concat": (INK, 4), "mlp_rowwise": (INK, 6), "attention_unscaled": (RED, -7), "attention_scaled": (RED, 20),
        "residual": (BLUE, 4),
    }  # fmt: skip
    lines = []
    for name, figures in outcomes("learning").items():
        colour, dy = styles[name]
        steps, losses = zip(*((point["step"], point["held_out"]) for point in figures["curve"]), strict=True)
        lines.append(Line(name, steps, losses, colour, dy=dy))
    ticks, nats = {n: f"{n:,}" for n in (100, 300, 1000, 3000)}, {3: "3", 4: "4", 5: "5", 6: "6"}
    parts = plot(lines, ticks, nats, "held-out loss, nats per token", "step", height=260, log="x")
    return svg(400, 340, parts, "Losses of rungs during training.")


def curvature() -> str:
    """Return the sharpness of the rung that diverges, at lower learning rates, and of the last one, over its limit."""
    rows = (
        ("four_blocks_0.01", "rate 0.01", RED, "", -12), ("four_blocks_0.003", "rate 0.003", RED, "2 3", 4),
        ("four_blocks_0.03", "rate 0.03", RED, "8 4", 20), ("rmsnorm", "rmsnorm, 0.1", BLUE, "", 36),
    )  # fmt: skip
    ratios = relative_sharpness()
    lines = [
        Line(name, list(ratios[row]), list(ratios[row].values()), colour, dashes, dy)
        for row, name, colour, dashes, dy in rows
    ]
    ticks, ends = {0: "0", 1000: "1,000", 2000: "2,000", 3000: "3,000"}, {x: f"{x:g}" for x in (0.05, 0.25, 1, 4, 16)}
    parts = plot(lines, ticks, ends, "sharpness / limit; red: four_blocks", "step", log="y")
    return svg(400, 240, parts, "Sharpness of four blocks without a norm, and with one, over the limit of its rate.")


def film() -> str:
    """Return the weight on the previous token and the rise of the loss with the head patched back, in a film."""
    figures = stored_figures("film")["two_blocks"]
    shown = {"blocks.0.attention.2": ("0.2", BLUE, "", 4), "blocks.1.attention.0": ("1.0", RED, "", -8)}
    heads = {f"{head['layer']}.{head['head']}": head for head in figures["heads"]}
    x = [step + 1 for step in figures["steps"]]
    ticks = {1: "0", 9: "8", 65: "64", 513: "512", 3001: "3,000"}
    loss = [Line("loss", x, figures["loss"], INK)]
    parts = plot(loss, ticks, {3: "3", 5: "5", 7: "7", 9: "9"}, "held-out loss, nats", log="x")
    for top, score, ends, title in (
        (280, "previous", {0: "0", 0.5: "0.5", 1: "1"}, "weight on the previous token"),
        (510, "patched", {0: "0", 0.25: "0.25", 0.5: "0.5"}, "rise of the last loss with the head of this step"),
    ):
        lines = [Line(style[0], x, heads[name][score], *style[1:]) for name, style in shown.items()]
        parts += plot(lines, ticks, ends, title, "step" if score == "patched" else "", top=top, log="x")
    return svg(330, 720, parts, "Loss, previous-token score and patched loss over the film of two_blocks.")


def stored_map(left: float, top: float, rows: Sequence[str], cell: int, title: str) -> list[str]:
    """Return the squares of a stored attention map, whose digits are tenths of a weight, and its title above."""
    size = f'width="{cell * len(rows[0])}" height="{cell * len(rows)}"'
    parts = [text(left, top - 10, title), f'<rect x="{left}" y="{top}" {size} fill="{INK}" fill-opacity="0.1"/>']
    cells = [(x, y, int(tenths)) for y, row in enumerate(rows) for x, tenths in enumerate(row) if tenths != "0"]
    for low in range(0, 10, 2):  # a path for every two tenths of a weight
        lines = [
            f"M{left + cell * x} {top + cell * (y + 0.5):g}h{cell}"
            for x, y, tenths in cells
            if low <= tenths <= low + 1
        ]
        stroke = f'stroke="{BLUE}" stroke-width="{cell}" stroke-opacity="{low / 10 + 0.2:.1f}"'
        parts.append(f'<path d="{"".join(lines)}" {stroke}/>')
    return parts


def maps(heads: dict[str, tuple[str, int]], title: str) -> str:
    """Return the attention maps of trained heads, each of a rung, for the beginning of a text."""
    runs, cell, parts = stored_figures("heads")["runs"], 11, ['<g font-size="11">']
    for i, (name, (rung, head)) in enumerate(heads.items()):
        tokens, rows = runs[rung]["tokens"], runs[rung]["heads"][head]["map"]
        left, top = 56 + 192 * (i % 2), 26 + 212 * (i // 2)
        parts += stored_map(left, top, rows, cell, name)
        if i % 2 == 0:
            names = [{"": "(start)", "\n": "↵"}.get(token, token.strip()) for token in tokens]
            parts += [text(50, top + 9 + cell * t, name, "end") for t, name in enumerate(names)]
    return svg(430, top + cell * len(tokens) + 4, [*parts, "</g>"], title)


def order() -> str:
    """Return what a head reads in each kind of sequence: 16 rows of its attention map, over the 64 tokens before."""
    parts = []
    for i, (name, figures) in enumerate(stored_figures("modalities")["modalities"].items()):
        reading = figures["reading"]
        left, top = 8 + 214 * (i % 2), 44 + 110 * (i // 2)
        parts += stored_map(
            left, top, reading["map"], 3, f"reads {reading['distance']} back, weight {reading['weight']:.2f}"
        )
        parts.append(text(left, top - 27, name))
    return svg(430, top + 60, parts, "What a head reads in each kind of sequence: rows of attention maps.")


def lesson() -> str:
    """Return the loss that each token of a repeated phrase must have, and where its repetition is found."""
    phrase, ln8, x, y, step = "3605", math.log(8), 44, 190, 24
    parts = [text(8, 18, "loss of each prediction, nats")]
    for nats, label in ((0.0, "0"), (ln8, "ln 8")):
        parts.append(f'<path d="M{x} {y - 60 * nats:.0f}h{15 * step}" stroke="{INK}" stroke-opacity="0.4"/>')
        parts.append(text(x - 6, y - 60 * nats + 4, label, "end"))
    for t, token in enumerate(4 * phrase):
        at = x + step * (t - 1)  # the first token is given, and predicted by none
        if t in (1, 2, 3):
            height = f'y="{y - 60 * ln8:.1f}" width="{step - 4}" height="{60 * ln8:.1f}"'
            parts.append(f'<rect x="{at}" {height} fill="{RED}" fill-opacity="0.8"/>')
        parts.append(box(at - 2, y + 12, step - 2, 28, token, BLUE if t > 3 else RED))
    for back in (4, 8, 12):
        end, start = x + step * (14 - back) + 9, x + step * 14 + 9
        low = y + 52 + 4 * back
        curve = f"M{start} {y + 42}C{start} {low} {end} {low} {end} {y + 44}"
        parts.append(f'<path d="{curve}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    parts += [text(x + 84, 100, "from here on, all can be known:"), text(x + 84, 118, "the phrase repeats")]
    parts += [
        text(8, 300, "red: a random phrase, which nothing foretells"),
        text(8, 318, "blue: the last token also stands 4, 8 and 12 back"),
    ]
    return svg(430, 328, parts, "Losses of a text that repeats a phrase of four: ln 8 for the first phrase, then 0.")


def masks() -> str:
    """Return three masks, and what a window reaches through three blocks."""
    t, s = np.indices((6, 6))
    window = (s <= t) & (t - 2 < s)
    drawn = {
        "causal": s <= t, "a prefix of three": (s <= t) | (s < 3), "a window of two": window,
        "the window, 3 blocks": np.linalg.matrix_power(window.astype(int), 3) > 0,
    }  # fmt: skip
    parts = [text(10, 18, "rows read, columns are read, position 0 first")]
    for i, (name, mask) in enumerate(drawn.items()):
        parts += heatmap(10 + 216 * (i % 2), 56 + 226 * (i // 2), mask * 0.8, name, 30)
    return svg(430, 466, parts, "Masks: causal, with a prefix, with a window, and what windows of three blocks reach.")


def experts() -> str:
    """Return a row on its way through a router and one of four MLPs."""
    p, parts = (0.1, 0.6, 0.2, 0.1), [box(165, 6, 100, 34, "row x"), arrow(215, 42, 0, 22)]
    parts += [box(115, 68, 200, 34, "router: softmax(x W_r)", RED)]
    for i, probability in enumerate(p):
        x, chosen = 10 + 104 * i, probability == max(p)
        colour = RED if chosen else INK
        parts += [arrow(215, 104, x + 49 - 215, 54, colour), text(x + 49, 176, f"p = {probability:g}", "middle")]
        parts.append(box(x, 186, 98, 44, f"MLP {i + 1}", colour, 0.45 if chosen else 0.12))
    parts += [arrow(163, 232, 52, 44, RED), text(228, 262, "times 0.6"), box(165, 280, 100, 34, "row y")]
    parts.append(text(10, 344, "three of the four MLPs are not computed for this row"))
    return svg(430, 354, parts, "A router sends a row to the likeliest of four MLPs, whose output it scales.")


def patches() -> str:
    """Return a picture of 8 by 8 pixels that is cut into four patches, which become four rows."""
    seven = ("00000000", "08999990", "00000980", "00004900", "00009400", "00039000", "00084000", "00000000")
    parts, cell = [text(10, 18, "8 by 8 pixels"), text(222, 18, "cut into four pieces")], 20
    for y, line in enumerate(seven):
        for x, tenths in enumerate(line):
            for left, gap in ((10, 0), (222, 14)):
                at = f'x="{left + cell * x + gap * (x > 3)}" y="{28 + cell * y + gap * (y > 3)}"'
                opacity = 0.1 + int(tenths) / 10
                parts.append(f'<rect {at} width="18" height="18" fill="{BLUE}" fill-opacity="{opacity:.1f}"/>')
    parts.append(arrow(178, 108, 36, 0))
    for i in range(4):
        x, rows = 10 + 106 * i, range(4 * (i // 2), 4 * (i // 2) + 4)
        pixels = [seven[y][4 * (i % 2) + c] for y in rows for c in range(4)]
        for n, tenths in enumerate(pixels):
            at = f'x="{x + 6 * n}" y="236" width="5" height="18"'
            parts.append(f'<rect {at} fill="{BLUE}" fill-opacity="{0.1 + int(tenths) / 10:.1f}"/>')
        parts += [arrow(x + 47, 258, 0, 22), box(x, 284, 95, 34, f"row {i + 1} of D")]
    parts += [
        text(10, 226, "each piece, pixel after pixel"),
        text(10, 342, "times a matrix, plus a position: rows like those of words"),
    ]
    return svg(430, 352, parts, "A picture is cut into four pieces, and each becomes a row.")


def induction() -> str:
    """Return how two blocks answer a question about a document of pairs."""
    tokens, step = (3, 9, 6, 12, 0, 15, 5, 10, 6), 46
    parts = [text(8, 18, "pairs of a key and a value, then a question")]
    for i, token in enumerate(tokens):
        colour, opacity = RED if i == 8 else BLUE, 0.5 if i in (3, 8) else 0.2
        parts += [box(8 + step * i, y, 42, 32, str(token), colour, opacity) for y in (28, 130)]
        if i % 2:
            x = 29 + step * i
            curve = f"M{x} 130C{x} 90 {x - step} 104 {x - step} 66"
            parts.append(f'<path d="{curve}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
            parts.append(text(x, 180, f"after {tokens[i - 1]}", "middle"))
    question, answer = 29 + step * 8, 29 + step * 3
    curve = f"M{question} 164C{question} 260 {answer} 260 {answer} 188"
    parts.append(f'<path d="{curve}" fill="none" stroke="{RED}" stroke-width="3"/>')
    parts += [
        text(8, 268, "blue, block 1: each value reads the key before it"),
        text(8, 286, "red, block 2: the question, 6, looks for a row that is after 6,"),
        text(8, 304, "and takes what it finds there, 12"),
    ]
    return svg(
        430, 314, parts, "In block 1 each value reads its key, in block 2 the question reads the value after it."
    )


def large() -> str:
    """Return the largest entry of SmolLM2's stream by block, as its chapter prints it."""
    page = (STORY / "real.md").read_text(encoding="utf-8")
    found = re.findall(r"^blocks\.(\d+)\.resid_post +first token +(\d+) .*others +(\d+), median +([\d.]+)", page, re.M)
    blocks, first, others, typical = zip(*(map(float, row) for row in found), strict=True)
    lines = [
        Line("first token", blocks, first, RED), Line("other tokens", blocks, others, BLUE),
        Line("median of all", blocks, typical, INK),
    ]  # fmt: skip
    ticks, entries = (
        {0: "0", 10: "10", 20: "20", 29: "29"},
        {0.1: "0.1", 1: "1", 10: "10", 100: "100", 1e3: "1k", 1e4: "10k", 1e5: "100k"},
    )
    parts = plot(lines, ticks, entries, "largest entry of the residual stream", "after block", height=200, log="y")
    return svg(
        376, 280, parts, "Largest entry of the residual stream of SmolLM2 by block, at the first token and at others."
    )


def suspects() -> str:
    """Return the rank correlations of estimated and true causes of ten texts, in two trainings."""
    figures, left, width, parts = stored_figures("influence"), 30, 370, []
    rows = [(training, method) for training in ("edge", "smooth") for method in ("tracin", "derivative")]
    names = {
        "edge": "at the edge of stability",
        "smooth": "smooth training",
        "tracin": "TracIn",
        "derivative": "derivative",
    }
    for i, (training, method) in enumerate(rows):
        y, colour = 44 + 56 * i, BLUE if method == "derivative" else INK
        parts += [text(left, y - 16, f"{names[training]}, {names[method]}")]
        parts += [f'<path d="M{left} {y}h{width}" stroke="{INK}" stroke-opacity="0.3"/>']
        for r in figures[training][method]["rank_correlation"]:
            at = f'cx="{left + width * (r + 0.2) / 1.2:.1f}" cy="{y}"'
            parts.append(f'<circle {at} r="6" fill="{colour}" fill-opacity="0.6"/>')
    parts += [text(left + width * (r + 0.2) / 1.2, 238, f"{r:g}", "middle") for r in (0, 0.25, 0.5, 0.75, 1)]
    parts.append(text(left + width / 2, 260, "rank correlation of estimate and truth, ten texts", "middle"))
    return svg(
        430, 270, parts, "Rank correlations of estimate and truth: near 0 to 0.7 at the edge, 0.8 to 1 if smooth."
    )


PICTURES: dict[str, Callable[[], str]] = {
    "types.svg": types,
    "mixing.svg": mixing,
    "attention.svg": asking,
    "scale.svg": scale,
    "saturation.svg": saturation,
    "ladder.svg": ladder,
    "overfitting.svg": overfitting,
    "cuts.svg": cuts,
    "cache.svg": cache,
    "context.svg": context,
    "translation.svg": translation,
    "whole.svg": whole,
    "alignment.svg": alignment,
    "rope.svg": rotation,
    "heads.svg": heads,
    "maps.svg": partial(
        maps,
        {f"head {head}": ("multihead", head) for head in range(4)},
        "Attention maps of the four heads of the rung multihead.",
    ),
    "replaced.svg": partial(
        maps,
        {"attention alone": ("attention_scaled", 0), "x + attention": ("residual", 0)},
        "Attention maps of the heads of the rungs attention_scaled and residual.",
    ),
    "learning.svg": learning,
    "norm.svg": norm,
    "mlp.svg": mlp,
    "gradients.svg": gradients,
    "order.svg": order,
    "curvature.svg": curvature,
    "film.svg": film,
    "lesson.svg": lesson,
    "masks.svg": masks,
    "experts.svg": experts,
    "patches.svg": patches,
    "induction.svg": induction,
    "large.svg": large,
    "suspects.svg": suspects,
}
"""Functions that draw, by the file that they draw in docs/story; docs/lab builds block.svg."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (STORY / name).write_text(draw(), encoding="utf-8")
