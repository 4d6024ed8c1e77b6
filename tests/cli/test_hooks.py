"""What is looked at while training."""

import jax
import numpy as np
import pytest

from jaxformer.cli.hooks import _gradients, _whole
from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.corpus import TextConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import next_token
from jaxformer.models.decoder import DecoderConfig
from jaxformer.sharding import make_mesh
from jaxformer.train.step import init_state, make_train_step
from tests.arrays import random_tokens

MODEL = DecoderConfig(24, 7, 8, n_blocks=1, n_heads=2, output_projection=True, d_ff=(12,), norm="rmsnorm")


@pytest.mark.parametrize(
    ("padding_is_told", "weights_BN", "kept"),
    [
        # Pairs, of which one is as long as its batch: padded ones are looked at beside it.
        (True, [[1, 1, 1], [1, 0, 0], [0, 0, 0]], [True, True, False]),
        # Windows, the last one filled up, which the model is not told; and a prefix, of which nothing is predicted.
        (False, [[1, 1, 1], [1, 1, 0], [0, 0, 0]], [True, False, False]),
        (False, [[1, 1, 1], [0, 0, 1], [0, 1, 0]], [True, True, False]),
        # One short text is better than nothing.
        (False, [[1, 1, 0], [0, 0, 0]], [True, False]),
    ],
)
def test_filling_is_not_looked_at(padding_is_told, weights_BN, kept):
    weights_BN = np.array(weights_BN, np.float32)
    inputs = (weights_BN.astype(np.int32), *([weights_BN > 0] if padding_is_told else []))
    assert _whole(Batch(inputs, weights_BN.astype(np.int32), weights_BN)).tolist() == kept


@pytest.mark.slow
def test_the_gradient_table_has_the_rate_of_the_next_update_whatever_was_left_out():
    """Without momentum the true update is lr·g, so that u and the update over w are the same."""
    optimizer = OptimizerConfig("nesterov_sgd", learning_rate=0.1, momentum=0.0, warmup_steps=50)
    train = TrainConfig(batch_size=4, non_finite="skip")
    config = Config("test", MODEL, TextConfig(), 100, optimizer=optimizer, train=train)
    mesh = make_mesh("", jax.devices()[:1])
    batch, step = next_token(random_tokens(24, 4, 8)), make_train_step(config, mesh)
    state, _ = step(init_state(config, mesh), batch, 0)
    gamma = state.params["blocks_0"]["mlp_norm"]["gamma"]
    state.params["blocks_0"]["mlp_norm"]["gamma"] = gamma * np.nan
    for k in range(1, 4):
        state, loss = step(state, batch, k)
        assert np.isnan(loss)
    state.params["blocks_0"]["mlp_norm"]["gamma"] = np.ones_like(gamma)
    rows = _gradients(config, mesh)(4, state, batch)["gradients"]
    moved = [row for row in rows if row["g"] > 0]
    assert len(moved) > 5
    for row in moved:
        np.testing.assert_allclose(row["u"], 0.1 * 2 / 50 * row["g"] / row["w"], rtol=1e-5)  # the second update
        np.testing.assert_allclose(row["u"], row["update"], rtol=1e-5)
