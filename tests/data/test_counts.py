"""Losses of counting, against hand-computed values and a table of all pairs."""

from math import log

import numpy as np
import pytest

from jaxformer.data.counts import count, token_loss

TEXT = np.array([0, 1, 0, 1, 0, 2], np.uint16)


def test_counting_by_hand():
    """Of four tokens, 0 occurs three times, 1 twice, 2 once; with one added, 4, 3, 2 and 1 of 10."""
    assert token_loss(TEXT, np.array([0, 3]), 4) == pytest.approx(-(log(0.4) + log(0.1)) / 2)
    # After 0 follow 1, 1 and 2; after 2, nothing.
    held_out = np.array([0, 1, 2, 3])
    expected = [(2 + 0.3) / (3 + 1), (0 + 0.2) / (2 + 1), 0.1]
    assert count(TEXT, held_out, 4).loss(2) == pytest.approx(-np.log(expected).mean())


def test_pair_loss_equals_a_table_of_all_pairs():
    rng, V = np.random.default_rng(0), 11
    train_N, val_M = (rng.integers(0, size, n, np.uint16) for size, n in ((9, 800), (V, 70)))
    share_V = (np.bincount(train_N, minlength=V) + 1) / (len(train_N) + V)
    pairs_VV = np.zeros((V, V))
    np.add.at(pairs_VV, (train_N[:-1], train_N[1:]), 1)
    table_VV = (pairs_VV + share_V) / (pairs_VV.sum(axis=1, keepdims=True) + 1)
    np.testing.assert_allclose(table_VV.sum(axis=1), 1)
    assert count(train_N, val_M, V).loss(2) == pytest.approx(-np.log(table_VV[val_M[:-1], val_M[1:]]).mean())


def test_triples_by_hand():
    """After (0, 1) follow 0 twice; after (1, 0), 1 and 2. The first held-out token after one other has only pairs."""
    counts = count(TEXT, np.array([0, 1, 0]), 4, 3)
    pairs = np.array([(2 + 0.3 * 1) / (3 + 1), (2 + 0.4 * 1) / (2 + 1)])
    expected = [pairs[0], (2 + pairs[1]) / (2 + 1)]
    assert counts.loss(3) == pytest.approx(-np.log(expected).mean())


def test_contexts_longer_than_the_text_change_nothing_and_keys_do_not_overflow():
    counts = count(TEXT[:2], np.array([0, 1, 0]), 4, 3)
    assert counts.loss(3) == counts.loss(2) != counts.loss(1)
    with pytest.raises(ValueError, match=r"got 65536\*\*4"):
        count(TEXT, TEXT, 65536, 4)
