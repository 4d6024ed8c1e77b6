"""In what sums are taken and probabilities made, whatever the weights are in."""

from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """float32, or float64 for float64: so that a model of float64 is computed in it throughout."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """The same numbers in `wide` of their dtype."""
    return x.astype(wide(x.dtype))
