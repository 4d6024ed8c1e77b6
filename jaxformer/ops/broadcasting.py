"""Explicit broadcasting: with `jax_numpy_rank_promotion` set to raise, JAX adds no axes itself."""

import jax
import jax.numpy as jnp


def expand(x: jax.Array, ndim: int) -> jax.Array:
    """Return an array with leading axes of size 1, such that it has at least `ndim` axes."""
    return jnp.expand_dims(x, tuple(range(ndim - jnp.ndim(x))))
