"""Special tokens of an exported tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens, by the names that other libraries' configs have for them."""

    bos: int
    """Id of the token that the tokenizer begins each text with or, without one, of end-of-text, which precedes each
    document in training."""
    eos: int
    """Id of end-of-text."""
    adds_bos: bool
    """True where the tokenizer begins each text with `bos`."""
    bos_text: str
    """Text of `bos`."""
    eos_text: str
    """Text of `eos`."""


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of a tokenizer."""
    content = json.loads(tokenizer.as_json())
    eos, first = tokenizer.end_of_text, _first_token(content.get("post_processor"))
    bos = eos if first is None else first
    texts = {added["id"]: added["content"] for added in content["added_tokens"]}
    return SpecialTokens(bos, eos, first is not None, texts[bos], texts[eos])


def _first_token(processor: Mapping[str, Any] | None) -> int | None:
    """Return the id that a post-processor begins each text with; None for none."""
    for part in (processor or {}).get("processors", [processor] if processor else []):
        if part["type"] == "TemplateProcessing" and "SpecialToken" in part["single"][0]:
            name = part["single"][0]["SpecialToken"]["id"]
            return int(part["special_tokens"][name]["ids"][0])
    return None
