"""Schedules and optimizers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import OptimizerConfig
from jaxformer.train.optimizer import make_optimizer, make_schedule


def test_warmup_rises_to_the_peak_and_cosine_falls_to_the_final_share():
    config = OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=4, final_fraction=0.1)
    schedule = make_schedule(config, 104)
    np.testing.assert_allclose([schedule(k) for k in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(schedule(54), 2.0 * (0.1 + 0.9 / 2), rtol=1e-6)  # half way: cos(π/2) = 0
    np.testing.assert_allclose(schedule(104), 0.2, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_constant_schedule_stays_at_the_peak(warmup):
    schedule = make_schedule(OptimizerConfig(learning_rate=0.3, warmup_steps=warmup), 10)
    np.testing.assert_allclose([schedule(k) for k in (warmup, 9, 1000)], 0.3, rtol=1e-6)


def test_nesterov_as_written_out_by_hand():
    optimizer = make_optimizer(OptimizerConfig("nesterov_sgd", learning_rate=0.1, momentum=0.9), 10)
    w, v = np.array([1.0, -2.0]), np.zeros(2)
    params, state = jnp.array(w), optimizer.init(jnp.array(w))
    for _ in range(3):
        updates, state = optimizer.update(params, state, params)  # the gradient of w²/2 is w
        params = optax.apply_updates(params, updates)
        v = 0.9 * v + w
        w = w - 0.1 * (w + 0.9 * v)
    np.testing.assert_allclose(params, w, rtol=1e-6)


def test_weight_decay_touches_matrices_and_neither_gains_biases_nor_positions():
    optimizer = make_optimizer(OptimizerConfig("adamw", learning_rate=0.1, weight_decay=0.5), 10)
    params = {name: jnp.ones((3, 2)) for name in ("W_E", "W_pos")} | {"gamma": jnp.ones(3), "b_1": jnp.ones(3)}
    zero = {name: jnp.zeros_like(x) for name, x in params.items()}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["W_E"], -0.05, rtol=1e-6)
    for name in ("W_pos", "gamma", "b_1"):
        np.testing.assert_array_equal(updates[name], 0.0)


def test_clipping_shortens_long_gradients_to_the_limit():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, momentum=0.0, clip_norm=1.0), 10)
    params = {"W": jnp.zeros(2)}
    updates, _ = optimizer.update({"W": jnp.array([30.0, 40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["W"], [-0.6, -0.8], rtol=1e-6)
