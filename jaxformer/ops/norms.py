"""Normalisation over the last axis. Statistics are float32, the result has the dtype of `x`.

A row whose squares overflow float32, from about 1e19 on, gives NaN: divided by an infinite norm it would be 0, which
would hide diverged activations.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxformer.ops.precision import widened


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Return γ · x / √(mean(x²) + ε) (Zhang and Sennrich 2019, equation 4). `x` is `(…, D)`, `gamma` `(D,)`."""
    return (divide_by_norm(widened(x), jnp.mean, eps) * gamma).astype(x.dtype)


def layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Return γ · (x - mean) / √(var + ε) + β (Ba et al. 2016). `x` is `(…, D)`, `gamma` and `beta` `(D,)`."""
    wide_x = widened(x)
    centred = wide_x - jnp.mean(wide_x, axis=-1, keepdims=True)
    return (divide_by_norm(centred, jnp.mean, eps) * gamma + beta).astype(x.dtype)


def l2_normalize(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """Return x / √(Σ x² + ε), which has length 1. `x` is `(…, D)`."""
    return divide_by_norm(widened(x), jnp.sum, eps).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def divide_by_norm(x: jax.Array, reduce: Callable[..., jax.Array], eps: float) -> jax.Array:
    """Return x / √(reduce(x²) + ε) along the last axis, `(…, D)`; NaN where x² overflows.

    The derivative is computed from the result: from x, it needs the cube of the norm, which overflows from 1e13 on.

    Args:
      reduce: `jnp.mean` or `jnp.sum`.
    """
    return x * _inverse_norm(x, reduce, eps)


@divide_by_norm.defjvp
def _divide_by_norm_jvp(reduce: Callable[..., jax.Array], eps: float, primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    scale = _inverse_norm(x, reduce, eps)
    y = x * scale
    return y, scale * (dx - y * reduce(y * dx, axis=-1, keepdims=True))


def _inverse_norm(x: jax.Array, reduce: Callable[..., jax.Array], eps: float) -> jax.Array:
    square = reduce(x * x, axis=-1, keepdims=True)
    return jnp.where(jnp.isinf(square), jnp.nan, jax.lax.rsqrt(square + eps))
