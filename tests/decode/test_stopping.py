import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.decode.stopping import StopStrings
from jaxformer.errors import UserError


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
def test_examples(strings: list[str], pieces: list[str], shown: list[str], met: bool) -> None:
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


@pytest.mark.parametrize(
    ("string", "message"), [("", "a stop string is empty"), ("a\ud800", r"stop string 'a\\ud800' can never occur")]
)
def test_a_string_that_can_never_occur_is_refused(string: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StopStrings(["fine", string])
