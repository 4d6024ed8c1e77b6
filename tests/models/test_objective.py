"""What models are trained on."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import capture
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.models.objective import BatchReduction, CrossEntropy, objective_of
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder, plain_rung, random_params
from tests.helpers import slow

OBJECTIVE = CrossEntropy()
B, T, D, V = 6, 5, 3, 11


class Linear(nn.Module):
    """Features straight to logits, and a number that is no part of them."""

    @nn.compact
    def __call__(self, x: jax.Array, _: jax.Array) -> jax.Array:
        return x @ self.param("W", nn.initializers.normal(1.0), (D, V))


@pytest.fixture(scope="module")
def batch() -> Batch:
    draw = np.random.default_rng(0)
    weights = draw.random((B, T)).astype(np.float32)
    inputs = (draw.normal(size=(B, T, D)).astype(np.float32), np.arange(B))
    return Batch(inputs, draw.integers(0, V, (B, T)).astype(np.int32), weights / weights.sum())


PARAMS = {"W": jnp.asarray(np.random.default_rng(1).normal(size=(D, V)), jnp.float32)}


def test_operations_of_the_loss_of_logits_are_in_its_scope(batch):
    jaxpr = jax.make_jaxpr(lambda params: OBJECTIVE.loss(Linear(), params, batch, smoothing=0.1))(PARAMS)
    last = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.outvars[0].aval.shape == ()]
    assert {str(eqn.source_info.name_stack) for eqn in last} >= {"loss"}


@pytest.mark.slow
def test_the_reported_loss_is_weighted_and_lacks_smoothing(batch):
    """Against optax, whose smoothed labels have the same definition."""
    logits = batch.inputs[0] @ PARAMS["W"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch.targets, V), 0.1)
    minimised, told = OBJECTIVE.loss(Linear(), PARAMS, batch, smoothing=0.1)
    wanted = np.sum(optax.softmax_cross_entropy(logits, labels) * batch.weights)
    np.testing.assert_allclose(minimised, wanted, rtol=1e-6)
    plain = np.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets) * batch.weights)
    np.testing.assert_allclose(told, plain, rtol=1e-6)
    assert abs(wanted - plain) > 0.01


def padded(batch: Batch, n: int) -> Batch:
    """A batch of rows, as packed ones with n places of padding on the right."""
    (tokens_BT,), pad = batch.inputs, lambda x: np.pad(x, ((0, 0), (0, n)))
    return Batch((pad(tokens_BT), None, pad(np.ones_like(tokens_BT))), pad(batch.targets), pad(batch.weights))


@pytest.mark.slow
def test_auxiliary_losses_and_gradients_do_not_depend_on_padding():
    """Rows of which 75 % are padding, against the equations of the losses in NumPy. Tokens without a target
    of weight count like others: they are no padding."""
    config = plain_decoder(
        V, 4 * T, 8, n_heads=2, d_ff=(12,), norm="rmsnorm", positions="none", rope=RoPE(),
        experts=ExpertsConfig(4, capacity_factor=0.75, balance_weight=2.0, router_z_weight=0.5),
    )  # fmt: skip
    model, (tokens_BT, targets_BT) = config.build(), np.random.default_rng(0).integers(0, V, (2, B, T), np.int32)
    params, weights_BT = random_params(model, tokens_BT[0]), np.full((B, T), 1 / (B * (T - 2)), np.float32)
    weights_BT[:, :2] = 0  # a prompt
    rows, keys_B = Batch((tokens_BT,), targets_BT, weights_BT), jax.random.split(jax.random.key(0), B)

    def auxiliary(params, batch):
        minimised, told = OBJECTIVE.loss(model, params, batch, keys_B)
        return minimised - told, (minimised, told)

    run = jax.jit(jax.value_and_grad(auxiliary, has_aux=True))
    wanted = run(params, rows)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, run(params, padded(rows, 3 * T)), wanted)
    x_BTD = jax.jit(jax.vmap(lambda tokens_T: capture(model, params, tokens_T, names="blocks.0.mlp_norm")))(tokens_BT)
    logits_NE = np.float64(x_BTD["blocks.0.mlp_norm"]).reshape(B * T, -1) @ params["blocks_0"]["mlp"]["W_router"]
    share_E = np.bincount(np.argsort(-logits_NE, axis=1)[:, :2].ravel(), minlength=4) / (2 * B * T)
    probability_NE = np.exp(logits_NE) / np.exp(logits_NE).sum(axis=1, keepdims=True)
    z = np.square(np.log(np.exp(logits_NE).sum(axis=1))).mean()
    np.testing.assert_allclose(wanted[0][0], 2.0 * 4 * share_E @ probability_NE.mean(axis=0) + 0.5 * z, rtol=1e-5)


@pytest.mark.parametrize("weighted", [slow(True), False])
def test_losses_of_microbatches_sum_to_the_loss_of_the_batch(batch, weighted):
    whole = batch if weighted else batch._replace(weights=None)
    wanted = jax.jit(lambda: OBJECTIVE.loss(Linear(), PARAMS, whole)[0])()
    parts = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], whole) for i in range(3)]
    of_part = jax.jit(lambda part: OBJECTIVE.loss(Linear(), PARAMS, part, across=BatchReduction(3))[0])
    shares = [of_part(part) for part in parts]
    np.testing.assert_allclose(sum(shares), wanted, rtol=1e-6)
    of_one = jax.jit(lambda example: OBJECTIVE.example_loss(Linear(), PARAMS, example))
    alone = [of_one(jax.tree.map(lambda x, i=i: x[i], whole)) for i in range(B)]
    np.testing.assert_allclose(np.sum(alone) if weighted else np.mean(alone), wanted, rtol=1e-6)


@pytest.mark.slow
def test_metrics_of_one_class_per_example_by_hand():
    """Logits that are given: the target is the largest, is not, is the second of two that are, and does not count."""
    model, params = Linear(), {"W": jnp.eye(D, V)}
    x = np.array([[2.0, 0, 0], [0, 0, 1], [0, 3, 3], [1, 1, 1]], np.float32)
    batch = Batch((x, np.zeros(4)), np.array([0, 1, 2, 0], np.int32), np.array([1, 1, 1, 0], np.float32))
    measures = jax.device_get(OBJECTIVE.measure(model, params, batch))
    total = np.log([np.e**2 + 10, np.e + 10, 2 * np.e**3 + 9])
    np.testing.assert_allclose(measures["nats"][:3], total - [2, 0, 3], rtol=1e-6)
    np.testing.assert_array_equal(measures["correct"], [1, 0, 0, 0])
    np.testing.assert_array_equal(measures["weight"], [1, 1, 1, 0])
    assert measures["nats"][3] == 0
    summary = OBJECTIVE.summary(measures)
    np.testing.assert_allclose(summary["loss"], np.mean(total - [2, 0, 3]), rtol=1e-6)
    assert summary["accuracy"] == 1 / 3


@pytest.mark.slow
def test_loss_and_metrics_are_those_of_the_model_s_own_logits() -> None:
    """Also where the final norm, whose gain is not 1, comes after the MLP that returns the logits."""
    config = plain_rung(
        vocab_size=V, context_length=T, d_model=4, n_blocks=1, n_heads=2, d_ff=(6,), norm="rmsnorm", final_norm=True,
        residual=False, mlp_logits=True,
    )  # fmt: skip
    model, tokens = config.build(), np.arange(B * (T + 1), dtype=np.int32).reshape(B, -1) % V
    params = random_params(model, tokens[0, :T])
    batch = Batch((tokens[:, :T],), tokens[:, 1:])
    logits = jax.jit(jax.vmap(lambda tokens_T: model.apply({"params": params}, tokens_T)))(*batch.inputs)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    loss, measures = jax.jit(
        lambda: (OBJECTIVE.loss(model, params, batch)[1], OBJECTIVE.measure(model, params, batch))
    )()
    np.testing.assert_allclose(loss, nll.mean(), rtol=1e-5)
    np.testing.assert_allclose(measures["nats"], nll.sum(axis=1), rtol=1e-5)


def test_a_module_without_contract_has_the_cross_entropy():
    assert isinstance(objective_of(Linear()), CrossEntropy)
