import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.alignment import additive_scores, alignment_weights, dot_scores
from tests.arrays import assert_close, normal

S, A = 5, 3
Q, K, V = normal(A, seed=1), normal(S, A, seed=2), normal(A, seed=3)


def test_additive_attention_is_the_papers_in_float64() -> None:
    """Equation 6 and appendix A.1.2 of Bahdanau et al. 2015, place by place."""
    q, k, v = (np.asarray(x, np.float64) for x in (Q, K, V))
    scores = [sum(v[a] * np.tanh(q[a] + k[s, a]) for a in range(A)) for s in range(S)]
    assert_close(additive_scores(Q, K, V), scores, 1e-6)
    total = sum(np.exp(scores))
    wanted = [np.exp(score) / total for score in scores]
    assert_close(alignment_weights(additive_scores(Q, K, V), jnp.ones(S, bool)), wanted, 1e-6)


def test_dot_scores_of_small_numbers_by_hand() -> None:
    k_SA = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    # (1, 1, 1, 2) with each row: 1 and 1 + 2 + 3 + 8 = 14, over √4.
    assert_close(dot_scores(jnp.array([1.0, 1.0, 1.0, 2.0]), k_SA), [0.5, 7.0], 0)


@pytest.mark.slow
def test_weights_are_for_valid_places_alone() -> None:
    scores_S, valid_S = normal(S), jnp.array([True, False, True, True, False])
    weights_S = alignment_weights(scores_S, valid_S)
    assert (weights_S == 0).tolist() == [False, True, False, False, True]
    assert_close(weights_S.sum(), 1, 1e-6)
    assert_close(weights_S[valid_S], alignment_weights(scores_S[valid_S], jnp.ones(3, bool)), 1e-6)
    np.testing.assert_array_equal(weights_S, alignment_weights(jnp.where(valid_S, scores_S, 99.0), valid_S))


def test_nothing_valid_gives_zeros_whatever_the_scores() -> None:
    np.testing.assert_array_equal(alignment_weights(normal(S), jnp.zeros(S, bool)), np.zeros(S))


def test_weights_are_float32_also_of_halves() -> None:
    assert alignment_weights(normal(S).astype(jnp.bfloat16), jnp.ones(S, bool)).dtype == jnp.float32
