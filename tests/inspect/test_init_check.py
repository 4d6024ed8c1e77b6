"""Expected statistics of an initialisation agree with observed ones, and with those of the sources."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs import ladder
from jaxformer.inspect.init_check import _warnings, check_init, expected_moments
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig, LatentsConfig
from jaxformer.ops import RoPE, Yarn
from tests.arrays import first_params, plain_rung

WIDE = plain_rung(500, 32, 96, n_blocks=1, n_heads=4, output_projection=True, d_ff=(256,))
CASES: dict[str, Any] = {
    "qk_norm, swiglu": replace(WIDE, norm="layernorm", qk_norm=True, activation="swiglu", bias=False,
                               positions="sinusoidal"),
    "norms around parts, local and global": replace(
        WIDE, n_blocks=2, norm="rmsnorm", norm_placement="both", activation="geglu", score_scale=0.1, positions="none",
        rope=RoPE(scaling=Yarn(16.0, 8)),
        attention=(BlockAttention(8), BlockAttention()),
        embedding_scale=2.0, embedding_std=0.5, bias=False,
    ),
    "alibi, parallel": replace(
        WIDE, norm="layernorm_no_bias", norm_placement="parallel", positions="alibi", embedding_norm=True,
        embedding_std=0.02,
    ),
    "one expert with biases, sinks": replace(
        WIDE, norm="rmsnorm", embedding_std=0.1, experts=ExpertsConfig(4, 1, bias=True), activation="clamped_swiglu",
        sinks=True, bias=False,
    ),
    "latents, sigmoid router": DecoderConfig(
        500, 32, d_model=96, n_blocks=2, head_dim=32, latents=LatentsConfig(24, 40, 8, 20), embedding_std=0.1,
        rope=RoPE(scaling=Yarn(16.0, 8)), activation="swiglu",
        experts=ExpertsConfig(4, router="sigmoid", weight_factor=2.0, dense_blocks=1, dense_width=64),
    ),
    "no residual, sum of heads": replace(
        WIDE, n_blocks=2, residual=False, norm="layernorm", norm_placement="post", output_projection=False, head_dim=96
    ),
}  # fmt: skip


def fresh(config: DecoderConfig):
    """Return an initialised model with an MLP narrower than the sources', and random tokens."""
    config = replace(config, d_ff=tuple(min(width, 256) for width in config.d_ff))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (8, config.context_length))
    model, tokens_BT = config.build(), jnp.asarray(tokens, jnp.int32)
    return model, first_params(model, tokens_BT[0]), tokens_BT


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_expected_statistics_are_observed(name):
    result = check_init(*fresh(CASES[name]))
    assert len(result.expected) == len(result.observed) == CASES[name].n_blocks
    for i, (expected, observed) in enumerate(zip(result.expected, result.observed, strict=True)):
        # A block writes similar vectors at positions with similar attention: they are no longer independent.
        np.testing.assert_allclose(observed.stream, expected.stream, rtol=0.3 if i else 0.1)
        np.testing.assert_allclose(observed.scores, expected.scores, rtol=0.5 if i else 0.2)
        np.testing.assert_allclose(observed.entropy, expected.entropy, rtol=0.1)
        if not i:
            np.testing.assert_allclose(observed.growth, expected.growth, rtol=0.15)
    assert not result.warnings
    assert str(result).count("\n") == 1 + len(result.observed)


def test_epsilon_of_a_layer_norm_affects_small_streams():
    """Of mean squares of 4e-4, 1e-5 is 2.4 %: scores, products of two projections, have 4.8 % less variance."""
    config = replace(WIDE, norm="layernorm", positions="none", embedding_std=0.02)
    np.testing.assert_allclose(expected_moments(config, 32)[0].scores, (4e-4 / 4.1e-4) ** 2, rtol=1e-6)
    of_rms = expected_moments(replace(config, norm="rmsnorm"), 32)[0].scores
    np.testing.assert_allclose(of_rms, (4e-4 / 4.01e-4) ** 2, rtol=1e-6)


def test_initial_entropy_agrees_with_the_sources():
    (scaled,) = expected_moments(ladder.attention_scaled.model, 32)
    assert abs(scaled.entropy - 1.492) < 0.05 and abs(scaled.scores - 4) < 1e-6  # embedding and position, each N(0, 1)
    (unscaled,) = expected_moments(ladder.attention_unscaled.model, 32)
    assert unscaled.entropy < 0.003


def warnings_of(config: DecoderConfig, T: int = 32) -> tuple[str, ...]:
    return tuple(_warnings(config, expected_moments(config, T), T))


def test_one_hot_attention_is_warned_of_with_rung_and_remedy():
    (warning,) = warnings_of(ladder.attention_unscaled.model)
    assert warning.startswith("scores of blocks.0 have variance 6") and "as on the rung attention_unscaled" in warning
    assert warning.endswith(
        "set model.score_scale to 0.0625, 1/sqrt(head_dim) and model.projection_std to 0.0625, 1/sqrt(d_model)."
    )
    wide = replace(WIDE, projection_std=1.0)
    (large,) = warnings_of(wide)
    assert "set model.projection_std to 0.102" in large and "model.score_scale" not in large
    assert not warnings_of(wide, 1)  # of a single token


def test_deep_model_without_a_norm_is_warned_of():
    (warning,) = warnings_of(replace(WIDE, n_blocks=4))
    assert warning.startswith("4 blocks without a norm, which make the stream ") and "four_blocks" in warning
    assert warning.endswith("set model.norm to rmsnorm.")


@pytest.mark.slow
def test_zero_stream_is_no_error():
    result = check_init(*fresh(replace(WIDE, norm="rmsnorm", positions="none", rope=RoPE(), embedding_std=0.0)))
    assert np.isnan(result.expected[0].growth) and result.expected[0].stream == 0


def test_norms_of_outputs_keep_what_is_added_at_1_and_no_depth_is_warned_of_with_a_norm():
    bare, block = (expected_moments(c, 32)[0] for c in (WIDE, replace(WIDE, norm="rmsnorm", norm_placement="output")))
    assert (block.scores, block.growth) == pytest.approx((bare.scores, 2))  # of 2, and 1 from each part
    assert not warnings_of(replace(WIDE, n_blocks=4, norm="rmsnorm"))
