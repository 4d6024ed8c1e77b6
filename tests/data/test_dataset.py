"""Random draws of datasets, which depend only on seed and step, as exact resuming requires."""

import numpy as np
import pytest

from jaxformer.data.dataset import epoch_permutation, evenly_spaced, step_rng


def test_epoch_permutation_is_a_permutation_per_seed_and_epoch() -> None:
    orders = {(seed, epoch): epoch_permutation(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    for permutation in orders.values():
        np.testing.assert_array_equal(np.sort(permutation), np.arange(1000))
    for key, permutation in orders.items():
        np.testing.assert_array_equal(permutation, epoch_permutation(1000, *key))
        # Two random orders of n numbers have one in the same place on average, and 10 once in ten million.
        assert all((permutation == other).sum() < 10 for at, other in orders.items() if at != key)


def test_step_rng_depends_only_on_seed_and_step() -> None:
    draws = {(seed, when): step_rng(seed, when).normal(size=1000) for seed in (0, 7) for when in (0, 3)}
    for key, actual in draws.items():
        np.testing.assert_array_equal(actual, step_rng(*key).normal(size=1000))
        # The correlation of independent draws is 0 ± 0.03.
        assert all(abs(np.corrcoef(actual, other)[0, 1]) < 0.15 for at, other in draws.items() if at != key)
    # Neither do they follow from the order of the same seed and number.
    shuffled = epoch_permutation(1000, 7, 3)
    assert abs(np.corrcoef(draws[7, 3], shuffled)[0, 1]) < 0.15


@pytest.mark.parametrize("n", [1, 2, 7, 150])
def test_evenly_spaced_includes_first_and_last(n: int) -> None:
    np.testing.assert_array_equal(evenly_spaced(n, None), np.arange(n))
    np.testing.assert_array_equal(evenly_spaced(n, n + 1), np.arange(n))
    for count in range(1, n + 1):
        indices = evenly_spaced(n, count)
        assert len(set(indices.tolist())) == count and indices[0] == 0
        if count > 1:
            assert indices[-1] == n - 1
            assert np.ptp(np.diff(indices)) <= 1
