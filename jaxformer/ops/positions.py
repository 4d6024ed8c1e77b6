"""Position encodings without parameters."""

from dataclasses import dataclass
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxformer.errors import batch_hint


def check_positions(positions_T: ArrayLike, n_tokens: int | None = None) -> jax.Array:
    """Return positions as an array, `(T,)`.

    Args:
      n_tokens: T; None for any.

    Raises:
      ValueError: another shape.
      TypeError: booleans, or floating-point numbers of 16 bits, which do not hold every position.
    """
    positions_T = jnp.asarray(positions_T)
    shape = "(T,)" if n_tokens is None else (n_tokens,)
    if positions_T.ndim != 1 or n_tokens not in (None, len(positions_T)):
        raise ValueError(f"expected positions of shape {shape}, one per token, got {positions_T.shape}")
    if positions_T.dtype == bool or positions_T.dtype in (jnp.bfloat16, jnp.float16):
        raise TypeError(f"positions are {positions_T.dtype}; give integers")
    return positions_T


def sinusoidal(positions_T: jax.Array, d_model: int) -> jax.Array:
    """Compute the sinusoidal encoding of Vaswani et al. 2017, section 3.5, `(T, D)` float32:
    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same angle."""
    positions_T = check_positions(positions_T)
    rates = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angles = positions_T[:, None].astype(rates.dtype) * rates[None, :]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(len(positions_T), -1)[:, :d_model]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of RoPE by frequency, for sequences longer than the training context (Llama 3.1; Grattafiori et al.
    2024).

    Frequencies with fewer than `low` periods in the training context are divided by `factor`, those with more than
    `high` are unchanged, and those between are interpolated.

    Attributes:
      factor: divisor of low frequencies.
      low, high: periods per training context.
      original_context: training context in tokens.
    """

    factor: float
    low: float
    high: float
    original_context: int

    def frequencies(self, n: int, base: float) -> np.ndarray:
        """Return the n frequencies of a head in radians per position, `(n,)` float64: at distant positions, a rounded
        frequency would yield a wrong angle."""
        frequencies_K = base ** (-np.arange(n) / n)
        periods_K = self.original_context * frequencies_K / (2 * pi)
        unscaled_K = np.clip((periods_K - self.low) / (self.high - self.low), 0, 1)
        return frequencies_K * (unscaled_K + (1 - unscaled_K) / self.factor)


def rope(
    x_HTK: jax.Array, positions_T: jax.Array, base: float = 10_000.0, scaling: float | Llama3Scaling = 1.0
) -> jax.Array:
    """Apply rotary position embedding (Su et al. 2021, equation 34), `(H, T, K)`: features i and i + K/2 are rotated by
    the angle position · base^(-2i/K), so that scores depend on distances only. K must be even.

    Features are paired across halves, as in Hugging Face's GPT-NeoX and Llama checkpoints; GPT-J and Meta's own Llama
    files pair neighbours, so that their weights need reordering. Positions are divided by
    `scaling`, for length extrapolation (Chen et al. 2023, equation 4), or frequencies are scaled by `Llama3Scaling`.
    """
    if x_HTK.ndim != 3 or x_HTK.shape[-1] % 2:
        got = f"{x_HTK.shape}{batch_hint(x_HTK.shape, 3)}"
        raise ValueError(f"expected vectors of shape (H, T, K) with even K, got {got}")
    positions_T = check_positions(positions_T, x_HTK.shape[1]).astype(float)
    half = x_HTK.shape[-1] // 2
    if isinstance(scaling, Llama3Scaling):
        frequencies_K = jnp.asarray(scaling.frequencies(half, base), jnp.float32)
        angles_TK = positions_T[:, None].astype(jnp.float32) * frequencies_K[None, :]
    else:
        angles_TK = positions_T[:, None] / scaling * (base ** (-jnp.arange(half) / half))[None, :]
    cos, sin = jnp.cos(angles_TK).astype(x_HTK.dtype), jnp.sin(angles_TK).astype(x_HTK.dtype)
    # With the rotated halves concatenated, XLA's CPU compiler would recompute sine and cosine per head and example.
    cos_TK, sin_TK = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return x_HTK * cos_TK[None] + jnp.roll(x_HTK, half, axis=-1) * sin_TK[None]


@jax.tree_util.register_static
@dataclass(frozen=True)
class RoPE:
    """Rotary position embedding with fixed options: `RoPE(base)(x_HTK, positions_T)`; see `rope`. Hashable and
    without leaves, so it can be an argument of a jitted function."""

    base: float = 10_000.0
    """Base of the frequencies: pair i of a head's K features rotates by base^(-2i/K) per position."""
    scaling: float | Llama3Scaling = 1.0
    """Divisor of positions, above 1 for sequences longer than the training context, or a scaling by frequency."""

    def __call__(self, x_HTK: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return rotary-embedded vectors, `(H, T, K)`."""
        return rope(x_HTK, positions_T, self.base, self.scaling)


def query_and_key_at(
    distance: int, head_dim: int, base: float = 10_000.0, low: float = 0.4, high: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return a query and a key, each `(K,)` float32, whose dot product after `rope` is 1 where the key is `distance`
    positions before the query, or after it if negative.

    At d positions from there, their dot product is the mean of cos(d θ) over RoPE's frequencies θ from `low` to `high`,
    in radians per position. Higher frequencies make a narrower peak: with K 64 and the defaults, the dot product is
    0.76 one position away and 0.19 two away. With more frequencies, as in wider heads, the next distance at which it
    approaches 1 is farther away.

    Raises:
      ValueError: no frequency is in this range.
    """
    frequencies_K = base ** (-np.arange(head_dim // 2) / (head_dim // 2))
    in_range_K = ((frequencies_K >= low) & (frequencies_K <= high)).astype(np.float32)
    if not in_range_K.any():
        problem = f"RoPE with base {base:g} has no frequency from {low:g} to {high:g}"
        raise ValueError(f"{problem} in heads of width {head_dim}")
    angles_K, norm = distance * frequencies_K, 1 / np.sqrt(in_range_K.sum())
    query_K = norm * np.concatenate([in_range_K * np.cos(angles_K), -in_range_K * np.sin(angles_K)])
    key_K = norm * np.concatenate([in_range_K, np.zeros_like(in_range_K)])
    return query_K.astype(np.float32), key_K.astype(np.float32)


def positions_in_segments(segments_T: jax.Array) -> jax.Array:
    """Return the position of each token in its segment, `(T,)` int32, counted from 0; a segment is a run of equal ids
    (packed documents)."""
    index_T = jnp.arange(len(segments_T))
    is_first_T = jnp.concatenate([jnp.array([True]), segments_T[1:] != segments_T[:-1]])
    return index_T - jax.lax.cummax(jnp.where(is_first_T, index_T, 0))
