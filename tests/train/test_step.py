"""The jitted steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import next_token_nll
from jaxformer.sharding import batch_split, make_mesh
from jaxformer.train.optimizer import make_optimizer
from jaxformer.train.step import batch_loss, init_state, make_train_step

MODEL = DecoderConfig(
    vocab_size=37, context_length=11, d_model=12, n_blocks=1, n_heads=3, output_projection=True, d_ff=(17,),
    norm="rmsnorm",
)  # fmt: skip
CONFIG = Config("test", MODEL, steps=5, optimizer=OptimizerConfig(learning_rate=0.1), train=TrainConfig(batch_size=8))
BATCHES = np.random.default_rng(0).integers(0, 37, (5, 8, 12)).astype(np.int32)


def losses_on(n_devices: int, config: Config = CONFIG) -> tuple[list[float], dict]:
    """Train for five steps on so many devices."""
    mesh = jax.make_mesh((n_devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n_devices])
    model, optimizer = config.model.build(), make_optimizer(config.optimizer, config.steps)
    state, step = init_state(config, model, optimizer, mesh), make_train_step(config, model, optimizer, mesh)
    losses = []
    for k, batch in enumerate(BATCHES):
        state, loss = step(state, jax.device_put(batch, batch_split(mesh)), k)
        losses.append(float(loss))
    return losses, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_device_equals_eight(dropout):
    config = replace(CONFIG, model=replace(MODEL, dropout=dropout))
    one, eight = losses_on(1, config), losses_on(8, config)
    np.testing.assert_allclose(one[0], eight[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one[1], eight[1])
    assert one[0][-1] != one[0][0]


@pytest.mark.slow
def test_dropout_is_on_in_training_and_differs_between_steps_and_examples():
    config = replace(CONFIG, model=replace(MODEL, dropout=0.3))
    assert losses_on(1, config)[0] != losses_on(1)[0]
    model = config.model.build()
    params = model.init(jax.random.key(0), jnp.zeros(11, jnp.int32))["params"]
    same = jnp.broadcast_to(BATCHES[0, 0], (8, 12))
    keys = jax.random.split(jax.random.key(0), 8)
    nll = jax.vmap(lambda t, k: next_token_nll(model, params, t, k).mean())(same, keys)
    assert len(np.unique(nll)) == 8


def test_the_batch_loss_is_the_mean_of_its_examples():
    model = MODEL.build()
    params = model.init(jax.random.key(1), jnp.zeros(11, jnp.int32))["params"]
    loop = [float(next_token_nll(model, params, tokens).mean()) for tokens in jnp.array(BATCHES[0])]
    np.testing.assert_allclose(batch_loss(model, params, jnp.array(BATCHES[0])), np.mean(loop), rtol=1e-6)


def test_the_step_is_optax_on_the_gradient_of_the_loss():
    mesh = make_mesh(8)
    model, optimizer = MODEL.build(), make_optimizer(CONFIG.optimizer, 5)
    state = init_state(CONFIG, model, optimizer, mesh)
    params = jax.device_get(state.params)
    grads = jax.grad(lambda p: batch_loss(model, p, jnp.array(BATCHES[0])))(params)
    expected = optax.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])
    state, _ = make_train_step(CONFIG, model, optimizer, mesh)(state, BATCHES[0], 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.params), expected)


def test_a_step_that_breaks_leaves_the_state_as_it_was_and_says_so_ever_after():
    mesh = make_mesh(8)
    model, optimizer = MODEL.build(), make_optimizer(replace(CONFIG.optimizer, learning_rate=1e20), 5)
    step = make_train_step(CONFIG, model, optimizer, mesh)
    state, loss = step(init_state(CONFIG, model, optimizer, mesh), BATCHES[0], 0)
    assert np.isfinite(loss)
    before = jax.device_get(state.params)
    for k in (1, 2):
        state, loss = step(state, BATCHES[k], k)
        assert np.isnan(loss) and not state.healthy
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_a_batch_that_does_not_split_is_refused_with_one_that_does():
    with pytest.raises(UserError, match="12 does not split over 8 devices; use a multiple such as 16"):
        make_mesh(12)
