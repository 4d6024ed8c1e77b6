"""Tokens on disk."""

import os
import socket
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.data import corpus as module
from jaxformer.data.corpus import TextConfig, load_corpus
from jaxformer.errors import UserError


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(5):
        words = " ".join(f"word{i}{j % 7} the and of" for j in range(40))
        (tmp_path / "texts" / f"{i}.txt").write_text(words)
    return TextConfig(path=str(tmp_path / "texts"))


def test_documents_stand_between_end_of_text_tokens(config):
    corpus = load_corpus(config, 270)
    end = corpus.tokenizer.end_of_text
    for split in (corpus.train, corpus.val):
        assert split.tokens.dtype == np.uint16
        assert split.tokens[0] == split.tokens[-1] == end
        assert (split.tokens == end).sum() == split.documents + 1
        assert corpus.tokenizer.token_lengths[split.tokens].sum() == split.n_bytes
    assert corpus.train.documents + corpus.val.documents == 5


def test_the_tokenizer_learns_from_the_training_split_only(config, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "z.txt").write_text("zzzzzz " * 500)
    tokenizer = load_corpus(replace(config, val_path=str(tmp_path / "held")), 270).tokenizer
    assert not any(b"zz" in piece for piece in tokenizer.token_bytes)


def test_a_second_time_reads_what_the_first_wrote(config, monkeypatch):
    first = load_corpus(config, 270)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    second = load_corpus(config, 270)
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(second.train.tokens, first.train.tokens)
    assert isinstance(second.train.tokens, np.memmap)


def test_content_and_settings_change_the_fingerprint_and_names_do_not(config, tmp_path):
    before = load_corpus(config, 270).fingerprint
    assert load_corpus(config, 271).fingerprint != before
    (tmp_path / "texts" / "0.txt").rename(tmp_path / "texts" / "00.txt")
    assert load_corpus(config, 270).fingerprint == before
    (tmp_path / "texts" / "1.txt").write_text("something else, the and of")
    assert load_corpus(config, 270).fingerprint != before


def test_a_tokenizer_that_is_given_is_used_and_leaves_the_fingerprint_as_it_is(config, tmp_path):
    own = load_corpus(config, 270)
    (tmp_path / "texts" / "0.txt").write_text("something else entirely, and of it a lot. " * 9)
    learned, given = load_corpus(config, 270), load_corpus(config, 270, own.tokenizer)
    assert given.fingerprint == learned.fingerprint != own.fingerprint
    assert given.tokenizer.as_json() == own.tokenizer.as_json() != learned.tokenizer.as_json()
    assert given.tokenizer.decode(given.train.tokens) == learned.tokenizer.decode(learned.train.tokens)
    assert not np.array_equal(given.train.tokens, learned.train.tokens)


def test_what_a_killed_tokenization_left_is_removed_and_what_is_under_way_is_not(config, tmp_path):
    place = tmp_path / "cache" / "tokens"
    place.mkdir(parents=True)
    child = subprocess.Popen(["true"])
    child.wait()
    here = socket.gethostname()
    names = {
        "dead": f".building-{here}-{child.pid}-abc", "alive": f".building-{here}-{os.getpid()}-abc",
        "elsewhere": f".building-far-away-{child.pid}-abc", "unknown": ".building-abc", "old": ".building-xyz",
    }  # fmt: skip
    for name in names.values():
        (place / name).mkdir()
        (place / name / "train.npy").write_text("half")
    yesterday = time.time() - 25 * 60 * 60
    os.utime(place / names["old"], (yesterday, yesterday))
    load_corpus(config, 270)
    left = {name for name in names if (place / names[name]).exists()}
    assert left == {"alive", "elsewhere", "unknown"}


def test_a_failure_leaves_nothing_behind(config, tmp_path):
    with pytest.raises(UserError, match="supports only"):
        load_corpus(config, 5000)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="JAXFORMER_CACHE"):
        load_corpus(config, 270)
