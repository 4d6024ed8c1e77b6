from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.models.mlp import MLPConfig
from jaxformer.models.objective import next_token_nll
from tests.arrays import apply, assert_close, build, random_tokens

V, T = 23, 7
ROWWISE = MLPConfig(V, T, d_model=5, d_ff=(11, 13))
CONCAT = replace(ROWWISE, concatenate=True)


def changed_rows(config: MLPConfig) -> np.ndarray:
    """`(S, rows)`: does a row of the logits change when token s does?"""
    model, params = build(config)
    tokens_T = random_tokens(V, T)
    variants_ST = (tokens_T + jnp.eye(T, dtype=jnp.int32)) % V
    logits = jax.jit(jax.vmap(lambda t: model.apply({"params": params}, t)))(jnp.vstack([tokens_T[None], variants_ST]))
    assert logits.shape == (T + 1, 1 if config.concatenate else T, V)
    return np.asarray((jnp.abs(logits[1:] - logits[0]) > 1e-6).any(-1))


@pytest.mark.slow
def test_rowwise_logits_depend_on_their_own_token_alone() -> None:
    np.testing.assert_array_equal(changed_rows(ROWWISE), np.eye(T, dtype=bool))


def test_concatenated_logits_are_one_row_that_depends_on_every_token() -> None:
    np.testing.assert_array_equal(changed_rows(CONCAT), np.ones((T, 1), bool))


@pytest.mark.parametrize("config", [ROWWISE, CONCAT], ids=["rowwise", "concat"])
def test_agrees_with_numpy(config: MLPConfig) -> None:
    model, params = build(config)
    tokens_T = random_tokens(V, T)
    h = np.asarray(params["embedding"]["W_E"])[tokens_T] + params["embedding"]["W_pos"]
    h = h.reshape(1, -1) if config.concatenate else h
    for i in (1, 2, 3):
        h = h @ params["mlp"][f"W_{i}"] + params["mlp"][f"b_{i}"]
        h = np.maximum(h, 0) if i < 3 else h
    assert_close(apply(model, params, tokens_T), h)


@pytest.mark.parametrize(("config", "terms"), [(ROWWISE, T), (CONCAT, 1)], ids=["rowwise", "concat"])
def test_loss_has_a_term_for_each_row_of_logits(config: MLPConfig, terms: int) -> None:
    model, params = build(config)
    tokens_T = random_tokens(V, T + 1)
    log_probs = jax.nn.log_softmax(apply(model, params, tokens_T[:-1]))
    wanted = -np.asarray(log_probs)[np.arange(terms), tokens_T[-terms:]]
    assert_close(next_token_nll(model, params, tokens_T), wanted)


@pytest.mark.parametrize("fields", [{"d_model": 0}, {"d_ff": (11, -1)}, {"vocab_size": -2}], ids=str)
def test_an_invalid_config_is_refused_with_its_value(fields: dict) -> None:
    with pytest.raises(UserError) as error:
        replace(ROWWISE, **fields)
    ((name, value),) = fields.items()
    assert name in str(error.value)
    assert str(value) in str(error.value)
