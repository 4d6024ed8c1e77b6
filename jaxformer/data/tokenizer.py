"""Tokenizers: byte-level BPE trained on the data (Sennrich et al. 2016; over bytes as in Radford et al. 2019), and
published ones, which are byte-level or fall back to bytes (Kudo and Richardson 2018), or WordPiece (Schuster and
Nakajima 2012; as in BERT), which normalises a text and has one token for all words that it cannot encode.

In a text of several documents, each document is followed by `end_of_text`, and contains no other special token. It is
preceded by `begin_of_text` if the published tokenizer adds one; otherwise, an `end_of_text` also precedes the first
document. Special tokens in a user's text are encoded as text, except by a Unigram model, which has them as pieces.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.config.fields import MAX_LENGTH
from jaxformer.data.text import locate
from jaxformer.errors import UserError, lone_surrogate, parse_json

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""Candidate end-of-text tokens for published tokenizers that do not name theirs."""
TOKENIZER_CONFIG = "tokenizer_config.json"
"""File beside a published tokenizer that names its `eos_token` and `bos_token`, and may hold a chat template."""
END_IDS = "eos_token_ids"
"""Field that we add to that file for the tokens that a published model's own config names as ends of a text."""
CHAT_TEMPLATE = "chat_template.jinja"
"""File beside a published tokenizer with its chat template."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"
"""Space in SentencePiece tokens."""
CONTINUED, WITHOUT_SPACE = "##", ".,!?"
"""Prefix of WordPiece tokens that continue a word, and tokens before which decoding puts no space, as others do."""
MAX_LEARNED_CHARACTERS = 2**21
"""Maximum total characters of the distinct words in a tokenizer's training text, which bounds training memory to about
250 MB; some ten million words of English have as many."""
MAX_TRAINING_CHARACTERS = 2**27
"""Maximum characters of a tokenizer's training text, which bounds training time."""


class Tokenizer:
    """A tokenizer that can encode every text; a published byte-level one may lack bytes that its training text never
    had (`missing_bytes`), and refuses a text with them.

    Raises:
      ValueError: it is neither byte-level, nor falls back to bytes, nor WordPiece, or has no end-of-text token.
    """

    def __init__(self, inner: tokenizers.Tokenizer, one_in: int = 1, config: Mapping[str, Any] | None = None) -> None:
        """Wrap a tokenizer. `one_in` is the inverse of the fraction of texts that it was trained on, `config` the
        content of a published tokenizer's `tokenizer_config.json`."""
        self._inner, self.one_in, self.config = inner, one_in, config or {}
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # "<|endoftext|>" in a user's text is text
        self.end_of_text = self._find_end()
        self.begin_of_text = self._find_begin()
        if self.vocab_size > MAX_LENGTH:  # libraries allocate a row per id
            raise ValueError(f"has a token {self.vocab_size - 1:,}; ids must be below {MAX_LENGTH:,}")

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size:,} tokens>"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train on the texts, or on a sample of 1 in 2, 4, 8, … (`one_in`) within `MAX_LEARNED_CHARACTERS` and
        `MAX_TRAINING_CHARACTERS`.

        The vocabulary is smaller than `vocab_size` if the texts have no more pairs to merge.

        Args:
          texts: iterated several times; an iterator is read into memory.
          vocab_size: maximum vocabulary size, at least 257.

        Raises:
          UserError: vocab_size is below the 257 that bytes and end-of-text need.
        """
        if vocab_size < 257:
            raise UserError(f"vocab_size is {vocab_size}; 256 bytes and end-of-text need at least 257.")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False, initial_alphabet=alphabet
        )
        texts = list(texts) if isinstance(texts, Iterator) else texts
        one_in = 1
        while not _fits(_sample(texts, one_in)) and any(_sample(texts, 2 * one_in)):
            one_in *= 2
        inner.train_from_iterator(_sample(texts, one_in), trainer)
        return cls(inner, one_in)

    @classmethod
    def load(cls, path: Path, ends: Sequence[int] = ()) -> Tokenizer:
        """Load a tokenizer that `save` wrote, or a published `tokenizer.json`, with the `TOKENIZER_CONFIG` beside it.
        `ends` are the ids of tokens that a published model's own config names as ends of a text. Raises `UserError` if
        the file is missing or not such a tokenizer."""
        remedy = "give the tokenizer.json of a run or of a published model"
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path} is not a readable tokenizer: {error}; {remedy}.") from error
        beside, config = path.with_name(TOKENIZER_CONFIG), {}
        if beside.is_file():
            try:
                config = dict(parse_json(beside.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                raise UserError(f"{beside} is not a readable JSON object ({error}); restore it.") from error
        if (template := path.with_name(CHAT_TEMPLATE)).is_file():  # takes precedence, as in transformers
            config["chat_template"] = template.read_text(encoding="utf-8", errors="replace")
        return published_tokenizer(inner, config | ({END_IDS: list(ends)} if ends else {}), path, remedy)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, and its config, if any, beside it."""
        for name, content in self.files(path.name).items():
            path.with_name(name).write_text(content, encoding="utf-8")

    def files(self, name: str) -> dict[str, str]:
        """Return the content of its files by name, where `name` is the tokenizer's own file; equal contents mean equal
        tokenizers."""
        config = {TOKENIZER_CONFIG: json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"} if self.config else {}
        return {name: self.as_json(), **config}

    def as_json(self) -> str:
        """Return the content of the tokenizer's file as JSON."""
        return self._inner.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """Vocabulary size in tokens, including special tokens: the largest id plus one."""
        return max(self._inner.get_vocab().values()) + 1

    def _find_end(self) -> int:
        """Return the id of the end-of-text token: the config's, else the first of `ENDS_OF_TEXT` in the vocabulary."""
        ids = self.config.get(END_IDS, [])
        known = [self._inner.id_to_token(token) if 0 <= token < self.vocab_size else None for token in ids]
        texts = [text for text in known if text is not None]
        if len(texts) < len(ids):
            named = ", ".join(map(str, ids))
            raise ValueError(f"has no token {named}, which the model's config names as its eos_token_id")
        given = self._named("eos_token")
        names = [given] if given else texts or ENDS_OF_TEXT
        tokens = [token for name in names if (token := self._inner.token_to_id(name)) is not None]
        if not tokens:
            raise ValueError(f"has no end-of-text token {' or '.join(names)}; see eos_token in its {TOKENIZER_CONFIG}")
        return tokens[0]

    @cached_property
    def ends_of_text(self) -> tuple[int, ...]:
        """Ids of all tokens that end a generated text: `end_of_text`, and the config's `END_IDS`."""
        return tuple(dict.fromkeys((self.end_of_text, *self.config.get(END_IDS, ()))))

    def _find_begin(self) -> int | None:
        """Return the id of the token that the tokenizer's post-processor or config puts before a text; None if there is
        none or it is end-of-text."""
        first = self._inner.encode("", add_special_tokens=True).ids[:1]
        adds, name = self.config.get("add_bos_token", bool(first)), self._named("bos_token")
        token = self._inner.token_to_id(name) if name else next(iter(first), None)
        return token if adds and token != self.end_of_text else None

    def _named(self, key: str) -> str | None:
        """Return the special token that the config names."""
        token = self.config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        return text if isinstance(text, str) and text else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises `UserError` if it has a lone surrogate or one of `missing_bytes`."""
        return self._inner.encode(self._check(text), add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of the start of a text: `begin_of_text`, if there is one, then those of `encode`."""
        return [*([] if self.begin_of_text is None else [self.begin_of_text]), *self.encode(text)]

    @cached_property
    def mask_token(self) -> int | None:
        """Id of the mask token that a published config names; None for a tokenizer without one."""
        name = self._named("mask_token")
        return None if name is None else self._inner.token_to_id(name)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in chat templates, such as `eos_token`."""
        names = [key for key in self.config if key.endswith("_token") and not key.startswith("add_")]
        named = {name: text for name in names if (text := self._named(name)) is not None}
        return {"eos_token": str(self._inner.id_to_token(self.end_of_text))} | named

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of all special tokens by id, which a user's text may contain."""
        added = self._inner.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special or i in self.ends_of_text}

    def encode_with_special(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the tokens of each text, with special tokens encoded as such, and the character range `[start, stop)`
        of each token. Raises as `encode` does."""
        checked = [self._check(text) for text in texts]
        return [(e.ids, e.offsets) for e in self._special_inner.encode_batch(checked, add_special_tokens=False)]

    @cached_property
    def _special_inner(self) -> tokenizers.Tokenizer:
        """Tokenizer that encodes special tokens in a text as special tokens."""
        inner = tokenizers.Tokenizer.from_str(self.as_json())
        inner.encode_special_tokens = False
        return inner

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return the tokenizer with a chat template in its config."""
        return Tokenizer(self._inner, self.one_in, {**self.config, "chat_template": source})

    def with_ends(self, texts: Iterable[str]) -> Tokenizer:
        """Return the tokenizer with more special tokens, given by their texts, that end a generated text."""
        more = (token for token, text in self.special_texts.items() if text in texts)
        return Tokenizer(self._inner, self.one_in, {**self.config, END_IDS: [*self.ends_of_text, *more]})

    def without_special_from(self, n: int) -> Tokenizer:
        """Return the tokenizer without special tokens whose ids are n or above."""
        form = json.loads(self.as_json())
        form["added_tokens"] = [t for t in form["added_tokens"] if t["id"] < n or not t["special"]]
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(form)), self.one_in, self.config)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, encoded in parallel on all cores. Raises as `encode` does."""
        checked = [self._check(text) for text in texts]
        return [e.ids for e in self._inner.encode_batch_fast(checked, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD, and ids beyond the vocabulary become nothing."""
        text = b"".join(self.token_bytes[t] for t in tokens if t < self.vocab_size).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._is_word_piece else text

    @cached_property
    def _is_word_piece(self) -> bool:
        return isinstance(self._inner.decoder, decoders.WordPiece)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each token; none for special tokens and ids without a token. Raises `ValueError` if it is neither
        byte-level, nor falls back to bytes, nor WordPiece."""
        steps = _decoder_steps(self._inner)
        if "ByteLevel" in steps:
            to_bytes = _byte_level_bytes
        elif "ByteFallback" in steps:
            to_bytes = _sentencepiece_bytes
        elif self._is_word_piece:
            to_bytes = _word_piece_bytes
        else:
            kind = f"a {type(self._inner.model).__name__} whose decoder has {', '.join(sorted(steps)) or 'nothing'}"
            raise ValueError(f"is {kind}, neither byte-level, nor with a fallback to bytes, nor WordPiece")
        added = self._inner.get_added_tokens_decoder()
        texts = [b""] * self.vocab_size
        for piece, i in self._inner.get_vocab().items():
            if i == self.end_of_text or (i in added and added[i].special):
                continue
            texts[i] = piece.encode() if i in added else to_bytes(piece)
        return texts

    @cached_property
    def missing_bytes(self) -> bytes:
        """Bytes without a token, in increasing order; the library would drop them from a text. None for WordPiece,
        which has a token for unknown words."""
        if self._is_word_piece:
            return b""
        return bytes(sorted({*range(256)} - {b[0] for b in self.token_bytes if len(b) == 1}))

    def _check(self, text: str) -> str:
        """Return the text. Raises `UserError` if it cannot be encoded."""
        if (start := lone_surrogate(text)) is not None:
            reason = "half a character, which UTF-8 cannot encode; remove it"
            raise UserError(f"the text has a lone surrogate, U+{ord(text[start]):04X}, at character {start}: {reason}.")
        if self.missing_bytes:
            normalizer = self._inner.normalizer
            content = (text if normalizer is None else normalizer.normalize_str(text)).encode()
            if match := re.search(b"[%b]" % re.escape(self.missing_bytes), content):
                start = len(content[: match.start()].decode(errors="ignore"))
                character = content.decode()[start]
                problem = f"the tokenizer has no token for the byte 0x{match[0][0]:02x}"
                raise UserError(f"{problem} of {character!r}, character {start} of the text; remove it.")
        return text

    def _encoded_bytes(self, text: str) -> bytes:
        return b"".join(self.token_bytes[t] for t in self.encode(text))

    @cached_property
    def doubles_space(self) -> bool:
        """True if the tokenizer adds a space even to a text that begins with one."""
        return self._encoded_bytes(" a").startswith(b"  ")

    @cached_property
    def separates_words(self) -> bool:
        """True if cutting a text before each single space between two words does not change its tokens, as for GPT-2's
        pattern."""
        form = json.loads(self.as_json())
        step, added = form["pre_tokenizer"] or {}, form["added_tokens"]
        by_pattern = step.get("type") == "ByteLevel" and step["use_regex"] and not step["add_prefix_space"]
        return by_pattern and form["normalizer"] is None and all(token["special"] for token in added)

    @cached_property
    def is_lossless(self) -> bool:
        """True if tokens have exactly the bytes of the text: no normaliser changes it, and no space is added."""
        return self._inner.normalizer is None and self._encoded_bytes("a") == b"a"

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """Bytes per token, `(V,)` int32."""
        return np.array([len(b) for b in self.token_bytes], np.int32)


def _decoder_steps(inner: tokenizers.Tokenizer) -> set[str]:
    """Return the types of the decoder's steps."""
    form = None if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    return {step["type"] for step in _flat(form)}


def published_tokenizer(inner: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path, remedy: str) -> Tokenizer:
    """Return a published tokenizer that was read from a file. Raises `UserError` with the file's path and the remedy if
    it cannot be used."""
    try:
        tokenizer = Tokenizer(inner, config=config)
        missing = tokenizer.missing_bytes
        # With a fallback, a character with a missing byte would be encoded as unknown.
        if missing and "ByteLevel" not in _decoder_steps(inner):
            raise ValueError(f"has no token for the byte 0x{missing[0]:02x}, which its fallback needs")
    except ValueError as error:
        raise UserError(f"{path} {error}; {remedy}.") from error
    return tokenizer


def find_tokenizer(path: str) -> Path:
    """Return the path of a tokenizer's file, given the file or its folder."""
    location = locate(path, "a tokenizer.json or its folder")
    return location / "tokenizer.json" if location.is_dir() else location


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder, with sequences flattened."""
    if step is None:
        return []
    return [inner for part in step["decoders"] for inner in _flat(part)] if step["type"] == "Sequence" else [step]


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""Byte of each character in the byte-level alphabet: printable bytes are represented by themselves, the others, in
order, by the characters from U+0100 on."""


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(BYTE_OF.__getitem__, piece))
    except KeyError as error:
        raise ValueError(f"has a byte-level decoder and a token with {error.args[0]!r}, which is not a byte") from None


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


def _word_piece_bytes(piece: str) -> bytes:
    is_continued = piece.startswith(CONTINUED) and piece != CONTINUED
    return (piece.removeprefix(CONTINUED) if is_continued or piece in WITHOUT_SPACE else f" {piece}").encode()


def _sample(texts: Iterable[str], one_in: int) -> Iterator[str]:
    """Yield about one in `one_in` texts, chosen by content, so that the sample does not depend on their order."""
    return (text for text in texts if zlib.crc32(text.encode(errors="replace")) % one_in == 0)


def _fits(texts: Iterable[str]) -> bool:
    """Return True if the texts and their distinct words do not exceed the maximum numbers of characters."""
    known: set[str] = set()
    words_left, left = MAX_LEARNED_CHARACTERS, MAX_TRAINING_CHARACTERS
    for text in texts:
        new = set(text.split()) - known
        words_left, left = words_left - sum(map(len, new)), left - len(text)
        if min(words_left, left) < 0:
            return False
        known |= new
    return True


class StreamDecoder:
    """Incremental decoder that holds back the bytes of a character until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the characters completed by these tokens."""
        return self._decoder.decode(b"".join(self._bytes[t] for t in tokens))

    def end(self) -> str:
        """Return the rest: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)
