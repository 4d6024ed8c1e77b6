"""Streaming cleaning of texts and splitting into pieces, so that no text is ever entirely in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TypeVar

from jaxformer.data.sources import PIECE_CHARACTERS

T = TypeVar("T")
MAX_WORD_CHARACTERS = 2**10
"""Maximum length of a word; longer stretches without white space may be cut."""
MIN_PAGE_WIDTH, MAX_PAGE_WIDTH = 40, 120
"""Limits of a page's width in characters. Longer lines are paragraphs of their own; if lines are shorter, as in verse,
lists and short documents, their breaks are meaningful."""
MIN_WRAPPED_LINES, MIN_WRAPPED_FRACTION = 3, 0.6
"""Minima of wrapped lines in a text whose lines are joined, see `page_width`."""
MIN_SENTENCE_FRACTION = 0.02
"""Minimum fraction of lines in which a sentence ends, in a text whose lines are joined."""
MID_SENTENCE = re.compile(r"[^\W\d_]\S{0,18}( \S|$)")
"""Beginning of a line of prose: a word. It is longer in encoded data and in scripts without spaces, and followed by
several spaces in tables."""
SENTENCE_END = re.compile(r"[.!?…।؟][^\w\s]*(\s|$)")
"""End of a sentence in a line."""
FIRST_LETTER = re.compile(r"\w")
MARKUP = re.compile(r"[-*+>•] |\d{1,3}[.)] |[#|]|```")
"""Beginning of a line of a list, quotation, heading, table or code block in Markdown."""
WORD_END, WORD_END_BEFORE_SPACE = re.compile(r"\S(?=[ \n\t])"), re.compile(r"\S(?= )")


def page_width(pieces: Iterable[str]) -> int:
    """Return the page width that a text is wrapped to, in characters per line: the 99th percentile of its line lengths.

    It is 0 for a text that is not wrapped: if the width is below `MIN_PAGE_WIDTH` or above `MAX_PAGE_WIDTH`; if hardly
    any sentence ends in it, as in records of equal length; or if, of the lines whose first letter is not a capital, too
    few are wrapped, as in code, tables, logs and verse. A line is wrapped if it begins with a word that would not have
    fitted on the line before it. Lines whose first letter is a capital may be sentences or verses of their own, and do
    not count.
    """
    counts = [0] * (MAX_PAGE_WIDTH + 2)
    needed = [0] * (MAX_PAGE_WIDTH + 2)  # number of lines by the width that the line before needs for their first word
    length = n_lines = n_sentences = 0
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins and length and line and not ((first := FIRST_LETTER.search(line)) and first[0].isupper()):
            n_lines += 1
            if MID_SENTENCE.match(line):
                needed[min(length + 1 + len(_first_word(line)), MAX_PAGE_WIDTH + 1)] += 1
        n_sentences += bool(SENTENCE_END.search(line))
        length = (0 if begins else length) + len(line)
        if ends:
            counts[min(length, MAX_PAGE_WIDTH + 1)] += 1
    counts[0] = 0  # empty lines
    rank = (sum(counts) - 1) * 99 // 100
    width = next((i for i, total in enumerate(accumulate(counts)) if total > rank), 0)
    n_wrapped = sum(needed[width + 1 :])
    is_wrapped = n_wrapped >= max(MIN_WRAPPED_LINES, MIN_WRAPPED_FRACTION * n_lines)
    is_wrapped &= n_sentences > MIN_SENTENCE_FRACTION * n_lines
    return width if is_wrapped and MIN_PAGE_WIDTH <= width <= MAX_PAGE_WIDTH else 0


def unwrap(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Yield a text without white space at the ends of its lines and, unless the width is 0, without the line breaks
    that only wrap it to a page's width. A newline is such a break if the next line's first word would not have fitted
    on the line before it. Verse, headings, and the lists, tables and code of Markdown therefore stay unchanged."""
    length, before = 0, -1  # lengths of this line and the previous one
    is_code = False
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins:
            if before >= 0:
                first_word = _first_word(line)
                fits = not width or before + 1 + len(first_word) <= width
                yield "\n" if fits or is_code or not before or not first_word or MARKUP.match(line) else " "
            length = 0
            is_code ^= line.startswith("```")
        yield line
        length += len(line)
        if ends:
            before = length


def clean(pieces: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield a text unwrapped (unless the width is None), with consecutive empty lines collapsed to one, without white
    space around it, and with a newline at its end; nothing for a text of only white space."""
    trailing, begun = "", False
    for group in batches(pieces if width is None else unwrap(pieces, width), len, PIECE_CHARACTERS):
        text = re.sub(r"\n{3,}", "\n\n", trailing + "".join(group))
        inner = text.rstrip()
        trailing = text[len(inner) :]
        if not begun:
            inner = inner.lstrip()
            begun = bool(inner)
            trailing = trailing if begun else ""
        if len(trailing) > PIECE_CHARACTERS:
            inner, trailing = inner + trailing, ""
        if inner:
            yield inner
    if begun:
        yield "\n"


def cut(pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of at most `PIECE_CHARACTERS`, which tokenize like the whole text. Pieces end before white
    space, where tokenizers also separate words; only words longer than a piece are cut."""
    rest = ""
    for piece in pieces:
        rest += piece
        while len(rest) > PIECE_CHARACTERS:
            position = _cut_position(rest)
            yield rest[:position]
            rest = rest[position:]
    if rest:
        yield rest


def _lines(pieces: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield lines, long ones in parts, as tuples (part, begins its line, ends its line)."""
    rest, begins = "", True
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        for line in lines:
            yield line, begins, True
            begins = True
        if len(rest) > PIECE_CHARACTERS:
            yield rest, begins, False
            rest, begins = "", False
    yield rest, begins, True


def _first_word(line: str) -> str:
    return line[: MAX_PAGE_WIDTH + 2].split(" ", 1)[0]


def batches(items: Iterable[T], length: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield lists of items with a total length of at least `least`, except for the last list."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += length(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _cut_position(text: str) -> int:
    """Return the end of the last word in the text's first piece, or of the piece if no word ends in it."""
    # Cut before a space if possible: the tokens then also agree for a tokenizer that adds a space to each text.
    word, piece = MAX_WORD_CHARACTERS, PIECE_CHARACTERS
    for end, window in ((WORD_END_BEFORE_SPACE, word), (WORD_END, word), (WORD_END, piece)):
        ends = [match.end() for match in end.finditer(text, PIECE_CHARACTERS - window, PIECE_CHARACTERS + 1)]
        if ends:
            return ends[-1]
    return PIECE_CHARACTERS
