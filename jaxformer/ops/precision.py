"""Dtype of sums and probabilities, whatever the compute dtype is."""

from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """Return float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """Return the array in `wide` of its dtype."""
    return x.astype(wide(x.dtype))
