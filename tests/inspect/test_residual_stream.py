"""Logit lens and direct logit attribution."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import logit_attribution, logit_lens
from jaxformer.models.decoder import ExpertsConfig
from tests.arrays import apply, plain_rung
from tests.inspect.test_activations import DECODER, MODELS, T, V, random_model

STREAMS = {
    "rmsnorm": replace(DECODER, final_norm=True, attention_bias=True, norm_eps=0.1),
    "norms of outputs, soft cap, tied": replace(
        DECODER,
        final_norm=True,
        norm="layernorm",
        norm_placement="both",
        attention_bias=True,
        logit_soft_cap=3.0,
        unembedding="tied",
    ),
    "parallel, norm of the embedding, biases": replace(
        DECODER,
        final_norm=True,
        norm="layernorm",
        norm_placement="parallel",
        embedding_norm=True,
        unembedding_bias=True,
    ),
    "no W_O, experts": plain_rung(
        V, T, 12, n_blocks=2, n_heads=3, d_ff=(16,), norm="rmsnorm", experts=ExpertsConfig(3), final_norm=True
    ),
}
TOKENS = jnp.arange(T)[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STREAMS if name != "rmsnorm"])
def test_attributions_sum_to_the_logit_before_a_soft_cap(name):
    model, params, _ = random_model(STREAMS[name])
    logits_TV = apply(replace(STREAMS[name], logit_soft_cap=None).build(), params, TOKENS)
    target_T, baseline_T = (TOKENS * 3) % V, (TOKENS + 1) % V
    chosen = lambda tokens_T: np.take_along_axis(np.asarray(logits_TV), np.asarray(tokens_T)[:, None], 1)[:, 0]  # noqa: E731
    scale = np.abs(logits_TV).max()
    parts = logit_attribution(model, params, TOKENS, target_T=target_T)
    total = sum(x.sum(0) if name.endswith(".z") else x for name, x in parts.items())
    np.testing.assert_allclose(total, chosen(target_T), atol=1e-5 * scale)
    differences = logit_attribution(model, params, TOKENS, target_T=target_T, baseline_T=baseline_T)
    total = sum(x.sum(0) if name.endswith(".z") else x for name, x in differences.items())
    np.testing.assert_allclose(total, chosen(target_T) - chosen(baseline_T), atol=1e-5 * scale)
    assert parts["blocks.1.attention.z"].shape == (3, T)
    likeliest = logit_attribution(model, params, TOKENS, baseline_T=2)
    total = sum(x.sum(0) if name.endswith(".z") else x for name, x in likeliest.items())
    np.testing.assert_allclose(total, logits_TV.max(axis=-1) - logits_TV[:, 2], atol=1e-5 * scale)
    with pytest.raises(ValueError, match=f"token {V} at position 0 is not in the vocabulary"):
        logit_attribution(model, params, TOKENS, target_T=V)


def test_logit_lens_ends_with_the_models_logits():
    config = STREAMS["rmsnorm"]
    model, params, _ = random_model(config)
    result = logit_lens(model, params, TOKENS)
    assert list(result) == ["blocks.0.resid_pre", "blocks.0.resid_post", "blocks.1.resid_post"]
    logits_TV = apply(model, params, TOKENS)
    np.testing.assert_allclose(result["blocks.1.resid_post"], logits_TV, rtol=1e-5, atol=1e-5 * np.abs(logits_TV).max())
    alone = replace(config, n_blocks=1).build()  # a model that ends after the first block
    first = {key: value for key, value in params.items() if key != "blocks_1"}
    expected = apply(alone, first, TOKENS)
    np.testing.assert_allclose(result["blocks.0.resid_post"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["unscaled", "grouped"])
def test_model_without_an_additive_stream_is_refused(name):
    model, params, inputs = random_model(MODELS[name])
    with pytest.raises(ValueError, match=r"stream|post-norm"):
        logit_lens(model, params, *inputs)


@pytest.mark.slow
def test_lens_and_attribution_of_a_prefix_model():
    model, params, _ = random_model(MODELS["prefix"])
    logits_TV = apply(model, params, TOKENS, 4)
    np.testing.assert_allclose(
        logit_lens(model, params, TOKENS, 4)["blocks.1.resid_post"], logits_TV, rtol=1e-5, atol=1e-4
    )
    parts = logit_attribution(model, params, TOKENS, 4, target_T=TOKENS)
    total = sum(x.sum(0) if name.endswith(".z") else x for name, x in parts.items())
    np.testing.assert_allclose(total, np.take_along_axis(np.asarray(logits_TV), np.asarray(TOKENS)[:, None], 1)[:, 0],
                               atol=1e-5 * np.abs(logits_TV).max())  # fmt: skip
