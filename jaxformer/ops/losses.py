"""Losses of one example. Axes before the last are as the targets have them: T, or none for one class."""

import jax
import jax.numpy as jnp


def negative_log_likelihood(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] in nats, `(T,)` float32, for integer targets."""
    logits_TV = logits_TV.astype(jnp.float32)
    return jax.nn.logsumexp(logits_TV, axis=-1) - _chosen(logits_TV, targets_T)


def smoothing_cost(logits_TV: jax.Array) -> jax.Array:
    """Nats that a target costs which is every class alike, `(T,)` float32: the mean of -log softmax(logits).

    Label smoothing ε (Szegedy et al. 2016, section 7) minimises 1 - ε of the target's likelihood and ε of this.
    """
    logits_TV = logits_TV.astype(jnp.float32)
    return jax.nn.logsumexp(logits_TV, axis=-1) - jnp.mean(logits_TV, axis=-1)


def is_largest(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """Whether the target's logit is the largest, or one of those, `(T,)` bool."""
    return _chosen(logits_TV, targets_T) >= jnp.max(logits_TV, axis=-1)


def _chosen(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_TV, targets_T[..., None], axis=-1)[..., 0]


def cross_entropy(logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array | None = None) -> jax.Array:
    """Mean of `negative_log_likelihood`, weighted: Σ w·nll / Σ w, a float32 scalar; 0 where all weights are 0."""
    loss_T = negative_log_likelihood(logits_TV, targets_T)
    if weights_T is None:
        return jnp.mean(loss_T)
    total = jnp.sum(weights_T)
    return jnp.sum(loss_T * weights_T) / jnp.where(total == 0, 1.0, total)
