"""The jitted steps: one that learns, one that only measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.models.objective import Params, next_token_nll
from jaxformer.sharding import replicated


class TrainState(NamedTuple):
    """What training changes.

    Once a loss or a gradient is not finite, `healthy` turns False and the rest stays as it was before that
    step: what broke can then still be looked at and saved.
    """

    params: Params
    opt_state: Any
    healthy: jax.Array


def init_state(config: Config, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Fresh parameters from `config.seed`, a whole copy on every device."""

    def init() -> TrainState:
        tokens_T = jnp.zeros((config.model.context_length,), jnp.int32)
        params = model.init(jax.random.key(config.seed), tokens_T)["params"]
        return TrainState(params, optimizer.init(params), jnp.array(True))

    return jax.jit(init, out_shardings=replicated(mesh))()


def batch_loss(model: nn.Module, params: Params, batch_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
    """Mean nats a predicted token over a batch, a float32 scalar; dropout is on where keys are given."""
    one = jax.vmap(lambda tokens_T, key: next_token_nll(model, params, tokens_T, key), in_axes=(0, 0))
    return jnp.mean(one(batch_BT, keys_B))


def all_finite(tree: Any) -> jax.Array:
    """Whether every number of a tree is finite. (Not whether its norm is: squares overflow first.)"""
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def make_train_step(
    config: Config, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, jax.Array, int], tuple[TrainState, jax.Array]]:
    """`(state, batch (B, T + 1), step)` to `(state, loss)`; the state given is donated.

    The loss, a float32 scalar, is finite only if all gradients, too, were, in this step and those before it.
    """

    def train_step(state: TrainState, batch_BT: jax.Array, step: jax.Array) -> tuple[TrainState, jax.Array]:
        # One dropout key an example of the whole batch, so that splitting the batch changes nothing.
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch_BT.shape[0]))
        loss, grads = jax.value_and_grad(batch_loss, argnums=1)(model, state.params, batch_BT, keys_B)
        healthy = state.healthy & jnp.isfinite(loss) & all_finite(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        learned = TrainState(optax.apply_updates(state.params, updates), opt_state, healthy)
        kept = TrainState(state.params, state.opt_state, healthy)
        state = jax.tree.map(lambda new, old: jnp.where(healthy, new, old), learned, kept)
        return state, jnp.where(healthy, loss, jnp.nan)

    return jax.jit(train_step, donate_argnums=0, out_shardings=replicated(mesh))


def make_eval_step(model: nn.Module, mesh: Mesh) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """`(params, batch (B, T + 1), weights (B, n_predicted))` to the weighted sum of nats, a float32 scalar."""

    def eval_step(params: Params, batch_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
        nll_BT = jax.vmap(lambda tokens_T: next_token_nll(model, params, tokens_T))(batch_BT)
        return jnp.sum(nll_BT * weights_BT)

    return jax.jit(eval_step, out_shardings=replicated(mesh))
