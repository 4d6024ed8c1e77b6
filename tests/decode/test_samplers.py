import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decode.samplers import Drawn, Sampling, begin, filter_top, sample
from jaxformer.errors import UserError
from tests.arrays import normal

PROBS = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
TIED = np.array([0.2, 0.4, 0.2, 0.2])


def draw(logits: jax.Array, key: jax.Array, sampling: Sampling) -> Drawn:
    """The first token after a prompt of token 0."""
    return sample(logits, begin(sampling, len(logits), jnp.zeros(1, jnp.int32), 1), key, sampling)


def kept(filtered: jax.Array) -> list[int]:
    return np.flatnonzero(np.isfinite(filtered)).tolist()


@pytest.mark.parametrize(
    ("probs", "k", "wanted"),
    [
        (PROBS, 1, [1]),
        (PROBS, 2, [1, 3]),
        (PROBS, 4, [0, 1, 3, 4]),
        (PROBS, 5, [0, 1, 2, 3, 4]),
        (PROBS, 6, [0, 1, 2, 3, 4]),
        (TIED, 2, [0, 1, 2, 3]),
    ],
)
def test_top_k_by_hand(probs: np.ndarray, k: int, wanted: list[int]) -> None:
    logits = jnp.log(jnp.asarray(probs, jnp.float32))
    filtered = filter_top(logits, k=k)
    assert kept(filtered) == wanted
    np.testing.assert_array_equal(filtered[jnp.array(wanted)], logits[jnp.array(wanted)])


@pytest.mark.parametrize(
    ("probs", "p", "wanted"),
    [
        (PROBS, 0.01, [1]),
        (PROBS, 0.39, [1]),
        (PROBS, 0.41, [1, 3]),
        (PROBS, 0.69, [1, 3]),
        (PROBS, 0.71, [1, 3, 4]),
        (PROBS, 0.94, [0, 1, 3, 4]),
        (PROBS, 0.96, [0, 1, 2, 3, 4]),
        (PROBS, 1.0, [0, 1, 2, 3, 4]),
        (TIED, 0.5, [0, 1, 2, 3]),
        (TIED, 0.3, [1]),
    ],
)
def test_top_p_by_hand(probs: np.ndarray, p: float, wanted: list[int]) -> None:
    assert kept(filter_top(jnp.log(jnp.asarray(probs, jnp.float32)), p=p)) == wanted


def test_top_p_of_one_keeps_every_token_of_a_large_vocabulary() -> None:
    # Chances down to 1e-10, below what is left of 1 in float32.
    assert len(kept(filter_top(3 * normal(2048), p=1.0))) == 2048


def test_top_p_keeps_out_what_top_k_took_away() -> None:
    assert kept(filter_top(jnp.log(jnp.asarray(PROBS)), 3, 1.0)) == [1, 3, 4]


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, top_k=1), Sampling(3.0, top_p=1e-6)], ids=str)
def test_greedy_takes_the_likeliest(sampling: Sampling) -> None:
    logits = jnp.array([0.1, 2.0, -1.0, 1.9, 0.0])
    token = draw(logits, jax.random.key(0), sampling).token
    assert token == 1
    assert token.dtype == jnp.int32


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(jnp.array([0.0, 3.0, 1.0, 3.0]), jax.random.key(0), Sampling(0)).token == 1


@pytest.mark.parametrize(
    ("sampling", "probs"),
    [
        (Sampling(), PROBS),
        (Sampling(0.5), PROBS**2),
        (Sampling(2.0), PROBS**0.5),
        (Sampling(top_k=3), np.where(PROBS >= 0.15, PROBS, 0)),
        (Sampling(top_p=0.5), np.where(PROBS >= 0.3, PROBS, 0)),
        # Squared: .01, .16, .0025, .09, .0225; the three largest make 0.59, 0.33, 0.08 and the first two 0.92.
        (Sampling(0.5, top_k=3, top_p=0.9), np.where(PROBS >= 0.3, PROBS**2, 0)),
    ],
    ids=str,
)
def test_frequencies_are_the_filtered_probabilities(sampling: Sampling, probs: np.ndarray) -> None:
    n = 10_007
    wanted = probs / probs.sum() * n
    keys = jax.random.split(jax.random.key(0), n)
    drawn = jax.jit(jax.vmap(lambda key: draw(jnp.log(jnp.asarray(PROBS)), key, sampling).token))(keys)
    counts = np.bincount(drawn, minlength=5)
    possible = wanted > 0
    assert not counts[~possible].any()
    chi_squared = ((counts - wanted) ** 2)[possible] / wanted[possible]
    # The 99.9 % quantile for 1, 2, 3 or 4 degrees of freedom; the seed is fixed.
    assert chi_squared.sum() < {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}[possible.sum() - 1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -0.5}, "-0.5"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_k": 0}, "0"),
        ({"top_k": -3}, "-3"),
        ({"top_p": 0.0}, "0.0"),
        ({"top_p": 1.1}, "1.1"),
    ],
    ids=str,
)
def test_a_sampling_that_cannot_be_is_refused_with_its_value(fields: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**fields)
