"""Encoding of long texts via their distinct words, each of which is encoded once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from jaxformer.data.tokenizer import Tokenizer

BETWEEN_WORDS = re.compile(r" (?=\S)(?<=\S )")
"""A single space between two words; the pattern begins with a literal, which makes the search fast."""
MAX_CHARACTERS = 2**20
"""Total characters of known words above which they are forgotten, which bounds memory to some 50 MB for English: its
hundred thousand most frequent words."""


class WordEncoder:
    """Encoder for a tokenizer that `separates_words`: a word's tokens do not depend on its context, so they are looked
    up. It gives the same tokens as `Tokenizer.encode_batch`, in a third of the processor time for English."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._known, self._n_characters = tokenizer, dict[str, list[int]](), 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text. Raises as `Tokenizer.encode` does."""
        if self._n_characters > MAX_CHARACTERS:
            self._known, self._n_characters = {}, 0
        words = [BETWEEN_WORDS.split(text) for text in texts]
        # The first and the last word may have white space around them, or no space before them.
        ends = [end for first, *others in words for end in (first, "".join(f" {word}" for word in others[-1:]))]
        new = list(set(chain.from_iterable(each[1:-1] for each in words)).difference(self._known))
        of_new, *of_ends = self._tokenizer.encode_batch(["".join(f" {word}" for word in new), *ends])
        self._learn(new, of_new)
        look_up = self._known.__getitem__
        return [
            [*first, *chain.from_iterable(map(look_up, each[1:-1])), *last]
            for each, first, last in zip(words, of_ends[::2], of_ends[1::2], strict=True)
        ]

    def _learn(self, words: Sequence[str], tokens: list[int]) -> None:
        """Store the tokens of words, given those of all words joined, each with a space before it."""
        token_ends = np.cumsum(self._tokenizer.token_lengths[tokens])
        word_ends = np.cumsum([1 + len(word.encode()) for word in words])
        stops = (np.searchsorted(token_ends, word_ends) + 1).tolist()
        self._known |= {word: tokens[i:j] for word, (i, j) in zip(words, pairwise([0, *stops]), strict=True)}
        self._n_characters += sum(map(len, words))
