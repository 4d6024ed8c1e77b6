"""Tokens of a text and their cache."""

import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.data import text as text_module
from jaxformer.data import tokenizer as tokenizer_module
from jaxformer.data import tokens as module
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.prefix import PrefixTextConfig
from jaxformer.data.text import read_documents
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokens import load_corpus, tokenize
from jaxformer.data.windows import TextConfig, pack_documents
from jaxformer.errors import UserError
from tests.arrays import plain_decoder
from tests.data.test_tokenizer import PUBLISHED, publish


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(5):
        words = " ".join(f"word{i}{j % 7} the and of" for j in range(40))
        (tmp_path / "texts" / f"{i}.txt").write_text(words)
    return TextConfig(path=str(tmp_path / "texts"))


def test_documents_are_delimited_by_end_of_text(config):
    corpus = load_corpus(config, 270)
    end = corpus.tokenizer.end_of_text
    for split in (corpus.train, corpus.val):
        assert split.tokens.dtype == np.uint16
        assert split.tokens[0] == split.tokens[-1] == end
        assert (split.tokens == end).sum() == split.documents + 1
        assert corpus.tokenizer.token_lengths[split.tokens].sum() == split.n_bytes
    assert corpus.train.documents + corpus.val.documents == 5


def test_tokenizer_is_trained_on_the_training_split_only(config, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "z.txt").write_text("zzzzzz " * 500)
    tokenizer = load_corpus(replace(config, val_path=str(tmp_path / "held")), 270).tokenizer
    assert not any(b"zz" in piece for piece in tokenizer.token_bytes)


def test_fingerprint_depends_on_content_and_settings_not_on_names(config, tmp_path):
    before = load_corpus(config, 270).fingerprint
    assert load_corpus(config, 271).fingerprint != before
    (tmp_path / "texts" / "0.txt").rename(tmp_path / "texts" / "00.txt")
    assert load_corpus(config, 270).fingerprint == before
    (tmp_path / "texts" / "1.txt").write_text("something else, the and of")
    assert load_corpus(config, 270).fingerprint != before


def test_given_tokenizer_is_used_and_keeps_the_fingerprint(config, tmp_path):
    own = load_corpus(config, 270)
    (tmp_path / "texts" / "0.txt").write_text("something else entirely, and of it a lot. " * 9)
    learned, given = load_corpus(config, 270), load_corpus(config, 270, own.tokenizer)
    assert given.fingerprint == learned.fingerprint != own.fingerprint
    assert given.tokenizer.as_json() == own.tokenizer.as_json() != learned.tokenizer.as_json()
    assert given.tokenizer.decode(given.train.tokens) == learned.tokenizer.decode(learned.train.tokens)
    assert not np.array_equal(given.train.tokens, learned.train.tokens)


def test_scratch_folders_of_killed_processes_are_removed(config, tmp_path):
    root = tmp_path / "cache" / "tokens"
    load_corpus(config, 270)
    (name,) = (path.name for path in root.iterdir() if path.is_dir())
    shutil.rmtree(root / name)
    names = {"of the same text": f".building-{name}-abc", "of another": ".building-abc", "old": ".building-xyz"}
    for folder in names.values():
        (root / folder).mkdir()
        (root / folder / "train.tokens").write_text("half")
    yesterday = time.time() - 25 * 60 * 60
    os.utime(root / names["old"], (yesterday, yesterday))
    load_corpus(config, 270)
    assert {name for name, folder in names.items() if (root / folder).exists()} == {"of another"}


def test_failed_tokenization_leaves_no_folder(config, tmp_path):
    with pytest.raises(UserError, match="at least 257"):
        load_corpus(config, 256)
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]


def test_second_load_reads_the_cache_and_the_fingerprint_uses_the_inferred_vocabulary(config, monkeypatch):
    """Check that a resumed run, which stores the smaller vocabulary, has the same fingerprint."""
    first = load_corpus(config, 50_000)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    assert 257 < first.tokenizer.vocab_size < 50_000
    for stored in (load_corpus(config, 50_000), load_corpus(config, first.tokenizer.vocab_size, first.tokenizer)):
        assert stored.fingerprint == first.fingerprint and isinstance(stored.train.tokens, np.memmap)
        np.testing.assert_array_equal(stored.train.tokens, first.train.tokens)


def test_validation_documents_are_left_out_of_training(config, tmp_path):
    texts = tmp_path / "texts"
    (tmp_path / "val.txt").write_text((texts / "1.txt").read_text() + "\n\n")  # the same once it is cleaned
    (texts / "again.txt").write_text((texts / "1.txt").read_text())
    held_out = replace(config, val_path=str(tmp_path / "val.txt"))
    for kind in (TextConfig, MaskedTextConfig, PrefixTextConfig):
        data = kind(held_out.path, held_out.val_path).load(plain_decoder(context_length=8, vocab_size=300), 2, 0)
        assert data.corpus.train.documents == 4
        note = f"2 document(s) of {texts} are excluded from training: {tmp_path / 'val.txt'} has the same text"
        assert data.notes[0] == note
    with pytest.raises(UserError, match=r"every document of `data.path` .* is in `data.val_path`"):
        load_corpus(replace(config, val_path=config.path), 270)


def test_notes_of_both_texts_are_those_of_the_data(config, tmp_path):
    val = tmp_path / "val"
    val.mkdir()
    (val / "a.txt").write_text("another text of the and of")
    for folder in (tmp_path / "texts", val):
        (folder / "b.md").write_text("another kind")
    data = replace(config, val_path=str(val)).load(plain_decoder(context_length=8, vocab_size=300), 2, 0)
    assert [note for note in data.notes if "are read" in note] == [
        f"5 file(s) of {tmp_path / 'texts'} are read (left out: 1 .md)",
        f"1 file(s) of {val} are read (left out: 1 .md)",
    ]


def test_note_about_a_tokenizer_sample_survives_the_cache(config, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_LEARNED_CHARACTERS", 120)
    notes = [config.load(plain_decoder(context_length=8, vocab_size=300), 2, 0).notes[-1] for _ in range(2)]
    assert notes[0] == notes[1] and re.search(
        r"the tokenizer was trained on about 1/[248] of .*texts, sampled", notes[0]
    )


def test_one_of_several_processes_rebuilds_a_corrupt_cache(config, tmp_path, monkeypatch, caplog):
    """Check four threads: removing a folder that another has rebuilt would make a third fail."""
    expected = np.array(load_corpus(config, 270).train.tokens)
    zero(next((tmp_path / "cache" / "tokens").glob("*/train.tokens")))
    builds, started, everyone = [], set(), threading.Barrier(4)
    build, read = module._build, module.read

    def messages(part):
        return [record for record in caplog.records if part in record.getMessage()]

    def build_while_others_wait(*arguments):
        builds.append(arguments)
        deadline = time.monotonic() + 300
        while len(messages("waiting for another process")) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        build(*arguments)

    def read_at_once(folder):
        try:
            return read(folder)
        finally:
            if (thread := threading.get_ident()) not in started:
                started.add(thread)
                everyone.wait(300)

    monkeypatch.setattr(module, "WARN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(module, "_build", build_while_others_wait)
    monkeypatch.setattr(module, "read", read_at_once)
    with ThreadPoolExecutor(4) as pool:
        for corpus in pool.map(lambda _: load_corpus(config, 270), range(4)):
            np.testing.assert_array_equal(corpus.train.tokens, expected)
    assert len(builds) == len(messages("tokenizing again")) == 1
    assert len(messages("waiting for another process")) == 3


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def substitute(file, old, new):
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("name", "corrupt_file"),
    [
        ("train.tokens", flip),
        ("val.tokens", lambda file: file.write_bytes(b"")),
        ("val.tokens", lambda file: file.unlink()),
        ("tokenizer.json", lambda file: Tokenizer.train(["something else"], 260).save(file)),
        ("tokenizer.json", lambda file: file.unlink()),
        ("manifest.json", lambda file: file.unlink()),
        ("manifest.json", lambda file: file.write_text("[1]")),
        ("manifest.json", lambda file: substitute(file, '"documents": ', '"documents": null, "": ')),
        ("manifest.json", lambda file: substitute(file, file.parent.name, "0" * 32)),
    ],
)  # fmt: skip
def test_corrupt_cache_is_rebuilt_with_one_warning(config, tmp_path, caplog, name, corrupt_file):
    first = load_corpus(config, 270)
    expected = np.array(first.train.tokens), np.array(first.val.tokens)
    (folder,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    corrupt_file(folder / name)
    second = load_corpus(config, 270)
    (record,) = caplog.records
    assert str(folder) in record.getMessage() and "tokenizing again" in record.getMessage()
    np.testing.assert_array_equal(second.train.tokens, expected[0])
    np.testing.assert_array_equal(second.val.tokens, expected[1])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_unwritable_cache_is_refused(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="JAXFORMER_CACHE"):
        load_corpus(config, 270)


def test_tokenized_documents_are_memory_mapped_and_equal_the_cache(config):
    corpus = load_corpus(replace(config, val_path=config.path + "/0.txt"), 270)
    tokens = tokenize(read_documents(config.path + "/0.txt", True), corpus.tokenizer)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, corpus.val.tokens)


@pytest.mark.parametrize("form", PUBLISHED)
def test_published_tokenizer_delimits_documents_once_and_counts_the_bytes_of_the_text(
    config, tmp_path, monkeypatch, form
):
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 4096)
    make, _ = PUBLISHED[form]
    (tmp_path / "published").mkdir()
    path = publish(tmp_path / "published", make)
    texts = [f"the cat {i} sat\ton  the ﬁnal mat,\n\nça và? 日本 🙂 e\u0301\n" * 150 for i in range(5)]
    for i, text in enumerate(texts):  # each of two pieces
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    data = replace(config, tokenizer=str(path)).load(plain_decoder(context_length=8, vocab_size=280), 2, 0, fixed=())
    tokenizer, reference = data.tokenizer, make()
    reference.no_truncation()
    reference.no_padding()
    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    documents = [[*reference.encode(text).ids, end] for text in texts]  # with its own BOS
    splits = [split.tokens.tolist() for split in (data.corpus.train, data.corpus.val)]
    assert sorted(splits[0] + splits[1]) == sorted(token for document in documents for token in document)
    for tokens in splits:
        starts = [i for i, token in enumerate(tokens) if token == begin]
        assert starts[0] == 0 and tokens[-1] == end
        assert all(tokens[a:b] in documents for a, b in zip(starts, [*starts[1:], None], strict=True))
    val = data.corpus.val
    assert data.token_lengths[val.tokens].sum() == pytest.approx(val.n_bytes) == len(texts[0].encode()) * val.documents
    assert data.model.vocab_size == tokenizer.vocab_size and f"{path} has {tokenizer.vocab_size}" in data.notes[-1]
    packed = pack_documents(val.tokens, tokenizer, 8)
    targets = np.concatenate([batch.targets[batch.weights > 0] for batch in packed.val_batches(64)])
    assert sorted(targets) == sorted(val.tokens[val.tokens != begin])
    loaded, again = tokenizer, load_corpus(config, 280, tokenizer)
    assert again.tokenizer.files("x") == loaded.files("x") and again.fingerprint == data.fingerprint


def test_vocabulary_of_a_published_tokenizer_must_fit(config, tmp_path):
    (tmp_path / "published").mkdir()
    path = publish(tmp_path / "published", PUBLISHED["byte-level"][0])
    config = replace(config, tokenizer=str(path.parent))
    model = plain_decoder(context_length=8, vocab_size=280)
    with pytest.raises(
        UserError, match=r"`model.vocab_size` is 280, but the tokenizer of `data.tokenizer` needs 290; set"
    ):
        config.load(model, 2, 0, fixed={"vocab_size"})
    assert config.load(replace(model, vocab_size=300), 2, 0, fixed={"vocab_size"}).model.vocab_size == 300
    with pytest.raises(UserError, match=r"nowhere is not a readable tokenizer: No such file"):
        replace(config, tokenizer=str(tmp_path / "nowhere")).load(model, 2, 0)


def test_tokens_of_the_same_tokenizer_with_other_special_tokens_are_made_anew(config, tmp_path):
    (tmp_path / "published").mkdir()
    make = PUBLISHED["byte-level"][0]
    first = load_corpus(config, 290, Tokenizer.load(publish(tmp_path / "published", make)))
    swapped = {"eos_token": "<|begin_of_text|>", "bos_token": "<|end_of_text|>"}
    second = load_corpus(config, 290, Tokenizer.load(publish(tmp_path / "published", make, swapped)))
    assert first.train.tokens[-1] == 1 and second.train.tokens[-1] == 0
    texts = [corpus.train.tokens[corpus.train.tokens > 1] for corpus in (first, second)]
    np.testing.assert_array_equal(*texts)
