"""Text with masked tokens."""

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import TokenModelConfig
from jaxformer.data.masked import MaskedTextConfig, MaskedTextDataset, mask_tokens
from jaxformer.errors import UserError
from tests.helpers import write_books

V, T, B = 281, 16, 5
MODEL = TokenModelConfig(V, T)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MaskedTextConfig:
    path: Path = write_books(tmp_path_factory.mktemp("books"))
    return MaskedTextConfig(str(path), val_fraction=0.2, masked_fraction=0.3)


@pytest.fixture(scope="module")
def data(config: MaskedTextConfig) -> MaskedTextDataset:
    return config.load(MODEL, B, seed=3)


def test_chosen_tokens_are_80_percent_masked_10_random_10_unchanged() -> None:
    """Check the fractions of a million draws; each is off by more than 0.005 with a probability below 1e-6."""
    draw = np.random.default_rng(0)
    true, n = draw.integers(100, size=(1000, 1000)), 100
    tokens, chosen = mask_tokens(true, draw.random(true.shape), 0.2, n)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[~chosen], true[~chosen])
    hidden, same = tokens == n, tokens == true
    for share, expected in ((chosen, 0.2), (hidden[chosen], 0.8), (same[chosen], 0.1 + 0.1 / n)):
        assert abs(share.mean() - expected) < 0.005
    others = tokens[chosen & ~hidden & ~same]  # uniform over the vocabulary without the mask
    assert others.min() == 0 and others.max() == n - 1
    assert abs(others.mean() - (n - 1) / 2) < 1.5  # 20,000 with a deviation of 29: 0.2 is one of the mean


def test_mask_is_the_last_token_of_the_vocabulary(data: MaskedTextDataset) -> None:
    assert data.tokenizer is not None and data.tokenizer.vocab_size == V - 1
    (tokens_BT, valid_BT), targets_BT, weights_BT = data.batch(0)
    assert tokens_BT.shape == valid_BT.shape == targets_BT.shape == weights_BT.shape == (B, T)
    assert (tokens_BT == V - 1).any() and targets_BT.max() < V - 1
    assert valid_BT.dtype == bool and valid_BT.all()
    np.testing.assert_array_equal(tokens_BT[weights_BT == 0], targets_BT[weights_BT == 0])


def test_batch_depends_only_on_seed_and_step_and_rows_are_consistent(
    config: MaskedTextConfig, data: MaskedTextDataset
) -> None:
    again, other = (config.load(MODEL, B, seed) for seed in (3, 4))
    for step in (40, 0):  # in any order, and beyond an epoch
        for x, y in zip(_arrays(data.batch(step)), _arrays(again.batch(step)), strict=True):
            np.testing.assert_array_equal(x, y)
        for rows in (slice(1, 3), np.array([4, 0])):
            for x, y in zip(_arrays(data.batch(step)), _arrays(data.batch(step, rows)), strict=True):
                np.testing.assert_array_equal(x[rows], y)
        assert data.batch(step).weights.sum() == pytest.approx(1, abs=1e-6)
    chosen = [dataset.batch(step).weights > 0 for dataset, step in ((data, 0), (data, 1), (other, 0))]
    assert (chosen[0] != chosen[1]).any() and (chosen[0] != chosen[2]).any()


def test_held_out_masks_do_not_depend_on_seed_or_batch_size(config: MaskedTextConfig) -> None:
    text, first = config.load(MODEL, B, seed=0), None
    for dataset, size in ((text, 4), (text, 7), (config.load(MODEL, B, seed=1), 4)):
        batches = list(dataset.val_batches(size))
        assert {batch.targets.shape for batch in batches} == {(size, T)}
        tokens, valid, targets, weights = (np.concatenate(x) for x in zip(*map(_arrays, batches), strict=True))
        assert set(np.unique(weights)) == {0, 1} and weights.dtype == np.float32
        real = valid.all(axis=1) | weights.any(axis=1)
        n = len(text.corpus.val.tokens)
        np.testing.assert_array_equal(targets[valid][:n], text.corpus.val.tokens)  # each token once, in order
        assert not weights[~valid].any()
        counted = tokens[real][weights[real] > 0].tolist()
        assert first is None or counted == first
        first = counted
    assert first is not None and 0.2 < len(first) / len(text.corpus.val.tokens) < 0.4  # of 0.3
    spread = list(text.val_batches(4, 3))
    assert len(spread) == 1 and not spread[0].weights[3].any()


def test_unigram_entropy_equals_a_loop(data: MaskedTextDataset) -> None:
    train, val = data.corpus.train.tokens.tolist(), data.corpus.val.tokens.tolist()
    cost = [log((len(train) + V - 1) / (train.count(token) + 1)) for token in val]
    assert data.unigram_entropy() == pytest.approx(sum(cost) / len(cost), rel=1e-9)
    assert f"{sum(cost) / len(cost):.2f} nats" in data.describe()


def test_invalid_masked_fraction_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(UserError, match=f"masked_fraction` is {share}"):
            replace(MaskedTextConfig(), masked_fraction=share)


def test_vocabulary_without_a_mask_token_is_refused(config: MaskedTextConfig) -> None:
    """Check one below 256 bytes, end-of-text and the mask."""
    with pytest.raises(UserError, match=r"vocab_size is 256; 256 bytes and end-of-text need at least 257"):
        config.load(TokenModelConfig(257, T), B, seed=0)


def _arrays(batch) -> list[np.ndarray]:
    return [*batch.inputs, batch.targets, batch.weights]
