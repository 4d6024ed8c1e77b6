"""Jacobian, regression and backward lenses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxformer.data.dataset import Batch
from jaxformer.inspect import (
    agreement,
    backward_lens,
    capture,
    intervene,
    jacobian_lens,
    lens_logits,
    logit_lens,
    regression_lens,
)
from jaxformer.inspect.activations import run_from
from jaxformer.inspect.lenses import mean_jacobian
from tests.arrays import apply
from tests.inspect.test_activations import DECODER, V, random_model

STREAMS = ("blocks.0.resid_pre", "blocks.0.resid_post", "blocks.1.resid_post")
NORMED = replace(DECODER, final_norm=True)
TOKENS = jnp.arange(4)[::-1]


@pytest.mark.slow
def test_mean_jacobian_is_that_of_jax_at_equal_positions():
    model, params, _ = random_model(NORMED)
    name = STREAMS[0]  # from which all blocks go on
    stream_TD = jax.jit(lambda params: capture(model, params, TOKENS, names=name)[name])(params)

    @jax.jit
    @jax.jacobian
    def jacobian(x_TD):  # of the rest of the model, by another way
        with intervene(name, lambda *_: x_TD):
            return capture(model, params, TOKENS, names="blocks.1.resid_post")["blocks.1.resid_post"]

    # Rows of a Hadamard matrix are orthogonal, so that over all of them the other positions cancel exactly.
    signs = jnp.asarray(scipy.linalg.hadamard(4), jnp.float32)
    measured = [mean_jacobian(model, params, TOKENS, sign_T)[0] for sign_T in signs]
    expected = np.einsum("tdte->de", jacobian(stream_TD)) / 4
    mean = np.mean([m[name] for m in measured], axis=0)
    np.testing.assert_allclose(mean, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_lenses_leave_the_last_stream_as_it_is():
    model, params, _ = random_model(NORMED)
    rng = np.random.default_rng(0)
    texts = [jnp.asarray(rng.integers(0, V, 7)) for _ in range(10)]
    lenses = {
        "jacobian": jacobian_lens(model, params, texts[:2], jax.random.key(0)),
        "regression": regression_lens(model, params, texts, ridge=1e-6),
    }
    for lens in lenses.values():
        np.testing.assert_allclose(lens["blocks.1.resid_post"].A_DD, np.eye(12), atol=1e-3)
        np.testing.assert_allclose(lens["blocks.1.resid_post"].b_D, np.zeros(12), atol=1e-3)
        np.testing.assert_allclose(
            lens_logits(model, params, lens, texts[0])["blocks.1.resid_post"], apply(model, params, texts[0]), atol=1e-3
        )
        result = agreement(model, params, lens, texts[:3])
        assert result["blocks.1.resid_post"].same == 1
        assert abs(result["blocks.1.resid_post"].divergence) < 1e-5 < result["blocks.0.resid_pre"].divergence


@pytest.mark.slow
def test_regression_predicts_better_than_the_stream_itself():
    model, params, _ = random_model(NORMED)
    texts = [jnp.asarray(row) for row in np.random.default_rng(1).integers(0, V, (60, 7))]
    fitted = agreement(model, params, regression_lens(model, params, texts[:50]), texts[50:])
    plain = agreement(model, params, None, texts[50:])
    for name in STREAMS[:2]:
        assert fitted[name].divergence < plain[name].divergence
    expected = logit_lens(model, params, texts[50])
    p_TV = jax.nn.softmax(expected["blocks.1.resid_post"])
    other = jax.nn.log_softmax(expected["blocks.0.resid_pre"])
    by_hand = jnp.mean(jnp.sum(p_TV * (jnp.log(p_TV) - other), axis=-1))
    np.testing.assert_allclose(
        agreement(model, params, None, texts[50:51])["blocks.0.resid_pre"].divergence, by_hand, rtol=1e-4
    )


def test_lens_of_a_linear_model_is_its_map():
    """Of a stream to which nothing is added, the last one is the first: all lenses are the identity."""
    model, params, _ = random_model(replace(NORMED, n_blocks=1))
    params["blocks_0"] = jax.tree.map(np.zeros_like, params["blocks_0"])
    texts = [jnp.asarray(row) for row in np.random.default_rng(0).integers(0, V, (8, 4))]
    for lens in (jacobian_lens(model, params, texts[:2], jax.random.key(0)), regression_lens(model, params, texts)):
        assert list(lens) == ["blocks.0.resid_pre", "blocks.0.resid_post"]
        np.testing.assert_allclose(lens["blocks.0.resid_pre"].A_DD, lens["blocks.0.resid_post"].A_DD, atol=1e-5)


def test_backward_lens_leaves_out_the_soft_cap():
    """Whose tanh would make all large values equal."""
    model, params, _ = random_model(replace(DECODER, n_blocks=1, logit_soft_cap=3.0))
    params["W_out"] *= 100
    example = Batch((TOKENS,), (TOKENS + 3) % V)
    capped_TV = apply(model, params, TOKENS)
    error_TV = (jax.nn.one_hot(example.targets, V) - jax.nn.softmax(capped_TV)) * (1 - (capped_TV / 3) ** 2) / 4
    W_DV = params["W_out"]
    expected = error_TV @ W_DV.T @ W_DV
    lens = backward_lens(model, params, example)["blocks.0.resid_post"]
    np.testing.assert_allclose(lens, expected, atol=1e-4 * float(jnp.abs(expected).max()))


def test_agreement_is_the_mean_over_positions():
    model, params, _ = random_model(replace(DECODER, n_blocks=1))
    texts = [jnp.arange(4), jnp.array([5])]
    same, *singles = (
        agreement(model, params, None, each)["blocks.0.resid_pre"] for each in (texts, texts[:1], texts[1:])
    )
    np.testing.assert_allclose(same, (4 * np.array(singles[0]) + np.array(singles[1])) / 5, rtol=1e-6)
    assert singles[0].divergence != singles[1].divergence


@pytest.mark.slow
def test_backward_lens_of_the_last_stream_is_target_minus_prediction():
    model, params, _ = random_model(replace(DECODER, n_blocks=1))
    example = Batch((TOKENS,), (TOKENS + 3) % V, jnp.ones(4))
    W_DV = params["W_out"]
    error_TV = jax.nn.one_hot(example.targets, V) - jax.nn.softmax(apply(model, params, TOKENS))
    lens = backward_lens(model, params, example)
    np.testing.assert_allclose(lens["blocks.0.resid_post"], error_TV @ W_DV.T @ W_DV, atol=1e-4)
    name = "blocks.0.resid_pre"
    stream = jax.jit(lambda params: capture(model, params, TOKENS, names=name)[name])(params)

    @jax.jit
    @jax.grad
    def loss(x_TD):
        log_p_TV = jax.nn.log_softmax(run_from(model, params, (TOKENS,), {name: x_TD}))
        return -jnp.take_along_axis(log_p_TV, example.targets[:, None], 1).sum()

    np.testing.assert_allclose(lens[name], -loss(stream) @ W_DV, atol=1e-4)
