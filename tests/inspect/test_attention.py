from dataclasses import replace
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import attention_entropy, attention_maps
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.decoder import BlockAttention
from tests.arrays import apply, assert_close, build, plain_decoder, random_tokens

V, T, D = 23, 7, 13
CONFIG = plain_decoder(V, T, D, n_blocks=2, n_heads=3, n_kv_heads=1, head_dim=5, d_ff=(17,), embedding_std=0.5)

maps_of = jax.jit(attention_maps, static_argnums=0)


def test_maps_are_causal_distributions_and_do_not_change_the_logits() -> None:
    model, params = build(replace(CONFIG, attention=BlockAttention(3)))
    tokens_T = random_tokens(V, T)
    logits = apply(model, params, tokens_T)
    visible = np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool)
    for weights_HTS in maps_of(model, params, tokens_T):
        assert_close(weights_HTS.sum(-1), np.ones((3, T)))
        np.testing.assert_array_equal(np.asarray(weights_HTS) > 0, np.broadcast_to(visible, (3, T, T)))
    np.testing.assert_array_equal(apply(model, params, tokens_T), logits)


def test_equal_scores_have_maximal_entropy() -> None:
    model, params = build(CONFIG)
    params["blocks_0"]["attention"]["W_Q"] = jnp.zeros((D, 3, 5))
    entropy_H = attention_entropy(model, params, random_tokens(V, 2, T))[0]
    assert_close(entropy_H, np.full(3, sum(map(log, range(1, T + 1))) / T))


@pytest.mark.slow
def test_model_without_attention_has_no_maps() -> None:
    model, params = build(MLPConfig(V, T, d_model=5, d_ff=(11,)))
    assert attention_maps(model, params, random_tokens(V, T)) == []
    assert attention_entropy(model, params, random_tokens(V, 2, T)) == []
