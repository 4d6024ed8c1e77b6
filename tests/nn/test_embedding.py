import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.embedding import Embedding
from jaxformer.ops.positions import sinusoidal
from tests.arrays import apply, assert_close, first_params, normal, random_params

V, N, D = 23, 11, 7
TOKENS_T, POSITIONS_T = jnp.array([3, 22, 3, 0]), jnp.array([0, 1, 5, 10])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_is_a_row_a_token_plus_its_position(positions: str) -> None:
    module = Embedding(V, N, D, positions)
    params = random_params(module, TOKENS_T, POSITIONS_T)
    wanted = np.asarray(params["W_E"])[TOKENS_T]
    if positions == "learned":
        wanted = wanted + np.asarray(params["W_pos"])[POSITIONS_T]
    if positions == "sinusoidal":
        wanted = wanted + sinusoidal(POSITIONS_T, D)
    assert_close(apply(module, params, TOKENS_T, POSITIONS_T), wanted, 1e-6)
    assert set(params) == ({"W_E", "W_pos"} if positions == "learned" else {"W_E"})
    assert params["W_E"].shape == (V, D)
    assert positions != "learned" or params["W_pos"].shape == (N, D)


def test_the_scale_is_of_the_tokens_row_alone() -> None:
    module = Embedding(V, N, D, scale=3.0)
    params = random_params(module, TOKENS_T, POSITIONS_T)
    wanted = 3 * np.asarray(params["W_E"])[TOKENS_T] + np.asarray(params["W_pos"])[POSITIONS_T]
    assert_close(apply(module, params, TOKENS_T, POSITIONS_T), wanted, 1e-6)
    assert_close(apply(module, params, normal(4, D), method="unembed"), normal(4, D) @ params["W_E"].T)


def test_unembedding_is_the_product_with_the_same_table() -> None:
    module, x_TD = Embedding(V, N, D), normal(4, D)
    params = random_params(module, TOKENS_T, POSITIONS_T)
    wanted = np.asarray(x_TD) @ np.asarray(params["W_E"]).T
    assert_close(apply(module, params, x_TD, method="unembed"), wanted)


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_tables_are_drawn_with_the_standard_deviation_asked_for(std: float) -> None:
    params = first_params(Embedding(101, 101, 53, init_std=std), TOKENS_T, POSITIONS_T)
    for table in params.values():
        # 5353 draws: known to 1 %; this is five of those.
        assert np.std(table) == pytest.approx(std, rel=0.05)


@pytest.mark.slow
def test_a_batch_and_ids_outside_the_vocabulary_are_refused():
    module, positions_T = Embedding(7, 5, 3), jnp.arange(5)
    params = module.init(jax.random.key(0), jnp.zeros(5, int), positions_T)
    with pytest.raises(ValueError, match=r"expected an input of shape \(T,\), got \(8, 5\); use jax.vmap for a batch"):
        module.apply(params, jnp.zeros((8, 5), int), positions_T)
    with pytest.raises(ValueError, match="token 7 at position 1 is not in the vocabulary of 7"):
        module.apply(params, jnp.array([0, 7, 0, 0, 0]), positions_T)
    assert jax.vmap(module.apply, (None, 0, None))(params, jnp.zeros((8, 5), int), positions_T).shape == (8, 5, 3)


def test_positions_that_have_no_row_or_would_broadcast_are_refused() -> None:
    module = Embedding(V, N, D)
    params = {"params": random_params(module, TOKENS_T, POSITIONS_T)}
    with pytest.raises(ValueError, match="position 11 is beyond the 11 learned positions"):
        module.apply(params, TOKENS_T, POSITIONS_T + 1)
    with pytest.raises(ValueError, match=r"expected positions of shape \(4,\), one per token, got \(1,\)"):
        module.apply(params, TOKENS_T, POSITIONS_T[:1])
    with pytest.raises(ValueError, match="positions is 'sine'; it must be one of none, learned, sinusoidal"):
        Embedding(V, N, D, "sine").init(jax.random.key(0), TOKENS_T, POSITIONS_T)


def test_lists_of_tokens_and_positions_are_arrays() -> None:
    module = Embedding(V, N, D)
    params = {"params": random_params(module, TOKENS_T, POSITIONS_T)}
    wanted = module.apply(params, TOKENS_T, POSITIONS_T)
    np.testing.assert_array_equal(module.apply(params, TOKENS_T.tolist(), POSITIONS_T.tolist()), wanted)
