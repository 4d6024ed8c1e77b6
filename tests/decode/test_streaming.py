"""From pieces of tokens to texts, which end before stop strings."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import GeneratedText, Samples, Throughput, stream_texts
from jaxformer.decode.batches import batch_by_length
from jaxformer.decode.streaming import CompileClock, StopStrings
from jaxformer.errors import UserError
from jaxformer.ops.masks import EMPTY

TOKENIZER = Tokenizer.train(["a b"], 257)  # a token a byte, and end-of-text
END = TOKENIZER.end_of_text


class Pieces:
    """A generation of given rows, a few tokens per piece.

    Attributes:
      ended: number of pieces before each row was ended.
    """

    def __init__(self, rows: list[list[int]], sizes: tuple[int, ...]) -> None:
        self.ended: dict[int, int] = {}
        self.given = 0
        self._rows, self._sizes = rows, sizes

    def end(self, row: int) -> None:
        self.ended[row] = self.given

    def __iter__(self):
        at = 0
        for size in self._sizes:
            part = [(row[at : at + size] + [EMPTY] * size)[:size] for row in self._rows]
            tokens_BN = np.array(part, np.int32)
            at += size
            self.given += 1
            yield Samples(tokens_BN, -tokens_BN / 8, tokens_BN[..., None] + 1, -tokens_BN[..., None] / 16)


def text(*stop: str) -> GeneratedText:
    return GeneratedText(TOKENIZER, stop)


def test_a_text_ends_by_stop_token_stop_string_or_length():
    rows = [
        [*TOKENIZER.encode("ab"), END, *TOKENIZER.encode("x")],
        TOKENIZER.encode("a STOP b"),
        TOKENIZER.encode("abc ST"),
    ]
    generation, texts, throughput = Pieces(rows, (1, 2, 3, 2)), [text("STOP") for _ in rows], Throughput()
    shown = "".join(stream_texts(generation, texts, [END], 6, throughput, lambda: False))
    assert [(t.text, t.finish_reason) for t in texts] == [
        ("ab", "stop token"),
        ("a ", "stop string"),
        ("abc ST", "length"),
    ]
    assert [t.tokens for t in texts] == [rows[0][:3], rows[1][:6], rows[2]]  # with what ended them
    assert shown == "ab"  # the first row alone
    assert generation.ended == {0: 2, 1: 3}  # after the piece in which they ended
    assert len(throughput.first_token_seconds) == 1 and throughput.tokens == 3 + 6 + 6 - 3


def test_part_of_a_character_or_of_a_stop_string_is_withheld():
    row = TOKENIZER.encode("é S")  # é is two bytes
    texts = text("Sx")
    shown = list(stream_texts(Pieces([row], (1, 1, 1, 1)), [texts], [END], 4, Throughput(), lambda: False))
    assert shown == ["", "é", " ", "", "S"] and texts.text == "é S"


def test_a_stop_token_releases_the_withheld_text():
    row = TOKENIZER.encode("aSb")
    texts = text("Sx")
    assert list(stream_texts(Pieces([row], (1, 2)), [texts], [row[-1]], 4, Throughput(), lambda: False)) == ["a", "S"]
    assert texts.finish_reason == "stop token" and texts.tokens == row


def test_an_interruption_after_the_last_token_has_no_effect():
    texts = text()
    list(stream_texts(Pieces([[65, 66]], (2,)), [texts], [END], 2, Throughput(), lambda: True))
    assert texts.finish_reason == "length"


def clock(monkeypatch, *times: float) -> None:
    """Set the times of the start and of each piece."""
    monkeypatch.setattr("jaxformer.decode.streaming.time.perf_counter", iter(times).__next__)


def test_times_of_a_text_are_those_of_its_own_tokens(monkeypatch):
    """As with a draft: rows one after another, several tokens per piece, the first not timed by itself."""
    texts, throughput = [text(), text()], Throughput()
    clock(monkeypatch, 10, 11, 13, 16)
    pieces = Pieces([[65] * 4 + [EMPTY] * 2, [EMPTY] * 4 + [66] * 2], (2, 2, 2))
    list(stream_texts(pieces, texts, [END], 4, throughput, lambda: False))
    assert [(t.first_token_seconds, t.seconds) for t in texts] == [(1, 3), (6, 6)]
    assert throughput == Throughput([1], 6, 6)


def test_only_a_first_token_in_its_own_piece_is_timed_apart(monkeypatch):
    alone, at_once = Throughput(), Throughput()
    clock(monkeypatch, 10, 12, 13)
    list(stream_texts(Pieces([[65] * 4], (1, 3)), [text()], [END], 4, alone, lambda: False))
    clock(monkeypatch, 10, 12)
    list(stream_texts(Pieces([[65] * 4], (4,)), [text()], [END], 4, at_once, lambda: False))  # as a search of beams
    assert alone == Throughput([2], 3, 1) and at_once == Throughput([], 4, 2)


def test_an_interruption_finishes_texts_with_their_tokens_so_far():
    texts = [text(), text()]
    rows = [[*TOKENIZER.encode("a"), END], TOKENIZER.encode("bcdef")]
    generation = Pieces(rows, (1, 2, 2))
    list(stream_texts(generation, texts, [END], 5, Throughput(), lambda: generation.given == 2))
    assert [(t.text, t.finish_reason) for t in texts] == [("a", "stop token"), ("bcd", "interrupted")]


def test_a_text_has_the_logprobs_of_its_tokens():
    texts = text()
    list(stream_texts(Pieces([[65, 66]], (2,)), [texts], [END], 4, Throughput(), lambda: False))
    assert texts.tokens == [65, 66] and texts.logprobs == [-65 / 8, -66 / 8]
    assert texts.top_logprobs == [[(66, -65 / 16)], [(67, -66 / 16)]]


def test_batches_have_prompts_of_similar_lengths():
    assert batch_by_length([5, 1, 4, 2, 3], 2) == [[1, 3], [4, 2], [0]]
    assert batch_by_length([1, 1, 1], 2) == [[0, 1], [2]]  # of equal ones, in order


def test_compile_time_of_nested_functions_counts_once():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    outer = jax.jit(lambda x: inner(x) + inner(x * 3))
    began = time.perf_counter()
    with CompileClock() as clock:
        outer(jnp.arange(3.0))
    assert 0 < clock.seconds < time.perf_counter() - began
    before = clock.seconds
    with clock:
        outer(jnp.arange(3.0)).block_until_ready()
    outer(jnp.arange(4.0))
    assert clock.seconds == before


@pytest.mark.parametrize(
    ("throughput", "expected"),
    [
        (Throughput([0.25]), "time to first token 0.250 s"),
        (Throughput([], 100, 0.5), "200 tokens/s (100 in 0.50 s)"),
        (Throughput([0.25], 100, 0.5), "time to first token 0.250 s; 200 tokens/s (100 in 0.50 s)"),
        (Throughput([0.2, 0.4], 3000, 1.0), "0.300 s (the mean of 2 batches); 3,000 tokens/s (3,000 in 1.00 s)"),
        (
            Throughput([], 100, 0.5, compile_seconds=2.25),
            "200 tokens/s (100 in 0.50 s); 2.2 s of compilation excluded",
        ),
    ],
)
def test_throughput_is_printed_apart_from_the_time_to_first_token(throughput, expected):
    assert str(throughput).endswith(expected)


def feed(strings: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """Return the text after each piece and at the end, and `met`."""
    stop = StopStrings(strings)
    shown = [stop.feed(piece) for piece in pieces]
    return [*shown, stop.end()], stop.met


def plain(strings: list[str], text: str) -> tuple[str, bool]:
    """Cut the text where the first stop string ends, by the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "met"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["\n"], ["ab", "c\nd", "e"], ["ab", "c", "", ""], True),
        (["stop"], ["a s", "t", "op b"], ["a ", "", "", ""], True),  # spans three pieces
        (["stop"], ["a s", "t", "ar"], ["a ", "", "star", ""], False),
        (["stop"], ["ends in sto"], ["ends in ", "sto"], False),
        (["aab"], ["a", "a", "a", "b", "a"], ["", "", "a", "", "", ""], True),  # overlaps itself
        (["aba"], ["abab"], ["", ""], True),
        (["abac"], ["ab", "ab", "ac"], ["", "ab", "", ""], True),
        (["END", "\n\n"], ["x\n", "EN", "\n", "\ny"], ["x", "\n", "EN", "", ""], True),
        (["ab", "abc"], ["xa", "bc"], ["x", "", ""], True),  # one a prefix of another: the shorter is complete first
        (["abc", "ab"], ["xabc"], ["x", ""], True),
        (["bc", "abcd"], ["abc", "d"], ["a", "", ""], True),  # inside another
        (["c", "abc"], ["ab", "c"], ["", "", ""], True),  # complete at the same index: the longest
        (["é"], ["caf", "é!"], ["caf", "", ""], True),
    ],
)
def test_a_stop_string_ends_a_text(strings: list[str], pieces: list[str], shown: list[str], met: bool) -> None:
    assert feed(strings, pieces) == (shown, met)


PIECES = st.lists(st.text("abc", max_size=5), max_size=8)


@pytest.mark.slow
@given(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), PIECES)
@settings(max_examples=400)
def test_pieces_give_the_result_of_a_search_of_the_whole_text(strings: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, met = feed(strings, pieces)
    assert ("".join(shown), met) == plain(strings, text)


@pytest.mark.slow
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), PIECES)
@settings(max_examples=400)
def test_only_the_beginning_of_a_stop_string_is_withheld(strings: list[str], pieces: list[str]) -> None:
    stop, shown, text = StopStrings(strings), "", ""
    for piece in pieces:
        shown, text = shown + stop.feed(piece), text + piece
        if stop.met:
            return
        beginnings = {s[:n] for s in strings for n in range(1, len(s))}
        longest = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert shown == text[: len(text) - longest]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="a stop string is empty; omit it"):
        StopStrings(["fine", ""])
