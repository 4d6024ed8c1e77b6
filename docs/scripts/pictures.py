"""Draw the pictures of docs/story as SVG. Those here show what was measured; `diagrams` draws the others.

python -m docs.scripts.pictures
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from docs.scripts import diagrams
from docs.scripts.drawing import BLUE, INK, RED, Line, heatmap, plot, svg, text
from docs.scripts.story import STORY, outcomes, relative_sharpness, stored_figures
from jaxformer import inspect
from jaxformer.config.files import load_module
from jaxformer.data import Batch


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
        (510, "patched", {0: "0", 0.25: "0.25", 0.5: "0.5"}, "rise of the last loss with this step's head"),
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
    "types.svg": diagrams.types,
    "mixing.svg": diagrams.mixing,
    "attention.svg": diagrams.asking,
    "scale.svg": scale,
    "saturation.svg": saturation,
    "ladder.svg": ladder,
    "overfitting.svg": overfitting,
    "cuts.svg": diagrams.cuts,
    "cache.svg": diagrams.cache,
    "context.svg": context,
    "translation.svg": diagrams.translation,
    "whole.svg": diagrams.whole,
    "alignment.svg": alignment,
    "rope.svg": diagrams.rotation,
    "heads.svg": diagrams.heads,
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
    "norm.svg": diagrams.norm,
    "mlp.svg": diagrams.mlp,
    "gradients.svg": gradients,
    "order.svg": order,
    "curvature.svg": curvature,
    "film.svg": film,
    "lesson.svg": diagrams.lesson,
    "masks.svg": diagrams.masks,
    "experts.svg": diagrams.experts,
    "patches.svg": diagrams.patches,
    "induction.svg": diagrams.induction,
    "large.svg": large,
    "suspects.svg": suspects,
}
"""Functions that draw, by the file that they draw in docs/story; docs/lab builds block.svg."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (STORY / name).write_text(draw(), encoding="utf-8")
