"""Labels on a page: names of layers and heads, and descriptions of a head's behaviour."""

from __future__ import annotations

import math
import re
from typing import Any

from jaxformer import terminal
from jaxformer.inspect.heads import HeadStatistics

LINE_SYMBOLS = terminal.SYMBOLS | str.maketrans({"\n": "⏎", "\t": "⇥"})
"""Symbols of control characters, for a text in one line."""
TOKEN_SYMBOLS = LINE_SYMBOLS | {ord(" "): "␣"} | {0xDC00 + byte: f"⟨{byte:02X}⟩" for byte in range(0x80, 0x100)}
"""Symbols of control characters, spaces, and the surrogates to which "surrogateescape" decodes bytes."""
STACKS = {"": "", "encoder_": "encoder ", "decoder_": "decoder ", "vision_": "image ", "text_": "text "}
"""Word before "layer", by prefix of a stack's name."""


def layer_label(name: str) -> str:
    """Return "layer 0" for `blocks.0.attention`, "decoder layer 0, cross-attention" and so on. Other names are
    unchanged."""
    if name == "reader":
        return "attention to the source"
    match = re.fullmatch(r"(\w*?)blocks\.(\d+)(?:\.(\w*)attention)?", name)
    if match is None or match[1] not in STACKS:
        return name
    return f"{STACKS[match[1]]}layer {match[2]}{', cross-attention' if match[3] else ''}"


def stream_label(name: str) -> str:
    """Return "embedding" or "after layer 0" for a residual stream of the logit lens, such as `blocks.0.resid_post`."""
    return f"after {layer_label(name.removesuffix('.resid_post'))}" if name.endswith(".resid_post") else "embedding"


def token_label(piece: bytes) -> str:
    """Return a token's text with "␣" for a space, and "⟨D9⟩" for a byte that is no whole character."""
    return piece.decode("utf-8", "surrogateescape").translate(TOKEN_SYMBOLS)


def head_label(layer: str, head: int) -> str:
    """Return "head 2.1" for head 1 of `blocks.2.attention`; other stacks are named."""
    match = re.fullmatch(r"blocks\.(\d+)\.attention", layer)
    return f"head {match[1]}.{head}" if match else f"head {head} of {layer_label(layer)}"


def position_unit(patches: str | None, layer: str) -> str:
    """Return the word for a position in a layer, "patch" or "token"; `patches` is from the model's contract."""
    if patches is None:
        return "token"
    return "patch" if layer.startswith(f"{patches}_blocks." if patches else "blocks.") else "token"


CLEAR, WEAK = 0.5, 0.25
"""Mean attention weights from which a head clearly or partly shows a behaviour."""
NEAR = 3
"""Mean distance in positions below which attention is local."""
SPREAD = 0.85
"""Fraction of the maximum entropy from which attention counts as evenly spread."""


def describe_head(statistics: HeadStatistics, head: int, unit: str = "token") -> str:
    """Return a description of a head's behaviour by its largest score, such as "looks at the previous token (83%)".
    `unit` is the word for a position."""

    def score(name: str) -> float:
        values: Any = getattr(statistics, name)
        return float(values[head])

    targets = {
        "previous": f"the previous {unit}",
        "induction": f"the {unit} that followed the same one before: induction",
        "duplicate": f"earlier occurrences of the same {unit}",
        "first": f"the first {'position' if unit == 'patch' else unit}",  # may be the class token
    }
    scores = {name: score(name) for name in targets}
    strongest = max(scores, key=lambda name: -1.0 if math.isnan(scores[name]) else scores[name])
    weight, spread, entropy = scores[strongest], score("normalized_entropy"), score("entropy")
    if not math.isfinite(entropy):
        return "has weights that are not finite"
    if weight >= CLEAR:
        return f"looks at {targets[strongest]} ({weight:.0%})"
    if spread >= SPREAD:
        return "spreads its attention evenly"
    if weight >= WEAK:
        return f"gives part of its attention to {targets[strongest]} ({weight:.0%})"
    distance = score("distance")
    if distance < NEAR:
        return f"looks at {unit}{'es' if unit == 'patch' else 's'} nearby ({distance:.1f} positions away)"
    return f"attends to about {math.exp(entropy):.0f} positions"
