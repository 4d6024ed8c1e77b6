"""Attention saturation: gradients of scores and of W_Q as attention becomes one-hot."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.ladder import attention_scaled, attention_unscaled
from jaxformer.data.dataset import Batch
from jaxformer.inspect import attention_entropy, saturation
from jaxformer.models.objective import objective_of
from tests.arrays import build, first_params, plain_decoder, random_tokens

SOFT, HARD = [10.0, 1.0], [0.03, 0.01, 0.002]


def untrained(config, n: int = 8):
    """Return an untrained rung at the sources' width, with a smaller MLP, and random tokens."""
    model_config = replace(config.model, d_ff=(64,), vocab_size=256)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (n, model_config.context_length + 1)), jnp.int32)
    model = model_config.build()
    return model, first_params(model, tokens[0, :-1]), Batch((tokens[:, :-1],), tokens[:, 1:])


@pytest.fixture(scope="module")
def rows():
    return saturation(*untrained(attention_scaled), SOFT + HARD)


@pytest.mark.slow
def test_gradient_of_the_scores_vanishes_for_one_hot_attention(rows):
    model, params, batch = untrained(attention_scaled)
    np.testing.assert_allclose(rows[1].entropy, attention_entropy(model, params, *batch.inputs)[0].mean(), rtol=1e-5)
    assert [row.entropy for row in rows] == sorted((row.entropy for row in rows), reverse=True)
    scaled, hardest = rows[1], rows[-1]
    assert 1.3 < scaled.entropy < 1.7 and hardest.entropy < 0.005  # 1.492 and 0.003 in the sources
    assert scaled.scores / hardest.scores > 10
    assert scaled.median_row > 0 and hardest.median_row == 0


@pytest.mark.slow
def test_gradient_of_W_Q_rises_before_it_vanishes(rows):
    assert rows[-1].W_Q > 10 * rows[1].W_Q and rows[-1].W_K > 10 * rows[1].W_K
    unscaled = saturation(*untrained(attention_unscaled), [3000.0, 100.0, 1.0, 0.1])
    assert unscaled[0].W_Q < unscaled[1].W_Q > unscaled[2].W_Q > unscaled[3].W_Q
    assert unscaled[3].W_Q < 1e-6 and unscaled[3].scores == 0


@pytest.mark.slow
def test_grown_projections_have_a_level_gradient_that_falls_relative_to_them(rows):
    """Times s for W_Q and W_K is times s² for the scores, so the gradient is that at a temperature of 1/s², over s."""
    model, params, batch = untrained(attention_scaled)
    layer, norms, relative = params["blocks_0"]["attention"], [], []
    for row in rows[1], rows[2], rows[-1]:
        s = row.temperature**-0.5
        grown = layer | {name: s * layer[name] for name in ("W_Q", "W_K")}
        (measured,) = saturation(model, params | {"blocks_0": params["blocks_0"] | {"attention": grown}}, batch, 1.0)
        np.testing.assert_allclose([measured.entropy, measured.W_Q], [row.entropy, row.W_Q / s], rtol=1e-2)
        norms.append(measured.W_Q)
        relative.append(measured.W_Q / s)
    np.testing.assert_allclose([rows[i].entropy for i in (1, 2, -1)], [1.55, 0.074, 0.003], rtol=0.1)
    np.testing.assert_allclose(norms, [0.22, 0.43, 0.14], atol=0.005)
    np.testing.assert_allclose(relative[0] / relative[-1], 36, rtol=0.02)


def test_temperature_one_gives_the_training_gradient():
    model, params = build(plain_decoder(7, 3, 4, n_blocks=1, n_heads=2, d_ff=(4,)))
    tokens = random_tokens(7, 3, 4)
    batch = Batch((tokens[:, :-1],), tokens[:, 1:])
    (row,) = saturation(model, params, batch, [1.0])
    loss = lambda params: jnp.mean(  # noqa: E731
        jax.vmap(lambda x: objective_of(model).example_loss(model, params, x))(batch)
    )
    grads = jax.jit(jax.grad(loss))(params)["blocks_0"]["attention"]
    np.testing.assert_allclose(row.scores_by_hand, row.scores, rtol=1e-4)
    np.testing.assert_allclose([row.W_Q, row.W_K], [jnp.linalg.norm(grads[w]) for w in ("W_Q", "W_K")], rtol=1e-4)
