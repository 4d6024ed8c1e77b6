"""Marian's two SentencePiece models: a small one of sources and one of targets, in the format of their library."""

import json
import struct
from pathlib import Path

import pytest

from jaxformer.data.pairs import encode_sources, encode_targets
from jaxformer.errors import UserError
from jaxformer.interop.sentencepiece import load_marian_tokenizer, read_pieces

NAMES = ["</s>", "<unk>", "▁the", "▁cat", "▁c", "a", "t", "▁", "▁chat", "h", "é", ">>fra<<", "<pad>"]
SOURCE = {"▁the": -2.0, "▁cat": -3.0, "▁c": -4.0, "a": -4.5, "t": -5.0, "▁": -5.5}
TARGET = {"▁chat": -2.0, "▁c": -3.5, "h": -4.0, "a": -4.5, "t": -5.0, "▁": -5.5}


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return varint(number * 8 + 5) + struct.pack("<f", value)
    content = varint(value) if isinstance(value, int) else varint(len(value)) + value
    return varint(number * 8 + 2 * isinstance(value, bytes)) + content


def write_pieces(file: Path, pieces: dict[str, float], kind: int = 1) -> None:
    """A model with its unknown token, what trained it, and what is done to a text: nothing to characters, but to
    spaces."""
    message = field(1, field(1, b"<unk>") + field(2, 0.0) + field(3, 2))
    message += b"".join(field(1, field(1, piece.encode()) + field(2, score)) for piece, score in pieces.items())
    file.write_bytes(message + field(2, field(3, kind) + field(4, 300)) + field(3, field(1, b"identity")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pieces(tmp_path / "source.spm", SOURCE)
    write_pieces(tmp_path / "target.spm", TARGET)
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(NAMES)}))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the cat", "▁the ▁cat </s>"),
        ("  the   cat ", "▁the ▁cat </s>"),
        ("chat", "▁c h a t </s>"),  # the target's h, which a source has as a text, but not its ▁chat
        ("zé é a</s>", "▁ <unk> ▁ é ▁ a <unk> </s>"),  # unknown parts are fused before they are looked up
        (">>fra<< cat", ">>fra<< ▁cat </s>"),
    ],
)
def test_sources_have_their_own_pieces_and_the_common_ids(folder: Path, text: str, pieces: str):
    assert encode_sources([text], load_marian_tokenizer(folder))[0] == list(map(NAMES.index, pieces.split()))


def test_targets_have_other_pieces_with_the_same_ids(folder: Path):
    tokenizer = load_marian_tokenizer(folder)
    [target] = encode_targets(["chat cat"], tokenizer)
    assert target == list(map(NAMES.index, ["▁chat", "▁c", "a", "t"]))
    assert tokenizer.decode([*target, 0]) == "chat cat"
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (0, len(NAMES))


def test_other_and_corrupt_files_are_refused(folder: Path):
    write_pieces(folder / "target.spm", TARGET, kind=2)
    with pytest.raises(UserError, match=r"target\.spm is no Unigram model"):
        load_marian_tokenizer(folder)
    for content in (b"", b"\x0a\xff", b"\x0a\x03\x0a\x05a", (folder / "source.spm").read_bytes()[:-3]):
        (folder / "source.spm").write_bytes(content)
        with pytest.raises(UserError, match=r"source\.spm is (no Unigram|not a readable SentencePiece) model"):
            read_pieces(folder / "source.spm")
    (folder / "vocab.json").write_text('{"</s>": 0, "<unk>": 2}')
    with pytest.raises(UserError, match=r"vocab\.json is not a readable vocabulary"):
        load_marian_tokenizer(folder)
