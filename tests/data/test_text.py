"""Cleaning and cutting of texts."""

import json
import random
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxformer.data import text as module
from jaxformer.data.text import clean, cut, page_width
from jaxformer.data.text import unwrap as unwrap_pieces
from jaxformer.data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
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


RNG = random.Random(0)
LENGTHS = [RNG.randrange(1, 12) for _ in range(90)]
"""Lengths of lines, in words."""
HANZI = "人之初性本善习相近苟不教乃迁道贵以专"
KEEPING = {
    "python": "\n".join(f"from package.module_{i} import name_{i}, other_{i}\nvalue_{i} = {i}" for i in range(40)),
    "c": "\n".join(f"static int function_{i}(const char *name, size_t size);\nextern int x_{i};" for i in range(40)),
    "json": "[\n" + ",\n".join(json.dumps({"name": f"word {i}", "values": [i] * 9}) for i in range(40)) + "\n]",
    "yaml": "\n".join(f"key_{i}:\n  text: {'some words ' * n}\nother_{i}: 3" for i, n in enumerate(LENGTHS)),
    "makefile": "\n".join(f"goal: part{i}.o {'other.o ' * n}\n\tcc -o $@ {'-g ' * n}" for i, n in enumerate(LENGTHS)),
    "csv": "\n".join(f"{RNG.choice(['alice', 'bob'])},2024-01-02,{RNG.random():.9f},{i},a remark" for i in range(90)),
    "columns": "\n".join(f"{RNG.choice(['alpha', 'beta']):12}{RNG.random():14.5f}{i:14}{i:9}" for i in range(90)),
    "log": "\n".join(f"2024-01-02T12:00:{i:02} server: a request of user {i:02} is served" for i in range(60)),
    "log of equal lines": "\n".join(f"info request {i:05} is served by worker 3 in 27 ms" for i in range(60)),
    "records": "\n".join(f"name {i:03}, 27, london, united kingdom, engineer, a" for i in range(60)),
    "chat": "\n".join(f"{RNG.choice(['alice', 'bob'])}: {'so it goes ' * n}" for n in LENGTHS),
    "verse": "\n".join(" ".join(RNG.choices(("arma", "virumque", "cano", "troiae", "qui"), k=8)) for _ in range(90)),
    "drama": "\n\n".join(f"FIRST CITIZEN.\nBefore we go further, {'hear ' * (n % 7)}me\nspeak of it." for n in LENGTHS),
    "chinese": "\n".join("".join(RNG.choices(HANZI, k=50)) + "。" for _ in range(40)),
    "encoded": "\n".join("".join(RNG.choices("abcdefgh", k=76)) for _ in range(40)),
}  # fmt: skip
"""Texts whose line breaks are meaningful, although many lines are about as long as the longest."""


@pytest.mark.parametrize("kind", KEEPING)
def test_line_breaks_that_are_meaningful_are_kept(kind):
    """Check texts of which some lines are full, and would be joined in prose."""
    lines = [line.rstrip() for line in KEEPING[kind].split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[len(lengths) * 98 // 100]
    assert width >= 40 and "".join(unwrap_pieces(["\n".join(lines)], width)) != "\n".join(lines)
    assert unwrap(KEEPING[kind]) == "\n".join(lines)


def test_source_files_of_this_project_keep_their_lines():
    assert not [path for path in (ROOT / "jaxformer").rglob("*.py") if page_width([path.read_text("utf-8")])]


def test_prose_is_unwrapped_in_languages_with_many_capitals_and_without_any():
    german = "Der Vater der Familie gab dem Sohn am Abend das alte Buch, und er las es in der Nacht. " * 20
    hindi = "यह एक लंबा वाक्य है जो कई पंक्तियों में लिखा गया है और इसका कोई अंत नहीं है। " * 20
    for text in (german.strip(), hindi.strip()):
        assert unwrap(textwrap.fill(text, 70)) == text


def test_indented_paragraphs_and_dialogue_without_empty_lines_are_unwrapped():
    lines = [f"Then they spoke {'and so they went on ' * (n % 7)}to the end." for n in LENGTHS]
    paragraphs = [f"  “{line}”" if i % 2 else f"    {line}" for i, line in enumerate(lines)]
    assert unwrap("\n".join(textwrap.fill(line, 50) for line in paragraphs)) == "\n".join(paragraphs)


def test_lists_tables_and_code_in_wrapped_prose_keep_their_lines():
    prose = textwrap.fill("the words of a paragraph run on from one line to the next, as long as it lasts. " * 9, 70)
    markdown = "\n".join([
        "- an item of a list that is as long as the lines of the paragraphs are,", "- and one more.",
        "> a quotation, which is just as long as the lines of the paragraphs are", "> and goes on.",
        "| a | a row of a table that is as long as the lines of the paragraphs |", "| b | another row |",
        "and a line of prose, which is as long as the lines of paragraphs are.", "```bash",
        "python train.py --config configs/vision.py:vit --data.path folder --st 4", "python sample.py", "```",
        "# A heading",
    ])  # fmt: skip
    assert unwrap(f"{prose}\n\n{markdown}\n\n{prose}").split("\n\n")[1] == markdown


def cleaned_whole(text: str, unwrap_lines: bool) -> str:
    """Return a reference for `clean` of a text in memory."""
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line) or [0]
    width = lengths[(len(lengths) - 1) * 99 // 100]
    if unwrap_lines:
        pairs = [(before, line, line.split(" ", 1)[0]) for before, line in pairwise(lines)]
        fits = [not a or not first or len(a) + 1 + len(first) <= width for a, _, first in pairs]
        shown = [i for i, (a, b, _) in enumerate(pairs) if a and b and not re.search(r"\w|$", b)[0].isupper()]
        wrapped = [i for i in shown if not fits[i] and re.match(r"[^\W\d_]\S{0,18}( \S|$)", pairs[i][1])]
        joins = 40 <= width <= 120 and len(wrapped) >= 3 and len(wrapped) >= 0.6 * len(shown)
        text = lines[0] + "".join(
            (" " if joins and not fit else "\n") + line for fit, (_, line, _) in zip(fits, pairs, strict=True)
        )
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return text + "\n" if text else ""


FULL = "words. that fill a line up to its very end\n"


@settings(max_examples=200, deadline=None)
@example(text="ab\n\n\nc", size=1, unwrap_lines=False)
@example(text=FULL * 4 + "\n\nshort\n" + FULL, size=3, unwrap_lines=True)
@given(
    text=st.lists(
        st.sampled_from(["\n", " ", "\t", "a", "word", "ß日🙂", "x" * 50, "\u2028", "\x1c", FULL]), max_size=60
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
