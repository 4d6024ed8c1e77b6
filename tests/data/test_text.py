"""Cleaning and cutting of texts."""

import re
from itertools import pairwise
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxformer.data import text as module
from jaxformer.data.text import clean, cut, page_width
from jaxformer.data.text import unwrap as unwrap_pieces
from jaxformer.data.tokenizer import Tokenizer

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


def test_unwrap_keeps_the_breaks_of_short_lines():
    for text in ("Hello\nworld", "def f(x):\n    return x\n", "- one\n- two\n- three\n" * 9):
        assert unwrap(text).split("\n") == [line.rstrip() for line in text.split("\n")]


def cleaned_whole(text: str, unwrap_lines: bool) -> str:
    """Return a reference for `clean` of a text in memory."""
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line) or [0]
    width = lengths[(len(lengths) - 1) * 99 // 100]
    if unwrap_lines:
        width = width if width >= 40 else 999
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
