"""The draws that resuming rests on: each follows from a few numbers alone."""

import numpy as np
import pytest

from jaxformer.data.dataset import epoch_permutation, evenly_spaced, step_rng


def test_an_epoch_takes_each_number_once_and_each_epoch_in_its_own_order() -> None:
    orders = {(seed, epoch): epoch_permutation(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    for found in orders.values():
        np.testing.assert_array_equal(np.sort(found), np.arange(1000))
    for key, found in orders.items():
        np.testing.assert_array_equal(found, epoch_permutation(1000, *key))
        # Two random orders of n numbers have one in the same place on average, and 10 once in ten million.
        assert all((found == other).sum() < 10 for at, other in orders.items() if at != key)


def test_draws_are_those_of_their_seed_and_time_alone() -> None:
    draws = {(seed, when): step_rng(seed, when).normal(size=1000) for seed in (0, 7) for when in (0, 3)}
    for key, found in draws.items():
        np.testing.assert_array_equal(found, step_rng(*key).normal(size=1000))
        # The correlation of independent draws is 0 ± 0.03.
        assert all(abs(np.corrcoef(found, other)[0, 1]) < 0.15 for at, other in draws.items() if at != key)
    # Neither do they follow from the order of the same seed and number.
    shuffled = epoch_permutation(1000, 7, 3)
    assert abs(np.corrcoef(draws[7, 3], shuffled)[0, 1]) < 0.15


@pytest.mark.parametrize("n", [1, 2, 7, 150])
def test_so_many_are_spread_from_the_first_to_the_last(n: int) -> None:
    np.testing.assert_array_equal(evenly_spaced(n, None), np.arange(n))
    np.testing.assert_array_equal(evenly_spaced(n, n + 1), np.arange(n))
    for wanted in range(1, n + 1):
        found = evenly_spaced(n, wanted)
        assert len(set(found.tolist())) == wanted and found[0] == 0
        if wanted > 1:
            assert found[-1] == n - 1
            assert np.ptp(np.diff(found)) <= 1
