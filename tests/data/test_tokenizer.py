"""Byte-level BPE."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.data import tokenizer as module
from jaxformer.data.tokenizer import END_OF_TEXT, StreamDecoder, Tokenizer
from jaxformer.errors import UserError

TEXT = "the cat sat on the mat, the rat sat on the cat; ça và? 日本語 🙂 " * 5


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 280)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_encode_decode_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_token_bytes_agree_with_the_library_decoder(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.token_bytes[t] for t in tokens) == TEXT.encode()
    assert tokenizer._inner.decode(tokens) == TEXT
    assert tokenizer.token_lengths.sum() == sum(len(b) for b in tokenizer.token_bytes)


def test_every_byte_is_a_token(tokenizer):
    assert {b for b in tokenizer.token_bytes if len(b) == 1} == {bytes([i]) for i in range(256)}
    assert tokenizer.token_bytes[tokenizer.end_of_text] == b""
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 280


def test_end_of_text_in_a_text_is_encoded_as_text(tokenizer):
    tokens = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in tokens
    assert tokenizer.decode(tokens) == f"a{END_OF_TEXT}b"


def test_encode_batch_equals_encode(tokenizer):
    texts = ["the cat", "", TEXT]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(t) for t in texts]


def test_saved_tokenizer_round_trips(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.end_of_text == tokenizer.end_of_text


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}'])
def test_invalid_tokenizer_file_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"t\.json is no tokenizer .*; put the run's tokenizer back, or train again\.$"):
        Tokenizer.load(tmp_path / "t.json")


def test_short_text_gives_a_smaller_vocabulary():
    tokenizer = Tokenizer.train(["abab"], 5000)
    assert tokenizer.vocab_size == 259  # ab, abab
    assert len(tokenizer.encode("abab")) == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_sample_does_not_depend_on_the_order_of_texts(monkeypatch, mixed):
    """Check texts of one distinct word each, in two languages; the limit allows a quarter of them."""
    texts = [f"{i}".join(["thethe" if text_model else "日本日本"] * 4) for text_model in (0, 1) for i in range(100)]
    monkeypatch.setattr(module, "MAX_LEARNED_CHARACTERS", sum(map(len, texts)) // 3)
    tokenizer = Tokenizer.train(texts[::2] + texts[1::2] if mixed else texts, 290)
    assert tokenizer.one_in in (4, 8)
    assert {b"thethe", "日本".encode()} <= set(tokenizer.token_bytes)
    monkeypatch.setattr(module, "MAX_LEARNED_CHARACTERS", sum(map(len, texts)))
    assert Tokenizer.train(texts, 290).one_in == 1


def test_training_on_an_iterator_equals_a_list():
    assert Tokenizer.train(iter(["abab", "cdcd"]), 300).as_json() == Tokenizer.train(["abab", "cdcd"], 300).as_json()


def test_training_on_a_single_large_text(monkeypatch):
    monkeypatch.setattr(module, "MAX_LEARNED_CHARACTERS", 1)
    assert Tokenizer.train(["abab"], 300).vocab_size == 259


@pytest.mark.parametrize(("text", "where"), [("\ud800", 0), ("ab\udfff", 2)])
def test_lone_surrogate_is_refused(tokenizer, text, where):
    message = rf"lone surrogate, U\+{ord(text[-1]):04X}, at character {where}"
    with pytest.raises(UserError, match=message):
        tokenizer.encode(text)
    with pytest.raises(UserError, match=message):
        tokenizer.encode_batch(["fine", text])


def test_vocabulary_below_257_is_refused():
    with pytest.raises(UserError, match="at least 257"):
        Tokenizer.train([TEXT], 256)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({END_OF_TEXT: 0, "a": 1, "b": 3}, "of 3 tokens, it has no token of id 2"),
        ({END_OF_TEXT: 0, "a": 1, "日": 2}, "of 3 tokens, it has a token with '日'"),
    ],
)
def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path, vocabulary, message):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.add_special_tokens([END_OF_TEXT])
    inner.save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path / "t.json")


def test_stream_decoder_emits_only_complete_characters(tokenizer):
    shown = [StreamDecoder(tokenizer)]
    pieces = [shown[0].feed([t]) for t in tokenizer.encode(TEXT)]
    assert "".join(pieces) + shown[0].end() == TEXT
    assert not any("�" in piece for piece in pieces)
    assert "" in pieces  # some tokens end in the middle of a character


def test_incomplete_character_becomes_a_replacement(tokenizer):
    byte = next(i for i, b in enumerate(tokenizer.token_bytes) if b == "é".encode()[:1])
    decoder = StreamDecoder(tokenizer)
    assert decoder.feed([byte]) == ""
    assert decoder.end() == "�"
