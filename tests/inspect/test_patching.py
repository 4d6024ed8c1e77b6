"""Activation patching, and attribution patching beside it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import attribution_patching, capture, intervene, patch_activations
from tests.arrays import apply, plain_decoder
from tests.inspect.test_activations import DECODER, MODELS, T, V, random_model

TOKENS = jnp.arange(T)[::-1]
OTHER = (TOKENS + 5) % V


def last_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 3]


def third_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[2, 3]


@pytest.mark.slow
def test_patching_the_last_stream_gives_the_source_logits():
    model, params, _ = random_model(DECODER)
    other = (TOKENS + 5) % V
    ours, theirs = (apply(model, params, tokens) for tokens in (TOKENS, other))
    result = patch_activations(
        model, params, [TOKENS], [other], ["embed", "blocks.*.resid_pre", "blocks.1.resid_post"], last_of_token_3
    )
    assert list(result) == ["embed", "blocks.0.resid_pre", "blocks.1.resid_pre", "blocks.1.resid_post"]
    # Logits at a position depend only on the last stream there.
    np.testing.assert_allclose(result["blocks.1.resid_post"][-1], theirs[-1, 3], rtol=1e-5)
    np.testing.assert_allclose(result["blocks.1.resid_post"][:-1], jnp.full(T - 1, ours[-1, 3]), rtol=1e-5)
    np.testing.assert_allclose(result["embed"], result["blocks.0.resid_pre"], rtol=1e-5)
    # Patching the embedding at a position is the same as another token there.
    for position in (0, T - 1):
        mixed = TOKENS.at[position].set(other[position])
        np.testing.assert_allclose(result["embed"][position], apply(model, params, mixed)[-1, 3], rtol=1e-4, atol=1e-4)


def test_patching_a_later_position_changes_no_earlier_logit():
    model, params, _ = random_model(replace(DECODER, n_blocks=1))
    result = patch_activations(model, params, [TOKENS], [(TOKENS + 5) % V], "blocks.*.attention.z", third_of_token_3)
    plain = apply(model, params, TOKENS)[2, 3]
    for by_position in result.values():
        np.testing.assert_allclose(by_position[3:], jnp.full(T - 3, plain), rtol=1e-5)
        assert abs(by_position[2] - plain) > 1e-4


def first_of_token_3(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[0, 3]


@pytest.mark.slow
def test_positions_are_patched_even_with_as_many_heads():
    model, params, _ = random_model(plain_decoder(V, T, 14, n_blocks=1, n_heads=T, d_ff=(16,)))
    result = patch_activations(model, params, [TOKENS], [(TOKENS + 5) % V], "blocks.0.attention.z", first_of_token_3)
    (by_position,) = result.values()
    plain = apply(model, params, TOKENS)[0, 3]
    np.testing.assert_allclose(
        by_position[1:], jnp.full(T - 1, plain), rtol=1e-5
    )  # no later position changes the first


@pytest.mark.slow
def test_positions_of_an_image_are_its_patches():
    model, params, (pixels,) = random_model(MODELS["vit"])
    result = patch_activations(model, params, [pixels], [255 - pixels], "blocks.0.resid_pre", first_class)
    assert result["blocks.0.resid_pre"].shape == (5,)  # two by two patches, and the token for the class


def first_class(logits: jax.Array) -> jax.Array:
    return logits[0]


@pytest.mark.slow
def test_attribution_is_the_directional_derivative():
    model, params, _ = random_model(DECODER)
    replaced = ["blocks.0.attention.pattern", "blocks.0.attention.mask"]
    estimate = attribution_patching(model, params, [TOKENS], [OTHER], replaced, last_of_token_3)
    assert set(estimate) == set(replaced[:1])  # booleans have no gradient
    plain = apply(model, params, TOKENS)
    step = 1e-2
    [(name, by_position)] = estimate.items()

    @jax.jit
    def shifted(shift_HTS):
        with intervene(name, lambda _, x: x + shift_HTS):
            return model.apply({"params": params}, TOKENS)[-1, 3]

    ours, theirs = (jax.jit(lambda x: capture(model, params, x, names=name)[name])(x) for x in (TOKENS, OTHER))
    for position in (0, T - 2):
        shift = step * (np.arange(T) == position)[:, None] * (theirs - ours)
        slope = (shifted(shift) - shifted(-shift)) / (2 * step)
        np.testing.assert_allclose(by_position[position] - plain[-1, 3], slope, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("patch", [patch_activations, attribution_patching])
def test_wrong_inputs_of_patching_are_errors(patch):
    model, params, _ = random_model(DECODER)
    with pytest.raises(ValueError, match=r"inputs have shapes \[\(7,\)\] and source \[\(5,\)\]"):
        patch(model, params, [TOKENS], [OTHER[:5]], "blocks.0.resid_pre", last_of_token_3)
    with pytest.raises(ValueError, match=r"expected an input of shape \(T,\), got \(1, 7\)"):
        patch(model, params, [TOKENS], [OTHER[None]], "blocks.0.resid_pre", last_of_token_3)
    with pytest.raises(KeyError, match=r"no activation is named 'blocks\.0\.befor'"):
        patch(model, params, [TOKENS], [OTHER], "blocks.0.befor", last_of_token_3)
