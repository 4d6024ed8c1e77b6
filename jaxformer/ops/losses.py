"""Losses of one example."""

import jax
import jax.numpy as jnp


def negative_log_likelihood(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] in nats, `(T,)` float32, for integer targets."""
    logits_TV = logits_TV.astype(jnp.float32)
    chosen_T1 = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)
    return jax.nn.logsumexp(logits_TV, axis=-1) - chosen_T1[:, 0]


def cross_entropy(logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array | None = None) -> jax.Array:
    """Mean of `negative_log_likelihood`, weighted: Σ w·nll / Σ w, a float32 scalar; 0 where all weights are 0."""
    loss_T = negative_log_likelihood(logits_TV, targets_T)
    if weights_T is None:
        return jnp.mean(loss_T)
    total = jnp.sum(weights_T)
    return jnp.sum(loss_T * weights_T) / jnp.where(total == 0, 1.0, total)
