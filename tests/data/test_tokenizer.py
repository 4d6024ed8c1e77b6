"""Tokenizers, trained and published."""

import json
import re
from unittest import mock

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.data import text as text_module
from jaxformer.data import tokenizer as module
from jaxformer.data.tokenizer import END_IDS, END_OF_TEXT, TOKENIZER_CONFIG, StreamDecoder, Tokenizer
from jaxformer.errors import UserError

TEXT = "the cat sat on the mat, the rat sat on the cat; ça và? 日本語 🙂 " * 5


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 280)


def test_encode_decode_round_trips(tokenizer):
    draw = np.random.default_rng(0)
    for end in (0x80, 0x300, 0xD800, 0x110000):  # ASCII, two bytes, three, and all but surrogates
        codes = draw.integers(end, size=(50, 9))
        for row in np.where((codes >= 0xD800) & (codes < 0xE000), 0, codes).tolist():
            text = "".join(map(chr, row))
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("")) == ""


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


@pytest.mark.parametrize("content", [None, '{"version": "1.0"}'])
def test_invalid_tokenizer_file_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"t\.json is not a readable tokenizer.*; give the tokenizer\.json of a run or"):
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
    monkeypatch.setattr(module, "MAX_TRAINING_CHARACTERS", sum(map(len, texts)) // 3)
    assert Tokenizer.train(texts, 290).one_in in (4, 8)


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


def byte_level(normalizer=None, add_prefix_space=False):
    """Return a tokenizer of the form of Llama 3 or, with NFC, of Qwen; its vocabulary has a gap."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # of GPT-2
    if not add_prefix_space:
        regex = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        inner.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator([TEXT], trainer)
    inner.normalizer = normalizer
    return with_begin(inner, "<|begin_of_text|>")


def with_begin(inner, token):
    """Add a post-processor that puts a token before a text, truncation and padding."""
    begin = inner.token_to_id(token)
    inner.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, begin)])
    inner.enable_truncation(4)
    inner.enable_padding(length=40, pad_id=begin, pad_token=token)
    return inner


BYTES = [f"<0x{i:02X}>" for i in range(256)]


def sentencepiece_bpe():
    """Return a tokenizer of the form of Llama 2: a space before the text, spaces as ▁, no pre-tokenizer."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("c", "at"), ("a", "t"), ("▁", "cat"), ("▁", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", *"thecason\n", *("".join(m) for m in merges)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    ordered = [merges[i] for i in (0, 1, 2, 4, 3, 5, 6)]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, ordered, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return with_begin(inner, "<s>")


def sentencepiece_unigram():
    """Return a tokenizer of the form of newer SentencePiece models: Metaspace, and NFKC."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁the", -2.0), ("▁", -3.0), ("c", -4.0), ("at", -3.0)]
    inner = tokenizers.Tokenizer(models.Unigram([*pieces, *((byte, -20.0) for byte in BYTES)], 0, byte_fallback=True))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return with_begin(inner, "<s>")


PUBLISHED = {
    "byte-level": (byte_level, False),
    "byte-level, NFC": (lambda: byte_level(normalizers.NFC()), False),
    "byte-level, space": (lambda: byte_level(add_prefix_space=True), True),
    "SentencePiece BPE": (sentencepiece_bpe, True),
    "SentencePiece unigram": (sentencepiece_unigram, True),
}
"""Published forms of tokenizers, and whether they put a space before a text."""


def publish(folder, make, config=None):
    """Write a tokenizer as it is published; return its path."""
    make().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("form", PUBLISHED)
def test_published_tokenizer_has_the_bytes_of_the_text_and_no_special_tokens(tmp_path, form):
    make, adds_space = PUBLISHED[form]
    tokenizer = Tokenizer.load(publish(tmp_path, make))
    text = f"the cat sat, ça và? 日本 🙂\n\nthe  cat {'' if 'unigram' in form else '<s>'} " * 9
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes[t] for t in tokens) == (b" " if adds_space else b"") + text.encode()
    assert tokenizer.doubles_space == (form == "SentencePiece BPE")
    assert tokenizer.is_lossless == (form == "byte-level")
    assert tokenizer.encode_batch([text]) == [tokens] and len(tokens) > 40  # neither truncated nor padded
    reference = make()
    reference.no_truncation()
    reference.no_padding()
    ids = reference.encode(text.replace("<s>", "")).ids
    assert ids == [tokenizer.begin_of_text, *tokenizer.encode(text.replace("<s>", ""))]  # the reference's own BOS
    assert ids == tokenizer.encode_prompt(text.replace("<s>", ""))
    assert reference.id_to_token(tokenizer.begin_of_text) in ("<s>", "<|begin_of_text|>")
    assert reference.id_to_token(tokenizer.end_of_text) in ("</s>", "<|end_of_text|>")
    assert tokenizer.vocab_size == reference.get_vocab_size() == len(tokenizer.token_bytes)
    assert tokenizer.token_lengths[[tokenizer.begin_of_text, tokenizer.end_of_text]].tolist() == [0, 0]
    with mock.patch.object(text_module, "PIECE_CHARACTERS", 30):
        pieces = list(text_module.cut([text]))
    removed = [piece.removeprefix(" ") if i and tokenizer.doubles_space else piece for i, piece in enumerate(pieces)]
    assert len(pieces) > 9 and [t for ids in tokenizer.encode_batch(removed) for t in ids] == tokens


def test_config_beside_a_tokenizer_names_its_special_tokens(tmp_path):
    (tmp_path / "other").mkdir()
    config = {"eos_token": {"content": "<|begin_of_text|>"}, "bos_token": "<|end_of_text|>", "chat_template": "{{ x }}"}
    named = Tokenizer.load(publish(tmp_path, byte_level, config))
    assert (named.begin_of_text, named.end_of_text) == (1, 0)
    named.save(tmp_path / "other/tokenizer.json")
    again = Tokenizer.load(tmp_path / "other/tokenizer.json")
    assert (again.begin_of_text, again.end_of_text, again.config) == (1, 0, config)
    assert again.files("t") == named.files("t")
    without = Tokenizer.load(publish(tmp_path, byte_level, {"bos_token": "<|begin_of_text|>", "add_bos_token": False}))
    assert (without.begin_of_text, without.end_of_text) == (None, 1)
    assert without.encode_prompt("the") == without.encode("the")
    same = Tokenizer.load(publish(tmp_path, byte_level, {"eos_token": "<|begin_of_text|>", "bos_token": None}))
    assert (same.begin_of_text, same.end_of_text) == (None, 0)


def test_ids_without_a_token_have_no_bytes(tmp_path):
    content = json.loads(byte_level().to_str())
    content["model"]["vocab"]["ĠĠĠĠ"] = 400
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.vocab_size == 401 and tokenizer.token_bytes[399:] == [b"", b"    "]


def word_piece():
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


def without(inner, *removed):
    """Return a BPE tokenizer without some of its tokens, and without merges."""
    content = json.loads(inner.to_str())
    content["model"]["merges"] = []
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if k not in removed and v < 259}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in removed]
    content["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize(("make", "config", "message"), [
    (word_piece, None, r"is a WordPiece whose decoder has Metaspace, neither byte-level, nor with a fallback"),
    (lambda: without(byte_level(), "<|end_of_text|>"), None, r"has no end-of-text token <\|endoftext\|> or <"),
    (byte_level, {"eos_token": "<eot>"}, "has no end-of-text token <eot>; see eos_token in its tokenizer_config.json"),
    (byte_level, {END_IDS: [1, 999]}, "has no token 1, 999, which the model's config names"),
    (lambda: without(sentencepiece_bpe(), "<0xE2>"), None, "has no token for the byte 0xe2, which its fallback needs"),
    (byte_level, [3], "tokenizer_config.json is not a readable JSON object"),
])  # fmt: skip
def test_published_tokenizer_of_another_kind_is_refused(tmp_path, make, config, message):
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}.* ?{message}"):
        Tokenizer.load(publish(tmp_path, make, config))


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_bytes_that_a_published_tokenizer_lacks_are_refused_in_texts_only(tmp_path, normalizer):
    tokenizer = Tokenizer.load(publish(tmp_path, lambda: without(byte_level(normalizer), "Ć", "ĩ")))
    assert tokenizer.missing_bytes == b"\x06\x87"
    assert tokenizer.decode(tokenizer.encode("ça và\x05")) == "ça và\x05"
    with pytest.raises(UserError, match=r"has no token for the byte 0x06 of '\\x06', character 2 of the text; remove"):
        tokenizer.encode_batch(["fine", "é \x06"])
    with pytest.raises(UserError, match=r"0x87 of 'Ç', character 1 of the text"):
        tokenizer.encode("éÇ")
    decomposed = "C\u0327"  # which NFC composes
    if normalizer is None:
        assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed
    else:
        with pytest.raises(UserError, match=r"0x87 of 'Ç', character 0 of the text"):
            tokenizer.encode_with_special([decomposed])


def test_byte_level_token_that_is_no_byte_is_refused(tmp_path):
    content = json.loads(byte_level().to_str())
    content["model"]["vocab"]["日"] = 400
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has a byte-level decoder and a token with '日', which is not a byte"):
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
