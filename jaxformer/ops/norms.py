"""Normalisation over the last axis. Statistics are float32; the result has the dtype of `x`.

A row whose squares overflow float32, from about 1e19 on, yields NaN: divided by an infinite norm it would be 0, which
would hide diverged activations.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops import workarounds
from jaxformer.ops.broadcasting import expand
from jaxformer.ops.precision import upcast


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Apply RMSNorm, γ · x / √(mean(x²) + ε), to `x` `(…, D)` (Zhang and Sennrich 2019, equation 4).

    `gamma` is `(D,)`."""
    _check(x, eps, gamma)
    y = divide_by_rms(upcast(x), eps)
    return (y * _matched(gamma, y)).astype(x.dtype)


def layer_norm(
    x: jax.Array, gamma: jax.Array | None = None, beta: jax.Array | None = None, eps: float = 1e-5
) -> jax.Array:
    """Apply LayerNorm, γ · (x - mean) / √(var + ε) + β, to `x` `(…, D)` (Ba et al. 2016).

    `gamma` and `beta` are `(D,)`; None for a norm without them, γ = 1 or β = 0."""
    _check(x, eps, *(vector for vector in (gamma, beta) if vector is not None))
    y = divide_by_rms(center(upcast(x)), eps)
    y = y if gamma is None else y * _matched(gamma, y)
    return (y if beta is None else y + _matched(beta, y)).astype(x.dtype)


def l2_normalize(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """Scale `x` `(…, D)` to unit norm, x / √(Σ x² + ε)."""
    _check(x, eps)
    D = x.shape[-1]
    return (divide_by_rms(upcast(x), eps / D) * D**-0.5).astype(x.dtype)


def _check(x: jax.Array, eps: float | jax.Array, *vectors: jax.Array) -> None:
    """Raise `TypeError` for an `x` that is not floating-point, `ValueError` for an ε of 1 or more, which is a width
    given in its place, or for a gain or shift that is not `(D,)`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"the features are {x.dtype}; give floating-point numbers")
    if not isinstance(eps, jax.core.Tracer) and not 0 <= eps < 1:
        raise ValueError(f"eps is {eps}; it must be at least 0 and below 1: the width is that of the features")
    for vector in vectors:
        if np.shape(vector) != x.shape[-1:]:
            raise ValueError(f"expected a gain or shift of shape {x.shape[-1:]}, got {np.shape(vector)}")


def _matched(vector_D: jax.Array, y: jax.Array) -> jax.Array:
    """Return a gain or shift in the dtype and the number of axes of y `(…, D)`."""
    return expand(vector_D, y.ndim).astype(y.dtype)


@jax.custom_jvp
def center(x: jax.Array) -> jax.Array:
    """Subtract the mean along the last axis, `(…, D)`."""
    return x - _mean(x)


@center.defjvp
def _center_jvp(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    return x - workarounds.materialized(_mean(x)), dx - _mean(dx)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def divide_by_rms(x: jax.Array, eps: float) -> jax.Array:
    """Divide by √(mean(x²) + ε) along the last axis, `(…, D)`; NaN for a row whose squares overflow.

    The derivative is computed from the result; computed from x, it would need the cube of the norm, which overflows
    from 1e13 on.
    """
    return x * _inverse_rms(x, eps)


@divide_by_rms.defjvp
def _divide_by_rms_jvp(eps: float, primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    scale = workarounds.materialized(_inverse_rms(x, eps))
    y = x * scale
    return y, scale * (dx - y * _mean(y * dx))


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """Return 1 / √(mean(x²) + ε), `(…, 1)`; NaN for a row whose squares overflow."""
    if is_one_row(x):
        return jax.lax.rsqrt(_mean(jnp.where(jnp.isinf(x * x), jnp.nan, x * x + eps)))
    square = _mean(x * x)
    return jnp.where(jnp.isinf(square), jnp.nan, jax.lax.rsqrt(square + eps))


def _mean(x: jax.Array) -> jax.Array:
    """Return the mean along the last axis, `(…, 1)`."""
    if is_one_row(x):
        return jnp.sum(x * (1 / x.shape[-1]), axis=-1, keepdims=True)
    return jnp.mean(x, axis=-1, keepdims=True)


def is_one_row(x: jax.Array) -> bool:
    """Return True for a single row, as in a decode step.

    XLA's GPU compiler fuses a row's norm and the matmul after it into one kernel instead of four if the sum is used
    unchanged, so terms are scaled and shifted before they are added. With many rows, that takes a CPU up to twice as
    long.
    """
    return x.size == x.shape[-1]
