"""Marian's tokenizers: two SentencePiece models, of sources and of targets, and the ids that both have in common.

A SentencePiece model is a message of protocol buffers (`sentencepiece_model.proto`): pieces with their scores, and what
is done to a text before. Of a message, only the fields needed here are read.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.data.tokenizer import HIDDEN, SPACE, TARGET_TOKENIZER, TOKENIZER_CONFIG, Tokenizer, published_tokenizer
from jaxformer.errors import UserError, parse_json

warn = logging.getLogger(__name__).warning
SOURCE_PIECES, TARGET_PIECES, IDS = "source.spm", "target.spm", "vocab.json"
UNIGRAM, NORMAL = 1, 1
"""Types of a model and of a piece."""
SPECIAL = ("<unk>", "</s>", "<pad>")
"""Special tokens of Marian, the second of which ends a text."""
REMEDY = "restore the published one"


class Pieces(NamedTuple):
    """Content of a SentencePiece model."""

    scores: Mapping[str, float]
    """Log-probability of each normal piece."""
    character_map: bytes
    """Compiled map of the characters of a text."""
    strips_spaces: bool
    """True if spaces at the ends of a text are removed, and of several spaces all but one."""


def load_marian_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder of Marian. Raises `UserError` if a file is missing or corrupt, or has another
    kind of model."""
    if (folder / "target_vocab.json").exists():
        raise UserError(f"{folder} has another vocabulary for targets, which is not supported; use a model with one.")
    try:
        ids = parse_json((folder / IDS).read_bytes())
        names = {i: name for name, i in ids.items()}
        if sorted(names) != list(range(len(ids))) or any(name not in ids for name in SPECIAL):
            raise ValueError(f"it must map pieces, {', '.join(SPECIAL)} among them, to 0, 1, 2, …")
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise UserError(f"{folder / IDS} is not a readable vocabulary ({error}); {REMEDY}.") from error
    pieces = [names[i] for i in range(len(ids))]
    source, target = (_build(pieces, read_pieces(folder / name), name) for name in (SOURCE_PIECES, TARGET_PIECES))
    config: dict[str, Any] = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if (own := folder / TOKENIZER_CONFIG).exists() and (languages := parse_json(own.read_bytes())):
        config |= {name: languages[name] for name in ("source_lang", "target_lang") if name in languages}
    if source.to_str() != target.to_str():
        config[TARGET_TOKENIZER] = target.to_str()
    return published_tokenizer(source, config, folder / SOURCE_PIECES, REMEDY)


def _build(names: list[str], pieces: Pieces, file: str) -> tokenizers.Tokenizer:
    """Return a tokenizer with an id for each of `names`, of which a text has only the `pieces`."""
    if missing := pieces.scores.keys() - set(names):
        warn(f"{len(missing)} pieces of {file} are not in {IDS}; without them, rare texts have other tokens.")
    # Codes of languages, such as >>fra<<, precede a text of models for several.
    codes = [name for name in names if name.startswith(">>") and name.endswith("<<")]
    shown = {*pieces.scores, *SPECIAL, *codes}
    vocabulary = [(name if name in shown else HIDDEN + name, pieces.scores.get(name, 0.0)) for name in names]
    inner = tokenizers.Tokenizer(models.Unigram(vocabulary, names.index("<unk>"), byte_fallback=False))
    steps: list[Any] = [normalizers.Replace(HIDDEN, "")]
    steps += [normalizers.Precompiled(pieces.character_map)] if pieces.character_map else []
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()] if pieces.strips_spaces else []
    inner.normalizer = normalizers.Sequence(steps)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace(HIDDEN, ""), decoders.Metaspace(SPACE, prepend_scheme="always", split=False)]
    )
    inner.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", names.index("</s>"))])
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    inner.add_tokens([AddedToken(name, normalized=False) for name in codes])
    return inner


def read_pieces(file: Path) -> Pieces:
    """Return the content of a SentencePiece model. Raises `UserError` if the file cannot be read, or is no Unigram
    model."""
    scores, kind, normalizer = dict[str, float](), UNIGRAM, dict[int, Any]()
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                piece = {1: b"", 2: b"\0\0\0\0", 3: NORMAL, **dict(_fields(value))}
                if piece[3] == NORMAL:
                    (scores[piece[1].decode()],) = struct.unpack("<f", piece[2])
            elif number == 2:
                kind = dict(_fields(value)).get(3, UNIGRAM)
            elif number == 3:
                normalizer = dict(_fields(value))
    except (ValueError, IndexError, TypeError, AttributeError, struct.error, OSError) as error:
        raise UserError(f"{file} is not a readable SentencePiece model ({error}); {REMEDY}.") from error
    if kind != UNIGRAM or not scores:
        raise UserError(f"{file} is no Unigram model, and other kinds are not supported; {REMEDY}.")
    return Pieces(scores, normalizer.get(2, b""), bool(normalizer.get(4, True)))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a message of protocol buffers: an integer, or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 2: varint() if wire == 2 else 0, 5: 4}.get(wire)
        if size is None or position + size > len(message):
            raise ValueError(f"field {number} is cut off or of an unknown type")
        yield number, message[position : position + size]
        position += size
