"""Tokenizers, trained and published."""

import json
import re
from collections import Counter
from functools import partial
from unittest import mock

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.data import text as text_module
from jaxformer.data import tokenizer as module
from jaxformer.data.tokenizer import END_IDS, END_OF_TEXT, TOKENIZER_CONFIG, StreamDecoder, Tokenizer
from jaxformer.errors import UserError
from tests.data.drawn_tokenizers import draw
from tests.data.unigram import ALBERT, T5, TEXTS, XLM_R, unigram

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
    text = "the cat sat, ça và? 日本 🙂\n\nthe  cat <s> " * 9
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


def test_unigram_tokenizer_without_bytes_has_one_token_for_what_it_lacks_and_special_tokens_are_text(tmp_path):
    path = publish(tmp_path, unigram, {"mask_token": "<mask>"})
    tokenizer, reference = Tokenizer.load(path), tokenizers.Tokenizer.from_file(str(path))
    text = "The cat\tsees   the ﬁsh, ça va 日本!\n"  # of these, T, and 日本! are unknown
    ids = reference.encode(text).ids
    assert [*tokenizer.before_text, *tokenizer.encode(text), *tokenizer.after_text] == ids
    assert ids == [0, *tokenizer.encode_batch([text])[0], 2] and ids.count(3) == 2
    assert tokenizer.decode(ids).strip() == "he cat sees the fish, ça va" and tokenizer.encode(
        "fish"
    ) == tokenizer.encode("ﬁsh")
    assert tokenizer.has_unknown and not tokenizer.is_lossless and tokenizer.missing_bytes == b""
    tokenizer.save(tmp_path / "again.json")
    again = Tokenizer.load(tmp_path / "again.json")
    assert again.as_json() == tokenizer.as_json() and again.encode(text) == ids[1:-1]
    text = "the <mask> cat</s>"
    assert {2, 4}.isdisjoint(tokenizer.encode(text)) and {2, 4} <= {*reference.encode(text).ids[:-1]}
    masked = tokenizer.encode_masked(text)
    assert masked[:3] == reference.encode("the <mask> cat").ids[1:4] and 4 in masked and 2 not in masked


@pytest.mark.slow
@pytest.mark.parametrize(("special", "kind"), [(XLM_R, "XLMRoberta"), (ALBERT, "Albert"), (T5, "T5")])
def test_unigram_tokenizers_have_the_tokens_of_their_classes_in_transformers(tmp_path, special, kind):
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": f"{kind}Tokenizer", "extra_ids": 0} | (
        {} if special == T5 else {"mask_token": {"content": special[-1], "lstrip": True, "__type": "AddedToken"}}
    )
    ours = Tokenizer.load(publish(tmp_path, lambda: unigram(special), config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS[:3], *DRAWN_TEXTS, "ﬁsh　Ⓐ\tthe NAÏVE 日", "the cat the " * 30]:
        tokens = [*ours.before_text, *ours.encode(text), *ours.after_text]
        assert tokens == theirs(text).input_ids, text
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True), text
    if special != T5:
        text = f"the {special[-1]} sees {special[-1]}."
        assert ours.encode_masked(text) == theirs(text, add_special_tokens=False).input_ids


def test_config_beside_a_tokenizer_names_its_special_tokens(tmp_path):
    (tmp_path / "other").mkdir()
    config = {"eos_token": {"content": "<|begin_of_text|>"}, "bos_token": "<|end_of_text|>", "chat_template": "{{ x }}"}
    named = Tokenizer.load(publish(tmp_path, byte_level, config))
    assert (named.before_text, named.begin_of_text, named.end_of_text) == ([0], None, 0)  # by the post-processor
    assert named.encode_prompt("the") == [0, *named.encode("the")]
    named.save(tmp_path / "other/tokenizer.json")
    again = Tokenizer.load(tmp_path / "other/tokenizer.json")
    assert (again.begin_of_text, again.end_of_text, again.config) == (None, 0, config)
    assert again.files("t") == named.files("t")
    ignored = {"bos_token": "<|begin_of_text|>", "add_bos_token": False}  # beside a tokenizer.json
    assert Tokenizer.load(publish(tmp_path, byte_level, ignored)).begin_of_text == 0


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


DRAWN_TEXTS = [
    "the cat", "The king's  12 cats,\n\nsat.  é 日本 🙂", " the  cat sat on", "a", "",
    "do not sat ! , <x> <e1>x", "xcat sat on the",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 60))
def test_drawn_tokenizers_have_the_tokens_and_texts_of_transformers_or_are_refused(tmp_path, first):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    kinds, refused = Counter(), Counter()
    for seed in range(first, first + 60):
        kind = draw(tmp_path, seed)
        try:
            ours = Tokenizer.load(tmp_path / "tokenizer.json")
        except UserError as error:
            assert str(error).count("\n") == 0 and "tokenizer" in str(error)
            refused[kind] += 1
            continue
        kinds[kind] += 1
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["model"].pop("dropout", None)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        normalizer, missing = ours._inner.normalizer, ours.missing_bytes
        for text in [text for text in DRAWN_TEXTS if not {*text.encode()} & {*missing}]:
            tokens, where = ours.encode(text), (seed, kind, text)
            plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
            assert tokens == ours.encode(text) == plain, where
            around = theirs(text, split_special_tokens=True).input_ids
            assert [*ours.before_text, *tokens, *ours.after_text] == around, where
            decoded, reference = ours.decode(tokens), theirs.decode(tokens, skip_special_tokens=True)
            normalized = text if normalizer is None else normalizer.normalize_str(text)
            # Bytes are given back even where the library drops further spaces at the beginning, or cleans up.
            assert decoded.strip() == reference.strip() or (
                kind != "WordPiece" and decoded.strip() in (text, normalized)
            ), where
        text = "the <s>cat </s> sat<|im_end|> [SEP] <mask> <e1><dec>"
        tokens = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_with_special([text])[0][0] == tokens, (seed, kind)
        ours.save(tmp_path / "tokenizer.json")
        assert Tokenizer.load(tmp_path / "tokenizer.json").encode_with_special([text])[0][0] == tokens, (seed, kind)
    assert set(kinds) == {"byte-level", "fallback", "unigram", "WordPiece"} and set(refused) == {*kinds, "WordLevel"}
    assert kinds.total() >= 15, (kinds, refused)


def with_parts(inner, **parts):
    """Return a tokenizer with some parts of its JSON replaced; those of its model are merged into it."""
    content = json.loads(inner.to_str())
    model = content["model"] | parts.pop("model", {})
    return tokenizers.Tokenizer.from_str(json.dumps(content | parts | {"model": model}))


def split_byte_level(*steps):
    return with_parts(byte_level(), pre_tokenizer={"type": "Sequence", "pretokenizers": [
        *(json.loads(step.__getstate__()) for step in steps),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]})  # fmt: skip


def template(single, **ids):
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*ids.items()])
    return inner


REMOVES = "has a pre-tokenizer that removes parts of a text, {'type': "


@pytest.mark.parametrize(("make", "message"), [
    (lambda: split_byte_level(pre_tokenizers.WhitespaceSplit()), REMOVES + "'WhitespaceSplit'"),
    (lambda: split_byte_level(pre_tokenizers.Whitespace()), REMOVES + "'Whitespace'"),
    (lambda: split_byte_level(pre_tokenizers.Punctuation("removed")), REMOVES + "'Punctuation'"),
    (lambda: split_byte_level(pre_tokenizers.Split("\x07", "removed")), REMOVES + "'Split'"),
    (lambda: split_byte_level(pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "removed", invert=True)),
     "turns \"The king's  \" into 'Thekings"),
    (lambda: with_parts(byte_level(), model={"end_of_word_suffix": "</w>", "merges": []}),
     "(model BPE, end_of_word_suffix '</w>', normalizer none, pre-tokenizer Split, ByteLevel, post-processor"),
    (lambda: with_parts(byte_level(), decoder={"type": "Sequence", "decoders": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Strip", "content": "x", "start": 1, "stop": 0},
    ]}), "has a decoder that changes a text, {'type': 'Strip'"),
    (lambda: with_parts(sentencepiece_bpe(), model={"byte_fallback": False, "unk_token": None}),
     "turns '▁The▁king' into"),
    (lambda: with_parts(byte_level(), added_tokens=[*json.loads(byte_level().to_str())["added_tokens"], {
        "id": 290, "content": "king", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False,
        "special": False}]), "decoder ByteLevel, added token 'king' that strips spaces)"),
    (lambda: template("$A x", x=7), "puts nothing before a text and & after it (TemplateProcessing); supported are"),
    (lambda: template("x x $A", x=0), "puts <|begin_of_text|> <|begin_of_text|> before a text and nothing after it"),
    (lambda: template("x $A", x=999), "has no token 999, which its post-processor (TemplateProcessing) adds to a text"),
    (lambda: template("$A $A"), r"turns '\n\nEnd' into " + '"' + r"\n\nEndThe king'"),
    (lambda: with_parts(without(byte_level(), "a"), model={"unk_token": "<none>"}),
     "cannot encode every text (Unk token '<none>' not found in the vocabulary)"),
    (lambda: with_parts(without(byte_level()), model={"type": "WordLevel", "unk_token": "Ġ"}),
     "is a WordLevel whose decoder has ByteLevel, neither byte-level, nor"),
])  # fmt: skip
def test_tokenizers_that_change_a_text_are_refused_by_the_part(tmp_path, make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Tokenizer.load(publish(tmp_path, make))


def test_tokens_that_a_tokenizer_appends_are_no_begin_of_text(tmp_path):
    """Check the tokens of a text by the reference, whose post-processor appends one that the config may name or not."""
    inner = template("$A x", x=1)
    inner.no_truncation()
    inner.no_padding()
    tokenizer = Tokenizer.load(publish(tmp_path, lambda: inner))
    assert (tokenizer.before_text, tokenizer.after_text, tokenizer.begin_of_text) == ([], [1], None)
    assert [*tokenizer.encode_prompt("the"), *tokenizer.after_text] == inner.encode("the").ids
    with pytest.raises(UserError, match=r"puts nothing before a text and <\|end_of_text\|> after it"):
        Tokenizer.load(publish(tmp_path, lambda: inner, {"eos_token": "<|begin_of_text|>"}))


def test_dropout_is_turned_off(tmp_path):
    with_dropout = with_parts(byte_level(), model={"dropout": 0.5})
    tokenizer = Tokenizer.load(publish(tmp_path, lambda: with_dropout))
    assert tokenizer.encode(TEXT) == tokenizer.encode(TEXT) == Tokenizer(byte_level()).encode(TEXT)
    assert json.loads(tokenizer.as_json())["model"]["dropout"] is None


def bert(**normalizer):
    inner = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(**normalizer), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[UNK]", "[SEP]"])
    return inner


def gpt2(add_prefix_space):
    step = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    return with_parts(byte_level(), pre_tokenizer=step, truncation=None, padding=None)


WORDS = ["[UNK]", "[SEP]", "the", "The", "été", "ete", "日", "日本"]


@pytest.mark.parametrize(
    ("make", "config", "same"),
    [
        (bert, {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False}, lambda: bert(lowercase=False)),
        (partial(bert, lowercase=False), {"tokenizer_class": "BertTokenizer"}, bert),
        (bert, {"tokenizer_class": "BertTokenizer", "strip_accents": False}, lambda: bert(strip_accents=False)),
        (
            bert, {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False},
            lambda: bert(handle_chinese_chars=False),
        ),
        (bert, {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, bert),
        (partial(gpt2, False), {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}, partial(gpt2, True)),
        (partial(gpt2, True), {"tokenizer_class": "GPT2TokenizerFast"}, partial(gpt2, False)),
        (partial(gpt2, True), {"add_prefix_space": False}, partial(gpt2, True)),
    ],
)  # fmt: skip
def test_options_that_a_class_of_transformers_takes_from_the_config_are_those_of_the_config(
    tmp_path, make, config, same
):
    tokenizer = Tokenizer.load(publish(tmp_path, make, config))
    text = "The été 日本 the"
    assert tokenizer.encode(text) == same().encode(text, add_special_tokens=False).ids


def test_a_space_before_a_text_that_the_config_excludes_is_refused(tmp_path):
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    with pytest.raises(
        UserError, match=r"add_prefix_space is false, but its tokenizer\.json puts a space before a text"
    ):
        Tokenizer.load(publish(tmp_path, sentencepiece_bpe, config))


def test_special_tokens_that_only_the_config_has_are_added(tmp_path):
    """Check markers of a conversation that a fine-tuning has added beside the tokenizer."""
    flags = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
    config = {"added_tokens_decoder": {"290": {"content": "<|im_start|>", **flags}}, "pad_token": "<pad>",
              "additional_special_tokens": ["<|im_end|>"], "eos_token": "<|end_of_text|>"}  # fmt: skip
    tokenizer = Tokenizer.load(publish(tmp_path, byte_level, config))
    assert tokenizer.vocab_size == 293 and tokenizer.special_texts[290] == "<|im_start|>"
    ids, _ = tokenizer.encode_with_special(["<|im_start|> a<|im_end|>"])[0]
    assert ids == [290, *tokenizer.encode("a"), 292]
    assert tokenizer.encode("<|im_end|>") == Tokenizer(byte_level()).encode("<|im_end|>")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|begin_of_text|>"}')
    assert Tokenizer.load(publish(tmp_path, byte_level, config)).end_of_text == 1  # superseded
    assert Tokenizer.load(publish(tmp_path, byte_level, {"eos_token": "<|end_of_text|>"})).end_of_text == 0


@pytest.mark.parametrize(("config", "message"), [
    ({"added_tokens_decoder": [3]}, "special tokens in an unknown form"),
    ({"added_tokens_decoder": {"x": {}}}, "special tokens in an unknown form"),
    ({"added_tokens_decoder": {"5": {"content": 3}}}, "special tokens in an unknown form"),
    ({"do_lower_case": "yes"}, "unknown form \\(do_lower_case is 'yes', not true or false\\)"),
    ({"extra_special_tokens": 3}, "special tokens in an unknown form"),
    ({END_IDS: "x"}, "which are no ids of tokens"),
    ({END_IDS: [True]}, "which are no ids of tokens"),
])  # fmt: skip
def test_configs_with_special_tokens_of_other_types_are_refused(tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        Tokenizer.load(publish(tmp_path, byte_level, config))


def test_a_panic_of_the_library_is_one_sentence(tmp_path, capfd):
    content = json.loads(byte_level().to_str())
    content["model"]["continuing_subword_prefix"] = "##"  # longer than tokens that are merged
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a readable tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    capfd.readouterr()  # the library's own lines
