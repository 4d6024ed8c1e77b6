"""Position encodings without parameters."""

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt

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


def sinusoidal(
    positions_T: jax.Array, d_model: int, interleaved: bool = True, includes_lowest: bool = False
) -> jax.Array:
    """Compute the sinusoidal encoding of Vaswani et al. 2017, section 3.5, `(T, D)` float32:
    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same angle. Not interleaved, all sines come before
    all cosines, as in the authors' code (tensor2tensor) and in Marian. If it `includes_lowest`, the last of the D/2
    frequencies is 1/10000 itself, as in tensor2tensor and fairseq."""
    positions_T = check_positions(positions_T)
    n_steps = d_model - 2 if includes_lowest else d_model
    rates = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / n_steps)
    angles = positions_T[:, None].astype(rates.dtype) * rates[None, :]
    if not interleaved:
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :d_model]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(len(positions_T), -1)[:, :d_model]


Positions = np.ndarray | jax.Array


class Scaling:
    """Scaling of RoPE's frequencies, for sequences longer than the training context: a hashable value of plain
    numbers."""

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys, so that scores are multiplied by its square; the attention factor, or
        scaling, of transformers."""
        return 1.0

    def frequencies(self, n: int, base: float, positions_T: Positions | None = None) -> np.ndarray | jax.Array:
        """Return the n frequencies of a head in radians per position, `(n,)` float64 in NumPy: at distant positions, a
        rounded frequency would yield a wrong angle.

        Args:
          positions_T: positions of the sequence, whose length (the largest plus 1) `NTK` and `LongRoPE` read; None for
            at most the training context. From an array of JAX, their result is one as well, in float32.
        """
        raise NotImplementedError


@jax.tree_util.register_static
@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Scaling of RoPE by frequency (Llama 3.1; Grattafiori et al. 2024).

    Frequencies with fewer than `low` periods in the training context are divided by `factor`, those with more than
    `high` are unchanged, and those between are interpolated.

    Attributes:
      factor: divisor of low frequencies.
      low: periods per training context below which a frequency is divided.
      high: periods per training context above which it is unchanged.
      original_context: training context in tokens.
    """

    factor: float
    low: float
    high: float
    original_context: int

    def frequencies(self, n: int, base: float, positions_T: Positions | None = None) -> np.ndarray:
        """See `Scaling`."""
        frequencies_K = _plain_frequencies(n, base)
        periods_K = self.original_context * frequencies_K / (2 * pi)
        unscaled_K = np.clip((periods_K - self.low) / (self.high - self.low), 0, 1)
        return frequencies_K * (unscaled_K + (1 - unscaled_K) / self.factor)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN (Peng et al. 2023, section 3.4): as `Llama3Scaling`, but interpolated linearly in the index of the
    frequency.

    Attributes:
      factor: divisor of low frequencies.
      original_context: training context in tokens.
      beta_fast: periods per training context from which on a frequency is unchanged.
      beta_slow: periods per training context up to which it is divided.
      attention_factor: the amplitude; by default, 0.1 ln factor + 1.
      truncate: round the ends of the interpolation outwards to whole indices.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """See `Scaling`."""
        return yarn_amplitude(self.factor) if self.attention_factor is None else self.attention_factor

    def frequencies(self, n: int, base: float, positions_T: Positions | None = None) -> np.ndarray:
        """See `Scaling`."""
        first, last = (
            n * log(self.original_context / (2 * pi * x)) / log(base) for x in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * n - 1)
        unscaled_K = 1 - np.clip((np.arange(n) - first) / (last - first or 0.001), 0, 1)
        return _plain_frequencies(n, base) * (unscaled_K + (1 - unscaled_K) / self.factor)


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """Return the amplitude 0.1 · mscale · ln factor + 1 (Peng et al. 2023, equation 22); DeepSeek's is a ratio of two,
    with `mscale` and `mscale_all_dim`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1


@jax.tree_util.register_static
@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware scaling (Peng et al. 2023, definition 1): a larger base, by which the lowest frequency is divided by
    `factor` and the highest is unchanged.

    With `original_context` it is dynamic: beyond this context, the factor grows with the length of the sequence, and is
    1 + factor · (length / original_context - 1).

    Attributes:
      factor: divisor of the lowest frequency.
      original_context: training context in tokens; None for the same factor at all lengths.
    """

    factor: float
    original_context: int | None = None

    def frequencies(self, n: int, base: float, positions_T: Positions | None = None) -> np.ndarray | jax.Array:
        """See `Scaling`."""
        factor: float | jax.Array = self.factor
        if self.original_context is not None:
            beyond = 0 if positions_T is None else (positions_T.max() + 1) / self.original_context - 1
            factor = 1 + self.factor * beyond * (beyond > 0)
        return _plain_frequencies(n, base) * factor ** (-np.arange(n) / max(n - 1, 1))


@jax.tree_util.register_static
@dataclass(frozen=True)
class LongRoPE(Scaling):
    """LongRoPE (Ding et al. 2024), as in Phi-3: a divisor of each frequency, found by search.

    Attributes:
      short: divisors for sequences up to the training context, one per frequency.
      long: divisors for longer ones.
      original_context: training context in tokens.
      factor: context divided by the training context.
      attention_factor: the amplitude, for all lengths; by default, √(1 + ln factor / ln original_context).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    factor: float
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """See `Scaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        return sqrt(1 + log(max(self.factor, 1)) / log(self.original_context))

    def frequencies(self, n: int, base: float, positions_T: Positions | None = None) -> np.ndarray | jax.Array:
        """See `Scaling`. Raises `ValueError` unless there are n divisors."""
        if {len(self.short), len(self.long)} != {n}:
            got = f"{len(self.short)} short and {len(self.long)} long"
            raise ValueError(f"LongRoPE needs one divisor for each of {n} frequencies, got {got}")
        short_K, long_K = (_plain_frequencies(n, base) / x for x in (self.short, self.long))
        if isinstance(positions_T, jax.Array):
            return jnp.where(positions_T.max() < self.original_context, short_K, long_K)
        return short_K if positions_T is None or positions_T.max() < self.original_context else long_K


def _plain_frequencies(n: int, base: float) -> np.ndarray:
    frequencies_K: np.ndarray = base ** (-np.arange(n) / n)
    return frequencies_K


def rope(
    x_HTK: jax.Array,
    positions_T: jax.Array,
    base: float = 10_000.0,
    scaling: float | Scaling = 1.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> jax.Array:
    """Apply rotary position embedding (Su et al. 2021, equation 34), `(H, T, K)`: features i and i + R/2 are rotated by
    the angle position · base^(-2i/R), so that scores depend on distances only.

    Args:
      x_HTK: queries or keys.
      positions_T: their positions.
      base: base of the frequencies.
      scaling: divisor of positions, for length extrapolation (Chen et al. 2023, equation 4); or a `Scaling` of
        frequencies. One that depends on the length of the sequence takes it to be the largest of these positions plus
        1. Keys already in a cache keep the rotation of the length at which they were written, as in transformers, so
        decoding beyond the training context is not the same as one pass over the whole text.
      fraction: fraction of K that is rotated, R = ⌊fraction · K⌋ features; the others are unchanged. R must be even.
      interleaved: rotate features 2i and 2i + 1 together, as in GPT-J, GLM and Meta's own Llama files, instead of
        i and i + R/2, as in Hugging Face's GPT-NeoX and Llama checkpoints.

    Raises:
      ValueError: the shapes are others, or R is odd or 0.
      TypeError: positions are booleans or floating-point numbers of 16 bits.
    """
    K = x_HTK.shape[-1]
    R = int(fraction * K)
    if x_HTK.ndim != 3 or R % 2 or not 0 < R <= K:
        got = f"{x_HTK.shape}{batch_hint(x_HTK.shape, 3)}"
        problem = f"expected vectors of shape (H, T, K) with even K, got {got}"
        raise ValueError(problem if fraction == 1 else f"{problem}, of which RoPE rotates {R} features")
    if R < K:
        rotated_HTK = rope(x_HTK[..., :R], positions_T, base, scaling, interleaved=interleaved)
        return jnp.concatenate([rotated_HTK, x_HTK[..., R:]], axis=-1)
    positions_T = check_positions(positions_T, x_HTK.shape[1]).astype(float)
    half = R // 2
    if isinstance(scaling, Scaling):
        frequencies_K = jnp.asarray(scaling.frequencies(half, base, positions_T), positions_T.dtype)
        angles_TK = positions_T[:, None] * frequencies_K[None, :]
    else:
        angles_TK = positions_T[:, None] / scaling * (base ** (-jnp.arange(half) / half))[None, :]
    cos, sin = jnp.cos(angles_TK), jnp.sin(angles_TK)
    if isinstance(scaling, Scaling) and scaling.amplitude != 1:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    cos, sin = cos.astype(x_HTK.dtype), sin.astype(x_HTK.dtype)
    if interleaved:
        cos_TK, sin_TK = (jnp.stack(both, axis=-1).reshape(-1, R) for both in ((cos, cos), (-sin, sin)))
        swapped_HTK = x_HTK.reshape(*x_HTK.shape[:2], half, 2)[..., ::-1].reshape(x_HTK.shape)
        return x_HTK * cos_TK[None] + swapped_HTK * sin_TK[None]
    # With the rotated halves concatenated, XLA's CPU compiler would recompute sine and cosine per head and example.
    cos_TK, sin_TK = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return x_HTK * cos_TK[None] + jnp.roll(x_HTK, half, axis=-1) * sin_TK[None]


@jax.tree_util.register_static
@dataclass(frozen=True)
class RoPE:
    """Rotary position embedding (Su et al. 2021): queries and keys are rotated by angles that grow with the position.

    `RoPE(base)(x_HTK, positions_T)` is `rope` with these options. Hashable and without leaves, so it can be an argument
    of a jitted function.

    Attributes:
      base: base of the frequencies: pair i of the R rotated features of a head rotates by base^(-2i/R) per position.
      scaling: divisor of positions, above 1 for sequences longer than the training context, or a scaling by frequency.
      fraction: fraction of a head's features that is rotated.
      interleaved: rotate neighbouring features together, not those half the rotated width apart.
    """

    base: float = 10_000.0
    scaling: float | Scaling = 1.0
    fraction: float = 1.0
    interleaved: bool = False

    def __call__(self, x_HTK: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Return rotary-embedded vectors, `(H, T, K)`."""
        return rope(x_HTK, positions_T, self.base, self.scaling, self.fraction, self.interleaved)

    def frequencies(self, head_dim: int, positions_T: Positions | None = None) -> np.ndarray | jax.Array:
        """Return the frequencies of heads of this width in radians per position, `(R/2,)`; see
        `Scaling.frequencies`."""
        n = int(self.fraction * head_dim) // 2
        if isinstance(self.scaling, Scaling):
            return self.scaling.frequencies(n, self.base, positions_T)
        return _plain_frequencies(n, self.base) / self.scaling


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
