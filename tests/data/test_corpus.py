"""Tokens on disk."""

from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import corpus as module
from jaxformer.data.corpus import load_corpus
from jaxformer.errors import UserError


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(5):
        words = " ".join(f"word{i}{j % 7} the and of" for j in range(40))
        (tmp_path / "texts" / f"{i}.txt").write_text(words)
    return DataConfig(path=str(tmp_path / "texts"))


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


def test_a_failure_leaves_nothing_behind(config, tmp_path):
    with pytest.raises(UserError, match="supports only"):
        load_corpus(config, 5000)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="JAXFORMER_CACHE"):
        load_corpus(config, 270)
