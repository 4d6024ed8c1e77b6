"""Biases added to the scores of attention, by the distance of a key from its query.

Like the rules of `ops.masks`, they read positions: with positions in order, which attention assumes of a bias that it
is passed, they serve training, windows and packed documents, and with those of a cache, decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log, log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class DistanceBias:
    """Bias that depends on head and distance only."""

    def at(self, distance: jax.Array) -> jax.Array:
        """Return the bias at distances key - query of any shape, int32, `(H, *shape)` in floating point."""
        raise NotImplementedError

    def __call__(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
        """Return the bias `(H, T, S)` from positions; it may be passed to attention in place of this object."""
        return self.at(key_S[None, :] - query_T[:, None])


@jax.tree_util.register_static
@dataclass(frozen=True)
class ALiBi(DistanceBias):
    """Attention with linear biases (Press et al. 2022, section 3): minus slope times distance, in either direction.

    Attributes:
      slopes: slope of each head; see `alibi_slopes`.
    """

    slopes: tuple[float, ...]

    def at(self, distance: jax.Array) -> jax.Array:
        """See `DistanceBias`."""
        slopes_H = jnp.asarray(self.slopes, float)
        return slopes_H.reshape(-1, *(1,) * distance.ndim) * -jnp.abs(distance)[None]


def alibi_slopes(n_heads: int, max_exponent: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head, a geometric sequence that ends at 2^-max_exponent (Press et al. 2022, section 3).

    For a number of heads that is not a power of two, the sequence is that of the power below, followed by every other
    slope of the power above, as in the authors' code, BLOOM and MPT.
    """
    power = 2 ** ceil(log2(n_heads))
    slopes = [2 ** (-max_exponent * i / power) for i in range(1, power + 1)]
    return tuple(slopes if power == n_heads else (slopes[1::2] + slopes[::2])[:n_heads])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RelativePositionBias(DistanceBias):
    """Learned bias by buckets of distances (T5; Raffel et al. 2020, section 2.1).

    Half of the buckets are for one distance each, the other half for ranges that widen with the logarithm, up to
    `max_distance`, beyond which there is one bucket.

    Attributes:
      table_NH: bias of each of the N buckets, `(N, H)`, as T5 stores it.
      bidirectional: use half of the buckets for keys after the query; if False, they share the bucket of distance 0.
      max_distance: distance from which all share a bucket.
    """

    table_NH: jax.Array
    bidirectional: bool = field(default=True, metadata={"static": True})
    max_distance: int = field(default=128, metadata={"static": True})

    def at(self, distance: jax.Array) -> jax.Array:
        """See `DistanceBias`."""
        n = self.max_distance
        buckets_R = relative_position_buckets(np.arange(-n, n + 1), len(self.table_NH), self.bidirectional, n)
        # One gather from the bias of each distance, instead of two.
        return self.table_NH.T[:, buckets_R][:, jnp.clip(distance, -n, n) + n]


def relative_position_buckets(
    distance: np.ndarray, n_buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> np.ndarray:
    """Return the bucket of distances key - query, int32; see `RelativePositionBias`.

    Raises:
      ValueError: there are too few buckets, or more for one distance each than `max_distance`.
    """
    n = n_buckets // 2 if bidirectional else n_buckets
    first = np.where(distance > 0, n, 0) if bidirectional else 0
    distance_before = np.abs(distance) if bidirectional else -np.minimum(distance, 0)
    exact = n // 2
    if not 0 < exact < max_distance:
        problem = f"{n_buckets} buckets have {exact} for one distance each in a direction"
        raise ValueError(f"{problem}; it must be from 1 to less than max_distance, {max_distance}")
    # In float32, as T5 was trained, because the boundaries of some ranges are whole numbers.
    log_ratio = np.log(np.maximum(distance_before, exact).astype(np.float32) / np.float32(exact))
    wide = exact + (log_ratio / np.float32(log(max_distance / exact)) * (n - exact)).astype(np.int32)
    buckets: np.ndarray = first + np.where(distance_before < exact, distance_before, np.minimum(wide, n - 1))
    return buckets.astype(np.int32)


Bias = DistanceBias | jax.Array | None
"""Bias of scores: by distance, an array, or None for none."""


def bias_array(bias: Bias, n_queries: int, n_keys: int) -> jax.Array | None:
    """Return a bias as an array, `(H, T, S)` or `(T, S)`, for queries and keys at positions 0, 1, 2, ..., or None."""
    return bias(jnp.arange(n_queries), jnp.arange(n_keys)) if isinstance(bias, DistanceBias) else bias


def check_bias(bias: Any, n_heads: int, n_queries: int, n_keys: int) -> None:
    """Raise `TypeError` for anything but a `Bias`, `ValueError` for one of another shape."""
    if bias is None:
        return
    if isinstance(bias, DistanceBias):
        heads = jax.eval_shape(bias.at, jax.ShapeDtypeStruct((), jnp.int32)).shape[0]
        if heads != n_heads:
            raise ValueError(f"the bias is for {heads} heads, the queries have {n_heads}")
        return
    if isinstance(bias, type):
        raise TypeError(f"the bias is the class {bias.__name__}; give an instance, such as ALiBi(alibi_slopes(H))")
    dtype = getattr(bias, "dtype", type(bias).__name__)
    if not hasattr(bias, "dtype") or not jnp.issubdtype(dtype, jnp.floating):
        remedy = "; a bool array is a mask" if dtype == jnp.bool_ else ""
        raise TypeError(f"the bias is {dtype}; give a floating-point array, which is added to the scores{remedy}")
    shared, per_head = (n_queries, n_keys), (n_heads, n_queries, n_keys)
    if bias.shape not in (shared, per_head):
        raise ValueError(f"expected a bias of shape {shared} or {per_head}, got {bias.shape}")


def check_cached_bias(bias: Any) -> None:
    """Raise `TypeError` for a bias by distance, which attention would compute for the slots of a cache in order."""
    if isinstance(bias, DistanceBias):
        raise TypeError("a cache's slots are in any order; give bias(positions_T, cache.position_S), an array")
