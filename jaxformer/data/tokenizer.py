"""Byte-level BPE (Sennrich et al. 2016; over bytes as in Radford et al. 2019)."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.errors import UserError

END_OF_TEXT = "<|endoftext|>"
MAX_LEARNED_CHARACTERS = 2**23
"""Maximum number of characters of distinct words in a tokenizer's training text, which bounds its memory to about a
gigabyte: those of some hundred megabytes of English, or of 25 MB of a script without spaces."""


class Tokenizer:
    """A lossless byte-level BPE tokenizer: every text has an encoding."""

    def __init__(self, inner: tokenizers.Tokenizer, one_in: int = 1) -> None:
        """Wrap a tokenizer that was trained on one in `one_in` texts."""
        self._inner, self.one_in = inner, one_in
        self._inner.encode_special_tokens = True  # "<|endoftext|>" in a user's text is text

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train on the texts, or on a sample of 1 in 2, 4, 8, … (`one_in`) that keeps to `MAX_LEARNED_CHARACTERS`.

        The vocabulary is smaller than `vocab_size` where the texts have no more pairs to merge.

        Args:
          texts: iterated several times; an iterator is read into memory.

        Raises:
          UserError: vocab_size is below the 257 that bytes and end-of-text need.
        """
        if vocab_size < 257:
            raise UserError(f"vocab_size is {vocab_size}; 256 bytes and end-of-text need at least 257.")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = list(texts) if isinstance(texts, Iterator) else texts
        one_in = 1
        while not _fits(_sample(texts, one_in)) and any(_sample(texts, 2 * one_in)):
            one_in *= 2
        inner.train_from_iterator(_sample(texts, one_in), trainer)
        return cls(inner, one_in)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a tokenizer that `save` wrote.

        Raises:
          UserError: the file is missing or is no such tokenizer.
        """
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            if not path.exists():
                raise UserError(f"{path} does not exist; put the run's tokenizer back, or train again.") from error
            raise UserError(
                f"{path} is no tokenizer that can be read: {error}; put the run's tokenizer back, or train again."
            ) from error
        if inner.token_to_id(END_OF_TEXT) is None:
            raise UserError(f"{path} has no token {END_OF_TEXT}; use the tokenizer.json of a run.")
        tokenizer = cls(inner)
        try:
            tokenizer.token_bytes  # noqa: B018
        except KeyError as error:
            what = "no token of id" if isinstance(error.args[0], int) else "a token with"
            raise UserError(
                f"{path} is no byte-level tokenizer with ids from 0 on: of {tokenizer.vocab_size} tokens, it has "
                f"{what} {error}; use the tokenizer.json of a run."
            ) from error
        return tokenizer

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        path.write_text(self.as_json(), encoding="utf-8")

    def as_json(self) -> str:
        """Return the JSON text of its file; equal texts mean equal tokenizers."""
        return self._inner.to_str()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size in tokens, end-of-text included."""
        return self._inner.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        """Id of the end-of-text token."""
        token = self._inner.token_to_id(END_OF_TEXT)
        assert token is not None  # ensured by `train` and `load`
        return token

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
          UserError: the text has a lone surrogate.
        """
        return self._inner.encode(_check_utf8(text)).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, in parallel on all cores; raises as `encode` does."""
        return [e.ids for e in self._inner.encode_batch_fast([_check_utf8(text) for text in texts])]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes[t] for t in tokens).decode("utf-8", "replace")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each token; none for end-of-text."""
        # The byte-level alphabet gives each byte a printable character: printable bytes stand for themselves,
        # the others, in order, for the characters from U+0100 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in printable]
        byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        pieces = {i: piece for piece, i in self._inner.get_vocab().items()}
        return [
            b"" if i == self.end_of_text else bytes(byte_of[char] for char in pieces[i]) for i in range(self.vocab_size)
        ]

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """Bytes of each token, `(V,)` int32."""
        return np.array([len(b) for b in self.token_bytes], np.int32)


def _sample(texts: Iterable[str], one_in: int) -> Iterator[str]:
    """Yield about one in `one_in` texts, chosen by their content, so that the sample does not depend on their order."""
    return (text for text in texts if zlib.crc32(text.encode(errors="replace")) % one_in == 0)


def _fits(texts: Iterable[str]) -> bool:
    """Return True if the distinct words of the texts have at most `MAX_LEARNED_CHARACTERS`."""
    known: set[str] = set()
    left = MAX_LEARNED_CHARACTERS
    for text in texts:
        new = set(text.split()) - known
        left -= sum(map(len, new))
        if left < 0:
            return False
        known |= new
    return True


def _check_utf8(text: str) -> str:
    """Return the text; `UserError` if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: half a "
            "character, which UTF-8 cannot write; remove it."
        ) from error
    return text


class StreamDecoder:
    """Incremental decoding: holds back the bytes of a character until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        return self._decoder.decode(b"".join(self._bytes[t] for t in tokens))

    def end(self) -> str:
        """Return the rest: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)
