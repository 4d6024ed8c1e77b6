"""Tokenizers of GGUF files, against those of published folders that they were written from."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from jaxformer.data.tokenizer import END_IDS, Tokenizer, published_tokenizer
from jaxformer.interop.gguf_file import GgufFile
from jaxformer.interop.gguf_tokenizer import ALIASES, PRE_TYPES, pre_type, tokenizer_config, tokenizer_json
from tests.data.test_tokenizer import byte_level, sentencepiece_bpe
from tests.interop.gguf_files import random_model, write_gguf

TEXTS = [
    "", "a", "the cat sat on the mat", "two  spaces   three    four", "a\n\n\n\tline\r\n", "don't you'LL I'VE",
    "12345 6 ½ ²", "ça và 日本語 🙂", "a\u00a0b\u2028c", "<s> </s> <|end_of_text|>", "x=1;y=[22,333]!!??",
    "the cat\u0327",
]  # fmt: skip
LEADING = [" ", " the cat", "   the", "\n the"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def published_byte_level(name: str) -> tokenizers.Tokenizer:
    """Return a tokenizer with the splits of a published one."""
    inner = byte_level()
    (splits, ignore_merges), _ = next(item for item in PRE_TYPES.items() if item[1] == name)
    made = {
        "ByteLevel": lambda by_regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex),
        "Digits": pre_tokenizers.Digits,
        "Split": lambda regex: pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
    }
    inner.pre_tokenizer = pre_tokenizers.Sequence([made[kind](setting) for kind, setting in splits])
    inner.model.ignore_merges = ignore_merges
    inner.normalizer = normalizers.NFC() if name == "qwen2" else None
    return inner


def byte_level_keys(inner: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """Return the keys of a byte-level tokenizer, as llama.cpp's converter writes them."""
    content = json.loads(inner.to_str())
    vocab = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def sentencepiece_keys(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the keys of a SentencePiece tokenizer, with scores in the order of its merges."""
    content = json.loads(inner.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    ranks = {"".join(merge): -float(rank) for rank, merge in enumerate(content["merges"])}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | {t: BYTE for t in tokens if t.startswith("<0x")}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [ranks.get(token, -1000.0) for token in tokens],
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def read(keys: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of keys."""
    inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(keys)))
    return published_tokenizer(inner, tokenizer_config(keys), Path("x.gguf"), "give another")


@pytest.mark.parametrize("name", [*PRE_TYPES.values(), *ALIASES])
def test_byte_level_tokenizer_is_the_published_one(name: str):
    known = ALIASES.get(name, name)
    inner = published_byte_level(known)
    tokenizer, published = read(byte_level_keys(inner, name)), Tokenizer(inner)
    for text in [*TEXTS, *LEADING]:
        assert tokenizer.encode_prompt(text) == published.encode_prompt(text), text
    assert tokenizer.special_texts == published.special_texts
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (1, 0)
    assert pre_type(json.loads(tokenizer.as_json())) == known


def test_begin_of_text_is_as_llama_cpp_has_it_without_a_key():
    for name, begin in (("llama-bpe", 0), ("gpt-2", None)):
        keys = byte_level_keys(published_byte_level(name), name)
        del keys["tokenizer.ggml.add_bos_token"]
        assert read(keys).begin_of_text == begin
    assert read(sentencepiece_keys(sentencepiece_bpe())).begin_of_text == 1


def test_all_ends_of_a_text_and_the_chat_template_are_read():
    keys = byte_level_keys(published_byte_level("gpt-2"), "gpt-2")
    keys |= {"tokenizer.ggml.eot_token_id": 0, "tokenizer.chat_template": "{{ messages }}"}
    tokenizer = read(keys)
    assert tokenizer.ends_of_text == (1, 0) and tokenizer.config[END_IDS] == [1, 0]
    assert tokenizer.config["chat_template"] == "{{ messages }}"


def test_sentencepiece_tokenizer_is_the_published_one():
    inner = sentencepiece_bpe()
    tokenizer, published = read(sentencepiece_keys(inner)), Tokenizer(inner)
    for text in [*TEXTS, *LEADING]:
        assert tokenizer.encode_prompt(text) == published.encode_prompt(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == published.decode(published.encode(text))
    assert tokenizer.special_texts == published.special_texts


def gemma_keys() -> dict[str, Any]:
    """Return the keys of a tokenizer as Gemma's: spaces as such in runs, which are marked as whole, no space before a
    text, merges in the order of the pieces, and newlines that are matched first."""
    keys = sentencepiece_keys(sentencepiece_bpe())
    more = ["  ", "   ", "\n\n", "<end_of_turn>"]
    tokens = [token for token in keys["tokenizer.ggml.tokens"] if token != "▁▁"]
    kinds = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    return keys | {
        "general.architecture": "gemma3",
        "tokenizer.ggml.tokens": tokens + more,
        "tokenizer.ggml.token_type": [kinds[token] for token in tokens] + [USER_DEFINED] * 3 + [CONTROL],
        "tokenizer.ggml.scores": [0.0] * len(tokens + more),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eot_token_id": len(tokens) + 3,
    }


def test_gemmas_runs_of_spaces_are_merged_and_its_newlines_whole():
    tokenizer = read(gemma_keys())
    pieces = lambda text: [tokenizer.token_bytes[token].decode() for token in tokenizer.encode(text)]  # noqa: E731
    assert pieces("he  he   a") == ["he", "  ", "he", "   ", "a"]
    assert pieces("a\n\n\nb")[:3] == ["a", "\n\n", "\n"]
    assert pieces("\n  c") == ["\n", "  ", "c"]
    assert tokenizer.ends_of_text == (2, tokenizer.vocab_size - 1)
    for text in [*TEXTS, *LEADING]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


FORMS: dict[str, Any] = {
    "llama-bpe": lambda: ("llama", byte_level_keys(published_byte_level("llama-bpe"), "llama-bpe")),
    "qwen2": lambda: ("qwen2", byte_level_keys(published_byte_level("qwen2"), "qwen2")),
    "gpt-2": lambda: ("llama", byte_level_keys(published_byte_level("gpt-2"), "gpt-2")),
    "SentencePiece": lambda: ("llama", sentencepiece_keys(sentencepiece_bpe())),
    "Gemma": lambda: ("gemma3", gemma_keys()),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_tokens_equal_those_of_transformers(tmp_path: Path, form: str):
    transformers = pytest.importorskip("transformers")
    architecture, keys = FORMS[form]()
    keys = {"tokenizer.ggml.merges": None, "tokenizer.ggml.pre": None} | keys
    keys.pop("general.architecture", None)  # which the package writes
    file = write_gguf(tmp_path / "x.gguf", architecture, random_model(architecture).tensors, keys)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name).backend_tokenizer
    theirs.encode_special_tokens = True
    tokenizer = GgufFile.open(file).tokenizer()
    # transformers' Llama adds no space to a text that begins with one, unlike SentencePiece and the published folders;
    # it leaves out Qwen's normalizer, which those have.
    for text in TEXTS if form == "SentencePiece" else [*TEXTS, *LEADING]:
        if form != "qwen2" or "\u0327" not in text:
            assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
