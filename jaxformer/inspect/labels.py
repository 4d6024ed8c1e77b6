"""Names of layers and their parts for readers of a page."""

from __future__ import annotations

import re

STACKS = {"": "", "encoder_": "encoder ", "decoder_": "decoder ", "vision_": "image ", "text_": "text "}
"""Word before "layer" for each stack of blocks."""


def layer_label(name: str) -> str:
    """Return "layer 0" for `blocks.0.attention`, "decoder layer 0, cross-attention" and so on; another
    name as it is."""
    if name == "reader":
        return "attention to the source"
    match = re.fullmatch(r"(\w*?)blocks\.(\d+)(?:\.(\w*)attention)?", name)
    if match is None or match[1] not in STACKS:
        return name
    return f"{STACKS[match[1]]}layer {match[2]}{', cross-attention' if match[3] else ''}"


def head_label(layer: str, head: int) -> str:
    """Return "head 2.1" for head 1 of `blocks.2.attention`; of another stack also its name."""
    match = re.fullmatch(r"blocks\.(\d+)\.attention", layer)
    return f"head {match[1]}.{head}" if match else f"head {head} of {layer_label(layer)}"
