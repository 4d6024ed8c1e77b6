"""From pieces of tokens to texts."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import Piece, Speed, Text, follow
from jaxformer.decode.streaming import CompileClock, batches
from jaxformer.ops.masks import EMPTY

TOKENIZER = Tokenizer.train(["a b"], 257)  # a token a byte, and end-of-text
END = TOKENIZER.end_of_text


class Pieces:
    """A generation that makes given texts, a few tokens at a time; `ended` are the rows it was told to end."""

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


def text(*stop: str) -> Text:
    return Text(TOKENIZER, stop)


def test_a_text_ends_by_token_string_or_length_and_the_rest_is_dropped():
    rows = [
        [*TOKENIZER.encode("ab"), END, *TOKENIZER.encode("x")],
        TOKENIZER.encode("a STOP b"),
        TOKENIZER.encode("abc ST"),
    ]
    generation, made, speed = Pieces(rows, (1, 2, 3, 2)), [text("STOP") for _ in rows], Speed()
    shown = "".join(follow(generation, made, [END], 6, speed, lambda: False))
    assert [(t.shown, t.ended) for t in made] == [("ab", "stop token"), ("a ", "stop string"), ("abc ST", "length")]
    assert [t.tokens for t in made] == [rows[0][:3], rows[1][:6], rows[2]]  # with what ended them
    assert shown == "ab"  # the first row alone
    assert generation.ended == {0: 2, 1: 3}  # after the piece in which they ended
    assert len(speed.first_token_s) == 1 and speed.tokens == 3 + 6 + 6 - 3


def test_a_character_and_what_may_begin_a_stop_string_are_held_back():
    row = TOKENIZER.encode("é S")  # é is two bytes
    made = text("Sx")
    shown = list(follow(Pieces([row], (1, 1, 1, 1)), [made], [END], 4, Speed(), lambda: False))
    assert shown == ["", "é", " ", "", "S"] and made.shown == "é S"


def test_a_stop_token_shows_nothing_of_itself_but_what_was_held_back():
    row = TOKENIZER.encode("aSb")
    made = text("Sx")
    assert list(follow(Pieces([row], (1, 2)), [made], [row[-1]], 4, Speed(), lambda: False)) == ["a", "S"]
    assert made.ended == "stop token" and made.tokens == row


def test_an_interruption_after_the_last_token_changes_nothing():
    made = text()
    list(follow(Pieces([[65, 66]], (2,)), [made], [END], 2, Speed(), lambda: True))
    assert made.ended == "length"


def clock(monkeypatch, *times: float) -> None:
    """The beginning, and when each piece comes."""
    monkeypatch.setattr("jaxformer.decode.streaming.time.perf_counter", iter(times).__next__)


def test_the_times_of_a_text_are_those_of_its_own_tokens(monkeypatch):
    """As with a draft: rows one after another, several tokens a piece; nothing counts apart from the others."""
    made, speed = [text(), text()], Speed()
    clock(monkeypatch, 10, 11, 13, 16)
    list(
        follow(
            Pieces([[65] * 4 + [EMPTY] * 2, [EMPTY] * 4 + [66] * 2], (2, 2, 2)), made, [END], 4, speed, lambda: False
        )
    )
    assert [(t.first_token_s, t.seconds) for t in made] == [(1, 3), (6, 6)]
    assert speed == Speed([1], 6, 6)


def test_a_first_token_that_comes_alone_is_timed_apart_and_what_comes_at_once_is_not(monkeypatch):
    alone, at_once = Speed(), Speed()
    clock(monkeypatch, 10, 12, 13)
    list(follow(Pieces([[65] * 4], (1, 3)), [text()], [END], 4, alone, lambda: False))
    clock(monkeypatch, 10, 12)
    list(follow(Pieces([[65] * 4], (4,)), [text()], [END], 4, at_once, lambda: False))  # as a search of beams
    assert alone == Speed([2], 3, 1) and at_once == Speed([], 4, 2)


def test_an_interruption_ends_what_goes_on_and_keeps_what_was_made():
    made = [text(), text()]
    rows = [[*TOKENIZER.encode("a"), END], TOKENIZER.encode("bcdef")]
    generation = Pieces(rows, (1, 2, 2))
    list(follow(generation, made, [END], 5, Speed(), lambda: generation.given == 2))
    assert [(t.shown, t.ended) for t in made] == [("a", "stop token"), ("bcd", "interrupted")]


def test_a_text_keeps_the_log_probabilities_of_its_tokens():
    made = text()
    list(follow(Pieces([[65, 66]], (2,)), [made], [END], 4, Speed(), lambda: False))
    assert made.tokens == [65, 66] and made.logprobs == [-65 / 8, -66 / 8]
    assert made.top_logprobs == [[(66, -65 / 16)], [(67, -66 / 16)]]


def test_prompts_of_like_lengths_go_together():
    assert batches([5, 1, 4, 2, 3], 2) == [[1, 3], [4, 2], [0]]
    assert batches([1, 1, 1], 2) == [[0, 1], [2]]  # of equal ones, in order


def test_compiling_is_timed_apart_once_however_deep_functions_call_each_other():
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
    ("speed", "said"),
    [
        (Speed([0.25]), "time to first token 0.250 s"),
        (Speed([], 100, 0.5), "200 tokens/s (100 in 0.50 s)"),
        (Speed([0.25], 100, 0.5), "time to first token 0.250 s; 200 tokens/s (100 in 0.50 s)"),
        (Speed([0.2, 0.4], 3000, 1.0), "0.300 s (the mean of 2 batches); 3,000 tokens/s (3,000 in 1.00 s)"),
        (Speed([], 100, 0.5, compile_s=2.25), "200 tokens/s (100 in 0.50 s); 2.2 s of compiling not counted"),
    ],
)
def test_speed_counts_decoding_apart_from_the_first_token(speed, said):
    assert str(speed).endswith(said)
