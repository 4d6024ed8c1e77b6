from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decode.weights import restored, store
from jaxformer.errors import UserError
from jaxformer.ladder.mixing import Mixing
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.objective import next_token_nll
from tests.arrays import apply, assert_close, build, normal, random_params, random_tokens

V, T = 23, 7
ROWWISE = MLPConfig(V, T, d_model=5, d_ff=(11, 13))
CONCAT = replace(ROWWISE, mixing="concatenate")


MIXED = {kind: replace(ROWWISE, mixing=kind) for kind in ("static", "dynamic", "gram", "qkv")}


def changed_rows(config: MLPConfig) -> np.ndarray:
    """`(S, rows)`: does a row of the logits change when token s does?"""
    model, params = build(config)
    tokens_T = random_tokens(V, T)
    variants_ST = (tokens_T[None] + jnp.eye(T, dtype=jnp.int32)) % V
    logits = jax.jit(jax.vmap(lambda t: model.apply({"params": params}, t)))(jnp.vstack([tokens_T[None], variants_ST]))
    assert logits.shape == (T + 1, 1 if config.mixing == "concatenate" else T, V)
    return np.asarray((jnp.abs(logits[1:] - logits[:1]) > 1e-6).any(-1))


@pytest.mark.slow
def test_rowwise_logits_depend_on_their_own_token_alone() -> None:
    np.testing.assert_array_equal(changed_rows(ROWWISE), np.eye(T, dtype=bool))


def test_concatenated_logits_are_one_row_that_depends_on_every_token() -> None:
    np.testing.assert_array_equal(changed_rows(CONCAT), np.ones((T, 1), bool))


@pytest.mark.parametrize("kind", [*MIXED, pytest.param("unmasked", marks=pytest.mark.slow)])
def test_mixed_logits_depend_on_no_later_token_but_without_the_mask(kind: str) -> None:
    config = MIXED.get(kind, replace(MIXED["qkv"], causal=False))
    np.testing.assert_array_equal(changed_rows(config), np.triu(np.ones((T, T), bool)) | (not config.causal))


@pytest.mark.parametrize("kind", MIXED)
def test_mixing_agrees_with_loops_over_positions(kind: str) -> None:
    mixing = Mixing(kind, T)
    x_TD = normal(T - 2, 5)
    params = {} if kind == "gram" else random_params(mixing, x_TD)
    x, p = np.asarray(x_TD, np.float64), {name: np.asarray(W, np.float64) for name, W in params.items()}
    expected = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(i + 1):
            weight, value = {
                "static": lambda i, j: (p["A"][i, j], x[j]),
                "dynamic": lambda i, j: (x[i] @ p["B"][:, j], x[j]),
                "gram": lambda i, j: (x[i] @ x[j] / 5**0.5, x[j]),
                "qkv": lambda i, j: ((x[i] @ p["W_Q"]) @ (x[j] @ p["W_K"]) / 5**0.5, x[j] @ p["W_V"]),
            }[kind](i, j)
            expected[i] += weight / T**0.5 * value
    assert_close(mixing.apply({"params": params}, x_TD), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_weights_rounded_to_8_bits_mix_texts_of_any_length(kind: str) -> None:
    model, params = build(MIXED[kind])
    tokens_T = random_tokens(V, T - 2)
    rounded = store(params, "int8", model)
    assert_close(apply(model, rounded, tokens_T), apply(model, restored(rounded), tokens_T), 1e-3)


@pytest.mark.parametrize("kind", ["none", "static", "gram"])
def test_more_tokens_than_positions_are_refused(kind: str) -> None:
    model, params = build(replace(ROWWISE, mixing=kind))
    with pytest.raises(ValueError, match=r"8 tokens, but the model has 7 learned positions; give it the last 7\."):
        model.apply({"params": params}, random_tokens(V, T + 1))


def test_another_length_than_the_window_is_refused() -> None:
    model, params = build(CONCAT)
    with pytest.raises(ValueError, match=r"6 tokens, but this model needs a window of exactly 7; give it as many\."):
        model.apply({"params": params}, random_tokens(V, T - 1))


def test_a_mask_is_refused_where_nothing_is_mixed() -> None:
    with pytest.raises(UserError, match=r"causal is False, but mixing 'concatenate' has no mask; omit it\.$"):
        replace(CONCAT, causal=False)


@pytest.mark.parametrize("config", [ROWWISE, CONCAT], ids=["rowwise", "concat"])
def test_agrees_with_numpy(config: MLPConfig) -> None:
    model, params = build(config)
    tokens_T = random_tokens(V, T)
    h = np.asarray(params["embedding"]["W_E"])[tokens_T] + params["embedding"]["W_pos"]
    h = h.reshape(1, -1) if config.mixing == "concatenate" else h
    for i in (1, 2, 3):
        h = h @ params["mlp"][f"W_{i}"] + params["mlp"][f"b_{i}"][None]
        h = np.maximum(h, 0) if i < 3 else h
    assert_close(apply(model, params, tokens_T), h)


@pytest.mark.parametrize(("config", "terms"), [(ROWWISE, T), (CONCAT, 1)], ids=["rowwise", "concat"])
def test_loss_has_a_term_for_each_row_of_logits(config: MLPConfig, terms: int) -> None:
    model, params = build(config)
    tokens_T = random_tokens(V, T + 1)
    log_probs = jax.nn.log_softmax(apply(model, params, tokens_T[:-1]))
    wanted = -np.asarray(log_probs)[np.arange(terms), tokens_T[-terms:]]
    assert_close(jax.jit(partial(next_token_nll, model))(params, tokens_T), wanted)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"d_model": 0}, "d_model is 0"), ({"d_ff": (11, -1)}, "d_ff is -1"), ({"vocab_size": -2}, "vocab_size is -2")],
)
def test_an_invalid_config_is_refused_with_its_value(fields: dict, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}; it must be at least 1"):
        replace(ROWWISE, **fields)
