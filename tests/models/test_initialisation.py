from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.inspect import attention_entropy
from tests.arrays import first_params, random_tokens, rung


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # The sources report 0.003 and 1.492 for their text and seed; uniform tokens differ a little.
        ("attention_unscaled", 0.0, 0.02),
        ("attention_scaled", 1.3, 1.7),
    ],
)
def test_attention_entropy_at_first_is_as_the_sources_report(name: str, low: float, high: float) -> None:
    config = replace(rung(name), d_ff=(8,))  # what comes after attention is not measured
    model = config.build()
    tokens_BT = random_tokens(config.vocab_size, 64, config.context_length)
    params = first_params(model, tokens_BT[0])
    ((entropy,),) = jax.device_get(attention_entropy(model, params, tokens_BT))
    assert low < entropy < high


@pytest.mark.slow
def test_unembedding_std_scales_w_out_alone() -> None:
    config = replace(rung("rmsnorm"), d_model=64, d_ff=(64,), n_blocks=1, final_norm=True)
    tokens_BT = random_tokens(config.vocab_size, 8, config.context_length)
    small = replace(config, unembedding_std=0.01)
    params, scaled = (first_params(c.build(), tokens_BT[0]) for c in (config, small))
    np.testing.assert_allclose(scaled["W_out"], params["W_out"] * 0.01 * 64**0.5, rtol=1e-5)
    for name in params.keys() - {"W_out"}:
        jax.tree.map(np.testing.assert_array_equal, params[name], scaled[name])
