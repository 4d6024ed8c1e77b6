from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import masks
from jaxformer.ops.masks import EMPTY


def matrix(*rows: str) -> np.ndarray:
    """One string a query, `x` where it sees the key."""
    return np.array([[c == "x" for c in row] for row in rows])


# A query in the middle and one at the end of the cache; slot 2 holds no token.
QUERIES, KEYS = jnp.array([1, 4]), jnp.array([0, 1, EMPTY, 3, 4])


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (masks.causal, matrix("xxx..", "xxxxx")),
        (lambda q, k: masks.sliding_window(q, k, 2), matrix("xx...", "...xx")),
        (lambda q, k: masks.sliding_window(q, k, 1), matrix(".x...", "....x")),
        (lambda q, k: masks.prefix(q, k, 4), matrix("xxxx.", "xxxxx")),
        (lambda q, k: masks.prefix(q, k, 0), matrix("xxx..", "xxxxx")),
        (masks.padding, matrix("xx.xx", "xx.xx")),
        (masks.Causal(), matrix("xxx..", "xxxxx")),
        (masks.Causal(2), matrix("xx...", "...xx")),
        (masks.segment, matrix(".x...", "....x")),
        (lambda q, k: masks.causal(q, k) & masks.padding(q, k), matrix("xx...", "xx.xx")),
        (
            lambda q, k: masks.causal(q, k) & masks.padding(q, k) & masks.sliding_window(q, k, 3),
            matrix("xx...", "...xx"),
        ),
        (lambda q, k: masks.segment(q, k) | (masks.causal(q, k) & masks.padding(q, k)), matrix("xx...", "xx.xx")),
    ],
    ids=[
        "causal", "window 2", "window 1", "prefix 4", "prefix 0", "padding", "Causal", "Causal 2",
        "segment", "causal & padding", "causal & padding & window 3", "segment | causal & padding",
    ],
)  # fmt: skip
def test_rule_by_hand(rule: Callable, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(rule(QUERIES, KEYS), wanted)


def test_tokens_are_seen_by_all_and_padding_by_none() -> None:
    np.testing.assert_array_equal(masks.tokens(2, jnp.array([True, True, False])), matrix("xx.", "xx."))
    assert masks.tokens(2, None) is None


def test_segments_keep_packed_documents_apart() -> None:
    segment_T, position_T = jnp.array([0, 0, 1, 1, 1]), jnp.array([0, 1, 0, 1, 2])
    both = masks.segment(segment_T, segment_T) & masks.causal(position_T, position_T)
    np.testing.assert_array_equal(both, matrix("x....", "xx...", "..x..", "..xx.", "..xxx"))
    np.testing.assert_array_equal(masks.Packed(segment_T).array(5, 5), both)
    windowed = masks.Packed(segment_T, masks.Causal(2)).array(5, 5)
    np.testing.assert_array_equal(windowed, matrix("x....", "xx...", "..x..", "..xx.", "...xx"))


def test_an_empty_query_sees_nothing_where_padding_is_masked() -> None:
    position_T = jnp.array([0, EMPTY])
    seen = masks.causal(position_T, position_T) & masks.padding(position_T, position_T)
    np.testing.assert_array_equal(seen, matrix("x.", ".."))


@pytest.mark.parametrize("window", [None, 1, 3, 11])
def test_a_symbolic_causal_mask_is_the_band_below_the_diagonal(window: int | None) -> None:
    T, S = 7, 5  # more queries than keys: with window 1 or 3 the last ones see nothing
    band = [[0 <= t - s < (window or T) for s in range(S)] for t in range(T)]
    np.testing.assert_array_equal(masks.Causal(window).array(T, S), band)


def test_symbolic_masks_are_equal_by_value_and_can_be_static_arguments() -> None:
    assert masks.Causal(3) == masks.Causal(3) != masks.Causal()
    assert len({masks.Causal(3), masks.Causal(3), masks.Causal()}) == 2


def test_a_window_that_hides_the_query_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        masks.Causal(0)


def test_a_window_that_is_no_number_of_positions_is_refused() -> None:
    for window in (True, 2.5):  # True for "causal", which would be a window of 1
        with pytest.raises(TypeError, match=f"window is {window}; give a number of positions"):
            masks.Causal(window)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda: masks.causal(5, 5), ValueError, r"\(T,\) and \(S,\), got \(\) and \(\)"),
        (lambda: masks.segment(KEYS[None], KEYS[None]), ValueError, r"got \(1, 5\) and \(1, 5\)"),
        (lambda: masks.padding(QUERIES, KEYS > 0), TypeError, "reads positions, not booleans; use masks.tokens"),
        (lambda: masks.prefix(QUERIES, KEYS, KEYS > 0), TypeError, r"the prefix is bool of shape \(5,\)"),
        (lambda: masks.tokens(2, jnp.array([1, 1, 0])), TypeError, "valid is int32; .* such as attention_mask == 1"),
        (lambda: masks.tokens(2, [True, False]), TypeError, "valid is list"),
        (lambda: masks.zero_padding(np.ones((5, 2)), np.ones(1, bool)), ValueError, r"of shape \(5,\), one per token"),
        (lambda: masks.zero_padding(np.ones((5, 2)), np.ones((2, 5), bool)), ValueError, "use jax.vmap for a batch"),
    ],
)
def test_what_a_rule_would_misread_is_refused(rule: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        rule()
