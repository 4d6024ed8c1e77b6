"""Decoders of the ladder beside a plain decoder."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config
from jaxformer.config.fields import differences
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.activations import capture
from jaxformer.interop.obstacles import Obstacle, obstacles
from jaxformer.models.decoder import DecoderConfig, ExpertsConfig
from jaxformer.nn.execution import Execution
from jaxformer.ops import RoPE
from jaxformer.ops.cache import read_layer
from tests.arrays import apply, build, plain_decoder, random_tokens, rung_like

PLAIN = plain_decoder(
    11, 5, 12, n_blocks=2, n_heads=6, n_kv_heads=2, d_ff=(8,), norm="rmsnorm", positions="none", rope=RoPE()
)


@pytest.mark.slow
def test_a_value_embedding_is_added_to_the_values_of_each_block_and_cached_with_them() -> None:
    config = rung_like(PLAIN, value_embedding=True, value_dim=3, embedding_scale=2.0)
    (model, params), tokens_T = build(config), random_tokens(11, 5)
    for i in range(2):
        params[f"blocks_{i}"]["attention"]["W_V"] *= 0
    added_GTK = 2 * params["value_embedding"]["W_E"][tokens_T].reshape(5, 2, 3).swapaxes(0, 1)
    for v_GTK in capture(model, params, tokens_T, names="*.v").values():
        np.testing.assert_array_equal(v_GTK, added_GTK)
    empty = model.init_cache(5)
    _, cache = apply(model, params, tokens_T, jnp.arange(5), empty, 0, method="extend")
    for layer in cache.layers:
        np.testing.assert_array_equal(read_layer(layer, jnp.float32)[1], added_GTK)


@pytest.mark.slow
def test_a_block_that_returns_logits_is_no_scan() -> None:
    config = rung_like(replace(PLAIN, n_blocks=1), mlp_logits=True, residual=False)
    (model, params), tokens_T = build(config), random_tokens(11, 5)
    scanned = config.build(Execution(remat="block", scan=True))
    np.testing.assert_array_equal(apply(scanned, params, tokens_T), apply(model, params, tokens_T))


def test_a_rung_with_the_parts_of_a_plain_decoder_is_one_in_exports_and_resumed_runs() -> None:
    config = Config("x", PLAIN, TextConfig(), 1)
    for plain in (PLAIN, replace(PLAIN, experts=ExpertsConfig(2))):
        same = replace(config, model=rung_like(plain, projection_std=0.02))
        assert differences(same.model, plain) == differences(plain, same.model) == []
        assert obstacles(same, "hf") == obstacles(replace(config, model=plain), "hf") != []
        assert differences(replace(same.model, n_blocks=3), plain)


@pytest.mark.parametrize(
    "part",
    [
        {"scaled": False},
        {"scaled_by_model": True},
        {"residual": False},
        {"value_embedding": True},
        {"value_dim": 5},
        {"head_dim": 12, "output_projection": False},
        {"mlp_logits": True, "residual": False},
    ],
    ids=str,
)
def test_a_rung_with_a_part_of_its_own_is_not_exported_as_a_decoder(part: dict[str, Any]) -> None:
    model = rung_like(PLAIN, **part)
    assert differences(model, PLAIN)
    assert obstacles(Config("x", model, TextConfig(), 1), "hf") == [
        Obstacle("model", "RungDecoderConfig", "DecoderConfig")
    ]


@pytest.mark.slow
def test_scores_are_divided_by_the_root_of_the_head_s_width_the_model_s_or_not_at_all() -> None:
    for part, scale in (({}, 2**-0.5), ({"scaled_by_model": True}, 12**-0.5), ({"scaled": False}, 1.0)):
        config = rung_like(PLAIN, **part)
        (model, params), tokens_T = build(config), random_tokens(11, 5)
        assert config.scale == scale
        found = capture(model, params, tokens_T, names="blocks.0.attention.*")
        q_GTK, k_GTK = (found[f"blocks.0.attention.{name}"] for name in "qk")
        k_HTK = np.repeat(k_GTK, 3, axis=0)
        scores_HTS = found["blocks.0.attention.attn_scores"]
        np.testing.assert_allclose(scores_HTS, scale * q_GTK @ k_HTK.swapaxes(1, 2), rtol=1e-5, atol=1e-6)
        assert replace(config, score_scale=0.3).scale == 0.3


def test_a_subclass_of_ones_own_is_not_exported_as_a_decoder() -> None:
    own = type("OwnConfig", (DecoderConfig,), {})(**vars(PLAIN))
    assert obstacles(Config("x", own, TextConfig(), 1), "hf") == [Obstacle("model", "OwnConfig", "DecoderConfig")]
