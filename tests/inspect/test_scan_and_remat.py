"""Captures and interventions of models whose blocks are scanned and rematerialised are those of the plain model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import (
    capture,
    capture_gradients,
    capturing,
    intervene,
)
from jaxformer.models.decoder import BlockAttention
from jaxformer.models.objective import objective_of
from jaxformer.nn.execution import Execution
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder
from tests.inspect.test_activations import DECODER, MODELS, T, V, random_model

DEEP = plain_decoder(
    V, T, 12, n_blocks=4, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=(16,), activation="swiglu", bias=False,
    norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(),
)  # fmt: skip
LLAMA = replace(DEEP, n_blocks=2)
WINDOWS = replace(  # two scans
    DEEP, n_blocks=3, attention=(BlockAttention(3), BlockAttention(3), BlockAttention()), qk_norm=True
)
SCAN, REMAT = Execution(scan=True), Execution(remat="block")
BOTH = Execution(scan=True, remat="block")


def assert_same(config: Any, execution: Execution, f: Callable[..., Any]) -> None:
    """Assert that `f(model, params, inputs)` does not depend on the execution. In float64, since the compiler rounds
    programs differently that are written differently."""
    model, params, inputs = random_model(config)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        expected, got = (
            jax.jit(lambda params, m=m: f(m, params, inputs))(params) for m in (model, config.build(execution))
        )
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), got, expected)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(got))


def loss_of(model: nn.Module, params: Any, inputs: tuple) -> jax.Array:
    """Return the loss of an example."""
    return objective_of(model).example_loss(model, params, Batch(inputs, jnp.arange(T) % V))


def test_captures_are_those_of_the_plain_model():
    assert_same(DECODER, BOTH, lambda model, params, inputs: capture(model, params, *inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "execution"),
    [
        (WINDOWS, BOTH),
        (MODELS["experts"], SCAN),
    ],
    ids=["windows", "experts"],
)
def test_values_and_their_gradients_are_those_of_the_plain_model(config, execution):
    assert_same(
        config,
        execution,
        lambda model, params, inputs: capture_gradients(lambda: loss_of(model, params, inputs)),
    )


def edit_one(name: str, value: jax.Array) -> jax.Array:
    """Change the second head of the second block alone."""
    return value.at[1].multiply(0.5) if name == "blocks.1.attention.z" else value


@pytest.mark.slow
def test_interventions_in_one_block_and_gradients_of_parameters_are_those_of_the_plain_model():
    def probe(model, params, inputs):
        with intervene("blocks.*.attention.z", edit_one):
            return jax.grad(lambda params: loss_of(model, params, inputs))(params)

    assert_same(LLAMA, BOTH, probe)


def _metric(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 0] - logits_TV[-1, 1]


@pytest.mark.slow
def test_captures_do_not_undo_activation_checkpointing():
    """What the backward pass stores grows by the captured values at most."""
    _, params, inputs = random_model(DEEP)

    def stored(execution, names):
        model = DEEP.build(execution)

        def loss(params):
            with capturing(names) as values:
                return loss_of(model, params, inputs), values

        pull = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    assert stored(BOTH, "*") <= stored(REMAT, ()) < 0.7 * stored(Execution(), ())
