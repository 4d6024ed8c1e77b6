"""Boolean masks, True where a query may attend to a key.

A rule maps one integer per query and one per key (a position or a segment) to `(T, S)`. Because rules read positions
and not cache slots, the same rule serves training, prefill, decoding with a cache and ragged prompts. Combine rules
with `&` and `|`.

`Causal` and `Packed` are masks without an array `(T, S)`, for queries and keys in order.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

EMPTY = -1
"""Position of a slot that holds no token: padding, or a cache slot not yet written."""


def causal(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the causal mask: a query attends to its own position and those before it."""
    return query_T[:, None] >= key_S[None, :]


def sliding_window(query_T: jax.Array, key_S: jax.Array, width: int) -> jax.Array:
    """Return the mask of keys less than `width` positions away (Beltagy et al. 2020); combined with `causal`, the last
    `width` positions."""
    return jnp.abs(query_T[:, None] - key_S[None, :]) < width


def prefix(query_T: jax.Array, key_S: jax.Array, length: int | jax.Array) -> jax.Array:
    """Return the causal mask with the first `length` positions visible to all queries (prefix LM of Raffel et al. 2020,
    figure 3)."""
    return causal(query_T, key_S) | (key_S < length)[None, :]


def padding(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the mask of keys that hold a token (position not `EMPTY`), the same for all queries."""
    return jnp.broadcast_to((key_S != EMPTY)[None, :], (query_T.shape[0], key_S.shape[0]))


def tokens(n_queries: int, valid_S: jax.Array | None) -> jax.Array | None:
    """Return the mask `(T, S)` from one boolean per key, True for a token; None if `valid_S` is None."""
    return None if valid_S is None else jnp.broadcast_to(valid_S, (n_queries, len(valid_S)))


def zero_padding(x_TD: jax.Array, valid_T: jax.Array | None) -> jax.Array:
    """Return features `(T, D)` with zeros at padding, so that NaN there does not reach any gradient; unchanged without
    `valid_T`."""
    return x_TD if valid_T is None else jnp.where(valid_T[:, None], x_TD, 0)


def segment(query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """Return the mask of keys in the query's own segment (packed documents), from segment ids."""
    return query_T[:, None] == key_S[None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal:
    """Static causal mask: a query attends to its own position and those before it, at most `window` positions in all.

    It is a rule like the others, and also a mask without an array, for queries and keys at positions 0, 1, 2, ... in
    order. Kernels skip masked blocks, and no array of size T·S is allocated. Hashable, so it can be a static argument
    of a jitted function.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, the query's own position")

    def __call__(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
        """Return the mask `(T, S)` from positions, like every rule."""
        mask_TS = causal(query_T, key_S)
        return mask_TS if self.window is None else mask_TS & sliding_window(query_T, key_S, self.window)

    def array(self, T: int, S: int) -> jax.Array:
        """Return the mask `(T, S)` for queries and keys in order."""
        return self(jnp.arange(T), jnp.arange(S))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Packed:
    """Causal mask of packed documents: a query attends to the keys of its own segment that `causal` lets it attend to.

    Like `Causal`, it is for queries and keys at positions 0, 1, 2, ... in order, and kernels compute it block by block.

    Attributes:
      segments_T: document index of each position, int32.
      causal: mask without the segments.
    """

    segments_T: jax.Array
    causal: Causal = Causal()

    def array(self, T: int, S: int) -> jax.Array:
        """Return the mask `(T, S)`; T and S must equal the length of `segments_T`."""
        return self.causal.array(T, S) & segment(self.segments_T, self.segments_T)


Mask = Causal | Packed | jax.Array | None
"""Attention mask: by order and segments, a bool array, or None for no mask."""


def as_array(mask: Mask, n_queries: int, n_keys: int) -> jax.Array:
    """Return any mask as an array, `(T, S)` bool."""
    if mask is None:
        return jnp.ones((n_queries, n_keys), bool)
    return mask.array(n_queries, n_keys) if isinstance(mask, Causal | Packed) else mask


def causal_part(mask: Mask) -> Causal | None:
    """Return the `Causal` that a mask contains; None for an array or no mask."""
    return mask.causal if isinstance(mask, Packed) else mask if isinstance(mask, Causal) else None
