"""Text with tokens left out."""

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
    place: Path = write_books(tmp_path_factory.mktemp("books"))
    return MaskedTextConfig(str(place), val_fraction=0.2, masked_fraction=0.3)


@pytest.fixture(scope="module")
def data(config: MaskedTextConfig) -> MaskedTextDataset:
    return config.load(MODEL, B, seed=3)


def test_of_the_chosen_eight_in_ten_are_hidden_one_replaced_and_one_kept() -> None:
    """Shares of a million draws; each is off by more than 0.005 with a chance below 1e-6."""
    draw = np.random.default_rng(0)
    true, n = draw.integers(100, size=(1000, 1000)), 100
    tokens, chosen = mask_tokens(true, draw.random(true.shape), 0.2, n)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[~chosen], true[~chosen])
    hidden, same = tokens == n, tokens == true
    for share, wanted in ((chosen, 0.2), (hidden[chosen], 0.8), (same[chosen], 0.1 + 0.1 / n)):
        assert abs(share.mean() - wanted) < 0.005
    others = tokens[chosen & ~hidden & ~same]  # uniform over the vocabulary without the mask
    assert others.min() == 0 and others.max() == n - 1
    assert abs(others.mean() - (n - 1) / 2) < 1.5  # 20,000 with a deviation of 29: 0.2 is one of the mean


def test_the_vocabulary_has_room_for_the_mask(data: MaskedTextDataset) -> None:
    assert data.tokenizer is not None and data.tokenizer.vocab_size == V - 1
    (tokens_BT, valid_BT), targets_BT, weights_BT = data.batch(0)
    assert tokens_BT.shape == valid_BT.shape == targets_BT.shape == weights_BT.shape == (B, T)
    assert (tokens_BT == V - 1).any() and targets_BT.max() < V - 1
    assert valid_BT.dtype == bool and valid_BT.all()
    np.testing.assert_array_equal(tokens_BT[weights_BT == 0], targets_BT[weights_BT == 0])


def test_a_batch_depends_on_seed_and_step_alone_and_its_rows_are_parts_of_it(
    config: MaskedTextConfig, data: MaskedTextDataset
) -> None:
    again, other = (config.load(MODEL, B, seed) for seed in (3, 4))
    for step in (40, 0):  # in any order, and beyond an epoch
        for x, y in zip(_arrays(data.batch(step)), _arrays(again.batch(step)), strict=True):
            np.testing.assert_array_equal(x, y)
        for which in (slice(1, 3), np.array([4, 0])):
            for x, y in zip(_arrays(data.batch(step)), _arrays(data.batch(step, which)), strict=True):
                np.testing.assert_array_equal(x[which], y)
        assert data.batch(step).weights.sum() == pytest.approx(1, abs=1e-6)
    chosen = [dataset.batch(step).weights > 0 for dataset, step in ((data, 0), (data, 1), (other, 0))]
    assert (chosen[0] != chosen[1]).any() and (chosen[0] != chosen[2]).any()


def test_held_out_text_is_masked_the_same_for_every_seed_and_batch_size(config: MaskedTextConfig) -> None:
    text, first = config.load(MODEL, B, seed=0), None
    for dataset, size in ((text, 4), (text, 7), (config.load(MODEL, B, seed=1), 4)):
        batches = list(dataset.held_out(size))
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
    spread = list(text.held_out(4, 3))
    assert len(spread) == 1 and not spread[0].weights[3].any()


def test_frequencies_alone_cost_what_they_do_in_a_loop(data: MaskedTextDataset) -> None:
    train, val = data.corpus.train.tokens.tolist(), data.corpus.val.tokens.tolist()
    cost = [log((len(train) + V - 1) / (train.count(token) + 1)) for token in val]
    assert data.unigram_entropy() == pytest.approx(sum(cost) / len(cost), rel=1e-9)
    assert f"{sum(cost) / len(cost):.2f} nats" in data.describe()


def test_a_share_that_cannot_be_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(UserError, match=f"masked_fraction is {share}"):
            replace(MaskedTextConfig(), masked_fraction=share)


def test_a_vocabulary_without_room_for_the_mask_is_refused(config: MaskedTextConfig) -> None:
    """256 bytes, end-of-text and the mask are 258."""
    with pytest.raises(UserError, match=r"vocab_size is 257; .* the mask need at least 258"):
        config.load(TokenModelConfig(257, T), B, seed=0)


def _arrays(batch) -> list[np.ndarray]:
    return [*batch.inputs, batch.targets, batch.weights]
