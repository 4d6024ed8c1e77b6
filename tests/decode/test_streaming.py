"""From pieces of tokens to texts."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import GeneratedText, Piece, Throughput, stream_texts
from jaxformer.decode.streaming import CompileClock, batch_by_length
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
            yield Piece(tokens_BN, -tokens_BN / 8, tokens_BN[..., None] + 1, -tokens_BN[..., None] / 16)


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
    list(
        stream_texts(
            Pieces([[65] * 4 + [EMPTY] * 2, [EMPTY] * 4 + [66] * 2], (2, 2, 2)),
            texts,
            [END],
            4,
            throughput,
            lambda: False,
        )
    )
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
