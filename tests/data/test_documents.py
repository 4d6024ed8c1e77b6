"""Documents: reading, splitting and cutting."""

import json
import random
import tracemalloc

import numpy as np
import pytest

from jaxformer.data import progress
from jaxformer.data.documents import Documents, Pieces, hold_out, leave_out, read_documents
from jaxformer.data.sources import PIECE_CHARACTERS
from jaxformer.errors import UserError


@pytest.fixture(params=["txt", "jsonl"])
def documents(request, tmp_path):
    """Return a function that writes texts, to one file each or to the lines of one, and reads them as documents."""

    def make(*texts: str) -> Documents:
        if request.param == "txt":
            (tmp_path / "texts").mkdir(exist_ok=True)
            for old in (tmp_path / "texts").iterdir():
                old.unlink()
            for i, text in enumerate(texts):
                (tmp_path / f"texts/{i:03}.txt").write_text(text)
            return read_documents(str(tmp_path / "texts"), False)
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return read_documents(str(tmp_path / "texts.jsonl"), False)

    return make


def whole(documents: Documents) -> list[str]:
    return ["".join(pieces) for pieces in documents]


def test_empty_documents_are_skipped_and_all_empty_is_refused(documents):
    with pytest.raises(UserError, match="hold no text"):
        documents("  \n\n", "")
    read = documents("  \n\n", "one\n\n\n\n\ntwo", "", "three")
    assert whole(read) == ["one\n\ntwo\n", "three\n"]
    assert (len(read), read.n_bytes, read.bytes_N.tolist()) == (2, 15, [9, 6])


def test_long_line_without_white_space_is_cut(documents):
    n = 3 * PIECE_CHARACTERS - 1
    read = documents("x" * (n - 1) + "  ")
    ((*pieces,),) = read
    assert [len(piece) for piece in pieces] == [PIECE_CHARACTERS, PIECE_CHARACTERS, PIECE_CHARACTERS - 1]
    train, val = hold_out(read, 0.1)
    assert len(whole(train)[0]) == int(0.9 * n)
    assert whole(train)[0] + whole(val)[0] == whole(read)[0]


def test_held_out_documents_do_not_depend_on_order(documents):
    texts = [f"document {i} " * 20 for i in range(23)]
    train, val = hold_out(documents(*texts), 0.1)
    assert sorted(whole(train) + whole(val)) == sorted(text.rstrip() + "\n" for text in texts)
    assert whole(train) == [text for text in (t.rstrip() + "\n" for t in texts) if text in set(whole(train))]
    assert 0.1 <= val.n_bytes / (train.n_bytes + val.n_bytes) < 0.2
    held_out = set(whole(val))
    assert set(whole(hold_out(documents(*texts[::-1]), 0.1)[1])) == held_out


def test_held_out_documents_are_the_first_by_digest_of_at_least_the_fraction(documents):
    draw = random.Random(0)
    texts = [f"{i} " + "word " * draw.randrange(1, 60) for i in range(40)]
    for fraction in (0.001, 0.05, 0.3, 0.999):
        read = documents(*texts)
        train, val = hold_out(read, fraction)
        sizes = dict(zip((d.tobytes() for d in read.digests_N), read.bytes_N.tolist(), strict=True))
        expected, size = set(), 0
        for digest in sorted(sizes)[:-1]:
            if expected and size >= fraction * read.n_bytes:
                break
            expected.add(digest)
            size += sizes[digest]
        assert {d.tobytes() for d in val.digests_N} == expected
        assert len(train) + len(val) == 40


def test_file_changed_during_reading_is_refused(tmp_path):
    """Check that text other than the verified one is not cached."""
    for name, old, new in (
        ("a.txt", "a text", "another text"),
        ("a.jsonl", '{"text": "a"}\n', '{"text": "a"}\n{"text": "b"}\n'),
        ("b.jsonl", '{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}\n'),
    ):
        (tmp_path / name).write_text(old)
        read = read_documents(str(tmp_path / name), False)
        (tmp_path / name).write_text(new)
        with pytest.raises(UserError, match=rf"{name} changed while it was read; start again"):
            whole(read)


def test_equal_documents_are_in_one_split(documents):
    texts = [f"document {i} " * 20 for i in range(6)]
    for fraction in (0.01, 0.3, 0.99):
        train, val = hold_out(documents(*texts, *(text + "\n\n" for text in texts)), fraction)
        assert len(train) + len(val) == 12 and len(train) and len(val)
        assert not set(whole(train)) & set(whole(val))
    train, val = hold_out(documents("the same words\n" * 40, "the same words\n" * 40), 0.1)
    assert len(whole(train)[0] + whole(val)[0]) == 15 * 40  # counted once


def test_documents_of_the_same_content_are_left_out(documents):
    read = documents("a", "b", "a\n\n", "c")
    others = read[np.array([0])]
    assert whole(leave_out(read, others)) == ["b\n", "c\n"]
    assert len(leave_out(others, read)) == 0


def test_two_documents_are_split_and_one_is_cut(documents):
    train, val = hold_out(documents("x" * 50, "y" * 50), 0.9)
    assert len(train) == len(val) == 1
    train, val = hold_out(documents("line\n" * 100), 0.1)
    assert whole(train)[0] + whole(val)[0] == "line\n" * 100
    assert len(whole(val)[0]) == 50
    assert train.digest() != val.digest()
    title = documents("Title\n" + "word " * 1000)
    assert 0.1 <= len(whole(hold_out(title, 0.1)[1])[0]) / title.n_bytes <= 0.2
    with pytest.raises(UserError, match="too short for a held-out split; give"):
        hold_out(documents("oneword"), 0.1)


@pytest.mark.slow
def test_memory_of_reading_does_not_grow_with_the_texts(tmp_path):
    line = "the cat sat on the mat, and the rat sat on the cat " * 60
    (tmp_path / "a.txt").write_text((line + "\n") * 1000)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": line}) + "\n") * 1000)
    for name in ("a.txt", "a.jsonl"):
        tracemalloc.start()
        try:
            read = read_documents(str(tmp_path / name), True)
            n = sum(len(piece) for piece in Pieces(read))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert n > 3_000_000 and peak < 1_500_000


def test_progress_is_shown_at_intervals_with_the_time_left(capsys):
    times = iter([0.0, 4.0, 11.0, 12.0, 30.0])
    shown = progress.Progress("tokenizing", 400_000_000, clock=lambda: next(times))
    for _ in range(4):
        shown.add(50_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tokenizing: 100 of 400 MB, 9.1 MB/s, 33 s left", "tokenizing: 200 of 400 MB, 6.7 MB/s, 30 s left"]


WRAPPED = (
    "a sentence ends. its paragraph goes on from one line\nto the next, as they do in a book that is set to some\n" * 9
)


def test_only_prose_is_unwrapped_which_is_noted_with_counts(tmp_path):
    for name, text in (("a.txt", WRAPPED), ("b.txt", "one line\nanother"), ("._a.txt", WRAPPED), ("c.py", WRAPPED)):
        (tmp_path / name).write_text(text)
    read = read_documents(str(tmp_path), True)
    assert [text.count("\n") for text in whole(read)] == [1, 2]
    assert read.notes == (
        f"2 file(s) of {tmp_path} are read (left out: 1 hidden, 1 .py)",
        f"1 of 2 document(s) of {tmp_path} are wrapped to a page's width; their lines are joined into paragraphs, "
        "unless --data.no-unwrap is given",
    )
    for path, unwrap in ((tmp_path / "c.py", True), (tmp_path / "a.txt", False)):
        read = read_documents(str(path), unwrap)
        assert whole(read) == [WRAPPED] and read.notes == ()
