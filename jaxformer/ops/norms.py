"""Normalisation over the last axis. Statistics are taken in float32, the result has the dtype of `x`."""

import jax
import jax.numpy as jnp

from jaxformer.ops.precision import widened


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float = 1e-6) -> jax.Array:
    """γ · x / √(mean(x²) + ε) (Zhang and Sennrich 2019, equation 4). `x` is `(…, D)`, `gamma` `(D,)`."""
    wide_x = widened(x)
    scale = jax.lax.rsqrt(jnp.mean(wide_x * wide_x, axis=-1, keepdims=True) + eps)
    return (wide_x * scale * gamma).astype(x.dtype)


def layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array, eps: float = 1e-5) -> jax.Array:
    """γ · (x - mean) / √(var + ε) + β (Ba et al. 2016). `x` is `(…, D)`, `gamma` and `beta` `(D,)`."""
    wide_x = widened(x)
    centred = wide_x - jnp.mean(wide_x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale * gamma + beta).astype(x.dtype)


def l2_normalize(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """x / √(Σ x² + ε), which has length 1. `x` is `(…, D)`."""
    wide_x = widened(x)
    return (wide_x * jax.lax.rsqrt(jnp.sum(wide_x * wide_x, axis=-1, keepdims=True) + eps)).astype(x.dtype)
