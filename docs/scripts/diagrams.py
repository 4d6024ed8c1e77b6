"""Pictures of docs/story that show how something works: nothing in them is measured."""

import math

import numpy as np

from docs.scripts.drawing import BLUE, INK, RED, arrow, bars, box, heatmap, moving, svg, text


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
