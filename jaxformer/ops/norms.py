"""Normalisation over the last axis. Statistics are taken in float32, the result has the dtype of `x`."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float = 1e-6) -> jax.Array:
    """γ · x / √(mean(x²) + ε) (Zhang and Sennrich 2019, equation 4). `x` is `(…, D)`, `gamma` `(D,)`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * gamma).astype(x.dtype)


def layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array, eps: float = 1e-5) -> jax.Array:
    """γ · (x - mean) / √(var + ε) + β (Ba et al. 2016). `x` is `(…, D)`, `gamma` and `beta` `(D,)`."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale * gamma + beta).astype(x.dtype)


def l2_normalize(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """x / √(Σ x² + ε), which has length 1. `x` is `(…, D)`."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
