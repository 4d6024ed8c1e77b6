"""Logit lens, direct logit attribution and activation patching."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.inspect import capture, logit_attribution, logit_lens, patch_activations
from jaxformer.models.decoder import DecoderConfig
from tests.inspect.test_capture import DECODER, MODELS, T, V, random_model

pytestmark = pytest.mark.slow

STREAMS = {
    "no norm": replace(DECODER, norm="none"),
    "rmsnorm": replace(DECODER, final_norm=True, attention_bias=True, norm_eps=0.1),
    "layernorm, tied": replace(DECODER, norm="layernorm", final_norm=True, unembedding="tied"),
    "no W_O, experts": DecoderConfig(V, T, 12, 2, 3, d_ff=(16,), norm="rmsnorm", n_experts=3, final_norm=True),
}
TOKENS = jnp.arange(T)[::-1]


@pytest.mark.parametrize("name", STREAMS)
def test_attributions_sum_to_the_logit(name):
    model, params, _ = random_model(STREAMS[name])
    logits_TV = model.apply({"params": params}, TOKENS)
    target_T, baseline_T = (TOKENS * 3) % V, (TOKENS + 1) % V
    chosen = lambda tokens_T: np.take_along_axis(np.asarray(logits_TV), np.asarray(tokens_T)[:, None], 1)[:, 0]  # noqa: E731
    scale = np.abs(logits_TV).max()
    parts = logit_attribution(model, params, TOKENS, target_T=target_T)
    total = sum(x.sum(0) if name.endswith(".heads") else x for name, x in parts.items())
    np.testing.assert_allclose(total, chosen(target_T), atol=1e-5 * scale)
    differences = logit_attribution(model, params, TOKENS, target_T=target_T, baseline_T=baseline_T)
    total = sum(x.sum(0) if name.endswith(".heads") else x for name, x in differences.items())
    np.testing.assert_allclose(total, chosen(target_T) - chosen(baseline_T), atol=1e-5 * scale)
    assert parts["blocks.1.attention.heads"].shape == (3, T)


@pytest.mark.parametrize("name", STREAMS)
def test_logit_lens_ends_with_the_models_logits(name):
    model, params, _ = random_model(STREAMS[name])
    result = logit_lens(model, params, TOKENS)
    assert list(result) == ["embedding", "blocks.0.after", "blocks.1.after"]
    logits_TV = model.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(result["blocks.1.after"], logits_TV, rtol=1e-5, atol=1e-5 * np.abs(logits_TV).max())
    alone = DecoderConfig(**{**vars(STREAMS[name]), "n_blocks": 1}).build()  # a model that ends after the first block
    first = {key: value for key, value in params.items() if key != "blocks_1"}
    expected = alone.apply({"params": first}, TOKENS)
    np.testing.assert_allclose(result["blocks.0.after"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def last_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 3]


def third_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[2, 3]


def test_patching_the_last_stream_gives_the_source_logits():
    model, params, _ = random_model(DECODER)
    other = (TOKENS + 5) % V
    ours, theirs = (model.apply({"params": params}, tokens) for tokens in (TOKENS, other))
    result = patch_activations(
        model, params, [TOKENS], [other], ["embedding", "blocks.*.before", "blocks.1.after"], last_of_token_3
    )
    assert list(result) == ["embedding", "blocks.0.before", "blocks.1.before", "blocks.1.after"]
    # Logits at a position depend only on the last stream there.
    np.testing.assert_allclose(result["blocks.1.after"][-1], theirs[-1, 3], rtol=1e-5)
    np.testing.assert_allclose(result["blocks.1.after"][:-1], jnp.full(T - 1, ours[-1, 3]), rtol=1e-5)
    np.testing.assert_allclose(result["embedding"], result["blocks.0.before"], rtol=1e-5)
    # Patching the embedding at a position is the same as another token there.
    for position in (0, T - 1):
        mixed = TOKENS.at[position].set(other[position])
        np.testing.assert_allclose(
            result["embedding"][position], model.apply({"params": params}, mixed)[-1, 3], rtol=1e-4, atol=1e-4
        )


def test_patching_a_later_position_changes_no_earlier_logit():
    model, params, _ = random_model(DECODER)
    result = patch_activations(
        model, params, [TOKENS], [(TOKENS + 5) % V], "blocks.*.attention.heads", third_of_token_3
    )
    plain = model.apply({"params": params}, TOKENS)[2, 3]
    for by_position in result.values():
        np.testing.assert_allclose(by_position[3:], jnp.full(T - 3, plain), rtol=1e-5)
        assert abs(by_position[2] - plain) > 1e-4


@pytest.mark.parametrize("name", ["unscaled", "grouped", "vit"])
def test_model_without_an_additive_stream_is_refused(name):
    model, params, inputs = random_model(MODELS[name])
    with pytest.raises(UserError, match=r"stream|pre-norm"):
        logit_lens(model, params, *inputs)


def test_patching_works_for_an_encoder_decoder():
    model, params, inputs = random_model(MODELS["encoder-decoder"])
    source, valid, target = inputs
    result = patch_activations(
        model, params, inputs, ((source + 1) % V, valid, target), "encoder_blocks.0.before", last_of_token_3
    )
    assert result["encoder_blocks.0.before"].shape == (T,)
    same = patch_activations(model, params, inputs, inputs, "encoder_blocks.0.before", last_of_token_3)
    plain = capture(model, params, *inputs)["logits"][-1, 3]
    np.testing.assert_allclose(same["encoder_blocks.0.before"], jnp.full(T, plain), rtol=1e-5)


def test_lens_and_attribution_of_a_prefix_model():
    model, params, _ = random_model(MODELS["prefix"])
    logits_TV = model.apply({"params": params}, TOKENS, 4)
    np.testing.assert_allclose(logit_lens(model, params, TOKENS, 4)["blocks.1.after"], logits_TV, rtol=1e-5, atol=1e-4)
    parts = logit_attribution(model, params, TOKENS, 4, target_T=TOKENS)
    total = sum(x.sum(0) if name.endswith(".heads") else x for name, x in parts.items())
    np.testing.assert_allclose(total, np.take_along_axis(np.asarray(logits_TV), np.asarray(TOKENS)[:, None], 1)[:, 0],
                               atol=1e-5 * np.abs(logits_TV).max())  # fmt: skip


def first_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[0, 3]


def test_positions_are_patched_even_with_as_many_heads():
    model, params, _ = random_model(DecoderConfig(V, T, 14, 1, T, d_ff=(16,), output_projection=True))
    result = patch_activations(
        model, params, [TOKENS], [(TOKENS + 5) % V], "blocks.0.attention.heads", first_of_token_3
    )
    (by_position,) = result.values()
    plain = model.apply({"params": params}, TOKENS)[0, 3]
    np.testing.assert_allclose(
        by_position[1:], jnp.full(T - 1, plain), rtol=1e-5
    )  # no later position changes the first


def test_positions_of_an_image_are_its_patches():
    model, params, (pixels,) = random_model(MODELS["vit"])
    result = patch_activations(model, params, [pixels], [255 - pixels], "blocks.0.before", first_class)
    assert result["blocks.0.before"].shape == (5,)  # two by two patches, and the token for the class


def first_class(logits: jax.Array) -> jax.Array:
    return logits[0]
