"""Dtype of sums and probabilities, independent of the compute dtype."""

from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """Return float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """Return the array converted to `wide` of its dtype."""
    return x.astype(wide(x.dtype))
