"""Encoding by words, beside the tokenizer's own."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxformer.data import word_encoder
from jaxformer.data.tokenizer import END_OF_TEXT, Tokenizer
from jaxformer.data.word_encoder import WordEncoder

TEXT = "it's  a cat,\n\na rat\tor   'three\u3000of 12  ça va \n 日本 we'll see: "
CHARACTERS = " \n\t\r\x1c\x85\xa0\u2028\u3000abs'12é日,<|>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT * 3], 320)  # with tokens of several spaces


@settings(deadline=None)
@given(batches=st.lists(st.lists(st.text(CHARACTERS, max_size=40) | st.just(TEXT), max_size=3), max_size=3))
def test_tokens_are_those_of_the_tokenizer(tokenizer, batches):
    encoder = WordEncoder(tokenizer)
    for texts in batches:
        assert encoder.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_words_are_encoded_once_and_forgotten_past_the_limit(tokenizer, monkeypatch):
    given_texts: list[list[str]] = []
    encode_batch = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: (given_texts.append(texts), encode_batch(texts))[1])
    encoder, text = WordEncoder(tokenizer), "a rat a cat a rat see"
    for limit in (100, 100, 5):
        monkeypatch.setattr(word_encoder, "MAX_CHARACTERS", limit)
        assert encoder.encode_batch([text]) == encode_batch([text])
    assert [sorted(new.split()) for new, *_ in given_texts] == [["a", "cat", "rat"], [], ["a", "cat", "rat"]]


def test_only_some_tokenizers_separate_words(tokenizer):
    def form(pre_tokenizer, normalizer=None, added=()):
        model = models.BPE({character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer, inner.normalizer, inner.decoder = pre_tokenizer, normalizer, decoders.ByteLevel()
        inner.add_special_tokens([END_OF_TEXT])
        inner.add_tokens(list(added))
        return Tokenizer(inner)

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.separates_words and form(plain).separates_words
    others = [
        form(None), form(pre_tokenizers.ByteLevel()), form(pre_tokenizers.ByteLevel(False, use_regex=False)),
        form(plain, normalizers.NFC()), form(plain, None, ["of the"]), form(pre_tokenizers.Sequence([plain])),
    ]  # fmt: skip
    assert not any(each.separates_words for each in others)
