"""Text with prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import TokenModelConfig
from jaxformer.data.prefix import PrefixTextConfig, PrefixTextDataset
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from tests.helpers import write_books

T, B = 16, 6
MODEL = TokenModelConfig(280, T)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PrefixTextConfig:
    folder_path = write_books(tmp_path_factory.mktemp("books"))
    return PrefixTextConfig(str(folder_path), val_fraction=0.2, shortest_prefix=3, longest_prefix=9)


@pytest.fixture(scope="module")
def data(config: PrefixTextConfig) -> PrefixTextDataset:
    return config.load(MODEL, B, seed=3)


def test_only_tokens_after_the_prefix_are_predicted(config: PrefixTextConfig, data: PrefixTextDataset) -> None:
    plain = TextConfig(config.path, val_fraction=config.val_fraction).load(MODEL, B, seed=3)
    batch = data.batch(7)
    tokens_BT, prefix_B = batch.inputs
    assert prefix_B.shape == (B,) and prefix_B.dtype == np.int32
    np.testing.assert_array_equal(tokens_BT, plain.batch(7).inputs[0])
    np.testing.assert_array_equal(batch.targets, plain.batch(7).targets)
    for prefix, weights_T in zip(prefix_B, batch.weights, strict=True):
        # Tokens 0 to prefix - 1 are given. The last of them is the first to predict its next, number `prefix`.
        np.testing.assert_array_equal(weights_T > 0, [t + 1 >= prefix for t in range(T)])
    assert len(np.unique(batch.weights)) == 2
    assert batch.weights.sum() == pytest.approx(1, abs=1e-6)


def test_prefix_lengths_are_uniform(data: PrefixTextDataset) -> None:
    lengths = np.concatenate([data.batch(step).inputs[1] for step in range(1000)])
    counts = np.bincount(lengths)
    assert len(counts) == 10 and not counts[:3].any()
    assert np.abs(counts[3:] / 6000 - 1 / 7).max() < 0.025  # more than 5 deviations of sqrt(6/49/6000)
    whole = replace_longest(data, None)
    assert {*np.concatenate([whole.batch(step).inputs[1] for step in range(200)])} == set(range(3, T + 1))


def replace_longest(data: PrefixTextDataset, longest: int | None) -> PrefixTextDataset:
    config = PrefixTextConfig(data.name, val_fraction=0.2, shortest_prefix=3, longest_prefix=longest)
    return config.load(MODEL, B, seed=3)


def test_batch_depends_only_on_seed_and_step_and_rows_are_consistent(
    config: PrefixTextConfig, data: PrefixTextDataset
) -> None:
    again = config.load(MODEL, B, seed=3)
    for step in (90, 0):
        whole = data.batch(step)
        np.testing.assert_array_equal(again.batch(step).inputs[1], whole.inputs[1])
        part = data.batch(step, np.array([5, 2]))
        np.testing.assert_array_equal(part.inputs[1], whole.inputs[1][[5, 2]])
        np.testing.assert_array_equal(part.weights, whole.weights[[5, 2]])
    assert (data.batch(0).inputs[1] != data.batch(1).inputs[1]).any()
    assert (data.batch(0).inputs[1] != config.load(MODEL, B, seed=4).batch(0).inputs[1]).any()


def test_held_out_prefixes_do_not_depend_on_seed_or_batch_size(config: PrefixTextConfig) -> None:
    actual = []
    for seed, size in ((0, 4), (0, 7), (1, 4)):
        dataset = config.load(MODEL, B, seed)
        batches = list(dataset.val_batches(size))
        n = -(-(len(dataset.corpus.val.tokens) - 1) // T)  # windows that predict something
        prefix = np.concatenate([batch.inputs[1] for batch in batches])[:n]
        weights = np.concatenate([batch.weights for batch in batches])
        assert set(np.unique(weights)) == {0, 1} and not weights[n:].any()
        np.testing.assert_array_equal(weights[: n - 1].sum(axis=1), T + 1 - prefix[:-1])
        actual.append(prefix.tolist())
    assert actual[0] == actual[1] == actual[2]


def test_invalid_prefix_lengths_are_refused(config: PrefixTextConfig) -> None:
    with pytest.raises(UserError, match="shortest_prefix` is 0"):
        replace(config, shortest_prefix=0)
    with pytest.raises(UserError, match="longest_prefix` is 2; it must be at least 3"):
        replace(config, longest_prefix=2)
    for name in ("shortest_prefix", "longest_prefix"):
        with pytest.raises(UserError, match=f"`data.{name}` is 17; it must be at most .*16"):
            replace(config, **{"longest_prefix": None, name: 17}).load(MODEL, B, seed=0)
