"""Tokenizers: byte-level BPE trained on the data (Sennrich et al. 2016; over bytes as in Radford et al. 2019), and
published ones, which are byte-level or fall back to bytes (Kudo and Richardson 2018), or WordPiece (Schuster and
Nakajima 2012; as in BERT), Unigram (Kudo 2018; as in XLM-R, ALBERT and T5) or BPE (as in NLLB) without bytes, which
normalise a text and have one token for all that they cannot encode. Published tokenizers of bytes must give a text
back, but for what their normalizer changes (`check_round_trip`). BPE dropout is turned off, so that a text always has
the same tokens.

In a text of several documents, each document is followed by `end_of_text`, and contains no other special token. It is
preceded by `begin_of_text` if the published tokenizer adds one; otherwise, an `end_of_text` also precedes the first
document. Special tokens in a user's text are encoded as text.
"""

from __future__ import annotations

import codecs
import json
import re
import string
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
from jaxformer.errors import UserError, abbreviate, foreign, lone_surrogate, parse_json

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""Candidate end-of-text tokens for published tokenizers that do not name theirs."""
TOKENIZER_CONFIG = "tokenizer_config.json"
"""File beside a published tokenizer that names its `eos_token` and `bos_token`, and may hold a chat template."""
END_IDS = "eos_token_ids"
"""Field that we add to that file for the tokens that a published model's own config names as ends of a text."""
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
"""Older file beside a published tokenizer with what the config may lack: its special tokens."""
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
"""Files beside a published tokenizer with its chat template, and with others, by name."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"
"""Space in SentencePiece tokens."""
HIDDEN = "\U0010fffe"
"""First character of the pieces of a Unigram model that no text has."""
SHOWN = {"pattern": {"String": HIDDEN}, "content": ""}
"""Step of a decoder, and of a normalizer, that removes it."""
TARGET_TOKENIZER = "target_tokenizer"
"""Field that we add to the config for the tokenizer of targets, if it is another with the same vocabulary: its JSON."""
PROBE = f"""The king's  KING   sees 3 ships,\t12,345.60 m off; {string.punctuation} <a b="c">\r\n
def f(x_1):
    return {{x_1: 'y'}} != 0x1F  # é ça Ω 日本 한국 🙂 👩‍🚀 \U0010fffd.\n\n\nEnd"""
"""Text that a tokenizer of bytes must give back."""
SCHEMES = ("always", "first", "never")
MODEL_OPTIONS = ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")
"""Options of a model that can change a text."""
PREFIX_SPACE = "add_prefix_space"
BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer")
"""Classes of transformers for which a config decides about a space before a text; false by default."""
OF_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
BERT_OPTIONS: Mapping[str, tuple[str, Any]] = {
    "lowercase": ("do_lower_case", True), "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}  # fmt: skip
"""Settings of the normalizer of such a class, by which its config decides: names there, and defaults."""
CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts whose spaces a WordPiece tokenizer removes if its config says so, in order."""
MAX_LEARNED_CHARACTERS = 2**21
"""Maximum total characters of the distinct words in a tokenizer's training text, which bounds training memory to about
250 MB; some ten million words of English have as many."""
MAX_TRAINING_CHARACTERS = 2**27
"""Maximum characters of a tokenizer's training text, which bounds training time."""


class Tokenizer:
    """A tokenizer that can encode every text; a published byte-level one may lack bytes that its training text never
    had (`missing_bytes`), and refuses a text with them.

    Raises:
      ValueError: it is neither byte-level, nor falls back to bytes, nor WordPiece, nor Unigram, or has no end-of-text
        token, or it puts other tokens around a text than one before it and end-of-text after it.
    """

    def __init__(self, inner: tokenizers.Tokenizer, one_in: int = 1, config: Mapping[str, Any] | None = None) -> None:
        """Wrap a tokenizer. `one_in` is the inverse of the fraction of texts that it was trained on, `config` the
        content of a published tokenizer's `tokenizer_config.json`."""
        self._inner, self.one_in, self.config = inner, one_in, config or {}
        inner.no_truncation()
        inner.no_padding()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None  # the same text has the same tokens
        inner.encode_special_tokens = True  # "<|endoftext|>" in a user's text is text
        self.before_text, self.after_text = self._added()
        self.end_of_text = self._find_end()
        self._check_added()
        begin = next(iter(self.before_text), self.end_of_text)
        self.begin_of_text = None if begin == self.end_of_text else begin
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
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise UserError(f"{path} is not a readable tokenizer: {foreign(error)}; {remedy}.") from error
        config = _read_config(path.with_name(TOKENIZER_CONFIG))
        if "added_tokens_decoder" not in config:
            config |= _read_config(path.with_name(SPECIAL_TOKENS_MAP))
        config |= _read_templates(path.parent)  # which take precedence, as in transformers
        try:
            inner = _with_options(inner, config)
            config = _add_tokens(inner, config)
        except (TypeError, ValueError, AttributeError, OverflowError, LookupError) as error:
            problem = f"{path.with_name(TOKENIZER_CONFIG)} has options or special tokens in an unknown form ({error})"
            raise UserError(f"{problem}; restore the published one.") from error
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

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the post-processor puts before and after a text. Raises `ValueError` if it changes the
        tokens of the text itself."""
        all_ids, ids = (self._inner.encode(PROBE, add_special_tokens=added).ids for added in (True, False))
        kind = _types(self._inner.post_processor)
        if unknown := [token for token in all_ids if self._inner.id_to_token(token) is None]:
            raise ValueError(f"has no token {unknown[0]}, which its post-processor ({kind}) adds to a text")
        for start in range(len(all_ids) - len(ids) + 1):
            if ids and all_ids[start : start + len(ids)] == ids:
                return all_ids[:start], all_ids[start + len(ids) :]
        raise ValueError(f"has a post-processor ({kind}) that changes the tokens of a text")

    def _check_added(self) -> None:
        """Raise `ValueError` for tokens around a text other than one before it and end-of-text after it."""
        before, after, end = self.before_text, self.after_text, [self.end_of_text]
        if len(before) > 1 or after not in ([], end) or before == after == end:
            texts = [" ".join(map(self._token_text, ids)) or "nothing" for ids in (before, after)]
            problem = f"puts {texts[0]} before a text and {texts[1]} after it ({_types(self._inner.post_processor)})"
            limit = f"one token before it and the end of text, {self._token_text(self.end_of_text)}, after it"
            raise ValueError(f"{problem}; supported are {limit}, or one of them")

    def _find_end(self) -> int:
        """Return the id of the end-of-text token: the config's, else the one that the tokenizer puts after a text, else
        the first of `ENDS_OF_TEXT` in the vocabulary."""
        ids = self.config.get(END_IDS, [])
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"has {END_IDS} {abbreviate(ids)} in its {TOKENIZER_CONFIG}, which are no ids of tokens")
        if not all(0 <= token < self.vocab_size and self._token_text(token) for token in ids):
            named = ", ".join(map(str, ids))
            raise ValueError(f"has no token {named}, which the model's config names as its eos_token_id")
        given, added = self._named("eos_token"), self._inner.get_added_tokens_decoder()
        after = [token for token in self.after_text if token in added and added[token].special]
        names = [given] if given else [*map(self._token_text, ids or after)] or ENDS_OF_TEXT
        tokens = [token for name in names if (token := self._inner.token_to_id(name)) is not None]
        if not tokens:
            raise ValueError(f"has no end-of-text token {' or '.join(names)}; see eos_token in its {TOKENIZER_CONFIG}")
        return tokens[0]

    def _token_text(self, token: int) -> str:
        """Return the text of a token as it is published; "" for an id without one."""
        added = self._inner.get_added_tokens_decoder()
        return added[token].content if token in added else self._inner.id_to_token(token) or ""

    @cached_property
    def ends_of_text(self) -> tuple[int, ...]:
        """Ids of all tokens that end a generated text: `end_of_text`, and the config's `END_IDS`."""
        return tuple(dict.fromkeys((self.end_of_text, *self.config.get(END_IDS, ()))))

    def _named(self, key: str) -> str | None:
        """Return the special token that the config names."""
        return _content(self.config.get(key))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises `UserError` if it has a lone surrogate or one of `missing_bytes`."""
        return self._ids(self._text_inner.encode(self._check(text), add_special_tokens=False), text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of `encode`, and the character range `[start, stop)` of each."""
        encoding = self._text_inner.encode(self._check(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_masked(self, text: str) -> list[int]:
        """Return the tokens of a text in which the published mask token, such as [MASK], is the mask, as by
        transformers, and other special tokens are text. Raises as `encode` does."""
        return self._masked_inner.encode(self._check(text), add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of the start of a text: those of `before_text`, then those of `encode`."""
        return [*self.before_text, *self.encode(text)]

    @cached_property
    def mask_token(self) -> int | None:
        """Id of the mask token that a published config names; None for a tokenizer without one."""
        name = self._named("mask_token")
        return None if name is None else self._inner.token_to_id(name)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in chat templates, such as `eos_token`."""
        named = {name: text for name in _named_tokens(self.config) if (text := self._named(name)) is not None}
        return {"eos_token": self._token_text(self.end_of_text)} | named

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

    @cached_property
    def _text_inner(self) -> tokenizers.Tokenizer:
        """Tokenizer that encodes special tokens in a text as text."""
        return self._with_only_special() if isinstance(self._inner.model, models.Unigram) else self._inner

    @cached_property
    def _masked_inner(self) -> tokenizers.Tokenizer:
        """Tokenizer that encodes the mask token in a text as such, and other special tokens as text."""
        assert self.mask_token is not None
        return self._with_only_special(self.mask_token)

    def _with_only_special(self, token: int | None = None) -> tokenizers.Tokenizer:
        """Return a tokenizer that encodes one special token in a text as such, and the others as text. A Unigram model
        would find these among its pieces, where they get names that no text has."""
        form = json.loads(self.as_json())
        pieces = form["model"]["vocab"] if isinstance(self._inner.model, models.Unigram) else []
        hidden = [t for t in form["added_tokens"] if t["special"] and t["id"] != token and t["id"] < len(pieces)]
        for each in hidden:
            pieces[each["id"]][0] = f"{HIDDEN}{each['id']}"
        form["added_tokens"] = [
            each | {"special": each["special"] and each["id"] != token}
            for each in form["added_tokens"]
            if each not in hidden
        ]
        inner = tokenizers.Tokenizer.from_str(json.dumps(form))
        inner.encode_special_tokens = True
        return inner

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates in the config, by name; a single one is named default."""
        return named_templates(self.config)

    def with_chat_template(self, template: str | list[dict[str, str]]) -> Tokenizer:
        """Return the tokenizer with a chat template, or several by name, in its config."""
        return self.with_settings({"chat_template": template})

    def with_settings(self, settings: Mapping[str, Any]) -> Tokenizer:
        """Return the tokenizer with more fields in its config."""
        return Tokenizer(self._inner, self.one_in, {**self.config, **settings})

    @cached_property
    def of_targets(self) -> Tokenizer:
        """Tokenizer that encodes targets, which for Marian has other pieces than that of sources."""
        form = self.config.get(TARGET_TOKENIZER)
        return self if form is None else Tokenizer(tokenizers.Tokenizer.from_str(form), self.one_in, self.config)

    def with_ends(self, texts: Iterable[str]) -> Tokenizer:
        """Return the tokenizer with more special tokens, given by their texts, that end a generated text."""
        more = (token for token, text in self.special_texts.items() if text in texts)
        return self.with_settings({END_IDS: [*self.ends_of_text, *more]})

    def without_special_from(self, n: int) -> Tokenizer:
        """Return the tokenizer without special tokens whose ids are n or above. Raises `ValueError` if a text needs one
        of them: before it, at its end, or in a conversation, by the chat template."""
        form, template = json.loads(self.as_json()), str(self.config.get("chat_template"))
        gone = {t["content"] for t in form["added_tokens"] if t["id"] >= n and t["special"]}
        form["added_tokens"] = [t for t in form["added_tokens"] if t["content"] not in gone]
        names = [name for name, text in self.special_tokens.items() if text in gone and name != "eos_token"]
        if needed := [text for text in (*sorted(gone), *names) if text in template]:
            raise ValueError(f"lacks {needed[0]}, which its chat template writes")
        config = {name: value for name, value in self.config.items() if name not in names}
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(form)), self.one_in, config)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, encoded in parallel on all cores. Raises as `encode` does."""
        checked = [self._check(text) for text in texts]
        encode = self._text_inner.encode_batch_fast if self._unknown is None else self._text_inner.encode_batch
        encodings = encode(checked, add_special_tokens=False)
        return [self._ids(encoding, text) for encoding, text in zip(encodings, checked, strict=True)]

    def _ids(self, encoding: tokenizers.Encoding, text: str) -> list[int]:
        """Return the tokens of a text. An unknown part of it that is a hidden piece has its id, as in SentencePiece,
        which looks up the ids of texts."""
        if self._unknown is None or self._unknown not in encoding.ids:
            return encoding.ids
        normalizer, ids = self._inner.normalizer, list(encoding.ids)
        for i, (start, stop) in enumerate(encoding.offsets):
            if ids[i] == self._unknown:
                part = text[start:stop] if normalizer is None else normalizer.normalize_str(text[start:stop])
                ids[i] = self._inner.token_to_id(HIDDEN + part) or self._unknown
        return ids

    @cached_property
    def _unknown(self) -> int | None:
        """Id of the unknown token, if there are hidden pieces; else None."""
        hides = any(step.items() >= SHOWN.items() for step in _steps(self._inner.decoder))
        return self._inner.token_to_id(self._named("unk_token") or "") if hides else None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without a space that the tokenizer puts before a text and its decoder removes.
        Invalid UTF-8 becomes U+FFFD; special tokens and ids beyond the vocabulary become nothing."""
        if not self._is_word_piece:
            text = self.decode_part(tokens)
            text = text.removesuffix(" ") if self._word_end else text
            return text.removeprefix(" ") if self._strips_space else text
        text = self._inner.decode([int(token) for token in tokens if token != self.end_of_text])
        for spaced in CLEANED_UP if self.config.get("clean_up_tokenization_spaces") else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def decode_part(self, tokens: Iterable[int]) -> str:
        """Return the text of some of a text's tokens, which may begin with a space; otherwise as `decode`."""
        return b"".join(self.token_bytes[t] for t in tokens if t < self.vocab_size).decode("utf-8", "replace")

    @cached_property
    def _strips_space(self) -> bool:
        """True if the decoder removes a space before the first word."""
        ids = self._inner.encode("a", add_special_tokens=False).ids
        return self.decode_part(ids).startswith(" ") and not self._inner.decode(ids).startswith(" ")

    @cached_property
    def _is_word_piece(self) -> bool:
        return isinstance(self._inner.model, models.WordPiece) and isinstance(self._inner.decoder, decoders.WordPiece)

    @cached_property
    def _word_end(self) -> str:
        """Text that ends the tokens that end a word, such as CLIP's </w>; "" for none. Spaces between words have no
        tokens then, so that a text is not given back."""
        has_bytes = "ByteLevel" in {step["type"] for step in _steps(self._inner.decoder)}
        return getattr(self._inner.model, "end_of_word_suffix", None) or "" if has_bytes else ""

    @cached_property
    def has_unknown(self) -> bool:
        """True if it has one token for all that it cannot encode: WordPiece, or Unigram or BPE without bytes."""
        steps = [step for step in _steps(self._inner.decoder) if not step.items() >= SHOWN.items()]
        model = self._inner.model
        is_bpe = isinstance(model, models.BPE) and model.unk_token is not None and not model.byte_fallback
        of_words = (is_bpe or isinstance(model, models.Unigram)) and [step["type"] for step in steps] == ["Metaspace"]
        return self._is_word_piece or of_words

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each token; none for special tokens and ids without a token. Raises `ValueError` if it is neither
        byte-level, nor falls back to bytes, nor WordPiece, nor Unigram."""
        decoder = self._inner.decoder
        steps = {step["type"] for step in _steps(decoder)}
        of_bytes = isinstance(self._inner.model, models.BPE | models.Unigram)
        if self._is_word_piece:
            to_bytes = lambda piece: decoder.decode(["a", piece]).removeprefix("a").encode()  # noqa: E731
        elif self._word_end:
            end = self._word_end
            to_bytes = lambda piece: _byte_level_bytes(piece.removesuffix(end)) + b" " * piece.endswith(end)  # noqa: E731
        elif "ByteLevel" in steps and of_bytes:
            to_bytes = _byte_level_bytes
        elif self.has_unknown or ("ByteFallback" in steps and of_bytes):
            to_bytes = _sentencepiece_bytes
        else:
            kind = f"a {type(self._inner.model).__name__} whose decoder has {', '.join(sorted(steps)) or 'nothing'}"
            known = "byte-level, nor with a fallback to bytes, nor WordPiece, nor Unigram or BPE with Metaspace"
            raise ValueError(f"is {kind}, neither {known}")
        added = self._inner.get_added_tokens_decoder()
        texts = [b""] * self.vocab_size
        for piece, i in self._inner.get_vocab().items():
            if i == self.end_of_text or (i in added and added[i].special):
                continue
            if i in added:
                piece = str(self._inner.id_to_token(i))  # as the normalizer, too, may have changed it
            texts[i] = piece.encode() if i in added and "ByteLevel" in steps else to_bytes(piece)
        return texts

    @cached_property
    def missing_bytes(self) -> bytes:
        """Bytes without a token, in increasing order; the library would drop them from a text. None with a token for
        unknown words."""
        if self.has_unknown:
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

    def check_round_trip(self) -> None:
        """Raise `ValueError` if `decode` or the library does not give a text back, but for what the normalizer changes.
        With a token for unknown words, or tokens that end a word, it need not."""
        inner, normalizer, steps = self._inner, self._inner.normalizer, _steps(self._inner.decoder)
        if self._is_word_piece:
            return
        if self._word_end:
            names, vocab = pre_tokenizers.ByteLevel.alphabet(), inner.get_vocab()
            lacking = [name for byte in names for name in (byte, byte + self._word_end) if name not in vocab]
            if lacking:  # which would be left out of a text
                raise ValueError(f"has no token {min(lacking)!r} for a byte ({self._components()})")
            return
        if self.missing_bytes and "ByteLevel" not in {step["type"] for step in steps}:
            # A character with a missing byte would be encoded as unknown.
            raise ValueError(f"has no token for the byte 0x{self.missing_bytes[0]:02x}, which its fallback needs")
        removing = [] if self.has_unknown else list(filter(_removes, _steps(inner.pre_tokenizer)))
        if removing:
            raise ValueError(f"has a pre-tokenizer that removes parts of a text, {abbreviate(removing[0])}")
        if others := [step for step in steps if not _is_plain(step)]:
            raise ValueError(f"has a decoder that changes a text, {abbreviate(others[0])}")
        if self.has_unknown:
            return
        normalize = (lambda text: text) if normalizer is None else normalizer.normalize_str
        probe = "".join(c for c in PROBE if not {*self.missing_bytes} & {*normalize(c).encode()})
        tokens, wanted = self.encode(probe), normalize(probe)
        for text in (self.decode(tokens).removeprefix(" "), inner.decode(tokens).removeprefix(" ")):
            if text != wanted and normalize(text) != wanted:  # which may have its own spaces
                shared = zip(wanted, text, strict=False)
                at = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(wanted), len(text)))
                problem = f"turns {wanted[max(0, at - 5) : at + 9]!r} into {text[max(0, at - 5) : at + 9]!r}"
                raise ValueError(f"{problem} ({self._components()})")

    def _components(self) -> str:
        """Return the types of the parts that can change a text."""
        inner, model = self._inner, self._inner.model
        kinds = {"normalizer": inner.normalizer, "pre-tokenizer": inner.pre_tokenizer}
        kinds |= {"post-processor": inner.post_processor, "decoder": inner.decoder}
        options = [f"{name} {value!r}" for name in MODEL_OPTIONS if (value := getattr(model, name, None))]
        parts = [f"{name} {_types(part)}" for name, part in kinds.items()]
        added = [token for token in inner.get_added_tokens_decoder().values() if not token.special]
        strip = [f"added token {token.content!r} that strips spaces" for token in added if token.lstrip or token.rstrip]
        return ", ".join([f"model {type(model).__name__}", *options, *parts, *strip[:1]])

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
        """True if tokens have exactly the bytes of the text: no normaliser changes it, no part of it is unknown, and no
        space is added."""
        return self._inner.normalizer is None and not self.has_unknown and self._encoded_bytes("a") == b"a"

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """Bytes per token, `(V,)` int32."""
        return np.array([len(b) for b in self.token_bytes], np.int32)


def published_tokenizer(inner: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path, remedy: str) -> Tokenizer:
    """Return a published tokenizer that was read from a file. Raises `UserError` with the file's path and the remedy if
    it cannot be used."""
    try:
        tokenizer = Tokenizer(inner, config=config)
        tokenizer.check_round_trip()
    except ValueError as error:
        raise UserError(f"{path} {error}; {remedy}.") from error
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise UserError(f"{path} cannot encode every text ({foreign(error)}); {remedy}.") from error
    return tokenizer


def is_library_error(error: BaseException) -> bool:
    """Return True for an error of the library: a bare exception, or a panic, which is no `Exception`."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _read_config(file: Path) -> dict[str, Any]:
    """Return the object in a file beside a tokenizer, or {} without the file. Raises `UserError` for anything else."""
    if not file.is_file():
        return {}
    try:
        if isinstance(config := parse_json(file.read_bytes()), dict):
            return config
        raise ValueError("it is none")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a readable JSON object ({error}); restore it.") from error


def _with_options(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the options that its class in transformers takes from the config, whatever its file has.
    Raises `ValueError` for one that cannot be set."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    options = {option: config.get(option) for option in (PREFIX_SPACE, *(name for name, _ in BERT_OPTIONS.values()))}
    if wrong := [f"{name} is {abbreviate(x)}" for name, x in options.items() if not isinstance(x, bool | None)]:
        raise ValueError(f"{wrong[0]}, not true or false")
    parts = {part: getattr(inner, part) for part in ("normalizer", "pre_tokenizer")}
    form = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    before = json.dumps(form)
    for step in [step for part in form.values() if part is not None for step in _flat(part)]:
        adds_space = step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never"
        if kind in OF_BERT and step["type"] == "BertNormalizer":
            given = {name: options[option] for name, (option, _) in BERT_OPTIONS.items()}
            step |= {name: BERT_OPTIONS[name][1] if x is None else x for name, x in given.items()}
        elif kind in BYTE_LEVEL and step["type"] == "ByteLevel":
            step["add_prefix_space"] = bool(options[PREFIX_SPACE])
        elif kind == "LlamaTokenizer" and adds_space and options[PREFIX_SPACE] is False:
            raise ValueError(f"{PREFIX_SPACE} is false, but its tokenizer.json puts a space before a text")
    unchanged = json.dumps(form) == before
    return inner if unchanged else tokenizers.Tokenizer.from_str(json.dumps(json.loads(inner.to_str()) | form))


def _read_templates(folder: Path) -> dict[str, Any]:
    """Return the chat templates that have files of their own, in a config; {} without any. Raises `UserError` if one
    cannot be read."""
    files = {"default": folder / CHAT_TEMPLATE} | {file.stem: file for file in sorted(folder.glob(MORE_TEMPLATES))}
    templates = []
    for name, file in files.items():
        try:
            if file.is_file():
                templates.append({"name": name, "template": file.read_text(encoding="utf-8")})
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not a readable chat template ({error}); restore it.") from error
    if [template["name"] for template in templates] == ["default"]:
        return {"chat_template": templates[0]["template"]}
    return {"chat_template": templates} if templates else {}


def _add_tokens(inner: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    """Add the tokens to a tokenizer that only its config has, as transformers does; return the config without those
    that it does not name."""
    lists = ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")
    added, *more = (config.get(key) or [] for key in lists)
    inner.add_tokens([tokenizers.AddedToken(**added[i]) for i in sorted(added, key=int)])
    unnamed: Any = next(filter(None, more), [])
    named = _named_tokens(config)
    if inner.token_to_id(_content(named.get("eos_token")) or "") is None:
        named.pop("eos_token", None)  # a new token would have ended no text
    values = [*named.values(), *(unnamed.values() if isinstance(unnamed, dict) else unnamed)]
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    for value in values:
        if (text := _content(value)) is not None and text not in known:
            flags = {k: v for k, v in value.items() if k in ("lstrip", "rstrip")} if isinstance(value, dict) else {}
            inner.add_special_tokens([tokenizers.AddedToken(text, normalized=False, **flags)])
    config = (_named_tokens(unnamed) if isinstance(unnamed, dict) else {}) | config
    return {key: value for key, value in config.items() if key not in lists}


def named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in a `tokenizer_config.json` by name, of which a single one is named default; without
    what is no template."""
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
    named = source if isinstance(source, dict) else {"default": source}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens in a config by their names, such as `eos_token`."""
    return {key: value for key, value in config.items() if key.endswith("_token") and not key.startswith("add_")}


def _content(token: object) -> str | None:
    """Return the text of a token in a config; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def find_tokenizer(path: str) -> Path:
    """Return the path of a tokenizer's file, given the file or its folder."""
    location = locate(path, "a tokenizer.json or its folder")
    return location / "tokenizer.json" if location.is_dir() else location


def _steps(component: object) -> list[dict[str, Any]]:
    """Return the steps of a decoder, normalizer, pre-tokenizer or post-processor, with sequences flattened."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))  # type: ignore[arg-type]


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for value in step.values() if isinstance(value, list) for part in value for inner in _flat(part)]


def _types(component: object) -> str:
    """Return the types of a component's steps, such as "WhitespaceSplit, ByteLevel"."""
    return ", ".join(step["type"] for step in _steps(component)) or "none"


def _is_plain(step: Mapping[str, Any]) -> bool:
    """Return True if a step of a decoder is one of those that `token_bytes` and `_strips_space` stand for."""
    kind, settings = step["type"], {name: value for name, value in step.items() if name != "type"}
    return kind in ("ByteLevel", "ByteFallback", "Fuse") or settings in (
        SHOWN,
        {"pattern": {"String": SPACE}, "content": " "},  # Replace
        {"content": " ", "start": 1, "stop": 0},  # Strip
        *({"replacement": SPACE, "prepend_scheme": s, "split": x} for s in SCHEMES for x in (True, False)),  # Metaspace
    )


def _removes(step: Mapping[str, Any]) -> bool:
    """Return True if a step of a pre-tokenizer removes what it splits at; an inverted one is left to the probe."""
    splits = step.get("behavior") == "Removed" and not step.get("invert")
    return splits or step["type"] in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")


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
    return bytes([int(byte[1], 16)]) if byte else piece.removeprefix(HIDDEN).replace(SPACE, " ").encode()


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
