"""Special tokens of an exported tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from jaxformer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens, by the names that other libraries' configs have for them."""

    bos: int
    """Id of the token that the tokenizer begins each text with or, without one, of end-of-text, which precedes each
    document in training."""
    eos: tuple[int, ...]
    """Ids of the tokens that end a text, end-of-text first."""
    adds_bos: bool
    """True where the tokenizer begins each text with `bos`."""
    bos_text: str
    """Text of `bos`."""
    eos_text: str
    """Text of end-of-text."""


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of a tokenizer."""
    added = {token["id"]: token["content"] for token in json.loads(tokenizer.as_json())["added_tokens"]}
    named, begin = tokenizer.special_tokens, tokenizer.begin_of_text
    bos, bos_text = tokenizer.end_of_text, named["eos_token"]
    if begin is not None:
        bos, bos_text = begin, added.get(begin) or named["bos_token"]
    return SpecialTokens(bos, tokenizer.ends_of_text, begin is not None, bos_text, named["eos_token"])
